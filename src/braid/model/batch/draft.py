"""A batch being written. `body.py` describes the layout.

A draft only lists the parts of the batch: space for the header, the directory, offsets, the caller's own keys and
values. Their sizes are known before anything large is allocated, so the limits are checked first, and then one `join`
copies every byte to its place, once. Where the parts are few and the receiver can write them one after the other,
nothing is joined (`gather`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from braid.model.batch.body import BUFFERS, DIRECTORY, KEY_VALIDITY, TIMESTAMPS, Data
from braid.model.batch.codec import compress
from braid.model.batch.header import (
    DIRECTORY_BYTES,
    HEADER_BYTES,
    MAX_BODY_BYTES,
    MAX_RAW_BYTES,
    MAX_RECORDS,
    NO_KEYS,
    Codec,
    fresh_header,
    padded,
)
from braid.model.errors import BatchTooLarge, BrokenInvariant, InvalidArgument

ZEROS: Final = tuple(bytes(length) for length in range(8))
HEADER_SPACE: Final = bytes(HEADER_BYTES)
ALL_BUT_BYTES: Final = DIRECTORY_BYTES + BUFFERS * 7


def largest_body(count: int, payload_bytes: int, header_entries: int = 0) -> int:
    """Return an upper bound of the raw body of `count` records with `payload_bytes` of keys, values and headers in all.

    A producer that gathers records keeps these three numbers and closes a batch before the bound passes its limit.
    """
    per_record = 4 + 4 + 8 + 2 + 4  # key offset, value offset, timestamp, hash, header list; validity is below
    return ALL_BUT_BYTES + 20 + (count + 7) // 8 + per_record * count + 8 * header_entries + payload_bytes


class Draft:
    """Takes buffers in the directory's order; a buffer that is not added is absent."""

    __slots__ = ("_lengths", "_next", "_parts", "count", "key_range", "time_range")

    def __init__(self, count: int) -> None:
        check_count(count)
        self.count = count
        self.key_range = NO_KEYS
        self.time_range = (0, 0)
        self._lengths = [0] * BUFFERS
        self._parts: list[Any] = []
        self._next = 0

    def add(self, slot: int, length: int, parts: Iterable[Any]) -> None:
        assert slot >= self._next
        self._next = slot + 1
        self._lengths[slot] = length
        self._parts += parts
        if length % 8:
            self._parts.append(ZEROS[-length % 8])

    def add_array(self, slot: int, array: npt.NDArray[Any]) -> None:
        self.add(slot, array.nbytes, (array,))

    def add_lists(self, slot: int, lengths: npt.NDArray[np.int64]) -> int:
        """Offsets from lengths; returns the last one."""
        ends = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=ends[1:])
        # What does not fit 32 bits is above the limits too, and `finish` refuses it.
        self.add_array(slot, ends.astype(np.int32))
        return int(ends[-1])

    def add_binary(self, slot: int, lengths: npt.NDArray[np.int64], parts: Sequence[Any]) -> None:
        """Add the offsets at `slot` and the bytes in the slot after it."""
        total = self.add_lists(slot, lengths)
        self.add(slot + 1, total, parts)

    def add_validity(self, valid: npt.NDArray[np.bool_]) -> None:
        self.add_array(KEY_VALIDITY, np.packbits(valid, bitorder="little"))

    def add_timestamps(self, timestamps: npt.NDArray[np.int64]) -> None:
        self.time_range = int(timestamps.min()), int(timestamps.max())
        if self.time_range[0] != self.time_range[1]:
            self.add_array(TIMESTAMPS, timestamps)

    def finish(self, codec: Codec, producer_id: int, first_sequence: int) -> bytearray:
        """Return the batch in one piece."""
        raw_length = self._raw_length(codec)
        out = joined((HEADER_SPACE, DIRECTORY.pack(*self._lengths), *self._parts), HEADER_BYTES + raw_length)
        body_length = raw_length
        if codec is not Codec.NONE:
            packed = compress(codec, memoryview(out)[HEADER_BYTES:])
            codec = Codec.NONE if packed is None else codec
            if packed is not None:
                body_length = sum(map(len, packed))
                out = bytearray().join((HEADER_SPACE, *packed, ZEROS[-body_length % 8]))
            check_stored(body_length)
        body_crc = crc32c(memoryview(out)[HEADER_BYTES : HEADER_BYTES + body_length])
        out[:HEADER_BYTES] = self._header(codec, body_length, raw_length, body_crc, producer_id, first_sequence)
        return out

    def gather(self, codec: Codec, producer_id: int, first_sequence: int) -> list[Data]:
        """Return the batch as buffers that follow each other. Nothing is copied unless it is compressed. The
        first begins with the header and may be renumbered; the others are still the caller's memory."""
        if codec is not Codec.NONE:
            return [self.finish(codec, producer_id, first_sequence)]
        raw_length = self._raw_length(codec)
        directory = DIRECTORY.pack(*self._lengths)
        views = [memoryview(part).cast("B") for part in self._parts if len(part)]
        if DIRECTORY_BYTES + sum(map(len, views)) != raw_length:
            raise BrokenInvariant("the buffers of a batch are not as long as its directory says")
        body_crc = crc32c(directory)
        for view in views:
            body_crc = crc32c(view, body_crc)
        header = self._header(codec, raw_length, raw_length, body_crc, producer_id, first_sequence)
        return [bytearray(header + directory), *views]

    def _raw_length(self, codec: Codec) -> int:
        raw_length = DIRECTORY_BYTES + sum(map(padded, self._lengths))
        check_raw(raw_length)
        if codec is Codec.NONE:
            check_stored(raw_length)
        return raw_length

    def _header(
        self, codec: Codec, body_length: int, raw_length: int, body_crc: int, producer_id: int, first_sequence: int
    ) -> bytes:
        return fresh_header(
            codec,
            body_length,
            raw_length,
            body_crc,
            self.count,
            self.key_range,
            self.time_range,
            producer_id,
            first_sequence,
        )


def joined(parts: Iterable[Data], expected: int) -> bytearray:
    try:
        out = bytearray().join(parts)
    except TypeError as error:
        raise InvalidArgument(f"keys and values must be bytes: {error}") from error
    if len(out) != expected:
        raise InvalidArgument("keys and values must be bytes or views of single bytes: their lengths do not add up")
    return out


def check_count(count: int) -> None:
    if count == 0:
        raise InvalidArgument("a batch has at least one record, none was given")
    if count > MAX_RECORDS:
        raise BatchTooLarge(f"{count} records are above the limit of {MAX_RECORDS} in a batch; make several batches")


def check_raw(length: int) -> None:
    if length > MAX_RAW_BYTES:
        raise BatchTooLarge(
            f"the batch's body of {length} bytes is above the limit of {MAX_RAW_BYTES}; split the batch"
        )


def check_stored(length: int) -> None:
    if length > MAX_BODY_BYTES:
        raise BatchTooLarge(
            f"the batch's body would be stored in {length} bytes, above the limit of {MAX_BODY_BYTES}; split the batch"
        )
