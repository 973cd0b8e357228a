"""Publishing records to one topic.

The producer makes batches by itself, at the pace of the brokers, as the log's group commit does at the pace of its
disk. Without linger, a record leaves at the end of the loop's iteration, with every other record of that iteration.
While a batch is in flight, a small next batch waits for its reply, for 2 ms at most. While 8 batches are in flight, new
records gather. So one waiting task gets its reply after one round trip, and thousands of tasks share batches. When
confirms arrive, waiting senders resume and their next batches leave in the same iteration of the loop (link.py).

    send / submit / send_many / send_table   →   ProducerBatch, one open in each writer   →   SegmentWriter

There is one writer for each active segment.
The partitioner chooses the segment of a record (partitioner.py). Each writer keeps strict order, and a batch that it
sends again is stored once (segment_writer.py). When the topic's layout changes, writers of new segments take over
(layout_change.py).

Memory is bounded (I12). Above `max_in_flight_bytes` unconfirmed bytes, `send`, `send_many` and `send_table` wait.
`submit` cannot wait: it takes records up to a higher limit and then raises `ProducerFull`.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable, Collection, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import pyarrow as pa

from braid.client.producing.bulk_send import BulkSend
from braid.client.producing.in_flight import InFlightBytes
from braid.client.producing.layout_change import retire
from braid.client.producing.open_batch import (
    GROUP,
    RECORD_BYTES,
    MessageIds,
    ProducerBatch,
    Receipt,
    id_at,
)
from braid.client.producing.options import CODECS, ProducerOptions
from braid.client.producing.partitioner import Partitioner
from braid.client.producing.records import (
    MANY_RECORDS,
    MAX_RECORD_BYTES,
    as_bytes,
    as_microseconds,
    check_times,
    columns,
    delivery_times,
    headers_bytes,
    with_times,
)
from braid.client.producing.segment_writer import SegmentWriter
from braid.client.retry import retrying
from braid.client.routing import TopicMap
from braid.client.shared import result_of
from braid.model.batch.encode import Headers
from braid.model.batch.header import Codec
from braid.model.batch.identity import ProducerIdentity
from braid.model.errors import (
    BatchTooLarge,
    BraidError,
    ClientClosed,
    InvalidArgument,
    ProducerFull,
    TimedOut,
    TopicNotFound,
)
from braid.model.layout import HashRange
from braid.model.message import MessageId
from braid.model.names import TopicName
from braid.ports.tasks import cancel
from braid.wire.operations import SegmentRoute
from braid.wire.wakeup import cancelled_itself, wait_on, wake

if TYPE_CHECKING:
    from braid.client.client import Client

TICKS: Final = 16
"""How often within a timeout the producer looks at deadlines."""
SUBMIT_ROOM: Final = 8
"""`submit` takes records up to this many times `max_in_flight_bytes`."""
EXIT_WAIT_S: Final = 1.0
"""How long a producer waits for unconfirmed records when an error leaves its `async with` block."""
REMEMBERED_FAILURES: Final = 1_024
"""How many failed batches are kept until `flush` reports the first that the program has not looked at. A failed batch
is small: its records are gone."""


class Producer:
    """Publishes to one topic; `Client.producer` makes it. Values, keys and header values are bytes, or text (UTF-8)."""

    def __init__(
        self,
        client: Client,
        topic: TopicName,
        options: ProducerOptions,
        identify: Callable[[TopicMap, int], ProducerIdentity] | None = None,
    ) -> None:
        """`identify` returns the fixed identity of the producer in a segment. Without it, ids are random, and the
        producer follows the layout by itself."""
        self.client: Final = client
        self.topic: Final = topic
        self.options: Final = options
        self.codec: Final = CODECS[options.compression]
        self._identify = identify
        self.in_flight: Final = InFlightBytes(options.max_in_flight_bytes, self._on_crowded)
        self.partitioner = Partitioner()
        """Has no writers until the producer is open."""
        self._only: SegmentWriter | None = None
        """The writer, if the topic has one active segment."""
        self._fast: SegmentWriter | None = None
        """The same writer, unless a `send` has to wait for room."""
        self._retired: dict[SegmentWriter, None] = {}
        """Writers of segments that have ended, until they have handed over."""
        self._topic_id = 0
        self.layout: TopicMap
        """The map whose active segments have the writers. Known when the producer is open."""
        self._full_bytes = options.max_batch_bytes
        self._last_number = options.max_batch_records - 1
        self._large_bytes = options.max_batch_bytes // 2
        self._failures: list[ProducerBatch] = []
        self._tick: asyncio.TimerHandle | None = None
        self._opening: asyncio.Task[None] | None = None
        self._closed = False

    # Life.

    async def open(self) -> Self:
        """Learn where the topic's segments are. `async with` and `send` call this. Raises `TopicNotFound`."""
        if not self.partitioner.writers:
            self.client.check_open()
            if self._opening is None:
                self._opening = asyncio.get_running_loop().create_task(self._open(), name=f"open {self.topic.path}")
            await result_of(self._opening)
        return self

    async def _open(self) -> None:
        try:
            deadline = asyncio.get_running_loop().time() + self.options.timeout_s
            topic = await retrying(lambda: self.client.routing.topic(self.topic.path), deadline, self.client.backoff())
            self._topic_id = topic.topic_id
            self._follow(topic)
        finally:
            self._opening = None

    def _follow(self, topic: TopicMap) -> None:
        """Go on with a writer for each active segment of this map."""
        known = {writer.segment: writer for writer in self.partitioner.writers}
        writers = [known.get(segment.id) or self._new_writer(topic, segment) for segment in topic.active]
        ended = [writer for writer in known.values() if writer not in writers]
        for writer in ended:
            writer.close_open()
        keyless = self.client.random.randrange(len(writers))  # many short-lived producers spread evenly
        self.partitioner = Partitioner(writers, topic.starts, keyless)
        self.layout = topic
        self._only = self.partitioner.only
        self._on_crowded(self.in_flight.crowded)
        self._retired |= dict.fromkeys(ended)
        if self._identify is None:
            retire(ended, writers)

    def _new_writer(self, topic: TopicMap, segment: SegmentRoute) -> SegmentWriter:
        identity = self._identify(topic, segment.id) if self._identify is not None else None
        return SegmentWriter(self, segment.id, HashRange(segment.first_hash, segment.last_hash), identity)

    def writer_of_ended(self, segment: SegmentRoute) -> SegmentWriter:
        """Make a writer with a fixed identity to a segment that has ended, and recognises what it has."""
        writer = self._new_writer(self.layout, segment)
        self._retired[writer] = None
        return writer

    async def follow_after(self, ended: Collection[int]) -> None:
        """Wait for a layout in which these segments have ended, and go on with it; only with a fixed identity."""

        def later(topic: TopicMap) -> bool:
            return topic.topic_id != self._topic_id or not any(segment.id in ended for segment in topic.active)

        path, timeout_s = self.topic.path, self.options.timeout_s
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                topic = await retrying(lambda: self.client.routing.until(path, later), deadline, self.client.backoff())
        except TimeoutError:
            raise TimedOut(
                f"segment {min(ended)} of {path} has ended, and for {timeout_s:g} s no layout has shown its children"
            ) from None
        self._follow(self._checked(topic))

    def _writers(self) -> list[SegmentWriter]:
        """Return all writers that may have batches; heirs come after their parents."""
        return [*self._retired, *self.partitioner.writers]

    async def flush(self) -> None:
        """Wait until all records so far are confirmed or have failed, without lingering.

        Raises the first failure since the last flush that the program has not seen by `send` or by a receipt.
        """
        for writer in self._writers():
            writer.flush()
        for batch in [batch for writer in self._writers() for batch in writer.unsettled()]:
            await batch.settled()
        failures, self._failures = self._failures, []
        for batch in failures:
            if not batch.looked_at:
                batch.raise_error()

    async def close(self) -> None:
        """Take no more records, wait for the given records, and raise as `flush` does. Closing twice is fine."""
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
            pass  # The caller must see the error that left the block.
        finally:
            await self.end()

    def abandon(self) -> None:
        """Close without waiting. Unconfirmed records fail with `ClientClosed`; they may be stored or not."""
        self._closed = True
        for writer in self._writers():
            writer.fail_all(ClientClosed("the producer was closed before the records were confirmed"))

    async def end(self) -> None:
        """Close without waiting for any broker. No task or timer of the producer runs afterwards."""
        self.abandon()
        if self._tick is not None:
            self._tick.cancel()
        if self._opening is not None:
            await cancel([self._opening])
        self.in_flight.fail(ClientClosed("the producer is closed"))
        for writer in self._writers():
            await writer.stop()
        self.client.forget_producer(self)

    def on_fork(self) -> None:
        """Take no more records, in a forked child: the writers belong to the parent."""
        self._closed = True
        self._only = self._fast = None
        self.partitioner = Partitioner()
        self._retired.clear()

    # One record.

    async def send(
        self,
        value: bytes | str,
        key: bytes | str | None = None,
        headers: Headers | None = None,
        timestamp: int | datetime.datetime | None = None,
        deliver_after: float | datetime.timedelta | None = None,
        deliver_at: int | datetime.datetime | None = None,
        ttl: float | datetime.timedelta | None = None,
    ) -> MessageId:
        """Publish a record and wait until it is stored. Returns its `MessageId`.

        `timestamp` is a datetime with its zone, or µs since 1970; the default is now. Cancelling ends the wait; the
        record is still sent.

        Only queues obey the rest; streams and readers get the record immediately. A queue delivers the message
        `deliver_after` seconds from now, or not before `deliver_at` (given as `timestamp` is), and does not deliver it
        later than `ttl` seconds from now.
        """
        # No keyword-only arguments: each would cost this call as much as all its checks together.
        writer = self._fast
        if (
            writer is None
            or type(value) is not bytes
            or headers is not None
            or timestamp is not None
            or deliver_after is not None
            or deliver_at is not None
            or ttl is not None
            or len(value) > self._large_bytes
            or not (key is None or type(key) is bytes)
        ):
            headers = self._scheduled(headers, deliver_after, deliver_at, ttl)
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
        base = batch.base_offset
        return MessageId(batch.segment, base + number) if base >= 0 else id_at(batch, number)

    async def _send_any(
        self,
        value: bytes | str,
        key: bytes | str | None,
        headers: Headers | None,
        timestamp: int | datetime.datetime | None,
    ) -> MessageId:
        if not self.partitioner.writers:
            await self.open()
        if self.in_flight.crowded:
            await self.in_flight.room(len(value))
        receipt = self._add_any(value, key, headers, timestamp)
        await receipt.batch.settled()
        return id_at(receipt.batch, receipt.number)

    def submit(
        self,
        value: bytes | str,
        key: bytes | str | None = None,
        headers: Headers | None = None,
        timestamp: int | datetime.datetime | None = None,
        deliver_after: float | datetime.timedelta | None = None,
        deliver_at: int | datetime.datetime | None = None,
        ttl: float | datetime.timedelta | None = None,
    ) -> Receipt:
        """Publish a record, as `send` takes it, without waiting. Await the receipt, ask it later, or let `flush` report
        every failure.

        A program that submits without end must `await flush()` now and then: `submit` raises `ProducerFull` when far
        more than `max_in_flight_bytes` is unconfirmed. The producer must be open: `submit` cannot wait for that.
        """
        writer = self._only
        if (
            writer is None
            or headers is not None
            or timestamp is not None
            or deliver_after is not None
            or deliver_at is not None
            or ttl is not None
            or type(value) is not bytes
            or len(value) > self._large_bytes
            or not (key is None or type(key) is bytes)
        ):
            headers = self._scheduled(headers, deliver_after, deliver_at, ttl)
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

    def _scheduled(
        self,
        headers: Headers | None,
        deliver_after: float | datetime.timedelta | None,
        deliver_at: int | datetime.datetime | None,
        ttl: float | datetime.timedelta | None,
    ) -> Headers | None:
        """Return the headers, with those that tell queues when to deliver the record."""
        if deliver_after is None and deliver_at is None and ttl is None:
            return headers
        times = delivery_times(self.client.clock.now_us(), deliver_after, deliver_at, ttl)
        return with_times(headers, times)

    def _add_any(
        self,
        value: bytes | str,
        key: bytes | str | None,
        headers: Headers | None,
        timestamp: int | datetime.datetime | None,
    ) -> Receipt:
        """Add a record of any type and size to the batch of its segment."""
        if not self.partitioner.writers:
            self.client.check_open()
            raise InvalidArgument(
                "the producer is not open yet: call `await producer.open()` before `submit`, or use it as "
                "`async with client.producer(…) as producer`"
            )
        data = as_bytes("value", value)
        key_data = None if key is None else as_bytes("key", key)
        header_bytes = headers_bytes(headers) if headers else 0
        time_us = None if timestamp is None else as_microseconds(timestamp)
        size = RECORD_BYTES + len(data) + len(key_data or b"") + header_bytes
        if size > MAX_RECORD_BYTES and self.codec is Codec.NONE:
            raise BatchTooLarge(f"a record of {size} bytes is above the limit of {MAX_RECORD_BYTES}")
        writer = self.partitioner.writer_of(key_data)
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

    # Many records.

    async def send_many(self, records: Iterable[bytes | str] | Iterable[tuple[Any, bytes | str]]) -> MessageIds:
        """Publish many records, values or (key, value) pairs, and wait until all are stored. Returns their ids.

        After a failure no more records are sent. The first failure is raised when all sent records are settled; the
        sent records that did not fail are stored.
        """
        await self.open()
        bulk = BulkSend(self)
        for values, keys in columns(records, self._full_bytes):
            if not await bulk.add(values, keys):
                break
        return await bulk.stored()

    async def send_table(self, table: Any) -> MessageIds:
        """Publish the rows of an Arrow table (columns value, and if wanted key, timestamp, headers), as `send_many`."""
        await self.open()
        if isinstance(table, pa.RecordBatch):
            table = pa.Table.from_batches([table])
        if not isinstance(table, pa.Table) or "value" not in table.column_names:
            raise InvalidArgument("send_table takes a pyarrow Table or RecordBatch with a column value")
        check_times(table)
        bulk = BulkSend(self)
        for first in range(0, table.num_rows, MANY_RECORDS):
            if not await bulk.add_table(table.slice(first, MANY_RECORDS)):
                break
        return await bulk.stored()

    async def pace(self) -> None:
        """Let the loop send between two batches, and wait while too much is unconfirmed."""
        if self.in_flight.crowded:
            await self.in_flight.room(0)
        else:
            await asyncio.sleep(0)

    @property
    def topic_id(self) -> int:
        return self._topic_id

    @property
    def layout_epoch(self) -> int:
        return self.layout.route.layout_epoch

    # Called by the writers.

    def new_id(self) -> int:
        return self.client.random.getrandbits(63) or 1  # derived ids have the highest bit

    def check_room(self) -> None:
        """Raise if no batch may begin: the producer is closed or full."""
        if self._closed:
            raise ClientClosed("the producer is closed")
        limit = SUBMIT_ROOM * self.in_flight.limit
        if self.in_flight.total > limit:
            raise ProducerFull(
                f"{self.in_flight.total} bytes wait to be confirmed, the limit is {limit}: "
                f"await flush() before more is submitted, or use send"
            )

    def on_closed(self, writer: SegmentWriter, batch: ProducerBatch) -> None:
        """Count a batch that takes no more records."""
        self.in_flight.add(batch.size)
        if self._only is None:
            self.partitioner.on_closed(writer)

    def on_settled(self, batch: ProducerBatch) -> None:
        self.in_flight.remove(batch.size)
        while batch.whole is not None:
            piece, batch = batch, batch.whole
            if not batch.settle_piece(piece):
                return
            if batch.futures:
                asyncio.get_running_loop().call_soon(wake, batch.futures)
        if batch.error is not None and batch.submitted:
            if len(self._failures) >= REMEMBERED_FAILURES:
                self._failures = [failed for failed in self._failures if not failed.looked_at][:REMEMBERED_FAILURES]
            self._failures.append(batch)

    def forget_writer(self, writer: SegmentWriter) -> None:
        """Forget a retired writer that has handed over."""
        self._retired.pop(writer, None)

    async def topic_map(self) -> TopicMap:
        """Return the topic's routing, and follow its layout (layout_change.py)."""
        routing = self.client.routing
        path = self.topic.path
        topic = await routing.topic(path)
        if topic.topic_id != self._topic_id:
            topic = await routing.refresh(path)
        self._checked(topic)
        if topic.route.layout_epoch > self.layout_epoch and self._identify is None:
            self._follow(topic)
        return topic

    def _checked(self, topic: TopicMap) -> TopicMap:
        if topic.topic_id != self._topic_id:
            raise TopicNotFound(
                f"topic {self.topic.path} was deleted, and another of the same name was created: make a new producer "
                f"for it"
            )
        return topic

    def watch_deadlines(self) -> None:
        if self._tick is None:
            self._tick = asyncio.get_running_loop().call_later(self.options.timeout_s / TICKS, self._look_at_deadlines)

    def _look_at_deadlines(self) -> None:
        self._tick = None
        now = asyncio.get_running_loop().time()
        for writer in self._writers():
            writer.expire(now, self.options.timeout_s / TICKS)
        if not all(writer.idle for writer in self._writers()):
            self.watch_deadlines()

    def _on_crowded(self, crowded: bool) -> None:
        self._fast = None if crowded else self._only
