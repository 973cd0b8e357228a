"""A broker's counters: plain numbers that the hot path writes directly. admin/ shows them as metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Final

LATENCY_BOUNDS_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
SIZE_BOUNDS_BYTES: Final = (256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)


class Histogram:
    """Counts per bucket. A value belongs to the first bound that is not below it, or to the bucket after the last."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)


class TopicMetrics:
    """The counters of one topic on this broker, since the broker started."""

    __slots__ = (
        "delivered_batches", "delivered_bytes", "delivered_records", "duplicate_batches", "forgotten_producers",
        "published_batches", "published_bytes", "published_records",
    )  # fmt: skip

    def __init__(self) -> None:
        self.published_batches = 0
        self.published_records = 0
        self.published_bytes = 0
        self.duplicate_batches = 0
        self.forgotten_producers = 0
        self.delivered_batches = 0
        self.delivered_records = 0
        self.delivered_bytes = 0


class BrokerMetrics:
    def __init__(self) -> None:
        self.connections = 0
        self.connections_total = 0
        self.connections_refused: Counter[str] = Counter()
        """By error code."""
        self.received_bytes = 0
        self.sent_bytes = 0
        self.requests: Counter[str] = Counter()
        """By operation, in lower case."""
        self.errors: Counter[tuple[str, str]] = Counter()
        """By operation and error code."""
        self.publish_latency_s = Histogram(LATENCY_BOUNDS_S)
        """From the arrival of a whole batch to its confirm."""
        self.sync_latency_s = Histogram(LATENCY_BOUNDS_S)
        """The write and the sync of each synced commit, of all logs together (`LogConfig.on_sync`)."""
        self.batch_bytes = Histogram(SIZE_BOUNDS_BYTES)
        self.topics: dict[str, TopicMetrics] = {}

    def topic(self, path: str) -> TopicMetrics:
        found = self.topics.get(path)
        if found is None:
            found = self.topics[path] = TopicMetrics()
        return found
