"""The body of a record batch: a directory of lengths, then columns in Arrow's memory layout.

    0     48 ─ directory: 12 lengths in bytes, u32 little-endian; 0: absent
    48     … ─ the 12 buffers in the directory's order, each followed by zeros to a multiple of 8

     0  key validity          1 bit per record, least significant first; absent when no key is null
     1  key offsets           int32 × (n + 1)
     2  key bytes
     3  value offsets         int32 × (n + 1)
     4  value bytes
     5  timestamps            int64 × n, µs since 1970; absent when all are equal
     6  key hashes            uint16 × n; 0 for a record without a key
     7  header lists          int32 × (n + 1): where each record's entries begin, m entries in all
     8  header key offsets    int32 × (m + 1)
     9  header key bytes      UTF-8
    10  header value offsets  int32 × (m + 1)
    11  header value bytes

0, 1, 2 and 6 are absent when no record has a key, 7 to 11 when none has headers. Values are always there, never null.

A batch of one without a key is so 56 bytes and its value: no timestamps (the header's lowest and highest say it), no
hashes, no headers. There is exactly one way to write given records (docs/formats/record-batch.md), and readers take the
buffers as Arrow arrays without a copy.

This module reads. Nothing here trusts the bytes: a checksum proves that they are what the producer wrote, not that the
producer was sane. `Body` checks every length when it is made, and each column checks its own offsets in one vectorised
pass before it is handed out for the first time. After that no access through Arrow can leave the buffers. The memory
must not change while arrays stand on it; `stamp` is fine, it writes only the header.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import numpy as np
import pyarrow as pa

from braid.model.batch.codec import decompress
from braid.model.batch.header import DIRECTORY_BYTES, BatchHeader, Codec, body_of
from braid.model.errors import BatchCorrupt, BatchTruncated, BatchUnsupported

(
    KEY_VALIDITY,
    KEY_OFFSETS,
    KEY_BYTES,
    VALUE_OFFSETS,
    VALUE_BYTES,
    TIMESTAMPS,
    KEY_HASHES,
    HEADER_LISTS,
    HEADER_KEY_OFFSETS,
    HEADER_KEY_BYTES,
    HEADER_VALUE_OFFSETS,
    HEADER_VALUE_BYTES,
) = range(12)
BUFFERS: Final = 12

DIRECTORY: Final = struct.Struct(f"<{BUFFERS}I")
assert DIRECTORY.size == DIRECTORY_BYTES
_INT32: Final = struct.Struct("<i")
_PAIR: Final = struct.Struct("<2i")

_BINARY_TYPE: Final = pa.binary()
TIMESTAMP_TYPE: Final = pa.timestamp("us", tz="UTC")
HEADERS_TYPE: Final = pa.map_(pa.string(), pa.binary())
_ENTRIES_TYPE: Final = pa.struct([HEADERS_TYPE.key_field, HEADERS_TYPE.item_field])
_NO_ENTRIES: Final = pa.nulls(0, _ENTRIES_TYPE)  # `pa.array` of a list would import pandas where that is installed.
_EMPTY: Final = pa.py_buffer(b"")

Data = bytes | bytearray | memoryview


class Body:
    """A checked view of one batch's columns. Each method returns one column as an Arrow array of `count` rows."""

    __slots__ = ("_buffer", "_checked", "count", "header", "is_plain_record", "lengths", "raw", "starts")

    def __init__(self, batch: Data, header: BatchHeader, position: int = 0) -> None:
        self.header = header
        self.count = header.count
        self.raw = _raw_body(batch, header, position)
        self.lengths, self.starts = _directory(self.raw)
        _check_lengths(self.lengths, header)
        self.is_plain_record = self.count == 1 and not self.lengths[HEADER_LISTS]
        """Whether there is one record, without headers: it is decoded without the fixed costs of Arrow."""
        self._buffer: Any = None
        self._checked: dict[str, Any] = {}
        """The columns that were checked, by name."""

    def view(self, slot: int) -> memoryview:
        start = self.starts[slot]
        return self.raw[start : start + self.lengths[slot]]

    def check(self) -> None:
        """Check every column: after this, none of them fails."""
        lengths = self.lengths
        if self.is_plain_record:
            if _PAIR.unpack_from(self.raw, self.starts[VALUE_OFFSETS]) != (0, lengths[VALUE_BYTES]):
                self._check_ends(VALUE_OFFSETS, "value", lengths[VALUE_BYTES])
            if lengths[KEY_OFFSETS]:
                self._check_ends(KEY_OFFSETS, "key", lengths[KEY_BYTES])
            return
        self.values()
        if lengths[KEY_OFFSETS]:
            self.keys()
        if lengths[HEADER_LISTS]:
            self.headers()

    def values(self) -> Any:
        return self._binary(_BINARY_TYPE, "value", self.count, VALUE_OFFSETS, VALUE_BYTES)

    def keys(self) -> Any:
        if not self.lengths[KEY_OFFSETS]:
            return pa.nulls(self.count, _BINARY_TYPE)
        validity = self._arrow(KEY_VALIDITY) if self.lengths[KEY_VALIDITY] else None
        return self._binary(_BINARY_TYPE, "key", self.count, KEY_OFFSETS, KEY_BYTES, validity)

    def key_hashes(self) -> Any:
        if not self.lengths[KEY_HASHES]:
            return pa.array(np.zeros(self.count, np.uint16))
        return pa.Array.from_buffers(pa.uint16(), self.count, [None, self._arrow(KEY_HASHES)])

    def timestamps(self) -> Any:
        if self.lengths[TIMESTAMPS]:
            buffer = self._arrow(TIMESTAMPS)
        else:
            buffer = pa.py_buffer(np.full(self.count, self.header.min_timestamp, np.int64))
        return pa.Array.from_buffers(TIMESTAMP_TYPE, self.count, [None, buffer])

    def headers(self) -> Any:
        if not self.lengths[HEADER_LISTS]:
            lists = pa.py_buffer(np.zeros(self.count + 1, np.int32))
            return pa.Array.from_buffers(HEADERS_TYPE, self.count, [None, lists], children=[_NO_ENTRIES])
        if (known := self._checked.get("headers")) is not None:
            return known
        entries = self.lengths[HEADER_KEY_OFFSETS] // 4 - 1
        self._check_ends(HEADER_LISTS, "header list", entries)
        keys = self._binary(pa.string(), "header key", entries, HEADER_KEY_OFFSETS, HEADER_KEY_BYTES)
        values = self._binary(_BINARY_TYPE, "header value", entries, HEADER_VALUE_OFFSETS, HEADER_VALUE_BYTES)
        pairs = pa.Array.from_buffers(_ENTRIES_TYPE, entries, [None], children=[keys, values])
        lists = self._arrow(HEADER_LISTS)
        found = _validated(pa.Array.from_buffers(HEADERS_TYPE, self.count, [None, lists], children=[pairs]), "headers")
        self._checked["headers"] = found
        return found

    def _binary(self, kind: Any, what: str, count: int, offsets: int, data: int, validity: Any = None) -> Any:
        if (known := self._checked.get(what)) is not None:
            return known
        self._check_ends(offsets, what, self.lengths[data])
        buffers = [validity, self._arrow(offsets), self._arrow(data)]
        self._checked[what] = found = _validated(pa.Array.from_buffers(kind, count, buffers), what)
        return found

    def _check_ends(self, offsets: int, what: str, end: int) -> None:
        """Offsets run from 0 to the end of what they divide; that they never fall is Arrow's validation to find."""
        first = _INT32.unpack_from(self.raw, self.starts[offsets])[0]
        last = _INT32.unpack_from(self.raw, self.starts[offsets] + self.lengths[offsets] - 4)[0]
        if first != 0 or last != end:
            raise BatchCorrupt(f"{what} offsets run from {first} to {last}, they must run from 0 to {end}")

    def _arrow(self, slot: int) -> Any:
        length = self.lengths[slot]
        if length == 0:
            return _EMPTY
        if self._buffer is None:
            self._buffer = pa.py_buffer(self.raw)
            if self._buffer.address % 8:
                # The batch stands at an odd place of a larger buffer. Arrow wants its numbers aligned: one copy.
                self._buffer = pa.py_buffer(bytes(self.raw))
        return self._buffer.slice(self.starts[slot], length)


