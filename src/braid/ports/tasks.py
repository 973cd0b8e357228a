"""Tasks that somebody owns: who starts one ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def all_of(work: Iterable[Awaitable[T]]) -> list[T]:
    """The results of what runs at the same time. The first error is raised when all have ended; `asyncio.gather` would
    leave the others running."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]  # no exception is among them


async def end(task: asyncio.Task[Any] | None) -> None:
    """Cancel it, and return when it has ended. Raises what it had broken by before: nobody else would hear of it."""
    if task is not None:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()
