"""Batches while they fill, and the receipts and ids by which a program learns the outcome of its records.

A record costs a few list operations here: no task, no future, no encoding. All records of a batch have one outcome, so
their senders share a few futures (wakeup.py), and a receipt is only the batch and a number. The batch is encoded once,
when it leaves (`ProducerBatch.encode`), in loops that run in C.

When the topic's layout changes, a batch may be cut (layout_change.py). Its receipts stay valid: it is settled when its
pieces are, and the outcome of a record is that of its piece.
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
"""The bytes of a record in a batch besides its key, value and headers (model/batch/draft.py, `largest_body`)."""
GROUP: Final = 128
"""How many senders share a future. asyncio keeps an object for each waiting task until the future is freed. If
thousands of senders shared one future, their resuming would look to Python's garbage collector like thousands of new
objects, and its runs would take a fifth of the time."""
UNKNOWN_OFFSET: Final = -1
"""The offset of a record that is stored, when the broker no longer remembers where."""


class ProducerBatch:
    """Records for one segment. The producer fills the batch; the segment's writer then owns it until it is settled."""

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
        "pieces",
        "segment",
        "sent_header",
        "size",
        "submitted",
        "table",
        "timestamps",
        "values",
        "whole",
    )

    def __init__(self, segment: int, opened_at: float, deadline: float, now_us: int) -> None:
        self.segment = segment
        self.opened_at = opened_at
        self.deadline = deadline
        """The loop's time at which the records time out."""
        self.now_us = now_us
        """The timestamp of records that have none."""
        self.values: list[bytes] = []
        self.keys: list[bytes | None] | None = None
        """None if no record has a key. The list may be shorter than `values`: the last records have no key."""
        self.headers: dict[int, Headers] | None = None
        self.timestamps: dict[int, int] | None = None
        self.table: Any = None
        """An Arrow table instead of the lists."""
        self.size = 0
        """About how many bytes will be sent."""
        self.count = 0
        """How many records; set when the batch is closed."""
        self.submitted = False
        """Whether a record of it came by `submit`."""
        self.looked_at = False
        """Whether the program has asked for its outcome, or waits for it."""

        self.data: Sequence[Data] | None = None
        """The encoded batch, as consecutive buffers that begin with the header. An encoded batch has its sequence
        number."""
        self.first_sequence = 0
        self.answer: BraidError | None = None
        """The broker's refusal in this round. None: there is no reply yet, or the batch is stored."""
        self.doubtful = False
        """The batch was sent and may be stored, so it must never be sent under another number."""

        self.sent_header: BatchHeader | None = None
        """With a fixed identity: the header as it was sent, to compare with the batch that the log has stored."""

        self.done = False
        self.duplicate = False
        """The log had the batch already when the confirmed copy arrived."""
        self.past_era = False
        """The producer has a derived id, and has begun a later era."""
        self.base_offset = 0
        """`UNKNOWN_OFFSET` also if the batch has failed or was cut: below 0, `id_at` knows more."""
        self.error: BraidError | None = None
        """If the batch was cut: the first error of a piece."""
        self.pieces: Pieces | None = None
        """The batches that have its records, if it was cut."""
        self.whole: ProducerBatch | None = None
        """Until it is settled: the batch of which it is a piece."""
        self.future: asyncio.Future[None] | None = None
        """The future on which the next task waits."""
        self.futures: list[asyncio.Future[None]] = []
        """All futures on which tasks wait."""

    def pad_keys(self) -> list[bytes | None]:
        """Return the list of keys, filled up to one key for each value."""
        keys = self.keys
        if keys is None:
            keys = self.keys = []
        if len(keys) < len(self.values):
            keys += [None] * (len(self.values) - len(keys))
        return keys

    def add_headers(self, headers: Headers) -> None:
        """Set the headers of the record that was added last."""
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
        """Set the outcome and release the records. The caller wakes the waiting tasks."""
        self.done = True
        self.base_offset = base_offset if error is None else UNKNOWN_OFFSET
        self.error = error
        self._release()

    def cut(self, pieces: Pieces) -> None:
        """Leave the records to the pieces."""
        self.pieces = pieces
        self.base_offset = UNKNOWN_OFFSET
        self._release()

    def settle_piece(self, piece: ProducerBatch) -> bool:
        """Note that a piece is settled. Returns whether it was the last one. The caller wakes the waiting tasks."""
        assert self.pieces is not None
        piece.whole = None
        self.pieces.unsettled -= 1
        self.error = self.error or piece.error
        self.done = not self.pieces.unsettled
        return self.done

    def renew(self, segment: int) -> None:
        """Make a batch that is certainly not stored one that was never sent, for another segment."""
        self.segment = segment
        self.data = self.answer = None
        self.doubtful = False

    def _release(self) -> None:
        self.values = []
        self.keys = self.headers = self.timestamps = self.table = self.data = None

    async def settled(self) -> None:
        """Wait until the outcome is known, good or bad. Many tasks may wait, and each may be cancelled."""
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
        """Make a new future to wait on. At most `GROUP` tasks share it (wakeup.py)."""
        future = self.future = asyncio.get_running_loop().create_future()
        self.futures.append(future)
        return future

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error.again()


