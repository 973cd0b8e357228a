"""`/metrics`: what the broker counts and what it holds now, in Prometheus' words.

Names follow Prometheus' rules: `braid_` first, base units (seconds, bytes), `_total` after counters. docs/operating/
monitoring.md says what each means and what to do about it.

Labels: `topic` is `tenant/namespace/name`. Series grow with topics, segments and subscriptions, which only an
administrator creates, never with clients, connections or keys; what a client chooses freely is no label. At most
`MAX_SERIES` of them are shown, topics in order of their names, each with all of its series or with none;
`braid_metrics_omitted_series` says how many were not.

A broker may have thousands of topics, and nobody's publish is to wait for a scrape. So the loop only reads numbers,
some topics at a time; making series and text of them takes ten times as long and happens in a thread.
"""

from __future__ import annotations

import asyncio
import math
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

import braid
from braid.broker.admin.segment_stats import hot_key
from braid.broker.groups.subscriptions import Progress
from braid.cluster.ownership.leader_step import Reason

if TYPE_CHECKING:
    from braid.broker.broker import Broker
    from braid.broker.metrics import Histogram
    from braid.broker.segments.segments import OwnedSegment

MAX_SERIES: Final = 50_000
"""Of those that grow with topics: 4 MB of text, a second of a thread."""
TOPICS_AT_ONCE: Final = 50
"""So many are read without a break: about 0.5 ms."""

_COUNTS: Final = {
    "published_batches": ("publish_batches", "Batches published"),
    "published_records": ("publish_records", "Records published"),
    "published_bytes": ("publish_bytes", "Bytes published"),
    "duplicate_batches": ("publish_duplicate_batches", "Batches that were retries of stored ones"),
    "forgotten_producers": (
        "publish_forgotten_producers",
        "Repeatable producers that segments have forgotten: what these repeat from its beginning is stored again",
    ),
    "delivered_batches": ("deliver_batches", "Batches sent to consumers"),
    "delivered_records": ("deliver_records", "Records sent to consumers"),
    "delivered_bytes": ("deliver_bytes", "Bytes sent to consumers"),
}
"""Fields of TopicMetrics: the metric's name and meaning."""
_QUEUE_GAUGES: Final = {
    "ready": ("ready_records", "Messages of a queue that the next consumer gets."),
    "leased": ("leased_records", "Messages of a queue that consumers have, and have not settled."),
    "delayed": ("delayed_records", "Messages of a queue that wait for their time: after a nack, or as published."),
}
_QUEUE_COUNTERS: Final = {
    "delivered": ("deliver_records", "Messages of a queue sent to consumers, since this broker opened the segment."),
    "redelivered": ("redeliver_records", "Of these, messages that were delivered before."),
    "dead_lettered": ("dead_letter_records", "Messages of a queue that consumers have moved to its dead-letter topic."),
}
"""Fields of QueueCounts: the metric's name and meaning."""
_read_queue: Final = attrgetter(*_QUEUE_GAUGES, *_QUEUE_COUNTERS)
_read_counts: Final = attrgetter(*_COUNTS)


class _SegmentRow(NamedTuple):
    id: int
    earliest: int
    end: int
    log_bytes: int
    pending_bytes: int
    lags: list[tuple[str, int]]
    """By subscription."""
    held: list[tuple[str, int]]
    """By subscription, of those that hold anything back."""
    hot_key_share: float | None
    """None: no key is most of the load, or nobody measures."""
    queues: list[tuple[str, tuple[int, ...], int]]
    """By subscription that is a queue: numbers as in `_QUEUE_GAUGES` and `_QUEUE_COUNTERS`, and attached consumers."""


class _TopicRow(NamedTuple):
    path: str
    counts: tuple[int, ...]
    """As in `_COUNTS`; empty if there are none."""
    segments: list[_SegmentRow]
    consumers: list[tuple[str, int, int]]
    """By subscription: all, and those without a segment."""

    @property
    def series(self) -> int:
        of_segments = sum(
            4
            + len(segment.lags)
            + len(segment.held)
            + (segment.hot_key_share is not None)
            + sum(len(numbers) + 1 for _, numbers, _ in segment.queues)
            for segment in self.segments
        )
        return len(self.counts) + 2 * len(self.consumers) + of_segments


