"""One channel: one segment's batches on their way from its owner to this client.

The broker sends only what it has credit for, in bytes. Credit and what waits here together never exceed the window, so
a consumer that stops reading costs one window for each segment (I12). Credit is given back in large pieces, when half
of the window is free, not for each delivery. A single batch may be larger than the credit that is left, or than the
whole window: the broker then says what it needs (NEED), and gets it as soon as what waits here leaves room for it, in
the worst case when nothing waits any more.

A channel is opened without credit. The answer tells where the broker begins; only then is credit given. So a delivery
never comes before it is known where it belongs.

When a sealed segment has been delivered to its end, nothing more comes; but a subscription's channel still takes acks,
and still hears when its subscription is set to another place.

Everything that arrives is checked before anybody sees it: checksums, and that each batch begins where the last one
ended (I1). A delivery that fails the check ends the channel.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from braid.client.consuming.delivery import Part, ReceivedBatch, checked_parts
from braid.model.errors import BraidError, BrokenInvariant, InvalidArgument, ProtocolError
from braid.wire.frame import Frame
from braid.wire.link import Link, within
from braid.wire.operations import (
    END_OF_SEGMENT,
    Ack,
    Close,
    Closed,
    Credit,
    Delivery,
    ErrorBody,
    Kind,
    Need,
    Open,
    Opened,
    encode,
    error_from,
)

DEFAULT_WINDOW_BYTES: Final = 8 << 20
"""Enough that a broker can read ahead while the application works on what it has."""
MIN_WINDOW_BYTES: Final = 64 << 10
MAX_WINDOW_BYTES: Final = 1 << 30


class SegmentGrant(NamedTuple):
    """By which a consumer may read a segment for its subscription, as its assignment says. The owner of the segment
    lets nobody read by a lower one than it has seen."""

    subscription: str
    term: int
    grant: int


class _Arrived(NamedTuple):
    payload: memoryview
    parts: list[Part]


def checked_window(window_bytes: int | None) -> int:
    if window_bytes is None:
        return DEFAULT_WINDOW_BYTES
    if not MIN_WINDOW_BYTES <= window_bytes <= MAX_WINDOW_BYTES:
        raise InvalidArgument(f"window_bytes is {window_bytes}; choose {MIN_WINDOW_BYTES} to {MAX_WINDOW_BYTES}")
    return window_bytes


def credit_to_grant(window: int, waiting: int, credit: int, needed: int) -> int:
    """How many more bytes the broker may send: it has `credit` left, needs `needed` for its next batch (0: it did not
    say), and `waiting` bytes that it sent were not taken yet."""
    free = window - waiting - credit
    if needed > credit:
        if needed <= credit + free:
            return free
        return needed - credit if not waiting else 0
    return free if free >= window // 2 else 0


class ClientChannel:
    """Whoever makes one opens it. `on_news` is called when something arrived, or when the channel is over."""

    def __init__(self, link: Link, topic: str, segment: int, window: int, on_news: Callable[[], None]) -> None:
        self.link: Final = link
        self.number: Final = link.open_channel(self)
        self.topic: Final = topic
        self.segment: Final = segment
        self.begins = 0
        """Where the broker begins: at the subscription's cursor, or at the offset that was asked for."""
        self.placement = 0
        """Changes when the subscription is set to another place: what was known of it before counts no more."""
        self.end = 0
        """Where the segment ended when the broker last said so, as consumers see it."""
        self.ended = False
        """The segment is sealed, and all of it has arrived here."""
        self.over: BraidError | None = None
        """Why the channel is closed; None while it is open, and when it was closed because the segment has ended."""
        self.waiting_bytes = 0
        """What has arrived and was not taken."""
        self._window = window
        self._on_news = on_news
        self._arrived: deque[_Arrived] = deque()
        self._credit = 0
        self._needed = 0
        self._expected = 0
        """Where the next batch begins (I1)."""
        self._takes_acks = False
        self._wanted = 0
        """The first offset that is handed out next."""

    async def open(
        self, topic_id: int, *, timeout_s: float, read_grant: SegmentGrant | None = None, offset: int = 0
    ) -> None:
        """At the subscription's cursor, or without one at `offset`."""
        subscription, term, grant = read_grant if read_grant is not None else ("", 0, 0)
        request = Open(self.number, self.topic, topic_id, self.segment, 0, 0, offset, subscription, term, grant)
        try:
            opened = await self.link.ask(Kind.OPEN, encode(request), Opened, timeout_s)
        except BaseException:
            self.abandon()
            raise
        self.begins = self._expected = opened.offset
        self.end = opened.end
        self.placement = opened.placement
        self._takes_acks = read_grant is not None

    def begin(self, wanted: int) -> None:
        """Let the broker send. What it sends below `wanted` is left out: it may begin at a cursor that is behind what
        the application has already."""
        assert wanted >= self.begins, "what lies before the broker's position cannot be handed out"
        self._wanted = wanted
        self._grant()

    @property
    def working(self) -> bool:
        """Whether something may still come."""
        return self.over is None and not self.ended

    @property
    def delivered(self) -> bool:
        """Whether anything has come."""
        return self._expected > self.begins

    @property
    def has_batch(self) -> bool:
        return bool(self._arrived)

    def take(self) -> ReceivedBatch | None:
        """The oldest delivery that was not taken yet. Taking it makes room for others."""
        if not self._arrived:
            return None
        payload, parts = self._arrived.popleft()
        start, self._wanted = self._wanted, parts[-1].header.next_offset
        self.waiting_bytes -= len(payload)
        self._grant()
        return ReceivedBatch(self.topic, self.segment, payload, parts, start, self._wanted)

    def ack(self, offset: int) -> None:
        """Everything below `offset` is consumed. Nobody answers: an ack that is lost is sent again after reopening."""
        self.link.send(Kind.ACK, encode(Ack(self.number, offset)))

    async def ack_surely(self, offset: int, timeout_s: float, *, durable: bool) -> None:
        """Returns when the broker has taken the ack; if `durable`, when it is stored."""
        request = self.link.request(Kind.ACK, encode(Ack(self.number, offset, durable)))
        await within(request, timeout_s, f"the ack of segment {self.segment} of {self.topic} was not answered")

    async def close(self, timeout_s: float) -> None:
        """Give the channel up; what waits here is dropped."""
        request = self.abandon()
        await within(request, timeout_s, f"closing segment {self.segment} of {self.topic} was not answered")

    def abandon(self) -> asyncio.Future[Frame]:
        """Give the channel up without waiting for the broker's word; what waits here is dropped."""
        self.link.forget_channel(self.number)
        self._arrived.clear()
        self.waiting_bytes = 0
        request = self.link.request(Kind.CLOSE, encode(Close(self.number)))
        request.add_done_callback(_look_at)
        return request

    # What the link calls.

    def on_delivery(self, delivery: Delivery, payload: memoryview) -> None:
        if self.over is not None:
            return
        try:
            self._check_credit(len(payload))
            parts = checked_parts(payload)
            self._check_continuity(parts)
        except BraidError as error:
            self._give_up(error)
            return
        self.end = delivery.end
        self._needed = 0
        if parts[-1].header.next_offset <= self._wanted:
            self._grant()  # All of it was handed out before, or it is a control batch.
            return
        self.waiting_bytes += len(payload)
        self._arrived.append(_Arrived(payload, parts))
        self._on_news()

    def on_need(self, need: Need) -> None:
        self._needed = need.bytes
        self._grant()

    def on_closed(self, error: Closed | BraidError) -> None:
        if isinstance(error, Closed) and error.code == END_OF_SEGMENT:
            self.ended = True
        elif isinstance(error, Closed):
            self.over = error_from(ErrorBody(error.code, error.message, error.retriable))
        else:
            self.over = error
        if self.over is not None or not self._takes_acks:
            self.link.forget_channel(self.number)
        self._on_news()

    def _check_credit(self, size: int) -> None:
        if size > self._credit:
            raise ProtocolError(
                f"the broker sent {size} bytes of segment {self.segment} of {self.topic}, "
                f"but had credit for {self._credit}"
            )
        self._credit -= size

    def _check_continuity(self, parts: list[Part]) -> None:
        expected = self._expected
        first = parts[0].header
        if expected == self.begins and first.base_offset < expected < first.next_offset:
            expected = first.base_offset  # Batches come whole: the first one may begin earlier.
        for header, _ in parts:
            if header.base_offset != expected:
                raise BrokenInvariant(
                    f"I1: a batch of segment {self.segment} of {self.topic} begins at offset {header.base_offset}, "
                    f"the one before it ended at {expected}"
                )
            expected = header.next_offset
        self._expected = expected

    def _grant(self) -> None:
        grant = credit_to_grant(self._window, self.waiting_bytes, self._credit, self._needed)
        if grant and self.working:
            self._credit += grant
            self.link.send(Kind.CREDIT, encode(Credit(self.number, grant)))

    def _give_up(self, error: BraidError) -> None:
        self.over = error
        self.abandon()
        self._on_news()


def _look_at(future: asyncio.Future[Frame]) -> None:
    if not future.cancelled():
        future.exception()
