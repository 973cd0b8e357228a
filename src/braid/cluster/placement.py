"""Which broker gets a segment: the least loaded one that may have it. Pure functions.

A broker's load is three numbers, added up with weights; the lowest sum gets the segment:

    score = 1 · segments / mean segments  +  2 · bytes per second / mean bytes per second  +  1 · cpu

Means are over the available brokers. Bytes count most, because they are a broker's work. The number of segments stands
for the load that they may get later; before there is traffic, nothing else is known. The processor counts absolutely:
one idle broker that uses half as much as another means nothing, but a broker at its limit does.

**Loads follow ownership.** Reports are some seconds old, ownership records are not. So a broker's bytes are those of
the segments that it owns *now*, each at the rate that its owner reported (its last owner, where the new one has not
reported it yet), plus the part of the broker's own sum that belongs to no reported segment. So placing many segments
one after the other, or draining a broker in portions, never piles everything on the broker that was idle a moment ago.

Only the arguments decide. Ties go to the lower id, so two leaders in turn come to the same result.
"""

from __future__ import annotations

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


class Tally:
    """The load of every broker, as it will be after the decisions so far. Lives for one decision."""

    def __init__(self, brokers: Iterable[BrokerView], loads: Loads, owned: Iterable[SegmentPlacement]) -> None:
        views = list(brokers)
        self.available: Final = sorted(broker.id for broker in views if broker.available)
        self.segments: Final = {broker.id: set[SegmentRef]() for broker in views}
        self.bytes_per_s: Final = {broker.id: 0 for broker in views}
        self.cpu: Final = {broker.id: loads[broker.id].cpu if broker.id in loads else 0.0 for broker in views}
        self.reported: Final[dict[SegmentRef, SegmentLoad]] = {}
        """The load of each segment that any report names: from its owner's report, or else from the youngest."""
        self._topics: Counter[tuple[str, str]] = Counter()
        by_broker = {broker: _by_segment(report) for broker, report in loads.items()}
        for broker in sorted(loads, key=lambda broker: (loads[broker].at, broker)):
            self.reported.update(by_broker[broker])
            if broker in self.bytes_per_s:
                named = sum(load.bytes_per_s for load in by_broker[broker].values())
                self.bytes_per_s[broker] = max(loads[broker].bytes_per_s - named, 0)
        for segment in owned:
            if segment.owner in self.segments:
                by_owner = by_broker.get(segment.owner, {}).get(segment.ref)
                if by_owner is not None:
                    self.reported[segment.ref] = by_owner
                self.add(segment.ref, segment.owner)

    def rate(self, segment: SegmentRef) -> int:
        """Return the segment's bytes per second, in and out; 0 if no report names it."""
        load = self.reported.get(segment)
        return 0 if load is None else load.bytes_per_s

    def add(self, segment: SegmentRef, broker: str) -> None:
        self.segments[broker].add(segment)
        self._topics[segment.topic_path, broker] += 1
        self.bytes_per_s[broker] += self.rate(segment)

    def remove(self, segment: SegmentRef, broker: str) -> None:
        self.segments[broker].remove(segment)
        self._topics[segment.topic_path, broker] -= 1
        self.bytes_per_s[broker] -= self.rate(segment)

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
        segments = sum(len(self.segments[broker]) for broker in self.available) / count
        bytes_per_s = sum(self.bytes_per_s[broker] for broker in self.available) / count
        return {
            broker: SEGMENTS_WEIGHT * (len(self.segments[broker]) / segments if segments else 0)
            + BYTES_WEIGHT * (self.bytes_per_s[broker] / bytes_per_s if bytes_per_s else 0)
            + CPU_WEIGHT * self.cpu[broker]
            for broker in self.available
        }


def _by_segment(report: LoadReport) -> dict[SegmentRef, SegmentLoad]:
    return {SegmentRef(load.topic_path, load.segment_id): load for load in report.busiest}
