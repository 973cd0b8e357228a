"""What retention may delete, and what a log looks like afterwards."""

from __future__ import annotations

import asyncio

import pytest

from braid.metadata.memory import Fault
from braid.model.errors import (
    BrokenInvariant,
    Fenced,
    LogClosed,
    MetadataUnavailable,
    ObjectStoreUnavailable,
    OffsetOutOfRange,
    RecoveryUnsafe,
    SyncFailed,
)
from braid.model.ids import Offset
from braid.storage.context import StorageMode
from braid.storage.history.manifest import read_segment_manifest
from braid.storage.log.producers import ProducerTable
from braid.storage.log.wal import wal_name
from braid.storage.retention import RetentionPolicy
from braid.storage.segment import SegmentStorage
from braid.testing.sim.disk import NO_FAULTS, DiskFaults
from braid.testing.sim.objects import Faults, FaultyObjects, MemoryObjects
from tests.kits.storage import DESCRIPTOR, SEGMENT_FOLDER, TOPIC, World, fill, make_batch, read_offsets, with_files


async def exported(world: World, records: int) -> SegmentStorage:
    """Twenty records in each chunk, all exported."""
    segment = await world.a.open()
    await fill(segment, records)
    await segment.log.rotate()
    await segment.exporter.export_closed()
    return segment


async def chunk_objects(world: World) -> list[str]:
    return [stat.name for stat in await world.objects.list(SEGMENT_FOLDER) if stat.name.endswith(".chunk")]


async def test_earliest_is_right_after_retention_and_after_a_reopen(world: World) -> None:
    segment = await exported(world, 100)
    assert segment.earliest == 0
    removed = await segment.apply_retention(RetentionPolicy(max_bytes=10_000))
    assert removed > 0
    earliest = segment.earliest
    assert 0 < earliest == segment.catalog.chunks[0].base_offset
    for reopened in range(3):
        assert segment.earliest == earliest
        assert await read_offsets(segment, earliest) == list(range(earliest, 100))
        with pytest.raises(OffsetOutOfRange, match=f"offset 0 of .* holds offsets {earliest} to 99") as caught:
            await segment.reader(0).read()
        assert (caught.value.earliest, caught.value.end) == (earliest, 100)
        with pytest.raises(OffsetOutOfRange):
            await segment.reader(earliest - 1).read()
        if reopened == 0:
            await segment.close()
            segment = await world.a.start().open()
        elif reopened == 1:
            await segment.hand_over()
            segment = await world.b.open()


async def test_a_chunk_that_a_subscription_needs_stays_unless_the_policy_says_so(world: World) -> None:
    segment = await exported(world, 100)
    bases = [chunk.base_offset for chunk in segment.catalog.chunks]
    await segment.apply_retention(RetentionPolicy(max_age_s=-1), needed_from=Offset(bases[2] + 1))
    assert segment.catalog.chunks[0].base_offset == bases[2]
    await segment.apply_retention(RetentionPolicy(max_age_s=-1, delete_unconsumed=True), needed_from=Offset(0))
    assert segment.catalog.chunks == []


async def test_chunks_go_by_age(world: World) -> None:
    segment = await world.a.open()
    for _ in range(3):
        now = world.clock.now_us()
        await segment.log.confirm(segment.append(make_batch(times=(now, now))))
        await segment.log.rotate()
        await asyncio.sleep(100)
    await segment.exporter.export_closed()
    assert await segment.apply_retention(RetentionPolicy(max_age_s=250)) == 3, "a chunk, and two local files"
    assert [chunk.base_offset for chunk in segment.catalog.chunks] == [1, 2]


