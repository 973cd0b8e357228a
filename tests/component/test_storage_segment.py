"""One segment on its owner: opening, reopening, handing over and taking over (I1)."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from braid.metadata.memory import Fault, MemoryStore
from braid.metadata.store import Compare, Put
from braid.model.batch.identity import DERIVED, NOT_KNOWN
from braid.model.errors import (
    ConditionFailed,
    LogClosed,
    LogSealed,
    MetadataUnavailable,
    ObjectStoreUnavailable,
    RecoveryUnsafe,
)
from braid.model.ids import Epoch, Offset, Revision
from braid.model.topic import Durability
from braid.ports.clock import SystemClock
from braid.ports.os_disk import OsDisk
from braid.storage.cache import HotCache
from braid.storage.context import StorageContext, StorageMode
from braid.storage.handles import FooterCache, ReadHandles
from braid.storage.history.manifest import read_segment_manifest
from braid.storage.log.context import LogConfig
from braid.storage.log.preallocated import PreallocatedFiles
from braid.storage.log.producers import ROW_BYTES, ProducerTable, inherited
from braid.storage.objects.disk import DiskObjects
from braid.storage.recovery_start import RecoverySource
from braid.storage.retention import RetentionPolicy
from braid.storage.segment import MAX_INHERITED_BYTES, SegmentStorage
from braid.testing.sim.disk import SimulatedDisk
from braid.testing.sim.objects import Faults, FaultyObjects
from tests.kits.owner_changes import send
from tests.kits.storage import (
    DESCRIPTOR,
    SEGMENT_FOLDER,
    SMALL,
    SMALL_FILES,
    TOPIC,
    WAL_FOLDER,
    Broker,
    World,
    fill,
    make_batch,
    make_header,
    read_all,
    read_offsets,
)


async def test_an_opening_that_is_cancelled_anywhere_leaves_the_segment_to_the_next_one(world: World) -> None:
    """Broker seed 8000293: a lease was lost while the folder was being locked, and the lock stayed."""
    broker = world.a.start()
    segment = await broker.open()
    await send(segment, 0)
    await segment.close()
    for turns in range(60):
        opening = asyncio.ensure_future(broker.open())
        for _ in range(turns):
            await asyncio.sleep(0)
        await asyncio.sleep(turns * 1e-5)
        opening.cancel()
        (outcome,) = await asyncio.gather(opening, return_exceptions=True)
        if isinstance(outcome, SegmentStorage):
            await outcome.close()
        else:
            assert isinstance(outcome, asyncio.CancelledError)
        segment = await broker.open()
        assert await read_offsets(segment) == [0]
        await segment.close()


async def test_the_seeds_timeline_stays_one_history_across_a_move(world: World) -> None:
    """Broker A accepts 0..21, a consumer has acknowledged 13, the topic moves, B accepts 22..27."""
    a = await world.a.open()
    await fill(a, 22)
    sealed = await a.hand_over()
    assert (sealed.last_committed_offset, sealed.broker_id, sealed.epoch) == (21, "a", 1)
    assert world.a.wal_names() == [], "local files are cleared"
    b = await world.b.open()
    assert (b.start.source, b.start.offset) == (RecoverySource.SEALED, 22)
    await fill(b, 6)
    assert b.log.base_offset == 22, "history belongs to the chunks, the local files to the new tail"
    assert await read_offsets(b, 14) == list(range(14, 28))
    assert [batch.body for batch in await read_all(b)] == [b"x" * 100 + b"%d" % offset for offset in range(28)]


async def test_an_owner_that_has_stored_nothing_is_known_by_its_first_batch(world: World) -> None:
    await world.a.open()
    segment = await world.a.crash().open()
    assert (segment.start.source, segment.start.offset) == (RecoverySource.LOCAL, 0)
    await segment.close()


async def test_a_reopen_goes_on_where_the_files_end(world: World) -> None:
    segment = await world.a.open()
    assert (segment.start.source, segment.start.offset) == (RecoverySource.EMPTY, 0)
    for outcomes in range(1, 6):
        await fill(segment, 13)
        await (segment.close() if outcomes % 2 else segment.abandon())
        segment = await world.a.start().open()
        assert (segment.start.source, segment.log.end) == (RecoverySource.LOCAL, 13 * outcomes)
    assert await read_offsets(segment) == list(range(65))


@pytest.mark.parametrize("last_rotation", [False, True], ids=["in a file with records", "in a file of its own"])
async def test_a_sealed_log_stays_sealed_through_reopens_and_moves(last_rotation: bool, world: World) -> None:
    segment = await world.a.open()
    await fill(segment, 30)
    if last_rotation:
        await segment.log.rotate()
    assert await segment.log.seal() == 30
    broker: Broker = world.a
    for way in ("close", "close", "crash", "move", "close", "move", "move", "crash", "move"):
        if way == "close":
            await segment.close()
        elif way == "crash":
            await segment.exporter.stop()
            broker.crash()
        else:
            await segment.hand_over()
            manifest = await read_segment_manifest(world.objects, TOPIC, DESCRIPTOR)
            assert manifest is not None
            assert (manifest.sealed, manifest.next_offset) == (True, 30)
            broker = world.b if broker is world.a else world.a
        segment = await broker.start().open()
        assert segment.log.sealed
        with pytest.raises(LogSealed, match="sealed at offset 30"):
            segment.append(make_batch())
        assert await segment.log.seal() == 30
        assert await read_offsets(segment) == list(range(30))


async def test_a_log_that_was_sealed_and_exported_stays_sealed_when_its_owner_is_lost(world: World) -> None:
    segment = await world.a.open()
    await fill(segment, 10)
    await segment.log.seal()
    await segment.log.rotate()
    await segment.exporter.export_closed()
    successor = await world.b.open(accept_loss=True)
    assert successor.log.sealed
    assert successor.log.end == 10


@pytest.mark.parametrize("rotated_before", [False, True], ids=["in a file with records", "in a file of its own"])
async def test_an_ended_log_needs_neither_its_owner_nor_consent_once_chunks_hold_it(
    rotated_before: bool, world: World
) -> None:
    segment = await world.a.open()
    await fill(segment, 10)
    if rotated_before:
        await segment.log.rotate()
    assert await segment.end_log() == 10
    await segment.log.rotate()
    await segment.exporter.export_closed()
    for broker in (world.b, world.a.start(), world.b.start()):
        await segment.abandon()
        broker.disk = SimulatedDisk(world.simulation.random)
        segment = await broker.start().open()
        assert (segment.start.source, segment.start.loss_accepted) == (RecoverySource.CHUNKS, False)
        assert (segment.log.sealed, segment.log.end) == (True, 10)
        assert await read_offsets(segment) == list(range(10))


async def test_the_end_of_a_log_stands_in_the_catalog_when_nothing_of_it_is_exported(world: World) -> None:
    segment = await world.a.start(mode=StorageMode.LOCAL).open()
    await fill(segment, 10)
    assert await segment.end_log() == 10
    assert (segment.catalog.end, segment.catalog.next_offset) == (10, 0)
    successor = await world.b.start(mode=StorageMode.LOCAL).open(accept_loss=True)
    assert (successor.log.sealed, successor.log.end) == (True, 0), "the records are lost, the end is not"
    with pytest.raises(LogSealed):
        successor.append(make_batch())


async def test_a_seal_alone_in_its_file_is_noted_by_the_next_export(world: World) -> None:
    segment = await world.a.open()
    await fill(segment, 10)
    await segment.log.rotate()
    await segment.exporter.export_closed()
    await segment.log.seal()
    await segment.log.rotate()
    await segment.exporter.export_closed()
    successor = await world.b.open(accept_loss=True)
    assert (successor.log.sealed, successor.log.end) == (True, 10)


async def test_a_seal_that_a_crash_kept_from_the_catalog_is_noted_when_the_log_is_opened(world: World) -> None:
    segment = await world.a.start(mode=StorageMode.LOCAL).open()
    await fill(segment, 10)
    await segment.log.seal()
    segment = await world.a.crash().open()
    assert (segment.log.sealed, segment.catalog.end) == (True, 10)


def producers(count: int) -> ProducerTable:
    """Return the table of a log to which so many derived producers have sent a batch of 5 records."""
    table = ProducerTable()
    for number in range(count):
        table.apply(make_header(5, producer=DERIVED + number), Offset(5 * number))
    return table


@pytest.mark.parametrize("count", [1, MAX_INHERITED_BYTES // ROW_BYTES, MAX_INHERITED_BYTES // ROW_BYTES + 1])
async def test_a_log_goes_on_with_the_producers_of_the_logs_before_it_whoever_owns_it(world: World, count: int) -> None:
    segment = await world.a.open()
    await segment.inherit(inherited([producers(count)]), (), ())
    assert (segment.catalog.producers is None) == (count * ROW_BYTES <= MAX_INHERITED_BYTES), "few need no object"
    segment = await world.a.crash().open()
    await segment.hand_over()
    segment = await world.b.open()
    assert await segment.log.next_sequences([DERIVED, DERIVED + count - 1, DERIVED + count]) == [5, 5, NOT_KNOWN]
    await fill(segment, 10)
    segment = await world.b.crash().open()
    await segment.hand_over()
    assert (segment.catalog.producers, segment.catalog.inherited) == (None, b""), "the footer of the chunk has it"
    segment = await world.a.open()
    assert await segment.log.next_sequences([DERIVED, DERIVED + count - 1, DERIVED + count]) == [5, 5, NOT_KNOWN]


async def test_a_sealed_log_stays_sealed_when_its_last_chunk_has_expired(world: World) -> None:
    segment = await world.a.open()
    await fill(segment, 10)
    await segment.end_log()
    await segment.log.rotate()
    await segment.exporter.export_closed()
    await segment.apply_retention(RetentionPolicy(max_age_s=-1))
    successor = await world.b.open()
    assert (successor.log.sealed, successor.log.end, successor.earliest) == (True, 10, 10)


async def test_an_empty_log_that_has_ended_outlives_a_limit_as_a_record_would(world: World) -> None:
    segment = await world.a.open()
    await segment.end_log()
    hour = RetentionPolicy(max_age_s=3_600)
    for _ in range(2):
        assert not segment.has_outlived(hour, None)
        assert not segment.has_outlived(RetentionPolicy(max_bytes=1_000_000), None)
        assert segment.has_outlived(RetentionPolicy(max_bytes=0), None), "later segments hold as much as may be kept"
        segment = await world.a.crash().open()
    await asyncio.sleep(3_601)
    assert segment.has_outlived(hour, None)
    await segment.hand_over()
    assert (await world.b.open()).has_outlived(hour, None)


async def test_what_the_caller_adds_is_written_once_when_chunks_hold_an_ended_log(world: World) -> None:
    objects = FaultyObjects(world.objects, world.simulation.random, Faults())
    world.a.start(objects=objects)
    segment = await SegmentStorage.open(
        world.a.context,
        TOPIC,
        DESCRIPTOR,
        Epoch(1),
        SMALL,
        on_complete=lambda: ([Compare("/ownership", Revision(0))], [Put("/ownership", b"clean")]),
    )
    await fill(segment, 10)
    objects.faults = Faults(fails_before=1)
    await segment.end_log()
    await segment.log.rotate()
    with pytest.raises(ObjectStoreUnavailable):
        await segment.exporter.export_closed()
    assert segment.catalog.end == 10
    assert await world.store.get("/ownership") is None
    objects.faults = Faults()
    await segment.exporter.export_closed()
    entry = await world.store.get("/ownership")
    assert entry is not None
    assert entry.value == b"clean"
    await segment.exporter.export_closed()


async def test_handing_over_marks_the_end_in_one_transaction_with_what_the_caller_adds(world: World) -> None:
    segment = await world.a.open()
    await fill(segment, 30)
    with pytest.raises(ConditionFailed):
        await segment.hand_over([Compare("/ownership", Revision(99))], [Put("/ownership", b"sealed")])
    assert world.a.wal_names() != [], "nothing is dropped before the sealed state stands"
    assert await world.store.get("/ownership") is None
    await segment.hand_over([Compare("/ownership", Revision(0))], [Put("/ownership", b"sealed")])
    entry = await world.store.get("/ownership")
    assert entry is not None
    sealed = next(e for e in (await world.store.list("/storage/")).entries if e.key.endswith("/state"))
    assert sealed.revision == entry.revision
    assert world.a.wal_names() == []


async def test_a_hand_over_that_failed_half_way_is_simply_called_again(world: World) -> None:
    objects = FaultyObjects(world.objects, world.simulation.random, Faults(fails_before=0.2, fails_after=0.2))
    segment = await world.a.start(objects=objects).open()
    await fill(segment, 100)
    failures = 0
    for _ in range(200):
        try:
            await segment.hand_over()
            break
        except Exception:
            failures += 1
    assert failures > 0
    b = await world.b.open()
    assert (b.log.end, b.start.source) == (100, RecoverySource.SEALED)
    assert await read_offsets(b) == list(range(100))


async def test_nothing_can_be_appended_while_and_after_handing_over(world: World) -> None:
    segment = await world.a.open()
    waiting = [asyncio.create_task(segment.log.confirm(segment.append(make_batch()))) for _ in range(30)]
    moving = asyncio.create_task(segment.hand_over())
    await asyncio.sleep(0.0001)
    assert not moving.done()
    with pytest.raises(LogClosed):
        segment.append(make_batch())
    sealed = await moving
    with pytest.raises(LogClosed):
        segment.append(make_batch())
    await asyncio.gather(*waiting)
    assert sealed.last_committed_offset == 29, "what was taken before was confirmed and is part of it"


async def test_an_empty_segment_can_move_too(world: World) -> None:
    for number, broker in enumerate((world.a, world.b, world.a)):
        segment = await broker.open()
        assert (segment.log.end, segment.earliest) == (0, 0)
        assert segment.start.source is (RecoverySource.SEALED if number else RecoverySource.EMPTY)
        assert (await segment.hand_over()).last_committed_offset == -1
    segment = await world.b.open()
    await fill(segment, 1)
    assert await read_offsets(segment) == [0]


async def test_without_the_old_owners_files_nobody_opens_until_the_loss_is_accepted(world: World) -> None:
    a = await world.a.open()
    await fill(a, 30)
    await a.log.rotate()
    await a.exporter.export_closed()
    await a.exporter.stop()
    await fill(a, 12)
    before = await world.store.list("/")
    with pytest.raises(RecoveryUnsafe, match=r"Chunks reach offset 30.*accept the loss"):
        await world.b.open()
    assert await world.store.list("/") == before, "a refusal fences nobody"
    await fill(a, 1)
    b = await world.b.open(accept_loss=True)
    assert (b.start.source, b.start.loss_accepted, b.log.end) == (RecoverySource.CHUNKS, True, 30)
    await fill(b, 5)
    await a.abandon()
    await b.hand_over()
    a = await world.a.start().open()
    assert a.log.end == 35
    assert await read_offsets(a) == list(range(35))
    kept = [path for path in world.a.disk.paths() if "/aside-" in path]
    assert len(kept) >= 1, "the records that were given up are kept aside, not deleted"


async def test_claims_that_never_began_do_not_hide_the_log(world: World) -> None:
    segment = await world.a.open()
    await fill(segment, 25)
    await segment.exporter.stop()
    for fault_at in range(3):
        world.a.crash()
        calls = [0]

        def fault(request: str, calls: list[int] = calls, last: int = fault_at) -> Fault:
            calls[0] += request == "txn"
            return Fault.UNAVAILABLE if request == "txn" and calls[0] == (1 if last == 0 else 2) else Fault.NONE

        world.a.store.fault = fault
        with pytest.raises(MetadataUnavailable):
            await world.a.open()
    segment = await world.a.start().open()
    assert (segment.start.source, segment.log.end) == (RecoverySource.LOCAL, 25)
    assert await read_offsets(segment) == list(range(25))


async def test_metadata_that_cannot_be_read_is_not_an_empty_segment(world: World) -> None:
    segment = await world.a.open()
    await fill(segment, 25)
    await segment.hand_over()
    world.b.store.fault = lambda _request: Fault.UNAVAILABLE
    with pytest.raises(MetadataUnavailable):
        await world.b.open()
    assert world.b.wal_names() == []
    world.b.store.fault = lambda _request: Fault.NONE
    assert (await world.b.open()).log.end == 25


async def test_an_open_segment_has_begun_before_anything_can_be_appended(world: World) -> None:
    segment = await world.a.open()
    assert segment.catalog.frontier is not None
    assert segment.catalog.frontier.begun
    assert not world.a.disk.unsynced(f"{WAL_FOLDER}/{segment.log.files[-1].name}")


async def test_local_mode_exports_nothing_before_the_hand_over(world: World) -> None:
    segment = await world.a.start(mode=StorageMode.LOCAL).open()
    await fill(segment, 100)
    await segment.log.rotate()
    await asyncio.sleep(100)
    assert await world.objects.list("") == []
    await segment.hand_over()
    assert len([s for s in await world.objects.list(SEGMENT_FOLDER) if s.name.endswith(".chunk")]) == 5


async def test_a_sweep_removes_what_no_catalog_refers_to_and_nothing_else(world: World) -> None:
    segment = await world.a.open()
    await fill(segment, 40)
    await segment.log.rotate()
    await segment.exporter.export_closed()
    orphan = f"{SEGMENT_FOLDER}/{0:020d}-{20:020d}-{99:010d}.chunk"
    coming = f"{SEGMENT_FOLDER}/{40:020d}-{60:020d}-{99:010d}.chunk"
    for name in (orphan, coming, f"{SEGMENT_FOLDER}/notes.txt"):
        await world.objects.create(name, [b"x"])
    before = {stat.name for stat in await world.objects.list("")}
    assert await segment.sweep() == 1
    assert {stat.name for stat in await world.objects.list("")} == before - {orphan}
    assert await segment.sweep() == 0
    assert await read_offsets(segment) == list(range(40))


async def test_a_record_that_was_only_in_memory_may_go_with_the_power_but_no_offset_is_given_twice(
    world: World,
) -> None:
    config = LogConfig(durability=Durability.MEMORY, files=SMALL_FILES, memory_sync_s=1_000)
    segment = await world.a.open(config)
    await fill(segment, 10)
    await segment.log.flush()
    await fill(segment, 5)
    await segment.exporter.stop()
    world.a.crash()
    segment = await world.a.open(config)
    assert 10 <= segment.log.end <= 15
    assert await read_offsets(segment) == list(range(segment.log.end))


def os_shelf(folder: Path, disk: OsDisk, objects_disk: OsDisk, store: MemoryStore, name: str) -> StorageContext:
    return StorageContext(
        broker_id=name,
        disk=disk,
        folder=str(folder / name / "wal"),
        store=store,
        objects=DiskObjects(objects_disk, str(folder / "objects")),
        mode=StorageMode.SHARED_FS,
        clock=SystemClock(),
        cache=HotCache(2_000),
        handles=ReadHandles(disk, 4),
        footers=FooterCache(),
        preallocated=PreallocatedFiles(disk, str(folder / name / "spare"), SMALL.files.file_bytes),
        random=random.Random(1),
    )


@pytest.mark.real_loop
async def test_on_a_real_disk_a_log_is_written_exported_reclaimed_moved_and_read(tmp_path: Path) -> None:
    disk = OsDisk()
    store = MemoryStore(SystemClock())
    try:
        a = os_shelf(tmp_path, disk, disk, store, "a")
        assert a.preallocated is not None
        await a.preallocated.open()
        segment = await SegmentStorage.open(a, TOPIC, DESCRIPTOR, Epoch(1), SMALL)
        await fill(segment, 100)
        await segment.close()
        segment = await SegmentStorage.open(a, TOPIC, DESCRIPTOR, Epoch(2), SMALL)
        await fill(segment, 100)
        await send(segment, 0, 5)
        await segment.log.rotate()
        await segment.exporter.export_closed()
        await segment.apply_retention(RetentionPolicy())
        assert segment.log.base_offset > 100
        assert await read_offsets(segment, 0, 1_000) == list(range(205))
        await segment.hand_over()
        await a.preallocated.close()
        b = os_shelf(tmp_path, disk, disk, store, "b")
        segment = await SegmentStorage.open(b, TOPIC, DESCRIPTOR, Epoch(3), SMALL)
        assert (await send(segment, 0, 5)).base_offset == 200
        await fill(segment, 5)
        assert await read_offsets(segment) == list(range(210))
        await segment.close()
        await a.handles.close()
        await b.handles.close()
    finally:
        await disk.close()


async def test_a_history_that_is_not_whole_on_the_next_owners_own_disk_is_not_served(world: World) -> None:
    """The last owner would remove its own as soon as it is: then nobody had it."""
    a = await world.a.start(mode=StorageMode.LOCAL).open()
    await fill(a, 10)
    await a.export_now()
    await fill(a, 10)
    await a.hand_over()
    first = f"{SEGMENT_FOLDER}/{a.catalog.chunks[0].object}"
    content = await world.objects.read(first, 0, a.catalog.chunks[0].size)
    await world.objects.delete(first)
    with pytest.raises(RecoveryUnsafe, match="1 of 2 chunks of this log are not on this broker's disk"):
        await world.b.start(mode=StorageMode.LOCAL).open()
    await world.objects.create(first, [content])
    b = await world.b.start(mode=StorageMode.LOCAL).open()
    assert await read_offsets(b) == list(range(20))
