"""Leases of a queue while connections break and segments get other owners, with whole brokers in virtual time: a
message stays with the consumer that works on it, and no owner hands out anything after its own time."""

from __future__ import annotations

import asyncio

import pytest

from braid.model.errors import AckStale
from braid.model.ids import Offset
from braid.model.subscription import Placing
from braid.testing.sim.disk import DiskFaults
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import PATH, Brokers
from tests.kits.queues import (
    kill_program,
    numbers,
    program,
    queue_at,
    queue_of,
    remaining,
    send,
    served,
    take,
    take_all,
)
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
    ):
        (message,) = await take(worker, 1)
        await worker.extend(message, 600)
        other = client.queue_consumer("orders", "work", name="other")
        await other.start()
        if event == "move":
            await move_away(brokers)
        else:
            brokers.network.reset("worker", await served(brokers))
        await until(lambda: queue_at(brokers).counts().consumers == ("other", "worker"))
        assert await other.receive(timeout=60) is None, "it is leased for ten minutes"
        await worker.ack(message)
        assert queue_at(brokers).counts().ready == 0


async def test_a_message_that_came_back_stays_though_the_answer_before_it_goes_again(simulation: Simulation) -> None:
    """The consumer names the message under two leases: that of its answer, and that of the next delivery."""
    async with (
        queue_of(simulation, messages=1, ack_timeout_ms=600_000) as (brokers, _),
        program(brokers, "worker") as worker_client,
        worker_client.queue_consumer("orders", "work", name="worker") as worker,
    ):
        (message,) = await take(worker, 1)
        feed, link = worker._feeds[0], worker._feeds[0]._link
        brokers.disks["a"].faults = DiskFaults(sync_s=(5.0, 5.0))
        returning = asyncio.ensure_future(worker.nack(message, reason="not now"))
        await until(lambda: worker._buffer)  # It is here again before the disk has the answer.
        brokers.network.reset("worker", "a")
        await until(lambda: feed._link not in (None, link))
        again = await worker.receive(timeout=30)
        assert again is not None
        assert (again.redelivery_count, again.failure) == (1, "not now")
        with pytest.raises(AckStale):
            await returning
        await worker.ack(again)
        assert queue_at(brokers).counts().leased == 0


# Consumers that come back later than others.


@pytest.mark.parametrize("event", ["move", "restart"])
async def test_a_new_owner_waits_for_consumers_that_hold_messages(simulation: Simulation, event: str) -> None:
    async with (
        queue_of(simulation, AWAY, messages=10, ack_timeout_ms=600_000) as (brokers, client),
        program(brokers, "slow") as slow_client,
        slow_client.queue_consumer("orders", "work", name="slow", prefetch=3) as slow,
    ):
        held = await take(slow, 3)
        fast = client.queue_consumer("orders", "work", name="fast")
        others = await take(fast, 7)
        source = await served(brokers)
        target = source if event == "restart" else next(each for each in AWAY if each != source)
        brokers.network.cut("slow", target)
        if event == "move":
            await brokers.move(0, target)
        else:
            brokers.network.reset("slow", source)
            brokers.kill(source)
            await brokers.start(source)
            await served(brokers)
        await until(lambda: queue_at(brokers).counts().consumers == ("fast",))
        await send(client, [10])
        assert numbers(await take(fast, 1)) == [10], "nobody can hold a message that came later"
        brokers.network.heal("slow")
        await until(lambda: queue_at(brokers).counts().consumers == ("fast", "slow"))
        assert await fast.receive(timeout=10) is None
        for consumer, messages in ((slow, held), (fast, others)):
            for message in messages:
                await consumer.ack(message)


async def test_messages_of_consumers_that_do_not_come_back_are_delivered_soon(simulation: Simulation) -> None:
    async with queue_of(simulation, AWAY, messages=10, ack_timeout_ms=600_000) as (brokers, client):
        async with program(brokers, "dying") as dying_client:
            dying = dying_client.queue_consumer("orders", "work", prefetch=3)
            await take(dying, 3)
            kill_program(brokers, "dying")
            await dying.end()
        await move_away(brokers)
        async with client.queue_consumer("orders", "work") as consumer:
            assert numbers(await take_all(consumer, quiet_s=3)) == list(range(10))


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
        assert numbers(await take(consumer, 2)) == [0, 1]


async def test_a_queue_goes_on_by_itself_when_the_lease_of_its_owner_was_renewed_late(simulation: Simulation) -> None:
    """A process that was frozen may find its disk before the answer to its last renewal."""
    async with (
        queue_of(simulation, messages=2, ack_timeout_ms=1_000) as (brokers, client),
        client.queue_consumer("orders", "work") as consumer,
    ):
        messages = await take(consumer, 2)
        queue, holds = queue_at(brokers), True
        queue._may_confirm = lambda: holds
        holds = False
        acking = asyncio.ensure_future(consumer.ack(messages[0]))
        await until(lambda: queue.durable == queue.last_number > queue.confirmed.value)
        assert await consumer.receive(timeout=10) is None, "the lease of a message has run out"
        assert not acking.done()
        holds = True
        await asyncio.wait_for(acking, 1)
        assert numbers(await take(consumer, 1)) == [1]


