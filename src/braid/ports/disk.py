"""The disk, as far as Braid uses one.

Nothing here blocks: the real disk (`os_disk.py`) works in threads, the simulated one (`testing/sim/disk.py`) in
virtual time. What is written is durable only after a `sync`; what is created, renamed, published or removed is durable
when the call returns. Errors are the `DiskError` family, never `OSError`:

- `DiskFull` when the device has no room; a write that failed so may have written a part;
- `SyncFailed` when a sync fails. The kernel may then have dropped the unsynced pages *and* forgotten the failure, so a
  second sync that succeeds proves nothing. A caller that gets this error must never confirm anything written since
  the last good sync;
- `FileMissing`, `FileTaken`, `OutOfFiles`, `ForeignFile` as their names say; `DiskError` for the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from braid.model.errors import BraidError

Buffer = bytes | bytearray | memoryview


class FileStat(NamedTuple):
    name: str
    """The last part of the path."""
    size: int
    modified_us: int


class DiskFile(Protocol):
    """One open file, for reading and writing at explicit positions."""

    async def write(self, position: int, buffers: Sequence[Buffer], *, sync: bool) -> None:
        """Write the buffers one after the other from `position` on; with `sync`, return when they are durable."""

    def start_write(
        self, position: int, buffers: Sequence[Buffer], *, sync: bool, on_end: Callable[[BaseException | None], None]
    ) -> None:
        """Start a `write` without a task: `on_end` is called once, from the loop and never from within this call, with
        the error or None. Raises only when nothing was begun; then `on_end` is not called."""

    async def sync(self) -> None:
        """Return when everything written so far is durable."""

    async def read(self, position: int, length: int) -> bytes:
        """Read up to `length` bytes; fewer only at the end of the file."""

    async def reserve(self, size: int) -> None:
        """Make the file at least `size` bytes long; new bytes read as zeros. Writes below `size` then need no new
        room."""

    async def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes. Durable after the next sync."""

    async def size(self) -> int: ...

    async def close(self) -> None:
        """Close without a sync. Closing twice is allowed."""


class FolderLock(Protocol):
    async def release(self) -> None:
        """Release the lock. Releasing twice is fine."""


class Disk(Protocol):
    async def open(self, path: str, *, create: bool = False) -> DiskFile:
        """Open an existing file (`FileMissing`) or, with `create`, a new one (`FileTaken`), whose name is then
        durable."""

    async def prepare(self, path: str, size: int) -> None:
        """Create a file of `size` zero bytes, written out and synced, so that later syncs of writes into it need no
        metadata. `FileTaken` if the name exists. When it fails, no file is left; a crash, or a call that is cancelled
        in its beginning, may leave a shorter one."""

    async def list_folders(self, folder: str) -> list[str]:
        """List the names of the folders directly in `folder`, sorted. An absent folder is empty."""

    async def list(self, folder: str) -> list[FileStat]:
        """List the plain files directly in `folder`, by name. An absent folder is empty."""

    async def stat(self, path: str) -> FileStat:
        """Describe a file. `FileMissing` if there is no such file."""

    async def make_folder(self, folder: str) -> None:
        """Create the folder and its parents, durably. Existing ones are fine."""

    async def sync_folder(self, folder: str) -> None:
        """Make every name in the folder durable, also of files whose makers died before they synced the name. An absent
        folder has no names."""

    async def lock(self, folder: str) -> FolderLock:
        """Lock the folder against this process and all others, until the lock is released or this process ends.
        `FileTaken` if it is locked already. The folder must exist."""

    async def rename(self, source: str, target: str) -> None:
        """Rename a file, replacing `target` if it exists. Atomic and durable."""

    async def publish(self, source: str, target: str) -> None:
        """Rename a file, but refuse to replace: `FileTaken`. Atomic and durable; of several callers one wins."""

    async def link(self, source: str, target: str) -> None:
        """Give a file a second name, but refuse to replace: `FileTaken`. Atomic and durable. The file's bytes stay as
        long as it has a name."""

    async def remove(self, path: str) -> None:
        """Remove a file, durably. `FileMissing` if it is not there."""

    async def remove_folder(self, folder: str) -> None:
        """Remove an empty folder. An absent one is fine. `ForeignFile` if it holds something that is neither a plain
        file nor a folder."""


async def lock_folder(disk: Disk, folder: str) -> FolderLock:
    """Call `disk.lock` for a caller that may be cancelled. A lock that was taken meanwhile is released: no other code
    could release it, and the folder would be locked as long as the process lives."""
    taking = asyncio.ensure_future(disk.lock(folder))
    try:
        return await asyncio.shield(taking)
    except asyncio.CancelledError:
        with contextlib.suppress(BraidError):
            await (await taking).release()
        raise
