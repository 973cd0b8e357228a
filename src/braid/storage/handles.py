"""Open files and known footers, for readers: bounded, shared by all logs of a broker."""

from __future__ import annotations

from braid.ports.disk import Disk, DiskFile
from braid.storage.chunk import ByteSource, Footer, read_footer

DEFAULT_OPEN_FILES = 256
DEFAULT_FOOTERS = 64
"""A footer of a 64 MiB chunk takes some 200 KB in memory."""


class ReadHandles:
    """Files that readers have open. The one that was used longest ago is closed when there are too many."""

    def __init__(self, disk: Disk, max_open: int = DEFAULT_OPEN_FILES) -> None:
        self._disk = disk
        self._max_open = max_open
        self._open: dict[str, DiskFile] = {}

    async def read(self, path: str, position: int, length: int) -> bytes:
        file = self._open.pop(path, None)
        twin: DiskFile | None = None
        if file is None:
            await self._close_down_to(self._max_open - 1)
            file = await self._disk.open(path)
            if path in self._open:  # another reader was faster
                twin, file = file, self._open.pop(path)
        self._open[path] = file
        # Nobody else has run since the look-up, so the file is open; and it ends its reads before it closes.
        data = await file.read(position, length)
        if twin is not None:
            await twin.close()
        await self._close_down_to(self._max_open)  # several readers may have opened files at once
        return data

    async def _close_down_to(self, count: int) -> None:
        while len(self._open) > count:
            await self._open.pop(next(iter(self._open))).close()

    async def forget(self, path: str) -> None:
        """Close a file that is about to be removed."""
        file = self._open.pop(path, None)
        if file is not None:
            await file.close()

    async def close(self) -> None:
        for path in list(self._open):
            await self.forget(path)


class FooterCache:
    """The footers of closed files and chunks that were read last."""

    def __init__(self, max_footers: int = DEFAULT_FOOTERS) -> None:
        self._max_footers = max_footers
        self._footers: dict[str, Footer] = {}

    async def get(self, name: str, source: ByteSource, size: int) -> Footer:
        footer = self._footers.pop(name, None)
        if footer is None:
            footer = await read_footer(source, size)
        self._footers[name] = footer
        if len(self._footers) > self._max_footers:
            del self._footers[next(iter(self._footers))]
        return footer

    def forget(self, name: str) -> None:
        """A file is about to be removed, and another one may get its name."""
        self._footers.pop(name, None)
