"""Open files and footers for readers, and spare files for writers: bounded, and never in the way."""

from __future__ import annotations

import asyncio

import pytest

from braid.model.errors import FileMissing
from braid.storage.handles import FooterCache, ReadHandles
from braid.storage.log.preallocated import CALM_S, PreallocatedFiles
from braid.testing.sim.disk import DiskFaults, SimulatedDisk
from braid.testing.sim.loop import Simulation
from tests.kits.storage import SMALL, Bytes, NotingDisk, fill, make_chunk, open_log


async def disk_with_files(simulation: Simulation, count: int) -> NotingDisk:
    disk = NotingDisk(SimulatedDisk(simulation.random))
    for number in range(count):
        file = await disk.open(f"f{number}", create=True)
        await file.write(0, [b"content of %d" % number], sync=False)
        await file.close()
    disk.most_open_files = 0
    return disk


async def test_one_after_the_other_never_opens_more_files_than_allowed_and_reuses_them(simulation: Simulation) -> None:
    disk = await disk_with_files(simulation, 5)
    handles = ReadHandles(disk, 2)
    for number in [0, 1, 0, 2, 0, 3, 4, 4, 0]:
        assert await handles.read(1, f"f{number}", 8, 100) == b"of %d" % number
    assert disk.most_open_files == 2
    await handles.close()
    assert disk.open_files == 0


@pytest.mark.parametrize("seed", range(20))
async def test_many_readers_at_once_get_the_right_bytes_and_the_bound_holds_afterwards(
    seed: int, simulation: Simulation
) -> None:
    disk = await disk_with_files(simulation, 8)
    handles = ReadHandles(disk, 2)

    async def reader() -> None:
        for _ in range(10):
            number = simulation.random.randrange(8)
            assert await handles.read(1, f"f{number}", 11, 1) == b"%d" % number

    await asyncio.gather(*(reader() for _ in range(10)))
    assert disk.open_files <= 2
    await handles.close()
    assert disk.open_files == 0


async def test_two_readers_of_a_closed_file_leave_one_handle(simulation: Simulation) -> None:
    disk = await disk_with_files(simulation, 1)
    handles = ReadHandles(disk)
    assert await asyncio.gather(*(handles.read(1, "f0", 0, 7) for _ in range(5))) == [b"content"] * 5
    assert disk.open_files == 1


async def test_a_forgotten_file_is_closed_and_a_missing_one_says_so(simulation: Simulation) -> None:
    disk = await disk_with_files(simulation, 1)
    handles = ReadHandles(disk)
    await handles.read(1, "f0", 0, 1)
    await handles.forget(1, "f0")
    await handles.forget(1, "never opened")
    assert disk.open_files == 0
    await disk.remove("f0")
    with pytest.raises(FileMissing):
        await handles.read(1, "f0", 0, 1)


async def test_each_owner_has_handles_of_its_own_and_they_are_forgotten_together(simulation: Simulation) -> None:
    disk = await disk_with_files(simulation, 2)
    handles = ReadHandles(disk)
    await handles.read(1, "f0", 0, 1)
    await disk.rename("f1", "f0")
    assert await handles.read(1, "f0", 8, 4) == b"of 0", "what it had opened"
    assert await handles.read(2, "f0", 8, 4) == b"of 1"
    await handles.forget_all(1)
    assert disk.open_files == 1
    await handles.close()
    assert disk.open_files == 0


@pytest.mark.parametrize("seed", range(10))
async def test_a_file_that_is_forgotten_while_it_is_opened_does_not_stay_open(
    seed: int, simulation: Simulation
) -> None:
    disk = await disk_with_files(simulation, 1)
    handles = ReadHandles(disk)
    reads = [asyncio.create_task(handles.read(1, "f0", 0, 7)) for _ in range(3)]
    await asyncio.sleep(0)
    await handles.forget_all(1)
    assert disk.open_files == 0, "all of them are still opening it"
    assert await asyncio.gather(*reads) == [b"content"] * 3
    assert disk.open_files == 0


@pytest.mark.real_loop
async def test_footers_are_kept_for_each_owner() -> None:
    cache = FooterCache()
    old, new = Bytes(make_chunk(10, 3)), Bytes(make_chunk(20, 3))
    assert (await cache.get(1, "f", old, len(old.data))).base_offset == 10
    assert (await cache.get(2, "f", new, len(new.data))).base_offset == 20
    cache.forget_all(1)
    await cache.get(2, "f", new, len(new.data))
    await cache.get(1, "f", old, len(old.data))
    assert (old.reads, new.reads) == (2, 1)


@pytest.mark.real_loop
async def test_footers_are_read_once_and_the_least_used_is_dropped() -> None:
    cache = FooterCache(2)
    sources = {name: Bytes(make_chunk(10 * number, 3)) for number, name in enumerate("abc")}

    async def get(name: str) -> int:
        source = sources[name]
        return (await cache.get(1, name, source, len(source.data))).base_offset

    assert [await get(name) for name in "abaca"] == [0, 10, 0, 20, 0]
    assert [source.reads for source in sources.values()] == [1, 1, 1]
    await get("b")
    assert sources["b"].reads == 2, "it was dropped for c"
    cache.forget(1, "b")
    cache.forget(1, "never there")
    await get("b")
    assert sources["b"].reads == 3


