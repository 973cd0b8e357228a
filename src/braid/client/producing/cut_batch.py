"""Cuts a batch by the ranges of the segments that take its records now; layout_change.py says when.

Each piece has the records of one range, in their order. Records without a key may go anywhere; all of them go to the
first range, so they keep their order, too. The program holds receipts of the whole batch, and waits for it: the whole
is settled when its pieces are, and says in which piece each record is (`Pieces`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from braid.client.producing.open_batch import Pieces, ProducerBatch
from braid.model.hashing import key_hashes

T = TypeVar("T")


class Piece(NamedTuple):
    range: int
    """The number of its range among those by which the batch was cut."""
    batch: ProducerBatch


def range_numbers(keys: Sequence[bytes | None], starts: Sequence[int], keyless: int) -> npt.NDArray[np.int64]:
    """Return which range takes each key, by the ranges' starts, in order; `keyless` takes the records without one."""
    null = np.fromiter([key is None for key in keys], np.bool_, len(keys))
    hashes = key_hashes([b"" if key is None else key for key in keys] if null.any() else keys)  # type: ignore[arg-type]
    numbers = np.searchsorted(np.array(starts), hashes, "right") - 1
    numbers[null] = keyless
    return numbers


def table_keys(table: Any) -> list[bytes | None] | None:
    if "key" not in table.column_names:
        return None
    return [key.encode() if isinstance(key, str) else key for key in table.column("key").to_pylist()]


def cut_batch(batch: ProducerBatch, starts: Sequence[int]) -> list[Piece]:
    """Return the batches that have the records from now on. If one range takes all records, it gets the batch itself.

    The batch takes no more records and is not settled. No piece has a segment yet.
    """
    keys = _keys(batch)
    ranges = np.zeros(batch.count, np.int64) if keys is None else range_numbers(keys, starts, keyless=0)
    found, places = np.unique(ranges, return_inverse=True)
    if len(found) == 1:
        return [Piece(int(found[0]), batch)]
    rows_of = [np.flatnonzero(places == place) for place in range(len(found))]
    numbers = np.empty(batch.count, np.int64)
    for rows in rows_of:
        numbers[rows] = np.arange(len(rows))
    pieces = [_piece(batch, keys, rows) for rows in rows_of]
    pieces[-1].size += batch.size - sum(piece.size for piece in pieces)
    batch.cut(Pieces(pieces, places, numbers))
    return [Piece(int(number), piece) for number, piece in zip(found, pieces)]


def _keys(batch: ProducerBatch) -> list[bytes | None] | None:
    if batch.table is not None:
        return table_keys(batch.table)
    return None if batch.keys is None else batch.pad_keys()


def _piece(batch: ProducerBatch, keys: list[bytes | None] | None, rows: npt.NDArray[np.intp]) -> ProducerBatch:
    piece = ProducerBatch(batch.segment, batch.opened_at, batch.deadline, batch.now_us)
    piece.whole = batch
    piece.count = len(rows)
    piece.size = batch.size * len(rows) // batch.count
    if batch.table is not None:
        piece.table = batch.table.take(pa.array(rows))
        return piece
    numbers: list[int] = rows.tolist()
    piece.values = [batch.values[number] for number in numbers]
    piece.keys = None if keys is None else [keys[number] for number in numbers]
    piece.headers = _chosen(batch.headers, numbers)
    piece.timestamps = _chosen(batch.timestamps, numbers)
    return piece


def _chosen(by_number: dict[int, T] | None, numbers: list[int]) -> dict[int, T] | None:
    if by_number is None:
        return None
    return {new: by_number[old] for new, old in enumerate(numbers) if old in by_number} or None
