"""Subscriptions: created, listed, moved to another place, deleted. Any broker does it, wherever the segments are.

A subscription exists when its key exists. Creating a subscription stores a cursor on every segment first and the key
last, so an existing subscription never lacks a cursor and skips nothing (I5). Deleting a subscription removes the key
first. A crash in between leaves cursors without a subscription. They would hold back retention, so each owner removes
those of its own segments (cursor_sweep.py).

On one broker, changes of a subscription take turns. Between brokers the store decides:

- When two brokers create the same subscription, the first to write the key has created it. The other broker's cursors
  do no harm: while there is no key, a cursor is placed only where there is none, or further down; once there is a key,
  it is not placed at all.
- A cursor is removed only while there is no key. A removal may still have come between a new cursor and its key. So the
  creating broker looks again after it has written the key, and places cursors that are missing.
- The key is written under the condition that the topic is unchanged: nothing appears below a topic that is being
  deleted, and no segment that was added meanwhile is forgotten.
- The same transaction writes the name to the topic's `newest-subscription`. The deletion of a segment looks at all
  subscriptions first, and is written under the condition that none was created since (`list_until_created`).

A client repeats a call whose answer was lost, and a try that the client has given up may still finish, late. So what a
call makes is stored with the call's id (`created_by`, `placed_by`), a deletion names the subscription by its id, and a
seek names the placements that its client knew (`SeekRequest`): a late seek never undoes a later one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext, suppress
from random import Random
from typing import Final
from zlib import crc32

import msgspec

from braid.broker.keyed_locks import KeyedLocks
from braid.broker.segments.segment_access import (
    AWAY,
    PATIENCE_S,
    BeginCursor,
    CheckQueues,
    FindPositions,
    FindUnsettled,
    GetProgress,
    PlaceCursor,
    RemoveCursor,
    SegmentAccess,
    SegmentAccesses,
)
from braid.broker.topics import Topics
from braid.metadata import paths
from braid.metadata.store import Compare, Delete, Entry, Put, Store
from braid.model.errors import (
    InvalidArgument,
    LogDamaged,
    MetadataUncertain,
    NotAvailable,
    NotServing,
    PositionDiverged,
    RecordUnreadable,
    SegmentNotFound,
    SubscriptionExists,
    SubscriptionKindConflict,
    SubscriptionNotFound,
    quote,
)
from braid.model.ids import NO_REQUEST, Offset, RequestId, Revision, SegmentId, random_id
from braid.model.log.epochs import UNKNOWN_EPOCH, parting
from braid.model.names import SegmentName, TopicName, check_name
from braid.model.stored_record import decode, encode
from braid.model.subscription import DEFAULT_QUEUE, Cursor, Placing, QueuePolicies, Subscription, SubscriptionKind
from braid.model.topic import Topic
from braid.ports.clock import Clock
from braid.ports.tasks import all_of
from braid.wire.operations import SegmentPositions

EVERYTHING: Final = 1 << 53
"""More records than any segment has."""
EARLIEST: Final = "earliest"
LATEST: Final = "latest"
MAX_TRIES: Final = 5
RETRY_S: Final = 0.05
"""How long a creation waits for the view of the topic to catch up."""
REMOVE_PATIENCE_S: Final = 2.0
"""How long a deletion waits for each segment. If it does not reach a segment, the owner sweeps the cursor."""

_log: Final = logging.getLogger(__name__)


class Progress(msgspec.Struct, frozen=True):
    """How far a subscription has come in one segment."""

    offset: Offset
    earliest: Offset
    end: Offset
    unsettled: int | None = None
    """Of a queue, which settles messages in any order; None: everything below the offset is consumed, and no more."""

    @property
    def backlog(self) -> int:
        """The number of records that are still to be consumed, without those that retention has deleted."""
        if self.unsettled is not None:
            return min(self.unsettled, self.end - self.earliest)
        return max(self.end - max(self.offset, self.earliest), 0)


class SeekRequest(msgspec.Struct, frozen=True):
    """A call that sets a subscription to another place."""

    id: RequestId = NO_REQUEST
    since: dict[SegmentId, int] | None = None
    """By segment, the placement that the caller knew; None: the placement when the call has its turn."""
    subscription_id: int | None = None
    """The subscription that the caller knew; None: the subscription that has the name."""


class Subscriptions:
    def __init__(
        self,
        store: Store,
        topics: Topics,
        accesses: SegmentAccesses,
        clock: Clock,
        random: Random,
        without_queues: Callable[[], Sequence[str]] = list,
    ) -> None:
        """`accesses` reach the segments of all brokers. `without_queues` names the brokers that do not know queues."""
        self._without_queues = without_queues
        self._store = store
        self._topics = topics
        self._accesses = accesses
        self._clock = clock
        self._random = random
        self._locks = KeyedLocks()

    async def ensure(
        self, topic: TopicName, name: str, *, kind: SubscriptionKind, start: str, create: bool
    ) -> tuple[Subscription, bool]:
        """Return the subscription, and whether this call created it. `SubscriptionNotFound` if it does not exist and
        `create` is false, `SubscriptionKindConflict` if it exists as another kind."""
        _check_start(check_name("subscription", name), start)
        async with self.lock(topic, name):
            entry = await self._read(topic, name)
            if entry is None:
                if not create:
                    raise _not_found(topic, name)
                found, created = await self._create(topic, name, kind, start, NO_REQUEST, DEFAULT_QUEUE)
            else:
                found, created = _read(entry), False
            if found.kind is not kind:
                raise SubscriptionKindConflict(
                    f"subscription {name} of {topic} is a {found.kind.value} subscription, "
                    f"it cannot be used as a {kind.value} one; use another name"
                )
            return found, created

    async def create(
        self,
        topic: TopicName,
        name: str,
        *,
        kind: SubscriptionKind,
        start: str,
        request_id: RequestId = NO_REQUEST,
        queue: QueuePolicies = DEFAULT_QUEUE,
        query: bool = False,
    ) -> Subscription:
        """Create a subscription. `SubscriptionExists`, unless an earlier try of this request created the one that
        exists."""
        queue.check()
        _check_start(check_name("subscription", name), start)
        async with self.lock(topic, name):
            entry = await self._read(topic, name)
            if entry is not None:
                found, created = _read(entry), False
            else:
                found, created = await self._create(topic, name, kind, start, request_id, queue, query)
            if created or found.created_by == request_id != NO_REQUEST:
                return found
            raise SubscriptionExists(f"subscription {name} of {topic} cannot be created: it exists")

    async def get(self, topic: TopicName, name: str) -> Subscription:
        entry = await self._read(topic, name)
        if entry is None:
            raise _not_found(topic, name)
        return _read(entry)

    async def list(self, topic: TopicName) -> dict[str, Subscription | RecordUnreadable]:
        """The subscriptions of a topic by name; for one whose record cannot be read, the reason."""
        self._topics.get(topic.path)
        return await self.stored(topic.path)

    async def list_until_created(self, topic: TopicName) -> tuple[set[str], Compare]:
        """The names of a topic's subscriptions, and a condition that holds until another one is created."""
        key = paths.newest_subscription(topic.path)
        entry = await self._store.get(key)  # Before the list, which then has what was created until now.
        return set(await self.list(topic)), Compare(key, entry.revision if entry is not None else Revision(0))

    async def identify(self, topic: TopicName, name: str) -> tuple[int, dict[SegmentId, int]]:
        """Return the subscription's id, 0 if there is none, and the placements of its cursors."""
        entry = await self._read(topic, name)
        id_ = _id_of(entry) if entry is not None else 0
        return id_, await self._placements(topic, name)

    async def delete(self, topic: TopicName, name: str, subscription_id: int | None = None) -> None:
        """Delete a subscription and close its channels. The next deletion, or the sweep, finishes an interrupted one. A
        subscription that has another id than `subscription_id` stays: `SubscriptionNotFound`."""
        async with self.lock(topic, name):
            entry = await self._read(topic, name)
            if entry is not None and subscription_id not in (None, _id_of(entry)):
                raise _not_found(topic, name)
            await self._topics.stored(topic.path)  # The view may not show the newest segments yet.
            segments = self._of_topic(topic, patience_s=REMOVE_PATIENCE_S)
            if entry is not None:
                await self._remove_key(topic, name, _id_of(entry))
            elif not await self._has_cursors(segments.values(), name):
                raise _not_found(topic, name)
            removals = [self._remove_cursor(each, name, access) for each, access in segments.items()]
            await all_of(removals)

    async def positions(self, topic: TopicName, timestamp_us: int | None = None) -> tuple[SegmentPositions, ...]:
        """Return where each segment begins and ends, and where the records of a time are."""
        segments = self._of_topic(topic, self._topics.get(topic.path).layout.segments)
        with _all_segments(topic):
            asked = (access.ask(FindPositions(timestamp_us)) for _, access in sorted(segments.items()))
            return tuple(await all_of(asked))

    async def check_queues(self, topic: TopicName) -> dict[SegmentId, Sequence[str]]:
        """Ask each segment what does not agree between its queues, their journals and the log."""
        segments = self._of_topic(topic, self._topics.get(topic.path).layout.segments)
        with _all_segments(topic):
            found = await all_of(map(_check_queues, segments.values()))
        return {segment: findings for segment, findings in zip(segments, found, strict=True) if findings}

    async def unsettled(self, topic: TopicName, name: str, count: int) -> dict[SegmentId, Sequence[tuple[int, int]]]:
        """Return the ranges of the first `count` messages of each segment that a queue has not settled."""
        entry = await self._read(topic, name)
        if entry is None:
            raise _not_found(topic, name)
        if not is_queue_record(entry):
            raise SubscriptionKindConflict(
                f"subscription {name} of {topic} is a stream: it has no messages that are settled one by one"
            )
        segments = self._of_topic(topic, self._topics.get(topic.path).layout.segments)
        with _all_segments(topic):
            found = await all_of(access.ask(FindUnsettled(name, count)) for access in segments.values())
        return {segment: ranges for segment, ranges in zip(segments, found, strict=True) if ranges}

    async def seek_to(
        self, topic: TopicName, name: str, place: str, request: SeekRequest | None = None
    ) -> dict[SegmentId, Offset]:
        """Go to `earliest` or `latest` in every segment. All seeks return the new offsets. `ConditionFailed` if another
        seek came between."""
        _check_start(name, place)
        return await self._seek(topic, name, None, lambda _, access: _start(access, place), request)

    async def seek_to_time(
        self, topic: TopicName, name: str, timestamp_us: int, request: SeekRequest | None = None
    ) -> dict[SegmentId, Offset]:
        """Go to the first records at or after this time."""

        async def find(_: SegmentId, access: SegmentAccess) -> Offset:
            return Offset((await access.ask(FindPositions(timestamp_us))).at_time)

        return await self._seek(topic, name, None, find, request)

    async def seek_to_offsets(
        self,
        topic: TopicName,
        name: str,
        offsets: dict[SegmentId, Offset],
        request: SeekRequest | None = None,
        *,
        epochs: Mapping[SegmentId, int] | None = None,
    ) -> dict[SegmentId, Offset]:
        """Go to these offsets; segments that are not named stay where they are. `epochs` are those of the records
        before the offsets, as the caller has read them: `PositionDiverged` if a segment has lost these records. If it
        loses them meanwhile, its cursor is placed anew by that, and this seek is `ConditionFailed`."""
        read_in = epochs or {}

        async def find(segment: SegmentId, access: SegmentAccess) -> Offset:
            ends = await access.ask(FindPositions())
            parted_at = parting(ends.epochs, offsets[segment], read_in.get(segment, UNKNOWN_EPOCH))
            if parted_at is not None:
                raise PositionDiverged(
                    f"subscription {name} cannot go to offset {offsets[segment]} of segment {segment} of {topic}: the "
                    f"record before it, of epoch {read_in[segment]}, is lost, and from offset {parted_at} on the "
                    f"segment holds other records",
                    ends.earliest,
                    ends.end,
                    parted_at,
                )
            if not ends.earliest <= offsets[segment] <= ends.end:
                raise InvalidArgument(
                    f"subscription {name} cannot go to offset {offsets[segment]} of segment {segment} of {topic}: "
                    f"choose one from {ends.earliest} to {ends.end}"
                )
            return offsets[segment]

        return await self._seek(topic, name, [*offsets], find, request)

    async def skip(
        self, topic: TopicName, name: str, segment_id: SegmentId, count: int, request: SeekRequest | None = None
    ) -> dict[SegmentId, Offset]:
        """Leave out the next `count` records of one segment, or as many as it has."""
        if count < 1:
            raise InvalidArgument(f"{count} records cannot be skipped; skip 1 or more")
        return await self._seek(topic, name, [segment_id], _from_the_cursor, request, skip=min(count, EVERYTHING))

    async def skip_all(
        self, topic: TopicName, name: str, request: SeekRequest | None = None
    ) -> dict[SegmentId, Offset]:
        """Leave out everything that waits now."""
        return await self._seek(topic, name, None, _from_the_cursor, request, skip=EVERYTHING)

    async def _create(
        self,
        topic: TopicName,
        name: str,
        kind: SubscriptionKind,
        start: str,
        request_id: RequestId,
        queue: QueuePolicies = DEFAULT_QUEUE,
        query: bool = False,
    ) -> tuple[Subscription, bool]:
        """Return the subscription, and whether this call created it; another broker may have been faster."""
        is_queue = kind is SubscriptionKind.QUEUE
        if is_queue and (older := self._without_queues()):
            raise NotAvailable(
                f"subscription {name} of {topic} cannot be a queue: broker {older[0]} is of a version that does not "
                f"know queues; upgrade it first"
            )
        value = encode(
            Subscription(
                id=random_id(self._random),
                kind=kind,
                created_at=self._clock.now_us(),
                created_by=request_id,
                queue=queue,
                query=query,
            )
        )
        key = paths.subscription(topic.path, name)
        created = uncertain = False
        first: dict[SegmentId, Offset] = {}
        for _ in range(MAX_TRIES):
            unchanged = self._topics.unchanged(topic.path)
            segments = self._of_topic(topic)
            with _all_segments(topic):
                begun = await all_of(_begin(access, name, start, queue=is_queue) for access in segments.values())
            # Where the first try has begun: the subscription may exist since then.
            first |= {each: at for each, at in zip(segments, begun) if at is not None and each not in first}
            if None not in begun:
                try:
                    newest = Put(paths.newest_subscription(topic.path), name.encode())
                    result = await self._store.txn([unchanged, Compare(key, Revision(0))], [Put(key, value), newest])
                    created = result.succeeded
                except MetadataUncertain:
                    uncertain = True
            entry = await self._store.get(key)
            if entry is not None:
                created = created or (uncertain and entry.value == value)
                if created:  # A cursor may have been removed before the key was there.
                    with _all_segments(topic):
                        await all_of(
                            _fill(each, name, start, first.get(id_), queue=is_queue) for id_, each in segments.items()
                        )
                return _read(entry), created
            # The topic has changed, or the write is under way: try again with the topic as it is now.
            await asyncio.sleep(RETRY_S)
        raise MetadataUncertain(f"it is not known whether subscription {name} of {topic} was created; try again")

    async def _remove_key(self, topic: TopicName, name: str, subscription_id: int) -> None:
        key = paths.subscription(topic.path, name)
        for _ in range(MAX_TRIES):
            entry = await self._store.get(key)
            if entry is None:
                return
            if subscription_id != _id_of(entry):
                return  # A try whose answer was lost has removed it, and another subscription has its name now.
            try:
                result = await self._store.txn([Compare(key, entry.revision)], [Delete(key)])
                if result.succeeded:
                    return
            except MetadataUncertain:
                continue
        raise MetadataUncertain(f"it is not known whether subscription {name} of {topic} was deleted; try again")

    async def _has_cursors(self, segments: Iterable[SegmentAccess], name: str) -> bool:
        found = await asyncio.gather(*(access.ask(GetProgress()) for access in segments), return_exceptions=True)
        return any(name in each for each in found if isinstance(each, dict))

    async def _remove_cursor(self, segment: SegmentId, name: str, access: SegmentAccess) -> None:
        try:
            with suppress(SegmentNotFound):  # The segment has gone meanwhile, with its cursors.
                await access.ask(RemoveCursor(name))
        except AWAY as error:
            _log.warning("the cursor of subscription %s on segment %d is left to its owner: %s", name, segment, error)

    async def _seek(
        self,
        topic: TopicName,
        name: str,
        segment_ids: Iterable[SegmentId] | None,
        find: Callable[[SegmentId, SegmentAccess], Awaitable[Offset]],
        request: SeekRequest | None,
        *,
        skip: int = 0,
    ) -> dict[SegmentId, Offset]:
        """Find all places before the first cursor moves: an impossible seek changes nothing. Cursors move on ancestors
        first, so that no record of a descendant comes before theirs (broker/groups/order_gate.py)."""
        request = request or SeekRequest()
        request_id = request.id or RequestId(random_id(self._random))
        async with self.lock(topic, name):
            if request.subscription_id not in (None, (await self.get(topic, name)).id):
                raise _not_found(topic, name)
            await self._topics.stored(topic.path)  # The view may not show the newest segments yet.
            since = request.since if request.since is not None else await self._placements(topic, name)

            def placing(segment: SegmentId, offset: Offset) -> PlaceCursor:
                return PlaceCursor(Placing(name, offset, skip, request_id=request_id, since=since.get(segment, 0)))

            segments = self._of_topic(topic, segment_ids)
            generations = _generations(self._topics.get(topic.path), segments)
            with _all_segments(topic) if segment_ids is None else nullcontext():
                found = await all_of(find(segment, access) for segment, access in segments.items())
                places = dict(zip(segments, found, strict=True))
                offsets: dict[SegmentId, Offset] = {}
                for generation in generations:
                    placed = await all_of(segments[each].ask(placing(each, places[each])) for each in generation)
                    offsets |= zip(generation, placed, strict=True)
            return {segment: offsets[segment] for segment in segments}

    async def _placements(self, topic: TopicName, name: str) -> dict[SegmentId, int]:
        """The placements of its cursors, as the store has them: a placement counts only when it is stored."""
        known = self._topics.get(topic.path).segments
        keys = {
            segment_id: paths.cursor(topic.path, SegmentName.of(topic, info).descriptor, name)
            for segment_id, info in known.items()
        }
        entries = await all_of(self._store.get(key) for key in keys.values())
        return {
            segment_id: decode(Cursor, entry.value, f"the Cursor at {entry.key}").placement
            for segment_id, entry in zip(keys, entries, strict=True)
            if entry is not None
        }

    def _of_topic(
        self, topic: TopicName, segment_ids: Iterable[SegmentId] | None = None, *, patience_s: float = PATIENCE_S
    ) -> dict[SegmentId, SegmentAccess]:
        """Access to these segments, or to all of the layout, wherever they are."""
        found = self._topics.get(topic.path)
        known = found.segments
        wanted = list(known) if segment_ids is None else list(segment_ids)
        for segment_id in wanted:
            if segment_id not in known:
                raise SegmentNotFound(f"topic {topic} has no segment {segment_id}")
        return {
            segment_id: self._accesses.of(SegmentName.of(topic, known[segment_id]), found.id, patience_s)
            for segment_id in wanted
        }

    async def _read(self, topic: TopicName, name: str) -> Entry | None:
        self._topics.get(topic.path)
        return await self._store.get(paths.subscription(topic.path, name))

    async def stored(self, path: str) -> dict[str, Subscription | RecordUnreadable]:
        """The subscriptions that the store has, by name; the topic may be gone."""
        listing = await self._store.list(paths.subscriptions_prefix(path))
        found: dict[str, Subscription | RecordUnreadable] = {}
        for entry in listing.entries:
            if (name := paths.subscription_of(entry.key)) is not None:
                try:
                    found[name] = _read(entry)
                except RecordUnreadable as error:
                    found[name] = error
        return found

    def lock(self, topic: TopicName, name: str) -> AbstractAsyncContextManager[None]:
        """One change of a subscription at a time."""
        return self._locks.of(paths.subscription(topic.path, name))