def _raw_body(batch: Data, header: BatchHeader, position: int) -> memoryview:
    if header.schema_id != 0:
        raise BatchUnsupported(f"schema {header.schema_id} is unknown to this build; it reads schema 0")
    stored = body_of(batch, header, position)
    if len(stored) < header.body_length:
        raise BatchTruncated(f"the batch's body has {header.body_length} bytes, only {len(stored)} are there")
    if header.codec != Codec.NONE:
        return decompress(Codec(header.codec), stored, header.raw_length)
    if header.raw_length != header.body_length:
        raise BatchCorrupt(f"an uncompressed body of {header.body_length} bytes says it has {header.raw_length}")
    return stored


def _directory(raw: memoryview) -> tuple[tuple[int, ...], list[int]]:
    """Return the length of each buffer and where the buffer starts, if the buffers together are the body."""
    if len(raw) < DIRECTORY_BYTES:
        raise BatchCorrupt(f"a body begins with a directory of {DIRECTORY_BYTES} bytes, this one has {len(raw)}")
    lengths: tuple[int, ...] = DIRECTORY.unpack_from(raw)
    starts = []
    at = DIRECTORY_BYTES
    for length in lengths:  # Hot: twelve times for each batch, so `padded` is written out.
        starts.append(at)
        if length:
            at += (length + 7) & ~7
    if at != len(raw):
        raise BatchCorrupt(f"the directory describes a body of {at} bytes, there are {len(raw)}")
    return lengths, starts


