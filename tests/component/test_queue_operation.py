"""Queues as operators see them: how many messages are ready, leased, delayed and dead, and when messages are due."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import AsyncIterator
from typing import Any

import pytest

from braid.broker.queues import segment_queue
from braid.client.client import Client
from braid.client.consuming.queue import QueueConsumer
from braid.model.errors import LogClosed, SubscriptionBusy
from braid.testing.sim.loop import Simulation
from braid.wire.operations import QueueAnswer
from tests.kits.brokers import PATH, Brokers, running_brokers
from tests.kits.queues import queue_at, queue_of
from tests.kits.waiting import until

FILE_S = 700.0
"""After so long a file is closed and retention has looked at it."""


@contextlib.asynccontextmanager
async def queued(
    simulation: Simulation, *, segments: int = 1, brokers: tuple[str, ...] = ("a",), **policies: Any
) -> AsyncIterator[tuple[Brokers, Client]]:
    """A topic with a queue, `work`, and a topic for its dead letters."""
    async with running_brokers(simulation, brokers) as running, running.client() as client:
        await client.admin.create_topic("orders", segments, **policies)
        await client.admin.create_topic("orders-dead")
        await client.admin.create_subscription(
            "orders", "work", kind="queue", ack_timeout_ms=10_000, max_deliveries=2, dead_letter_topic="orders-dead"
        )
        yield running, client


async def publish(client: Client, count: int) -> None:
    async with client.producer("orders") as producer:
        await producer.send_many([(b"%d" % number, b"%d" % number) for number in range(count)])


async def shown(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = await client.admin.subscription("orders", "work")
    return found


async def counts(client: Client) -> tuple[int, ...]:
    queue = (await shown(client))["queue"]
    return tuple(queue[each] for each in ("ready", "leased", "delayed", "deadLettered"))


async def counted(client: Client, *wanted: int) -> None:
    async def is_so() -> bool:
        return await counts(client) == wanted

    await until(is_so)


async def received(consumer: QueueConsumer, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        message = await consumer.receive(timeout=90)
        assert message is not None
        found.append(message)
    return found


async def test_a_queue_shows_its_messages_consumers_and_policies(simulation: Simulation) -> None:
    async with queued(simulation, segments=2, brokers=("a", "b")) as (_, client):
        published_at = simulation.clock.now_us()
        await publish(client, 10)
        await asyncio.sleep(5)
        found = await shown(client)
        assert (found["kind"], found["backlog"], found["consumers"]) == ("queue", 10, {})
        assert found["queue"] == {
            "ready": 10, "leased": 0, "delayed": 0, "deadLettered": 0, "blocked": {},
            "oldestAt": found["queue"]["oldestAt"],
            "policies": {"ackTimeoutMs": 10_000, "maxDeliveries": 2, "deadLetterTopic": "public/default/orders-dead"},
        }  # fmt: skip
        assert 0 <= found["queue"]["oldestAt"] - published_at < 1_000_000, "also if nobody consumes"
        async with client.queue_consumer("orders", "work", name="worker-1") as consumer:
            messages = await received(consumer, 10)
            assert await counts(client) == (0, 10, 0, 0)
            for message in messages[3:6]:
                await consumer.ack(message)
            await consumer.nack(messages[6], delay=60)
            found = await shown(client)
            assert found["backlog"] == 7, "not the end minus the cursor"
            assert await counts(client) == (0, 6, 1, 0)
            assert found["consumers"] == {"worker-1": {"segments": [0, 1], "connected": True}}
            parts = [each["queue"] for each in found["segments"].values()]
            assert [each["consumers"] for each in parts] == [["worker-1"], ["worker-1"]]
            assert sum(each["leased"] for each in parts) == 6
        await counted(client, 6, 0, 1, 0)
        assert (await shown(client))["consumers"] == {}
        (listed,) = await client.admin.subscriptions("orders")
        assert (listed["backlog"], listed["queue"]["ready"]) == (7, 6)
        assert (await client.admin.topic_stats("orders"))["subscriptions"]["work"]["backlog"] == 7


async def test_a_stream_beside_a_queue_has_a_backlog_of_its_own(simulation: Simulation) -> None:
    async with queued(simulation) as (_, client):
        await client.admin.create_subscription("orders", "billing")
        await publish(client, 5)
        async with client.queue_consumer("orders", "work") as consumer:
            for message in await received(consumer, 5):
                await consumer.ack(message)
        found = {each["name"]: each for each in await client.admin.subscriptions("orders")}
        assert (found["work"]["backlog"], found["billing"]["backlog"]) == (0, 5)
        assert found["billing"]["queue"] is None
        assert found["billing"]["segments"]["0"]["queue"] is None
        assert found["work"]["queue"]["oldestAt"] is None


async def test_dead_letters_are_counted_when_they_are_settled(simulation: Simulation) -> None:
    async with queued(simulation) as (_, client):
        await publish(client, 3)
        async with client.queue_consumer("orders", "work") as consumer:
            for _ in range(2):
                for message in await received(consumer, 3):
                    await consumer.nack(message, reason="no")
            await counted(client, 0, 0, 0, 3)
        assert (await client.admin.topic_stats("orders-dead"))["segments"]["0"]["records"] == 3


async def test_a_queue_with_consumers_is_deleted_only_by_force(simulation: Simulation) -> None:
    async with queued(simulation) as (_, client):
        async with client.queue_consumer("orders", "work", name="worker-1"):

            async def is_connected() -> bool:
                return bool((await shown(client))["consumers"])

            await until(is_connected)
            with pytest.raises(SubscriptionBusy, match=r"1 connected consumers \(worker-1\)"):
                await client.admin.delete_subscription("orders", "work")
            with pytest.raises(SubscriptionBusy):
                await client.admin.delete_topic("orders")
        await client.admin.delete_subscription("orders", "work")


async def test_a_skip_settles_everything_that_a_queue_has(simulation: Simulation) -> None:
    async with queued(simulation) as (_, client):
        await publish(client, 20)
        async with client.queue_consumer("orders", "work", prefetch=4) as consumer:
            first = await received(consumer, 1)
            await consumer.nack(first[0], delay=60)
            assert await client.admin.skip("orders", "work") == {"offsets": {"0": 20}}
            await counted(client, 0, 0, 0, 0)
            await publish(client, 1)
            (message,) = await received(consumer, 1)
            assert message.offset == 20
            await consumer.ack(message)


async def test_a_message_is_delivered_when_it_is_due_and_not_after_its_time(simulation: Simulation) -> None:
    async with queued(simulation) as (_, client):
        loop = asyncio.get_running_loop()
        begun = loop.time()
        later = datetime.datetime.fromtimestamp(simulation.clock.now_us() / 1e6 + 40, datetime.UTC)
        async with client.producer("orders") as producer:
            await producer.send(b"at 40", deliver_at=later)
            await producer.submit(b"after 20", deliver_after=20)
            await producer.send(b"now", headers={"trace": "a1"}, ttl=5)
            await producer.send(b"never", ttl=datetime.timedelta(seconds=1))
        await asyncio.sleep(2)
        async with client.queue_consumer("orders", "work") as consumer:
            found = []
            for _ in range(3):
                (message,) = await received(consumer, 1)
                found.append((message.value, round(loop.time() - begun, -1)))
                await consumer.ack(message)
                assert message.redelivery_count == 0
                if message.value == b"now":
                    assert message.headers["trace"] == b"a1"
                    await counted(client, 0, 0, 2, 0)
        assert found == [(b"now", 0), (b"after 20", 20), (b"at 40", 40)]
        await counted(client, 0, 0, 0, 0)


async def test_a_topic_may_limit_the_age_of_what_queues_deliver(simulation: Simulation) -> None:
    async with queued(simulation, message_ttl_ms=30_000) as (_, client):
        assert (await client.admin.topic("orders"))["policies"]["messageTtlMs"] == 30_000
        await publish(client, 3)
        await asyncio.sleep(31)
        await publish(client, 1)
        async with client.queue_consumer("orders", "work") as consumer:
            (message,) = await received(consumer, 1)
            assert message.offset == 3
            await client.admin.update_topic("orders", message_ttl_ms=None)
            await consumer.nack(message, delay=60)
            (again,) = await received(consumer, 1)
            assert again.offset == 3
            await consumer.ack(again)
        assert (await client.admin.topic("orders"))["policies"]["messageTtlMs"] is None
        assert (await client.admin.topic_stats("orders"))["segments"]["0"]["records"] == 4, "records stay"


async def test_messages_grow_too_old_while_a_queue_has_no_consumer(simulation: Simulation) -> None:
    """Otherwise retention would keep them for a queue that delivers none of them."""
    async with queued(simulation, message_ttl_ms=30_000) as (brokers, client):
        await publish(client, 3)
        await asyncio.sleep(20)
        await publish(client, 2)
        await counted(client, 5, 0, 0, 0)
        await asyncio.sleep(11)
        await counted(client, 2, 0, 0, 0)
        brokers.kill("a")
        await brokers.start("a")
        await counted(client, 2, 0, 0, 0)
        await asyncio.sleep(10)
        await counted(client, 0, 0, 0, 0)
        assert (await shown(client))["segments"]["0"]["offset"] == 5, "retention may take them"


async def test_a_limit_of_age_that_is_set_later_counts_for_what_waits(simulation: Simulation) -> None:
    async with queued(simulation) as (_, client):
        await publish(client, 3)
        await asyncio.sleep(60)
        await client.admin.update_topic("orders", message_ttl_ms=30_000)
        await counted(client, 0, 0, 0, 0)


async def test_a_limit_of_age_that_is_set_late_does_not_hold_up_the_broker(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_queue, "TURN_STEPS", 2)
    async with queued(simulation) as (brokers, client):
        for _ in range(9):
            await publish(client, 3)
        await asyncio.sleep(60)
        queue = queue_at(brokers)
        queue._message_ttl_us = lambda: 30_000_000
        queue.pump()
        assert queue.counts().ready == 21, "two batches in one turn of the loop"
        await counted(client, 0, 0, 0, 0)


async def test_retention_keeps_what_a_queue_has_not_settled(simulation: Simulation) -> None:
    """One message that nobody settles keeps its file and all later ones. Earlier files go."""

    async def earliest() -> int:
        await asyncio.sleep(FILE_S)
        offset: int = (await client.admin.topic_stats("orders"))["segments"]["0"]["earliestOffset"]
        return offset

    policies = {"retention_ms": 60_000}
    async with (
        queue_of(simulation, topic=policies, ack_timeout_ms=86_400_000) as (_, client),
        client.queue_consumer("orders", "work") as consumer,
    ):
        messages = []
        for _ in range(3):
            await publish(client, 10)
            messages += await received(consumer, 10)
            assert await earliest() == 0
        for message in messages:
            if message.offset != 15:
                await consumer.ack(message)
        assert await earliest() == 10
        await consumer.ack(messages[15])
        assert await earliest() == 30


async def test_a_stop_that_was_cancelled_is_made_again_for_all_queues(simulation: Simulation) -> None:
    """Otherwise the next owner would not hear of some of them, and their journals would stay open."""
    async with queued(simulation) as (brokers, client):
        await client.admin.create_subscription("orders", "other", kind="queue")
        queues = brokers.running["a"].segments.get(PATH, 0).queues
        cancelled = asyncio.get_running_loop().create_task(queues.stop())
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert cancelled.cancelled()
        assert sorted(await queues.stop()) == ["other", "work"]
        for queue in queues.all():
            with pytest.raises(LogClosed):
                queue.answer(QueueAnswer(1))
