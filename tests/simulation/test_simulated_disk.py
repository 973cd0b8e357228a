"""The simulated disk keeps what it must and loses, over the seeds, everything that it may."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import TypeVar

import pytest

from braid.model.errors import DiskError, DiskFull, FileMissing, FileTaken, SyncFailed
from braid.ports.disk import Disk
from braid.testing.sim.disk import NO_FAULTS, Crashed, DiskFaults, SimulatedDisk
from braid.testing.sim.loop import Simulation, run_simulation
from braid.testing.sim.sectors import SECTOR_BYTES

T = TypeVar("T")
SEEDS = range(200)


def with_disk(seed: int, main: Callable[[Simulation, SimulatedDisk], Awaitable[T]]) -> T:
    async def run(sim: Simulation) -> T:
        return await main(sim, SimulatedDisk(sim.random))

    return run_simulation(seed, run)


async def whole(disk: Disk, path: str) -> bytes:
    file = await disk.open(path)
    return await file.read(0, await file.size())


def sectors(data: bytes) -> list[bytes]:
    return [data[start : start + SECTOR_BYTES] for start in range(0, len(data), SECTOR_BYTES)]


def test_the_simulated_disk_is_a_disk() -> None:
    disk = SimulatedDisk(Random(1))
    port: Disk = disk
    assert port is disk


@pytest.mark.parametrize("seed", SEEDS)
async def test_what_was_synced_survives_every_crash(seed: int, disk: SimulatedDisk) -> None:
    """Random writes, truncations and syncs on one file; a model keeps, for each byte, whether it may still change."""
    random = Random(seed)
    synced = b""
    await disk.open("f", create=True)
    for _ in range(6):
        file = await disk.open("f")
        settled = bytearray(synced)  # What the file held at the last sync.
        touched = [False] * len(settled)
        for _ in range(random.randrange(6)):
            match random.choice(["write", "write", "write", "sync", "truncate", "reserve"]):
                case "write":
                    position, size = random.randrange(6_000), random.randrange(1, 3_000)
                    await file.write(position, [random.randbytes(size)], sync=random.random() < 0.3)
                    if not disk.unsynced("f"):
                        settled = bytearray(disk.content("f"))
                        touched = [False] * len(settled)
                    for at in range(position, min(position + size, len(settled))):
                        touched[at] = disk.unsynced("f")
                case "sync":
                    await file.sync()
                    assert not disk.unsynced("f")
                    settled = bytearray(await whole(disk, "f"))
                    touched = [False] * len(settled)
                case "truncate":
                    size = random.randrange(6_000)
                    await file.truncate(size)
                    touched[size:] = [True] * len(touched[size:])
                case "reserve":
                    await file.reserve(random.randrange(6_000))
        disk.crash()
        after = await whole(disk, "f")
        kept = [at for at, changed in enumerate(touched) if not changed]
        assert len(after) > max(kept, default=-1)
        assert all(after[at] == settled[at] for at in kept)
        file = await disk.open("f")
        await file.sync()
        synced = await whole(disk, "f")
        assert synced == after, "what a crash left is durable"


def outcomes_of_a_crash(old: bytes, new: bytes, *, seeds: range = SEEDS) -> list[bytes]:
    """`old` is synced, `new` is written over it and not synced; what is there after the crash, for each seed?"""

    async def main(sim: Simulation, disk: SimulatedDisk) -> bytes:
        file = await disk.open("f", create=True)
        await file.write(0, [old], sync=True)
        await file.write(0, [new], sync=False)
        assert await file.read(0, len(new)) == new
        disk.crash()
        return await whole(disk, "f")

    return [with_disk(seed, main) for seed in seeds]


def test_unsynced_sectors_are_lost_kept_mixed_and_torn() -> None:
    old, new = b"o" * 4_096, b"n" * 4_096
    outcomes = outcomes_of_a_crash(old, new)
    assert all(len(outcome) == 4_096 and not outcome.strip(b"on") for outcome in outcomes)
    assert old in outcomes
    assert new in outcomes
    mixed = [outcome for outcome in outcomes if b"o" in outcome and b"n" in outcome]
    assert any({len(set(sector)) for sector in sectors(outcome)} == {1} for outcome in mixed), "whole sectors, mixed"
    torn = [sector for outcome in mixed for sector in sectors(outcome) if len(set(sector)) == 2]
    assert any(sector.startswith(b"n") for sector in torn)
    assert any(sector.startswith(b"o") for sector in torn)


def test_an_unsynced_append_leaves_any_length_and_zeros_where_it_was_lost() -> None:
    new = b"o" * 1_000 + b"n" * 3_000
    outcomes = outcomes_of_a_crash(b"o" * 1_000, new)
    assert all(outcome.startswith(b"o" * 1_000) for outcome in outcomes)
    lengths = {len(outcome) for outcome in outcomes}
    assert {1_000, 4_000} < lengths
    assert min(lengths) == 1_000
    assert max(lengths) == 4_000
    assert any(0 in outcome and outcome.rstrip(b"\0").endswith(b"n") for outcome in outcomes), "a hole in the middle"
    assert any(outcome.endswith(bytes(SECTOR_BYTES)) for outcome in outcomes), "a tail of zeros"


def test_an_unsynced_truncation_is_undone_or_kept() -> None:
    async def main(sim: Simulation, disk: SimulatedDisk) -> bytes:
        file = await disk.open("f", create=True)
        await file.write(0, [b"o" * 3_000], sync=True)
        await file.truncate(1_000)
        await file.write(1_000, [b"n" * 1_000], sync=False)
        disk.crash()
        return await whole(disk, "f")

    outcomes = {with_disk(seed, main) for seed in SEEDS}
    assert b"o" * 3_000 in outcomes
    assert b"o" * 1_000 in outcomes
    assert b"o" * 1_000 + b"n" * 1_000 in outcomes
    assert all(outcome.startswith(b"o" * 1_000) for outcome in outcomes)


def test_a_sector_written_twice_may_survive_in_its_first_version() -> None:
    async def main(sim: Simulation, disk: SimulatedDisk) -> bytes:
        file = await disk.open("f", create=True)
        await file.write(0, [b"0" * 512], sync=True)
        await file.write(0, [b"1" * 512], sync=False)
        await file.write(0, [b"2" * 512], sync=False)
        disk.crash()
        return await whole(disk, "f")

    assert {b"0" * 512, b"1" * 512, b"2" * 512} <= {with_disk(seed, main) for seed in SEEDS}


def test_a_write_in_flight_at_the_crash_leaves_any_part_of_itself() -> None:
    async def main(sim: Simulation, disk: SimulatedDisk) -> bytes:
        file = await disk.open("f", create=True)
        await file.write(0, [b"o" * 4_096], sync=True)
        writing = asyncio.create_task(file.write(0, [b"n" * 4_096], sync=True))
        await asyncio.sleep(sim.random.uniform(0, 1e-3))
        done = writing.done()
        disk.crash()
        if not done:
            with pytest.raises(Crashed):
                await writing
        result = await whole(disk, "f")
        assert not done or result == b"n" * 4_096
        return result

    outcomes = [with_disk(seed, main) for seed in SEEDS]
    assert b"o" * 4_096 in outcomes
    assert b"n" * 4_096 in outcomes
    assert any(b"o" in outcome and b"n" in outcome for outcome in outcomes)


def test_a_call_that_the_crash_found_at_its_beginning_may_have_been_carried_out() -> None:
    async def main(sim: Simulation, disk: SimulatedDisk) -> tuple[bool, bool]:
        file = await disk.open("f", create=True)
        disk.faults = DiskFaults(write_s=(1, 1))
        calls = [
            asyncio.create_task(file.write(0, [b"x"], sync=True)),
            asyncio.create_task(disk.prepare("g", 100)),
        ]
        await asyncio.sleep(0.5)
        assert (disk.content("f"), disk.paths()) == (b"", ["f"])
        disk.crash()
        for call in calls:
            with pytest.raises(Crashed):
                await call
        return disk.content("f") == b"x", "g" in disk.paths()

    assert {with_disk(seed, main) for seed in SEEDS} == {(True, True), (True, False), (False, True), (False, False)}


def test_a_failed_sync_loses_its_sectors_even_if_the_next_sync_succeeds() -> None:
    """Fsyncgate: the kernel marks the pages clean; only writing them again makes them durable."""

    async def main(sim: Simulation, disk: SimulatedDisk) -> tuple[bytes, bytes]:
        file = await disk.open("f", create=True)
        await file.write(0, [b"o" * 4_096], sync=True)
        disk.faults = DiskFaults(sync_failure=1.0)
        with pytest.raises(SyncFailed):
            await file.write(0, [b"n" * 4_096], sync=True)
        disk.faults = NO_FAULTS
        await file.sync()
        assert await file.read(0, 4_096) == b"n" * 4_096, "reads still show it"
        await file.write(1_024, [b"again" * 10], sync=True)
        disk.crash()
        after = await whole(disk, "f")
        return after[:1_024] + after[1_536:], after[1_024:1_536]

    outcomes = [with_disk(seed, main) for seed in SEEDS]
    assert all(again == (b"again" * 10).ljust(512, b"n") for _, again in outcomes), "the page is written as a whole"
    assert any(lost == b"o" * 3_584 for lost, _ in outcomes)
    assert any(b"o" in lost and b"n" in lost for lost, _ in outcomes)


def test_a_sync_does_not_cover_a_write_that_came_while_it_ran() -> None:
    async def main(sim: Simulation, disk: SimulatedDisk) -> bytes:
        disk.faults = DiskFaults(write_s=(1e-3, 1e-3), sync_s=(5e-3, 5e-3))
        file = await disk.open("f", create=True)
        await file.write(0, [b"1" * 512], sync=False)
        syncing = asyncio.create_task(file.sync())
        await asyncio.sleep(1e-4)
        await file.write(0, [b"2" * 512], sync=False)
        await syncing
        disk.crash()
        return await whole(disk, "f")

    outcomes = {with_disk(seed, main) for seed in SEEDS}
    assert {b"1" * 512, b"2" * 512} <= outcomes
    assert not any(set(outcome) - set(b"12") for outcome in outcomes), "the first version was synced"


async def test_open_files_and_mounted_disks_are_dead_after_a_crash(disk: SimulatedDisk) -> None:
    mounted = disk.mount()
    file = await mounted.open("f", create=True)
    disk.crash()
    for call in (file.write(0, [b"x"], sync=True), file.read(0, 1), file.size(), mounted.list("."), file.sync()):
        with pytest.raises(Crashed):
            await call
    await file.close()
    assert [stat.name for stat in await disk.list(".")] == ["f"]
    assert await disk.mount().list(".") == await disk.list(".")
    assert disk.crashes == 1


def test_names_are_durable_when_the_call_has_returned() -> None:
    async def main(sim: Simulation, disk: SimulatedDisk) -> None:
        await disk.make_folder("a/b")
        await disk.prepare("a/b/p", 1_000)
        await disk.open("a/one", create=True)
        await disk.open("a/two", create=True)
        await disk.rename("a/one", "a/three")
        await disk.publish("a/two", "a/four")
        await disk.remove("a/three")
        disk.crash()
        assert disk.paths() == ["a/b/p", "a/four"]
        assert await whole(disk, "a/b/p") == bytes(1_000)

    for seed in SEEDS:
        with_disk(seed, main)


def test_a_file_with_two_names_takes_its_room_once_and_stays_until_both_are_removed() -> None:
    async def main(sim: Simulation, disk: SimulatedDisk) -> None:
        disk.faults = DiskFaults(capacity_bytes=1_000)
        await disk.prepare("one", 1_000)
        await disk.link("one", "two")
        with pytest.raises(FileTaken):
            await disk.link("one", "two")
        with pytest.raises(FileMissing):
            await disk.link("three", "four")
        disk.crash()
        await disk.remove("one")
        assert await whole(disk, "two") == bytes(1_000)
        await disk.remove("two")
        await disk.prepare("three", 1_000)

    for seed in SEEDS:
        with_disk(seed, main)


def test_a_change_of_names_in_flight_at_the_crash_happened_or_not() -> None:
    async def main(sim: Simulation, disk: SimulatedDisk) -> tuple[str, ...]:
        for name in ("old", "target"):
            file = await disk.open(name, create=True)
            await file.write(0, [name.encode()], sync=True)
        renaming = asyncio.create_task(disk.rename("old", "target"))
        await asyncio.sleep(sim.random.uniform(0, 2e-3))
        disk.crash()
        await asyncio.gather(renaming, return_exceptions=True)
        return tuple([(await whole(disk, path)).decode() for path in disk.paths()])

    assert {with_disk(seed, main) for seed in SEEDS} == {("old", "target"), ("old",)}


async def killed_create(sim: Simulation, disk: SimulatedDisk, path: str) -> bool:
    """Whether the name is there after its maker was killed, just before it was durable."""
    disk.faults = DiskFaults(sync_s=(1, 1))
    creating = asyncio.create_task(disk.open(path, create=True))
    await asyncio.sleep(0.5)
    disk.kill()
    await asyncio.gather(creating, return_exceptions=True)
    disk.faults = NO_FAULTS
    return path in disk.paths()


def test_a_name_whose_maker_was_killed_is_seen_and_may_still_be_lost() -> None:
    async def main(sim: Simulation, disk: SimulatedDisk) -> int:
        await disk.make_folder("a")
        await disk.make_folder("b")
        assert await killed_create(sim, disk, "a/found")
        file = await disk.open("a/found")
        await file.write(0, [b"x"], sync=True)
        # None of this says anything of the names in `a`.
        await disk.make_folder("c")
        await disk.prepare("b/prepared", 10)
        await disk.rename("b/prepared", "c/renamed")
        await disk.sync_folder("b")
        disk.crash()
        assert "c/renamed" in disk.paths()
        return "a/found" in disk.paths()

    assert {with_disk(seed, main) for seed in SEEDS} == {False, True}


@pytest.mark.parametrize("how", ["sync_folder", "create", "rename"])
def test_syncing_a_folder_makes_all_its_names_durable(how: str) -> None:
    async def main(sim: Simulation, disk: SimulatedDisk) -> None:
        await disk.make_folder("a")
        await disk.open("f", create=True)
        assert await killed_create(sim, disk, "a/found")
        match how:
            case "sync_folder":
                await disk.sync_folder("a/")
            case "create":
                await disk.open("a/other", create=True)
            case _:
                await disk.rename("f", "a/f")
        disk.crash()
        assert "a/found" in disk.paths()

    for seed in SEEDS:
        with_disk(seed, main)


def test_each_folder_keeps_some_first_part_of_its_changes() -> None:
    async def main(sim: Simulation, disk: SimulatedDisk) -> tuple[str, ...]:
        await disk.make_folder("a")
        await disk.make_folder("b")
        disk.faults = DiskFaults(sync_failure=1.0)
        for path in ("a/1", "b/1", "a/2", "b/2"):
            with pytest.raises(SyncFailed):
                await disk.open(path, create=True)
        disk.crash()
        return tuple(disk.paths())

    parts: list[list[str]] = [[], ["1"], ["1", "2"]]
    expected = {tuple([f"a/{n}" for n in a] + [f"b/{n}" for n in b]) for a in parts for b in parts}
    assert {with_disk(seed, main) for seed in SEEDS} == expected


def test_a_file_is_lost_with_the_folder_around_it() -> None:
    async def main(sim: Simulation, disk: SimulatedDisk) -> tuple[str, ...]:
        disk.faults = DiskFaults(sync_s=(1, 1))
        making = asyncio.create_task(disk.make_folder("a"))
        await asyncio.sleep(1.5)
        disk.kill()
        await asyncio.gather(making, return_exceptions=True)
        disk.faults = NO_FAULTS
        await disk.open("a/f", create=True)
        disk.crash()
        assert await disk.list_folders(".") == (["a"] if disk.paths() else [])
        return tuple(disk.paths())

    assert {with_disk(seed, main) for seed in SEEDS} == {(), ("a/f",)}


def test_a_folder_that_is_found_is_durable_when_it_was_made_again() -> None:
    async def main(sim: Simulation, disk: SimulatedDisk) -> None:
        making = asyncio.create_task(disk.make_folder("a/b/c"))
        await asyncio.sleep(sim.random.uniform(0, 5e-3))
        disk.kill()
        await asyncio.gather(making, return_exceptions=True)
        await disk.make_folder("a/b/c")
        await disk.open("a/b/c/f", create=True)
        disk.crash()
        assert disk.paths() == ["a/b/c/f"]

    for seed in SEEDS:
        with_disk(seed, main)


def test_a_folder_whose_sync_failed_may_forget_the_new_name() -> None:
    async def main(sim: Simulation, disk: SimulatedDisk) -> int:
        disk.faults = DiskFaults(sync_failure=1.0)
        with pytest.raises(SyncFailed):
            await disk.open("f", create=True)
        disk.crash()
        return len(disk.paths())

    assert {with_disk(seed, main) for seed in SEEDS} == {0, 1}


def test_a_full_disk_takes_a_part_and_reserved_room_stays_usable() -> None:
    async def main(sim: Simulation, disk: SimulatedDisk) -> int:
        disk.faults = DiskFaults(capacity_bytes=10_000)
        file = await disk.open("f", create=True)
        await file.reserve(6_000)
        other = await disk.open("g", create=True)
        with pytest.raises(DiskFull):
            await other.write(0, [b"x" * 5_000], sync=True)
        written = await other.size()
        assert await other.read(0, 5_000) == b"x" * written
        with pytest.raises(DiskFull):
            await file.reserve(10_001)
        with pytest.raises(DiskFull):
            await disk.prepare("h", 10_001)
        await file.write(0, [b"y" * 6_000], sync=True)
        assert disk.paths() == ["f", "g"]
        return written

    written = {with_disk(seed, main) for seed in SEEDS}
    assert max(written) <= 4_000
    assert len(written) > 10


def test_reads_fail_as_often_as_asked_and_faults_can_be_switched_off() -> None:
    async def main(sim: Simulation, disk: SimulatedDisk) -> int:
        file = await disk.open("f", create=True)
        await file.write(0, [b"x"], sync=True)
        disk.faults = DiskFaults(read_failure=0.5)
        results = await asyncio.gather(*(file.read(0, 1) for _ in range(200)), return_exceptions=True)
        disk.faults = NO_FAULTS
        assert await file.read(0, 1) == b"x"
        return sum(isinstance(result, DiskError) for result in results)

    assert 60 < with_disk(1, main) < 140


async def test_operations_take_virtual_time_and_sometimes_stall(simulation: Simulation, disk: SimulatedDisk) -> None:
    file = await disk.open("f", create=True)
    disk.faults = DiskFaults(write_s=(1, 2), sync_s=(10, 20))
    before = simulation.loop.time()
    await file.write(0, [b"x"], sync=True)
    assert 11 <= simulation.loop.time() - before <= 22
    disk.faults = DiskFaults(stall=1.0, stall_s=(100, 100))
    before = simulation.loop.time()
    await file.read(0, 1)
    assert simulation.loop.time() - before == pytest.approx(100)


async def test_flipped_and_corrupted_bytes_are_read_and_survive_a_crash(disk: SimulatedDisk) -> None:
    file = await disk.open("f", create=True)
    await file.write(0, [bytes(10)], sync=True)
    disk.flip("f", 3, 7)
    disk.corrupt("f", 8, b"abcdef")
    assert await file.read(0, 20) == b"\0\0\0\x80\0\0\0\0ab"
    disk.crash()
    assert await whole(disk, "f") == b"\0\0\0\x80\0\0\0\0ab"


async def test_a_cancelled_write_still_happens_and_close_waits_for_it(disk: SimulatedDisk) -> None:
    file = await disk.open("f", create=True)
    writing = asyncio.create_task(file.write(0, [b"x"], sync=False))
    await asyncio.sleep(0)
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    assert disk.content("f") == b""
    await file.close()
    assert disk.content("f") == b"x"
    with pytest.raises(DiskError, match="closed"):
        await file.read(0, 1)
    await file.close()


async def test_what_a_process_gave_to_the_kernel_is_written_although_it_was_killed(
    simulation: Simulation, disk: SimulatedDisk
) -> None:
    file = await disk.open("f", create=True)
    disk.faults = DiskFaults(write_s=(1, 1), sync_s=(1, 1))
    process = simulation.process("writer")
    process.start(file.write(0, [b"x"], sync=True))
    await asyncio.sleep(0.5)
    assert disk.content("f") == b""
    process.kill()
    await asyncio.sleep(5)
    assert disk.durable("f") == b"x"


async def test_a_buffer_that_changes_before_the_write_returns_is_written_changed(disk: SimulatedDisk) -> None:
    file = await disk.open("f", create=True)
    buffer = bytearray(b"before")
    writing = asyncio.create_task(file.write(0, [buffer], sync=False))
    await asyncio.sleep(0)
    buffer[:] = b"after!"
    await writing
    assert disk.content("f") == b"after!"


async def test_a_removed_file_lives_on_for_who_has_it_open(disk: SimulatedDisk) -> None:
    file = await disk.open("f", create=True)
    await file.write(0, [b"x"], sync=True)
    await disk.remove("f")
    assert await file.read(0, 1) == b"x"
    with pytest.raises(FileMissing):
        await disk.open("f")


def test_the_same_seed_gives_the_same_disk() -> None:
    async def main(sim: Simulation, disk: SimulatedDisk) -> list[object]:
        disk.faults = DiskFaults(sync_failure=0.1, read_failure=0.1, stall=0.05, capacity_bytes=40_000)
        trace: list[object] = []

        async def work(name: str) -> None:
            random = Random(f"{sim.seed}{name}")
            while True:
                try:
                    file = await disk.open(name, create=name not in disk.paths())
                    for _ in range(10):
                        await file.write(random.randrange(9_000), [random.randbytes(3_000)], sync=random.random() < 0.5)
                    await disk.rename(name, name + "x")
                except DiskError as error:
                    trace.append((sim.loop.time(), name, str(error)))

        tasks = [asyncio.create_task(work(name)) for name in "abc"]
        for _ in range(20):
            await asyncio.sleep(0.05)
            disk.crash()
            trace.append([(path, disk.content(path)) for path in disk.paths()])
        for task in tasks:
            task.cancel()
        return trace

    assert with_disk(3, main) == with_disk(3, main)
    assert with_disk(3, main) != with_disk(4, main)
