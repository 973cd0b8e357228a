"""The record batches of one delivery, as the broker sent them.

The batches stay the bytes that arrived. They are decoded when the application asks: into Arrow columns that use those
bytes, a list of values, or one object for each record. So receiving costs per delivery, not per record. Batches travel
whole, so the first batch may begin before the wanted offset; the records before that offset are left out.

**Memory.** A few compressed bytes may hold very much, and a delivery has many batches. So a delivery is handed out in
runs of batches that are decoded together (`decoded_run`), and message by message only one batch is open at a time.

**Poison.** A producer may write a batch that no reader can decode: its checksums are right, its contents are not. The
records before it are good, and are handed out (`readable`). At the batch itself a reader stops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, Final, NamedTuple

import pyarrow as pa

from braid.model.batch.body import Body
from braid.model.batch.columns import COLUMNS, RECORD_SCHEMA, arrow_rows, decode_one, message_lists
from braid.model.batch.header import BatchHeader, verify
from braid.model.errors import BatchError, BatchUnreadable
from braid.model.log.epochs import UNKNOWN_EPOCH
from braid.model.message import Message

MAX_DECODED_BYTES: Final = 64 << 20
"""Of the batches that are handed out together, unless one batch alone has more."""
MESSAGE_BYTES: Final = 200
"""What a record takes as a `Message`, beside the bytes of its key and value."""


class BatchSlice(NamedTuple):
    """One checked batch, and its position in the payload."""

    header: BatchHeader
    position: int


def checked_slices(payload: memoryview) -> list[BatchSlice]:
    """Find the batches of a delivery, control batches included, and verify the checksums of each."""
    slices = []
    position = 0
    size = len(payload)
    while position < size:
        header = verify(payload, position)
        slices.append(BatchSlice(header, position))
        position += header.size
    return slices


def decoded_run(slices: Sequence[BatchSlice]) -> int:
    """Return how many of these batches may be decoded together: at least one with records."""
    size = records = 0
    for number, (header, _) in enumerate(slices):
        size += header.raw_length + MESSAGE_BYTES * header.count
        if size > MAX_DECODED_BYTES and records and header.count:
            return number
        records += header.count
    return len(slices)


class ReceivedBatch:
    """Records of one segment with consecutive offsets. It keeps the memory of its delivery alive."""

    def __init__(
        self,
        topic: str,
        segment: int,
        payload: memoryview,
        slices: Sequence[BatchSlice],
        base_offset: int,
        next_offset: int,
    ) -> None:
        self.topic: Final = topic
        """The path `tenant/namespace/name`."""
        self.segment: Final = segment
        self.base_offset: Final = base_offset
        self.next_offset: Final = next_offset
        """The offset after the last record."""
        self._payload = payload
        self._slices = [each for each in slices if each.header.next_offset > base_offset]
        self.last_epoch: Final = self._slices[-1].header.epoch if self._slices else UNKNOWN_EPOCH
        """The epoch of the last batch: with `next_offset`, it is a position (model/log/epochs.py)."""
        self._open: dict[int, Body] = {}
        """The bodies that `readable` has checked, by their position."""

    def __len__(self) -> int:
        return self.next_offset - self.base_offset

    def __repr__(self) -> str:
        return f"<ReceivedBatch {self.topic} segment {self.segment} offsets {self.base_offset} to {self.next_offset}>"

    @cached_property
    def table(self) -> Any:
        """A `pyarrow.Table` with the columns offset, key, value, timestamp, headers and key_hash."""
        return self.columns(COLUMNS)

    def columns(self, names: Sequence[str]) -> Any:
        """Return a `pyarrow.Table` of only these columns. The others are not decoded."""
        rows = [*self._rows(names)]
        return pa.Table.from_batches(rows) if rows else RECORD_SCHEMA.empty_table().select(list(names))

    def batches(self) -> Iterator[tuple[BatchHeader, memoryview]]:
        """Yield the stored batches, each with its checked header. The first may begin before `base_offset`."""
        for header, position in self._slices:
            if not header.is_control:
                yield header, self._payload[position : position + header.size]

    def values(self) -> list[bytes]:
        """Return the values alone, in order: the fast way to Python objects."""
        values: list[bytes] = []
        for rows in self._rows(("value",)):
            values += rows.column(0).to_pylist()
        return values

    def messages(self) -> list[Message]:
        messages: list[Message] = []
        for part in self._message_lists():
            messages += part
        return messages

    def iter_messages(self) -> Iterator[Message]:
        """Iterate over the messages. Only one batch is decoded at a time."""
        return chain.from_iterable(self._message_lists())

    def readable(self) -> ReceivedBatch:
        """Return the records before the first batch that cannot be decoded: all of them, as a rule. `BatchUnreadable`
        if it is the first batch. The batches stay decoded."""
        until = self.base_offset
        try:
            for position, body in self._bodies():
                self._open[position] = body
                until = body.header.next_offset
        except BatchUnreadable:
            if until == self.base_offset:
                raise
            return self._between(self.base_offset, until)
        return self

    def batch_headers(self) -> list[BatchHeader]:
        """Return the stored headers of the batches that hold the records."""
        return [header for header, _ in self._slices]

    def _message_lists(self) -> Iterator[list[Message]]:
        early = self._early_records()
        for _, body in self._bodies():
            if body.is_plain_record:
                yield [decode_one(body, self.segment, self.topic)]
            else:
                yield from message_lists(body, segment=self.segment, topic=self.topic, first=early)
            early = 0
            del body  # Its memory is free before the next body is decompressed.

    def _rows(self, names: Sequence[str]) -> Iterator[Any]:
        early = self._early_records()
        for _, body in self._bodies():
            rows = arrow_rows(body, names)
            yield rows.slice(early) if early else rows
            early = 0

    def _bodies(self) -> Iterator[tuple[int, Body]]:
        """Yield the checked bodies of the batches that have records, with their positions."""
        for header, position in self._slices:
            if header.is_control:
                continue
            body = self._open.get(position) if self._open else None
            if body is None:
                try:
                    body = Body(self._payload, header, position)
                    body.check()
                except BatchError as error:
                    raise self._unreadable(header, error) from error
            yield position, body
            del body

    def _unreadable(self, header: BatchHeader, error: BatchError) -> BatchUnreadable:
        first, until = max(header.base_offset, self.base_offset), header.next_offset
        return BatchUnreadable(
            f"offsets {first} to {until - 1} of segment {self.segment} of {self.topic} cannot be decoded, because "
            f"their producer wrote them wrong: {error}",
            self.segment,
            first,
            until,
        )

    def _early_records(self) -> int:
        return max(self.base_offset - self._slices[0].header.base_offset, 0) if self._slices else 0

    def from_offset(self, offset: int) -> ReceivedBatch:
        """Return the records from this offset on; the whole batch if it begins there or later."""
        if offset <= self.base_offset:
            return self
        return self._between(offset, max(self.next_offset, offset))

    def _between(self, base_offset: int, next_offset: int) -> ReceivedBatch:
        slices = [each for each in self._slices if each.header.base_offset < next_offset]
        part = ReceivedBatch(self.topic, self.segment, self._payload, slices, base_offset, next_offset)
        part._open = self._open
        return part
