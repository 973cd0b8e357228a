"""The stream consumer: a subscription's records in order, shared with the other consumers of the subscription.

    JOIN ─► session ─► ASSIGN: segments ─► for each: OPEN a channel ─► receive ─► ack ─► ACK
    └─ at the topic's controller ─┘                  └─ at the segment's owner, wherever it goes ─┘

The controller gives each segment to one consumer, with a *read grant*: by this number the segment's owner knows which
consumer may read. One task keeps the session (group_session.py). One task for each assigned segment keeps a channel
open and gives the segment back when another consumer gets it. These tasks own all state here. The application only
takes records and leaves marks for its acks.

Session and channels do not depend on each other. When the controller is lost, the consumer joins the next controller
under the same name and gets the same segments; meanwhile it keeps reading. When a segment moves, its channel is opened
at the new owner; meanwhile the session and the other channels stay.

**Acks** are cumulative for each segment. An ack only leaves a mark; one ACK for all marks follows a few milliseconds
later. So after a crash of this program or of the broker, the last acked records may be delivered again. `flush_acks`
and `close` return when all acks are stored.

**After a lost channel** the consumer continues after the last record that it took, even if the broker's cursor is
lower: no record is delivered twice. An ack that found no channel, or was lost with its channel, goes first on the next
channel. In three cases the broker's position counts instead. A RESET says that the subscription was set to another
place. A cursor of another placement says that this happened while we were away, or that records were lost. And the
cursor may be beyond the last taken record. The consumer ignores an ack for a record that it delivered before such a
change: the ack would undo the change.

**When a segment goes to another consumer**, no more of its records are delivered. The application may still ack
delivered records for a while. Then the last ack is sent. The segment is given back only when the owner has this ack, so
the next consumer begins exactly there.

**At the end of a sealed segment** the channel stays open for acks. The last ack is sent immediately: the controller
waits for it, takes the segment back, and gives out the segment's children, to this consumer or to others. The map may
show the children a moment later than the controller does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

from braid.client.consuming.channel import ClientChannel, SegmentGrant, checked_window
from braid.client.consuming.consumer import Consumer, SegmentReader, closed_error, may_pass
from braid.client.consuming.delivery import ReceivedBatch
from braid.client.consuming.group_session import GroupSession
from braid.client.retry import Backoff, retrying
from braid.client.routing import OwnerSearch
from braid.model.errors import (
    BatchUnreadable,
    BraidError,
    InvalidArgument,
    NotServing,
    OffsetOutOfRange,
    SegmentNotFound,
)
from braid.model.message import Message
from braid.model.names import TopicName, check_name
from braid.ports.tasks import all_of, cancel
from braid.wire.operations import RESET, Assignment

if TYPE_CHECKING:
    from braid.client.client import Client

ACK_DELAY_S: Final = 0.005
"""How long marks gather before one ACK is sent."""
RELEASE_GRACE_S: Final = 5.0
"""How long the application may still ack records of a segment that goes to another consumer."""
LAST_ACK_S: Final = 3.0
"""How long the last ack of such a segment may take to reach the owner: the segment may be moving just then. Both
times together are well below the ten seconds after which the controller takes the segment away by itself."""

_JUMPS: Final = frozenset((RESET, OffsetOutOfRange.code))
"""The next channel begins elsewhere after these: the subscription was set to another place, or retention deleted
records that a slow consumer had not read."""

_log: Final = logging.getLogger(__name__)


class _StreamReader(SegmentReader):
    """A reader whose records are acked."""

    def __init__(self, segment: int, offset: int, placement: int) -> None:
        super().__init__(segment, offset)
        self.placement: Final = placement
        """The placement of the cursor at which the reader began."""
        self.acked = offset
        """The application has acked everything below this offset."""
        self.sent = offset
        """The last offset that was sent to the broker in an ACK."""
        self.stored = offset
        """The broker has stored acks up to here, as far as we know."""


class _AssignedSegment:
    """A segment of this consumer, from its assignment until the consumer gives it back."""

    def __init__(self, segment: int, read_grant: SegmentGrant, owner: OwnerSearch, repositions: Backoff) -> None:
        self.segment: Final = segment
        self.read_grant = read_grant
        self.owner: Final = owner
        self.repositions: Final = repositions
        """How long to wait between changes of position that follow each other."""
        self.channel: ClientChannel | None = None
        """Delivers records and takes acks."""
        self.revoked = False
        self.changed = asyncio.Event()
        """Set when the channel is over, the segment is revoked, or an ack was sent."""
        self.notified = asyncio.Event()
        """Set when the controller sends an assignment: the next attempt need not wait longer."""
        self.task: asyncio.Task[None] | None = None


class StreamConsumer(Consumer):
    """Consumes a subscription in order; `client.stream_consumer` makes it."""

    def __init__(
        self,
        client: Client,
        topic: TopicName,
        subscription: str,
        *,
        name: str = "",
        start: str,
        window_bytes: int | None = None,
    ) -> None:
        super().__init__(topic.path)
        if start not in ("earliest", "latest"):
            raise InvalidArgument(f"start is {start!r}; a new subscription begins at 'earliest' or 'latest'")
        self.subscription: Final = check_name("subscription", subscription)
        self.name: Final = check_name("consumer", name or f"consumer-{client.random.getrandbits(48):012x}")
        """Unique in the subscription: a second consumer of the same name replaces the first."""
        self._client = client
        self._window_bytes = checked_window(window_bytes)
        self._session = GroupSession(client, self.topic, self.subscription, self.name, start, self._on_assignment)
        self._read_grants: dict[int, SegmentGrant] = {}
        """The read grant of each segment that is assigned to this consumer."""
        self._readers: dict[int, _StreamReader] = {}
        self._assigned: dict[int, _AssignedSegment] = {}
        self._unsent: dict[int, _StreamReader] = {}
        self._ack_timer: asyncio.TimerHandle | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._final: BraidError | None = None
        """The error that ended the session for good, unless we closed it."""
        self._closed = False

    @property
    def segments(self) -> tuple[int, ...]:
        """The segments that are assigned to this consumer now."""
        return tuple(sorted(self._read_grants))

    # Acks.

    async def ack(self, acked: Message | ReceivedBatch) -> None:
        """Ack a message or batch, and everything before it in its segment. This only leaves a mark: see
        `flush_acks`."""
        self.check_usable()
        self.mark_acked(acked.segment, acked.next_offset if isinstance(acked, ReceivedBatch) else acked.offset + 1)

    def mark_acked(self, segment: int, offset: int) -> None:
        """Ack everything below `offset` in this segment. Ignored if the segment's present reader did not deliver it."""
        reader = self._readers.get(segment)
        if reader is None or not reader.acked < offset <= reader.delivered:
            return
        reader.acked = offset
        self._unsent[segment] = reader
        if reader.finished and offset == reader.delivered:
            self._send_acks()
        elif self._ack_timer is None:
            self._ack_timer = asyncio.get_running_loop().call_later(ACK_DELAY_S, self._send_acks)

    def _send_acks(self) -> None:
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None
        unsent, self._unsent = self._unsent, {}
        for segment, reader in unsent.items():
            assigned = self._assigned.get(segment)
            if assigned is None or self._readers.get(segment) is not reader:
                continue
            if assigned.channel is not None and assigned.channel.over is None:
                assigned.channel.ack(reader.acked)
                reader.sent = reader.acked
            assigned.changed.set()

    async def flush_acks(self) -> None:
        """Wait until all acks are stored: no consumer of the subscription gets the acked records again."""
        deadline = asyncio.get_running_loop().time() + self._client.timeout_s
        behind = [reader for reader in self._readers.values() if reader.stored < reader.acked]
        stores = (retrying(partial(self._store_ack, reader), deadline, self._client.backoff()) for reader in behind)
        await all_of(stores)

    async def _store_ack(self, reader: _StreamReader) -> None:
        if self._final is not None:
            raise self._final.again()
        if self._readers.get(reader.segment) is not reader:
            return  # The segment was given back with its last ack, or the subscription was set to another place.
        assigned = self._assigned.get(reader.segment)
        channel = assigned.channel if assigned is not None else None
        if channel is None or channel.over is not None:
            raise NotServing(f"segment {reader.segment} of {self.topic} is being opened again; its acks wait for that")
        offset = reader.acked
        await channel.ack_surely(offset, self._client.timeout_s, durable=True)
        reader.sent = max(reader.sent, offset)
        reader.stored = max(reader.stored, offset)

    def _way_past(self, error: BatchUnreadable) -> str:
        place = f"{{{error.segment}: {error.next_offset}}}"
        return (
            f"To skip them: await client.admin.seek({self.topic!r}, {self.subscription!r}, {place}), or braid "
            f"subscription seek {self.topic} {self.subscription} --offset {error.segment}:{error.next_offset}"
        )

    # The session.

    async def _begin(self) -> None:
        self._client.add_consumer(self)
        try:
            await self._session.join_until(asyncio.get_running_loop().time() + self._client.timeout_s)
        except BaseException:
            self._client.forget_consumer(self)
            raise
        if self._failure is not None:  # It was closed meanwhile.
            await self._let_go()
            await self._session.leave()
            raise self._failure.again()
        self._keeper = asyncio.get_running_loop().create_task(self._keep_session(), name=f"consumer {self.name}")

    async def close(self) -> None:
        """Store all acks, then leave the subscription. Other consumers get its segments immediately."""
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
            # No channel is left, so a task that still waits for a stored ack must fail.
            self._final = self._final or closed_error("the consumer")
            await self._session.leave()

    async def end(self) -> None:
        self._closed = True
        self._client.forget_consumer(self)
        self._fail(closed_error("the consumer"))
        await self._end_tasks()

    async def _end_tasks(self) -> None:
        self._session.end()
        await self._end_opening()
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None
        if self._keeper is not None:
            await cancel([self._keeper])
        await self._let_go()

    async def _let_go(self) -> None:
        """End all tasks and channels. The readers stay: they know what the application got."""
        self._session.ignore()  # No assignment may arrive meanwhile.
        tasks = [assigned.task for assigned in self._assigned.values() if assigned.task is not None]
        await cancel(tasks)  # `close` may cancel the keeper here, and does the rest itself.
        all_assigned, self._assigned = self._assigned, {}
        for assigned in all_assigned.values():
            if assigned.channel is not None:
                assigned.channel.abandon()
            if (reader := self._readers.get(assigned.segment)) is not None:
                reader.channel = None

    async def _keep_session(self) -> None:
        """Keep the session. While it joins again, reading continues."""
        try:
            await self._session.keep()
        except BraidError as error:
            self._final = error
            self._fail(error)
            await self._let_go()
            await self._session.leave()

    # One segment.

    def _on_assignment(self, assignment: Assignment) -> None:
        self._read_grants = {
            segment: SegmentGrant(self.subscription, assignment.term, grant)
            for segment, grant in zip(assignment.segments, assignment.grants, strict=True)
        }
        for segment, read_grant in self._read_grants.items():
            assigned = self._assigned.get(segment)
            if assigned is None:
                self._take_up(segment)
            else:  # If it is being given back, the new grant lets the last ack reach the owner.
                assigned.read_grant = read_grant
                assigned.notified.set()
        for segment, assigned in self._assigned.items():
            if segment not in self._read_grants:
                assigned.revoked = True
                assigned.changed.set()
                assigned.notified.set()
                self._stop_handing_out(segment)

    def _take_up(self, segment: int) -> None:
        client = self._client
        owner = OwnerSearch(client.routing, self.topic, segment, client.backoff())
        assigned = self._assigned[segment] = _AssignedSegment(
            segment, self._read_grants[segment], owner, client.backoff()
        )
        assigned.task = asyncio.get_running_loop().create_task(self._hold(assigned), name=f"segment {segment}")

    def _stop_handing_out(self, segment: int) -> None:
        if (reader := self._readers.get(segment)) is not None:
            reader.end()

    def _forget(self, segment: int) -> None:
        self._stop_handing_out(segment)
        self._readers.pop(segment, None)

    async def _hold(self, assigned: _AssignedSegment) -> None:
        """Keep a channel open until the segment is revoked, then give it back."""
        try:
            while not assigned.revoked:
                try:
                    await self._open(assigned)
                    error = await self._channel_over(assigned)
                except BraidError as failure:
                    error = failure
                if error is None or assigned.revoked:
                    continue
                if error.code in _JUMPS:
                    await self._reposition(assigned)
                else:
                    await self._pause(assigned, error)
            await self._give_back(assigned)
        except BraidError as error:
            self._session.on_session_lost(error)  # The keeper leaves the group, so other consumers get the segments.

    async def _open(self, assigned: _AssignedSegment) -> None:
        segment = assigned.segment
        assigned.channel = None
        assigned.channel = channel = await self._open_channel(assigned)
        reader = self._readers.get(segment)
        if reader is not None and not _may_go_on(reader, channel):
            self._forget(segment)
            reader = None
        if reader is None:
            reader = self._readers[segment] = _StreamReader(segment, channel.begins, channel.placement)
        elif reader.acked > channel.begins:
            channel.ack(reader.acked)
            reader.sent = reader.acked
        reader.stored = min(reader.stored, channel.begins)
        reader.channel = channel
        channel.begin(reader.taken)

    async def _open_channel(self, assigned: _AssignedSegment) -> ClientChannel:
        segment = assigned.segment
        assigned.notified.clear()  # An assignment from now on is a reason for another attempt.
        link = await assigned.owner.link()
        channel = ClientChannel(link, self.topic, segment, self._window_bytes, lambda: self._on_news(assigned, channel))
        await channel.open(self._session.topic_id, read_grant=assigned.read_grant, timeout_s=self._client.timeout_s)
        return channel

    async def _channel_over(self, assigned: _AssignedSegment) -> BraidError | None:
        """Wait until the channel is over or the segment is revoked. Returns the channel's error, if any."""
        channel = assigned.channel
        assert channel is not None
        while channel.over is None and not assigned.revoked:
            assigned.changed.clear()
            await assigned.changed.wait()
        return channel.over

    def _on_news(self, assigned: _AssignedSegment, channel: ClientChannel) -> None:
        if channel.over is not None:
            assigned.changed.set()
        if channel.over is not None and channel.over.code in _JUMPS and assigned.channel is channel:
            self._forget(assigned.segment)
        reader = self._readers.get(assigned.segment)
        if reader is not None and reader.channel is channel:
            self._arrived(reader)

    async def _pause(self, assigned: _AssignedSegment, error: BraidError) -> None:
        """Wait for a reason to try again: another owner, an assignment, or the end of a pause."""
        if not _may_pass(error):
            raise error
        if assigned.channel is not None and assigned.channel.delivered:
            assigned.owner.worked()
        loop = asyncio.get_running_loop()
        reasons = (loop.create_task(assigned.owner.after(error)), loop.create_task(assigned.notified.wait()))
        try:
            await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
            if reasons[0].done():
                reasons[0].result()
        except BraidError as failure:
            if not _may_pass(failure):
                raise
        finally:
            await cancel(reasons)

    async def _reposition(self, assigned: _AssignedSegment) -> None:
        """Forget the position. Wait before the next attempt only if nothing was delivered since the last change."""
        self._forget(assigned.segment)
        if assigned.channel is not None and assigned.channel.delivered:
            assigned.repositions.reset()
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(assigned.repositions.next()):
                await assigned.notified.wait()

    async def _give_back(self, assigned: _AssignedSegment) -> None:
        segment = assigned.segment
        reader = self._readers.get(segment)
        if reader is not None:
            self._stop_handing_out(segment)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RELEASE_GRACE_S):
                    while reader.acked < reader.delivered and self._readers.get(segment) is reader:
                        assigned.changed.clear()
                        await assigned.changed.wait()
        try:
            async with asyncio.timeout(LAST_ACK_S):
                await self._end_channel(assigned, reader if self._readers.get(segment) is reader else None)
        except (BraidError, TimeoutError) as error:
            _log.warning("segment %s of %s is given back without its last ack: %r", segment, self.topic, error)
        self._forget(segment)
        await self._session.release(segment)
        if self._assigned.get(segment) is assigned:
            del self._assigned[segment]
            if segment in self._read_grants:
                self._take_up(segment)

    async def _end_channel(self, assigned: _AssignedSegment, reader: _StreamReader | None) -> None:
        """Close the channel when the owner has the last ack. If the channel was lost before, open another for the
        ack."""
        timeout_s = self._client.timeout_s
        while True:
            channel = assigned.channel
            try:
                if channel is None or channel.over is not None:
                    if (
                        reader is None
                        or reader.acked <= reader.stored
                        or self._readers.get(assigned.segment) is not reader
                    ):
                        return
                    channel = assigned.channel = await self._open_channel(assigned)
                    reader.sent = channel.begins
                if reader is not None and reader.acked > reader.sent and reader.placement == channel.placement:
                    await channel.ack_surely(reader.acked, timeout_s, durable=False)
                await channel.close(timeout_s)
            except BraidError as error:
                if assigned.channel is not None:  # A channel that is being closed does not hear of its end.
                    assigned.channel.abandon()
                    assigned.channel = None
                await self._pause(assigned, error)
            else:
                return


def _may_go_on(reader: _StreamReader, channel: ClientChannel) -> bool:
    """Whether the reader's own position counts, and not the position at which the broker opened the channel."""
    return reader.valid and reader.placement == channel.placement and channel.begins <= reader.taken


def _may_pass(error: BraidError) -> bool:
    """Whether trying again may help. A segment that a broker does not know is new: the controller knows it."""
    return may_pass(error) or isinstance(error, SegmentNotFound)
