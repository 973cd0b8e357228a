"""What must hold whatever state the cluster is in, and in whatever order its parts come."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any, TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st

from braid.cluster.ownership.leader_step import DRAINED_AT_ONCE, Reason, decide, is_lost, is_served, waiting
from braid.cluster.snapshot import Snapshot
from braid.model.ids import Epoch
from braid.model.ownership import Move, Ownership, OwnershipState
from braid.model.topic import OwnerLoss, TopicPolicies
from tests.kits.examples import share
from tests.kits.leader import applied, key_of, snapshot_of, unable

BROKERS = ("a", "b", "c", "d", "e")
NOW = 100.0

SOME_BROKERS = [some for count in range(len(BROKERS) + 1) for some in combinations(BROKERS, count)]
T = TypeVar("T")

some_brokers = st.sampled_from(SOME_BROKERS)


class Choices:
    """All choices for one record, in one number: Hypothesis takes as long for each number that it draws."""

    def __init__(self, number: int) -> None:
        self._number = number

    def of(self, options: Sequence[T]) -> T:
        self._number, at = divmod(self._number, len(options))
        return options[at]


def record_of(number: int) -> Ownership | None:
    """Return no record, or one as it can be: sealed is clean, serving and draining are not, draining has a move; an
    accepted loss gives the holders up; only a segment that is to be opened can have failed to."""
    choose = Choices(number)
    if choose.of([True, False]):
        return None
    state = choose.of(list(OwnershipState))
    serves = state in (OwnershipState.SERVING, OwnershipState.DRAINING, OwnershipState.RECOVERING)
    clean = state is OwnershipState.SEALED or (not serves and choose.of([False, True]))
    moves = state in (OwnershipState.DRAINING, OwnershipState.SEALED) or choose.of([False, True])
    accept_loss = clean and state is OwnershipState.ASSIGNED and choose.of([False, True])
    return Ownership(
        state=state,
        owner=choose.of(BROKERS),
        epoch=Epoch(choose.of(range(1, 1_001))),
        move=Move(to=choose.of(["", *BROKERS])) if moves else None,
        holders=() if accept_loss else choose.of(SOME_BROKERS),
        clean=clean,
        accept_loss=accept_loss,
        given_up=choose.of(SOME_BROKERS) if accept_loss else (),
        failures=unable(*choose.of(SOME_BROKERS)) if state is OwnershipState.ASSIGNED else (),
    )


records = st.integers(0, (1 << 40) - 1).map(record_of)
"""All choices together take 31 bits."""


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    live = draw(some_brokers)
    gone = {broker: draw(st.sampled_from([0.0, 60.0, 99.5])) for broker in BROKERS if broker not in live}
    policies = TopicPolicies(
        on_owner_loss=draw(st.sampled_from(OwnerLoss)), owner_loss_after_ms=draw(st.sampled_from([0, 1_000, 60_000]))
    )
    return snapshot_of(
        draw(st.lists(records, min_size=1, max_size=24)),
        live=live,
        drained=draw(some_brokers),
        gone_since=gone,
        unable_since={broker: draw(st.sampled_from([0.0, 60.0, 99.5])) for broker in BROKERS},
        policies=policies,
        deleting=draw(st.integers(0, 9)) == 0,
    )


@settings(max_examples=share(400), deadline=None)
@given(snapshots())
def test_no_record_that_is_not_clean_goes_to_another_broker_without_an_accepted_loss(snapshot: Snapshot) -> None:
    for decision in decide(snapshot, NOW):
        before = snapshot.records.get(key_of(decision.segment))
        if before is not None and not before.value.clean and decision.record.owner != before.value.owner:
            (topic,) = snapshot.topics.values()
            assert decision.record.accept_loss
            assert decision.reason is Reason.CONTINUED
            assert topic.policies.on_owner_loss is OwnerLoss.CONTINUE
            owner = before.value.owner
            assert is_lost(snapshot, before.value)
            assert decision.gone == (() if snapshot.is_live(owner) else (owner,))
            unable_since = snapshot.unable_since[key_of(decision.segment), owner] if before.value.failures else NOW
            since = min(unable_since, snapshot.gone_since.get(owner, NOW))
            assert NOW - since >= topic.policies.owner_loss_after_ms / 1000


@settings(max_examples=share(400), deadline=None)
@given(snapshots())
def test_segments_go_only_to_holders_that_are_live_and_active(snapshot: Snapshot) -> None:
    for decision in decide(snapshot, NOW):
        before = snapshot.records.get(key_of(decision.segment))
        if decision.record.move is not None:
            assert snapshot.is_active(decision.record.move.to)
            assert decision.record.move.to != decision.record.owner
        elif decision.reason is Reason.RETURNED:
            assert before is not None
            assert decision.record.owner in before.value.given_up
            assert snapshot.is_live(decision.record.owner)
        else:
            assert snapshot.is_active(decision.record.owner)
            if before is not None and before.value.holders and not decision.record.accept_loss:
                assert decision.record.owner in before.value.holders


@settings(max_examples=share(400), deadline=None)
@given(snapshots())
def test_deciding_again_on_what_was_decided_does_nothing(snapshot: Snapshot) -> None:
    assert decide(applied(snapshot, decide(snapshot, NOW)), NOW) == []


@settings(max_examples=share(400), deadline=None)
@given(snapshots())
def test_every_assignment_has_a_higher_epoch_and_a_move_keeps_it(snapshot: Snapshot) -> None:
    for decision in decide(snapshot, NOW):
        before = snapshot.records.get(key_of(decision.segment))
        epoch = before.value.epoch if before is not None else 0
        assert decision.revision == (before.revision if before is not None else 0)
        if decision.record.state is OwnershipState.ASSIGNED:
            assert decision.record.epoch == epoch + 1
        else:
            assert before is not None
            assert decision.record.move is not None
            assert decision.record == before.value.moving(decision.record.move)


@settings(max_examples=share(400), deadline=None)
@given(snapshots())
def test_each_segment_is_decided_once_and_drains_are_bounded(snapshot: Snapshot) -> None:
    decisions = decide(snapshot, NOW)
    assert len({decision.segment for decision in decisions}) == len(decisions)
    after = applied(snapshot, decisions)
    for broker, view in snapshot.brokers.items():
        if not view.available:
            given_now = [each for each in decisions if each.record.owner == broker and each.record.move is not None]
            in_flight = [
                known
                for known in after.records.values()
                if known.value.owner == broker
                and known.value.move is not None
                and known.value.state in (OwnershipState.SERVING, OwnershipState.DRAINING)
            ]
            assert not given_now or len(in_flight) <= DRAINED_AT_ONCE


@settings(max_examples=share(400), deadline=None)
@given(snapshots())
def test_what_nobody_serves_is_assigned_or_waits_visibly(snapshot: Snapshot) -> None:
    """Nothing is forgotten: a live broker serves it or will, or it was just decided, or it is shown as waiting."""
    decided = {decision.segment for decision in decide(snapshot, NOW)}
    shown = {each.segment for each in waiting(snapshot)}
    for each in snapshot.segments():
        record: Any = each.known.value if each.known is not None else None
        will_be_served = (
            record is not None and record.state is not OwnershipState.SEALED and is_served(snapshot, record)
        )
        assert will_be_served or each.name in decided | shown
        assert not (will_be_served and each.name in shown)
