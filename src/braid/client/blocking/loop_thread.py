"""An event loop in its own thread, for blocking callers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from braid.model.errors import ClientClosed, InvalidArgument

T = TypeVar("T")


class LoopThread:
    def __init__(self) -> None:
        self.loop: Final = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="braid", daemon=True)
        self._stopped = False
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
        if self._stopped:
            work.close()
            raise ClientClosed("the client is closed; connect again")
        if threading.current_thread() is self._thread:
            work.close()
            raise InvalidArgument("the blocking client was called from its own loop, which would wait for itself")
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call_soon(self, callback: Callable[[], None]) -> None:
        if self._stopped:
            raise ClientClosed("the client is closed; connect again")
        self.loop.call_soon_threadsafe(callback)

    def stop(self) -> None:
        if not self._stopped:
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
