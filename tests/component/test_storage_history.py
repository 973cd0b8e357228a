"""History is read by range from objects alone, with every broker and the metadata store gone."""

import pytest

from braid.model.errors import LogDamaged, ObjectMissing, OffsetOutOfRange
from braid.model.ids import Epoch, Offset
from braid.storage.chunk import Footer, Index, IndexEntry
from braid.storage.history.manifest import read_segment_manifest
from braid.storage.history.ranges import HistoryReader, Span, batches_in, spans
from braid.storage.log.producers import ProducerTable
from tests.kits.storage import DESCRIPTOR, TOPIC, World, fill, stamped_batch


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
async def test_a_range_is_read_exactly_whatever_the_size_of_the_reads(
    first: int, until: int, max_bytes: int, world: World
) -> None:
    assert await offsets(await written(world), first, until, max_bytes) == list(range(first, until))


@pytest.mark.parametrize(("first", "until"), [(-1, 5), (0, 31), (30, 40)])
async def test_a_range_beyond_history_is_refused_with_what_there_is(first: int, until: int, world: World) -> None:
    with pytest.raises(OffsetOutOfRange) as caught:
        await offsets(await written(world), first, until)
    assert (caught.value.earliest, caught.value.end) == (0, 30)


async def test_a_missing_chunk_is_an_error_and_never_a_gap(world: World) -> None:
    reader = await written(world)
    stats = [stat for stat in await world.objects.list(f"{TOPIC}/{DESCRIPTOR}") if stat.name.endswith(".chunk")]
    await world.objects.delete(stats[1].name)
    assert await offsets(reader, 0, 10) == list(range(10))
    with pytest.raises(ObjectMissing):
        await offsets(reader, 0, 30)


async def test_a_manifest_with_a_hole_is_an_error_and_never_a_gap(world: World) -> None:
    reader = await written(world)
    reader._chunks = [chunk for chunk in reader._chunks if chunk.base_offset != 10]
    with pytest.raises(LogDamaged) as caught:
        await offsets(reader, 0, 30)
    assert caught.value.first_offset == 10


def runs_of(*offsets_and_positions: tuple[int, int]) -> Footer:
    """100 records in 1,000 bytes, with runs that begin there."""
    index = Index()
    index.runs = [IndexEntry(Offset(offset), position, 0, 0, 0, 0, 1) for offset, position in offsets_and_positions]
    return Footer(Offset(0), Offset(100), 1_000, Epoch(1), Epoch(1), False, index, ProducerTable(), 0)


FOUR_RUNS = runs_of((0, 96), (25, 300), (50, 500), (75, 700))


@pytest.mark.parametrize(
    ("first", "until", "max_bytes", "expected"),
    [
        (0, 100, 1_000, [Span(96, 904, 0, 100)]),
        (0, 100, 450, [Span(96, 404, 0, 50), Span(500, 200, 50, 75), Span(700, 300, 75, 100)]),
        (0, 100, 1, [Span(96, 204, 0, 25), Span(300, 200, 25, 50), Span(500, 200, 50, 75), Span(700, 300, 75, 100)]),
        (24, 26, 1_000, [Span(96, 404, 0, 50)]),
        (25, 50, 1_000, [Span(300, 200, 25, 50)]),
        (99, 100, 1_000, [Span(700, 300, 75, 100)]),
        (30, 30, 1_000, []),
        (100, 100, 1_000, []),
    ],
)
def test_a_range_becomes_spans_of_whole_runs(first: int, until: int, max_bytes: int, expected: list[Span]) -> None:
    assert spans(FOUR_RUNS, first, until, max_bytes) == expected


def test_runs_that_are_not_wanted_are_not_read() -> None:
    wanted = spans(FOUR_RUNS, 0, 100, 1_000, lambda run: run.offset != 25)
    assert wanted == [Span(96, 204, 0, 25), Span(500, 500, 50, 100)]


@pytest.mark.parametrize("damage", ["flipped bit", "missing end", "other place", "too few"])
def test_a_span_whose_batches_are_not_what_the_index_says_is_damaged(damage: str) -> None:
    data = b"".join(stamped_batch(offset) for offset in (5, 6, 7))
    span = Span(0, len(data), 5, 8)
    assert [batch.header.base_offset for batch in batches_in(data, span, "x.chunk")] == [5, 6, 7]
    if damage == "flipped bit":
        data = data[:-20] + bytes([data[-20] ^ 1]) + data[-19:]
    elif damage == "missing end":
        data = data[:-10]
    elif damage == "other place":
        span = span._replace(first=4)
    else:
        span = span._replace(until=9)
    with pytest.raises(LogDamaged, match=r"x\.chunk cannot be read at offset"):
        batches_in(data, span, "x.chunk")
