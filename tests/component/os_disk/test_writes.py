"""Reads, writes and syncs of the real disk."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from braid.model.errors import DiskError, DiskFull, SyncFailed
from braid.ports import os_disk
from braid.ports.disk import Disk
from braid.ports.kernel_sync import SYNCS_AT_ONCE, KernelSyncs, OnSynced
from braid.ports.os_disk import OsDisk, OsFile
from tests.kits.kernel_aio import is_forbidden, needs_kernel_aio
from tests.kits.os_disk import fail, open_descriptors_of, open_disk

pytestmark = pytest.mark.real_loop


T = TypeVar("T")


def with_disk(main: Callable[[OsDisk], Awaitable[T]]) -> T:
    async def run() -> T:
        async with open_disk() as disk:
            return await main(disk)

    return asyncio.run(run())


@pytest.fixture(params=["kernel", "threads"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who syncs small writes."""
    if request.param == "kernel" and is_forbidden():
        pytest.skip("this system forbids io_setup")
    if request.param == "threads":
        monkeypatch.setattr(KernelSyncs, "of", lambda _loop: None)
    return str(request.param)


async def test_os_disk_is_a_disk() -> None:
    async with open_disk() as disk:
        port: Disk = disk
        assert port is disk


@pytest.mark.parametrize(
    "buffers",
    [
        [],
        [b""],
        [b"one"],
        [b"a", bytearray(b"bc"), memoryview(b"def"), b""],
        [bytes([n % 251]) * 3 for n in range(3_000)],
        [bytes([n % 251]) * 2_000 for n in range(2_500)],
        [memoryview(b"x" * 100_000), memoryview(bytearray(b"yyyyzzzz")).cast("I")],
    ],
    ids=["none", "empty", "one", "mixed", "many small", "more than IOV_MAX", "other item size"],
)
@pytest.mark.parametrize("sync", [False, True])
def test_buffers_are_written_one_after_the_other(folder: str, buffers: list[bytes], sync: bool) -> None:
    async def main(disk: OsDisk) -> bytes:
        file = await disk.open(f"{folder}/f", create=True)
        await file.write(5, buffers, sync=sync)
        return await file.read(0, 10_000_000)

    expected = b"".join(bytes(buffer) for buffer in buffers)
    assert with_disk(main) == (bytes(5) + expected if expected else b"")


