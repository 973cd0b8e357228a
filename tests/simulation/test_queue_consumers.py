"""What a program sees of a queue consumer, with whole brokers in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from braid.client.client import Client
from braid.client.consuming.queue import QueueConsumer
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import Brokers
from tests.kits.queues import numbers, program, queue_at, queue_of, remaining, send, take, take_all


async def test_a_message_has_its_key_and_headers_and_its_consumer_has_names(simulation: Simulation) -> None:
    async with queue_of(simulation) as (_, client):
        await send(client, [7], headers={"colour": b"red"})
        async with client.queue_consumer("orders", "work", name="painter") as consumer:
            (message,) = await take(consumer, 1)
            assert (message.value, message.key, message.headers) == (b"7", b"7", {"colour": b"red"})
            assert (consumer.topic, consumer.subscription, consumer.name) == (
                "public/default/orders",
                "work",
                "painter",
            )


async def test_receive_returns_none_when_nothing_comes_in_time(simulation: Simulation) -> None:
    async with queue_of(simulation) as (_, client), client.queue_consumer("orders", "work") as consumer:
        before = asyncio.get_running_loop().time()
        assert await consumer.receive(timeout=2) is None
        assert asyncio.get_running_loop().time() - before == pytest.approx(2)
        assert await consumer.receive_many(10, timeout=1) == []


@pytest.mark.parametrize(("start", "found"), [("earliest", [0, 1, 2, 3]), ("latest", [2, 3])])
async def test_a_queue_begins_at_either_end(simulation: Simulation, start: str, found: list[int]) -> None:
    async with queue_of(simulation, messages=2) as (_, client):
        await client.admin.create_subscription("orders", "late", kind="queue", start=start)
        await send(client, [2, 3])
        async with client.queue_consumer("orders", "late") as consumer:
            assert numbers(await take_all(consumer, ack=True)) == found


async def test_acks_one_by_one_cover_all_segments_and_the_rest_comes_to_the_next_consumer(
    simulation: Simulation,
) -> None:
    async with queue_of(simulation, messages=60, segments=4) as (_, client):
        async with client.queue_consumer("orders", "work") as consumer:
            messages = await take(consumer, 60)
            assert {message.segment for message in messages} == {0, 1, 2, 3}
            for message in messages[::2]:
                await consumer.ack(message)
        assert await remaining(client) == numbers(messages[1::2])
        assert await remaining(client) == []


async def test_dead_letters_of_all_segments_keep_their_keys_and_name_their_origin(simulation: Simulation) -> None:
    async with queue_of(simulation, segments=4) as (_, client):
        await client.admin.create_topic("buried", segments=2)
        await client.admin.create_subscription(
            "orders", "careful", kind="queue", max_deliveries=1, dead_letter_topic="buried"
        )
        await client.admin.create_subscription("buried", "graves", kind="queue")
        await send(client, range(20), headers={"colour": b"red"})
        places = {}
        async with client.queue_consumer("orders", "careful") as consumer:
            for message in await take(consumer, 20):
                places[message.key] = (message.segment, message.offset)
                await consumer.nack(message, reason="never")
            assert await consumer.receive(timeout=10) is None
        async with client.queue_consumer("buried", "graves") as graves:
            letters = await take_all(graves, ack=True)
        assert numbers(letters) == list(range(20))
        assert {segment for segment, _ in places.values()} == {0, 1, 2, 3}
        for letter in letters:
            origin = {name.removeprefix("braid-dead-letter-"): value.decode() for name, value in letter.headers.items()}
            assert (int(origin["segment"]), int(origin["offset"])) == places[letter.key]
            assert (origin["topic"], origin["subscription"]) == ("public/default/orders", "careful")
            assert (origin["deliveries"], origin["reason"], origin["colour"]) == ("1", "never", "red")


async def test_what_a_hung_consumer_does_not_answer_goes_to_an_idle_one(simulation: Simulation) -> None:
    async with queue_of(simulation, messages=20) as (_, client):
        await client.admin.create_subscription("orders", "quick", kind="queue", ack_timeout_ms=1_000)
        async with (
            client.queue_consumer("orders", "quick", name="hung", prefetch=10) as hung,
            client.queue_consumer("orders", "quick", name="idle", prefetch=10) as idle,
        ):
            await take(hung, 10)
            assert numbers(await take_all(idle, ack=True)) == list(range(20)), "one turn each, and none in vain"


async def test_prefetch_bounds_what_a_consumer_has_of_all_generations_of_segments(simulation: Simulation) -> None:
    async with queue_of(simulation, messages=400) as (brokers, client):
        consumer = client.queue_consumer("orders", "work", prefetch=100)
        async with consumer:
            await take(consumer, 1)
            for segment in (0, 1, 3):
                await client.admin.split("orders", segment)
                await send(client, range(400))
                await asyncio.sleep(2)
            assert sum(leased(brokers).values()) <= 100 + 6, "the first segment has 100, each other one has one"
            for message in await take(consumer, 95):
                await consumer.ack(message)
            await asyncio.sleep(2)
            assert set(leased(brokers).values()) == {100 // 7}, "each of the seven segments has its part"
            assert len(await take_all(consumer, ack=True)) > 1_000


def leased(brokers: Brokers) -> dict[int, int]:
    found = [each for broker in brokers.running.values() for each in broker.segments.of_topic("public/default/orders")]
    return {owned.name.id: sum(queue.counts().leased for queue in owned.queues.all()) for owned in found}


@contextlib.asynccontextmanager
async def burying(simulation: Simulation) -> AsyncIterator[tuple[Brokers, Client, QueueConsumer]]:
    """A consumer whose program `worker` does not reach the broker of the dead-letter topic. It has settled message 0,
    and has message 1 as a dead letter. Also another client."""
    async with queue_of(simulation, ("a", "b")) as (brokers, client):
        await client.admin.create_topic("buried")
        there = "b" if brokers.owner(0) == "a" else "a"
        await client.admin.move("buried", to=there)
        await client.admin.create_subscription(
            "orders", "careful", kind="queue", max_deliveries=1, dead_letter_topic="buried", ack_timeout_ms=1_000
        )
        await send(client, [0, 1])
        async with (
            program(brokers, "worker") as worker,
            worker.queue_consumer("orders", "careful", prefetch=1) as consumer,
        ):
            await consumer.ack((await take(consumer, 1))[0])
            (message,) = await take(consumer, 1)
            brokers.network.cut("worker", there)
            await consumer.nack(message)
            assert await consumer.receive(timeout=0.5) is None
            yield brokers, client, consumer


async def test_a_dead_letter_whose_publish_outlives_its_lease_is_settled_under_the_next_one(
    simulation: Simulation,
) -> None:
    """The message comes again while it is on its way to the dead-letter topic."""
    async with burying(simulation) as (brokers, client, consumer):
        assert await consumer.receive(timeout=5) is None
        brokers.network.heal()
        await consumer.flush()
        assert queue_at(brokers, subscription="careful").counts().dead_lettered == 1
        assert (await client.admin.topic_stats("buried"))["segments"]["0"]["endOffset"] == 1


async def test_a_dead_letter_that_another_consumer_settles_is_no_failure_of_the_program(simulation: Simulation) -> None:
    """The program has not seen it, so nothing that it did is stale."""
    async with burying(simulation) as (brokers, client, consumer):
        async with client.queue_consumer("orders", "careful") as other:
            assert await other.receive(timeout=5) is None
        brokers.network.heal()
        await consumer.flush()
        assert (await client.admin.topic_stats("buried"))["segments"]["0"]["endOffset"] == 1


async def test_a_dead_letter_that_is_published_after_a_seek_settles_nothing(simulation: Simulation) -> None:
    """The seek has made the message new, and no consumer has it yet."""
    async with burying(simulation) as (brokers, client, consumer):
        await client.admin.seek("orders", "careful", to="earliest")
        (first,) = await take(consumer, 1)
        brokers.network.heal()
        await consumer.flush()
        await consumer.ack(first)
        (message,) = await take(consumer, 1)
        assert (numbers([first, message]), message.redelivery_count) == ([0, 1], 0)
