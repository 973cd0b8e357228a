"""What may be asked of a segment wherever it is served: its ends, its cursors, to place or remove one, and to let
joined chunks take the place of small ones.

Any broker takes any call. What needs a segment asks for it here and does not care whose it is: an own one is asked
directly (`LocalAccess`), another one through its owner (`RemoteAccess`, which arrives at the owner's `LocalAccess`).

Segments move, and brokers come and go while somebody asks. `AnywhereAccess` finds the owner by the view for every
attempt. When nobody serves the segment, or the owner refuses because it has just given it away, or does not answer, it
waits for news in the view and tries again, as long as its patience lasts. So a seek in the middle of a move just takes
a little longer. Everything here can be repeated: a seek whose answer was lost is asked for once more, and recognises
its own work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

import msgspec

from braid.broker.error_mapping import told_to_clients
from braid.broker.peers.calls import Arguments, PeerCalls
from braid.broker.segments.cursors import Cursors
from braid.cluster.members import Members
from braid.cluster.owners import Owners
from braid.model.errors import (
    BraidError,
    ConditionFailed,
    ConnectFailed,
    ConnectionLost,
    Fenced,
    LogClosed,
    MetadataUncertain,
    Moved,
    NotServing,
    Overloaded,
    ShuttingDown,
    SubscriptionNotFound,
    TimedOut,
    TopicNotFound,
)
from braid.model.ids import Offset
from braid.model.names import SegmentName
from braid.model.ownership import OwnershipState
from braid.model.subscription import Placing
from braid.wire.operations import RESET, SegmentPositions

PATIENCE_S: Final = 15.0
"""A move takes a second or so; a broker that starts again, some more."""
ATTEMPT_S: Final = 5.0
FIRST_PAUSE_S: Final = 0.02
MAX_PAUSE_S: Final = 0.5
"""For what the view does not tell: a broker that cannot be reached, a segment that is being opened."""
AWAY: Final = (NotServing, Moved, ShuttingDown, Overloaded, ConnectFailed, ConnectionLost, TimedOut)
"""What says that the segment may be found later, or elsewhere."""

T = TypeVar("T")


class Segment(Protocol):
    """What is asked of a served segment."""

    @property
    def name(self) -> SegmentName: ...

    @property
    def topic_id(self) -> int: ...

    @property
    def cursors(self) -> Cursors: ...

    @property
    def earliest(self) -> Offset: ...

    @property
    def end(self) -> Offset: ...

    @property
    def sealed(self) -> bool: ...

    async def sync_to(self, offset: Offset) -> None: ...

    async def offset_at_time(self, timestamp_us: int) -> Offset: ...

    def close_channels(self, subscription: str, closed_code: str, message: str) -> None: ...

    async def replace_chunks(self, old: Sequence[str], new: str) -> int: ...


class ServedSegments(Protocol):
    """Those of this broker. `get` raises what tells where else to ask, or why not here."""

    def get(self, path: str, segment_id: int) -> Segment: ...

    def of_topic(self, path: str) -> Sequence[Segment]: ...


class SegmentAccess(Protocol):
    async def positions(self, timestamp_us: int | None = None) -> SegmentPositions: ...

    async def progress(self) -> dict[str, Offset]:
        """Where each subscription stands."""

    async def begin_cursor(self, subscription: str, offset: Offset) -> Offset | None:
        """For a subscription that is being created (`Cursors.begin`); None if it exists."""

    async def place_cursor(self, placing: Placing) -> Offset:
        """Stored when it returns where the cursor stands: here, or at the end if that is before it. The subscription's
        channels are closed, so that its consumer begins anew."""

    async def remove_cursor(self, subscription: str) -> None:
        """Of a subscription that was deleted. Its channels are closed for good."""

    async def replace_chunks(self, old: Sequence[str], new: str) -> int:
        """Swap a joined chunk in (`SegmentStorage.replace_chunks`); returns how many chunks there are now."""


class LocalAccess:
    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    async def positions(self, timestamp_us: int | None = None) -> SegmentPositions:
        segment = self._segment
        at_time = -1 if timestamp_us is None else await _served(segment.offset_at_time(timestamp_us))
        return SegmentPositions(segment.name.id, segment.earliest, segment.end, segment.sealed, at_time)

    async def progress(self) -> dict[str, Offset]:
        return self._segment.cursors.all()

    async def begin_cursor(self, subscription: str, offset: Offset) -> Offset | None:
        offset = min(offset, self._segment.end)
        await _served(self._segment.sync_to(offset))
        return await _served(self._segment.cursors.begin(subscription, offset))

    async def place_cursor(self, placing: Placing) -> Offset:
        segment, subscription = self._segment, placing.subscription
        offset = segment.earliest if placing.skip else min(placing.offset, segment.end)
        placing = msgspec.structs.replace(placing, offset=offset)
        await _served(segment.sync_to(segment.end if placing.skip else offset))
        stands = await _served(segment.cursors.place(placing))
        if not placing.only_if_absent:
            # At once, before an ack that is under way on an old channel can move the cursor.
            segment.close_channels(subscription, RESET, f"subscription {subscription} was set to offset {stands}")
        return stands

    async def remove_cursor(self, subscription: str) -> None:
        segment = self._segment
        if await _served(segment.cursors.remove(subscription)):
            message = f"subscription {subscription} of {segment.name.topic} was deleted"
            segment.close_channels(subscription, SubscriptionNotFound.code, message)

    async def replace_chunks(self, old: Sequence[str], new: str) -> int:
        return await _served(self._segment.replace_chunks(old, new))


async def _served(work: Awaitable[T]) -> T:
    """That a log is closed or fenced means here that the segment is to be looked for again."""
    try:
        return await work
    except (Fenced, LogClosed) as error:
        raise told_to_clients(error) from error


class Ask(Protocol):
    """Of the other brokers (`Peers.call`)."""

    async def __call__(self, broker_id: str, name: str, arguments: Arguments, *, timeout_s: float) -> Any: ...


class RemoteAccess:
    def __init__(self, ask: Ask, owner: str, name: SegmentName, topic_id: int, timeout_s: float) -> None:
        self._ask = ask
        self._owner = owner
        self._about: Final = {"topic": name.topic.path, "topic_id": topic_id, "segment": name.id}
        self._timeout_s = timeout_s

    async def _call(self, call: str, **arguments: Any) -> Any:
        return await self._ask(self._owner, call, {**self._about, **arguments}, timeout_s=self._timeout_s)

    async def positions(self, timestamp_us: int | None = None) -> SegmentPositions:
        return msgspec.convert(await self._call("positions", timestamp=timestamp_us), SegmentPositions)

    async def progress(self) -> dict[str, Offset]:
        found: dict[str, Offset] = await self._call("progress")
        return found

    async def begin_cursor(self, subscription: str, offset: Offset) -> Offset | None:
        stands: Offset | None = await self._call("begin_cursor", subscription=subscription, offset=offset)
        return stands

    async def place_cursor(self, placing: Placing) -> Offset:
        stands: Offset = await self._call("place_cursor", placing=msgspec.structs.asdict(placing))
        return stands

    async def remove_cursor(self, subscription: str) -> None:
        await self._call("remove_cursor", subscription=subscription)

    async def replace_chunks(self, old: Sequence[str], new: str) -> int:
        chunks: int = await self._call("replace_chunks", old=list(old), new=new)
        return chunks


def answer_for(segments: ServedSegments, calls: PeerCalls) -> None:
    """Register the owner's side of `RemoteAccess`."""

    def found(arguments: Arguments) -> LocalAccess:
        return local_access(segments, arguments["topic"], arguments["segment"], arguments["topic_id"])

    async def positions(arguments: Arguments) -> SegmentPositions:
        return await found(arguments).positions(arguments["timestamp"])

    async def progress(arguments: Arguments) -> dict[str, Offset]:
        return await found(arguments).progress()

    async def begin_cursor(arguments: Arguments) -> Offset | None:
        return await found(arguments).begin_cursor(arguments["subscription"], arguments["offset"])

    async def place_cursor(arguments: Arguments) -> Offset:
        return await found(arguments).place_cursor(msgspec.convert(arguments["placing"], Placing))

    async def remove_cursor(arguments: Arguments) -> None:
        await found(arguments).remove_cursor(arguments["subscription"])

    async def replace_chunks(arguments: Arguments) -> int:
        return await found(arguments).replace_chunks(arguments["old"], arguments["new"])

    for handler in (positions, progress, begin_cursor, place_cursor, remove_cursor, replace_chunks):
        calls.register(handler.__name__, handler)


