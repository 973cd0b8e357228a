"""The log: order, group commit, the three moments of confirming, rotation, and every kind of end."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from braid.model.batch.header import BatchHeader, Flag, control_batch
from braid.model.errors import Fenced, InvalidArgument, LogBusy, LogClosed, LogSealed, SegmentSealed
from braid.model.ids import Epoch, Offset
from braid.model.topic import Durability
from braid.storage.cache import HotCache
from braid.storage.log.context import LogConfig
from braid.storage.log.log import Appended, Log
from braid.storage.log.recovery import recover
from braid.storage.log.wal import FrameWalk
from braid.testing.sim.disk import DiskFaults, SimulatedDisk
from braid.testing.sim.loop import Simulation, run_simulation
from tests.kits.storage import SMALL, SMALL_FILES, NotingDisk, fill, make_batch, make_header, open_log, with_files
from tests.kits.waiting import until

MEMORY = LogConfig(durability=Durability.MEMORY, files=SMALL_FILES)
REPLICATED = LogConfig(durability=Durability.REPLICATED, files=SMALL_FILES)
ONE_FILE = LogConfig()


def log_test(test: object, seed: int = 1) -> None:
    async def main(simulation: Simulation) -> None:
        await test(simulation, SimulatedDisk(simulation.random))  # type: ignore[operator]

    run_simulation(seed, main)


async def frames(disk: SimulatedDisk, folder: str = "log") -> list[BatchHeader]:
    """Every batch in every file, control batches included."""
    found: list[BatchHeader] = []
    for file in (await recover(disk, folder)).files:
        source = await disk.open(f"{folder}/{file.name}")
        walk = FrameWalk(source, file.batch_bytes, 0, file.base_offset)
        while window := await walk.next_window():
            found.extend(header for _, header in window)
        await source.close()
    return found


@pytest.mark.parametrize("seed", range(5))
async def test_offsets_follow_the_order_of_appends_under_many_appenders(
    seed: int, simulation: Simulation, disk: SimulatedDisk
) -> None:
    log = await open_log(disk, simulation)
    assigned: list[tuple[int, int]] = []

    async def appender(producer: int) -> None:
        for sequence in range(20):
            batch = make_batch(simulation.random.randrange(1, 5), producer=producer, sequence=log_sequence[producer])
            appended = log.append(batch)
            assert appended.base_offset is not None
            log_sequence[producer] += appended.next_offset - appended.base_offset
            assigned.append((appended.base_offset, producer))
            if sequence % 3:
                await log.confirm(appended)
                assert log.synced.value >= appended.next_offset

    log_sequence = dict.fromkeys(range(1, 11), 0)
    await asyncio.gather(*(appender(producer) for producer in log_sequence))
    await log.close()
    stored = [header for header in await frames(disk) if header.count]
    assert [(header.base_offset, header.producer_id) for header in stored] == assigned
    expected = 0
    for header in stored:
        assert header.base_offset == expected
        expected = header.next_offset


async def test_what_gathers_during_a_sync_goes_into_the_next_write_together(
    simulation: Simulation, disk: SimulatedDisk
) -> None:
    noting = NotingDisk(disk)
    log = await open_log(noting, simulation, config=ONE_FILE)
    disk.faults = DiskFaults(sync_s=(0.01, 0.01))
    noting.writes.clear()
    first = log.append(make_batch())
    await until(lambda: len(noting.writes) == 1)
    gathered = [log.append(make_batch()) for _ in range(100)]
    await log.confirm(first)
    assert log.synced.value == 1
    await log.confirm(gathered[-1])
    assert [(write.buffers, write.sync) for write in noting.writes] == [(1, True), (100, True)]
    assert noting.syncs == [], "the sync is part of the write"


async def test_a_lone_batch_on_an_idle_disk_waits_for_no_timer(simulation: Simulation, disk: SimulatedDisk) -> None:
    log = await open_log(disk, simulation, config=ONE_FILE)
    before = simulation.clock.monotonic()
    await log.confirm(log.append(make_batch()))
    assert simulation.clock.monotonic() - before < 0.005


async def test_a_group_is_bounded_but_a_batch_above_the_bound_goes_alone(
    simulation: Simulation, disk: SimulatedDisk
) -> None:
    noting = NotingDisk(disk)
    log = await open_log(noting, simulation, config=LogConfig(max_group_bytes=1_000))
    noting.writes.clear()
    for body in [b"x" * 104] * 7 + [b"y" * 5_000] + [b"x" * 104]:
        log.append(make_batch(body=body))
    await log.flush()
    assert [write.buffers for write in noting.writes] == [5, 2, 1, 1]


async def test_a_batch_larger_than_a_file_gets_a_file_of_its_own(simulation: Simulation, disk: SimulatedDisk) -> None:
    log = await open_log(disk, simulation)
    await fill(log, 3)
    await log.confirm(log.append(make_batch(7, b"y" * 50_000)))
    await fill(log, 3)
    assert [(file.base_offset, file.next_offset) for file in log.files] == [(0, 3), (3, 10), (10, 13)]
    await log.close()
    log = await open_log(disk, simulation, epoch=2)
    assert log.end == 13


async def test_too_many_bytes_waiting_for_the_disk_are_refused_and_room_comes_back(
    simulation: Simulation, disk: SimulatedDisk
) -> None:
    log = await open_log(disk, simulation, config=LogConfig(max_pending_bytes=1_000))
    for _ in range(5):
        log.append(make_batch(body=b"x" * 104))
    with pytest.raises(LogBusy, match="1000 bytes wait"):
        log.append(make_batch(body=b"x" * 104))
    assert log.pending_bytes == 1_000
    assert log.end == 5, "a refused batch got no offset"
    await log.flush()
    assert log.pending_bytes == 0
    big = log.append(make_batch(body=b"y" * 2_000))
    assert (big.base_offset, big.next_offset) == (5, 6), "alone, even a batch above the bound may come"
    with pytest.raises(LogBusy):
        log.append(make_batch())
    await log.confirm(big)


async def test_a_refused_batch_is_not_remembered_as_stored(simulation: Simulation, disk: SimulatedDisk) -> None:
    log = await open_log(disk, simulation, config=LogConfig(max_pending_bytes=300))
    log.append(make_batch(producer=1, sequence=0))
    with pytest.raises(LogBusy):
        log.append(make_batch(producer=1, sequence=1))
    await log.flush()
    assert not log.append(make_batch(producer=1, sequence=1)).duplicate


def test_memory_confirms_before_and_fsync_after_the_sync() -> None:
    async def test(simulation: Simulation, disk: SimulatedDisk) -> None:
        log = await open_log(disk, simulation, config=MEMORY)
        appended = log.append(make_batch())
        assert log.confirmed is log.written
        await log.confirm(appended)
        assert (log.written.value, log.synced.value) == (1, 0)
        assert disk.unsynced(f"log/{log.files[-1].name}")
        await log.flush()
        assert log.synced.value == 1
        assert not disk.unsynced(f"log/{log.files[-1].name}")

    log_test(test)

    async def fsync(simulation: Simulation, disk: SimulatedDisk) -> None:
        log = await open_log(disk, simulation)
        assert log.confirmed is log.synced
        await log.confirm(log.append(make_batch()))
        assert not disk.unsynced(f"log/{log.files[-1].name}")

    log_test(fsync)


async def test_replicated_confirms_nothing_until_the_hook_is_advanced(
    simulation: Simulation, disk: SimulatedDisk
) -> None:
    log = await open_log(disk, simulation, config=REPLICATED)
    assert log.confirmed is log.replicated
    first, second = log.append(make_batch(3)), log.append(make_batch(2))
    waiting = [asyncio.create_task(log.confirm(each)) for each in (first, second)]
    await log.flush()
    await asyncio.sleep(10)
    assert log.synced.value == 5
    assert not any(task.done() for task in waiting)
    log.replicated.advance(3)
    await waiting[0]
    assert not waiting[1].done()
    log.replicated.advance(5)
    await waiting[1]


async def test_memory_syncs_after_its_interval(simulation: Simulation, disk: SimulatedDisk) -> None:
    log = await open_log(disk, simulation, config=msgspec.structs.replace(MEMORY, memory_sync_s=5.0))
    await log.confirm(log.append(make_batch()))
    await asyncio.sleep(4.9)
    assert log.synced.value == 0
    await asyncio.sleep(0.2)
    assert log.synced.value == 1
    await log.confirm(log.append(make_batch()))
    assert log.synced.value == 1
    await asyncio.sleep(5.1)
    assert log.synced.value == 2, "the timer starts again with the next batch"


async def test_memory_syncs_after_its_bytes(simulation: Simulation, disk: SimulatedDisk) -> None:
    config = LogConfig(durability=Durability.MEMORY, memory_sync_bytes=1_000)
    log = await open_log(disk, simulation, config=config)
    for end in range(1, 11):
        await log.confirm(log.append(make_batch(body=b"x" * 104)))
        assert log.synced.value == (end // 5) * 5


async def test_a_rotation_in_memory_mode_counts_as_a_sync(simulation: Simulation, disk: SimulatedDisk) -> None:
    log = await open_log(disk, simulation, config=MEMORY)
    await fill(log, 21)
    assert [file.closed for file in log.files] == [True, False]
    assert log.synced.value == log.files[0].next_offset


def test_frames_say_how_many_records_before_them_were_not_synced_yet() -> None:
    async def test(simulation: Simulation, disk: SimulatedDisk) -> None:
        log = await open_log(disk, simulation, config=ONE_FILE)
        for count in (1, 2, 3):
            log.append(make_batch(count))
        await log.flush()
        await log.confirm(log.append(make_batch(4)))
        await log.close()
        lags = [(header.base_offset, header.commit_lag) for header in await frames(disk)]
        assert lags == [(0, 0), (0, 0), (1, 1), (3, 3), (6, 0)]

    log_test(test)

    async def memory(simulation: Simulation, disk: SimulatedDisk) -> None:
        log = await open_log(disk, simulation, config=msgspec.structs.replace(ONE_FILE, durability=Durability.MEMORY))
        for _ in range(3):
            await log.confirm(log.append(make_batch(2)))
        await log.flush()
        await log.confirm(log.append(make_batch(2)))
        assert [(h.base_offset, h.commit_lag) for h in await frames(disk)] == [(0, 0), (0, 0), (2, 2), (4, 4), (6, 0)]

    log_test(memory)


async def test_every_epoch_begins_with_a_begin(simulation: Simulation, disk: SimulatedDisk) -> None:
    for epoch in (1, 2, 5):
        log = await open_log(disk, simulation, epoch=epoch)
        assert [h.flags for h in await frames(disk) if h.epoch == epoch] == [Flag.BEGIN], "durable before open ends"
        assert not disk.unsynced(f"log/{log.files[-1].name}")
        await fill(log, 30)
        await (log.close() if epoch == 1 else log.abandon())
    headers = await frames(disk)
    assert [h.epoch for h in headers] == sorted(h.epoch for h in headers)
    begins = [(h.epoch, h.base_offset) for h in headers if h.flags == Flag.BEGIN]
    assert begins == [(1, 0), (2, 30), (5, 60)]
    assert all(header.epoch > 0 for header in headers)


@pytest.mark.parametrize("epoch", [1, 2, 3])
async def test_an_epoch_that_is_not_above_every_epoch_in_the_files_is_fenced(
    epoch: int, simulation: Simulation, disk: SimulatedDisk
) -> None:
    log = await open_log(disk, simulation, epoch=3)
    await log.close()
    with pytest.raises(Fenced, match=f"epoch {epoch} cannot open log: epoch 3 has written"):
        await open_log(disk, simulation, epoch=epoch)


async def test_files_rotate_by_size_and_none_is_larger_than_allowed(
    simulation: Simulation, disk: SimulatedDisk
) -> None:
    log = await open_log(disk, simulation)
    await fill(log, 200)
    assert len(log.files) > 5
    assert all(file.batch_bytes <= SMALL.files.file_bytes for file in log.files)
    assert all(a.next_offset == b.base_offset for a, b in zip(log.files, log.files[1:]))
    assert [file.closed for file in log.files] == [True] * (len(log.files) - 1) + [False]
    assert [file.name for file in log.files] == [f"{file.base_offset:020d}.wal" for file in log.files]


async def test_files_rotate_by_age_also_when_nothing_arrives_any_more(
    simulation: Simulation, disk: SimulatedDisk
) -> None:
    log = await open_log(disk, simulation, config=with_files(file_age_s=60.0))
    await fill(log, 1)
    await asyncio.sleep(59)
    assert [file.closed for file in log.files] == [False]
    await asyncio.sleep(2)
    assert [file.closed for file in log.files] == [True], "idle, and closed all the same"
    await asyncio.sleep(100)
    await fill(log, 1)
    assert [file.records for file in log.files] == [1, 1]
    assert [file.closed for file in log.files] == [True, False], "the new file's age counts from its own begin"


async def test_a_busy_file_rotates_by_age_too(simulation: Simulation, disk: SimulatedDisk) -> None:
    log = await open_log(disk, simulation, config=with_files(file_age_s=10.0))
    for _ in range(10):
        await fill(log, 1)
        await asyncio.sleep(5)
    assert len(log.files) >= 4


async def test_a_file_without_records_is_not_closed(simulation: Simulation, disk: SimulatedDisk) -> None:
    log = await open_log(disk, simulation, config=with_files(file_age_s=1.0))
    await asyncio.sleep(2)
    await log.rotate()
    assert [(file.records, file.closed) for file in log.files] == [(0, False)]


async def refused(log: Log, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        log.append(make_batch())


async def test_a_sealed_log_takes_nothing_more_and_stays_sealed_after_every_reopen(
    simulation: Simulation, disk: SimulatedDisk
) -> None:
    log = await open_log(disk, simulation)
    await fill(log, 30)
    assert await log.seal() == 30
    assert await log.seal() == 30, "sealing is repeatable"
    for epoch in (2, 3):
        assert log.sealed
        await refused(log, LogSealed, "sealed at offset 30")
        await log.close()
        assert log.sealed
        await refused(log, LogClosed, "is closed")
        log = await open_log(disk, simulation, epoch=epoch)
    assert log.end == 30
    headers = await frames(disk)
    assert headers[-1].flags == Flag.SEAL, "nothing stands behind it"
    assert sum(header.is_seal for header in headers) == 1


async def test_an_ended_log_knows_retries_and_refuses_every_other_batch_for_good(
    simulation: Simulation, disk: SimulatedDisk
) -> None:
    log = await open_log(disk, simulation)
    log.append(make_batch(3, producer=7))
    log.append(make_batch(2, producer=7, sequence=3))
    sealing = asyncio.create_task(log.seal())
    await asyncio.sleep(0)
    for reopened in (2, 3, 0):
        assert log.append(make_batch(2, producer=7, sequence=3)) == Appended(Offset(3), Offset(5), duplicate=True)
        for producer, sequence, next_sequence in ((7, 5, 5), (7, 9, 5), (7, 4, 5), (8, 0, -1), (8, 4, -1), (0, 0, -1)):
            with pytest.raises(SegmentSealed, match="sealed at offset 5") as refusal:
                log.append(make_batch(2, producer=producer, sequence=sequence))
            assert (refusal.value.end, refusal.value.next_sequence) == (5, next_sequence)
            assert refusal.value.retriable
        assert await log.next_sequences([7, 8]) == [5, -1]
        assert await sealing == 5
        if reopened:
            await log.close()
            log = await open_log(disk, simulation, epoch=reopened)


async def test_a_former_owner_says_nothing_of_what_an_ended_log_has(
    simulation: Simulation, disk: SimulatedDisk
) -> None:
    held = True
    log = await open_log(disk, simulation, may_confirm=lambda: held)
    log.append(make_batch(3, producer=7))
    await log.seal()
    held = False
    for sequence in (0, 3):
        with pytest.raises(Fenced):
            log.append(make_batch(3, producer=7, sequence=sequence))
    with pytest.raises(Fenced):
        await log.next_sequences([7])
    with pytest.raises(Fenced):
        log.producer_rows()


async def test_a_producer_counts_as_stored_when_its_batches_are_confirmed(
    simulation: Simulation, disk: SimulatedDisk
) -> None:
    log = await open_log(disk, simulation)
    appended = log.append(make_batch(3, producer=7))
    asking = asyncio.create_task(log.next_sequences([7]))
    await asyncio.sleep(0)
    assert not asking.done()
    log.append(make_batch(3, producer=7, sequence=3))
    assert await asking == [3]
    assert log.synced.value >= appended.next_offset
    await log.close()
    with pytest.raises(LogClosed):
        await log.next_sequences([7])


async def test_a_seal_waits_for_what_was_appended_before_it(simulation: Simulation, disk: SimulatedDisk) -> None:
    log = await open_log(disk, simulation, config=MEMORY)
    for _ in range(50):
        log.append(make_batch())
    assert await log.seal() == 50
    assert log.synced.value == 50
    disk.crash()
    assert (await recover(disk, "log")).sealed


async def test_closing_writes_everything_and_twice_is_fine(simulation: Simulation, disk: SimulatedDisk) -> None:
    log = await open_log(disk, simulation, config=MEMORY)
    waiting = [asyncio.create_task(log.confirm(log.append(make_batch()))) for _ in range(50)]
    await asyncio.gather(log.close(), log.close())
    await log.close()
    await asyncio.gather(*waiting)
    await refused(log, LogClosed, "closed")
    with pytest.raises(LogClosed):
        await log.seal()
    with pytest.raises(LogClosed):
        await log.confirmed.reached(51)
    disk.crash()
    found = await recover(disk, "log")
    assert (found.next_offset, found.checkpoint_used, found.torn_bytes) == (50, True, 0)
    assert all(file.closed for file in found.files)


async def test_abandoning_confirms_nothing_more_and_whoever_waits_is_told(
    simulation: Simulation, disk: SimulatedDisk
) -> None:
    log = await open_log(disk, simulation)
    await fill(log, 3)
    waiting = [asyncio.create_task(log.confirm(log.append(make_batch()))) for _ in range(10)]
    await asyncio.sleep(0)
    await log.abandon()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(outcome, LogClosed) for outcome in outcomes)
    assert log.synced.value == 3
    await refused(log, LogClosed, "abandoned")
    await log.close()
    await log.abandon()


@pytest.mark.parametrize("durability", [Durability.MEMORY, Durability.FSYNC])
async def test_without_the_lease_nothing_is_confirmed_and_nothing_becomes_visible(
    durability: Durability, simulation: Simulation, disk: SimulatedDisk
) -> None:
    lease = [True]
    config = LogConfig(durability=durability, files=SMALL_FILES)
    log = await open_log(disk, simulation, config=config, may_confirm=lambda: lease[0])
    await fill(log, 3)
    appended = [log.append(make_batch()) for _ in range(3)]
    lease[0] = False
    for each in appended:
        with pytest.raises(Fenced, match="lease on log has run out in epoch 1"):
            await log.confirm(each)
    assert log.confirmed.value == 3
    assert isinstance(log.failure, Fenced)
    lease[0] = True
    await refused(log, Fenced, "run out")
    with pytest.raises(Fenced):
        await log.flush()
    await log.close()


async def test_a_log_that_lost_its_lease_does_not_judge_what_its_producers_sent_since(
    simulation: Simulation, disk: SimulatedDisk
) -> None:
    """I10: that a producer has left something out is for the present owner to say. (Seed 1005 of the simulation.)"""
    lease = [True]
    log = await open_log(disk, simulation, may_confirm=lambda: lease[0])
    log.append(make_batch(1, producer=1, sequence=0))
    lease[0] = False
    with pytest.raises(Fenced):
        log.append(make_batch(1, producer=2, sequence=11))  # Beside one that waits for the disk.
    await log.abandon()


async def test_a_confirm_that_waited_for_replicas_still_asks_for_the_lease(
    simulation: Simulation, disk: SimulatedDisk
) -> None:
    lease = [True]
    log = await open_log(disk, simulation, config=REPLICATED, may_confirm=lambda: lease[0])
    waiting = asyncio.create_task(log.confirm(log.append(make_batch())))
    await log.flush()
    lease[0] = False
    log.replicated.advance(1)
    with pytest.raises(Fenced):
        await waiting


async def test_a_retry_gets_the_first_offsets_and_waits_for_the_first_write(
    simulation: Simulation, disk: SimulatedDisk
) -> None:
    log = await open_log(disk, simulation)
    first = log.append(make_batch(3, producer=1, sequence=0))
    again = log.append(make_batch(3, producer=1, sequence=0))
    assert (again.base_offset, again.next_offset, again.duplicate) == (0, 3, True)
    assert log.synced.value == 0
    await log.confirm(again)
    assert log.synced.value == 3
    assert not first.duplicate
    assert log.end == 3
    await log.close()
    assert [header.count for header in await frames(disk)] == [0, 3]


async def test_buffers_that_are_not_one_batch_of_records_are_refused(
    simulation: Simulation, disk: SimulatedDisk
) -> None:
    log = await open_log(disk, simulation)
    with pytest.raises(InvalidArgument, match="control batches are made by the log"):
        log.append(control_batch(Flag.SEAL))
    with pytest.raises(InvalidArgument, match="has 208 bytes, the batch in it 200"):
        log.append(make_batch(body=b"x" * 104) + bytes(8), make_header(body=b"x" * 104))
    assert log.end == 0


async def test_logs_of_one_broker_share_a_cache_without_mixing(simulation: Simulation, disk: SimulatedDisk) -> None:
    cache = HotCache()
    log = await open_log(disk, simulation, cache=cache)
    await fill(log, 5)
    await log.abandon()
    later = await open_log(disk, simulation, epoch=2, cache=cache)
    assert later.number != log.number
    assert cache.get(later.number, 0, 1 << 20, 100) == []


async def test_an_epoch_is_part_of_every_frame(simulation: Simulation, disk: SimulatedDisk) -> None:
    log = await open_log(disk, simulation, epoch=9)
    await fill(log, 50)
    assert {header.epoch for header in await frames(disk)} == {Epoch(9)}


async def test_nothing_is_written_after_a_log_was_abandoned_though_that_was_cancelled(
    simulation: Simulation, disk: SimulatedDisk
) -> None:
    """A broker that stops cancels the opening of a segment, and with it the end of the log that was opened."""

    def checkpoints() -> list[asyncio.Task[object]]:
        return [each for each in asyncio.all_tasks() if "_write_checkpoints" in str(each.get_coro())]

    log = await open_log(disk, simulation)
    disk.faults = DiskFaults(sync_s=(0.1, 0.1))
    while not checkpoints():
        log.append(make_batch())
        await log.flush()
    ending = asyncio.create_task(log.abandon())
    await asyncio.sleep(0.01)
    ending.cancel()
    await asyncio.wait([ending])
    assert not checkpoints()
