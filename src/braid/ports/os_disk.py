"""The real disk: one hop into a small thread pool per call, but none for the small writes of a log.

A write with its sync is one hop, because a hop costs about as much as a small write. A cancelled call does not stop its
thread: the operation may still happen, and its buffers stay in use until `close()` of the file has returned.

Files are in `os_file.py`; here are names, folders, locks, and the threads that all of them share.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Callable
from typing import Final, TypeVar

from braid.model.errors import DiskError, FileTaken, ForeignFile, SyncFailed
from braid.ports import kernel_sync
from braid.ports.disk import FileStat
from braid.ports.kernel_sync import KernelSyncs
from braid.ports.os_file import NOT_SUPPORTED, SMALL_BYTES, ZEROS, OsFile, disk_error
from braid.ports.private_files import FILE_MODE, FOLDER_MODE
from braid.ports.threads import Threads

__all__ = ["SMALL_BYTES", "OsDisk", "OsFile", "OsLock"]

T = TypeVar("T")

SHARED_FILE_MODE: Final = 0o644
SHARED_FOLDER_MODE: Final = 0o777
"""Less what the process's umask takes away."""
PREPARE_PAUSE_S = 0.01
"""The pause after each megabyte of zeros: the syncs of logs come first. A file of 64 MiB takes a second that way."""


class OsDisk:
    def __init__(self, threads: int = 4, *, read_only: bool = False, private_folder: str | None = None) -> None:
        """With `read_only`, files are opened for reading, which needs no permission to write them. Below the
        `private_folder`, files and folders are made for this user alone."""
        self._threads = Threads(threads, "braid-disk")
        self._mode = os.O_RDONLY if read_only else os.O_RDWR
        self._private = f"{os.path.abspath(private_folder)}/" if private_folder is not None else None
        self._files: set[OsFile] = set()
        self._closed = False
        self._syncs: KernelSyncs | None = None
        """The syncs of the first loop that wrote; other loops use threads."""
        self._syncs_tried = False

    async def open(self, path: str, *, create: bool = False) -> OsFile:
        opening = self.call(self._open, path, create)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The caller never gets this file, so it must be closed here.
            opening.add_done_callback(_close_unclaimed)
            raise

    async def prepare(self, path: str, size: int) -> None:
        file = await self.open(path, create=True)
        try:
            for position in range(0, size, len(ZEROS)):
                if position:
                    await asyncio.sleep(PREPARE_PAUSE_S)
                await file.write(position, [memoryview(ZEROS)[: size - position]], sync=True)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        finally:
            await file.close()

    async def list_folders(self, folder: str) -> list[str]:
        return await self._run(_list_folders, folder)

    async def list(self, folder: str) -> list[FileStat]:
        return await self._run(_list, folder)

    async def stat(self, path: str) -> FileStat:
        return await self._run(_stat, path)

    async def make_folder(self, folder: str) -> None:
        await self._run(_make_folder, folder, FOLDER_MODE if self._is_private(folder) else SHARED_FOLDER_MODE)

    async def lock(self, folder: str) -> OsLock:
        return OsLock(await self._run(_lock, folder, self._file_mode(folder)))

    async def sync_folder(self, folder: str) -> None:
        await self._run(_sync_found_names, folder)

    async def rename(self, source: str, target: str) -> None:
        await self._run(_rename, source, target)

    async def publish(self, source: str, target: str) -> None:
        await self._run(_publish, source, target)

    async def link(self, source: str, target: str) -> None:
        await self._run(_link, source, target)

    async def remove(self, path: str) -> None:
        await self._run(_remove, path)

    async def remove_folder(self, folder: str) -> None:
        await self._run(_remove_folder, folder)

    async def close(self) -> None:
        """Close every file that is still open, after its calls have ended, and stop the threads. Twice is fine."""
        if self._closed:
            return
        while self._files:
            for file in tuple(self._files):
                await file.close()
        self._closed = True
        self.end_syncs()
        # Calls may still run whose tasks were cancelled; waiting for them would block the event loop.
        self._threads.stop()

    def _open(self, path: str, create: bool) -> OsFile:
        try:
            creating = os.O_CREAT | os.O_EXCL if create else 0
            descriptor = os.open(path, self._mode | creating, self._file_mode(path) if create else 0)
        except OSError as error:
            raise disk_error(error, f"{'create' if create else 'open'} {path}") from error
        if create:
            try:
                _sync_folder(os.path.dirname(path))
            except DiskError:
                os.close(descriptor)
                with contextlib.suppress(OSError):
                    os.unlink(path)
                raise
        if self._mode == os.O_RDWR:
            with contextlib.suppress(ImportError):
                kernel_sync.load()  # So that no write waits for it.
        file = OsFile(self, path, descriptor)
        self._files.add(file)
        return file

    def _is_private(self, path: str) -> bool:
        return self._private is not None and os.path.abspath(path).startswith(self._private)

    def _file_mode(self, path: str) -> int:
        return FILE_MODE if self._is_private(path) else SHARED_FILE_MODE

    def call(
        self, work: Callable[..., T], *arguments: object, on_end: Callable[[], None] | None = None
    ) -> asyncio.Future[T]:
        if self._closed:
            raise DiskError("this disk was closed: open another one")
        return self._threads.call(work, *arguments, on_end=on_end)

    def start(
        self,
        done: Callable[[object, BaseException | None], None],
        work: Callable[..., object],
        *arguments: object,
        on_end: Callable[[], None],
    ) -> None:
        if self._closed:
            raise DiskError("this disk was closed: open another one")
        self._threads.start(done, work, *arguments, on_end=on_end)

    async def _run(self, work: Callable[..., T], *arguments: object) -> T:
        return await self.call(work, *arguments)

    def kernel_syncs(self) -> KernelSyncs | None:
        """Return the kernel syncs of the running loop, if it has any."""
        loop = asyncio.get_running_loop()
        if not self._syncs_tried:
            self._syncs_tried = True
            self._syncs = KernelSyncs.of(loop)
        return self._syncs if self._syncs is not None and self._syncs.loop is loop else None

    def end_syncs(self, *, of_closed_loop: bool = False) -> None:
        """Complete the syncs of a loop that was closed: no event of a loop will."""
        if self._syncs is not None and (self._syncs.loop.is_closed() or not of_closed_loop):
            self._syncs.close()
            self._syncs = None


