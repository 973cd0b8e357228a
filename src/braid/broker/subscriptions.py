"""Subscriptions: made, listed, moved to another place, deleted.

A subscription exists when its key exists. Creating one stores its cursor on every segment first and the key last, so
one that exists never lacks a cursor and skips nothing (I5); deleting one removes the key first. What a crash leaves in
between are cursors without a subscription: they would hold back retention, and `sweep` removes them at start.

A subscription's changes take turns, so that two consumers that join at the same moment find one subscription. The key
is written under the condition that the topic is as it was: nothing appears below a topic that is being deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol

import msgspec

from braid.broker.cursors import Cursors
from braid.broker.topics import Topics
from braid.broker.turns import Turns
from braid.metadata import paths
from braid.metadata.store import Compare, Delete, Entry, Put, Store
from braid.model.errors import (
    InvalidArgument,
    MetadataUncertain,
    NotAvailable,
    SubscriptionExists,
    SubscriptionKindConflict,
    SubscriptionNotFound,
)
from braid.model.ids import Offset, Revision, SegmentId
from braid.model.names import SegmentName, TopicName, check_name
from braid.model.subscription import Subscription, SubscriptionKind, decode, encode
from braid.ports.clock import Clock
from braid.wire import operations

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
MAX_TRIES: Final = 5
RETRY_S: Final = 0.05
"""How long a creation waits for the view of the topic to catch up."""


class Segment(Protocol):
    """What subscriptions need of a served segment."""

    @property
    def name(self) -> SegmentName: ...

    @property
    def cursors(self) -> Cursors: ...

    @property
    def earliest(self) -> Offset: ...

    @property
    def end(self) -> Offset: ...

    async def sync_to(self, offset: Offset) -> None: ...

    async def offset_at_time(self, timestamp_us: int) -> Offset: ...

    def close_channels(self, subscription: str, closed_code: str, message: str) -> None: ...


class ServedSegments(Protocol):
    def get(self, path: str, segment_id: int) -> Segment: ...

    def of_topic(self, path: str) -> Sequence[Segment]: ...


class Progress(msgspec.Struct, frozen=True):
    """How far a subscription has come in one segment."""

    offset: Offset
    earliest: Offset
    end: Offset

    @property
    def backlog(self) -> int:
        """The records that it has before it. Those that retention deleted are not among them."""
        return max(self.end - max(self.offset, self.earliest), 0)


class Subscriptions:
    def __init__(self, store: Store, topics: Topics, segments: ServedSegments, clock: Clock) -> None:
        self._store = store
        self._topics = topics
        self._segments = segments
        self._clock = clock
        self._turns = Turns()

    async def ensure(
        self, topic: TopicName, name: str, *, kind: SubscriptionKind, start: str, create: bool
    ) -> tuple[Subscription, bool]:
        """The subscription, and whether it was created now. `SubscriptionNotFound` if it is not to be created,
        `SubscriptionKindConflict` if it exists as another kind."""
        _check_start(check_name("subscription", name), start)
        async with self._turn(topic, name):
            entry = await self._read(topic, name)
            if entry is None:
                if not create:
                    raise _not_found(topic, name)
                return await self._create(topic, name, kind, start), True
            found = decode(Subscription, entry.value)
            if found.kind is not kind:
                raise SubscriptionKindConflict(
                    f"subscription {name} of {topic} is a {found.kind.value} subscription, "
                    f"it cannot be used as a {kind.value} one; use another name"
                )
            return found, False

    async def create(self, topic: TopicName, name: str, *, kind: SubscriptionKind, start: str) -> Subscription:
        _check_start(check_name("subscription", name), start)
        async with self._turn(topic, name):
            if await self._read(topic, name) is not None:
                raise SubscriptionExists(f"subscription {name} of {topic} cannot be created: it exists")
            return await self._create(topic, name, kind, start)

    async def get(self, topic: TopicName, name: str) -> Subscription:
        entry = await self._read(topic, name)
        if entry is None:
            raise _not_found(topic, name)
        return decode(Subscription, entry.value)

    async def list(self, topic: TopicName) -> dict[str, Subscription]:
        """By name."""
        self._topics.get(topic.path)
        return await self._list(topic.path)

    async def delete(self, topic: TopicName, name: str) -> None:
        """Its channels are closed. An interrupted deletion is finished by the next one."""
        async with self._turn(topic, name):
            entry = await self._read(topic, name)
            segments = self._segments.of_topic(topic.path)
            if entry is None and all(segment.cursors.offset(name) is None for segment in segments):
                raise _not_found(topic, name)
            if entry is not None:
                await self._remove_key(topic, name)
            for segment in segments:
                message = f"subscription {name} of {topic} was deleted"
                segment.close_channels(name, SubscriptionNotFound.code, message)
            for segment in segments:
                await segment.cursors.remove(name)

    async def seek_to(self, topic: TopicName, name: str, place: str) -> dict[SegmentId, Offset]:
        """Go to `earliest` or `latest` in every segment. All seeks return the new offsets."""
        _check_start(name, place)

        async def find(segment: Segment) -> Offset:
            return segment.earliest if place == EARLIEST else segment.end

        return await self._seek(topic, name, None, find)

    async def seek_to_time(self, topic: TopicName, name: str, timestamp_us: int) -> dict[SegmentId, Offset]:
        """Go to the first records at or after this time."""
        return await self._seek(topic, name, None, lambda segment: segment.offset_at_time(timestamp_us))

    async def seek_to_offsets(
        self, topic: TopicName, name: str, offsets: dict[SegmentId, Offset]
    ) -> dict[SegmentId, Offset]:
        """Go to these offsets; segments that are not named stay where they are."""

        async def find(segment: Segment) -> Offset:
            offset = offsets[segment.name.id]
            if not segment.earliest <= offset <= segment.end:
                raise InvalidArgument(
                    f"subscription {name} cannot go to offset {offset} of {segment.name}: "
                    f"choose one from {segment.earliest} to {segment.end}"
                )
            return offset

        return await self._seek(topic, name, [*offsets], find)

    async def skip(self, topic: TopicName, name: str, segment_id: SegmentId, count: int) -> dict[SegmentId, Offset]:
        """Leave out the next `count` records of one segment, or as many as it has. To skip everything, seek to the
        latest."""
        if count < 1:
            raise InvalidArgument(f"{count} records cannot be skipped; skip 1 or more")

        async def find(segment: Segment) -> Offset:
            offset = self._offset(topic, name, segment)
            return Offset(min(max(offset, segment.earliest) + count, segment.end))

        return await self._seek(topic, name, [segment_id], find)

    def progress(self, topic: TopicName, name: str) -> dict[SegmentId, Progress]:
        """By segment, of those that are served here."""
        return {
            segment.name.id: Progress(offset, segment.earliest, segment.end)
            for segment in self._segments.of_topic(topic.path)
            if (offset := segment.cursors.offset(name)) is not None
        }

    async def sweep(self) -> int:
        """Remove cursors whose subscription does not exist: leftovers of a creation or deletion that a crash ended.
        Returns how many."""
        removed = 0
        for path in self._topics.all():
            for segment in self._segments.of_topic(path):
                for name in segment.cursors.all():
                    async with self._turn(segment.name.topic, name):
                        if await self._store.get(paths.subscription(path, name)) is None:
                            await segment.cursors.remove(name)
                            removed += 1
        return removed

    async def _create(self, topic: TopicName, name: str, kind: SubscriptionKind, start: str) -> Subscription:
        if kind is SubscriptionKind.QUEUE:
            raise NotAvailable(
                f"subscription {name} of {topic} cannot be a queue: queue subscriptions come in a later version"
            )
        subscription = Subscription(kind=kind, created_at=self._clock.now_us())
        key = paths.subscription(topic.path, name)
        for _ in range(MAX_TRIES):
            unchanged = self._topics.unchanged(topic.path)
            for segment in self._all_segments(topic):
                offset = segment.earliest if start == EARLIEST else segment.end
                await segment.sync_to(offset)
                await segment.cursors.place(name, offset)
            try:
                result = await self._store.txn([unchanged, Compare(key, Revision(0))], [Put(key, encode(subscription))])
                if result.succeeded:
                    return subscription
            except MetadataUncertain:
                pass
            entry = await self._store.get(key)
            if entry is not None:
                return decode(Subscription, entry.value)  # This write, or that of another broker.
            # The topic has changed, or the write is under way: once more with the topic as it is now.
            await asyncio.sleep(RETRY_S)
        raise MetadataUncertain(f"it is not known whether subscription {name} of {topic} was created; try again")

    async def _remove_key(self, topic: TopicName, name: str) -> None:
        key = paths.subscription(topic.path, name)
        for _ in range(MAX_TRIES):
            entry = await self._store.get(key)
            if entry is None:
                return
            try:
                result = await self._store.txn([Compare(key, entry.revision)], [Delete(key)])
                if result.succeeded:
                    return
            except MetadataUncertain:
                continue
        raise MetadataUncertain(f"it is not known whether subscription {name} of {topic} was deleted; try again")

    async def _seek(
        self,
        topic: TopicName,
        name: str,
        segment_ids: Sequence[SegmentId] | None,
        find: Callable[[Segment], Awaitable[Offset]],
    ) -> dict[SegmentId, Offset]:
        """All places are found before the first cursor moves: a seek that cannot be changes nothing."""
        async with self._turn(topic, name):
            await self.get(topic, name)
            if segment_ids is None:
                segments = self._all_segments(topic)
            else:
                segments = [self._segments.get(topic.path, segment_id) for segment_id in segment_ids]
            places = [(segment, min(await find(segment), segment.end)) for segment in segments]
            for segment, offset in places:
                await segment.sync_to(offset)
                await segment.cursors.place(name, offset)
                # At once, before an ack that is under way on an old channel can move the cursor.
                segment.close_channels(name, operations.RESET, f"subscription {name} was set to offset {offset}")
            return {segment.name.id: offset for segment, offset in places}

    def _all_segments(self, topic: TopicName) -> Sequence[Segment]:
        """Every segment of the layout; `NotServing` if one is not served here now."""
        layout = self._topics.get(topic.path).layout
        return [self._segments.get(topic.path, segment_id) for segment_id in layout.segments]

    def _offset(self, topic: TopicName, name: str, segment: Segment) -> Offset:
        offset = segment.cursors.offset(name)
        if offset is None:
            raise _not_found(topic, name)
        return offset

    async def _read(self, topic: TopicName, name: str) -> Entry | None:
        self._topics.get(topic.path)
        return await self._store.get(paths.subscription(topic.path, name))

    async def _list(self, path: str) -> dict[str, Subscription]:
        listing = await self._store.list(paths.subscriptions_prefix(path))
        return {
            name: decode(Subscription, entry.value)
            for entry in listing.entries
            if (name := paths.subscription_of(entry.key)) is not None
        }

    def _turn(self, topic: TopicName, name: str) -> AbstractAsyncContextManager[None]:
        """One change of a subscription at a time."""
        return self._turns.of(paths.subscription(topic.path, name))


def _check_start(name: str, start: str) -> None:
    if start not in (EARLIEST, LATEST):
        raise InvalidArgument(f"subscription {name} cannot start at {start!r}; write '{EARLIEST}' or '{LATEST}'")


def _not_found(topic: TopicName, name: str) -> SubscriptionNotFound:
    return SubscriptionNotFound(f"there is no subscription {name} of {topic}; create it first")
