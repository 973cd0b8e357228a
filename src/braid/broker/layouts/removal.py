"""Removing segments that a topic no longer has: children of an aborted transition, and segments that were pruned.

A segment's id is never given out again. So a segment that has an ownership record, and that the topic's record does not
name although its id was given out, will never be needed. Its owner ends it and removes all that is left of it, the
ownership record last. The cluster leader does the same for owners that are down, but for what lies on their disks.
Every step can be repeated after a crash anywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

from braid.broker.segments.segments import Segments
from braid.broker.topics import Topics
from braid.cluster.members import Members
from braid.cluster.owners import Owners, SegmentKey
from braid.cluster.segment_keys import delete_segment_keys
from braid.model.errors import BraidError, MetadataUncertain, ShuttingDown
from braid.model.names import SegmentName
from braid.ports.tasks import TaskScope, cancel
from braid.storage.context import StorageContext, StorageMode
from braid.storage.history.manifest import segment_folder
from braid.storage.history.object_names import topic_id_of

RETRY_S: Final = 1.0

_log: Final = logging.getLogger(__name__)


class SegmentRemoval:
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
        self._context = context
        self._topics = topics
        self._owners = owners
        self._members = members
        self._segments = segments
        self._may_act = may_act
        self._leads = leads
        self._removing = TaskScope[SegmentName]()

    def start(self) -> None:
        self._topics.on_change.append(self._on_topic)
        self._owners.table.on_change.append(self._on_record)
        for key in self._owners.table.all():
            self._on_record(key)

    async def stop(self) -> None:
        with contextlib.suppress(ValueError):  # It was never started.
            self._topics.on_change.remove(self._on_topic)
            self._owners.table.on_change.remove(self._on_record)
        await cancel([*self._removing])

    def look(self) -> None:
        """Look at the segments of owners that are down: nothing tells of them when their topic has done with them.
        Called while this broker leads, at each look."""
        live = self._members.brokers.all()
        for key, record in self._owners.table.all().items():
            if record.owner not in live:
                self._on_record(key)

    def _on_topic(self, path: str) -> None:
        for descriptor in self._owners.of_topic(path):
            self._on_record((path, descriptor))

    def _on_record(self, key: SegmentKey) -> None:
        name = SegmentName.at(*key)
        if name not in self._removing and self._is_to_remove(name):
            self._removing.start(name, self._remove_until_gone(name), name=f"remove {name}")

    def _is_to_remove(self, name: SegmentName) -> bool:
        """Tell whether the topic has done with the segment, and whether that is this broker's to carry out."""
        topic, record = self._topics.find(name.topic.path), self._owners.find(name)
        if topic is None or record is None or name.id in topic.segments or name.id >= topic.layout.next_segment_id:
            return False
        if record.owner == self._context.broker_id:
            return True
        return self._leads() and not self._members.is_live(record.owner)

    async def _remove_until_gone(self, name: SegmentName) -> None:
        while self._is_to_remove(name):
            seen = self._owners.view.changes
            try:
                if self._may_act():  # Otherwise the lease comes back, and the segment is still there.
                    await self._remove(name)
            except BraidError as error:
                _log.warning("%s, which its topic no longer has, could not be removed yet: %s", name, error)
                await asyncio.sleep(RETRY_S)
                continue
            try:
                await self._owners.view.changed_since(seen, RETRY_S)
            except ShuttingDown:
                return  # The leader, or this broker when it is back, removes it.

    async def _remove(self, name: SegmentName) -> None:
        topic, known = self._topics.find(name.topic.path), self._owners.known(name)
        if topic is None or known is None:
            return
        if known.value.owner == self._context.broker_id:
            await self._segments.drop(name)
        if self._context.mode is not StorageMode.LOCAL:
            await self._delete_objects(name, topic.id)
        with contextlib.suppress(MetadataUncertain):  # The view will show whether the keys are gone.
            await delete_segment_keys(self._context.store, name, known)

    async def _delete_objects(self, name: SegmentName, topic_id: int) -> None:
        """Delete the segment's objects, but none of a later topic of the same name."""
        objects, folder = self._context.objects, segment_folder(name.topic.path, name.descriptor)
        for stat in await objects.list(folder):
            topic = self._topics.find(name.topic.path)
            if topic is None or topic.id != topic_id:
                return
            if topic_id_of(stat.name.rpartition("/")[2]) in (0, topic_id):
                await objects.delete(stat.name)
        await objects.remove_empty_folders(folder)
