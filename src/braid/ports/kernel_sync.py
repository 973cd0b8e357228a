"""`fdatasync` by the kernel's own threads (Linux AIO, through caio), and its end as an event of the loop.

A thread of ours that syncs has to take Python's lock four times for it: for its job, behind the write, behind the sync,
and to wake the loop; and whoever holds the lock meanwhile gives it up late. Measured here, a small write with its sync
costs 100 µs of processor time so, and 28 if the loop writes into the page cache itself and the kernel syncs. At some
thousand confirms a second that is the difference between a broker that has time and one that has none.

Not every system has it (containers may forbid the calls; there is a limit for the whole machine), so nothing depends on
it: `KernelSyncs.of` says None, or `start` says no, and threads do the work.

Who holds this must `close` it, also when its loop was closed before: then the ends of what was under way are told
there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Self

SYNCS_AT_ONCE: Final = 64
"""The kernel sets some more aside, of 65,536 for the whole machine. One log has one sync under way."""

OnSynced = Callable[[int], None]
"""Takes 0, or the number of the error."""


class KernelSyncs:
    """Of one loop. Everything here happens on it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Raises what the system, the loop or the library objects with."""
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
        """Sync the file. `on_synced` is called later, from the loop. False: not begun, there is no room for it or the
        kernel cannot do it with this file."""
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
        """Wait for what is under way, which blocks; whoever can, lets it end first."""
        if not self.loop.is_closed():
            self.loop.remove_reader(self._context.fileno)
        while self._under_way:
            if not self._results:
                self._context.process_events(SYNCS_AT_ONCE, 1, -1)
            self._tell()
        self._context = None


def load() -> Any:
    """The library, which takes 90 ms the first time."""
    from caio import linux_aio

    if linux_aio is None:  # What caio says on a system without it.
        raise ImportError("this system has no asynchronous files")
    return linux_aio
