"""The checkpoint consumer: which segments it may read, and what its checkpoints promise."""

from __future__ import annotations

import asyncio
import datetime
import random
from collections.abc import AsyncIterator

import pytest

from braid.client.consuming.checkpoint import (
    END,
    CheckpointConsumer,
    ConsumerCheckpoint,
    Position,
    chosen_positions,
    epochs_before,
    first_positions,
    kept_positions,
    readable_segments,
)
from braid.client.consuming.segment_range import read_segment_range
from braid.model.errors import (
    ClientClosed,
    InvalidArgument,
    NotServing,
    OffsetOutOfRange,
    SegmentNotFound,
    TimedOut,
    TopicNotFound,
)
from braid.model.ids import Epoch
from braid.model.message import Message
from braid.testing.sim.loop import Simulation
from braid.wire.operations import Kind, SegmentPositions
from tests.kits.client_stream import connected, with_records
from tests.kits.scripted_broker import TOPIC, ScriptedBroker
from tests.kits.waiting import until

# Which segments may be read: pure.


def test_a_child_is_read_when_its_parents_were() -> None:
    parents = {0: (), 1: (), 2: (0, 1), 3: (2,), 4: (2,)}
    assert readable_segments(parents, {}) == (0, 1)
    assert readable_segments(parents, {0: END, 1: 5}) == (1,)
    assert readable_segments(parents, {0: END, 1: END}) == (2,)
    assert readable_segments(parents, {0: END, 1: END, 2: END, 3: END, 4: 7}) == (4,)


def test_a_pruned_parent_holds_nobody_up() -> None:
    assert readable_segments({2: (0, 1), 3: (2,)}, {}) == (2,)


def test_a_grandparent_counts_also_when_the_parent_was_read() -> None:
    parents = {0: (), 1: (0,), 2: (1,)}
    assert readable_segments(parents, {0: 3, 1: END}) == (0,)


def random_dag(luck: random.Random) -> dict[int, tuple[int, ...]]:
    """Segments as splits and merges make them; some of the oldest are pruned."""
    active = list(range(luck.randint(1, 4)))
    parents: dict[int, tuple[int, ...]] = dict.fromkeys(active, ())
    for _ in range(luck.randint(0, 8)):
        at = luck.randrange(len(active))
        taken = active[at : at + luck.randint(1, 2)]
        children = list(range(len(parents), len(parents) + luck.randint(1, 3)))
        parents |= {child: tuple(taken) for child in children}
        active[at : at + len(taken)] = children
    pruned = luck.randint(0, max(len(parents) - len(active), 0))
    return {segment: given for segment, given in parents.items() if segment >= pruned}


def ancestors(parents: dict[int, tuple[int, ...]], segment: int) -> set[int]:
    direct = {parent for parent in parents[segment] if parent in parents}
    return direct.union(*(ancestors(parents, parent) for parent in direct))


@pytest.mark.parametrize("seed", range(200))
def test_over_any_layout_reading_is_ordered_and_reaches_every_segment(seed: int) -> None:
    luck = random.Random(seed)
    parents = random_dag(luck)
    positions: dict[int, Position] = {segment: luck.randint(0, 3) for segment in parents}
    read: list[int] = []
    while readable := readable_segments(parents, positions):
        for segment in readable:
            assert ancestors(parents, segment) <= set(read)
        segment = luck.choice(readable)
        if luck.random() < 0.5:
            # A checkpoint in between changes nothing.
            saved = ConsumerCheckpoint(topic=TOPIC, topic_id=1, positions=positions).to_bytes()
            positions = kept_positions(parents, ConsumerCheckpoint.from_bytes(saved).positions)
        positions[segment] = END
        read.append(segment)
    assert sorted(read) == sorted(parents)


def test_positions_follow_the_layout() -> None:
    assert kept_positions([1, 2, 3], {0: END, 1: 4, 2: END}) == {1: 4, 2: END, 3: 0}
    with pytest.raises(SegmentNotFound, match="segment 0 any more"):
        kept_positions([1], {0: 7})
    with pytest.raises(NotServing, match="segment 2 of the topic yet"):
        kept_positions([0, 1], {0: END, 1: 4, 2: 0})  # Of a broker whose layout is older than the checkpoint.
    with pytest.raises(NotServing, match="segment 2 of the topic yet"):
        kept_positions([0, 1], {0: END, 1: 4, 2: END})  # It would be read again when the layout shows it.


