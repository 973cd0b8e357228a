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
import contextlib
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
SOON_S: Final = 1.0
"""After a layout has dropped a segment, its children may go, and their owners look again."""
TRIES: Final = 5
"""How often a segment is tried in one round, while other changes of the topic are faster."""

_log: Final = logging.getLogger(__name__)


class Pruning:
    def __init__(self, topics: Topics, owners: Owners, segments: Segments) -> None:
        self._topics = topics
        self._owners = owners
        self._segments = segments
        self._task: asyncio.Task[None] | None = None
        self._kept: dict[str, int] = {}
        """By a topic's path: how many segments its layout had last."""
        self._dropped = asyncio.Event()

    def start(self) -> None:
        self._topics.on_change.append(self._on_topic)
        self._task = asyncio.get_running_loop().create_task(self._run(), name="prune layouts")

    async def stop(self) -> None:
        with contextlib.suppress(ValueError):  # It was never started.
            self._topics.on_change.remove(self._on_topic)
        task, self._task = self._task, None
        await end(task)

    def _on_topic(self, path: str) -> None:
        """Notice that a layout has dropped a segment. Parents go before children, and may have other owners: a topic
        that changes often would otherwise wait for a round at each generation."""
        topic = self._topics.find(path)
        kept = len(topic.layout.segments) if topic is not None else 0
        if kept < self._kept.get(path, 0):
            self._dropped.set()
        self._kept[path] = kept
        if topic is None:
            del self._kept[path]

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ROUND_S):
                    await self._dropped.wait()
            await asyncio.sleep(SOON_S)
            self._dropped.clear()
            await self.go_round()

    async def go_round(self) -> None:
        """Drop what can be dropped, the oldest segments first: each may make way for its children."""
        for segment in sorted(self._segments.all(), key=lambda each: each.name.id):
            try:
                for _ in range(TRIES):
                    topic = self._topics.find(segment.name.topic.path)
                    if topic is None or not self._has_ended(segment, topic) or not segment.has_outlived_retention():
                        break
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
