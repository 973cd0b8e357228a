"""Cache, files and chunks as one log: slow readers, retention, idle files, retries."""

from __future__ import annotations

import asyncio

import pytest

from braid.model.errors import (
    OffsetOutOfRange,
    StorageError,
)
from braid.storage.cache import HotCache
from braid.storage.context import StorageMode
from braid.storage.retention import RetentionPolicy
from braid.storage.segment import SegmentStorage
from braid.testing.sim.loop import Simulation
from tests.kits.fault_scenes import CHECKPOINT, Scene, batch, read_all

pytestmark = pytest.mark.seed(0)


@pytest.mark.parametrize("checkpoint", [True, False])
async def test_after_retention_the_hot_part_does_not_claim_the_pruned_offsets_again(
    checkpoint: bool, simulation: Simulation
) -> None:
    """Seen elsewhere: The checkpoint's `start_offset` returns to 0 after retention: pruned offsets are looked for in
    the hot part."""
    scene = Scene(simulation, file_bytes=600)
    a = scene.broker("a")
    segment = await a.open()
    await scene.publish(segment, 20)
    await segment.log.rotate()
    await segment.exporter.export_closed()
    await segment.apply_retention(RetentionPolicy())
    base = segment.log.base_offset
    assert base > 0
    await asyncio.sleep(1)
    a.kill()
    if not checkpoint:
        await a.disk.remove(CHECKPOINT)
    segment = await a.open()
    assert segment.log.base_offset == base
    await scene.check(segment)
    await segment.apply_retention(RetentionPolicy(max_bytes=2_000))
    earliest = segment.earliest
    assert 0 < earliest < 20
    with pytest.raises(OffsetOutOfRange) as caught:
        await segment.reader(0).read()
    assert (caught.value.earliest, caught.value.end) == (earliest, 20)
    await scene.check(segment, earliest)


async def test_local_files_that_retention_deleted_do_not_stop_a_later_move(simulation: Simulation) -> None:
    scene = Scene(simulation, file_bytes=600)
    a, b = scene.broker("a"), scene.broker("b")
    segment = await a.open()
    await scene.publish(segment, 20)
    await segment.log.rotate()
    await segment.apply_retention(RetentionPolicy(max_bytes=1_200))
    earliest = segment.earliest
    assert earliest > 0
    a.power_loss()
    segment = await a.open()
    assert (segment.earliest, segment.recovered.damage) == (earliest, [])
    await a.run(segment.hand_over())
    segment = await b.open()
    await scene.check(segment, earliest)


async def test_a_reader_that_fell_behind_everything_goes_back_to_chunks_and_comes_forward_again(
    simulation: Simulation,
) -> None:
    """Seen elsewhere: A slow reader that falls behind the broadcast buffer ends with an error instead of going back to
    files."""
    scene = Scene(simulation, file_bytes=600, cache_bytes=500)
    segment = await scene.broker("a").open()
    await scene.publish(segment, 2)
    slow = segment.reader(0)
    assert len(await slow.read(1)) == 1
    await scene.publish(segment, 40)  # out of the cache
    await segment.log.rotate()
    await segment.exporter.export_closed()
    await segment.apply_retention(RetentionPolicy())  # and out of the files
    await scene.publish(segment, 3)
    assert [offset for offset, _ in await read_all(slow, 200)] == list(range(1, 45))
    waiting = asyncio.ensure_future(slow.read())
    await scene.publish(segment, 1)
    ((header, _),) = await waiting
    assert header.base_offset == 45


async def test_an_offset_that_no_tier_holds_is_an_error_and_never_skipped(simulation: Simulation) -> None:
    """Seen elsewhere: Seams between tiers are not checked: offsets that are neither exported nor cached are skipped in
    silence."""
    scene = Scene(simulation, file_bytes=600)
    a = scene.broker("a")
    segment = await a.open()
    await scene.publish(segment, 20)
    await segment.log.rotate()
    await segment.exporter.export_closed()
    await segment.apply_retention(RetentionPolicy())
    lost = segment.catalog.chunks.pop(2)
    reader = segment.reader(0)
    with pytest.raises(StorageError) as caught:
        await read_all(reader)
    assert isinstance(caught.value, OffsetOutOfRange)
    assert reader.offset == lost.base_offset


