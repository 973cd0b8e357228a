"""A publish names the layout that it was routed by; the owner checks it each time, also on a route that it knows."""

from __future__ import annotations

import msgspec
import pytest

from braid.broker.broker import Broker
from braid.client.client import Client, connect
from braid.metadata import paths
from braid.metadata.store import Put
from braid.model.batch.encode import encode_batch
from braid.model.errors import StaleRoute
from braid.model.ids import LayoutEpoch, SegmentId
from braid.model.layout import HashRange, Layout, SegmentInfo, SegmentState
from braid.testing.sim.loop import Simulation
from braid.wire.operations import Kind, Published, Route, decode, encode
from tests.kits.control import ORDERS, Machine
from tests.kits.waiting import until


def split(layout: Layout, parent: int) -> Layout:
    """The layout after a segment was split in the middle."""
    old, epoch = layout.segment(parent), LayoutEpoch(layout.epoch + 1)
    first, second = layout.next_segment_id, SegmentId(layout.next_segment_id + 1)
    start, end = old.hash_range.start, old.hash_range.end
    ranges = {first: HashRange(start, (start + end) // 2), second: HashRange((start + end) // 2 + 1, end)}
    sealed = msgspec.structs.replace(old, state=SegmentState.SEALED, child_ids=(first, second), sealed_at_epoch=epoch)
    children = {
        child: SegmentInfo(child, hashes, parent_ids=(old.segment_id,), created_at_epoch=epoch)
        for child, hashes in ranges.items()
    }
    segments = layout.segments | {old.segment_id: sealed} | children
    return Layout(epoch, SegmentId(second + 1), segments)


class Wire:
    """One connection to the owner, which sends publishes with routes of its own choice."""

    def __init__(self, broker: Broker, client: Client) -> None:
        self.broker = broker
        self.client = client

    async def publish(self, segment: int, layout_epoch: int) -> int:
        topic_id = self.broker.segments.get(ORDERS.path, segment).topic_id
        link = await self.client.pool.any()
        route = encode(Route(ORDERS.path, topic_id, segment, layout_epoch))
        frame = await link.request(Kind.PUBLISH, route, [encode_batch([b"value"], now_us=0)])
        return decode(Published, frame.body).base_offset


async def test_a_layout_that_changes_ends_the_routes_of_the_one_before(simulation: Simulation) -> None:
    machine = Machine(simulation)
    broker = await machine.start()
    async with connect(
        "braid://machine:6660", network=machine.host, clock=simulation.clock, random=simulation.random
    ) as client:
        wire = Wire(broker, client)
        await client.admin.create_topic("orders", segments=2)
        for offset in range(2):
            assert await wire.publish(0, 0) == await wire.publish(1, 0) == offset
        topic = broker.topics.get(ORDERS.path)
        changed = msgspec.structs.replace(topic, layout=split(topic.layout, 1))
        await machine.store.txn([], [Put(paths.layout(ORDERS.path), changed.to_json())])
        await until(lambda: broker.topics.get(ORDERS.path).layout.epoch == 1)
        for segment in (0, 1):
            with pytest.raises(StaleRoute, match="has epoch 1"):
                await wire.publish(segment, 0)
        with pytest.raises(StaleRoute):
            await wire.publish(1, 1)
        assert [await wire.publish(0, 1), await wire.publish(0, 1)] == [2, 3]
        assert broker.segments.get(ORDERS.path, 1).end == 2
    await broker.close()
