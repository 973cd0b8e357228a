"""Exporting: in order, once, under the fence, and again after whatever went wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from braid.metadata.memory import Fault
from braid.metadata.store import Delete
from braid.model.errors import (
    ChunkCorrupt,
    Fenced,
    MetadataUnavailable,
    ObjectExists,
    ObjectMissing,
    ObjectStoreUnavailable,
)
from braid.model.ids import Epoch
from braid.ports.disk import Buffer
from braid.storage.context import StorageMode
from braid.storage.history.compaction import store_joined
from braid.storage.history.exporter import FIRST_RETRY_S, MAX_RETRY_S, chunk_name
from braid.storage.history.manifest import read_segment_manifest
from braid.storage.history.object_names import topic_id_of
from braid.storage.log.context import LogConfig
from braid.storage.segment import SegmentStorage
from braid.testing.sim.disk import SimulatedDisk
from braid.testing.sim.objects import Faults, FaultyObjects, MemoryObjects
from tests.kits.storage import (
    DESCRIPTOR,
    SEGMENT_FOLDER,
    SMALL,
    TOPIC,
    WAL_FOLDER,
    World,
    fill,
    make_batch,
    read_all,
    read_offsets,
)
from tests.kits.waiting import until


class SlowObjects(MemoryObjects):
    """Creates no chunk until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = asyncio.Event()
        self.waiting = False

    async def create(self, name: str, parts: Sequence[Buffer]) -> None:
        if name.endswith(".chunk"):
            self.waiting = True
            await self.go_on.wait()
        await super().create(name, parts)


class NotingObjects(MemoryObjects):
    """Notes creations and reads; raises what it is told to, once."""

    def __init__(self) -> None:
        super().__init__()
        self.created: list[str] = []
        self.fail_create: Exception | None = None

    async def create(self, name: str, parts: Sequence[Buffer]) -> None:
        if self.fail_create is not None and name.endswith(".chunk"):
            error, self.fail_create = self.fail_create, None
            raise error
        await super().create(name, parts)
        self.created.append(name)

    @property
    def chunks(self) -> list[str]:
        return [name for name in self.created if name.endswith(".chunk")]


async def closed_files(world: World, records: int, objects: NotingObjects | FaultyObjects) -> SegmentStorage:
    """A segment with closed files of twenty records that nobody exports by himself."""
    segment = await world.a.start(objects=objects).open()
    await segment.exporter.stop()
    await fill(segment, records)
    await segment.log.rotate()
    return segment


async def test_closed_files_become_chunks_in_order_with_the_same_bytes(world: World) -> None:
    objects = NotingObjects()
    segment = await closed_files(world, 100, objects)
    assert objects.chunks == []
    assert await segment.exporter.export_closed() == 5
    assert await segment.exporter.export_closed() == 0, "once is enough"
    bases = [file.base_offset for file in segment.log.files]
    assert objects.chunks == [f"{SEGMENT_FOLDER}/{chunk_name(base, base + 20, segment.log.epoch)}" for base in bases]
    for file, name, chunk in zip(segment.log.files, objects.chunks, segment.catalog.chunks):
        assert await objects.read(name, 0, 1 << 20) == world.a.disk.content(f"{WAL_FOLDER}/{file.name}")
        assert (chunk.base_offset, chunk.next_offset, chunk.size) == (file.base_offset, file.next_offset, file.size)
        assert (chunk.batch_bytes, chunk.epoch) == (file.batch_bytes, segment.log.epoch)
    assert segment.catalog.next_offset == 100


async def test_a_chunks_descriptor_has_its_times_and_key_hashes(world: World) -> None:
    objects = NotingObjects()
    segment = await closed_files(world, 0, objects)
    for low, high, keys in ((50, 60, (7, 9)), (10, 20, (300, 400)), (70, 90, (8, 8))):
        segment.append(make_batch(times=(low, high), key_hashes=keys))
    await segment.log.rotate()
    await segment.exporter.export_closed()
    (chunk,) = segment.catalog.chunks
    assert (chunk.min_timestamp, chunk.max_timestamp) == (10, 90)
    assert (chunk.min_key_hash, chunk.max_key_hash) == (7, 400)


