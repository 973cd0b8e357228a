"""One segment's messages, on their way to a queue consumer.

    QUEUE_OPEN at the segment's owner ─► reply ─► QUEUE_DELIVER … ─► the consumer's buffer

One task keeps a channel open, wherever the segment goes (`SegmentFeed.run`). The feed remembers the leases of all
messages that are here and not answered, and names them when it opens the next channel: a move, a fail-over or a cut
connection takes nothing from a program that is still at work.

A segment that is sealed and settled is left, and looked at again now and then, because a seek may set the subscription
back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container, Iterable
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from braid.client.consuming.consumer import may_pass
from braid.client.consuming.delivery import ReceivedBatch, checked_slices
from braid.client.consuming.queue_answers import Answering, AnswerKind, PendingAnswer, SegmentAnswers, as_ranges
from braid.client.routing import OwnerSearch, TopicMap
from braid.model.errors import BatchError, BraidError, ProtocolError, SegmentNotFound
from braid.model.message import Message, QueueMessage
from braid.model.queue.events import shortened
from braid.wire.link import Link, within
from braid.wire.operations import (
    END_OF_SEGMENT,
    RESET,
    Close,
    Closed,
    ErrorBody,
    Kind,
    QueueAnswer,
    QueueDelivery,
    QueueOpen,
    QueueOpened,
    QueueRun,
    decode,
    encode,
    error_from,
)

if TYPE_CHECKING:
    from braid.wire.frame import Frame

LOOK_AGAIN_S: Final = 30.0
"""How often a segment is looked at that had nothing left: a seek may have set the subscription back."""
SWEEP_ABOVE: Final = 64
"""So many leases more than twice the prefetch are remembered; then those that have run out are forgotten."""
UNREADABLE_DELAY_S: Final = 10.0
"""Before a batch that cannot be decoded is delivered again."""
MARGIN: Final = 0.9
"""Of its lease, a message may wait so long in the buffer. The broker's clock runs beside this one."""

_log: Final = logging.getLogger(__name__)


