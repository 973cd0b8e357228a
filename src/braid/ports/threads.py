"""A few threads that work for event loops: one queue in, one wake-up out.

Python's `ThreadPoolExecutor` with `wrap_future` costs 60 µs of processor time a call here, most of it in the locks of
its futures; this costs 26. The commit of a log makes one call for each group of batches, so a lone publish pays it once
and its client waits for it.

Submitted work is done, also if its caller stopped waiting, and in the order of submission as far as the number of
threads allows; urgent work overtakes all work that no thread has begun. `start` calls back in the iteration of the loop
that the thread woke; a task that awaits the future of `call` resumes one iteration later.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

Done = Callable[[Any, BaseException | None], None]
"""Takes the result of the work, or None and the error that it raised."""

_Job = tuple[
    asyncio.AbstractEventLoop | None, Done | None, Callable[[], None] | None, Callable[..., Any], tuple[object, ...]
]


class Threads:
    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._urgent: deque[_Job] = deque()
        """Done before the next job of `_jobs`; each has an empty job there, which wakes a thread."""
        self._threads: list[threading.Thread] = []
        self._stopped = False

    def call(
        self,
        work: Callable[..., T],
        *arguments: object,
        on_end: Callable[[], None] | None = None,
        urgent: bool = False,
    ) -> asyncio.Future[T]:
        """Do `work` in a thread. The future belongs to the running loop; `on_end` is called in the thread when the work
        has ended, before the future is done, whether or not the caller still waits."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._give((loop, partial(_finish, future), on_end, work, arguments), urgent=urgent)
        return future

    def start(
        self, done: Done, work: Callable[..., T], *arguments: object, on_end: Callable[[], None] | None = None
    ) -> None:
        """Do `work` in a thread, then call `done` from the running loop. `on_end` as in `call`."""
        self._give((asyncio.get_running_loop(), done, on_end, work, arguments))

    def submit(self, work: Callable[[], object]) -> None:
        """Do `work`, which does not raise, in a thread."""
        self._give((None, None, None, work, ()))

    def stop(self) -> None:
        """End the threads when they have done all submitted work. Does not wait for that."""
        self._stopped = True
        for _ in self._threads:
            self._jobs.put(None)

    def _give(self, job: _Job, *, urgent: bool = False) -> None:
        if self._stopped:  # No thread would ever do the work.
            raise RuntimeError(f"the threads {self._name} were stopped: they take no more work")
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        if urgent:
            self._urgent.append(job)
            job = _NOTHING
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            with contextlib.suppress(IndexError):  # Another thread may have taken the last one.
                while self._urgent:
                    _do(self._urgent.popleft())
            _do(job)
            del job  # and with it the buffers, while this thread waits for the next one


def _do_nothing() -> None:
    pass


_NOTHING: _Job = (None, None, None, _do_nothing, ())


def _do(job: _Job) -> None:
    loop, done, on_end, work, arguments = job
    result: object = None
    error: BaseException | None = None
    try:
        result = work(*arguments)
    except BaseException as raised:
        error = raised
    if on_end is not None:
        on_end()
    if loop is not None and done is not None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits
            loop.call_soon_threadsafe(done, result, error)


def _finish(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if future.done():
        return  # cancelled
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
