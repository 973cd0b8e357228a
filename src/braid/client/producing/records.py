"""Records as programs give them: values, keys, pairs, tables, times and headers. They are checked and measured here."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from braid.client.producing.open_batch import RECORD_BYTES
from braid.model.batch.encode import Headers
from braid.model.batch.header import MAX_BODY_BYTES
from braid.model.errors import InvalidArgument, cut
from braid.model.message import DELIVER_AT, EXPIRES_AT

MAX_RECORD_BYTES: Final = MAX_BODY_BYTES - 1_024
"""Only compression can make a larger record fit into a batch. The rest is for the fields of the batch."""
MAX_DELAY_US: Final = 366 * 86_400 * 1_000_000
"""The longest time from now that a record may wait or live. `deliver_at` may be later."""
MANY_RECORDS: Final = 1 << 16
"""The largest slice of records that `send_many` handles together. It sends a slice before it looks at the next."""
COLUMNAR_RECORDS: Final = 1_024
COLUMNAR_VALUE_BYTES: Final = 512
"""`send_many` turns this many small records directly into columns, which costs less for each. Fewer records join the
open batch. Large values join it too: then they are copied only once."""

OFFSET_BYTES: Final = 4
"""The offset of a row in a binary column; `RECORD_BYTES` includes it."""

_UNIX_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND: Final = datetime.timedelta(microseconds=1)
_ERA_US: Final = range(10**14, 10**17)
"""The years 1973 to 5138. No other unit has the same numbers for these years, so a number in another one is noticed."""
_OTHER_UNITS: Final = (
    (range(10**8, 10**11), "seconds: multiply by 1,000,000"),
    (range(10**11, 10**14), "milliseconds: multiply by 1,000"),
    (range(10**17, 10**20), "nanoseconds: divide by 1,000"),
)


def columns(records: Iterable[Any], batch_bytes: int) -> Iterator[tuple[list[Any], list[bytes | None] | None]]:
    """Yield slices of the records: the values as given, and the keys if there are any.

    All records are values, or all are pairs. If all records are as long as the first, a slice of small records is a
    batch: records that are still in the processor's cache cost half.
    """
    if isinstance(records, bytes | str | bytearray | memoryview):
        raise InvalidArgument("send_many takes many values; use send for one")
    pairs: bool | None = None
    for part in _slices(records, batch_bytes):
        if pairs is None:
            pairs = type(part[0]) is tuple
        if pairs:
            if set(map(type, part)) != {tuple} or set(map(len, part)) != {2}:
                raise InvalidArgument("send_many takes values, or (key, value) pairs, but not both")
            keys, values = map(list, zip(*part))
            yield values, all_bytes("key", keys, None)
        else:
            yield part, None


def _slices(records: Iterable[Any], batch_bytes: int) -> Iterator[list[Any]]:
    if type(records) is list:  # The usual case: slicing a list costs a tenth of iterating.
        first, count = 0, slice_records(records[0], batch_bytes) if records else 0
        while part := records[first : first + count]:
            yield part
            first += count
        return
    source = iter(records)
    part = list(islice(source, 1))
    if not part:
        return
    count = slice_records(part[0], batch_bytes)
    part += islice(source, count - 1)
    while part:
        yield part
        part = list(islice(source, count))


def slice_records(first: Any, batch_bytes: int) -> int:
    """Return how many records like the first `send_many` handles together."""
    fields = first if type(first) is tuple else (first,)
    if not all(field is None or is_small(field) for field in fields):
        return MANY_RECORDS
    size = RECORD_BYTES + sum(len(field) for field in fields if field is not None)
    return min(max(batch_bytes // size, COLUMNAR_RECORDS), MANY_RECORDS)


def is_small(value: Any) -> bool:
    return isinstance(value, bytes | str) and len(value) < COLUMNAR_VALUE_BYTES


def as_table(values: list[Any], keys: list[bytes | None] | None) -> Any:
    """Make columns. Arrow checks the type of each value while it copies, so we check only if Arrow objects."""
    try:
        made = {"value": pa.array(values, pa.binary())}
    except (pa.ArrowException, TypeError, UnicodeError):
        made = {"value": pa.array(all_bytes("value", values), pa.binary())}
    if made["value"].null_count:
        all_bytes("value", values)  # raises the error: None is no value
    if keys is not None:
        made["key"] = pa.array(keys, pa.binary())
    return pa.table(made)


def all_bytes(what: str, items: list[Any], *absent: None) -> list[Any]:
    if set(map(type, items)) == {bytes}:
        return items
    return [item if type(item) is bytes or (item is None and absent) else as_bytes(what, item) for item in items]


def as_bytes(what: str, item: object) -> bytes:
    if isinstance(item, bytes):
        return bytes(item)
    if isinstance(item, str):
        try:
            return item.encode()
        except UnicodeError as error:
            raise InvalidArgument(f"the {what} is text that UTF-8 cannot write: {error}") from error
    if isinstance(item, bytearray | memoryview):
        return bytes(item)
    raise InvalidArgument(f"the {what} is of type {type(item).__name__}; it must be bytes or text")


def as_microseconds(timestamp: object) -> int:
    if isinstance(timestamp, datetime.datetime):
        if timestamp.tzinfo is None:
            raise InvalidArgument(f"the timestamp {timestamp} has no zone; give it one, such as datetime.UTC")
        return (timestamp - _UNIX_EPOCH) // _MICROSECOND
    if isinstance(timestamp, int) and not isinstance(timestamp, bool):
        check_era(timestamp)
        return timestamp
    shown = repr(timestamp)
    raise InvalidArgument(f"{shown[:200]} is no time: give microseconds since 1970, or a datetime with its zone")


def check_era(timestamp: int) -> None:
    """Raise if this number cannot be microseconds of this era. A datetime may be of any year: its unit is clear."""
    if timestamp in _ERA_US:
        return
    unit = next((f"it looks like {unit}" for values, unit in _OTHER_UNITS if timestamp in values), "")
    number = str(timestamp) if abs(timestamp) < 10**30 else "a huge number"
    raise InvalidArgument(
        f"the timestamp {number} is no number of microseconds since 1970 in the years 1973 to 5138"
        f"{'; ' + unit if unit else ''}. A datetime with its zone may be of any year"
    )


def check_times(table: Any) -> None:
    """Check the column timestamp of a table if it holds plain numbers, whose unit can be mistaken."""
    if "timestamp" in table.column_names and table.schema.field("timestamp").type == pa.int64():
        ends = pc.min_max(table.column("timestamp"))
        for end in (ends["min"].as_py(), ends["max"].as_py()):
            if end is not None:
                check_era(end)


def headers_bytes(headers: object) -> int:
    """Return roughly how many bytes the headers will take. Raises `InvalidArgument` if these cannot be headers."""
    total = 0
    try:
        for name, value in headers.items():  # type: ignore[attr-defined]
            total += (
                8 + len(name.encode()) + len(value.encode() if isinstance(value, str) else bytes(memoryview(value)))
            )
    except (AttributeError, TypeError, UnicodeError) as error:
        raise InvalidArgument(f"headers must map text to bytes or text: {error}") from error
    return total


def delivery_times(
    now_us: int,
    deliver_after: float | datetime.timedelta | None = None,
    deliver_at: int | datetime.datetime | None = None,
    ttl: float | datetime.timedelta | None = None,
) -> dict[str, bytes]:
    """Return the headers that tell queues when to deliver a record. Raises `InvalidArgument` if the times cannot be."""
    if deliver_after is not None and deliver_at is not None:
        raise InvalidArgument("deliver_after and deliver_at are two ways to say the same: give one of them")
    due_us = now_us if deliver_after is None else now_us + _microseconds("deliver_after", deliver_after, least=0)
    if deliver_at is not None:
        due_us = as_microseconds(deliver_at)
    headers = {}
    if deliver_after is not None or deliver_at is not None:
        headers[DELIVER_AT] = b"%d" % max(-(-due_us // 1_000), 0)  # Rounded up: never before its time.
    if ttl is not None:
        expires_us = now_us + _microseconds("ttl", ttl, least=1_000)
        if expires_us <= due_us:
            raise InvalidArgument(
                f"the message would never be delivered: its ttl of {ttl} ends before it is due; give a longer one"
            )
        headers[EXPIRES_AT] = b"%d" % (expires_us // 1_000)
    return headers


def with_times(headers: Headers | None, times: dict[str, bytes]) -> Headers:
    """Return the headers of a record with its `delivery_times`."""
    if not headers:
        return times
    headers_bytes(headers)
    for name in times.keys() & headers.keys():
        raise InvalidArgument(f"the header {name} and the argument that sets it were both given: leave one out")
    return {**headers, **times}


def _microseconds(what: str, given: object, *, least: int) -> int:
    """Return a length of time, given in seconds or as a timedelta."""
    amount = math.nan
    if isinstance(given, datetime.timedelta):
        amount = given.total_seconds()
    elif isinstance(given, int | float) and not isinstance(given, bool):
        amount = given
    if not least <= amount * 1e6 <= MAX_DELAY_US:  # Also for NaN.
        raise InvalidArgument(
            f"{what} is {cut(repr(given))}; give {least / 1e6:g} to {MAX_DELAY_US // 1_000_000} seconds, or a timedelta"
        )
    return round(amount * 1e6)


def table_size(rows: Any) -> int:
    """Return about how many bytes all rows take in a batch."""
    columns_bytes: int = rows.nbytes
    counted_twice = OFFSET_BYTES * sum(name in rows.column_names for name in ("key", "value"))
    return columns_bytes + (RECORD_BYTES - counted_twice) * int(rows.num_rows)


def row_sizes(rows: Any) -> npt.NDArray[np.int64]:
    """Return about how many bytes each row takes in a batch."""
    sizes = np.full(rows.num_rows, RECORD_BYTES, np.int64)
    for name in ("key", "value"):
        if name in rows.column_names:
            column = rows.column(name)
            try:
                sizes += pc.fill_null(pc.binary_length(column), 0).to_numpy()
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError, TypeError):
                sizes += column.nbytes // max(1, rows.num_rows)
    if "headers" in rows.column_names:
        sizes += rows.column("headers").nbytes // max(1, rows.num_rows)
    return sizes