async def test_the_open_file_is_not_exported(world: World) -> None:
    segment = await closed_files(world, 20, NotingObjects())
    await fill(segment, 5)
    assert await segment.exporter.export_closed() == 1
    assert segment.catalog.next_offset == 20


async def test_an_error_between_object_and_metadata_leaves_an_object_that_the_next_try_adopts(world: World) -> None:
    objects = NotingObjects()
    segment = await closed_files(world, 40, objects)
    world.a.store.fault = lambda _request: Fault.UNAVAILABLE
    with pytest.raises(MetadataUnavailable):
        await segment.exporter.export_closed()
    assert len(objects.chunks) == 1
    assert segment.catalog.next_offset == 0
    world.a.store.fault = lambda _request: Fault.NONE
    assert await segment.exporter.export_closed() == 2
    assert len(objects.chunks) == 2, "the first was adopted, not created again"
    assert await read_offsets(segment) == list(range(40))


@pytest.mark.parametrize("position", [0, 100, 70_000, -1], ids=["first byte", "early", "late", "last byte"])
async def test_an_object_with_other_content_under_the_same_name_is_refused_and_kept(
    position: int, world: World
) -> None:
    objects = NotingObjects()
    segment = await world.a.start(objects=objects).open(LogConfig())
    await segment.exporter.stop()
    await fill(segment, 800)
    await segment.log.rotate()
    (file,) = segment.log.files
    other = bytearray(world.a.disk.content(f"{WAL_FOLDER}/{file.name}"))
    assert len(other) > 140_000, "more than the footer that a quick comparison would look at"
    other[position] ^= 1
    name = f"{SEGMENT_FOLDER}/{chunk_name(0, 800, segment.log.epoch)}"
    await objects.create(name, [other])
    with pytest.raises(ChunkCorrupt, match="exists and holds something else; nothing was overwritten"):
        await segment.exporter.export_closed()
    assert await objects.read(name, 0, 1 << 20) == other
    assert segment.catalog.chunks == []


async def test_a_shorter_object_under_the_same_name_is_refused(world: World) -> None:
    objects = NotingObjects()
    segment = await closed_files(world, 20, objects)
    await objects.create(f"{SEGMENT_FOLDER}/{chunk_name(0, 20, segment.log.epoch)}", [b"half of an upl"])
    with pytest.raises(ChunkCorrupt):
        await segment.exporter.export_closed()
    assert segment.catalog.chunks == []


async def test_an_upload_that_the_store_lost_is_noticed_before_the_catalog_believes_it(world: World) -> None:
    objects = FaultyObjects(MemoryObjects(), world.simulation.random, Faults(loses_upload=1))
    segment = await closed_files(world, 20, objects)
    with pytest.raises(ObjectMissing):
        await segment.exporter.export_closed()
    assert segment.catalog.chunks == []
    objects.faults = Faults()
    assert await segment.exporter.export_closed() == 1
    assert await read_offsets(segment) == list(range(20))


async def test_an_upload_whose_answer_was_lost_is_adopted(world: World) -> None:
    objects = NotingObjects()
    segment = await closed_files(world, 20, objects)
    (file,) = segment.log.files
    data = world.a.disk.content(f"{WAL_FOLDER}/{file.name}")
    await objects.create(f"{SEGMENT_FOLDER}/{chunk_name(0, 20, segment.log.epoch)}", [data])
    objects.fail_create = ObjectStoreUnavailable("no answer")
    with pytest.raises(ObjectStoreUnavailable):
        await segment.exporter.export_closed()
    assert await segment.exporter.export_closed() == 1
    assert len(objects.chunks) == 1


