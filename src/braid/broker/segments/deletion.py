"""Deleting topics, to the end, wherever their parts lie.

A topic that is marked as *deleting* does not exist for clients any more. Then every broker that sees the mark ends what
it serves of it and removes what its own disk holds; the owner of a segment also removes the segment's chunks, cursors
and, last, its ownership record. The cluster leader finishes: it does so for owners that are not there, waits until no
record is left, and removes what belongs to the topic as a whole, its own record last. The broker that was asked waits
until that is gone. Every step can be repeated after a crash anywhere.

A topic of the same name may be made as soon as the record is gone, and it uses the same keys and names of objects. So
whoever is slow must not go on with what he began: keys are deleted only while the mark is the one that he saw, and
before each object he looks whether it is, and whether he may still act.

Unloading a segment is another thing, and takes another way (handover.py): nothing here is ever reached from a move.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Final

from braid.broker.keyed_locks import KeyedLocks
from braid.broker.segments.segments import Segments
from braid.broker.topics import Topics
from braid.cluster.members import Members
from braid.cluster.owners import Owners
from braid.metadata import paths
from braid.metadata.store import MAX_TXN_OPERATIONS, Compare, Condition, Delete
from braid.metadata.view import Known
from braid.model.errors import BraidError, Fenced, MetadataUncertain
from braid.model.names import SegmentName, TopicName
from braid.model.ownership import Ownership
from braid.ports.tasks import TaskScope, all_of, cancel
from braid.storage.history.manifest import segment_folder
from braid.storage.segment import StorageContext, StorageMode

REMOVED_AT_ONCE: Final = 16
RETRY_S: Final = 1.0
LOOK_S: Final = 1.0
"""How often somebody who waits for other brokers' parts looks whether one of them has gone."""

_log: Final = logging.getLogger(__name__)


