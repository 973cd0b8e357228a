"""The base of all consumers: takes deliveries from the channels of several segments and hands them out in turn.

    channel ─ take ─► delivery ─ hand out ─► application
      `waiting`         `taken`                `delivered`

A `SegmentReader` is one segment on its way to the application, with two positions. A taken delivery has left the
channel and is not fetched again. Its records count as handed out when the application gets them, one by one or all
together. Records that were taken but not handed out are dropped when the reader becomes invalid: another consumer has
the segment now, or the subscription was set to another place. After a lost connection the reader stays, gets another
channel, and continues at its position.

Segments take turns, one delivery each, so a segment with a long backlog does not delay the others.

A batch that cannot be decoded stops its segment: the records before it are handed out, and each turn of the segment
raises the same error. The other segments go on.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Final, NamedTuple, Self

from braid.client.consuming.channel import ClientChannel
from braid.client.consuming.delivery import ReceivedBatch
from braid.client.shared import result_of
from braid.model.errors import BatchUnreadable, BraidError, ClientClosed, TimedOut
from braid.model.ids import Epoch, Offset
from braid.model.log.epochs import UNKNOWN_EPOCH, EpochStarts, begin_epoch, epoch_before
from braid.model.message import Message
from braid.ports.tasks import cancel

NO_MESSAGES: Final[Iterator[Message]] = iter(())
UNREADABLE_PAUSE_S: Final = 0.01
"""Before a batch that cannot be decoded is reported: a program that only tries again must not keep the loop from
everything else, such as a seek."""


class SegmentReader:
    """The positions of one segment on its way to the application."""

    def __init__(self, segment: int, offset: int, after_epoch: int = UNKNOWN_EPOCH) -> None:
        self.segment: Final = segment
        self.taken = offset
        """The offset after the last record that left a channel."""
        self.delivered = offset
        """The offset after the last record that the application got."""
        self.valid = True
        """Whether taken records may still be handed out. The thread of a blocking consumer reads this, too."""
        self.channel: ClientChannel | None = None
        self.queued = False
        """Whether the reader waits for its turn."""
        self.put_back: ReceivedBatch | None = None
        """A taken delivery that begins with a batch that cannot be decoded. It comes again at the next turn."""
        self._last_epoch = Epoch(after_epoch)
        self._epochs: EpochStarts = ((self._last_epoch, Offset(offset - 1)),) if after_epoch else ()
        """The epochs of the records that were taken, the last ones at least."""

    def take(self, batch: ReceivedBatch) -> None:
        """Note that this delivery has left the channel."""
        self.taken = batch.next_offset
        if batch.last_epoch != self._last_epoch:  # A new owner wrote some of it: rare.
            for header in batch.batch_headers():
                if header.epoch != self._last_epoch:
                    self._last_epoch = header.epoch
                    self._epochs = begin_epoch(self._epochs, header.epoch, header.base_offset)

    @property
    def taken_epoch(self) -> Epoch:
        """The epoch of the last record that left a channel: with `taken`, it is a position (model/log/epochs.py)."""
        return epoch_before(self._epochs, self.taken)

    @property
    def delivered_epoch(self) -> Epoch:
        """The epoch of the last record that the application got."""
        return epoch_before(self._epochs, self.delivered)

    @property
    def has_batch(self) -> bool:
        return self.channel is not None and self.channel.has_batch

    @property
    def finished(self) -> bool:
        """Whether the segment has ended and the application got all of it."""
        channel = self.channel
        return channel is not None and channel.ended and not channel.has_batch and self.delivered >= self.taken

    def next_batch(self) -> ReceivedBatch | None:
        """Return the next delivery, if there is one."""
        batch, self.put_back = self.put_back, None
        if batch is None and self.channel is not None:
            batch = self.channel.take()
        return batch

    def end(self) -> None:
        """Hand out no more records of this segment."""
        self.valid = False
        self.channel = None
        self.put_back = None


class Fetched(NamedTuple):
    reader: SegmentReader
    batch: ReceivedBatch


class ConsumerLifecycle(ABC):
    """Begins once, whichever call needs it first, and ends with an error that every later call raises.

    `async with` begins to receive, and closes the consumer at the end. Without it, the first `receive` begins, and the
    program closes the consumer or its client.
    """

    def __init__(self, topic: str) -> None:
        self.topic: Final = topic
        """The path `tenant/namespace/name`."""
        self.started = False
        self._failure: BraidError | None = None
        """The error that ended receiving."""
        self._starts = asyncio.Lock()
        self._opening: asyncio.Task[None] | None = None
        """Starts the consumer for a `receive`. It outlives a `receive` that timed out or was cancelled."""

    async def start(self) -> None:
        """Begin to receive. `async with` and the first `receive` call this."""
        async with self._starts:
            self.check_usable()
            if not self.started:
                await self._begin()
                self.started = True

    def check_usable(self) -> None:
        """Raise the error that ended the consumer, if there is one. Any thread may ask."""
        if self._failure is not None:
            raise self._failure.again()

    def on_fork(self, error: BraidError) -> None:
        """Refuse everything with this error, in a forked child."""
        self._failure = error

    @abstractmethod
    async def close(self) -> None:
        """End receiving. Closing twice is fine."""

    @abstractmethod
    async def end(self) -> None:
        """Close without waiting for any broker. No task of the consumer runs afterwards."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except BraidError:
            if error is None:  # Otherwise it would hide the application's own error.
                raise

    @abstractmethod
    async def _begin(self) -> None:
        """Begin to receive."""

    @abstractmethod
    def _wake_receivers(self) -> None:
        """Let calls that wait for messages look again."""

    def _fail(self, error: BraidError) -> None:
        """Make receiving raise this error from now on."""
        if self._failure is None:
            self._failure = error
            self._wake_receivers()

    async def _begin_by_receive(self) -> None:
        """Start the consumer, because the program did not. After a failure, the next call tries again."""
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self.start(), name=f"open {self.topic}")
            self._opening.add_done_callback(_look_at)
        opening = self._opening
        try:
            await result_of(opening)
        finally:
            if opening.done():
                self._opening = None

    async def _end_opening(self) -> None:
        if self._opening is not None:
            await cancel([self._opening])