async def test_every_export_writes_a_manifest_and_their_revisions_rise(world: World) -> None:
    objects = NotingObjects()
    segment = await closed_files(world, 60, objects)
    await segment.exporter.export_closed()
    manifests = [name for name in objects.created if name.endswith(".json")]
    assert len(manifests) >= 3
    assert manifests == sorted(manifests)
    manifest = await read_segment_manifest(objects, TOPIC, DESCRIPTOR)
    assert manifest is not None
    assert (manifest.revision, manifest.next_offset) == (segment.catalog.revision, 60)
    assert manifest.chunks == tuple(segment.catalog.chunks)
    kept = [stat.name for stat in await objects.list(SEGMENT_FOLDER) if stat.name.endswith(".json")]
    assert len(kept) == 2


async def test_a_manifest_that_could_not_be_written_is_written_by_the_next_try(world: World) -> None:
    objects = FaultyObjects(MemoryObjects(), world.simulation.random, Faults())
    segment = await closed_files(world, 20, objects)
    committed = segment.catalog.commit

    async def commit_and_break(chunk: object) -> None:
        await committed(chunk)  # type: ignore[arg-type]
        objects.faults = Faults(fails_before=1)

    segment.catalog.commit = commit_and_break  # type: ignore[method-assign]
    with pytest.raises(ObjectStoreUnavailable):
        await segment.exporter.export_closed()
    assert segment.catalog.next_offset == 20
    objects.faults = Faults()
    assert await segment.exporter.export_closed() == 0
    manifest = await read_segment_manifest(objects, TOPIC, DESCRIPTOR)
    assert manifest is not None
    assert manifest.next_offset == 20


async def test_the_manifest_says_when_a_log_has_been_sealed(world: World) -> None:
    segment = await closed_files(world, 30, NotingObjects())
    await segment.exporter.export_closed()
    manifest = await read_segment_manifest(world.a.context.objects, TOPIC, DESCRIPTOR)
    assert manifest is not None
    assert not manifest.sealed
    await fill(segment, 1)
    await segment.log.seal()
    await segment.log.rotate()
    await segment.exporter.export_closed()
    manifest = await read_segment_manifest(world.a.context.objects, TOPIC, DESCRIPTOR)
    assert manifest is not None
    assert manifest.sealed


async def test_a_fenced_owners_export_changes_no_history_and_no_manifest(world: World) -> None:
    zombie = await world.a.open()
    await zombie.exporter.stop()
    await fill(zombie, 40)
    await zombie.log.rotate()
    successor = await world.b.open(accept_loss=True)
    await fill(successor, 10)
    await successor.log.rotate()
    await successor.exporter.export_closed()
    metadata = await world.store.list("/")
    with pytest.raises(Fenced):
        await zombie.exporter.export_closed()
    with pytest.raises(Fenced):
        await zombie.hand_over()
    assert await world.store.list("/") == metadata
    manifest = await read_segment_manifest(world.objects, TOPIC, DESCRIPTOR)
    assert manifest is not None
    assert (manifest.epoch, manifest.next_offset) == (2, 10)
    assert await read_offsets(successor) == list(range(10))


async def test_the_background_export_follows_the_log(world: World) -> None:
    segment = await world.a.open()
    for end in (20, 40, 60):
        await fill(segment, 20)
        await segment.log.rotate()
        await until(lambda end=end: segment.catalog.next_offset == end)  # type: ignore[misc]


async def test_the_background_export_goes_on_after_failures_ever_more_slowly(world: World) -> None:
    objects = FaultyObjects(world.objects, world.simulation.random, Faults(fails_before=1))
    segment = await world.a.start(objects=objects).open()
    await fill(segment, 20)
    await segment.log.rotate()
    await asyncio.sleep(600)
    assert isinstance(segment.exporter.last_error, ObjectStoreUnavailable)
    tries = sum(objects.suffered.values())
    assert 600 / MAX_RETRY_S <= tries <= 2 * 600 / MAX_RETRY_S + 20, f"{tries} tries, from {FIRST_RETRY_S} s on"
    assert await read_offsets(segment) == list(range(20)), "the log itself does not care"
    objects.faults = Faults()
    await until(lambda: segment.catalog.next_offset == 20)
    await until(lambda: segment.exporter.last_error is None)


