"""What an owner does not believe, does not keep, and does not carry over to another place."""

from __future__ import annotations

import asyncio

from braid.broker.queues.segment_queue import MAX_DELAY_US
from braid.client.client import Client
from braid.client.consuming.dead_letters import one_row, publish_once
from braid.model.queue.events import MAX_REASON_CHARS
from braid.testing.sim.disk import DiskFaults
from braid.testing.sim.loop import Simulation
from braid.wire.operations import QueueAnswer
from tests.kits.queues import queue_at, queue_of, send, take
from tests.kits.waiting import until


async def test_a_delay_and_a_reason_of_any_client_are_cut(simulation: Simulation) -> None:
    async with (
        queue_of(simulation, messages=1) as (brokers, client),
        client.queue_consumer("orders", "work") as consumer,
    ):
        (message,) = await take(consumer, 1)
        queue = queue_at(brokers)
        now = simulation.clock.now_us()
        _, stale = queue.answer(QueueAnswer(1, (), ((0, message.lease, (1 << 64) - 1, True, "x" * 10_000),)))
        (returned,) = queue.snapshot().returned
        assert stale == []
        assert returned.not_before <= now + MAX_DELAY_US + 1_000_000
        assert returned.reason == "x" * MAX_REASON_CHARS


async def test_an_owner_remembers_nothing_of_consumers_that_are_gone(simulation: Simulation) -> None:
    async with queue_of(simulation, messages=3) as (brokers, client):
        for _ in range(5):
            async with client.queue_consumer("orders", "work") as consumer:
                await take(consumer, 3)
        await until(lambda: not queue_at(brokers).counts().consumers)
        assert not queue_at(brokers)._state._held


async def test_acks_that_a_disk_takes_after_a_seek_do_not_move_the_cursor(simulation: Simulation) -> None:
    """The subscription was set back meanwhile, and these messages are new again."""
    async with queue_of(simulation, messages=10) as (brokers, client):
        consumer = client.queue_consumer("orders", "work")
        messages = await take(consumer, 10)
        brokers.disks["a"].faults = DiskFaults(sync_s=(1.0, 1.0))
        for message in messages[:5]:
            consumer.submit_ack(message)
        await asyncio.sleep(0.1)
        await client.admin.seek("orders", "work", "earliest")
        await asyncio.sleep(10)
        await consumer.end()
        (segment,) = (await client.admin.subscription("orders", "work"))["segments"].values()
        assert segment["offset"] == 0


async def test_leases_have_other_numbers_after_a_seek(simulation: Simulation) -> None:
    """A late answer to a message of before would settle a message that is new again."""
    async with queue_of(simulation, messages=5) as (_, client), client.queue_consumer("orders", "work") as consumer:
        before = {message.lease for message in await take(consumer, 5)}
        await client.admin.seek("orders", "work", "earliest")
        after = {message.lease for message in await take(consumer, 5)}
        assert max(before) < min(after)


async def test_a_lease_lasts_as_long_as_it_should(simulation: Simulation) -> None:
    async with (
        queue_of(simulation, ack_timeout_ms=30_000) as (brokers, client),
        client.queue_consumer("orders", "work") as consumer,
    ):
        for number in range(5):  # At different moments of a step.
            began = simulation.clock.monotonic()
            await send(client, [number])
            (message,) = await take(consumer, 1)
            assert queue_at(brokers)._state._leased[message.offset].deadline >= (began + 30) * 1e6
            await asyncio.sleep(0.037)


async def bury(client: Client) -> None:
    """Let the first message of a queue become a dead letter, and wait until it is settled."""
    async with client.queue_consumer("orders", "careful") as consumer:
        (message,) = await take(consumer, 1)
        await consumer.nack(message)

        async def is_settled() -> bool:
            found = await client.admin.subscription("orders", "careful")
            return bool(found["backlog"] == 0)

        await until(is_settled)


async def buried(client: Client) -> None:
    await client.admin.create_topic("buried")
    await client.admin.create_subscription(
        "orders", "careful", kind="queue", max_deliveries=1, dead_letter_topic="buried"
    )


async def test_a_dead_letter_that_another_consumer_has_stored_otherwise_counts(simulation: Simulation) -> None:
    """It knew of fewer deliveries, or of another reason."""
    async with queue_of(simulation, messages=1) as (brokers, client):
        await buried(client)
        placement = queue_at(brokers, subscription="careful").placement
        app = f"dead letter public/default/orders careful 0 {placement} 0"
        await publish_once(client, "public/default/buried", app, one_row(b"0", b"0", [("other", b"header")]))
        await bury(client)
        assert (await client.admin.topic_stats("buried"))["segments"]["0"]["endOffset"] == 1


async def test_a_message_that_dies_again_after_a_seek_is_another_dead_letter(simulation: Simulation) -> None:
    async with queue_of(simulation, messages=1) as (_, client):
        await buried(client)
        await bury(client)
        await client.admin.seek("orders", "careful", "earliest")
        await bury(client)
        assert (await client.admin.topic_stats("buried"))["segments"]["0"]["endOffset"] == 2


async def test_a_dead_letter_names_its_origin_whatever_its_message_says(simulation: Simulation) -> None:
    async with queue_of(simulation) as (_, client):
        await buried(client)
        await send(client, [0], headers={"braid-dead-letter-topic": b"\xff", "braid-dead-letter-offset": b"-7"})
        await bury(client)
        async with client.checkpoint_consumer("buried") as reader:
            letter = await reader.receive(timeout=5)
        assert letter is not None
        assert letter.headers["braid-dead-letter-topic"] == b"public/default/orders"
        assert letter.headers["braid-dead-letter-offset"] == b"0"
