"""The log on a bad disk: full, failing, slow; and what a confirm means on it (I1, I2, I7, I10)."""

from __future__ import annotations

import asyncio

import pytest

from braid.model.batch.header import verify
from braid.model.errors import (
    DiskError,
    DiskFull,
    LogBusy,
    LogClosed,
    LogFailed,
    StorageError,
    SyncFailed,
)
from braid.model.topic import Durability
from braid.storage.log.recovery import recover
from braid.storage.log.wal import base_of
from braid.storage.segment import SegmentStorage
from braid.testing.sim.disk import NO_FAULTS, DiskFaults
from braid.testing.sim.loop import Simulation
from tests.kits.fault_scenes import (
    CHECKPOINT,
    FOLDER,
    Scene,
    batch,
    files_of,
    read_all,
    refusal,
    wal_path,
)

pytestmark = pytest.mark.seed(0)


NEVER_S = (1e6, 1e6)
SEEDS = range(12)


# ── what a confirm means ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", SEEDS)
async def test_whatever_was_confirmed_survives_a_loss_of_power_at_the_next_instant(
    seed: int, simulation: Simulation
) -> None:
    """Seen elsewhere: The ack means "queued in memory": a crash loses up to seconds of acked messages, and no `fsync`
    exists anywhere."""
    scene = Scene(simulation, file_bytes=600)
    a = scene.broker("a")
    for _ in range(3):
        segment = await a.open()
        for count in (1, 7, 2):
            await scene.publish(segment, count)
        scene.append_unconfirmed(segment, 5)
        await asyncio.sleep(scene.random.uniform(0, 0.0005))
        a.power_loss()
    await scene.check(await a.open())


async def test_nothing_is_confirmed_before_its_sync_has_ended(scene: Scene) -> None:
    a = scene.broker("a")
    segment = await a.open()
    a.disk.faults = DiskFaults(sync_s=NEVER_S)
    appended = segment.append(batch(0))
    confirm = asyncio.ensure_future(segment.log.confirm(appended))
    await asyncio.sleep(3_600)
    assert not confirm.done()
    assert a.disk.unsynced(wal_path(0))
    assert await segment.reader(0).read_available() == []  # I7: nobody is shown what could still vanish
    confirm.cancel()
    a.power_loss()


async def test_durability_memory_confirms_at_once_and_syncs_within_its_second(simulation: Simulation) -> None:
    scene = Scene(simulation, durability=Durability.MEMORY)
    a = scene.broker("a")
    segment = await a.open()
    await scene.publish(segment, 3)
    a.kill()  # a killed process loses nothing at this level
    segment = await a.open()
    await scene.check(segment)
    await scene.publish(segment, 3)
    await asyncio.sleep(scene.config.memory_sync_s + 0.1)
    assert segment.log.synced.value == 6
    a.power_loss()
    await scene.check(await a.open())


async def test_offsets_and_the_order_in_the_file_are_the_same_however_many_append(scene: Scene) -> None:
    """Seen elsewhere: Offset assignment and enqueueing are two steps: frames land out of order. → one writer per
    log."""
    a = scene.broker("a")
    segment = await a.open()

    async def client(number: int) -> None:
        for _ in range(10):
            await scene.publish(segment, scene.random.randint(1, 3))
            await asyncio.sleep(scene.random.uniform(0, 0.001))

    await asyncio.gather(*map(client, range(10)))
    for name, content in files_of(a).items():
        base = base_of(name)
        assert base is not None
        expected, at = int(base), 0
        while content[at : at + 4] == b"BRDB":
            header = verify(content, at)
            assert header.base_offset == expected
            expected, at = header.next_offset, at + header.size
    await scene.check(segment)


@pytest.mark.parametrize("durability", [Durability.FSYNC, Durability.MEMORY])
async def test_every_file_begins_with_the_offset_in_its_name(durability: Durability, simulation: Simulation) -> None:
    """Seen elsewhere: Rotation before flushing: buffered frames land in the next file whose name then lies."""
    scene = Scene(simulation, durability=durability, file_bytes=600)
    a = scene.broker("a")
    segment = await a.open()
    rotations = [asyncio.ensure_future(segment.log.rotate()) for _ in range(3)]
    for _ in range(5):
        scene.append_unconfirmed(segment, 7)
        rotations.append(asyncio.ensure_future(segment.log.rotate()))
        await scene.publish(segment, 3)
    await asyncio.gather(*rotations)
    files = files_of(a)
    assert len(files) >= 5
    for name, content in files.items():
        if content.rstrip(b"\0"):
            assert verify(content).base_offset == base_of(name)
    a.kill()
    await scene.check(await a.open())