async def test_an_object_is_deleted_only_after_the_catalog_has_dropped_it(world: World) -> None:
    segment = await exported(world, 60)
    before = await chunk_objects(world)
    world.a.store.fault = lambda _request: Fault.UNAVAILABLE
    with pytest.raises(MetadataUnavailable):
        await segment.apply_retention(RetentionPolicy(max_age_s=-1))
    assert await chunk_objects(world) == before
    assert segment.earliest == 0
    world.a.store.fault = lambda _request: Fault.NONE
    await segment.apply_retention(RetentionPolicy(max_age_s=-1))
    assert await chunk_objects(world) == []


async def test_a_fenced_owner_deletes_nothing(world: World) -> None:
    zombie = await exported(world, 60)
    successor = await world.b.open(accept_loss=True)
    before = await chunk_objects(world)
    with pytest.raises(Fenced):
        await zombie.apply_retention(RetentionPolicy(max_age_s=-1))
    assert await chunk_objects(world) == before
    assert await read_offsets(successor) == list(range(60))


async def test_more_chunks_than_one_transaction_takes_can_expire_at_once(world: World) -> None:
    segment = await world.a.open(with_files(file_bytes=200))
    await fill(segment, 300)
    await segment.log.rotate()
    await segment.exporter.export_closed()
    assert len(segment.catalog.chunks) == 300
    await segment.apply_retention(RetentionPolicy(max_age_s=-1))
    assert segment.catalog.chunks == []
    assert await chunk_objects(world) == []
    manifest = await read_segment_manifest(world.objects, TOPIC, DESCRIPTOR)
    assert manifest is not None
    assert (manifest.chunks, manifest.next_offset) == ((), 300)


async def test_local_files_are_reclaimed_only_as_far_as_chunks_cover_them(world: World) -> None:
    world.a.start(mode=StorageMode.SHARED_FS)
    segment = await world.a.open()
    await segment.exporter.stop()
    await fill(segment, 100)
    await segment.log.rotate()
    assert await segment.apply_retention(RetentionPolicy(max_bytes=0)) == 0, "nothing is exported yet"
    await segment.exporter.export_closed()
    assert await segment.apply_retention(RetentionPolicy(), keep_local_bytes=8_000) == 3
    assert segment.log.base_offset == 60
    assert await segment.apply_retention(RetentionPolicy()) == 1
    assert segment.log.base_offset == 80, "the newest closed file stays"
    assert world.a.wal_names()[0] == wal_name(80)
    assert await read_offsets(segment) == list(range(100))


async def local_after_retention(world: World) -> SegmentStorage:
    world.a.start(mode=StorageMode.LOCAL)
    segment = await world.a.open()
    await fill(segment, 100)
    assert await segment.apply_retention(RetentionPolicy(max_bytes=6_000)) == 3
    assert segment.earliest == 60
    return segment


async def test_in_local_mode_files_are_the_history_and_expire(world: World) -> None:
    segment = await local_after_retention(world)
    with pytest.raises(OffsetOutOfRange) as caught:
        await segment.reader(59).read()
    assert (caught.value.earliest, caught.value.end) == (60, 100)
    await segment.close()
    segment = await world.a.open()
    assert (segment.earliest, segment.log.end) == (60, 100), "not 0 again"
    assert await read_offsets(segment, 60) == list(range(60, 100))
    assert await segment.apply_retention(RetentionPolicy(max_bytes=0), needed_from=Offset(60)) == 0


async def test_in_local_mode_a_log_with_expired_files_can_still_be_handed_over(world: World) -> None:
    segment = await local_after_retention(world)
    await segment.hand_over()
    segment = await world.a.open()
    assert (segment.earliest, segment.log.end) == (60, 100)
    assert await read_offsets(segment, 60) == list(range(60, 100))


async def test_in_local_mode_files_expire_after_the_chunks_of_an_earlier_hand_over(world: World) -> None:
    world.a.start(mode=StorageMode.LOCAL)
    segment = await world.a.open()
    await fill(segment, 50)
    await segment.hand_over()
    segment = await world.a.open()
    await fill(segment, 200)
    await segment.apply_retention(RetentionPolicy(max_bytes=6_000))
    earliest = segment.earliest
    assert earliest > 50
    for _ in range(2):
        await segment.close()
        segment = await world.a.open()
        assert segment.earliest == earliest
        assert await read_offsets(segment, earliest) == list(range(earliest, 250))
    await segment.hand_over()
    segment = await world.a.open()
    assert await read_offsets(segment, earliest) == list(range(earliest, 250))


