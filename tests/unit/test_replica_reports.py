"""How replicas are shown: each with its state, and a change with what it waits for."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from braid.broker.admin.replicas import SegmentReplicas
from braid.broker.admin.reports import OwnerReport, why_unavailable
from braid.broker.admin.segment_stats import TopicCounts
from braid.model.ids import Epoch, Offset, SegmentId
from braid.model.layout import Layout
from braid.model.log.replication import FollowerStatus, LogPosition
from braid.model.ownership import Ownership, ReplicaChange

(INFO,) = Layout.initial(1).segments.values()
ABC = ("a", "b", "c")
SERVING = Ownership.first("a", ABC, 2).serving()
COUNTS = TopicCounts(**dict.fromkeys(TopicCounts.__struct_fields__, 0))
CHANGING = SERVING.changing(ReplicaChange(replicas=("a", "b", "d"), write_quorum=3))


def status(
    broker: str, behind: int = 0, *, in_sync: bool = True, member: bool = True, error: str = ""
) -> FollowerStatus:
    position = LogPosition(epoch=Epoch(1), end=Offset(100 - behind))
    return FollowerStatus(broker=broker, position=position, in_sync=in_sync, member=member, behind=behind, error=error)


def shown(
    record: Ownership | None, followers: Mapping[str, FollowerStatus] | str = "?", live: str = "abcd"
) -> SegmentReplicas:
    return SegmentReplicas.of(INFO, record, followers, set(live), None)


@pytest.mark.parametrize(
    ("record", "followers", "live", "states"),
    [
        (None, {}, "abc", []),
        (Ownership.first("a").serving(), {}, "abc", ["a owner"]),
        (SERVING, {"b": status("b"), "c": status("c", 7)}, "abc", ["a owner", "b in-sync", "c in-sync"]),
        (SERVING, {"b": status("b"), "c": status("c", 7, in_sync=False)}, "abc", ["a owner", "b in-sync", "c behind"]),
        (SERVING, {"b": status("b"), "c": status("c", member=False)}, "abc", ["a owner", "b in-sync", "c behind"]),
        (SERVING, {"b": status("b"), "c": status("c")}, "ab", ["a owner", "b in-sync", "c down"]),
        (SERVING, "no answer", "abc", ["a owner", "b unknown", "c unknown"]),
        (SERVING, {}, "bc", ["a down", "b unknown", "c unknown"]),
        (SERVING.recovering(), {}, "bc", ["a down", "b voting", "c voting"]),
        (CHANGING, {"d": status("d", 9, in_sync=False)}, "abcd", ["a owner", "b unknown", "c unknown", "d joining"]),
        (CHANGING, {}, "abc", ["a owner", "b unknown", "c unknown", "d down"]),
    ],
)
def test_each_replica_has_a_state(
    record: Ownership | None, followers: Mapping[str, FollowerStatus] | str, live: str, states: list[str]
) -> None:
    assert [f"{each.broker} {each.state}" for each in shown(record, followers, live).replicas] == states


def test_a_replica_says_how_far_it_is_and_why_it_gets_nothing() -> None:
    found = shown(SERVING, {"b": status("b", 7, error="its disk is full")})
    _, behind, unknown = found.replicas
    assert (behind.behind, behind.end, behind.error) == (7, 93, "its disk is full")
    assert (unknown.behind, unknown.end, unknown.error) == (None, None, "")
    assert (found.owner, found.write_quorum, found.change) == ("a", 2, None)
    _, down, _ = shown(SERVING, {"b": status("b", 7, error="it is not registered")}, "ac").replicas
    assert (down.state, down.behind, down.end, down.error) == ("down", None, None, "")
    assert shown(SERVING.recovering()).owner is None


@pytest.mark.parametrize(
    ("followers", "live", "waits_for"),
    [
        ({"d": status("d")}, "abcd", ()),
        ({"d": status("d", 1_234, in_sync=False)}, "abcd", ("broker d lacks 1,234 records",)),
        ({"d": status("d", 9, in_sync=False, error="full")}, "abcd", ("broker d gets nothing: full",)),
        ({"d": status("d")}, "abc", ("broker d is down",)),
        ({}, "abcd", ("the owner has not begun to send to broker d",)),
        ("the owner does not answer", "abcd", ("the owner does not answer",)),
    ],
)
def test_a_change_says_what_it_waits_for(
    followers: Mapping[str, FollowerStatus] | str, live: str, waits_for: tuple[str, ...]
) -> None:
    change = shown(CHANGING, followers, live).change
    assert change is not None
    assert (change.replicas, change.write_quorum, change.waits_for) == (("a", "b", "d"), 3, waits_for)


@pytest.mark.parametrize(
    ("record", "down", "said"),
    [
        (SERVING, ["a"], "its replicas take over"),
        (SERVING.recovering(), ["a"], "its owner a is lost, and its replicas vote"),
        (SERVING.recovering(), [], "its owner a is lost, and its replicas vote"),
        (
            SERVING,
            ["a", "c"],
            "its owner a is lost, and 2 of its replicas a, b, c must vote: 1 of a, c must come back",
        ),
        (SERVING.recovering(), [*ABC], "its owner a is lost, and 2 of its replicas a, b, c must vote: all are down"),
        (SERVING, ["b", "c"], "its owner does not serve it at the moment"),
    ],
)
def test_a_segment_that_is_not_served_says_which_votes_are_missing(
    record: Ownership, down: list[str], said: str
) -> None:
    answers: dict[str, OwnerReport | str] = {"a": "its owner a is down"} if "a" in down else {}
    if "a" not in answers:
        answers["a"] = OwnerReport(segments={}, cursors={}, counts=COUNTS)
    assert why_unavailable(record, answers, SegmentId(0), down).reason == said
