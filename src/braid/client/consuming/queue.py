"""The queue consumer: messages one by one, in no order, shared with all other consumers of the subscription.

    for each segment: SegmentFeed ─► buffer ─► receive ─► ack, nack, extend ─► SegmentAnswers

The consumer attaches to all segments of the topic, parents and children alike: order is not promised. Each segment has
a feed (queue_feed.py), which keeps a channel to the segment's owner, and sends the answers back (queue_answers.py).
`ack` returns when the broker has stored it: the message is never delivered again. `submit_ack` does not wait; `flush`
waits for all.

**Prefetch** bounds the messages that are here and not answered. It is shared by the segments, and each gets one at
least. A message whose lease ran out in the buffer is not handed out: another consumer has it.

**Delays, times to live and dead letters** are the consumer's work, because a broker never opens a batch. A message that
is not due is returned, unseen, until its time. One that is too old is settled. One that was delivered as often as is
allowed goes to the dead-letter topic (dead_letters.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Container
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from braid.client.consuming.consumer import ConsumerLifecycle, closed_error, may_pass
from braid.client.consuming.dead_letters import DeadLetters, OnBuried
from braid.client.consuming.delivery import ReceivedBatch
from braid.client.consuming.queue_answers import AnswerTimeouts
from braid.client.consuming.queue_feed import SegmentFeed
from braid.client.retry import retrying
from braid.client.routing import OwnerSearch, TopicMap
from braid.model.errors import AckStale, BraidError, InvalidArgument, TimedOut, cut
from braid.model.message import DELIVER_AT, EXPIRES_AT, QueueMessage, header_ms
from braid.model.names import TopicName, check_name
from braid.ports.tasks import all_of, cancel
from braid.wire.link import Link
from braid.wire.operations import QueueRun
from braid.wire.wakeup import wait_on

if TYPE_CHECKING:
    from braid.client.client import Client

DEFAULT_PREFETCH: Final = 100
MAX_PREFETCH: Final = 100_000
MAX_DELAY_S: Final = 366 * 86_400
SHARE_AGAIN_S: Final = 0.2
"""While a segment has more than its part of the prefetch."""
BURY_AGAIN_S: Final = 1.0
"""After a dead letter could not be published."""


class _Buffered(NamedTuple):
    message: QueueMessage
    feed: SegmentFeed
    until: float
    """The loop's time after which another consumer may have the message."""


