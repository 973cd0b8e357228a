"""How far a transition may go: a table over the records of its segments."""

from __future__ import annotations

import msgspec
import pytest

from braid.cluster.ownership import owner_step
from braid.cluster.ownership.owner_step import OwnerAction, TransitionRole
from braid.model.cluster import TRANSITIONS, Registration
from braid.model.ids import Epoch, Offset, SegmentId
from braid.model.layout import Layout
from braid.model.ownership import Move, Ownership
from braid.model.topic import Topic
from braid.model.transition import Transition, plan_merge, plan_split
from braid.scaling.transition_step import TransitionAction, being_ended, decide

BROKER = Registration(address="", admin="", version="9.9", features=(TRANSITIONS,))
LIVE = {"a": BROKER, "b": BROKER}
ASSIGNED = Ownership.first("a")
SERVING = ASSIGNED.serving()
ENDED = SERVING.ended(Offset(5))
INHERITED = SERVING.inheriting(7)
Records = dict[int, Ownership]


def transition(*, merge: bool = False, sealing: bool = False) -> tuple[Topic, Transition]:
    layout = Layout.initial(2)
    plan = plan_merge(layout, 0, 1) if merge else plan_split(layout, 0)
    topic = Topic(id=1, layout=layout).beginning(plan, transition_id=7, created_at=0)
    topic = topic.sealing() if sealing else topic
    assert topic.transition is not None
    return topic, topic.transition


def records(found: Records) -> dict[SegmentId, Ownership]:
    return {SegmentId(segment): record for segment, record in found.items()}


@pytest.mark.parametrize(
    ("found", "missing"),
    [
        ({}, "segment 2 has no owner yet"),
        ({0: SERVING, 2: SERVING}, "segment 3 has no owner yet"),
        ({0: SERVING, 2: SERVING, 3: ASSIGNED}, "segment 3 is not served yet"),
        ({0: ASSIGNED, 2: SERVING, 3: SERVING}, "segment 0 is not served yet"),
        ({0: SERVING.moving(Move(to="b")), 2: SERVING, 3: SERVING}, "segment 0 is moving"),
        ({0: msgspec.structs.replace(SERVING, owner="c"), 2: SERVING, 3: SERVING}, "owner of segment 0, c, is down"),
        ({0: SERVING, 2: ASSIGNED.unopened("no disk", lasting=True), 3: SERVING}, "a cannot open segment 2: no disk"),
    ],
)
def test_the_parents_end_only_when_all_of_them_can_and_all_children_are_there(found: Records, missing: str) -> None:
    _, change = transition()
    action, why = decide(change, records(found), LIVE)
    assert action is TransitionAction.WAIT
    assert missing in "; ".join(why)


def test_a_broker_of_an_earlier_build_that_has_joined_since_keeps_the_parents_from_ending() -> None:
    live = LIVE | {"old": msgspec.structs.replace(BROKER, version="0.0.9", features=())}
    served = {0: SERVING, 2: SERVING, 3: SERVING}
    action, why = decide(transition()[1], records(served), live)
    assert action is TransitionAction.WAIT
    assert why == ("broker old runs version 0.0.9, which does not know changes of a layout; upgrade it",)
    ended = {0: ENDED, 2: INHERITED, 3: INHERITED}
    assert decide(transition(sealing=True)[1], records(ended), live).action is TransitionAction.COMMIT, "only forward"


def test_with_all_served_the_owners_are_asked() -> None:
    _, change = transition()
    assert decide(change, records({0: SERVING, 2: SERVING, 3: SERVING}), LIVE) == (TransitionAction.SEAL, ())


@pytest.mark.parametrize(
    ("found", "missing"),
    [
        ({0: SERVING, 1: ENDED, 2: SERVING}, "the log of segment 0 is being ended"),
        ({0: ENDED, 1: ENDED, 2: SERVING}, "segment 2 has not taken over from its parents"),
        ({0: ENDED, 1: ENDED, 2: SERVING.inheriting(6)}, "segment 2 has not taken over from its parents"),
        ({0: ENDED, 1: ENDED, 2: msgspec.structs.replace(SERVING, owner="c")}, "owner of segment 2, c, is down"),
        (
            {0: ENDED, 1: msgspec.structs.replace(ENDED, owner="c"), 2: SERVING},
            "the owner of segment 1, c, is down; segment 2 has not taken over from its parents",
        ),
    ],
)
def test_the_layout_changes_only_when_all_logs_have_ended_and_all_children_have_inherited(
    found: Records, missing: str
) -> None:
    _, change = transition(merge=True, sealing=True)
    action, why = decide(change, records(found), LIVE)
    assert action is TransitionAction.WAIT
    assert missing in "; ".join(why)


