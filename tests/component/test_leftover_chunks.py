"""When chunks of a segment that others serve may go from a broker's own disk."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from braid.broker.segments.leftover_chunks import Copies
from braid.cluster.owners import Owners
from braid.metadata import paths
from braid.metadata.memory import MemoryStore
from braid.metadata.store import Put
from braid.metadata.view import View
from braid.model.ids import Epoch, Offset, Revision
from braid.model.names import SegmentName
from braid.model.ownership import Move, Ownership
from braid.storage.cache import HotCache
from braid.storage.context import StorageContext, StorageMode
from braid.storage.handles import FooterCache, ReadHandles
from braid.storage.history.catalog import ChunkDescriptor
from braid.storage.history.manifest import segment_folder
from braid.storage.history.producer_objects import producers_name
from braid.testing.sim.disk import SimulatedDisk
from braid.testing.sim.loop import Simulation, run_simulation
from braid.testing.sim.objects import MemoryObjects
from tests.kits.waiting import until

NAME = SegmentName.parse("segment://public/default/orders/0000-ffff-0")
FOLDER = segment_folder(NAME.topic.path, NAME.descriptor)
CHUNK = "00000000000000000000-00000000000000000005-0000000001.chunk"
STRANGER = "00000000000000000005-00000000000000000009-0000000001.chunk"

SERVING = Ownership.first("b").serving(("b",))
MOVING = SERVING.moving(Move(to="a"))


class World:
    def __init__(self, simulation: Simulation, objects: MemoryObjects | None = None) -> None:
        self.store = MemoryStore(simulation.clock)
        self.objects = objects or MemoryObjects()
        self.view = View(self.store)
        self.owners = Owners(self.view)
        disk = SimulatedDisk(simulation.random).mount()
        self.copies = Copies(
            StorageContext(
                broker_id="a",
                disk=disk,
                folder="/a",
                store=self.store,
                objects=self.objects,
                mode=StorageMode.LOCAL,
                clock=simulation.clock,
                cache=HotCache(1_000),
                handles=ReadHandles(disk),
                footers=FooterCache(),
                preallocated=None,
                random=simulation.random,
            ),
            self.owners,
        )

    async def start(self, record: Ownership) -> None:
        for leaf in (CHUNK, STRANGER):
            await self.objects.create(f"{FOLDER}/{leaf}", [b"chunk"])
        descriptor = ChunkDescriptor(Offset(0), Offset(5), Epoch(1), CHUNK, 5, 5, 0, 0, 0, 0)
        chunk = paths.chunk(NAME.topic.path, NAME.descriptor, descriptor.base_offset)
        await self.store.txn([], [Put(chunk, _json(descriptor))])
        await self.put(record)
        await self.view.load()
        await self.copies.start()

    async def put(self, record: Ownership) -> Revision:
        key = paths.ownership(NAME.topic.path, NAME.descriptor)
        return (await self.store.txn([], [Put(key, record.to_json())])).revision

    async def here(self) -> list[str]:
        return [stat.name.rpartition("/")[2] for stat in await self.objects.list(FOLDER)]


def _json(descriptor: ChunkDescriptor) -> bytes:
    return msgspec.json.encode(descriptor)


@pytest.mark.parametrize(
    "record",
    [
        Ownership.first("b"),
        Ownership.first("a").serving(("a",)),
        MOVING,
        SERVING.moving(Move()),
        MOVING.draining(),
        MOVING.draining().sealed(("b", "a")),
        MOVING.draining().sealed(("b", "a")).assigned("a"),
        MOVING.draining().sealed(("b", "a")).assigned("b"),
    ],
    ids=["assigned", "ours", "coming", "leaving", "draining", "sealed", "given to us", "given back"],
)
def test_they_stay_while_this_disk_may_be_the_one_that_goes_on(record: Ownership) -> None:
    async def main(simulation: Simulation) -> None:
        world = World(simulation)
        await world.start(record)
        world.copies.left(NAME)
        await asyncio.sleep(10)
        assert await world.here() == [CHUNK, STRANGER]
        await world.copies.stop()
        await world.view.stop()

    run_simulation(1, main)


async def test_what_the_catalog_names_goes_when_another_broker_serves_and_what_it_does_not_name_stays(
    simulation: Simulation,
) -> None:
    world = World(simulation)
    await world.start(MOVING)
    await world.put(SERVING)
    await until(lambda: not world.copies._here)
    assert await world.here() == [STRANGER]
    await world.copies.stop()
    await world.view.stop()


async def test_producer_tables_go_with_the_chunks_also_those_that_the_owner_has_replaced(
    simulation: Simulation,
) -> None:
    world = World(simulation)
    await world.objects.create(f"{FOLDER}/{producers_name(5, 1)}", [b"table"])
    await world.start(MOVING)
    await asyncio.sleep(10)
    assert producers_name(5, 1) in await world.here()
    await world.put(SERVING)
    await until(lambda: not world.copies._here)
    assert await world.here() == [STRANGER]
    await world.copies.stop()
    await world.view.stop()


async def test_a_broker_that_hears_late_of_a_move_keeps_what_the_owner_counts_on(simulation: Simulation) -> None:
    """Its view still shows the record from before the wish, when the owner copies to it."""
    world = World(simulation)
    await world.start(SERVING)
    await until(lambda: not world.copies._here)
    await world.objects.create(f"{FOLDER}/{CHUNK}", [b"chunk"])
    known = world.owners.known(NAME)
    assert known is not None
    world.copies.count_on(NAME, Revision(known.revision + 1))
    world.copies.left(NAME)
    await asyncio.sleep(10)
    assert CHUNK in await world.here()
    await world.put(MOVING)
    await asyncio.sleep(10)
    assert CHUNK in await world.here()
    await world.put(MOVING.kept("it was given up"))
    await until(lambda: not world.copies._here)
    assert CHUNK not in await world.here()
    await world.copies.stop()
    await world.view.stop()


class SlowDeletion(MemoryObjects):
    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()

    async def delete(self, name: str) -> None:
        self.begun.set()
        await self.go_on.wait()
        await super().delete(name)


async def test_whoever_counts_on_what_lies_here_is_told_of_it_when_no_removal_is_under_way(
    simulation: Simulation,
) -> None:
    world = World(simulation, objects := SlowDeletion())
    await world.start(SERVING)
    await objects.begun.wait()
    world.copies.count_on(NAME, await world.put(MOVING))
    asking = asyncio.create_task(world.copies.settled(NAME))
    await asyncio.sleep(10)
    assert not asking.done()
    objects.go_on.set()
    await asking
    assert NAME in world.copies._here
    await world.copies.stop()
    await world.view.stop()


async def test_nothing_is_removed_by_a_broker_that_has_stopped(simulation: Simulation) -> None:
    world = World(simulation)
    await world.start(MOVING)
    await world.copies.stop()
    await world.view.caught_up(await world.put(SERVING))
    world.copies.left(NAME)
    await asyncio.sleep(10)
    assert await world.here() == [CHUNK, STRANGER]
    await world.view.stop()
