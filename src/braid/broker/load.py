"""What this broker has counted, for its load report (cluster/load_reports.py)."""

from __future__ import annotations

from braid.broker.admin.segment_stats import stored_bytes
from braid.broker.groups.subscriptions import Progress
from braid.broker.metrics import BrokerMetrics
from braid.broker.segments.host import OwnedSegment, Segments
from braid.cluster.load_reports import Reading, SegmentReading


def reading(segments: Segments, metrics: BrokerMetrics, adopted_generation: int | None) -> Reading:
    return Reading(
        [_of_segment(each) for each in segments.all()],
        sum(topic.published_records for topic in metrics.topics.values()),
        adopted_generation,
    )


def _of_segment(segment: OwnedSegment) -> SegmentReading:
    earliest, end, stored = segment.earliest, segment.end, stored_bytes(segment.storage)
    backlog = sum(Progress(offset, earliest, end).backlog for offset in segment.cursors.all().values())
    return SegmentReading(
        segment.name.topic.path,
        segment.name.id,
        segment.publishes.taken_bytes,
        segment.delivered_bytes,
        stored,
        backlog * stored // max(end - earliest, 1),  # As if all its records were equally long.
    )