def test_the_owners_of_parents_that_are_served_and_have_not_ended_know_why() -> None:
    gone = msgspec.structs.replace(SERVING, owner="c")
    sealing, creating = (transition(merge=True, sealing=each)[1] for each in (True, False))
    assert being_ended(sealing, records({0: SERVING, 1: SERVING}), LIVE) == [0, 1]
    assert being_ended(sealing, records({0: SERVING, 1: gone}), LIVE) == [0]
    assert being_ended(sealing, records({1: ENDED}), LIVE) == []
    assert being_ended(creating, records({0: SERVING, 1: SERVING}), LIVE) == []


def test_an_ended_parent_need_not_be_served_for_the_commit() -> None:
    _, change = transition(merge=True, sealing=True)
    gone = msgspec.structs.replace(ENDED, owner="c")
    assert decide(change, records({0: gone, 1: ENDED, 2: INHERITED}), LIVE) == (TransitionAction.COMMIT, ())


def role(topic: Topic, segment: int, found: Records) -> TransitionRole:
    return owner_step.transition_role(topic, SegmentId(segment), records(found).get)


def test_owners_do_nothing_before_the_transition_is_sealing() -> None:
    topic, _ = transition(merge=True)
    assert role(topic, 0, {0: SERVING, 1: SERVING, 2: SERVING}) is TransitionRole.NONE
    assert role(topic, 2, {0: ENDED, 1: ENDED, 2: SERVING}) is TransitionRole.NONE


def test_a_parent_ends_its_log_once_and_a_child_waits_for_all_parents() -> None:
    topic, _ = transition(merge=True, sealing=True)
    assert role(topic, 0, {0: SERVING, 1: SERVING, 2: SERVING}) is TransitionRole.PARENT
    assert role(topic, 0, {0: ENDED, 1: SERVING, 2: SERVING}) is TransitionRole.NONE
    assert role(topic, 2, {0: ENDED, 1: SERVING, 2: SERVING}) is TransitionRole.NONE
    assert role(topic, 2, {0: ENDED, 2: SERVING}) is TransitionRole.NONE
    assert role(topic, 2, {0: ENDED, 1: ENDED, 2: SERVING}) is TransitionRole.CHILD
    assert role(topic, 2, {0: ENDED, 1: ENDED, 2: INHERITED}) is TransitionRole.NONE


def test_a_child_waits_only_for_its_own_parents_and_other_segments_for_nothing() -> None:
    topic, _ = transition(sealing=True)
    assert role(topic, 1, {0: SERVING, 1: SERVING, 2: SERVING, 3: SERVING}) is TransitionRole.NONE
    assert role(topic, 3, {0: ENDED, 1: SERVING, 2: SERVING, 3: SERVING}) is TransitionRole.CHILD


@pytest.mark.parametrize(
    ("record", "wanted", "action"),
    [
        (SERVING, TransitionRole.PARENT, OwnerAction.END_LOG),
        (SERVING, TransitionRole.CHILD, OwnerAction.INHERIT),
        (SERVING.moving(Move(to="b")), TransitionRole.PARENT, OwnerAction.END_LOG),
        (SERVING.moving(Move(to="b")).draining(), TransitionRole.PARENT, OwnerAction.HAND_OVER),
    ],
)
def test_a_transition_comes_before_a_move_that_has_not_begun_to_drain(
    record: Ownership, wanted: TransitionRole, action: OwnerAction
) -> None:
    assert owner_step.decide(record, "a", Epoch(1), role=wanted) is action


def test_a_failed_log_is_opened_again_before_it_ends() -> None:
    assert owner_step.decide(SERVING, "a", Epoch(1), failed=True, role=TransitionRole.PARENT) is OwnerAction.REOPEN


def test_an_accepted_loss_makes_a_child_inherit_again() -> None:
    assert INHERITED.assigned("b", accept_loss=True).inherited == 0
    assert msgspec.structs.replace(INHERITED, clean=True).assigned("b").inherited == 7