@pytest.mark.parametrize("seed", range(8))
async def test_a_crash_in_the_middle_of_local_retention_leaves_a_log_that_opens(seed: int, world: World) -> None:
    world.a.start(mode=StorageMode.LOCAL)
    segment = await world.a.open()
    await fill(segment, 100)
    deleting = asyncio.create_task(segment.apply_retention(RetentionPolicy(max_bytes=6_000)))
    await asyncio.wait([deleting], timeout=seed * 0.0005)
    world.a.crash()
    await asyncio.wait([deleting])
    deleting.cancelled() or deleting.exception()
    segment = await world.a.open()
    assert segment.recovered.damage == []
    assert segment.earliest in (0, 60)
    assert await read_offsets(segment, segment.earliest) == list(range(segment.earliest, 100))


async def test_records_that_local_retention_has_deleted_do_not_come_back_with_their_files(world: World) -> None:
    world.a.start(mode=StorageMode.LOCAL)
    segment = await world.a.open()
    await fill(segment, 100)
    world.a.disk.faults = DiskFaults(sync_failure=1.0)
    with pytest.raises(SyncFailed):  # No file could be removed for good; the catalog has changed before.
        await segment.apply_retention(RetentionPolicy(max_bytes=6_000))
    world.a.disk.faults = NO_FAULTS
    assert segment.earliest == 60
    world.a.crash()
    segment = await world.a.open()
    assert segment.log.base_offset < 60, "files are left, or this test shows nothing"
    assert segment.earliest == 60
    with pytest.raises(OffsetOutOfRange) as caught:
        await segment.reader(59).read()
    assert (caught.value.earliest, caught.value.end) == (60, 100)
    assert segment.held_back(RetentionPolicy(max_bytes=6_000), {"billing": Offset(0)}) == {}
    await segment.apply_retention(RetentionPolicy(), keep_local_bytes=1 << 20)
    assert world.a.wal_names()[0] == wal_name(60)
    assert await read_offsets(segment, 60) == list(range(60, 100))


async def test_retention_also_deletes_records_whose_local_files_were_kept_for_fast_reading(world: World) -> None:
    """A later round would remove the files and ask no subscription, so none may be set to these records any more."""
    world.a.start(mode=StorageMode.SHARED_FS)
    segment = await exported(world, 100)
    await segment.apply_retention(RetentionPolicy(), keep_local_bytes=1 << 20)
    assert segment.log.base_offset == 0
    await segment.apply_retention(RetentionPolicy(max_bytes=10_000), keep_local_bytes=1 << 20)
    assert segment.earliest == segment.log.base_offset == segment.catalog.chunks[0].base_offset > 0
    with pytest.raises(OffsetOutOfRange):
        await segment.reader(segment.earliest - 1).read()


async def test_a_manifest_that_retention_could_not_write_is_written_by_the_next_export(world: World) -> None:
    objects = FaultyObjects(world.objects, world.simulation.random, Faults())
    world.a.start(objects=objects)
    segment = await exported(world, 60)
    await segment.exporter.stop()
    objects.faults = Faults(fails_before=1)
    with pytest.raises(ObjectStoreUnavailable):
        await segment.apply_retention(RetentionPolicy(max_age_s=-1))
    objects.faults = Faults()
    await segment.exporter.export_closed()
    manifest = await read_segment_manifest(world.objects, TOPIC, DESCRIPTOR)
    assert manifest is not None
    assert manifest.chunks == (), "nobody is sent to objects that are gone"
    assert await segment.sweep() == 3, "and the objects that were left go with the next sweep"


