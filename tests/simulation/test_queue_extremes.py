"""Queues of programs that say very much, or take very much, together: everything still fits into frames, files and
records."""

from __future__ import annotations

import asyncio
import random

import pytest

from braid.client.consuming import dead_letters
from braid.model.queue.events import MAX_REASON_CHARS
from braid.testing.sim.loop import Simulation
from tests.kits.queues import queue_at, queue_of, remaining, send, take

LONGEST = "ж" * MAX_REASON_CHARS
MANY = 12_000
"""Of messages with the longest reasons: more than one frame takes."""


async def test_long_reasons_of_many_messages_are_cut_and_take_no_other_answer_with_them(
    simulation: Simulation,
) -> None:
    async with queue_of(simulation, messages=1_001) as (_, client):
        async with client.queue_consumer("orders", "work", prefetch=2_000) as consumer:
            acked, *messages = await take(consumer, 1_001)
            returning = (consumer.nack(each, reason="a traceback " * 1_000) for each in messages)
            await asyncio.gather(consumer.ack(acked), *returning)
            again = await take(consumer, 1_000)
            assert {len(each.failure) for each in again} == {MAX_REASON_CHARS}
        assert await remaining(client) == list(range(1, 1_001))


async def test_a_reason_that_utf_8_cannot_write_takes_no_answer_with_it(simulation: Simulation) -> None:
    """Python reads names of files that are no text in this way, and errors quote them."""
    async with queue_of(simulation, messages=2) as (_, client), client.queue_consumer("orders", "work") as consumer:
        (first, other) = await take(consumer, 2)
        await asyncio.gather(consumer.nack(first, reason="no file \udcff"), consumer.ack(other))
        (again,) = await take(consumer, 1)
        assert again.failure == "no file ?"


async def test_more_reasons_than_one_frame_takes_go_in_several_both_ways(simulation: Simulation) -> None:
    async with queue_of(simulation) as (_, client):
        async with client.producer("orders") as producer:
            await producer.send_many([b"%d" % each for each in range(MANY)])
        async with client.queue_consumer("orders", "work", prefetch=MANY) as consumer:
            messages = await take(consumer, MANY)
            await asyncio.gather(*(consumer.nack(each, 1.0, f"{each.offset} {LONGEST}") for each in messages))
        await asyncio.sleep(2)
        async with client.queue_consumer("orders", "work", prefetch=MANY) as consumer:  # All of them are due together.
            again = await take(consumer, MANY)
            known = [each for each in again if each.failure]
            assert known
            assert all(each.failure == f"{each.offset} {LONGEST}"[:MAX_REASON_CHARS] for each in known)


async def test_a_segment_moves_though_very_many_messages_wait_each_until_its_own_time(simulation: Simulation) -> None:
    count = 100_000
    async with queue_of(simulation, ("a", "b")) as (brokers, client):
        async with client.producer("orders") as producer:
            await producer.send_many([b"%d" % each for each in range(count)])
        random_ = random.Random(1)
        async with client.queue_consumer("orders", "work", prefetch=count) as consumer:
            messages = await take(consumer, count)
            await asyncio.gather(*(consumer.nack(each, 3_600 + 36_000 * random_.random()) for each in messages))
        (other,) = {"a", "b"} - {brokers.owner(0)}
        await client.admin.move("orders", to=other)
        assert brokers.owner(0) == other
        returned = list(queue_at(brokers)._state.returned())
        assert (len(returned), {each.deliveries for each in returned}) == (count, {1})


async def test_a_program_hears_nothing_of_stale_answers_that_its_consumer_gave_itself(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead letter takes longer to be published than its lease lasts, so another consumer gets it, too."""
    publish = dead_letters.publish_once

    async def slowly(*arguments: object) -> None:
        await asyncio.sleep(1.5)
        await publish(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(dead_letters, "publish_once", slowly)
    async with queue_of(simulation) as (_, client):
        await client.admin.create_topic("buried")
        await client.admin.create_subscription(
            "orders", "careful", kind="queue", ack_timeout_ms=1_000, max_deliveries=1, dead_letter_topic="buried"
        )
        await send(client, [0])
        one = client.queue_consumer("orders", "careful")
        other = client.queue_consumer("orders", "careful")
        async with one, other:
            (message,) = await take(one, 1)
            await one.nack(message)
            assert await asyncio.gather(one.receive(timeout=5), other.receive(timeout=5)) == [None, None]  # type: ignore[comparison-overlap]
            await one.flush()
            await other.flush()
        (segment,) = (await client.admin.subscription("orders", "careful"))["segments"].values()
        assert segment["backlog"] == 0


async def test_a_message_that_waits_for_a_slow_program_does_not_count_as_delivered(simulation: Simulation) -> None:
    """Otherwise a consumer with a large prefetch makes dead letters of messages that no program has seen."""
    async with queue_of(simulation) as (brokers, client):
        await client.admin.create_topic("buried")
        await client.admin.create_subscription(
            "orders", "careful", kind="queue", ack_timeout_ms=1_000, max_deliveries=3, dead_letter_topic="buried"
        )
        await send(client, range(10))
        async with client.queue_consumer("orders", "careful", prefetch=10) as consumer:
            for _ in range(10):
                (message,) = await take(consumer, 1)
                assert message.redelivery_count == 0
                await consumer.extend(message, 5)
                await asyncio.sleep(1.5)  # The others wait here for longer than a lease.
                await consumer.ack(message)
        assert queue_at(brokers, subscription="careful").counts().dead_lettered == 0
