"""The record batches of one delivery, as the broker sent them.

The batches stay the bytes that arrived. They are decoded when the application asks: into Arrow columns that use those
bytes, a list of values, or one object for each record. So receiving costs per delivery, not per record. Batches travel
whole, so the first batch may begin before the wanted offset; the records before that offset are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

import pyarrow as pa

from braid.model.batch.columns import COLUMNS, RECORD_SCHEMA, decode_arrow, decode_messages
from braid.model.batch.epochs import UNKNOWN_EPOCH
from braid.model.batch.header import BatchHeader, verify
from braid.model.ids import Epoch
from braid.model.message import Message


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
        if not self._slices:
            return RECORD_SCHEMA.empty_table().select(list(names))
        return pa.Table.from_batches(self._rows(names))

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
        for header, position in self._slices:
            messages += decode_messages(self._payload, header, position, segment=self.segment, topic=self.topic)
        # Only the first batch can begin too early.
        early = self._early_records()
        return messages[early:] if early else messages

    @property
    def last_epoch(self) -> Epoch:
        """The epoch of the last record."""
        for header, _ in reversed(self._slices):
            if header.count:
                return header.epoch
        return UNKNOWN_EPOCH

    def batch_headers(self) -> list[BatchHeader]:
        """Return the stored headers of the batches that hold the records."""
        return [header for header, _ in self._slices]

    def _rows(self, names: Sequence[str]) -> Iterator[Any]:
        early = self._early_records()
        for header, position in self._slices:
            rows = decode_arrow(self._payload, header, position, columns=names)
            yield rows.slice(early) if early else rows
            early = 0

    def _early_records(self) -> int:
        return max(self.base_offset - self._slices[0].header.base_offset, 0) if self._slices else 0

    def from_offset(self, offset: int) -> ReceivedBatch:
        """Return the records from this offset on; the whole batch if it begins there or later."""
        if offset <= self.base_offset:
            return self
        end = max(self.next_offset, offset)
        return ReceivedBatch(self.topic, self.segment, self._payload, self._slices, offset, end)
