"""From record batches to rows in Arrow: the columns asked for, and no others.

A buffer takes batch after batch and gives one Arrow batch of all of them. Columns that differ from record to record
come from the batches: keys and values as they are there, without a copy if there is only one batch. Columns that follow
from a batch's place (segment, offset, epoch) are made once for all batches. So records in small batches cost little
more than records in large ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from braid.model.batch.body import HEADER_LISTS, HEADERS_TYPE, KEY_HASHES, TIMESTAMP_TYPE, TIMESTAMPS, Body
from braid.model.batch.header import BatchHeader
from braid.scan.planning import Piece

Numbers = npt.NDArray[Any]

_NO_ENTRIES: Final = pa.nulls(0, pa.struct([HEADERS_TYPE.key_field, HEADERS_TYPE.item_field]))


class RowBuffer:
    """Collects rows of an Arrow schema, and keeps those with timestamps within the bounds."""

    def __init__(
        self, schema: Any, since_us: int | None = None, before_us: int | None = None, *, check: bool = False
    ) -> None:
        """With `check`, bodies are opened although the columns do not need them."""
        self._schema = schema
        self._since_us, self._before_us = since_us, before_us
        headers_suffice = {"segment", "offset", "epoch"}.issuperset(schema.names)
        self.opens_bodies: Final = check or not headers_suffice or since_us is not None or before_us is not None
        self._clear()

    def _clear(self) -> None:
        self.rows = 0
        self.size = 0
        """Decompressed bytes of the batches in the buffer."""
        self._parts: list[_Part] = []

    def add(self, piece: Piece, header: BatchHeader, data: memoryview) -> None:
        """Add the records of this batch that belong to the piece. Raises `BatchError`, and adds nothing, if the batch
        cannot be decoded."""
        first = max(piece.first - header.base_offset, 0)
        part = _Part(piece.segment, header, first, min(piece.until, header.next_offset) - header.base_offset)
        cut = self._cuts(header)
        if self.opens_bodies:
            part.body = Body(data, header)
            part.body.check()
        if cut:
            times = _times(part)
            since = np.iinfo(np.int64).min if self._since_us is None else self._since_us
            before = np.iinfo(np.int64).max if self._before_us is None else self._before_us
            part.kept = (times >= since) & (times < before)
            part.rows = int(np.count_nonzero(part.kept))
        if part.rows:
            self._parts.append(part)
            self.rows += part.rows
            self.size += header.raw_length

    def take(self) -> Any:
        """Return all rows in order, as one `pyarrow.RecordBatch`, and empty the buffer."""
        arrays = [_COLUMNS[name](self._parts) for name in self._schema.names]
        self._clear()
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _cuts(self, header: BatchHeader) -> bool:
        """Whether a bound lies within this batch."""
        return (self._since_us is not None and header.min_timestamp < self._since_us) or (
            self._before_us is not None and header.max_timestamp >= self._before_us
        )


class _Part:
    """The records of one batch from number `first` up to but not including number `until`."""

    __slots__ = ("body", "first", "header", "kept", "rows", "segment", "until")

    def __init__(self, segment: int, header: BatchHeader, first: int, until: int) -> None:
        self.segment = segment
        self.header = header
        self.first = first
        self.until = until
        self.rows = until - first
        self.body: Any = None
        self.kept: Numbers | None = None
        """Which of these records are kept; None: all."""

    def of(self, column: Any) -> Any:
        """Cut the part's records out of an Arrow column of the whole batch."""
        if self.until - self.first < self.header.count:
            column = column.slice(self.first, self.until - self.first)
        return column if self.kept is None else column.filter(pa.array(self.kept))

    def numbers(self, whole: Numbers) -> Numbers:
        """Cut the part's records out of a numpy array of the whole batch."""
        found = whole[self.first : self.until]
        return found if self.kept is None else found[self.kept]


Parts = list[_Part]


def _joined(parts: Parts, column: Callable[[_Part], Any]) -> Any:
    arrays = [column(part) for part in parts]
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _repeated(parts: Parts, number: Callable[[_Part], int]) -> Any:
    numbers = np.array([number(part) for part in parts], np.int32)
    return pa.array(np.repeat(numbers, [part.rows for part in parts]))


def _offsets(parts: Parts) -> Any:
    ranges = []
    for part in parts:
        base = part.header.base_offset
        found = np.arange(base + part.first, base + part.until, dtype=np.int64)
        ranges.append(found if part.kept is None else found[part.kept])
    return pa.array(np.concatenate(ranges))


def _times(part: _Part) -> Numbers:
    """Return the timestamps of the part's records, in µs."""
    if part.body.lengths[TIMESTAMPS]:
        return part.numbers(np.frombuffer(part.body.view(TIMESTAMPS), np.int64))
    return np.full(part.rows, part.header.min_timestamp, np.int64)


def _timestamps(parts: Parts) -> Any:
    times = np.concatenate([_times(part) for part in parts])
    return pa.Array.from_buffers(TIMESTAMP_TYPE, len(times), [None, pa.py_buffer(times)])


def _hashes(part: _Part) -> Numbers:
    if part.body.lengths[KEY_HASHES]:
        return part.numbers(np.frombuffer(part.body.view(KEY_HASHES), np.uint16))
    return np.zeros(part.rows, np.uint16)


def _headers(parts: Parts) -> Any:
    if any(part.body.lengths[HEADER_LISTS] for part in parts):
        return _joined(parts, lambda part: part.of(part.body.headers()))
    rows = sum(part.rows for part in parts)
    lists = pa.py_buffer(np.zeros(rows + 1, np.int32))
    return pa.Array.from_buffers(HEADERS_TYPE, rows, [None, lists], children=[_NO_ENTRIES])


_COLUMNS: Final[dict[str, Callable[[Parts], Any]]] = {
    "segment": lambda parts: _repeated(parts, lambda part: part.segment),
    "offset": _offsets,
    "key": lambda parts: _joined(parts, lambda part: part.of(part.body.keys())),
    "value": lambda parts: _joined(parts, lambda part: part.of(part.body.values())),
    "timestamp": _timestamps,
    "headers": _headers,
    "keyHash": lambda parts: pa.array(np.concatenate([_hashes(part) for part in parts]).astype(np.int32)),
    "epoch": lambda parts: _repeated(parts, lambda part: part.header.epoch),
}
