"""A change of a topic's layout: some ACTIVE segments, the parents, are replaced by children that tile the same hashes.

Split, merge and repartition are three ways to plan one. A plan is pure and names only parents and ranges. When it is
written into the topic's record it becomes a transition: its children have ids, and it has a step. Decision 34 says who
does what in which step, and what a crash leaves.

    split        1 → 2, in the middle or at a given hash; or 1 → n
    merge        2 neighbours → 1
    repartition  k → n ranges of equal size; a segment that has such a range already stays as it is
    rollover     1 → 1: the segment ends, and a new one has its range
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum

from msgspec import Struct

from braid.model.errors import BraidError, InvalidArgument, SegmentNotFound, TransitionRefused, cut
from braid.model.ids import NO_REQUEST, LayoutEpoch, RequestId, SegmentId
from braid.model.layout import MAX_SEGMENTS, HashRange, Layout, SegmentInfo, equal_ranges
from braid.model.stored_record import StoredRecord


class TransitionStep(Enum):
    CREATING = "CREATING"
    """The children are placed, opened and given cursors. They take no publish yet. The transition may be aborted."""
    SEALING = "SEALING"
    """The parents' logs end, and the children inherit their producer tables. From here on there is only forward."""


class ChildSegment(StoredRecord, frozen=True, rename="camel"):
    segment_id: SegmentId
    hash_range: HashRange


class LayoutPlan(Struct, frozen=True):
    """A change of layout that could begin now."""

    parents: tuple[SegmentId, ...]
    ranges: tuple[HashRange, ...]
    """Of the children, in order."""


class TransitionKey(Struct, frozen=True):
    """Names one transition, and tells from a later layout whether it has happened: the ids of its children are never
    given out again."""

    id: int
    child_ids: tuple[SegmentId, ...]

    def is_committed(self, layout: Layout) -> bool:
        return not layout.segments.keys().isdisjoint(self.child_ids)


class Transition(StoredRecord, frozen=True, kw_only=True, rename="camel"):
    """A change of layout that has begun."""

    id: int
    """Random: tells it from every other transition of the topic."""
    parents: tuple[SegmentId, ...]
    children: tuple[ChildSegment, ...]
    step: TransitionStep = TransitionStep.CREATING
    created_at: int = 0
    """µs since 1970."""
    created_by: RequestId = NO_REQUEST
    """The call that began it: a repeat of that call recognises its own work."""

    @property
    def child_ids(self) -> tuple[SegmentId, ...]:
        return tuple(child.segment_id for child in self.children)

    @property
    def key(self) -> TransitionKey:
        return TransitionKey(self.id, self.child_ids)

    @property
    def ranges(self) -> dict[SegmentId, HashRange]:
        return {child.segment_id: child.hash_range for child in self.children}

    def is_planned_by(self, plan: Callable[[Layout], LayoutPlan], layout: Layout) -> bool:
        """Tell whether a plan asks for this change. The layout still has its parents as they were."""
        try:
            return plan(layout) == LayoutPlan(self.parents, tuple(self.ranges.values()))
        except BraidError:
            return False

    def pending(self, layout: Layout) -> dict[SegmentId, SegmentInfo]:
        """Return the children as they will stand in the layout."""
        return layout.children(self.parents, self.ranges)

    def applied(self, layout: Layout) -> Layout:
        return layout.replaced(self.parents, self.ranges)

    def mark(self, committed_at: int) -> CommittedTransition:
        return CommittedTransition(
            id=self.id,
            parents=self.parents,
            child_ids=self.child_ids,
            committed_at=committed_at,
            created_by=self.created_by,
        )


class CommittedTransition(StoredRecord, frozen=True, kw_only=True, rename="camel"):
    """The mark of a transition whose children are in the layout, until clients and subscriptions have left the parents.
    The revision of its key is the generation of routing that shows the new layout."""

    id: int
    parents: tuple[SegmentId, ...]
    child_ids: tuple[SegmentId, ...]
    committed_at: int
    """µs since 1970."""
    created_by: RequestId = NO_REQUEST


def plan_split(layout: Layout, segment_id: int, *, at: int | None = None, into: int = 2) -> LayoutPlan:
    """Plan to cut a segment: into equal parts, or in two, of which `at` is the second one's first hash."""
    segment = _active(layout, segment_id)
    hashes = segment.hash_range
    if at is not None:
        if into != 2:
            raise InvalidArgument(f"a split at one hash makes 2 segments, not {into}")
        if not hashes.start < at <= hashes.end:
            raise TransitionRefused(
                f"segment {segment_id} has the range {hashes} and cannot be split at {at:04x}: choose the first hash "
                f"of the upper part, {hashes.start + 1:04x} to {hashes.end:04x}"
                if len(hashes) > 1
                else f"segment {segment_id} has the single hash {hashes.start:04x} and cannot be split"
            )
        ranges = [HashRange(hashes.start, at - 1), HashRange(at, hashes.end)]
    else:
        if into < 2:
            raise InvalidArgument(f"a split makes 2 segments or more, not {into}")
        if into > len(hashes):
            raise TransitionRefused(
                f"segment {segment_id} has the range {hashes}, {len(hashes)} hashes: it cannot be split into {into}"
            )
        ranges = hashes.parts(into)
    return _checked(layout, LayoutPlan((segment.segment_id,), tuple(ranges)))


