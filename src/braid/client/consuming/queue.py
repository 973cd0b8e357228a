"""The queue consumer: messages one by one, in no order, shared with all other consumers of the subscription.

    for each segment: QUEUE_OPEN at its owner ─► QUEUE_DELIVER ─► buffer ─► receive ─► ack, nack, extend ─► QUEUE_ANSWER

One task for each segment keeps a channel open, wherever the segment goes (`_Feed`). The consumer attaches to all
segments of the topic, parents and children alike: order is not promised. A segment that is sealed and settled is left,
and looked at again now and then, because a seek may set the subscription back.

**Answers** gather until the end of the loop's iteration, and go together. `ack` returns when the broker has stored it:
the message is never delivered again. `submit_ack` does not wait; `flush` waits for all. An answer that was lost with
its channel goes again on the next one. It counts as long as no other consumer got the message; otherwise it is
`AckStale`.

**Prefetch** bounds the messages that are here and not answered. It is shared by the segments, and each gets one at
least. A message whose lease ran out in the buffer is not handed out: another consumer has it.

**Delays, times to live and dead letters** are the consumer's work, because a broker never opens a batch. A message that
is not due is returned, unseen, until its time. One that is too old is settled. One that was delivered as often as is
allowed goes to the dead-letter topic, under an identity that is derived from its place: written twice, it is stored
once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Container, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import pyarrow as pa

from braid.client.consuming.consumer import closed_error, may_pass
from braid.client.consuming.delivery import ReceivedBatch, checked_slices
from braid.client.routing import OwnerSearch, TopicMap
from braid.client.shared import result_of
from braid.model.errors import (
    AckStale,
    BatchError,
    BraidError,
    InvalidArgument,
    ProtocolError,
    RepeatDiffers,
    SegmentNotFound,
    TimedOut,
)
from braid.model.message import DELIVER_AT, EXPIRES_AT, Message, QueueMessage, header_ms
from braid.model.names import TopicName, check_name
from braid.ports.tasks import all_of, cancel
from braid.wire.link import Link, within
from braid.wire.operations import (
    END_OF_SEGMENT,
    RESET,
    Close,
    Closed,
    ErrorBody,
    Kind,
    QueueAnswer,
    QueueAnswered,
    QueueDelivery,
    QueueOpen,
    QueueOpened,
    QueueRun,
    decode,
    encode,
    error_from,
)
from braid.wire.wakeup import wait_on

if TYPE_CHECKING:
    from braid.client.client import Client
    from braid.wire.frame import Frame

DEFAULT_PREFETCH: Final = 100
MAX_PREFETCH: Final = 100_000
LOOK_AGAIN_S: Final = 30.0
"""How often a segment is looked at that had nothing left: a seek may have set the subscription back."""
SAY_AGAIN_S: Final = 0.1
"""After answers were refused for a while."""
ANSWERS_UNDER_WAY: Final = 64
"""Of one segment."""
SWEEP_ABOVE: Final = 64
"""So many leases more than twice the prefetch are remembered; then those that have run out are forgotten."""
UNREADABLE_DELAY_S: Final = 10.0
"""Before a batch that cannot be decoded is delivered again."""
MARGIN: Final = 0.9
"""Of its lease, a message may wait so long in the buffer. The broker's clock runs beside this one."""
FIRST_SWEEP: Final = 1_000
"""Answers that callers waited for are forgotten when there are so many, and later whenever their number has doubled."""

_log: Final = logging.getLogger(__name__)


class _Buffered(NamedTuple):
    message: QueueMessage
    feed: _Feed
    until: float
    """The loop's time after which another consumer may have the message."""


class _Said(NamedTuple):
    """An answer that is to be sent, or is under way."""

    kind: str
    offset: int
    lease: int
    amount_us: int
    """The delay of a nack, the length of an extension."""
    seen: bool
    reason: str
    done: asyncio.Future[None] | None
    placement: int
    """Of the message: an answer that comes back after a seek is not sent again."""