@contextmanager
def _all_segments(topic: TopicName) -> Iterator[None]:
    """Around work on all segments of a topic: one that is gone when its turn comes was dropped from the layout, or its
    transition was taken back. The caller did not name it, so the call may be tried again with the others."""
    try:
        yield
    except SegmentNotFound as error:
        raise NotServing(f"the segments of {topic} have changed meanwhile, try again: {error}") from error


def _generations(topic: Topic, segment_ids: Iterable[SegmentId]) -> list[list[SegmentId]]:
    """Group segments by the change of layout that created them, the oldest first: ancestors come before descendants."""
    known = topic.segments
    generations: dict[int, list[SegmentId]] = {}
    for segment in segment_ids:
        generations.setdefault(known[segment].created_at_epoch, []).append(segment)
    return [generations[epoch] for epoch in sorted(generations)]


def _check_start(name: str, start: str) -> None:
    if start not in (EARLIEST, LATEST):
        raise InvalidArgument(f"subscription {name} cannot start at {quote(start)}; write '{EARLIEST}' or '{LATEST}'")


def _read(entry: Entry) -> Subscription:
    return decode(Subscription, entry.value, f"the Subscription at {entry.key}")


def _id_of(entry: Entry) -> int:
    """The subscription's id. A record that cannot be read has one of its own, for as long as it stays as it is."""
    try:
        return _read(entry).id
    except RecordUnreadable:
        return crc32(entry.value) | 1


