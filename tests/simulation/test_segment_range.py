"""A range of one segment read from its owner, in virtual time, while the segment moves and brokers stop and die."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from braid.client.client import Client
from braid.client.consuming.segment_range import read_segment_range
from braid.model.batch.columns import decode_messages
from braid.model.errors import BraidError, OffsetOutOfRange, SegmentNotFound, TimedOut, TopicNotFound
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import PATH, Brokers, running_brokers
from tests.kits.waiting import until

RECORDS = 400
WINDOW = 64 << 10
"""As small as it may be: much of the range is still on the broker when something happens."""


async def filled(brokers: Brokers, client: Client) -> int:
    """A topic of one segment with numbered records of 1 KiB in batches of ten; its id."""
    await client.admin.create_topic("orders")
    await until(lambda: brokers.owner(0))
    async with client.producer("orders", max_batch_records=10) as producer:
        for first in range(0, RECORDS, 10):
            await producer.send_many([b"%d" % number + bytes(1_000) for number in range(first, first + 10)])
    return (await client.routing.topic(PATH)).topic_id


class Reading:
    """What has arrived of the range; `event` runs once, when `after` records have."""

    def __init__(self, client: Client, topic_id: int, first: int = 0, until_offset: int = RECORDS) -> None:
        self.offsets: list[int] = []
        self.numbers: list[int] = []
        self._range = read_segment_range(client, PATH, topic_id, 0, first, until_offset, window_bytes=WINDOW)
        self._first, self._until = first, until_offset

    async def run(self, event: Callable[[], Awaitable[None]] | None = None, after: int = 60) -> None:
        async for delivery in self._range:
            for header, data in delivery.batches():
                for message in decode_messages(data, header):
                    if self._first <= message.offset < self._until:
                        self.offsets.append(message.offset)
                        self.numbers.append(int(message.value.rstrip(b"\0")))
            if event is not None and len(self.offsets) >= after:
                await event()
                event = None
        assert event is None, "the range was read before anything could happen"


@contextlib.asynccontextmanager
async def filled_topic(simulation: Simulation, timeout: float = 30.0) -> AsyncIterator[tuple[Brokers, Client, int]]:
    async with running_brokers(simulation) as brokers, brokers.client(timeout=timeout) as client:
        yield brokers, client, await filled(brokers, client)


@pytest.mark.parametrize(("first", "end"), [(0, RECORDS), (0, 1), (17, 33), (395, 400), (40, 50), (7, 7)])
async def test_exactly_the_offsets_of_the_range_arrive(first: int, end: int, simulation: Simulation) -> None:
    async with filled_topic(simulation) as (_brokers, client, topic_id):
        reading = Reading(client, topic_id, first, end)
        await reading.run()
        assert reading.offsets == reading.numbers == list(range(first, end))


async def test_reading_goes_on_where_it_was_when_the_segment_moves(simulation: Simulation) -> None:
    async with filled_topic(simulation) as (brokers, client, topic_id):

        async def move() -> None:
            await brokers.move(0, next(name for name in brokers.running if name != brokers.owner(0)))

        reading = Reading(client, topic_id)
        await reading.run(move)
        assert reading.offsets == reading.numbers == list(range(RECORDS))


async def test_reading_goes_on_when_the_owner_stops_and_another_broker_takes_over(simulation: Simulation) -> None:
    async with filled_topic(simulation) as (brokers, client, topic_id):

        async def stop() -> None:
            await brokers.stop(brokers.owner(0))

        reading = Reading(client, topic_id)
        await reading.run(stop)
        assert reading.offsets == list(range(RECORDS))


async def test_reading_waits_for_an_owner_that_was_killed_and_comes_back(simulation: Simulation) -> None:
    async with filled_topic(simulation, timeout=60.0) as (brokers, client, topic_id):

        async def restart() -> None:
            owner = brokers.owner(0)
            brokers.kill(owner)
            await asyncio.sleep(5)
            await brokers.start(owner)

        reading = Reading(client, topic_id)
        await reading.run(restart)
        assert reading.offsets == list(range(RECORDS))


async def test_reading_gives_up_after_the_timeout_when_nobody_serves_the_segment(simulation: Simulation) -> None:
    async with filled_topic(simulation, timeout=10.0) as (brokers, client, topic_id):
        begun = 0.0

        async def kill() -> None:
            nonlocal begun
            begun = asyncio.get_running_loop().time()
            brokers.kill(brokers.owner(0))

        with pytest.raises(BraidError):
            await Reading(client, topic_id).run(kill)
        assert 9 <= asyncio.get_running_loop().time() - begun <= 15


async def test_offsets_that_do_not_exist_yet_time_out_and_say_which(simulation: Simulation) -> None:
    async with filled_topic(simulation, timeout=5.0) as (_brokers, client, topic_id):
        with pytest.raises(TimedOut, match="offset 400 of segment 0"):
            await Reading(client, topic_id, 390, RECORDS + 10).run()


async def test_offsets_far_beyond_the_end_are_out_of_range(simulation: Simulation) -> None:
    async with filled_topic(simulation) as (_brokers, client, topic_id):
        with pytest.raises(OffsetOutOfRange) as caught:
            await Reading(client, topic_id, RECORDS + 10, RECORDS + 20).run()
        assert (caught.value.earliest, caught.value.end) == (0, RECORDS)


async def test_a_topic_that_was_created_again_is_another_topic(simulation: Simulation) -> None:
    async with filled_topic(simulation) as (_brokers, client, topic_id):
        with pytest.raises(TopicNotFound):
            await Reading(client, topic_id + 1).run()


async def test_a_segment_that_the_topic_does_not_have_is_refused(simulation: Simulation) -> None:
    async with filled_topic(simulation) as (_brokers, client, topic_id):
        with pytest.raises(SegmentNotFound):
            async for _ in read_segment_range(client, PATH, topic_id, 9, 0, 5):
                pass


async def test_who_stops_early_leaves_no_channel_open(simulation: Simulation) -> None:
    async with filled_topic(simulation) as (_brokers, client, topic_id):
        deliveries = read_segment_range(client, PATH, topic_id, 0, 0, RECORDS, window_bytes=WINDOW)
        await anext(deliveries)
        await deliveries.aclose()
        assert all(not link._channels for link in client.pool.links())
