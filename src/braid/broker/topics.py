"""This broker's view of all topics. The metadata store is the truth; the view follows it by a watch.

The view changes in one way only: the watch applies changes in the order of the store's revisions. A write of this
broker takes that way too: `create` returns when the watch has brought it back. So the view is always the whole truth of
one revision, its `generation`, and content never changes without the generation rising, which is what clients compare.

A write whose answer was lost is read back. It may be repeated, because every write compares the revision of the key
that it changes: of several that arrive, late or not, one at most succeeds, and a topic's random id tells whose it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from braid.metadata import paths
from braid.metadata.history import watching
from braid.metadata.store import Changes, Compare, Delete, Entry, Listing, Operation, Put, Store
from braid.model.errors import (
    BraidError,
    InvalidLayout,
    MetadataCompacted,
    MetadataCorrupt,
    MetadataUnavailable,
    MetadataUncertain,
    ShuttingDown,
    TopicExists,
    TopicNotFound,
)
from braid.model.ids import Revision
from braid.model.layout import Layout
from braid.model.names import TopicName
from braid.model.topic import Topic, TopicPolicies
from braid.ports.clock import Clock

log = logging.getLogger(__name__)

RETRY_S: Final = 0.5
"""How long the view waits before it asks a store again that did not answer."""
MAX_TRIES: Final = 5
"""How often a write is tried whose answer was lost, or that met a change of somebody else."""
MAX_TOPIC_ID: Final = (1 << 53) - 1
"""What every JSON parser reads exactly."""


class _Known(NamedTuple):
    topic: Topic
    revision: Revision


class Topics:
    def __init__(self, store: Store, clock: Clock, random: random.Random) -> None:
        self.generation = 0
        """The metadata revision that this view reflects."""
        self.on_change: list[Callable[[str], None]] = []
        """Called with a topic's path after the view of it has changed."""
        self.on_failure: Callable[[BaseException], None] | None = None
        """Told when the view can follow no more: our bug, or a store that is broken for good."""
        self._store = store
        self._clock = clock
        self._random = random
        self._known: dict[str, _Known] = {}
        self._waiting: list[tuple[Revision, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def load(self) -> None:
        """Read all topics, and follow their changes from there on."""
        listing = await self._store.list(paths.TOPICS_PREFIX)
        self._take_listing(listing)
        self._task = asyncio.create_task(self._follow(listing.revision), name="follow topics")
        self._task.add_done_callback(self._on_end)

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()
        self._fail_waiting()

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail_waiting()
            if self.on_failure is not None:
                self.on_failure(error)

    def _fail_waiting(self) -> None:
        for _, future in self._waiting:
            if not future.done():
                future.set_exception(_stopped())
        self._waiting.clear()

    def find(self, path: str) -> Topic | None:
        known = self._known.get(path)
        return known.topic if known is not None and not known.topic.deleting else None

    def get(self, path: str) -> Topic:
        topic = self.find(path)
        if topic is None:
            raise TopicNotFound(f"there is no topic {path}; create it first")
        return topic

    def all(self) -> dict[str, Topic]:
        """By path, also those that are being deleted."""
        return {path: known.topic for path, known in self._known.items()}

    def unchanged(self, path: str) -> Compare:
        """Holds while the topic is as this view shows it. What is written below a topic carries it, so that nothing
        is left below one that was deleted meanwhile. `TopicNotFound`"""
        self.get(path)
        return Compare(paths.layout(path), self._known[path].revision)

    async def create(
        self, name: TopicName, *, segments: int, policies: TopicPolicies, properties: dict[str, str]
    ) -> Topic:
        layout = msgspec.structs.replace(Layout.initial(segments), properties=properties)
        topic = Topic(
            id=self._random.randint(1, MAX_TOPIC_ID),
            layout=layout,
            policies=policies,
            created_at=self._clock.now_us(),
        )
        key = paths.layout(name.path)
        for _ in range(MAX_TRIES):
            revision = await self._try([Compare(key, Revision(0))], Put(key, topic.to_json()))
            if revision is None:
                entry = await self._store.get(key)
                if entry is None:
                    continue
                if entry.value != topic.to_json():
                    await self._caught_up(entry.revision)
                    raise self._exists(name, entry)
                revision = entry.revision
            await self._caught_up(revision)
            return topic
        raise _unknown(f"whether topic {name} was created")

    async def mark_deleting(self, name: TopicName) -> Topic:
        """From now on the topic does not exist for clients. Marking it again is fine."""
        key = paths.layout(name.path)
        for _ in range(MAX_TRIES):
            entry = await self._store.get(key)
            if entry is None:
                raise TopicNotFound(f"topic {name} cannot be deleted: it does not exist")
            topic = Topic.from_json(entry.value)
            revision: Revision | None = entry.revision
            if not topic.deleting:
                topic = msgspec.structs.replace(topic, deleting=True)
                revision = await self._try([Compare(key, entry.revision)], Put(key, topic.to_json()))
            if revision is not None:
                await self._caught_up(revision)
                return topic
        raise _unknown(f"whether topic {name} was marked as deleted")

    async def remove(self, name: TopicName) -> None:
        """Removes the record of a topic that is being deleted. Removing it again is fine."""
        key = paths.layout(name.path)
        for _ in range(MAX_TRIES):
            entry = await self._store.get(key)
            # One that is not marked is a new topic of the same name: the old one's record went before.
            if entry is None or not Topic.from_json(entry.value).deleting:
                return
            revision = await self._try([Compare(key, entry.revision)], Delete(key))
            if revision is not None:
                await self._caught_up(revision)
                return
        raise _unknown(f"whether the record of topic {name} was removed")

    async def _try(self, conditions: list[Compare], operation: Operation) -> Revision | None:
        """The revision of the write; None when it is not known to have happened: read back."""
        try:
            result = await self._store.txn(conditions, [operation])
        except MetadataUncertain:
            return None
        return result.revision if result.succeeded else None

    def _exists(self, name: TopicName, entry: Entry) -> TopicExists:
        if Topic.from_json(entry.value).deleting:
            return TopicExists(f"topic {name} is still being deleted; create it again when that is done")
        return TopicExists(f"topic {name} cannot be created: it exists")

    # Following the store.

    async def _caught_up(self, revision: Revision) -> None:
        if self.generation < revision:
            if self._task is None or self._task.done():
                raise _stopped()
            future = asyncio.get_running_loop().create_future()
            self._waiting.append((revision, future))
            await future

    async def _follow(self, after: Revision) -> None:
        while True:
            # What a watch cannot go on from (its history is gone, its client is closed), a new listing tells.
            with contextlib.suppress(MetadataCompacted, MetadataUnavailable):
                async with watching(self._store, paths.TOPICS_PREFIX, after) as watch:
                    async for changes in watch:
                        self._apply(changes)
            listing = await self._list_again()
            self._take_listing(listing)
            after = listing.revision

    async def _list_again(self) -> Listing:
        while True:
            try:
                return await self._store.list(paths.TOPICS_PREFIX)
            except MetadataUnavailable as error:
                log.warning("the topics cannot be listed, trying again: %s", error)
                await asyncio.sleep(RETRY_S)

    def _apply(self, changes: Changes) -> None:
        changed = []
        for event in changes.events:
            path = paths.topic_of_layout(event.key)
            if path is not None and self._set(path, event.value, event.revision):
                changed.append(path)
        self._reached(changes.revision, changed)

    def _take_listing(self, listing: Listing) -> None:
        entries = {path: entry for entry in listing.entries if (path := paths.topic_of_layout(entry.key)) is not None}
        changed = [path for path in [*self._known] if path not in entries and self._set(path, None, listing.revision)]
        changed += [path for path, entry in entries.items() if self._set(path, entry.value, entry.revision)]
        self._reached(listing.revision, changed)

    def _set(self, path: str, value: bytes | None, revision: Revision) -> bool:
        """Whether this changed the view."""
        known = self._known.get(path)
        if value is None:
            return self._known.pop(path, None) is not None
        if known is not None and known.revision == revision:
            return False
        try:
            self._known[path] = _Known(Topic.from_json(value), revision)
        except (MetadataCorrupt, InvalidLayout) as error:
            # One record that this build cannot read must not cost the others; what is known of it stays.
            log.error("topic %s: %s", path, error)
            return False
        return True

    def _reached(self, revision: Revision, changed: list[str]) -> None:
        self.generation = max(self.generation, revision)
        for path in changed:
            for callback in self.on_change:
                callback(path)
        due = [future for waits_for, future in self._waiting if waits_for <= self.generation]
        self._waiting = [each for each in self._waiting if each[0] > self.generation]
        for future in due:
            if not future.done():
                future.set_result(None)


def _stopped() -> BraidError:
    return ShuttingDown("this broker no longer follows the topics: it is shutting down; ask another one")


def _unknown(what: str) -> MetadataUncertain:
    return MetadataUncertain(f"it is not known {what}: the metadata store's answers were lost; look, then try again")
