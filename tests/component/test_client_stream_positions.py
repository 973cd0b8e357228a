"""Seeks, retention and segments that come and go under a stream consumer."""

from __future__ import annotations

import asyncio

import pytest

from braid.client.consuming.stream import RELEASE_GRACE_S
from braid.model.errors import NotServing, OffsetOutOfRange
from braid.testing.sim.loop import Simulation
from braid.wire.operations import Ack, Close, Expelled, Kind, Open, Release
from tests.kits.client_stream import WINDOW, connected, offsets, receive, with_records
from tests.kits.scripted_broker import Segment
from tests.kits.waiting import until

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


async def test_the_last_ack_of_a_segment_that_has_ended_is_sent_immediately(simulation: Simulation) -> None:
    """Its children wait for it."""
    async with (
        connected(simulation, with_records(10)) as (broker, client),
        client.stream_consumer("orders", "billing") as consumer,
    ):
        broker.segments[0].sealed = True
        broker.pump()
        messages = await receive(consumer, 10)
        await consumer.ack(messages[8])
        await consumer.ack(messages[9])
        await asyncio.sleep(0.002)
        assert [ack.offset for ack in broker.got(Ack)] == [10]
        await asyncio.sleep(1)
        assert len(broker.got(Ack)) == 1


async def test_a_child_that_the_map_does_not_have_yet_is_waited_for(simulation: Simulation) -> None:
    """The controller may know a layout earlier than the broker that pushes the map."""
    async with (
        connected(simulation, with_records(1)) as (broker, client),
        client.stream_consumer("orders", "billing") as consumer,
    ):
        await consumer.ack((await receive(consumer, 1))[0])
        broker.segments[1] = Segment((0,))
        broker.append(1, b"child")
        broker.assign(1)
        assert await consumer.receive(timeout=5) is None
        broker.generation += 1
        broker.push_routes()
        assert [message.value for message in await receive(consumer, 1)] == [b"child"]


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
    """Its last ack found no channel, and no owner takes the grant that it had: another consumer read there since."""
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
