"""Where the next micro-batch ends: a pure function of what there is, where the query stands, and its limits.

    beginning          where a new query begins
    stream_position    where the query stands in the topic as it is now, and which records it has lost
    admit              how far it goes from there
    partitions         into how many tasks that is cut

**Order (I4).** The tasks of a micro-batch run side by side, so a parent's records must not be in the same one as its
child's. Only segments that are readable where the micro-batch begins take part: every ancestor of theirs was read to
its end *before*. It is not enough that the ancestors end within this micro-batch. A parent that is finished by it gets
END, and its children come with the next one. A segment that is sealed exactly where the query stands counts as read:
nothing will ever follow, so its children may be read at once, and a chain of empty segments does not cost a micro-batch
for each.

**Progress.** If nothing is new, the end is the beginning, to the letter: otherwise Spark would run empty micro-batches
for ever. But a segment that turns out to be finished does move the end, without any record: if END were not kept, the
segment would seem lost once the topic forgets it.

**Limits** are shared out over the segments in proportion to what waits in each, so that all of them arrive at the same
time: event times in a micro-batch stay close together. Each segment that has records gets at least one, so none
starves. If not even that is within the limit, they take turns; whose turn it is follows from the sum of the positions,
so it needs no memory. One record is always let through, for a limit of bytes below its size would stop the query.
Bytes are estimates from the size of the stored batches, and so the limit of bytes is kept on average.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from braid.client.consuming.checkpoint import END, Position, readable_segments
from braid.spark.source.options import EARLIEST, LATEST, SourceOptions
from braid.spark.source.planning import Range
from braid.spark.source.ranges import wanted_ranges
from braid.spark.source.snapshot import SegmentSnapshot, TopicSnapshot
from braid.spark.stream.offsets import StreamOffset, is_other_topic

PARTITION_BYTES: Final = 8 << 20
"""A partition costs 10 to 35 ms to start, about as long as it takes to read so much. Less is not worth a partition."""

Segments = Mapping[int, SegmentSnapshot]


class BatchLimits(msgspec.Struct, frozen=True):
    """Of one micro-batch. None: no limit."""

    records: int | None = None
    bytes: int | None = None


class StreamPosition(msgspec.Struct, frozen=True):
    """Where a query stands in a topic as it is now."""

    positions: dict[int, Position]
    """Of every segment. What is lost is left behind: the first record that is still there."""
    losses: tuple[str, ...] = ()
    """What the query can never read, each a sentence's beginning."""


def beginning(
    options: SourceOptions, snapshot: TopicSnapshot, at_time: Mapping[int, int] | None = None
) -> dict[int, Position]:
    """Where a new query begins: at the latest records if nothing was said. `at_time` has an offset for each segment
    with no row before it that startingTimestamp asks for; rows behind it that are older are left out when read."""
    said = options.starting_offsets or (LATEST if at_time is None else EARLIEST)
    asked = msgspec.structs.replace(options, starting_offsets=said)
    firsts = {each.segment: each.first for each in wanted_ranges(snapshot, asked)}
    positions: dict[int, Position] = {}
    for segment, found in sorted(snapshot.segments.items()):
        first = firsts.get(segment, found.end)  # A range that is left out is empty.
        if at_time is not None:
            first = max(first, min(at_time.get(segment, 0), found.end))
        positions[segment] = _read_up_to(found, first)
    return positions


def stream_position(start: StreamOffset, snapshot: TopicSnapshot) -> StreamPosition:
    segments = snapshot.segments
    if is_other_topic(start, snapshot.topic_id):
        loss = (
            f"topic {snapshot.topic} was deleted and created again (its id was {start.topic_id} and is "
            f"{snapshot.topic_id} now): what the query had not read of the old one is gone"
        )
        return StreamPosition({segment.id: segment.earliest for segment in segments.values()}, (loss,))
    losses = [
        f"segment {segment} of {snapshot.topic} is gone, and the query had read it only up to offset {position}"
        for segment, position in sorted(start.positions.items())
        if position != END and segment not in segments
    ]
    positions: dict[int, Position] = {}
    for segment in sorted(segments):
        found = segments[segment]
        position = start.positions.get(segment, 0)
        positions[segment] = position
        if position == END:
            continue
        if position < found.earliest:
            positions[segment] = found.earliest
            losses.append(
                f"offsets {position} to {found.earliest - 1} of segment {segment} of {snapshot.topic} were deleted by "
                "retention before the query had read them"
            )
        elif position > found.end and snapshot.live:
            positions[segment] = found.end
            losses.append(
                f"segment {segment} of {snapshot.topic} ends at offset {found.end}, and the query had read it up to "
                f"{position}: the topic has lost records"
            )
    return StreamPosition(positions, tuple(losses))


def bounded(snapshot: TopicSnapshot, target: TopicSnapshot) -> TopicSnapshot:
    """The topic as it is, but as if nothing had been written to it since `target` was taken."""
    segments = {
        segment: msgspec.structs.replace(snapshot.segments[segment], end=then.end, sealed=then.sealed)
        for segment, then in target.segments.items()
        if segment in snapshot.segments
    }
    return msgspec.structs.replace(snapshot, segments=segments)


