"""What consumers have of a real broker at the end of a segment, on a failing disk, and when it has lost the segment."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest

from braid.broker.broker import Broker
from braid.broker.segments.segment_access import FindPositions, LocalAccess
from braid.client.client import Client, connect
from braid.client.consuming.stream import StreamConsumer
from braid.metadata import paths
from braid.model.errors import Fenced, LogDamaged, NotServing
from braid.model.ids import Offset
from braid.model.message import Message
from braid.model.stored_record import decode
from braid.model.subscription import Cursor
from braid.testing.sim.disk import NO_FAULTS, DiskFaults
from braid.testing.sim.loop import Simulation
from tests.kits.control import ORDERS, Machine, own
from tests.kits.storage import make_batch


@contextlib.asynccontextmanager
async def filled(simulation: Simulation) -> AsyncIterator[tuple[Machine, Broker, Client]]:
    """With ten records in the one segment of topic `orders`."""
    machine = Machine(simulation)
    machine.config = msgspec.structs.replace(machine.config, cache_bytes=0)  # Everything is read from the disk.
    async with running(machine) as broker, client_of(machine) as client:
        await client.admin.create_topic("orders", segments=1)
        async with client.producer("orders") as producer:
            await producer.send_many([b"%d" % number for number in range(10)])
        yield machine, broker, client


@contextlib.asynccontextmanager
async def running(machine: Machine) -> AsyncIterator[Broker]:
    broker = await machine.start()
    try:
        yield broker
    finally:
        await broker.close()


def client_of(machine: Machine) -> Client:
    simulation = machine.simulation
    return connect(
        "braid://machine:6660", network=machine.host, clock=simulation.clock, random=simulation.random, timeout=30.0
    )


async def receive(consumer: StreamConsumer, count: int) -> list[Message]:
    messages = [await consumer.receive(timeout=60) for _ in range(count)]
    return [message for message in messages if message is not None]


async def stored(machine: Machine, broker: Broker) -> int:
    descriptor = broker.segments.get(ORDERS.path, 0).name.descriptor
    entry = await machine.store.client("looker-on").get(paths.cursor(ORDERS.path, descriptor, "billing"))
    assert entry is not None
    return decode(Cursor, entry.value).offset


async def test_a_segment_that_has_ended_still_takes_acks_and_follows_a_seek(simulation: Simulation) -> None:
    async with filled(simulation) as (machine, broker, client):
        segment = broker.segments.get(ORDERS.path, 0)
        await segment.storage.log.seal()
        async with client.stream_consumer("orders", "billing", start="earliest") as consumer:
            messages = await receive(consumer, 10)
            (channel,) = segment._channels
            assert channel.finished
            await consumer.ack(messages[6])
            await consumer.flush_acks()
            assert await stored(machine, broker) == 7
            assert [*segment._channels] == [channel], "the same channel"
            await client.admin.seek("orders", "billing", {0: 4})
            assert [message.offset for message in await receive(consumer, 6)] == [4, 5, 6, 7, 8, 9]
        assert not segment._channels


async def test_a_checkpoint_consumers_channel_is_gone_when_the_segment_has_ended(simulation: Simulation) -> None:
    async with filled(simulation) as (_machine, broker, client):
        segment = broker.segments.get(ORDERS.path, 0)
        async with client.checkpoint_consumer("orders", start="earliest") as consumer:
            for _ in range(10):
                assert await consumer.receive(timeout=60) is not None
            assert segment._channels
            await segment.storage.log.seal()
            assert await consumer.receive(timeout=1) is None
            assert not segment._channels


async def test_a_consumer_hears_of_the_end_when_the_seal_is_durable(simulation: Simulation) -> None:
    """Were it lost in a crash, the log would go on, and the consumer would not look there again."""
    async with filled(simulation) as (_machine, broker, client):
        segment = broker.segments.get(ORDERS.path, 0)
        async with client.checkpoint_consumer("orders", start="earliest") as consumer:
            for _ in range(10):
                assert await consumer.receive(timeout=60) is not None
            (channel,) = segment._channels
            sealing = asyncio.create_task(segment.storage.log.seal())
            await asyncio.sleep(0)
            channel.pump()
            assert not channel.ended
            await sealing
            assert await consumer.receive(timeout=1) is None
            assert not segment._channels


async def test_a_segment_is_called_sealed_only_when_consumers_may_see_all_of_it(simulation: Simulation) -> None:
    """Who hears that it is sealed takes its end for the last one, and never reads what is confirmed later."""
    async with filled(simulation) as (_machine, broker, _client):
        segment = broker.segments.get(ORDERS.path, 0)
        segment.storage.append(make_batch(5))
        sealing = asyncio.create_task(segment.storage.log.seal())
        await asyncio.sleep(0)
        assert segment.storage.log.sealed
        told = await LocalAccess(segment).ask(FindPositions())
        assert (told.end, told.sealed) == (10, False)
        await sealing
        told = await LocalAccess(segment).ask(FindPositions())
        assert (told.end, told.sealed) == (15, True)


async def test_a_read_that_fails_is_tried_again(simulation: Simulation) -> None:
    async with filled(simulation) as (machine, _broker, client):
        machine.disk.faults = DiskFaults(read_failure=1.0)
        async with client.stream_consumer("orders", "billing", start="earliest") as consumer:
            assert await consumer.receive(timeout=5) is None
            machine.disk.faults = NO_FAULTS
            assert [message.offset for message in await receive(consumer, 10)] == [*range(10)]


async def test_records_that_are_damaged_end_their_consumer(simulation: Simulation) -> None:
    async with filled(simulation) as (machine, _broker, client):
        (path,) = [path for path in machine.disk.paths() if path.endswith(".wal")]
        content = machine.disk.content(path)
        machine.disk.flip(path, content.rindex(b"789") + 1, 0)
        async with client.stream_consumer("orders", "billing", start="earliest") as consumer:
            with pytest.raises(LogDamaged):
                await receive(consumer, 10)


async def test_a_segment_whose_cursors_are_fenced_is_not_served_any_more(simulation: Simulation) -> None:
    async with (
        filled(simulation) as (machine, broker, client),
        client.stream_consumer("orders", "billing", start="earliest") as consumer,
    ):
        await receive(consumer, 5)
        segment = broker.segments.get(ORDERS.path, 0)
        segment.cursors.advance("billing", Offset(5))
        await own(machine.store, segment.name, owner="broker-2", epoch=9)
        with pytest.raises(Fenced):
            await segment.cursors.flush()
        assert not segment.serving
        assert not segment._channels
        with pytest.raises(NotServing):
            broker.segments.get(ORDERS.path, 0)