def _read_topic(broker: Broker, path: str, segments: Sequence[OwnedSegment]) -> _TopicRow:
    rows = []
    subscriptions: dict[str, None] = {}
    for segment in segments:
        earliest, end, log = segment.earliest, segment.end, segment.storage.log
        cursors = segment.cursors.all()
        counts_of_queues = segment.queues.counts()
        unsettled = {name: each.ready + each.leased + each.delayed for name, each in counts_of_queues.items()}
        subscriptions.update(dict.fromkeys(cursors.keys() - unsettled.keys()))
        lags = [
            (name, Progress(offset, earliest, end, unsettled.get(name)).backlog) for name, offset in cursors.items()
        ]
        queues = [(name, _read_queue(each), len(each.consumers)) for name, each in counts_of_queues.items()]
        log_bytes = sum([file.batch_bytes for file in log.files])
        held = [*segment.retention.held.items()]
        hot = hot_key(segment)
        share = hot.hottest_share if hot is not None else None
        rows.append(
            _SegmentRow(segment.name.id, earliest, end, log_bytes, log.pending_bytes, lags, held, share, queues)
        )
    counts = broker.metrics.topics.get(path)
    members = [(name, [*broker.groups.members(path, name).values()]) for name in subscriptions]
    consumers = [(name, len(held), held.count(())) for name, held in members]
    return _TopicRow(path, _read_counts(counts) if counts is not None else (), rows, consumers)


class _Snapshot(CollectorRegistry):
    """Families that are there already, in the form that the encoders take."""

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

    async def write(self, encode: Callable[[CollectorRegistry], bytes]) -> bytes:
        rows, omitted = await self._read_topics()
        families = list(self._broker_families())

        def write() -> bytes:
            families.extend(_topic_families(rows, omitted))
            for collector in self._process:
                families.extend(collector.collect())
            return encode(_Snapshot(families))

        return await asyncio.get_running_loop().run_in_executor(None, write)

    async def _read_topics(self) -> tuple[list[_TopicRow], int]:
        """What is shown of topics, and how many series are not."""
        broker = self._broker
        by_topic: dict[str, list[OwnedSegment]] = {}
        for segment in broker.segments.all():
            by_topic.setdefault(segment.name.topic.path, []).append(segment)
        shown: list[_TopicRow] = []
        left, omitted = MAX_SERIES, 0
        for number, path in enumerate(sorted(by_topic.keys() | broker.metrics.topics.keys()), start=1):
            if broker.topics.find(path) is not None:
                row = _read_topic(broker, path, by_topic.get(path, ()))
                if row.series <= left:
                    shown.append(row)
                    left -= row.series
                else:
                    left, omitted = 0, omitted + row.series  # nor anything after it
            if number % TOPICS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return shown, omitted

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
        lacking = [sum(not each.in_sync for each in segment.followers) for segment in broker.segments.all()]
        yield _gauge(
            "braid_replicas_out_of_sync",
            "Followers of this broker's segments whose copies do not count for confirms: they are gone or behind.",
            sum(lacking),
        )
        yield _gauge(
            "braid_segments_under_replicated",
            "Segments of this broker with such a follower.",
            sum(map(bool, lacking)),
        )
        yield _gauge(
            "braid_metadata_unreadable_records",
            "Metadata records that this broker cannot read; see its log.",
            broker.topics.view.unreadable(),
        )
        yield from self._cluster_families()
        yield _gauge("braid_connections", "Open client connections.", counts.connections)
        yield _counter("braid_connections_accepted", "Client connections accepted.", counts.connections_total)
        yield _counted(
            "braid_connections_refused", "Client connections refused.", ["code"],
            {(code,): count for code, count in counts.connections_refused.items()},
        )  # fmt: skip
        received, sent = broker.front_door.server.traffic()
        yield _counter("braid_network_receive_bytes", "Bytes received from clients.", received)
        yield _counter("braid_network_transmit_bytes", "Bytes sent to clients.", sent)
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

    def _cluster_families(self) -> Iterator[Metric]:
        leader = self._broker.cluster.leader
        leading = leader.leading
        yield _gauge("braid_cluster_leader", "1 while this broker leads the cluster.", int(leading))
        yield _counted(
            "braid_cluster_decisions", "Ownership records that this broker wrote as the leader, by reason.", ["reason"],
            {(reason.value,): leader.decisions[reason] for reason in Reason},
        )  # fmt: skip
        actions = self._broker.group_host.auto_scaling.actions
        yield _counted(
            "braid_auto_scale_actions", "Changes of layouts that this broker began as the leader, because of the load.",
            ["action"], {(action,): actions[action] for action in ("merge", "split")},
        )  # fmt: skip
        # Of the whole cluster, so that a sum over brokers is right: only one of them tells.
        yield _gauge(
            "braid_cluster_segments_waiting",
            "Segments that no broker serves: theirs is gone, or cannot open them. On the leader; 0 elsewhere.",
            len(leader.waiting()) if leading else 0,
        )

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