class _Feed:
    """One segment's messages, on their way here, and the answers, on their way back."""

    def __init__(self, consumer: QueueConsumer, segment: int, prefetch: int) -> None:
        self.segment: Final = segment
        self.task: asyncio.Task[None] | None = None
        self.prefetch = prefetch
        self._consumer = consumer
        self._link: Link | None = None
        self._number = 0
        self._over: asyncio.Future[BraidError | None] | None = None
        """Done when the channel is over: with the reason, or with None if nothing is left of the segment."""
        self.placement = 0
        self._lease_s = 0.0
        self._batch: ReceivedBatch | None = None
        self._messages: list[Message] = []
        self._pending: list[_Said] = []
        self._under_way = 0
        self._flushing = False
        self._early: list[tuple[QueueDelivery, memoryview | None]] | None = None
        """Deliveries that came before the reply to QUEUE_OPEN was read; None: the channel is open."""
        self._is_drained = False
        """Whether the owner has said that all messages of the segment are settled: there is nothing to answer."""
        self._held: dict[int, tuple[int, float]] = {}
        """By offset: the leases of messages that are here and not answered, and until when they run."""
        self._leaving = False
        """Whether the owner is to be told that the channel takes no more messages."""

    # The channel.

    async def run(self, owner: OwnerSearch) -> None:
        """Keep a channel open until cancelled."""
        while True:
            try:
                error = await self._attached(owner)
            except BraidError as failure:
                error = failure
            finally:
                self._link = None
            if isinstance(error, SegmentNotFound):
                return  # Retention has taken it, with everything that it held.
            if error is None:
                await asyncio.sleep(LOOK_AGAIN_S)
            elif error.code != RESET and not may_pass(error):
                self._consumer.fail(error)
                return
            elif error.code != RESET:
                try:
                    await owner.after(error)
                except BraidError as failure:
                    if not may_pass(failure):
                        self._consumer.fail(failure)
                        return

    async def _attached(self, owner: OwnerSearch) -> BraidError | None:
        """Open a channel; return why it is over, None if nothing is left of the segment."""
        consumer = self._consumer
        link = await owner.link()
        topic = await consumer.map()
        over: asyncio.Future[BraidError | None] = asyncio.get_running_loop().create_future()
        self._over = over
        self._batch, self._messages, self._early, self._is_drained = None, [], [], False
        self._number = link.open_queue(self)
        request = QueueOpen(
            self._number,
            consumer.topic,
            topic.topic_id,
            self.segment,
            consumer.subscription,
            consumer.name,
            self.prefetch,
            self.placement,
            self._holds(),
        )
        try:
            opened = await link.ask(Kind.QUEUE_OPEN, encode(request), QueueOpened, consumer.timeout_s)
        except BaseException:
            link.forget_queue(self._number)
            raise
        if self.placement not in (0, opened.placement):
            self._forget()
        self._lose(opened.lost)
        self.placement = opened.placement
        self._lease_s = opened.ack_timeout_ms / 1000
        consumer.dead_letter_topic = opened.dead_letter_topic
        owner.worked()
        if over.done():  # The owner had to say only that nothing is left.
            link.forget_queue(self._number)
            return over.result()
        self._link = link
        # Deliveries mean what the reply says. The loop may read both before this task goes on.
        early, self._early = self._early, None
        for each in early or ():
            self._take_in(*each)
        consumer.wake(None)
        self.flush()
        return await over

    def _holds(self) -> tuple[tuple[int, int, int], ...]:
        """Return the messages that are here, or that are answered and the answer goes again."""
        now = asyncio.get_running_loop().time()
        self._held = {offset: held for offset, held in self._held.items() if held[1] > now}
        said = [(each.offset, each.lease) for each in self._pending]
        return _ranges([*((offset, lease) for offset, (lease, _) in self._held.items()), *said])

    def _lose(self, offsets: Iterable[int]) -> None:
        """Drop messages that no program has seen here: others have got them."""
        if lost := set(offsets):
            self._held = {offset: held for offset, held in self._held.items() if offset not in lost}
            self._consumer.drop_buffered(self, lost)

    def _forget(self) -> None:
        """Drop what is here: the subscription was set to another place, and answers to older messages do not count."""
        self._held.clear()
        self._consumer.drop_buffered(self)
        pending, self._pending = self._pending, []
        for said in pending:
            self._refuse(said)

    def on_queue_delivery(self, delivery: QueueDelivery, payload: memoryview | None) -> None:
        if self._over is None or self._over.done():
            return
        if self._early is not None:
            self._early.append((delivery, payload))
            return
        self._take_in(delivery, payload)
        self._consumer.wake(self._link)

    def _take_in(self, delivery: QueueDelivery, payload: memoryview | None) -> None:
        try:
            if payload is not None:
                self._messages = []
                self._batch = _received(self._consumer.topic, self.segment, payload)
            if self._batch is None or not delivery.runs:
                raise ProtocolError(f"a delivery of segment {self.segment} has neither a batch nor messages")
            first = self._batch.base_offset
            if delivery.base_offset != first or any(
                not first <= run.start < run.end <= self._batch.next_offset for run in delivery.runs
            ):
                raise ProtocolError(f"a delivery of segment {self.segment} has messages that are not in its batch")
        except BraidError as error:
            self._end(error)
            return
        try:
            if not self._messages:
                self._messages = self._batch.messages()
        except BatchError as error:
            self._on_unreadable(delivery.runs, self._batch, error)
            return
        until = asyncio.get_running_loop().time() + self._lease_s * MARGIN
        for run in delivery.runs:
            messages = [
                _leased(message, run, self.placement) for message in self._messages[run.start - first : run.end - first]
            ]
            for message in messages:
                self._held[message.offset] = (run.lease, until)
            if len(self._held) > 2 * self.prefetch + SWEEP_ABOVE:
                self._holds()
            self._consumer.take_in(self, messages, until, dead=run.dead)

    def on_closed(self, error: Closed | BraidError) -> None:
        if isinstance(error, Closed):
            if error.code == END_OF_SEGMENT:
                self._is_drained = True
                said, self._pending = self._pending, []
                for each in said:
                    self._settle(each, None)
                self._end(None)
                self._consumer.on_answered()
                return
            error = error_from(ErrorBody(error.code, error.message, error.retriable))
        if error.code == RESET:
            self._forget()
        self._end(error)

    def _end(self, error: BraidError | None) -> None:
        if self._link is not None:
            self._link.forget_queue(self._number)
            self._link = None
        if self._over is not None and not self._over.done():
            self._over.set_result(error)

    def _on_unreadable(self, runs: Iterable[QueueRun], batch: ReceivedBatch, error: BraidError) -> None:
        """Return messages that cannot be decoded, or bury them as the bytes that they are."""
        for run in runs:
            _log.error(
                "messages %d to %d of segment %d cannot be decoded: %s", run.start, run.end - 1, self.segment, error
            )
            if run.dead:
                self._consumer.bury_bytes(self, run, batch, str(error))
                continue
            for offset in range(run.start, run.end):
                self.say("nack", offset, run.lease, amount_us=int(UNREADABLE_DELAY_S * 1e6), reason=str(error))

    # Answers.

    def say(
        self,
        kind: str,
        offset: int,
        lease: int,
        *,
        amount_us: int = 0,
        seen: bool = True,
        reason: str = "",
        done: asyncio.Future[None] | None = None,
    ) -> None:
        if kind == "extend":
            self._held[offset] = (lease, asyncio.get_running_loop().time() + amount_us / 1e6)
        else:
            self._held.pop(offset, None)
        self._pending.append(_Said(kind, offset, lease, amount_us, seen, reason, done, self.placement))
        if not self._flushing and self._link is not None:
            self._flushing = True
            self._link.call_at_end(self.flush)

    def flush(self) -> None:
        """Send what gathered."""
        self._flushing = False
        link = self._link
        if link is None or not (self._pending or self._leaving) or self._under_way >= ANSWERS_UNDER_WAY:
            return
        said, self._pending = _one_for_each(self._pending)
        leaving, self._leaving = self._leaving, False
        acks = _ranges([(each.offset, each.lease) for each in said if each.kind == "ack"])
        nacks = tuple(
            (each.offset, each.lease, each.amount_us, each.seen, each.reason) for each in said if each.kind == "nack"
        )
        extensions = tuple((each.offset, each.lease, each.amount_us) for each in said if each.kind == "extend")
        body = encode(QueueAnswer(self._number, acks, nacks, extensions, leaving))
        self._under_way += 1

        def on_reply(frame: Frame | None, error: BraidError | None) -> None:
            self._under_way -= 1
            self._on_answered(said, frame, error)

        try:
            link.call(Kind.QUEUE_ANSWER, body, (), on_reply)
        except BraidError as error:
            self._under_way -= 1
            self._on_answered(said, None, error)

    def _on_answered(self, said: list[_Said], frame: Frame | None, error: BraidError | None) -> None:
        if error is not None and may_pass(error) and self._is_drained:
            for each in said:
                self._settle(each, None)
        elif error is not None and may_pass(error) and not self._consumer.closed:
            for each in said:
                if each.placement != self.placement:
                    self._refuse(each)
            # The others go again on the next channel. A consumer that leaves gives back nothing there: leases end.
            again = [each for each in said if each.placement == self.placement]
            if self._consumer.leaving:
                again = [each for each in again if each.kind != "nack" or each.seen]
            self._pending = again + self._pending
        elif error is not None:
            for each in said:
                self._settle(each, error)
        else:
            assert frame is not None
            stale = set(decode(QueueAnswered, frame.body).stale)
            for each in said:
                if each.offset in stale:
                    self._refuse(each)
                else:
                    self._settle(each, None)
        self._consumer.on_answered()
        if self._pending and error is None:
            self.flush()
        elif self._pending and not self._flushing:  # If the channel is over, the next one sends them before that.
            self._flushing = True
            asyncio.get_running_loop().call_later(SAY_AGAIN_S, self.flush)

    def _refuse(self, said: _Said) -> None:
        self._settle(
            said,
            AckStale(
                f"another consumer has got message {said.offset} of segment {self.segment} since this one did: what "
                f"was said about it does not count"
            ),
        )

    def _settle(self, said: _Said, error: BraidError | None) -> None:
        if said.done is not None and not said.done.done():
            if error is None:
                said.done.set_result(None)
            else:
                said.done.set_exception(error)
        elif error is not None and said.kind == "ack" and said.done is None:
            self._consumer.note_failure(error)

    def leave(self) -> None:
        """Ask the owner for no more messages on this channel. The reply comes after all that are under way."""
        self._leaving = True
        self.flush()

    @property
    def is_attached(self) -> bool:
        return self._link is not None

    @property
    def is_quiet(self) -> bool:
        """Whether no answer waits or is under way."""
        return not self._pending and not self._under_way

    async def close(self, timeout_s: float) -> BraidError | None:
        """Tell the owner that this consumer leaves: its messages are handed out again now. Return what went wrong."""
        link = self._link
        if link is None:
            return None
        link.forget_queue(self._number)
        self._link = None
        request = link.request(Kind.CLOSE, encode(Close(self._number)))
        try:
            await within(request, timeout_s, f"closing the queue of segment {self.segment} was not answered")
        except BraidError as error:
            return None if may_pass(error) else error
        return None


