"""Who gets which segment: a table of layouts, and the rules over any of them."""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from braid.model.ids import SegmentId
from braid.model.layout import Layout
from braid.scaling.assignment import assign, assignable
from tests.kits.layouts import merge, split


def two_quick_splits() -> Layout:
    """0 was split into 1 and 2; then 1, before anybody had drained 0, into 3 and 4."""
    return split(split(Layout.initial(1), 0), 1)


def ids(layout: Layout, *drained: int) -> list[int]:
    return [segment.segment_id for segment in assignable(layout, set(map(SegmentId, drained)))]


def test_segments_go_round_the_consumers_by_name_in_order_of_their_ranges() -> None:
    layout = Layout.initial(5)
    assert assign(layout, (), ["b", "a"]) == {"a": (0, 2, 4), "b": (1, 3)}


def test_more_consumers_than_segments_leave_some_without_any() -> None:
    assert assign(Layout.initial(1), (), ["c", "b", "a"]) == {"a": (0,), "b": (), "c": ()}


def test_nobody_there_gets_nothing() -> None:
    assert assign(Layout.initial(3), (), []) == {}


def test_a_child_waits_for_every_ancestor_and_not_only_for_its_parent() -> None:
    """pulsar #26274: after two quick splits a sealed child is read beside its undrained parent."""
    layout = two_quick_splits()
    assert ids(layout) == [0]
    assert ids(layout, 0) == [1, 2]
    assert ids(layout, 0, 1) == [3, 4, 2]
    assert ids(layout, 1) == [0], "a seek backwards on 0 re-arms the gate, whatever 1 says"


def test_a_drained_segment_is_nobodys() -> None:
    assert assign(two_quick_splits(), {SegmentId(0), SegmentId(1)}, ["a", "b"]) == {"a": (3, 2), "b": (4,)}


@st.composite
def grown_layouts(draw: st.DrawFn) -> Layout:
    """Any layout that splits and merges can lead to."""
    layout = Layout.initial(draw(st.integers(1, 4)))
    for _ in range(draw(st.integers(0, 6))):
        active = layout.active
        at = draw(st.integers(0, len(active) - 1))
        if len(active) > 1 and draw(st.booleans()):
            left = max(at - 1, 0)
            layout = merge(layout, active[left].segment_id, active[left + 1].segment_id)
        elif len(active[at].hash_range) > 1:
            whole = active[at].hash_range
            layout = split(layout, active[at].segment_id, draw(st.integers(whole.start + 1, whole.end)))
    return layout


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, set[SegmentId], list[str]]:
    layout = draw(grown_layouts())
    sealed = sorted(segment.segment_id for segment in layout.segments.values() if not segment.is_active)
    drained = draw(st.sets(st.sampled_from(sealed))) if sealed else set()
    names = draw(st.lists(st.text("abcdef", min_size=1, max_size=2), unique=True, min_size=1, max_size=6))
    return layout, drained, names


@given(cases())
def test_every_assignable_segment_has_exactly_one_consumer_and_the_shares_are_even(
    case: tuple[Layout, set[SegmentId], list[str]],
) -> None:
    layout, drained, names = case
    result = assign(layout, drained, names)
    given_out = [segment for segments in result.values() for segment in segments]
    expected = [
        segment.segment_id
        for segment in layout.segments.values()
        if segment.segment_id not in drained and set(layout.ancestors(segment.segment_id)) <= drained
    ]
    assert sorted(given_out) == sorted(expected)
    assert set(result) == set(names)
    sizes = [len(segments) for segments in result.values()]
    assert max(sizes) - min(sizes) <= 1
    # I4: no key's records are read in two places at once.
    ranges = sorted(layout.segments[segment].hash_range for segment in given_out)
    assert all(left.end < right.start for left, right in pairwise(ranges))


@given(cases())
def test_the_order_in_which_consumers_are_named_changes_nothing(
    case: tuple[Layout, set[SegmentId], list[str]],
) -> None:
    layout, drained, names = case
    assert assign(layout, drained, names) == assign(layout, sorted(drained), [*reversed(names), *names])


@given(grown_layouts(), st.randoms(use_true_random=False))
def test_in_whatever_order_segments_are_drained_no_child_comes_before_an_ancestor(
    layout: Layout, luck: random.Random
) -> None:
    """Seeks set a segment back now and then. In the end every sealed segment was read, and the active ones are left."""
    drained: set[SegmentId] = set()
    for _ in range(4 * len(layout.segments)):
        ready = [segment.segment_id for segment in assignable(layout, drained)]
        for segment in ready:
            assert drained.issuperset(layout.ancestors(segment))
        if drained and luck.random() < 0.2:
            drained.discard(luck.choice(sorted(drained)))
        elif sealed := [segment for segment in ready if not layout.segments[segment].is_active]:
            drained.add(luck.choice(sealed))
    while left := [segment for segment in assignable(layout, drained) if not segment.is_active]:
        drained.add(luck.choice(left).segment_id)
    assert assignable(layout, drained) == layout.active
