"""The series of topics, segments and subscriptions.

Reading and writing are apart: the loop reads plain numbers into rows (`read_segment`, `read_topic`). A thread makes
families of them (`topic_families`), which takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from braid.broker.admin.segment_stats import hot_key
from braid.broker.groups.subscriptions import Progress
from braid.storage.record_times import written_at

if TYPE_CHECKING:
    from braid.broker.broker import Broker
    from braid.broker.segments.segments import OwnedSegment

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


class SegmentRow(NamedTuple):
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
    ages: list[tuple[str, float]]
    """By subscription: how old the oldest record is that it has before it, in seconds."""
    unexported: tuple[int, float] | None
    """Bytes that only local files hold, and the age of the oldest in seconds; None: only moves export."""
    replicas: list[tuple[str, bool, int]]
    """By follower: whether its copy counts for confirms, and how many records it lacks."""


class TopicRow(NamedTuple):
    path: str
    counts: tuple[int, ...]
    """As in `_COUNTS`; empty if there are none."""
    segments: list[SegmentRow]
    consumers: list[tuple[str, int, int]]
    """By subscription: all, and those without a segment."""

    @property
    def series(self) -> int:
        of_segments = sum(
            4
            + 2 * len(segment.lags)
            + 2 * (segment.unexported is not None)
            + 2 * len(segment.replicas)
            + len(segment.held)
            + (segment.hot_key_share is not None)
            + sum(len(numbers) + 1 for _, numbers, _ in segment.queues)
            for segment in self.segments
        )
        return len(self.counts) + 2 * len(self.consumers) + of_segments


def read_topic(broker: Broker, path: str, rows: list[SegmentRow]) -> TopicRow:
    """Read what the broker knows of a topic, beside its segments that were read."""
    of_queues = {name for row in rows for name, _, _ in row.queues}
    subscriptions = dict.fromkeys(name for row in rows for name, _ in row.lags if name not in of_queues)
    counts = broker.metrics.topics.get(path)
    members = [(name, [*broker.groups.members(path, name).values()]) for name in subscriptions]
    consumers = [(name, len(held), held.count(())) for name, held in members]
    return TopicRow(path, _read_counts(counts) if counts is not None else (), rows, consumers)


def read_segment(segment: OwnedSegment, now_us: int) -> SegmentRow:
    earliest, end, log = segment.earliest, segment.end, segment.storage.log
    queues = segment.queues.counts()
    lags, ages = [], []
    for name, offset in segment.cursors.all().items():
        queue = queues.get(name)
        unsettled = queue.ready + queue.leased + queue.delayed if queue is not None else None
        backlog = Progress(offset, earliest, end, unsettled).backlog
        lags.append((name, backlog))
        oldest_us = queue.oldest_us if queue is not None else 0
        if backlog and not oldest_us:
            oldest_us = written_at(segment.storage.sources, max(offset, earliest)) or 0
        ages.append((name, age_s(oldest_us, now_us) if backlog else 0.0))
    hot = hot_key(segment)
    return SegmentRow(
        id=segment.name.id,
        earliest=earliest,
        end=end,
        log_bytes=sum([file.batch_bytes for file in log.files]),
        pending_bytes=log.pending_bytes,
        lags=lags,
        held=[*segment.retention.held.items()],
        hot_key_share=hot.hottest_share if hot is not None else None,
        queues=[(name, _read_queue(each), len(each.consumers)) for name, each in queues.items()],
        ages=ages,
        unexported=_read_unexported(segment, now_us),
        replicas=[(each.broker, each.in_sync, each.behind) for each in segment.followers],
    )


def _read_unexported(segment: OwnedSegment, now_us: int) -> tuple[int, float] | None:
    storage = segment.storage
    if not storage.exports_continuously:
        return None
    exported, end = storage.catalog.next_offset, segment.end
    size = sum([file.batch_bytes for file in storage.log.files if file.next_offset > max(exported, file.base_offset)])
    oldest_us = written_at(storage.sources, exported) if exported < end else None
    return size, age_s(oldest_us or 0, now_us)


def age_s(then_us: int, now_us: int) -> float:
    """Return 0 for a time that is not known, and for one that a producer's clock puts into the future."""
    return max(now_us - then_us, 0) / 1e6 if then_us else 0.0


_SEGMENT: Final = ("topic", "segment")
_SUBSCRIPTION: Final = ("topic", "subscription")
_CURSOR: Final = ("topic", "subscription", "segment")
_REPLICA: Final = ("topic", "segment", "follower")