class Pieces(msgspec.Struct):
    """The batches into which a batch was cut, and where each of its records is now."""

    batches: list[ProducerBatch]
    places: npt.NDArray[np.intp]
    """By record: the number of its piece."""
    numbers: npt.NDArray[np.int64]
    """By record: its number in that piece."""
    unsettled: int = 0

    def __post_init__(self) -> None:
        self.unsettled = len(self.batches)


class Receipt(msgspec.Struct, gc=False, eq=False):
    """The result of `submit`. Await it, ask it later, or drop it: `flush` reports failures that were not looked at."""

    # gc=False: a batch never refers to its receipts, so there are no cycles for the collector to look for.
    batch: ProducerBatch
    number: int

    def done(self) -> bool:
        return self.batch.done

    def result(self) -> MessageId:
        """Return the record's id, or raise its error. Raises `InvalidStateError` while the outcome is not known."""
        batch = self.batch
        batch.looked_at = True
        if not batch.done:
            raise asyncio.InvalidStateError("what became of the record is not known yet; await the receipt")
        return id_at(batch, self.number)

    def exception(self) -> BraidError | None:
        """Return the record's error, or None. Raises `InvalidStateError` while the outcome is not known."""
        self.batch.looked_at = True
        if not self.batch.done:
            raise asyncio.InvalidStateError("what became of the record is not known yet; await the receipt")
        return place_of(self.batch, self.number)[0].error

    def __await__(self) -> Generator[Any, None, MessageId]:
        self.batch.looked_at = True
        if not self.batch.done:
            yield from self.batch.settled().__await__()
        return self.result()


def place_of(batch: ProducerBatch, number: int) -> tuple[ProducerBatch, int]:
    """Return the batch that has a record, and the record's number there: the same, unless the batch was cut."""
    while (pieces := batch.pieces) is not None:
        batch, number = pieces.batches[pieces.places[number]], int(pieces.numbers[number])
    return batch, number


def id_at(batch: ProducerBatch, number: int) -> MessageId:
    """Return the id of a record of a settled batch, or raise its error."""
    if batch.pieces is not None:
        batch, number = place_of(batch, number)
    batch.raise_error()
    base = batch.base_offset
    return MessageId(batch.segment, base + number if base >= 0 else UNKNOWN_OFFSET)


class BatchSpan(msgspec.Struct, frozen=True, gc=False):
    """Records `first`, `first + 1`, … of a batch."""

    batch: ProducerBatch
    first: int
    count: int

    def raise_error(self) -> None:
        """Raise the first error of these records. Other records of the batch may have failed."""
        if self.batch.error is not None:
            for number in range(self.first, self.first + self.count):
                place_of(self.batch, number)[0].raise_error()


class MessageIds(Sequence[MessageId]):
    """The ids of many records, in the order in which the program gave them. An id is made when it is asked for."""

    def __init__(self, spans: Sequence[BatchSpan], order: npt.NDArray[np.int64] | None = None) -> None:
        """`order` has the number of each given record among all records of the spans. None: the order is the same."""
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
    """Cut records of these sizes into pieces: the first has up to `room_bytes`, the others up to `batch_bytes`.

    Returns the ends of the pieces; the last end is the number of records. A record that is larger than a batch is its
    own piece. Only the first piece may be empty: then its first record does not fit.
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
