"""Consumers for blocking callers (braid.sync shows their use).

They take whole deliveries from the asyncio consumer and hand out the messages in the caller's thread, so threads change
once per delivery. The caller's thread notes its position in the delivery's reader, and reads there whether the rest may
still be handed out. Each of these fields has one writer. Acks leave marks that the loop collects.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Coroutine, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from braid.client.blocking.loop_thread import LoopThread
from braid.client.consuming.checkpoint import CheckpointConsumer
from braid.client.consuming.consumer import NO_MESSAGES, Consumer, ConsumerLifecycle, Fetched
from braid.client.consuming.delivery import ReceivedBatch
from braid.client.consuming.stream import ACK_DELAY_S, StreamConsumer
from braid.model.errors import BatchUnreadable, BraidError, ClientClosed
from braid.model.message import Message

L = TypeVar("L", bound=ConsumerLifecycle)
C = TypeVar("C", bound=Consumer)


class BlockingLifecycle(Generic[L]):
    """Starts and closes an asyncio consumer from the caller's thread."""

    def __init__(self, thread: LoopThread, consumer: L) -> None:
        self._thread = thread
        self._consumer: Final = consumer

    @property
    def topic(self) -> str:
        return self._consumer.topic

    def start(self) -> None:
        """Begin to receive. `with` and the first `receive` call this."""
        self._thread.call(self._consumer.start())

    def close(self) -> None:
        """End receiving. Closing twice is fine. In a forked child this does nothing: the parent has the consumer."""
        self._run_at_end(self._consumer.close())

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run_at_end(self._consumer.__aexit__(kind, error, trace))

    def _run_at_end(self, work: Coroutine[Any, Any, None]) -> None:
        if self._thread.forked:
            work.close()
        else:
            self._thread.call(work)


class BlockingConsumer(BlockingLifecycle[C]):
    """Fetches whole deliveries from the asyncio consumer and hands out their messages in the caller's thread."""

    def __init__(self, thread: LoopThread, consumer: C) -> None:
        super().__init__(thread, consumer)
        self._taking: concurrent.futures.Future[Fetched | None] | None = None
        """Waits for the next delivery. It outlives a `receive` that timed out or was interrupted, so nothing is
        lost."""
        self._current: Fetched | None = None
        self._messages: Iterator[Message] = NO_MESSAGES

    def receive(self, timeout: float | None = None) -> Message | None:
        """Return the next message, or None if none came within `timeout` seconds."""
        message = self._next_message()
        while message is None:
            taken = self._take(timeout)
            if taken is None:
                return None
            self._current = taken
            self._messages = taken.batch.iter_messages()
            message = self._next_message()
        return message

    def receive_batch(self, timeout: float | None = None) -> ReceivedBatch | None:
        """Return the next delivery of one segment, or None if none came within `timeout` seconds."""
        current, self._current, self._messages = self._current, None, NO_MESSAGES
        while current is None or not self._consumer.may_hand_out(current):
            current = self._take(timeout)
            if current is None:
                return None
        rest = Fetched(current.reader, current.batch.from_offset(current.reader.delivered))
        return self._consumer.hand_out(rest, self._put_back)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Message:
        """Return the next message. The iteration ends only by `break`, by an error, or when the consumer is closed."""
        message = self._next_message()
        if message is None:
            message = self.receive()
            assert message is not None
        return message

    def _next_message(self) -> Message | None:
        """Hot: called for each message."""
        current = self._current
        if current is None:
            return None
        try:
            message = next(self._messages, None)
        except BatchUnreadable as error:
            self._current, self._messages = None, NO_MESSAGES
            if not self._consumer.may_hand_out(current):
                return None
            self._put_back(Fetched(current.reader, current.batch.from_offset(current.reader.delivered)))
            raise self._consumer.unreadable(error) from error
        if message is None or not self._consumer.may_hand_out(current):
            self._current, self._messages = None, NO_MESSAGES
            return None
        current.reader.delivered = message.offset + 1
        return message

    def _put_back(self, rest: Fetched) -> None:
        self._thread.call_soon(partial(self._consumer.put_back, rest))

    def _take(self, timeout: float | None) -> Fetched | None:
        self._thread.check_running()
        if self._taking is None:
            self._taking = self._thread.begin(self._consumer.take())
        try:
            taken = self._taking.result(timeout)
        except Exception as error:
            if isinstance(error, TimeoutError) and not isinstance(error, BraidError):
                return None  # If the delivery has just arrived, the next call gets it.
            self._taking = None
            if isinstance(error, concurrent.futures.CancelledError):
                raise ClientClosed("the consumer is closed; make another one") from None
            raise
        self._taking = None
        return taken


