"""A producer for blocking callers (braid.sync shows its use).

`send`, `send_many` and `send_table` change threads once each. `submit` does not: records gather in the caller's thread,
and the loop takes all gathered records together. When too much is unconfirmed, `submit` waits instead of raising
`ProducerFull` (I12).

Records keep the order of the calls, also between different methods.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import datetime
import threading
from collections import deque
from collections.abc import Coroutine, Iterable
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from braid.client.blocking.loop_thread import LoopThread
from braid.client.forks import forked_error
from braid.client.producing.open_batch import MessageIds, ProducerBatch, Receipt
from braid.client.producing.producer import Producer
from braid.model.batch.encode import Headers
from braid.model.errors import BraidError, ClientClosed, TimedOut
from braid.model.message import MessageId
from braid.model.names import TopicName

T = TypeVar("T")

MAX_GATHERED_RECORDS: Final = 16_384
MAX_GATHERED_BYTES: Final = 4 << 20
"""Above one of these, `submit` waits until the loop has taken the gathered records."""


_Record = tuple[Any, ...]
"""The arguments of `Producer.submit`. A plain tuple: a named tuple would cost more than the rest of `submit`."""


class _Gathered:
    """Submitted records that the loop takes together."""

    def __init__(self) -> None:
        self.records: list[_Record] = []
        self.size = 0
        self.receipts: list[Receipt | BraidError] = []
        """The producer's receipt or error for each record."""
        self.taken = threading.Event()


class BlockingReceipt:
    """The result of `submit`. Ask it at any time, or drop it: `flush` reports failures that were not looked at."""

    __slots__ = ("_gathered", "_number", "_producer")

    def __init__(self, producer: BlockingProducer, gathered: _Gathered, number: int) -> None:
        self._producer = producer
        self._gathered = gathered
        self._number = number

    def done(self) -> bool:
        if not self._gathered.taken.is_set():
            return False
        receipt = self._gathered.receipts[self._number]
        return isinstance(receipt, BraidError) or receipt.done()

    def result(self, timeout: float | None = None) -> MessageId:
        """Wait for the record's id and return it. Raises the record's error, or `TimedOut`."""
        receipt = self._settled(timeout)
        if isinstance(receipt, BraidError):
            raise receipt.again()
        return receipt.result()

    def exception(self, timeout: float | None = None) -> BraidError | None:
        """Wait for the outcome. Returns the record's error, or None if the record is stored."""
        receipt = self._settled(timeout)
        return receipt if isinstance(receipt, BraidError) else receipt.exception()

    def _settled(self, timeout: float | None) -> Receipt | BraidError:
        if not self.done():
            self._producer.wait_for(self._wait(), timeout)
        return self._gathered.receipts[self._number]

    async def _wait(self) -> None:
        if not self._gathered.taken.is_set():
            await self._producer.hand_over()
        receipt = self._gathered.receipts[self._number]
        if isinstance(receipt, Receipt):
            await receipt.batch.settled()