class _Gauges:
    """Gauges by their names, made on first use and in this order."""

    _TEXTS: Final = {
        "segment_earliest_offset": (_SEGMENT, "The oldest offset that is kept."),
        "segment_end_offset": (_SEGMENT, "The first offset that consumers may not see yet."),
        "segment_log_bytes": (_SEGMENT, "Bytes of batches in local log files."),
        "segment_pending_bytes": (_SEGMENT, "Bytes that wait to be written to the log."),
        "segment_hot_key_ratio": (
            _SEGMENT,
            "The part of its load that sits on one key; absent if no key has half of it, or if nobody measures.",
        ),
        "segment_unexported_bytes": (
            _SEGMENT,
            "Bytes of the files that no chunk covers yet; absent where the storage exports only when a segment moves.",
        ),
        "segment_unexported_age_seconds": (
            _SEGMENT,
            "How old the oldest record is that no chunk covers yet; 0 if chunks hold everything.",
        ),
        "replica_in_sync": (_REPLICA, "1 while the follower's copy counts for confirms."),
        "replica_behind_records": (_REPLICA, "Records of the log that the follower's disk does not have."),
        "subscription_lag_records": (_CURSOR, "Records that a subscription has before it."),
        "subscription_lag_seconds": (
            _CURSOR,
            "How old the oldest record is that a subscription has before it, by the record's own time; 0 if none is.",
        ),
        "subscription_held_bytes": (
            _CURSOR,
            "Bytes that have outlived the topic's retention and are kept for this subscription; absent if none are.",
        ),
        "subscription_consumers": (
            _SUBSCRIPTION,
            "Consumers of a subscription, also those in their grace after a lost connection.",
        ),
        "subscription_idle_consumers": (
            _SUBSCRIPTION,
            "Consumers of a subscription that have no segment: there are more of them than segments that can be read.",
        ),
        "queue_consumers": (_CURSOR, "Consumers that are attached to a segment of a queue."),
    }

    def __init__(self) -> None:
        self.families: Final = {
            name: GaugeMetricFamily(f"braid_{name}", text, labels=labels)
            for name, (labels, text) in self._TEXTS.items()
        }

    def add(self, name: str, labels: Sequence[str], value: float) -> None:
        self.families[name].add_metric(labels, value)


def topic_families(rows: Sequence[TopicRow]) -> list[Metric]:
    """Make families of what was read. Runs in a thread."""
    counters = [
        CounterMetricFamily(f"braid_topic_{name}", f"{text}, on this broker.", labels=["topic"])
        for name, text in _COUNTS.values()
    ]
    of_queues: list[GaugeMetricFamily | CounterMetricFamily] = [
        *(GaugeMetricFamily(f"braid_queue_{name}", text, labels=_CURSOR) for name, text in _QUEUE_GAUGES.values()),
        *(CounterMetricFamily(f"braid_queue_{name}", text, labels=_CURSOR) for name, text in _QUEUE_COUNTERS.values()),
    ]
    gauges = _Gauges()
    for row in rows:
        for counter, value in zip(counters, row.counts):
            counter.add_metric([row.path], value)
        for segment in sorted(row.segments):
            _add_segment(gauges, row.path, segment)
            for name, numbers, connected in sorted(segment.queues):
                labels = [row.path, name, str(segment.id)]
                for family, number in zip(of_queues, numbers, strict=True):
                    family.add_metric(labels, number)
                gauges.add("queue_consumers", labels, connected)
        for name, count, without_segment in sorted(row.consumers):
            gauges.add("subscription_consumers", [row.path, name], count)
            gauges.add("subscription_idle_consumers", [row.path, name], without_segment)
    return [*counters, *gauges.families.values(), *of_queues]


def _add_segment(gauges: _Gauges, path: str, segment: SegmentRow) -> None:
    id_ = str(segment.id)
    labels = [path, id_]
    gauges.add("segment_earliest_offset", labels, segment.earliest)
    gauges.add("segment_end_offset", labels, segment.end)
    gauges.add("segment_log_bytes", labels, segment.log_bytes)
    gauges.add("segment_pending_bytes", labels, segment.pending_bytes)
    if segment.hot_key_share is not None:
        gauges.add("segment_hot_key_ratio", labels, segment.hot_key_share)
    if segment.unexported is not None:
        gauges.add("segment_unexported_bytes", labels, segment.unexported[0])
        gauges.add("segment_unexported_age_seconds", labels, segment.unexported[1])
    for follower, in_sync, behind in sorted(segment.replicas):
        gauges.add("replica_in_sync", [path, id_, follower], int(in_sync))
        gauges.add("replica_behind_records", [path, id_, follower], behind)
    for name, records in sorted(segment.lags):
        gauges.add("subscription_lag_records", [path, name, id_], records)
    for name, age_in_s in sorted(segment.ages):
        gauges.add("subscription_lag_seconds", [path, name, id_], age_in_s)
    for name, size in sorted(segment.held):
        gauges.add("subscription_held_bytes", [path, name, id_], size)