def _check_lengths(lengths: tuple[int, ...], header: BatchHeader) -> None:
    """Raise unless every length fits the record count and the other lengths."""
    count = header.count
    offsets = 4 * (count + 1)
    keyed = lengths[KEY_OFFSETS] != 0
    entries = lengths[HEADER_KEY_OFFSETS]
    if lengths[VALUE_OFFSETS] != offsets:
        raise _wrong_length("value offsets", lengths[VALUE_OFFSETS], count)
    if lengths[KEY_OFFSETS] not in (0, offsets) or (lengths[KEY_BYTES] and not keyed):
        raise _wrong_length("key offsets", lengths[KEY_OFFSETS], count)
    if lengths[KEY_HASHES] != (2 * count if keyed else 0):
        raise _wrong_length("key hashes", lengths[KEY_HASHES], count)
    if lengths[KEY_VALIDITY] and (lengths[KEY_VALIDITY] != (count + 7) // 8 or not keyed):
        raise _wrong_length("key validity", lengths[KEY_VALIDITY], count)
    if lengths[TIMESTAMPS] not in (0, 8 * count):
        raise _wrong_length("timestamps", lengths[TIMESTAMPS], count)
    if not lengths[TIMESTAMPS] and header.min_timestamp != header.max_timestamp:
        raise BatchCorrupt("the timestamps are absent, but the header's lowest and highest differ")
    if not lengths[HEADER_LISTS]:
        if any(lengths[HEADER_LISTS:]):
            raise _wrong_length("header lists", 0, count)
    elif lengths[HEADER_LISTS] != offsets:
        raise _wrong_length("header lists", lengths[HEADER_LISTS], count)
    elif entries < 4 or entries % 4 or entries != lengths[HEADER_VALUE_OFFSETS]:
        raise BatchCorrupt(f"header key offsets have {entries} bytes, value offsets {lengths[HEADER_VALUE_OFFSETS]}")


def _wrong_length(what: str, length: int, count: int) -> BatchCorrupt:
    return BatchCorrupt(f"{what} of {length} bytes do not belong to {count} records with this directory")


def _validated(array: Any, what: str) -> Any:
    try:
        array.validate(full=True)
    except (ValueError, OSError) as error:  # ArrowInvalid is a ValueError; Arrow's own texts tell the place
        array = None  # A tool that prints the variables of a traceback would end the process in Arrow.
        raise BatchCorrupt(f"the {what} column is damaged: {error}") from error
    return array
