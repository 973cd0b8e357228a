"""Records to a batch, from lists of bytes or from an Arrow table.

Cost is per batch, not per record: every column is measured, hashed and copied by loops that run in C. Only headers,
which few records have, cost some Python each. A batch of one, the other end of the scale, has its own short way; tests
hold both ways to the same bytes.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from crc32c import crc32c

from braid.model.batch.body import (
    DIRECTORY,
    HEADER_KEY_OFFSETS,
    HEADER_LISTS,
    HEADER_VALUE_OFFSETS,
    HEADERS_TYPE,
    KEY_HASHES,
    KEY_OFFSETS,
    TIMESTAMP_TYPE,
    VALUE_OFFSETS,
    Data,
)
from braid.model.batch.draft import ZEROS, Draft, check_stored, joined
from braid.model.batch.header import DIRECTORY_BYTES, HEADER_BYTES, NO_KEYS, Codec, fresh_header, padded
from braid.model.errors import InvalidArgument
from braid.model.hashing import key_hash, key_hashes

Headers = Mapping[str, bytes | str]
Timestamps = Sequence[int] | npt.NDArray[np.int64]

_PAIR: Final = struct.Struct("<2i")
_ONE_VALUE: Final = struct.Struct(f"{DIRECTORY.format}2i")
"""Directory and value offsets of one record without a key."""
_HASH: Final = struct.Struct("<H6x")
_PLAIN: Final = int(Codec.NONE)  # An enum's member takes five times as long to pack.
_LOWEST_TIME: Final = -(1 << 63)
_HIGHEST_TIME: Final = (1 << 63) - 1


def encode_batch(
    values: Sequence[Data],
    *,
    keys: Sequence[Data | None] | None = None,
    timestamps: Timestamps | None = None,
    headers: Sequence[Headers | None] | None = None,
    now_us: int,
    codec: Codec = Codec.NONE,
    producer_id: int = 0,
    first_sequence: int = 0,
) -> bytearray:
    """Encode one batch, ready to be stamped. Without `timestamps`, every record gets `now_us`.

    `BatchTooLarge` before anything large is allocated. A codec that does not save an eighth is not used.
    """
    count = len(values)
    for what, column in (("keys", keys), ("timestamps", timestamps), ("headers", headers)):
        if column is not None and len(column) != count:
            raise InvalidArgument(f"{len(column)} {what} were given for {count} values; there must be one for each")
    if count == 1 and headers is None and codec is Codec.NONE:
        key = keys[0] if keys is not None else None
        timestamp = _whole(timestamps[0]) if timestamps is not None else now_us
        return encode_one(values[0], key, timestamp, producer_id, first_sequence)
    draft = Draft(count)
    hashes = _add_keys(draft, keys) if keys is not None else None
    draft.add_binary(VALUE_OFFSETS, _lengths(values), values)
    _add_timestamps(draft, timestamps, now_us)
    if hashes is not None:
        draft.add_array(KEY_HASHES, hashes)
    if headers is not None and any(headers):
        _add_headers(draft, [given.items() if given else () for given in headers])
    return draft.finish(codec, producer_id, first_sequence)


def encode_table(
    table: Any,
    *,
    now_us: int,
    codec: Codec = Codec.NONE,
    producer_id: int = 0,
    first_sequence: int = 0,
) -> bytearray:
    """Encode the batch of `gather_table` in one piece."""
    parts = gather_table(table, now_us=now_us, codec=codec, producer_id=producer_id, first_sequence=first_sequence)
    return bytearray().join(parts)


def gather_table(
    table: Any,
    *,
    now_us: int,
    codec: Codec = Codec.NONE,
    producer_id: int = 0,
    first_sequence: int = 0,
) -> list[Data]:
    """Encode one batch from a `pyarrow.Table` or `RecordBatch` with the columns key?, value, timestamp?, headers?.

    Keys and values may be of any binary or string type, timestamps of any unit (without a zone: UTC) or int64
    microseconds; a null timestamp is `now_us`, a null key no key, a null map no headers. The bytes are those that
    `encode_batch` makes of the same records.

    The batch comes as buffers that follow each other. The first begins with the header and may be renumbered; the
    others are the table's own memory, where that has the form already.
    """
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    names = table.column_names
    if "value" not in names or len(set(names)) != len(names) or set(names) - {"key", "value", "timestamp", "headers"}:
        raise InvalidArgument(f"the columns are {names}; they must be value and, if wanted, key, timestamp, headers")
    draft = Draft(table.num_rows)
    values = _binary_column(table, "value")
    if values.null_count:
        raise InvalidArgument(f"{values.null_count} values are null; a value may be empty, but not null")
    hashes = None
    if "key" in names:
        keys = _binary_column(table, "key")
        if keys.null_count == 0:
            _add_binary_column(draft, KEY_OFFSETS, keys)
            hashes = _hashed(draft, keys.to_pylist())
        else:
            hashes = _add_keys(draft, keys.to_pylist())
    _add_binary_column(draft, VALUE_OFFSETS, values)
    _add_timestamps(draft, _timestamp_column(table, now_us), now_us)
    if hashes is not None:
        draft.add_array(KEY_HASHES, hashes)
    if "headers" in names:
        _add_headers_column(draft, _cast(table, "headers", HEADERS_TYPE))
    return draft.gather(codec, producer_id, first_sequence)


def _check_time(time_us: object) -> None:
    if not isinstance(time_us, int) or not _LOWEST_TIME <= time_us <= _HIGHEST_TIME:
        raise InvalidArgument(f"{time_us!r} is no time: times are whole microseconds since 1970, signed 64 bits")


def _whole(time_us: object) -> int:
    try:
        return operator.index(time_us)  # type: ignore[arg-type]
    except TypeError as error:
        raise InvalidArgument(f"{time_us!r} is no time: times are whole microseconds since 1970") from error


def encode_one(value: Data, key: Data | None, timestamp: int, producer_id: int, first_sequence: int) -> bytearray:
    """Encode one record as the general way would, without its fixed costs."""
    try:
        value_length = len(value)
        key_length = len(key) if key is not None else 0
    except TypeError as error:
        raise InvalidArgument(f"keys and values must be bytes: {error}") from error
    _check_time(timestamp)
    length = DIRECTORY_BYTES + _PAIR.size + padded(value_length)
    if key is None:
        check_stored(length)
        key_range = NO_KEYS
        front = _ONE_VALUE.pack(0, 0, 0, _PAIR.size, value_length, 0, 0, 0, 0, 0, 0, 0, 0, value_length)
        parts: tuple[Data, ...] = (front, value, ZEROS[-value_length % 8])
    else:
        length += _PAIR.size + padded(key_length) + _HASH.size
        check_stored(length)
        hashed = _hash_of(key)
        key_range = (hashed, hashed)
        directory = DIRECTORY.pack(0, _PAIR.size, key_length, _PAIR.size, value_length, 0, 2, 0, 0, 0, 0, 0)
        key_parts = (_PAIR.pack(0, key_length), key, ZEROS[-key_length % 8])
        value_parts = (_PAIR.pack(0, value_length), value, ZEROS[-value_length % 8])
        parts = (directory, *key_parts, *value_parts, _HASH.pack(hashed))
    body_crc = 0
    try:
        for part in parts:
            body_crc = crc32c(part, body_crc)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"keys and values must be bytes: {error}") from error
    times = (timestamp, timestamp)
    header = fresh_header(_PLAIN, length, length, body_crc, 1, key_range, times, producer_id, first_sequence)
    return joined((header, *parts), HEADER_BYTES + length)


def _hash_of(key: Data) -> int:
    try:
        return key_hash(key)
    except TypeError as error:
        raise InvalidArgument(f"keys must be bytes: {error}") from error


def _lengths(items: Collection[Any]) -> npt.NDArray[np.int64]:
    try:
        return np.fromiter(map(len, items), np.int64, len(items))
    except TypeError as error:
        raise InvalidArgument(f"keys and values must be bytes: {error}") from error


def _add_keys(draft: Draft, keys: Sequence[Data | None]) -> npt.NDArray[np.uint16] | None:
    """Add the key column; returns the hashes, or None when no record has a key."""
    try:
        data = b"".join(keys)  # type: ignore[arg-type]
    except TypeError:  # some are None, or no bytes
        return _add_nullable_keys(draft, keys)
    draft.add_binary(KEY_OFFSETS, _lengths(keys), (data,))
    return _hashed(draft, keys)


def _add_nullable_keys(draft: Draft, keys: Sequence[Data | None]) -> npt.NDArray[np.uint16] | None:
    objects = np.fromiter(keys, object, len(keys))
    null = np.equal(objects, np.array(None)).astype(np.bool_)
    if null.all():
        return None
    objects[null] = b""  # whose hash is 0, as a record without a key must have it
    filled = objects.tolist()
    draft.add_validity(~null)
    draft.add_binary(KEY_OFFSETS, _lengths(filled), filled)
    return _hashed(draft, filled, ~null)


def _hashed(draft: Draft, keys: Iterable[Any], valid: npt.NDArray[np.bool_] | None = None) -> npt.NDArray[np.uint16]:
    try:
        hashes = key_hashes(keys)
    except TypeError as error:
        raise InvalidArgument(f"keys must be bytes: {error}") from error
    counted = hashes if valid is None else hashes[valid]
    draft.key_range = int(counted.min()), int(counted.max())
    return hashes


def _add_timestamps(draft: Draft, given: Timestamps | None, now_us: int) -> None:
    if given is None:
        _check_time(now_us)
        draft.time_range = (now_us, now_us)
        return
    try:
        if isinstance(given, np.ndarray):
            timestamps = np.ascontiguousarray(given, np.int64)
        else:
            timestamps = np.fromiter(given, np.int64, draft.count)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidArgument(f"timestamps must be signed 64-bit numbers of microseconds: {error}") from error
    draft.add_timestamps(timestamps)


def _add_headers(draft: Draft, rows: Sequence[Collection[tuple[str, Any]]]) -> None:
    """Add each record's (name, value) pairs."""
    names = []
    values = []
    try:
        for name, value in chain.from_iterable(rows):
            names.append(name.encode())
            values.append(value.encode() if isinstance(value, str) else value)
    except (AttributeError, UnicodeError) as error:
        raise InvalidArgument(f"headers must map text to bytes or text: {error}") from error
    draft.add_lists(HEADER_LISTS, _lengths(rows))
    draft.add_binary(HEADER_KEY_OFFSETS, _lengths(names), names)
    draft.add_binary(HEADER_VALUE_OFFSETS, _lengths(values), values)


