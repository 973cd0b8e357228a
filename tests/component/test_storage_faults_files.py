"""A log's folder after bad days: files that are empty, missing, misnamed or strange; bad checkpoints and footers."""

from __future__ import annotations

import asyncio

import pytest

from braid.model.errors import (
    LogDamaged,
    RecoveryConflict,
    RecoveryUnsafe,
)
from braid.model.ids import Offset
from braid.storage.log import checkpoint as checkpoints
from braid.storage.log.checkpoint import LogCheckpoint
from braid.storage.segment import SegmentStorage
from tests.kits.fault_scenes import (
    CHECKPOINT,
    FOLDER,
    Broker,
    Scene,
    batch,
    begin,
    files_of,
    offsets,
    put_file,
    read_all,
    stamped,
    wal_path,
)

pytestmark = pytest.mark.seed(0)


FIRST = wal_path(0)


async def three_files(scene: Scene, broker: Broker, *, checkpoint: bool = True) -> None:
    """Offsets 0–3 and 4–7 in closed files, 8–9 in an open one; then the process is killed."""
    segment = await broker.open()
    for count in (4, 4, 2):
        await scene.publish(segment, count)
        if count == 4:
            await segment.log.rotate()
    await asyncio.sleep(1)
    broker.kill()
    assert list(files_of(broker)) == [path.rpartition("/")[2] for path in (wal_path(0), wal_path(4), wal_path(8))]
    if not checkpoint:
        await broker.disk.remove(CHECKPOINT)


# ── files that are empty, missing, misnamed or strange ───────────────────────────────────────────────────────────────

with_and_without_checkpoint = pytest.mark.parametrize("checkpoint", [True, False], ids=["checkpoint", "no checkpoint"])


@with_and_without_checkpoint
async def test_an_empty_newest_file_is_a_rotation_that_was_interrupted(checkpoint: bool, scene: Scene) -> None:
    a = scene.broker("a")
    await three_files(scene, a, checkpoint=checkpoint)
    content = files_of(a)
    await put_file(a.disk, wal_path(10), b"")
    segment = await a.open()
    assert segment.recovered.damage == []
    await scene.check(segment)
    assert await scene.publish(segment, 2) == [10, 11]
    await scene.check(segment)
    assert content.keys() <= files_of(a).keys()


@with_and_without_checkpoint
@pytest.mark.parametrize("zeros", [0, 512])
async def test_a_file_that_lost_its_content_is_damage_and_its_offsets_are_not_reused(
    checkpoint: bool, zeros: int, scene: Scene
) -> None:
    a = scene.broker("a")
    await three_files(scene, a, checkpoint=checkpoint)
    await put_file(a.disk, wal_path(4), bytes(zeros))
    segment = await a.open()
    assert [(each.first_offset, each.next_offset) for each in segment.recovered.damage] == [(4, 8)]
    await check_around_the_gap(scene, segment)


async def check_around_the_gap(scene: Scene, segment: SegmentStorage) -> None:
    assert await scene.publish(segment, 2) == [10, 11]
    reader = segment.reader(0)
    await reader.read_available()
    assert reader.offset == 4
    with pytest.raises(LogDamaged) as caught:
        await reader.read_available()
    assert (caught.value.first_offset, caught.value.next_offset) == (4, 8)
    reader.offset = Offset(8)
    assert offsets(await read_all(reader)) == [8, 9, 10, 11]


@with_and_without_checkpoint
async def test_a_missing_middle_file_is_damage_and_its_offsets_are_not_reused(checkpoint: bool, scene: Scene) -> None:
    a = scene.broker("a")
    await three_files(scene, a, checkpoint=checkpoint)
    await a.disk.remove(wal_path(4))
    segment = await a.open()
    assert [(each.first_offset, each.next_offset) for each in segment.recovered.damage] == [(4, 8)]
    await check_around_the_gap(scene, segment)
    with pytest.raises(LogDamaged):
        await segment.hand_over()


async def test_a_missing_middle_file_stops_the_exporter_also_when_the_file_before_it_is_history(scene: Scene) -> None:
    a = scene.broker("a")
    segment = await a.open()
    await scene.publish(segment, 4)
    await segment.log.rotate()
    await segment.exporter.export_closed()
    for count in (4, 2):
        await scene.publish(segment, count)
        await segment.log.rotate()
    a.kill()
    await a.disk.remove(wal_path(4))
    segment = await a.open()
    with pytest.raises(LogDamaged) as caught:
        await a.run(segment.exporter.export_closed())
    assert (caught.value.first_offset, caught.value.next_offset) == (4, 8)
    assert (await scene.catalog()).next_offset == 4


