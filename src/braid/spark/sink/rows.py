"""The rows of one task on their way to a topic: checked, converted to binary, sorted, cut into blocks. Pure functions.

**Blocks are a function of the rows alone**, whatever slices Spark makes: a block ends before the row with which it
would have more than `BLOCK_ROWS` rows or `BLOCK_BYTES` bytes, and a larger row is a block of its own. So a repeated
task cuts the same blocks as its first try, and brokers recognise its batches (client/producing/repeatable_producer.py).

**By content**: some plans repeat a task's rows as a set, but not in their order; after a shuffle, for example, rows
come as its files arrive. Then the task can gather its rows and sort them by everything in them: topic, key, timestamp,
value, headers. That needs memory for all rows of the task, twice for a moment, and the records of a key are then in the
order of their timestamps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from braid.client.producing.open_batch import RECORD_BYTES
from braid.model.batch.body import HEADERS_TYPE, TIMESTAMP_TYPE
from braid.model.errors import InvalidArgument

BLOCK_ROWS: Final = 16_384
BLOCK_BYTES: Final = 2 << 20
ENTRY_BYTES: Final = 8
"""The cost of a header besides its name and value."""

_TYPES: Final = {
    "topic": pa.string(),
    "key": pa.binary(),
    "value": pa.binary(),
    "timestamp": TIMESTAMP_TYPE,
    "headers": HEADERS_TYPE,
}
_LISTS: Final = pa.list_(pa.struct([HEADERS_TYPE.key_field, HEADERS_TYPE.item_field]))
"""Headers as a list of pairs: Arrow's list functions do not take maps."""


def checked(rows: Any, first_row: int, *, default_topic: bool) -> Any:
    """Return a table with the columns of batches. `first_row` is the number of the first row, for messages."""
    _refuse_null(rows, "value", first_row, "a record's value may be empty, but not null")
    _refuse_null(rows, "timestamp", first_row, "fill it in, or leave the column out: then records get the present time")
    if not default_topic:
        _refuse_null(rows, "topic", first_row, "name a topic there, or set option topic")
    arrays = [_as(rows.column(name), name, first_row) for name in rows.schema.names]
    return pa.table(arrays, names=rows.schema.names)


def _refuse_null(rows: Any, name: str, first_row: int, why: str) -> None:
    if name in rows.schema.names and rows.column(name).null_count:
        number = first_row + int(np.flatnonzero(rows.column(name).is_null().to_numpy(zero_copy_only=False))[0])
        raise InvalidArgument(f"the column {name} is null in row {number} of this partition: {why}")


def _as(column: Any, name: str, first_row: int) -> Any:
    kind = _TYPES[name]
    column = column if column.type == kind else column.cast(kind)
    if name == "headers" and column.cast(_LISTS).flatten().field(1).null_count:
        raise InvalidArgument(
            f"the column headers has a null value in the {len(column)} rows from row {first_row} of this partition on: "
            f"a header's value may be empty, but not null"
        )
    return column


def row_bytes(rows: Any) -> npt.NDArray[np.int64]:
    """Estimate the bytes of each row in a batch; always the same for the same row."""
    sizes = np.full(rows.num_rows, RECORD_BYTES, np.int64)
    for name in ("key", "value"):
        if name in rows.column_names:
            sizes += _lengths(rows.column(name))
    if "headers" in rows.column_names:
        start = 0
        for chunk in rows.column("headers").chunks:
            lists = chunk.cast(_LISTS)
            entries = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
            pairs = lists.flatten()
            lengths = ENTRY_BYTES + _lengths(pairs.field(0)) + _lengths(pairs.field(1))
            ends = np.concatenate(([0], np.cumsum(lengths)))
            last = np.cumsum(entries, dtype=np.int64)
            sizes[start : start + len(chunk)] += ends[last] - ends[last - entries]
            start += len(chunk)
    return sizes


def _lengths(column: Any) -> npt.NDArray[np.int64]:
    lengths: npt.NDArray[np.int64] = pc.fill_null(pc.binary_length(column), 0).to_numpy().astype(np.int64)
    return lengths


def cut_blocks(tables: Iterable[Any]) -> Iterator[Any]:
    """Cut the rows into blocks, as the top of this module says. Empty tables make no block."""
    waiting: list[Any] = []
    rows = size = 0
    for table in tables:
        sizes = row_bytes(table)
        ends = np.cumsum(sizes)
        start = 0
        while start < table.num_rows:
            before = int(ends[start - 1]) if start else 0
            end = min(int(np.searchsorted(ends, before + BLOCK_BYTES - size, "right")), start + BLOCK_ROWS - rows)
            if end == start and not rows:
                end = start + 1
            if end > start:
                waiting.append(table.slice(start, end - start))
                rows += end - start
                size += int(ends[end - 1]) - before
                start = end
            if start < table.num_rows or rows == BLOCK_ROWS:
                yield pa.concat_tables(waiting)
                waiting, rows, size = [], 0, 0
    if waiting:
        yield pa.concat_tables(waiting)


def by_content(tables: Iterable[Any]) -> Iterator[Any]:
    """Gather all rows and yield them sorted by content, a block at a time."""
    gathered = list(tables)
    if not gathered:
        return
    table = pa.concat_tables(gathered)
    del gathered
    if not table.num_rows:
        return
    order = _content_order(table)
    for start in range(0, len(order), BLOCK_ROWS):
        yield table.take(order.slice(start, BLOCK_ROWS))


def _content_order(table: Any) -> Any:
    names = [name for name in ("topic", "key", "timestamp", "value") if name in table.column_names]
    order = pc.sort_indices(table, [(name, "ascending") for name in names])
    if "headers" not in table.column_names:
        return order
    # Arrow cannot compare maps. Only rows that are otherwise equal need that, and they are few.
    numbers = order.to_numpy().copy()
    same = np.ones(len(numbers) - 1, np.bool_)
    for name in names:
        column = table.column(name).take(order)
        same &= _equal(column.slice(1), column.slice(0, len(numbers) - 1))
    edges = np.flatnonzero(np.diff(np.concatenate(([False], same, [False])).astype(np.int8)))
    for first, last in zip(edges[::2].tolist(), edges[1::2].tolist()):
        tied = numbers[first : last + 1]
        headers = [pairs or [] for pairs in table.column("headers").take(pa.array(tied)).to_pylist()]
        ranked = sorted(range(len(tied)), key=lambda at: (sorted(headers[at]), headers[at]))
        numbers[first : last + 1] = tied[ranked]
    return pa.array(numbers)


def _equal(one: Any, other: Any) -> npt.NDArray[np.bool_]:
    """Compare row by row; two nulls are equal."""
    equal = pc.fill_null(pc.equal(one, other), False)
    both: npt.NDArray[np.bool_] = pc.or_(equal, pc.and_(one.is_null(), other.is_null())).to_numpy()
    return both