async def test_files_whose_removal_failed_leave_no_gap_behind_when_later_ones_are_removed(world: World) -> None:
    segment = await exported(world, 100)
    world.a.disk.faults = DiskFaults(sync_failure=1)
    with pytest.raises(SyncFailed):
        await segment.apply_retention(RetentionPolicy())
    world.a.disk.faults = NO_FAULTS
    await fill(segment, 100)
    await segment.log.rotate()
    await segment.exporter.export_closed()
    await segment.apply_retention(RetentionPolicy())
    await segment.exporter.stop()
    world.a.crash()
    segment = await world.a.open()
    assert segment.recovered.damage == []
    assert await read_offsets(segment) == list(range(200))


async def test_a_log_refuses_to_forget_its_newest_closed_file(world: World) -> None:
    segment = await exported(world, 40)
    with pytest.raises(BrokenInvariant, match="must not be removed"):
        segment.log.forget_files({segment.log.files[-1].name})


# The producer table, when its chunk goes.


async def producer_objects(world: World) -> list[str]:
    return [stat.name for stat in await world.objects.list(SEGMENT_FOLDER) if stat.name.endswith(".producers")]


async def known_after_a_move(world: World, segment: SegmentStorage) -> bool:
    """Hand over to broker b and repeat the only batch of producer 7."""
    await segment.hand_over()
    moved = await world.b.open()
    return moved.append(make_batch(producer=7)).duplicate


async def test_the_table_of_producers_is_an_object_until_the_next_chunk_holds_it(world: World) -> None:
    segment = await world.a.open()
    await segment.log.confirm(segment.append(make_batch(producer=7)))
    await segment.export_now()
    assert await producer_objects(world) == []
    await segment.apply_retention(RetentionPolicy(max_age_s=-1))
    name = "00000000000000000001-0000000001.producers"
    assert await producer_objects(world) == [f"{SEGMENT_FOLDER}/{name}"]
    manifest = await read_segment_manifest(world.objects, TOPIC, DESCRIPTOR)
    assert manifest is not None
    assert manifest.producers is not None
    assert (manifest.producers.object, manifest.producers.next_offset) == (name, 1)
    assert await segment.sweep() == 0, "the catalog names it"
    await fill(segment, 3)
    await segment.export_now()
    assert segment.catalog.producers is None
    assert await segment.sweep() == 1
    assert await known_after_a_move(world, segment)


async def test_no_table_is_stored_for_a_log_without_producers(world: World) -> None:
    segment = await exported(world, 20)
    await segment.apply_retention(RetentionPolicy(max_age_s=-1))
    assert segment.catalog.objects == []
    assert await producer_objects(world) == []


async def test_chunks_stay_while_the_table_of_producers_cannot_be_stored(world: World) -> None:
    objects = FaultyObjects(world.objects, world.simulation.random, Faults())
    world.a.start(objects=objects)
    segment = await world.a.open()
    await segment.log.confirm(segment.append(make_batch(producer=7)))
    await segment.export_now()
    objects.faults = Faults(fails_before=1)
    with pytest.raises(ObjectStoreUnavailable):
        await segment.apply_retention(RetentionPolicy(max_age_s=-1))
    objects.faults = Faults()
    assert len(segment.catalog.chunks) == 1
    assert await known_after_a_move(world, segment)


async def test_a_table_whose_transaction_never_happened_is_swept_by_the_next_owner(world: World) -> None:
    segment = await world.a.open()
    await segment.log.confirm(segment.append(make_batch(producer=7)))
    await segment.export_now()
    world.a.store.fault = lambda request: Fault.UNAVAILABLE if request == "txn" else Fault.NONE
    with pytest.raises(MetadataUnavailable):
        await segment.apply_retention(RetentionPolicy(max_age_s=-1))
    world.a.store.fault = lambda _request: Fault.NONE
    assert len(await producer_objects(world)) == 1
    await segment.exporter.stop()
    segment = await world.a.crash().open()
    assert await segment.sweep() == 1
    assert await producer_objects(world) == []
    assert segment.append(make_batch(producer=7)).duplicate


