"""A new segment goes to the least loaded broker that may have it, and nothing but the arguments decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import pytest

from braid.cluster.placement import Loads, Tally, choose_replicas, place_all
from braid.model.cluster import BrokerState, BrokerView, SegmentPlacement, SegmentRef
from braid.model.load import LoadReport
from tests.kits.balancing import MB, NOON_US, TOPIC, brokers, owned, ref, replicated, report

NEW = ref(99)


def place(
    segment: SegmentRef,
    members: Iterable[BrokerView],
    loads: Loads,
    have: Iterable[SegmentPlacement],
    *,
    allowed: Collection[str] | None = None,
    avoid: str | None = None,
) -> str | None:
    return Tally(members, loads, have).least_loaded(segment, allowed=allowed, avoid=avoid)


def test_the_broker_with_the_fewest_segments_gets_it_when_nothing_happens() -> None:
    have = owned({"a": [ref(0), ref(1)], "b": [ref(2)], "c": [ref(3), ref(4)]})
    assert place(NEW, brokers("a", "b", "c"), {}, have) == "b"


def test_the_broker_with_the_fewest_bytes_gets_it_when_all_have_as_many_segments() -> None:
    have = owned({"a": [ref(0)], "b": [ref(1)], "c": [ref(2)]})
    loads = {"a": report({ref(0): 9 * MB}), "b": report({ref(1): 8 * MB}), "c": report({ref(2): 3 * MB})}
    assert place(NEW, brokers("a", "b", "c"), loads, have) == "c"


def test_the_broker_with_the_idlest_processor_gets_it_when_the_rest_is_equal() -> None:
    loads = {"a": report({}, cpu=0.9), "b": report({}, cpu=0.2), "c": report({}, cpu=0.5)}
    assert place(NEW, brokers("a", "b", "c"), loads, ()) == "b"


def test_bytes_count_more_than_segments() -> None:
    have = owned({"a": [ref(0), ref(1)], "b": [ref(2)]})
    loads = {"a": report({ref(0): 1 * MB, ref(1): 0}), "b": report({ref(2): 3 * MB})}
    assert place(NEW, brokers("a", "b"), loads, have) == "a"


def test_what_a_broker_carries_beside_its_reported_segments_counts() -> None:
    have = owned({"a": [ref(0)], "b": [ref(1)]})
    loads = {"a": report({ref(0): 1 * MB}, rest=9 * MB), "b": report({ref(1): 2 * MB})}
    assert place(NEW, brokers("a", "b"), loads, have) == "b"


def test_ties_go_to_the_lower_id_in_whatever_order_brokers_come() -> None:
    assert place(NEW, brokers("c", "b", "a"), {}, ()) == "a"
    assert place(NEW, brokers("a", "b", "c"), {}, ()) == "a"


def test_a_tie_goes_to_the_broker_with_less_of_the_same_topic() -> None:
    have = owned({"a": [ref(0)], "b": [ref(0, "public/default/other")]})
    assert place(NEW, brokers("a", "b"), {}, have) == "b"


@pytest.mark.parametrize(
    "unavailable",
    [
        BrokerView(id="a", state=BrokerState.DRAINING),
        BrokerView(id="a", state=BrokerState.DRAINED),
        BrokerView(id="a", live=False),
    ],
    ids=["draining", "drained", "dead"],
)
def test_a_broker_that_is_not_available_gets_nothing_however_idle(unavailable: BrokerView) -> None:
    have = owned({"b": [ref(number) for number in range(50)]})
    assert place(NEW, [unavailable, BrokerView(id="b")], {}, have) == "b"
    assert place(NEW, [unavailable], {}, have) is None
    assert place(NEW, [unavailable, BrokerView(id="b")], {}, have, avoid="b") == "b"
    assert place_all([NEW], Tally([unavailable], {}, have)) == {}


def test_without_brokers_there_is_no_place() -> None:
    assert place(NEW, (), {}, ()) is None
    assert place_all([NEW], Tally((), {}, ())) == {}


def test_only_a_broker_that_is_allowed_gets_it() -> None:
    have = owned({"a": [ref(number) for number in range(9)]})
    assert place(NEW, brokers("a", "b", "c"), {}, have, allowed={"a"}) == "a"
    assert place(NEW, brokers("a", "b", "c"), {}, have, allowed={"a", "c"}) == "c"
    assert place(NEW, brokers("a", "b"), {}, have, allowed={"z"}) is None
    assert place(NEW, brokers("a", "b"), {}, have, allowed=()) is None


def test_an_unloaded_segment_goes_elsewhere_if_there_is_an_elsewhere() -> None:
    have = owned({"b": [ref(number) for number in range(9)]})
    assert place(NEW, brokers("a", "b"), {}, have, avoid="a") == "b"
    assert place(NEW, brokers("a"), {}, have, avoid="a") == "a"
    assert place(NEW, brokers("a", "b"), {}, have, avoid="a", allowed={"a"}) == "a"


def test_a_broker_without_a_report_counts_as_idle() -> None:
    have = owned({"a": [ref(0)], "b": [ref(1)]})
    assert place(NEW, brokers("a", "b"), {"a": report({ref(0): MB})}, have) == "b"


# ── loads follow ownership ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_segment_that_moved_after_the_reports_counts_where_it_is_now() -> None:
    loads = {"a": report({ref(0): 6 * MB, ref(1): MB}), "b": report({ref(2): 2 * MB})}
    tally = Tally(brokers("a", "b"), loads, owned({"a": [ref(1)], "b": [ref(2), ref(0)]}))
    assert tally.bytes_per_s == {"a": MB, "b": 8 * MB}


def test_the_owners_word_about_a_segment_beats_a_younger_one_of_its_last_owner() -> None:
    loads = {"a": report({ref(0): 6 * MB}, at=NOON_US + 5), "b": report({ref(0): 2 * MB}, at=NOON_US)}
    tally = Tally(brokers("a", "b"), loads, owned({"b": [ref(0)]}))
    assert tally.bytes_per_s == {"a": 0, "b": 2 * MB}


def test_of_two_former_owners_the_younger_report_counts() -> None:
    loads = {"a": report({ref(0): 6 * MB}, at=NOON_US + 5), "b": report({ref(0): 2 * MB}, at=NOON_US)}
    tally = Tally(brokers("a", "b", "c"), loads, owned({"c": [ref(0)]}))
    assert tally.bytes_per_s["c"] == 6 * MB


def test_reports_and_segments_of_brokers_that_nobody_knows_are_passed_over() -> None:
    loads = {"gone": report({ref(0): 6 * MB})}
    assert place(NEW, brokers("a"), loads, owned({"gone": [ref(0)], "older": [ref(1)]})) == "a"


def test_a_sum_that_is_smaller_than_its_parts_is_taken_for_nothing_beside_them() -> None:
    parts = report({ref(0): 5 * MB})
    loads = {"a": LoadReport(at=NOON_US, bytes_in_per_s=1, segments=1, busiest=parts.busiest)}
    assert Tally(brokers("a"), loads, owned({"a": [ref(0)]})).bytes_per_s == {"a": 5 * MB}


# ── many at once ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_segments_of_a_new_topic_are_spread_evenly() -> None:
    placed = place_all([ref(number) for number in range(10)], Tally(brokers("a", "b", "c"), {}, ()))
    assert sorted(Counter(placed.values()).values()) == [3, 3, 4]
    assert len({placed[ref(number)] for number in range(3)}) == 3


def test_the_segments_of_one_topic_are_on_different_brokers_before_one_has_two() -> None:
    have = owned({"a": [ref(number, "public/default/other") for number in range(40)]})
    placed = place_all([ref(0), ref(1), ref(2)], Tally(brokers("a", "b", "c"), {}, have))
    assert sorted(placed.values()) == ["a", "b", "c"]
    assert placed[ref(2)] == "a"  # the busy one comes last


def test_many_topics_of_one_segment_are_spread_too() -> None:
    topics = [ref(0, f"public/default/t{number}") for number in range(12)]
    placed = place_all(topics, Tally(brokers("a", "b", "c", "d"), {}, ()))
    assert Counter(placed.values()) == {"a": 3, "b": 3, "c": 3, "d": 3}


def test_a_new_topic_fills_up_the_broker_that_has_little() -> None:
    have = owned({"a": [ref(number, "x/y/z") for number in range(4)], "b": [], "c": []})
    topics = [ref(0, f"public/default/t{number}") for number in range(8)]
    placed = place_all(topics, Tally(brokers("a", "b", "c"), {}, have))
    assert Counter(placed.values()) == {"b": 4, "c": 4}


def test_the_same_cluster_in_another_order_gives_the_same_places() -> None:
    have = {"a": [ref(7)], "b": [ref(8), ref(9)], "c": []}
    loads = {"a": report({ref(7): MB}), "b": report({ref(8): MB, ref(9): MB}), "c": report({}, cpu=0.3)}
    segments = [ref(number, topic) for topic in (TOPIC, "public/default/x") for number in range(5)]
    first = place_all(segments, Tally(brokers("a", "b", "c"), loads, owned(have)))
    backwards = dict(reversed(loads.items()))
    assert place_all(segments, Tally(brokers("c", "b", "a"), backwards, tuple(reversed(owned(have))))) == first


# Replicas.

RACKS = {"a": "east", "b": "east", "c": "west", "d": "west", "e": "north"}


@pytest.mark.parametrize(
    ("owner", "count", "chosen"),
    [("a", 1, "a"), ("a", 2, "ab"), ("b", 3, "bac"), ("c", 5, "cabde"), ("a", 7, "abcde"), ("gone", 2, ("gone", "a"))],
)
def test_replicas_are_the_owner_and_others_and_no_broker_twice(owner: str, count: int, chosen: Sequence[str]) -> None:
    tally = Tally(brokers("e", "d", "c", "b", "a"), {}, ())
    assert choose_replicas(NEW, (owner,), count, tally) == tuple(chosen)


def test_followers_are_the_least_loaded_others() -> None:
    have = owned({"a": [ref(0)], "b": [ref(1), ref(2)], "c": [], "d": [ref(3)]})
    tally = Tally(brokers("a", "b", "c", "d"), {}, have)
    assert choose_replicas(NEW, ("b",), 3, tally) == ("b", "c", "a")
    assert choose_replicas(NEW, ("b",), 3, tally, candidates=("a", "d")) == ("b", "a", "d")


@pytest.mark.parametrize(
    ("owner", "count", "chosen"),
    [("a", 2, "ac"), ("a", 3, "ace"), ("b", 3, "bce"), ("e", 3, "eac"), ("a", 4, "aceb"), ("a", 5, "acebd")],
)
def test_followers_are_in_other_racks_as_far_as_there_are_any(owner: str, count: int, chosen: str) -> None:
    busy = owned({"c": [ref(0)], "d": [ref(1), ref(2)], "e": [ref(3)]})
    tally = Tally(brokers("a", "b", "c", "d", "e", racks=RACKS), {}, busy)
    assert choose_replicas(NEW, (owner,), count, tally) == tuple(chosen)


def test_a_copy_counts_as_a_segment_of_each_broker_that_holds_it() -> None:
    have = [replicated(ref(0), "a", "b")]
    assert place(NEW, brokers("a", "b", "c"), {}, have) == "c"
    tally = Tally(brokers("a", "b", "c"), {}, have)
    assert tally.scores() == {"a": 1.5, "b": 1.5, "c": 0}
    assert tally.segments == {"a": {ref(0)}, "b": set(), "c": set()}, "only its owner can hand it over"


def test_followers_write_what_comes_in_and_only_the_owner_sends_it_out() -> None:
    loads = {"a": report({ref(0): 9 * MB})}  # 3 come in, 6 go out.
    tally = Tally(brokers("a", "b", "c"), loads, [replicated(ref(0), "a", "b")])
    assert tally.bytes_per_s == {"a": 9 * MB, "b": 3 * MB, "c": 0}
    tally.remove(ref(0), "a")
    tally.add(ref(0), "b")
    assert tally.bytes_per_s == {"a": 3 * MB, "b": 9 * MB, "c": 0}, "the last owner follows"
    assert tally.scores() == {"a": 1.5 + 0.25 * 6, "b": 1.5 + 0.75 * 6, "c": 0}


def test_a_segment_that_is_forgotten_counts_for_no_broker() -> None:
    loads = {"a": report({ref(0): 9 * MB, ref(1): 3 * MB})}
    have = [replicated(ref(0), "a", "b", "gone"), *owned({"a": [ref(1)]})]
    tally = Tally(brokers("a", "b"), loads, have)
    tally.forget(ref(0))
    assert tally.bytes_per_s == {"a": 3 * MB, "b": 0}
    assert (tally.segments["a"], tally.copies) == ({ref(1)}, {"a": set(), "b": set()})
    assert tally.of_topic(NEW, "a") == 1
    assert tally.of_topic(NEW, "b") == 0
    tally.add(ref(0), "b")
    assert tally.bytes_per_s["b"] == 9 * MB, "without replicas, the owner does everything"
