"""What a query's filters say about which offsets and chunks it needs.

Only to read less: Spark checks every filter again, on the rows. So a filter that is not understood is simply not used,
and one that is understood may be used loosely. A key is looked for by its hash: segments, chunks, runs and batches with
a range of hashes that does not have it hold no record of it.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from braid.model.hashing import key_hash
from braid.spark.source.options import SourceOptions
from braid.spark.source.planning import Prune, Range

_MICROSECOND: Final = datetime.timedelta(microseconds=1)
_1970: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


class Interval(msgspec.Struct, frozen=True):
    """The numbers from `low` to `high`, both included; None: without a bound."""

    low: int | None = None
    high: int | None = None

    def __and__(self, other: Interval) -> Interval:
        lows = [each for each in (self.low, other.low) if each is not None]
        highs = [each for each in (self.high, other.high) if each is not None]
        return Interval(max(lows, default=None), min(highs, default=None))

    def __contains__(self, number: int) -> bool:
        return (self.low is None or number >= self.low) and (self.high is None or number <= self.high)


class Filters(msgspec.Struct, frozen=True):
    segments: Interval = Interval()
    offsets: Interval = Interval()
    times: Interval = Interval()
    """µs since 1970."""
    hashes: frozenset[int] | None = None

    @property
    def prune(self) -> Prune:
        before = None if self.times.high is None else self.times.high + 1
        return Prune(self.times.low, before, self.hashes)

    def narrowed(self, ranges: Iterable[Range]) -> list[Range]:
        """The ranges, as far as segment and offset may be wanted."""
        found = []
        for each in ranges:
            if each.segment in self.segments:
                low = each.first if self.offsets.low is None else max(each.first, self.offsets.low)
                high = each.until if self.offsets.high is None else min(each.until, self.offsets.high + 1)
                if low < high:
                    found.append(Range(each.segment, low, high))
        return found


def no_filters(options: SourceOptions) -> Filters:
    """Only the bounds of time that the options give."""
    since, before = options.starting_timestamp, options.ending_timestamp
    return Filters(times=Interval(since, None if before is None else before - 1))


def understood(filters: Sequence[Filter], options: SourceOptions) -> Filters:
    """All of the filters hold at once."""
    found = no_filters(options)
    for each in filters:
        found = _with(found, each)
    return found


def _with(found: Filters, one: Filter) -> Filters:
    column = getattr(one, "attribute", ())
    match column:
        case ("segment",):
            return msgspec.structs.replace(found, segments=found.segments & _interval(one, _integer))
        case ("offset",):
            return msgspec.structs.replace(found, offsets=found.offsets & _interval(one, _integer))
        case ("timestamp",):
            return msgspec.structs.replace(found, times=found.times & _interval(one, _microseconds))
        case ("keyHash",):
            hashes = _values(one, _integer)
            # Records without a key show 0 there, and count in nobody's range of hashes.
            return found if hashes is None or 0 in hashes else _with_hashes(found, hashes)
        case ("key",):
            keys = _values(one, _bytes)
            return found if keys is None else _with_hashes(found, [key_hash(key) for key in keys])
    return found


def _with_hashes(found: Filters, hashes: Iterable[int]) -> Filters:
    both = frozenset(hashes) if found.hashes is None else found.hashes & frozenset(hashes)
    return msgspec.structs.replace(found, hashes=both)


def _interval(one: Filter, number: Any) -> Interval:
    """Which numbers may pass; all of them where the filter is none of these."""
    values = _values(one, number)
    if values:
        return Interval(min(values), max(values))
    bound = number(getattr(one, "value", None))
    if bound is None:
        return Interval()
    match one:
        case GreaterThan():
            return Interval(low=bound + 1)
        case GreaterThanOrEqual():
            return Interval(low=bound)
        case LessThan():
            return Interval(high=bound - 1)
        case LessThanOrEqual():
            return Interval(high=bound)
    return Interval()


def _values(one: Filter, read: Any) -> list[Any] | None:
    """The values that the column may have, for a filter that lists them; None where it does not, or lists others."""
    match one:
        case EqualTo() | EqualNullSafe():
            values = [read(one.value)]
        case In():
            values = [read(value) for value in one.value if value is not None]  # NULL equals nothing.
        case _:
            return None
    return None if None in values else values


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _bytes(value: object) -> bytes | None:
    return bytes(value) if isinstance(value, bytes | bytearray) else None


def _microseconds(value: object) -> int | None:
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        return (value - _1970) // _MICROSECOND
    return None
