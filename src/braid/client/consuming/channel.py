"""One channel: one segment's batches on their way from its owner to this client.

The broker sends only as many bytes as it has credit for. Credit and waiting bytes together never exceed the window, so
a consumer that stops reading costs one window for each segment (I12). The client gives credit back when half of the
window is free, not after each delivery. A single batch may be larger than the remaining credit, or than the whole
window. The broker then says how much it needs (NEED), and gets this credit when the waiting deliveries leave room; at
the latest, when nothing waits.

A channel is opened without credit. The reply says at which offset the broker begins; only then does the client give
credit. So no delivery arrives before its place is known.

After a sealed segment was delivered to its end, no more deliveries come. But a subscription's channel still takes acks,
and still hears when its subscription is set to another place.

The client checks every delivery before the application sees it: the checksums, and that each batch begins where the
last one ended (I1). A delivery that fails a check ends the channel.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from braid.client.consuming.delivery import BatchSlice, ReceivedBatch, checked_slices, decoded_run
from braid.model.errors import BraidError, BrokenInvariant, InvalidArgument, ProtocolError
from braid.model.log.epochs import UNKNOWN_EPOCH
from braid.model.subscription import is_group
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
"""Enough for a broker to read ahead while the application works on its records."""
MIN_WINDOW_BYTES: Final = 64 << 10
MAX_WINDOW_BYTES: Final = 1 << 30


class SegmentGrant(NamedTuple):
    """Lets a consumer read a segment for its subscription, or for its group; it comes with the assignment. The owner of
    the segment refuses a grant that is lower than one it has seen."""

    subscription: str
    term: int
    grant: int


class _Arrived(NamedTuple):
    payload: memoryview
    slices: list[BatchSlice]
    size: int
    """Bytes of the payload that were not taken."""


def checked_window(window_bytes: int | None) -> int:
    if window_bytes is None:
        return DEFAULT_WINDOW_BYTES
    if not MIN_WINDOW_BYTES <= window_bytes <= MAX_WINDOW_BYTES:
        raise InvalidArgument(f"window_bytes is {window_bytes}; choose {MIN_WINDOW_BYTES} to {MAX_WINDOW_BYTES}")
    return window_bytes


def credit_to_grant(window: int, waiting: int, credit: int, needed: int) -> int:
    """Return how many more bytes the broker may send. It has `credit` left and needs `needed` for its next batch (0: it
    did not say); `waiting` bytes that it sent were not taken yet."""
    free = window - waiting - credit
    if needed > credit:
        if needed <= credit + free:
            return free
        return needed - credit if not waiting else 0
    return free if free >= window // 2 else 0


class ClientChannel:
    """The consumer's end of a channel. `on_news` is called when something arrived, or when the channel is over."""

    def __init__(self, link: Link, topic: str, segment: int, window: int, on_news: Callable[[], None]) -> None:
        self.link: Final = link
        self.number: Final = link.open_channel(self)
        self.topic: Final = topic
        self.segment: Final = segment
        self.begins = 0
        """The offset at which the broker begins: the subscription's cursor, or the offset of the request."""
        self.placement = 0
        """Changes when the subscription is set to another place: older positions no longer count."""
        self.end = 0
        """The end of the segment, as consumers see it, when the broker last sent it."""
        self.ended = False
        """Whether the segment is sealed and all of it has arrived."""
        self.over: BraidError | None = None
        """The error that closed the channel. None while it is open, and when the end of the segment closed it."""
        self.waiting_bytes = 0
        """Bytes that have arrived and were not taken."""
        self._window = window
        self._on_news = on_news
        self._arrived: deque[_Arrived] = deque()
        self._credit = 0
        self._needed = 0
        self._expected = 0
        """The offset at which the next batch must begin (I1)."""
        self._takes_acks = False
        self._wanted = 0
        """The offset from which the next delivery is handed out."""

    async def open(
        self,
        topic_id: int,
        *,
        timeout_s: float,
        read_grant: SegmentGrant | None = None,
        offset: int = 0,
        after_epoch: int = UNKNOWN_EPOCH,
    ) -> None:
        """Open the channel at the subscription's cursor. For a group of checkpoint consumers, and without a
        subscription, open it at `offset`, if the record before it is the one that was read in `after_epoch`."""
        subscription, term, grant = read_grant if read_grant is not None else ("", 0, 0)
        request = Open(
            self.number, self.topic, topic_id, self.segment, 0, 0, offset, subscription, term, grant, after_epoch
        )
        try:
            opened = await self.link.ask(Kind.OPEN, encode(request), Opened, timeout_s)
        except BaseException:
            self.abandon()
            raise
        self.begins = self._expected = opened.offset
        self.end = opened.end
        self.placement = opened.placement
        self._takes_acks = read_grant is not None and not is_group(subscription)

    def begin(self, wanted: int) -> None:
        """Let the broker send. Records below `wanted` are left out: the broker's cursor may be lower than the
        application's position."""
        assert wanted >= self.begins, "what lies before the broker's position cannot be handed out"
        self._wanted = wanted
        self._grant()

    @property
    def working(self) -> bool:
        """Whether deliveries may still come."""
        return self.over is None and not self.ended

    @property
    def delivered(self) -> bool:
        """Whether anything has arrived."""
        return self._expected > self.begins

    @property
    def has_batch(self) -> bool:
        return bool(self._arrived)

    def take(self) -> ReceivedBatch | None:
        """Return the oldest delivery that was not taken yet, or the part of it that may be decoded together. This makes
        room for others."""
        if not self._arrived:
            return None
        payload, slices, size = self._arrived.popleft()
        batches = decoded_run(slices)
        if batches < len(slices):
            rest, slices = slices[batches:], slices[:batches]
            rest_size = len(payload) - rest[0].position
            self._arrived.appendleft(_Arrived(payload, rest, rest_size))
            size -= rest_size
        start, self._wanted = self._wanted, slices[-1].header.next_offset
        self.waiting_bytes -= size
        self._grant()
        return ReceivedBatch(self.topic, self.segment, payload, slices, start, self._wanted)

    def ack(self, offset: int) -> None:
        """Ack everything below `offset`, without a reply. A lost ack is sent again on the next channel."""
        self.link.send(Kind.ACK, encode(Ack(self.number, offset)))

    async def ack_surely(self, offset: int, timeout_s: float, *, durable: bool) -> None:
        """Ack everything below `offset`, and wait until the broker has the ack; if `durable`, until it is stored."""
        request = self.link.request(Kind.ACK, encode(Ack(self.number, offset, durable)))
        await within(request, timeout_s, f"the ack of segment {self.segment} of {self.topic} was not answered")

    async def close(self, timeout_s: float) -> None:
        """Close the channel and drop the waiting deliveries."""
        request = self.abandon()
        await within(request, timeout_s, f"closing segment {self.segment} of {self.topic} was not answered")

    def abandon(self) -> asyncio.Future[Frame]:
        """Close the channel without waiting for the broker's reply, and drop the waiting deliveries."""
        self.link.forget_channel(self.number)
        self._arrived.clear()
        self.waiting_bytes = 0
        request = self.link.request(Kind.CLOSE, encode(Close(self.number)))
        request.add_done_callback(_look_at)
        return request

    # Called by the link.

    def on_delivery(self, delivery: Delivery, payload: memoryview) -> None:
        if self.over is not None:
            return
        try:
            self._check_credit(len(payload))
            slices = checked_slices(payload)
            self._check_continuity(slices)
        except BraidError as error:
            self._give_up(error)
            return
        self.end = delivery.end
        self._needed = 0
        if slices[-1].header.next_offset <= self._wanted:
            self._grant()  # All its records were handed out before, or it is a control batch.
            return
        if slices[0].header.next_offset <= self._wanted:
            slices = [each for each in slices if each.header.next_offset > self._wanted]
        self.waiting_bytes += len(payload)
        self._arrived.append(_Arrived(payload, slices, len(payload)))
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

    def _check_continuity(self, slices: list[BatchSlice]) -> None:
        expected = self._expected
        first = slices[0].header
        if expected == self.begins and first.base_offset < expected < first.next_offset:
            expected = first.base_offset  # Batches travel whole: the first may begin earlier.
        for header, _ in slices:
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
