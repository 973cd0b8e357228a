"""Which offsets a batch read wants: a pure function of its options and a snapshot."""

from __future__ import annotations

import logging
from typing import Final

from braid.client.consuming.checkpoint import END
from braid.model.errors import DataLoss, InvalidArgument, OffsetOutOfRange
from braid.spark.source.options import EARLIEST, LATEST, Offsets, SourceOptions
from braid.spark.source.planning import Range
from braid.spark.source.snapshot import SegmentSnapshot, TopicSnapshot

_log: Final = logging.getLogger(__name__)


def wanted_ranges(snapshot: TopicSnapshot, options: SourceOptions) -> list[Range]:
    """Return the range of each segment, without empty ranges. A segment that startingOffsets does not name begins at
    its earliest record; a segment that endingOffsets does not name ends at its latest."""
    check_named(snapshot, options)
    ranges = [_range(snapshot, segment, options) for segment in snapshot.segments.values()]
    return [each for each in ranges if each.records]


def check_named(snapshot: TopicSnapshot, options: SourceOptions) -> None:
    """Check that the options name only existing segments."""
    _check_known(snapshot, "startingOffsets", options.starting_offsets)
    _check_known(snapshot, "endingOffsets", options.ending_offsets)


def _check_known(snapshot: TopicSnapshot, option: str, offsets: Offsets | None) -> None:
    for segment in offsets if isinstance(offsets, dict) else ():
        if segment not in snapshot.segments:
            known = ", ".join(map(str, sorted(snapshot.segments)))
            raise InvalidArgument(
                f"option {option} names segment {segment}, which topic {snapshot.topic} does not have; it has {known}"
            )


def _range(snapshot: TopicSnapshot, segment: SegmentSnapshot, options: SourceOptions) -> Range:
    first = _place(segment, options.starting_offsets or EARLIEST, default=segment.earliest)
    until = _place(segment, options.ending_offsets or LATEST, default=segment.end)
    where = f"segment {segment.id} of topic {snapshot.topic}, which holds {segment.earliest} to {segment.end - 1}"
    for option, offset in (("startingOffsets", first), ("endingOffsets", until)):
        if offset > segment.end:
            raise OffsetOutOfRange(
                f"option {option} names offset {offset} of {where}: it does not exist", segment.earliest, segment.end
            )
    if first < segment.earliest:
        text = f"option startingOffsets names offset {first} of {where}: retention has deleted earlier records"
        if options.fail_on_data_loss:
            raise DataLoss(f"{text}. Begin at earliest, or set option failOnDataLoss to false to read what is left")
        _log.warning("%s; reading begins at %d, because failOnDataLoss is false", text, segment.earliest)
        first = segment.earliest
    if until < first and first == segment.earliest:
        until = first  # Retention has deleted all records that were asked for.
    if until < first:
        raise InvalidArgument(
            f"options startingOffsets and endingOffsets ask for offsets {first} up to {until} of {where}: the end is "
            "before the start"
        )
    return Range(segment.id, first, until)


def _place(segment: SegmentSnapshot, offsets: Offsets, *, default: int) -> int:
    if offsets == EARLIEST:
        return segment.earliest
    if offsets == LATEST:
        return segment.end
    assert isinstance(offsets, dict)
    place = offsets.get(segment.id)
    if place is None:
        return default
    if place == END or place == -1:
        return segment.end
    return segment.earliest if place == -2 else place
