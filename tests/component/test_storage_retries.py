"""A log knows the batches that a producer sends again, whichever way its owner got it (I10)."""

from __future__ import annotations

import asyncio

import pytest

from braid.model.errors import OutOfSequence
from braid.storage.chunk import read_footer
from tests.kits.owner_changes import WAYS, crashed, moved, send
from tests.kits.storage import WAL_FOLDER, Bytes, World, make_batch, make_header


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_a_retry_is_known_however_the_log_got_its_owner(way: object, world: World) -> None:
    segment = await world.a.open()
    for sequence in range(0, 40, 4):
        await send(segment, sequence, 4)
    segment = await way(world, segment)  # type: ignore[operator]
    end = segment.log.end
    again = await send(segment, 36, 4)
    assert (again.base_offset, again.next_offset, again.duplicate) == (36, 40, True)
    old = await send(segment, 0, 4)
    assert (old.base_offset, old.duplicate) == (None, True), "known, though its place is forgotten"
    for sequence, count in ((41, 1), (38, 4), (39, 1)):
        with pytest.raises(OutOfSequence):
            segment.append(make_batch(count, producer=7, sequence=sequence))
    assert segment.log.end == end
    assert not (await send(segment, 40)).duplicate
    assert (await send(segment, 0, producer=8)).base_offset == end + 1


async def test_retries_of_batches_before_and_after_a_move_are_known_after_the_new_owners_crash(world: World) -> None:
    segment = await world.a.open()
    await send(segment, 0, 3)
    segment = await moved(world, segment)
    await send(segment, 3, 2)
    await send(segment, 0, 1, producer=9)
    await segment.exporter.stop()
    world.b.crash()
    segment = await world.b.open()
    assert segment.log.base_offset == 3, "the first batch is in a chunk only"
    for sequence, count, producer, base in ((0, 3, 7, 0), (3, 2, 7, 3), (0, 1, 9, 5)):
        assert (await send(segment, sequence, count, producer)).base_offset == base
    assert segment.log.end == 6


async def test_a_footer_never_knows_a_batch_that_is_only_queued(world: World) -> None:
    segment = await world.a.open()
    for sequence in range(300):
        segment.append(make_batch(producer=7, sequence=sequence))
    await segment.log.flush()
    await segment.log.rotate()
    closed = [file for file in segment.log.files if file.closed]
    assert len(closed) > 10
    for file in closed:
        data = world.a.disk.content(f"{WAL_FOLDER}/{file.name}")
        footer = await read_footer(Bytes(data), len(data))
        known = footer.producers.check(make_header(producer=7, sequence=file.next_offset - 1))
        assert known is not None
        assert known.base_offset == file.next_offset - 1
        queued = make_header(producer=7, sequence=file.next_offset)
        assert footer.producers.check(queued) is None, "the next one is not stored yet"


@pytest.mark.parametrize("seed", range(20))
async def test_after_a_crash_a_batch_is_a_retry_exactly_if_it_is_stored(seed: int, world: World) -> None:
    segment = await world.a.open()
    for sequence in range(100):
        segment.append(make_batch(producer=7, sequence=sequence))
    await asyncio.sleep(world.simulation.random.uniform(0, 0.02))
    confirmed = segment.log.confirmed.value
    segment = await crashed(world, segment)
    stored = segment.log.end
    assert stored >= confirmed
    for sequence in range(max(0, stored - 8), 100):
        appended = await send(segment, sequence)
        assert appended.duplicate == (sequence < stored)
        assert appended.base_offset == sequence
