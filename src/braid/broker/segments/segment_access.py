"""Asking a segment, wherever it is served: where it ends, where its cursors are, to place or remove a cursor.

A question is one struct (`Question`): its fields travel, and its `answer` runs on the segment's owner. Any broker takes
any call. A call that needs a segment asks it here and need not know the owner: a segment of this broker is asked
directly (`LocalAccess`), any other through its owner (`RemoteAccess`, which arrives at the owner's `LocalAccess`).

Segments move, and brokers come and go, while a question is under way. `AnywhereAccess` finds the owner in the view for
every attempt. It tries again when no broker serves the segment, when the owner refuses because it has just given the
segment away, and when the owner does not answer. Between attempts it waits for a change in the view, as long as its
patience lasts. So a seek in the middle of a move just takes a little longer. Every question can be repeated: a seek
whose answer was lost is asked for once more, and recognises its own work.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar

import msgspec

from braid.broker.cursors.cursors import Cursors
from braid.broker.error_mapping import to_client
from braid.broker.peers.calls import Arguments, PeerCalls
from braid.broker.queues.segment_queue import SegmentQueue
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
from braid.model.log.epochs import EpochStarts
from braid.model.log.replication import FollowerStatus
from braid.model.names import SegmentName
from braid.model.ownership import OwnershipState
from braid.model.subscription import Placing
from braid.wire.operations import RESET, SegmentPositions

PATIENCE_S: Final = 15.0
"""A move takes a second or so; a broker that starts again, some more."""
ATTEMPT_S: Final = 5.0
FIRST_PAUSE_S: Final = 0.02
MAX_PAUSE_S: Final = 0.5
"""For changes that the view does not show: a broker can be reached again, a segment has been opened."""
AWAY: Final = (NotServing, Moved, ShuttingDown, Overloaded, ConnectFailed, ConnectionLost, TimedOut)
"""Errors that say that the segment may be found later, or elsewhere."""

ASK_SEGMENT: Final = "ask_segment"

T = TypeVar("T")


class QueuesOfSegment(Protocol):
    """The queues of a segment on its owner, as questions see them (`SegmentQueues`)."""

    def find(self, subscription: str) -> SegmentQueue | None: ...

    def get(self, subscription: str) -> SegmentQueue: ...

    def follow_cursor(self, subscription: str) -> None: ...

    async def begin(self, subscription: str) -> None: ...

    async def remove(self, subscription: str) -> None: ...

    async def check(self) -> list[str]: ...


class ServedSegment(Protocol):
    """A segment on its owner, as questions see it (`OwnedSegment`)."""

    @property
    def name(self) -> SegmentName: ...

    @property
    def topic_id(self) -> int: ...

    @property
    def cursors(self) -> Cursors: ...

    @property
    def queues(self) -> QueuesOfSegment: ...

    @property
    def earliest(self) -> Offset: ...

    @property
    def end(self) -> Offset: ...

    @property
    def sealed(self) -> bool: ...

    @property
    def epochs(self) -> EpochStarts: ...

    async def sync_to(self, offset: Offset) -> None: ...

    async def offset_at_time(self, timestamp_us: int) -> Offset: ...

    def close_channels(self, subscription: str, closed_code: str, message: str) -> None: ...

    async def replace_chunks(self, old: Sequence[str], new: str) -> int: ...

    def producer_rows(self) -> bytes: ...

    async def check_can_end(self) -> None: ...

    @property
    def followers(self) -> tuple[FollowerStatus, ...]: ...


class OwnedSegments(Protocol):
    """The segments of this broker. The error of `get` tells where else to ask, or why the segment is not here."""

    def get(self, path: str, segment_id: int) -> ServedSegment: ...

    def of_topic(self, path: str) -> Sequence[ServedSegment]: ...


class Question(msgspec.Struct, Generic[T], frozen=True):
    """A question to a segment. It travels to the segment's owner and is answered there."""

    once: ClassVar[bool] = False
    """Whether a refusal may mean that an earlier attempt was carried out and others followed it."""

    @abstractmethod
    async def answer(self, segment: ServedSegment) -> T: ...

    def read(self, answer: Any) -> T:
        """The answer, as it came from another broker."""
        found: T = answer
        return found


