"""Where a look at a topic begins: `braid consume --from`."""

from __future__ import annotations

import datetime
import re
import time
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import click

from braid.cli.terminal.param_types import DURATION

if TYPE_CHECKING:
    from braid.wire.operations import SegmentPositions

_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND: Final = datetime.timedelta(microseconds=1)
_LONG_AGO_US: Final = -(1 << 63)
"""No record is older."""
_EXAMPLES: Final = "earliest, latest, -1h, 2026-11-15T12:00:00Z, an offset, or -5 for the last five records"


class AtTime(NamedTuple):
    time_us: int


class AtOffset(NamedTuple):
    offset: int
    """In each segment. Below 0: so many records before the end."""


StartPoint = Literal["earliest", "latest"] | AtTime | AtOffset


def parse_start(text: str, now_us: int) -> StartPoint:
    """Parse what a person writes. A time is in UTC unless it has a zone. Raises `ValueError`."""
    match text:
        case "earliest":
            return "earliest"
        case "latest":
            return "latest"
    if re.fullmatch(r"-?[0-9]{1,18}", text, re.ASCII):
        return AtOffset(int(text))
    if text.startswith("-"):
        return AtTime(max(now_us - DURATION.convert(text[1:], None, None) * 1_000_000, _LONG_AGO_US))
    moment = datetime.datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return AtTime((moment - _EPOCH) // _MICROSECOND)


def first_offset(start: StartPoint, segment: SegmentPositions) -> int:
    """Return the offset at which a look at this segment begins. An offset that does not exist means the next one that
    does."""
    match start:
        case "earliest":
            return segment.earliest
        case "latest":
            return segment.end
        case AtTime():
            return max(segment.at_time, segment.earliest)
        case AtOffset(offset):
            wanted = offset if offset >= 0 else segment.end + offset
            return min(max(wanted, segment.earliest), segment.end)


class StartType(click.ParamType[StartPoint]):
    name = "start"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> StartPoint:
        if not isinstance(value, str):
            point: StartPoint = value
            return point
        try:
            return parse_start(value, time.time_ns() // 1_000)
        except (ValueError, click.BadParameter):
            self.fail(f"{value[:200]!r} is no place to begin: write {_EXAMPLES}", param, ctx)


START: Final = StartType()
