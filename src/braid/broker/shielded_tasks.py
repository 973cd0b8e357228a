"""Work that is carried to its end even if whoever asked for it is gone meanwhile: half a deletion would be worse than
one that nobody waits for.

A broker that stops waits for it, but not for ever: a disk or a store may never answer. So only what can be asked for
again runs shielded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from braid.ports.tasks import TaskScope

CLOSE_S: Final = 10.0

T = TypeVar("T")

_log: Final = logging.getLogger(__name__)


class ShieldedTasks:
    def __init__(self) -> None:
        self._running = TaskScope[object]()

    async def run(self, name: str, work: Coroutine[Any, Any, T]) -> T:
        """The work's result. If the waiting is cancelled, the work is not."""
        task = self._running.start(object(), work, name=name)
        task.add_done_callback(_take_note)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Returns when nothing runs any more."""
        if running := list(self._running):
            await asyncio.wait(running, timeout=CLOSE_S)
        for task in self._running:
            _log.warning("%s is given up: it has not ended within %g s", task.get_name(), CLOSE_S)
        await self._running.cancel()


def _take_note(task: asyncio.Task[Any]) -> None:
    """The caller is told of an error. If the caller is gone, nobody needs to be."""
    if not task.cancelled():
        task.exception()