class FindPositions(Question[SegmentPositions], frozen=True, tag=True):
    """Where the segment begins and ends, and where the records of a time are."""

    timestamp_us: int | None = None

    async def answer(self, segment: ServedSegment) -> SegmentPositions:
        at_time = -1 if self.timestamp_us is None else await segment.offset_at_time(self.timestamp_us)
        return SegmentPositions(segment.name.id, segment.earliest, segment.end, segment.sealed, at_time, segment.epochs)

    def read(self, answer: Any) -> SegmentPositions:
        return msgspec.convert(answer, SegmentPositions)


class GetProgress(Question[dict[str, Offset]], frozen=True, tag=True):
    """Where each subscription stands."""

    async def answer(self, segment: ServedSegment) -> dict[str, Offset]:
        return segment.cursors.all()


class BeginCursor(Question[Offset | None], frozen=True, tag=True):
    """Place the cursor of a subscription that is being created (`Cursors.begin`); None if the subscription exists."""

    subscription: str
    offset: Offset
    queue: bool = False

    async def answer(self, segment: ServedSegment) -> Offset | None:
        offset = min(self.offset, segment.end)
        await segment.sync_to(offset)
        begun = await segment.cursors.begin(self.subscription, offset, queue=self.queue)
        if begun is not None:
            await follow_cursor(segment, self.subscription)
        return begun


class PlaceCursor(Question[Offset], frozen=True, tag=True):
    """Place a cursor (`Cursors.place`). It is stored when the answer says where it stands: at the place that was asked
    for, or at the end of the segment if that comes first. The subscription's channels are closed, so that its consumer
    begins anew."""

    once: ClassVar[bool] = True
    placing: Placing

    async def answer(self, segment: ServedSegment) -> Offset:
        placing, subscription = self.placing, self.placing.subscription
        offset = segment.earliest if placing.skip else min(placing.offset, segment.end)
        await segment.sync_to(segment.end if placing.skip else offset)
        placing = msgspec.structs.replace(placing, offset=offset)
        queue = segment.queues.find(subscription) if placing.skip else None
        try:
            # A queue skips messages that are not settled. Those that are settled after them stay so.
            skipped = partial(queue.after_skipping, placing.skip) if queue is not None else None
            stands = await segment.cursors.place(placing, skipped)
        finally:
            if queue is not None:
                queue.resume()
        if not placing.only_if_absent:
            # Immediately, before an ack that is under way on an old channel can move the cursor.
            segment.close_channels(subscription, RESET, f"subscription {subscription} was set to offset {stands}")
        await follow_cursor(segment, subscription)
        return stands


class RemoveCursor(Question[None], frozen=True, tag=True):
    """Remove the cursor of a deleted subscription. Its channels are closed for good."""

    subscription: str

    async def answer(self, segment: ServedSegment) -> None:
        if await segment.cursors.remove(self.subscription):
            message = f"subscription {self.subscription} of {segment.name.topic} was deleted"
            segment.close_channels(self.subscription, SubscriptionNotFound.code, message)
            await segment.queues.remove(self.subscription)


async def follow_cursor(segment: ServedSegment, subscription: str) -> None:
    """Let the queue of a subscription begin where its cursor was placed, if it is a queue."""
    segment.queues.follow_cursor(subscription)  # Before an answer can come.
    await segment.queues.begin(subscription)


class SwapChunks(Question[int], frozen=True, tag=True):
    """Swap a joined chunk in (`SegmentStorage.replace_chunks`); the answer is how many chunks there are now."""

    old: list[str]
    new: str

    async def answer(self, segment: ServedSegment) -> int:
        return await segment.replace_chunks(self.old, self.new)


class GetProducers(Question[bytes], frozen=True, tag=True):
    """What a log that has ended knows of its producers (`ProducerTable.rows`)."""

    async def answer(self, segment: ServedSegment) -> bytes:
        return segment.producer_rows()


class CheckCanEnd(Question[None], frozen=True, tag=True):
    """Whether the log could end now: it takes batches, and a file has room for the seal. Otherwise the error says why
    not."""

    async def answer(self, segment: ServedSegment) -> None:
        await segment.check_can_end()


class CheckQueues(Question[list[str]], frozen=True, tag=True):
    """What does not agree between the queues of the segment, their journals on the owner's disk, and the log."""

    async def answer(self, segment: ServedSegment) -> list[str]:
        return await segment.queues.check()


class FindUnsettled(Question[list[tuple[int, int]]], frozen=True, tag=True):
    """The ranges of the first messages of a queue that are not settled."""

    subscription: str
    count: int

    async def answer(self, segment: ServedSegment) -> list[tuple[int, int]]:
        return segment.queues.get(self.subscription).first_unsettled(self.count)

    def read(self, answer: Any) -> list[tuple[int, int]]:
        return msgspec.convert(answer, list[tuple[int, int]])


