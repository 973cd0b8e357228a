"""Writing each new layout into the topic's manifest, so that storage alone tells which segments there are.

A broker that opens a segment writes the manifest of the layout that it sees (broker/segments/opening.py). The layout
may change while the segment is open: a transition is committed, or a sealed segment is dropped. Every broker that
serves a segment of the topic then writes the new layout. In shared storage they write the same object, and the first
one counts.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from braid.broker.segments.segments import Segments
from braid.broker.topics import Topics
from braid.model.errors import BraidError
from braid.model.ids import LayoutEpoch
from braid.ports.tasks import TaskScope, cancel
from braid.storage.history.manifest import write_topic_manifest
from braid.storage.objects.store import Objects

RETRY_S: Final = 1.0

_log: Final = logging.getLogger(__name__)


class LayoutManifests:
    def __init__(self, topics: Topics, segments: Segments, objects: Objects) -> None:
        self._topics = topics
        self._segments = segments
        self._objects = objects
        self._written: dict[str, LayoutEpoch] = {}
        """By a topic's path: the layout that this broker has written last."""
        self._writing = TaskScope[str]()
        """By a topic's path."""
        topics.on_change.append(self._on_topic)

    async def stop(self) -> None:
        await cancel([*self._writing])

    def _on_topic(self, path: str) -> None:
        topic = self._topics.find(path)
        if topic is None:
            self._written.pop(path, None)
        elif topic.layout.epoch == self._written.get(path, 0) or path in self._writing:
            return
        elif self._segments.of_topic(path):
            self._writing.start(path, self._write(path), name=f"manifest of {path}")

    async def _write(self, path: str) -> None:
        while (topic := self._topics.find(path)) is not None and topic.layout.epoch != self._written.get(path):
            revision = self._topics.unchanged(path).revision
            try:
                await write_topic_manifest(self._objects, path, revision, topic.layout, topic.id)
                self._written[path] = topic.layout.epoch
            except BraidError as error:
                _log.warning("the manifest of %s was not written: %s", path, error)
                await asyncio.sleep(RETRY_S)
