"""The topics, as this broker knows them. The metadata store is the truth; the view follows it (metadata/view.py).

A write of this broker takes that way too: `create` returns when the view has brought it back.

A write whose answer was lost is read back. It may be repeated, because every write compares the revision of the key
that it changes: of several that arrive, late or not, one at most succeeds, and a topic's random id tells whose it was.
A client may repeat a whole call, too, through another broker: a topic is stored with the id of the request that created
it, and a deletion names the id of the topic that it is about.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

import msgspec

from braid.metadata import paths
from braid.metadata.store import Compare, Delete, Operation, Put
from braid.metadata.view import Table, View
from braid.model.errors import MetadataUncertain, TopicExists, TopicNotFound
from braid.model.ids import NO_REQUEST, RequestId, Revision, random_id
from braid.model.layout import Layout
from braid.model.names import TopicName
from braid.model.topic import Topic, TopicPolicies
from braid.ports.clock import Clock

MAX_TRIES: Final = 5
"""How often a write is tried whose answer was lost, or that met a change of somebody else."""


class Topics:
    def __init__(self, view: View, clock: Clock, random: random.Random) -> None:
        self.view = view
        self._store = view.store
        self._table: Table[str, Topic] = view.add(
            Table(paths.TOPICS_PREFIX, paths.topic_of_layout, Topic.from_json, paths.layout)
        )
        self._clock = clock
        self._random = random

    @property
    def generation(self) -> int:
        """The metadata revision that this view reflects."""
        return self.view.generation

    @property
    def on_change(self) -> list[Callable[[str], None]]:
        """Called with a topic's path after the view of it has changed."""
        return self._table.on_change

    def find(self, path: str) -> Topic | None:
        topic = self._table.get(path)
        return topic if topic is not None and not topic.deleting else None

    def get(self, path: str) -> Topic:
        topic = self.find(path)
        if topic is None:
            raise TopicNotFound(f"there is no topic {path}; create it first")
        return topic

    def all(self) -> dict[str, Topic]:
        """By path, also those that are being deleted."""
        return self._table.all()

    def unchanged(self, path: str) -> Compare:
        """Holds while the topic is as this view shows it. What is written below a topic carries it, so that nothing
        is left below one that was deleted meanwhile. `TopicNotFound`"""
        self.get(path)
        return self._table.unchanged(path)

    def mark(self, path: str) -> Compare | None:
        """Holds while the topic is being deleted, and is the one that this view shows; None if it is not."""
        topic = self._table.get(path)
        return self._table.unchanged(path) if topic is not None and topic.deleting else None

    async def stored(self, path: str) -> Topic | None:
        """As the store has it now, also if it is being deleted; the view has caught up with that."""
        entry = await self._store.get(paths.layout(path))
        if entry is None:
            return None
        await self.view.caught_up(entry.revision)
        return Topic.from_json(entry.value)

    async def create(
        self,
        name: TopicName,
        *,
        segments: int,
        policies: TopicPolicies,
        properties: dict[str, str],
        request_id: RequestId = NO_REQUEST,
    ) -> Topic:
        """`TopicExists`, unless the one that exists was created by an earlier try of this request."""
        layout = msgspec.structs.replace(Layout.initial(segments), properties=properties)
        topic = Topic(
            id=random_id(self._random),
            layout=layout,
            policies=policies,
            created_at=self._clock.now_us(),
            created_by=request_id,
        )
        key = paths.layout(name.path)
        for _ in range(MAX_TRIES):
            revision = await self._try([Compare(key, Revision(0))], Put(key, topic.to_json()))
            if revision is None:
                entry = await self._store.get(key)
                if entry is None:
                    continue
                found = Topic.from_json(entry.value)
                ours = found.id == topic.id or found.created_by == request_id != NO_REQUEST
                await self.view.caught_up(entry.revision)
                if not ours or found.deleting:
                    raise _exists(name, found)
                return found
            await self.view.caught_up(revision)
            return topic
        raise _unknown(f"whether topic {name} was created")

    async def mark_deleting(self, name: TopicName, topic_id: int | None = None) -> Topic:
        """From now on the topic does not exist for clients. Marking it again is fine. `TopicNotFound`, also if the one
        that exists has another id than the one that is meant."""
        key = paths.layout(name.path)
        for _ in range(MAX_TRIES):
            entry = await self._store.get(key)
            if entry is None:
                raise TopicNotFound(f"topic {name} cannot be deleted: it does not exist")
            topic = Topic.from_json(entry.value)
            if topic_id is None:
                topic_id = topic.id
            if topic_id != topic.id:
                raise TopicNotFound(f"topic {name} cannot be deleted: it was deleted, and created again since")
            revision: Revision | None = entry.revision
            if not topic.deleting:
                topic = msgspec.structs.replace(topic, deleting=True)
                revision = await self._try([Compare(key, entry.revision)], Put(key, topic.to_json()))
            if revision is not None:
                await self.view.caught_up(revision)
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
                await self.view.caught_up(revision)
                return
        raise _unknown(f"whether the record of topic {name} was removed")

    async def _try(self, conditions: list[Compare], operation: Operation) -> Revision | None:
        """The revision of the write; None when it is not known to have happened: read back."""
        try:
            result = await self._store.txn(conditions, [operation])
        except MetadataUncertain:
            return None
        return result.revision if result.succeeded else None


def _exists(name: TopicName, found: Topic) -> TopicExists:
    if found.deleting:
        return TopicExists(f"topic {name} is still being deleted; create it again when that is done")
    return TopicExists(f"topic {name} cannot be created: it exists")


def _unknown(what: str) -> MetadataUncertain:
    return MetadataUncertain(f"it is not known {what}: the metadata store's answers were lost; look, then try again")