def test_descendants_of_what_was_named_are_read_from_their_beginning() -> None:
    children: dict[int, tuple[int, ...]] = {0: (2, 3), 1: (4,), 2: (), 3: (4,), 4: ()}
    assert chosen_positions(children, {0: 7}) == {0: 7, 1: END, 2: 0, 3: 0, 4: 0}
    assert chosen_positions(children, {0: 7, 4: 5}) == {0: 7, 1: END, 2: 0, 3: 0, 4: 5}
    assert chosen_positions(children, {2: 1}) == {0: END, 1: END, 2: 1, 3: END, 4: END}
    assert kept_positions([2, 5, 6], {2: 1}, left_out={6}) == {2: 1, 5: 0, 6: END}


def test_first_positions() -> None:
    segments = [SegmentPositions(0, 5, 20, True, 20), SegmentPositions(1, 0, 10, False, 3)]
    assert first_positions("earliest", segments) == {0: 5, 1: 0}
    assert first_positions("latest", segments) == {0: END, 1: 10}
    assert first_positions(1_000_000, segments) == {0: 20, 1: 3}


def test_first_positions_have_the_epochs_that_brokers_know() -> None:
    starts = {0: ((1, 0), (4, 12)), 1: ((6, 8),)}
    assert epochs_before({0: 12, 1: 9, 2: 5}, starts) == {0: 1, 1: 6}
    assert epochs_before({0: END, 1: 8}, starts) == {}


