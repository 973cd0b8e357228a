"""Layout changes beside a broker of an earlier version: they are refused, or wait visibly. Queues are refused."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from braid.metadata import paths
from braid.metadata.store import Put
from braid.model.cluster import Registration
from braid.model.errors import NotAvailable, TransitionRefused
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import PATH, Brokers, running_brokers
from tests.kits.waiting import until


async def a_topic(brokers: Brokers) -> None:
    await brokers.call("a", "create_topic", topic="orders", segments=1)
    await until(lambda: bool(brokers.owner(0)))


def active(brokers: Brokers) -> dict[int, str]:
    return {segment.segment_id: str(segment.hash_range) for segment in brokers.any().topics.get(PATH).layout.active}


async def outdated(brokers: Brokers, name: str) -> Put:
    """Let a broker look like one of an earlier version. Returns what takes that back."""
    entry = await brokers.store.get(paths.broker(name))
    assert entry is not None
    older = msgspec.structs.replace(Registration.from_json(entry.value), version="0.0.9", features=())
    await brokers.store.txn([], [Put(entry.key, older.to_json(), entry.lease)])
    views = [each.cluster.members.brokers for each in brokers.running.values()]
    await until(lambda: all(view.get(name) == older for view in views))
    return Put(entry.key, entry.value, entry.lease)


async def test_a_broker_of_an_earlier_version_keeps_layouts_as_they_are(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers:
        await a_topic(brokers)
        await outdated(brokers, "c")
        with pytest.raises(TransitionRefused, match=r"broker c runs version 0\.0\.9"):
            await brokers.call("a", "split_segment", topic="orders", segment=0)
        assert brokers.any().topics.get(PATH).transition is None


async def test_a_broker_of_an_earlier_version_that_joins_a_split_holds_it_up_visibly(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers:
        await a_topic(brokers)
        gone = brokers.owner(0)
        brokers.kill(gone)
        await until(lambda: not brokers.any().cluster.members.is_live(gone))
        survivor = next(iter(brokers.running))
        splitting = asyncio.create_task(brokers.call(survivor, "split_segment", topic="orders", segment=0))
        await until(lambda: bool(brokers.owner(1) and brokers.owner(2)))
        older = await outdated(brokers, survivor)
        await brokers.start(gone)

        async def is_told() -> bool:
            waits = await brokers.any().group_host.transitions.waits_for(PATH)
            return len(waits) == 1 and f"broker {survivor} runs version 0.0.9" in waits[0]

        await until(is_told)
        assert active(brokers) == {0: "0000-ffff"}
        await brokers.store.txn([], [older])
        await splitting
        assert active(brokers) == {1: "0000-7fff", 2: "8000-ffff"}


async def test_a_broker_of_an_earlier_version_that_joins_while_owners_are_asked_holds_up_a_split(
    simulation: Simulation,
) -> None:
    async with running_brokers(simulation) as brokers:
        await a_topic(brokers)
        leader = next(name for name, each in brokers.running.items() if each.cluster.leader.leading)
        owner = next(name for name in brokers.running if name != leader)
        if brokers.owner(0) != owner:
            await brokers.move(0, owner)
        brokers.network.cut(leader, owner)  # The leader asks, and hears nothing.
        splitting = asyncio.create_task(brokers.call(leader, "split_segment", topic="orders", segment=0))
        await until(lambda: bool(brokers.owner(1) and brokers.owner(2)))
        older = await outdated(brokers, owner)
        brokers.network.heal(leader, owner)
        waits = brokers.running[leader].group_host.transitions._missing
        await until(lambda: any(f"broker {owner} runs version 0.0.9" in each for each in waits.get(PATH, ())))
        assert active(brokers) == {0: "0000-ffff"}
        await brokers.store.txn([], [older])
        await splitting
        assert active(brokers) == {1: "0000-7fff", 2: "8000-ffff"}


async def test_a_broker_of_an_earlier_version_keeps_queues_away_until_it_is_upgraded(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers:
        await a_topic(brokers)
        older = await outdated(brokers, "c")
        work = {"topic": "orders", "subscription": "work", "kind": "queue"}
        with pytest.raises(NotAvailable, match=r"cannot be a queue: broker c .* upgrade it first"):
            await brokers.call("a", "create_subscription", **work)
        assert await brokers.call("a", "list_subscriptions", topic="orders") == []
        await brokers.call("a", "create_subscription", topic="orders", subscription="billing")
        await brokers.store.txn([], [older])

        async def is_there() -> bool:
            try:
                return bool(await brokers.call("a", "create_subscription", **work))
            except NotAvailable:
                return False

        await until(is_there)
