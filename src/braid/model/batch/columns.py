"""Records to batches and back: the public face of the body format (body.py tells the layout).

Decoding costs per batch, not per record, as long as the records stay columns; messages cost one object each.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise, repeat
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
    VALUE_OFFSETS,
    Body,
    Data,
)
from braid.model.batch.draft import largest_body
from braid.model.batch.encode import Headers, Timestamps, encode_batch, encode_table
from braid.model.batch.header import BatchHeader, verify
from braid.model.errors import BatchCorrupt, InvalidArgument
from braid.model.message import NO_HEADERS, Message

__all__ = [
    "COLUMNS",
    "RECORD_SCHEMA",
    "Headers",
    "Message",
    "Timestamps",
    "decode_arrow",
    "decode_messages",
    "encode_batch",
    "encode_table",
    "largest_body",
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

_PAIR: Final = struct.Struct("<2i")


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
    body = Body(batch, header, position)
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
    if header.count == 1 and not body.lengths[HEADER_LISTS]:
        return [_decode_one(body, segment, topic)]
    values = body.values().to_pylist()
    keys = body.keys().to_pylist() if body.lengths[KEY_OFFSETS] else repeat(None)
    timestamps: Iterable[int] = repeat(header.min_timestamp)
    if body.lengths[TIMESTAMPS]:
        timestamps = np.frombuffer(body.view(TIMESTAMPS), np.int64).tolist()
    offsets = range(header.base_offset, header.next_offset)
    headers: Iterable[Mapping[str, bytes]] = _header_dicts(body) if body.lengths[HEADER_LISTS] else repeat(NO_HEADERS)
    return list(map(Message, values, keys, timestamps, offsets, headers, repeat(segment), repeat(topic)))


def _decode_one(body: Body, segment: int, topic: str) -> Message:
    """What the general way makes of one record without headers, without its fixed costs."""
    header = body.header
    key = None
    if body.lengths[KEY_OFFSETS]:
        data = _only_item(body, "key", KEY_OFFSETS, KEY_BYTES)
        if not body.lengths[KEY_VALIDITY] or body.view(KEY_VALIDITY)[0] & 1:
            key = data
    value = _only_item(body, "value", VALUE_OFFSETS, VALUE_BYTES)
    timestamp = header.min_timestamp
    if body.lengths[TIMESTAMPS]:
        timestamp = int.from_bytes(body.view(TIMESTAMPS), "little", signed=True)
    return Message(value, key, timestamp, header.base_offset, NO_HEADERS, segment, topic)


def _only_item(body: Body, what: str, offsets: int, data: int) -> bytes:
    first, last = _PAIR.unpack_from(body.raw, body.starts[offsets])
    if first != 0 or last != body.lengths[data]:
        raise BatchCorrupt(f"{what} offsets run from {first} to {last}, they must run from 0 to {body.lengths[data]}")
    return bytes(body.view(data))


def _header_dicts(body: Body) -> list[Mapping[str, bytes]]:
    """Each record's headers; of a name that a foreign producer wrote twice, the last counts."""
    maps = body.headers()
    pairs = list(zip(maps.keys.to_pylist(), maps.items.to_pylist()))
    return [dict(pairs[start:end]) or NO_HEADERS for start, end in pairwise(maps.offsets.to_pylist())]


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
