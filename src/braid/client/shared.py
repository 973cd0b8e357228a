"""Work for which several callers wait at the same time, such as connecting to a broker. One task does it once."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from braid.model.errors import ClientClosed

T = TypeVar("T")


async def result_of(task: asyncio.Task[T]) -> T:
    """Wait for the task and return its result. A caller that is cancelled leaves, and the task continues for the
    others. Only closing cancels the task itself: then the remaining callers get `ClientClosed`."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        caller = asyncio.current_task()
        assert caller is not None
        if task.cancelled() and not caller.cancelling():
            raise ClientClosed(f"the client was closed meanwhile: {task.get_name()} was given up") from None
        raise
