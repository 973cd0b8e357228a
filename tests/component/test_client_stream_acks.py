"""Acks of a stream consumer, lost connections, and how a consumer ends."""

from __future__ import annotations

import asyncio

import pytest

from braid.model.errors import (
    ClientClosed,
    ConsumerReplaced,
    InvalidArgument,
    InvalidName,
    NotServing,
    PermissionDenied,
    SubscriptionNotFound,
    TopicNotFound,
)
from braid.testing.sim.loop import Simulation
from braid.wire.operations import Ack, Close, Expelled, Join, Kind, Leave, Open
from tests.kits.client_stream import connected, offsets, receive, with_records
from tests.kits.scripted_broker import ScriptedBroker
from tests.kits.waiting import until

# Acks.


async def test_acks_of_one_moment_are_one_frame_for_each_segment(simulation: Simulation) -> None:
    async with (
        connected(simulation, with_records(100, segments=2)) as (broker, client),
        client.stream_consumer("orders", "billing") as consumer,
    ):
        for message in await receive(consumer, 200):
            await consumer.ack(message)
        await until(lambda: all(segment.cursor == 100 for segment in broker.segments.values()))
        assert len(broker.got(Ack)) == 2


async def test_a_flush_that_fails_for_one_segment_has_ended_for_the_others_when_it_says_so(
    simulation: Simulation,
) -> None:
    """Cluster seed 20000496: their tries went on after the client was closed."""
    async with (
        connected(simulation, with_records(10, segments=2)) as (broker, client),
        client.stream_consumer("orders", "billing") as consumer,
    ):
        for message in await receive(consumer, 20):
            await consumer.ack(message)
        await until(lambda: all(segment.cursor == 10 for segment in broker.segments.values()))
        broker.refusals[Kind.ACK] = [InvalidArgument("no"), NotServing("later"), NotServing("later")]
        with pytest.raises(InvalidArgument):
            await consumer.flush_acks()
        assert sorted(segment.stored for segment in broker.segments.values()) == [0, 10]


async def test_an_ack_is_cumulative_and_never_goes_back(simulation: Simulation) -> None:
    async with connected(simulation, with_records(10)) as (broker, client):
        async with client.stream_consumer("orders", "billing") as consumer:
            messages = await receive(consumer, 10)
            await consumer.ack(messages[6])
            await consumer.flush_acks()
            assert broker.segments[0].stored == 7
            await consumer.ack(messages[2])
            await consumer.flush_acks()
            await asyncio.sleep(1)
        assert {ack.offset for ack in broker.got(Ack)} == {7}


async def test_an_acked_batch_counts_to_its_end(simulation: Simulation) -> None:
    async with connected(simulation, with_records(10, per_batch=5)) as (broker, client):
        async with client.stream_consumer("orders", "billing") as consumer:
            batch = await consumer.receive_batch()
            assert batch is not None
            await consumer.ack(batch)
        assert broker.segments[0].stored == 5


async def test_closing_waits_until_the_acks_are_stored_and_then_leaves(simulation: Simulation) -> None:
    async with connected(simulation, with_records(10)) as (broker, client):
        async with client.stream_consumer("orders", "billing") as consumer:
            messages = await receive(consumer, 4)
            await consumer.ack(messages[3])
        assert broker.segments[0].stored == 4
        assert [type(frame) for frame in broker.frames[-3:]] == [Ack, Close, Leave]
        assert broker.got(Ack)[-1].durable
        with pytest.raises(ClientClosed):
            await consumer.receive()
        with pytest.raises(ClientClosed):
            await consumer.ack(messages[3])
        await consumer.close()


async def test_closing_stores_the_acks_even_if_the_connection_breaks_meanwhile(simulation: Simulation) -> None:
    async with connected(simulation, with_records(10)) as (broker, client):
        async with client.stream_consumer("orders", "billing") as consumer:
            messages = await receive(consumer, 4)
            await consumer.ack(messages[3])
            broker.cut()
        assert broker.segments[0].stored == 4


async def test_closing_without_an_answer_fails_after_the_timeout(simulation: Simulation) -> None:
    async with connected(simulation, with_records(10), timeout=20) as (broker, client):
        consumer = client.stream_consumer("orders", "billing")
        await consumer.start()
        messages = await receive(consumer, 4)
        await consumer.ack(messages[3])
        broker.silent = True
        started = asyncio.get_running_loop().time()
        with pytest.raises(Exception, match=r"not answered|silent|did not answer|opened again"):
            await consumer.close()
        assert asyncio.get_running_loop().time() - started < 70


# Reconnecting.


async def test_a_lost_connection_repeats_nothing_and_skips_nothing(simulation: Simulation) -> None:
    async with (
        connected(simulation, with_records(30, per_batch=4)) as (broker, client),
        client.stream_consumer("orders", "billing", name="worker-1") as consumer,
    ):
        messages = await receive(consumer, 7)
        await consumer.ack(messages[2])
        await until(lambda: broker.segments[0].cursor == 3)
        broker.cut()
        await until(lambda: len(broker.opened) == 2)
        messages += await receive(consumer, 7)
        broker.cut()
        broker.segments[0].cursor = broker.segments[0].stored  # Not flushed yet when the broker died.
        await until(lambda: len(broker.opened) == 3)
        messages += await receive(consumer, 16)
        assert offsets(messages) == list(range(30))
        assert await consumer.receive(timeout=5) is None
        # The acks that the broker forgot come again.
        assert broker.segments[0].cursor == 3
    joins = broker.got(Join)
    assert [join.consumer for join in joins] == ["worker-1"] * 3
    assert [join.create for join in joins] == [True, False, False]


