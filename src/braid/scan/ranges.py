"""Which offsets a batch read wants: a pure function of its options and a snapshot."""

from __future__ import annotations

import logging
from typing import Final

from braid.client.consuming.checkpoint import END
from braid.model.errors import DataLoss, InvalidArgument, OffsetOutOfRange
from braid.scan.options import EARLIEST, LATEST, Offsets, ScanOptions
from braid.scan.planning import Range
from braid.scan.snapshot import SegmentSnapshot, TopicSnapshot

_log: Final = logging.getLogger(__name__)


def wanted_ranges(snapshot: TopicSnapshot, options: ScanOptions) -> list[Range]:
    """Return the range of each segment, without empty ranges."""
    return [each for each in asked_ranges(snapshot, options) if each.records]


def asked_ranges(snapshot: TopicSnapshot, options: ScanOptions) -> list[Range]:
    """Return the range of each segment. A segment that the starting offsets do not name begins at its earliest record;
    a segment that the ending offsets do not name ends at its latest."""
    check_named(snapshot, options)
    return [_range(snapshot, segment, options) for segment in snapshot.segments.values()]


def check_named(snapshot: TopicSnapshot, options: ScanOptions) -> None:
    """Check that the options name only existing segments."""
    _check_known(snapshot, options.called("starting_offsets"), options.starting_offsets)
    _check_known(snapshot, options.called("ending_offsets"), options.ending_offsets)


def _check_known(snapshot: TopicSnapshot, option: str, offsets: Offsets | None) -> None:
    for segment in offsets if isinstance(offsets, dict) else ():
        if segment not in snapshot.segments:
            known = ", ".join(map(str, sorted(snapshot.segments)))
            raise InvalidArgument(
                f"{option} names segment {segment}, which topic {snapshot.topic} does not have; it has {known}"
            )


def _range(snapshot: TopicSnapshot, segment: SegmentSnapshot, options: ScanOptions) -> Range:
    first = _place(segment, options.starting_offsets or EARLIEST, default=segment.earliest)
    until = _place(segment, options.ending_offsets or LATEST, default=segment.end)
    where = f"segment {segment.id} of topic {snapshot.topic}, which holds {segment.earliest} to {segment.end - 1}"
    starting, ending = options.called("starting_offsets"), options.called("ending_offsets")
    for option, offset in ((starting, first), (ending, until)):
        if offset > segment.end:
            raise OffsetOutOfRange(
                f"{option} names offset {offset} of {where}: it does not exist", segment.earliest, segment.end
            )
    if first < segment.earliest:
        text = f"{starting} names offset {first} of {where}: retention has deleted earlier records"
        kept = options.called("fail_on_data_loss")
        if options.fail_on_data_loss:
            raise DataLoss(f"{text}. Begin at earliest, or set {kept} to false to read what is left")
        _log.warning("%s; reading begins at %d, because %s is false", text, segment.earliest, kept)
        first = segment.earliest
    if until < first and first == segment.earliest:
        until = first  # Retention has deleted all records that were asked for.
    if until < first:
        raise InvalidArgument(
            f"{starting} and {ending} ask for offsets {first} up to {until} of {where}: the end is before the start"
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
