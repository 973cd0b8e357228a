"""What storage refuses, so that nobody loses records to a mistake: a second owner on one disk, reads beyond a sealed
end, bad names, read-only buffers, the files of a log that has ended."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence

import pytest

from braid.metadata import paths
from braid.metadata.store import Put
from braid.model.batch.header import verify
from braid.model.errors import (
    BatchCorrupt,
    BrokenInvariant,
    Fenced,
    FileTaken,
    InvalidArgument,
    InvalidName,
    LogBusy,
    LogClosed,
    LogFailed,
    LogSealed,
    MetadataCorrupt,
    ObjectStoreUnavailable,
)
from braid.model.ids import Epoch, Offset
from braid.model.topic import Durability
from braid.ports.disk import Buffer
from braid.ports.os_disk import OsDisk
from braid.storage.history.manifest import read_segment_manifest
from braid.storage.log.context import FileConfig, LogConfig
from braid.storage.log.watermark import Watermark
from braid.storage.segment import SegmentStorage
from braid.testing.sim.objects import MemoryObjects
from tests.kits.storage import DESCRIPTOR, SMALL, TOPIC, World, fill, make_batch, read_offsets, with_files

REPLICATED = LogConfig(durability=Durability.REPLICATED, files=SMALL.files)


async def test_a_second_owner_on_the_same_disk_is_refused_until_the_first_one_ends(world: World) -> None:
    first = await world.a.open()
    await fill(first, 3)
    before = await world.store.list("/")
    with pytest.raises(FileTaken, match="in use"):
        await world.a.open()
    assert await world.store.list("/") == before, "the refused one has fenced nobody"
    await fill(first, 1)
    await first.abandon()
    second = await world.a.open()
    await second.close()
    third = await world.a.open()
    await third.hand_over()
    assert await read_offsets(await world.a.open()) == [0, 1, 2, 3]


async def test_an_open_that_fails_leaves_no_lock_behind(world: World) -> None:
    await (await world.a.open()).close()
    world.epoch = 0
    with pytest.raises(Fenced):
        await world.a.open()
    world.epoch = 5
    await (await world.a.open()).close()


def test_a_lock_keeps_others_out_on_a_real_disk_until_it_is_released() -> None:
    async def main(folder: str) -> None:
        disk, other = OsDisk(), OsDisk()
        await disk.make_folder(f"{folder}/log")
        lock = await disk.lock(f"{folder}/log")
        for each in (disk, other):
            with pytest.raises(FileTaken, match=f"{folder}/log is in use"):
                await each.lock(f"{folder}/log")
        await lock.release()
        await lock.release()
        await (await other.lock(f"{folder}/log")).release()
        await disk.close()
        await other.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(folder))


async def test_readers_at_the_end_of_a_sealed_log_learn_that_it_is_the_end(world: World) -> None:
    segment = await world.a.open()
    await fill(segment, 3)
    parked = asyncio.create_task(segment.reader(3).read())
    await asyncio.sleep(1)
    assert not parked.done()
    assert await segment.log.seal() == 3
    with pytest.raises(LogSealed, match="ends at offset 3"):
        await parked
    assert await read_offsets(segment) == [0, 1, 2], "what is there is still read"
    await segment.hand_over()
    moved = await world.b.open()
    with pytest.raises(LogSealed, match="ends at offset 3"):
        await moved.reader(3).read()
    assert await read_offsets(moved) == [0, 1, 2]


async def test_a_manifest_says_sealed_only_when_chunks_hold_the_whole_sealed_log(world: World) -> None:
    async def sealed() -> bool:
        manifest = await read_segment_manifest(world.objects, TOPIC, DESCRIPTOR)
        assert manifest is not None
        return manifest.sealed

    segment = await world.a.open()
    await segment.exporter.stop()
    await fill(segment, 2)
    await segment.log.rotate()
    await fill(segment, 3)
    sealing = asyncio.create_task(segment.log.seal())
    await asyncio.sleep(0)
    assert segment.log.sealed
    assert not segment.log.seal_is_durable
    await sealing
    await segment.exporter.export_closed()
    assert not await sealed(), "three records are not in chunks yet"
    await segment.hand_over()
    assert await sealed()


async def test_the_bytes_of_records_that_no_chunk_holds_are_set_aside_and_not_removed(world: World) -> None:
    """The successor's seal reaches further than the local files, but it is not their seal."""
    a = await world.a.open()
    await fill(a, 5)
    world.a.crash()
    b = await world.b.open(accept_loss=True)
    await fill(b, 10)
    await b.hand_over()
    a = await world.a.open()
    assert a.log.end == 10
    assert [path for path in world.a.disk.paths() if "/aside-" in path], "a's own five records"


async def test_a_log_that_has_ended_gives_up_no_files_and_writes_no_checkpoint(world: World) -> None:
    segment = await world.a.open()
    for _ in range(2):
        await fill(segment, 3)
        await segment.log.rotate()
    name = segment.log.files[0].name
    await segment.abandon()
    before = {path: world.a.disk.content(path) for path in world.a.disk.paths()}
    with pytest.raises(LogClosed):
        segment.log.forget_files({name})
    await asyncio.sleep(1)
    assert {path: world.a.disk.content(path) for path in world.a.disk.paths()} == before