class BlockingProducer:
    """Publishes to one topic; the blocking client's `producer` makes it. Several threads may use it."""

    def __init__(self, thread: LoopThread, producer: Producer) -> None:
        self._thread = thread
        self._producer: Final = producer
        self._lock = threading.Lock()
        self._gathered: _Gathered | None = None
        self._opened = False
        self._closed = False
        # Used only on the loop.
        self._handing_over: Final = asyncio.Lock()
        self._half_taken: _Gathered | None = None
        """The records that are being handed over. They stay here if the hand-over was interrupted."""
        self._unsettled: deque[ProducerBatch] = deque()
        self._refused: BraidError | None = None
        """The first error of a record that the producer refused since the last flush."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def topic(self) -> TopicName:
        return self._producer.topic

    def send(
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

        Only queues obey the last three: a queue delivers the message `deliver_after` seconds from now, or not before
        `deliver_at` (a datetime with its zone, or µs since 1970), and not later than `ttl` seconds from now.
        """
        record = (value, key, headers, timestamp, deliver_after, deliver_at, ttl)
        return self._thread.call(self._in_order(self._producer.send(*record)))

    def send_many(self, records: Iterable[bytes | str] | Iterable[tuple[Any, bytes | str]]) -> MessageIds:
        """Publish many records, values or (key, value) pairs, and wait until all are stored. Returns their ids."""
        return self._thread.call(self._in_order(self._producer.send_many(records)))

    def send_table(self, table: Any) -> MessageIds:
        """Publish the rows of an Arrow table (columns value, and if wanted key, timestamp, headers), as `send_many`."""
        return self._thread.call(self._in_order(self._producer.send_table(table)))

    def submit(
        self,
        value: bytes | str,
        key: bytes | str | None = None,
        headers: Headers | None = None,
        timestamp: int | datetime.datetime | None = None,
        deliver_after: float | datetime.timedelta | None = None,
        deliver_at: int | datetime.datetime | None = None,
        ttl: float | datetime.timedelta | None = None,
    ) -> BlockingReceipt:
        """Publish a record, as `send` takes it, without waiting, unless too much is unconfirmed. Errors in the record
        itself also come by the receipt, or by `flush`. The first record opens the producer, if the program did not."""
        if self._thread.forked:  # Before the lock: another thread may have held it during the fork.
            raise forked_error()
        if not self._opened:
            self.open()
        while True:
            with self._lock:
                if self._closed:
                    raise ClientClosed("the producer is closed")
                gathered = self._gathered
                if gathered is None:
                    gathered = self._gathered = _Gathered()
                    self._thread.call_soon(self._begin_handing_over)
                number = len(gathered.records)
                if number < MAX_GATHERED_RECORDS and gathered.size < MAX_GATHERED_BYTES:
                    gathered.records.append((value, key, headers, timestamp, deliver_after, deliver_at, ttl))
                    gathered.size += _length(value)
                    return BlockingReceipt(self, gathered, number)
            self._thread.call(self.hand_over())

    def wait_for(self, work: Coroutine[Any, Any, None], timeout: float | None) -> None:
        """Wait for the outcome of a receipt."""
        waiting = self._thread.begin(work)
        try:
            waiting.result(timeout)
        except BraidError:
            raise
        except TimeoutError:
            raise TimedOut(f"what became of the record was not known after {timeout:g} s") from None
        except concurrent.futures.CancelledError:
            raise ClientClosed("the client was closed before the record was confirmed") from None
        finally:
            waiting.cancel()

    def flush(self) -> None:
        """Wait until all records so far are confirmed or have failed. Raises the first failure not looked at before."""
        self._thread.call(self._flush())

    def open(self) -> None:
        """Learn where the topic's segments are. `with` and the first record call this. Raises `TopicNotFound`."""
        self._thread.call(self._producer.open())
        self._opened = True

    def close(self) -> None:
        """Take no more records, wait for the given records, and raise as `flush` does. Closing twice is fine. In a
        forked child this does nothing: the parent has the producer."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread.forked:
            return
        with self._lock:
            self._closed = True
        self._thread.call(self._close(kind, error, trace))

    # On the loop.

    async def _in_order(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            await self.hand_over()
        except BaseException:
            work.close()
            raise
        return await work

    def _begin_handing_over(self) -> None:
        task = asyncio.get_running_loop().create_task(self.hand_over())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def hand_over(self) -> None:
        """Give the gathered records to the producer."""
        in_flight = self._producer.in_flight
        async with self._handing_over:
            while (gathered := self._half_taken or self._take_gathered()) is not None:
                self._half_taken = gathered
                records, receipts = gathered.records, gathered.receipts
                while len(receipts) < len(records):
                    if in_flight.total > in_flight.limit:
                        await self._room()
                    receipts.append(self._submit(records[len(receipts)]))
                self._half_taken = None
                gathered.taken.set()

    def _take_gathered(self) -> _Gathered | None:
        with self._lock:
            gathered, self._gathered = self._gathered, None
        return gathered

    def _submit(self, record: _Record) -> Receipt | BraidError:
        try:
            receipt = self._producer.submit(*record)
        except BraidError as error:
            self._refused = self._refused or error
            return error
        if not self._unsettled or self._unsettled[-1] is not receipt.batch:
            while self._unsettled and self._unsettled[0].done:
                self._unsettled.popleft()
            self._unsettled.append(receipt.batch)
        return receipt

    async def _room(self) -> None:
        """Wait until the producer's unconfirmed bytes are within the limit."""
        in_flight = self._producer.in_flight
        while self._unsettled and in_flight.total > in_flight.limit:
            await self._unsettled.popleft().settled()

    async def _flush(self) -> None:
        await self.hand_over()
        await self._producer.flush()
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused.again()

    async def _close(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.hand_over()
        await self._producer.__aexit__(kind, error, trace)
        refused, self._refused = self._refused, None
        if refused is not None and error is None:
            raise refused.again()


def _length(value: object) -> int:
    return len(value) if isinstance(value, bytes | str) else 0
