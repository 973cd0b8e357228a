"""The object store on bad days: slow, failing before and after, losing uploads, breaking reads, missing and corrupt."""

from __future__ import annotations

import asyncio
import itertools

import msgspec
import pytest

from braid.model.batch.header import HEADER_BYTES
from braid.model.errors import (
    BraidError,
    ChunkCorrupt,
    LogDamaged,
    ObjectExists,
    ObjectMissing,
    ObjectStoreUnavailable,
    RecoveryUnsafe,
    StorageError,
)
from braid.model.ids import Offset
from braid.storage.context import StorageMode
from braid.storage.history.exporter import chunk_name
from braid.storage.history.manifest import read_segment_manifest
from braid.storage.retention import RetentionPolicy
from braid.storage.segment import SegmentStorage
from braid.testing.sim.loop import Simulation
from braid.testing.sim.objects import Fault, Faults
from tests.kits.fault_scenes import (
    DESCRIPTOR,
    OBJECTS,
    TOPIC,
    Broker,
    Scene,
    at,
    fail_object_calls,
    files_of,
    read_all,
    simulate,
)

pytestmark = pytest.mark.seed(0)


SMALL_FILES = 600
FIRST_CHUNK = f"{OBJECTS}/{chunk_name(0, 3, 1)}"
"""With small files: offsets 0–2 behind the BEGIN."""

EVERY_FAULT = [
    pytest.param(Faults(fails_before=1.0), id="fails before"),
    pytest.param(Faults(fails_after=1.0), id="fails after"),
    pytest.param(Faults(loses_upload=1.0), id="loses the upload"),
    pytest.param(Faults(breaks_read=1.0), id="breaks the read"),
]


async def closed_files(scene: Scene, broker: Broker) -> SegmentStorage:
    segment = await broker.open()
    await scene.publish(segment, 11)
    await segment.log.rotate()
    assert len(files_of(broker)) >= 3
    return segment


async def check_history(scene: Scene, segment: SegmentStorage) -> None:
    """The catalog, the objects and the manifest all tell the whole history, without the local files."""
    catalog = await scene.catalog()
    assert catalog.next_offset == segment.log.end
    for chunk in catalog.chunks:
        assert (await scene.objects.stat(f"{OBJECTS}/{chunk.object}")).size == chunk.size
    manifest = await read_segment_manifest(scene.objects, TOPIC, DESCRIPTOR)
    assert manifest is not None
    assert list(manifest.chunks) == catalog.chunks
    await segment.apply_retention(RetentionPolicy())
    await scene.check(segment)


@pytest.mark.parametrize("faults", EVERY_FAULT)
def test_exporting_is_right_after_any_single_fault(faults: Faults) -> None:
    for number in itertools.count(1):

        async def main(scene: Scene, number: int = number) -> bool:
            a = scene.broker("a")
            segment = await closed_files(scene, a)
            fail_object_calls(a, [number], faults)
            tries = 0
            while True:
                tries += 1
                try:
                    await a.run(segment.exporter.export_closed())
                    break
                except (ObjectStoreUnavailable, ObjectMissing):
                    assert (await scene.catalog()).next_offset <= 11
                    assert tries < 3
            reached = sum(a.objects.suffered.values()) > 0
            a.objects.faults = Faults()
            await check_history(scene, segment)
            return reached or number < 8

        if not simulate(main, seed=number, file_bytes=SMALL_FILES):
            break
    assert number >= 8


@pytest.mark.parametrize("faults", EVERY_FAULT)
def test_handing_over_is_right_after_any_single_fault(faults: Faults) -> None:
    for number in itertools.count(1):

        async def main(scene: Scene, number: int = number) -> bool:
            a, b = scene.broker("a"), scene.broker("b")
            segment = await closed_files(scene, a)
            await scene.publish(segment, 2)
            fail_object_calls(a, [number], faults)
            for tries in range(3):
                assert tries < 2
                try:
                    await a.run(segment.hand_over())
                    break
                except (ObjectStoreUnavailable, ObjectMissing):
                    assert files_of(a), "local files go only when all the rest has worked"
            reached = sum(a.objects.suffered.values()) > 0
            assert files_of(a) == {}
            segment = await b.open()
            assert segment.log.end == 13
            await scene.check(segment)
            return reached or number < 8

        if not simulate(main, seed=number, file_bytes=SMALL_FILES):
            break
    assert number >= 8


