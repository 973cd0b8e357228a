"""How a segment that this broker no longer serves comes to its end: its channels are closed, its cursors are stored as
far as that is still allowed, and its storage is closed or abandoned. After that its folder is free, also for the next
epoch on this broker.

`Segments` withdraws the segment first. From then on only its ending knows it: so an ending is a task of its own, which
goes on when the call that waits for it is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Final

from braid.broker.segments.owned_segment import OwnedSegment
from braid.model.errors import BraidError
from braid.model.names import SegmentName, TopicName
from braid.ports.tasks import TaskScope, join
from braid.storage.history.housekeeper import Housekeeper

_log: Final = logging.getLogger(__name__)


class Endings:
    def __init__(self, housekeeper: Housekeeper) -> None:
        self._housekeeper = housekeeper
        self._running = TaskScope[OwnedSegment]()

    def __iter__(self) -> Iterator[asyncio.Task[None]]:
        return iter(self._running)

    def begin(self, segment: OwnedSegment, reason: BraidError, *, orderly: bool) -> asyncio.Task[None]:
        """Start the task that ends a segment that is not served here any more, or return the one that runs. Wait for it
        by `outlived`: if it were cancelled with its caller, the segment's folder would stay locked for ever."""
        task = self._running.get(segment)
        if task is None:
            work = self._bring_to_end(segment, reason, orderly=orderly)
            task = self._running.start(segment, work, name=f"end {segment.name}")
        return task

    async def end(self, segment: OwnedSegment, reason: BraidError, *, orderly: bool) -> None:
        """End a segment; `reason` is what its channels are told. In `orderly` endings the log is closed as it is: the
        next start needs no recovery."""
        await outlived(self.begin(segment, reason, orderly=orderly))

    async def ended(self, name: SegmentName) -> None:
        """Return when no ending of this segment runs, however the last one ended."""
        await join([task for segment, task in self._running.items() if segment.name == name])

    async def ended_of_topic(self, name: TopicName) -> None:
        await join([task for segment, task in self._running.items() if segment.name.topic == name])

    async def _bring_to_end(self, segment: OwnedSegment, reason: BraidError, *, orderly: bool) -> None:
        segment.stop_serving()
        self._housekeeper.remove(segment.storage)
        segment.fail_channels(reason)
        try:
            await segment.store_cursors(handing_over=False)
        except BraidError as error:
            _log.warning("cursors of %s are not stored, so consumers go back a little: %s", segment.name, error)
        finally:
            await segment.stop_replication()
            await _close_storage(segment, orderly=orderly)


async def outlived(ending: asyncio.Task[None]) -> None:
    """Wait for a task that goes on if the waiting is cancelled."""
    await asyncio.shield(ending)


async def _close_storage(segment: OwnedSegment, *, orderly: bool) -> None:
    """Close the storage in order, if that is possible. Its folder must be free afterwards in any case."""
    if orderly:
        try:
            await segment.storage.close()
            return
        except BraidError as error:  # The lease is over, or the disk fails.
            _log.warning("%s could not be closed in order: %s", segment.name, error)
    await segment.storage.abandon()
