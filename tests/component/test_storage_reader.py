"""Reading: both ways between chunks, files, cache and the live tail, with every seam checked."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from braid.model.batch.header import body_of
from braid.model.errors import LogClosed, LogDamaged, OffsetOutOfRange
from braid.model.ids import Offset
from braid.model.topic import Durability
from braid.storage.chunk import RUN_BYTES, Index
from braid.storage.history.exporter import chunk_name
from braid.storage.log import recovery, wal
from braid.storage.log.context import LogConfig
from braid.storage.log.wal import FrameWalk, wal_name
from braid.storage.reader import LogReader, read_batches
from braid.storage.retention import RetentionPolicy
from braid.storage.segment import SegmentStorage
from braid.testing.sim.objects import MemoryObjects
from tests.kits.storage import (
    SEGMENT_FOLDER,
    SMALL_FILES,
    WAL_FOLDER,
    Bytes,
    World,
    fill,
    make_batch,
    make_chunk,
    read_all,
    read_offsets,
    stamped_batch,
)


class CountingObjects(MemoryObjects):
    reads = 0

    async def read(self, name: str, start: int, length: int) -> bytes:
        self.reads += 1
        return await super().read(name, start, length)


class Tracked:
    """A reader that says where each batch came from."""

    def __init__(self, world: World, objects: CountingObjects, reader: LogReader) -> None:
        self.world = world
        self.objects = objects
        self.reader = reader

    async def read_one(self) -> str:
        objects, files, offset = self.objects.reads, len(self.world.a.noting.reads), self.reader.offset
        (batch,) = await self.reader.read(1)
        assert batch.header.base_offset == offset
        assert bytes(body_of(batch.data, batch.header)).endswith(b"x%d" % offset)
        if self.objects.reads > objects:
            return "chunk"
        return "file" if len(self.world.a.noting.reads) > files else "cache"

    async def read_until(self, offset: int) -> list[str]:
        """Where the batches up to `offset` came from, each place once."""
        places: list[str] = []
        while self.reader.offset < offset:
            place = await self.read_one()
            if places[-1:] != [place]:
                places.append(place)
        return places


async def test_a_reader_moves_from_chunks_to_files_to_the_cache_to_the_tail_and_back(world: World) -> None:
    objects = CountingObjects()
    segment = await world.a.start(objects=objects, cache_bytes=1_100).open()
    await fill(segment, 100)
    await segment.log.rotate()
    await segment.exporter.export_closed()
    await segment.exporter.stop()
    await segment.apply_retention(RetentionPolicy())
    await fill(segment, 10)
    tracked = Tracked(world, objects, segment.reader(0))
    assert await tracked.read_until(80) == ["chunk"]
    assert await tracked.read_until(105) == ["file"]
    assert await tracked.read_until(110) == ["cache"]
    waiting = asyncio.create_task(tracked.read_one())
    await asyncio.sleep(60)
    assert not waiting.done(), "at the live tail it waits"
    await fill(segment, 1)
    assert await waiting == "cache"
    await fill(segment, 50)
    assert await tracked.read_until(160) == ["file", "cache"], "it fell behind the cache and caught up again"
    await fill(segment, 95)
    await segment.log.rotate()
    await segment.exporter.export_closed()
    await segment.apply_retention(RetentionPolicy())
    assert await tracked.read_until(256) == ["chunk", "file", "cache"], "it fell behind the files and caught up again"


async def test_files_that_are_reclaimed_under_a_reader_are_read_from_chunks(world: World) -> None:
    segment = await world.a.start(cache_bytes=0).open()
    await fill(segment, 100)
    await segment.log.rotate()
    await segment.exporter.export_closed()
    reader = segment.reader(0)
    await reader.read(1)
    assert (reader.offset, segment.log.base_offset) == (1, 0)
    await segment.apply_retention(RetentionPolicy())
    assert segment.log.base_offset == 80
    found: list[int] = []
    while batches := await reader.read_available(300):
        found.extend(header.base_offset for header, _ in batches)
    assert found == list(range(1, 100))
    assert world.a.noting.open_files <= 2


@pytest.mark.parametrize("seed", range(10))
async def test_readers_of_all_speeds_see_every_offset_once_while_files_come_and_go(seed: int, world: World) -> None:
    random = world.simulation.random
    segment = await world.a.start(cache_bytes=1_000, max_open=2).open()

    async def read(until: int) -> list[int]:
        reader = segment.reader(0)
        found: list[int] = []
        while len(found) < until:
            batches = await reader.read(random.choice([1, 300, 5_000]))
            found.extend(header.base_offset for header, _ in batches)
            await asyncio.sleep(random.choice([0, 0, 0.001, 0.02]))
        return found

    async def write() -> None:
        for _ in range(40):
            await fill(segment, random.randrange(1, 12))
            await segment.apply_retention(RetentionPolicy(), keep_local_bytes=random.choice([0, 5_000]))

    readers = [asyncio.create_task(read(150)) for _ in range(5)]
    await write()
    await fill(segment, 150)
    for found in await asyncio.gather(*readers):
        assert found == list(range(len(found)))


async def test_a_reader_that_waits_is_told_when_the_log_closes(world: World) -> None:
    segment = await world.a.open()
    await fill(segment, 3)
    waiting = asyncio.create_task(segment.reader(3).read())
    await asyncio.sleep(1)
    await segment.close()
    with pytest.raises(LogClosed):
        await waiting
    assert await read_offsets(segment) == [0, 1, 2], "what is there can still be read"


@pytest.mark.parametrize("place", ["cache", "file", "chunk"])
async def test_a_reader_may_start_inside_a_batch_and_gets_it_whole(place: str, world: World) -> None:
    segment = await world.a.start(cache_bytes=1 << 20 if place == "cache" else 0).open()
    await fill(segment, 10, count=10)
    if place == "chunk":
        await segment.hand_over()
        segment = await world.b.start(cache_bytes=0).open()
    for offset in (0, 1, 9, 10, 55, 99):
        reader = segment.reader(offset)
        (batch, *_) = await reader.read(1)
        assert batch.header.base_offset == offset // 10 * 10
        assert reader.offset == offset // 10 * 10 + 10
    assert await read_offsets(segment, 55) == list(range(50, 100))


@pytest.mark.parametrize("place", ["cache", "file", "chunk"])
@pytest.mark.parametrize(
    ("max_bytes", "batches"), [(0, 1), (1, 1), (200, 1), (399, 1), (400, 2), (1_000, 5), (1_199, 5), (1 << 20, 10)]
)
async def test_a_read_returns_at_least_one_batch_and_about_as_many_bytes_as_asked(
    place: str, max_bytes: int, batches: int, world: World
) -> None:
    segment = await world.a.start(cache_bytes=1 << 20 if place == "cache" else 0).open()
    for _ in range(10):
        segment.append(make_batch(body=b"x" * 104))
    await segment.log.flush()
    if place == "chunk":
        await segment.hand_over()
        segment = await world.b.start(cache_bytes=0).open()
    found = await segment.reader(0).read(max_bytes)
    assert len(found) == batches
    assert sum(len(data) for _, data in found) <= max(max_bytes, 200)


@pytest.mark.parametrize("max_bytes", [1, 500, 5_000])
async def test_a_reader_with_little_credit_does_not_read_header_by_header(max_bytes: int, world: World) -> None:
    """The index knows every 64 KiB: a batch at the end of a run took hundreds of reads."""
    segment = await world.a.start(cache_bytes=0).open()
    for _ in range(600):
        segment.append(make_batch(body=b"x" * 104))
    await segment.log.flush()
    for offset in (0, 299, 599):
        reads = len(world.a.noting.reads)
        found = await segment.reader(offset).read(max_bytes)
        assert found[0].header.base_offset == offset
        assert sum(len(data) for _, data in found) <= max(max_bytes, 200)
        assert len(world.a.noting.reads) - reads <= 2
        assert memoryview(memoryview(found[0].data).obj).nbytes <= max(max_bytes, 200), (
            "a few batches keep 64 KiB in memory"
        )


class Remembered(Bytes):
    """Bytes that remember what was last read of them."""

    async def read(self, position: int, length: int) -> bytes:
        self.last = await super().read(position, length)
        return self.last


async def test_a_batch_is_copied_only_where_it_would_keep_much_more_in_memory(world: World) -> None:
    small = b"".join(stamped_batch(offset, body=b"x" * 104) for offset in range(600))
    for limit in (1, 600):
        found = await read_batches(Remembered(small), Index(), len(small), 0, limit, 500)
        assert memoryview(memoryview(found[0].data).obj).nbytes <= 500
    large = Remembered(stamped_batch(0, body=b"x" * (1 << 20)) + stamped_batch(1, body=b"y"))
    found = await read_batches(large, Index(), 1 << 21, 0, 2, 1 << 20)
    assert memoryview(found[0].data).obj is large.last
    filled = Remembered(small)
    found = await read_batches(filled, Index(), len(small), 0, 600, 1 << 20)
    assert len(found) == 600
    assert memoryview(found[0].data).obj is filled.last


@pytest.mark.parametrize("window_bytes", [50, 4_096])
async def test_batches_larger_than_a_read_and_than_a_window_come_whole(
    window_bytes: int, monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    monkeypatch.setattr(wal, "WINDOW_BYTES", window_bytes)
    monkeypatch.setattr(recovery, "WINDOW_BYTES", window_bytes)
    segment = await world.a.start(cache_bytes=0).open(LogConfig())
    bodies = [b"a" * 10, b"b" * 20_000, b"c" * 5_000, b"d" * 130_000, b"e" * 10]
    for body in bodies:
        segment.append(make_batch(body=body))
    await segment.log.flush()
    await segment.abandon()
    world.a.crash().start(cache_bytes=0)
    segment = await world.a.open(LogConfig())
    for max_bytes in (1, window_bytes, 1 << 20):
        assert [batch.body for batch in await read_all(segment, 0, max_bytes)] == bodies
    await segment.hand_over()
    segment = await world.b.open()
    assert [batch.body for batch in await read_all(segment, 0, window_bytes)] == bodies


FRAMES = b"".join(stamped_batch(offset, body=b"x" * (37 * offset % 150)) for offset in range(6))


async def walked(data: bytes) -> tuple[int, int, list[int], str | None]:
    walk = FrameWalk(Bytes(data), len(data), 0, 0)
    positions: list[int] = []
    while window := await walk.next_window():
        positions.extend(position for position, _ in window)
    assert await walk.next_window() == []
    return walk.position, walk.expected, positions, walk.reason


@pytest.mark.parametrize("left_over", [0, 1, 95, 100], ids=lambda n: f"{n} bytes of a torn batch")
def test_the_walk_never_overstates_the_good_end_wherever_a_window_ends(
    left_over: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torn = FRAMES + stamped_batch(6, body=b"y" * 100)[:left_over]
    plain = asyncio.run(walked(torn))
    assert plain[:2] == (len(FRAMES), 6)
    for window_bytes in range(1, len(torn) + 2):
        monkeypatch.setattr(wal, "WINDOW_BYTES", window_bytes)
        assert asyncio.run(walked(torn)) == plain
    monkeypatch.setattr(wal, "WINDOW_BYTES", 100)
    assert asyncio.run(walked(torn + bytes(500)))[:3] == plain[:3]


def test_the_walk_stops_where_offsets_epochs_or_incarnations_do_not_continue() -> None:
    for wrong in (stamped_batch(7), stamped_batch(5), stamped_batch(6, epoch=0), stamped_batch(6, incarnation=78)):
        position, expected, _, reason = asyncio.run(walked(FRAMES + wrong))
        assert (position, expected) == (len(FRAMES), 6)
        assert reason is not None
        assert f"batch at byte {len(FRAMES)}" in reason
    later = stamped_batch(6, epoch=2, incarnation=78)
    assert asyncio.run(walked(FRAMES + later))[1] == 7, "a new epoch has an incarnation of its own"


def test_the_last_byte_that_is_not_zero_is_found_across_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"ab" + bytes(20) + b"c" + bytes(30)
    for window_bytes in range(1, 60):
        monkeypatch.setattr(wal, "WINDOW_BYTES", window_bytes)
        assert asyncio.run(wal.last_nonzero(Bytes(data), 0, len(data))) == 23
        assert asyncio.run(wal.last_nonzero(Bytes(data), 23, len(data))) == 23
        assert asyncio.run(wal.last_nonzero(Bytes(data), 2, 22)) == 2


async def with_false_chunk(world: World, content: bytes, base: int, end: int) -> SegmentStorage:
    """A broker whose catalog says that offsets 20–39 are in an object with this content."""
    segment = await world.a.open()
    await fill(segment, 60)
    await segment.hand_over()
    segment = await world.b.start(cache_bytes=0).open()
    at = next(at for at, chunk in enumerate(segment.catalog.chunks) if chunk.base_offset == 20)
    name = chunk_name(base, end, 99)
    await world.objects.create(f"{SEGMENT_FOLDER}/{name}", [content])
    batch_bytes = content.find(b"BRDC")
    assert batch_bytes > 0
    segment.catalog.chunks[at] = msgspec.structs.replace(
        segment.catalog.chunks[at], object=name, size=len(content), batch_bytes=len(content) - 40 - 72
    )
    return segment


@pytest.mark.parametrize(
    ("base", "batches"), [(40, 20), (0, 20), (21, 19), (20, 10), (19, 5)],
    ids=["later offsets", "earlier offsets", "the first is missing", "the rest is missing", "it ends too early"],
)  # fmt: skip
async def test_a_chunk_that_holds_other_offsets_than_the_catalog_says_is_an_error_and_never_a_gap(
    base: int, batches: int, world: World
) -> None:
    segment = await with_false_chunk(world, make_chunk(base, batches), base, base + batches)
    reader = segment.reader(0)
    found: list[int] = []

    async def read_on() -> None:
        while True:
            found.extend(header.base_offset for header, _ in await reader.read(100))

    with pytest.raises(LogDamaged):
        await read_on()
    assert found == list(range(len(found))), "everything before it, without a gap"
    assert 20 <= len(found) <= 30
    assert reader.offset == len(found)


async def test_an_offset_that_no_source_holds_is_an_error_and_never_a_gap(world: World) -> None:
    segment = await world.a.open()
    await fill(segment, 60)
    await segment.hand_over()
    segment = await world.b.start(cache_bytes=0).open()
    segment.catalog.chunks = [chunk for chunk in segment.catalog.chunks if chunk.base_offset != 20]
    with pytest.raises(OffsetOutOfRange, match="offset 20 "):
        await read_offsets(segment)


async def test_nothing_is_visible_before_it_is_replicated(world: World) -> None:
    config = LogConfig(durability=Durability.REPLICATED, files=SMALL_FILES)
    for cache_bytes in (0, 1 << 20):
        segment = await world.a.start(cache_bytes=cache_bytes).open(config)
        base = segment.log.end
        reader = segment.reader(base)
        for _ in range(30):
            segment.append(make_batch())
        await segment.log.flush()
        assert await reader.read_available() == []
        waiting = asyncio.create_task(reader.read())
        await asyncio.sleep(10)
        assert not waiting.done()
        segment.log.replicated.advance(base + 7)
        await waiting
        assert reader.offset == base + 7
        assert await reader.read_available() == []
        segment.log.replicated.advance(base + 30)
        assert await read_offsets(segment, base) == list(range(base, base + 30))
        await segment.close()


async def test_nothing_is_visible_before_it_is_synced(world: World) -> None:
    segment = await world.a.open()
    segment.append(make_batch())
    assert await segment.reader(0).read_available() == []
    await segment.log.flush()
    assert len(await segment.reader(0).read_available()) == 1


async def test_an_offset_is_found_by_time_in_chunks_files_and_at_the_end(world: World) -> None:
    segment = await world.a.open()
    for time in range(100):
        segment.append(make_batch(times=(1_000 + 10 * time, 1_005 + 10 * time)))
        if time == 49:
            await segment.log.rotate()
            await segment.exporter.export_closed()
    await segment.log.flush()
    for time in range(900, 2_100, 7):
        offset = await segment.sources.offset_at_time(time)
        first = next((n for n in range(100) if 1_005 + 10 * n >= time), 100)
        assert offset <= first, "no record at or after the time stands before it"
        assert first - offset <= RUN_BYTES // 200, "and it is near"
        if first == 100:
            assert offset == 100
    segment.log.files[-1].max_timestamp = 0
    assert await segment.sources.offset_at_time(3_000) == 100


async def test_time_is_found_to_within_a_run_in_long_files(world: World) -> None:
    segment = await world.a.open(LogConfig())
    for time in range(100):
        segment.append(make_batch(body=b"x" * 10_000, times=(time, time)))
    await segment.log.flush()
    for time in (0, 1, 30, 55, 99):
        assert 0 <= time - await segment.sources.offset_at_time(time) <= 7
    await segment.log.rotate()
    await segment.exporter.export_closed()
    for time in (0, 1, 30, 55, 99):
        assert 0 <= time - await segment.sources.offset_at_time(time) <= 7


async def test_retention_under_a_reader_tells_it_where_history_begins_now(world: World) -> None:
    for cache_bytes in (0, 1 << 20):
        segment = await world.a.start(cache_bytes=cache_bytes).open()
        start = segment.log.end
        reader = segment.reader(segment.earliest)
        await fill(segment, 100)
        await segment.log.rotate()
        await reader.read(1)
        await segment.exporter.export_closed()
        await segment.apply_retention(RetentionPolicy(max_bytes=0))
        with pytest.raises(OffsetOutOfRange) as caught:
            await reader.read()
        assert (caught.value.earliest, caught.value.end) == (segment.earliest, start + 100)
        reader.offset = Offset(caught.value.earliest)
        assert (await reader.read(1))[0].header.base_offset == caught.value.earliest
        await segment.close()


async def test_a_file_that_vanished_under_a_reader_is_read_from_its_chunk(world: World) -> None:
    segment = await world.a.start(cache_bytes=0).open()
    await fill(segment, 40)
    await segment.log.rotate()
    await segment.exporter.export_closed()
    path = f"{WAL_FOLDER}/{wal_name(20)}"
    await world.a.context.handles.forget(segment.log.number, path)
    await world.a.disk.remove(path)
    assert await read_offsets(segment, 0, 1) == list(range(40))


async def test_an_object_that_is_gone_is_an_error_after_looking_again(world: World) -> None:
    segment = await world.a.open()
    await fill(segment, 40)
    await segment.hand_over()
    segment = await world.b.open()
    await world.objects.delete(f"{SEGMENT_FOLDER}/{segment.catalog.chunks[1].object}")
    with pytest.raises(Exception, match=segment.catalog.chunks[1].object):
        await read_offsets(segment, 20)


async def test_reading_ahead_gives_the_same_and_ends_at_the_tail(world: World) -> None:
    segment = await world.a.start(cache_bytes=0).open()
    await fill(segment, 100)
    found = [header.base_offset async for batches in segment.reader(7).ahead(500) for header, _ in batches]
    assert found == list(range(7, 100))
    assert [batches async for batches in segment.reader(100).ahead()] == []


async def test_whoever_stops_reading_ahead_goes_on_where_he_stopped(world: World) -> None:
    segment = await world.a.start(cache_bytes=0).open()
    await fill(segment, 100)
    reader = segment.reader(0)
    found: list[int] = []
    ahead = reader.ahead(500)
    async for batches in ahead:
        found.extend(header.base_offset for header, _ in batches)
        await asyncio.sleep(1)
        if len(found) > 10:
            break
    await ahead.aclose()  # type: ignore[attr-defined]
    while batches := await reader.read_available():
        found.extend(header.base_offset for header, _ in batches)
    assert found == list(range(100))


async def test_a_read_ahead_that_failed_after_its_reader_left_disturbs_nobody(world: World) -> None:
    segment = await world.a.start(cache_bytes=0).open()
    await fill(segment, 100)
    await segment.hand_over()
    segment = await world.b.start(cache_bytes=0).open()
    await world.objects.delete(f"{SEGMENT_FOLDER}/{segment.catalog.chunks[1].object}")
    ahead = segment.reader(19).ahead(1)
    assert len(await anext(ahead)) == 1
    await asyncio.sleep(1)
    await ahead.aclose()  # type: ignore[attr-defined]


async def test_footers_of_files_that_left_do_not_describe_the_files_that_follow_them(world: World) -> None:
    config = LogConfig()
    segment = await world.a.start(cache_bytes=0).open(config)
    await fill(segment, 20)
    await segment.log.rotate()
    await segment.exporter.export_closed()
    await segment.exporter.stop()
    await fill(segment, 50, body=b"a" * 20_000)
    await segment.log.rotate()
    assert len(await read_offsets(segment, 20, 1)) == 50, "the footer of the second file is known now"
    await segment.abandon()
    successor = await world.b.open(config, accept_loss=True)
    assert successor.log.end == 20
    await successor.hand_over()
    segment = await world.a.open(config)
    await segment.exporter.stop()
    await fill(segment, 80, body=b"b" * 7_000)
    await segment.log.rotate()
    assert segment.log.files[0].name == wal_name(20)
    assert await read_offsets(segment, 20, 1) == list(range(20, 100))
    for offset in range(20, 100, 7):
        assert (await read_offsets(segment, offset, 1))[0] == offset
    assert world.a.disk.content(f"{WAL_FOLDER}/aside-{segment.log.epoch}/{wal_name(20)}")
