"""What a program sees of a queue consumer, with whole brokers in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from braid.testing.sim.loop import Simulation
from tests.kits.queues import numbers, queue_of, remaining, send, take, take_all


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
