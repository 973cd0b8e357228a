"""What a replica that was elected stores of a queue before it opens the segment (broker/queues/evidence.py)."""

from __future__ import annotations

from typing import Any

import msgspec

from braid.broker.queues.evidence import gather
from braid.metadata import paths
from braid.metadata.memory import MemoryStore
from braid.metadata.store import Put
from braid.model.ids import Epoch, Offset
from braid.model.log.replication import LogPosition
from braid.model.names import SegmentName
from braid.model.ownership import Ownership
from braid.model.queue.events import QueueSnapshot, encode
from braid.model.stored_record import encode as stored
from braid.model.subscription import Cursor
from braid.storage.history.catalog import Frontier
from braid.storage.log import promise as promises
from braid.storage.log.promise import ReplicaMark
from braid.storage.queue_journal import folder_of, read_image
from braid.testing.sim.disk import SimulatedDisk
from braid.testing.sim.loop import Simulation

NAME = SegmentName.at("public/default/orders", "0000-ffff-0")
FOLDER = "/wal"
ELECTED = msgspec.structs.replace(
    Ownership.first("b", ("a", "b", "c"), 2), epoch=Epoch(2), elected=LogPosition(epoch=Epoch(1), end=Offset(35))
)


async def write_metadata(store: MemoryStore, in_chunks: int, end: Offset | None = None) -> None:
    cursor = Cursor(offset=Offset(0), epoch=Epoch(1), placement=1, queue=True)
    frontier = Frontier(
        epoch=Epoch(1), holder="a", begun=True, continues=Epoch(0), next_offset=Offset(in_chunks), writes=1, end=end
    )
    path, descriptor = NAME.topic.path, NAME.descriptor
    puts = [
        Put(paths.cursor(path, descriptor, "work"), stored(cursor)),
        Put(paths.current_chunk(path, descriptor), stored(frontier)),
    ]
    await store.txn([], puts)


async def settled_below(store: MemoryStore, disk: SimulatedDisk, record: Ownership = ELECTED) -> int | None:
    """Gather what two members know: all messages below 30 are settled. Return what this disk knows after that."""

    async def ask(_broker: str, _subscriptions: list[str]) -> dict[str, Any]:
        return {"member": True, "images": {"work": encode(QueueSnapshot(1, 30))}}

    await gather(store, disk, FOLDER, NAME, record, "b", ask)
    image = await read_image(disk, folder_of(FOLDER, "work"))
    return image.settled.base if image is not None else None


async def test_a_disk_that_was_lost_after_the_vote_keeps_nothing_of_messages_that_it_lacks(
    simulation: Simulation,
) -> None:
    store, disk = MemoryStore(simulation.clock), SimulatedDisk(simulation.random)
    await write_metadata(store, in_chunks=20)
    assert await settled_below(store, disk) is None, "I8: chunks have 20 of 35 messages, and this disk has none"
    await disk.make_folder(FOLDER)
    await promises.write(disk, FOLDER, ReplicaMark(promised=Epoch(2), member=True))
    assert await settled_below(store, disk) == 30


async def test_a_disk_that_was_lost_after_the_vote_is_told_of_messages_that_chunks_have(
    simulation: Simulation,
) -> None:
    store, disk = MemoryStore(simulation.clock), SimulatedDisk(simulation.random)
    await write_metadata(store, in_chunks=35)
    assert await settled_below(store, disk) == 30


async def test_an_owner_that_lost_its_disk_asks_what_was_settled_of_a_log_that_chunks_have(
    simulation: Simulation,
) -> None:
    store, disk = MemoryStore(simulation.clock), SimulatedDisk(simulation.random)
    await write_metadata(store, in_chunks=35, end=Offset(35))
    again = msgspec.structs.replace(ELECTED, elected=None, clean=False, ended_at=Offset(35))
    assert await settled_below(store, disk, again) == 30
