"""Writes output, and knows how much of it was printed.

A record may be acked when it was printed. But the kernel takes up to a megabyte of a pipe's output before its reader
looks at it: `braid consume … | head -3` would lose the contents of the pipe when `head` ends. So in a pipe, *printed*
means that the reader has taken the bytes. The kernel says how many bytes are still in the pipe (FIONREAD), also after
the reader has closed its end. A reader may still drop bytes that it took: `head -3` takes a block of some kilobytes and
drops most of it; `--count 3` prints three records.

Everywhere else (terminal, file, socket) bytes are printed when the kernel has taken them.

A thread writes: a slow reader, such as a pager, must not keep the loop from answering the broker. The thread is a
daemon, so a write that blocks for ever does not keep the process alive.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import os
import queue
import stat
import termios
import threading
from typing import Final

PIPE_BYTES: Final = 1 << 20
"""The most that an ordinary user may request. A larger pipe means fewer changes between us and the reader."""


class Printer:
    """Belongs to the running loop. One write at a time."""

    def __init__(self, descriptor: int) -> None:
        self.closed: asyncio.Future[None]
        """Done when the reader of a pipe has closed it."""
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        self.closed = self._loop.create_future()
        self._written = 0
        """Bytes that the kernel took; counted by the thread."""
        self._work: queue.SimpleQueue[tuple[bytes, asyncio.Future[None]]] = queue.SimpleQueue()
        self._pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
        if self._pipe:
            with contextlib.suppress(OSError):
                fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            # The writing end is never readable: the event means that the reading end was closed.
            self._loop.add_reader(descriptor, self._on_closed)
        threading.Thread(target=self._write_all, name="write output", daemon=True).start()

    async def write(self, data: bytes) -> None:
        """Write, and wait until the kernel has all bytes. Raises `OSError`, and `BrokenPipeError` without a reader."""
        done: asyncio.Future[None] = self._loop.create_future()
        self._work.put((data, done))
        await done

    async def settle(self) -> None:
        """After the reader has closed the pipe: wait until the thread has counted what the kernel took before that."""
        await self.write(b"")  # The thread takes writes one after the other. This one does nothing.

    def printed(self) -> int:
        """Return how many of the written bytes count as printed."""
        if not self._pipe:
            return self._written
        unread = array.array("i", [0])
        fcntl.ioctl(self._descriptor, termios.FIONREAD, unread)
        return max(self._written - unread[0], 0)

    @property
    def written(self) -> int:
        return self._written

    def close(self) -> None:
        if self._pipe:
            self._loop.remove_reader(self._descriptor)

    def _on_closed(self) -> None:
        self._loop.remove_reader(self._descriptor)
        if not self.closed.done():
            self.closed.set_result(None)

    def _write_all(self) -> None:
        while True:
            data, done = self._work.get()
            failure: OSError | None = None
            rest = memoryview(data)
            try:
                while rest:
                    count = os.write(self._descriptor, rest)
                    self._written += count
                    rest = rest[count:]
            except OSError as error:
                failure = error
            with contextlib.suppress(RuntimeError):  # The loop is closed.
                self._loop.call_soon_threadsafe(_finish, done, failure)


def _finish(done: asyncio.Future[None], failure: OSError | None) -> None:
    if done.cancelled():
        return
    if failure is not None:
        done.set_exception(failure)
    else:
        done.set_result(None)
