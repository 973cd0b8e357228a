"""Deleting topics completely, wherever their parts are.

A topic that is marked as *deleting* does not exist for clients any more. Every broker that sees the mark ends the
topic's segments that it serves, and removes what its own disk holds of the topic. The owner of a segment also removes
the segment's chunks, cursors and, last, its ownership record. The cluster leader finishes: it does the same for owners
that are down, waits until no ownership record is left, and removes what belongs to the topic as a whole, the topic's
record last. The broker that was asked waits until that record is gone. Every step can be repeated after a crash
anywhere.

A topic of the same name may be created as soon as the record is gone, and it uses the same keys and names of objects.
So a slow broker must not go on with a deletion that is over. It deletes keys only while the mark is the one that it
saw. Before each object it checks that the mark is still the same, and that it may still act.

Handing over a segment is something else (handover.py): a move never gets here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

from braid.broker.keyed_locks import KeyedLocks
from braid.broker.segments.segments import Segments
from braid.broker.topics import Topics
from braid.cluster.members import Members
from braid.cluster.owners import Owners
from braid.cluster.segment_keys import delete_keys, delete_segment_keys
from braid.metadata import paths
from braid.metadata.store import Compare
from braid.metadata.view import Known
from braid.model.errors import BraidError, Fenced, ForeignFile, MetadataUncertain
from braid.model.names import SegmentName, TopicName
from braid.model.ownership import Ownership
from braid.ports.tasks import TaskScope, all_of, cancel
from braid.storage.context import StorageContext, StorageMode
from braid.storage.history.manifest import segment_folder

MAX_REMOVING: Final = 16
RETRY_S: Final = 1.0
LOOK_S: Final = 1.0
"""How often a broker that waits for the others' parts of a deletion looks whether one of them is down."""

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
        """`may_act` tells whether this broker's lease holds, `leads` whether it is also the cluster's leader."""
        self._may_act = may_act
        self._leads = leads
        self._context = context
        self._store = context.store
        self._topics = topics
        self._owners = owners
        self._members = members
        self._segments = segments
        self._locks = KeyedLocks()
        """By a topic's path: one task at a time finishes the deletion."""
        self._obstacles: dict[str, ForeignFile] = {}
        """By a topic's path: why this broker cannot remove its own part before somebody has made way."""
        self._dropping = TaskScope[str]()
        """By a topic's path: this broker's own part of the deletion."""
        self._finishing = TaskScope[str]()
        """By a topic's path: the leader's part."""

    def start(self) -> None:
        """Go on with deletions that a crash interrupted, and follow new marks. Called when the segments are open."""
        self._topics.on_change.append(self._reconcile)
        for path in self._topics.all():
            self._reconcile(path)

    async def stop(self) -> None:
        with contextlib.suppress(ValueError):
            self._topics.on_change.remove(self._reconcile)
        await cancel([*self._dropping, *self._finishing])

    async def delete(self, name: TopicName, topic_id: int | None = None) -> None:
        """Delete a topic; return when nothing of it is left. `TopicNotFound`, also if the topic of this name has
        another id than `topic_id`. `ForeignFile` if a file that is not Braid's keeps this broker from removing its
        part: clients see the topic no more, and the rest follows when the file is gone."""
        await self._topics.mark_deleting(name, topic_id)
        mark = self._topics.mark(name.path)
        while mark is not None and self._topics.mark(name.path) == mark:
            if (obstacle := self._obstacles.get(name.path)) is not None:
                raise obstacle.again()
            await self._owners.view.until(lambda: self._topics.mark(name.path) != mark, LOOK_S)

    def finish_later(self, path: str) -> None:
        """Finish the deletion of a topic in the background. Called while this broker leads, possibly many times."""
        if path not in self._finishing:
            self._finishing.start(path, self._until_done(TopicName.parse(path)), name=f"delete {path}")

    async def _until_done(self, name: TopicName) -> None:
        try:
            await self._finish(name)
        except BraidError as error:
            _log.warning("topic %s is still to be deleted: %s", name, error)

    # This broker's own part.

    def _reconcile(self, path: str) -> None:
        if self._topics.mark(path) is not None and path not in self._dropping:
            self._dropping.start(path, self._drop(TopicName.parse(path)), name=f"drop {path}")

    async def _drop(self, name: TopicName) -> None:
        dropped: Compare | None = None
        # Meanwhile the topic may have been deleted completely, created again, and marked again.
        while (mark := self._topics.mark(name.path)) not in (None, dropped):
            assert mark is not None
            try:
                await self._segments.drop_topic(name)
                # Until this broker's view shows none: the view may not yet have shown a write of this broker.
                while own := self._own_records(name):
                    seen = self._owners.view.changes
                    for first in range(0, len(own), MAX_REMOVING):
                        some = own[first : first + MAX_REMOVING]
                        await all_of(self._remove(*each, mark, self._may_act) for each in some)
                    await self._owners.view.changed_since(seen, LOOK_S)
                dropped = mark
            except BraidError as error:
                if isinstance(error, ForeignFile):
                    self._obstacles[name.path] = error
                _log.warning("what this broker has of topic %s could not be removed yet: %s", name, error)
                await asyncio.sleep(RETRY_S)
        self._obstacles.pop(name.path, None)

    # The leader's part.

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
            # Also cursors and chunks of segments without a record, which a crash in a creation or deletion has left.
            for prefix in (
                paths.topic_segments_prefix(name.path),
                paths.topic_storage_prefix(name.path),
                paths.topic_prefix(name.path),
            ):
                await delete_keys(self._store, [entry.key for entry in (await self._store.list(prefix)).entries], mark)
            self._check(mark, self._leads)
            await self._topics.remove(name)

    def _records(self, name: TopicName) -> list[tuple[SegmentName, Known[Ownership]]]:
        names = [SegmentName.at(name.path, each) for each in self._owners.of_topic(name.path)]
        return [(each, known) for each in names if (known := self._owners.known(each)) is not None]

    def _own_records(self, name: TopicName) -> list[tuple[SegmentName, Known[Ownership]]]:
        return [each for each in self._records(name) if each[1].value.owner == self._context.broker_id]

    async def _remove(self, name: SegmentName, known: Known[Ownership], mark: Compare, may: Callable[[], bool]) -> None:
        """Remove all that shared storage and the metadata have of a segment, its ownership record last."""
        self._check(mark, may)
        await self._delete_objects(segment_folder(name.topic.path, name.descriptor), mark, may)
        with contextlib.suppress(MetadataUncertain):  # The view will show whether the keys are gone.
            await delete_segment_keys(self._store, name, known, mark)

    async def _delete_objects(self, folder: str, mark: Compare, may: Callable[[], bool]) -> None:
        if self._context.mode is StorageMode.LOCAL:
            return  # Each broker removes what its own disk holds (`drop_topic`).
        for stat in await self._context.objects.list(folder):
            self._check(mark, may)
            await self._context.objects.delete(stat.name)
        self._check(mark, may)
        await self._context.objects.delete_below(folder)  # When this has returned, a crash brings nothing back.

    def _check(self, mark: Compare, may: Callable[[], bool]) -> None:
        path = paths.topic_of_layout(mark.key)
        assert path is not None
        if not may() or self._topics.mark(path) != mark:
            raise Fenced(f"topic {path} is not this broker's to delete any more")
