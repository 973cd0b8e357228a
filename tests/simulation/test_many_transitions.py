"""Many changes of a topic's layout in a row, in virtual time: what one costs does not depend on those before it."""

from __future__ import annotations

import asyncio
import gc
from typing import NamedTuple

from braid.broker.segments.owned_segment import OwnedSegment
from braid.testing.sim.loop import SimulatedLoop, Simulation
from tests.kits.brokers import PATH, Brokers, running_brokers

CHANGES = 120
PRUNED_S = 20.0
"""Between two changes. Retention and pruning look once a minute."""
STEADY = 30
"""After so many changes, as many segments are pruned as are made."""


class Found(NamedTuple):
    """What a topic has and costs after some changes."""

    segments: int
    keys: int
    objects: int
    files: int
    in_memory: int
    """Segments that the broker still refers to."""


async def found(brokers: Brokers) -> Found:
    assert brokers.objects is not None
    gc.collect()
    return Found(
        len(brokers.any().topics.get(PATH).layout.segments),
        len((await brokers.store.list("/")).entries),
        len(await brokers.objects.list("")),
        len(brokers.disks["a"].paths()),
        sum(isinstance(each, OwnedSegment) for each in gc.get_objects()),
    )


async def test_a_change_costs_the_same_however_many_came_before(simulation: Simulation) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    after, steps = [], []
    async with running_brokers(simulation, ("a",)) as brokers, brokers.client() as client:
        await client.admin.create_topic("orders", retention_ms=1_000)
        async with client.producer("orders") as producer:
            for number in range(CHANGES):
                began = loop.steps
                await producer.send(b"%d" % number, key=b"key")
                await client.admin.repartition("orders", 2 - number % 2)
                await asyncio.sleep(PRUNED_S)
                steps.append(loop.steps - began)
                if number % 10 == 0:
                    after.append(await found(brokers))
    early, late = after[: STEADY // 10], after[STEADY // 10 :]
    most = Found(*map(max, zip(*early, strict=True)))
    for each in late:
        # By the moment of the look, there is a segment more or less, with its keys, objects and files.
        assert all(now <= then + 5 for now, then in zip(each, most, strict=True)), (each, most)
    early_steps, late_steps = sum(steps[:STEADY]) / STEADY, sum(steps[-STEADY:]) / STEADY
    assert late_steps < 1.1 * early_steps


async def test_the_layout_stays_small_also_where_parents_and_children_have_different_owners(
    simulation: Simulation,
) -> None:
    """Each owner drops its own segments, parents before children: owners must not wait for each other's rounds."""
    kept = []
    async with running_brokers(simulation, ("a", "b", "c")) as brokers, brokers.client() as client:
        await client.admin.create_topic("orders", retention_ms=1_000)
        async with client.producer("orders") as producer:
            for number in range(100):
                await producer.send(b"%d" % number, key=b"key")
                await client.admin.repartition("orders", 2 - number % 2)
                await asyncio.sleep(PRUNED_S / 10)
                kept.append(len(brokers.any().topics.get(PATH).layout.segments))
    assert max(kept) < 130, "those of a minute"
    assert max(kept[50:]) < 1.2 * max(kept[:50]), kept
