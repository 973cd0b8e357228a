"""Publishing records to one topic.

The producer batches by itself, clocked by the brokers, as the log's group commit is by its disk: without linger, a
record leaves at the end of the loop's turn with everything else that came in that turn. While a batch is under way, the
next one waits for its answer if it is small (2 ms at most); while 8 are, new records gather. So one waiting task gets
its answer after one round trip, and thousands of them share batches. A turn that brings confirms is the same turn in
which those go on who waited for them, and in which leaves what they send next: nothing is planned for another one
(link.py).

    send / submit / send_many / send_table   →   Batch, one open in each writer   →   SegmentWriter, one for each
    segment

Records with a key go to the segment whose range has the key's hash. Records without one go to the segments in turn, a
batch at a time. Each writer keeps strict order and stores once what it sends again (segment_writer.py tells how).

Memory is bounded (I12): above `max_in_flight_bytes` unconfirmed, `send`, `send_many` and `send_table` wait; `submit`,
which cannot wait, goes on to a hard limit and then raises `ProducerFull`.
"""

from __future__ import annotations

import asyncio
import datetime
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from braid.client.producing.open_batch import (
    GROUP,
    RECORD_BYTES,
    UNKNOWN_OFFSET,
    Batch,
    MessageIds,
    Piece,
    Receipt,
    cut_points,
    id_at,
)
from braid.client.producing.records import (
    COLUMNAR_RECORDS,
    MANY_RECORDS,
    all_bytes,
    as_bytes,
    as_microseconds,
    as_table,
    columns,
    headers_bytes,
    is_small,
    row_sizes,
    table_size,
)
from braid.client.producing.segment_writer import SegmentWriter
from braid.client.retry import retrying
from braid.client.routing import TopicMap
from braid.client.shared import result_of
from braid.model.batch.encode import Headers
from braid.model.batch.header import MAX_BODY_BYTES, MAX_RECORDS, Codec
from braid.model.errors import (
    BatchTooLarge,
    BraidError,
    ClientClosed,
    InvalidArgument,
    NotAvailable,
    ProducerFull,
    TopicNotFound,
)
from braid.model.hashing import key_hash, key_hashes
from braid.model.identity import ProducerIdentity
from braid.model.message import MessageId
from braid.model.names import TopicName
from braid.wire.wakeup import cancelled_itself, wait_on

if TYPE_CHECKING:
    from braid.client.client import Client

CODECS: Final = {None: Codec.NONE, "none": Codec.NONE, "lz4": Codec.LZ4, "zstd": Codec.ZSTD}
TICKS: Final = 16
"""Deadlines are looked at so often within a timeout."""
SUBMIT_ROOM: Final = 8
"""`submit` may gather so many times `max_in_flight_bytes`."""
EXIT_WAIT_S: Final = 1.0
"""When its block is left by an error, a producer waits this long for what is under way."""
REMEMBERED_FAILURES: Final = 1_024
"""Failed batches that `flush` looks through for one that nobody has looked at. They are small: their records are gone.
"""


class ProducerOptions(msgspec.Struct, frozen=True, kw_only=True):
    linger_s: float = 0.0
    """How long a batch that is not full waits for more records. 0: it leaves at the end of the loop's turn, or, if it
    is small and another is under way, with the answer to that."""
    max_batch_bytes: int = 1 << 20
    """A batch that has this many bytes is full. A larger record is a batch of its own."""
    max_batch_records: int = 65_536
    compression: str | None = None
    """`lz4` or `zstd`, per batch, where it saves something."""
    max_in_flight_bytes: int = 16 << 20
    """Above so many unconfirmed bytes, `send` waits."""
    timeout_s: float = 30.0
    """For so long after a record was given, what can be retried is retried."""

    def __post_init__(self) -> None:
        if not 0 <= self.linger_s <= 60:
            raise InvalidArgument(f"linger is {self.linger_s}; it must be 0 to 60 seconds")
        if not 1 <= self.max_batch_bytes <= MAX_BODY_BYTES // 2:
            raise InvalidArgument(f"max_batch_bytes is {self.max_batch_bytes}; it must be 1 to {MAX_BODY_BYTES // 2}")
        if not 1 <= self.max_batch_records <= MAX_RECORDS:
            raise InvalidArgument(f"max_batch_records is {self.max_batch_records}; it must be 1 to {MAX_RECORDS}")
        if self.compression not in CODECS:
            raise InvalidArgument(f"compression is {self.compression!r}; it must be None, 'lz4' or 'zstd'")
        if self.max_in_flight_bytes < 1:
            raise InvalidArgument(f"max_in_flight_bytes is {self.max_in_flight_bytes}; it must be at least 1")
        if not self.timeout_s > 0:
            raise InvalidArgument(f"timeout is {self.timeout_s}; it must be a positive number of seconds")