class Consumer(ConsumerLifecycle):
    """Receives records of one topic, in its client's event loop. One task at a time receives."""

    def __init__(self, topic: str) -> None:
        super().__init__(topic)
        self._news = asyncio.Event()
        self._turns: deque[SegmentReader] = deque()
        self._current: Fetched | None = None
        """The delivery that is being handed out message by message."""
        self._messages = NO_MESSAGES

    # Receiving.

    async def receive(self, timeout: float | None = None) -> Message | None:
        """Return the next message, or None if none came within `timeout` seconds."""
        try:
            message = self._next_message()
            if message is None:
                deadline = _deadline(timeout)
                while message is None:
                    if not await self._news_before(deadline):
                        return None
                    message = self._next_message()
        except BatchUnreadable:
            await asyncio.sleep(UNREADABLE_PAUSE_S)
            raise
        return message

    async def receive_batch(self, timeout: float | None = None) -> ReceivedBatch | None:
        """Return the next delivery of one segment, or None if none came within `timeout` seconds."""
        taken = await self.take(timeout)
        try:
            return None if taken is None else self.hand_out(taken, self.put_back)
        except BatchUnreadable:
            await asyncio.sleep(UNREADABLE_PAUSE_S)
            raise

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        """Return the next message. The iteration ends only by `break`, by an error, or when the consumer is closed."""
        try:
            message = self._next_message()
            while message is None:
                await self._news_before(None)
                message = self._next_message()
        except BatchUnreadable:
            await asyncio.sleep(UNREADABLE_PAUSE_S)
            raise
        return message

    async def take(self, timeout: float | None = None) -> Fetched | None:
        """Return the next delivery. The caller hands out its records and sets `reader.delivered` accordingly."""
        taken = self._take()
        if taken is None:
            deadline = _deadline(timeout)
            while taken is None:
                if not await self._news_before(deadline):
                    return None
                taken = self._take()
        return taken

    def hand_out(self, taken: Fetched, put_back: Callable[[Fetched], None]) -> ReceivedBatch:
        """Return the delivery as far as it can be decoded, and put back the rest. Raises `BatchUnreadable` if it cannot
        be decoded from its first batch on. Any thread may call this."""
        reader, batch = taken
        try:
            good = batch.readable()
        except BatchUnreadable as error:
            put_back(taken)
            raise self.unreadable(error) from error
        if good.next_offset < batch.next_offset:
            put_back(Fetched(reader, batch.from_offset(good.next_offset)))
        reader.delivered = good.next_offset
        return good

    def put_back(self, taken: Fetched) -> None:
        """Hand out this delivery again at the next turn of its reader: other segments come first."""
        if taken.reader.valid:
            taken.reader.put_back = taken.batch
            self._arrived(taken.reader)

    def unreadable(self, error: BatchUnreadable) -> BatchUnreadable:
        """Return the error with the way past the batch. Any thread may ask."""
        return BatchUnreadable(
            f"{error}. {self._way_past(error)}", error.segment, error.first_offset, error.next_offset
        )

    def _way_past(self, error: BatchUnreadable) -> str:
        """Say how the application goes on after a batch that cannot be decoded."""
        return f"To skip them, go on at offset {error.next_offset} of segment {error.segment}"

    def may_hand_out(self, taken: Fetched) -> bool:
        """Whether the records of this delivery still belong to this consumer. Any thread may ask."""
        return taken.reader.valid and self._failure is None

    def _next_message(self) -> Message | None:
        """Hot: called for each message."""
        while True:
            try:
                message = next(self._messages, None)
            except BatchUnreadable as error:
                self._stop_before(error)
                continue
            if message is None:
                self._current = None
                taken = self._take()
                if taken is None:
                    return None
                self._current = taken
                self._messages = taken.batch.iter_messages()
            elif (current := self._current) is not None and self.may_hand_out(current):
                current.reader.delivered = message.offset + 1
                return message
            else:
                self._messages = NO_MESSAGES

    def _stop_before(self, error: BatchUnreadable) -> None:
        """Raise the error, unless the segment has gone to another consumer. The next turn raises it again."""
        current, self._current, self._messages = self._current, None, NO_MESSAGES
        if current is not None and self.may_hand_out(current):
            self.put_back(Fetched(current.reader, current.batch.from_offset(current.reader.delivered)))
            raise self.unreadable(error) from error

    def _take(self) -> Fetched | None:
        self.check_usable()
        if (current := self._current) is not None:
            # The program changed from messages to batches: the rest of the delivery comes first.
            self._current = None
            self._messages = NO_MESSAGES
            if current.reader.valid and current.reader.delivered < current.batch.next_offset:
                return Fetched(current.reader, current.batch.from_offset(current.reader.delivered))
        while self._turns:
            reader = self._turns.popleft()
            reader.queued = False
            batch = reader.next_batch()
            if batch is None:
                self._on_nothing_left(reader)
                continue
            reader.take(batch)
            self._list(reader)
            return Fetched(reader, batch)
        return None

    def _arrived(self, reader: SegmentReader) -> None:
        """Queue a reader whose channel has news, and wake the application."""
        self._list(reader)
        self._news.set()

    def _list(self, reader: SegmentReader) -> None:
        if not reader.queued:
            reader.queued = True
            self._turns.append(reader)

    def _on_nothing_left(self, reader: SegmentReader) -> None:
        """Called when this reader had its turn and its channel had nothing."""

    async def _news_before(self, deadline: float | None) -> bool:
        """Wait for a reason to look again. False after the deadline."""
        try:
            async with asyncio.timeout_at(deadline):
                if self.started:
                    self._news.clear()
                    await self._news.wait()
                else:
                    await self._begin_by_receive()
        except BraidError:
            raise
        except TimeoutError:
            return False
        return True

    def _wake_receivers(self) -> None:
        self._news.set()


def closed_error(what: str) -> ClientClosed:
    return ClientClosed(f"{what} is closed; make another one")


def may_pass(error: BraidError) -> bool:
    """Whether trying again may help. A request that timed out may succeed the next time."""
    return error.retriable or isinstance(error, TimedOut)


def _look_at(opening: asyncio.Task[None]) -> None:
    """Note the error, so that asyncio does not report it: the next `receive` raises it."""
    if not opening.cancelled():
        opening.exception()


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else asyncio.get_running_loop().time() + timeout
