"""The stream consumer against a broker that does what each test says, in virtual time."""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

import pytest

from braid.client.consuming.delivery import ReceivedBatch
from braid.client.consuming.stream import StreamConsumer
from braid.model.errors import BatchCorrupt, BrokenInvariant, ProtocolError
from braid.model.message import MessageId
from braid.testing.sim.loop import Simulation
from braid.wire.operations import Credit, Join
from tests.kits.client_stream import WINDOW, connected, offsets, receive, with_records
from tests.kits.scripted_broker import TOPIC, ScriptedBroker, stamped
from tests.kits.waiting import until


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