class FedConsumer(Answering, Protocol):
    """The consumer, as the feeds of its segments see it."""

    @property
    def topic(self) -> str: ...

    @property
    def subscription(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def timeout_s(self) -> float: ...

    dead_letter_topic: str

    async def map(self) -> TopicMap: ...

    def take_in(self, feed: SegmentFeed, messages: list[QueueMessage], until: float, *, dead: bool) -> None:
        """Take messages that may be handed out until this time of the loop."""

    def bury_bytes(self, feed: SegmentFeed, run: QueueRun, batch: ReceivedBatch, reason: str) -> None:
        """Move messages that cannot be decoded to the dead letters."""

    def drop_buffered(self, feed: SegmentFeed, offsets: Container[int] | None = None) -> None:
        """Drop messages of the segment that no program has seen: these, or all."""

    def share_prefetch(self) -> None:
        """Hear that another number of segments has messages."""

    def wake(self, link: Link | None) -> None:
        """Let waiting programs look again."""

    def fail(self, error: BraidError) -> None:
        """End receiving with this error."""


class SegmentFeed:
    """Owns one segment's channel, and the leases of its messages that are here."""

    def __init__(self, consumer: FedConsumer, segment: int, prefetch: int) -> None:
        self.segment: Final = segment
        self.task: asyncio.Task[None] | None = None
        self.placement = 0
        self._consumer = consumer
        self.is_drained = False
        """Whether the segment has nothing for this queue, as far as its last channel knew."""
        self._prefetch = prefetch
        self._answers = SegmentAnswers(segment, consumer)
        self._link: Link | None = None
        """None while the channel is not open."""
        self._number = 0
        self._over: asyncio.Future[BraidError | None] | None = None
        """Done when the channel is over: with the reason, or with None if nothing is left of the segment."""
        self._lease_s = 0.0
        self._batch: ReceivedBatch | None = None
        self._messages: list[Message] = []
        self._held: dict[int, tuple[int, float]] = {}
        """By offset: the leases of messages that are here and not answered, and until when they run."""

    @property
    def held(self) -> int:
        """How many messages are here and not answered."""
        self._sweep()
        return len(self._held)

    def set_prefetch(self, prefetch: int) -> None:
        """Let so many messages be here and not answered from now on."""
        if prefetch != self._prefetch:
            self._prefetch = prefetch
            if self._link is not None:
                answer = QueueAnswer(self._number, prefetch=prefetch)
                self._link.call(Kind.QUEUE_ANSWER, encode(answer), (), lambda *_: None)

    # The channel.

    async def run(self, owner: OwnerSearch) -> None:
        """Keep a channel open until cancelled."""
        while True:
            try:
                error = await self._attached(owner)
            except BraidError as failure:
                error = failure
            finally:
                self._detach()
            if isinstance(error, SegmentNotFound):
                self._answers.end()  # Retention has taken it, with everything that it held.
                self._drained()
                return
            if error is None:
                self._drained()
                await asyncio.sleep(LOOK_AGAIN_S)
            elif error.code != RESET and not may_pass(error):
                self._fail(error)
                return
            elif error.code != RESET:
                try:
                    await owner.after(error)
                except BraidError as failure:
                    if not may_pass(failure):
                        self._fail(failure)
                        return

    def _fail(self, error: BraidError) -> None:
        self._consumer.fail(error)
        self._answers.fail(error)

    def _drained(self) -> None:
        self.is_drained = True
        self._consumer.share_prefetch()

    async def _attached(self, owner: OwnerSearch) -> BraidError | None:
        """Open a channel; return why it is over, None if nothing is left of the segment."""
        consumer, loop = self._consumer, asyncio.get_running_loop()
        link = await owner.link()
        topic = await consumer.map()
        over: asyncio.Future[BraidError | None] = loop.create_future()
        self._over = over
        opened: asyncio.Future[None] = loop.create_future()
        self._batch, self._messages = None, []
        self._number = link.open_queue(self)
        request = QueueOpen(
            self._number,
            consumer.topic,
            topic.topic_id,
            self.segment,
            consumer.subscription,
            consumer.name,
            self._prefetch,
            self.placement,
            self._holds(),
        )
        try:
            link.call(Kind.QUEUE_OPEN, encode(request), (), partial(self._on_reply, link, self._number, opened))
            await within(opened, consumer.timeout_s, "QUEUE_OPEN was not answered")
        except BaseException:
            link.forget_queue(self._number)
            raise
        owner.worked()
        if self.is_drained:
            self.is_drained = False
            self._consumer.share_prefetch()
        return await over

    def _on_reply(
        self, link: Link, number: int, opened: asyncio.Future[None], frame: Frame | None, error: BraidError | None
    ) -> None:
        """Take the reply to QUEUE_OPEN as it is read: the deliveries that follow it may be read together with it."""
        if opened.done():  # Nobody waits any more. The broker must not hand out messages on this channel.
            if error is None:
                link.call(Kind.CLOSE, encode(Close(number)), (), lambda *_: None)
            return
        try:
            if error is not None:
                raise error
            assert frame is not None
            self._open(link, decode(QueueOpened, frame.body))
        except BraidError as failure:
            opened.set_exception(failure)
        else:
            opened.set_result(None)

    def _open(self, link: Link, opened: QueueOpened) -> None:
        if self.placement not in (0, opened.placement):
            self._forget()
        self._lose(opened.lost)
        self.placement = opened.placement
        self._lease_s = opened.ack_timeout_ms / 1000
        self._consumer.dead_letter_topic = opened.dead_letter_topic
        self._link = link
        self._answers.attach(link, self._number, opened.placement)
        self._extend_again()
        link.call_at_end(self._answers.flush)

    def _extend_again(self) -> None:
        """Ask for the rest of longer leases: the owner leaves messages here for the ack time-out."""
        now = asyncio.get_running_loop().time()
        for offset, (lease, until) in self._held.items():
            if until > now + self._lease_s:
                left_us = int((until - now) * 1e6)
                self._answers.add(PendingAnswer(AnswerKind.EXTEND, offset, lease, self.placement, left_us))

    def _holds(self) -> tuple[tuple[int, int, int], ...]:
        """Return the messages that are here, or that are answered and the answer goes again."""
        self._sweep()
        return as_ranges([*((offset, lease) for offset, (lease, _) in self._held.items()), *self._answers.waiting()])

    def _sweep(self) -> None:
        """Forget leases that have run out."""
        now = asyncio.get_running_loop().time()
        self._held = {offset: held for offset, held in self._held.items() if held[1] > now}

    def _lose(self, offsets: Iterable[int]) -> None:
        """Drop messages that no program has seen here: others have got them."""
        if lost := set(offsets):
            self._held = {offset: held for offset, held in self._held.items() if offset not in lost}
            self._consumer.drop_buffered(self, lost)

    def _forget(self) -> None:
        """Drop what is here: the subscription was set to another place, and answers to older messages do not count."""
        self._held.clear()
        self._consumer.drop_buffered(self)
        self._answers.refuse_all()

    def on_closed(self, error: Closed | BraidError) -> None:
        if isinstance(error, Closed):
            if error.code == END_OF_SEGMENT:
                self._answers.settle_all()
                self._end(None)
                return
            error = error_from(ErrorBody(error.code, error.message, error.retriable))
        if error.code == RESET:
            self._forget()
        self._end(error)

    def _end(self, error: BraidError | None) -> None:
        if self._link is not None:
            self._link.forget_queue(self._number)
        self._detach()
        if self._over is not None and not self._over.done():
            self._over.set_result(error)

    def _detach(self) -> None:
        self._link = None
        self._answers.detach()

    # Deliveries.

    def on_queue_delivery(self, delivery: QueueDelivery, payload: memoryview | None) -> None:
        if self._over is None or self._over.done():
            return
        link = self._link
        try:
            if link is None:
                raise ProtocolError(f"a delivery of segment {self.segment} came before its channel was open")
            batch = self._batch_of(delivery, payload)
        except BraidError as error:
            self._end(error)
            return
        try:
            if not self._messages:
                self._messages = batch.messages()
        except BatchError as error:
            self._on_unreadable(delivery.runs, batch, error)
            return
        self._take_in(delivery.runs, batch.base_offset)
        self._consumer.wake(link)

    def _batch_of(self, delivery: QueueDelivery, payload: memoryview | None) -> ReceivedBatch:
        """Return the batch of a delivery: the one that came with it, or the last one."""
        if payload is not None:
            self._messages = []
            self._batch = _received(self._consumer.topic, self.segment, payload)
        if self._batch is None or not delivery.runs:
            raise ProtocolError(f"a delivery of segment {self.segment} has neither a batch nor messages")
        first, stop = self._batch.base_offset, self._batch.next_offset
        if delivery.base_offset != first or any(not first <= run.start < run.end <= stop for run in delivery.runs):
            raise ProtocolError(f"a delivery of segment {self.segment} has messages that are not in its batch")
        return self._batch

    def _take_in(self, runs: Iterable[QueueRun], first: int) -> None:
        until = asyncio.get_running_loop().time() + self._lease_s * MARGIN
        for run in runs:
            messages = [
                _leased(message, run, self.placement) for message in self._messages[run.start - first : run.end - first]
            ]
            for message in messages:
                self._held[message.offset] = (run.lease, until)
            if len(self._held) > 2 * self._prefetch + SWEEP_ABOVE:
                self._sweep()
            self._consumer.take_in(self, messages, until, dead=run.dead)

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
                self.nack(offset, run.lease, delay_us=int(UNREADABLE_DELAY_S * 1e6), reason=str(error))

    # Answers.

    def ack(self, offset: int, lease: int, *, seen: bool = True, done: asyncio.Future[None] | None = None) -> None:
        """Settle a message; `done` when that is stored."""
        self._held.pop(offset, None)
        self._answers.add(PendingAnswer(AnswerKind.ACK, offset, lease, self.placement, seen=seen, done=done))

    def nack(
        self,
        offset: int,
        lease: int,
        *,
        delay_us: int = 0,
        seen: bool = True,
        reason: str = "",
        done: asyncio.Future[None] | None = None,
    ) -> None:
        """Return a message, to be delivered again; `done` when that is stored."""
        self._held.pop(offset, None)
        answer = PendingAnswer(AnswerKind.NACK, offset, lease, self.placement, delay_us, seen, shortened(reason), done)
        self._answers.add(answer)

    def extend(self, offset: int, lease: int, more_us: int, done: asyncio.Future[None]) -> None:
        """Keep a message for so long from now; `done` when the owner has it."""
        self._held[offset] = (lease, asyncio.get_running_loop().time() + more_us / 1e6)
        self._answers.add(PendingAnswer(AnswerKind.EXTEND, offset, lease, self.placement, more_us, done=done))

    @property
    def is_attached(self) -> bool:
        return self._link is not None

    @property
    def is_quiet(self) -> bool:
        """Whether no answer waits or is under way."""
        return self._answers.is_quiet

    def leave(self) -> None:
        """Ask the owner for no more messages."""
        self._answers.leave()

    async def close(self, timeout_s: float) -> BraidError | None:
        """Tell the owner that this consumer leaves: its messages are handed out again now. Return what went wrong."""
        link = self._link
        if link is None:
            return None
        link.forget_queue(self._number)
        self._detach()
        request = link.request(Kind.CLOSE, encode(Close(self._number)))
        try:
            await within(request, timeout_s, f"closing the queue of segment {self.segment} was not answered")
        except BraidError as error:
            return None if may_pass(error) else error
        return None


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