@with_and_without_checkpoint
async def test_a_missing_first_file_is_not_overlooked(checkpoint: bool, scene: Scene) -> None:
    a = scene.broker("a")
    await three_files(scene, a, checkpoint=checkpoint)
    await a.disk.remove(wal_path(0))
    with pytest.raises(RecoveryConflict, match="chunks end at offset 0 and local batches begin at 4"):
        await a.open()


async def test_a_missing_first_file_that_chunks_hold_is_read_from_there(scene: Scene) -> None:
    a = scene.broker("a")
    segment = await a.open()
    for _ in range(3):
        await scene.publish(segment, 4)
        await segment.log.rotate()
    await segment.exporter.export_closed()
    a.kill()
    for base in (0, 4):
        await a.disk.remove(wal_path(base))
    segment = await a.open()
    await scene.check(segment)
    assert segment.recovered.damage == []


async def test_a_missing_last_file_is_noticed_when_the_checkpoint_reaches_into_it(scene: Scene) -> None:
    a = scene.broker("a")
    segment = await a.open()
    await scene.publish(segment, 4)
    await segment.log.rotate()
    await scene.publish(segment, 4)
    await a.run(segment.close())
    await a.disk.remove(wal_path(4))
    segment = await a.open()
    assert [(each.first_offset, each.next_offset) for each in segment.recovered.damage] == [(4, 8)]
    assert await scene.publish(segment, 1) == [8]
    a.kill()
    segment = await a.open()
    assert [(each.first_offset, each.next_offset) for each in segment.recovered.damage] == [(4, 8)]


async def test_a_missing_last_file_is_noticed_when_it_held_the_last_owners_beginning(scene: Scene) -> None:
    a = scene.broker("a")
    segment = await a.open()
    await scene.publish(segment, 4)
    await a.run(segment.close())
    segment = await a.open()
    await scene.publish(segment, 4)
    a.kill()
    await a.disk.remove(wal_path(4))
    with pytest.raises(RecoveryUnsafe):
        await a.open()


async def test_a_missing_last_file_is_noticed_when_chunks_reach_beyond_the_rest(scene: Scene) -> None:
    a = scene.broker("a")
    segment = await a.open()
    for _ in range(2):
        await scene.publish(segment, 4)
        await segment.log.rotate()
    await segment.exporter.export_closed()
    a.kill()
    await a.disk.remove(CHECKPOINT)
    await a.disk.remove(wal_path(4))
    with pytest.raises(RecoveryConflict, match=r"chunks reach offset 8, but .* end at 4"):
        await a.open()


@with_and_without_checkpoint
@pytest.mark.parametrize("new_base", [2, 5, 3_000])
async def test_a_file_that_was_renamed_is_a_conflict_and_stays(checkpoint: bool, new_base: int, scene: Scene) -> None:
    a = scene.broker("a")
    await three_files(scene, a, checkpoint=checkpoint)
    await a.disk.rename(wal_path(4), wal_path(new_base))
    content = files_of(a)
    with pytest.raises(RecoveryConflict, match=f"{new_base:020d}"):
        await a.open()
    assert files_of(a) == content
    await a.disk.rename(wal_path(new_base), wal_path(4))
    await scene.check(await a.open())


async def test_files_with_foreign_names_are_left_alone(scene: Scene) -> None:
    a = scene.broker("a")
    await three_files(scene, a)
    names = ["4.wal", "00000000000000000004.wal.bak", "notes.txt", "-0000000000000000004.wal"]
    for name in names:
        await put_file(a.disk, f"{FOLDER}/{name}", b"whatever")
    segment = await a.open()
    assert sorted(segment.recovered.foreign) == sorted(names)
    await scene.check(segment)
    assert all(a.disk.content(f"{FOLDER}/{name}") == b"whatever" for name in names)


