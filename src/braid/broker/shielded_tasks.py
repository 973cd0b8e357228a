"""Tasks that run to their end even if their caller is gone meanwhile: half a deletion would be worse than a deletion
that nobody waits for.

A broker that stops waits for these tasks, but not for ever: a disk or a store may never answer. So only work that can
be repeated runs shielded.
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
        """Return the result of the work. Cancelling the caller does not cancel the work."""
        task = self._running.start(object(), work, name=name)
        task.add_done_callback(_retrieve_error)
        try:
            return await asyncio.shield(task)
        finally:
            # Otherwise an error, its traceback, this frame and the task refer to each other in a circle, and keep what
            # was asked, which may be megabytes, until the garbage is collected.
            del task

    async def close(self) -> None:
        """Return when no task runs any more. Tasks that run for longer than CLOSE_S are cancelled."""
        if running := list(self._running):
            await asyncio.wait(running, timeout=CLOSE_S)
        for task in self._running:
            _log.warning("%s is given up: it has not ended within %g s", task.get_name(), CLOSE_S)
        await self._running.cancel()


def _retrieve_error(task: asyncio.Task[Any]) -> None:
    """`run` raises the error to its caller. If the caller is gone, asyncio must not report the error as unseen."""
    if not task.cancelled():
        task.exception()
