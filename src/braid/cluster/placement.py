"""Which brokers get a segment: the least loaded ones that may have it. Pure functions.

A broker's load is three numbers, added up with weights; the lowest sum gets the segment:

    score = 1 · segments / mean segments  +  2 · bytes per second / mean bytes per second  +  1 · cpu

Means are over the available brokers. Bytes count most, because they are a broker's work. The number of segments stands
for the load that they may get later; before there is traffic, nothing else is known. The processor counts absolutely:
one idle broker that uses half as much as another means nothing, but a broker at its limit does.

**Loads follow ownership.** Reports are some seconds old, ownership records are not. So a broker's bytes are those of
the segments that it owns *now*, each at the rate that its owner reported (its last owner, where the new one has not
reported it yet), plus the part of the broker's own sum that belongs to no reported segment. So placing many segments
one after the other, or draining a broker in portions, never piles everything on the broker that was idle a moment ago.

**A copy is a load, too.** Each replica of a segment writes what comes in; only the owner sends it out to readers. So
the bytes that come in count for every replica, and those that go out for the owner. A broker's number of segments
counts those that it holds, as owner or as follower. Followers of one segment go to different brokers, and to different
racks as far as there are racks: brokers of one rack fail together.

Only the arguments decide. Ties go to the lower id, so two leaders in turn come to the same result.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from braid.model.cluster import BrokerView, SegmentPlacement, SegmentRef
from braid.model.load import LoadReport, SegmentLoad

SEGMENTS_WEIGHT: Final = 1.0
BYTES_WEIGHT: Final = 2.0
CPU_WEIGHT: Final = 1.0

Loads = Mapping[str, LoadReport]


def place_all(segments: Iterable[SegmentRef], tally: Tally) -> dict[SegmentRef, str]:
    """Return brokers for many segments together, which the tally counts from now on; none if no broker is available.

    The segments of one topic go to different brokers as far as possible, so that a topic gets more throughput with more
    segments. The load decides which brokers these are, and which broker gets a second segment.
    """
    if not tally.available:
        return {}
    found: dict[SegmentRef, str] = {}
    given: Counter[tuple[str, str]] = Counter()
    """By topic and broker."""
    for segment in segments:
        topic = segment.topic_path
        fewest = min(given[topic, broker] for broker in tally.available)
        target = tally.least_loaded(segment, allowed=[each for each in tally.available if given[topic, each] == fewest])
        assert target is not None
        found[segment] = target
        given[topic, target] += 1
        tally.add(segment, target)
    return found


def choose_replicas(
    segment: SegmentRef, first: Iterable[str], count: int, tally: Tally, *, candidates: Collection[str] | None = None
) -> tuple[str, ...]:
    """Return at most `count` brokers for the copies of a segment: the `first`, which are chosen already, then others in
    the order in which they are chosen. `candidates` are the brokers that may be chosen; None: all that are available.

    A broker in a rack that no chosen one is in comes first, then the least loaded one."""
    chosen = list(first)
    left = set(tally.available if candidates is None else candidates).difference(chosen)
    scores = tally.scores()
    while left and len(chosen) < count:
        crowd = Counter(tally.racks.get(broker, "") for broker in chosen)
        best = min(
            left,
            key=lambda broker: (
                crowd[tally.racks.get(broker, "")],
                scores.get(broker, math.inf),
                tally.of_topic(segment, broker),
                broker,
            ),
        )
        left.remove(best)
        chosen.append(best)
    return tuple(chosen)


class Tally:
    """The load of every broker, as it will be after the decisions so far. Lives for one decision."""

    def __init__(self, brokers: Iterable[BrokerView], loads: Loads, owned: Iterable[SegmentPlacement]) -> None:
        views = list(brokers)
        self.available: Final = sorted(broker.id for broker in views if broker.available)
        self.racks: Final = {broker.id: broker.rack for broker in views}
        self.segments: Final = {broker.id: set[SegmentRef]() for broker in views}
        """Those that it owns."""
        self.copies: Final = {broker.id: set[SegmentRef]() for broker in views}
        """Those of which it holds a copy as one of several replicas, also as their owner."""
        self.bytes_per_s: Final = {broker.id: 0 for broker in views}
        self.cpu: Final = {broker.id: loads[broker.id].cpu if broker.id in loads else 0.0 for broker in views}
        self.reported: Final[dict[SegmentRef, SegmentLoad]] = {}
        """The load of each segment that any report names: from its owner's report, or else from the youngest."""
        self._topics: Counter[tuple[str, str]] = Counter()
        self._replicated: set[SegmentRef] = set()
        self._held: Counter[str] = Counter()
        """By broker: the segments that it owns or holds a copy of."""
        by_broker = {broker: _by_segment(report) for broker, report in loads.items()}
        for broker in sorted(loads, key=lambda broker: (loads[broker].at, broker)):
            self.reported.update(by_broker[broker])
            if broker in self.bytes_per_s:
                named = sum(load.bytes_per_s for load in by_broker[broker].values())
                self.bytes_per_s[broker] = max(loads[broker].bytes_per_s - named, 0)
        for segment in owned:
            by_owner = by_broker.get(segment.owner, {}).get(segment.ref)
            if by_owner is not None and segment.owner in self.segments:
                self.reported[segment.ref] = by_owner
            self.add_copies(segment.ref, segment.replicas)
            if segment.owner in self.segments:
                self.add(segment.ref, segment.owner)

    def rate(self, segment: SegmentRef) -> int:
        """Return the segment's bytes per second, in and out; 0 if no report names it."""
        load = self.reported.get(segment)
        return 0 if load is None else load.bytes_per_s

    def owner_rate(self, segment: SegmentRef) -> int:
        """Return the bytes per second that a new owner takes over: of a replicated segment, only those that go out."""
        load = self.reported.get(segment)
        if load is None:
            return 0
        return load.bytes_out_per_s if segment in self._replicated else load.bytes_per_s

    def add(self, segment: SegmentRef, broker: str) -> None:
        """Count the segment for its owner. Copies are counted before."""
        self.segments[broker].add(segment)
        self._hold(segment, broker, 1, segment in self.copies[broker])
        self.bytes_per_s[broker] += self.owner_rate(segment)

    def remove(self, segment: SegmentRef, broker: str) -> None:
        self.segments[broker].remove(segment)
        self._hold(segment, broker, -1, segment in self.copies[broker])
        self.bytes_per_s[broker] -= self.owner_rate(segment)

    def add_copies(self, segment: SegmentRef, replicas: Iterable[str]) -> None:
        """Count a segment for the brokers that hold copies of it, the owner among them. No owner is counted yet."""
        for broker in replicas:
            self._replicated.add(segment)
            if broker in self.copies:
                self.copies[broker].add(segment)
                self._hold(segment, broker, 1, segment in self.segments[broker])
                self.bytes_per_s[broker] += self._written(segment)

    def forget(self, segment: SegmentRef) -> None:
        """Count a segment for no broker any more."""
        for broker in self.segments:
            if segment in self.segments[broker]:
                self.remove(segment, broker)
            if segment in self.copies[broker]:
                self.copies[broker].remove(segment)
                self._hold(segment, broker, -1, False)
                self.bytes_per_s[broker] -= self._written(segment)
        self._replicated.discard(segment)

    def of_topic(self, segment: SegmentRef, broker: str) -> int:
        """Return how many segments of the same topic the broker holds."""
        return self._topics[segment.topic_path, broker]

    def _written(self, segment: SegmentRef) -> int:
        load = self.reported.get(segment)
        return 0 if load is None else load.bytes_in_per_s

    def _hold(self, segment: SegmentRef, broker: str, change: int, holds_anyway: bool) -> None:
        if not holds_anyway:
            self._held[broker] += change
            self._topics[segment.topic_path, broker] += change

    def mean_bytes_per_s(self) -> float:
        """Return the mean over the available brokers, of which there must be one."""
        return sum(self.bytes_per_s[broker] for broker in self.available) / len(self.available)

    def spread(self) -> float:
        """Return how many times the mean load the busiest available broker has. 1 is even, also without any load."""
        mean = self.mean_bytes_per_s() if self.available else 0
        return max(self.bytes_per_s[broker] for broker in self.available) / mean if mean else 1.0

    def least_loaded(
        self, segment: SegmentRef, *, allowed: Collection[str] | None = None, avoid: str | None = None
    ) -> str | None:
        """Return the broker for a segment; None if no broker can have it. `allowed` are the brokers that can, for
        instance those that hold its history; None: every broker. `avoid`, for instance the broker that the segment is
        to leave, gets it only if no other broker can."""
        able = [broker for broker in self.available if allowed is None or broker in allowed]
        others = [broker for broker in able if broker != avoid]
        scores = self.scores()
        return min(
            others or able,
            key=lambda broker: (scores[broker], self._topics[segment.topic_path, broker], broker),
            default=None,
        )

    def scores(self) -> dict[str, float]:
        """Score each available broker; lower is less loaded."""
        count = len(self.available) or 1
        segments = sum(self._held[broker] for broker in self.available) / count
        bytes_per_s = sum(self.bytes_per_s[broker] for broker in self.available) / count
        return {
            broker: SEGMENTS_WEIGHT * (self._held[broker] / segments if segments else 0)
            + BYTES_WEIGHT * (self.bytes_per_s[broker] / bytes_per_s if bytes_per_s else 0)
            + CPU_WEIGHT * self.cpu[broker]
            for broker in self.available
        }


def _by_segment(report: LoadReport) -> dict[SegmentRef, SegmentLoad]:
    return {SegmentRef(load.topic_path, load.segment_id): load for load in report.busiest}
