"""An owner's log and a follower's copy of it, without brokers: what the owner appends, and what is sent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from braid.model.ids import Epoch, Offset
from braid.model.log.replication import LogPosition
from braid.model.topic import Durability
from braid.storage.frames import LogFrames
from braid.storage.history.catalog import Catalog
from braid.storage.log.log import Log
from braid.storage.replica import ReplicaStorage
from braid.storage.segment import SegmentStorage
from tests.kits.storage import DESCRIPTOR, SMALL, TOPIC, Broker, make_batch

REPLICATED = msgspec.structs.replace(SMALL, durability=Durability.REPLICATED)


async def open_replica(broker: Broker) -> ReplicaStorage:
    return await ReplicaStorage.open(broker.context, TOPIC, DESCRIPTOR, REPLICATED)


def at(epoch: int, end: int, *, sealed: bool = False) -> LogPosition:
    return LogPosition(epoch=Epoch(epoch), end=Offset(end), sealed=sealed)


async def open_owner(
    broker: Broker,
    replicate: Callable[[Log, Catalog], Awaitable[None]] | None = None,
    *,
    elected: LogPosition | None = None,
) -> SegmentStorage:
    async def alone(log: Log, catalog: Catalog) -> None:
        """The test moves the watermark."""

    broker.world.epoch += 1
    return await SegmentStorage.open(
        broker.context,
        TOPIC,
        DESCRIPTOR,
        Epoch(broker.world.epoch),
        REPLICATED,
        elected=elected,
        replicate=replicate or alone,
    )


async def send(owner: SegmentStorage, broker: Broker, replica: ReplicaStorage, *, pieces: int = 1_000) -> LogPosition:
    """Send what the copy does not have, and say how far its disk has come."""
    frames = LogFrames(owner.log, broker.context.handles)
    place = await frames.after(replica.position)
    assert place is not None
    held = replica.position
    for _ in range(pieces):
        piece = await frames.read(place, 700)
        if piece is None:
            break
        held = await replica.held(replica.apply(owner.log.epoch, piece.place.file_base, bytearray(piece.data)))
        place = piece.next
    return held


async def append(owner: SegmentStorage, count: int, *, producer: int = 0, sequence: int = 0) -> None:
    for number in range(count):
        owner.append(make_batch(producer=producer, sequence=sequence + number if producer else 0))
    await owner.log.flush()