class BlockingStreamConsumer(BlockingConsumer[StreamConsumer]):
    """Consumes a subscription in order; `client.stream_consumer` makes it."""

    def __init__(self, thread: LoopThread, consumer: StreamConsumer) -> None:
        super().__init__(thread, consumer)
        self._marks: dict[int, int] = {}
        """Acks that the loop has not taken yet: for each segment, the offset below which all is acked."""
        self._marks_lock = threading.Lock()
        self._collecting = False

    @property
    def subscription(self) -> str:
        return self._consumer.subscription

    @property
    def name(self) -> str:
        return self._consumer.name

    @property
    def segments(self) -> tuple[int, ...]:
        """The segments that are assigned to this consumer now."""
        return self._consumer.segments

    def ack(self, acked: Message | ReceivedBatch) -> None:
        """Ack a message or batch, and all before it in its segment. This only leaves a mark: see `flush_acks`."""
        self._consumer.check_usable()
        offset = acked.next_offset if isinstance(acked, ReceivedBatch) else acked.offset + 1
        with self._marks_lock:
            if offset > self._marks.get(acked.segment, 0):
                self._marks[acked.segment] = offset
            if self._collecting:
                return
            self._collecting = True
        self._thread.call_soon(self._collect_soon)

    def flush_acks(self) -> None:
        """Wait until all acks are stored: no consumer of the subscription gets the acked records again."""
        self._thread.call(self._flush_acks())

    def close(self) -> None:
        """Store all acks, then leave the subscription. Other consumers get its segments immediately."""
        self._run_at_end(self._close())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run_at_end(self._exit(kind, error, trace))

    # On the loop.

    def _collect_soon(self) -> None:
        self._thread.loop.call_later(ACK_DELAY_S, self.collect_marks)

    def collect_marks(self) -> None:
        """Pass the acks to the asyncio consumer."""
        with self._marks_lock:
            marks, self._marks = self._marks, {}
            self._collecting = False
        for segment, offset in marks.items():
            self._consumer.mark_acked(segment, offset)

    async def _flush_acks(self) -> None:
        self.collect_marks()
        await self._consumer.flush_acks()

    async def _close(self) -> None:
        self.collect_marks()
        await self._consumer.close()

    async def _exit(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.collect_marks()
        await self._consumer.__aexit__(kind, error, trace)


class BlockingCheckpointConsumer(BlockingConsumer[CheckpointConsumer]):
    """Reads a topic from positions that the caller keeps; `client.checkpoint_consumer` makes it."""

    @property
    def segments(self) -> tuple[int, ...]:
        """The segments that this consumer reads now; in a group, those that are assigned to it."""
        return self._consumer.segments

    def checkpoint(self) -> bytes:
        """Return the positions of the application: in each segment, after the last record that it got."""
        return self._thread.call(self._checkpoint())

    def seek(self, segment: int, offset: int) -> None:
        """Go on at this offset of a segment that is being read, such as after records that cannot be decoded."""
        self._thread.call(self._consumer.seek(segment, offset))

    async def _checkpoint(self) -> bytes:
        if not self._consumer.started:
            await self._consumer.start()
        return self._consumer.checkpoint()
