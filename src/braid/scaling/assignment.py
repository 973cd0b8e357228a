"""Which consumer of an ordered subscription gets which segment.

A segment is assignable when *every* ancestor is drained: parents, their parents and so on, sealed ones too. So records
of one key reach consumers in order across any number of splits and merges (I4). Looking at direct parents only is not
enough: after a seek, a drained parent may have a parent that is to be read again.

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
    ready: list[SegmentInfo] = []
    done: set[SegmentId] = set()  # Drained, and so is every ancestor.
    for segment in sorted(layout.segments.values(), key=lambda segment: segment.created_at_epoch):  # Parents first.
        if done.issuperset(segment.parent_ids):
            if segment.segment_id in drained:
                done.add(segment.segment_id)
            else:
                ready.append(segment)
    return tuple(sorted(ready, key=lambda segment: (segment.hash_range.start, segment.segment_id)))


def assign(
    layout: Layout, drained: Collection[SegmentId], consumers: Iterable[str]
) -> dict[str, tuple[SegmentId, ...]]:
    """Every consumer's segments, in order of their ranges. With more consumers than segments, some get none."""
    names = sorted(set(consumers))
    segments = [segment.segment_id for segment in assignable(layout, drained)]
    return {name: tuple(segments[turn :: len(names)]) for turn, name in enumerate(names)}