def _topic_families(rows: Sequence[_TopicRow], omitted: int) -> list[Metric]:
    counters = [
        CounterMetricFamily(f"braid_topic_{name}", f"{text}, on this broker.", labels=["topic"])
        for name, text in _COUNTS.values()
    ]
    earliest, end, log_bytes, pending_bytes = (
        GaugeMetricFamily(f"braid_segment_{name}", text, labels=["topic", "segment"])
        for name, text in (
            ("earliest_offset", "The oldest offset that is kept."),
            ("end_offset", "The first offset that consumers may not see yet."),
            ("log_bytes", "Bytes of batches in local log files."),
            ("pending_bytes", "Bytes that wait to be written to the log."),
        )
    )
    hot_key_share = GaugeMetricFamily(
        "braid_segment_hot_key_ratio",
        "The part of its load that sits on one key; absent if no key has half of it, or if nobody measures.",
        labels=["topic", "segment"],
    )
    lag = GaugeMetricFamily(
        "braid_subscription_lag_records",
        "Records that a subscription has before it.",
        labels=["topic", "subscription", "segment"],
    )
    held = GaugeMetricFamily(
        "braid_subscription_held_bytes",
        "Bytes that have outlived the topic's retention and are kept for this subscription; absent if none are.",
        labels=["topic", "subscription", "segment"],
    )
    consumers = GaugeMetricFamily(
        "braid_subscription_consumers",
        "Consumers of a subscription, also those in their grace after a lost connection.",
        labels=["topic", "subscription"],
    )
    idle = GaugeMetricFamily(
        "braid_subscription_idle_consumers",
        "Consumers of a subscription that have no segment: there are more of them than segments that can be read.",
        labels=["topic", "subscription"],
    )
    of_queues = ["topic", "subscription", "segment"]
    queue_families: list[GaugeMetricFamily | CounterMetricFamily] = [
        *(GaugeMetricFamily(f"braid_queue_{name}", text, labels=of_queues) for name, text in _QUEUE_GAUGES.values()),
        *(
            CounterMetricFamily(f"braid_queue_{name}", text, labels=of_queues)
            for name, text in _QUEUE_COUNTERS.values()
        ),
    ]
    attached = GaugeMetricFamily(
        "braid_queue_consumers", "Consumers that are attached to a segment of a queue.", labels=of_queues
    )
    for row in rows:
        for counter, value in zip(counters, row.counts):
            counter.add_metric([row.path], value)
        for segment in sorted(row.segments):
            labels = [row.path, str(segment.id)]
            earliest.add_metric(labels, segment.earliest)
            end.add_metric(labels, segment.end)
            log_bytes.add_metric(labels, segment.log_bytes)
            pending_bytes.add_metric(labels, segment.pending_bytes)
            if segment.hot_key_share is not None:
                hot_key_share.add_metric(labels, segment.hot_key_share)
            for name, records in sorted(segment.lags):
                lag.add_metric([row.path, name, labels[1]], records)
            for name, size in sorted(segment.held):
                held.add_metric([row.path, name, labels[1]], size)
            for name, numbers, connected in sorted(segment.queues):
                for family, number in zip(queue_families, numbers, strict=True):
                    family.add_metric([row.path, name, labels[1]], number)
                attached.add_metric([row.path, name, labels[1]], connected)
        for name, count, without_segment in sorted(row.consumers):
            consumers.add_metric([row.path, name], count)
            idle.add_metric([row.path, name], without_segment)
    left_out = _gauge("braid_metrics_omitted_series", f"Series beyond the limit of {MAX_SERIES}.", omitted)
    of_segments = (earliest, end, log_bytes, pending_bytes, hot_key_share)
    return [*counters, *of_segments, lag, held, consumers, idle, *queue_families, attached, left_out]


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
