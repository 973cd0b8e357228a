"""A broker whose disk is full waits for room, and opens its segments again when there is some."""

from __future__ import annotations

import asyncio

from braid.client.producing.producer import Producer
from braid.model.errors import DiskFull, Fenced
from braid.model.message import MessageId
from braid.testing.sim.disk import NO_FAULTS, DiskFaults
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import Brokers, running_brokers
from tests.kits.waiting import until

KEYS = [b"key-%d" % number for number in range(8)]
FULL = DiskFaults(capacity_bytes=0)


def failed(brokers: Brokers) -> int:
    """How many segments have a log that found no room."""
    return sum(isinstance(segment.storage.log.failure, DiskFull) for segment in brokers.any().segments.all())


async def fill(brokers: Brokers, producer: Producer, faults: DiskFaults) -> list[asyncio.Task[MessageId]]:
    """Send more than fits, to both segments, and wait until both have noticed."""
    brokers.disks["a"].faults = faults
    sending = [asyncio.ensure_future(producer.send(b"x" * 2_000_000, key=key)) for key in KEYS]
    await until(lambda: failed(brokers) == 2)
    return sending


async def test_two_segments_wait_for_room_at_the_same_time(simulation: Simulation) -> None:
    async with running_brokers(simulation, names=("a",)) as brokers, brokers.client(timeout=60) as client:
        await client.admin.create_topic("orders", segments=2)
        async with client.producer("orders", timeout=60) as producer:
            sending = await fill(brokers, producer, FULL)
            await asyncio.sleep(5)
            assert failed(brokers) == 2
            brokers.disks["a"].faults = NO_FAULTS
            ids = await asyncio.gather(*sending)
        assert {segment for segment, _ in ids} == {0, 1}


async def test_segments_that_wait_for_room_are_served_again_although_syncs_fail_meanwhile(
    simulation: Simulation,
) -> None:
    async with running_brokers(simulation, names=("a",)) as brokers, brokers.client(timeout=60) as client:
        await client.admin.create_topic("orders", segments=2)
        async with client.producer("orders", timeout=60) as producer:
            sending = await fill(brokers, producer, FULL)
            brokers.disks["a"].faults = DiskFaults(sync_failure=1.0)
            await asyncio.sleep(5)
            assert failed(brokers) == 2
            brokers.disks["a"].faults = NO_FAULTS
            await asyncio.gather(*sending)


async def test_a_segment_that_is_fenced_while_it_waits_for_room_is_ended_once(simulation: Simulation) -> None:
    async with running_brokers(simulation, names=("a",)) as brokers, brokers.client(timeout=60) as client:
        await client.admin.create_topic("orders", segments=2)
        async with client.producer("orders", timeout=60) as producer:
            sending = await fill(brokers, producer, FULL)
            fenced, _ = brokers.any().segments.all()
            ended: list[str] = []
            abandon = fenced.storage.abandon

            async def counted() -> None:
                ended.append(str(fenced.name))
                await abandon()

            fenced.storage.abandon = counted  # type: ignore[method-assign]
            assert fenced.cursors._on_fenced is not None
            fenced.cursors._on_fenced(Fenced("another owner has the segment"))
            await asyncio.sleep(1)
            brokers.disks["a"].faults = NO_FAULTS
            await asyncio.gather(*sending)
            assert ended == [str(fenced.name)]
