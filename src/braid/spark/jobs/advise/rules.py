"""Which splits and merges would even the load of a topic: a pure function of its layout and its measured load.

**Load** is the input of a segment's log: bytes of keys and values, and `RECORD_BYTES` for each record. It is measured
by cells of the ring of key hashes and by buckets of time:

            hash 0000        4000        8000        c000      ffff
    10:00      ├─────2─────┼──3──┼──3──┼────1─────┼────1────┤           a segment is a run of cells; its load is
    11:00      ├─────2─────┼─30──┼──9──┼────1─────┼────1────┤           the highest of its buckets' sums: a mean
    12:00      ├─────1─────┼──2──┼──2──┼────1─────┼────0────┤           would hide the hour that hurts

**The even share** is the load of the topic's highest bucket, divided by the number of segments wanted (`target`). One
segment may carry `TOLERANCE` times that; this is its capacity. Then:

1. *Splits.* The segment furthest above its capacity is split where the least load stays above it. This repeats until no
   segment is above its capacity, or a split is not worth it (`WORTH`): then one hash has the load.
2. *Merges.* The neighbours with the least load are merged if together they are cold (`COLD`). While there are more
   segments than wanted, they are also merged if together they are near the even share. A merged segment is never above
   its capacity.
3. *Hot keys.* The advice names a key above half a capacity: no split can divide a key.

Tests check the consequences: the ranges go on tiling the ring; the highest load never rises, except towards the even
share when fewer segments are wanted than there are; and following the advice leads to no other advice.

Records without a key go to the segments in turn, so each segment has the same part of them: `unkeyed / target`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from braid.model.layout import FULL_RANGE, LAST_HASH, HashRange, tiles
from braid.spark.jobs.report import JobReport

if TYPE_CHECKING:
    import numpy.typing as npt

    Loads = npt.NDArray[np.int64]

RECORD_BYTES: Final = 18
"""The cost of a record besides its key and value: two offsets, a timestamp and a hash."""
TOLERANCE: Final = 1.5
"""Loads are never quite even, and each change of layout has its price."""
COLD: Final = 0.5
NEAR: Final = 1.25
"""Below TOLERANCE, so that a merged segment is not split again."""
WORTH: Final = 0.1
"""A split must remove at least this much load, in capacities, or all that is above the capacity."""
MAX_GROWTH: Final = 4
"""More and more segments do not cure a hot range that wanders over the ring from hour to hour."""
MIN_RECORDS: Final = 1_000
"""Fewer records say nothing about the next ones."""


class ActiveSegment(msgspec.Struct, frozen=True):
    """An active segment."""

    id: int
    range: HashRange


class LoadHistogram(msgspec.Struct, frozen=True, eq=False):
    """Load by cell of the ring and by bucket of time."""

    bucket_s: int
    times: tuple[int, ...]
    """When each bucket begins, in seconds since 1970."""
    starts: Loads
    """The first hash of each cell, from 0 on; a cell ends where the next one begins."""
    loads: Loads
    """[cell, bucket]"""
    unkeyed: Loads
    """[bucket]: of records without a key."""
    records: int


class KeyLoad(JobReport, frozen=True):
    key: str
    """Bytes that are not UTF-8 are escaped."""
    key_hash: int
    records: int
    load: int
    """In all buckets together."""
    peak_load: int
    """In its highest bucket."""


class Policy(msgspec.Struct, frozen=True):
    target: int
    """How many segments are wanted; the even share is one part of so many."""


class SegmentShare(JobReport, frozen=True):
    segment_id: int
    hash_range: HashRange
    peak_load: int
    """In its highest bucket."""
    share: float
    """Of all the load of the topic, over all the time."""
    evenness: float
    """Its peak in even shares: 1 is even, above TOLERANCE is hot."""


class Split(JobReport, frozen=True, tag="split", tag_field="action"):
    segment_id: int
    at: str
    """The first hash of the upper half, in four hex digits."""
    child_ids: tuple[int, int]
    """The ids that the halves will have, if nothing else changes the layout."""


class Merge(JobReport, frozen=True, tag="merge", tag_field="action"):
    segment_ids: tuple[int, int]
    child_id: int


class HotKey(JobReport, frozen=True):
    key: str
    key_hash: int
    segment_id: int
    share: float
    """Of all the load of the topic."""
    of_capacity: float
    """Its peak, in capacities of a segment."""


class Advice(JobReport, frozen=True):
    statement: str
    target: int
    even_share: int
    """Bytes in one bucket."""
    capacity: int
    actions: tuple[Split | Merge, ...]
    """In the order in which to run them."""
    hot_keys: tuple[HotKey, ...]
    before: tuple[SegmentShare, ...]
    after: tuple[SegmentShare, ...]


def advise(
    layout: Sequence[ActiveSegment], histogram: LoadHistogram, top_keys: Sequence[KeyLoad], policy: Policy
) -> Advice:
    """Advise splits and merges. `layout` has the active segments in order of their ranges; cells must begin where
    segments begin."""
    assert tiles([segment.range for segment in layout], FULL_RANGE), "I6"
    ring = _Ring(histogram, policy.target)
    plan = _Plan(ring, layout, policy.target)
    before = plan.loads()
    hot_keys: tuple[HotKey, ...] = ()
    if histogram.records >= MIN_RECORDS:
        plan.split_what_is_hot()
        plan.merge_what_is_cold()
        hot_keys = _hot_keys(ring, layout, top_keys)
    after = plan.loads()
    return Advice(
        statement=_statement(histogram.records, plan, before, after),
        target=policy.target,
        even_share=round(ring.even_share),
        capacity=round(ring.capacity),
        actions=tuple(plan.actions),
        hot_keys=hot_keys,
        before=before,
        after=after,
    )


def followed(before: Sequence[SegmentShare], actions: Sequence[Split | Merge]) -> dict[int, HashRange]:
    """Return the active segments after these actions, and their ranges."""
    ranges = {each.segment_id: each.hash_range for each in before}
    for action in actions:
        if isinstance(action, Split):
            old, at = ranges.pop(action.segment_id), int(action.at, 16)
            ranges[action.child_ids[0]] = HashRange(old.start, at - 1)
            ranges[action.child_ids[1]] = HashRange(at, old.end)
        else:
            left, right = (ranges.pop(number) for number in action.segment_ids)
            ranges[action.child_id] = HashRange(left.start, right.end)
    return ranges


class _Ring:
    """The measured load as running sums, so that the load of any run of cells is a subtraction."""

    def __init__(self, histogram: LoadHistogram, target: int) -> None:
        buckets = max(1, len(histogram.times))
        self.edges = np.append(histogram.starts, LAST_HASH + 1)
        keyed = histogram.loads.reshape(len(histogram.starts), -1)
        self.below = np.zeros((len(keyed) + 1, buckets), np.int64)
        """[edge, bucket]: the load of all hashes below the edge."""
        self.everywhere = np.zeros(buckets, np.int64)
        """[bucket]: of records without a key, in each segment."""
        if histogram.times:
            np.cumsum(keyed, axis=0, out=self.below[1:])
            self.everywhere = -(-histogram.unkeyed // target)
        self.total = int(self.below[-1].sum() + histogram.unkeyed.sum())
        highest = int((self.below[-1] + (histogram.unkeyed if histogram.times else 0)).max())
        self.even_share = highest / target
        self.capacity = TOLERANCE * self.even_share

    def edge(self, first_hash: int) -> int:
        """Return the number of the edge at this hash."""
        found = int(np.searchsorted(self.edges, first_hash))
        assert self.edges[found] == first_hash, f"no cell begins at {first_hash:04x}"
        return found

    def peak(self, hashes: HashRange) -> int:
        first, end = self.edge(hashes.start), self.edge(hashes.end + 1)
        return int((self.below[end] - self.below[first] + self.everywhere).max())

    def share(self, hashes: HashRange) -> float:
        first, end = self.edge(hashes.start), self.edge(hashes.end + 1)
        load = int((self.below[end] - self.below[first] + self.everywhere).sum())
        return load / self.total if self.total else 0.0

    def best_split(self, hashes: HashRange) -> int | None:
        """Find the split that leaves the least load above the capacity, in all buckets together; None if no split is
        worth it.

        One split does not always lower the highest bucket: if the morning is hot in one part of the range and the
        evening in another, only the second split does. So all buckets count. Among equals, the most even halves win.
        """
        first, end = self.edge(hashes.start), self.edge(hashes.end + 1)
        if end - first < 2:
            return None
        inside = self.below[first + 1 : end]
        lower = inside - self.below[first] + self.everywhere
        upper = self.below[end] - inside + self.everywhere
        left = self._excess(lower) + self._excess(upper)
        least = left.min()
        gain = self._excess(self.below[end] - self.below[first] + self.everywhere) - least
        if gain <= 0 or (gain < WORTH * self.capacity and least > 0):
            return None
        higher = np.maximum(lower.max(axis=1), upper.max(axis=1))
        higher = np.where(left == least, higher, higher.max() + 1)
        best = np.flatnonzero(higher == higher.min())
        return int(self.edges[first + 1 + int(best[len(best) // 2])])

    def _excess(self, loads: Loads) -> Any:
        return np.maximum(loads - int(self.capacity), 0).sum(axis=-1)


class _Plan:
    """The layout as it changes, action by action."""

    def __init__(self, ring: _Ring, layout: Sequence[ActiveSegment], target: int) -> None:
        self.ring = ring
        self.target = target
        self.segments = list(layout)
        self.actions: list[Split | Merge] = []
        self.most = max(len(layout), MAX_GROWTH * target)
        self.is_full = False
        """Whether a helpful split was left out because of `most`."""
        self.next_id = max(segment.id for segment in layout) + 1
        self.highest = max(ring.peak(segment.range) for segment in layout)

    def split_what_is_hot(self) -> None:
        stuck: set[int] = set()
        while True:
            peaks = {index: self.ring.peak(segment.range) for index, segment in enumerate(self.segments)}
            hot = [index for index, peak in peaks.items() if peak > self.ring.capacity]
            hot = [index for index in hot if self.segments[index].id not in stuck]
            if not hot:
                return
            index = max(hot, key=peaks.__getitem__)
            segment = self.segments[index]
            at = self.ring.best_split(segment.range)
            if at is None:
                stuck.add(segment.id)
            elif len(self.segments) >= self.most:
                self.is_full = True
                return
            else:
                lower = self._new(HashRange(segment.range.start, at - 1))
                upper = self._new(HashRange(at, segment.range.end))
                self.segments[index : index + 1] = [lower, upper]
                self.actions.append(Split(segment.id, f"{at:04x}", (lower.id, upper.id)))

    def merge_what_is_cold(self) -> None:
        # Merging makes room for the splits that did not fit, and these would call for merges again, for ever.
        while not self.is_full and len(self.segments) > 1:
            merged = [HashRange(left.range.start, right.range.end) for left, right in pairwise(self.segments)]
            peaks = [self.ring.peak(each) for each in merged]
            index = min(range(len(peaks)), key=peaks.__getitem__)
            if peaks[index] > self._merge_limit():
                return
            left, right = self.segments[index : index + 2]
            child = self._new(merged[index])
            self.segments[index : index + 2] = [child]
            self.actions.append(Merge((left.id, right.id), child.id))

    def _merge_limit(self) -> float:
        even = self.ring.even_share
        if len(self.segments) <= self.target:
            return COLD * even
        return max(even, min(NEAR * even, self.highest))

    def _new(self, hashes: HashRange) -> ActiveSegment:
        self.next_id += 1
        return ActiveSegment(self.next_id - 1, hashes)

    def loads(self) -> tuple[SegmentShare, ...]:
        even = self.ring.even_share
        found = []
        for segment in self.segments:
            peak = self.ring.peak(segment.range)
            share = self.ring.share(segment.range)
            found.append(SegmentShare(segment.id, segment.range, peak, share, peak / even if even else 0.0))
        return tuple(found)


def _hot_keys(ring: _Ring, layout: Sequence[ActiveSegment], keys: Sequence[KeyLoad]) -> tuple[HotKey, ...]:
    found = []
    for key in sorted(keys, key=lambda each: (-each.peak_load, each.key)):
        if key.peak_load > ring.capacity / 2:
            (segment,) = (each for each in layout if key.key_hash in each.range)
            share, capacities = key.load / ring.total, key.peak_load / ring.capacity
            found.append(HotKey(key.key, key.key_hash, segment.id, share, capacities))
    return tuple(found)


def _statement(records: int, plan: _Plan, before: Sequence[SegmentShare], after: Sequence[SegmentShare]) -> str:
    if records < MIN_RECORDS:
        return f"{records:,} records are too few to advise anything; at least {MIN_RECORDS:,} are needed."
    then, now = (max(each.evenness for each in loads) for loads in (before, after))
    splits = sum(isinstance(action, Split) for action in plan.actions)
    merges = len(plan.actions) - splits
    if not plan.actions and now <= TOLERANCE:
        return (
            f"Nothing to do: the busiest segment carries {now:.2f} times its even share, and {TOLERANCE} times is fine."
        )
    if plan.is_full:
        why = f"its load wanders over the ring, and following it would take more than {plan.most} segments"
    else:
        why = "what is above sits on too few key hashes to be divided"
    if not plan.actions:
        return f"No split or merge would help: the busiest segment carries {now:.2f} times its even share, and {why}."
    counted = " and ".join(
        f"{count} {name}{'' if count == 1 else 's'}" for count, name in ((splits, "split"), (merges, "merge")) if count
    )
    bring = f"{counted} {'brings' if len(plan.actions) == 1 else 'bring'}"
    if not splits:
        return (
            f"{bring} {len(before)} segments down to {len(after)}; the busiest carries {now:.2f} times its even share."
        )
    rest = f"; {why}" if now > TOLERANCE else ""
    return f"{bring} the busiest segment from {then:.2f} times its even share to {now:.2f}{rest}."
