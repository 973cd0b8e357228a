"""Logs that have ended, and names that the next log uses again: nobody reads one for the other, and nothing that was
confirmed is lost with a name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from braid.model.errors import DiskFull, LogClosed, LogFailed, NotEnoughReplicas
from braid.model.ids import Offset
from braid.model.topic import Durability
from braid.storage.log.context import LogConfig
from braid.storage.segment import SegmentStorage
from braid.testing.sim.disk import NO_FAULTS, DiskFaults, SimulatedDisk
from braid.testing.sim.loop import Simulation
from tests.kits.storage import (
    SMALL,
    SMALL_FILES,
    World,
    fill,
    make_batch,
    open_log,
    read_all,
    read_offsets,
    with_files,
)
from tests.kits.waiting import until

REPLICATED = LogConfig(durability=Durability.REPLICATED, files=SMALL_FILES)


@pytest.mark.parametrize("seed", range(60))
async def test_records_confirmed_into_a_file_that_was_found_survive_a_power_loss(seed: int, world: World) -> None:
    disk = world.a.disk
    await disk.make_folder("log")
    disk.faults = DiskFaults(sync_s=(0.01, 0.02))
    opening = asyncio.create_task(open_log(disk.mount(), world.simulation, 1))
    await until(lambda: bool(disk.paths()))
    disk.kill()
    await asyncio.gather(opening, return_exceptions=True)
    disk.faults = NO_FAULTS
    assert disk.paths(), "the name is there, but nobody has made it durable"
    await fill(await open_log(disk.mount(), world.simulation, 2), 5)
    disk.crash()
    log = await open_log(disk.mount(), world.simulation, 3)
    assert log.end == 5
    await log.close()


@pytest.mark.parametrize("seed", range(20))
async def test_readers_of_an_abandoned_log_do_not_spoil_the_files_of_the_next(seed: int, world: World) -> None:
    old = await world.a.start(cache_bytes=0).open()
    await fill(old, 5, body=b"old")
    zombie = old.reader(0)
    await zombie.read(1)
    await old.abandon()
    moved = await world.b.open(accept_loss=True)
    await moved.hand_over()  # it wrote nothing: the next log begins at offset 0 too

    async def read_for_ever() -> None:
        while True:
            zombie.offset = Offset(0)
            with pytest.raises(LogClosed):
                await zombie.read_available()
            await asyncio.sleep(10e-6)  # often, while files are removed, renamed and created

    reading = asyncio.create_task(read_for_ever())
    new = await world.a.open()
    await fill(new, 3, body=b"new")
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert [read.body for read in await read_all(new)] == [b"new0", b"new1", b"new2"]
    await new.close()


@pytest.mark.parametrize("seed", range(20))
async def test_a_read_that_the_end_of_its_log_overtakes_is_refused(seed: int, world: World) -> None:
    """It may have opened the file of the next log under the old name."""
    segment = await world.a.start(cache_bytes=0).open()
    await fill(segment, 5)
    reading = asyncio.create_task(segment.reader(0).read())
    await asyncio.sleep(0)
    await segment.abandon()
    with pytest.raises(LogClosed):
        await reading
    assert world.a.noting.open_files == 0


EXACT = with_files(first_reserve_bytes=0)
"""Files get no more room on the disk than their batches need."""


@pytest.mark.parametrize("config", [SMALL, EXACT], ids=["reserved", "exact"])
@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
@pytest.mark.parametrize("count", range(1, 30))
async def test_a_log_that_was_prepared_for_its_seal_ends_on_a_full_disk(
    count: int, closed: bool, config: LogConfig, simulation: Simulation, disk: SimulatedDisk
) -> None:
    log = await open_log(disk, simulation, config=config)
    await fill(log, count)
    if closed:
        await log.rotate()
    await log.prepare_seal()
    disk.faults = DiskFaults(capacity_bytes=0)
    assert await log.seal() == count
    assert log.seal_is_durable


@pytest.mark.parametrize("config", [SMALL, EXACT], ids=["reserved", "exact"])
@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
async def test_a_log_on_a_full_disk_is_prepared_for_its_seal_only_if_the_seal_fits(
    closed: bool, config: LogConfig, simulation: Simulation, disk: SimulatedDisk
) -> None:
    log = await open_log(disk, simulation, config=config)
    await fill(log, 3)
    if closed:
        await log.rotate()
    disk.faults = DiskFaults(capacity_bytes=0)
    if closed or config is EXACT:
        with pytest.raises(DiskFull):
            await log.prepare_seal()
    else:
        await log.prepare_seal()
        assert await log.seal() == 3


async def test_a_log_that_is_closed_or_held_is_not_prepared_for_its_seal(
    simulation: Simulation, disk: SimulatedDisk
) -> None:
    log = await open_log(disk, simulation)
    await fill(log, 3)
    log.hold(NotEnoughReplicas("a replica is down"))
    with pytest.raises(NotEnoughReplicas, match="a replica is down"):
        await log.prepare_seal()
    log.resume()
    await log.prepare_seal()
    await log.rotate()
    preparing = asyncio.create_task(log.prepare_seal())
    await asyncio.sleep(0)  # It has begun.
    await log.close()
    for prepared in (preparing, log.prepare_seal()):
        with pytest.raises(LogClosed):
            await prepared


async def test_a_log_that_has_ended_is_prepared_for_its_seal(simulation: Simulation, disk: SimulatedDisk) -> None:
    log = await open_log(disk, simulation)
    await fill(log, 3)
    await log.seal()
    disk.faults = DiskFaults(capacity_bytes=0)
    await log.prepare_seal()


@pytest.mark.parametrize("end", [SegmentStorage.close, SegmentStorage.abandon, SegmentStorage.hand_over])
async def test_an_ended_log_refuses_readers_that_would_need_its_files(
    end: Callable[[SegmentStorage], Awaitable[object]], world: World
) -> None:
    segment = await world.a.start(cache_bytes=0).open()
    await fill(segment, 60)
    reader = segment.reader(0)
    await reader.read(1)
    await end(segment)
    with pytest.raises(LogClosed):
        await reader.read(1)
    with pytest.raises(LogClosed):
        await segment.reader(59).read_available()


async def test_a_failed_log_refuses_readers(world: World) -> None:
    segment = await world.a.start(cache_bytes=0).open()
    await fill(segment, 5)
    world.a.disk.faults = DiskFaults(sync_failure=1.0)
    with pytest.raises(LogFailed):
        await fill(segment, 1)
    with pytest.raises(LogFailed):
        await segment.reader(0).read()
    await segment.abandon()


async def test_a_log_on_a_full_disk_serves_readers_until_it_is_abandoned(world: World) -> None:
    segment = await world.a.start(cache_bytes=0).open()
    await fill(segment, 5)
    world.a.disk.faults = DiskFaults(capacity_bytes=0)
    with pytest.raises(DiskFull):
        await fill(segment, 100)
    confirmed = segment.log.confirmed.value
    assert confirmed >= 5
    assert await read_offsets(segment) == list(range(confirmed))
    await segment.abandon()
    with pytest.raises(DiskFull):
        await segment.reader(0).read()


@pytest.mark.parametrize("end", [SegmentStorage.close, SegmentStorage.abandon, SegmentStorage.hand_over])
async def test_an_ended_log_leaves_no_file_open(
    end: Callable[[SegmentStorage], Awaitable[object]], world: World
) -> None:
    segment = await world.a.start(cache_bytes=0).open()
    await fill(segment, 60)
    await read_all(segment)
    assert world.a.noting.open_files > 1
    await end(segment)
    assert world.a.noting.open_files == 0


async def test_a_sealed_log_is_read_until_it_is_closed(world: World) -> None:
    segment = await world.a.start(cache_bytes=0).open()
    await fill(segment, 5)
    await segment.log.seal()
    assert segment.log.ended is None
    assert await read_offsets(segment) == [0, 1, 2, 3, 4]
    await segment.close()


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
@pytest.mark.parametrize("more", [0, 3])
async def test_a_watermark_inside_a_batch_shows_the_batches_before_it_and_then_waits(
    cache_bytes: int, more: int, world: World
) -> None:
    segment = await world.a.start(cache_bytes=cache_bytes).open(REPLICATED)
    for _ in range(2 + more):
        segment.append(make_batch(10))
    await segment.log.flush()
    segment.log.replicated.advance(15)
    reader = segment.reader(0)
    assert [batch.header.base_offset for batch in await reader.read_available()] == [0]
    assert await reader.read_available() == []
    reading = asyncio.create_task(reader.read())
    for offset in (16, 19):
        await asyncio.sleep(1)
        segment.log.replicated.advance(offset)
    await asyncio.sleep(1)
    assert not reading.done()
    segment.log.replicated.advance(20)
    assert [batch.header.base_offset for batch in await reading] == [10]
    assert reader.offset == 20
    await segment.close()


@pytest.mark.parametrize("handed_over", [True, False])
async def test_the_lost_records_of_a_log_that_has_ended_do_not_come_back(handed_over: bool, world: World) -> None:
    first = await world.a.open()
    await fill(first, 5)
    await first.end_log()
    await first.abandon()
    second = await world.b.open(accept_loss=True)
    assert (second.log.end, second.log.sealed, second.start.loss_accepted) == (0, True, True)
    await (second.hand_over() if handed_over else second.abandon())
    third = await world.a.open()
    assert (third.log.end, third.log.sealed, third.catalog.end) == (0, True, 0), "consumers were told that it is empty"
    await third.hand_over()
    assert (await world.b.open()).log.end == 0
