"""Open files and known footers, for readers: bounded, shared by all logs of a broker.

Everything is kept under an owner and a name. The owner is the number of the log that reads, because the next log in a
folder gives the last log's names to other files: a reader of the old log that is still at work must not leave its old
file under the new log's name. An object never changes under its name; its owner is `NO_LOG`.
"""

from __future__ import annotations

from braid.ports.disk import Disk, DiskFile
from braid.storage.chunk import ByteSource, Footer, read_footer

DEFAULT_OPEN_FILES = 256
DEFAULT_FOOTERS = 64
"""A footer of a 64 MiB chunk takes some 200 KB in memory."""

NO_LOG = 0
"""Logs are numbered from 1 on."""


class ReadHandles:
    """Files that readers have open. The one that was used longest ago is closed when there are too many."""

    def __init__(self, disk: Disk, max_open: int = DEFAULT_OPEN_FILES) -> None:
        self._disk = disk
        self._max_open = max_open
        self._open: dict[tuple[int, str], DiskFile] = {}
        self._forgets = 0

    async def read(self, owner: int, path: str, position: int, length: int) -> bytes:
        key = owner, path
        file = self._open.pop(key, None)
        unkept: DiskFile | None = None
        if file is None:
            await self._close_down_to(self._max_open - 1)
            forgets = self._forgets
            file = await self._disk.open(path)
            if key in self._open:  # another reader was faster
                unkept, file = file, self._open.pop(key)
            elif forgets != self._forgets:  # perhaps this very file: then nothing would ever close it
                unkept = file
        if file is not unkept:
            self._open[key] = file
        try:
            # No other task has run since the look-up, so the file is open; and a file ends its reads before it closes.
            data = await file.read(position, length)
        finally:
            if unkept is not None:
                await unkept.close()
        await self._close_down_to(self._max_open)  # several readers may have opened files at the same time
        return data

    async def _close_down_to(self, count: int) -> None:
        while len(self._open) > count:
            await self._open.pop(next(iter(self._open))).close()

    async def forget(self, owner: int, path: str) -> None:
        """Close a file that is about to be removed."""
        await self._forget([(owner, path)])

    async def forget_all(self, owner: int) -> None:
        """Close the files of a log that has ended."""
        await self._forget([key for key in self._open if key[0] == owner])

    async def close(self) -> None:
        await self._forget(list(self._open))

    async def _forget(self, keys: list[tuple[int, str]]) -> None:
        self._forgets += 1
        for key in keys:
            file = self._open.pop(key, None)
            if file is not None:
                await file.close()


class FooterCache:
    """The footers of closed files and chunks that were read last."""

    def __init__(self, max_footers: int = DEFAULT_FOOTERS) -> None:
        self._max_footers = max_footers
        self._footers: dict[tuple[int, str], Footer] = {}

    async def get(self, owner: int, name: str, source: ByteSource, size: int) -> Footer:
        footer = self._footers.pop((owner, name), None)
        if footer is None:
            footer = await read_footer(source, size)
        self._footers[owner, name] = footer
        if len(self._footers) > self._max_footers:
            del self._footers[next(iter(self._footers))]
        return footer

    def forget(self, owner: int, name: str) -> None:
        """Forget a file that is about to be removed."""
        self._footers.pop((owner, name), None)

    def forget_all(self, owner: int) -> None:
        """Forget the files of a log that has ended."""
        self._footers = {key: footer for key, footer in self._footers.items() if key[0] != owner}