@pytest.mark.parametrize("most", [1, 7, 1_000, 4_096])
def test_short_writes_are_continued_where_they_stopped(folder: str, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    real = os.pwritev

    def short(descriptor: int, buffers: list[bytes], position: int) -> int:
        data = b"".join(buffers)
        return real(descriptor, [data[:most]], position)

    monkeypatch.setattr(os, "pwritev", short)
    buffers = [os.urandom(size) for size in (1_500, 0, 3, 2_000, 1_997)]

    async def main(disk: OsDisk) -> bytes:
        file = await disk.open(f"{folder}/f", create=True)
        await file.write(3, buffers, sync=True)
        return await file.read(3, 100_000)

    assert with_disk(main) == b"".join(buffers)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("sync", [False, True])
async def test_a_write_without_a_task_calls_back_once_from_the_loop(folder: str, synced: list[str], sync: bool) -> None:
    async with open_disk() as disk:
        file = await disk.open(f"{folder}/f", create=True)
        synced.clear()
        ended = asyncio.Event()
        heard: list[tuple[BaseException | None, threading.Thread]] = []

        def on_end(error: BaseException | None) -> None:
            heard.append((error, threading.current_thread()))
            ended.set()

        file.start_write(5, [b"one", bytearray(b"two")], sync=sync, on_end=on_end)
        assert heard == []
        await asyncio.wait_for(ended.wait(), 30)
        assert heard == [(None, threading.current_thread())]
        assert synced == ([f"{folder}/f"] if sync else [])
        assert await file.read(0, 100) == bytes(5) + b"onetwo"
        await file.close()
        with pytest.raises(DiskError, match="closed"):
            file.start_write(0, [b"x"], sync=False, on_end=on_end)
        assert len(heard) == 1


async def test_a_write_without_a_task_calls_back_with_what_went_wrong_and_close_waits_for_it(
    folder: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_disk() as disk:
        file = await disk.open(f"{folder}/f", create=True)
        if way == "kernel":
            start = KernelSyncs.start
            monkeypatch.setattr(
                KernelSyncs, "start", lambda syncs, number, end: start(syncs, number, lambda _: end(errno.EIO))
            )
        else:
            monkeypatch.setattr(os, "fdatasync", fail(errno.EIO))
        heard: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        file.start_write(0, [b"x"], sync=True, on_end=heard.set_result)
        await file.close()
        assert isinstance(await asyncio.wait_for(heard, 30), SyncFailed)
        assert open_descriptors_of(f"{folder}/f") == []


async def test_a_write_without_a_task_that_fails_at_once_calls_back_later(
    folder: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_disk() as disk:
        file = await disk.open(f"{folder}/f", create=True)
        monkeypatch.setattr(os, "pwritev", fail(errno.ENOSPC))
        heard: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        file.start_write(0, [b"x"], sync=True, on_end=heard.set_result)
        assert not heard.done()
        assert isinstance(await asyncio.wait_for(heard, 30), DiskFull), way
        await file.close()


@pytest.mark.usefixtures("way")
async def test_more_writes_than_the_kernel_takes_at_once_all_end(folder: str, synced: list[str]) -> None:
    async with open_disk() as disk:
        files = [await disk.open(f"{folder}/{number}", create=True) for number in range(2 * SYNCS_AT_ONCE)]
        synced.clear()
        ends: asyncio.Queue[BaseException | None] = asyncio.Queue()
        for file in files:
            file.start_write(0, [b"x"], sync=True, on_end=ends.put_nowait)
        assert [await asyncio.wait_for(ends.get(), 30) for _ in files] == [None] * len(files)
        assert {f"{folder}/{number}" for number in range(len(files))} <= set(synced)


@pytest.mark.parametrize("failure", [None, errno.EIO])
async def test_what_the_kernel_does_not_take_is_synced_by_a_thread(
    folder: str, failure: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[threading.Thread] = []

    def fdatasync(descriptor: int) -> None:
        assert os.pread(descriptor, 10, 0) == b"x", "written before"
        synced.append(threading.current_thread())
        if failure is not None:
            raise OSError(failure, os.strerror(failure))

    async with open_disk() as disk:
        file = await disk.open(f"{folder}/f", create=True)
        monkeypatch.setattr(KernelSyncs, "start", lambda *_: False)
        monkeypatch.setattr(os, "fdatasync", fdatasync)
        heard: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        file.start_write(0, [b"x"], sync=True, on_end=heard.set_result)
        error = await asyncio.wait_for(heard, 30)
        assert error is None if failure is None else isinstance(error, SyncFailed)
        assert [thread is threading.current_thread() for thread in synced] == [False]
        assert file._calls == 0


@needs_kernel_aio
async def test_the_kernel_syncs_what_was_written_before_and_close_waits_for_it(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = KernelSyncs.start
    seen: list[bytes] = []

    def look(self: KernelSyncs, descriptor: int, on_synced: OnSynced) -> bool:
        seen.append(os.pread(descriptor, 10, 0))
        return start(self, descriptor, on_synced)

    async with open_disk() as disk:
        file = await disk.open(f"{folder}/f", create=True)
        monkeypatch.setattr(KernelSyncs, "start", look)
        heard: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        file.start_write(0, [b"x"], sync=True, on_end=heard.set_result)
        assert file._calls == 1
        await file.close()
        assert heard.done()
        assert heard.result() is None
        assert seen == [b"x"]


@pytest.mark.usefixtures("way")
async def test_a_large_write_does_not_hold_the_loop_up(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writers: list[threading.Thread] = []
    real = os.pwritev

    def pwritev(*arguments: Any) -> int:
        writers.append(threading.current_thread())
        return real(*arguments)

    async with open_disk() as disk:
        file = await disk.open(f"{folder}/f", create=True)
        monkeypatch.setattr(os, "pwritev", pwritev)
        heard: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        file.start_write(0, [bytes(os_disk.SMALL_BYTES), b"x"], sync=True, on_end=heard.set_result)
        assert await asyncio.wait_for(heard, 30) is None
        assert threading.current_thread() not in writers


def test_a_loop_that_was_closed_with_a_sync_under_way_leaves_nothing(folder: str) -> None:
    disk = OsDisk()

    async def begin() -> OsFile:
        file = await disk.open(f"{folder}/f", create=True)
        file.start_write(0, [b"x"], sync=True, on_end=lambda _: None)
        return file

    async def close_all(file: OsFile) -> None:
        await asyncio.wait_for(file.close(), 30)
        await asyncio.wait_for(disk.close(), 30)

    asyncio.run(close_all(asyncio.run(begin())))
    assert open_descriptors_of(f"{folder}/f") == []


async def test_a_file_that_is_opened_while_the_disk_closes_is_closed_with_it(folder: str) -> None:
    async with open_disk() as disk:
        await disk.open(f"{folder}/a", create=True)
        closing = asyncio.ensure_future(disk.close())
        late = await disk.open(f"{folder}/b", create=True)
        heard: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        with contextlib.suppress(DiskError):
            late.start_write(0, [b"x"], sync=True, on_end=heard.set_result)
            assert await asyncio.wait_for(heard, 30) is None
        await closing


async def test_a_file_whose_name_cannot_be_made_durable_is_not_left(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_disk() as disk:
        monkeypatch.setattr(os, "fsync", fail(errno.EIO))
        for making in (disk.prepare(f"{folder}/f", 100), disk.open(f"{folder}/g", create=True)):
            with pytest.raises(SyncFailed):
                await making
        assert os.listdir(folder) == []


def test_a_disk_serves_one_loop_after_the_other(folder: str) -> None:
    disk = OsDisk()

    async def write(position: int) -> bytes:
        file = await disk.open(f"{folder}/f", create=position == 0)
        ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        file.start_write(position, [b"x"], sync=True, on_end=ended.set_result)
        assert await asyncio.wait_for(ended, 30) is None
        return await file.read(0, 10)

    assert asyncio.run(write(0)) == b"x"
    assert asyncio.run(write(1)) == b"xx"
    asyncio.run(disk.close())
    assert open_descriptors_of(f"{folder}/f") == []


async def test_short_reads_are_continued_and_the_end_of_the_file_shortens(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, length, position: real(descriptor, min(length, 7), position))
    async with open_disk() as disk:
        file = await disk.open(f"{folder}/f", create=True)
        await file.write(0, [bytes(range(100))], sync=False)
        assert await file.read(10, 50) == bytes(range(10, 60))
        assert await file.read(90, 50) == bytes(range(90, 100))
        assert await file.read(100, 50) == b""
        assert await file.read(0, 0) == b""


async def test_a_write_is_synced_only_if_asked(folder: str, synced: list[str]) -> None:
    async with open_disk() as disk:
        file = await disk.open(f"{folder}/f", create=True)
        assert synced == [folder], "the new name is durable"
        await file.write(0, [b"x"], sync=False)
        assert synced == [folder]
        await file.write(1, [b"y"], sync=True)
        await file.sync()
        assert synced[1:] == [f"{folder}/f"] * 2