def _cast(table: Any, name: str, kind: Any) -> Any:
    column = table.column(name)
    try:
        return column if column.type == kind else column.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise InvalidArgument(f"the column {name} of type {column.type} cannot become {kind}: {error}") from error


def _binary_column(table: Any, name: str) -> Any:
    kind = table.column(name).type
    if not (_is_binary(kind) or (pa.types.is_dictionary(kind) and _is_binary(kind.value_type))):
        raise InvalidArgument(f"the column {name} is of type {kind}; it must be binary or string")
    return _cast(table, name, pa.binary())


def _is_binary(kind: Any) -> bool:
    is_ = pa.types
    return any(
        test(kind)
        for test in (
            is_.is_binary, is_.is_large_binary, is_.is_binary_view, is_.is_fixed_size_binary,
            is_.is_string, is_.is_large_string, is_.is_string_view,
        )
    )  # fmt: skip


def _add_binary_column(draft: Draft, slot: int, column: Any) -> None:
    """Add a binary column without nulls. Its bytes are taken from the chunks as they lie."""
    if column.num_chunks == 1 and len(column):
        chunk = column.chunk(0)
        _, offsets, data = chunk.buffers()
        ends = np.frombuffer(offsets, np.int32, len(chunk) + 1, 4 * chunk.offset)
        first, last = int(ends[0]), int(ends[-1])
        draft.add_array(slot, ends - ends[0] if first else ends)
        draft.add(slot + 1, last - first, (data.slice(first, last - first),) if last > first else ())
        return
    lengths = [np.zeros(0, np.int32)]
    parts = []
    for chunk in column.chunks:
        if len(chunk):
            _, offsets, data = chunk.buffers()
            ends = np.frombuffer(offsets, np.int32, len(chunk) + 1, 4 * chunk.offset)
            lengths.append(np.diff(ends))
            if data is not None:
                parts.append(data.slice(int(ends[0]), int(ends[-1] - ends[0])))
    draft.add_binary(slot, np.concatenate(lengths, dtype=np.int64), parts)


