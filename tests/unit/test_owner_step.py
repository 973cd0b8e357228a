"""What a broker does about a record, in every state of the record and of the broker."""

from __future__ import annotations

import itertools

import pytest

from braid.cluster.ownership import leader_step, owner_step
from braid.cluster.ownership.owner_step import OwnerAction, TransitionRole
from braid.model.ids import Epoch, SegmentId
from braid.model.layout import Layout
from braid.model.ownership import Ownership, OwnershipState
from braid.model.topic import Topic
from braid.model.transition import plan_split
from tests.kits.layouts import split
from tests.kits.leader import record, snapshot_of

EPOCH = 3
TABLE = """
    state       owner  move  not-served  older    same       newer
    ASSIGNED    this   no    open        let-go   nothing    let-go
    ASSIGNED    this   yes   open        let-go   hand-over  let-go
    SERVING     this   no    open        let-go   nothing    let-go
    SERVING     this   yes   open        let-go   hand-over  let-go
    DRAINING    this   no    open        let-go   nothing    let-go
    DRAINING    this   yes   open        let-go   hand-over  let-go
    SEALED      this   no    not-ours    let-go   let-go     let-go
    SEALED      this   yes   not-ours    let-go   let-go     let-go
    RECOVERING  this   no    not-ours    let-go   let-go     let-go
    RECOVERING  this   yes   not-ours    let-go   let-go     let-go
    ASSIGNED    other  no    not-ours    let-go   let-go     let-go
    ASSIGNED    other  yes   not-ours    let-go   let-go     let-go
    SERVING     other  no    not-ours    let-go   let-go     let-go
    SERVING     other  yes   not-ours    let-go   let-go     let-go
    DRAINING    other  no    not-ours    let-go   let-go     let-go
    DRAINING    other  yes   not-ours    let-go   let-go     let-go
    SEALED      other  no    not-ours    let-go   let-go     let-go
    SEALED      other  yes   not-ours    let-go   let-go     let-go
    RECOVERING  other  no    not-ours    let-go   let-go     let-go
    RECOVERING  other  yes   not-ours    let-go   let-go     let-go
    none        -      -     not-ours    let-go   let-go     let-go
"""
"""Columns three to six: in which epoch the broker serves the segment, compared with that of the record."""
SERVED = {"not-served": None, "older": Epoch(EPOCH - 1), "same": Epoch(EPOCH), "newer": Epoch(EPOCH + 1)}


def rows() -> list[tuple[str, Ownership | None, str, OwnerAction]]:
    """The name of a case, its record, how it is served, and the action."""
    (*_, _move, not_served, older, same, newer), *lines = (line.split() for line in TABLE.strip().splitlines())
    found: list[tuple[str, Ownership | None, str, OwnerAction]] = []
    for state, owner, move, *actions in lines:
        to = {"to": "c"} if move == "yes" else {}
        known = None if state == "none" else record(state, {"this": "a", "other": "b"}[owner], EPOCH, **to)
        for served, action in zip((not_served, older, same, newer), actions, strict=True):
            found.append((f"{state} {owner} {move} {served}", known, served, OwnerAction(action)))
    return found


CASES = [pytest.param(known, SERVED[served], action, id=name) for name, known, served, action in rows()]
cases = pytest.mark.parametrize(("known", "served", "action"), CASES)
served_cases = pytest.mark.parametrize(
    ("known", "served", "action"), [case for case in CASES if case.values[1] is not None]
)


def test_the_table_has_every_state() -> None:
    moves = itertools.product(OwnershipState, ("this", "other"), ("no", "yes"), SERVED)
    expected = {f"{state.value} {owner} {move} {served}" for state, owner, move, served in moves}
    assert {name for name, *_ in rows()} == expected | {f"none - - {served}" for served in SERVED}


@cases
def test_the_broker_acts_as_the_table_says(known: Ownership | None, served: Epoch | None, action: OwnerAction) -> None:
    assert owner_step.decide(known, "a", served) is action


@cases
def test_nothing_begins_while_the_broker_is_busy_with_the_segment(
    known: Ownership | None, served: Epoch | None, action: OwnerAction
) -> None:
    assert owner_step.decide(known, "a", served, busy=True) is OwnerAction.NOTHING


@served_cases
def test_a_failed_log_is_opened_again_only_under_a_record_that_still_names_it(
    known: Ownership | None, served: Epoch, action: OwnerAction
) -> None:
    expected = OwnerAction.LET_GO if action is OwnerAction.LET_GO else OwnerAction.REOPEN
    for of_topic in (True, False):
        assert owner_step.decide(known, "a", served, failed=True, known=of_topic) is expected


@served_cases
def test_a_log_whose_disk_is_full_is_handed_over_if_it_is_to_move_and_otherwise_opened_again(
    known: Ownership | None, served: Epoch, action: OwnerAction
) -> None:
    expected = OwnerAction.REOPEN if action is OwnerAction.NOTHING else action
    assert owner_step.decide(known, "a", served, failed=True, full=True) is expected


@cases
def test_a_segment_outside_the_layout_is_neither_opened_nor_handed_over_but_let_go(
    known: Ownership | None, served: Epoch | None, action: OwnerAction
) -> None:
    expected = OwnerAction.NOTHING if action in (OwnerAction.OPEN, OwnerAction.HAND_OVER) else action
    assert owner_step.decide(known, "a", served, known=False) is expected


@pytest.mark.parametrize("to", [None, "b"])
@pytest.mark.parametrize("state", OwnershipState)
def test_a_record_of_a_live_broker_is_either_its_owners_turn_or_the_leaders(
    state: OwnershipState, to: str | None
) -> None:
    known = record(state.value, "a", EPOCH, **({"to": to} if to is not None else {}))
    for_owner = owner_step.decide(known, "a", None) is OwnerAction.OPEN
    votes = state is OwnershipState.RECOVERING  # The leader counts them.
    for_leader = bool(leader_step.decide(snapshot_of([known]), now=0.0)) or votes
    assert for_owner != for_leader


@served_cases
def test_a_new_durability_renews_only_what_is_served_as_the_record_says(
    known: Ownership | None, served: Epoch, action: OwnerAction
) -> None:
    serves = known is not None and known.state is OwnershipState.SERVING and action is OwnerAction.NOTHING
    expected = OwnerAction.RENEW if serves else action
    assert owner_step.decide(known, "a", served, renewed=True) is expected
    assert owner_step.decide(known, "a", served, renewed=True, busy=True) is OwnerAction.NOTHING


def test_a_failed_log_is_not_closed_in_order() -> None:
    known = record("SERVING", "a", EPOCH)
    assert owner_step.decide(known, "a", Epoch(EPOCH), failed=True, renewed=True) is OwnerAction.REOPEN


@pytest.mark.parametrize(("inherited", "role"), [(False, TransitionRole.CHILD), (True, TransitionRole.PARENT)])
def test_a_segment_inherits_before_it_ends(inherited: bool, role: TransitionRole) -> None:
    topic = Topic(id=1, layout=split(Layout.initial(), 0))
    sealing = topic.beginning(plan_split(topic.layout, 1), transition_id=7, created_at=0).sealing()
    found = owner_step.transition_role(sealing, SegmentId(1), lambda _: record("SERVING", "this"), inherited=inherited)
    assert found is role