async def test_export_by_hand_and_in_the_background_take_turns(world: World) -> None:
    objects = NotingObjects()
    segment = await world.a.start(objects=objects).open()
    for _ in range(5):
        await fill(segment, 20)
        await segment.log.rotate()
        counts = await asyncio.gather(*(segment.exporter.export_closed() for _ in range(3)))
        assert sum(counts) <= 1, "each file is exported by one of them"
    assert len(objects.chunks) == len(set(objects.chunks)) == 5
    assert segment.catalog.next_offset == 100


def test_equal_names_mean_equal_content_so_everything_that_decides_is_in_the_name() -> None:
    names = {chunk_name(0, 20, 1), chunk_name(0, 20, 2), chunk_name(0, 21, 1), chunk_name(1, 20, 1)}
    assert len(names) == 4
    assert min(chunk_name(100, 200, 1), chunk_name(20, 100, 2)).startswith(f"{20:020d}-")


@pytest.mark.real_loop
async def test_objects_in_memory_refuse_to_be_overwritten() -> None:
    objects = NotingObjects()
    await objects.create("x", [b"1"])
    with pytest.raises(ObjectExists):
        await objects.create("x", [b"2"])


# A topic that has the name of a deleted one.


async def open_topic(world: World, topic_id: int) -> SegmentStorage:
    world.epoch += 1
    return await SegmentStorage.open(world.a.context, TOPIC, DESCRIPTOR, Epoch(world.epoch), SMALL, topic_id=topic_id)


async def test_a_late_upload_of_a_deleted_topic_does_not_meet_the_chunks_of_its_namesake(world: World) -> None:
    world.a.start(mode=StorageMode.LOCAL)
    old = await open_topic(world, 1)
    await fill(old, 20, body=b"old")
    await old.export_now()
    late = old.catalog.chunks[0].object
    data = await world.objects.read(f"{SEGMENT_FOLDER}/{late}", 0, 1 << 20)
    await old.abandon()
    await world.objects.delete_below(SEGMENT_FOLDER)
    await world.store.txn([], [Delete(entry.key) for entry in (await world.store.list("/storage/")).entries])
    world.epoch = 0
    world.a.disk = SimulatedDisk(world.simulation.random)
    world.a.start(mode=StorageMode.LOCAL)
    new = await open_topic(world, 2)
    await fill(new, 20, body=b"new")
    await world.objects.create(f"{SEGMENT_FOLDER}/{late}", [data])
    await new.export_now()
    assert [chunk.object for chunk in new.catalog.chunks] == [chunk_name(0, 20, 1, 2)]
    assert await new.sweep() == 1
    await new.hand_over()
    assert [each.body[:3] for each in await read_all(await open_topic(world, 2))] == [b"new"] * 20


async def test_chunks_whose_names_have_no_topic_id_stay_readable_and_can_be_joined(world: World) -> None:
    old = await open_topic(world, 0)
    await fill(old, 20)
    await old.hand_over()
    segment = await open_topic(world, 7)
    await fill(segment, 20)
    await segment.export_now()
    chunks = segment.catalog.chunks
    assert [chunk.object for chunk in chunks] == [chunk_name(0, 20, 1), chunk_name(20, 40, 2, 7)]
    assert await read_offsets(segment) == list(range(40))
    joined = await store_joined(world.objects, SEGMENT_FOLDER, chunks)
    assert (await segment.replace_chunks([chunk.object for chunk in chunks], joined)).object == joined
    assert topic_id_of(joined) == 7
    assert await read_offsets(segment) == list(range(40))
    assert await segment.sweep() == 0, "what was replaced stays for a while"
    await segment.close()


async def test_a_log_can_end_while_its_files_are_exported(world: World) -> None:
    """Producers wait for the end, and a large file takes long."""
    objects = SlowObjects()
    segment = await world.a.start(objects=objects).open()
    await fill(segment, 10)
    await segment.log.rotate()
    await until(lambda: objects.waiting)
    assert await segment.end_log() == 10
    assert segment.catalog.end == 10
    objects.go_on.set()
    await until(lambda: segment.catalog.next_offset == 10)
