"""Which offsets and chunks a query needs, by its filters.

Filters only reduce reading: Spark checks every filter again, on the rows. So an unknown filter is not used, and a known
one may be used loosely. A key is found by its hash: segments, chunks, runs and batches whose range of hashes does not
contain the hash have no record of the key.
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
from braid.scan.planning import Prune, Range
from braid.spark.source.options import SourceOptions

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
        """Cut the ranges to segments and offsets that the filters allow."""
        found = []
        for each in ranges:
            if each.segment in self.segments:
                low = each.first if self.offsets.low is None else max(each.first, self.offsets.low)
                high = each.until if self.offsets.high is None else min(each.until, self.offsets.high + 1)
                if low < high:
                    found.append(Range(each.segment, low, high))
        return found


def no_filters(options: SourceOptions) -> Filters:
    """Return only the time bounds of the options."""
    since, before = options.starting_timestamp, options.ending_timestamp
    return Filters(times=Interval(since, None if before is None else before - 1))


def understood(filters: Sequence[Filter], options: SourceOptions) -> Filters:
    """Combine the filters, all of which must hold, with the time bounds of the options."""
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
            # Records without a key show 0 there, and no range of hashes counts them.
            return found if hashes is None or 0 in hashes else _with_hashes(found, hashes)
        case ("key",):
            keys = _values(one, _bytes)
            return found if keys is None else _with_hashes(found, [key_hash(key) for key in keys])
    return found


def _with_hashes(found: Filters, hashes: Iterable[int]) -> Filters:
    both = frozenset(hashes) if found.hashes is None else found.hashes & frozenset(hashes)
    return msgspec.structs.replace(found, hashes=both)


def _interval(one: Filter, number: Any) -> Interval:
    """Return the numbers that may pass; all numbers for any other filter."""
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
    """Return the values that a filter lists for its column; None if it lists none, or values of another type."""
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
