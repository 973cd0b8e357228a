"""The layout of a topic: a DAG of segments, each an inclusive range of the 16-bit ring of key hashes.

The ranges of the ACTIVE segments tile the ring: every hash belongs to exactly one of them (I6). A SEALED segment has
handed its range to its children, in the change of layout that sealed it. A layout never changes; a transition makes a
new one with a higher epoch. Every new layout is checked as a whole, also when it comes from JSON: a layout in hand is
sound.

The JSON is PIP-468's:

    {"epoch": 1, "nextSegmentId": 3, "properties": {}, "segments": {
      "0": {"segmentId": 0, "hashRange": {"start": 0, "end": 65535}, "state": "SEALED", "parentIds": [],
            "childIds": [1, 2], "createdAtEpoch": 0, "sealedAtEpoch": 1}, …}}
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Final, TypeVar

import msgspec

from braid.model.errors import InvalidLayout
from braid.model.ids import LayoutEpoch, SegmentId
from braid.model.stored_record import StoredRecord, encode

LAST_HASH: Final = 0xFFFF
MAX_INITIAL_SEGMENTS: Final = 1_024
"""At some 160 bytes of JSON each, the layout stays far below the limit of a metadata value."""
MAX_SEGMENTS: Final = MAX_INITIAL_SEGMENTS
"""That take writes."""

_Id = TypeVar("_Id", bound=int)
Hash = Annotated[int, msgspec.Meta(extra_json_schema={"minimum": 0, "maximum": LAST_HASH})]
"""The limits are documentation; a `HashRange` checks them."""


class HashRange(StoredRecord, frozen=True):
    """The hashes `start` … `end`, both included. Integers only: halves of halves stay exact."""

    start: Hash
    end: Hash

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end <= LAST_HASH:
            raise InvalidLayout(f"{self.start} to {self.end} is no hash range: 0 <= start <= end <= {LAST_HASH}")

    def __lt__(self, other: HashRange) -> bool:
        return (self.start, self.end) < (other.start, other.end)

    def __contains__(self, key_hash: int) -> bool:
        return self.start <= key_hash <= self.end

    def __len__(self) -> int:
        return self.end - self.start + 1

    def __str__(self) -> str:
        return f"{self.start:04x}-{self.end:04x}"

    def overlap(self, other: HashRange) -> HashRange | None:
        start, end = max(self.start, other.start), min(self.end, other.end)
        return HashRange(start, end) if start <= end else None

    def parts(self, count: int) -> list[HashRange]:
        """Cut the range into parts of equal size, give or take one hash; the larger ones first."""
        if not 1 <= count <= len(self):
            raise InvalidLayout(f"the range {self} has {len(self)} hashes: it cannot be cut into {count} parts")
        size, larger = divmod(len(self), count)
        starts = [self.start + index * size + min(index, larger) for index in range(count + 1)]
        return [HashRange(start, end - 1) for start, end in pairwise(starts)]


FULL_RANGE: Final = HashRange(0, LAST_HASH)


def equal_ranges(count: int) -> list[HashRange]:
    """Return the ranges into which a topic of so many segments cuts the ring."""
    ring = LAST_HASH + 1
    starts = [index * ring // count for index in range(count + 1)]
    return [HashRange(start, end - 1) for start, end in pairwise(starts)]


def tiles(ranges: Sequence[HashRange], whole: HashRange) -> bool:
    """Tell whether the ranges, given in order of their starts, cover `whole` exactly: no gap, no overlap."""
    return (
        bool(ranges)
        and ranges[0].start == whole.start
        and ranges[-1].end == whole.end
        and all(left.end + 1 == right.start for left, right in pairwise(ranges))
    )


class SegmentState(Enum):
    ACTIVE = "ACTIVE"
    SEALED = "SEALED"


class SegmentInfo(StoredRecord, frozen=True, rename="camel"):
    segment_id: SegmentId
    hash_range: HashRange
    state: SegmentState = SegmentState.ACTIVE
    parent_ids: tuple[SegmentId, ...] = ()
    child_ids: tuple[SegmentId, ...] = ()
    created_at_epoch: LayoutEpoch = LayoutEpoch(0)
    sealed_at_epoch: LayoutEpoch = LayoutEpoch(0)
    """0 while ACTIVE. No segment is sealed at epoch 0, because sealing is a change of layout."""

    @property
    def is_active(self) -> bool:
        return self.state is SegmentState.ACTIVE


class Layout(StoredRecord, frozen=True, rename="camel", dict=True):
    epoch: LayoutEpoch
    next_segment_id: SegmentId
    segments: dict[SegmentId, SegmentInfo]
    properties: dict[str, str] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def initial(cls, segments: int = 1) -> Layout:
        """Lay out a new topic: `segments` ranges of equal size, give or take one hash."""
        if not 1 <= segments <= MAX_INITIAL_SEGMENTS:
            raise InvalidLayout(f"{segments} segments were asked for; a topic begins with 1 to {MAX_INITIAL_SEGMENTS}")
        infos = {
            SegmentId(index): SegmentInfo(SegmentId(index), hashes)
            for index, hashes in enumerate(equal_ranges(segments))
        }
        return cls(LayoutEpoch(0), SegmentId(segments), infos)

    @classmethod
    def from_json(cls, data: bytes | str) -> Layout:
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidLayout(f"the layout's JSON cannot be read: {error}") from error

    def to_json(self) -> bytes:
        return encode(self)

    @cached_property
    def active(self) -> tuple[SegmentInfo, ...]:
        """The writable segments, in order of their ranges."""
        return tuple(sorted(filter(lambda segment: segment.is_active, self.segments.values()), key=_start))

    @cached_property
    def _active_starts(self) -> list[int]:
        return [segment.hash_range.start for segment in self.active]

    def find_active(self, key_hash: int) -> SegmentInfo:
        """Return the one segment that takes writes of this hash."""
        if key_hash not in FULL_RANGE:
            raise InvalidLayout(f"{key_hash} is no key hash: hashes are 0 to {LAST_HASH}")
        return self.active[bisect_right(self._active_starts, key_hash) - 1]

    def segment(self, segment_id: int) -> SegmentInfo:
        try:
            return self.segments[SegmentId(segment_id)]
        except KeyError:
            known = ", ".join(map(str, sorted(self.segments)))
            raise InvalidLayout(
                f"there is no segment {segment_id} in the layout of epoch {self.epoch}: {known}"
            ) from None

    def ancestors(self, segment_id: int) -> tuple[SegmentId, ...]:
        """Parents, their parents and so on, in every generation that the layout still holds; lowest id first."""
        return tuple(
            sorted(reachable(self.segment(segment_id).parent_ids, lambda each: self.segments[each].parent_ids))
        )

    @cached_property
    def merge_depths(self) -> Mapping[SegmentId, int]:
        """How many segments of each line of ancestors were merged of others, at most, the segment itself included; as
        far as the layout still holds them."""
        depths: dict[SegmentId, int] = {}
        for segment in sorted(self.segments.values(), key=lambda each: each.created_at_epoch):  # Parents first.
            above = max((depths[parent] for parent in segment.parent_ids), default=0)
            depths[segment.segment_id] = above + (len(segment.parent_ids) > 1)
        return depths

    def lineage(self, segment_id: int) -> tuple[SegmentId, ...]:
        """The segment, its ancestors and its descendants: every segment that a key of its range may have been in, or
        is. Lowest id first."""
        later = reachable([SegmentId(segment_id)], lambda each: self.segment(each).child_ids)
        return tuple(sorted(later.union(self.ancestors(segment_id))))

    def with_ids_taken(self, count: int) -> Layout:
        """Reserve so many segment ids, from `next_segment_id` on. They are never given out again."""
        return msgspec.structs.replace(self, next_segment_id=SegmentId(self.next_segment_id + count))

    def replaced(self, parent_ids: Collection[SegmentId], ranges: Mapping[SegmentId, HashRange]) -> Layout:
        """Seal these parents, and let children of these ids and ranges take their place. The ids were reserved."""
        epoch = LayoutEpoch(self.epoch + 1)
        for child in ranges.keys() & self.segments.keys():
            raise InvalidLayout(f"segment {child} is in the layout already: it cannot take the place of another")
        children = self.children(parent_ids, ranges)
        by_parent: dict[SegmentId, list[SegmentId]] = {parent: [] for parent in parent_ids}
        for child, info in children.items():
            for parent in info.parent_ids:
                by_parent[parent].append(child)
        sealed = {
            parent: msgspec.structs.replace(
                self.segment(parent), state=SegmentState.SEALED, child_ids=tuple(child_ids), sealed_at_epoch=epoch
            )
            for parent, child_ids in by_parent.items()
        }
        return msgspec.structs.replace(self, epoch=epoch, segments={**self.segments, **sealed, **children})

    def children(
        self, parent_ids: Collection[SegmentId], ranges: Mapping[SegmentId, HashRange]
    ) -> dict[SegmentId, SegmentInfo]:
        """Return the segments that will take these ranges over from those of the parents that have them now."""
        parents = sorted((self.segment(parent) for parent in parent_ids), key=_start)
        starts = [parent.hash_range.start for parent in parents]
        ends = [parent.hash_range.end for parent in parents]
        epoch = LayoutEpoch(self.epoch + 1)
        found: dict[SegmentId, SegmentInfo] = {}
        for child, hashes in ranges.items():
            overlapping = parents[bisect_left(ends, hashes.start) : bisect_right(starts, hashes.end)]
            ids = tuple(sorted(parent.segment_id for parent in overlapping))
            found[child] = SegmentInfo(child, hashes, parent_ids=ids, created_at_epoch=epoch)
        return found

    def before(self, epoch: LayoutEpoch) -> Layout:
        """Return the layout as it was before the change that made this epoch. `InvalidLayout` if segments that took
        writes then have been dropped since."""
        earlier = (segment for segment in self.segments.values() if segment.created_at_epoch < epoch)
        segments = {
            segment.segment_id: msgspec.structs.replace(
                segment, state=SegmentState.ACTIVE, child_ids=(), sealed_at_epoch=LayoutEpoch(0)
            )
            if segment.sealed_at_epoch >= epoch
            else segment
            for segment in earlier
        }
        return msgspec.structs.replace(self, epoch=LayoutEpoch(epoch - 1), segments=segments)

    def pruned(self, segment_id: int) -> Layout:
        """Drop a sealed segment, whose records are gone. Its own parents must be gone before: of an older segment that
        is kept, every descendant is kept, so that the order of reading can be known."""
        segment = self.segment(segment_id)
        if segment.is_active or segment.parent_ids:
            why = "takes writes" if segment.is_active else f"has a parent that is kept: {segment.parent_ids[0]}"
            raise InvalidLayout(f"segment {segment_id} cannot be dropped from the layout: it {why}")
        segments = {key: info for key, info in self.segments.items() if key != segment_id}
        for child_id in segment.child_ids:
            child = segments[child_id]
            parents = tuple(parent for parent in child.parent_ids if parent != segment_id)
            segments[child_id] = msgspec.structs.replace(child, parent_ids=parents)
        return msgspec.structs.replace(self, epoch=LayoutEpoch(self.epoch + 1), segments=segments)


def reachable(first: Iterable[_Id], next_to: Callable[[_Id], Iterable[_Id]]) -> set[_Id]:
    """Return the segments to which parents, or children, lead from the first ones. The first ones are among them."""
    found = set(first)
    to_visit = [*found]
    while to_visit:
        new = set(next_to(to_visit.pop())) - found
        found |= new
        to_visit += new
    return found


def _start(segment: SegmentInfo) -> int:
    return segment.hash_range.start


def _check(layout: Layout) -> None:
    """Raise `InvalidLayout` unless the layout keeps every rule that others rely on."""
    if layout.epoch < 0:
        raise InvalidLayout(f"the layout's epoch is {layout.epoch}; epochs count from 0")
    for key, segment in layout.segments.items():
        _check_segment(layout, key, segment)
    for segment in layout.segments.values():
        _check_children(layout, segment)
        _check_parents(layout, segment)
    if not tiles([segment.hash_range for segment in layout.active], FULL_RANGE):
        ranges = ", ".join(str(segment.hash_range) for segment in layout.active) or "none"
        raise InvalidLayout(f"I6: the active ranges must tile {FULL_RANGE} exactly, they are {ranges}")


def _check_segment(layout: Layout, key: SegmentId, segment: SegmentInfo) -> None:
    if key != segment.segment_id or not 0 <= key < layout.next_segment_id:
        raise InvalidLayout(
            f"segment {segment.segment_id} stands under the key {key}; its key must be its id, "
            f"and ids are 0 to {layout.next_segment_id - 1} here"
        )
    if not 0 <= segment.created_at_epoch <= layout.epoch:
        raise InvalidLayout(f"segment {key} was created at epoch {segment.created_at_epoch} of {layout.epoch}")
    if segment.is_active:
        if segment.child_ids or segment.sealed_at_epoch:
            raise InvalidLayout(f"segment {key} is active, yet it has children or the epoch of a seal")
    elif not segment.child_ids or not segment.created_at_epoch < segment.sealed_at_epoch <= layout.epoch:
        raise InvalidLayout(
            f"segment {key} is sealed at epoch {segment.sealed_at_epoch}, with {len(segment.child_ids)} children; it "
            f"needs children, and an epoch after its creation ({segment.created_at_epoch}) up to now ({layout.epoch})"
        )


def _check_children(layout: Layout, parent: SegmentInfo) -> None:
    """A parent's range is handed on whole, to segments that the sealing change created."""
    if parent.is_active:
        return
    inherited = []
    for child_id in parent.child_ids:
        child = layout.segments.get(child_id)
        if child is None or parent.segment_id not in child.parent_ids:
            raise InvalidLayout(f"segment {parent.segment_id} names {child_id} as its child, which does not agree")
        if child.created_at_epoch != parent.sealed_at_epoch:
            raise InvalidLayout(
                f"segment {parent.segment_id} was sealed at epoch {parent.sealed_at_epoch}, "
                f"its child {child_id} created at {child.created_at_epoch}; one change does both"
            )
        shared = parent.hash_range.overlap(child.hash_range)
        if shared is not None:
            inherited.append(shared)
    if len(inherited) != len(parent.child_ids) or not tiles(sorted(inherited), parent.hash_range):
        raise InvalidLayout(f"the children of segment {parent.segment_id} do not tile its range {parent.hash_range}")


def _check_parents(layout: Layout, child: SegmentInfo) -> None:
    for parent_id in child.parent_ids:
        parent = layout.segments.get(parent_id)
        if parent is None or child.segment_id not in parent.child_ids:
            raise InvalidLayout(f"segment {child.segment_id} names {parent_id} as its parent, which does not agree")