def test_a_checkpoint_is_readable_json_with_a_version() -> None:
    saved = ConsumerCheckpoint(topic=TOPIC, topic_id=7, positions={0: END, 1: 17}).to_bytes()
    assert saved == (
        b'{"version":1,"topic":"public/default/orders","topicId":7,"positions":{"0":"END","1":17}}'
    )  # people store these: the form does not change
    saved = ConsumerCheckpoint(topic=TOPIC, topic_id=7, positions={0: END, 1: 17}, epochs={1: Epoch(3)}).to_bytes()
    assert saved == (
        b'{"version":1,"topic":"public/default/orders","topicId":7,"positions":{"0":"END","1":17},"epochs":{"1":3}}'
    )
    assert ConsumerCheckpoint.from_bytes(saved).epochs == {1: 3}


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "no checkpoint"),
        (b"\xff\x00", "no checkpoint"),
        (b"[]", "no checkpoint"),
        (b'{"version":2,"what":"ever"}', "version 2"),
        (b'{"version":1,"topic":"a","topicId":7}', "no checkpoint"),
        (b'{"version":1,"topic":"a","topicId":7,"positions":{"0":-1}}', "negative"),
        (b'{"version":1,"topic":"a","topicId":7,"positions":{"0":"BEGIN"}}', "no checkpoint"),
        (b'{"version":1,"topic":"a","topicId":7,"positions":{"0":1},"epochs":{"0":-1}}', "negative epoch"),
        (b'{"version":1,"topic":"a","topicId":7,"positions":{"0":1},"epochs":{"0":"END"}}', "no checkpoint"),
        (b'{"version":1,"topic":"a","topicId":7,"positions":{"x":1}}', "no checkpoint"),
    ],
)
def test_bytes_that_are_no_checkpoint_are_refused(data: bytes, match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        ConsumerCheckpoint.from_bytes(data)


# Reading.


async def read(consumer: CheckpointConsumer, count: int) -> list[tuple[int, int]]:
    ids: list[tuple[int, int]] = []
    for _ in range(count):
        message = await consumer.receive(timeout=60)
        assert message is not None, f"only {len(ids)} of {count} came"
        ids.append(tuple(message.id))  # type: ignore[arg-type]
    return ids


async def test_a_checkpoint_continues_exactly_behind_the_last_record_handed_out(simulation: Simulation) -> None:
    async with connected(simulation, with_records(10, segments=2, per_batch=4)) as (_broker, client):
        seen = []
        saved: bytes | str = "earliest"
        for count in (7, 1, 12):
            async with client.checkpoint_consumer("orders", start=saved) as consumer:
                seen += await read(consumer, count)
                saved = consumer.checkpoint()
            assert consumer.checkpoint() == saved, "a closed consumer still knows its positions"
            with pytest.raises(ClientClosed):
                await consumer.receive()
        assert sorted(seen) == [(segment, offset) for segment in (0, 1) for offset in range(10)]
        assert ConsumerCheckpoint.from_bytes(bytes(saved)).positions == {0: 10, 1: 10}  # type: ignore[arg-type]


async def test_latest_begins_at_the_end_and_a_time_at_that_time(simulation: Simulation) -> None:
    async with connected(simulation, with_records(10)) as (broker, client):
        async with client.checkpoint_consumer("orders", start="latest") as consumer:
            broker.append(0, b"new")
            assert await read(consumer, 1) == [(0, 10)]
        noon = datetime.datetime(2026, 11, 15, 12, tzinfo=datetime.UTC)
        async with client.checkpoint_consumer("orders", start=noon) as consumer:
            assert await read(consumer, 1) == [(0, 5)]
        assert broker.frames[-3].topic == TOPIC
    assert 1_794_744_000_000_000 in [getattr(frame, "timestamp", None) for frame in broker.frames]


async def test_a_start_that_makes_no_sense_is_refused(simulation: Simulation) -> None:
    async with connected(simulation) as (_broker, client):
        with pytest.raises(InvalidArgument, match="zone"):
            client.checkpoint_consumer("orders", start=datetime.datetime(2026, 1, 1))  # noqa: DTZ001
        with pytest.raises(InvalidArgument, match="'earliest', 'latest'"):
            client.checkpoint_consumer("orders", start="first")
        other = ConsumerCheckpoint(topic="public/default/bills", topic_id=11, positions={}).to_bytes()
        with pytest.raises(InvalidArgument, match="bills"):
            client.checkpoint_consumer("orders", start=other)
        recreated = ConsumerCheckpoint(topic=TOPIC, topic_id=10, positions={0: 3}).to_bytes()
        with pytest.raises(InvalidArgument, match="created again"):
            await client.checkpoint_consumer("orders", start=recreated).start()
        with pytest.raises(TopicNotFound):
            await client.checkpoint_consumer("unknown", start="earliest").start()


async def test_a_position_that_retention_has_deleted_is_an_error_that_says_what_to_do(simulation: Simulation) -> None:
    async with connected(simulation, with_records(10)) as (broker, client):
        broker.segments[0].earliest = 6
        saved = ConsumerCheckpoint(topic=TOPIC, topic_id=11, positions={0: 2}).to_bytes()
        async with client.checkpoint_consumer("orders", start=saved) as consumer:
            with pytest.raises(OffsetOutOfRange, match=r"retention has deleted.*Begin at 'earliest'") as caught:
                await consumer.receive()
            assert (caught.value.earliest, caught.value.end) == (6, 10)
        async with client.checkpoint_consumer("orders", start="earliest") as consumer:
            assert await read(consumer, 1) == [(0, 6)]
        beyond = ConsumerCheckpoint(topic=TOPIC, topic_id=11, positions={0: 11}).to_bytes()
        async with client.checkpoint_consumer("orders", start=beyond) as consumer:
            with pytest.raises(OffsetOutOfRange, match="ends at 10"):
                await consumer.receive()


async def test_retention_that_overtakes_an_open_channel_is_the_same_error(simulation: Simulation) -> None:
    async with (
        connected(simulation) as (broker, client),
        client.checkpoint_consumer("orders", start="earliest") as consumer,
    ):
        await until(lambda: broker.opened)
        broker.segments[0].earliest = broker.segments[0].end = 6
        broker.opened[0].fail(OffsetOutOfRange("gone", 6, 6))
        with pytest.raises(OffsetOutOfRange, match="retention has deleted"):
            await consumer.receive()


async def test_broken_connections_repeat_nothing(simulation: Simulation) -> None:
    async with (
        connected(simulation, with_records(10, per_batch=4)) as (broker, client),
        client.checkpoint_consumer("orders", start="earliest", window_bytes=64 << 10) as consumer,
    ):
        seen = await read(consumer, 3)
        broker.cut()
        await until(lambda: len(broker.opened) == 2)
        seen += await read(consumer, 3)
        broker.opened[1].fail(NotServing("the log failed"))
        await until(lambda: len(broker.opened) == 3)
        seen += await read(consumer, 4)
        assert seen == [(0, offset) for offset in range(10)]


async def test_children_are_read_after_their_parents_and_from_their_beginning(simulation: Simulation) -> None:
    async with connected(simulation, with_records(10, segments=2, per_batch=3)) as (broker, client):
        async with client.checkpoint_consumer("orders", start="earliest") as consumer:
            first = await read(consumer, 5)
            broker.split(0, 2, 3)
            broker.append(2, b"a", b"b")
            broker.append(3, b"c")
            broker.split(2, 4)
            broker.append(4, b"d")
            seen = first + await read(consumer, 19)
            assert await consumer.receive(timeout=5) is None
            saved = consumer.checkpoint()
        assert sorted(seen) == sorted(
            [(0, each) for each in range(10)] + [(1, each) for each in range(10)] + [(2, 0), (2, 1), (3, 0), (4, 0)]
        )
        assert seen.index((0, 9)) < min(seen.index((2, 0)), seen.index((3, 0)))
        assert seen.index((2, 1)) < seen.index((4, 0))
        assert ConsumerCheckpoint.from_bytes(saved).positions == {0: END, 1: 10, 2: END, 3: 1, 4: 1}
        async with client.checkpoint_consumer("orders", start=saved) as consumer:
            broker.append(4, b"new")
            assert await read(consumer, 1) == [(4, 1)]
            assert await consumer.receive(timeout=5) is None


async def test_children_that_become_visible_later_are_waited_for(simulation: Simulation) -> None:
    async with (
        connected(simulation, with_records(10)) as (broker, client),
        client.checkpoint_consumer("orders", start="earliest") as consumer,
    ):
        broker.segments[0].sealed = True
        broker.pump()
        assert len(await read(consumer, 10)) == 10
        asked = broker.asked
        assert await consumer.receive(timeout=5) is None
        assert broker.asked == asked, "the broker pushes the layout"
        broker.split(0, 1)
        broker.append(1, b"child")
        assert await read(consumer, 1) == [(1, 0)]


@pytest.mark.parametrize("resumed", [True, False])
async def test_a_consumer_that_begins_between_a_seal_and_its_layout_waits_for_the_children(
    resumed: bool, simulation: Simulation
) -> None:
    async with connected(simulation, with_records(10)) as (broker, client):
        broker.segments[0].sealed = True
        async with client.checkpoint_consumer("orders", start="earliest") as consumer:
            await read(consumer, 10)
            assert await consumer.receive(timeout=5) is None
            saved = consumer.checkpoint()
        assert ConsumerCheckpoint.from_bytes(saved).positions == {0: END}
        async with client.checkpoint_consumer("orders", start=saved if resumed else "latest") as consumer:
            assert await consumer.receive(timeout=5) is None
            broker.split(0, 1)
            broker.append(1, b"child")
            assert await read(consumer, 1) == [(1, 0)]


async def test_a_consumer_that_never_reads_costs_one_window_for_each_segment(simulation: Simulation) -> None:
    broker = ScriptedBroker(3)
    for segment in broker.segments.values():
        for _ in range(100):
            segment.append(bytes(2_000))
    async with connected(simulation, broker) as (broker, client):
        async with client.checkpoint_consumer("orders", start="earliest", window_bytes=64 << 10):
            await asyncio.sleep(10)
        for channel in broker.opened:
            assert channel.granted_bytes == 64 << 10


async def test_only_the_named_segments_are_read_each_from_its_offset(simulation: Simulation) -> None:
    async with (
        connected(simulation, with_records(5, segments=3, per_batch=5)) as (broker, client),
        client.checkpoint_consumer("orders", start={0: 3, 2: 4}) as consumer,
    ):
        seen = [message.id async for message, _ in _numbered(consumer, 3)]
        assert sorted((each.segment, each.offset) for each in seen) == [(0, 3), (0, 4), (2, 4)]
        assert await consumer.receive(timeout=5) is None
        assert {channel.segment for channel in broker.opened} == {0, 2}
        saved = ConsumerCheckpoint.from_bytes(consumer.checkpoint())
        assert saved.positions == {0: 5, 1: END, 2: 5}
        with pytest.raises(SegmentNotFound, match="no segment 7; it has 0, 1, 2"):
            await client.checkpoint_consumer("orders", start={7: 0}).start()
        for wrong in ({}, {0: -1}, {"0": 5}, {0: "5"}, {0: 2.5}):
            with pytest.raises(InvalidArgument, match="the next offset of at least one segment"):
                client.checkpoint_consumer("orders", start=wrong)  # type: ignore[arg-type]


async def _numbered(consumer: CheckpointConsumer, count: int) -> AsyncIterator[tuple[Message, int]]:
    async for message in consumer:
        count -= 1
        yield message, count
        if not count:
            return


async def test_a_range_is_read_though_its_owner_gave_up_opening_it_at_first(simulation: Simulation) -> None:
    async with connected(simulation, with_records(3)) as (broker, client):
        broker.refusals = {Kind.OPEN: [TimedOut("the segment was not opened in time")]}
        topic = await client.routing.topic(TOPIC)
        reading = read_segment_range(client, TOPIC, topic.topic_id, 0, 0, 3)
        assert [value async for batch in reading for value in batch.values()] == [b"0/0", b"0/1", b"0/2"]
