"""A file of the real disk: one descriptor, used by threads and, for small writes, by the loop.

A file descriptor is a number that the kernel gives away again after `close`, so a late operation could hit another
file. Each `OsFile` therefore counts the calls that were submitted and have not ended; the descriptor is closed when
closing was asked for *and* the count is zero, and calls made after `close()` are refused.

A hop into a thread costs more than a small write and its sync together (kernel_sync.py). So `start_write` copies a
small group of batches into the page cache itself, and the kernel syncs it. As a rule that copy waits for nothing but
memory. Where the file system has to wait (for its journal, for pages that are just written back, because the whole
machine has too much to write), the loop waits with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from braid.model.errors import DiskError, DiskFull, FileMissing, FileTaken, OutOfFiles, SyncFailed
from braid.ports.disk import Buffer
from braid.ports.kernel_sync import KernelSyncs

if TYPE_CHECKING:
    from braid.ports.os_disk import OsDisk

T = TypeVar("T")

IOV_MAX = 1_024
"""Linux takes at most this many buffers in one `pwritev`."""
JOIN_BYTES = 64 * 1_024
JOIN_AVERAGE_BYTES = 1_024
"""Below both, one `join` and one `pwrite` beat `pwritev` (512 buffers of 100 B: 10 µs against 27); above either, the
copy costs more than it saves (16 buffers of 64 KiB: 60 µs against 31)."""
SMALL_BYTES = 128 * 1_024
"""What is copied into the page cache on the loop: 60 µs of its time at most."""
ZEROS = bytes(1 << 20)

_KINDS: dict[int, type[DiskError]] = {
    errno.ENOSPC: DiskFull,
    errno.EDQUOT: DiskFull,
    errno.ENOENT: FileMissing,
    errno.EEXIST: FileTaken,
    errno.EMFILE: OutOfFiles,
    errno.ENFILE: OutOfFiles,
}
NOT_SUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}


def disk_error(error: OSError, doing: str) -> DiskError:
    kind = _KINDS.get(error.errno or 0, DiskError)
    return kind(f"could not {doing}: {error.strerror or error}")


class OsFile:
    """One descriptor. The event loop submits; the threads work; `_lock` guards the count and the two flags."""

    def __init__(self, disk: OsDisk, path: str, descriptor: int) -> None:
        self._disk = disk
        self._path = path
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._calls = 0
        self._closing = False
        self._closed: Future[None] = Future()
        # A future that "runs" cannot be cancelled, so a cancelled `close()` does not cancel the close of others.
        self._closed.set_running_or_notify_cancel()

    async def write(self, position: int, buffers: Sequence[Buffer], *, sync: bool) -> None:
        await self._run(self._write, position, buffers, sync)

    def start_write(
        self, position: int, buffers: Sequence[Buffer], *, sync: bool, on_end: Callable[[BaseException | None], None]
    ) -> None:
        self._begin_call()
        try:
            small = sum(map(_nbytes, buffers)) <= SMALL_BYTES
            if small and (syncs := self._disk.kernel_syncs()) is not None:
                self._write_on_loop(syncs, position, buffers, sync, on_end)
            else:
                work = partial(self._write, position, buffers, sync)
                self._disk.start(lambda _, error: on_end(error), work, on_end=self._end_call)
        except BaseException:
            self._end_call()
            raise

    def _write_on_loop(
        self,
        syncs: KernelSyncs,
        position: int,
        buffers: Sequence[Buffer],
        sync: bool,
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        """Write now; let the kernel sync, or a thread if that does not."""

        def end(failure: BaseException | None) -> None:
            self._end_call()
            if not syncs.loop.is_closed():
                on_end(failure)

        try:
            self._write(position, buffers, sync=False)
            if not sync:
                syncs.loop.call_soon(end, None)
            elif not syncs.start(self._descriptor, lambda error: end(self._sync_failure(error) if error else None)):
                self._disk.start(lambda _, error: on_end(error), self._sync, on_end=self._end_call)
        except DiskError as error:
            syncs.loop.call_soon(end, error)

    async def sync(self) -> None:
        await self._run(self._sync)

    async def read(self, position: int, length: int) -> bytes:
        return await self._run(self._read, position, length)

    async def reserve(self, size: int) -> None:
        await self._run(self._reserve, size)

    async def truncate(self, size: int) -> None:
        await self._run(self._truncate, size)

    async def size(self) -> int:
        return await self._run(self._size)

    async def close(self) -> None:
        """Refuse new calls, let the submitted ones end, close. Every caller returns when the file is closed."""
        self._disk.end_syncs(of_closed_loop=True)
        with self._lock:
            last = not self._closing and self._calls == 0
            self._closing = True
        if last and self._disk._closed:
            self._close_descriptor()
        elif last:
            self._disk._threads.submit(self._close_descriptor)
        await asyncio.wrap_future(self._closed)

    async def _run(self, work: Callable[..., T], *arguments: object) -> T:
        self._begin_call()
        try:
            call = self._disk.call(work, *arguments, on_end=self._end_call)
        except BaseException:
            self._end_call()
            raise
        return await call

    def _begin_call(self) -> None:
        with self._lock:
            if self._closing:
                raise DiskError(f"{self._path} was closed: open it again")
            self._calls += 1

    def _end_call(self) -> None:
        with self._lock:
            self._calls -= 1
            last = self._closing and self._calls == 0
        if last:
            self._close_descriptor()

    def _close_descriptor(self) -> None:
        self._disk._files.discard(self)
        # Nothing was promised without a sync, so a failing close loses nothing that was promised.
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
        self._closed.set_result(None)

    def _write(self, position: int, buffers: Sequence[Buffer], sync: bool) -> None:
        try:
            _write_all(self._descriptor, position, buffers)
        except OSError as error:
            raise disk_error(error, f"write to {self._path} at {position}") from error
        if sync:
            self._sync()

    def _sync(self) -> None:
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise self._sync_failure(error.errno or 0) from error

    def _sync_failure(self, error: int) -> SyncFailed:
        return SyncFailed(
            f"could not sync {self._path}: {os.strerror(error)}; what was written since its last good sync may be lost"
        )

    def _read(self, position: int, length: int) -> bytes:
        try:
            data = os.pread(self._descriptor, length, position)
            if not data or len(data) == length:
                return data
            pieces = [data]
            while data and (rest := length - sum(map(len, pieces))):
                data = os.pread(self._descriptor, rest, position + length - rest)
                pieces.append(data)
            return b"".join(pieces)
        except OSError as error:
            raise disk_error(error, f"read {length} bytes of {self._path} at {position}") from error

    def _reserve(self, size: int) -> None:
        if size == 0:
            return
        try:
            try:
                os.posix_fallocate(self._descriptor, 0, size)
            except OSError as error:
                if error.errno not in NOT_SUPPORTED:
                    raise
                _write_zeros(self._descriptor, os.fstat(self._descriptor).st_size, size)
        except OSError as error:
            raise disk_error(error, f"reserve {size} bytes for {self._path}") from error

    def _truncate(self, size: int) -> None:
        try:
            os.ftruncate(self._descriptor, size)
        except OSError as error:
            raise disk_error(error, f"cut {self._path} to {size} bytes") from error

    def _size(self) -> int:
        try:
            return os.fstat(self._descriptor).st_size
        except OSError as error:
            raise disk_error(error, f"read the size of {self._path}") from error


def _nbytes(buffer: Buffer) -> int:
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)


def _write_all(descriptor: int, position: int, buffers: Sequence[Buffer]) -> None:
    left = sum(map(_nbytes, buffers))
    if len(buffers) > 1 and left <= JOIN_BYTES and left < JOIN_AVERAGE_BYTES * len(buffers):
        buffers = [b"".join(buffers)]
    start = 0
    while left:
        written = os.pwritev(descriptor, buffers[start : start + IOV_MAX], position)
        if written == 0:
            raise OSError(errno.EIO, f"the device took none of {left} bytes")
        position += written
        left -= written
        # Skip what was written whole; a buffer that was written in part goes on in its middle.
        while start < len(buffers) and written >= (size := _nbytes(buffers[start])):
            written -= size
            start += 1
        if written:
            buffers = [memoryview(buffers[start]).cast("B")[written:], *buffers[start + 1 :]]
            start = 0


def _write_zeros(descriptor: int, start: int, end: int) -> None:
    for position in range(start, end, len(ZEROS)):
        _write_all(descriptor, position, [memoryview(ZEROS)[: end - position]])