@pytest.mark.parametrize("seed", range(10))
async def test_the_exporter_in_the_background_gets_there_through_all_faults_together(
    seed: int, simulation: Simulation
) -> None:
    scene = Scene(simulation, mode=StorageMode.OBJECT_STORE, file_bytes=SMALL_FILES)
    a = scene.broker("a")
    a.objects.faults = Faults(
        fails_before=0.2, fails_after=0.2, breaks_read=0.1, loses_upload=0.2, slow=0.3, slowest_s=20.0
    )
    segment = await a.open()
    for _ in range(5):
        await scene.publish(segment, 3)  # a confirm never waits for the object store
        await asyncio.sleep(0.1)
    await segment.log.rotate()
    while segment.catalog.next_offset < segment.log.end:
        await asyncio.sleep(1)
        assert scene.clock.monotonic() < 36_000
    assert a.objects.suffered[Fault.FAILS_BEFORE] + a.objects.suffered[Fault.LOSES_UPLOAD] > 0
    a.objects.faults = Faults()
    await segment.exporter.export_closed()
    await check_history(scene, segment)


def exporter_error(segment: SegmentStorage) -> BraidError | None:
    return segment.exporter.last_error


async def test_an_object_store_that_is_down_is_said_and_costs_no_confirm(simulation: Simulation) -> None:
    scene = Scene(simulation, mode=StorageMode.OBJECT_STORE, file_bytes=SMALL_FILES)
    a = scene.broker("a")
    a.objects.faults = Faults(fails_before=1.0)
    segment = await a.open()
    await scene.publish(segment, 20)
    await asyncio.sleep(100)
    assert isinstance(exporter_error(segment), ObjectStoreUnavailable)
    await segment.apply_retention(RetentionPolicy(), keep_local_bytes=0)
    await scene.check(segment)
    a.objects.faults = Faults()
    await asyncio.sleep(100)
    await segment.log.rotate()
    await asyncio.sleep(100)
    assert exporter_error(segment) is None
    await check_history(scene, segment)


async def test_an_upload_whose_transaction_never_happened_is_found_and_adopted(simulation: Simulation) -> None:
    scene = Scene(simulation, file_bytes=SMALL_FILES)
    a = scene.broker("a")
    segment = await closed_files(scene, a)
    a.store.disconnect()
    with pytest.raises(Exception, match="did not reach the metadata store"):
        await segment.exporter.export_closed()
    before = (await scene.objects.stat(FIRST_CHUNK)).modified_us
    a.store.reconnect()
    await segment.exporter.export_closed()
    assert (await scene.objects.stat(FIRST_CHUNK)).modified_us == before
    await check_history(scene, segment)


@pytest.mark.parametrize("same_length", [True, False])
async def test_an_object_of_the_same_name_with_other_content_is_never_overwritten_nor_taken(
    same_length: bool, simulation: Simulation
) -> None:
    scene = Scene(simulation, file_bytes=SMALL_FILES)
    a = scene.broker("a")
    segment = await closed_files(scene, a)
    size = segment.log.files[0].size
    stranger = b"?" * (size if same_length else size + 1)
    await scene.objects.create(FIRST_CHUNK, [stranger])
    with pytest.raises(ChunkCorrupt, match="nothing was overwritten"):
        await a.run(segment.exporter.export_closed())
    assert await scene.objects.read(FIRST_CHUNK, 0, size + 1) == stranger
    assert (await scene.catalog()).chunks == []
    with pytest.raises(ChunkCorrupt):
        await a.run(segment.hand_over())
    assert len(files_of(a)) >= 3


async def test_objects_are_created_once(scene: Scene) -> None:
    await scene.objects.create("a/b", [b"first"])
    with pytest.raises(ObjectExists):
        await scene.objects.create("a/b", [b"second"])
    assert await scene.objects.read("a/b", 0, 100) == b"first"


