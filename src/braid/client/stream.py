"""The stream consumer: a subscription's records in order, shared with the other consumers of the subscription.

    JOIN ─► session ─► ASSIGN: segments ─► for each: OPEN a channel ─► receive ─► ack ─► ACK

The broker gives each segment to one consumer. One task keeps the session, and one for each assigned segment keeps a
channel open and gives the segment back when it goes to somebody else. They own all state here; applications only take
what arrived and leave marks of what they have done with it.

**Acks** are cumulative for each segment and only leave a mark; one ACK for all marks follows a few milliseconds later.
A crash of this program or of the broker can so deliver again what was acked last. `flush_acks` and `close` return when
everything that was acked is stored.

**After a lost connection** the session is joined again under the same name, and each segment goes on behind the last
record that was taken, even if the broker's cursor is behind it: no record is handed out twice. Two things make the
broker's position count instead: a RESET, which tells that the subscription was set to another place, and a cursor that
cannot come from our acks, because it lies before what was stored or behind what was taken. An ack for something that
was handed out before such a jump is ignored; it would undo it.

**When a segment goes to another consumer**, nothing more of it is handed out. What was handed out may still be acked
for a while, then the last ack is sent, and only when the broker has it is the segment given back: the next consumer
begins exactly there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

from braid.client.channel import Channel, checked_window
from braid.client.consumer import Consumer, Feed, closed_error, may_pass
from braid.client.link import Link, within
from braid.client.received import ReceivedBatch
from braid.client.retry import retrying
from braid.model.errors import (
    BraidError,
    InvalidArgument,
    NotServing,
    OffsetOutOfRange,
    TopicNotFound,
)
from braid.model.message import Message
from braid.model.names import TopicName, check_name
from braid.wire.frame import Frame
from braid.wire.operations import RESET, Assignment, Join, Joined, Kind, Leave, Release, decode, encode

if TYPE_CHECKING:
    from braid.client.client import Client

ACK_DELAY_S: Final = 0.005
"""Marks gather for so long before they are sent."""
RELEASE_GRACE_S: Final = 5.0
"""How long the application may take to ack what it has of a segment that goes to another consumer. Well below the ten
seconds after which brokers take it away unasked."""
OPEN_ATTEMPTS: Final = 6
"""After so many refusals in a row, about a second, the session itself may be what the broker does not know any more:
joining again finds out."""

_JUMPS: Final = frozenset((RESET, OffsetOutOfRange.code))
"""Why the next channel begins elsewhere: somebody set the subscription to another place, or retention, where it may,
overtook a slow consumer."""

_log: Final = logging.getLogger(__name__)


class _StreamFeed(Feed):
    """A feed whose records are acked."""

    def __init__(self, segment: int, offset: int) -> None:
        super().__init__(segment, offset)
        self.acked = offset
        """What the application acked: everything below."""
        self.sent = offset
        """What the broker was told."""
        self.stored = offset
        """What the broker has stored, as far as we know."""


class _Holding:
    """A segment that the session has, from its assignment until it is given back."""

    def __init__(self, segment: int) -> None:
        self.segment: Final = segment
        self.channel: Channel | None = None
        """Takes the acks, and delivers unless the segment has ended."""
        self.revoked = False
        self.changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class StreamConsumer(Consumer):
    """Made by `client.stream_consumer`."""

    def __init__(
        self,
        client: Client,
        topic: TopicName,
        subscription: str,
        *,
        name: str = "",
        start: str = "latest",
        window_bytes: int | None = None,
    ) -> None:
        super().__init__(topic.path)
        if start not in ("earliest", "latest"):
            raise InvalidArgument(f"start is {start!r}; a new subscription begins at 'earliest' or 'latest'")
        self.subscription: Final = check_name("subscription", subscription)
        self.name: Final = check_name("consumer", name or f"consumer-{client.random.getrandbits(48):012x}")
        """Unique in the subscription: a second consumer of the same name takes the first one's place."""
        self._client = client
        self._start = start
        self._window_bytes = checked_window(window_bytes)
        self._topic_id = 0
        self._link: Link | None = None
        self._session = 0
        self._assignment = 0
        self._assigned: frozenset[int] = frozenset()
        self._session_lost: asyncio.Future[BraidError] | None = None
        self._feeds: dict[int, _StreamFeed] = {}
        self._holdings: dict[int, _Holding] = {}
        self._unsent: dict[int, _StreamFeed] = {}
        self._ack_timer: asyncio.TimerHandle | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._final: BraidError | None = None
        """Why the session is over for good, unless we closed it."""
        self._closed = False

    @property
    def segments(self) -> tuple[int, ...]:
        """The segments that are assigned to this consumer now."""
        return tuple(sorted(self._assigned))

    # Acks.

    async def ack(self, acked: Message | ReceivedBatch) -> None:
        """This and everything before it in its segment is done. Only leaves a mark: see `flush_acks`."""
        self.check_usable()
        self.mark_acked(acked.segment, acked.next_offset if isinstance(acked, ReceivedBatch) else acked.offset + 1)

    def mark_acked(self, segment: int, offset: int) -> None:
        """Everything below `offset` in this segment is done. Ignored if that was not handed out by the feed that the
        segment has now."""
        feed = self._feeds.get(segment)
        if feed is None or not feed.acked < offset <= feed.handed:
            return
        feed.acked = offset
        self._unsent[segment] = feed
        if self._ack_timer is None:
            self._ack_timer = asyncio.get_running_loop().call_later(ACK_DELAY_S, self._send_acks)

    def _send_acks(self) -> None:
        self._ack_timer = None
        unsent, self._unsent = self._unsent, {}
        for segment, feed in unsent.items():
            holding = self._holdings.get(segment)
            if holding is None or self._feeds.get(segment) is not feed:
                continue
            if holding.channel is not None and holding.channel.over is None:
                holding.channel.ack(feed.acked)
                feed.sent = feed.acked
            holding.changed.set()

    async def flush_acks(self) -> None:
        """Returns when everything that was acked is stored: no consumer of the subscription will get it again."""
        deadline = asyncio.get_running_loop().time() + self._client.timeout_s
        behind = [feed for feed in self._feeds.values() if feed.stored < feed.acked]
        stores = (retrying(partial(self._store_ack, feed), deadline, self._client.backoff()) for feed in behind)
        await asyncio.gather(*stores)

    async def _store_ack(self, feed: _StreamFeed) -> None:
        if self._final is not None:
            raise self._final.again()
        if self._feeds.get(feed.segment) is not feed:
            return  # It was given back with its last ack, or the subscription was set to another place.
        holding = self._holdings.get(feed.segment)
        channel = holding.channel if holding is not None else None
        if channel is None or channel.over is not None:
            raise NotServing(f"segment {feed.segment} of {self.topic} is being opened again; its acks wait for that")
        offset = feed.acked
        await channel.ack_surely(offset, self._client.timeout_s, durable=True)
        feed.sent = max(feed.sent, offset)
        feed.stored = max(feed.stored, offset)

    # The session.

    async def start(self) -> None:
        if self._closed:
            raise closed_error("the consumer")
        if self._keeper is not None:
            return
        deadline = asyncio.get_running_loop().time() + self._client.timeout_s
        self._client.add_consumer(self)
        try:
            await retrying(self._join, deadline, self._client.backoff())
        except BaseException:
            self._client.forget_consumer(self)
            raise
        self._keeper = asyncio.get_running_loop().create_task(self._keep_session(), name=f"consumer {self.name}")

    async def close(self) -> None:
        """Store what was acked, then leave the subscription: its segments go to others at once."""
        if self._closed:
            return
        self._closed = True
        self._client.forget_consumer(self)
        self._fail(closed_error("the consumer"))
        try:
            if self._final is None:
                await self.flush_acks()
        finally:
            await self._end_tasks()
            await self._leave()

    async def _leave(self) -> None:
        link, self._link = self._link, None
        if link is None:
            return
        with contextlib.suppress(BraidError):  # A session that cannot be ended ends by itself, after its grace.
            await within(link.request(Kind.LEAVE, encode(Leave(self._session))), self._client.timeout_s, "LEAVE")

    async def _end_tasks(self) -> None:
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None
        if self._keeper is not None:
            await _ended(self._keeper)
        await self._let_go()

    async def _let_go(self) -> None:
        """Hold nothing. The feeds stay: they know how far the application has come."""
        if self._link is not None:
            self._link.forget_session(self._session)  # No assignment may come in between.
        holdings, self._holdings = self._holdings, {}
        for holding in holdings.values():
            if holding.task is not None:
                await _ended(holding.task)
            if holding.channel is not None:
                holding.channel.abandon()
            if (feed := self._feeds.get(holding.segment)) is not None:
                feed.channel = None

    async def _keep_session(self) -> None:
        """Join again whenever the session is lost, until that cannot work."""
        backoff = self._client.backoff()
        try:
            while True:
                assert self._session_lost is not None
                error = await self._session_lost
                if not may_pass(error):
                    raise error.again()
                _log.warning("consumer %s of %s lost its session and joins again: %s", self.name, self.topic, error)
                await self._let_go()
                backoff.reset()
                while True:
                    await asyncio.sleep(backoff.next())
                    try:
                        await self._join()
                        break
                    except BraidError as failure:
                        if not may_pass(failure):
                            raise
        except BraidError as error:
            self._final = error
            self._fail(error)
            await self._let_go()
            await self._leave()

    async def _join(self) -> None:
        again = self._topic_id != 0
        link = await self._client.pool.any()
        # A subscription that was deleted while we were away must not come back at another place.
        body = encode(Join(self.topic, self.subscription, self.name, self._start, create=not again))
        request = link.request(Kind.JOIN, body)
        try:
            frame = await within(asyncio.shield(request), self._client.timeout_s, "JOIN was not answered")
        except BaseException:
            request.add_done_callback(lambda late: _leave_late(link, late))
            raise
        joined = decode(Joined, frame.body)
        if again and joined.topic_id != self._topic_id:
            link.send(Kind.LEAVE, encode(Leave(joined.session)))
            raise TopicNotFound(
                f"topic {self.topic} was deleted and created again; make another consumer for the new one"
            )
        if not link.alive:
            raise link.connection.end_reason().again()
        self._topic_id = joined.topic_id
        self._link, self._session, self._assignment = link, joined.session, 0
        self._session_lost = asyncio.get_running_loop().create_future()
        link.open_session(joined.session, self)

    # What the link calls.

    def on_assignment(self, assignment: Assignment) -> None:
        if assignment.number <= self._assignment:
            return
        first, self._assignment = self._assignment == 0, assignment.number
        self._assigned = frozenset(assignment.segments)
        for segment in assignment.segments:
            if segment not in self._holdings:
                self._take_up(segment)
        for segment, holding in self._holdings.items():
            if segment not in self._assigned:
                holding.revoked = True
                holding.changed.set()
                self._stop_handing_out(segment)
        if first:  # Of what an earlier session had, this may be less.
            for segment in self._feeds.keys() - self._assigned:
                self._forget(segment)

    def on_session_lost(self, error: BraidError) -> None:
        self._assigned = frozenset()
        if self._session_lost is not None and not self._session_lost.done():
            self._session_lost.set_result(error)

    # One segment.

    def _take_up(self, segment: int) -> None:
        holding = self._holdings[segment] = _Holding(segment)
        holding.task = asyncio.get_running_loop().create_task(self._hold(holding), name=f"segment {segment}")

    def _stop_handing_out(self, segment: int) -> None:
        if (feed := self._feeds.get(segment)) is not None:
            feed.end()

    def _forget(self, segment: int) -> None:
        self._stop_handing_out(segment)
        self._feeds.pop(segment, None)

    async def _hold(self, holding: _Holding) -> None:
        """Keep a channel open until the segment is revoked, then give it back."""
        backoff = self._client.backoff()
        refusals = 0
        try:
            while not holding.revoked:
                try:
                    await self._open(holding)
                    refusals = 0
                    error = await self._channel_over(holding)
                except BraidError as failure:
                    error = failure
                    refusals += 1
                if error is None or holding.revoked:
                    continue
                if error.code in _JUMPS:
                    self._forget(holding.segment)
                elif not may_pass(error) or refusals == OPEN_ATTEMPTS:
                    raise error
                else:
                    if holding.channel is not None and holding.channel.delivered:
                        backoff.reset()
                    await self._pause(backoff.next())
            await self._give_back(holding)
        except BraidError as error:
            self.on_session_lost(error)  # The keeper joins again, or leaves, so that others get the segments.

    async def _open(self, holding: _Holding) -> None:
        timeout_s = self._client.timeout_s
        segment = holding.segment
        link = await self._client.routing.owner_link(self.topic, segment)
        channel = Channel(link, self.topic, segment, self._window_bytes, lambda: self._on_news(holding, channel))
        holding.channel = None
        await channel.open(self._topic_id, session=self._session, offset=0, timeout_s=timeout_s)
        holding.channel = channel
        feed = self._feeds.get(segment)
        # A segment that ends before what was taken has lost its tail, as a topic that does not sync may.
        if feed is not None and not (feed.valid and feed.stored <= channel.begins <= feed.taken <= channel.end):
            self._forget(segment)
            feed = None
        if feed is None:
            feed = self._feeds[segment] = _StreamFeed(segment, channel.begins)
        elif feed.acked > channel.begins:
            channel.ack(feed.acked)
            feed.sent = feed.acked
        if feed.channel is None or not feed.channel.ended:
            feed.channel = channel
            channel.begin(feed.taken)

    async def _channel_over(self, holding: _Holding) -> BraidError | None:
        """Returns when there is something to do about the channel: its error, or None when it was revoked or has
        ended. A segment that has ended gets one more channel, without credit, which only takes acks."""
        channel = holding.channel
        assert channel is not None
        while channel.working and not holding.revoked:
            holding.changed.clear()
            await holding.changed.wait()
        return channel.over

    def _on_news(self, holding: _Holding, channel: Channel) -> None:
        if not channel.working:
            holding.changed.set()
        if channel.over is not None and channel.over.code in _JUMPS and holding.channel is channel:
            self._forget(holding.segment)
        feed = self._feeds.get(holding.segment)
        if feed is not None and feed.channel is channel:
            self._arrived(feed)

    async def _pause(self, delay_s: float) -> None:
        """Wait before the next attempt, with a fresh map: the segment may have another owner."""
        await asyncio.sleep(delay_s)
        with contextlib.suppress(BraidError):
            await self._client.routing.refresh(self.topic)

    async def _give_back(self, holding: _Holding) -> None:
        segment = holding.segment
        feed = self._feeds.get(segment)
        channel = holding.channel
        if feed is not None and channel is not None:
            self._stop_handing_out(segment)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RELEASE_GRACE_S):
                    while feed.acked < feed.handed and channel.over is None:
                        holding.changed.clear()
                        await holding.changed.wait()
        link, session = self._link, self._session
        try:
            if channel is not None and channel.over is None:
                if feed is not None and feed.acked > feed.sent:
                    await channel.ack_surely(feed.acked, self._client.timeout_s, durable=False)
                await channel.close(self._client.timeout_s)
        except BraidError as error:
            _log.warning("segment %s of %s is given back without its last ack: %s", segment, self.topic, error)
        self._forget(segment)
        with contextlib.suppress(BraidError):  # A broker that does not hear it takes the segment away by itself.
            if link is not None:
                request = link.request(Kind.RELEASE, encode(Release(session, segment)))
                await within(request, self._client.timeout_s, "RELEASE")
        if self._holdings.get(segment) is holding:
            del self._holdings[segment]
            if segment in self._assigned:
                self._take_up(segment)


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))


def _leave_late(link: Link, request: asyncio.Future[Frame]) -> None:
    """Nobody waits for this JOIN any more. If it worked after all, the session must not keep segments."""
    if not request.cancelled() and request.exception() is None:
        link.send(Kind.LEAVE, encode(Leave(decode(Joined, request.result().body).session)))
