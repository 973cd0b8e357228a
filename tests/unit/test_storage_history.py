"""History is read by range from objects alone, with every broker and the metadata store gone."""

import pytest

from braid.model.errors import LogDamaged, ObjectMissing, OffsetOutOfRange
from braid.storage.history import HistoryReader
from braid.storage.manifest import read_segment_manifest
from tests.storage_kit import DESCRIPTOR, TOPIC, World, fill, run


async def written(world: World, chunks: int = 3, batches: int = 10) -> HistoryReader:
    """A handed-over segment of single-record batches, seen through its manifest."""
    segment = await world.a.open()
    for _ in range(chunks):
        await fill(segment, batches)
        await segment.log.rotate()
    await segment.hand_over()
    manifest = await read_segment_manifest(world.objects, TOPIC, DESCRIPTOR)
    assert manifest is not None
    return HistoryReader(world.objects, manifest)


async def offsets(reader: HistoryReader, first: int, until: int, max_bytes: int = 1 << 20) -> list[int]:
    return [batch.header.base_offset async for batches in reader.read(first, until, max_bytes) for batch in batches]


@pytest.mark.parametrize("max_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize(("first", "until"), [(0, 30), (0, 1), (29, 30), (5, 25), (10, 20), (9, 11), (7, 7)])
def test_a_range_is_read_exactly_whatever_the_size_of_the_reads(first: int, until: int, max_bytes: int) -> None:
    async def main(world: World) -> None:
        assert await offsets(await written(world), first, until, max_bytes) == list(range(first, until))

    run(main)


@pytest.mark.parametrize(("first", "until"), [(-1, 5), (0, 31), (30, 40)])
def test_a_range_beyond_history_is_refused_with_what_there_is(first: int, until: int) -> None:
    async def main(world: World) -> None:
        with pytest.raises(OffsetOutOfRange) as caught:
            await offsets(await written(world), first, until)
        assert (caught.value.earliest, caught.value.end) == (0, 30)

    run(main)


def test_a_missing_chunk_is_an_error_and_never_a_gap() -> None:
    async def main(world: World) -> None:
        reader = await written(world)
        stats = [stat for stat in await world.objects.list(f"{TOPIC}/{DESCRIPTOR}") if stat.name.endswith(".chunk")]
        await world.objects.delete(stats[1].name)
        assert await offsets(reader, 0, 10) == list(range(10))
        with pytest.raises(ObjectMissing):
            await offsets(reader, 0, 30)

    run(main)


def test_a_manifest_with_a_hole_is_an_error_and_never_a_gap() -> None:
    async def main(world: World) -> None:
        reader = await written(world)
        reader._chunks = [chunk for chunk in reader._chunks if chunk.base_offset != 10]
        with pytest.raises(LogDamaged) as caught:
            await offsets(reader, 0, 30)
        assert caught.value.first_offset == 10

    run(main)
