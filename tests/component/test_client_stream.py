"""The stream consumer against a broker that does what each test says, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from braid.client.client import Client, connect
from braid.client.consuming.delivery import ReceivedBatch
from braid.client.consuming.stream import RELEASE_GRACE_S, StreamConsumer
from braid.model.errors import (
    BatchCorrupt,
    BrokenInvariant,
    ClientClosed,
    ConsumerReplaced,
    InvalidArgument,
    InvalidName,
    NotServing,
    OffsetOutOfRange,
    PermissionDenied,
    ProtocolError,
    SubscriptionNotFound,
    TopicNotFound,
)
from braid.model.message import Message, MessageId
from braid.testing.sim.loop import Simulation
from braid.testing.sim.network import SimulatedNetwork
from braid.wire.operations import Ack, Close, Credit, Expelled, Join, Kind, Leave, Open, Release
from tests.kits.scripted_broker import TOPIC, ScriptedBroker, stamped
from tests.kits.waiting import until

Test = Callable[[ScriptedBroker, Client], Awaitable[None]]

WINDOW = 64 << 10


@contextlib.asynccontextmanager
async def connected(
    simulation: Simulation, broker: ScriptedBroker | None = None, *, timeout: float = 30.0
) -> AsyncIterator[tuple[ScriptedBroker, Client]]:
    broker = broker if broker is not None else ScriptedBroker()
    network = SimulatedNetwork(simulation.random, latency_s=(1e-4, 1e-3))
    await broker.listen(network.host("broker"))
    client = connect(
        "braid://broker:6660",
        network=network.host("client"),
        clock=simulation.clock,
        random=simulation.random,
        timeout=timeout,
    )
    async with client:
        yield broker, client


def with_records(count: int, segments: int = 1, *, per_batch: int = 1) -> ScriptedBroker:
    broker = ScriptedBroker(segments)
    for number in range(segments):
        for first in range(0, count, per_batch):
            last = min(first + per_batch, count)
            broker.segments[number].append(*(b"%d/%d" % (number, each) for each in range(first, last)))
    return broker


async def receive(consumer: StreamConsumer, count: int) -> list[Message]:
    messages: list[Message] = []
    for _ in range(count):
        message = await consumer.receive(timeout=60)
        assert message is not None, f"only {len(messages)} of {count} messages came"
        messages.append(message)
    return messages


def offsets(messages: list[Message]) -> list[int]:
    return [message.offset for message in messages]


async def test_messages_come_in_order_with_their_topic_and_segment(simulation: Simulation) -> None:
    async with connected(simulation, with_records(5, per_batch=2)) as (broker, client):
        async with client.stream_consumer("orders", "billing", name="worker-1", start="earliest") as consumer:
            messages = [message async for message, _ in _numbered(consumer, 5)]
        assert offsets(messages) == [0, 1, 2, 3, 4]
        assert messages[3].value == b"0/3"
        assert messages[3].topic == TOPIC
        assert messages[3].id == MessageId(0, 3)
    assert broker.got(Join) == [Join(TOPIC, "billing", "worker-1", "earliest", "stream", create=True)]


async def _numbered(consumer: StreamConsumer, count: int) -> Any:
    if count:
        async for message in consumer:
            count -= 1
            yield message, count
            if not count:
                return


async def test_receive_returns_none_when_nothing_comes_in_time(simulation: Simulation) -> None:
    async with connected(simulation) as (broker, client), client.stream_consumer("orders", "billing") as consumer:
        started = asyncio.get_running_loop().time()
        assert await consumer.receive(timeout=2) is None
        assert asyncio.get_running_loop().time() - started == pytest.approx(2)
        assert await consumer.receive_batch(timeout=0) is None
        waiting = asyncio.ensure_future(consumer.receive())
        await asyncio.sleep(1000)
        broker.append(0, b"late")
        message = await waiting
        assert message is not None
        assert message.value == b"late"


async def test_a_batch_after_some_messages_is_the_rest_of_the_delivery(simulation: Simulation) -> None:
    async with (
        connected(simulation, with_records(10, per_batch=5)) as (_broker, client),
        client.stream_consumer("orders", "billing") as consumer,
    ):
        await receive(consumer, 2)
        rest = await consumer.receive_batch()
        assert isinstance(rest, ReceivedBatch)
        assert (rest.base_offset, rest.next_offset, len(rest)) == (2, 5, 3)
        assert rest.values() == [b"0/2", b"0/3", b"0/4"]
        assert rest.table["offset"].to_pylist() == [2, 3, 4]
        assert offsets(rest.messages()) == [2, 3, 4]
        following = await consumer.receive_batch()
        assert following is not None
        assert following.base_offset == 5


async def test_segments_take_turns(simulation: Simulation) -> None:
    async with connected(simulation, with_records(10, segments=3)) as (broker, client):
        async with client.stream_consumer("orders", "billing") as consumer:
            await until(lambda: len(broker.opened) == 3 and not any(each.credit == 0 for each in broker.opened))
            await asyncio.sleep(0.1)
            seen = [message.segment for message in await receive(consumer, 30)]
        for turn in range(0, 30, 3):
            assert sorted(seen[turn : turn + 3]) == [0, 1, 2], f"not fair from message {turn} on: {seen}"


# Credit.


async def test_a_consumer_that_never_reads_costs_one_window(simulation: Simulation) -> None:
    async with (
        connected(simulation, _large(2, 200, 1000)) as (broker, client),
        client.stream_consumer("orders", "billing", window_bytes=WINDOW) as consumer,
    ):
        await asyncio.sleep(10)
        assert len(broker.opened) == 2
        for channel in broker.opened:
            assert channel.granted_bytes == WINDOW
            assert WINDOW - 2_000 < channel.sent_bytes <= WINDOW
        # Reading makes room, and only then is more granted.
        for _ in range(100):
            await receive(consumer, 1)
        await asyncio.sleep(10)
        for channel in broker.opened:
            assert WINDOW < channel.granted_bytes <= 2 * WINDOW


def _large(segments: int, batches: int, size: int) -> ScriptedBroker:
    broker = ScriptedBroker(segments)
    for segment in broker.segments.values():
        for number in range(batches):
            segment.append(number.to_bytes(4, "big") * (size // 4))
    return broker


async def test_credit_is_returned_in_large_pieces(simulation: Simulation) -> None:
    async with (
        connected(simulation, _large(1, 1000, 1000)) as (broker, client),
        client.stream_consumer("orders", "billing", window_bytes=WINDOW) as consumer,
    ):
        await receive(consumer, 1_000)
    grants = [grant.bytes for grant in broker.got(Credit)]
    assert len(grants) < 60, "for a thousand batches"
    assert statistics.median(grants) >= WINDOW // 2, "only what answers a NEED may be less"


async def test_a_batch_larger_than_the_window_gets_the_credit_that_it_needs(simulation: Simulation) -> None:
    broker = ScriptedBroker()
    for size in (100, 10 * WINDOW, 100, 30_000):
        broker.segments[0].append(bytes(size))
    async with (
        connected(simulation, broker) as (broker, client),
        client.stream_consumer("orders", "billing", window_bytes=WINDOW) as consumer,
    ):
        await asyncio.sleep(5)
        channel = broker.opened[0]
        assert channel.granted_bytes == WINDOW, "the large one has to wait until what came before it was taken"
        messages = await receive(consumer, 4)
        assert [len(message.value) for message in messages] == [100, 10 * WINDOW, 100, 30_000]


async def test_a_batch_larger_than_what_is_left_waits_for_room(simulation: Simulation) -> None:
    broker = ScriptedBroker()
    for _ in range(5):
        broker.segments[0].append(bytes(30_000))
    async with (
        connected(simulation, broker) as (broker, client),
        client.stream_consumer("orders", "billing", window_bytes=WINDOW) as consumer,
    ):
        await asyncio.sleep(5)
        channel = broker.opened[0]
        assert channel.needed > channel.credit
        assert channel.granted_bytes == WINDOW
        messages = await receive(consumer, 5)
        assert offsets(messages) == [0, 1, 2, 3, 4]
        assert channel.granted_bytes <= channel.sent_bytes + WINDOW


async def test_a_broker_that_exceeds_its_credit_is_refused(simulation: Simulation) -> None:
    async with (
        connected(simulation) as (broker, client),
        client.stream_consumer("orders", "billing", window_bytes=WINDOW) as consumer,
    ):
        await until(lambda: broker.opened)
        broker.opened[0].deliver(stamped([bytes(2 * WINDOW)], 0))
        with pytest.raises(ProtocolError, match="had credit for"):
            await consumer.receive()


# What arrives is checked.


@pytest.mark.parametrize("base", [0, 1, 4])
async def test_a_gap_or_a_repeat_ends_the_consumer(base: int, simulation: Simulation) -> None:
    async with (
        connected(simulation, with_records(3)) as (broker, client),
        client.stream_consumer("orders", "billing") as consumer,
    ):
        await receive(consumer, 3)
        broker.opened[0].deliver(stamped([b"x"], base))
        with pytest.raises(BrokenInvariant, match="I1"):
            await consumer.receive()


@pytest.mark.parametrize("cursor", [1, 4])
async def test_the_first_batch_must_hold_the_wanted_offset(cursor: int, simulation: Simulation) -> None:
    async with connected(simulation) as (broker, client):
        broker.segments[0].end = 9
        broker.segments[0].cursor = cursor
        async with client.stream_consumer("orders", "billing") as consumer:
            await until(lambda: broker.opened and broker.opened[0].credit)
            broker.opened[0].deliver(stamped([b"x", b"y"], 2))
            with pytest.raises(BrokenInvariant, match="I1"):
                await consumer.receive()


async def test_a_first_batch_that_begins_before_the_cursor_is_cut(simulation: Simulation) -> None:
    async with connected(simulation, with_records(6, per_batch=5)) as (broker, client):
        broker.segments[0].cursor = 3
        async with client.stream_consumer("orders", "billing") as consumer:
            assert offsets(await receive(consumer, 3)) == [3, 4, 5]


async def test_a_damaged_batch_is_not_handed_out(simulation: Simulation) -> None:
    async with connected(simulation) as (broker, client), client.stream_consumer("orders", "billing") as consumer:
        await until(lambda: broker.opened and broker.opened[0].credit)
        damaged = stamped([b"hello"], 0)
        damaged[-8] ^= 1
        broker.opened[0].deliver(damaged)
        with pytest.raises(BatchCorrupt):
            await consumer.receive()


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
        with pytest.raises(Exception, match=r"not answered|silent|did not answer"):
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


# Seek.


async def test_after_a_seek_the_brokers_position_counts(simulation: Simulation) -> None:
    async with (
        connected(simulation, with_records(10, per_batch=4)) as (broker, client),
        client.stream_consumer("orders", "billing") as consumer,
    ):
        before = await receive(consumer, 8)
        await consumer.ack(before[7])
        broker.seek(0, 2)
        await until(lambda: len(broker.opened) == 2)
        await until(lambda: broker.opened[1].sent_bytes)
        await asyncio.sleep(1)
        assert broker.segments[0].cursor == 2, "an ack from before the seek must not undo it"
        again = await receive(consumer, 3)
        assert offsets(again) == [2, 3, 4]
        await consumer.ack(before[7])
        await asyncio.sleep(1)
        assert broker.segments[0].cursor == 2
        await consumer.ack(again[1])
        await consumer.flush_acks()
        assert broker.segments[0].stored == 4
        broker.seek(0, 9)
        await until(lambda: len(broker.opened) == 3)
        assert offsets(await receive(consumer, 1)) == [9]


async def test_a_seek_while_the_connection_was_lost_is_seen_by_the_cursor(simulation: Simulation) -> None:
    async with (
        connected(simulation, with_records(10)) as (broker, client),
        client.stream_consumer("orders", "billing") as consumer,
    ):
        messages = await receive(consumer, 8)
        await consumer.ack(messages[5])
        await consumer.flush_acks()
        broker.cut()
        broker.seek(0, 1)
        await until(lambda: len(broker.opened) == 2)
        await asyncio.sleep(0.1)
        assert offsets(await receive(consumer, 4)) == [1, 2, 3, 4]
        broker.cut()
        broker.seek(0, 9)
        await until(lambda: len(broker.opened) == 3)
        await asyncio.sleep(0.1)
        assert offsets(await receive(consumer, 1)) == [9]


@pytest.mark.parametrize("place", [3, 5, 7])
async def test_a_seek_while_away_to_a_place_that_acks_could_have_reached_is_followed(
    place: int, simulation: Simulation
) -> None:
    async with (
        connected(simulation, with_records(10)) as (broker, client),
        client.stream_consumer("orders", "billing") as consumer,
    ):
        messages = await receive(consumer, 8)
        await consumer.ack(messages[2])
        await consumer.flush_acks()
        await consumer.ack(messages[6])
        broker.cut()
        broker.seek(0, place)
        await until(lambda: len(broker.opened) == 2)
        await asyncio.sleep(0.1)  # The answer to OPEN tells of the seek.
        assert offsets(await receive(consumer, 10 - place)) == list(range(place, 10))
        await consumer.ack(messages[1])  # Of before the seek: it says nothing of what came since.
        await asyncio.sleep(1)
        assert broker.segments[0].cursor == place


async def test_records_that_took_the_place_of_lost_ones_are_not_skipped(simulation: Simulation) -> None:
    async with (
        connected(simulation, with_records(10)) as (broker, client),
        client.stream_consumer("orders", "billing") as consumer,
    ):
        messages = await receive(consumer, 10)
        await consumer.ack(messages[3])
        await consumer.flush_acks()
        broker.cut()
        segment = broker.segments[0]
        del segment.batches[6:]
        segment.end = 6
        segment.append(*(b"new" for _ in range(6)))
        segment.placement += 1
        await until(lambda: len(broker.opened) == 2)
        messages = await receive(consumer, 8)
        assert offsets(messages) == list(range(4, 12))
        assert [message.value for message in messages] == [b"0/4", b"0/5"] + [b"new"] * 6


async def test_retention_that_overtakes_a_slow_consumer_moves_it_forward(simulation: Simulation) -> None:
    async with (
        connected(simulation, with_records(20)) as (broker, client),
        client.stream_consumer("orders", "billing") as consumer,
    ):
        await receive(consumer, 3)
        broker.segments[0].earliest = broker.segments[0].cursor = 15
        broker.opened[0].fail(OffsetOutOfRange("offset 3 is gone", 15, 20))
        await until(lambda: len(broker.opened) == 2)
        await asyncio.sleep(0.1)
        assert offsets(await receive(consumer, 5)) == [15, 16, 17, 18, 19]


# Giving segments back.


async def test_a_segment_that_goes_to_another_consumer_is_given_back_with_its_last_ack(simulation: Simulation) -> None:
    async with (
        connected(simulation, with_records(20, segments=2)) as (broker, client),
        client.stream_consumer("orders", "billing") as consumer,
    ):
        await asyncio.sleep(0.1)  # Both segments have arrived.
        messages = [message for message in await receive(consumer, 6) if message.segment == 1]
        assert messages
        broker.assign(0)
        await until(lambda: consumer.segments == (0,))
        await asyncio.sleep(RELEASE_GRACE_S / 2)
        assert not broker.got(Release), "what was handed out may still be acked"
        await consumer.ack(messages[-1])
        await until(lambda: broker.got(Release))
        assert broker.segments[1].cursor == messages[-1].offset + 1
        assert [type(frame) for frame in broker.frames[-3:]] == [Ack, Close, Release]
        # Nothing of it comes any more, though much of it was here.
        rest = await receive(consumer, 20 - (6 - len(messages)))
        assert {message.segment for message in rest} == {0}
        assert await consumer.receive(timeout=5) is None


async def test_a_segment_is_given_back_after_the_grace_even_if_nothing_is_acked(simulation: Simulation) -> None:
    async with (
        connected(simulation, with_records(20)) as (broker, client),
        client.stream_consumer("orders", "billing") as consumer,
    ):
        messages = await receive(consumer, 5)
        await consumer.ack(messages[1])
        await until(lambda: broker.segments[0].cursor == 2)
        started = asyncio.get_running_loop().time()
        broker.assign()
        await until(lambda: not consumer.segments)
        assert await consumer.receive(timeout=1) is None
        await until(lambda: broker.got(Release))
        waited_s = asyncio.get_running_loop().time() - started
        assert RELEASE_GRACE_S <= waited_s < RELEASE_GRACE_S + 1
        await consumer.ack(messages[4])
        await asyncio.sleep(1)
        assert broker.segments[0].cursor == 2, "an ack after that belongs to nobody"


async def test_a_segment_with_nothing_unacked_is_given_back_at_once(simulation: Simulation) -> None:
    async with (
        connected(simulation, with_records(20, per_batch=10)) as (broker, client),
        client.stream_consumer("orders", "billing") as consumer,
    ):
        messages = await receive(consumer, 5)
        await consumer.ack(messages[4])
        started = asyncio.get_running_loop().time()
        broker.assign()
        await until(lambda: broker.got(Release))
        assert asyncio.get_running_loop().time() - started < 1
        assert broker.segments[0].cursor == 5
        broker.assign(0)
        assert offsets(await receive(consumer, 3)) == [5, 6, 7]


async def test_a_segment_that_comes_back_while_it_is_given_back_is_opened_again(simulation: Simulation) -> None:
    async with (
        connected(simulation, with_records(20)) as (broker, client),
        client.stream_consumer("orders", "billing") as consumer,
    ):
        await receive(consumer, 5)
        broker.assign()
        await until(lambda: not consumer.segments)
        broker.assign(0)
        # It was not acked, so it comes again: somebody else may have had it meanwhile.
        assert offsets(await receive(consumer, 3)) == [0, 1, 2]
        assert broker.got(Release) == [Release(1, 0)]


async def test_a_segment_that_comes_back_with_another_session_is_handed_out_again(simulation: Simulation) -> None:
    async with (
        connected(simulation, with_records(20, segments=2)) as (broker, client),
        client.stream_consumer("orders", "billing") as consumer,
    ):
        await asyncio.sleep(0.1)  # Both segments have arrived.
        assert {message.segment for message in await receive(consumer, 6)} == {0, 1}
        broker.assign(0)
        await until(lambda: consumer.segments == (0,))
        # While segment 1 waits for its acks, the session is lost.
        expelled = Expelled(1, NotServing.code, "another broker is the controller now", retriable=True)
        broker.peers[-1].push(Kind.EXPEL, expelled)
        await until(lambda: consumer.segments == (0, 1))
        again = [message for message in await receive(consumer, 37) if message.segment == 1]
        assert offsets(again) == list(range(20))


async def test_a_segment_that_is_taken_away_while_it_is_opened_again_is_not_handed_out(simulation: Simulation) -> None:
    async with (
        connected(simulation, with_records(20)) as (broker, client),
        client.stream_consumer("orders", "billing") as consumer,
    ):
        await receive(consumer, 5)
        broker.refusals[Kind.OPEN] = [NotServing("not yet")] * 5
        broker.opened[0].fail(NotServing("gone"))
        await until(lambda: len(broker.got(Open)) == 5)
        broker.assign()
        await until(lambda: not consumer.segments)
        assert await consumer.receive(timeout=0) is None, "though it was here"
        await until(lambda: broker.got(Release))


# Ended segments.


async def test_acks_of_a_segment_that_has_ended_are_not_lost(simulation: Simulation) -> None:
    async with connected(simulation, with_records(10)) as (broker, client):
        async with client.stream_consumer("orders", "billing") as consumer:
            broker.segments[0].sealed = True
            broker.pump()
            messages = await receive(consumer, 5)
            await asyncio.sleep(1)
            messages += await receive(consumer, 5)
            assert offsets(messages) == list(range(10))
            assert await consumer.receive(timeout=3) is None
            await consumer.ack(messages[8])
            await consumer.flush_acks()
            assert broker.segments[0].stored == 9
            await consumer.ack(messages[9])
            broker.assign()
            await until(lambda: broker.got(Release))
            assert broker.segments[0].cursor == 10
        assert len(broker.opened) == 1, "the channel that has ended takes the acks"


async def test_acks_of_a_segment_that_has_ended_outlive_its_connection(simulation: Simulation) -> None:
    async with connected(simulation, with_records(10)) as (broker, client):
        async with client.stream_consumer("orders", "billing") as consumer:
            broker.segments[0].sealed = True
            broker.pump()
            messages = await receive(consumer, 5)
            await asyncio.sleep(1)
            broker.cut()
            messages += await receive(consumer, 5)
            assert offsets(messages) == list(range(10))
            await consumer.ack(messages[9])
        assert broker.segments[0].stored == 10


async def test_a_segment_that_has_ended_is_read_again_after_a_seek(simulation: Simulation) -> None:
    async with (
        connected(simulation, with_records(10)) as (broker, client),
        client.stream_consumer("orders", "billing") as consumer,
    ):
        broker.segments[0].sealed = True
        broker.pump()
        await consumer.ack((await receive(consumer, 10))[9])
        await consumer.flush_acks()
        broker.seek(0, 4)
        assert offsets(await receive(consumer, 6)) == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_happens_each_record_is_handed_out_once_and_in_order(seed: int, simulation: Simulation) -> None:
    """Connections break, channels fail, acks come late: the application sees each segment as if nothing happened."""
    async with connected(simulation, with_records(100, segments=3, per_batch=seed % 7 + 1)) as (broker, client):
        random = client.random
        seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
        async with client.stream_consumer("orders", "billing", window_bytes=WINDOW) as consumer:
            while sum(map(len, seen.values())) < 300:
                match random.randrange(12):
                    case 0:
                        broker.cut()
                        if random.random() < 0.5:  # It was killed: cursors go back to what was stored.
                            for segment in broker.segments.values():
                                segment.cursor = segment.stored
                    case 1 if broker.channels:
                        random.choice(broker.channels).fail(NotServing("moved"))
                    case 2:
                        await consumer.flush_acks()
                    case 3:
                        await asyncio.sleep(random.random())
                    case 4:
                        batch = await consumer.receive_batch(timeout=60)
                        assert batch is not None
                        seen[batch.segment] += range(batch.base_offset, batch.next_offset)
                        await consumer.ack(batch)
                    case _:
                        for message in await receive(consumer, min(5, 300 - sum(map(len, seen.values())))):
                            seen[message.segment].append(message.offset)
                            if random.random() < 0.3:
                                await consumer.ack(message)
        assert seen == {number: list(range(100)) for number in seen}
        for channel in broker.opened:
            assert channel.granted_bytes <= channel.sent_bytes + WINDOW


async def test_a_segment_that_comes_back_while_it_is_given_back_is_read_on_by_its_new_seat(
    simulation: Simulation,
) -> None:
    """Its last ack found no channel, and no owner takes the read_grant that it had: another consumer has read there
    since."""
    async with (
        connected(simulation, with_records(2)) as (broker, client),
        client.stream_consumer("orders", "billing", start="earliest") as consumer,
    ):
        messages = await receive(consumer, 2)
        broker.refusals[Kind.OPEN] = [NotServing("out of date") for _ in range(1_000)]
        broker.assignment = ()
        broker.cut()
        await until(lambda: consumer.segments == ())
        await consumer.ack(messages[-1])
        await until(lambda: len(broker.got(Open)) > 5)
        broker.refusals.clear()
        broker.grants[0] = 2
        tried = len(broker.got(Open))
        broker.assign(0)
        broker.append(0, b"next")
        assert offsets(await receive(consumer, 1)) == [2]
        assert {opening.grant for opening in broker.got(Open)[tried:]} == {2}
        assert broker.segments[0].cursor == 2
