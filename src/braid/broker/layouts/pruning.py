"""Dropping sealed segments from the layout, when their records are gone.

The owner of a sealed segment drops it when its log has outlived the topic's retention to its end, every subscription
has consumed it (or retention does not wait for subscriptions), its own parents are gone, and no transition that made it
a parent is still to be finalized. The layout forgets the segment in one write; then its owner removes what is left of
it (removal.py). The children keep what it knew of producers: they have inherited it.

So the layout of a topic that is split and merged for ever stays as long as its retention, not as its history. A topic
that keeps all records keeps all segments, also empty ones. Under a limit, an empty segment stays as long as a record
would that was written when the segment ended.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from braid.broker.segments.owned_segment import OwnedSegment
from braid.broker.segments.segments import Segments
from braid.broker.topics import Topics
from braid.cluster.owners import Owners
from braid.metadata import paths
from braid.metadata.store import Compare
from braid.model.errors import BraidError
from braid.model.topic import Topic
from braid.ports.tasks import end

ROUND_S: Final = 60.0

_log: Final = logging.getLogger(__name__)


class Pruning:
    def __init__(self, topics: Topics, owners: Owners, segments: Segments) -> None:
        self._topics = topics
        self._owners = owners
        self._segments = segments
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="prune layouts")

    async def stop(self) -> None:
        task, self._task = self._task, None
        await end(task)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(ROUND_S)
            await self.go_round()

    async def go_round(self) -> None:
        """Drop what can be dropped, the oldest segments first: each may make way for its children."""
        for segment in sorted(self._segments.all(), key=lambda each: each.name.id):
            try:
                topic = self._topics.find(segment.name.topic.path)
                if topic is not None and self._has_ended(segment, topic) and segment.has_outlived_retention():
                    await self._prune(segment)
            except BraidError as error:
                _log.warning("%s could not be dropped from the layout: %s", segment.name, error)

    def _has_ended(self, segment: OwnedSegment, topic: Topic) -> bool:
        """Tell whether the layout needs the segment only for its records."""
        info = topic.layout.segments.get(segment.name.id)
        if info is None or info.is_active or info.parent_ids or topic.id != segment.topic_id:
            return False
        mark = self._topics.committed.get(segment.name.topic.path)
        return mark is None or segment.name.id not in mark.parents

    async def _prune(self, segment: OwnedSegment) -> None:
        known = self._owners.known(segment.name)
        if known is None or known.value.epoch != segment.epoch:
            return
        key = paths.ownership(segment.name.topic.path, segment.name.descriptor)
        if await self._topics.prune(segment.name.topic, segment.name.id, [Compare(key, known.revision)]):
            _log.info("%s is dropped from its layout: its records are gone", segment.name)
