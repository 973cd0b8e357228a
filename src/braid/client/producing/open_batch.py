"""Batches while they are being filled, and what a program holds to learn what became of its records.

A record costs a few list operations here and nothing else: no task, no future, no encoding. All records of a batch
share its action, so their senders share a few futures (wakeup.py), and a receipt is only the batch and a number.
Encoding happens once, when the batch leaves (`ProducerBatch.encode`), in loops that run in C.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Final, overload

import msgspec
import numpy as np
import numpy.typing as npt

from braid.model.batch.body import Data
from braid.model.batch.encode import Headers, encode_batch, encode_one, gather_table
from braid.model.batch.header import BatchHeader, Codec
from braid.model.errors import BraidError
from braid.model.message import MessageId
from braid.wire.wakeup import cancelled_itself, wait_on

RECORD_BYTES: Final = 22
"""What a record costs in a batch besides its key, value and headers (model/batch/draft.py, `largest_body`)."""
GROUP: Final = 128
"""Records whose senders share a future. What asyncio keeps for each task that waits on one is freed with the future, so
if thousands shared one, their going on would look to Python's garbage collector like thousands of new objects: it would
run so often that it took a fifth of the time."""
UNKNOWN_OFFSET: Final = -1
"""Of a record that is stored, at an offset that the broker no longer remembers."""


class ProducerBatch:
    """Records for one segment. Filled by the producer, then owned by the segment's writer until it is settled."""

    __slots__ = (
        "answer",
        "base_offset",
        "count",
        "data",
        "deadline",
        "done",
        "doubtful",
        "duplicate",
        "error",
        "first_sequence",
        "future",
        "futures",
        "headers",
        "keys",
        "looked_at",
        "now_us",
        "opened_at",
        "past_era",
        "segment",
        "sent_header",
        "size",
        "submitted",
        "table",
        "timestamps",
        "values",
    )

    def __init__(self, segment: int, opened_at: float, deadline: float, now_us: int) -> None:
        self.segment = segment
        self.opened_at = opened_at
        self.deadline = deadline
        """The loop's time at which its records are given up."""
        self.now_us = now_us
        """The time of records that bring none."""
        self.values: list[bytes] = []
        self.keys: list[bytes | None] | None = None
        """None: no record has a key. May be shorter than `values`: the last ones have none."""
        self.headers: dict[int, Headers] | None = None
        self.timestamps: dict[int, int] | None = None
        self.table: Any = None
        """An Arrow table instead of the lists."""
        self.size = 0
        """Bytes, about as many as will be sent."""
        self.count = 0
        """Records; set when the batch is closed."""
        self.submitted = False
        """Whether it has records for which nobody waits in `send`."""
        self.looked_at = False
        """Whether somebody asked a receipt, or waits, for what became of it."""

        self.data: Sequence[Data] | None = None
        """Encoded, as buffers that follow each other, the first of which begins with the header; from then on it has
        its number."""
        self.first_sequence = 0
        self.answer: BraidError | None = None
        """What the broker refused it with in this round; None: not answered yet, or stored."""
        self.doubtful = False
        """It was sent, and whether it was stored then is not known: it must never be sent under another number."""

        self.sent_header: BatchHeader | None = None
        """Kept of a batch under a fixed identity, for comparing it with what is stored under its number."""

        self.done = False
        self.duplicate = False
        """It was stored before it was sent, or before it was sent again."""
        self.past_era = False
        """Its producer, a derived one, has begun a later era."""
        self.base_offset = 0
        self.error: BraidError | None = None
        self.future: asyncio.Future[None] | None = None
        """The one that the next task waits on."""
        self.futures: list[asyncio.Future[None]] = []
        """All that somebody waits on."""

    def pad_keys(self) -> list[bytes | None]:
        """The keys, one for each value."""
        keys = self.keys
        if keys is None:
            keys = self.keys = []
        if len(keys) < len(self.values):
            keys += [None] * (len(self.values) - len(keys))
        return keys

    def add_headers(self, headers: Headers) -> None:
        """Of the record that was added last."""
        if self.headers is None:
            self.headers = {}
        self.headers[len(self.values) - 1] = headers

    def add_timestamp(self, timestamp_us: int) -> None:
        if self.timestamps is None:
            self.timestamps = {}
        self.timestamps[len(self.values) - 1] = timestamp_us

    def encode(self, codec: Codec, producer_id: int, first_sequence: int) -> Sequence[Data]:
        data: Sequence[Data]
        values = self.values
        headers, timestamps = self.headers, self.timestamps
        if self.table is not None:
            data = gather_table(
                self.table, now_us=self.now_us, codec=codec, producer_id=producer_id, first_sequence=first_sequence
            )
        elif len(values) == 1 and headers is None and timestamps is None and codec is Codec.NONE:
            key = self.keys[0] if self.keys else None
            data = (encode_one(values[0], key, self.now_us, producer_id, first_sequence),)
        else:
            whole = encode_batch(
                values,
                keys=None if self.keys is None else self.pad_keys(),
                timestamps=None if timestamps is None else [timestamps.get(n, self.now_us) for n in range(len(values))],
                headers=None if headers is None else [headers.get(n) for n in range(len(values))],
                now_us=self.now_us,
                codec=codec,
                producer_id=producer_id,
                first_sequence=first_sequence,
            )
            data = (whole,)
        self.data = data
        self.first_sequence = first_sequence
        return data

    def settle(self, base_offset: int, error: BraidError | None) -> None:
        """Say once and for all what became of it, and let go of its records. The caller wakes those who wait."""
        self.done = True
        self.base_offset = base_offset
        self.error = error
        self.values = []
        self.keys = self.headers = self.timestamps = self.table = self.data = None

    async def settled(self) -> None:
        """Returns when it is known what became of it, be it good or bad. May be waited for by many, and cancelled."""
        while not self.done:
            future = self.future
            if future is None or future.done():
                future = self.waiting()
            try:
                await wait_on(future)
            except asyncio.CancelledError:
                if cancelled_itself():
                    raise

    def waiting(self) -> asyncio.Future[None]:
        """A new future to wait on. Many share it (wakeup.py), but no more than `GROUP`."""
        future = self.future = asyncio.get_running_loop().create_future()
        self.futures.append(future)
        return future

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error.again()


