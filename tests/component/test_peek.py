"""A look at a queue shows what is not settled, and takes nothing away from consumers."""

from __future__ import annotations

import pytest

from braid.client.peek import READ_ON, close_together, first_of
from braid.model.errors import InvalidArgument, SubscriptionKindConflict, SubscriptionNotFound
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import running_brokers


def test_the_first_offsets_end_with_the_count() -> None:
    assert list(first_of([(3, 5), (7, 20)], 4)) == [range(3, 5), range(7, 9)]
    assert list(first_of([(3, 5), (7, 20)], 2)) == [range(3, 5)]


def test_one_reader_reads_ranges_that_lie_close_together() -> None:
    near, far = range(5, 6), range(5 + READ_ON + 2, 5 + READ_ON + 3)
    assert list(close_together([range(4), near, far])) == [[range(4), near], [far]]


async def test_a_peek_shows_messages_that_are_not_settled(simulation: Simulation) -> None:
    async with running_brokers(simulation, ("a", "b")) as running, running.client() as client:
        await client.admin.create_topic("orders", 2)
        await client.admin.create_subscription("orders", "mailer", kind="queue")
        assert await client.admin.peek("orders", "mailer") == []
        async with client.producer("orders") as producer:
            for number in range(12):
                await producer.send(f"{number}", key=f"key-{number}")
        async with client.queue_consumer("orders", "mailer", name="worker-1") as consumer:
            taken = [await consumer.receive(timeout=5) for _ in range(12)]
            settled = {message.id for message in taken[::2] if message is not None}
            for message in taken[::2]:
                assert message is not None
                await consumer.ack(message)
            waiting = {message.id: message.value for message in taken[1::2] if message is not None}
            found = await client.admin.peek("orders", "mailer")
            assert {message.id: message.value for message in found} == waiting
            assert not settled & {message.id for message in found}
            assert await client.admin.peek("orders", "mailer", count=4) == found[:4]
            shown = await client.admin.subscription("orders", "mailer")
            assert (shown["queue"]["leased"], shown["queue"]["ready"]) == (6, 0)
            for message in taken[1::2]:
                assert message is not None
                await consumer.ack(message)  # The look took nothing away: no ack is stale.
        assert await client.admin.peek("orders", "mailer") == []


async def test_a_peek_reads_messages_that_lie_far_apart(simulation: Simulation) -> None:
    async with running_brokers(simulation, ("a",)) as running, running.client() as client:
        await client.admin.create_topic("orders")
        await client.admin.create_subscription("orders", "mailer", kind="queue")
        async with client.producer("orders") as producer:
            await producer.send_many([f"{number}" for number in range(2 * READ_ON + 3)])
        last = 2 * READ_ON + 2
        async with client.queue_consumer("orders", "mailer", prefetch=last) as consumer:
            kept = []
            for _ in range(last + 1):
                message = await consumer.receive(timeout=5)
                assert message is not None
                if message.offset in (1, last):
                    kept.append(message)
                else:
                    consumer.submit_ack(message)
                await consumer.flush()
            found = await client.admin.peek("orders", "mailer", count=5)
            assert [message.offset for message in found] == [1, last]


async def test_a_peek_names_what_cannot_be(simulation: Simulation) -> None:
    async with running_brokers(simulation, ("a",)) as running, running.client() as client:
        await client.admin.create_topic("orders")
        await client.admin.create_subscription("orders", "billing")
        with pytest.raises(SubscriptionNotFound):
            await client.admin.peek("orders", "nobody")
        with pytest.raises(SubscriptionKindConflict, match="is a stream"):
            await client.admin.peek("orders", "billing")
        with pytest.raises(InvalidArgument, match="peek at 1 to 1,000 messages"):
            await client.admin.peek("orders", "billing", count=0)
