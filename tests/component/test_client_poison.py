"""Consumers that meet batches which no reader can decode, or which become very large, in virtual time."""

from __future__ import annotations

import tracemalloc

import pyarrow as pa
import pytest

from braid.client.consuming.consumer import Consumer
from braid.client.consuming.delivery import MAX_DECODED_BYTES
from braid.model.errors import BatchUnreadable, InvalidArgument
from braid.testing.sim.loop import Simulation
from tests.kits import poison
from tests.kits.client_stream import connected, offsets, receive
from tests.kits.scripted_broker import TOPIC, ScriptedBroker
from tests.kits.waiting import until

SHAPES = {**poison.shown_by_the_body(), "an unknown schema": poison.shown_by_the_header()["an unknown schema"]}
"""Brokers refuse the last one now; older brokers have stored it."""
FALLING = "value offsets that fall"


def poisoned(what: str = FALLING, *, together: bool = True, segments: int = 1) -> ScriptedBroker:
    """Of segment 0, offsets 0 and 1 are good, 2 to 4 are poison, 5 and 6 are good."""
    broker = ScriptedBroker(segments)
    broker.together = together
    broker.segments[0].append(b"0", b"1")
    broker.segments[0].append_batch(bytearray(SHAPES[what]))
    broker.segments[0].append(b"5", b"6")
    return broker


async def stopped(consumer: Consumer) -> BatchUnreadable:
    with pytest.raises(BatchUnreadable) as raised:
        await consumer.receive()
    error = raised.value
    assert (error.segment, error.first_offset, error.next_offset) == (0, 2, 5)
    assert f"offsets 2 to 4 of segment 0 of {TOPIC} cannot be decoded" in str(error)
    return error


@pytest.mark.parametrize("together", [True, False], ids=["one delivery", "three deliveries"])
@pytest.mark.parametrize("what", SHAPES)
async def test_a_consumer_hands_out_what_is_good_and_then_goes_on_raising_until_it_is_set_past_the_poison(
    simulation: Simulation, what: str, together: bool
) -> None:
    async with (
        connected(simulation, poisoned(what, together=together)) as (broker, client),
        client.stream_consumer("orders", "billing") as consumer,
    ):
        good = await receive(consumer, 2)
        assert offsets(good) == [0, 1]
        await consumer.ack(good[-1])
        for _ in range(2):
            await stopped(consumer)
        error = await stopped(consumer)
        assert f"braid subscription seek {TOPIC} billing --offset 0:5" in str(error)
        await consumer.flush_acks()
        assert broker.segments[0].cursor == 2, "poison is never acked"
        broker.seek(0, 5)
        await until(lambda: len(broker.opened) == 2)
        assert offsets(await receive(consumer, 2)) == [5, 6]


@pytest.mark.parametrize("what", SHAPES)
async def test_a_batch_ends_before_the_poison(simulation: Simulation, what: str) -> None:
    async with (
        connected(simulation, poisoned(what)) as (broker, client),
        client.stream_consumer("orders", "billing") as consumer,
    ):
        good = await consumer.receive_batch()
        assert good is not None
        assert (good.base_offset, good.next_offset) == (0, 2)
        assert good.values() == [b"0", b"1"]
        assert good.table["offset"].to_pylist() == [0, 1]
        for _ in range(3):
            with pytest.raises(BatchUnreadable, match="offsets 2 to 4"):
                await consumer.receive_batch()
        await stopped(consumer)
        broker.seek(0, 5)
        await until(lambda: len(broker.opened) == 2)
        rest = await consumer.receive_batch()
        assert rest is not None
        assert offsets(rest.messages()) == [5, 6]


async def test_the_other_segments_go_on(simulation: Simulation) -> None:
    broker = poisoned(segments=2)
    for number in range(20):
        broker.segments[1].append(b"%d" % number)
    broker.together = False
    async with (
        connected(simulation, broker) as (_, client),
        client.stream_consumer("orders", "billing") as consumer,
    ):
        got: dict[int, list[int]] = {0: [], 1: []}
        errors = 0
        while len(got[1]) < 20:
            try:
                message = await consumer.receive(timeout=60)
            except BatchUnreadable:
                errors += 1
            else:
                assert message is not None
                got[message.segment].append(message.offset)
        assert got == {0: [0, 1], 1: list(range(20))}
        assert 10 < errors <= 25, "the segments take turns"


