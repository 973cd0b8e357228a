"""Work that several callers wait for at once, such as connecting to a broker: done once, in a task of its own."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from braid.model.errors import ClientClosed

T = TypeVar("T")


async def result_of(task: asyncio.Task[T]) -> T:
    """Its result. A caller that is cancelled leaves, and the task goes on for the others. Only closing cancels the task
    itself: who waited then, and was not cancelled, gets `ClientClosed`."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        caller = asyncio.current_task()
        assert caller is not None
        if task.cancelled() and not caller.cancelling():
            raise ClientClosed(f"the client was closed meanwhile: {task.get_name()} was given up") from None
        raise