class Receipt(msgspec.Struct, gc=False, eq=False):
    """What `submit` returns: await it, ask it later, or drop it: `flush` reports what nobody looked at."""

    # gc=False: a batch never refers to its receipts, so there are no cycles for the collector to look for.
    batch: ProducerBatch
    number: int

    def done(self) -> bool:
        return self.batch.done

    def result(self) -> MessageId:
        """Where the record is stored. `InvalidStateError` before it is known; raises what it failed with."""
        batch = self.batch
        batch.looked_at = True
        if not batch.done:
            raise asyncio.InvalidStateError("what became of the record is not known yet; await the receipt")
        batch.raise_error()
        return id_at(batch, self.number)

    def exception(self) -> BraidError | None:
        """What the record failed with, or None. `InvalidStateError` before it is known."""
        self.batch.looked_at = True
        if not self.batch.done:
            raise asyncio.InvalidStateError("what became of the record is not known yet; await the receipt")
        return self.batch.error

    def __await__(self) -> Generator[Any, None, MessageId]:
        self.batch.looked_at = True
        if not self.batch.done:
            yield from self.batch.settled().__await__()
        return self.result()


def id_at(batch: ProducerBatch, number: int) -> MessageId:
    base = batch.base_offset
    return MessageId(batch.segment, base + number if base >= 0 else UNKNOWN_OFFSET)


class BatchSpan(msgspec.Struct, frozen=True, gc=False):
    """Records `first`, `first + 1`, … of a batch."""

    batch: ProducerBatch
    first: int
    count: int


class MessageIds(Sequence[MessageId]):
    """The ids of many records in the order in which they were given. They are runs: an id is made when asked for."""

    def __init__(self, spans: Sequence[BatchSpan], order: npt.NDArray[np.int64] | None = None) -> None:
        """`order`: which number of all records of the spans each given record is; None: the same."""
        self._spans = spans
        self._order = order
        self._starts = [0]
        for span in spans:
            self._starts.append(self._starts[-1] + span.count)

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> MessageId: ...

    @overload
    def __getitem__(self, index: slice) -> list[MessageId]: ...

    def __getitem__(self, index: int | slice) -> MessageId | list[MessageId]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        if self._order is not None:
            number = int(self._order[number])
        at = bisect_right(self._starts, number) - 1
        span = self._spans[at]
        return id_at(span.batch, span.first + number - self._starts[at])

    def __iter__(self) -> Iterator[MessageId]:
        if self._order is not None:
            yield from map(self.__getitem__, range(len(self)))
            return
        for span in self._spans:
            for number in range(span.first, span.first + span.count):
                yield id_at(span.batch, number)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(a == b for a, b in zip(self, other))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:3]))
        return f"MessageIds([{shown}{', …' if len(self) > 3 else ''}], {len(self)} records)"


def cut_points(sizes: npt.NDArray[np.int64], room_bytes: int, batch_bytes: int, max_records: int) -> list[int]:
    """Where to cut records of these sizes: the first piece has up to `room_bytes`, the others up to `batch_bytes`.

    Returns the ends of the pieces, the last of which is the number of records. A record that is larger than a
    batch is a piece of its own; only the first piece may be empty, when its first record does not fit.
    """
    ends = np.cumsum(sizes)
    cuts: list[int] = []
    start, limit = 0, room_bytes
    while start < len(sizes):
        before = int(ends[start - 1]) if start else 0
        end = int(np.searchsorted(ends, before + limit, "right"))
        if cuts or room_bytes >= batch_bytes:
            end = max(end, start + 1)
        end = min(end, start + max_records)
        cuts.append(end)
        start, limit = end, batch_bytes
    return cuts
