"""Many tasks that wait on one future and resume together: how `send` waits.

All records of a batch are confirmed or fail together, so all tasks that sent one wait on one future. Cancelling one
task cancels the future, which wakes all. Each task then asks `cancelled_itself`; if it was not, it waits again on a new
future.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Generator, Iterator, Sequence
from contextvars import Context


@types.coroutine
def wait_on(future: asyncio.Future[None]) -> Generator[asyncio.Future[None], None, None]:
    """Wait until `wake(future)`, as `await future` does, but without looking at the future's result."""
    future._asyncio_future_blocking = True
    yield future


def wake(futures: list[asyncio.Future[None]]) -> None:
    """Resume every task that waits on one of the futures, in order; empties the list. Only a callback of the loop may
    call this: no task can step another.

    `set_result` would schedule one callback for each task, through the loop, which takes longer than everything else in
    a `send`. So the tasks are stepped here, each in its own context, as the loop would do. This needs the callbacks of
    a future, which asyncio shows only to its own `repr`. A future that collects its callbacks itself was measured: a
    task that waits on anything but a plain `asyncio.Future` costs as much as the way through the loop. Where asyncio
    does not show the callbacks, `set_result` is used.
    """
    loop = futures[0].get_loop()
    over: asyncio.Future[None] = loop.create_future()
    over.set_result(None)
    waiting: Iterator[tuple[Callable[..., object], Context]] = iter(())
    futures.reverse()
    try:
        while futures:
            waiting = iter(_waiting_on(futures.pop()))  # The future goes with its last task, not with the last of all.
            for step, context in waiting:
                context.run(step, over)
    finally:  # An error that leaves a step ends the program, but the other tasks must not hang meanwhile.
        for step, context in waiting:
            loop.call_soon(step, over, context=context)
        if futures:
            futures.reverse()
            loop.call_soon(wake, futures)


def _waiting_on(future: asyncio.Future[None]) -> Sequence[tuple[Callable[..., object], Context]]:
    """Return the callbacks of a future, with their contexts."""
    try:
        found: Sequence[tuple[Callable[..., object], Context]] | None = future._callbacks
    except AttributeError:
        if not future.done():
            future.set_result(None)
        return ()
    return found or ()


def cancelled_itself() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
