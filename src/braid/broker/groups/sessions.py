"""The keys of consumers' sessions, written by the topic's controller.

Every write carries the controller's fence among its conditions, so a former controller changes nothing. Writes of one
session take turns. If the key of an ended session could not be removed, a background task tries again. Keys that this
broker may not remove any more are removed by the next controller, when the session's grace has passed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Final

from braid.broker.keyed_locks import KeyedLocks
from braid.metadata import paths
from braid.metadata.store import Compare, Delete, Put
from braid.metadata.view import View
from braid.model.errors import (
    BraidError,
    MetadataError,
    MetadataUncertain,
    NotServing,
    SubscriptionNotFound,
    TopicNotFound,
)
from braid.model.ids import Revision
from braid.model.names import TopicName
from braid.model.stored_record import encode
from braid.model.subscription import ConsumerSession, is_group
from braid.ports.clock import Clock
from braid.ports.tasks import cancel

MAX_TRIES: Final = 5
RETRY_S: Final = 1.0
"""How long the removal of a session waits after the store did not answer."""

_log: Final = logging.getLogger(__name__)


class StoredSessions:
    def __init__(
        self,
        view: View,
        clock: Clock,
        fence: Callable[[TopicName], Compare | None],
        is_member: Callable[[TopicName, str, str], bool],
    ) -> None:
        """`fence` returns the condition that holds while this broker is the topic's controller, None if it is not.
        `is_member` tells whether a consumer has joined: its session must not be removed."""
        self._view = view
        self._store = view.store
        self._clock = clock
        self._fence = fence
        self._is_member = is_member
        self._locks = KeyedLocks()
        self._to_remove: dict[tuple[TopicName, str, str], None] = {}
        """By topic, subscription and consumer."""
        self._removing: asyncio.Task[None] | None = None
        self._closed = False

    def turn(self, topic: TopicName, subscription: str, consumer: str) -> AbstractAsyncContextManager[None]:
        """A lock: one change of a session at a time."""
        return self._locks.of(paths.consumer(topic.path, subscription, consumer))

    async def put(self, topic: TopicName, subscription: str, consumer: str, fence: Compare) -> None:
        """Store a session; the caller holds its `turn`. When this returns, this broker's view shows the subscription
        that the session is stored below, and no earlier one of that name. A group of checkpoint consumers has no key:
        its sessions only need the topic. After a failure the key is removed in the background."""
        value = encode(ConsumerSession(joined_at=self._clock.now_us()))
        group = is_group(subscription)
        parent = paths.layout(topic.path) if group else paths.subscription(topic.path, subscription)
        key = paths.consumer(topic.path, subscription, consumer)
        try:
            for _ in range(MAX_TRIES):
                joined = await self._store.get(parent)
                if joined is None and group:
                    raise TopicNotFound(f"there is no topic {topic}: it was deleted")
                if joined is None:
                    raise SubscriptionNotFound(f"there is no subscription {subscription} of {topic} to join")
                # An existing key is left from an ended session, or it is this write, whose answer was lost.
                entry = await self._store.get(key)
                if entry is not None and entry.value == value:
                    return await self._view.caught_up(entry.revision)
                before = Compare(key, entry.revision if entry is not None else Revision(0))
                try:
                    result = await self._store.txn([Compare(parent, joined.revision), before, fence], [Put(key, value)])
                except MetadataUncertain:
                    continue
                if result.succeeded:
                    return await self._view.caught_up(result.revision)
                if await self._is_fenced(fence):
                    raise NotServing(
                        f"this broker does not run the subscriptions of topic {topic} any more; join again"
                    )
            raise MetadataUncertain(
                f"it is not known whether consumer {consumer} joined subscription {subscription} of {topic}; join again"
            )
        except (BraidError, asyncio.CancelledError):
            self.remove_later(topic, subscription, consumer)
            raise

    async def remove(self, topic: TopicName, subscription: str, consumer: str) -> None:
        """Remove a session, unless a consumer of this name has joined again or another broker is the controller."""
        key = paths.consumer(topic.path, subscription, consumer)
        async with self.turn(topic, subscription, consumer):
            for _ in range(MAX_TRIES):
                fence = self._fence(topic)
                if fence is None or self._is_member(topic, subscription, consumer):
                    return
                entry = await self._store.get(key)
                if entry is None:
                    return
                try:
                    result = await self._store.txn([Compare(key, entry.revision), fence], [Delete(key)])
                except MetadataUncertain:
                    continue
                if result.succeeded or await self._is_fenced(fence):
                    return
        raise MetadataUncertain(f"it is not known whether the session of consumer {consumer} was removed; try again")

    def remove_later(self, topic: TopicName, subscription: str, consumer: str) -> None:
        self._to_remove[topic, subscription, consumer] = None
        if self._removing is None and not self._closed:
            self._removing = asyncio.create_task(self._remove_all(), name="remove consumer sessions")

    async def close(self) -> None:
        self._closed = True
        task, self._removing = self._removing, None
        if task is not None:
            await cancel([task])

    async def _remove_all(self) -> None:
        while self._to_remove:
            ended = next(iter(self._to_remove))
            try:
                await self.remove(*ended)
            except MetadataError as error:
                _log.warning("the session of consumer %s cannot be removed, trying again: %s", ended[2], error)
                await asyncio.sleep(RETRY_S)
            else:
                del self._to_remove[ended]
        self._removing = None

    async def _is_fenced(self, fence: Compare) -> bool:
        """Whether a write failed because this broker is not the controller any more."""
        entry = await self._store.get(fence.key)
        return entry is None or entry.revision != fence.revision
