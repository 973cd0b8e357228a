"""When a topic's segments are split and merged by themselves, where, and what keeps them as they are."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from braid.model.errors import InvalidArgument
from braid.model.ids import SegmentId
from braid.model.layout import HashRange, Layout
from braid.model.load import KeyHashLoad
from braid.model.topic import AutoScaleOverride, AutoScalePolicy, StoredOverride, Topic, auto_scale_policy
from braid.model.transition import LayoutPlan, plan_merge, plan_split
from braid.scaling.auto_scale import (
    AutoScaleDecision,
    MeasuredSegment,
    Merge,
    SegmentRates,
    Split,
    decide,
)

ON = AutoScalePolicy(enabled=True)
HOUR_US = 3_600_000_000
NOW = 100 * HOUR_US
LONG = 10_000.0


def keys(at: int, lower: float = 0.5, upper: float = 0.5, records: float = 10_000.0) -> KeyHashLoad:
    return KeyHashLoad(records=records, split_at=at, lower_share=lower, upper_share=upper)


def load(
    records: float = 0.0,
    bytes_in: float = 0.0,
    bytes_out: float = 0.0,
    hashes: KeyHashLoad | None = None,
    cold_for_s: float = 0.0,
) -> MeasuredSegment:
    return MeasuredSegment(SegmentRates(records, bytes_in, bytes_out), hashes, cold_for_s)


HOT = load(20_000, hashes=keys(0x1234))
WARM = load(5_000)
COLD = load(10, cold_for_s=LONG)


def decided(
    *loads: MeasuredSegment | None,
    policy: AutoScalePolicy = ON,
    consumers: dict[str, int] | None = None,
    layout: Layout | None = None,
    split_at: int = 0,
    merged_at: int = 0,
) -> AutoScaleDecision:
    """Decide about a topic whose active segments, in the order of their ranges, have these loads; None: unknown."""
    layout = layout or Layout.initial(len(loads))
    measured = {info.segment_id: found for info, found in zip(layout.active, loads, strict=True) if found is not None}
    return decide(policy, layout, measured, consumers or {}, split_at=split_at, merged_at=merged_at, now=NOW)


def changed(layout: Layout, plan: LayoutPlan) -> Layout:
    return Topic(id=1, layout=layout).beginning(plan, transition_id=1, created_at=0).sealing().committed().layout


def test_a_policy_that_is_off_changes_nothing() -> None:
    assert decided(HOT, policy=AutoScalePolicy()) == AutoScaleDecision(None, "Auto-scaling is off.")


@pytest.mark.parametrize(
    ("hot", "why"),
    [
        (load(12_000, hashes=keys(0x4000)), "Segment 0 takes 12,000 records a second, above 10,000"),
        (load(1, 60_000_000, hashes=keys(0x4000)), "Segment 0 takes 60,000,000 bytes a second, above 50,000,000"),
        (load(1, 1, 300_000_000, keys(0x4000)), "Segment 0 sends 300,000,000 bytes a second, above 250,000,000"),
    ],
)
def test_a_segment_above_any_threshold_is_split_where_half_of_its_load_is(hot: MeasuredSegment, why: str) -> None:
    found = decided(hot)
    assert found.action == Split(SegmentId(0), 0x4000)
    where = "50% of its records are below, 50% above"
    assert found.reason == f"{why}: split segment 0 at 4000 ({where})."


def test_of_several_hot_segments_the_one_furthest_above_is_split() -> None:
    found = decided(load(11_000, hashes=keys(0x100)), load(1, 90_000_000, hashes=keys(0x5678)), WARM)
    assert found.action == Split(SegmentId(1), 0x5678)


def test_nothing_is_split_at_a_threshold_and_nothing_is_merged_between_the_thresholds() -> None:
    assert decided(load(10_000), load(1_000, cold_for_s=LONG), load(5_000)).action is None


def test_a_hot_segment_waits_until_its_key_hashes_are_measured() -> None:
    for unknown in (None, keys(0x4000, records=99)):
        found = decided(load(20_000, hashes=unknown))
        assert (found.action, "waits until" in found.reason) == (None, True)


def test_records_without_keys_are_split_anywhere() -> None:
    found = decided(load(20_000, hashes=KeyHashLoad(records=10_000)))
    assert (found.action, "(the middle of its range)" in found.reason) == (Split(SegmentId(0), 0x8000), True)


def test_one_key_that_is_the_load_is_named_and_the_next_hot_segment_is_split() -> None:
    hot_key = KeyHashLoad(
        records=10_000,
        split_at=0x1234,
        lower_share=0.02,
        upper_share=0.98,
        hottest=HashRange(0x1234, 0x1234),
        hottest_share=0.97,
    )
    found = decided(load(50_000, hashes=hot_key), load(11_000, hashes=keys(0x9000)))
    assert found.action == Split(SegmentId(1), 0x9000)
    assert found.findings == (
        "Key hashes 1234-1234 have 97% of the load of segment 0: one key is in one segment, so splits hardly help.",
        "Segment 0 takes 50,000 records a second, above 10,000, but no split takes as much as 10% off it.",
    )
    alone = decided(load(50_000, hashes=hot_key))
    assert (alone.action, len(alone.findings)) == (None, 2)


def test_a_segment_of_one_hash_is_not_split() -> None:
    layout = changed(Layout.initial(1), plan_split(Layout.initial(1), 0, at=1))
    found = decided(load(50_000), WARM, layout=layout)
    assert (found.action, found.findings) == (
        None,
        ("Segment 1 takes 50,000 records a second, above 10,000, but it has a single key hash.",),
    )


def test_a_topic_with_as_many_segments_as_it_may_have_is_not_split() -> None:
    policy = AutoScalePolicy(enabled=True, max_segments=2)
    for consumers in ({}, {"billing": 9}):
        found = decided(HOT, WARM, policy=policy, consumers=consumers)
        assert (found.action, "max_segments is 2" in found.findings[0]) == (None, True)


def test_the_busiest_segment_is_split_for_a_subscription_with_more_consumers_than_segments() -> None:
    found = decided(load(10), load(900, hashes=keys(0x9000)), consumers={"billing": 3})
    assert found.action == Split(SegmentId(1), 0x9000)
    assert found.reason.startswith("A subscription has 3 consumers, and the topic 2 segments: split segment 1 at 9000")
    idle = decided(load(), load(), consumers={"billing": 3})
    assert idle.action == Split(SegmentId(0), 0x4000), "nothing is measured: the middle"


def test_consumers_of_several_subscriptions_do_not_add_up() -> None:
    assert decided(WARM, WARM, consumers={"billing": 2, "mailer": 2}).action is None


def test_a_load_is_split_before_consumers_are_given_segments() -> None:
    assert decided(HOT, WARM, consumers={"billing": 9}).action == Split(SegmentId(0), 0x1234)


@pytest.mark.parametrize(("loads", "consumers"), [((HOT,), {}), ((WARM,), {"billing": 3})], ids=["load", "consumers"])
def test_a_split_rests_after_the_last_one(loads: tuple[MeasuredSegment, ...], consumers: dict[str, int]) -> None:
    resting = decided(*loads, consumers=consumers, split_at=NOW - 59_000_000)
    assert (resting.action, "waits for 1 s more" in resting.reason) == (None, True)
    assert decided(*loads, consumers=consumers, split_at=NOW - 60_000_000).action is not None
    ahead = decided(*loads, consumers=consumers, split_at=NOW + HOUR_US)
    assert "waits for 60 s more" in ahead.reason, "another leader's clock is ahead"


def test_cold_neighbours_are_merged() -> None:
    found = decided(COLD, COLD, WARM)
    assert (found.action, found.reason) == (
        Merge(SegmentId(0), SegmentId(1)),
        "Segments 0 and 1 were cold for 300 s: merge them.",
    )


def test_only_neighbours_are_merged() -> None:
    assert decided(COLD, WARM, COLD).action is None


def test_the_coldest_neighbours_are_merged() -> None:
    loads = (load(900, cold_for_s=LONG), load(500, cold_for_s=LONG), load(5, cold_for_s=LONG), load(9, cold_for_s=LONG))
    assert decided(*loads).action == Merge(SegmentId(2), SegmentId(3))


def test_neighbours_are_merged_in_the_order_of_the_ring_not_of_their_ids() -> None:
    layout = changed(Layout.initial(2), plan_split(Layout.initial(2), 0))
    found = decided(WARM, COLD, COLD, layout=layout)
    assert found.action == Merge(SegmentId(3), SegmentId(1))


def test_segments_are_merged_only_when_both_were_cold_for_the_whole_window() -> None:
    assert decided(COLD, load(10, cold_for_s=299)).action is None
    assert "cold since 299 s" in decided(COLD, load(10, cold_for_s=299)).reason


def test_a_segment_whose_load_is_not_known_is_neither_merged_nor_split() -> None:
    assert decided(COLD, None, COLD).action is None
    assert decided(None, consumers={"billing": 4}).action is None


def test_a_merge_rests_after_the_last_one() -> None:
    assert decided(COLD, COLD, merged_at=NOW - 299_000_000).action is None
    assert decided(COLD, COLD, merged_at=NOW - 300_000_000).action is not None


def test_a_topic_keeps_its_fewest_segments_and_one_for_each_consumer() -> None:
    kept = decided(COLD, COLD, policy=AutoScalePolicy(enabled=True, min_segments=2))
    assert (kept.action, "min_segments is 2" in kept.reason) == (None, True)
    used = decided(COLD, COLD, consumers={"billing": 2})
    assert (used.action, "a subscription has 2 consumers" in used.reason) == (None, True)


def test_a_split_goes_before_a_merge_also_while_it_rests() -> None:
    assert decided(COLD, COLD, HOT).action == Split(SegmentId(2), 0x1234)
    assert decided(COLD, COLD, HOT, split_at=NOW).action is None


def test_what_was_merged_too_often_is_not_merged_again() -> None:
    layout = Layout.initial(2)
    assert set(layout.merge_depths.values()) == {0}
    for turn in range(2):
        merged = changed(layout, plan_merge(layout, *(each.segment_id for each in layout.active)))
        layout = changed(merged, plan_split(merged, merged.active[0].segment_id))
        assert {layout.merge_depths[each.segment_id] for each in layout.active} == {turn + 1}
    policy = AutoScalePolicy(enabled=True, max_dag_depth=2)
    found = decided(COLD, COLD, layout=layout, policy=policy)
    assert (found.action, "2 merges made them" in found.reason) == (None, True)
    assert decided(COLD, COLD, layout=layout).action is not None


def test_a_merge_threshold_of_zero_never_merges() -> None:
    policy = AutoScalePolicy(enabled=True, merge_msg_rate_in_threshold=0)
    assert decided(load(cold_for_s=LONG), load(cold_for_s=LONG), policy=policy).action is None


# Policies.


def given(**settings: Any) -> StoredOverride:
    """An override as it is stored."""
    found: StoredOverride = msgspec.to_builtins(AutoScaleOverride(**settings))
    return found


def test_auto_scaling_is_off_by_default() -> None:
    assert AutoScalePolicy().enabled is False


def test_a_topic_wins_over_its_namespace_and_that_over_the_broker() -> None:
    broker = AutoScalePolicy(enabled=True, max_segments=32)
    namespace = given(max_segments=16, split_msg_rate_in_threshold=20_000)
    topic = given(max_segments=4, split_cooldown_seconds=5)
    found = auto_scale_policy(broker, namespace, topic)
    assert (found.enabled, found.max_segments, found.split_cooldown_seconds) == (True, 4, 5)
    assert (found.split_msg_rate_in_threshold, found.merge_cooldown_seconds) == (20_000, 300)
    assert auto_scale_policy(broker, None, None) == broker


@pytest.mark.parametrize(
    ("override", "wrong"),
    [
        (given(min_segments=10, max_segments=5), "min_segments is 10, above max_segments"),
        (given(min_segments=65), "min_segments is 65, above max_segments, which is 64"),
        (given(max_segments=1_025), "max_segments is 1025; it must be 1 to 1,024"),
        (given(split_msg_rate_in_threshold=0), "split_msg_rate_in_threshold is 0"),
        (given(split_cooldown_seconds=-1), "split_cooldown_seconds is -1"),
        (given(merge_msg_rate_in_threshold=5_001), "more than half of split_msg_rate_in_threshold"),
    ],
)
def test_a_combination_that_cannot_be_is_refused(override: StoredOverride, wrong: str) -> None:
    with pytest.raises(InvalidArgument, match=wrong):
        auto_scale_policy(AutoScalePolicy(), None, override)


def test_times_of_splits_and_merges_are_kept_with_the_topic_when_they_are_committed() -> None:
    topic = Topic(id=1, layout=Layout.initial(1))
    begun = topic.beginning(plan_split(topic.layout, 0), transition_id=1, created_at=5)
    assert (begun.split_at, begun.aborted().split_at) == (0, 0)
    split = begun.sealing().committed(at=7)
    assert (split.split_at, split.merged_at) == (7, 0)
    merged = split.beginning(plan_merge(split.layout, 1, 2), transition_id=2, created_at=8).sealing().committed(at=9)
    assert (merged.split_at, merged.merged_at) == (7, 9)
    assert Topic.from_json(merged.to_json()) == merged


def test_a_policy_of_another_build_is_kept_and_its_settings_are_ignored() -> None:
    topic = Topic(id=1, layout=Layout.initial(1), auto_scale={"maxSegments": 4, "fromTheFuture": {"a": 1}})
    assert Topic.from_json(topic.to_json()) == topic
    assert auto_scale_policy(AutoScalePolicy(), topic.auto_scale).max_segments == 4
    with pytest.raises(InvalidArgument, match="policy of auto-scaling is wrong"):
        auto_scale_policy(AutoScalePolicy(), {"maxSegments": "many"})