class QueueConsumer(ConsumerLifecycle):
    """Consumes a queue subscription; `client.queue_consumer` makes it."""

    def __init__(self, client: Client, topic: TopicName, subscription: str, *, name: str, prefetch: int | None) -> None:
        prefetch = DEFAULT_PREFETCH if prefetch is None else prefetch
        if not 1 <= prefetch <= MAX_PREFETCH:
            raise InvalidArgument(f"prefetch is {prefetch}; choose 1 to {MAX_PREFETCH}")
        super().__init__(topic.path)
        self.subscription: Final = check_name("subscription", subscription)
        self.name: Final = name or client.name
        self.prefetch: Final = prefetch
        self.timeout_s: Final = client.timeout_s
        self.dead_letter_topic = ""
        self.closed = False
        self.leaving = False
        """Whether messages are given back as they come: the consumer is being closed."""
        self.obeys_times = True
        """Whether delays and times to live count. A redrive takes what is there."""
        self._client = client
        self._feeds: dict[int, SegmentFeed] = {}
        self._buffer: deque[_Buffered] = deque()
        self._returning: asyncio.TimerHandle | None = None
        """Returns the first message of the buffer when its time there is over."""
        self._sharing: asyncio.TimerHandle | None = None
        """Shares the prefetch again."""
        self._waiting: dict[asyncio.Future[None], None] = {}
        """Of tasks that wait for a message, in the order in which they came."""
        self._answered = asyncio.Event()
        self._timeouts = AnswerTimeouts(client.timeout_s)
        self._ack_failure: BraidError | None = None
        """The first failure of an answer that nobody waited for."""
        self._following: asyncio.Task[None] | None = None
        self._dead_letters = DeadLetters(client, topic.path, subscription)

    # Receiving.

    async def receive(self, timeout: float | None = None) -> QueueMessage | None:
        """Return the next message, or None if none came within `timeout` seconds."""
        if (message := self._next()) is not None:
            return message
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        while (message := self._next()) is None:
            try:
                async with asyncio.timeout_at(deadline):
                    if self.started:
                        await self._arrival()
                    else:
                        await self._begin_by_receive()
            except BraidError:
                raise
            except TimeoutError:
                return None
        return message

    async def receive_many(self, max_messages: int, timeout: float | None = None) -> list[QueueMessage]:
        """Return the messages that are here, at most so many. If there are none, wait for one."""
        messages: list[QueueMessage] = []
        while len(messages) < max_messages and (message := self._next()) is not None:
            messages.append(message)
        if not messages and (first := await self.receive(timeout)) is not None:
            messages.append(first)
            while len(messages) < max_messages and (message := self._next()) is not None:
                messages.append(message)
        return messages

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> QueueMessage:
        message = await self.receive()
        assert message is not None
        return message

    # Answering.

    async def ack(self, message: QueueMessage) -> None:
        """Settle a message: when this returns, it is never delivered again. `AckStale` if its lease had run out and
        it was handed out again."""
        feed, done = self._feed(message), self._awaited()
        feed.ack(message.offset, message.lease, done=done)
        await done

    def submit_ack(self, message: QueueMessage) -> None:
        """Settle a message without waiting. `flush` waits, and reports the first failure."""
        self._feed(message).ack(message.offset, message.lease)

    def note_ack(self, message: QueueMessage) -> None:
        """Do what `submit_ack` does; `flush` reports all failures."""
        try:
            self.submit_ack(message)
        except BraidError as error:
            self.note_failure(error)

    async def nack(self, message: QueueMessage, delay: float = 0.0, reason: str = "") -> None:
        """Return a message, to be delivered again after `delay` seconds. `reason` goes with it to the dead letters."""
        delay_us = _microseconds("delay", delay, least=0)
        feed, done = self._feed(message), self._awaited()
        feed.nack(message.offset, message.lease, delay_us=delay_us, reason=reason, done=done)
        await done

    async def extend(self, message: QueueMessage, seconds: float) -> None:
        """Keep a message for so many seconds from now. `AckStale` if it was handed out again."""
        more_us = _microseconds("seconds", seconds, least=1)
        feed, done = self._feed(message), self._awaited()
        feed.extend(message.offset, message.lease, more_us, done)
        await done

    async def flush(self) -> None:
        """Return when everything that was said is stored. Raises the first failure of a `submit_ack` since the last
        flush."""
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                while self._dead_letters or not all(feed.is_quiet for feed in self._feeds.values()):
                    self._answered.clear()
                    await self._answered.wait()
        except TimeoutError as error:
            raise TimedOut(
                f"answers to messages of {self.topic} were not stored within {self.timeout_s:g} s"
            ) from error
        failure, self._ack_failure = self._ack_failure, None
        if failure is not None:
            raise failure.again()

    # Ending.

    def check_usable(self) -> None:
        super().check_usable()
        if self.closed:
            raise self._closed_error()
        self._client.check_open()

    async def close(self) -> None:
        """Store the acks, and give back all messages that are here. Closing twice is fine."""
        if self.closed:
            return
        failure: BraidError | None = None
        self.leaving = True
        for feed in self._feeds.values():
            feed.leave()  # Otherwise the messages that are given back would come here again.
        buffered, self._buffer = self._buffer, deque()
        for each in buffered:
            if each.feed.is_attached:  # Otherwise their leases end.
                each.feed.nack(each.message.offset, each.message.lease, seen=False)
        try:
            if self.started and self._failure is None:
                await self.flush()
        except BraidError as error:
            failure = error
        self.closed = True
        failures = await all_of(feed.close(self.timeout_s) for feed in list(self._feeds.values()))
        failure = failure or next(filter(None, failures), None)
        await self.end()
        if failure is not None:
            raise failure

    async def end(self) -> None:
        """Close without waiting for any broker. No task of the consumer runs afterwards."""
        self.closed = True
        for timer in (self._sharing, self._returning):
            if timer is not None:
                timer.cancel()
        self._client.forget_consumer(self)
        await self._end_opening()
        tasks = [self._following, *(feed.task for feed in self._feeds.values())]
        await cancel([task for task in tasks if task is not None])
        await self._dead_letters.end()
        self._wake_receivers()
        self._timeouts.end(self._closed_error())

    # What feeds call.

    async def map(self) -> TopicMap:
        return await self._client.routing.topic(self.topic)

    def take_in(self, feed: SegmentFeed, messages: list[QueueMessage], until: float, *, dead: bool) -> None:
        now_ms = self._client.clock.now_us() // 1000
        for message in messages:
            headers = message.headers
            if self.leaving:
                feed.nack(message.offset, message.lease, seen=False)
            elif dead:
                self._dead_letters.bury(message, self.dead_letter_topic, self._on_buried(feed, message.lease))
            elif not headers or not self.obeys_times:
                self._buffer.append(_Buffered(message, feed, until))
            elif (due_ms := header_ms(headers, DELIVER_AT)) > now_ms and not message.redelivery_count:
                feed.nack(message.offset, message.lease, delay_us=(due_ms - now_ms) * 1000, seen=False)
            elif 0 < header_ms(headers, EXPIRES_AT) <= now_ms:
                feed.ack(message.offset, message.lease, seen=False)
            else:
                self._buffer.append(_Buffered(message, feed, until))
        if self._buffer and self._returning is None:
            self._returning = asyncio.get_running_loop().call_at(self._buffer[0].until, self._return_late)

    def bury_bytes(self, feed: SegmentFeed, run: QueueRun, batch: ReceivedBatch, reason: str) -> None:
        on_buried = self._on_buried(feed, run.lease)
        self._dead_letters.bury_bytes(batch, run, feed.placement, reason, self.dead_letter_topic, on_buried)

    def wake(self, link: Link | None) -> None:
        """Let the tasks look again that wait for a message. While `link` hands out frames, they resume in the same
        iteration of the loop, and what they answer leaves in it."""
        waiting, self._waiting = [*self._waiting], {}
        if link is not None:
            link.wake_at_end(waiting)
            return
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def drop_buffered(self, feed: SegmentFeed, offsets: Container[int] | None = None) -> None:
        """Drop messages of a segment that wait here: these, or all."""
        self._buffer = deque(
            each
            for each in self._buffer
            if each.feed is not feed or (offsets is not None and each.message.offset not in offsets)
        )

    def fail(self, error: BraidError) -> None:
        self._fail(error)

    def note_failure(self, error: BraidError) -> None:
        self._ack_failure = self._ack_failure or error

    def on_answered(self) -> None:
        self._answered.set()

    # Steps.

    def _on_buried(self, feed: SegmentFeed, lease: int) -> OnBuried:
        placement = feed.placement

        def settle(offsets: range, buried: bool) -> None:
            for offset in offsets:
                if feed.placement != placement:
                    break  # A seek has made these messages new meanwhile.
                if buried:
                    feed.ack(offset, lease, seen=False)
                else:
                    feed.nack(offset, lease, delay_us=int(BURY_AGAIN_S * 1e6), seen=False)
            self._answered.set()

        return settle

    def _closed_error(self) -> BraidError:
        return closed_error(f"the consumer of {self.subscription}")

    def _wake_receivers(self) -> None:
        self.wake(None)

    def _next(self) -> QueueMessage | None:
        """Return the next message whose lease still runs."""
        self.check_usable()
        now = asyncio.get_running_loop().time()
        while self._buffer:
            message, feed, until = self._buffer.popleft()
            if until > now:
                return message
            feed.nack(message.offset, message.lease, seen=False)  # If nobody else has it, it comes again now.
        return None

    def _return_late(self) -> None:
        """Return what waits here for too long, because the program is slow: left to the end of its lease, it would
        count as delivered, and could become a dead letter that no program has seen."""
        loop, buffer = asyncio.get_running_loop(), self._buffer
        while buffer and buffer[0].until <= loop.time():
            message, feed, _ = buffer.popleft()
            if feed.is_attached:  # Otherwise its lease ends.
                feed.nack(message.offset, message.lease, seen=False)
        self._returning = loop.call_at(buffer[0].until, self._return_late) if buffer else None

    async def _arrival(self) -> None:
        """Return when messages may have come."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[future] = None
        try:
            await wait_on(future)
        finally:
            self._waiting.pop(future, None)

    def _feed(self, message: QueueMessage | None) -> SegmentFeed:
        self.check_usable()
        if message is None:
            raise InvalidArgument("there is no message to answer: receive returns None if none came in time")
        feed = self._feeds.get(message.segment)
        if feed is None:
            raise InvalidArgument(f"message {message.id} did not come from this consumer")
        if feed.placement != message.placement:
            raise AckStale(f"subscription {self.subscription} was set to another place since message {message.id} came")
        return feed

    def _awaited(self) -> asyncio.Future[None]:
        """Return a future for an answer that its caller waits for, but not for ever."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._timeouts.add(done)
        return done

    async def _begin(self) -> None:
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        topic = await retrying(self.map, deadline, self._client.backoff())
        self.check_usable()  # It may have been closed meanwhile.
        self._client.add_consumer(self)
        self._follow(topic)
        self._following = asyncio.get_running_loop().create_task(self._follow_layout(topic), name=f"queue {self.topic}")

    async def _follow_layout(self, topic: TopicMap) -> None:
        """Attach to the segments of each new layout."""
        while True:
            try:
                epoch = topic.route.layout_epoch
                topic = await self._client.routing.until(
                    self.topic,
                    lambda found, epoch=epoch: found.route.layout_epoch > epoch or not found.topic_id,  # type: ignore[misc]
                )
                self._follow(topic)
            except BraidError as error:
                if not may_pass(error):
                    self.fail(error)
                    return
                await asyncio.sleep(self._client.backoff().next())

    def _follow(self, topic: TopicMap) -> None:
        routing = self._client.routing
        new = [each.id for each in topic.route.segments if each.id not in self._feeds]
        for segment in new:
            self._feeds[segment] = SegmentFeed(self, segment, 1)
        self.share_prefetch()
        for segment in new:
            feed = self._feeds[segment]
            owner = OwnerSearch(routing, self.topic, segment, self._client.backoff())
            feed.task = asyncio.get_running_loop().create_task(feed.run(owner), name=f"queue segment {segment}")
            feed.task.add_done_callback(self._on_feed_end)

    def share_prefetch(self) -> None:
        """Let each segment that may have messages have the same part of the prefetch, and one message at least. While
        some have more than their part, from a time of fewer segments, the others have what is left."""
        if self._sharing is not None:
            self._sharing.cancel()
            self._sharing = None
        feeds = [each for each in self._feeds.values() if not each.is_drained]
        if self.closed or not feeds:
            return
        part = max(1, self.prefetch // len(feeds))
        held = {feed: feed.held for feed in feeds}
        others = [feed for feed in feeds if held[feed] <= part]
        left = self.prefetch - sum(held[feed] for feed in feeds if held[feed] > part)
        for feed in feeds:
            feed.set_prefetch(part if held[feed] > part else max(1, min(part, left // len(others))))
        if len(others) < len(feeds):
            self._sharing = asyncio.get_running_loop().call_later(SHARE_AGAIN_S, self.share_prefetch)

    def _on_feed_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error if isinstance(error, BraidError) else BraidError(f"a queue's channel broke: {error!r}"))


def _microseconds(what: str, seconds: float, *, least: int) -> int:
    with contextlib.suppress(TypeError):  # It is no number.
        if seconds * 1e6 >= least and seconds <= MAX_DELAY_S:  # Neither for NaN.
            return int(seconds * 1e6)
    bound = "more than 0" if least else "0 or more"
    raise InvalidArgument(f"{what} is {cut(repr(seconds))}; give a number of seconds, {bound}, and a year at most")