async def test_a_cancelled_commit_ends_the_log_instead_of_leaving_a_hole(world: World) -> None:
    segment = await world.a.open()
    await fill(segment, 1)
    rotating = asyncio.create_task(segment.log.rotate())
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # The step that closes the file has begun.
    appended = segment.append(make_batch())
    assert segment.log._commit._task is not None
    segment.log._commit._task.cancel()
    with pytest.raises(LogFailed):
        await rotating
    with pytest.raises(LogFailed):
        await segment.log.confirm(appended)
    with pytest.raises(LogFailed):
        segment.append(make_batch())
    await segment.abandon()
    assert (await read_offsets(await world.a.open()))[0] == 0


async def test_what_is_not_replicated_is_neither_visible_after_a_reopen_nor_exported_nor_handed_over(
    world: World,
) -> None:
    segment = await world.a.open(REPLICATED)
    segment.append(make_batch())
    await segment.log.flush()
    with pytest.raises(BrokenInvariant, match="cannot be replicated"):
        segment.log.note_replicated(Offset(2))
    await segment.log.rotate()
    assert await segment.exporter.export_closed() == 0
    world.a.crash()
    segment = await world.a.open(REPLICATED)
    assert segment.log.confirmed.value == 0
    assert await segment.reader(0).read_available() == []
    segment.log.note_replicated(Offset(1))
    assert await read_offsets(segment) == [0]
    segment.append(make_batch())
    await segment.log.flush()
    with pytest.raises(LogBusy, match="not confirmed yet"):
        await segment.hand_over()


@pytest.mark.real_loop
async def test_those_who_gave_up_waiting_are_forgotten() -> None:
    watermark = Watermark(0)
    for _ in range(10_000):
        watermark.reached(1).cancel()
    patient = watermark.reached(1)
    assert len(watermark._waiters) < 1_000
    watermark.advance(1)
    await patient


class ShortOnce(MemoryObjects):
    """Stores the first chunk without its end."""

    short = True

    async def create(self, name: str, parts: Sequence[Buffer]) -> None:
        if self.short and name.endswith(".chunk"):
            self.short = False
            parts = [bytes(parts[0])[:-10]]
        await super().create(name, parts)


async def test_an_upload_that_was_stored_short_is_noticed_and_heals(world: World) -> None:
    world.a.start(objects=ShortOnce())
    segment = await world.a.open()
    await segment.exporter.stop()
    await fill(segment, 3)
    await segment.log.rotate()
    with pytest.raises(ObjectStoreUnavailable, match="but has"):
        await segment.exporter.export_closed()
    assert segment.catalog.chunks == []
    assert await segment.exporter.export_closed() == 1


async def test_a_batch_is_verified_at_the_door_unless_the_caller_did(world: World) -> None:
    segment = await world.a.open()
    flipped = make_batch()
    flipped[120] ^= 1
    with pytest.raises(BatchCorrupt):
        segment.append(flipped)
    with pytest.raises(InvalidArgument, match="pass a bytearray"):
        segment.append(bytes(make_batch()))  # type: ignore[arg-type]
    good = make_batch()
    assert segment.append(good, verify(good)).base_offset == 0
    await fill(segment, 1)


@pytest.mark.parametrize("topic", ["", "orders", "../x/y", "public/default/or ders", "/public/default/orders"])
async def test_a_topic_that_is_no_name_opens_nothing(topic: str, world: World) -> None:
    with pytest.raises(InvalidName):
        await SegmentStorage.open(world.a.context, topic, DESCRIPTOR, Epoch(1), SMALL)
    assert world.a.disk.paths() == []


async def test_an_epoch_below_one_claims_nothing(world: World) -> None:
    with pytest.raises(InvalidArgument, match="0 is no epoch"):
        await SegmentStorage.open(world.a.context, TOPIC, DESCRIPTOR, Epoch(0), SMALL)
    assert (await world.store.list("/")).entries == ()


async def test_a_frontier_that_cannot_be_read_is_named_and_never_taken_for_none(world: World) -> None:
    key = paths.current_chunk(TOPIC, DESCRIPTOR)
    await world.store.txn([], [Put(key, b'{"epoch": "x"}')])
    with pytest.raises(MetadataCorrupt, match=key):
        await world.a.open()


@pytest.mark.parametrize(
    "make",
    [
        lambda: with_files(file_bytes=0),
        lambda: with_files(file_bytes=5 << 30),
        lambda: with_files(file_age_s=float("nan")),
        lambda: FileConfig(first_reserve_bytes=-1),
        lambda: LogConfig(max_pending_bytes=0),
        lambda: LogConfig(memory_sync_s=-1),
        lambda: LogConfig(durability="fsync"),  # type: ignore[arg-type]
    ],
)
def test_a_configuration_that_cannot_work_is_refused_when_it_is_made(make: type) -> None:
    with pytest.raises(InvalidArgument):
        make()