class QueueConsumer:
    """Consumes a queue subscription; `client.queue_consumer` makes it."""

    def __init__(self, client: Client, topic: TopicName, subscription: str, *, name: str, prefetch: int | None) -> None:
        prefetch = DEFAULT_PREFETCH if prefetch is None else prefetch
        if not 1 <= prefetch <= MAX_PREFETCH:
            raise InvalidArgument(f"prefetch is {prefetch}; choose 1 to {MAX_PREFETCH}")
        self.topic: Final = topic.path
        self.subscription: Final = check_name("subscription", subscription)
        self.name: Final = name or client.name
        self.prefetch: Final = prefetch
        self.timeout_s: Final = client.timeout_s
        self.dead_letter_topic = ""
        self.closed = False
        self.leaving = False
        """Whether messages are given back as they come: the consumer is being closed."""
        self._client = client
        self._feeds: dict[int, _Feed] = {}
        self._buffer: deque[_Buffered] = deque()
        self._waiting: dict[asyncio.Future[None], None] = {}
        """Of tasks that wait for a message, in the order in which they came."""
        self._answered = asyncio.Event()
        self._awaited: deque[tuple[float, asyncio.Future[None]]] = deque()
        """Answers whose callers wait, each with the loop's time at which they give up, in order."""
        self._sweep_at = FIRST_SWEEP
        self._giving_up: asyncio.TimerHandle | None = None
        self._failure: BraidError | None = None
        self._ack_failure: BraidError | None = None
        """The first failure of an answer that nobody waited for."""
        self._following: asyncio.Task[None] | None = None
        self._opening: asyncio.Task[None] | None = None
        self._burying: dict[tuple[int, int], asyncio.Task[None]] = {}

    # Receiving.

    async def start(self) -> None:
        """Begin to receive. `async with` and the first `receive` call this."""
        self._check()
        if self._following is None:
            if self._opening is None:
                self._opening = asyncio.get_running_loop().create_task(self._open(), name=f"open queue {self.topic}")
            opening = self._opening
            try:
                await result_of(opening)
            finally:
                if opening.done():
                    self._opening = None

    async def receive(self, timeout: float | None = None) -> QueueMessage | None:
        """Return the next message, or None if none came within `timeout` seconds."""
        if (message := self._next()) is not None:
            return message
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        while (message := self._next()) is None:
            try:
                async with asyncio.timeout_at(deadline):
                    await self.start()
                    if not self._buffer and self._failure is None and not self.closed:
                        await self._arrival()
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
        another consumer got it."""
        await self._say("ack", message)

    def submit_ack(self, message: QueueMessage) -> None:
        """Settle a message without waiting. `flush` waits, and reports the first failure."""
        self._feed(message).say("ack", message.offset, message.lease)

    def note_ack(self, message: QueueMessage) -> None:
        """Do what `submit_ack` does; `flush` reports all failures."""
        try:
            self.submit_ack(message)
        except BraidError as error:
            self.note_failure(error)

    async def nack(self, message: QueueMessage, delay: float = 0.0, reason: str = "") -> None:
        """Return a message, to be delivered again after `delay` seconds. `reason` goes with it to the dead letters."""
        if not 0 <= delay <= 366 * 86_400:
            raise InvalidArgument(f"delay is {delay} seconds; give 0 to a year")
        await self._say("nack", message, amount_us=int(delay * 1e6), reason=reason)

    async def extend(self, message: QueueMessage, seconds: float) -> None:
        """Keep a message for so many seconds from now. `AckStale` if another consumer has it."""
        if not 0 < seconds <= 366 * 86_400:
            raise InvalidArgument(f"seconds is {seconds}; a message can be kept for more than 0 seconds, and a year")
        await self._say("extend", message, amount_us=int(seconds * 1e6))

    async def flush(self) -> None:
        """Return when everything that was said is stored. Raises the first failure of a `submit_ack` since the last
        flush."""
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                while self._burying or not all(feed.is_quiet for feed in self._feeds.values()):
                    self._answered.clear()
                    await self._answered.wait()
        except TimeoutError as error:
            raise TimedOut(
                f"answers to messages of {self.topic} were not stored within {self.timeout_s:g} s"
            ) from error
        failure, self._ack_failure = self._ack_failure, None
        if failure is not None:
            raise failure.again()

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
                each.feed.say("nack", each.message.offset, each.message.lease, seen=False)
        try:
            if self._following is not None and self._failure is None:
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
        self._client.forget_consumer(self)
        tasks = [self._following, self._opening, *(feed.task for feed in self._feeds.values()), *self._burying.values()]
        await cancel([task for task in tasks if task is not None])
        self.wake(None)
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
        while self._awaited:
            _, done = self._awaited.popleft()
            if not done.done():
                done.set_exception(closed_error(f"the consumer of {self.subscription}"))

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

    def on_fork(self, error: BraidError) -> None:
        """Refuse everything with this error, in a forked child."""
        self._failure = error

    # What feeds call.

    async def map(self) -> TopicMap:
        return await self._client.routing.topic(self.topic)

    def take_in(self, feed: _Feed, messages: list[QueueMessage], until: float, *, dead: bool) -> None:
        now_ms = self._client.clock.now_us() // 1000
        for message in messages:
            headers = message.headers
            if self.leaving:
                feed.say("nack", message.offset, message.lease, seen=False)
            elif dead:
                self._bury(feed, message)
            elif headers and (due_ms := header_ms(headers, DELIVER_AT)) > now_ms and not message.redelivery_count:
                feed.say("nack", message.offset, message.lease, amount_us=(due_ms - now_ms) * 1000, seen=False)
            elif headers and 0 < header_ms(headers, EXPIRES_AT) <= now_ms:
                feed.say("ack", message.offset, message.lease)
            else:
                self._buffer.append(_Buffered(message, feed, until))

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

    def drop_buffered(self, feed: _Feed, offsets: Container[int] | None = None) -> None:
        """Drop messages of a segment that wait here: these, or all."""
        self._buffer = deque(
            each
            for each in self._buffer
            if each.feed is not feed or (offsets is not None and each.message.offset not in offsets)
        )

    def fail(self, error: BraidError) -> None:
        """Make receiving raise this error from now on."""
        if self._failure is None:
            self._failure = error
            self.wake(None)

    def note_failure(self, error: BraidError) -> None:
        self._ack_failure = self._ack_failure or error

    def on_answered(self) -> None:
        self._answered.set()

    # Dead letters.

    def _bury(self, feed: _Feed, message: QueueMessage) -> None:
        origin = {
            "braid-dead-letter-topic": self.topic.encode(),
            "braid-dead-letter-subscription": self.subscription.encode(),
            "braid-dead-letter-segment": b"%d" % message.segment,
            "braid-dead-letter-offset": b"%d" % message.offset,
            "braid-dead-letter-deliveries": b"%d" % message.redelivery_count,
            "braid-dead-letter-reason": message.failure.encode(),
        }
        row = _row(message.key, message.value, {**message.headers, **origin}, message.timestamp_us)
        self._bury_row(feed, message.offset, range(message.offset, message.offset + 1), message.lease, row)

    def bury_bytes(self, feed: _Feed, run: QueueRun, batch: ReceivedBatch, reason: str) -> None:
        """Bury a batch that cannot be decoded, as the bytes that it is."""
        origin = {
            "braid-dead-letter-topic": self.topic.encode(),
            "braid-dead-letter-subscription": self.subscription.encode(),
            "braid-dead-letter-segment": b"%d" % feed.segment,
            "braid-dead-letter-offset": b"%d" % run.start,
            "braid-dead-letter-deliveries": b"%d" % run.deliveries,
            "braid-dead-letter-reason": f"a batch that cannot be decoded: {reason}"[:200].encode(),
        }
        stored = b"".join(bytes(data) for _, data in batch.batches())
        row = _row(None, stored, origin, self._client.clock.now_us())
        self._bury_row(feed, run.start, range(run.start, run.end), run.lease, row)

    def _bury_row(self, feed: _Feed, first: int, offsets: range, lease: int, row: Any) -> None:
        key = (feed.segment, first)
        if key not in self._burying:
            work = self._buried(feed, offsets, lease, row)
            self._burying[key] = asyncio.get_running_loop().create_task(work, name=f"dead letter {key}")

    async def _buried(self, feed: _Feed, offsets: range, lease: int, row: Any) -> None:
        """Publish a dead letter, and settle the message."""
        try:
            app = f"dead letter {self.topic} {self.subscription} {feed.segment} {feed.placement} {offsets.start}"
            writer = self._client.repeatable_producer(self.dead_letter_topic, app=app, part=0, era=0)
            try:
                async with writer:
                    await writer.add(row)
                    await writer.finish()
            finally:
                await writer.producer.end()  # Also if this was cancelled while the writer was being opened.
            for offset in offsets:
                feed.say("ack", offset, lease)
        except RepeatDiffers:
            # It is stored under this identity: another consumer knew of fewer deliveries, or of another reason.
            for offset in offsets:
                feed.say("ack", offset, lease)
        except BraidError as error:
            _log.warning(
                "message %d of segment %d of %s could not be moved to %s: %s",
                offsets.start, feed.segment, self.topic, self.dead_letter_topic, error,
            )  # fmt: skip
            for offset in offsets:
                feed.say("nack", offset, lease, amount_us=1_000_000, seen=False)
        finally:
            self._burying.pop((feed.segment, offsets.start), None)
            self._answered.set()

    # Steps.

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure.again()
        if self.closed:
            raise closed_error(f"the consumer of {self.subscription}")
        self._client.check_open()

    def _next(self) -> QueueMessage | None:
        """Return the next message whose lease still runs."""
        self._check()
        now = asyncio.get_running_loop().time()
        while self._buffer:
            message, feed, until = self._buffer.popleft()
            if until > now:
                return message
            feed.say("nack", message.offset, message.lease, seen=False)  # If nobody else has it, it comes again now.
        return None

    async def _arrival(self) -> None:
        """Return when messages may have come."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[future] = None
        try:
            await wait_on(future)
        finally:
            self._waiting.pop(future, None)

    def _feed(self, message: QueueMessage) -> _Feed:
        self._check()
        feed = self._feeds.get(message.segment)
        if feed is None:
            raise InvalidArgument(f"message {message.id} did not come from this consumer")
        if feed.placement != message.placement:
            raise AckStale(f"subscription {self.subscription} was set to another place since message {message.id} came")
        return feed

    def _say(self, kind: str, message: QueueMessage, *, amount_us: int = 0, reason: str = "") -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._feed(message).say(kind, message.offset, message.lease, amount_us=amount_us, reason=reason, done=done)
        self._give_up_later(done)
        return done

    # Callers that wait for an answer to be stored share one timer: a timer for each would cost as much as all the rest.

    def _give_up_later(self, done: asyncio.Future[None]) -> None:
        """Fail this with `TimedOut` if it is not done in time."""
        if len(self._awaited) >= self._sweep_at:
            self._awaited = deque(each for each in self._awaited if not each[1].done())
            self._sweep_at = max(FIRST_SWEEP, 2 * len(self._awaited))
        loop = asyncio.get_running_loop()
        self._awaited.append((loop.time() + self.timeout_s, done))
        if self._giving_up is None:
            self._giving_up = loop.call_at(self._awaited[0][0], self._give_up)

    def _give_up(self) -> None:
        loop, awaited = asyncio.get_running_loop(), self._awaited
        while awaited and (awaited[0][1].done() or awaited[0][0] <= loop.time()):
            _, done = awaited.popleft()
            if not done.done():
                message = f"no broker has stored this within {self.timeout_s:g} s; it may be stored later"
                done.set_exception(TimedOut(message))
        self._giving_up = loop.call_at(awaited[0][0], self._give_up) if awaited else None

    async def _open(self) -> None:
        topic = await self.map()
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
        ids = [segment.id for segment in topic.route.segments]
        prefetch = max(1, self.prefetch // max(len(topic.active), 1))
        for segment in ids:
            if segment not in self._feeds:
                feed = self._feeds[segment] = _Feed(self, segment, prefetch)
                owner = OwnerSearch(routing, self.topic, segment, self._client.backoff())
                feed.task = asyncio.get_running_loop().create_task(feed.run(owner), name=f"queue segment {segment}")
                feed.task.add_done_callback(lambda task, feed=feed: self._on_feed_end(feed, task))  # type: ignore[misc]

    def _on_feed_end(self, feed: _Feed, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error if isinstance(error, BraidError) else BraidError(f"a queue's channel broke: {error!r}"))
        if feed.is_quiet:
            self._feeds.pop(feed.segment, None)


def _received(topic: str, segment: int, payload: memoryview) -> ReceivedBatch:
    slices = checked_slices(payload)
    if len(slices) != 1 or slices[0].header.is_control:
        raise ProtocolError(f"a delivery of segment {segment} of {topic} has {len(slices)} batches instead of one")
    header = slices[0].header
    return ReceivedBatch(topic, segment, payload, slices, header.base_offset, header.next_offset)


def _leased(message: Message, run: QueueRun, placement: int) -> QueueMessage:
    return QueueMessage(
        message.value,
        message.key,
        message.timestamp_us,
        message.offset,
        message.headers,
        message.segment,
        message.topic,
        run.deliveries,
        run.reason,
        run.lease,
        placement,
    )


def _one_for_each(pending: list[_Said]) -> tuple[list[_Said], list[_Said]]:
    """Return answers of which no two are different ones to the same message, and the others. A reply names messages
    whose answers are stale. A consumer that got a message twice may have said two things of it, and one may count."""
    chosen: dict[int, tuple[str, int]] = {}
    now, later = list[_Said](), list[_Said]()
    for said in pending:
        answer = (said.kind, said.lease)
        (now if chosen.setdefault(said.offset, answer) == answer else later).append(said)
    return now, later


def _ranges(acks: list[tuple[int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Return offsets and leases as ranges: programs ack one message after the other."""
    ranges: list[tuple[int, int, int]] = []
    for offset, lease in sorted(set(acks)):
        if ranges and ranges[-1][1] == offset and ranges[-1][2] == lease:
            ranges[-1] = (ranges[-1][0], offset + 1, lease)
        else:
            ranges.append((offset, offset + 1, lease))
    return tuple(ranges)


def _row(key: bytes | None, value: bytes, headers: Mapping[str, bytes], timestamp_us: int) -> Any:
    return pa.table(
        {
            "key": pa.array([key], pa.binary()),
            "value": pa.array([value], pa.binary()),
            "headers": pa.array([list(headers.items())], pa.map_(pa.string(), pa.binary())),
            "timestamp": pa.array([timestamp_us], pa.timestamp("us", tz="UTC")),
        }
    )
