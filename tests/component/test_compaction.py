"""Compaction: many small chunks become few large ones, and nobody who reads them can tell (I1, I3, I10)."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from braid.model.batch.header import HEADER_BYTES, parse_header
from braid.model.errors import (
    ChunkCorrupt,
    ConditionFailed,
    Fenced,
    InvalidArgument,
    NotAvailable,
    ObjectMissing,
    ObjectStoreUnavailable,
)
from braid.model.ids import Epoch
from braid.storage.chunk import RUN_BYTES, decode_footer, encode_footer
from braid.storage.context import StorageMode
from braid.storage.history.catalog import Catalog
from braid.storage.history.compaction import (
    GRACE_S,
    MIN_TARGET_BYTES,
    is_joined,
    join,
    joined_name,
    plan_compaction,
    store_joined,
)
from braid.storage.history.manifest import read_segment_manifest
from braid.storage.history.ranges import HistoryReader
from braid.storage.retention import RetentionPolicy
from braid.storage.segment import SegmentStorage
from braid.testing.sim.clock import START_US
from braid.testing.sim.objects import Faults, FaultyObjects
from tests.kits.storage import DESCRIPTOR, SEGMENT_FOLDER, TOPIC, World, fill, make_batch, read_all

TARGET = MIN_TARGET_BYTES


LONG_S = GRACE_S + 1


# Joining real chunks.


async def many_chunks(world: World, files: int = 6, batches: int = 5) -> SegmentStorage:
    """A segment whose history lies in small chunks, and whose local files are gone."""
    segment = await world.a.open()
    await segment.exporter.stop()
    for _ in range(files):
        await fill(segment, batches)
        await asyncio.sleep(1)
        await segment.log.rotate()
    await segment.exporter.export_closed()
    await segment.apply_retention(RetentionPolicy())
    return segment


async def compact(world: World, segment: SegmentStorage, target: int = TARGET) -> int:
    """What the job does, with nothing in between; returns how many swaps there were."""
    runs = plan_compaction(segment.catalog.chunks, target)
    for run in runs:
        name = await store_joined(world.objects, SEGMENT_FOLDER, run)
        await segment.replace_chunks([chunk.object for chunk in run], name)
    return len(runs)


async def names(world: World) -> set[str]:
    stats = await world.objects.list(SEGMENT_FOLDER)
    return {stat.name.rpartition("/")[2] for stat in stats if stat.name.endswith(".chunk")}


async def through_manifest(world: World) -> list[bytes]:
    manifest = await read_segment_manifest(world.objects, TOPIC, DESCRIPTOR)
    assert manifest is not None
    reader = HistoryReader(world.objects, manifest)
    return [
        bytes(batch.data)
        async for batches in reader.read(reader.earliest, reader.next_offset)
        for batch in batches
        if batch.header.count
    ]


async def test_readers_of_the_owner_and_of_manifests_see_the_same_bytes_before_and_after(world: World) -> None:
    segment = await many_chunks(world)
    by_owner, by_manifest = await read_all(segment), await through_manifest(world)
    old = [chunk.object for chunk in segment.catalog.chunks]
    assert len(old) == 6
    assert await compact(world, segment) == 1
    assert await read_all(segment) == by_owner
    assert await through_manifest(world) == by_manifest
    assert len(segment.catalog.chunks) == 1
    catalog = Catalog(world.store, TOPIC, DESCRIPTOR)
    await catalog.load()
    assert catalog.chunks == segment.catalog.chunks
    assert await names(world) == {*old, catalog.chunks[0].object}, "readers with an older plan still find their objects"
    assert await compact(world, segment) == 0, "a second run has nothing to do"
    for offset in range(30):
        assert (await read_all(segment, offset))[0].offset == offset


async def test_a_joined_chunk_is_the_same_as_if_one_file_had_held_everything(world: World) -> None:
    segment = await world.a.open()
    await segment.exporter.stop()
    for _ in range(4):
        await fill(segment, 3, body=b"y" * 30_000)
        await segment.log.rotate()
    await segment.exporter.export_closed()
    chunks = segment.catalog.chunks
    contents = [await world.objects.read(f"{SEGMENT_FOLDER}/{chunk.object}", 0, chunk.size) for chunk in chunks]
    data = b"".join(join(chunks, contents))
    footer = decode_footer(data)
    positions = [run.position for run in footer.index.runs]
    assert all(later - earlier >= RUN_BYTES for earlier, later in pairwise(positions))
    assert len(positions) == 4
    assert [parse_header(data, run.position).base_offset for run in footer.index.runs] == [0, 3, 6, 9]
    assert sum(run.batches for run in footer.index.runs) == len(await read_all(segment))
    last = decode_footer(contents[-1])
    assert list(footer.producers.rows()) == list(last.producers.rows())
    assert (footer.first_epoch, footer.last_epoch, footer.sealed) == (1, 1, False)


async def test_offsets_by_time_are_as_before(world: World) -> None:
    segment = await world.a.open()
    await segment.exporter.stop()
    for number in range(60):
        at = START_US + number * 1_000
        await segment.log.confirm(segment.append(make_batch(1, times=(at, at))))
        if number % 10 == 9:
            await segment.log.rotate()
    await segment.exporter.export_closed()
    await segment.apply_retention(RetentionPolicy())
    await compact(world, segment)
    chunk = segment.catalog.chunks[0]
    assert (chunk.min_timestamp, chunk.max_timestamp) == (START_US, START_US + 59_000)
    for number in range(60):
        found = await segment.sources.offset_at_time(START_US + number * 1_000)
        assert found <= number
        assert await segment.sources.offset_at_time(START_US + 60_000) == 60


async def test_epochs_begins_and_the_end_of_a_log_stay_in_joined_chunks(world: World) -> None:
    for broker in (world.a, world.b):
        segment = await broker.open()
        await fill(segment, 4)
        await segment.hand_over()
    segment = await world.a.open()
    await fill(segment, 4)
    await segment.log.seal()
    await segment.export_now()
    chunks = segment.catalog.chunks
    assert len(chunks) == 3
    contents = [await world.objects.read(f"{SEGMENT_FOLDER}/{chunk.object}", 0, chunk.size) for chunk in chunks]
    await compact(world, segment)
    joined = segment.catalog.chunks[0]
    data = await world.objects.read(f"{SEGMENT_FOLDER}/{joined.object}", 0, joined.size)
    assert data[: joined.batch_bytes] == b"".join(
        content[: chunk.batch_bytes] for chunk, content in zip(chunks, contents)
    )
    footer = decode_footer(data)
    assert (footer.first_epoch, footer.last_epoch, footer.sealed, joined.epoch) == (1, 3, True, 3)
    manifest = await read_segment_manifest(world.objects, TOPIC, DESCRIPTOR)
    assert manifest is not None
    assert manifest.sealed
    await segment.hand_over()
    segment = await world.b.open()
    assert segment.log.sealed
    assert [each.offset for each in await read_all(segment)] == list(range(12))


async def test_another_broker_and_a_restarted_one_recover_from_joined_chunks(world: World) -> None:
    segment = await many_chunks(world)
    expected = await read_all(segment)
    await compact(world, segment)
    await segment.close()
    world.a.start()
    segment = await world.a.open()
    assert await read_all(segment) == expected
    await fill(segment, 3)
    await segment.hand_over()
    segment = await world.b.open()
    assert [each.offset for each in await read_all(segment)] == list(range(33))
    assert (await read_all(segment))[:30] == expected
    await compact(world, segment)
    assert [each.offset for each in await read_all(segment)] == list(range(33))


async def test_a_retry_is_recognised_by_an_owner_that_knows_only_joined_chunks(world: World) -> None:
    segment = await world.a.open()
    for number in range(12):
        batch = make_batch(2, producer=7 + number % 2, sequence=number // 2 * 2)
        await segment.log.confirm(segment.append(batch))
        await segment.log.rotate()
    await segment.export_now()
    await compact(world, segment)
    await segment.hand_over()
    segment = await world.b.open()
    assert len(segment.catalog.chunks) == 1
    again = segment.append(make_batch(2, producer=8, sequence=10))
    assert again.duplicate
    assert again.base_offset == 22
    assert segment.log.end == 24


async def test_retention_removes_joined_chunks_as_any_others(world: World) -> None:
    segment = await many_chunks(world, files=12)
    for run in (segment.catalog.chunks[:4], segment.catalog.chunks[4:8]):
        name = await store_joined(world.objects, SEGMENT_FOLDER, run)
        await segment.replace_chunks([chunk.object for chunk in run], name)
    sizes = [chunk.size for chunk in segment.catalog.chunks]
    await segment.apply_retention(RetentionPolicy(max_bytes=sum(sizes[1:])))
    assert segment.earliest == 20
    assert [each.offset for each in await read_all(segment, 20)] == list(range(20, 60))
    assert joined_name(0, 20, 1) not in await names(world)


# What may go wrong.


async def test_what_was_replaced_stays_for_readers_with_an_older_plan_and_goes_after_the_grace(world: World) -> None:
    segment = await many_chunks(world)
    old = {chunk.object for chunk in segment.catalog.chunks}
    await compact(world, segment)
    assert await segment.sweep() == 0
    assert old < await names(world)
    await segment.hand_over()
    segment = await world.b.open()
    assert await segment.sweep() == 0, "a new owner does not forget it"
    await asyncio.sleep(LONG_S)
    assert await segment.sweep() == len(old)
    assert await names(world) == {segment.catalog.chunks[0].object}
    assert [each.offset for each in await read_all(segment)] == list(range(30))


async def test_a_run_that_dies_before_the_swap_is_repeated_with_what_it_left(world: World) -> None:
    segment = await many_chunks(world)
    expected = await read_all(segment)
    run = segment.catalog.chunks
    left = await store_joined(world.objects, SEGMENT_FOLDER, run)
    assert await segment.sweep() == 0, "it may be on its way to the owner"
    assert await read_all(segment) == expected
    assert await store_joined(world.objects, SEGMENT_FOLDER, run) == left
    await compact(world, segment)
    assert segment.catalog.chunks[0].object == left
    assert await read_all(segment) == expected


async def test_what_a_dead_run_left_is_removed_after_the_grace_and_never_swapped_in_shortly_before(
    world: World,
) -> None:
    segment = await many_chunks(world)
    run = list(segment.catalog.chunks)
    left = await store_joined(world.objects, SEGMENT_FOLDER, run)
    await asyncio.sleep(GRACE_S / 2 + 1)
    with pytest.raises(ObjectMissing, match="being removed"):
        await segment.replace_chunks([chunk.object for chunk in run], left)
    await asyncio.sleep(GRACE_S / 2)
    assert await segment.sweep() == 1
    assert left not in await names(world)
    assert await compact(world, segment) == 1, "and is made again"


async def test_a_swap_is_repeatable_after_a_crash_before_the_manifest(world: World) -> None:
    objects = FaultyObjects(world.objects, world.simulation.random, Faults())
    world.a.start(objects=objects)
    segment = await many_chunks(world)
    run = list(segment.catalog.chunks)
    name = await store_joined(world.objects, SEGMENT_FOLDER, run)
    write_manifest = segment.exporter.write_manifest

    async def fail() -> None:
        objects.faults = Faults(fails_before=1)
        await write_manifest()

    segment.exporter.write_manifest = fail  # type: ignore[method-assign]
    with pytest.raises(ObjectStoreUnavailable):
        await segment.replace_chunks([chunk.object for chunk in run], name)
    objects.faults = Faults()
    segment.exporter.write_manifest = write_manifest  # type: ignore[method-assign]
    before = await read_segment_manifest(world.objects, TOPIC, DESCRIPTOR)
    assert before is not None
    assert len(before.chunks) == 6, "readers of the older manifest find its objects"
    await segment.replace_chunks([chunk.object for chunk in run], name)
    manifest = await read_segment_manifest(world.objects, TOPIC, DESCRIPTOR)
    assert manifest is not None
    assert [chunk.object for chunk in manifest.chunks] == [name]


async def test_a_fenced_owner_swaps_nothing_in_and_sweeps_nothing_of_its_successor_away(world: World) -> None:
    zombie = await many_chunks(world)
    run = list(zombie.catalog.chunks)
    segment = await world.b.open(accept_loss=True)
    await compact(world, segment)
    await asyncio.sleep(LONG_S)
    before = await names(world)
    with pytest.raises(Fenced):
        await zombie.sweep()
    assert await names(world) == before
    name = await store_joined(world.objects, SEGMENT_FOLDER, run[1:])
    with pytest.raises(Fenced):
        await zombie.replace_chunks([chunk.object for chunk in run[1:]], name)
    assert [each.offset for each in await read_all(segment)] == list(range(30))


async def test_a_swap_of_what_retention_or_another_run_took_is_refused(world: World) -> None:
    segment = await many_chunks(world)
    run = list(segment.catalog.chunks)
    name = await store_joined(world.objects, SEGMENT_FOLDER, run)
    await segment.apply_retention(RetentionPolicy(max_bytes=sum(chunk.size for chunk in run[1:])))
    assert segment.earliest == 5
    with pytest.raises(ConditionFailed, match="plan again"):
        await segment.replace_chunks([chunk.object for chunk in run], name)
    assert await compact(world, segment) == 1
    assert [each.offset for each in await read_all(segment, 5)] == list(range(5, 30))


async def test_an_object_that_is_not_what_its_name_says_never_gets_into_the_catalog(world: World) -> None:
    segment = await many_chunks(world)
    run = list(segment.catalog.chunks)
    old = [chunk.object for chunk in run]
    contents = [await world.objects.read(f"{SEGMENT_FOLDER}/{chunk.object}", 0, chunk.size) for chunk in run]
    good = b"".join(join(run, contents))
    footer = decode_footer(good)
    batches = good[: footer.batch_bytes]

    def with_footer(**changes: object) -> bytes:
        fields = {name: getattr(footer, name) for name in footer.__struct_fields__ if name != "size"}
        return batches + encode_footer(**(fields | changes))

    flipped = bytearray(good)
    flipped[footer.batch_bytes - 8] ^= 1
    fewer = b"".join(join(run[:5], contents[:5]))
    bad = {
        "cut": good[:-8],
        "other offsets": fewer,
        "last body": bytes(flipped),
        "first header": b"x" * HEADER_BYTES + good[HEADER_BYTES:],
        "producers": with_footer(producers=type(footer.producers)(), sealed=True),
        "epochs": with_footer(last_epoch=Epoch(2)),
    }
    name = joined_name(0, 30, 1)
    for what, data in bad.items():
        await world.objects.create(f"{SEGMENT_FOLDER}/{name}", [data])
        with pytest.raises(ChunkCorrupt):
            await segment.replace_chunks(old, name)
        with pytest.raises(ChunkCorrupt, match="holds something else"):
            await store_joined(world.objects, SEGMENT_FOLDER, run)
        await world.objects.delete(f"{SEGMENT_FOLDER}/{name}")
        assert len(segment.catalog.chunks) == 6, what
    with pytest.raises(ObjectMissing):
        await segment.replace_chunks(old, name)
    with pytest.raises(InvalidArgument, match="is called"):
        await segment.replace_chunks(old, joined_name(0, 30, 2))
    with pytest.raises(InvalidArgument, match="may be 2 to"):
        await segment.replace_chunks(old[:1], name)
    assert await compact(world, segment) == 1


@pytest.mark.parametrize("at", [0.0, 0.3, 0.6, 0.95])
async def test_damage_is_not_joined_and_not_spread(at: float, world: World) -> None:
    segment = await many_chunks(world, files=2)
    run = segment.catalog.chunks
    path = f"{SEGMENT_FOLDER}/{run[1].object}"
    data = bytearray(await world.objects.read(path, 0, run[1].size))
    data[int(at * len(data))] ^= 0x10
    await world.objects.delete(path)
    await world.objects.create(path, [data])
    with pytest.raises(ChunkCorrupt, match="cannot be joined"):
        await store_joined(world.objects, SEGMENT_FOLDER, run)
    assert not any(map(is_joined, await names(world)))


async def test_chunks_on_a_brokers_own_disk_are_not_compacted(world: World) -> None:
    world.a.start(mode=StorageMode.LOCAL)
    segment = await world.a.open()
    with pytest.raises(NotAvailable, match="own disk"):
        await segment.replace_chunks(["a", "b"], "c")
