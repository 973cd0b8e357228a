"""Redrive: dead letters are published again, once, and those of other subscriptions stay where they are."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from braid.client.client import Client
from braid.client.consuming.queue import QueueConsumer
from braid.client.redrive import redrive_name
from braid.model.errors import (
    BraidError,
    ConnectionLost,
    InvalidArgument,
    SubscriptionKindConflict,
    SubscriptionNotFound,
    TopicNotFound,
)
from braid.model.message import DELIVER_AT, EXPIRES_AT, QueueMessage
from braid.model.names import MAX_NAME_CHARS, TopicName
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import running_brokers
from tests.kits.waiting import until

ORDERS = TopicName.parse("orders")


@contextlib.asynccontextmanager
async def queued(simulation: Simulation, *subscriptions: str) -> AsyncIterator[Client]:
    """A topic with queues whose messages are dead letters after one delivery."""
    async with running_brokers(simulation, ("a",)) as running, running.client() as client:
        await client.admin.create_topic("orders", 2)
        await client.admin.create_topic("orders-dead")
        for name in subscriptions:
            await client.admin.create_subscription(
                "orders", name, kind="queue", max_deliveries=1, dead_letter_topic="orders-dead"
            )
        yield client


async def publish(client: Client, *values: str, **options: Any) -> None:
    async with client.producer("orders") as producer:
        for value in values:
            await producer.send(value, key=f"key of {value}", headers={"trace": value}, **options)


async def bury(client: Client, subscription: str, count: int) -> None:
    """Let so many messages of a queue become dead letters."""

    async def are_buried() -> bool:
        found = await client.admin.subscription("orders", subscription)
        return bool(found["queue"]["deadLettered"] == before + count)

    before = (await client.admin.subscription("orders", subscription))["queue"]["deadLettered"]
    async with client.queue_consumer("orders", subscription) as consumer:
        for _ in range(count):
            message = await consumer.receive(timeout=90)
            assert message is not None
            await consumer.nack(message, reason="no stamps")
        await until(are_buried)


async def records(client: Client, topic: str = "orders") -> list[Any]:
    stats = await client.admin.topic_stats(topic)
    count = sum(each["records"] for each in stats["segments"].values())
    found: list[Any] = []
    async with client.checkpoint_consumer(topic) as reader:
        while len(found) < count:
            batch = await reader.receive_batch(timeout=60)
            assert batch is not None
            found += batch.messages()
    return found


async def values(client: Client, topic: str = "orders") -> list[str]:
    return sorted(message.value.decode() for message in await records(client, topic))


async def test_dead_letters_are_published_again_as_they_were(simulation: Simulation) -> None:
    async with queued(simulation, "mailer") as client:
        await publish(client, "a", "b", "c", ttl=3_600)
        await bury(client, "mailer", 3)
        name = redrive_name(ORDERS, "mailer")
        assert await client.admin.redrive("orders", "mailer") == {
            "redriven": 3, "unreadable": 0, "from": "public/default/orders-dead", "to": ORDERS.path,
            "subscription": name,
        }  # fmt: skip
        found = await records(client)
        again = [each for each in found if EXPIRES_AT not in each.headers]
        assert sorted((each.value, each.key) for each in again) == sorted(
            (each.value, each.key) for each in found if each not in again
        )
        assert all(dict(each.headers) == {"trace": each.value} for each in again), "not the headers of dead letters"
        assert len(await records(client, "orders-dead")) == 3, "they stay there"
        assert (await client.admin.redrive("orders", "mailer"))["redriven"] == 0
        await bury(client, "mailer", 3)
        assert (await client.admin.redrive("orders", "mailer", count=2))["redriven"] == 2
        assert (await client.admin.redrive("orders", "mailer"))["redriven"] == 1
        assert (await client.admin.subscription("orders-dead", name))["backlog"] == 0


async def test_dead_letters_of_other_subscriptions_wait_for_their_own_redrive(simulation: Simulation) -> None:
    async with queued(simulation, "mailer", "printer") as client:
        await client.admin.create_topic("elsewhere")
        await publish(client, "a", "b")
        await bury(client, "printer", 2)
        await bury(client, "mailer", 2)
        done = await client.admin.redrive("orders", "mailer", to="elsewhere")
        assert (done["redriven"], await values(client, "elsewhere")) == (2, ["a", "b"])
        assert await values(client) == ["a", "b"]
        assert (await client.admin.redrive("orders", "printer", count=1))["redriven"] == 1
        assert (await client.admin.redrive("orders", "printer"))["redriven"] == 1
        assert await values(client) == ["a", "a", "b", "b"]


async def test_a_redrive_that_ends_between_publish_and_ack_publishes_once(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with queued(simulation, "mailer") as client:
        await publish(client, "a", "b")
        await bury(client, "mailer", 2)

        async def lost(consumer: QueueConsumer, message: QueueMessage) -> None:
            raise ConnectionLost("the process is gone")

        with monkeypatch.context() as patched:
            patched.setattr(QueueConsumer, "ack", lost)
            letters = [each.value.decode() for each in await records(client, "orders-dead")]
            for again in (letters[:1], letters, letters, letters):
                with pytest.raises(ConnectionLost):
                    await client.admin.redrive("orders", "mailer")
                # The next run begins with the letter that none has taken up: one that fails holds up no other.
                assert await values(client) == sorted(["a", "b", *again])
        assert (await client.admin.redrive("orders", "mailer"))["redriven"] == 2
        assert await values(client) == ["a", "a", "b", "b"]
        await client.admin.seek("orders-dead", redrive_name(ORDERS, "mailer"), "earliest")
        assert (await client.admin.redrive("orders", "mailer"))["redriven"] == 2
        assert await values(client) == ["a", "a", "a", "b", "b", "b"], "an operator wants them once more"


async def test_a_delayed_dead_letter_is_due_immediately(simulation: Simulation) -> None:
    async with queued(simulation, "mailer") as client:
        await publish(client, "a", deliver_after=30)
        await bury(client, "mailer", 1)
        await client.admin.redrive("orders", "mailer")
        assert [DELIVER_AT in each.headers for each in await records(client)] == [True, False]


async def test_a_dead_letter_whose_time_to_live_is_over_is_published_again(simulation: Simulation) -> None:
    async with queued(simulation, "mailer") as client:
        await publish(client, "a", ttl=5)
        await bury(client, "mailer", 1)
        await asyncio.sleep(10)
        assert (await client.admin.redrive("orders", "mailer"))["redriven"] == 1
        assert [EXPIRES_AT in each.headers for each in await records(client)] == [True, False]


async def test_a_redrive_does_not_wait_for_messages_that_are_not_due(simulation: Simulation) -> None:
    """Others may write to the dead-letter topic, too."""
    async with queued(simulation, "mailer") as client:
        async with client.producer("orders-dead") as producer:
            await producer.send("of another program", deliver_after=86_400)
        await publish(client, "a")
        await bury(client, "mailer", 1)
        async with asyncio.timeout(60):
            assert (await client.admin.redrive("orders", "mailer"))["redriven"] == 1


async def test_a_redrive_that_cannot_be_says_what_to_do(simulation: Simulation) -> None:
    async with queued(simulation, "mailer") as client:
        await client.admin.create_subscription("orders", "billing")
        await client.admin.create_subscription("orders", "plain", kind="queue")
        refused: list[tuple[str, dict[str, Any], type[BraidError], str]] = [
            ("billing", {}, InvalidArgument, "is no queue"),
            ("plain", {}, InvalidArgument, "has no dead-letter topic"),
            ("absent", {}, SubscriptionNotFound, "absent"),
            ("mailer", {"count": 0}, InvalidArgument, "redrive 1 message or more"),
            ("mailer", {"to": "nowhere"}, TopicNotFound, "does not exist; name another topic"),
            ("mailer", {"to": "orders-dead"}, InvalidArgument, "publish them to another topic"),
        ]
        for name, options, error, said in refused:
            with pytest.raises(error, match=said):
                await client.admin.redrive("orders", name, **options)
        await client.admin.create_subscription("orders-dead", redrive_name(ORDERS, "mailer"))
        with pytest.raises(
            SubscriptionKindConflict, match="which a redrive needs, is a stream subscription; delete it"
        ):
            await client.admin.redrive("orders", "mailer")
        await client.admin.delete_topic("orders-dead")
        with pytest.raises(TopicNotFound, match="dead-letter topic public/default/orders-dead does not exist"):
            await client.admin.redrive("orders", "mailer")


def test_each_source_has_a_redrive_of_its_own() -> None:
    names = [redrive_name(TopicName.parse(topic), each) for topic in ("a/b/c", "c") for each in ("s" * 128, "s" * 127)]
    assert len(set(names)) == 4
    assert all(len(name) <= MAX_NAME_CHARS for name in names)
    assert redrive_name(ORDERS, "mailer").startswith("redrive-mailer-")