async def test_an_idle_file_rotates_by_age_and_is_exported(simulation: Simulation) -> None:
    """Seen elsewhere: Idle files never rotate, so their tail is never exported."""
    scene = Scene(simulation, mode=StorageMode.SHARED_FS, file_age_s=60.0)
    segment = await scene.broker("a").open()
    await scene.publish(segment, 3)
    assert segment.catalog.next_offset == 0
    await asyncio.sleep(66)
    assert segment.catalog.next_offset == 3


async def test_history_is_deleted_by_age_and_by_size_and_never_what_somebody_needs(simulation: Simulation) -> None:
    """Seen elsewhere: Durable history is never deleted (no retention)."""
    scene = Scene(simulation, file_bytes=600)
    segment = await scene.broker("a").open()
    await scene.publish(segment, 20)
    await segment.log.rotate()
    await segment.exporter.export_closed()
    chunks = list(segment.catalog.chunks)
    old = RetentionPolicy(max_age_s=1.0)  # the records' timestamps are of 1970
    await segment.apply_retention(old, needed_from=chunks[1].base_offset)
    assert segment.catalog.chunks == chunks[1:]
    await segment.apply_retention(RetentionPolicy(max_bytes=2 * chunks[-2].size))
    assert 0 < len(segment.catalog.chunks) <= 2
    await segment.apply_retention(old)
    assert segment.catalog.chunks == []
    stored = [stat.name for stat in await scene.objects.list("") if stat.name.endswith(".chunk")]
    assert stored == []
    assert await scene.publish(segment, 1) == [20]


async def test_the_cache_is_bounded_in_bytes_whatever_the_batches_weigh(scene: Scene) -> None:
    """Seen elsewhere: Small caches are bounded by message count, not bytes: 1,024 messages of 10 MiB."""
    a = scene.broker("a")
    context = a.context()
    context.cache = HotCache(10_000)
    segment = await a.open(context=context)
    for size in (40, 9_000, 100_000, 3_000, 9_900):
        await scene.publish(segment, 5, size=size)
        assert context.cache.used_bytes <= 10_000
    await scene.check(segment)


async def test_a_retried_batch_is_stored_once_after_every_kind_of_end(scene: Scene) -> None:
    a, b = scene.broker("a"), scene.broker("b")

    async def send(segment: SegmentStorage, sequence: int) -> tuple[bool, int | None]:
        appended = segment.append(batch(sequence, producer=9, sequence=sequence))
        await segment.log.confirm(appended)
        return appended.duplicate, appended.base_offset

    segment = await a.open()
    assert await send(segment, 0) == (False, 0)
    a.power_loss()
    segment = await a.open()
    assert await send(segment, 0) == (True, 0)
    assert await send(segment, 1) == (False, 1)
    await segment.close()
    segment = await a.open()
    assert await send(segment, 1) == (True, 1)
    assert await send(segment, 2) == (False, 2)
    await a.run(segment.hand_over())
    segment = await b.open()
    assert await send(segment, 2) == (True, 2)
    assert await send(segment, 3) == (False, 3)
    b.kill()
    segment = await b.open()
    assert await send(segment, 2) == (True, 2)
    assert await send(segment, 3) == (True, 3)
    assert await read_all(segment.reader(0)) == [(n, n) for n in range(4)]


@pytest.mark.parametrize("checkpoint", [True, False])
async def test_a_producer_whose_batches_are_no_longer_local_is_still_recognised(
    checkpoint: bool, simulation: Simulation
) -> None:
    scene = Scene(simulation, file_bytes=600)
    a = scene.broker("a")
    segment = await a.open()
    await segment.log.confirm(segment.append(batch(1_000, producer=9, sequence=0)))
    await scene.publish(segment, 12)
    await segment.log.rotate()
    await segment.exporter.export_closed()
    await segment.apply_retention(RetentionPolicy())
    assert segment.log.base_offset > 0
    await asyncio.sleep(1)
    a.kill()
    if not checkpoint:
        await a.disk.remove(CHECKPOINT)
    segment = await a.open()
    again = segment.append(batch(1_000, producer=9, sequence=0))
    assert (again.duplicate, again.base_offset) == (True, 0)
