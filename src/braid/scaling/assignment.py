"""Which consumer of an ordered subscription gets which segment.

A segment is assignable when *every* ancestor is drained: parents, their parents and so on, sealed ones too. So records
of one key reach consumers in order across any number of splits and merges (I4); looking at direct parents only is not
enough, because a drained parent may itself have been assigned before its own parent was drained, as after a seek.

The rule is PIP-468's: segments in order of their ranges, dealt out in turn to the consumers in order of their names.
Nothing but the arguments decides, so every broker, and the same broker after a restart, comes to the same result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from braid.model.ids import SegmentId
from braid.model.layout import Layout, SegmentInfo


def assignable(layout: Layout, drained: Collection[SegmentId]) -> tuple[SegmentInfo, ...]:
    """The segments that may be read now, in order of their ranges.

    `drained` has the sealed segments of which the subscription has consumed everything: these have nothing to give any
    more, and they free their children."""
    ready = [
        segment
        for segment in layout.segments.values()
        if segment.segment_id not in drained
        and all(ancestor in drained for ancestor in layout.ancestors(segment.segment_id))
    ]
    return tuple(sorted(ready, key=lambda segment: (segment.hash_range.start, segment.segment_id)))


def assign(
    layout: Layout, drained: Collection[SegmentId], consumers: Iterable[str]
) -> dict[str, tuple[SegmentId, ...]]:
    """Every consumer's segments, in order of their ranges. With more consumers than segments, some get none."""
    names = sorted(set(consumers))
    segments = [segment.segment_id for segment in assignable(layout, drained)]
    return {name: tuple(segments[turn :: len(names)]) for turn, name in enumerate(names)}