async def test_a_lost_connection_does_not_lead_past_the_poison(simulation: Simulation) -> None:
    async with (
        connected(simulation, poisoned()) as (broker, client),
        client.stream_consumer("orders", "billing") as consumer,
    ):
        await receive(consumer, 2)
        await stopped(consumer)
        broker.cut()
        await until(lambda: len(broker.opened) == 2)
        await stopped(consumer)
        await stopped(consumer)


async def test_a_checkpoint_consumer_stops_before_the_poison_and_seeks_past_it(simulation: Simulation) -> None:
    async with connected(simulation, poisoned()) as (_, client):
        async with client.checkpoint_consumer("orders", start="earliest") as consumer:
            assert [(await consumer.receive()).offset for _ in range(2)] == [0, 1]  # type: ignore[union-attr]
            error = await stopped(consumer)
            assert "await consumer.seek(0, 5)" in str(error)
            checkpoint = consumer.checkpoint()
        async with client.checkpoint_consumer("orders", start=checkpoint) as consumer:
            await stopped(consumer)
            with pytest.raises(InvalidArgument, match="segment 7"):
                await consumer.seek(7, 0)
            await consumer.seek(0, 5)
            assert [(await consumer.receive()).offset for _ in range(2)] == [5, 6]  # type: ignore[union-attr]
            await consumer.seek(0, 0)
            assert (await consumer.receive()).offset == 0  # type: ignore[union-attr]


async def test_a_program_that_only_tries_again_hears_of_a_seek(simulation: Simulation) -> None:
    async with (
        connected(simulation, poisoned()) as (broker, client),
        client.stream_consumer("orders", "billing") as consumer,
    ):
        await receive(consumer, 2)
        broker.seek(0, 5)
        for _ in range(10_000):
            try:
                message = await consumer.receive()
            except BatchUnreadable:
                continue
            assert message is not None
            assert message.offset == 5
            return
        pytest.fail("the loop never came to anything else")


# What becomes large.

BOMBS = 40
BOMB_BYTES = 8 << 20


def bombed() -> ScriptedBroker:
    broker = ScriptedBroker()
    broker.together = True
    batch = poison.bomb(BOMB_BYTES)
    for _ in range(BOMBS):
        broker.segments[0].append_batch(bytearray(batch))
    assert sum(map(len, broker.segments[0].batches)) < BOMB_BYTES / 10
    return broker


async def test_message_by_message_one_batch_is_decoded_at_a_time(simulation: Simulation) -> None:
    async with (
        connected(simulation, bombed()) as (_, client),
        client.stream_consumer("orders", "billing") as consumer,
    ):
        before = pa.total_allocated_bytes()
        tracemalloc.start()
        try:
            for offset in range(BOMBS):
                message = await consumer.receive()
                assert message is not None
                assert (message.offset, len(message.value)) == (offset, BOMB_BYTES)
                assert pa.total_allocated_bytes() - before < 3 * BOMB_BYTES
            assert tracemalloc.get_traced_memory()[1] < 4 * BOMB_BYTES
        finally:
            tracemalloc.stop()


async def test_batch_by_batch_a_delivery_comes_in_parts_that_can_be_decoded_together(simulation: Simulation) -> None:
    async with (
        connected(simulation, bombed()) as (_, client),
        client.stream_consumer("orders", "billing") as consumer,
    ):
        got = 0
        while got < BOMBS:
            batch = await consumer.receive_batch()
            assert batch is not None
            assert batch.base_offset == got
            assert 1 <= len(batch) <= MAX_DECODED_BYTES // BOMB_BYTES
            assert sum(map(len, batch.values())) == len(batch) * BOMB_BYTES
            got = batch.next_offset
        (reader,) = consumer._readers.values()
        assert reader.channel is not None
        assert reader.channel.waiting_bytes == 0, "all credit comes back"


async def test_a_batch_of_very_many_records_does_not_become_messages_all_at_once(simulation: Simulation) -> None:
    broker = ScriptedBroker()
    broker.segments[0].append_batch(poison.crowd(1 << 20))
    async with (
        connected(simulation, broker) as (_, client),
        client.stream_consumer("orders", "billing") as consumer,
    ):
        tracemalloc.start()
        try:
            assert offsets(await receive(consumer, 100)) == list(range(100))
            assert tracemalloc.get_traced_memory()[1] < 32 << 20
        finally:
            tracemalloc.stop()
        rest = await consumer.receive_batch()
        assert rest is not None
        assert (rest.base_offset, rest.next_offset) == (100, 1 << 20)