async def test_a_chunk_that_is_exported_while_the_last_one_expires_carries_the_table_on(world: World) -> None:
    objects = FaultyObjects(world.objects, world.simulation.random, Faults())
    world.a.start(objects=objects)
    segment = await world.a.open()
    await segment.log.confirm(segment.append(make_batch(producer=7)))
    await segment.export_now()
    objects.faults = Faults(slow=1, slowest_s=5.0)
    deleting = asyncio.create_task(segment.apply_retention(RetentionPolicy(max_age_s=-1)))
    await asyncio.sleep(0.001)
    await segment.log.confirm(segment.append(make_batch(producer=8)))
    objects.faults = Faults()
    await segment.export_now()
    await deleting
    assert [chunk.base_offset for chunk in segment.catalog.chunks] == [1]
    assert segment.catalog.producers is None
    assert await known_after_a_move(world, segment)


async def test_retention_leaves_a_log_alone_that_is_being_handed_over(world: World) -> None:
    segment = await exported(world, 20)
    await segment.finish()
    with pytest.raises(LogClosed):
        await segment.apply_retention(RetentionPolicy(max_age_s=-1))
    assert len(segment.catalog.chunks) == 1
    await segment.seal()


async def test_in_local_mode_a_target_without_the_table_of_producers_does_not_begin(world: World) -> None:
    world.a.start(mode=StorageMode.LOCAL)
    segment = await world.a.open()
    await segment.log.confirm(segment.append(make_batch(producer=7)))
    await segment.export_now()
    await segment.apply_retention(RetentionPolicy(max_age_s=-1))
    await segment.hand_over()
    empty = MemoryObjects(world.clock)
    world.b.start(mode=StorageMode.LOCAL, objects=empty)
    with pytest.raises(RecoveryUnsafe, match=r"1 of 1 .* not on this broker's disk, .*\.producers"):
        await world.b.open()
    segment = await world.a.open()
    assert segment.append(make_batch(producer=7)).duplicate
    await segment.abandon()
    successor = await world.b.open(accept_loss=True)
    assert successor.catalog.objects == []
    await successor.hand_over()
    await world.b.start(mode=StorageMode.LOCAL, objects=empty).open()


@pytest.mark.parametrize("earlier", [True, False], ids=["after an earlier hand-over", "from the beginning"])
async def test_in_local_mode_producers_outlive_their_expired_files_and_chunks_through_a_hand_over(
    earlier: bool, world: World
) -> None:
    """A skip keeps the producers of the records that it skips, in the place of an older table. The newest closed file
    has records and stays, so the hand-over exports it with the whole table (I10)."""
    world.a.start(mode=StorageMode.LOCAL)
    segment = await world.a.open()
    batches = [make_batch(producer=7, sequence=sequence) for sequence in range(4)]
    await segment.log.confirm(segment.log.append(bytearray(batches[0])))
    if earlier:
        await segment.hand_over()
        segment = await world.a.open()
    for batch in batches[1:]:
        await segment.log.confirm(segment.log.append(bytearray(batch)))
        await segment.log.rotate()
    for _ in range(2):  # The chunk first, then the files.
        await segment.apply_retention(RetentionPolicy(max_bytes=0))
    assert (segment.earliest, segment.log.end) == (3, 4)
    assert segment.catalog.next_offset == 3
    assert segment.catalog.producers is None
    assert set(ProducerTable.from_rows(segment.catalog.inherited)) == {7}
    await segment.hand_over()
    segment = await world.a.open()
    for sequence in (2, 3):
        repeated = segment.log.append(bytearray(batches[sequence]))
        assert (repeated.duplicate, repeated.base_offset) == (True, sequence)
    assert segment.log.end == 4
