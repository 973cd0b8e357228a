"""Everything opens when it is first used: consumers and producers without `async with`, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from braid.client.client import connect
from braid.client.consuming.checkpoint import CheckpointConsumer
from braid.model.errors import ClientClosed, ConnectFailed, InvalidArgument, NotServing, TopicNotFound
from braid.testing.sim.loop import Simulation
from braid.wire.operations import Join, Kind, Leave
from tests.kits.client_stream import connected, offsets, receive, with_records
from tests.kits.scripted_broker import ScriptedBroker
from tests.kits.waiting import until


async def test_a_stream_consumer_begins_with_the_first_receive(simulation: Simulation) -> None:
    async with connected(simulation, with_records(3)) as (broker, client):
        consumer = client.stream_consumer("orders", "billing", start="earliest")
        assert offsets(await receive(consumer, 3)) == [0, 1, 2]
        assert len(broker.got(Join)) == 1
        await consumer.close()
        assert len(broker.got(Leave)) == 1


async def test_a_stream_consumer_begins_with_the_first_step_of_a_loop(simulation: Simulation) -> None:
    async with connected(simulation, with_records(2)) as (_broker, client):
        async for message in client.stream_consumer("orders", "billing", start="earliest"):
            assert message.offset == 0
            break


async def test_a_checkpoint_consumer_begins_with_the_first_receive(simulation: Simulation) -> None:
    async with connected(simulation, with_records(3, per_batch=3)) as (_broker, client):
        consumer = client.checkpoint_consumer("orders", start="earliest")
        batch = await consumer.receive_batch(timeout=5)
        assert batch is not None
        assert len(batch) == 3
        saved = consumer.checkpoint()
        again = client.checkpoint_consumer("orders", start=saved)
        assert await again.receive(timeout=1) is None, "it continues after the three"


async def test_a_receive_that_times_out_while_the_consumer_begins_lets_it_begin(simulation: Simulation) -> None:
    async with connected(simulation, with_records(1)) as (broker, client):
        broker.refusals = {Kind.JOIN: [NotServing("not now")] * 20}
        consumer = client.stream_consumer("orders", "billing", start="earliest")
        began = asyncio.get_running_loop().time()
        assert await consumer.receive(timeout=0.5) is None
        assert asyncio.get_running_loop().time() - began == pytest.approx(0.5)
        assert await consumer.receive(timeout=0) is None
        joins = len(broker.got(Join))
        message = await consumer.receive()
        assert message is not None
        assert message.offset == 0
        assert joins < len(broker.got(Join)) == 21, "one session, however often the program asked"


@pytest.mark.parametrize("kind", ["stream", "checkpoint"])
async def test_a_consumer_that_cannot_begin_says_so_each_time(simulation: Simulation, kind: str) -> None:
    async with connected(simulation) as (_broker, client):
        consumer = (
            client.stream_consumer("unknown", "billing") if kind == "stream" else client.checkpoint_consumer("unknown")
        )
        for _ in range(2):
            with pytest.raises(TopicNotFound):
                await consumer.receive(timeout=5)
            with pytest.raises(TopicNotFound):
                await consumer.receive_batch(timeout=5)
            with pytest.raises(TopicNotFound):
                await anext(consumer)


async def test_a_consumer_that_is_closed_while_its_receive_begins_it_leaves_again(simulation: Simulation) -> None:
    async with connected(simulation) as (broker, client):
        consumer = client.stream_consumer("orders", "billing")
        receiving = asyncio.ensure_future(consumer.receive())
        await until(lambda: broker.got(Join))
        await consumer.close()
        with pytest.raises(ClientClosed):
            await receiving
        await until(lambda: broker.got(Leave))
        with pytest.raises(ClientClosed):
            await consumer.receive()


async def test_a_client_that_is_closed_ends_a_consumer_that_begins(simulation: Simulation) -> None:
    async with connected(simulation) as (broker, client):
        await client.routing.topic("public/default/orders")
        broker.silent = True
        receiving = [
            asyncio.ensure_future(consumer.receive())
            for consumer in (client.stream_consumer("orders", "billing"), client.checkpoint_consumer("orders"))
        ]
        await asyncio.sleep(0.1)
        await client.abandon()
        for each in receiving:
            with pytest.raises(ClientClosed):
                await each


async def test_what_cannot_wait_for_the_opening_names_the_line_to_write(simulation: Simulation) -> None:
    async with connected(simulation, ScriptedBroker()) as (_broker, client):
        with pytest.raises(InvalidArgument, match=r"await producer\.open\(\)"):
            client.producer("orders").submit(b"paid")
        consumer: CheckpointConsumer = client.checkpoint_consumer("orders")
        with pytest.raises(InvalidArgument, match=r"await consumer\.start\(\)"):
            consumer.checkpoint()


def test_a_client_that_is_used_in_a_second_loop_says_so() -> None:
    client = connect("braid://127.0.0.1:1", timeout=0.1)
    with pytest.raises(ConnectFailed):
        asyncio.run(client.admin.list_topics())
    with pytest.raises(InvalidArgument, match=r"in another event loop.+make one in each asyncio\.run"):
        asyncio.run(client.admin.list_topics())
    with pytest.raises(InvalidArgument, match="in another event loop"):
        asyncio.run(client.stream_consumer("orders", "billing").receive(timeout=5))
