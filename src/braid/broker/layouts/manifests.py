"""The manifests of topics: storage alone tells which segments a topic has.

A broker that opens a segment writes the layout that it sees. The layout may change while the segment is open: a
transition is committed, or a sealed segment is dropped. Every broker that serves a segment of the topic then writes the
new layout. In shared storage they write the same object, and the first one counts.

No segment waits for storage that is away. A write that has failed is tried again in the background.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from braid.broker.keyed_locks import KeyedLocks
from braid.broker.topics import Topics
from braid.model.errors import BraidError
from braid.model.ids import LayoutEpoch
from braid.ports.tasks import TaskScope, cancel
from braid.storage.history.manifest import write_topic_manifest
from braid.storage.objects.store import Objects

RETRY_S: Final = 1.0

_log: Final = logging.getLogger(__name__)


class TopicManifests:
    def __init__(self, topics: Topics, objects: Objects, serves: Callable[[str], bool]) -> None:
        """`serves` tells whether this broker serves a segment of the topic of this path."""
        self._topics = topics
        self._objects = objects
        self._serves = serves
        self._written: dict[str, tuple[int, LayoutEpoch]] = {}
        """By a topic's path: the topic's id, and the layout that this broker has written last."""
        self._locks = KeyedLocks()
        """By a topic's path: a thousand of its segments may be opened together, and one of them writes."""
        self._writing = TaskScope[str]()
        """By a topic's path: the tasks that write in the background."""
        topics.on_change.append(self.look)

    async def stop(self) -> None:
        await cancel([*self._writing])

    async def write(self, path: str) -> None:
        """Return when the layout of a topic is written, or when that has failed: then a task goes on trying."""
        async with self._locks.of(path):
            while path not in self._writing and self._is_due(path):
                if not await self._write(path):
                    self._write_later(path)

    def look(self, path: str) -> None:
        """Write the layout of a topic in the background, if it has changed. Called when the topic has changed, and when
        a segment of it has been opened."""
        if self._topics.find(path) is None:
            self._written.pop(path, None)
        elif self._is_due(path) and self._serves(path):
            self._write_later(path)

    def _write_later(self, path: str) -> None:
        if path not in self._writing:
            self._writing.start(path, self._write_until_done(path), name=f"manifest of {path}")

    async def _write_until_done(self, path: str) -> None:
        while self._is_due(path):
            if not await self._write(path):
                await asyncio.sleep(RETRY_S)

    def _is_due(self, path: str) -> bool:
        topic = self._topics.find(path)
        return topic is not None and self._written.get(path) != (topic.id, topic.layout.epoch)

    async def _write(self, path: str) -> bool:
        """Write the layout of a topic as it is now. Return False if storage is away."""
        topic, revision = self._topics.get(path), self._topics.unchanged(path).revision
        try:
            await write_topic_manifest(self._objects, path, revision, topic.layout, topic.id)
        except BraidError as error:
            _log.warning("the manifest of %s was not written: %s", path, error)
            return False
        self._written[path] = (topic.id, topic.layout.epoch)
        return True
