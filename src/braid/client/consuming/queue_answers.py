"""Answers to messages of a queue, on their way to the segment's owner.

Answers gather until the end of the loop's iteration, and go together in one QUEUE_ANSWER. An answer that was lost with
its channel goes again on the next one. It counts as long as no other consumer got the message; otherwise it is
`AckStale`. An answer about a message of another placement is never sent: a seek has made that message new.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from braid.client.consuming.consumer import may_pass
from braid.model.errors import AckStale, BraidError, TimedOut
from braid.wire.link import Link
from braid.wire.operations import Kind, QueueAnswer, QueueAnswered, decode, encode

if TYPE_CHECKING:
    from braid.wire.frame import Frame

SAY_AGAIN_S: Final = 0.1
"""After answers were refused for a while."""
ANSWERS_UNDER_WAY: Final = 64
"""Of one segment."""
ANSWERS_TOGETHER: Final = 4_000
"""Of one request: so many returns fit into its frame, also if each has the longest reason."""
FIRST_SWEEP: Final = 1_000
"""Answers that callers waited for are forgotten when there are so many, and later whenever their number has doubled."""


class AnswerKind(Enum):
    ACK = "ack"
    NACK = "nack"
    EXTEND = "extend"


class PendingAnswer(NamedTuple):
    """An answer that is to be sent, or is under way."""

    kind: AnswerKind
    offset: int
    lease: int
    placement: int
    """Of the message."""
    amount_us: int = 0
    """The delay of a nack, the length of an extension."""
    seen: bool = True
    """Whether the program has had the message. Otherwise the consumer answers it by itself."""
    reason: str = ""
    done: asyncio.Future[None] | None = None
    """Of a caller that waits."""


class Answering(Protocol):
    """The consumer, as its answers see it."""

    closed: bool
    leaving: bool

    def note_failure(self, error: BraidError) -> None:
        """Hear that an ack for which nobody waits does not count."""

    def on_answered(self) -> None:
        """Hear that answers have come."""


class SegmentAnswers:
    """Owns the answers about one segment's messages until the owner has confirmed them."""

    def __init__(self, segment: int, consumer: Answering) -> None:
        self._segment = segment
        self._consumer = consumer
        self._link: Link | None = None
        self._channel = 0
        self._placement = 0
        self._pending: list[PendingAnswer] = []
        self._under_way = 0
        self._flushing = False
        self._leaving = False
        """Whether the owner is to be told that the channel takes no more messages."""
        self._is_drained = False
        """Whether the owner has said that all messages of the segment are settled: there is nothing to answer."""
        self._is_gone = False
        self._failure: BraidError | None = None
        """Why there will be no other channel."""

    @property
    def is_quiet(self) -> bool:
        """Whether no answer waits or is under way."""
        return not self._pending and not self._under_way

    def attach(self, link: Link, channel: int, placement: int) -> None:
        """Send on this channel from now on."""
        self._link, self._channel, self._placement = link, channel, placement
        self._is_drained = False
        self._leaving = self._consumer.leaving  # The owner knows it of an earlier channel only.

    def detach(self) -> None:
        """Keep answers until there is another channel."""
        self._link = None

    def waiting(self) -> list[tuple[int, int]]:
        """Return offsets and leases of messages whose answers were not sent, or are to be sent again."""
        return [(each.offset, each.lease) for each in self._pending]

    def add(self, answer: PendingAnswer) -> None:
        # Nobody opens another channel for the sake of this answer: a drained segment is looked at now and then.
        if self._is_gone or (self._is_drained and self._link is None):
            self._settle(answer, None)
            return
        if self._failure is not None:
            self._settle(answer, self._failure)
            return
        self._pending.append(answer)
        if not self._flushing and self._link is not None:
            self._flushing = True
            self._link.call_at_end(self.flush)

    def leave(self) -> None:
        """Ask the owner for no more messages on this channel. The reply comes after all that are under way."""
        self._leaving = True
        self.flush()

    def flush(self) -> None:
        """Send what gathered."""
        self._flushing = False
        link = self._link
        if link is None or not (self._pending or self._leaving) or self._under_way >= ANSWERS_UNDER_WAY:
            return
        answers, later = one_for_each(self._pending[:ANSWERS_TOGETHER])
        self._pending = later + self._pending[ANSWERS_TOGETHER:]
        leaving, self._leaving = self._leaving, False
        self._under_way += 1

        def on_reply(frame: Frame | None, error: BraidError | None) -> None:
            self._under_way -= 1
            self._on_answered(answers, frame, error)

        try:
            link.call(Kind.QUEUE_ANSWER, encode(as_request(self._channel, answers, leaving)), (), on_reply)
        except BraidError as error:
            on_reply(None, error)

    def end(self) -> None:
        """Hear that the segment is gone for good. Its messages count as settled, whatever is said about them."""
        self._is_gone = True
        self.settle_all()

    def fail(self, error: BraidError) -> None:
        """Hear that there will be no other channel: what is not stored fails with this error."""
        self._failure = error
        answers, self._pending = self._pending, []
        for each in answers:
            self._settle(each, error)
        self._consumer.on_answered()

    def settle_all(self) -> None:
        """Hear that all messages of the segment are settled."""
        self._is_drained = True
        answers, self._pending = self._pending, []
        for each in answers:
            self._settle(each, None)
        self._consumer.on_answered()

    def refuse_all(self) -> None:
        """Drop everything: the subscription was set to another place, and these answers would settle new messages."""
        answers, self._pending = self._pending, []
        for each in answers:
            self._refuse(each)
        self._consumer.on_answered()

    def _on_answered(self, answers: list[PendingAnswer], frame: Frame | None, error: BraidError | None) -> None:
        if error is None:
            assert frame is not None
            stale = set(decode(QueueAnswered, frame.body).stale)
            for each in answers:
                if each.offset in stale:
                    self._refuse(each)
                else:
                    self._settle(each, None)
        elif may_pass(error) and self._is_drained:
            for each in answers:
                self._settle(each, None)
        elif may_pass(error) and not self._consumer.closed and self._failure is None:
            self._put_back(answers)
        else:
            for each in answers:
                self._settle(each, self._failure or error)
        self._consumer.on_answered()
        if self._pending and error is None:
            self.flush()
        elif self._pending and not self._flushing:  # If the channel is over, the next one sends them before that.
            self._flushing = True
            asyncio.get_running_loop().call_later(SAY_AGAIN_S, self.flush)

    def _put_back(self, answers: list[PendingAnswer]) -> None:
        """Let answers go again on the next channel. A consumer that leaves gives back nothing there: leases end."""
        again = []
        for each in answers:
            if each.placement != self._placement:
                self._refuse(each)
            elif each.seen or each.kind is AnswerKind.ACK or not self._consumer.leaving:
                again.append(each)
        self._pending = again + self._pending

    def _refuse(self, answer: PendingAnswer) -> None:
        message = (
            f"message {answer.offset} of segment {self._segment} was delivered again since, or the queue was set to "
            f"another place: this answer does not count. For work that takes longer than the lease, call extend"
        )
        self._settle(answer, AckStale(message))

    def _settle(self, answer: PendingAnswer, error: BraidError | None) -> None:
        if answer.done is not None:
            if answer.done.done():
                return
            if error is None:
                answer.done.set_result(None)
            else:
                answer.done.set_exception(error.again())
        elif error is not None and answer.kind is AnswerKind.ACK and answer.seen:
            self._consumer.note_failure(error)


