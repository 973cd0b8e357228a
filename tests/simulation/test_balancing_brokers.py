"""Balancing from end to end: whole brokers count, report, decide and move, in virtual time."""

from __future__ import annotations

import asyncio

from braid.testing.checkers.fence_checker import FenceChecker
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import PATH, Brokers, running_brokers
from tests.kits.waiting import until

SEGMENTS = 4
VALUE = bytes(128 << 10)
RATE = 12
"""Records per second: 1.5 MiB/s, above what is left alone."""


async def load_one_broker(brokers: Brokers, seconds: int) -> None:
    """`a` has all segments, because the others came later, and there is load on all of them."""
    await brokers.start("a")
    await brokers.call("a", "create_topic", topic="orders", segments=SEGMENTS)
    await until(lambda: owners(brokers) == {"a"})
    await brokers.start("b", "c")
    async with brokers.client() as client, client.producer("orders") as producer:
        for _ in range(seconds * RATE):
            await producer.send(VALUE)  # Without a key: the segments take turns.
            await asyncio.sleep(1 / RATE)


def owners(brokers: Brokers) -> set[str]:
    return {brokers.owner(segment) for segment in range(SEGMENTS)}


async def test_a_broker_that_has_all_the_load_is_relieved_and_no_record_is_lost(simulation: Simulation) -> None:
    async with running_brokers(simulation, (), balance=True) as brokers:
        await load_one_broker(brokers, 75)
        assert len(owners(brokers)) > 1, "a was relieved of something"
        reports = {name: broker.cluster.members.loads.get(name) for name, broker in brokers.running.items()}
        assert all(report is not None for report in reports.values())
        async with brokers.client() as client, client.checkpoint_consumer("orders", start="earliest") as reader:
            found = 0
            while found < 75 * RATE:
                batch = await reader.receive_batch(timeout=60)
                assert batch is not None
                found += len(batch.table)


async def test_nothing_moves_by_itself_unless_somebody_asked_for_it(simulation: Simulation) -> None:
    async with running_brokers(simulation, ()) as brokers:
        await load_one_broker(brokers, 75)
        assert owners(brokers) == {"a"}
        plan = await brokers.call("b", "balance", dryRun=True)
        assert plan["moves"], "the dry run tells what would be done"
        assert {move["from"] for move in plan["moves"]} == {"a"}
        assert brokers.any().topics.find(PATH) is not None


async def idle_at_one_broker(brokers: Brokers) -> None:
    await brokers.start("a")
    await brokers.call("a", "create_topic", topic="orders", segments=SEGMENTS)
    await until(lambda: owners(brokers) == {"a"})
    await brokers.start("b", "c")
    await until(lambda: len(brokers.any().cluster.members.loads.all()) == 3)


def numbers(brokers: Brokers) -> list[int]:
    """How many segments each broker serves, the fewest first."""
    served = [brokers.owner(segment) for segment in range(SEGMENTS)]
    return sorted(served.count(broker) for broker in brokers.running)


async def test_idle_segments_are_distributed_when_somebody_asks_for_it(simulation: Simulation) -> None:
    async with running_brokers(simulation, ()) as brokers:
        await idle_at_one_broker(brokers)
        broken: list[BaseException] = []
        FenceChecker(brokers.store, broken.append)
        assert not brokers.running["b"].cluster.leader.leading, "a leads, and b passes the call on"
        begun = await brokers.call("b", "balance")
        assert broken == []
        assert begun["begun"] == 2
        assert {move["from"] for move in begun["moves"]} == {"a"}
        await until(lambda: numbers(brokers) == [1, 1, 2])
        assert (await brokers.call("b", "balance"))["notes"][0]["remark"] == "balanced"


async def test_idle_segments_are_distributed_by_themselves_when_the_cluster_was_calm_for_a_while(
    simulation: Simulation,
) -> None:
    async with running_brokers(simulation, (), balance=True) as brokers:
        await idle_at_one_broker(brokers)
        began = simulation.clock.monotonic()
        await until(lambda: numbers(brokers) == [1, 1, 2], 600)
        assert simulation.clock.monotonic() - began > 240
