"""What a split, a merge and a repartition replace by what, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from braid.model.errors import BrokenInvariant, InvalidArgument, InvalidLayout, SegmentNotFound, TransitionRefused
from braid.model.ids import SegmentId
from braid.model.layout import FULL_RANGE, MAX_SEGMENTS, HashRange, Layout, tiles
from braid.model.topic import Topic
from braid.model.transition import (
    LayoutPlan,
    TransitionStep,
    find_finished,
    plan_merge,
    plan_repartition,
    plan_rollover,
    plan_split,
)


def ranges(plan: LayoutPlan) -> list[str]:
    return [str(hashes) for hashes in plan.ranges]


def begun(plan: LayoutPlan, topic: Topic) -> Topic:
    return topic.beginning(plan, transition_id=7, created_at=0)


def after(plan: LayoutPlan, layout: Layout) -> Layout:
    return begun(plan, Topic(id=1, layout=layout)).sealing().committed().layout


def test_a_split_is_at_the_middle() -> None:
    plan = plan_split(Layout.initial(1), 0)
    assert (plan.parents, ranges(plan)) == ((0,), ["0000-7fff", "8000-ffff"])


def test_a_split_of_an_odd_range_gives_the_lower_half_one_hash_more() -> None:
    layout = after(plan_split(Layout.initial(1), 0, at=3), Layout.initial(1))
    assert ranges(plan_split(layout, 1)) == ["0000-0001", "0002-0002"]


def test_a_split_at_a_hash_gives_that_hash_to_the_upper_part() -> None:
    assert ranges(plan_split(Layout.initial(1), 0, at=0x4000)) == ["0000-3fff", "4000-ffff"]
    assert ranges(plan_split(Layout.initial(1), 0, at=0xFFFF)) == ["0000-fffe", "ffff-ffff"]


def test_a_split_into_several_parts_makes_them_equal() -> None:
    assert ranges(plan_split(Layout.initial(1), 0, into=3)) == ["0000-5555", "5556-aaaa", "aaab-ffff"]


def test_a_merge_takes_neighbours_in_either_order() -> None:
    plan = plan_merge(Layout.initial(4), 2, 1)
    assert (plan.parents, ranges(plan)) == ((1, 2), ["4000-bfff"])


def test_a_repartition_leaves_segments_alone_that_have_the_right_range() -> None:
    plan = plan_repartition(after(plan_split(Layout.initial(2), 1), Layout.initial(2)), 2)
    assert (plan.parents, ranges(plan)) == ((2, 3), ["8000-ffff"])


def test_a_repartition_from_four_to_seven_cuts_across_the_old_ranges() -> None:
    layout = after(plan_repartition(Layout.initial(4), 7), Layout.initial(4))
    assert len(layout.active) == 7
    parents = {segment.segment_id: segment.parent_ids for segment in layout.active}
    assert parents == {4: (0,), 5: (0, 1), 6: (1,), 7: (1, 2), 8: (2,), 9: (2, 3), 10: (3,)}
    assert layout.segment(1).child_ids == (5, 6, 7)


ONE_HASH = after(plan_split(Layout.initial(1), 0, at=1), Layout.initial(1))
SPLIT = after(plan_split(Layout.initial(1), 0), Layout.initial(1))


@pytest.mark.parametrize(
    ("plan", "error", "words"),
    [
        (lambda: plan_split(SPLIT, 9), SegmentNotFound, "no segment 9; those that take writes: 1, 2"),
        (lambda: plan_split(SPLIT, 0), TransitionRefused, "segment 0 is sealed: its range has gone to 1, 2"),
        (lambda: plan_split(ONE_HASH, 1), TransitionRefused, "1 hashes: it cannot be split into 2"),
        (lambda: plan_split(ONE_HASH, 1, at=0), TransitionRefused, "single hash 0000"),
        (lambda: plan_split(SPLIT, 1, at=0), TransitionRefused, "0001 to 7fff"),
        (lambda: plan_split(SPLIT, 1, at=0x8000), TransitionRefused, "cannot be split at 8000"),
        (lambda: plan_split(SPLIT, 1, into=1), InvalidArgument, "2 segments or more"),
        (lambda: plan_split(SPLIT, 1, at=5, into=3), InvalidArgument, "makes 2 segments, not 3"),
        (lambda: plan_split(Layout.initial(1), 0, into=MAX_SEGMENTS + 1), TransitionRefused, "1025 segments"),
        (lambda: plan_merge(Layout.initial(4), 0, 2), TransitionRefused, "no neighbours"),
        (lambda: plan_merge(Layout.initial(4), 3, 0), TransitionRefused, "no neighbours"),
        (lambda: plan_merge(Layout.initial(4), 1, 1), TransitionRefused, "no neighbours"),
        (lambda: plan_merge(SPLIT, 0, 1), TransitionRefused, "segment 0 is sealed"),
        (lambda: plan_merge(SPLIT, 1, 9), SegmentNotFound, "no segment 9"),
        (lambda: plan_repartition(SPLIT, 0), InvalidArgument, "choose 1 to 1024"),
        (lambda: plan_repartition(SPLIT, 70_000), InvalidArgument, "choose 1 to 1024"),
        (lambda: plan_repartition(SPLIT, 2), TransitionRefused, "2 segments of equal size already"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(plan: object, error: type[Exception], words: str) -> None:
    assert callable(plan)
    with pytest.raises(error, match=words):
        plan()


def test_the_topic_has_the_children_before_its_layout_does() -> None:
    topic = begun(plan_split(Layout.initial(1), 0), Topic(id=1, layout=Layout.initial(1)))
    assert sorted(topic.layout.segments) == [0]
    assert sorted(topic.segments) == [0, 1, 2]
    assert topic.segments[SegmentId(1)].parent_ids == (0,)
    assert topic.transition is not None
    assert topic.transition.step is TransitionStep.CREATING
    assert Topic.from_json(topic.to_json()) == topic


def test_ids_of_an_aborted_transition_are_never_used_again() -> None:
    topic = begun(plan_split(Layout.initial(1), 0), Topic(id=1, layout=Layout.initial(1))).aborted()
    assert sorted(topic.segments) == [0]
    again = begun(plan_split(topic.layout, 0), topic)
    assert sorted(again.segments) == [0, 3, 4]


def test_a_transition_whose_parents_end_cannot_be_aborted() -> None:
    topic = begun(plan_split(Layout.initial(1), 0), Topic(id=1, layout=Layout.initial(1))).sealing()
    with pytest.raises(BrokenInvariant, match="cannot be aborted"):
        topic.aborted()
    with pytest.raises(BrokenInvariant, match="without a transition"):
        topic.committed().sealing()


def test_the_committed_layout_is_the_json_of_the_seed() -> None:
    data = json.loads(SPLIT.to_json())
    assert data == {
        "epoch": 1,
        "nextSegmentId": 3,
        "properties": {},
        "segments": {
            "0": {
                "segmentId": 0, "hashRange": {"start": 0, "end": 65535}, "state": "SEALED", "parentIds": [],
                "childIds": [1, 2], "createdAtEpoch": 0, "sealedAtEpoch": 1,
            },
            "1": {
                "segmentId": 1, "hashRange": {"start": 0, "end": 32767}, "state": "ACTIVE", "parentIds": [0],
                "childIds": [], "createdAtEpoch": 1, "sealedAtEpoch": 0,
            },
            "2": {
                "segmentId": 2, "hashRange": {"start": 32768, "end": 65535}, "state": "ACTIVE", "parentIds": [0],
                "childIds": [], "createdAtEpoch": 1, "sealedAtEpoch": 0,
            },
        },
    }  # fmt: skip


def test_only_sealed_segments_without_parents_are_pruned() -> None:
    layout = after(plan_split(SPLIT, 1), SPLIT)
    for segment, why in ((2, "takes writes"), (1, "has a parent that is kept: 0")):
        with pytest.raises(InvalidLayout, match=why):
            layout.pruned(segment)
    pruned = layout.pruned(0).pruned(1)
    assert sorted(pruned.segments) == [2, 3, 4]
    assert pruned.ancestors(3) == ()
    assert (pruned.epoch, pruned.next_segment_id) == (layout.epoch + 2, layout.next_segment_id)


def test_lineage_reaches_both_ways() -> None:
    layout = after(plan_split(SPLIT, 1), SPLIT)
    assert layout.lineage(1) == (0, 1, 3, 4)
    assert layout.lineage(2) == (0, 2)
    assert layout.lineage(0) == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100])
def test_parts_of_a_range_tile_it(count: int) -> None:
    parts = HashRange(3, 1000).parts(count)
    assert tiles(parts, HashRange(3, 1000))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    with pytest.raises(InvalidLayout):
        HashRange(5, 6).parts(3)
    assert FULL_RANGE.parts(2)[1].start == 0x8000


def changed(layout: Layout, *plans: Callable[[Layout], LayoutPlan]) -> Layout:
    for plan in plans:
        layout = after(plan(layout), layout)
    return layout


def split(segment: int, **how: int) -> Callable[[Layout], LayoutPlan]:
    return lambda layout: plan_split(layout, segment, **how)


def merge(first: int, second: int) -> Callable[[Layout], LayoutPlan]:
    return lambda layout: plan_merge(layout, first, second)


def repartition(count: int) -> Callable[[Layout], LayoutPlan]:
    return lambda layout: plan_repartition(layout, count)


FOUR = Layout.initial(4)
OFTEN = changed(FOUR, split(0), merge(2, 1), split(4, at=0x800), lambda layout: plan_rollover(layout, 6))
"""0 → 4, 5; 1 and 2 → 6; 4 → 7, 8; 6 → 9."""


@pytest.mark.parametrize(
    ("plan", "named", "answer"),
    [
        (split(0), [0], (1, (0,), (4, 5))),
        (merge(1, 2), [1, 2], (2, (1, 2), (6,))),
        (merge(2, 1), [2, 1], (2, (1, 2), (6,))),
        (split(4, at=0x800), [4], (3, (4,), (7, 8))),
        (lambda layout: plan_rollover(layout, 6), [6], (4, (6,), (9,))),
    ],
)
def test_a_change_that_was_made_is_found_however_many_came_later(
    plan: Callable[[Layout], LayoutPlan], named: list[int], answer: object
) -> None:
    found = find_finished(OFTEN, plan, named)
    assert found is not None
    assert (found.epoch, found.parents, found.child_ids) == answer


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        (split(0, at=0x1000), [0]),
        (split(0, into=3), [0]),
        (split(4), [4]),
        (split(6), [6]),
        (lambda layout: plan_rollover(layout, 4), [4]),
        (merge(0, 1), [0, 1]),
        (merge(4, 5), [4, 5]),
        (split(9), [9]),
        (split(99), [99]),
    ],
)
def test_another_change_of_the_same_segments_was_not_made(
    plan: Callable[[Layout], LayoutPlan], named: list[int]
) -> None:
    assert find_finished(OFTEN, plan, named) is None


def test_the_newest_change_is_the_one_that_a_repartition_finds() -> None:
    layout = changed(FOUR, repartition(7), repartition(2), repartition(7))
    found = find_finished(layout, repartition(7))
    assert found is not None
    assert (found.epoch, found.parents, len(found.child_ids)) == (3, (11, 12), 7)
    assert find_finished(layout, repartition(2)) is None
    assert find_finished(FOUR, repartition(4)) is None, "nothing was changed"
    assert find_finished(changed(layout, split(13)), repartition(7)) is None


def test_a_change_whose_parents_have_left_the_layout_is_not_found() -> None:
    assert find_finished(OFTEN.pruned(0), split(0), [0]) is None
    assert find_finished(OFTEN.pruned(0).pruned(4), split(4, at=0x800), [4]) is None
