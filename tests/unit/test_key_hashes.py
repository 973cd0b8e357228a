"""What an answer about key hashes says of a segment: whether one key is the load, and where a split halves it."""

from __future__ import annotations

import pytest

from braid.broker.layouts.key_hashes import LEAST_PARTS, MOST_PARTS, SegmentKeyHashes, TopicKeyHashes, parts_of
from braid.model.ids import SegmentId
from braid.model.layout import FULL_RANGE, MAX_SEGMENTS, HashRange, Layout
from braid.model.load import KeyHashLoad
from braid.model.names import TopicName
from braid.model.topic import Topic
from braid.model.transition import plan_split

EVEN = KeyHashLoad(
    records=1_000,
    split_at=0x80,
    lower_share=0.52,
    upper_share=0.48,
    hottest=HashRange(0, 63),
    hottest_share=0.02,
    shares=(0.52, 0.48),
)
ONE_KEY = KeyHashLoad(
    records=1_000, split_at=0x80, lower_share=0.96, upper_share=0.04, hottest=HashRange(64, 127), hottest_share=0.95
)


def test_a_load_that_is_spread_has_a_hash_at_which_it_is_halved() -> None:
    found = SegmentKeyHashes.of(FULL_RANGE, 50, EVEN)
    assert (found.split_at, found.split_helps, found.hot_key) == ("0080", True, False)
    assert (found.lower_share, found.upper_share, found.shares) == (0.52, 0.48, (0.52, 0.48))


def test_one_key_that_is_the_load_is_told_and_no_split_helps() -> None:
    found = SegmentKeyHashes.of(FULL_RANGE, 50, ONE_KEY)
    assert (found.hot_key, found.split_helps, found.hottest) == (True, False, HashRange(64, 127))


def test_a_few_records_say_nothing() -> None:
    few = KeyHashLoad(records=99, split_at=0x80, lower_share=1.0, hottest=HashRange(64, 127), hottest_share=1.0)
    found = SegmentKeyHashes.of(FULL_RANGE, 50, few)
    assert (found.hot_key, found.split_helps, found.split_at) == (False, None, None)


def test_a_segment_of_one_hash_cannot_be_split() -> None:
    single = KeyHashLoad(records=1_000, hottest=HashRange(5, 5), hottest_share=1.0)
    assert SegmentKeyHashes.of(HashRange(5, 5), 50, single).split_helps is None


@pytest.mark.parametrize(
    ("segments", "parts"), [(0, MOST_PARTS), (1, MOST_PARTS), (3, 64), (8, 32), (MAX_SEGMENTS, LEAST_PARTS)]
)
def test_many_segments_have_fewer_parts_each(segments: int, parts: int) -> None:
    assert parts_of(segments) == parts


def test_only_segments_that_take_writes_and_were_measured_are_told() -> None:
    whole = Topic(id=1, layout=Layout.initial(1))
    split = whole.beginning(plan_split(whole.layout, 0), transition_id=7, created_at=0).sealing().committed()
    measured = {SegmentId(0): (50, EVEN), SegmentId(1): (50, EVEN), SegmentId(2): (10, None), SegmentId(9): (1, EVEN)}
    found = TopicKeyHashes.of(TopicName.parse("orders"), split.layout, measured, ["why"])
    assert ([*found.segments], found.unknown) == ([1], ("why",)), "0 is sealed, 2 was not measured, 9 is not there"
    assert found.segments[SegmentId(1)].hash_range == HashRange(0, 0x7FFF)
