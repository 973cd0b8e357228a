"""A publish is judged by its segment's state and range, each time, also on a route that the connection knows."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest

from braid.broker.broker import Broker
from braid.broker.connections.questions import MAX_STORED
from braid.client.client import Client, connect
from braid.metadata import paths
from braid.metadata.store import Put
from braid.model.batch.encode import encode_batch
from braid.model.errors import InvalidArgument, NotServing, SegmentSealed, StaleRoute, TopicNotFound
from braid.model.ids import SegmentId
from braid.model.layout import Layout
from braid.model.transition import plan_split
from braid.testing.sim.loop import Simulation
from braid.wire.operations import Kind, Published, Route, Stored, StoredRequest, decode, encode
from tests.kits.control import ORDERS, Machine
from tests.kits.waiting import until


def split(layout: Layout, parent: int) -> Layout:
    """The layout after a segment was split in the middle."""
    plan, first = plan_split(layout, parent), layout.next_segment_id
    reserved = msgspec.structs.replace(layout, next_segment_id=SegmentId(first + 2))
    return reserved.replaced(plan.parents, {SegmentId(first + each): hashes for each, hashes in enumerate(plan.ranges)})


class Wire:
    """One connection to the owner, which sends publishes with routes of its own choice."""

    def __init__(self, machine: Machine, broker: Broker, client: Client) -> None:
        self.machine = machine
        self.broker = broker
        self.client = client

    @property
    def topic_id(self) -> int:
        return self.broker.topics.get(ORDERS.path).id

    async def publish(self, segment: int, layout_epoch: int, producer: int = 0, sequence: int = 0) -> Published:
        link = await self.client.pool.any()
        route = encode(Route(ORDERS.path, self.topic_id, segment, layout_epoch))
        batch = encode_batch([b"value"], now_us=0, producer_id=producer, first_sequence=sequence)
        frame = await link.request(Kind.PUBLISH, route, [batch])
        return decode(Published, frame.body)

    async def stored(self, segment: int, *producers: int, topic_id: int | None = None) -> Stored:
        link = await self.client.pool.any()
        request = StoredRequest(ORDERS.path, self.topic_id if topic_id is None else topic_id, segment, producers)
        return await link.ask(Kind.STORED, encode(request), Stored)

    async def write(self, layout: Layout) -> None:
        """Change the topic's layout by hand."""
        changed = msgspec.structs.replace(self.broker.topics.get(ORDERS.path), layout=layout)
        await self.machine.store.txn([], [Put(paths.layout(ORDERS.path), changed.to_json())])
        await until(lambda: self.broker.topics.get(ORDERS.path).layout.epoch == layout.epoch)

    @property
    def layout(self) -> Layout:
        return self.broker.topics.get(ORDERS.path).layout


@contextlib.asynccontextmanager
async def publishing(simulation: Simulation) -> AsyncIterator[Wire]:
    machine = Machine(simulation)
    broker = await machine.start()
    async with connect(
        "braid://machine:6660", network=machine.host, clock=simulation.clock, random=simulation.random
    ) as client:
        await client.admin.create_topic("orders", segments=2)
        yield Wire(machine, broker, client)
    await broker.close()


async def test_a_route_of_any_layout_counts_as_long_as_its_segment_is_active(simulation: Simulation) -> None:
    async with publishing(simulation) as wire:
        for offset in range(2):
            for segment in (0, 1):
                assert (await wire.publish(segment, 0)).base_offset == offset
        await wire.broker.segments.get(ORDERS.path, 1).storage.end_log()
        await wire.write(split(wire.layout, 1))
        assert [(await wire.publish(0, epoch)).base_offset for epoch in (0, 1, 0, 2)] == [2, 3, 4, 5]
        await until(lambda: len(wire.broker.segments.of_topic(ORDERS.path)) == 4)
        assert [(await wire.publish(2, epoch)).base_offset for epoch in (1, 0)] == [0, 1]
        for epoch in (0, 1):
            with pytest.raises(SegmentSealed):
                await wire.publish(1, epoch)
        assert wire.broker.segments.get(ORDERS.path, 1).end == 2


async def test_a_sealed_segment_whose_log_has_not_ended_takes_nothing(simulation: Simulation) -> None:
    async with publishing(simulation) as wire:
        await wire.publish(1, 0)
        await wire.write(split(wire.layout, 1))
        for epoch in (0, 1):
            with pytest.raises(StaleRoute, match="has epoch 1"):
                await wire.publish(1, epoch)
        assert wire.broker.segments.get(ORDERS.path, 1).end == 1


async def test_a_child_takes_nothing_before_the_layout_has_it(simulation: Simulation) -> None:
    async with publishing(simulation) as wire:
        for segment in (2, 3):
            with pytest.raises(NotServing, match="not in the layout"):
                await wire.publish(segment, 1)
            with pytest.raises(NotServing, match="not in the layout"):
                await wire.stored(segment, 7)


async def test_an_ended_segment_answers_retries_and_says_of_other_batches_that_they_are_not_stored(
    simulation: Simulation,
) -> None:
    async with publishing(simulation) as wire:
        for sequence in range(2):
            await wire.publish(1, 0, producer=7, sequence=sequence)
        assert await wire.stored(1, 7, 8) == Stored((2, -1), False, (0, -1))
        await wire.broker.segments.get(ORDERS.path, 1).storage.end_log()
        for later in (False, True):  # Before and after the layout says so; on a route that the connection knows.
            assert await wire.publish(1, 0, producer=7, sequence=1) == Published(1, True)
            with pytest.raises(SegmentSealed) as refusal:
                await wire.publish(1, 0, producer=7, sequence=2)
            assert (refusal.value.end, refusal.value.next_sequence) == (2, 2)
            with pytest.raises(SegmentSealed) as refusal:
                await wire.publish(1, 0, producer=8)
            assert (refusal.value.end, refusal.value.next_sequence) == (2, -1)
            assert await wire.stored(1, 7, 8) == Stored((2, -1), True, (0, -1))
            if not later:
                await wire.write(split(wire.layout, 1))


async def test_stored_names_its_topic_and_asks_for_a_bounded_number_of_producers(simulation: Simulation) -> None:
    async with publishing(simulation) as wire:
        assert await wire.stored(0) == Stored((), False)
        with pytest.raises(TopicNotFound, match="created again"):
            await wire.stored(0, 7, topic_id=wire.topic_id + 1)
        with pytest.raises(InvalidArgument, match="1001 producers"):
            await wire.stored(0, *range(MAX_STORED + 1))
