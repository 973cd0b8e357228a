"""The real disk on a real folder: results, durability calls, error mapping, and the guard of descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from braid.model.errors import DiskError, DiskFull, FileMissing, FileTaken, SyncFailed
from braid.ports import os_disk
from braid.ports.disk import Disk
from braid.ports.kernel_sync import SYNCS_AT_ONCE, KernelSyncs, OnSynced
from braid.ports.os_disk import OsDisk, OsFile
from braid.storage.log.recovery import recover, repair
from tests.kits.kernel_aio import is_forbidden, needs_kernel_aio

T = TypeVar("T")


@contextlib.asynccontextmanager
async def open_disk() -> AsyncIterator[OsDisk]:
    disk = OsDisk()
    try:
        yield disk
    finally:
        await disk.close()


def with_disk(main: Callable[[OsDisk], Awaitable[T]]) -> T:
    async def run() -> T:
        async with open_disk() as disk:
            return await main(disk)

    return asyncio.run(run())


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that were synced, in order."""
    paths: list[str] = []

    def record(real: Callable[[int], None]) -> Callable[[int], None]:
        def sync(descriptor: int) -> None:
            paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            real(descriptor)

        return sync

    start = KernelSyncs.start

    def kernel_sync(self: KernelSyncs, descriptor: int, on_synced: OnSynced) -> bool:
        paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        return start(self, descriptor, on_synced)

    monkeypatch.setattr(os, "fsync", record(os.fsync))
    monkeypatch.setattr(os, "fdatasync", record(os.fdatasync))
    monkeypatch.setattr(KernelSyncs, "start", kernel_sync)
    return paths


