"""What the cluster leader decides, as tables of states and decisions."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from braid.cluster.ownership.leader_step import DRAINED_AT_ONCE, Decision, decide, waiting
from braid.model.cluster import SegmentRef
from braid.model.ids import SegmentId
from braid.model.load import LoadReport, SegmentLoad
from braid.model.ownership import Ownership
from braid.model.topic import OwnerLoss, TopicPolicies
from tests.kits.leader import ORDERS, applied, names_of, record, snapshot_of, unable

NOW = 1_000.0
CONTINUE = TopicPolicies(on_owner_loss=OwnerLoss.CONTINUE, owner_loss_after_ms=30_000)
GONE: dict[str, Any] = {"live": ("b", "c"), "gone_since": {"a": NOW - 29}}
"""Broker a, 29 s ago."""
LONG_GONE: dict[str, Any] = {"live": ("b", "c"), "gone_since": {"a": NOW - 30}}
UNABLE: dict[str, Any] = {"policies": CONTINUE, "unable_since": {"a": NOW - 29}}
LONG_UNABLE: dict[str, Any] = {"policies": CONTINUE, "unable_since": {"a": NOW - 30}}
ALL_GONE: dict[str, Any] = {"live": ("b",), "policies": CONTINUE, "gone_since": {"a": NOW - 60, "c": NOW - 30}}
GIVEN_UP: dict[str, Any] = {"clean": True, "accept_loss": True, "given_up": ("a",)}


HELD = record("SEALED", "a", holders=("a", "c")).assigned("b", accept_loss=True, given_up=("a", "c"))
"""The brokers a and c, which hold all of its history, were given up."""


def outcome(state: Ownership | None, **cluster: Any) -> tuple[str, str, int, bool] | tuple[str, str] | None:
    """Of one segment: the reason, who is to own it, in which epoch, whether a loss is accepted; or where it moves."""
    decisions = decide(snapshot_of([state], **cluster), NOW)
    if not decisions:
        return None
    (decision,) = decisions
    assert decision.segment == names_of(1)[0]
    assert decision.revision == (10 if state is not None else 0)
    new = decision.record
    if new.move is not None:
        return decision.reason.value, new.move.to
    return decision.reason.value, new.owner, new.epoch, new.accept_loss


@pytest.mark.parametrize(
    ("state", "cluster", "expected"),
    [
        # No record.
        (None, {}, ("placed", "a", 1, False)),
        (None, {"drained": ("a",)}, ("placed", "b", 1, False)),
        (None, {"live": ()}, None),
        (None, {"deleting": True}, None),
        # Sealed.
        (record("SEALED", "a", to="c"), {}, ("handed-over", "c", 4, False)),
        (record("SEALED", "a", to=""), {}, ("handed-over", "b", 4, False)),
        (record("SEALED", "a", to="c"), {"live": ("a", "b")}, ("handed-over", "b", 4, False)),
        (record("SEALED", "a", to="c"), {"drained": ("c",)}, ("handed-over", "b", 4, False)),
        (record("SEALED", "a", to="b", holders=("c",)), {}, ("handed-over", "c", 4, False)),
        (record("SEALED", "a", to="b", holders=("a",)), {}, ("handed-over", "a", 4, False)),
        (record("SEALED", "a", to="b", holders=("c",)), {"live": ("a", "b")}, None),
        (record("SEALED", "a", to="b"), {"live": ("a",)}, ("handed-over", "a", 4, False)),
        (record("SEALED", "a", to="b"), {"live": ()}, None),
        (record("SEALED", "a", to="b"), {"deleting": True}, None),
        # Assigned, not served yet.
        (record("ASSIGNED", "a", clean=True), {}, None),
        (record("ASSIGNED", "a", clean=True), {"drained": ("a",)}, None),
        (record("ASSIGNED", "a", clean=True), GONE, ("reassigned", "b", 4, False)),
        (record("ASSIGNED", "a", clean=True, holders=("a", "c")), GONE, ("reassigned", "c", 4, False)),
        (record("ASSIGNED", "a", clean=True, holders=("a",)), GONE, None),
        (record("ASSIGNED", "a", clean=True, accept_loss=True), GONE, ("reassigned", "b", 4, True)),
        (record("ASSIGNED", "a"), {}, None),
        # The owner is gone with what only it had.
        (record("SERVING", "a"), LONG_GONE, None),
        (record("DRAINING", "a", to="b"), LONG_GONE, None),
        (record("ASSIGNED", "a"), LONG_GONE, None),
        (record("SERVING", "a"), {**GONE, "policies": CONTINUE}, None),
        (record("SERVING", "a"), {**LONG_GONE, "policies": CONTINUE}, ("continued", "b", 4, True)),
        (record("SERVING", "a", to="c"), {**LONG_GONE, "policies": CONTINUE}, ("continued", "c", 4, True)),
        (record("DRAINING", "a", to="c"), {**LONG_GONE, "policies": CONTINUE}, ("continued", "c", 4, True)),
        (record("ASSIGNED", "a"), {**LONG_GONE, "policies": CONTINUE}, ("continued", "b", 4, True)),
        (record("SERVING", "a", holders=("a",)), {**LONG_GONE, "policies": CONTINUE}, ("continued", "b", 4, True)),
        (record("SERVING", "a"), {**LONG_GONE, "policies": CONTINUE, "drained": ("b", "c")}, None),
        # The owner is there and cannot open it: no other broker needs its disk.
        (record("ASSIGNED", "a", clean=True, failures=unable("a")), {}, ("reassigned", "b", 4, False)),
        (record("ASSIGNED", "a", clean=True, failures=unable("a", "b")), {}, ("reassigned", "c", 4, False)),
        (record("ASSIGNED", "a", clean=True, failures=unable("a", "b", "c")), {}, None),
        (record("ASSIGNED", "a", clean=True, failures=unable("b")), {}, None),
        (
            record("ASSIGNED", "a", clean=True, holders=("a", "c"), failures=unable("a")),
            {},
            ("reassigned", "c", 4, False),
        ),
        (record("ASSIGNED", "a", clean=True, holders=("a", "c"), failures=unable("a", "c")), {}, None),
        (record("ASSIGNED", "a", clean=True, failures=unable("a", "b", "c")), GONE, ("reassigned", "b", 4, False)),
        # The owner is there and cannot open it: what only it had may be lost.
        (record("ASSIGNED", "a", failures=unable("a")), {}, None),
        (record("ASSIGNED", "a", failures=unable("a")), UNABLE, None),
        (record("ASSIGNED", "a", failures=unable("a")), LONG_UNABLE, ("continued", "b", 4, True)),
        (record("ASSIGNED", "a", failures=unable("a", lasting=False)), {"policies": CONTINUE}, None),
        (record("ASSIGNED", "a", failures=unable("a"), holders=("a",)), LONG_UNABLE, ("continued", "a", 4, True)),
        (record("ASSIGNED", "a", failures=unable("a")), {**LONG_UNABLE, "live": ("a",)}, ("continued", "a", 4, True)),
        # All that hold it are gone.
        (record("SEALED", "a", to="c", holders=("a", "c")), ALL_GONE, ("continued", "b", 4, True)),
        (record("SEALED", "a", to="c", holders=("a", "c")), {**ALL_GONE, "policies": None}, None),
        (record("SEALED", "a", to="c", holders=("a", "c")), {**ALL_GONE, "gone_since": {"a": 0, "c": NOW - 29}}, None),
        (record("SEALED", "a", to="c", holders=("a", "c")), {**ALL_GONE, "live": ("b", "c"), "drained": ("c",)}, None),
        # A loss is accepted, and the broker that was given up is back before another one served.
        (record("ASSIGNED", "b", **GIVEN_UP), {}, ("returned", "a", 4, True)),
        (record("ASSIGNED", "b", **GIVEN_UP), {"live": ("a", "c")}, ("returned", "a", 4, True)),
        (record("ASSIGNED", "b", **GIVEN_UP), {"live": ("a", "c"), "drained": ("a",)}, ("returned", "a", 4, True)),
        (record("ASSIGNED", "b", **GIVEN_UP), {"live": ("b", "c")}, None),
        (record("ASSIGNED", "b", **GIVEN_UP), {"live": ("c",)}, ("reassigned", "c", 4, True)),
        (record("ASSIGNED", "b", **GIVEN_UP, failures=unable("a")), {"live": ("a", "b")}, None),
        (record("ASSIGNED", "a", **GIVEN_UP), {}, None),
        (record("ASSIGNED", "a", **GIVEN_UP, failures=unable("a")), {}, ("reassigned", "b", 4, True)),
        (HELD, {"live": ("b", "c")}, ("returned", "c", 5, False)),
        (HELD, {"live": ("a", "b", "c")}, ("returned", "a", 5, False)),
        (HELD, {"live": ("b",)}, None),
        (HELD.restored("c"), {"live": ("a", "b", "c")}, None),
        (HELD.restored("c").unopened("blank", lasting=True), {}, ("reassigned", "a", 6, False)),
        # The owner is there.
        (record("SERVING", "a"), {"policies": CONTINUE}, None),
        (record("SERVING", "a", to="gone"), {}, None),
        (record("DRAINING", "a", to="b"), {}, None),
        # The owner is to be drained.
        (record("SERVING", "a"), {"drained": ("a",)}, ("drained", "b")),
        (record("SERVING", "a"), {"drained": ("a", "b")}, ("drained", "c")),
        (record("SERVING", "a"), {"drained": ("a", "b", "c")}, None),
        (record("SERVING", "a", holders=("a",)), {"drained": ("a",)}, ("drained", "b")),
        (record("SERVING", "a", to="c"), {"drained": ("a",)}, None),
        (record("SERVING", "a"), {"drained": ("a",), **LONG_GONE}, None),
    ],
)
def test_decision_for_one_segment(state: Ownership | None, cluster: dict[str, Any], expected: object) -> None:
    assert outcome(state, **cluster) == expected


@pytest.mark.parametrize(
    ("state", "cluster", "gone"),
    [
        (record("SERVING", "a"), {**LONG_GONE, "policies": CONTINUE}, ("a",)),
        (record("SEALED", "a", holders=("a", "c")), ALL_GONE, ("a", "c")),
        (record("ASSIGNED", "a", failures=unable("a")), LONG_UNABLE, ()),
        (record("ASSIGNED", "b", **GIVEN_UP), {"live": ("c",)}, ("a",)),
        (record("ASSIGNED", "b", **GIVEN_UP), {}, ()),
        (record("ASSIGNED", "a", clean=True), GONE, ()),
    ],
)
def test_a_loss_is_accepted_only_while_the_brokers_that_it_gives_up_are_gone(
    state: Ownership, cluster: dict[str, Any], gone: tuple[str, ...]
) -> None:
    (decision,) = decide(snapshot_of([state], **cluster), NOW)
    assert decision.gone == gone
    assert set(gone) <= set(decision.record.given_up)


def test_a_topics_new_segments_go_to_different_brokers() -> None:
    decisions = decide(snapshot_of([None] * 6), NOW)
    assert [decision.record.owner for decision in decisions] == ["a", "b", "c", "a", "b", "c"]


def test_what_is_handed_over_at_once_is_not_all_given_to_the_one_that_was_idle() -> None:
    owned = [record("SERVING", "b"), record("SERVING", "c")]
    decisions = decide(snapshot_of([*owned, *[record("SEALED", "a", to="")] * 6], drained=("a",)), NOW)
    assert sorted(decision.record.owner for decision in decisions) == ["b"] * 3 + ["c"] * 3


def test_a_segment_on_its_way_counts_for_the_broker_that_it_goes_to() -> None:
    """So that a second topic that is created meanwhile goes to the third broker."""
    records = [record("SERVING", "a", to="b"), record("SERVING", "a"), None]
    assert [decision.record.owner for decision in decide(snapshot_of(records), NOW)] == ["c"]


def test_a_broker_is_drained_in_portions() -> None:
    count = 3 * DRAINED_AT_ONCE
    snapshot = snapshot_of([record("SERVING", "a")] * count, drained=("a",))
    portions = []
    while decisions := decide(snapshot, NOW):
        portions.append(len(decisions))
        snapshot = applied(snapshot, decisions)
        assert decide(snapshot, NOW) == [], "no more until these have gone"
        snapshot = applied(snapshot, [with_record(each, handed_over(each.record)) for each in decisions])
    assert portions == [DRAINED_AT_ONCE] * 3
    assert Counter(known.value.owner for known in snapshot.records.values()) == {"b": count // 2, "c": count // 2}


def handed_over(moving: Ownership) -> Ownership:
    assert moving.move is not None
    return moving.draining().sealed().assigned(moving.move.to).serving()


def with_record(decision: Decision, new: Ownership) -> Decision:
    return Decision(decision.segment, decision.revision, new, decision.reason)


def test_the_busiest_segments_leave_a_draining_broker_first() -> None:
    count = DRAINED_AT_ONCE + 2
    loads = {
        "a": LoadReport(
            at=0,
            busiest=tuple(
                SegmentLoad(topic_path=ORDERS.path, segment_id=SegmentId(each), bytes_in_per_s=each)
                for each in range(count)
            ),
        )
    }
    snapshot = snapshot_of([record("SERVING", "a")] * count, drained=("a",), loads=loads)
    moved = [SegmentRef(ORDERS.path, decision.segment.id) for decision in decide(snapshot, NOW)]
    assert [ref.segment_id for ref in moved] == list(range(count - 1, 1, -1))


def test_balancing_leaves_alone_what_is_on_its_way() -> None:
    records = [
        record("SERVING", "a"),
        record("SERVING", "a", to="b"),
        record("ASSIGNED", "a"),
        record("DRAINING", "a", to="b"),
        record("SEALED", "a", to="b"),
    ]
    view = snapshot_of(records).cluster_load(copies_history=False)
    assert [each.moving for each in view.owned] == [False, True, True, True, True]
    assert {each.owner for each in view.owned} == {"a"}


def test_what_waits_says_for_whom_and_since_when() -> None:
    records = [
        record("SERVING", "a"),
        record("SEALED", "b", holders=("a", "d")),
        record("SERVING", "b"),
        record("ASSIGNED", "a", clean=True),
        record("ASSIGNED", "b"),
        record("SEALED", "b", holders=("c",)),
    ]
    found = waiting(snapshot_of(records, live=("b", "c"), gone_since={"a": 7.0, "d": 5.0}))
    assert [(each.segment.id, each.brokers, each.since, each.until) for each in found] == [
        (0, ("a",), 7.0, None),
        (1, ("a", "d"), 5.0, None),
    ]


def test_a_segment_that_its_owner_cannot_open_waits_visibly_and_says_why() -> None:
    records = [
        record("ASSIGNED", "a", failures=unable("a")),
        record("ASSIGNED", "a", clean=True, failures=unable("a")),
        record("ASSIGNED", "a", clean=True, failures=unable("a", "b", "c")),
        record("ASSIGNED", "a"),
    ]
    found = waiting(snapshot_of(records, unable_since={"a": NOW - 7}, policies=CONTINUE))
    assert [(each.segment.id, each.brokers, each.since, each.until, each.reason) for each in found] == [
        (0, ("a",), NOW - 7, NOW + 23, "a has no files"),
        (2, ("a",), NOW - 7, None, "a has no files"),
    ]


def test_a_segment_that_will_be_continued_says_when() -> None:
    (found,) = waiting(snapshot_of([record("DRAINING", "a", to="b")], **GONE, policies=CONTINUE))
    assert found.until == NOW + 1


def test_without_an_active_broker_everything_that_nobody_serves_waits_for_any() -> None:
    found = waiting(snapshot_of([None, record("SEALED", "b"), record("SERVING", "b")], live=("b",), drained=("b",)))
    assert [(each.segment.id, each.brokers, each.since) for each in found] == [(0, (), None), (1, (), None)]