def local_access(segments: ServedSegments, path: str, segment_id: int, topic_id: int) -> LocalAccess:
    segment = segments.get(path, segment_id)
    if segment.topic_id != topic_id:
        raise TopicNotFound(f"topic {path} was deleted, or deleted and created again")
    return LocalAccess(segment)


class SegmentAccesses:
    def __init__(self, broker_id: str, segments: ServedSegments, owners: Owners, members: Members, ask: Ask) -> None:
        self._broker_id = broker_id
        self._segments = segments
        self._owners = owners
        self._members = members
        self._ask = ask
        self.view: Final = owners.view

    def of(self, name: SegmentName, topic_id: int, patience_s: float = PATIENCE_S) -> SegmentAccess:
        """The segment of the topic that has this id: one of the same name that is created later is another one."""
        return AnywhereAccess(self, name, topic_id, patience_s)

    def now(self, name: SegmentName, topic_id: int, timeout_s: float) -> SegmentAccess:
        """As the view shows it now. Raises what `ServedSegments.get` raises when nobody serves it."""
        record = self._owners.find(name)
        if (
            record is not None
            and record.owner != self._broker_id
            and record.state is OwnershipState.SERVING
            and self._members.is_live(record.owner)
        ):
            return RemoteAccess(self._ask, record.owner, name, topic_id, timeout_s)
        return local_access(self._segments, name.topic.path, name.id, topic_id)


