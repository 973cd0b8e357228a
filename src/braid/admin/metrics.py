"""`/metrics`: what the broker counts and what it holds now, in Prometheus' words.

Names follow Prometheus' rules: `braid_` first, base units (seconds, bytes), `_total` behind counters. docs/operating/
monitoring.md says what each means and what to do about it.

Labels: `topic` is `tenant/namespace/name`. Series grow with topics, segments and subscriptions, which only an
administrator creates, never with clients, connections or keys; what a client chooses freely is no label. At most
`MAX_SERIES` of them are shown, topics in order of their names; `braid_metrics_omitted_series` says how many were not.
"""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

import braid
from braid.broker.subscriptions import Progress

if TYPE_CHECKING:
    from braid.broker.broker import Broker
    from braid.broker.metrics import Histogram
    from braid.broker.segments import ServedSegment

MAX_SERIES: Final = 50_000
"""Of those that grow with topics. At some 10 µs each, showing them all takes half a second of a thread."""


class Snapshot(CollectorRegistry):
    """Families that were collected at one moment, to be written in a thread."""

    def __init__(self, families: list[Metric]) -> None:
        super().__init__(auto_describe=False)
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


class Exposition:
    def __init__(self, broker: Broker, admin_answers: Counter[tuple[str, int]]) -> None:
        self._broker = broker
        self._admin_answers = admin_answers
        registry = CollectorRegistry()
        self._process: tuple[Collector, ...] = (ProcessCollector(registry=registry), GCCollector(registry=registry))

    def collect(self) -> Snapshot:
        """Everything as it is now. Runs on the broker's loop: nothing changes meanwhile."""
        families = [*self._broker_families(), *self._topic_families()]
        for collector in self._process:
            families += collector.collect()
        return Snapshot(families)

    def _broker_families(self) -> Iterator[Metric]:
        broker = self._broker
        counts = broker.metrics
        build = GaugeMetricFamily(
            "braid_build_info", "Always 1; the labels say what runs here.", labels=["broker", "version", "python"]
        )
        build.add_metric([broker.id, braid.__version__, platform.python_version()], 1)
        yield build
        yield _gauge("braid_ready", "1 while the broker serves clients.", int(broker.ready))
        yield _gauge("braid_topics", "Topics of the cluster.", len(broker.topics.all()))
        yield _gauge("braid_segments_served", "Segments that this broker serves now.", len(broker.segments.all()))
        yield _gauge(
            "braid_segments_unavailable",
            "Segments of this broker that could not be opened, or failed and are not open again yet.",
            len(broker.segments.absent()),
        )
        yield _gauge("braid_connections", "Open client connections.", counts.connections)
        yield _counter("braid_connections_accepted", "Client connections accepted.", counts.connections_total)
        yield _counted(
            "braid_connections_refused", "Client connections refused.", ["code"],
            {(code,): count for code, count in counts.connections_refused.items()},
        )  # fmt: skip
        yield _counter("braid_network_receive_bytes", "Bytes received from clients.", counts.received_bytes)
        yield _counter("braid_network_transmit_bytes", "Bytes sent to clients.", counts.sent_bytes)
        yield _counted(
            "braid_requests", "Requests by operation.", ["operation"],
            {(operation,): count for operation, count in counts.requests.items()},
        )  # fmt: skip
        yield _counted("braid_request_errors", "Requests answered with an error.", ["operation", "code"], counts.errors)
        yield _counted(
            "braid_admin_requests", "Requests on the admin port, by method and status.", ["method", "status"],
            {(method, str(status)): count for (method, status), count in self._admin_answers.items()},
        )  # fmt: skip
        yield _histogram(
            "braid_publish_latency_seconds",
            "From a whole batch being received to its confirm.",
            counts.publish_latency_s,
        )
        yield _histogram("braid_publish_batch_size_bytes", "Sizes of published batches.", counts.batch_bytes)
        yield _histogram(
            "braid_log_sync_seconds",
            "One group commit: writing the batches that had gathered, and fdatasync.",
            counts.sync_latency_s,
        )
        yield from self._cache_families()

    def _cache_families(self) -> Iterator[Metric]:
        used = hits = misses = 0
        segments = self._broker.segments.all()
        if segments:
            cache = segments[0].storage.sources.cache  # one for all of them
            used, hits, misses = cache.used_bytes, cache.hits, cache.misses
        yield _gauge("braid_cache_used_bytes", "Bytes of recent batches in the hot cache.", used)
        yield _gauge("braid_cache_limit_bytes", "The most that the hot cache holds.", self._broker.config.cache_bytes)
        yield _counter("braid_cache_hits", "Reads that found their batches in the hot cache.", hits)
        yield _counter("braid_cache_misses", "Reads that had to go to a file or a chunk.", misses)

    def _topic_families(self) -> list[Metric]:
        """What grows with topics, within one budget of series."""
        families = _TopicFamilies()
        by_topic: dict[str, list[ServedSegment]] = {}
        for segment in self._broker.segments.all():
            by_topic.setdefault(segment.name.topic.path, []).append(segment)
        for path in sorted(by_topic.keys() | self._broker.metrics.topics.keys()):
            if self._broker.topics.find(path) is not None:
                families.add_topic(self._broker, path, sorted(by_topic.get(path, ()), key=lambda each: each.name.id))
        return families.all()


