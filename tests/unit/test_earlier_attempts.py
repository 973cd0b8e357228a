"""Where a repeat looks for what earlier attempts have stored: along the line of segments that its rows went through."""

from __future__ import annotations

import pytest

from braid.client.producing.earlier_attempts import FIRST, Lineage, Writer, begun_in
from braid.client.routing import TopicMap
from braid.model.batch.identity import NOT_KNOWN, derived_id
from braid.model.errors import RepeatTooLate
from braid.model.layout import Layout
from braid.wire.operations import SegmentRoute, TopicRoute
from tests.kits.layouts import merge, split

WRITER = Writer("app", 7, 3, 5, 2)


def topic_map(layout: Layout) -> TopicMap:
    segments = tuple(
        SegmentRoute(
            info.segment_id,
            info.hash_range.start,
            info.hash_range.end,
            info.is_active,
            info.parent_ids,
            info.child_ids,
            "broker:6660",
        )
        for info in layout.segments.values()
    )
    return TopicMap(1, TopicRoute("public/default/orders", 7, layout.epoch, segments, "", 2))


SPLIT = split(Layout.initial(2), 0)
"""0 became 2 and 3; 1 is as it was."""
MERGED = split(merge(SPLIT, 3, 1), 4)
"""3 and 1 became 4, which became 5 and 6."""


def test_a_writer_has_an_id_for_each_segment_and_one_for_those_of_the_first_layout() -> None:
    ids = [WRITER.id_in(segment) for segment in range(6)]
    assert ids[0] == ids[1] == derived_id("app", 7, 3)
    assert len(set(ids)) == 5


@pytest.mark.parametrize("segments", [1, 2, 3, 16, 1_024])
def test_blocks_without_keys_go_round_the_segments_of_the_first_layout_and_evenly_to_their_parts(segments: int) -> None:
    writer = Writer("app", 7, 3, 5, segments)
    layout = Layout.initial(segments)
    halves = {info.segment_id: [0, 0] for info in layout.active}
    for block in range(8 * segments):
        key_hash = writer.keyless_hash(block)
        info = layout.find_active(key_hash)
        assert info.segment_id == (writer.first_id + block) % segments
        halves[info.segment_id][key_hash >= info.hash_range.start + len(info.hash_range) // 2] += 1
    assert set(map(tuple, halves.values())) == {(4, 4)}


def test_the_ancestors_of_a_segment_are_asked_for_and_those_of_others_are_not() -> None:
    whole = Lineage(topic_map(MERGED), 5, 2)
    assert whole.ancestors == [0, 1, 3, 4]
    assert whole.is_whole
    assert whole.may_have_rows == [FIRST, 3, 4]
    assert Lineage(topic_map(MERGED), 2, 2).may_have_rows == [FIRST]


def test_all_that_have_left_the_layout_may_be_ancestors() -> None:
    half = Lineage(topic_map(MERGED.pruned(1)), 5, 2)
    assert not half.is_whole, "4 has one of its parents"
    assert half.may_have_rows == [FIRST, 3, 4]
    less = Lineage(topic_map(MERGED.pruned(1).pruned(0).pruned(3).pruned(4)), 5, 2)
    assert (less.ancestors, less.is_whole) == ([], False)
    assert less.may_have_rows == [FIRST, 3, 4]


def test_an_era_was_begun_where_it_is_the_last_one() -> None:
    topic = topic_map(MERGED)
    lineage = Lineage(topic, 5, 2)
    assert begun_in(topic, lineage, {FIRST: NOT_KNOWN, 3: 4, 4: NOT_KNOWN}, WRITER) == set()
    assert begun_in(topic, lineage, {FIRST: 4, 3: 5, 4: NOT_KNOWN}, WRITER) == {3}
    assert begun_in(topic, lineage, {FIRST: 5, 3: 4, 4: 5}, WRITER) == {0, 1, 4}


@pytest.mark.parametrize("eras", [{FIRST: 5}, {3: 5}])
def test_an_era_that_was_begun_where_nobody_can_be_asked_is_refused(eras: dict[int, int]) -> None:
    topic = topic_map(MERGED.pruned(1).pruned(0).pruned(3))
    with pytest.raises(RepeatTooLate, match="has left the layout"):
        begun_in(topic, Lineage(topic, 5, 2), eras, WRITER)