class AnswerTimeouts:
    """Fails callers whose answers are not stored in time. They share one timer: a timer for each would cost as much as
    all the rest."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._awaited: deque[tuple[float, asyncio.Future[None]]] = deque()
        """Answers whose callers wait, each with the loop's time at which they give up, in order."""
        self._sweep_at = FIRST_SWEEP
        self._timer: asyncio.TimerHandle | None = None

    def add(self, done: asyncio.Future[None]) -> None:
        """Fail this with `TimedOut` if it is not done in time."""
        if len(self._awaited) >= self._sweep_at:
            self._awaited = deque(each for each in self._awaited if not each[1].done())
            self._sweep_at = max(FIRST_SWEEP, 2 * len(self._awaited))
        loop = asyncio.get_running_loop()
        self._awaited.append((loop.time() + self._timeout_s, done))
        if self._timer is None:
            self._timer = loop.call_at(self._awaited[0][0], self._give_up)

    def end(self, error: BraidError) -> None:
        """Fail all that wait with this error."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._awaited:
            _, done = self._awaited.popleft()
            if not done.done():
                done.set_exception(error.again())

    def _give_up(self) -> None:
        loop, awaited = asyncio.get_running_loop(), self._awaited
        while awaited and (awaited[0][1].done() or awaited[0][0] <= loop.time()):
            _, done = awaited.popleft()
            if not done.done():
                message = f"no broker has stored this within {self._timeout_s:g} s; it may be stored later"
                done.set_exception(TimedOut(message))
        self._timer = loop.call_at(awaited[0][0], self._give_up) if awaited else None


def as_request(channel: int, answers: Iterable[PendingAnswer], leaving: bool) -> QueueAnswer:
    """Return the answers as the wire has them."""
    acks, nacks, extensions = list[tuple[int, int]](), list[tuple[int, int, int, bool, str]](), []
    for kind, offset, lease, _, amount_us, seen, reason, _ in answers:
        if kind is AnswerKind.ACK:
            acks.append((offset, lease))
        elif kind is AnswerKind.NACK:
            nacks.append((offset, lease, amount_us, seen, reason))
        else:
            extensions.append((offset, lease, amount_us))
    return QueueAnswer(channel, as_ranges(acks), tuple(nacks), tuple(extensions), leaving)


def one_for_each(pending: list[PendingAnswer]) -> tuple[list[PendingAnswer], list[PendingAnswer]]:
    """Return answers of which no two are different ones to the same message, and the others. A reply names messages
    whose answers are stale. A consumer that got a message twice may have said two things of it, and one may count."""
    chosen: dict[int, tuple[AnswerKind, int]] = {}
    now, later = list[PendingAnswer](), list[PendingAnswer]()
    for each in pending:
        answer = (each.kind, each.lease)
        (now if chosen.setdefault(each.offset, answer) == answer else later).append(each)
    return now, later


def as_ranges(messages: Iterable[tuple[int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Return offsets and leases as ranges: programs ack one message after the other."""
    ranges: list[tuple[int, int, int]] = []
    for offset, lease in sorted(set(messages)):
        if ranges and ranges[-1][1] == offset and ranges[-1][2] == lease:
            ranges[-1] = (ranges[-1][0], offset + 1, lease)
        else:
            ranges.append((offset, offset + 1, lease))
    return tuple(ranges)