def plan_merge(layout: Layout, first: int, second: int) -> LayoutPlan:
    """Plan to join two neighbours."""
    lower, upper = sorted((_active(layout, first), _active(layout, second)), key=lambda each: each.hash_range)
    if lower.hash_range.end + 1 != upper.hash_range.start:
        raise TransitionRefused(
            f"segments {first} and {second} are no neighbours: their ranges are {lower.hash_range} and "
            f"{upper.hash_range}; only ranges that follow each other can be merged"
        )
    joined = HashRange(lower.hash_range.start, upper.hash_range.end)
    return _checked(layout, LayoutPlan((lower.segment_id, upper.segment_id), (joined,)))


def plan_rollover(layout: Layout, segment_id: int) -> LayoutPlan:
    """Plan to end a segment. Another one must have its range, or the ring would have a hole (I6)."""
    segment = _active(layout, segment_id)
    return LayoutPlan((segment.segment_id,), (segment.hash_range,))


def plan_repartition(layout: Layout, count: int) -> LayoutPlan:
    """Plan so many segments of equal size. Segments that have such a range already are left alone."""
    if not 1 <= count <= MAX_SEGMENTS:
        raise InvalidArgument(f"a topic cannot have {count} segments that take writes; choose 1 to {MAX_SEGMENTS}")
    wanted = equal_ranges(count)
    there = {segment.hash_range: segment.segment_id for segment in layout.active}
    ranges = tuple(hashes for hashes in wanted if hashes not in there)
    kept = {there[hashes] for hashes in wanted if hashes in there}
    parents = tuple(segment.segment_id for segment in layout.active if segment.segment_id not in kept)
    if not ranges:
        raise TransitionRefused(f"the topic has {count} segments of equal size already")
    return LayoutPlan(parents, ranges)


class FinishedChange(Struct, frozen=True):
    """A change that the layout shows."""

    epoch: LayoutEpoch
    """Of the layout that it made."""
    parents: tuple[SegmentId, ...]
    child_ids: tuple[SegmentId, ...]


def find_finished(
    layout: Layout, plan: Callable[[Layout], LayoutPlan], parents: Collection[int] = ()
) -> FinishedChange | None:
    """Find the change that this plan has made already: the one that ended these parents, or the newest one if the plan
    names no parents. A call that is repeated gets the answer of its first try.

    The plan is made once more, in the layout as it was before that change. None if it comes to something else now, or
    if the layout has dropped too much of that time."""
    if parents:
        epochs = [layout.segments[SegmentId(each)].sealed_at_epoch for each in parents if each in layout.segments]
    else:
        epochs = [each.created_at_epoch for each in layout.active]
    epoch = max(epochs, default=0)
    if not epoch:
        return None
    try:
        planned = plan(layout.before(LayoutEpoch(epoch)))
    except BraidError:
        return None
    ended = {each.segment_id for each in layout.segments.values() if each.sealed_at_epoch == epoch}
    made = {each.hash_range: each.segment_id for each in layout.segments.values() if each.created_at_epoch == epoch}
    if set(planned.parents) != ended or set(planned.ranges) != made.keys():
        return None
    return FinishedChange(LayoutEpoch(epoch), planned.parents, tuple(made[hashes] for hashes in planned.ranges))


def _active(layout: Layout, segment_id: int) -> SegmentInfo:
    segment = layout.segments.get(SegmentId(segment_id))
    if segment is None:
        active = ", ".join(str(each.segment_id) for each in layout.active)
        raise SegmentNotFound(f"the topic has no segment {segment_id}; those that take writes: {cut(active)}")
    if not segment.is_active:
        children = ", ".join(map(str, segment.child_ids))
        raise TransitionRefused(f"segment {segment_id} is sealed: its range has gone to {children}")
    return segment


def _checked(layout: Layout, plan: LayoutPlan) -> LayoutPlan:
    count = len(layout.active) - len(plan.parents) + len(plan.ranges)
    if count > MAX_SEGMENTS:
        raise TransitionRefused(
            f"the topic would have {count} segments that take writes; {MAX_SEGMENTS} are the most that it may have"
        )
    return plan