async def test_a_channel_that_may_be_opened_again_is(simulation: Simulation) -> None:
    async with (
        connected(simulation, with_records(20, per_batch=4)) as (broker, client),
        client.stream_consumer("orders", "billing") as consumer,
    ):
        messages = await receive(consumer, 7)
        broker.opened[0].fail(NotServing("the log failed and is opened again"))
        broker.refusals[Kind.OPEN] = [NotServing("not yet"), NotServing("not yet")]
        await until(lambda: len(broker.opened) == 2)
        messages += await receive(consumer, 13)
        assert offsets(messages) == list(range(20))
    assert len(broker.got(Open)) == 4
    assert len(broker.got(Join)) == 1


async def test_a_channel_that_is_refused_for_long_is_opened_in_the_end_by_the_same_session(
    simulation: Simulation,
) -> None:
    async with connected(simulation, with_records(10)) as (broker, client):
        async with client.stream_consumer("orders", "billing") as consumer:
            await receive(consumer, 7)
            broker.opened[0].fail(NotServing("gone"))
            broker.refusals[Kind.OPEN] = [NotServing("not yet")] * 20
            await until(lambda: len(broker.opened) == 2)
            assert offsets(await receive(consumer, 3)) == [7, 8, 9]
        assert len(broker.got(Join)) == 1


async def test_a_subscription_that_was_deleted_while_away_does_not_come_back(simulation: Simulation) -> None:
    async with (
        connected(simulation, with_records(5)) as (broker, client),
        client.stream_consumer("orders", "billing") as consumer,
    ):
        await receive(consumer, 5)
        broker.refusals[Kind.JOIN] = [SubscriptionNotFound("it was deleted")]
        broker.cut()
        with pytest.raises(SubscriptionNotFound):
            await consumer.receive()
        with pytest.raises(SubscriptionNotFound):
            await consumer.receive()


async def test_a_topic_that_was_created_again_is_another_topic(simulation: Simulation) -> None:
    async with (
        connected(simulation, with_records(5)) as (broker, client),
        client.stream_consumer("orders", "billing") as consumer,
    ):
        await receive(consumer, 5)
        broker.topic_id = 12
        broker.cut()
        with pytest.raises(TopicNotFound, match="created again"):
            await consumer.receive()


async def test_errors_that_stay_are_raised_at_the_start(simulation: Simulation) -> None:
    async with connected(simulation) as (broker, client):
        broker.refusals[Kind.JOIN] = [NotServing("soon"), PermissionDenied("no")]
        with pytest.raises(PermissionDenied):
            await client.stream_consumer("orders", "billing").start()
        with pytest.raises(InvalidArgument, match="start"):
            client.stream_consumer("orders", "billing", start="yesterday")
        with pytest.raises(InvalidName):
            client.stream_consumer("orders", "no/name")


async def test_a_final_refusal_of_one_segment_ends_the_consumer_and_its_session(simulation: Simulation) -> None:
    async with connected(simulation, ScriptedBroker(2)) as (broker, client):
        broker.refusals[Kind.OPEN] = [PermissionDenied("no")]
        async with client.stream_consumer("orders", "billing") as consumer:
            with pytest.raises(PermissionDenied):
                await consumer.receive()
            await until(lambda: broker.got(Leave))


async def test_a_consumer_that_was_replaced_says_so(simulation: Simulation) -> None:
    async with (
        connected(simulation, with_records(5)) as (broker, client),
        client.stream_consumer("orders", "billing", name="twin") as consumer,
    ):
        messages = await receive(consumer, 5)
        await consumer.ack(messages[4])
        broker.peers[0].push(Kind.EXPEL, Expelled(1, ConsumerReplaced.code, "another twin joined", retriable=False))
        with pytest.raises(ConsumerReplaced, match="twin"):
            await consumer.receive()


async def test_closing_the_client_ends_its_consumers(simulation: Simulation) -> None:
    async with connected(simulation) as (_broker, client):
        consumer = client.stream_consumer("orders", "billing")
        await consumer.start()
        waiting = asyncio.ensure_future(consumer.receive())
        await asyncio.sleep(1)
        await client.close()
        with pytest.raises(ClientClosed):
            await waiting
        await consumer.close()


async def test_a_join_that_nobody_waits_for_any_more_is_undone(simulation: Simulation) -> None:
    async with connected(simulation) as (broker, client):
        consumer = client.stream_consumer("orders", "billing")
        starting = asyncio.ensure_future(consumer.start())
        await until(lambda: broker.got(Join))
        starting.cancel()
        await until(lambda: broker.got(Leave))
        assert broker.got(Leave) == [Leave(1)]