class _TopicFamilies:
    def __init__(self) -> None:
        topic, segment = ["topic"], ["topic", "segment"]
        self._left = MAX_SERIES
        self._omitted = 0
        self._counters = {
            field: CounterMetricFamily(f"braid_topic_{name}", f"{text}, on this broker.", labels=topic)
            for field, name, text in (
                ("published_batches", "publish_batches", "Batches published"),
                ("published_records", "publish_records", "Records published"),
                ("published_bytes", "publish_bytes", "Bytes published"),
                ("duplicate_batches", "publish_duplicate_batches", "Batches that were retries of stored ones"),
                ("delivered_batches", "deliver_batches", "Batches sent to consumers"),
                ("delivered_records", "deliver_records", "Records sent to consumers"),
                ("delivered_bytes", "deliver_bytes", "Bytes sent to consumers"),
            )
        }  # fmt: skip
        self._earliest = GaugeMetricFamily("braid_segment_earliest_offset", "The oldest offset kept.", labels=segment)
        self._end = GaugeMetricFamily(
            "braid_segment_end_offset", "The first offset that consumers may not see yet.", labels=segment
        )
        self._log_bytes = GaugeMetricFamily(
            "braid_segment_log_bytes", "Bytes of batches in local log files.", labels=segment
        )
        self._pending_bytes = GaugeMetricFamily(
            "braid_segment_pending_bytes", "Bytes that wait to be written to the log.", labels=segment
        )
        self._lag = GaugeMetricFamily(
            "braid_subscription_lag_records",
            "Records that a subscription has before it.",
            labels=["topic", "subscription", "segment"],
        )
        self._consumers = GaugeMetricFamily(
            "braid_subscription_consumers",
            "Consumers of a subscription, also those in their grace after a lost connection.",
            labels=["topic", "subscription"],
        )

    def add_topic(self, broker: Broker, path: str, segments: list[ServedSegment]) -> None:
        counts = broker.metrics.topics.get(path)
        if counts is not None:
            for field, family in self._counters.items():
                self._add(family, (path,), getattr(counts, field))
        subscriptions: dict[str, None] = {}
        for segment in segments:
            labels = (path, str(segment.name.id))
            earliest, end = segment.earliest, segment.end
            log = segment.storage.log
            self._add(self._earliest, labels, earliest)
            self._add(self._end, labels, end)
            self._add(self._log_bytes, labels, sum(file.batch_bytes for file in log.files))
            self._add(self._pending_bytes, labels, log.pending_bytes)
            for name, offset in sorted(segment.cursors.all().items()):
                subscriptions[name] = None
                self._add(self._lag, (path, name, labels[1]), Progress(offset, earliest, end).backlog)
        for name in subscriptions:
            self._add(self._consumers, (path, name), len(broker.groups.members(path, name)))

    def _add(self, family: Metric, labels: Iterable[str], value: float) -> None:
        if not self._left:
            self._omitted += 1
            return
        self._left -= 1
        assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
        family.add_metric(list(labels), value)

    def all(self) -> list[Metric]:
        omitted = _gauge("braid_metrics_omitted_series", f"Series beyond the limit of {MAX_SERIES}.", self._omitted)
        live = (self._earliest, self._end, self._log_bytes, self._pending_bytes, self._lag, self._consumers)
        return [*self._counters.values(), *live, omitted]


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    """`_total` is added where it is written."""
    return CounterMetricFamily(name, text, value=value)


def _counted(name: str, text: str, labels: list[str], counts: Mapping[Any, int]) -> Metric:
    """`counts` by the values of the labels."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, count in sorted(counts.items()):
        family.add_metric(list(values), count)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip((*histogram.bounds, math.inf), histogram.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == math.inf else repr(float(bound)), total))
    family = HistogramMetricFamily(name, text)
    family.add_metric([], buckets, histogram.sum)
    return family
