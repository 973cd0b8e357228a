"""Who gets which segment: a table of layouts, and the rules over any of them."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from braid.model.ids import LayoutEpoch, SegmentId
from braid.model.layout import HashRange, Layout, SegmentInfo, SegmentState
from braid.scaling.assignment import assign, assignable

SEALED = SegmentState.SEALED


def info(segment: int, start: int, end: int, *, parents: tuple[int, ...] = (), children: tuple[int, ...] = (),
         created: int = 0, sealed: int = 0) -> SegmentInfo:  # fmt: skip
    return SegmentInfo(
        SegmentId(segment),
        HashRange(start, end),
        SEALED if children else SegmentState.ACTIVE,
        tuple(map(SegmentId, parents)),
        tuple(map(SegmentId, children)),
        LayoutEpoch(created),
        LayoutEpoch(sealed),
    )


def two_quick_splits() -> Layout:
    """0 was split into 1 and 2; then 1, before anybody had drained 0, into 3 and 4."""
    segments = [
        info(0, 0, 0xFFFF, children=(1, 2), sealed=1),
        info(1, 0, 0x7FFF, parents=(0,), children=(3, 4), created=1, sealed=2),
        info(2, 0x8000, 0xFFFF, parents=(0,), created=1),
        info(3, 0, 0x3FFF, parents=(1,), created=2),
        info(4, 0x4000, 0x7FFF, parents=(1,), created=2),
    ]
    return Layout(LayoutEpoch(2), SegmentId(5), {segment.segment_id: segment for segment in segments})


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
        active, epoch, new = layout.active, LayoutEpoch(layout.epoch + 1), layout.next_segment_id
        at = draw(st.integers(0, len(active) - 1))
        if len(active) > 1 and draw(st.booleans()):
            parents = [active[at - 1], active[at]] if at else [active[0], active[1]]
            ranges = [HashRange(parents[0].hash_range.start, parents[1].hash_range.end)]
        elif len(active[at].hash_range) > 1:
            parents, whole = [active[at]], active[at].hash_range
            middle = draw(st.integers(whole.start, whole.end - 1))
            ranges = [HashRange(whole.start, middle), HashRange(middle + 1, whole.end)]
        else:
            continue
        children = tuple(SegmentId(new + turn) for turn in range(len(ranges)))
        changed = {
            parent.segment_id: SegmentInfo(parent.segment_id, parent.hash_range, SEALED, parent.parent_ids, children,
                                           parent.created_at_epoch, epoch)
            for parent in parents
        }  # fmt: skip
        for child, its_range in zip(children, ranges):
            parent_ids = tuple(parent.segment_id for parent in parents)
            changed[child] = SegmentInfo(child, its_range, parent_ids=parent_ids, created_at_epoch=epoch)
        layout = Layout(epoch, SegmentId(new + len(ranges)), {**layout.segments, **changed})
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
