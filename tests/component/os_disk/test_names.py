"""Names of files on the real disk: made durable, published, listed, refused."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from braid.model.errors import DiskError, DiskFull, FileMissing, FileTaken, OutOfFiles, SyncFailed
from braid.ports import os_disk
from braid.storage.log.recovery import recover, repair
from tests.kits.open_files import no_file_left
from tests.kits.os_disk import fail, open_disk

pytestmark = pytest.mark.real_loop


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
            (disk.link(f"{folder}/a/r", f"{folder}/second"), [folder]),
            (disk.remove(f"{folder}/a/r"), [f"{folder}/a"]),
            (disk.remove_folder(f"{folder}/a/b"), [f"{folder}/a"]),
        ]:
            synced.clear()
            await change
            assert synced == folders


async def test_names_that_were_found_are_made_durable_on_demand(folder: str, synced: list[str]) -> None:
    async with open_disk() as disk:
        Path(f"{folder}/found").touch()  # its maker was killed before it could sync the folder
        await disk.sync_folder(folder)
        assert synced == [folder]
        await disk.sync_folder(f"{folder}/absent")
        assert synced == [folder], "an absent folder has no names"


async def test_recovery_syncs_the_folder_of_a_file_that_it_finds(folder: str, synced: list[str]) -> None:
    async with open_disk() as disk:
        recovered = await recover(disk, folder)
        await repair(disk, folder, recovered)
        assert synced == [folder], "also when nothing else is to be done"


async def test_a_process_without_a_file_left_may_try_again(folder: str) -> None:
    async with open_disk() as disk:
        await (await disk.open(f"{folder}/found", create=True)).close()  # The disk's threads are there from now on.
        with no_file_left():
            for change in (
                disk.open(f"{folder}/found"),
                disk.open(f"{folder}/new", create=True),
                disk.list(folder),
                disk.rename(f"{folder}/found", f"{folder}/renamed"),
                disk.make_folder(f"{folder}/a"),
            ):
                with pytest.raises(OutOfFiles, match="Too many open files") as raised:
                    await change
                assert raised.value.retriable
        await (await disk.open(f"{folder}/new", create=True)).close()


async def test_a_folder_that_cannot_be_synced_says_so(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", fail(errno.EIO))
    async with open_disk() as disk:
        with pytest.raises(SyncFailed, match=folder):
            await disk.sync_folder(folder)


async def test_prepare_writes_real_blocks_of_zeros_and_refuses_an_existing_name(folder: str) -> None:
    size = (3 << 20) + 17
    async with open_disk() as disk:
        await disk.prepare(f"{folder}/f", size)
        status = os.stat(f"{folder}/f")
        assert (status.st_size, status.st_blocks * 512 >= size) == (size, True)
        assert await (await disk.open(f"{folder}/f")).read(0, 2 * size) == bytes(size)
        with pytest.raises(FileTaken):
            await disk.prepare(f"{folder}/f", size)


async def test_prepare_that_runs_out_of_room_leaves_no_file(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", fail(errno.ENOSPC))
    async with open_disk() as disk:
        with pytest.raises(DiskFull, match=f"{folder}/f"):
            await disk.prepare(f"{folder}/f", 100)
        assert await disk.list(folder) == []


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


async def test_a_file_with_two_names_stays_until_both_are_removed(folder: str) -> None:
    async with open_disk() as disk:
        file = await disk.open(f"{folder}/one", create=True)
        await file.write(0, [b"kept"], sync=True)
        await disk.link(f"{folder}/one", f"{folder}/two")
        with pytest.raises(FileTaken, match=f"{folder}/two"):
            await disk.link(f"{folder}/one", f"{folder}/two")
        with pytest.raises(FileMissing):
            await disk.link(f"{folder}/three", f"{folder}/four")
        await disk.remove(f"{folder}/one")
        assert [stat.name for stat in await disk.list(folder)] == ["two"]
        assert await (await disk.open(f"{folder}/two")).read(0, 10) == b"kept"


async def test_of_many_publishers_one_wins(folder: str) -> None:
    async with open_disk() as disk:
        for n in range(8):
            await disk.prepare(f"{folder}/{n}", 1)
        results = await asyncio.gather(
            *(disk.publish(f"{folder}/{n}", f"{folder}/target") for n in range(8)), return_exceptions=True
        )
        assert sorted(type(result).__name__ for result in results) == ["FileTaken"] * 7 + ["NoneType"]
        assert len(await disk.list(folder)) == 8


async def test_a_filesystem_without_links_is_named_as_the_reason(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os_disk, "_renameat2", None)
    monkeypatch.setattr(os, "link", fail(errno.EPERM))
    async with open_disk() as disk:
        await disk.prepare(f"{folder}/a", 1)
        with pytest.raises(DiskError, match="hard links"):
            await disk.publish(f"{folder}/a", f"{folder}/b")


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
