"""Calls that wait for messages of a queue: the order in which they get them, and how they end. With whole brokers in
virtual time."""

from __future__ import annotations

import asyncio

import pytest

from braid.model.errors import ClientClosed
from braid.model.message import QueueMessage
from braid.testing.sim.loop import Simulation
from tests.kits.queues import numbers, queue_of, send, take, take_all


def number(message: QueueMessage | None) -> int:
    assert message is not None
    return int(message.value)


async def test_messages_come_in_the_order_of_their_segment(simulation: Simulation) -> None:
    async with queue_of(simulation, messages=50) as (_, client), client.queue_consumer("orders", "work") as consumer:
        assert [number(each) for each in await take(consumer, 50)] == list(range(50))


async def test_calls_that_wait_get_messages_in_the_order_in_which_they_began(simulation: Simulation) -> None:
    async with queue_of(simulation) as (_, client), client.queue_consumer("orders", "work") as consumer:
        waiting = []
        for _ in range(3):
            waiting.append(asyncio.ensure_future(consumer.receive()))
            await asyncio.sleep(1)
        assert not any(each.done() for each in waiting)
        for sent in range(3):
            await send(client, [sent])
            assert number(await waiting[sent]) == sent
            assert not any(each.done() for each in waiting[sent + 1 :])


async def test_a_call_that_was_cancelled_takes_no_message_with_it(simulation: Simulation) -> None:
    async with queue_of(simulation) as (_, client), client.queue_consumer("orders", "work") as consumer:
        given_up = asyncio.ensure_future(consumer.receive())
        await asyncio.sleep(1)
        given_up.cancel()
        await asyncio.wait([given_up])
        await send(client, [0])
        assert number(await consumer.receive(timeout=10)) == 0
        waiting = [asyncio.ensure_future(consumer.receive()) for _ in range(2)]
        await asyncio.sleep(1)
        await send(client, [1])
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert [each.done() for each in waiting] == [True, False]
        waiting[1].cancel()
        await send(client, [2])
        assert number(await consumer.receive(timeout=10)) == 2


async def test_a_message_that_comes_around_the_end_of_a_timeout_comes_once(simulation: Simulation) -> None:
    async with queue_of(simulation) as (_, client), client.queue_consumer("orders", "work") as consumer:
        in_time = []
        for sent in range(60):
            receiving = asyncio.ensure_future(consumer.receive(timeout=sent * 5e-4))
            await send(client, [sent])
            message = await receiving
            in_time.append(message is not None)
            assert number(message or await consumer.receive(timeout=10)) == sent
        assert set(in_time) == {True, False}
        assert await consumer.receive(timeout=10) is None


async def test_receive_many_returns_what_is_here_and_no_more_than_was_asked_for(simulation: Simulation) -> None:
    async with queue_of(simulation, messages=10) as (_, client), client.queue_consumer("orders", "work") as consumer:
        assert numbers(await take(consumer, 1)) == [0]
        await asyncio.sleep(1)  # Until the others are here.
        assert numbers(await consumer.receive_many(3, timeout=10)) == [1, 2, 3]
        assert numbers(await consumer.receive_many(100, timeout=10)) == [4, 5, 6, 7, 8, 9]
        later = asyncio.ensure_future(consumer.receive_many(100))
        await asyncio.sleep(1)
        assert not later.done()
        await send(client, [10])
        assert numbers(await later) == [10], "it waits for the first message only"


@pytest.mark.parametrize("whole_client", [False, True], ids=["consumer", "client"])
async def test_closing_ends_the_calls_that_wait_and_refuses_others(simulation: Simulation, whole_client: bool) -> None:
    async with queue_of(simulation) as (_, client):
        consumer = client.queue_consumer("orders", "work")
        waiting = [asyncio.ensure_future(consumer.receive()) for _ in range(2)]
        await asyncio.sleep(1)
        await (client if whole_client else consumer).close()
        for each in waiting:
            with pytest.raises(ClientClosed):
                await asyncio.wait_for(each, 10)
        with pytest.raises(ClientClosed):
            await consumer.receive(timeout=1)


async def test_each_segment_may_send_its_part_of_the_prefetch_and_goes_on_when_messages_are_taken(
    simulation: Simulation,
) -> None:
    async with (
        queue_of(simulation, messages=400, segments=4) as (_, client),
        client.queue_consumer("orders", "work", prefetch=40) as consumer,
    ):
        await take(consumer, 1)
        await asyncio.sleep(1)
        here = [each.message.segment for each in consumer._buffer]
        assert sorted({segment: here.count(segment) for segment in here}.values()) == [9, 10, 10, 10]
        assert len(await take_all(consumer, ack=True)) == 399