async def test_a_sync_of_nothing_makes_nothing_durable(scene: Scene) -> None:
    """Seen elsewhere: An empty `fsync` marks offset 0 durable."""
    segment = await scene.broker("a").open()
    await segment.log.flush()
    await segment.log.flush()
    assert segment.log.synced.value == segment.log.confirmed.value == 0
    assert not segment.log.synced.reached(1).done()
    assert await segment.reader(0).read_available() == []


async def test_a_sync_that_ends_after_its_log_was_given_up_confirms_nothing(scene: Scene) -> None:
    """Seen elsewhere: An old `fsync` completing after a reset marks new offsets durable."""
    a = scene.broker("a")
    context = a.context()
    old = await a.open(context=context)
    await scene.publish(old, 2)
    a.disk.faults = DiskFaults(sync_s=(5.0, 5.0))
    appended = old.append(batch(100))
    confirm = asyncio.ensure_future(old.log.confirm(appended))
    await asyncio.sleep(0.1)
    abandoning = asyncio.ensure_future(old.abandon())
    with pytest.raises(LogClosed):
        await confirm
    a.disk.faults = NO_FAULTS
    await abandoning
    assert old.log.synced.value == 2
    new = await a.open(context=context)
    first = new.log.end
    assert new.log.synced.value == first
    await asyncio.sleep(10)
    assert new.log.synced.value == first
    await scene.publish(new, 2)
    await scene.check(new)


async def publish_for_ever(scene: Scene, segment: SegmentStorage) -> None:
    while True:
        await scene.publish(segment, scene.random.randint(1, 4), size=200)


# ── a full disk ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_full_disk_is_a_typed_error_and_costs_nothing_that_was_confirmed(
    seed: int, simulation: Simulation
) -> None:
    scene = Scene(simulation, file_bytes=4000)
    a = scene.broker("a")
    segment = await a.open()
    a.disk.faults = DiskFaults(capacity_bytes=6_000)
    with pytest.raises(DiskFull) as caught:
        await publish_for_ever(scene, segment)
    assert caught.value.retriable
    with pytest.raises(DiskFull):
        segment.append(batch(0))
    assert isinstance(segment.log.failure, DiskFull)
    await segment.close()
    (a.power_loss if seed % 2 else a.kill)()
    assert isinstance(await refusal(a.open()), DiskFull | None)  # perhaps there is room for a BEGIN
    a.kill()
    a.disk.faults = NO_FAULTS
    segment = await a.open()
    assert segment.recovered.damage == []
    await scene.check(segment)
    await scene.publish(segment, 10)
    await scene.check(segment)


async def test_a_full_disk_still_serves_readers(scene: Scene) -> None:
    a = scene.broker("a")
    segment = await a.open()
    await scene.publish(segment, 3)
    a.disk.faults = DiskFaults(capacity_bytes=0)
    with pytest.raises(DiskFull):
        await scene.publish(segment, 20, size=500)
    await scene.check(segment)


async def test_a_checkpoint_that_finds_no_room_stops_nobody(scene: Scene) -> None:
    a = scene.broker("a")
    segment = await a.open()
    await scene.publish(segment, 3)
    await segment.log.rotate()
    await asyncio.sleep(1)
    before = a.disk.content(CHECKPOINT)
    a.disk.faults = DiskFaults(capacity_bytes=0)
    segment.log.forget_files(set())
    await asyncio.sleep(1)
    assert segment.log.failure is None
    a.disk.faults = NO_FAULTS
    assert a.disk.content(CHECKPOINT) == before
    await scene.publish(segment, 3)
    a.kill()
    await scene.check(await a.open())


async def test_more_than_may_wait_for_the_disk_is_refused_and_can_be_tried_again(simulation: Simulation) -> None:
    scene = Scene(simulation, file_bytes=64 << 20)
    a = scene.broker("a")
    segment = await a.open()
    a.disk.faults = DiskFaults(sync_s=(1.0, 1.0))
    big = 16 << 20

    async def append_for_ever() -> None:
        while True:
            scene.next_value += 1
            segment.append(batch(scene.next_value, size=big))
            await asyncio.sleep(0.01)

    with pytest.raises(LogBusy) as caught:
        await append_for_ever()
    assert caught.value.retriable
    assert segment.log.pending_bytes <= scene.config.max_pending_bytes
    await segment.log.flush()
    await scene.publish(segment, 1)


