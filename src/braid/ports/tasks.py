"""Tasks and their owner: the code that starts a task also ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Coroutine, Hashable, Iterable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


async def all_of(work: Iterable[Awaitable[T]]) -> list[T]:
    """Run all at the same time and return their results. The first error is raised when all have ended;
    `asyncio.gather` would leave the others running."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]  # no exception is among them


async def completed(work: Coroutine[Any, Any, T]) -> T:
    """Await work to its end, also when the caller is cancelled meanwhile; the cancellation follows. For calls to the
    disk: a thread goes on with such a call, and its result would appear after the caller's cleaning up."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await join([task])
        if not task.cancelled():
            task.exception()  # Nobody asks for it any more.
        raise


async def end(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task, and return when it has ended. Raises the error by which it had ended before."""
    if task is not None:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()


async def cancel(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel them, and return when all have ended, however they ended."""
    for task in tasks:
        task.cancel()
    await join(tasks)


async def join(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Return when all have ended, however they ended."""
    if tasks:
        await asyncio.wait(tasks)


class TaskScope(Generic[K]):
    """The running tasks of one owner, by key, at most one of each key."""

    def __init__(self) -> None:
        self._running: dict[K, asyncio.Task[Any]] = {}

    def start(self, key: K, work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        assert key not in self._running, f"{name}: a task of {key!r} is running"
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running[key] = task
        task.add_done_callback(lambda _: self._running.pop(key))
        return task

    def get(self, key: K) -> asyncio.Task[Any] | None:
        return self._running.get(key)

    def items(self) -> list[tuple[K, asyncio.Task[Any]]]:
        return list(self._running.items())

    def __contains__(self, key: K) -> bool:
        return key in self._running

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(list(self._running.values()))

    async def cancel(self) -> None:
        """Cancel what runs, and return when all of it has ended."""
        await cancel(list(self))
