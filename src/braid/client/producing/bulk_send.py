"""One call of `send_many` or `send_table`: gives many records to their writers, and collects their ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from braid.client.producing.open_batch import RECORD_BYTES, BatchSpan, MessageIds, cut_points
from braid.client.producing.records import (
    COLUMNAR_RECORDS,
    MAX_RECORD_BYTES,
    all_bytes,
    as_table,
    is_small,
    row_sizes,
    table_size,
)
from braid.client.producing.segment_writer import SegmentWriter
from braid.model.batch.header import Codec
from braid.model.errors import BatchTooLarge

if TYPE_CHECKING:
    from braid.client.producing.producer import Producer


class BulkSend:
    def __init__(self, producer: Producer) -> None:
        """The producer must be open."""
        self._producer = producer
        self._batch_bytes = producer.options.max_batch_bytes
        self._batch_records = producer.options.max_batch_records
        self._given = 0
        """Records of the slices that were given before."""
        self._spans: list[BatchSpan] = []
        """Where the given records are, in the order in which the writers got them."""
        self._places: list[npt.NDArray[np.int64] | None] = []
        """For each span: the place of each of its records among those that the program gave. None: the span follows
        all records of the spans before it, because there was one writer."""

    # The layout may change while a slice waits between two batches. The rest of the slice still goes to the writers of
    # its beginning, which pass it on (layout_change.py).

    async def add(self, values: list[Any], keys: list[bytes | None] | None) -> bool:
        """Give a slice of records to their writers. Returns False after a failure: the rest would wait just as long, so
        the caller gives no more."""
        if len(values) >= COLUMNAR_RECORDS and is_small(values[0]):
            return await self.add_table(as_table(values, keys))
        for span, places in self._add_columns(all_bytes("value", values), keys):
            if not await self._note(span, places):
                return False
        self._given += len(values)
        return True

    async def add_table(self, rows: Any) -> bool:
        """Give the rows of an Arrow table to their writers, as batches of their own. Returns as `add` does."""
        for writer, part, chosen in self._producer.partitioner.split_table(rows):
            start = 0
            for end, size in self._cut_table(part):
                batch = writer.add_table(part.slice(start, end - start), end - start, size)
                places = None if chosen is None else chosen[start:end] + self._given
                if not await self._note(BatchSpan(batch, 0, end - start), places):
                    return False
                start = end
        self._given += rows.num_rows
        return True

    async def stored(self) -> MessageIds:
        """Wait until all given records are settled. Returns their ids, or raises the first failure."""
        for span in self._spans:
            span.batch.looked_at = True
            await span.batch.settled()
        for span in self._spans:
            span.raise_error()
        if not any(places is not None for places in self._places):
            return MessageIds(self._spans)
        filled: list[npt.NDArray[np.int64]] = []
        given = 0
        for span, span_places in zip(self._spans, self._places):
            filled.append(np.arange(given, given + span.count) if span_places is None else span_places)
            given += span.count
        places = np.concatenate(filled)
        order = np.empty(len(places), np.int64)
        order[places] = np.arange(len(places))
        return MessageIds(self._spans, order)

    async def _note(self, span: BatchSpan, places: npt.NDArray[np.int64] | None) -> bool:
        self._spans.append(span)
        self._places.append(places)
        await self._producer.pace()
        return all(span.batch.error is None for span in self._spans)

    def _cut_table(self, rows: Any) -> Iterator[tuple[int, int]]:
        """Yield the end and the size of each batch of the rows."""
        count, size = rows.num_rows, table_size(rows)
        if size <= self._batch_bytes and count <= self._batch_records:
            yield count, size
            return
        sizes = row_sizes(rows)
        start = 0
        for end in cut_points(sizes, self._batch_bytes, self._batch_bytes, self._batch_records):
            yield end, int(sizes[start:end].sum())
            start = end

    def _add_columns(
        self, values: list[bytes], keys: list[bytes | None] | None
    ) -> Iterator[tuple[BatchSpan, npt.NDArray[np.int64] | None]]:
        """Add records to their writers' open batches. Yields each span, and with several writers its places."""
        partitioner = self._producer.partitioner
        if partitioner.only is not None:
            for span in self._add_to(partitioner.only, values, keys):
                yield span, None
            return
        for writer, chosen in partitioner.split(keys, len(values)):
            numbers = chosen.tolist()
            writer_values = [values[number] for number in numbers]
            writer_keys = [keys[number] for number in numbers] if keys is not None else None
            start = 0
            for span in self._add_to(writer, writer_values, writer_keys):
                yield span, chosen[start : start + span.count] + self._given
                start += span.count

    def _add_to(
        self, writer: SegmentWriter, values: list[bytes], keys: list[bytes | None] | None
    ) -> Iterator[BatchSpan]:
        sizes = np.fromiter(map(len, values), np.int64, len(values)) + RECORD_BYTES
        if keys is not None:
            sizes += np.fromiter([len(key) if key is not None else 0 for key in keys], np.int64, len(keys))
        if len(sizes) and int(sizes.max()) > MAX_RECORD_BYTES and self._producer.codec is Codec.NONE:
            raise BatchTooLarge(f"a record of {int(sizes.max())} bytes is above the limit of {MAX_RECORD_BYTES}")
        room = self._batch_bytes - writer.open.size if writer.open is not None else self._batch_bytes
        start = 0
        for at, end in enumerate(cut_points(sizes, room, self._batch_bytes, self._batch_records)):
            if at or (writer.open is not None and len(writer.open.values) + end > self._batch_records):
                writer.close_open()
            if end == start:
                continue
            batch = writer.open or writer.begin()
            first = len(batch.values)
            if keys is not None:
                batch.pad_keys().extend(keys[start:end])
            batch.values += values[start:end]
            batch.size += int(sizes[start:end].sum())
            if batch.size >= self._batch_bytes or writer.retired:  # It may retire between two spans.
                writer.close_open()
            yield BatchSpan(batch, first, end - start)
            start = end