async def test_spares_are_made_ahead_taken_by_renaming_and_made_again(simulation: Simulation) -> None:
    disk = SimulatedDisk(simulation.random)
    await disk.make_folder("spare")
    await disk.prepare("spare/left-behind", 99)
    await disk.make_folder("log")
    preallocated = PreallocatedFiles(disk, "spare", 4_096)
    await preallocated.open()
    await preallocated.filled()
    assert [stat.size for stat in await disk.list("spare")] == [4_096, 4_096], "what was left behind is gone"
    assert not await preallocated.take("log/x", 1_000), "no spare has that size"
    assert await preallocated.take("log/x", 4_096)
    assert disk.content("log/x") == bytes(4_096)
    assert not disk.unsynced("log/x")
    await asyncio.sleep(CALM_S - 1)
    assert len(await disk.list("spare")) == 1, "the disk is not calm yet"
    assert await preallocated.take("log/y", 4_096)
    await asyncio.sleep(CALM_S - 1)
    assert await disk.list("spare") == [], "asked for again"
    await asyncio.sleep(2)
    await preallocated.filled()
    assert len(await disk.list("spare")) == 2
    await preallocated.close()
    assert await disk.list("spare") == []


async def test_an_empty_stock_is_no_reason_to_wait(simulation: Simulation) -> None:
    disk = SimulatedDisk(simulation.random)
    preallocated = PreallocatedFiles(disk, "spare", 4_096, most=1)
    await preallocated.open()
    assert not await preallocated.take("x", 4_096)
    await preallocated.filled()
    await disk.remove((await disk.list("spare"))[0].name.join(["spare/", ""]))
    assert not await preallocated.take("x", 4_096), "somebody removed it"
    await preallocated.close()


async def test_a_disk_without_room_for_spares_costs_no_append(simulation: Simulation) -> None:
    disk = SimulatedDisk(simulation.random, faults=DiskFaults(capacity_bytes=40_000))
    preallocated = PreallocatedFiles(disk, "spare", 1 << 20)
    await preallocated.open()
    await preallocated.filled()
    assert await disk.list("spare") == []
    log = await open_log(disk, simulation, preallocated=preallocated)
    await fill(log, 60)
    await log.close()
    await preallocated.close()


async def test_a_busy_log_rotates_into_spares_and_reads_the_same(simulation: Simulation) -> None:
    disk = SimulatedDisk(simulation.random)
    preallocated = PreallocatedFiles(disk, "spare", SMALL.files.file_bytes)
    await preallocated.open()
    await preallocated.filled()
    made = {path for path in disk.paths() if path.startswith("spare/")}
    log = await open_log(disk, simulation, preallocated=preallocated)
    for _ in range(5):
        await fill(log, 20)
        await preallocated.filled()
    assert made - set(disk.paths()), "a spare was taken"
    await log.close()
    await preallocated.close()
    log = await open_log(disk, simulation, epoch=2)
    assert (log.base_offset, log.end) == (0, 100)


async def test_the_stock_follows_what_a_burst_asked_for_up_to_its_limit(simulation: Simulation) -> None:
    disk = SimulatedDisk(simulation.random)
    await disk.make_folder("log")
    preallocated = PreallocatedFiles(disk, "spare", 4_096, most=5)
    await preallocated.open()

    async def burst(files: int, name: str) -> list[bool]:
        await preallocated.filled()
        return [await preallocated.take(f"log/{name}-{number}", 4_096) for number in range(files)]

    assert await burst(4, "first") == [True, True, False, False]
    assert await burst(4, "second") == [True] * 4
    assert await burst(9, "third") == [True] * 4 + [False] * 5
    assert await burst(9, "fourth") == [True] * 5 + [False] * 4
    await preallocated.close()


async def test_a_disk_without_room_for_the_stock_gets_half_of_it_back(simulation: Simulation) -> None:
    disk = SimulatedDisk(simulation.random, faults=DiskFaults(capacity_bytes=5 * 4_096 + 100))
    await disk.make_folder("log")
    preallocated = PreallocatedFiles(disk, "spare", 4_096, most=8)
    await preallocated.open()
    for _ in range(8):
        await preallocated.take("log/x", 4_096)
    await preallocated.filled()
    assert len(await disk.list("spare")) == 2
    await preallocated.close()


async def test_the_stock_is_not_refilled_while_it_is_asked_for(simulation: Simulation) -> None:
    disk = SimulatedDisk(simulation.random)
    await disk.make_folder("log")
    preallocated = PreallocatedFiles(disk, "spare", 4_096, most=4)
    await preallocated.open()
    await preallocated.filled()
    prepare, made = disk.prepare, []

    async def slowly(path: str, size: int) -> None:
        await asyncio.sleep(1.0)
        await prepare(path, size)
        made.append(path)

    disk.prepare = slowly  # type: ignore[method-assign]
    for number in range(60):
        await preallocated.take(f"log/{number}", 4_096)
        await asyncio.sleep(CALM_S / 2)
    assert made == []
    await asyncio.sleep(3 * CALM_S)
    assert len(made) == 4
    await preallocated.close()
    await preallocated.take("log/late", 4_096)
    await asyncio.sleep(2 * CALM_S)
    assert len(made) == 4, "nobody fills the stock of a broker that has stopped"
