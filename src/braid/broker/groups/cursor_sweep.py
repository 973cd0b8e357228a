"""The sweep: it makes the cursors of this broker's own segments fit the subscriptions that exist.

A creation or a deletion that was interrupted, or that did not reach a segment, leaves cursors without a subscription
there. They would hold back retention. A subscription may also lack a cursor (subscriptions.py says when).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from braid.broker.groups.subscriptions import Subscriptions, is_queue_record
from braid.broker.segments.segment_access import OwnedSegments, follow_cursor
from braid.broker.topics import Topics
from braid.metadata import paths
from braid.metadata.store import Store
from braid.model.errors import BraidError
from braid.model.subscription import Placing
from braid.ports.tasks import cancel

SWEEP_AGAIN_S: Final = 1.0
"""How long a sweep waits that failed, before it begins again: children of a transition get their cursors by it."""

_log: Final = logging.getLogger(__name__)


class CursorSweep:
    def __init__(self, store: Store, topics: Topics, segments: OwnedSegments, subscriptions: Subscriptions) -> None:
        self._store = store
        self._topics = topics
        self._segments = segments
        self._subscriptions = subscriptions
        self._waiting: dict[str, None] = {}
        """Topics that are to be swept, in this order."""
        self._sweeping: asyncio.Task[None] | None = None

    async def sweep(self, path: str | None = None) -> int:
        """Sweep one topic, or all. Cursors without a subscription are removed; return how many. A subscription may lack
        its cursor: a sweep removed the cursor during the creation, and the creating broker ended before it looked
        again. It gets a cursor at the earliest record: it may see some records twice, but skips none (I5)."""
        removed = 0
        for each in self._topics.all() if path is None else [path]:
            segments = self._segments.of_topic(each)
            known = await self._subscriptions.stored(each) if segments else {}
            for segment in segments:
                for name in sorted(segment.cursors.all().keys() ^ known.keys()):
                    async with self._subscriptions.lock(segment.name.topic, name):
                        entry = await self._store.get(paths.subscription(each, name))
                        if entry is None:
                            removed += await segment.cursors.remove(name)
                            await segment.queues.remove(name)
                        else:
                            placing = Placing(name, segment.earliest, only_if_absent=True, queue=is_queue_record(entry))
                            await segment.cursors.place(placing)
                            await follow_cursor(segment, name)
        return removed

    def sweep_later(self, path: str) -> None:
        """Sweep a topic in the background. Called when a segment of the topic is opened here: its last owner may have
        missed a deletion."""
        self._waiting[path] = None
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().create_task(self._sweep_waiting(), name="sweep cursors")

    async def _sweep_waiting(self) -> None:
        while self._waiting:
            path = next(iter(self._waiting))  # The first: one that cannot be swept yet comes after the others.
            del self._waiting[path]
            try:
                await self.sweep(path)
            except BraidError as error:
                _log.warning("cursors of topic %s may not fit its subscriptions yet: %s", path, error)
                self._waiting[path] = None
                await asyncio.sleep(SWEEP_AGAIN_S)
        self._sweeping = None

    async def stop(self) -> None:
        if self._sweeping is not None:
            await cancel([self._sweeping])
