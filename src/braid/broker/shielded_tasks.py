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

CLOSE_S: Final = 10.0

T = TypeVar("T")

_log: Final = logging.getLogger(__name__)


class ShieldedTasks:
    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    async def run(self, name: str, work: Coroutine[Any, Any, T]) -> T:
        """The work's result. If the waiting is cancelled, the work is not."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Returns when nothing runs any more."""
        if not self._running:
            return
        _, late = await asyncio.wait(self._running, timeout=CLOSE_S)
        for task in late:
            _log.warning("%s is given up: it has not ended within %g s", task.get_name(), CLOSE_S)
            task.cancel()
        if late:
            await asyncio.wait(late)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # Whoever asked is told; if he is gone, nobody needs to be.
