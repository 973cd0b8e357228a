"""Tasks that somebody owns: who starts one ends it."""

from __future__ import annotations

import asyncio
from typing import Any


async def end(task: asyncio.Task[Any] | None) -> None:
    """Cancel it, and return when it has ended. Raises what it had broken by before: nobody else would hear of it."""
    if task is not None:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()
