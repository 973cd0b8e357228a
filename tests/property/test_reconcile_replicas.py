"""What must hold of segments with replicas, whatever state the cluster is in."""

from __future__ import annotations

from itertools import combinations
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from braid.cluster.ownership.leader_step import Reason, decide, is_served, waiting
from braid.cluster.snapshot import Snapshot
from braid.model.ids import Epoch, Offset
from braid.model.log.replication import LogPosition
from braid.model.names import SegmentName
from braid.model.ownership import Move, Ownership, OwnershipState, ReplicaChange
from braid.model.topic import Durability, OwnerLoss, TopicPolicies
from braid.testing.checkers.ownership_checker import _check_transition
from tests.kits.examples import share
from tests.kits.leader import applied, key_of, snapshot_of

BROKERS = ("a", "b", "c", "d", "e")
NOW = 10_000.0
SETS = [some for count in range(len(BROKERS) + 1) for some in combinations(BROKERS, count)]


def record_of(random: Random) -> Ownership | None:
    """Return no record, or one that leader and owners can have written."""
    replicas = random.choice(SETS[1:])
    placed = Ownership.first(random.choice(replicas), replicas, random.randint(1, len(replicas)))
    serving = placed.serving()
    gone = tuple(each for each in replicas if random.random() < 0.5)
    recovering = serving.recovering()
    losing = recovering.losing(gone)
    position = LogPosition(epoch=Epoch(1), end=Offset(5))
    elected = random.choice([recovering, losing]).voted(random.choice(replicas), position)
    others = tuple(sorted({*random.choice(SETS), placed.owner}))
    change = ReplicaChange(replicas=others, write_quorum=random.randint(1, len(others)))
    moving = serving.moving(Move(to=random.choice(["", *BROKERS])))
    lasting = random.random() < 0.5
    strangers = tuple(each for each in BROKERS if each not in replicas) or (placed.owner,)
    elsewhere = random.choice([serving, recovering, elected]).assigned(
        strangers[0],
        replicas=random.choice([(), strangers]),
        write_quorum=1,
        accept_loss=True,
        given_up=random.choice([gone, replicas]),
    )
    return random.choice(
        [
            None,
            placed,
            placed.unopened("no room", lasting=lasting),
            serving,
            serving.changing(change),
            serving.changing(ReplicaChange(replicas=(), write_quorum=1)),
            moving,
            serving.draining(),
            moving.draining().sealed(),
            serving.taken_again(),
            serving.taken_again().unopened("no files", lasting=lasting),
            recovering,
            losing,
            elected,
            elected.unopened("too few replicas", lasting=lasting),
            serving.replicas_changed((), 1),
            serving.assigned(placed.owner, accept_loss=True, given_up=gone),
            elsewhere,
            elsewhere.unopened("too few replicas", lasting=lasting),
            serving.replicas_changed((), 1).assigned(
                strangers[0], replicas=strangers, accept_loss=True, given_up=(placed.owner,)
            ),
        ]
    )


def snapshot_from(number: int) -> Snapshot:
    """All choices in one number: Hypothesis takes as long for each number that it draws."""
    random = Random(number)
    live, wanted = random.choice(SETS), random.randint(1, 5)
    policies = TopicPolicies(
        durability=Durability.REPLICATED if wanted > 1 else Durability.FSYNC,
        replicas=wanted,
        write_quorum=random.randint(1, wanted),
        on_owner_loss=random.choice(list(OwnerLoss)),
        owner_loss_after_ms=random.choice([0, 60_000]),
    )
    return snapshot_of(
        [record_of(random) for _ in range(random.randint(1, 6))],
        live=live,
        drained=random.choice(SETS),
        gone_since={each: NOW - random.choice([0.0, 30.0, 700.0]) for each in BROKERS if each not in live},
        unable_since={each: NOW - random.choice([0.0, 90.0]) for each in BROKERS},
        policies=policies,
        racks={each: random.choice("xy") for each in random.choice(SETS)},
    )


