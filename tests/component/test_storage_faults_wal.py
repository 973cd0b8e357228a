"""A log's files after bad days: garbage at the end, damage in the middle, files that are gone, strange or misnamed."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

import pytest
from crc32c import crc32c

from braid.model.batch.header import HEADER_BYTES, MAX_BODY_BYTES, Flag, control_batch, verify
from braid.model.errors import (
    BatchCorrupt,
    BatchError,
    BatchTooLarge,
    BatchTruncated,
    InvalidArgument,
    LogDamaged,
    RecoveryConflict,
    RecoveryUnsafe,
)
from braid.model.ids import Offset
from braid.storage.log import recovery, wal
from braid.storage.log.recovery import recover
from braid.storage.retention import RetentionPolicy
from braid.storage.segment import SegmentStorage
from tests.kits.fault_scenes import (
    BATCH_BYTES,
    CHECKPOINT,
    FOLDER,
    Broker,
    Scene,
    at,
    batch,
    files_of,
    incarnation_of,
    offsets,
    put_file,
    read_all,
    refusal,
    stamped,
    wal_path,
)

pytestmark = pytest.mark.seed(0)


FIRST = wal_path(0)


def with_body_length(data: bytearray, length: int) -> bytearray:
    """The batch with another body length and a header checksum that agrees."""
    struct.pack_into("<I", data, 12, length)
    struct.pack_into("<I", data, 92, crc32c(memoryview(data)[:92]))
    return data


async def three_groups(scene: Scene, broker: Broker) -> None:
    """Offsets 0–8 in one open file, synced three at a time; then the process is killed."""
    segment = await broker.open()
    for _ in range(3):
        await scene.publish(segment, 3)
    broker.kill()


# ── at the log's door ────────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_oversized_length_is_refused_before_anything_is_allocated_for_it(scene: Scene) -> None:
    """Seen elsewhere: No maximum frame length in the decoder: one bad length allocates everything."""
    segment = await scene.broker("a").open()
    for length in (MAX_BODY_BYTES + 1, 0xFFFF_FFFF):
        with pytest.raises(BatchTooLarge):
            segment.append(with_body_length(batch(0), length))
    assert await scene.publish(segment, 1) == [0]
    await scene.check(segment)


async def test_every_truncated_batch_is_refused_and_takes_no_offset(scene: Scene) -> None:
    segment = await scene.broker("a").open()
    whole = batch(0)
    for length in range(len(whole)):
        with pytest.raises((BatchTruncated, InvalidArgument)):
            segment.append(whole[:length])
    with pytest.raises(InvalidArgument):
        segment.append(whole + bytes(8))
    assert await scene.publish(segment, 1) == [0]


def test_every_flipped_bit_is_seen_at_the_door() -> None:
    whole = batch(0)
    for position in range(len(whole)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[position] ^= 1 << bit
            with pytest.raises(BatchError):
                verify(flipped)


async def test_batch_corrupt_is_the_type_of_a_flipped_header(scene: Scene) -> None:
    segment = await scene.broker("a").open()
    flipped = batch(0)
    flipped[30] ^= 1
    with pytest.raises(BatchCorrupt):
        segment.append(flipped)
    assert segment.log.end == 0


async def test_control_batches_from_outside_are_refused(scene: Scene) -> None:
    segment = await scene.broker("a").open()
    for flag in (Flag.SEAL, Flag.BEGIN):
        with pytest.raises(InvalidArgument):
            segment.append(control_batch(flag))
    assert segment.log.end == 0
    assert not segment.log.sealed


# ── garbage at the end ───────────────────────────────────────────────────────────────────────────────────────────────

garbage_of_every_kind = pytest.mark.parametrize(
    "garbage_of",
    [
        pytest.param(lambda own: b"\x01", id="one byte"),
        pytest.param(lambda own: b"garbage!" * 9, id="text"),
        pytest.param(lambda own: stamped(9, 3, incarnation=own)[:50], id="half a header"),
        pytest.param(lambda own: stamped(9, 3, incarnation=own)[:100], id="a header and some body"),
        pytest.param(lambda own: stamped(9, 3, incarnation=own)[:-9] + bytes(9), id="a batch without its end"),
        pytest.param(lambda own: bytes(with_body_length(batch(9), 0xFFFF_FFFF)), id="an impossible length"),
        pytest.param(
            lambda own: bytes(BATCH_BYTES) + stamped(9, 4, lag=4, incarnation=own),
            id="a hole and a whole batch of the same group",
        ),
    ],
)


@garbage_of_every_kind
@pytest.mark.parametrize("checkpoint", [True, False])
async def test_garbage_at_the_tail_is_cut_and_the_next_batch_stands_right_behind_the_last_whole_one(
    garbage_of: Callable[[int], bytes], checkpoint: bool, scene: Scene
) -> None:
    """Seen elsewhere: A reopened WAL is appended to after torn bytes; the garbage then sits in the middle of the
    file."""
    a = scene.broker("a")
    segment = await a.open()
    await scene.publish(segment, 3)
    a.kill()
    if not checkpoint and CHECKPOINT in a.disk.paths():
        await a.disk.remove(CHECKPOINT)
    garbage = garbage_of(incarnation_of(a.disk.content(FIRST)))
    a.disk.corrupt(FIRST, at(3), garbage)
    segment = await a.open()
    assert segment.recovered.torn_bytes == len(garbage.rstrip(b"\0"))
    assert segment.recovered.damage == []
    assert await scene.publish(segment, 1) == [3]
    content = a.disk.durable(FIRST)
    assert verify(content, at(3)).epoch == 2  # its BEGIN
    assert verify(content, at(3) + HEADER_BYTES).base_offset == 3
    a.power_loss()
    segment = await a.open()
    assert segment.recovered.torn_bytes == 0
    await scene.check(segment)


async def test_the_valid_end_is_never_overstated_wherever_the_file_was_cut(
    monkeypatch: pytest.MonkeyPatch, scene: Scene
) -> None:
    """Seen elsewhere: The recovery scan overstates the valid end across read-buffer borders."""
    monkeypatch.setattr(wal, "WINDOW_BYTES", 200)
    monkeypatch.setattr(recovery, "WINDOW_BYTES", 200)
    a = scene.broker("a")
    segment = await a.open()
    await scene.publish(segment, 4)
    a.kill()
    content = a.disk.content(FIRST)
    for length in range(at(4) + 1):
        await put_file(a.disk, FIRST, content[:length])
        found = await recover(a.disk, FOLDER)
        whole = max(0, (length - HEADER_BYTES) // BATCH_BYTES)
        assert found.next_offset == whole
        assert found.tail is not None
        assert found.tail.good_end == (at(whole) if length >= HEADER_BYTES else 0)
        assert found.damage == []


async def test_what_only_the_page_cache_held_is_durable_before_it_counts_again(scene: Scene) -> None:
    a = scene.broker("a")
    segment = await a.open()
    await scene.publish(segment, 2)
    a.kill()
    file = await a.disk.open(FIRST)
    own = incarnation_of(a.disk.content(FIRST))
    # Written, never synced, and the process was killed.
    await file.write(at(2), [stamped(50, 2, incarnation=own)], sync=False)
    segment = await a.open()
    assert segment.log.end == 3
    shown = await read_all(segment.reader(0))
    a.power_loss()
    assert await read_all((await a.open()).reader(0)) == shown


# ── damage in the middle ─────────────────────────────────────────────────────────────────────────────────────────────

in_an_open_and_in_a_closed_file = pytest.mark.parametrize("closed", [False, True], ids=["open file", "closed file"])


async def damaged(scene: Scene, broker: Broker, *, closed: bool) -> SegmentStorage:
    """Offset 4 of 0–8 has lost a bit, and the log was opened again."""
    if closed:
        segment = await broker.open()
        await scene.publish(segment, 9)
        await segment.log.rotate()
        await asyncio.sleep(1)
        broker.kill()
        await broker.disk.remove(CHECKPOINT)
    else:
        await three_groups(scene, broker)
    broker.disk.flip(FIRST, at(4) + HEADER_BYTES + 3, 5)
    return await broker.open()


@in_an_open_and_in_a_closed_file
async def test_damage_in_the_middle_is_reported_and_every_byte_of_it_stays(closed: bool, scene: Scene) -> None:
    """Seen elsewhere: A checksum error in the middle: the reader stops silently, the exporter publishes the prefix, the
    seal deletes the rest. → corruption in the middle is reported and quarantined, nothing behind it is deleted."""
    a = scene.broker("a")
    segment = await damaged(scene, a, closed=closed)
    before = files_of(a)
    for _ in range(3):
        (damage,) = segment.recovered.damage
        assert (damage.file, damage.position) == (FIRST.rpartition("/")[2], at(4))
        assert (damage.first_offset, damage.next_offset) == (4, 5)
        assert segment.recovered.torn_bytes == 0
        await scene.publish(segment, 2)
        await segment.apply_retention(RetentionPolicy(max_bytes=0, delete_unconsumed=True))
        a.kill()
        assert files_of(a)[damage.file] == before[damage.file]
        segment = await a.open()
    assert segment.log.end == 15
    assert await refusal(segment.reader(4).read_available()) is not None


@in_an_open_and_in_a_closed_file
@pytest.mark.parametrize("max_bytes", [1, 300, 1 << 20])
async def test_a_reader_is_told_which_offsets_are_damaged_and_can_go_on_behind_them(
    closed: bool, max_bytes: int, scene: Scene
) -> None:
    segment = await damaged(scene, scene.broker("a"), closed=closed)
    await scene.publish(segment, 3)
    reader = segment.reader(0)
    with pytest.raises(LogDamaged) as caught:
        await read_all(reader, max_bytes)
    assert reader.offset == 4, "everything before the damage can be read"
    assert (caught.value.first_offset, caught.value.next_offset) == (4, 5)
    reader.offset = Offset(caught.value.next_offset)
    behind = await read_all(reader, max_bytes)
    assert offsets(behind) == list(range(5, 12))
    assert dict(behind).items() <= scene.confirmed.items()


@in_an_open_and_in_a_closed_file
async def test_a_damaged_log_is_neither_exported_nor_handed_over(closed: bool, scene: Scene) -> None:
    a = scene.broker("a")
    segment = await damaged(scene, a, closed=closed)
    await scene.publish(segment, 3)
    await segment.log.rotate()
    for _ in range(2):
        with pytest.raises(LogDamaged) as caught:
            await a.run(segment.exporter.export_closed())
        assert caught.value.first_offset == 4
        with pytest.raises(LogDamaged):
            await a.run(segment.hand_over())
    catalog = await scene.catalog()
    assert (catalog.chunks, catalog.sealed, catalog.next_offset) == ([], None, 0)
    assert len(files_of(a)) == 2


async def test_a_bit_that_flips_after_the_log_was_opened_is_not_exported_either(scene: Scene) -> None:
    a = scene.broker("a")
    segment = await a.open()
    await scene.publish(segment, 9)
    await segment.log.rotate()
    a.disk.flip(FIRST, at(4) + HEADER_BYTES, 0)
    with pytest.raises(LogDamaged) as caught:
        await a.run(segment.hand_over())
    assert caught.value.first_offset == 4
    assert (await scene.catalog()).sealed is None
    assert FIRST in a.disk.paths()


@pytest.mark.parametrize("max_bytes", [1, 300, 1 << 20])
async def test_a_bit_that_flips_after_the_log_was_opened_hides_only_its_own_neighbourhood(
    max_bytes: int, scene: Scene
) -> None:
    a = scene.broker("a")
    segment = await a.open()
    await scene.publish(segment, 9)
    a.disk.flip(FIRST, at(4) + HEADER_BYTES, 0)
    reader = segment.reader(0)
    with pytest.raises(LogDamaged) as caught:
        await read_all(reader, max_bytes)
    assert reader.offset == caught.value.first_offset == 4


async def test_a_flipped_bit_anywhere_before_the_last_group_is_never_a_torn_tail(scene: Scene) -> None:
    """Whatever bit of synced batches flips: the log says so, or it does not open; it never just gets shorter."""
    a = scene.broker("a")
    await three_groups(scene, a)
    content = a.disk.content(FIRST)
    for position in range(0, at(6), 5):
        a.disk.corrupt(FIRST, 0, content)
        a.disk.flip(FIRST, position, position % 8)
        found = await recover(a.disk, FOLDER)
        assert found.next_offset == 9, position
        assert found.damage, position
        assert found.torn_bytes == 0, position


@pytest.mark.parametrize("flipped", [0, at(3)], ids=["first", "second"])
async def test_a_damaged_begin_in_front_of_the_last_group_loses_nothing_in_silence(flipped: int, scene: Scene) -> None:
    a = scene.broker("a")
    await scene.publish(await a.open(), 3)
    if flipped:
        a.kill()
        await scene.publish(await a.open(), 3)
    a.kill()
    a.disk.flip(FIRST, flipped + 20, 0)
    content = a.disk.content(FIRST)
    try:
        segment = await a.open()
    except (RecoveryUnsafe, RecoveryConflict):
        assert a.disk.content(FIRST) == content
    else:
        assert segment.recovered.damage
        await scene.check(segment)


async def test_a_torn_tail_behind_damage_does_not_keep_the_log_from_opening_again(scene: Scene) -> None:
    a = scene.broker("a")
    await three_groups(scene, a)
    a.disk.flip(FIRST, at(4) + HEADER_BYTES, 0)
    # Of a group of two, never synced, only the second batch reached the disk.
    torn = bytes(BATCH_BYTES) + stamped(70, 10, lag=1, incarnation=incarnation_of(a.disk.content(FIRST)))
    await put_file(a.disk, FIRST, a.disk.content(FIRST)[: at(9)] + torn)
    for expected in (9, 11, 13):
        segment = await a.open()
        assert segment.log.end == expected
        assert [damage.first_offset for damage in segment.recovered.damage] == [4]
        await scene.publish(segment, 2)
        reader = segment.reader(5)
        assert offsets(await read_all(reader)) == list(range(5, expected + 2))
        a.power_loss()


@pytest.mark.parametrize("seed", range(4))
async def test_what_only_the_page_cache_held_behind_damage_is_durable_before_it_counts_again(
    seed: int, scene: Scene
) -> None:
    a = scene.broker("a")
    await three_groups(scene, a)
    a.disk.flip(FIRST, at(4) + HEADER_BYTES, 0)
    file = await a.disk.open(FIRST)
    own = incarnation_of(a.disk.content(FIRST))
    await file.write(at(9), [stamped(50, 9, incarnation=own)], sync=False)
    segment = await a.open()
    shown = await read_all(segment.reader(5))
    assert offsets(shown) == [5, 6, 7, 8, 9]
    a.power_loss()
    assert await read_all((await a.open()).reader(5)) == shown


async def test_several_damages_are_all_reported(scene: Scene) -> None:
    a = scene.broker("a")
    await three_groups(scene, a)
    for offset in (1, 2, 5):
        a.disk.flip(FIRST, at(offset) + HEADER_BYTES, 0)
    segment = await a.open()
    assert [(each.first_offset, each.next_offset) for each in segment.recovered.damage] == [(1, 3), (5, 6)]
    for start, end in ((0, 1), (3, 5), (6, 9)):
        reader = segment.reader(start)
        await reader.read_available(1 << 20)
        assert reader.offset == end