class Deletion:
    def __init__(
        self,
        context: StorageContext,
        topics: Topics,
        owners: Owners,
        members: Members,
        segments: Segments,
        *,
        may_act: Callable[[], bool],
        leads: Callable[[], bool],
    ) -> None:
        """`may_act` tells whether this broker's lease holds, `leads` whether it is the cluster's leader, too."""
        self._may_act = may_act
        self._leads = leads
        self._context = context
        self._store = context.store
        self._topics = topics
        self._owners = owners
        self._members = members
        self._segments = segments
        self._locks = KeyedLocks()
        """By a topic's path: one finisher on this broker."""
        self._dropping = TaskScope[str]()
        """By a topic's path, as are the next."""
        self._finishing = TaskScope[str]()

    def start(self) -> None:
        """When the segments are open: take up what a crash interrupted, and whatever is marked from now on."""
        self._topics.on_change.append(self._reconcile)
        for path in self._topics.all():
            self._reconcile(path)

    async def stop(self) -> None:
        with contextlib.suppress(ValueError):
            self._topics.on_change.remove(self._reconcile)
        await cancel([*self._dropping, *self._finishing])

    async def delete(self, name: TopicName, topic_id: int | None = None) -> None:
        """Returns when nothing of the topic is left. `TopicNotFound`, also if only one with another id is there."""
        await self._topics.mark_deleting(name, topic_id)
        mark = self._topics.mark(name.path)
        await self._owners.view.until(lambda: mark is None or self._topics.mark(name.path) != mark)

    def finish_later(self, path: str) -> None:
        """Called while this broker leads: a topic is being deleted. May be called again and again."""
        if path not in self._finishing:
            self._finishing.start(path, self._until_done(TopicName.parse(path)), name=f"delete {path}")

    async def _until_done(self, name: TopicName) -> None:
        try:
            await self._finish(name)
        except BraidError as error:
            _log.warning("topic %s is still to be deleted: %s", name, error)

    # What is this broker's own.

    def _reconcile(self, path: str) -> None:
        if self._topics.mark(path) is not None and path not in self._dropping:
            self._dropping.start(path, self._drop(TopicName.parse(path)), name=f"drop {path}")

    async def _drop(self, name: TopicName) -> None:
        dropped: Compare | None = None
        # Meanwhile the topic may have been deleted to the end, and made again, and be deleted again.
        while (mark := self._topics.mark(name.path)) not in (None, dropped):
            assert mark is not None
            try:
                await self._segments.drop_topic(name)
                # Until this broker's view shows none: a write of its own, just before, may not have been in it.
                while own := self._own_records(name):
                    seen = self._owners.view.changes
                    for first in range(0, len(own), REMOVED_AT_ONCE):
                        some = own[first : first + REMOVED_AT_ONCE]
                        await all_of(self._remove(*each, mark, self._may_act) for each in some)
                    await self._owners.view.changed_since(seen, LOOK_S)
                dropped = mark
            except BraidError as error:
                _log.warning("what this broker has of topic %s could not be removed yet: %s", name, error)
                await asyncio.sleep(RETRY_S)

    # What is everybody's.

    async def _finish(self, name: TopicName) -> None:
        async with self._locks.of(name.path):
            mark = self._topics.mark(name.path)
            if mark is None:
                return
            while records := self._records(name):
                self._check(mark, self._leads)
                seen = self._owners.view.changes
                for segment, known in records:
                    if not self._members.is_live(known.value.owner):
                        await self._remove(segment, known, mark, self._leads)
                await self._owners.view.changed_since(seen, LOOK_S)
            if (task := self._dropping.get(name.path)) is not None:
                await asyncio.wait([task])
            await self._delete_objects(name.path, mark, self._leads)
            # Cursors and chunks of segments without a record, too: a creation or deletion that a crash ended.
            for prefix in (
                paths.topic_segments_prefix(name.path),
                paths.topic_storage_prefix(name.path),
                paths.topic_prefix(name.path),
            ):
                await self._delete_keys([entry.key for entry in (await self._store.list(prefix)).entries], mark)
            self._check(mark, self._leads)
            await self._topics.remove(name)

    def _records(self, name: TopicName) -> list[tuple[SegmentName, Known[Ownership]]]:
        names = [SegmentName.at(name.path, each) for each in self._owners.of_topic(name.path)]
        return [(each, known) for each in names if (known := self._owners.known(each)) is not None]

    def _own_records(self, name: TopicName) -> list[tuple[SegmentName, Known[Ownership]]]:
        return [each for each in self._records(name) if each[1].value.owner == self._context.broker_id]

    async def _remove(self, name: SegmentName, known: Known[Ownership], mark: Compare, may: Callable[[], bool]) -> None:
        """All that shared storage and the metadata have of a segment; its ownership record last."""
        self._check(mark, may)
        key = paths.ownership(name.topic.path, name.descriptor)
        await self._delete_objects(segment_folder(name.topic.path, name.descriptor), mark, may)
        below = [
            entry.key
            for prefix in (
                paths.segment_storage_prefix(name.topic.path, name.descriptor),
                paths.cursors_prefix(name.topic.path, name.descriptor),
            )
            for entry in (await self._store.list(prefix)).entries
        ]
        with contextlib.suppress(MetadataUncertain):  # The view will tell.
            await self._delete_keys([*below, key], mark, Compare(key, known.revision))

    async def _delete_objects(self, folder: str, mark: Compare, may: Callable[[], bool]) -> None:
        if self._context.mode is StorageMode.LOCAL:
            return  # Each broker removes what its own disk holds (`drop_topic`).
        for stat in await self._context.objects.list(folder):
            self._check(mark, may)
            await self._context.objects.delete(stat.name)
        self._check(mark, may)
        await self._context.objects.delete_below(folder)  # Says that nothing comes back.

    async def _delete_keys(self, keys: Sequence[str], *conditions: Condition) -> None:
        """In this order."""
        room = MAX_TXN_OPERATIONS - len(conditions)
        for first in range(0, len(keys), room):
            await self._store.txn([*conditions], [Delete(key) for key in keys[first : first + room]])

    def _check(self, mark: Compare, may: Callable[[], bool]) -> None:
        path = paths.topic_of_layout(mark.key)
        assert path is not None
        if not may() or self._topics.mark(path) != mark:
            raise Fenced(f"topic {path} is not this broker's to delete any more")
