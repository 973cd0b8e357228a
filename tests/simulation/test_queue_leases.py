"""Leases of a queue while connections break and segments get other owners, with whole brokers in virtual time: a
message stays with the consumer that works on it, and no owner hands out anything after its own time."""

from __future__ import annotations

import asyncio

import pytest

from braid.testing.sim.loop import Simulation
from tests.kits.brokers import Brokers
from tests.kits.queues import numbers, program, queue_at, queue_of, send, served, take
from tests.kits.waiting import until

AWAY = ("a", "b", "c")


async def move_away(brokers: Brokers) -> None:
    source = await served(brokers)
    await brokers.move(0, next(each for each in AWAY if each != source))


# Extensions.


@pytest.mark.parametrize("event", ["cut", "move"])
async def test_an_extension_outlives_its_channel(simulation: Simulation, event: str) -> None:
    async with (
        queue_of(simulation, AWAY, messages=1, ack_timeout_ms=2_000) as (brokers, client),
        program(brokers, "worker") as worker_client,
        worker_client.queue_consumer("orders", "work", name="worker") as worker,
        client.queue_consumer("orders", "work", name="other") as other,
    ):
        (message,) = await take(worker, 1)
        await worker.extend(message, 600)
        if event == "move":
            await move_away(brokers)
        else:
            brokers.network.reset("worker", await served(brokers))
        await until(lambda: queue_at(brokers).counts().consumers == ("other", "worker"))
        assert await other.receive(timeout=60) is None, "it is leased for ten minutes"
        await worker.ack(message)
        assert queue_at(brokers).counts().ready == 0


# Owners whose time is over.


async def test_an_owner_whose_lease_is_over_hands_out_nothing(simulation: Simulation) -> None:
    """Another owner may have confirmed acks since. A process that was frozen finds its timers before that news."""
    async with (
        queue_of(simulation, messages=1, ack_timeout_ms=1_000) as (brokers, client),
        client.queue_consumer("orders", "work") as consumer,
    ):
        await take(consumer, 1)
        queue, holds = queue_at(brokers), True
        queue._may_confirm = lambda: holds
        holds = False
        await send(client, [1])
        assert await consumer.receive(timeout=10) is None, "a lease has run out, and a message is new"
        holds = True
        queue.pump()
        assert numbers(await take(consumer, 2)) == [0, 1]


# Channels that are refused, and answers that wait.


async def test_a_consumer_starts_when_a_broker_is_there_again(simulation: Simulation) -> None:
    async with queue_of(simulation, messages=1) as (brokers, client):
        brokers.kill("a")
        starting = asyncio.ensure_future(client.queue_consumer("orders", "work").start())
        await asyncio.sleep(5)
        await brokers.start("a")
        await starting
