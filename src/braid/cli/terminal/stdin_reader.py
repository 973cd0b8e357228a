"""Reads lines of a descriptor ahead, in a thread.

Files and pipes block, and a blocked loop could not answer the broker; hence the thread. The reader hands out all whole
lines that it has. So the lines of a slow pipe go out one by one, immediately, and those of a big file by the megabyte.
The reader reads ahead up to a limit and then waits. The thread is a daemon: a read that blocks for ever does not keep
the process alive.

Lines are bytes and end with a newline, which is not part of the line; the last line may lack it. The reader handles
neither encodings nor carriage returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from typing import Final

from braid.model.errors import BraidError

READ_BYTES: Final = 1 << 20
MAX_AHEAD_BYTES: Final = 8 << 20
"""The limit of bytes that were read and not taken. It is above a producer's limit in flight, so the producer never
waits."""
MAX_LINE_BYTES: Final = 31 << 20
"""A record must fit in one batch, which has at most 32 MiB."""


class LineReader:
    """Belongs to the running loop, and reads from its creation on."""

    def __init__(self, descriptor: int) -> None:
        self.read_bytes = 0
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._state = threading.Condition()
        # Guarded by the condition:
        self._lines: list[bytes] = []
        self._ahead_bytes = 0
        self._ended = False
        self._stopped = False
        self._failure: BraidError | None = None
        threading.Thread(target=self._read, name="read lines", daemon=True).start()

    async def take(self) -> list[bytes]:
        """Wait for at least one line, and return all lines that were read. Returns an empty list at the end."""
        while True:
            with self._state:
                if self._stopped:
                    return []
                lines, self._lines = self._lines, []
                self._ahead_bytes = 0
                self._state.notify()
                if lines:
                    return lines
                if self._failure is not None:
                    raise self._failure
                if self._ended:
                    return []
                self._news.clear()
            await self._news.wait()

    def stop(self) -> None:
        """Hand out no more lines, not even those that were read."""
        with self._state:
            self._stopped = True
        self._news.set()

    def _read(self) -> None:
        failure: BraidError | None = None
        try:
            self._read_lines()
        except OSError as error:
            failure = BraidError(f"the input cannot be read: {error.strerror}")
        except BraidError as error:
            failure = error
        with self._state:
            self._ended, self._failure = True, failure
        self._tell()

    def _read_lines(self) -> None:
        rest: list[bytes] = []
        rest_bytes = 0
        number = 0
        while block := os.read(self._descriptor, READ_BYTES):
            self.read_bytes += len(block)
            first, *lines = block.split(b"\n")
            rest.append(first)
            rest_bytes += len(first)
            if rest_bytes > MAX_LINE_BYTES:
                raise BraidError(
                    f"line {number + 1} is longer than a record may be, {MAX_LINE_BYTES >> 20} MiB; is the input text?"
                )
            if not lines:
                continue
            last = lines.pop()
            number += len(lines) + 1
            self._put([b"".join(rest) if len(rest) > 1 else rest[0], *lines], len(block))
            rest, rest_bytes = [last], len(last)
        if rest_bytes:
            self._put([b"".join(rest)], rest_bytes)

    def _put(self, lines: list[bytes], size: int) -> None:
        with self._state:
            while self._ahead_bytes and self._ahead_bytes + size > MAX_AHEAD_BYTES:
                self._state.wait()
            first = not self._lines
            self._lines += lines
            self._ahead_bytes += size
        if first:
            self._tell()

    def _tell(self) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            self._loop.call_soon_threadsafe(self._news.set)