# ── chunks that are missing or corrupt when somebody reads ───────────────────────────────────────────────────────────


async def history_only_in_chunks(scene: Scene, broker: Broker) -> SegmentStorage:
    """Offsets 0–10 and more, of which only the newest file is still local."""
    segment = await closed_files(scene, broker)
    await segment.exporter.export_closed()
    await segment.apply_retention(RetentionPolicy())
    assert segment.log.base_offset > 3
    return segment


async def replace_object(scene: Scene, name: str, content: bytes | None) -> bytes:
    old = await scene.objects.read(name, 0, 1 << 20)
    await scene.objects.delete(name)
    if content is not None:
        await scene.objects.create(name, [content])
    return old


async def test_a_missing_chunk_is_a_typed_error_that_names_its_offsets(simulation: Simulation) -> None:
    scene = Scene(simulation, file_bytes=SMALL_FILES)
    segment = await history_only_in_chunks(scene, scene.broker("a"))
    content = await replace_object(scene, FIRST_CHUNK, None)
    reader = segment.reader(1)
    with pytest.raises(ObjectMissing, match=chunk_name(0, 3, 1)):
        await reader.read()
    assert reader.offset == 1
    reader.offset = segment.catalog.chunks[1].base_offset
    assert [offset for offset, _ in await read_all(reader)] == list(range(3, 11))
    await scene.objects.create(FIRST_CHUNK, [content])  # brought back from somewhere
    await scene.check(segment)


async def test_a_missing_or_corrupt_chunk_does_not_matter_while_the_local_file_is_there(simulation: Simulation) -> None:
    scene = Scene(simulation, file_bytes=SMALL_FILES)
    a = scene.broker("a")
    segment = await closed_files(scene, a)
    await segment.exporter.export_closed()
    await replace_object(scene, FIRST_CHUNK, b"junk")
    await scene.check(segment)
    await replace_object(scene, FIRST_CHUNK, None)
    a.kill()
    await scene.check(await a.open())


async def test_a_damaged_local_file_does_not_matter_while_the_chunk_is_there(simulation: Simulation) -> None:
    scene = Scene(simulation, file_bytes=SMALL_FILES)
    a = scene.broker("a")
    segment = await closed_files(scene, a)
    await segment.exporter.export_closed()
    path = f"{segment.log.folder}/{segment.log.files[0].name}"
    a.disk.flip(path, at(1) + HEADER_BYTES, 0)
    await scene.check(segment)
    a.kill()
    await scene.check(await a.open())


@pytest.mark.parametrize("position", [at(1) + HEADER_BYTES, at(1) + 10], ids=["body", "header"])
@pytest.mark.parametrize("max_bytes", [1, 1 << 20])
async def test_a_corrupt_chunk_is_a_typed_error_with_the_offsets(
    position: int, max_bytes: int, simulation: Simulation
) -> None:
    scene = Scene(simulation, file_bytes=SMALL_FILES)
    segment = await history_only_in_chunks(scene, scene.broker("a"))
    content = bytearray(await replace_object(scene, FIRST_CHUNK, None))
    content[position] ^= 4
    await scene.objects.create(FIRST_CHUNK, [bytes(content)])
    reader = segment.reader(0)
    with pytest.raises(LogDamaged) as caught:
        await read_all(reader, max_bytes)
    assert (caught.value.first_offset, caught.value.next_offset) == (1, 3)
    assert reader.offset == 1, "what stands before it was read"
    reader.offset = segment.catalog.chunks[1].base_offset
    assert [offset for offset, _ in await read_all(reader)] == list(range(3, 11))