@pytest.mark.parametrize(
    ("base", "content"),
    [
        pytest.param(3, begin(3, 1) + stamped(50, 3) + stamped(51, 4), id="overlaps the file before it"),
        pytest.param(9, begin(9, 1) + stamped(50, 9) + stamped(51, 10), id="overlaps the newest file"),
        pytest.param(10, begin(10, 0) + stamped(50, 10, epoch=0), id="written by an older owner"),
        pytest.param(10, begin(90, 1) + stamped(50, 90), id="of another log"),
    ],
)
async def test_a_file_that_does_not_belong_here_is_a_conflict_and_nothing_is_changed(
    base: int, content: bytes, scene: Scene
) -> None:
    a = scene.broker("a")
    await three_files(scene, a)
    await put_file(a.disk, wal_path(base), content)
    before = {path: a.disk.content(path) for path in a.disk.paths()}
    with pytest.raises(RecoveryConflict):
        await a.open()
    assert {path: a.disk.content(path) for path in a.disk.paths()} == before
    await a.disk.remove(wal_path(base))
    await scene.check(await a.open())


# ── checkpoint and footers ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["missing", "empty", "garbage", "flipped", "stale", "none of its files"])
async def test_a_bad_checkpoint_costs_time_and_no_records(kind: str, scene: Scene) -> None:
    """Seen elsewhere: A restart on an existing WAL resets offsets to 0 because only the checkpoint was read."""
    a = scene.broker("a")
    segment = await a.open()
    await scene.publish(segment, 4)
    await segment.log.rotate()
    await asyncio.sleep(1)
    stale = a.disk.content(CHECKPOINT)
    await scene.publish(segment, 4)
    await segment.log.rotate()
    await scene.publish(segment, 2)
    await asyncio.sleep(1)
    a.kill()
    good = a.disk.content(CHECKPOINT)
    await a.disk.remove(CHECKPOINT)
    bad = {
        "missing": None,
        "empty": b"",
        "garbage": b"BRDK" + bytes(100),
        "flipped": good[:20] + bytes([good[20] ^ 1]) + good[21:],
        "stale": stale,
        "none of its files": checkpoints.encode(LogCheckpoint(Offset(0), ())),
    }[kind]
    if bad is not None:
        await put_file(a.disk, CHECKPOINT, bad)
    segment = await a.open()
    assert segment.recovered.damage == []
    assert await scene.publish(segment, 1) == [10]
    await scene.check(segment)


async def test_a_checkpoint_ahead_of_the_files_is_evidence_of_a_loss(scene: Scene) -> None:
    a = scene.broker("a")
    await three_files(scene, a)
    checkpoint = await checkpoints.read(a.disk, FOLDER)
    assert checkpoint is not None
    await checkpoints.write(a.disk, FOLDER, LogCheckpoint(Offset(25), checkpoint.closed))
    for expected in (25, 26):
        segment = await a.open()
        assert [(each.first_offset, each.next_offset) for each in segment.recovered.damage] == [(10, 25)]
        assert await scene.publish(segment, 1) == [expected]
        with pytest.raises(LogDamaged):
            await segment.reader(10).read()
        a.kill()


@pytest.mark.parametrize("base", [0, 4, 8])
@with_and_without_checkpoint
async def test_a_corrupt_footer_loses_no_batch(base: int, checkpoint: bool, scene: Scene) -> None:
    a = scene.broker("a")
    segment = await a.open()
    for count in (4, 4, 2):
        await scene.publish(segment, count)
        await segment.log.rotate()
    await asyncio.sleep(1)
    a.kill()
    if not checkpoint:
        await a.disk.remove(CHECKPOINT)
    size = len(a.disk.content(wal_path(base)))
    a.disk.flip(wal_path(base), size - 20, 3)
    segment = await a.open()
    assert segment.recovered.damage == []
    assert await scene.publish(segment, 1) == [10]
    await scene.check(segment)
    if checkpoint and base < 8:
        # Recovery had no reason to look into this file; a copy without a good footer is no chunk.
        with pytest.raises(LogDamaged):
            await a.run(segment.hand_over())
        a.kill()
        await a.disk.remove(CHECKPOINT)
        segment = await a.open()
    await a.run(segment.hand_over())
    await scene.check(await scene.broker("b").open())


async def test_a_flipped_producer_table_never_forgets_a_producer_in_silence(scene: Scene) -> None:
    a = scene.broker("a")
    segment = await a.open()
    await segment.log.confirm(segment.append(batch(1, producer=7, sequence=0)))
    await segment.log.rotate()
    await asyncio.sleep(1)
    a.kill()
    size = len(a.disk.content(FIRST))
    a.disk.flip(FIRST, size - 90, 1)  # in the producer rows
    segment = await a.open()
    again = segment.append(batch(1, producer=7, sequence=0))
    assert (again.duplicate, again.base_offset) == (True, 0)