def is_queue_record(entry: Entry) -> bool:
    """Whether this is the record of a queue. One that cannot be read is not, as far as can be known."""
    try:
        return _read(entry).kind is SubscriptionKind.QUEUE
    except RecordUnreadable:
        return False


def _not_found(topic: TopicName, name: str) -> SubscriptionNotFound:
    return SubscriptionNotFound(
        f"there is no subscription {name} of {topic}: it was never created, or it was deleted; a queue is created "
        f"before its first consumer"
    )


async def _check_queues(access: SegmentAccess) -> Sequence[str]:
    try:
        return await access.ask(CheckQueues())
    except LogDamaged as error:  # A journal cannot be read. Other segments may have findings, too.
        return [str(error)]


async def _from_the_cursor(_: SegmentId, __: SegmentAccess) -> Offset:
    """A skip begins at the cursor, which the segment's owner knows; the owner ignores this offset."""
    return Offset(0)


async def _start(access: SegmentAccess, start: str) -> Offset:
    ends = await access.ask(FindPositions())
    return Offset(ends.earliest if start == EARLIEST else ends.end)


async def _begin(access: SegmentAccess, name: str, start: str, *, queue: bool) -> Offset | None:
    return await access.ask(BeginCursor(name, await _start(access, start), queue))


async def _fill(access: SegmentAccess, name: str, start: str, first: Offset | None, *, queue: bool) -> None:
    """Place the cursor of a subscription that now exists, if the cursor is missing. It goes to its `first` place: other
    brokers know of the subscription already, so it skips no record that came since (I5)."""
    if name not in await access.ask(GetProgress()):
        offset = first if first is not None else await _start(access, start)
        await access.ask(PlaceCursor(Placing(name, offset, only_if_absent=True, queue=queue)))