@pytest.mark.parametrize("length", [0, 10, 100, 300])
async def test_a_truncated_chunk_gives_what_it_has_and_then_a_typed_error(length: int, simulation: Simulation) -> None:
    scene = Scene(simulation, file_bytes=SMALL_FILES)
    segment = await history_only_in_chunks(scene, scene.broker("a"))
    content = await replace_object(scene, FIRST_CHUNK, None)
    await scene.objects.create(FIRST_CHUNK, [content[:length]])
    reader = segment.reader(0)
    with pytest.raises(StorageError) as caught:
        await read_all(reader)
    assert isinstance(caught.value, LogDamaged)
    assert caught.value.first_offset == reader.offset == (1 if length > at(1) else 0)
    assert caught.value.next_offset == 3


async def test_a_chunk_with_a_corrupt_footer_can_still_be_read(simulation: Simulation) -> None:
    scene = Scene(simulation, file_bytes=SMALL_FILES)
    segment = await history_only_in_chunks(scene, scene.broker("a"))
    content = bytearray(await replace_object(scene, FIRST_CHUNK, None))
    content[-30] ^= 1
    await scene.objects.create(FIRST_CHUNK, [bytes(content)])
    await scene.check(segment)


@pytest.mark.parametrize("corrupt", [True, False])
async def test_without_the_newest_chunk_no_owner_opens_as_if_it_knew_all_producers(
    corrupt: bool, simulation: Simulation
) -> None:
    """The producer table is in its footer: without it a retry would be stored twice (I10)."""
    scene = Scene(simulation, file_bytes=SMALL_FILES)
    a, b = scene.broker("a"), scene.broker("b")
    segment = await closed_files(scene, a)
    await a.run(segment.hand_over())
    name = f"{OBJECTS}/{(await scene.catalog()).chunks[-1].object}"
    content = await replace_object(scene, name, b"junk" if corrupt else None)
    with pytest.raises((ChunkCorrupt, ObjectMissing, RecoveryUnsafe)):
        await b.open()
    await replace_object(scene, name, content) if corrupt else await scene.objects.create(name, [content])
    await scene.check(await b.open())


async def test_broken_reads_can_be_tried_again(simulation: Simulation) -> None:
    scene = Scene(simulation, file_bytes=SMALL_FILES)
    a = scene.broker("a")
    segment = await history_only_in_chunks(scene, a)
    a.objects.faults = Faults(breaks_read=0.5, fails_before=0.2)
    reader = segment.reader(0)
    offsets: list[int] = []
    while reader.offset < segment.log.end:
        try:
            offsets += [header.base_offset for header, _ in await reader.read_available(1)]
        except ObjectStoreUnavailable:
            continue
    assert offsets == list(range(11))
    assert a.objects.suffered[Fault.BREAKS_READ] > 0


async def test_exporting_and_retention_at_the_same_time_do_not_fence_each_other(simulation: Simulation) -> None:
    scene = Scene(simulation, file_bytes=SMALL_FILES)
    segment = await history_only_in_chunks(scene, scene.broker("a"))
    old, last = segment.catalog.chunks[:2], segment.catalog.chunks[-1]
    new = msgspec.structs.replace(last, base_offset=last.next_offset, next_offset=Offset(last.next_offset + 3))
    await asyncio.gather(segment.catalog.remove(old[:1]), segment.catalog.commit(new), segment.catalog.remove(old[1:]))
    catalog = await scene.catalog()
    assert catalog.chunks == segment.catalog.chunks
    assert old[0] not in catalog.chunks
    assert old[1] not in catalog.chunks
    assert catalog.chunks[-1] == new


async def test_sweeping_deletes_only_uploads_that_nobody_refers_to(simulation: Simulation) -> None:
    scene = Scene(simulation, file_bytes=SMALL_FILES)
    a = scene.broker("a")
    segment = await closed_files(scene, a)
    await segment.exporter.export_closed()
    orphan = f"{OBJECTS}/{chunk_name(0, 2, 1)}"
    ahead = f"{OBJECTS}/{chunk_name(11, 15, 1)}"
    for name in (orphan, ahead):
        await scene.objects.create(name, [b"left over"])
    assert await segment.sweep() == 1
    left = {stat.name for stat in await scene.objects.list(OBJECTS)}
    assert orphan not in left
    assert ahead in left, "it may be an upload on its way into the catalog"
    await check_history(scene, segment)