class OsLock:
    """An open file with a `flock`: the kernel gives it up when the process ends, however it ends."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    async def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _close_unclaimed(opening: asyncio.Future[OsFile]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        file = opening.result()
        file._closing = True
        file._close_descriptor()


def _lock(folder: str, mode: int) -> int:
    path = f"{folder.rstrip('/')}.lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
    except OSError as error:
        raise disk_error(error, f"lock {folder}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if isinstance(error, BlockingIOError):
            raise FileTaken(
                f"{folder} is in use: another process, or another part of this one, has locked it"
            ) from None
        raise disk_error(error, f"lock {folder}") from error
    return fd


def _sync_folder(folder: str) -> None:
    try:
        descriptor = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):  # The kernel has not tried to sync.
            raise disk_error(error, f"sync the folder {folder or '.'}") from error
        raise SyncFailed(f"could not sync the folder {folder or '.'}: {error.strerror}") from error


def _sync_found_names(folder: str) -> None:
    try:
        _sync_folder(folder)
    except SyncFailed as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise


def _list(folder: str) -> list[FileStat]:
    found = []
    try:
        with os.scandir(folder or ".") as entries:
            for entry in entries:
                # A file that vanishes while we look was removed; it is not an error.
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        found.append(FileStat(entry.name, status.st_size, status.st_mtime_ns // 1_000))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise disk_error(error, f"list {folder}") from error
    return sorted(found)


def _stat(path: str) -> FileStat:
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError as error:
        raise disk_error(error, f"look at {path}") from error
    if not stat.S_ISREG(status.st_mode):
        raise DiskError(f"could not look at {path}: it is not a plain file")
    return FileStat(os.path.basename(path), status.st_size, status.st_mtime_ns // 1_000)


def _list_folders(folder: str) -> list[str]:
    try:
        with os.scandir(folder or ".") as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise disk_error(error, f"list {folder}") from error


def _make_folder(folder: str, mode: int) -> None:
    """Make folders, and sync each folder's name before a folder is made in it. So the parents of a folder that exists
    are durable. Its own name must still be synced: its maker may have died before that."""
    folder = os.path.abspath(folder)
    missing = []
    while not os.path.isdir(folder) and folder != "/":
        missing.append(folder)
        folder = os.path.dirname(folder)
    try:
        _sync_folder(os.path.dirname(folder))
    except SyncFailed as error:
        # A parent that we may not even read is not ours; it was there before us.
        if not isinstance(error.__cause__, PermissionError):
            raise
    for name in reversed(missing):
        try:
            os.mkdir(name, mode)
        except FileExistsError as error:
            if not os.path.isdir(name):
                raise disk_error(error, f"create the folder {name}") from error
        except OSError as error:
            raise disk_error(error, f"create the folder {name}") from error
        _sync_folder(os.path.dirname(name))


def _sync_folders_of(target: str, source: str) -> None:
    _sync_folder(os.path.dirname(target))
    if os.path.dirname(source) != os.path.dirname(target):
        _sync_folder(os.path.dirname(source))


def _check_is_file(source: str, target: str) -> None:
    # `rename` would move a folder too, and no caller means that.
    if os.path.isdir(source):
        raise DiskError(f"could not rename {source} to {target}: it is a folder, and only files are renamed")


def _rename(source: str, target: str) -> None:
    _check_is_file(source, target)
    try:
        os.rename(source, target)
    except OSError as error:
        raise disk_error(error, f"rename {source} to {target}") from error
    _sync_folders_of(target, source)


def _publish(source: str, target: str) -> None:
    _check_is_file(source, target)
    try:
        if not _rename_exclusively(source, target):
            # The other atomic way. A crash between the two calls leaves both names, of one file.
            os.link(source, target)
            _sync_folder(os.path.dirname(target))
            os.unlink(source)
    except OSError as error:
        doing = f"rename {source} to {target} without replacing"
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP):
            raise DiskError(
                f"could not {doing}: the filesystem has neither RENAME_NOREPLACE nor hard links; use another one"
            ) from error
        raise disk_error(error, doing) from error
    _sync_folders_of(target, source)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        raise disk_error(error, f"give {source} the second name {target}") from error
    _sync_folder(os.path.dirname(target))


_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


def _rename_exclusively(source: str, target: str) -> bool:
    """Return False when the C library, the kernel or the filesystem cannot do it (NFS, for one)."""
    if _renameat2 is None:
        return False
    if _renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE) == 0:
        return True
    number = ctypes.get_errno()
    if number in NOT_SUPPORTED:
        return False
    raise OSError(number, os.strerror(number))


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError as error:
        raise disk_error(error, f"remove {path}") from error
    _sync_folder(os.path.dirname(path))


def _foreign(folder: str) -> str:
    """Return the path of a link, a socket or a device in the folder, which no `list` shows and no code of ours makes;
    empty if there is none."""
    if os.path.islink(folder):
        return folder
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_file(follow_symlinks=False) and not entry.is_dir(follow_symlinks=False):
                return entry.path
    return ""


def _remove_folder(folder: str) -> None:
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        if foreign := _foreign(folder):
            raise ForeignFile(
                f"could not remove the folder {folder}: {foreign} is neither a file nor a folder of Braid's; remove it"
            ) from error
        raise disk_error(error, f"remove the folder {folder}") from error
    _sync_folder(os.path.dirname(folder.rstrip("/")))
