"""What only the owner of a segment knows of it, and what only the broker that did the work has counted.

Which topics, segments and subscriptions there are stands in the metadata, and every broker answers for it. How far a
log reaches, what it weighs and how far subscriptions have come in it changes with every batch: that lives with the log.
These are the questions that a segment's owner answers from its own memory, without waiting:

    segment_statistics  offsets and size of the segments that it serves
    topic_counts        what it has published and delivered of a topic since it started

One answer may need a disk: how old the oldest message of a queue is, if no consumer has fetched it lately.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from braid.broker.metrics import BrokerMetrics, TopicMetrics
from braid.broker.segments.segments import OwnedSegment, Segments
from braid.cluster.load_reports import MeasuredRates
from braid.model.errors import BraidError
from braid.model.ids import Epoch, Offset, SegmentId
from braid.model.layout import HashRange
from braid.model.load import KeyHashLoad
from braid.model.names import TopicName
from braid.scaling.auto_scale import has_hot_key
from braid.storage.segment import SegmentStorage


class SegmentStatistics(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    owner: str
    epoch: Epoch
    earliest_offset: Offset
    end_offset: Offset
    records: int
    bytes: int
    """Stored, once: in chunks, or in local files that no chunk covers."""
    bytes_in_per_s: int | None = None
    bytes_out_per_s: int | None = None
    records_in_per_s: int | None = None
    """None: its owner is of a version that does not tell."""
    chunks: int | None = None
    chunk_bytes: int | None = None
    exported_offset: Offset | None = None
    log_bytes: int | None = None
    """As in these: None from an owner of an older version."""
    hot_key_hashes: HashRange | None = None
    """Those of a key that is most of its load; None if there is none, or if nobody measures."""
    hot_key_share: float | None = None


class TopicCounts(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """On one broker, since it started."""

    published_batches: int
    published_records: int
    published_bytes: int
    duplicate_batches: int
    delivered_batches: int
    delivered_records: int
    delivered_bytes: int


class QueueStatistics(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What the owner of a segment knows of a queue there."""

    ready: Annotated[int, Meta(description="Messages that the next consumer gets.")]
    leased: Annotated[int, Meta(description="Messages that consumers have, and have not settled.")]
    delayed: Annotated[int, Meta(description="Messages that wait for their time: after a nack, or as published.")]
    dead_lettered: Annotated[
        int, Meta(description="Messages that went to the dead-letter topic since the segment's owner opened it.")
    ]
    oldest_at: Annotated[
        int | None,
        Meta(
            description="When the oldest unsettled message was published, by its batch: microseconds since 1970. Null: "
            "there is none, or it is not known."
        ),
    ]
    consumers: Annotated[tuple[str, ...], Meta(description="Those that are attached to the segment.")]
    blocked: Annotated[str, Meta(description="Why no new messages are handed out; empty: they are.")]

    @property
    def unsettled(self) -> int:
        return self.ready + self.leased + self.delayed


Rates = Callable[[str, SegmentId], MeasuredRates]
"""Of a segment of a topic's path."""


def segment_statistics(
    broker: str, segments: Segments, topic: TopicName, rates: Rates
) -> dict[SegmentId, SegmentStatistics]:
    """Of the segments that this broker, which has the id `broker`, serves now."""
    return {segment.name.id: _statistics(broker, segment, rates) for segment in segments.of_topic(topic.path)}


def _statistics(broker: str, segment: OwnedSegment, rates: Rates) -> SegmentStatistics:
    earliest, end = segment.earliest, segment.end
    found, hot = rates(segment.name.topic.path, segment.name.id), hot_key(segment)
    catalog = segment.storage.catalog
    return SegmentStatistics(
        owner=broker,
        epoch=segment.epoch,
        earliest_offset=earliest,
        end_offset=end,
        records=end - earliest,
        bytes=stored_bytes(segment.storage),
        bytes_in_per_s=found.bytes_in_per_s,
        bytes_out_per_s=found.bytes_out_per_s,
        records_in_per_s=found.records_in_per_s,
        chunks=len(catalog.chunks),
        chunk_bytes=sum(chunk.size for chunk in catalog.chunks),
        exported_offset=catalog.next_offset,
        log_bytes=sum(file.batch_bytes for file in segment.storage.log.files),
        hot_key_hashes=hot.hottest if hot is not None else None,
        hot_key_share=round(hot.hottest_share, 3) if hot is not None else None,
    )


async def queue_statistics(segment: OwnedSegment, deadline: float) -> dict[str, QueueStatistics]:
    """Of the segment's queues, by subscription. Reads end at the deadline, by the loop's time: the rest is known."""
    found: dict[str, QueueStatistics] = {}
    for name, counts in segment.queues.counts().items():
        oldest_us = counts.oldest_us
        if not oldest_us and counts.ready + counts.leased + counts.delayed:
            oldest_us = await _written_at(segment, segment.cursors.offset(name), deadline)
        found[name] = QueueStatistics(
            ready=counts.ready,
            leased=counts.leased,
            delayed=counts.delayed,
            dead_lettered=counts.dead_lettered,
            oldest_at=oldest_us or None,
            consumers=counts.consumers,
            blocked=counts.blocked,
        )
    return found


async def _written_at(segment: OwnedSegment, offset: Offset | None, deadline: float) -> int:
    """Return the time of the batch at this offset; 0 if there is none, or if it cannot be read in time."""
    if offset is None:
        return 0
    try:
        async with asyncio.timeout_at(deadline):
            batches = await segment.storage.reader(max(offset, segment.earliest)).read_available(1)
    except (BraidError, TimeoutError):
        return 0
    return batches[0].header.min_timestamp if batches else 0


def unsettled(segment: OwnedSegment) -> dict[str, int]:
    """Return the number of messages that queues have not settled, by subscription."""
    return {name: each.ready + each.leased + each.delayed for name, each in segment.queues.counts().items()}


def hot_key(segment: OwnedSegment) -> KeyHashLoad | None:
    """Return how the segment's load spreads if one key is most of it; None if none is, or if nobody measures."""
    samples = segment.publishes.samples
    found = samples.summary() if samples is not None else None
    return found if found is not None and has_hot_key(found, segment.name.range) else None


def topic_counts(metrics: BrokerMetrics, topic: TopicName) -> TopicCounts:
    return msgspec.convert(metrics.topics.get(topic.path) or TopicMetrics(), TopicCounts, from_attributes=True)


def stored_bytes(storage: SegmentStorage) -> int:
    """Chunks, and local files as far as no chunk covers them."""
    exported = storage.catalog.next_offset
    tail = (file.batch_bytes for file in storage.log.files if file.next_offset > exported)
    return sum(chunk.size for chunk in storage.catalog.chunks) + sum(tail)