class AnywhereAccess:
    def __init__(self, accesses: SegmentAccesses, name: SegmentName, topic_id: int, patience_s: float) -> None:
        self._accesses = accesses
        self._name = name
        self._topic_id = topic_id
        self._patience_s = patience_s

    async def positions(self, timestamp_us: int | None = None) -> SegmentPositions:
        return await self._try(lambda access: access.positions(timestamp_us))

    async def progress(self) -> dict[str, Offset]:
        return await self._try(lambda access: access.progress())

    async def begin_cursor(self, subscription: str, offset: Offset) -> Offset | None:
        return await self._try(lambda access: access.begin_cursor(subscription, offset))

    async def place_cursor(self, placing: Placing) -> Offset:
        return await self._try(lambda access: access.place_cursor(placing), once=True)

    async def remove_cursor(self, subscription: str) -> None:
        return await self._try(lambda access: access.remove_cursor(subscription))

    async def replace_chunks(self, old: Sequence[str], new: str) -> int:
        return await self._try(lambda access: access.replace_chunks(old, new))

    async def _try(self, ask: Callable[[SegmentAccess], Awaitable[T]], *, once: bool = False) -> T:
        """`once`: what is asked may be refused because an earlier attempt was carried out and others followed it. Then
        `MetadataUncertain` says that this is not known."""
        clock = asyncio.get_running_loop().time
        give_up_at = clock() + self._patience_s
        pause_s = FIRST_PAUSE_S
        doubt = asked = False
        while True:
            seen = self._accesses.view.changes
            attempt_s = min(ATTEMPT_S, max(give_up_at - clock(), FIRST_PAUSE_S))
            asked = False
            try:
                access = self._accesses.now(self._name, self._topic_id, attempt_s)
                asked = True
                return await ask(access)
            except ConditionFailed as error:
                if doubt:
                    raise self._unknown(error) from error
                raise
            except AWAY as error:
                doubt = doubt or (once and asked)
                if clock() + pause_s >= give_up_at:
                    if doubt:
                        raise self._unknown(error) from error
                    if isinstance(error, TimedOut):  # To whoever asked this broker, it is not to be had now.
                        raise NotServing(str(error)) from error
                    raise
            await self._accesses.view.changed_since(seen, pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _unknown(self, error: BraidError) -> MetadataUncertain:
        return MetadataUncertain(f"it is not known whether {self._name} was asked in time: {error}")
