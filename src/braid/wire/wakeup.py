"""Many tasks that wait on one future and resume together: how `send` waits.

All records of a batch are confirmed or fail together, so all tasks that sent one wait on one future. Cancelling one
task cancels the future, which wakes all. Each task then asks `cancelled_itself`; if it was not, it waits again on a new
future.

Stepping tasks needs two private parts of asyncio. This module looks for them when it is imported (`shows_callbacks`).
Where they are missing or different, and where the environment has `BRAID_PLAIN_WAKEUP`, it uses `await` and
`set_result` alone. That is correct everywhere, and `send` takes longer.
"""

from __future__ import annotations

import asyncio
import os
import types
from collections.abc import Callable, Generator, Iterator, Sequence
from contextvars import Context, copy_context
from typing import Any, Final, cast

PLAIN_VARIABLE: Final = "BRAID_PLAIN_WAKEUP"


class _NoLoop:
    """All that a future asks of its loop before it is done."""

    def get_debug(self) -> bool:
        return False


def shows_callbacks(future: asyncio.Future[None]) -> bool:
    """Whether a future has the private parts that this module uses, in the form that it knows."""

    def callback(_: object) -> None:
        pass

    context = copy_context()
    future.add_done_callback(callback, context=context)
    try:
        shown: Any = future._callbacks
        return [*shown] == [(callback, context)] and future._asyncio_future_blocking is False
    except (AttributeError, TypeError):
        return False


stepping = not os.environ.get(PLAIN_VARIABLE) and shows_callbacks(
    asyncio.Future(loop=cast("asyncio.AbstractEventLoop", _NoLoop()))
)
"""Whether `wake` steps the tasks itself."""


@types.coroutine
def wait_on(future: asyncio.Future[None]) -> Generator[Any, None, None]:
    """Wait until `wake(future)`, as `await future` does, but without looking at the future's result."""
    if stepping:
        future._asyncio_future_blocking = True
        yield future
    else:
        yield from future.__await__()


def wake(futures: list[asyncio.Future[None]]) -> None:
    """Resume every task that waits on one of the futures, in order; empties the list. Only a callback of the loop may
    call this: no task can step another.

    `set_result` would schedule one callback for each task, through the loop, which takes longer than everything else in
    a `send`. So the tasks are stepped here, each in its own context, as the loop would do. This needs the callbacks of
    a future, which asyncio shows only to its own `repr`. A future that collects its callbacks itself was measured: a
    task that waits on anything but a plain `asyncio.Future` costs as much as the way through the loop. Where asyncio
    does not show the callbacks, `set_result` is used.
    """
    if not stepping:
        for future in futures:
            if not future.done():
                future.set_result(None)
        futures.clear()
        return
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
