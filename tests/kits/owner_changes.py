"""Ways in which a log gets its next owner, and a producer's batches before and after."""

from __future__ import annotations

from braid.storage.log.log import Appended
from braid.storage.retention import RetentionPolicy
from braid.storage.segment import SegmentStorage
from tests.kits.storage import Broker, World, fill, make_batch


async def send(segment: SegmentStorage, sequence: int, count: int = 1, producer: int = 7) -> Appended:
    appended = segment.append(make_batch(count, producer=producer, sequence=sequence))
    await segment.log.confirm(appended)
    return appended


async def reopened(world: World, segment: SegmentStorage) -> SegmentStorage:
    await segment.close()
    return await world.a.start().open()


async def crashed(world: World, segment: SegmentStorage) -> SegmentStorage:
    await segment.exporter.stop()
    world.a.crash()
    return await world.a.open()


async def rotated(world: World, segment: SegmentStorage) -> SegmentStorage:
    await fill(segment, 100)
    await segment.log.rotate()
    return await crashed(world, segment)


async def reclaimed(world: World, segment: SegmentStorage) -> SegmentStorage:
    await fill(segment, 100)
    await segment.log.rotate()
    await segment.exporter.export_closed()
    await segment.apply_retention(RetentionPolicy())
    return await crashed(world, segment)


async def moved(world: World, segment: SegmentStorage) -> SegmentStorage:
    await segment.hand_over()
    return await world.b.open()


async def moved_without_checkpoint_reuse(world: World, segment: SegmentStorage) -> SegmentStorage:
    segment = await moved(world, segment)
    await fill(segment, 3)
    await segment.exporter.stop()
    world.b.crash()
    return await world.b.open()


async def taken_over(world: World, segment: SegmentStorage) -> SegmentStorage:
    await segment.log.rotate()
    await segment.exporter.export_closed()
    return await world.b.open(accept_loss=True)


async def expire(segment: SegmentStorage) -> None:
    """Let retention delete every chunk, with all footers."""
    await segment.log.rotate()
    await segment.exporter.export_closed()
    await segment.apply_retention(RetentionPolicy(max_age_s=-1))
    assert segment.catalog.chunks == []


async def expired_and_crashed(world: World, segment: SegmentStorage) -> SegmentStorage:
    await expire(segment)
    return await crashed(world, segment)


async def expired_and_moved(world: World, segment: SegmentStorage) -> SegmentStorage:
    await expire(segment)
    return await moved(world, segment)


async def expired_and_moved_twice(world: World, segment: SegmentStorage) -> SegmentStorage:
    segment = await expired_and_moved(world, segment)
    await segment.hand_over()
    return await world.a.open()


async def expired_after_a_move(world: World, segment: SegmentStorage) -> SegmentStorage:
    """The new owner's only file has no footer yet."""
    segment = await moved(world, segment)
    await expire(segment)
    await fill(segment, 3)
    await segment.exporter.stop()
    world.b.crash()
    return await world.b.open()


async def expired_and_taken_over(world: World, segment: SegmentStorage) -> SegmentStorage:
    """As by a broker that restarts with an empty disk."""
    await expire(segment)
    return await world.b.open(accept_loss=True)


async def expired_and_swept(world: World, segment: SegmentStorage) -> SegmentStorage:
    await expire(segment)
    await segment.sweep()
    segment = await moved(world, segment)
    await segment.sweep()
    return await reopened_at(world.b, segment)


async def reopened_at(broker: Broker, segment: SegmentStorage) -> SegmentStorage:
    await segment.close()
    return await broker.start().open()


WAYS = [
    reopened,
    crashed,
    rotated,
    reclaimed,
    moved,
    moved_without_checkpoint_reuse,
    taken_over,
    expired_and_crashed,
    expired_and_moved,
    expired_and_moved_twice,
    expired_after_a_move,
    expired_and_taken_over,
    expired_and_swept,
]
