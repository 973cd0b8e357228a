"""A split and a merge, with a crash of each broker that has a part in them before each of its requests to the metadata
store: so after each step that others can see. Whatever the moment, the new layout comes, no record is lost or there
twice, every subscription has its cursors, and the children know what the parents have stored (I1, I2, I5, I6, I10)."""

from __future__ import annotations

import pytest

from braid.metadata import paths
from braid.metadata.store import Compare, Put
from braid.model.names import SegmentName, TopicName
from braid.model.ownership import Ownership, OwnershipState
from braid.model.topic import Topic
from braid.model.transition import plan_merge, plan_split
from braid.storage.log.producers import ProducerTable
from braid.testing.sim.loop import Simulation, run_simulation
from tests.kits.brokers import PATH, Brokers, read_all
from tests.kits.crash_point import CrashPoint
from tests.kits.waiting import until

BEFORE = 12
AFTER = 8
SUBSCRIPTIONS = {"billing", "mailer"}
ORDERS = TopicName.parse(PATH)


async def begin(brokers: Brokers, parents: int) -> None:
    """As an operator does whose broker has nothing else to do with it."""
    key = paths.layout(PATH)
    entry = await brokers.store.get(key)
    assert entry is not None
    topic = Topic.from_json(entry.value)
    plan = plan_split(topic.layout, 0) if parents == 1 else plan_merge(topic.layout, 0, 1)
    begun = topic.beginning(plan, transition_id=7, created_at=0)
    assert (await brokers.store.txn([Compare(key, entry.revision)], [Put(key, begun.to_json())])).succeeded


def committed(brokers: Brokers) -> bool:
    topic = brokers.any().topics.get(PATH)
    return topic.transition is None and topic.layout.epoch == 1


def served(brokers: Brokers) -> bool:
    broker = brokers.any()
    names = [SegmentName.of(ORDERS, info) for info in broker.topics.get(PATH).segments.values()]
    records = [broker.cluster.owners.find(name) for name in names]
    return all(_is_served(brokers, record) for record in records) and all(
        brokers.running[brokers.owner(each.segment_id)].segments.get(PATH, each.segment_id).takes_publishes
        for each in broker.topics.get(PATH).layout.active
    )


def _is_served(brokers: Brokers, record: Ownership | None) -> bool:
    return record is not None and record.state is OwnershipState.SERVING and record.owner in brokers.running


def keys() -> list[bytes]:
    return [b"key-%d" % number for number in range(7)]


async def story(brokers: Brokers, victim: str, at: int, parents: int) -> int:
    """How many requests the victim made, if it was not killed. `a` leads, `b` has the parents."""
    await brokers.start("a")
    await until(lambda: brokers.running["a"].cluster.leader.leading)
    await brokers.start("b", "c")
    async with brokers.client(timeout=120.0) as client:
        await client.admin.create_topic("orders", segments=parents)
        for parent in range(parents):
            if brokers.owner(parent) != "b":
                await brokers.move(parent, "b")
        for name in SUBSCRIPTIONS:
            await client.admin.create_subscription("orders", name)
        async with client.producer("orders") as producer:
            for number in range(BEFORE):
                await producer.send(b"%d" % number, key=keys()[number % 7])
        point = CrashPoint(brokers, victim, at)
        await begin(brokers, parents)
        if at:
            await until(lambda: point.hit or committed(brokers))
            if point.hit:
                await until(lambda: victim not in brokers.running)
                await brokers.start(victim)
            else:
                point.disarm()
        await until(lambda: committed(brokers) and served(brokers))
    check_children(brokers, parents)
    async with brokers.client(timeout=120.0) as client:
        async with client.producer("orders") as producer:
            for number in range(BEFORE, BEFORE + AFTER):
                await producer.send(b"%d" % number, key=keys()[number % 7])
        found = await read_all(client, BEFORE + AFTER)
        for key in range(7):
            values = [int(value) for value in found if int(value) % 7 == key]
            assert values == list(range(key, BEFORE + AFTER, 7)), (
                "I4: a key's records are out of order, or not all there"
            )
        assert len(found) == BEFORE + AFTER
    return point.seen


def check_children(brokers: Brokers, parents: int) -> None:
    layout = brokers.any().topics.get(PATH).layout
    assert [segment.segment_id for segment in layout.active] == ([1, 2] if parents == 1 else [2])
    stored: set[int] = set()
    for parent in range(parents):
        owned = brokers.running[brokers.owner(parent)].segments.get(PATH, parent)
        assert owned.storage.log.seal_is_durable
        stored |= set(ProducerTable.from_rows(owned.producer_rows()))
    for segment in layout.active:
        child = brokers.running[brokers.owner(segment.segment_id)].segments.get(PATH, segment.segment_id)
        assert set(child.storage.log._producers) == stored, "I10: a child must know its parents' producers"
        assert child.cursors.all() == dict.fromkeys(SUBSCRIPTIONS, 0), "I5: a subscription has no cursor on a child"


def told(victim: str, at: int, parents: int, *, shared: bool) -> int:
    counted = 0

    async def main(simulation: Simulation) -> None:
        nonlocal counted
        brokers = Brokers(simulation, shared=shared)
        counted = await story(brokers, victim, at, parents)
        for name in [*brokers.running]:
            await brokers.stop(name)

    run_simulation(1, main)
    return counted


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "local"])
@pytest.mark.parametrize("parents", [1, 2], ids=["split", "merge"])
@pytest.mark.parametrize("victim", ["a", "b", "c"])
def test_a_transition_survives_a_crash_before_each_request(victim: str, parents: int, shared: bool) -> None:
    requests = told(victim, 0, parents, shared=shared)
    assert requests or victim == "c", "or this test shows nothing"
    for at in range(1, requests + 1):
        told(victim, at, parents, shared=shared)
