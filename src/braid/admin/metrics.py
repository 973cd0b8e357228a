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
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

import braid
from braid.admin.topic_metrics import TopicRow, age_s, read_segment, read_topic, topic_families
from braid.cluster.ownership.leader_step import Reason
from braid.model.transition import TransitionStep

if TYPE_CHECKING:
    from braid.broker.broker import Broker
    from braid.broker.metrics import Histogram
    from braid.broker.segments.segments import OwnedSegment

MAX_SERIES: Final = 50_000
"""Of those that grow with topics: 4 MB of text, a second of a thread."""
TOPICS_AT_ONCE: Final = 50
SEGMENTS_AT_ONCE: Final = 50
"""So many are read without a break: less than 1 ms."""

_STEPS: Final = (*(step.value.lower() for step in TransitionStep), "finalizing")


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
            families.extend(topic_families(rows))
            families.append(
                _gauge("braid_metrics_omitted_series", f"Series beyond the limit of {MAX_SERIES}.", omitted)
            )
            families.extend(_disk_families(self._broker.config.data))
            for collector in self._process:
                families.extend(collector.collect())
            return encode(_Snapshot(families))

        return await asyncio.get_running_loop().run_in_executor(None, write)

    async def _read_topics(self) -> tuple[list[TopicRow], int]:
        """What is shown of topics, and how many series are not."""
        broker = self._broker
        by_topic: dict[str, list[OwnedSegment]] = {}
        for segment in broker.segments.all():
            by_topic.setdefault(segment.name.topic.path, []).append(segment)
        shown: list[TopicRow] = []
        left, omitted, read = MAX_SERIES, 0, 0
        now_us = broker.resources.clock.now_us()
        for number, path in enumerate(sorted(by_topic.keys() | broker.metrics.topics.keys()), start=1):
            if broker.topics.find(path) is not None:
                rows = []
                for segment in by_topic.get(path, ()):
                    rows.append(read_segment(segment, now_us))
                    if (read := read + 1) % SEGMENTS_AT_ONCE == 0:
                        await asyncio.sleep(0)
                row = read_topic(broker, path, rows)
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
        yield from _transition_families(self._broker, leading=leading)

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


def _transition_families(broker: Broker, *, leading: bool) -> Iterator[Metric]:
    """Of the whole cluster, so only the leader tells."""
    began_us: dict[str, list[int]] = {step: [] for step in _STEPS}
    if leading:
        for topic in broker.topics.all().values():
            if topic.transition is not None:
                began_us[topic.transition.step.value.lower()].append(topic.transition.created_at)
        began_us["finalizing"] = [mark.committed_at for mark in broker.topics.committed.all().values()]
    under_way = GaugeMetricFamily(
        "braid_cluster_transitions",
        "Changes of layouts that are under way, by step. On the leader; 0 elsewhere.",
        labels=["step"],
    )
    oldest = GaugeMetricFamily(
        "braid_cluster_transition_age_seconds",
        "How long the oldest of them has been under way; of a finalizing one, since its commit. 0 if there is none.",
        labels=["step"],
    )
    now_us = broker.resources.clock.now_us()
    for step, times in began_us.items():
        under_way.add_metric([step], len(times))
        oldest.add_metric([step], age_s(min(times, default=0), now_us))
    yield under_way
    yield oldest


def _disk_families(folder: str) -> Iterator[Metric]:
    """Of the disk that holds the broker's data. Nothing is told of a disk that cannot be asked."""
    try:
        size, used, free = shutil.disk_usage(folder)
    except OSError:
        return
    yield _gauge("braid_disk_size_bytes", "The size of the disk that holds the broker's data.", size)
    yield _gauge("braid_disk_used_bytes", "What is used of it, also by others.", used)
    yield _gauge("braid_disk_free_bytes", "What the broker may still write there.", free)


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