# Channels that are refused, and answers that wait.


async def test_a_consumer_that_ends_while_its_channel_is_opened_leaves_none_behind(simulation: Simulation) -> None:
    async with queue_of(simulation, messages=5, ack_timeout_ms=600_000) as (brokers, client):
        gone = client.queue_consumer("orders", "work", name="gone")
        await gone.start()
        while not gone._feeds[0]._number:  # noqa: ASYNC110 — until the request leaves, and not longer
            await asyncio.sleep(0)
        await gone.end()
        await until(lambda: queue_at(brokers).counts().delivered > 0)
        async with client.queue_consumer("orders", "work", name="here") as consumer:
            assert numbers(await take(consumer, 5)) == list(range(5))
            assert queue_at(brokers).counts().consumers == ("here",)


async def test_a_consumer_starts_when_a_broker_is_there_again(simulation: Simulation) -> None:
    async with queue_of(simulation, messages=1) as (brokers, client):
        brokers.kill("a")
        consumer = client.queue_consumer("orders", "work")
        starting = asyncio.ensure_future(consumer.start())
        await asyncio.sleep(5)
        assert not starting.done()
        await brokers.start("a")
        await starting
        assert numbers(await take(consumer, 1)) == [0]


async def test_a_flush_ends_when_its_answers_count_no_more(simulation: Simulation) -> None:
    """They wait for a channel, and the next one says that the subscription was set to another place."""
    async with (
        queue_of(simulation, messages=1) as (brokers, client),
        program(brokers, "worker") as worker_client,
        worker_client.queue_consumer("orders", "work") as worker,
    ):
        (message,) = await take(worker, 1)
        brokers.network.cut("worker", "a")
        brokers.network.reset("worker", "a")
        await until(lambda: not worker._feeds[0].is_attached)
        worker.submit_ack(message)
        flushing = asyncio.ensure_future(worker.flush())
        await client.admin.seek("orders", "work", "earliest")
        brokers.network.heal("worker")
        with pytest.raises(AckStale):
            await flushing
        assert numbers(await take(worker, 1)) == [0]


async def test_an_answer_about_a_drained_segment_does_not_wait(simulation: Simulation) -> None:
    async with queue_of(simulation, messages=1, ack_timeout_ms=1_000) as (_, client):
        slow = client.queue_consumer("orders", "work", name="slow")
        (message,) = await take(slow, 1)
        other = client.queue_consumer("orders", "work", name="other")
        await other.ack((await take(other, 1))[0])
        await client.admin.split("orders", 0)
        await until(lambda: slow._feeds[0].is_drained)
        await asyncio.wait_for(slow.ack(message), 1)
        slow.submit_ack(message)
        await asyncio.wait_for(slow.close(), 5)


@pytest.mark.parametrize("event", ["cut", "split"])
async def test_a_consumer_that_leaves_takes_nothing_on_channels_that_it_opens_meanwhile(
    simulation: Simulation, event: str
) -> None:
    """Otherwise it is sent the same messages again and again, returns each, and never has nothing to say."""
    async with (
        queue_of(simulation, messages=5, ack_timeout_ms=2_000) as (brokers, client),
        program(brokers, "worker") as worker_client,
    ):
        worker = worker_client.queue_consumer("orders", "work", prefetch=1)
        (message,) = await take(worker, 1)
        queue = queue_at(brokers)
        agreed, queue._agreed = queue._agreed, lambda *_: 0
        worker.submit_ack(message)
        closing = asyncio.ensure_future(worker.close())
        await until(lambda: worker.leaving)
        if event == "cut":
            brokers.network.reset("worker", "a")
        else:
            await client.admin.split("orders", 0)
            await send(client, range(5, 12))
            await until(lambda: len(worker._feeds) == 3)
        await until(lambda: all(each.is_attached for each in worker._feeds.values()))
        queue._agreed = agreed
        queue.recount()
        await asyncio.wait_for(closing, 10)
        segments = brokers.running["a"].segments.of_topic(PATH)
        assert sum(each.queues.get("work").counts().delivered for each in segments) < 10
        assert await remaining(client) == list(range(1, 5 if event == "cut" else 12))


async def test_nothing_of_a_new_placement_goes_to_the_channels_of_before(simulation: Simulation) -> None:
    async with (
        queue_of(simulation, messages=10) as (brokers, client),
        client.queue_consumer("orders", "work", prefetch=5) as consumer,
    ):
        await take(consumer, 5)
        segment = brokers.running["a"].segments.get(PATH, 0)
        await segment.cursors.place(Placing("work", Offset(0)))
        segment.queues.follow_cursor("work")  # Before the call that has placed it closes the channels.
        again = await take(consumer, 5)
        assert {message.placement for message in again} == {queue_at(brokers).placement}