class Producer:
    """Made by `Client.producer`. Values, keys and header values are bytes; text is taken as UTF-8."""

    def __init__(
        self,
        client: Client,
        topic: TopicName,
        options: ProducerOptions,
        identify: Callable[[int], ProducerIdentity] | None = None,
    ) -> None:
        """`identify`: who the producer is in the topic of this id; None: someone new, whose ids are drawn."""
        self.client: Final = client
        self.topic: Final = topic
        self.options: Final = options
        self.codec: Final = CODECS[options.compression]
        self.identity: ProducerIdentity | None = None
        """If it is fixed; known when the producer is open."""
        self._identify = identify
        self.unconfirmed_bytes = 0
        """Of closed batches that are not settled."""
        self._only: SegmentWriter | None = None
        """The writer, if the topic has one active segment."""
        self._fast: SegmentWriter | None = None
        """The same, unless a `send` has to wait for room."""
        self._writers: list[SegmentWriter] = []
        self._starts: list[int] = []
        self._keyless = 0
        """The writer that takes records without a key now."""
        self._topic_id = 0
        self._layout_epoch = 0
        self._max_in_flight = options.max_in_flight_bytes
        self._full_bytes = options.max_batch_bytes
        self._last_number = options.max_batch_records - 1
        self._large_bytes = options.max_batch_bytes // 2
        self._waiting_for_room: deque[tuple[asyncio.Future[None], int]] = deque()
        self._granted = 0
        self._granted_bytes = 0
        self._failures: list[Batch] = []
        self._tick: asyncio.TimerHandle | None = None
        self._opening: asyncio.Task[None] | None = None
        self._closed = False

    # Life.

    async def open(self) -> Self:
        """Learn where the topic's segments are; `async with` and `send` do it. `TopicNotFound` if it does not exist."""
        if not self._writers:
            if self._opening is None:
                self._opening = asyncio.get_running_loop().create_task(self._open(), name=f"open {self.topic.path}")
            await result_of(self._opening)
        return self

    async def _open(self) -> None:
        try:
            deadline = asyncio.get_running_loop().time() + self.options.timeout_s
            topic = await retrying(lambda: self.client.routing.topic(self.topic.path), deadline, self.client.backoff())
            self._topic_id = topic.topic_id
            self._layout_epoch = topic.route.layout_epoch
            self.identity = self._identify(topic.topic_id) if self._identify is not None else None
            self._writers = [SegmentWriter(self, segment.id) for segment in topic.active]
            self._starts = topic.starts
            self._keyless = self.client.random.randrange(len(self._writers))  # many short-lived producers spread evenly
            self._only = self._fast = self._writers[0] if len(self._writers) == 1 else None
        finally:
            self._opening = None

    async def flush(self) -> None:
        """Wait until everything given so far is settled, without lingering.

        Raises the first failure since the last flush that nobody has looked at, by `send` or by a receipt.
        """
        for writer in self._writers:
            writer.flush()
        for batch in [batch for writer in self._writers for batch in writer.unsettled()]:
            await batch.settled()
        failures, self._failures = self._failures, []
        for batch in failures:
            if not batch.looked_at:
                batch.raise_error()

    async def close(self) -> None:
        """Take no more records, wait for those that were given, and raise as `flush` does. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        try:
            await self.flush()
        finally:
            await self.end()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.close()
            return
        self._closed = True
        try:
            async with asyncio.timeout(EXIT_WAIT_S):
                await self.flush()
        except (BraidError, TimeoutError):
            pass  # The error that is under way is the one to see.
        finally:
            await self.end()

    def abandon(self) -> None:
        """Close without waiting: what is not confirmed fails with `ClientClosed`, and may be stored or not."""
        self._closed = True
        for writer in self._writers:
            writer.fail_all(ClientClosed("the producer was closed before the records were confirmed"))

    async def end(self) -> None:
        """Close without waiting for any broker. Nothing of the producer runs afterwards."""
        self.abandon()
        if self._tick is not None:
            self._tick.cancel()
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        for waiter, _ in self._waiting_for_room:
            if not waiter.done():
                waiter.set_exception(ClientClosed("the producer is closed"))
        self._waiting_for_room.clear()
        for writer in self._writers:
            await writer.stop()
        self.client.forget_producer(self)

    # One record.

    async def send(
        self,
        value: bytes | str,
        key: bytes | str | None = None,
        headers: Headers | None = None,
        timestamp: int | datetime.datetime | None = None,
    ) -> MessageId:
        """Publish a record and wait until it is stored. Returns where.

        `timestamp`: µs since 1970 or a datetime; without it, now. Cancelling stops the waiting, not the record.
        """
        writer = self._fast
        if (
            writer is None
            or type(value) is not bytes
            or headers is not None
            or timestamp is not None
            or len(value) > self._large_bytes
            or not (key is None or type(key) is bytes)
        ):
            return await self._send_any(value, key, headers, timestamp)
        # Hot: the same lines stand in `submit`.
        batch = writer.open or writer.begin()
        values = batch.values
        number = len(values)
        if key is None:
            size = batch.size = batch.size + RECORD_BYTES + len(value)
        else:
            batch.pad_keys().append(key)
            size = batch.size = batch.size + RECORD_BYTES + len(value) + len(key)
        values.append(value)
        if size >= writer.cut_bytes or number >= self._last_number:
            writer.on_threshold()
        future = batch.future
        if future is None or not number % GROUP:
            future = batch.waiting()
        try:
            await wait_on(future)
        except asyncio.CancelledError:
            if cancelled_itself():
                raise
            await batch.settled()
        if batch.error is not None:
            raise batch.error.again()
        base = batch.base_offset
        return MessageId(batch.segment, base + number if base >= 0 else UNKNOWN_OFFSET)

    async def _send_any(
        self,
        value: bytes | str,
        key: bytes | str | None,
        headers: Headers | None,
        timestamp: int | datetime.datetime | None,
    ) -> MessageId:
        if not self._writers:
            await self.open()
        if self.unconfirmed_bytes > self._max_in_flight or self._waiting_for_room or self._granted:
            await self._room(len(value))
        receipt = self._add_any(value, key, headers, timestamp)
        await receipt.batch.settled()
        receipt.batch.raise_error()
        return id_at(receipt.batch, receipt.number)

    def submit(
        self,
        value: bytes | str,
        key: bytes | str | None = None,
        headers: Headers | None = None,
        timestamp: int | datetime.datetime | None = None,
    ) -> Receipt:
        """Publish a record without waiting. The receipt can be awaited, or asked later; or `flush` reports for all.

        Whoever submits without end must `await flush()` now and then: `ProducerFull` is raised when far more waits to
        be confirmed than `max_in_flight_bytes`. The producer must be open (`async with`).
        """
        writer = self._only
        if (
            writer is None
            or headers is not None
            or timestamp is not None
            or type(value) is not bytes
            or len(value) > self._large_bytes
            or not (key is None or type(key) is bytes)
        ):
            receipt = self._add_any(value, key, headers, timestamp)
            receipt.batch.submitted = True
            return receipt
        # Hot: the same lines stand in `send`.
        batch = writer.open or writer.begin()
        values = batch.values
        number = len(values)
        if key is None:
            size = batch.size = batch.size + RECORD_BYTES + len(value)
        else:
            batch.pad_keys().append(key)
            size = batch.size = batch.size + RECORD_BYTES + len(value) + len(key)
        values.append(value)
        batch.submitted = True
        if size >= writer.cut_bytes or number >= self._last_number:
            writer.on_threshold()
        return Receipt(batch, number)

    def _add_any(
        self,
        value: bytes | str,
        key: bytes | str | None,
        headers: Headers | None,
        timestamp: int | datetime.datetime | None,
    ) -> Receipt:
        """The general way: any writer, any type, any size."""
        data = as_bytes("value", value)
        key_data = None if key is None else as_bytes("key", key)
        header_bytes = headers_bytes(headers) if headers else 0
        time_us = None if timestamp is None else as_microseconds(timestamp)
        size = RECORD_BYTES + len(data) + len(key_data or b"") + header_bytes
        if size > MAX_BODY_BYTES - 1_024 and self.codec is Codec.NONE:
            raise BatchTooLarge(f"a record of {size} bytes is above the limit of {MAX_BODY_BYTES - 1_024}")
        writer = self._writer_of(key_data)
        if writer.open is not None and writer.open.size + size > self._full_bytes:
            writer.close_open()
        batch = writer.open or writer.begin()
        number = len(batch.values)
        if key_data is not None:
            batch.pad_keys().append(key_data)
        batch.values.append(data)
        if headers:
            batch.add_headers(dict(headers))
        if time_us is not None:
            batch.add_timestamp(time_us)
        batch.size += size
        if batch.size >= writer.cut_bytes or number >= self._last_number:
            writer.on_threshold()
        return Receipt(batch, number)

    def _writer_of(self, key: bytes | None) -> SegmentWriter:
        if not self._writers:
            raise InvalidArgument("the producer is not open yet: use it as `async with client.producer(…) as producer`")
        if self._only is not None:
            return self._only
        if key is None:
            return self._writers[self._keyless]
        return self._writers[bisect_right(self._starts, key_hash(key)) - 1]

    # Many records.

    async def send_many(self, records: Iterable[bytes | str] | Iterable[tuple[Any, bytes | str]]) -> MessageIds:
        """Publish many records, values or (key, value) pairs, and wait until all are stored. Returns their ids.

        When some fail, no more are given, and the first failure is raised once all that were given are settled: those
        that did not fail are stored.
        """
        await self.open()
        pieces: list[Piece] = []
        orders: list[npt.NDArray[np.int64]] = []
        given = 0
        for values, keys in columns(records, self._full_bytes):
            if len(values) >= COLUMNAR_RECORDS and is_small(values[0]):
                await self._add_table(as_table(values, keys), given, pieces, orders)
            else:
                for piece, order in self._add_columns(all_bytes("value", values), keys, given):
                    pieces.append(piece)
                    if order is not None:
                        orders.append(order)
                    await self.pace()
                    if _failed(pieces):
                        break
            given += len(values)
            if _failed(pieces):
                break
        return await _stored(pieces, orders)

    async def send_table(self, table: Any) -> MessageIds:
        """Publish the rows of an Arrow table (columns value, and if wanted key, timestamp, headers), as `send_many`."""
        await self.open()
        if isinstance(table, pa.RecordBatch):
            table = pa.Table.from_batches([table])
        if not isinstance(table, pa.Table) or "value" not in table.column_names:
            raise InvalidArgument("send_table takes a pyarrow Table or RecordBatch with a column value")
        pieces: list[Piece] = []
        orders: list[npt.NDArray[np.int64]] = []
        for first in range(0, table.num_rows, MANY_RECORDS):
            await self._add_table(table.slice(first, MANY_RECORDS), first, pieces, orders)
            if _failed(pieces):
                break
        return await _stored(pieces, orders)

    async def _add_table(self, rows: Any, given: int, pieces: list[Piece], orders: list[npt.NDArray[np.int64]]) -> None:
        """Give the rows to their writers as batches of their own, and note the pieces and, with several writers,
        places."""
        for writer, part, order in self._by_writer_table(rows, given):
            start = 0
            for end, size in self._cut_table(part):
                batch = writer.add_table(part.slice(start, end - start), end - start, size)
                pieces.append(Piece(batch, 0, end - start))
                if order is not None:
                    orders.append(order[start:end])
                start = end
                await self.pace()
                if _failed(pieces):
                    return

    def _cut_table(self, rows: Any) -> Iterator[tuple[int, int]]:
        """Where each batch of the rows ends, and its size."""
        count, size = rows.num_rows, table_size(rows)
        if size <= self._full_bytes and count <= self.options.max_batch_records:
            yield count, size
            return
        sizes = row_sizes(rows)
        start = 0
        for end in cut_points(sizes, self._full_bytes, self._full_bytes, self.options.max_batch_records):
            yield end, int(sizes[start:end].sum())
            start = end

    def _add_columns(
        self, values: list[bytes], keys: list[bytes | None] | None, given: int
    ) -> Iterator[tuple[Piece, npt.NDArray[np.int64] | None]]:
        """Add records to their writers' batches, a piece at a time; with several writers, with its records' places."""
        if self._only is not None:
            for piece in self._add_to(self._only, values, keys):
                yield piece, None
            return
        for writer, chosen in self._by_writer(keys, len(values)):
            numbers = chosen.tolist()
            writer_values = [values[number] for number in numbers]
            writer_keys = [keys[number] for number in numbers] if keys is not None else None
            start = 0
            for piece in self._add_to(writer, writer_values, writer_keys):
                yield piece, chosen[start : start + piece.count] + given
                start += piece.count

    def _add_to(self, writer: SegmentWriter, values: list[bytes], keys: list[bytes | None] | None) -> Iterator[Piece]:
        sizes = np.fromiter(map(len, values), np.int64, len(values)) + RECORD_BYTES
        if keys is not None:
            sizes += np.fromiter([len(key) if key is not None else 0 for key in keys], np.int64, len(keys))
        if len(sizes) and int(sizes.max()) > MAX_BODY_BYTES - 1_024 and self.codec is Codec.NONE:
            raise BatchTooLarge(f"a record of {int(sizes.max())} bytes is above the limit of {MAX_BODY_BYTES - 1_024}")
        room = self._full_bytes - writer.open.size if writer.open is not None else self._full_bytes
        start = 0
        for at, end in enumerate(cut_points(sizes, room, self._full_bytes, self.options.max_batch_records)):
            if at or (writer.open is not None and len(writer.open.values) + end > self.options.max_batch_records):
                writer.close_open()
            if end == start:
                continue
            batch = writer.open or writer.begin()
            first = len(batch.values)
            if keys is not None:
                batch.pad_keys().extend(keys[start:end])
            batch.values += values[start:end]
            batch.size += int(sizes[start:end].sum())
            if batch.size >= self._full_bytes:
                writer.close_open()
            yield Piece(batch, first, end - start)
            start = end

    def _by_writer(
        self, keys: Sequence[bytes | None] | None, count: int
    ) -> Iterator[tuple[SegmentWriter, npt.NDArray[np.int64]]]:
        """Which of `count` records go to which writer, in order. Those without a key go to one, next time to
        another."""
        keyless = self._keyless
        self._keyless = (keyless + 1) % len(self._writers)
        if keys is None:
            yield self._writers[keyless], np.arange(count)
            return
        null = np.fromiter([key is None for key in keys], np.bool_, count)
        hashes = key_hashes([b"" if key is None else key for key in keys] if null.any() else keys)  # type: ignore[arg-type]
        writers = self.lane_numbers(hashes)
        writers[null] = keyless
        for at, writer in enumerate(self._writers):
            chosen = np.flatnonzero(writers == at)
            if len(chosen):
                yield writer, chosen

    def _by_writer_table(
        self, rows: Any, given: int
    ) -> Iterator[tuple[SegmentWriter, Any, npt.NDArray[np.int64] | None]]:
        if self._only is not None:
            yield self._only, rows, None
            return
        keys = None
        if "key" in rows.column_names:
            column = rows.column("key")
            keys = [key.encode() if isinstance(key, str) else key for key in column.to_pylist()]
        for writer, chosen in self._by_writer(keys, rows.num_rows):
            yield writer, rows.take(pa.array(chosen)) if keys is not None else rows, chosen + given

    async def pace(self) -> None:
        """Between two batches: let the loop send, and wait while too much is under way."""
        if self.unconfirmed_bytes > self._max_in_flight or self._waiting_for_room:
            await self._room(0)
        else:
            await asyncio.sleep(0)

    # What a repeatable producer asks (idempotent.py).

    @property
    def writers(self) -> Sequence[SegmentWriter]:
        """In order of their segments' ranges."""
        return self._writers

    @property
    def topic_id(self) -> int:
        return self._topic_id

    def lane_numbers(self, hashes: npt.NDArray[np.uint16]) -> npt.NDArray[np.int64]:
        """Which of `writers` takes a key with this hash, for each of them."""
        return np.searchsorted(np.array(self._starts), hashes, "right") - 1

    # What the writers ask and tell.

    def new_id(self) -> int:
        return self.client.random.getrandbits(63) or 1  # The highest bit is that of derived ids.

    def check_room(self) -> None:
        """Whether another batch may be begun."""
        if self._closed:
            raise ClientClosed("the producer is closed")
        if self.unconfirmed_bytes > SUBMIT_ROOM * self._max_in_flight:
            raise ProducerFull(
                f"{self.unconfirmed_bytes} bytes wait to be confirmed, the limit is "
                f"{SUBMIT_ROOM * self._max_in_flight}: await flush() before more is submitted, or use send"
            )

    def on_closed(self, writer: SegmentWriter, batch: Batch) -> None:
        """The batch takes no more records."""
        self.unconfirmed_bytes += batch.size
        if self.unconfirmed_bytes > self._max_in_flight:
            self._fast = None
        if self._only is None and self._writers[self._keyless] is writer:
            self._keyless = (self._keyless + 1) % len(self._writers)

    def on_settled(self, batch: Batch) -> None:
        self.unconfirmed_bytes -= batch.size
        if batch.error is not None and batch.submitted:
            if len(self._failures) >= REMEMBERED_FAILURES:
                self._failures = [failed for failed in self._failures if not failed.looked_at][:REMEMBERED_FAILURES]
            self._failures.append(batch)
        if self._fast is None:
            self._give_room()

    async def topic_map(self) -> TopicMap:
        """The topic's routing, if it is still the topic and the layout that the writers were made for."""
        routing = self.client.routing
        path = self.topic.path
        topic = await routing.topic(path)
        if (topic.topic_id, topic.route.layout_epoch) != (self._topic_id, self._layout_epoch):
            topic = await routing.refresh(path)
        if topic.topic_id != self._topic_id:
            raise TopicNotFound(
                f"topic {path} was deleted, and another of the same name was created: make a new producer for it"
            )
        if topic.route.layout_epoch != self._layout_epoch:
            raise NotAvailable(
                f"topic {path} has a new layout, which this version's producers cannot follow: make a new producer"
            )
        return topic

    def watch_deadlines(self) -> None:
        if self._tick is None:
            self._tick = asyncio.get_running_loop().call_later(self.options.timeout_s / TICKS, self._look_at_deadlines)

    def _look_at_deadlines(self) -> None:
        self._tick = None
        now = asyncio.get_running_loop().time()
        for writer in self._writers:
            writer.expire(now, self.options.timeout_s / TICKS)
        if not all(writer.idle for writer in self._writers):
            self.watch_deadlines()

    # Room.

    async def _room(self, size: int) -> None:
        """Wait, behind those who came before, until less than `max_in_flight_bytes` is unconfirmed."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting_for_room.append((waiter, size))
        self._fast = None
        try:
            await waiter
        finally:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._granted -= 1
                self._granted_bytes -= size
                self._give_room()

    def _give_room(self) -> None:
        waiting = self._waiting_for_room
        while waiting and self.unconfirmed_bytes + self._granted_bytes <= self._max_in_flight:
            waiter, size = waiting.popleft()
            if not waiter.done():
                self._granted += 1
                self._granted_bytes += size
                waiter.set_result(None)
        if not waiting and not self._granted and self.unconfirmed_bytes <= self._max_in_flight:
            self._fast = self._only


def _failed(pieces: Sequence[Piece]) -> bool:
    """Whether something that was given has failed: then the rest, which would wait as long again, is not given."""
    return any(piece.batch.error is not None for piece in pieces)


async def _stored(pieces: Sequence[Piece], orders: Sequence[npt.NDArray[np.int64]]) -> MessageIds:
    for piece in pieces:
        piece.batch.looked_at = True
        await piece.batch.settled()
    for piece in pieces:
        piece.batch.raise_error()
    if not orders:
        return MessageIds(pieces)
    places = np.concatenate(orders)
    order = np.empty(len(places), np.int64)
    order[places] = np.arange(len(places))
    return MessageIds(pieces, order)
