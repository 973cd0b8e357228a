"""Layouts as splits and merges make them, written by hand."""

from __future__ import annotations

from collections.abc import Sequence

from braid.model.ids import SegmentId
from braid.model.layout import HashRange, Layout, SegmentInfo


def replaced(layout: Layout, parents: Sequence[SegmentInfo], ranges: Sequence[HashRange]) -> Layout:
    """The layout in which these neighbours have handed their ranges to children with the given ranges."""
    children = {SegmentId(layout.next_segment_id + turn): hashes for turn, hashes in enumerate(ranges)}
    return layout.with_ids_taken(len(ranges)).replaced([parent.segment_id for parent in parents], children)


def split(layout: Layout, segment: int, at: int | None = None) -> Layout:
    """Split a segment in two; the second child begins at the hash `at`, by default in the middle."""
    parent = layout.segment(segment)
    whole = parent.hash_range
    middle = (whole.start + whole.end + 1) // 2 if at is None else at
    return replaced(layout, [parent], [HashRange(whole.start, middle - 1), HashRange(middle, whole.end)])


def merge(layout: Layout, left: int, right: int) -> Layout:
    """Merge two neighbours, named from left to right."""
    parents = [layout.segment(left), layout.segment(right)]
    return replaced(layout, parents, [HashRange(parents[0].hash_range.start, parents[1].hash_range.end)])
