"""Where the next micro-batch ends: a pure function of a snapshot, the query's position and its limits.

    beginning          where a new query begins
    stream_position    where the query stands in the topic as it is now, and which records it has lost
    admit              how far it goes from there
    partitions         into how many tasks that is cut

**Order (I4).** The tasks of a micro-batch run at the same time, so a parent's records must not be in the same
micro-batch as its child's. A micro-batch has only segments whose ancestors were read to their end *before* it begins;
it is not enough that the ancestors end within it. A parent that ends within a micro-batch gets END, and its children
come with the next one. A segment that is sealed exactly at the query's position counts as read: no record will follow,
so its children may be read immediately, and a chain of empty segments does not cost a micro-batch for each.

**Progress.** If nothing is new, the end equals the beginning exactly: otherwise Spark would run empty micro-batches for
ever. But a segment that turns out to be finished moves the end, without any record: without END the segment would seem
lost once the topic forgets it.

**Limits** are shared among the segments in proportion to their waiting records, so that all segments arrive at the same
time, and event times in a micro-batch stay close together. Each segment with waiting records gets at least one, so none
starves. If the limit is too low for that, segments take turns; the sum of the positions decides whose turn it is, so
turns need no state. One record always passes, because a byte limit below its size would stop the query. Bytes are
estimated from the size of the stored batches, so the byte limit holds on average.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from braid.client.consuming.checkpoint import END, Position, epochs_before, readable_segments
from braid.model.ids import Epoch
from braid.model.log.epochs import UNKNOWN_EPOCH, parting
from braid.scan.options import EARLIEST, LATEST
from braid.scan.planning import Range
from braid.scan.ranges import wanted_ranges
from braid.scan.snapshot import SegmentSnapshot, TopicSnapshot
from braid.spark.source.options import SourceOptions
from braid.spark.stream.offsets import StreamOffset, is_behind, is_other_topic, still_behind

PARTITION_BYTES: Final = 8 << 20
"""A partition takes 10 to 35 ms to start, about as long as reading this much. Less is not worth a partition."""

Segments = Mapping[int, SegmentSnapshot]
NO_EPOCHS: Final[Mapping[int, Epoch]] = {}
"""Nothing is known, and nothing is checked."""


class BatchLimits(msgspec.Struct, frozen=True):
    """The limits of one micro-batch. None: no limit."""

    records: int | None = None
    bytes: int | None = None


class StreamPosition(msgspec.Struct, frozen=True):
    """The position of a query in a topic as it is now."""

    positions: dict[int, Position]
    """Of every segment. After a loss, the first record that still exists."""
    losses: tuple[str, ...] = ()
    """Records that the query can never read, each the beginning of a sentence."""


def beginning(
    options: SourceOptions, snapshot: TopicSnapshot, at_time: Mapping[int, int] | None = None
) -> dict[int, Position]:
    """Return where a new query begins: by default at the latest records. `at_time` has, for each segment, an offset
    before which no row is wanted by startingTimestamp; later rows that are older are left out when they are read."""
    said = options.starting_offsets or (LATEST if at_time is None else EARLIEST)
    asked = msgspec.structs.replace(options, starting_offsets=said)
    firsts = {each.segment: each.first for each in wanted_ranges(snapshot, asked)}
    positions: dict[int, Position] = {}
    for segment, found in sorted(snapshot.segments.items()):
        first = firsts.get(segment, found.end)  # A missing range is empty.
        if at_time is not None:
            first = max(first, min(at_time.get(segment, 0), found.end))
        positions[segment] = _read_up_to(found, first)
    return positions


def stream_position(start: StreamOffset, snapshot: TopicSnapshot) -> StreamPosition:
    """Return where a query stands. `NotServing` if the snapshot is older than its start: segments that the query has
    read would be read again, and others would seem lost."""
    segments = snapshot.segments
    if is_behind(snapshot, start):
        raise still_behind(snapshot, start)
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
        parted_at = parting(found.epochs, position, start.epochs.get(segment, UNKNOWN_EPOCH))
        if parted_at is not None:
            positions[segment] = max(parted_at, found.earliest)
            losses.append(_parted(snapshot, segment, position, parted_at, "the query had read it"))
        elif position < found.earliest:
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
    """Return the topic as it is now, without the records that came after `target` was taken. A segment that has lost
    records since then ends where it ends now, and it is sealed only if it is sealed now, too."""
    segments = {
        segment: msgspec.structs.replace(now, end=min(now.end, then.end), sealed=now.sealed and then.sealed)
        for segment, then in target.segments.items()
        if (now := snapshot.segments.get(segment)) is not None
    }
    return msgspec.structs.replace(snapshot, segments=segments)


def admit(snapshot: TopicSnapshot, positions: Mapping[int, Position], limits: BatchLimits) -> dict[int, Position]:
    """Return where a micro-batch ends that begins at these positions: at the same positions if nothing is new."""
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
    """Return the position of a query that has read everything."""
    return {segment: _read_up_to(found, found.end) for segment, found in sorted(snapshot.segments.items())}


def epochs_at(positions: Mapping[int, Position], snapshot: TopicSnapshot) -> dict[int, Epoch]:
    """Return the epochs of the records before these positions, as far as they are known."""
    return epochs_before(positions, {number: segment.epochs for number, segment in snapshot.segments.items()})


def ranges(
    begin: Mapping[int, Position],
    end: Mapping[int, Position],
    snapshot: TopicSnapshot,
    epochs: Mapping[int, Epoch] = NO_EPOCHS,
) -> list[Range]:
    """Return the ranges between two positions. END is the end of the segment in the snapshot: the segment is sealed, so
    its end never changes. A segment that is gone has no range (see `gone`). `epochs` are those of `end`: a range stops
    where the segment has lost the records that were in it."""
    found = []
    for segment, until in sorted(end.items()):
        first = begin.get(segment, 0)
        if first == END or segment not in snapshot.segments:
            continue
        last = snapshot.segments[segment].end if until == END else until
        parted_at = parting(snapshot.segments[segment].epochs, last, epochs.get(segment, UNKNOWN_EPOCH))
        if parted_at is not None:
            last = parted_at
        if first < last:
            found.append(Range(segment, first, last))
    return found


def gone(
    begin: Mapping[int, Position],
    end: Mapping[int, Position],
    snapshot: TopicSnapshot,
    epochs: Mapping[int, Epoch] = NO_EPOCHS,
) -> tuple[str, ...]:
    """Say which records of a micro-batch that runs again are not there any more; as `StreamPosition.losses`. `epochs`
    are those of `end`."""
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
    for number in sorted(end.keys() & snapshot.segments.keys()):
        until = end[number]
        if until != END and begin.get(number, 0) != until:
            parted_at = parting(snapshot.segments[number].epochs, until, epochs.get(number, UNKNOWN_EPOCH))
            if parted_at is not None:
                found.append(_parted(snapshot, number, until, parted_at, "the micro-batch reaches"))
    for each in ranges(begin, end, snapshot, epochs):
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
    """Return how many partitions to make: one for every few megabytes, but not so many that a segment is divided,
    because a key's records are in order only within a partition. `min_partitions` has precedence, if there are so many
    records."""
    size = sum(each.records * _record_bytes(segments[each.segment]) for each in admitted)
    by_size = min(len(admitted), int(-(-size // PARTITION_BYTES)))
    records = sum(each.records for each in admitted)
    return max(1, by_size, min(min_partitions, records))


def _parted(snapshot: TopicSnapshot, segment: int, until: int, parted_at: int, what: str) -> str:
    return (
        f"segment {segment} of {snapshot.topic} has lost records, and holds other records from offset {parted_at} on: "
        f"{what} up to offset {until}"
    )


def _read_up_to(segment: SegmentSnapshot | None, position: Position) -> Position:
    if segment is None or position == END:
        return position
    return END if segment.sealed and position >= segment.end else position


def _record_bytes(segment: SegmentSnapshot) -> float:
    return max(1.0, segment.bytes_per_record)


def _within(waiting: Mapping[int, int], segments: Segments, limits: BatchLimits, turn: int) -> Mapping[int, int]:
    """Return how many records of each segment are within the limits."""
    if limits.records is not None:
        waiting = _share(waiting, dict.fromkeys(waiting, 1), max(1, limits.records), turn)
    if limits.bytes is not None:
        sizes = {segment: _record_bytes(segments[segment]) for segment in waiting}
        waiting = _share(waiting, sizes, max(1, limits.bytes), turn)
    return waiting


def _share(waiting: Mapping[int, int], costs: Mapping[int, float], budget: int, turn: int) -> Mapping[int, int]:
    """Share the budget in proportion to the waiting records: at least one record for each segment. If that is too much,
    one record each for some of the segments, and for at least one."""
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
    for segment in order:  # Share the rest that rounding has left.
        more = max(0, min(int(left // costs[segment]), waiting[segment] - shares[segment]))
        shares[segment] += more
        left -= more * costs[segment]
    return shares


def _one_each(order: list[int], costs: Mapping[int, float], budget: float) -> dict[int, int]:
    """Take one record each from the first segments that the budget allows, and always from the first."""
    taken = {order[0]: 1}
    left = budget - costs[order[0]]
    for segment in order[1:]:
        left -= costs[segment]
        if left < 0:
            break
        taken[segment] = 1
    return taken
