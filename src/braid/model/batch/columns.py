"""Records to batches and back: the public face of the body format (body.py tells the layout).

Decoding costs per batch, not per record, as long as the records stay columns; messages cost one object each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, pairwise, repeat
from typing import Any, Final

import numpy as np
import pyarrow as pa

from braid.model.batch.body import (
    HEADER_LISTS,
    HEADERS_TYPE,
    KEY_BYTES,
    KEY_OFFSETS,
    KEY_VALIDITY,
    TIMESTAMP_TYPE,
    TIMESTAMPS,
    VALUE_BYTES,
    Body,
    Data,
)
from braid.model.batch.draft import largest_body
from braid.model.batch.encode import Headers, Timestamps, encode_batch, encode_table
from braid.model.batch.header import BatchHeader, verify
from braid.model.errors import InvalidArgument
from braid.model.message import NO_HEADERS, Message

__all__ = [
    "COLUMNS",
    "RECORD_SCHEMA",
    "Headers",
    "Message",
    "Timestamps",
    "arrow_rows",
    "decode_arrow",
    "decode_messages",
    "decode_one",
    "encode_batch",
    "encode_table",
    "largest_body",
    "message_lists",
]

RECORD_SCHEMA: Final = pa.schema(
    [
        ("offset", pa.int64()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("timestamp", TIMESTAMP_TYPE),
        ("headers", HEADERS_TYPE),
        ("key_hash", pa.uint16()),
    ]
)
COLUMNS: Final[tuple[str, ...]] = tuple(RECORD_SCHEMA.names)

LIST_RECORDS: Final = 8_192
"""Messages that are made of a batch at a time: some megabytes beside the bytes of the records."""
LIST_HEADERS: Final = 65_536
"""Headers of these messages together, unless one record has more."""


def decode_arrow(
    batch: Data, header: BatchHeader | None = None, position: int = 0, *, columns: Sequence[str] = COLUMNS
) -> Any:
    """Return the records as a `pyarrow.RecordBatch` of the named columns of `RECORD_SCHEMA`, in the order asked.

    Without compression the arrays stand on the memory of `batch`, which must not change while they live. Pass the
    header that `verify` returned, so that the checksums are not computed twice. A control batch has no rows.
    """
    schema = _schema(tuple(columns))
    if header is None:
        header = verify(batch, position)
    if header.is_control:
        return pa.RecordBatch.from_pylist([], schema=schema)
    return arrow_rows(Body(batch, header, position), columns)


def arrow_rows(body: Body, columns: Sequence[str] = COLUMNS) -> Any:
    """Return the records of an open body as `decode_arrow` does."""
    schema = _schema(tuple(columns))
    return pa.RecordBatch.from_arrays([_COLUMN[name](body) for name in columns], schema=schema)


def decode_messages(
    batch: Data, header: BatchHeader | None = None, position: int = 0, *, segment: int = 0, topic: str = ""
) -> list[Message]:
    """Return the records as objects; their bytes are copies. A control batch has none. `header`: see `decode_arrow`.

    A batch does not say where it stands: `segment` and `topic` are what the messages are told.
    """
    if header is None:
        header = verify(batch, position)
    if header.is_control:
        return []
    body = Body(batch, header, position)
    body.check()
    if body.is_plain_record:
        return [decode_one(body, segment, topic)]
    messages: list[Message] = []
    for part in message_lists(body, segment=segment, topic=topic):
        messages += part
    return messages


def message_lists(body: Body, *, segment: int = 0, topic: str = "", first: int = 0) -> Iterator[list[Message]]:
    """Yield the records of a checked body from number `first` on, in lists of at most `LIST_RECORDS` messages. A few
    compressed bytes can hold millions of records and headers, so each list is made when it is asked for."""
    base_offset = body.header.base_offset
    start = first
    while start < body.count:
        end = _list_end(body, start)
        offsets = range(base_offset + start, base_offset + end)
        fields = _fields(body, start, end)
        headers = _headers(body, start, end)
        yield [*map(Message, *fields, offsets, headers, repeat(segment), repeat(topic))]
        start = end


def _list_end(body: Body, start: int) -> int:
    """Return the number after the last record of the list that begins with this one."""
    end = min(start + LIST_RECORDS, body.count)
    if body.lengths[HEADER_LISTS]:
        before = np.frombuffer(body.view(HEADER_LISTS), np.int32)  # How many headers stand before each record.
        fit = int(np.searchsorted(before, int(before[start]) + LIST_HEADERS, "right")) - 1
        end = min(end, max(fit, start + 1))
    return end


def _fields(body: Body, start: int, end: int) -> tuple[Iterable[bytes], Iterable[bytes | None], Iterable[int]]:
    """Return the values, keys and timestamps of these records."""
    values = body.values().slice(start, end - start).to_pylist()
    keys: Iterable[bytes | None] = repeat(None)
    if body.lengths[KEY_OFFSETS]:
        keys = body.keys().slice(start, end - start).to_pylist()
    timestamps: Iterable[int] = repeat(body.header.min_timestamp)
    if body.lengths[TIMESTAMPS]:
        timestamps = np.frombuffer(body.view(TIMESTAMPS), np.int64)[start:end].tolist()
    return values, keys, timestamps


def decode_one(body: Body, segment: int, topic: str) -> Message:
    """Return what `message_lists` makes of a checked body that is a plain record, without its fixed costs."""
    header = body.header
    key = None
    if body.lengths[KEY_OFFSETS] and (not body.lengths[KEY_VALIDITY] or body.view(KEY_VALIDITY)[0] & 1):
        key = bytes(body.view(KEY_BYTES))
    value = bytes(body.view(VALUE_BYTES))
    timestamp = header.min_timestamp
    if body.lengths[TIMESTAMPS]:
        timestamp = int.from_bytes(body.view(TIMESTAMPS), "little", signed=True)
    return Message(value, key, timestamp, header.base_offset, NO_HEADERS, segment, topic)


def _headers(body: Body, start: int, end: int) -> Iterable[Mapping[str, bytes]]:
    """Return the headers of these records; of a name that a foreign producer wrote twice, the last counts."""
    if not body.lengths[HEADER_LISTS]:
        return repeat(NO_HEADERS)
    maps = body.headers()
    ends = maps.offsets.slice(start, end - start + 1).to_pylist()
    before, entries = ends[0], ends[-1] - ends[0]
    if entries > LIST_HEADERS:  # Of one record: the pairs of all would take far more memory than the dictionary.
        parts = (_pairs(maps, at, min(LIST_HEADERS, ends[-1] - at)) for at in range(before, ends[-1], LIST_HEADERS))
        return [dict(chain.from_iterable(parts))]
    pairs = list(_pairs(maps, before, entries))
    return [dict(pairs[first - before : last - before]) or NO_HEADERS for first, last in pairwise(ends)]


def _pairs(maps: Any, first: int, count: int) -> Iterator[tuple[str, bytes]]:
    return zip(maps.keys.slice(first, count).to_pylist(), maps.items.slice(first, count).to_pylist())


def _offsets(body: Body) -> Any:
    return pa.array(np.arange(body.header.base_offset, body.header.next_offset, dtype=np.int64))


_COLUMN: Final[Mapping[str, Callable[[Body], Any]]] = {
    "offset": _offsets,
    "key": Body.keys,
    "value": Body.values,
    "timestamp": Body.timestamps,
    "headers": Body.headers,
    "key_hash": Body.key_hashes,
}


@lru_cache(maxsize=64)
def _schema(columns: tuple[str, ...]) -> Any:
    unknown = [name for name in columns if name not in _COLUMN]
    if unknown or not columns:
        raise InvalidArgument(f"the columns asked for are {list(columns)}; a batch has {', '.join(COLUMNS)}")
    return pa.schema([RECORD_SCHEMA.field(name) for name in columns])