def _add_headers_column(draft: Draft, column: Any) -> None:
    if column.null_count:
        # A null map may still have entries in the array. Rare enough for the slow way.
        rows = column.to_pylist()
        if any(rows):
            _add_headers(draft, [pairs or () for pairs in rows])
        return
    lists = [np.zeros(0, np.int32)]
    names = []
    values = []
    for chunk in column.chunks:
        ends = chunk.offsets.to_numpy()
        lists.append(np.diff(ends))
        pairs = chunk.values.slice(int(ends[0]), int(ends[-1] - ends[0]))
        names.append(pairs.field(0))
        values.append(pairs.field(1))
    if not sum(map(len, names)):
        return
    if any(array.null_count for array in values):
        raise InvalidArgument("a header's value is null; it may be empty, but not null")
    draft.add_lists(HEADER_LISTS, np.concatenate(lists, dtype=np.int64))
    _add_binary_column(draft, HEADER_KEY_OFFSETS, pa.chunked_array(names))
    _add_binary_column(draft, HEADER_VALUE_OFFSETS, pa.chunked_array(values))


def _timestamp_column(table: Any, now_us: int) -> npt.NDArray[np.int64] | None:
    if "timestamp" not in table.column_names:
        return None
    column = table.column("timestamp")
    if pa.types.is_timestamp(column.type):
        try:
            # Only nanoseconds lose digits; the coarser units must not overflow.
            column = column.cast(TIMESTAMP_TYPE, safe=column.type.unit != "ns").cast(pa.int64())
        except pa.ArrowInvalid as error:
            raise InvalidArgument(f"a timestamp does not fit 64 bits of microseconds: {error}") from error
    elif column.type != pa.int64():
        raise InvalidArgument(f"the column timestamp is of type {column.type}; it must be timestamp or int64")
    if column.null_count:
        column = column.fill_null(now_us)
    return np.ascontiguousarray(column.to_numpy(), np.int64)