class GetFollowers(Question[tuple[FollowerStatus, ...]], frozen=True, tag=True):
    """How far the followers of the segment are, as its owner knows."""

    async def answer(self, segment: ServedSegment) -> tuple[FollowerStatus, ...]:
        return segment.followers

    def read(self, answer: Any) -> tuple[FollowerStatus, ...]:
        return msgspec.convert(answer, tuple[FollowerStatus, ...])


AnyQuestion = (
    FindPositions
    | GetProgress
    | BeginCursor
    | PlaceCursor
    | RemoveCursor
    | SwapChunks
    | GetProducers
    | CheckCanEnd
    | CheckQueues
    | FindUnsettled
    | GetFollowers
)


class SegmentAccess(Protocol):
    async def ask(self, question: Question[T]) -> T: ...


class LocalAccess:
    def __init__(self, segment: ServedSegment) -> None:
        self._segment = segment

    async def ask(self, question: Question[T]) -> T:
        """Ask a segment of this broker. A closed or fenced log becomes `NotServing`: the caller looks for the segment
        again."""
        try:
            return await question.answer(self._segment)
        except (Fenced, LogClosed) as error:
            raise to_client(error) from error


class Ask(Protocol):
    """A call to another broker (`Peers.call`)."""

    async def __call__(self, broker_id: str, name: str, arguments: Arguments, *, timeout_s: float) -> Any: ...


class RemoteAccess:
    def __init__(self, ask: Ask, owner: str, name: SegmentName, topic_id: int, timeout_s: float) -> None:
        self._ask = ask
        self._owner = owner
        self._about: Final = {"topic": name.topic.path, "topic_id": topic_id, "segment": name.id}
        self._timeout_s = timeout_s

    async def ask(self, question: Question[T]) -> T:
        arguments = {**self._about, "question": msgspec.to_builtins(question)}
        return question.read(await self._ask(self._owner, ASK_SEGMENT, arguments, timeout_s=self._timeout_s))


def answer_for(segments: OwnedSegments, calls: PeerCalls) -> None:
    """Register the owner's side of `RemoteAccess`."""

    async def answer(arguments: Arguments) -> Any:
        segment = local_access(segments, arguments["topic"], arguments["segment"], arguments["topic_id"])
        question: Question[Any] = msgspec.convert(arguments["question"], AnyQuestion)
        return await segment.ask(question)

    calls.register(ASK_SEGMENT, answer)


def local_access(segments: OwnedSegments, path: str, segment_id: int, topic_id: int) -> LocalAccess:
    segment = segments.get(path, segment_id)
    if segment.topic_id != topic_id:
        raise TopicNotFound(f"topic {path} was deleted, or deleted and created again")
    return LocalAccess(segment)


class SegmentAccesses:
    def __init__(self, broker_id: str, segments: OwnedSegments, owners: Owners, members: Members, ask: Ask) -> None:
        self._broker_id = broker_id
        self._segments = segments
        self._owners = owners
        self._members = members
        self._ask = ask
        self.view: Final = owners.view

    def of(self, name: SegmentName, topic_id: int, patience_s: float = PATIENCE_S) -> SegmentAccess:
        """Access to the segment of the topic that has this id; a later topic of the same name is another topic."""
        return AnywhereAccess(self, name, topic_id, patience_s)

    def now(self, name: SegmentName, topic_id: int, timeout_s: float) -> SegmentAccess:
        """Access to the segment where the view shows it now. Raises the error of `OwnedSegments.get` when no broker
        serves it."""
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

    async def ask(self, question: Question[T]) -> T:
        """Ask as often as it takes. `MetadataUncertain` if the question is refused and an earlier attempt may be the
        reason."""
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
                return await access.ask(question)
            except ConditionFailed as error:
                if doubt:
                    raise self._unknown(error) from error
                raise
            except AWAY as error:
                doubt = doubt or (question.once and asked)
                if clock() + pause_s >= give_up_at:
                    if doubt:
                        raise self._unknown(error) from error
                    if isinstance(error, TimedOut):  # For the caller of this broker, the segment is not served now.
                        raise NotServing(str(error)) from error
                    raise
            await self._accesses.view.changed_since(seen, pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _unknown(self, error: BraidError) -> MetadataUncertain:
        return MetadataUncertain(f"it is not known whether {self._name} has done what was asked: {error}")
