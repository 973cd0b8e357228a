"""`fdatasync` by the kernel's own threads (Linux AIO, through caio), and its end as an event of the loop.

A thread of ours that syncs has to take Python's lock four times: for its job, after the write, after the sync, and to
wake the loop. Another thread that holds the lock meanwhile gives it up late. Measured here, a small write with its sync
costs 100 µs of processor time that way, and 28 if the loop writes into the page cache itself and the kernel syncs. At
some thousand confirms a second, that decides whether the broker keeps up.

Not every system has it (containers may forbid the calls; there is a limit for the whole machine), so nothing depends on
it: `KernelSyncs.of` returns None, or `start` returns False, and threads do the work.

Call `close()` even after the loop has closed; pending syncs complete there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Self

SYNCS_AT_ONCE: Final = 64
"""The kernel reserves some more, of 65,536 for the whole machine. One log has one sync under way."""

OnSynced = Callable[[int], None]
"""Takes 0, or the number of the error."""


class KernelSyncs:
    """The syncs of one loop. Everything here happens on that loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set up syncs. Raises the errors of the system, the loop or the library."""
        self.loop: Final = loop
        aio = load()
        self._fdsync: Final[Callable[[int], Any]] = aio.Operation.fdsync
        self._context: Any = aio.Context(SYNCS_AT_ONCE)
        self._under_way = 0
        self._results: deque[tuple[OnSynced, int]] = deque()
        loop.add_reader(self._context.fileno, self._on_event)

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> Self | None:
        try:
            return cls(loop)
        except (ImportError, OSError, SystemError, NotImplementedError):
            return None

    def start(self, descriptor: int, on_synced: OnSynced) -> bool:
        """Sync the file. `on_synced` is called later, from the loop. Returns False when nothing was begun: there is no
        room, or the kernel cannot sync this file."""
        if self._under_way >= SYNCS_AT_ONCE:
            return False
        operation = self._fdsync(descriptor)
        # caio swallows what a callback raises, so this one only takes notes.
        operation.set_callback(lambda result: self._results.append((on_synced, result)))
        try:
            begun = bool(self._context.submit(operation) == 1)
        except (OverflowError, ValueError, SystemError):
            return False
        self._under_way += begun
        return begun

    def _on_event(self) -> None:
        try:
            self._context.poll()
        except BlockingIOError:
            return
        self._context.process_events()
        self._tell()

    def _tell(self) -> None:
        try:
            while self._results:
                on_synced, result = self._results.popleft()
                self._under_way -= 1
                on_synced(result and (1 << 64) - result)  # A negative number, seen as one without a sign.
        finally:
            if self._results and not self.loop.is_closed():
                self.loop.call_soon(self._tell)

    def close(self) -> None:
        """Wait for the syncs under way. This blocks; a caller that can wait on the loop lets them end first."""
        if not self.loop.is_closed():
            self.loop.remove_reader(self._context.fileno)
        while self._under_way:
            if not self._results:
                self._context.process_events(SYNCS_AT_ONCE, 1, -1)
            self._tell()
        self._context = None


def load() -> Any:
    """Import the library, which takes 90 ms the first time."""
    from caio import linux_aio

    if linux_aio is None:  # caio found no Linux AIO on this system.
        raise ImportError("this system has no asynchronous files")
    return linux_aio
