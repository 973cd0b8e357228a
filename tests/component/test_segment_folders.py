"""Folders of segments on a broker's disk, used by several tasks at the same time."""

from __future__ import annotations

import asyncio

from braid.broker.segment_folders import own_folder
from braid.metadata.memory import MemoryStore
from braid.model.names import SegmentName
from braid.storage.cache import HotCache
from braid.storage.context import StorageContext, StorageMode
from braid.storage.handles import FooterCache, ReadHandles
from braid.storage.history.manifest import segment_folder
from braid.testing.sim.disk import SimulatedDisk
from braid.testing.sim.loop import Simulation
from braid.testing.sim.objects import MemoryObjects

NAME = SegmentName.parse("segment://public/default/orders/0000-ffff-0")
CHUNK = f"{segment_folder(NAME.topic.path, NAME.descriptor)}/00000000000000000000-00000000000000000005-0000000001.chunk"


class SlowObjects(MemoryObjects):
    """The first deletion takes long."""

    slow_s = 10.0

    async def delete_below(self, prefix: str) -> None:
        slow_s, self.slow_s = self.slow_s, 0.0
        await asyncio.sleep(slow_s)
        await super().delete_below(prefix)


async def test_a_slow_look_at_an_empty_folder_deletes_no_chunk_that_came_after_a_later_look(
    simulation: Simulation,
) -> None:
    """A broker that copies its history asks again when the first answer does not come, and then sends chunks."""
    disk, objects = SimulatedDisk(simulation.random).mount(), SlowObjects()
    context = StorageContext(
        broker_id="a",
        disk=disk,
        folder="/a",
        store=MemoryStore(simulation.clock),
        objects=objects,
        mode=StorageMode.LOCAL,
        clock=simulation.clock,
        cache=HotCache(1_000),
        handles=ReadHandles(disk),
        footers=FooterCache(),
        preallocated=None,
        random=simulation.random,
    )
    first = asyncio.create_task(own_folder(context, NAME, 7))
    await asyncio.sleep(1)
    await own_folder(context, NAME, 7)
    await objects.create(CHUNK, [b"chunk"])
    await first
    assert [stat.name for stat in await objects.list("")] == [CHUNK]