@pytest.fixture(params=["kernel", "threads"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who syncs small writes."""
    if request.param == "kernel" and is_forbidden():
        pytest.skip("this system forbids io_setup")
    if request.param == "threads":
        monkeypatch.setattr(KernelSyncs, "of", lambda _loop: None)
    return str(request.param)


def open_descriptors_of(path: str) -> list[str]:
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if link.startswith(path):
            links.append(link)
    return links


def fail(number: int) -> Callable[..., None]:
    def raise_error(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return raise_error


@pytest.mark.real_loop
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


@pytest.mark.real_loop
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


@pytest.mark.real_loop
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


@pytest.mark.real_loop
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


@pytest.mark.real_loop
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


@pytest.mark.real_loop
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


@pytest.mark.real_loop
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


@pytest.mark.real_loop
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


@pytest.mark.real_loop
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


@pytest.mark.real_loop
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


@pytest.mark.real_loop
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


@pytest.mark.real_loop
async def test_a_write_is_synced_only_if_asked(folder: str, synced: list[str]) -> None:
    async with open_disk() as disk:
        file = await disk.open(f"{folder}/f", create=True)
        assert synced == [folder], "the new name is durable"
        await file.write(0, [b"x"], sync=False)
        assert synced == [folder]
        await file.write(1, [b"y"], sync=True)
        await file.sync()
        assert synced[1:] == [f"{folder}/f"] * 2


@pytest.mark.real_loop
async def test_every_change_of_names_syncs_its_folders(folder: str, synced: list[str]) -> None:
    async with open_disk() as disk:
        await disk.make_folder(f"{folder}/a/b")
        assert synced[-2:] == [folder, f"{folder}/a"]
        await disk.make_folder(f"{folder}/a/b")
        assert synced[-1] == f"{folder}/a", "its maker may have crashed before this"
        for change, folders in [
            (disk.prepare(f"{folder}/p", 10), [folder, f"{folder}/p"]),
            (disk.rename(f"{folder}/p", f"{folder}/a/q"), [f"{folder}/a", folder]),
            (disk.publish(f"{folder}/a/q", f"{folder}/a/r"), [f"{folder}/a"]),
            (disk.remove(f"{folder}/a/r"), [f"{folder}/a"]),
            (disk.remove_folder(f"{folder}/a/b"), [f"{folder}/a"]),
        ]:
            synced.clear()
            await change
            assert synced == folders


@pytest.mark.real_loop
async def test_names_that_were_found_are_made_durable_on_demand(folder: str, synced: list[str]) -> None:
    async with open_disk() as disk:
        Path(f"{folder}/found").touch()  # its maker was killed before it could sync the folder
        await disk.sync_folder(folder)
        assert synced == [folder]
        await disk.sync_folder(f"{folder}/absent")
        assert synced == [folder], "an absent folder has no names"


@pytest.mark.real_loop
async def test_recovery_syncs_the_folder_of_a_file_that_it_finds(folder: str, synced: list[str]) -> None:
    async with open_disk() as disk:
        recovered = await recover(disk, folder)
        await repair(disk, folder, recovered)
        assert synced == [folder], "also when nothing else is to be done"


@pytest.mark.real_loop
async def test_a_folder_that_cannot_be_synced_says_so(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", fail(errno.EIO))
    async with open_disk() as disk:
        with pytest.raises(SyncFailed, match=folder):
            await disk.sync_folder(folder)


@pytest.mark.real_loop
async def test_prepare_writes_real_blocks_of_zeros_and_refuses_an_existing_name(folder: str) -> None:
    size = (3 << 20) + 17
    async with open_disk() as disk:
        await disk.prepare(f"{folder}/f", size)
        status = os.stat(f"{folder}/f")
        assert (status.st_size, status.st_blocks * 512 >= size) == (size, True)
        assert await (await disk.open(f"{folder}/f")).read(0, 2 * size) == bytes(size)
        with pytest.raises(FileTaken):
            await disk.prepare(f"{folder}/f", size)


@pytest.mark.real_loop
async def test_prepare_that_runs_out_of_room_leaves_no_file(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", fail(errno.ENOSPC))
    async with open_disk() as disk:
        with pytest.raises(DiskFull, match=f"{folder}/f"):
            await disk.prepare(f"{folder}/f", 100)
        assert await disk.list(folder) == []


@pytest.mark.real_loop
@pytest.mark.parametrize("supported", [True, False])
async def test_reserve_allocates_and_keeps_what_is_there(
    folder: str, monkeypatch: pytest.MonkeyPatch, supported: bool
) -> None:
    if not supported:
        monkeypatch.setattr(os, "posix_fallocate", fail(errno.EOPNOTSUPP))
    async with open_disk() as disk:
        file = await disk.open(f"{folder}/f", create=True)
        await file.write(0, [b"kept"], sync=False)
        await file.reserve(0)
        await file.reserve(2_000_000)
        assert os.stat(f"{folder}/f").st_blocks * 512 >= 2_000_000
        assert await file.size() == 2_000_000
        await file.reserve(100)
        assert await file.size() == 2_000_000
        assert await file.read(0, 6) == b"kept\0\0"
        await file.truncate(3)
        assert await file.read(0, 6) == b"kep"


@pytest.mark.real_loop
@pytest.mark.parametrize("exclusive_rename", [True, False])
async def test_publish_never_replaces(folder: str, monkeypatch: pytest.MonkeyPatch, exclusive_rename: bool) -> None:
    if not exclusive_rename:
        monkeypatch.setattr(os_disk, "_renameat2", None)
    async with open_disk() as disk:
        for name in ("one", "two"):
            file = await disk.open(f"{folder}/{name}", create=True)
            await file.write(0, [name.encode()], sync=True)
        await disk.publish(f"{folder}/one", f"{folder}/target")
        with pytest.raises(FileTaken, match=f"{folder}/target"):
            await disk.publish(f"{folder}/two", f"{folder}/target")
        with pytest.raises(FileMissing):
            await disk.publish(f"{folder}/three", f"{folder}/other")
        assert [stat.name for stat in await disk.list(folder)] == ["target", "two"]
        assert await (await disk.open(f"{folder}/target")).read(0, 10) == b"one"


@pytest.mark.real_loop
async def test_of_many_publishers_one_wins(folder: str) -> None:
    async with open_disk() as disk:
        for n in range(8):
            await disk.prepare(f"{folder}/{n}", 1)
        results = await asyncio.gather(
            *(disk.publish(f"{folder}/{n}", f"{folder}/target") for n in range(8)), return_exceptions=True
        )
        assert sorted(type(result).__name__ for result in results) == ["FileTaken"] * 7 + ["NoneType"]
        assert len(await disk.list(folder)) == 8


@pytest.mark.real_loop
async def test_a_filesystem_without_links_is_named_as_the_reason(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os_disk, "_renameat2", None)
    monkeypatch.setattr(os, "link", fail(errno.EPERM))
    async with open_disk() as disk:
        await disk.prepare(f"{folder}/a", 1)
        with pytest.raises(DiskError, match="hard links"):
            await disk.publish(f"{folder}/a", f"{folder}/b")


@pytest.mark.real_loop
async def test_lists_are_sorted_and_an_absent_folder_is_empty(folder: str) -> None:
    async with open_disk() as disk:
        await disk.make_folder(f"{folder}/z")
        await disk.make_folder(f"{folder}/y")
        await disk.prepare(f"{folder}/b", 2)
        await disk.prepare(f"{folder}/a", 1)
        assert [(stat.name, stat.size) for stat in await disk.list(folder)] == [("a", 1), ("b", 2)]
        assert await disk.list_folders(folder) == ["y", "z"]
        assert await disk.list(f"{folder}/absent") == []
        assert await disk.list_folders(f"{folder}/absent") == []
        with pytest.raises(DiskError):
            await disk.list(f"{folder}/a")
        await disk.remove_folder(f"{folder}/absent")
        with pytest.raises(DiskError, match="not empty"):
            await disk.remove_folder(folder)


@pytest.mark.real_loop
@pytest.mark.parametrize(
    ("call", "number", "error"),
    [
        ("pwritev", errno.ENOSPC, DiskFull),
        ("pwritev", errno.EDQUOT, DiskFull),
        ("pwritev", errno.EIO, DiskError),
        ("fdatasync", errno.EIO, SyncFailed),
        ("fdatasync", errno.ENOSPC, SyncFailed),
    ],
)
async def test_a_failing_write_or_sync_says_which_file_and_why(
    folder: str, monkeypatch: pytest.MonkeyPatch, call: str, number: int, error: type[DiskError]
) -> None:
    monkeypatch.setattr(os, call, fail(number))
    async with open_disk() as disk:
        file = await disk.open(f"{folder}/f", create=True)
        with pytest.raises(DiskError) as caught:
            await file.write(0, [b"x"], sync=True)
        assert type(caught.value) is error
        assert f"{folder}/f" in str(caught.value)
        assert os.strerror(number) in str(caught.value)


@pytest.mark.real_loop
async def test_missing_and_taken_names_have_their_own_errors(folder: str) -> None:
    async with open_disk() as disk:
        for missing in (
            disk.open(f"{folder}/f"),
            disk.remove(f"{folder}/f"),
            disk.rename(f"{folder}/f", f"{folder}/g"),
            disk.open(f"{folder}/absent/f", create=True),
        ):
            with pytest.raises(FileMissing, match=folder):
                await missing
        await disk.prepare(f"{folder}/f", 1)
        for taken in (disk.open(f"{folder}/f", create=True), disk.make_folder(f"{folder}/f/g")):
            with pytest.raises(FileTaken, match=f"{folder}/f"):
                await taken


class Gate:
    """Stands in for `os.fdatasync` and holds each call until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()
        self.descriptors: list[str] = []

    def __call__(self, descriptor: int) -> None:
        self.entered.set()
        assert self.opened.wait(30)
        self.descriptors.append(os.readlink(f"/proc/self/fd/{descriptor}"))


async def entered(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.entered.wait, 30)


@pytest.mark.real_loop
@pytest.mark.parametrize("cancelled", [False, True])
async def test_close_waits_for_calls_in_flight_and_refuses_new_ones(
    folder: str, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    """Otherwise the number of the descriptor could belong to another file when the thread uses it."""
    gate = Gate()
    monkeypatch.setattr(os, "fdatasync", gate)
    async with open_disk() as disk:
        file = await disk.open(f"{folder}/f", create=True)
        sync = asyncio.create_task(file.sync())
        await entered(gate)
        if cancelled:
            sync.cancel()
        closing = [asyncio.create_task(file.close()) for _ in range(2)]
        other = await disk.open(f"{folder}/g", create=True)
        assert not any(task.done() for task in closing)
        with pytest.raises(DiskError, match="closed"):
            await file.write(0, [b"x"], sync=False)
        gate.opened.set()
        await asyncio.gather(*closing)
        assert gate.descriptors == [f"{folder}/f"]
        assert open_descriptors_of(f"{folder}/f") == []
        await asyncio.gather(sync, return_exceptions=True)
        await file.close()
        await other.close()


@pytest.mark.real_loop
async def test_close_waits_for_the_last_of_several_calls(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, quick = Gate(), Gate()
    monkeypatch.setattr(os, "fdatasync", slow)
    monkeypatch.setattr(os, "ftruncate", lambda descriptor, _: quick(descriptor))
    async with open_disk() as disk:
        file = await disk.open(f"{folder}/f", create=True)
        syncing, cutting = asyncio.create_task(file.sync()), asyncio.create_task(file.truncate(0))
        await entered(slow)
        await entered(quick)
        closing = asyncio.create_task(file.close())
        await asyncio.sleep(0)
        quick.opened.set()
        await cutting
        assert open_descriptors_of(f"{folder}/f") == [f"{folder}/f"]
        slow.opened.set()
        await asyncio.gather(syncing, closing)
        assert open_descriptors_of(f"{folder}/f") == []


def test_close_waits_for_a_call_that_was_cancelled_before_a_thread_took_it(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()

    async def main() -> None:
        disk = OsDisk(threads=1)
        first = await disk.open(f"{folder}/f", create=True)
        second = await disk.open(f"{folder}/g", create=True)
        monkeypatch.setattr(os, "fdatasync", gate)
        holding = asyncio.create_task(first.sync())
        await entered(gate)
        waiting = asyncio.create_task(second.sync())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        closing = asyncio.create_task(second.close())
        gate.opened.set()
        await asyncio.gather(holding, closing)
        assert gate.descriptors == [f"{folder}/f", f"{folder}/g"], "what was given is done, on its own file"
        await disk.close()

    asyncio.run(main())
    assert open_descriptors_of(folder) == []


@pytest.mark.real_loop
async def test_a_cancelled_open_leaks_no_descriptor(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started, proceed = threading.Event(), threading.Event()
    real = OsDisk._open

    def slow(self: OsDisk, path: str, create: bool) -> OsFile:
        started.set()
        assert proceed.wait(30)
        return real(self, path, create)

    monkeypatch.setattr(OsDisk, "_open", slow)
    disk = OsDisk(threads=1)
    opening = asyncio.create_task(disk.open(f"{folder}/f", create=True))
    assert await asyncio.to_thread(started.wait, 30)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    proceed.set()
    await disk.list(folder)  # The one thread has ended the open before it begins this.
    assert open_descriptors_of(folder) == []
    assert [stat.name for stat in await disk.list(folder)] == ["f"]
    await disk.close()


@pytest.mark.real_loop
async def test_closing_the_disk_closes_its_files_and_refuses_calls(folder: str) -> None:
    disk = OsDisk()
    file = await disk.open(f"{folder}/f", create=True)
    await disk.close()
    await disk.close()
    assert open_descriptors_of(folder) == []
    with pytest.raises(DiskError, match="closed"):
        await file.size()
    with pytest.raises(DiskError, match="closed"):
        await disk.list(folder)
    await file.close()
