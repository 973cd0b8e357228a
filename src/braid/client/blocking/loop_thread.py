"""An event loop in its own thread, for blocking callers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from braid.client.forks import forked_error, tell_of_forks
from braid.model.errors import ClientClosed, InvalidArgument

T = TypeVar("T")


class LoopThread:
    """The loop and its thread, which exist only in the process that made them."""

    def __init__(self) -> None:
        self.loop: Final = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="braid", daemon=True)
        self._stopped = False
        self.forked = False
        """Whether this process is a fork: then the thread runs only in the parent."""
        tell_of_forks(self)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run this on the loop and wait for it. An interruption of the wait also cancels the work."""
        future = self.begin(work)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise ClientClosed("the client was closed before this was done") from None
        finally:
            future.cancel()

    def begin(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        try:
            self.check_running()
        except ClientClosed:
            work.close()
            raise
        if threading.current_thread() is self._thread:
            work.close()
            raise InvalidArgument("the blocking client was called from its own loop, which would wait for itself")
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.check_running()
        self.loop.call_soon_threadsafe(callback)

    def check_running(self) -> None:
        """Raise if nothing would ever run: the loop is stopped, or runs in the parent of this process."""
        if self.forked:
            raise forked_error()
        if self._stopped:
            raise ClientClosed("the client is closed; connect again")

    def on_fork(self) -> None:
        self.forked = True

    def stop(self) -> None:
        if not self._stopped and not self.forked:
            self._stopped = True
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()