def admit(snapshot: TopicSnapshot, positions: Mapping[int, Position], limits: BatchLimits) -> dict[int, Position]:
    """Where a micro-batch ends that begins at these positions. They stay as they are if nothing is new."""
    segments = snapshot.segments
    ends = {segment: _read_up_to(segments.get(segment), position) for segment, position in positions.items()}
    parents = {segment: found.parents for segment, found in segments.items()}
    waiting: dict[int, int] = {}
    for segment in readable_segments(parents, ends):
        position = ends.get(segment, 0)
        assert position != END
        if segments[segment].end > position:
            waiting[segment] = segments[segment].end - position
    turn = sum(position for position in ends.values() if position != END)
    for segment, count in _within(waiting, segments, limits, turn).items():
        position = ends.get(segment, 0)
        assert position != END
        ends[segment] = _read_up_to(segments[segment], position + count)
    return ends


def latest(snapshot: TopicSnapshot) -> dict[int, Position]:
    """Where a query stands that has read everything."""
    return {segment: _read_up_to(found, found.end) for segment, found in sorted(snapshot.segments.items())}


def ranges(begin: Mapping[int, Position], end: Mapping[int, Position], snapshot: TopicSnapshot) -> list[Range]:
    """The records between two positions. A segment that ends with END ends where the snapshot has its end: it is
    sealed, so that is always the same place. Of a segment that is gone nothing can be read (`gone` tells)."""
    found = []
    for segment, until in sorted(end.items()):
        first = begin.get(segment, 0)
        if first == END or segment not in snapshot.segments:
            continue
        last = snapshot.segments[segment].end if until == END else until
        if first < last:
            found.append(Range(segment, first, last))
    return found


def gone(begin: Mapping[int, Position], end: Mapping[int, Position], snapshot: TopicSnapshot) -> tuple[str, ...]:
    """Say which records of a micro-batch that runs again are not there any more; as `StreamPosition.losses`."""
    found = [
        f"segment {segment} of {snapshot.topic} is gone, and with it its records from offset {begin.get(segment, 0)}"
        for segment in sorted(end)
        if segment not in snapshot.segments and begin.get(segment, 0) not in (END, end[segment])
    ]
    found += [
        f"segment {segment} of {snapshot.topic} had ended when the micro-batch was made, and what is there of it now "
        f"breaks off at offset {snapshot.segments[segment].end}: its last records are missing"
        for segment in sorted(end.keys() & snapshot.segments.keys())
        if end[segment] == END and begin.get(segment, 0) != END and not snapshot.segments[segment].sealed
    ]
    for each in ranges(begin, end, snapshot):
        segment = snapshot.segments[each.segment]
        if each.first < segment.earliest:
            last = min(segment.earliest, each.until) - 1
            found.append(f"offsets {each.first} to {last} of segment {segment.id} of {snapshot.topic} were deleted")
        if each.until > segment.end and snapshot.live:
            found.append(
                f"segment {segment.id} of {snapshot.topic} ends at offset {segment.end}, and the micro-batch at "
                f"{each.until}: the topic has lost records"
            )
    return tuple(found)


def partitions(admitted: list[Range], segments: Segments, min_partitions: int = 0) -> int:
    """Few and large: one for every few megabytes, but none that would divide a segment, because a key's records are in
    order only within a partition. `min_partitions` are made nevertheless, if there are so many records."""
    size = sum(each.records * _record_bytes(segments[each.segment]) for each in admitted)
    by_size = min(len(admitted), int(-(-size // PARTITION_BYTES)))
    records = sum(each.records for each in admitted)
    return max(1, by_size, min(min_partitions, records))


def _read_up_to(segment: SegmentSnapshot | None, position: Position) -> Position:
    if segment is None or position == END:
        return position
    return END if segment.sealed and position >= segment.end else position


def _record_bytes(segment: SegmentSnapshot) -> float:
    return max(1.0, segment.bytes_per_record)


def _within(waiting: Mapping[int, int], segments: Segments, limits: BatchLimits, turn: int) -> Mapping[int, int]:
    """How many records of each segment are within the limits."""
    if limits.records is not None:
        waiting = _share(waiting, dict.fromkeys(waiting, 1), max(1, limits.records), turn)
    if limits.bytes is not None:
        sizes = {segment: _record_bytes(segments[segment]) for segment in waiting}
        waiting = _share(waiting, sizes, max(1, limits.bytes), turn)
    return waiting


def _share(waiting: Mapping[int, int], costs: Mapping[int, float], budget: int, turn: int) -> Mapping[int, int]:
    """Parts of what waits, in proportion, that cost no more than the budget; each at least one record, or if that is
    too much, one each for some of the segments and at least for one."""
    if sum(count * costs[segment] for segment, count in waiting.items()) <= budget:
        return waiting
    order = sorted(waiting)
    left: float = budget - sum(costs.values())
    if left < 0:
        first = turn % len(order)
        return _one_each(order[first:] + order[:first], costs, budget)
    further = sum((count - 1) * costs[segment] for segment, count in waiting.items())
    shares = {segment: 1 + min(int((count - 1) * left // further), count - 1) for segment, count in waiting.items()}
    left = budget - sum(count * costs[segment] for segment, count in shares.items())
    for segment in order:  # What rounding has left.
        more = max(0, min(int(left // costs[segment]), waiting[segment] - shares[segment]))
        shares[segment] += more
        left -= more * costs[segment]
    return shares


def _one_each(order: list[int], costs: Mapping[int, float], budget: float) -> dict[int, int]:
    """Of as many as the budget allows, and of the first in any case."""
    taken = {order[0]: 1}
    left = budget - costs[order[0]]
    for segment in order[1:]:
        left -= costs[segment]
        if left < 0:
            break
        taken[segment] = 1
    return taken