snapshots = st.integers(0, (1 << 64) - 1).map(snapshot_from)


@settings(max_examples=share(400), deadline=None)
@given(snapshots)
def test_every_decision_is_one_that_the_checker_allows(snapshot: Snapshot) -> None:
    for decision in decide(snapshot, NOW):
        before = snapshot.records.get(key_of(decision.segment))
        new = decision.record
        if before is not None:
            _check_transition(key_of(decision.segment), before.value, new)
            assert decision.revision == before.revision
        if new.replicas:
            assert new.owner in new.replicas
            assert len(set(new.replicas)) == len(new.replicas)
        if new.accept_loss and not (before is not None and before.value.accept_loss):
            assert decision.reason is Reason.CONTINUED
            assert {*new.given_up} in ({*decision.gone}, set()), "all of them, or none if one of them gets a new copy"
            assert not any(map(snapshot.is_live, decision.gone))


@settings(max_examples=share(400), deadline=None)
@given(snapshots)
def test_no_segment_gets_replicas_that_cannot_confirm(snapshot: Snapshot) -> None:
    (topic,) = snapshot.topics.values()
    for decision in decide(snapshot, NOW):
        new = decision.record
        if new.state is OwnershipState.RECOVERING:
            there = sum(map(snapshot.is_live, new.replicas))
            few = new.all_confirm or new.accept_loss or decision.reason is Reason.RETURNED
            assert there >= (1 if few else new.write_quorum) or decision.reason is Reason.RETURNED
        elif new.state is OwnershipState.ASSIGNED:
            assert (len(new.replicas) > 0) == (topic.policies.replicas > 1) or decision.reason is Reason.RETURNED
            there = sum(map(snapshot.is_live, new.replicas))
            assert there >= new.write_quorum or not new.replicas or decision.reason is Reason.RETURNED
        elif decision.reason is Reason.REPLICAS and new.change is not None:
            change = new.change
            assert change.write_quorum == topic.policies.write_quorum
            assert not change.replicas or sum(map(snapshot.is_live, change.replicas)) >= change.write_quorum
            assert len(change.replicas) <= topic.policies.replicas


@settings(max_examples=share(400), deadline=None)
@given(snapshots)
def test_no_owner_waits_for_a_broker_that_was_given_up_to_be_gone(snapshot: Snapshot) -> None:
    """An owner serves without the disks that were given up only while their brokers are gone."""
    for _ in range(4):
        snapshot = applied(snapshot, decide(snapshot, NOW))
    for known in snapshot.records.values():
        record = known.value
        back = {each for each in record.given_up if snapshot.is_live(each) and record.failure_of(each) is None}
        assert back <= {record.owner}, record


@settings(max_examples=share(400), deadline=None)
@given(snapshots)
def test_deciding_again_decides_nothing(snapshot: Snapshot) -> None:
    """Unless a broker that was given up is back: then the loss of the others may be accepted once more."""
    settled: set[SegmentName] = set()
    for _ in range(4):
        decisions = decide(snapshot, NOW)
        assert not settled & {decision.segment for decision in decisions}
        settled |= {each.segment for each in decisions if each.reason not in (Reason.RETURNED, Reason.REASSIGNED)}
        snapshot = applied(snapshot, decisions)
    assert not [each for each in decide(snapshot, NOW) if each.reason is not Reason.REPLICAS]


@settings(max_examples=share(400), deadline=None)
@given(snapshots)
def test_a_segment_is_served_or_decided_about_or_waits(snapshot: Snapshot) -> None:
    after = applied(snapshot, decide(snapshot, NOW))
    waits = {each.segment for each in waiting(after)}
    for each in after.segments():
        record = each.known.value if each.known is not None else None
        if record is None:
            assert each.name in waits
        elif not is_served(after, record):
            assert each.name in waits, record