# ── failed syncs and reads ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", SEEDS)
async def test_after_a_failed_sync_nothing_is_confirmed_until_the_log_is_opened_again(seed: int, scene: Scene) -> None:
    """A failed fsync is never retried as if it had worked: the kernel may have dropped the pages and the failure."""
    a = scene.broker("a")
    segment = await a.open()
    await scene.publish(segment, 3)
    a.disk.faults = DiskFaults(sync_failure=1.0)
    appended = segment.append(batch(1_000))
    with pytest.raises(LogFailed, match="has stopped confirming") as caught:
        await segment.log.confirm(appended)
    assert isinstance(caught.value.__cause__, SyncFailed)
    a.disk.faults = NO_FAULTS  # from here on every sync works, and proves nothing
    for work in (segment.log.flush, segment.log.rotate, segment.log.seal, segment.hand_over):
        with pytest.raises(LogFailed):
            await work()
    with pytest.raises(LogFailed):
        segment.append(batch(1_001))
    with pytest.raises(LogFailed):
        await segment.log.confirm(appended)
    assert segment.log.confirmed.value == 3
    await segment.close()
    if seed % 2:
        a.power_loss()
    segment = await a.open()
    await scene.check(segment)
    shown = await read_all(segment.reader(0))
    await scene.publish(segment, 3)
    a.power_loss()
    segment = await a.open()
    assert (await read_all(segment.reader(0)))[: len(shown)] == shown
    await scene.check(segment)


@pytest.mark.parametrize("seed", SEEDS)
async def test_whatever_else_fails_to_sync_the_next_opening_finds_all_that_was_confirmed(
    seed: int, simulation: Simulation
) -> None:
    """Rotation, repair and names of files may fail to sync too."""
    scene = Scene(simulation, file_bytes=600)
    a = scene.broker("a")
    for _ in range(10):
        a.disk.faults = DiskFaults(sync_failure=0.15)
        try:
            segment = await a.open()
            for _ in range(6):
                await scene.publish(segment, 2)
        except StorageError:
            pass
        (a.power_loss if scene.random.random() < 0.5 else a.kill)()
    a.disk.faults = NO_FAULTS
    segment = await a.open()
    assert segment.recovered.damage == []
    await scene.check(segment)


async def test_a_read_error_while_opening_is_raised_and_changes_nothing(scene: Scene) -> None:
    a = scene.broker("a")
    segment = await a.open()
    for _ in range(3):
        await scene.publish(segment, 3)
        await segment.log.rotate()
    await asyncio.sleep(1)
    a.kill()
    before = {path: a.disk.content(path) for path in a.disk.paths()}
    a.disk.faults = DiskFaults(read_failure=1.0)
    with pytest.raises(DiskError, match="simulated read error"):
        await a.open()
    with pytest.raises(DiskError):
        await recover(a.disk, FOLDER)
    assert {path: a.disk.content(path) for path in a.disk.paths()} == before
    a.disk.faults = NO_FAULTS
    await scene.check(await a.open())


async def test_a_read_error_reaches_the_reader_who_can_try_again(scene: Scene) -> None:
    a = scene.broker("a")
    segment = await a.open()
    await scene.publish(segment, 5)
    reader = segment.reader(0)
    a.disk.faults = DiskFaults(read_failure=1.0)
    with pytest.raises(DiskError):
        await reader.read()
    assert reader.offset == 0
    a.disk.faults = NO_FAULTS
    assert [offset for offset, _ in await read_all(reader)] == list(range(5))


async def test_a_stalling_disk_only_takes_longer(simulation: Simulation) -> None:
    scene = Scene(simulation, file_bytes=600)
    a = scene.broker("a")
    a.disk.faults = DiskFaults(stall=0.5, stall_s=(1.0, 60.0))
    segment = await a.open()
    for _ in range(5):
        await scene.publish(segment, 4)
    await scene.check(segment)
    await a.run(segment.hand_over())
    await scene.check(await scene.broker("b").open())
