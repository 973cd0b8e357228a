"""Waiting for something together with many others, and going on: what `send` is made of.

All records of a batch share its fate, so all tasks that sent one wait on one future. Cancelling one of them cancels the
future, which wakes all: each asks `cancelled_itself`, and if it was not, waits again on a new one.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Generator, Iterator, Sequence
from contextvars import Context


@types.coroutine
def wait_on(future: asyncio.Future[None]) -> Generator[asyncio.Future[None], None, None]:
    """Wait until `wake(future)`. What `await future` does, but for looking at the future when it is over."""
    future._asyncio_future_blocking = True
    yield future


def wake(futures: list[asyncio.Future[None]]) -> None:
    """Go on with every task that waits on one of the futures, in order; empties the list. To be called by a callback of
    the loop's: no task can step another.

    `set_result` plans one callback for each of them, through the loop, which takes longer than all else that a `send`
    does. So they are stepped here, each in its own context, which is what the loop would do. For that one has to read
    whom a future would call, which asyncio offers to nobody but its own `repr`. A future that collects its callbacks
    itself was measured: a task that waits on anything but a plain `asyncio.Future` costs as much as the way through the
    loop. An asyncio that shows nothing gets `set_result`.
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
    finally:  # What ends a step by an error ends the program, but the others must not hang meanwhile.
        for step, context in waiting:
            loop.call_soon(step, over, context=context)
        if futures:
            futures.reverse()
            loop.call_soon(wake, futures)


def _waiting_on(future: asyncio.Future[None]) -> Sequence[tuple[Callable[..., object], Context]]:
    """The callbacks of a future, with their contexts."""
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
