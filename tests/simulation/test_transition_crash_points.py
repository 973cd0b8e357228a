"""A split, a merge, a repartition, the end of a segment, and a change that is taken back, with a crash of each broker
that has a part in them before each of its requests to the metadata store: so after each step that others can see.

Whatever the moment, the next driver finishes or undoes what was begun, no record is lost or there twice, every
subscription has its cursors, and the children know what the parents have stored (I1, I2, I5, I6, I10)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import pytest

from braid.client.client import Client
from braid.metadata import paths
from braid.metadata.store import Compare, Put
from braid.model.layout import Layout
from braid.model.names import SegmentName, TopicName
from braid.model.ownership import Ownership, OwnershipState
from braid.model.topic import Topic
from braid.model.transition import LayoutPlan, plan_merge, plan_repartition, plan_rollover, plan_split
from braid.storage.log.producers import ProducerTable
from braid.testing.sim.loop import Simulation, run_simulation
from tests.kits.brokers import PATH, SHARED, Brokers, read_all
from tests.kits.crash_point import CrashPoint
from tests.kits.waiting import until

BEFORE = 12
AFTER = 8
SUBSCRIPTIONS = {"billing", "mailer"}
ORDERS = TopicName.parse(PATH)


class Change(NamedTuple):
    parents: int
    plan: Callable[[Layout], LayoutPlan]
    children: list[int]


CHANGES = {
    "split": Change(1, lambda layout: plan_split(layout, 0), [1, 2]),
    "merge": Change(2, lambda layout: plan_merge(layout, 0, 1), [2]),
    "repartition": Change(2, lambda layout: plan_repartition(layout, 3), [2, 3, 4]),
    "terminate": Change(1, lambda layout: plan_rollover(layout, 0), [1]),
}


async def write(brokers: Brokers, change: Callable[[Topic], Topic]) -> None:
    """Change the topic's record, as an operator does whose broker has nothing else to do with it."""
    key, written = paths.layout(PATH), False
    while not written:
        entry = await brokers.store.get(key)
        assert entry is not None
        data = change(Topic.from_json(entry.value)).to_json()
        written = (await brokers.store.txn([Compare(key, entry.revision)], [Put(key, data)])).succeeded


async def begin(brokers: Brokers, plan: Callable[[Layout], LayoutPlan]) -> None:
    await write(brokers, lambda topic: topic.beginning(plan(topic.layout), transition_id=7, created_at=0))


class Victim:
    """A broker that dies before one of its requests, and comes back: soon, or when another driver has done the work."""

    def __init__(self, brokers: Brokers, name: str, at: int) -> None:
        self._brokers = brokers
        self._name = name
        self._is_back = False
        self.point = CrashPoint(brokers, name, at)

    async def reach(self, done: Callable[[Brokers], object], *, without: bool = False) -> None:
        """Wait for it, whether the broker dies meanwhile or not. `without`: if it dies, it stays away until then."""
        brokers, point = self._brokers, self.point
        await until(lambda: (point.hit and not self._is_back) or done(brokers))
        if point.hit and not self._is_back:
            await until(lambda: self._name not in brokers.running)
            if without:
                await until(lambda: done(brokers))
            await brokers.start(self._name)
            self._is_back = True
            await until(lambda: done(brokers))


def committed(brokers: Brokers) -> bool:
    topic = brokers.any().topics.get(PATH)
    return topic.transition is None and topic.layout.epoch == 1


def finalized(brokers: Brokers) -> bool:
    return PATH not in brokers.any().topics.committed


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


async def prepare(brokers: Brokers, client: Client, parents: int) -> None:
    """Let `b` have a topic with subscriptions and records."""
    await client.admin.create_topic("orders", segments=parents)
    for parent in range(parents):
        if brokers.owner(parent) != "b":
            await brokers.move(parent, "b")
    for name in SUBSCRIPTIONS:
        await client.admin.create_subscription("orders", name)
    async with client.producer("orders") as producer:
        for number in range(BEFORE):
            await producer.send(b"%d" % number, key=keys()[number % 7])


async def start(brokers: Brokers) -> None:
    """`a` leads."""
    await brokers.start("a")
    await until(lambda: brokers.running["a"].cluster.leader.leading)
    await brokers.start("b", "c")


async def check_records(brokers: Brokers) -> None:
    """Send some more records, and compare all."""
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


async def change_story(brokers: Brokers, name: str, at: int, change: Change, *, stays_away: bool) -> int:
    """How many requests the victim made, if it was not killed. `a` leads, `b` has the parents."""
    await start(brokers)
    async with brokers.client(timeout=120.0) as client:
        await prepare(brokers, client, change.parents)
        victim = Victim(brokers, name, at)
        await begin(brokers, change.plan)
        await victim.reach(committed, without=stays_away)
        await victim.reach(served)
        check_children(brokers, change)
        skipping = asyncio.gather(*(client.admin.skip("orders", each) for each in SUBSCRIPTIONS))
        await victim.reach(lambda _: skipping.done())
        await skipping
        await victim.reach(finalized, without=stays_away)
        victim.point.disarm()
        await until(lambda: served(brokers))
    await check_records(brokers)
    return victim.point.seen


def check_children(brokers: Brokers, change: Change) -> None:
    layout = brokers.any().topics.get(PATH).layout
    assert [segment.segment_id for segment in layout.active] == change.children
    stored: set[int] = set()
    for parent in range(change.parents):
        owned = brokers.running[brokers.owner(parent)].segments.get(PATH, parent)
        assert owned.storage.log.seal_is_durable
        stored |= set(ProducerTable.from_rows(owned.producer_rows()))
    for segment in layout.active:
        child = brokers.running[brokers.owner(segment.segment_id)].segments.get(PATH, segment.segment_id)
        known = set(child.storage.log._producers)
        if len(segment.parent_ids) == change.parents:
            assert known == stored, "I10: a child must know its parents' producers"
        else:
            assert known <= stored
        assert child.cursors.all() == dict.fromkeys(SUBSCRIPTIONS, 0), "I5: a subscription has no cursor on a child"


def children_served(brokers: Brokers) -> bool:
    return bool(brokers.owner(1) and brokers.owner(2))


async def nothing_is_left(brokers: Brokers) -> bool:
    """Of the children, in the metadata and in shared storage. Nobody removes files for a broker that is down."""
    names = [entry.key for entry in (await brokers.store.list("/")).entries]
    if brokers.objects is not None:
        names += [each.name for each in await brokers.objects.list("")]
    return not any(child in name for name in names for child in ("0000-7fff-1", "8000-ffff-2"))


async def abort_story(brokers: Brokers, name: str, at: int, *, stays_away: bool) -> int:
    """How many requests the victim made. The parent's owner `b` is down: the change waits until it is aborted."""
    await start(brokers)
    async with brokers.client(timeout=120.0) as client:
        await prepare(brokers, client, 1)
    brokers.kill("b")
    await until(lambda: not brokers.any().cluster.members.is_live("b"))
    victim = Victim(brokers, name, at)
    await begin(brokers, CHANGES["split"].plan)
    await victim.reach(children_served)
    await write(brokers, Topic.aborted)
    records = [SegmentName.at(PATH, each) for each in ("0000-7fff-1", "8000-ffff-2")]
    await victim.reach(lambda _: not any(map(brokers.any().cluster.owners.find, records)), without=stays_away)
    victim.point.disarm()
    await until(lambda: nothing_is_left(brokers))
    await brokers.start("b")
    await until(lambda: served(brokers))
    topic = brokers.any().topics.get(PATH)
    assert (topic.layout.epoch, [each.segment_id for each in topic.layout.active]) == (0, [0])
    assert brokers.running["b"].segments.get(PATH, 0).cursors.all() == dict.fromkeys(SUBSCRIPTIONS, 0)
    await check_records(brokers)
    return victim.point.seen


def told(story: Callable[[Brokers], Awaitable[int]], *, shared: bool) -> int:
    counted = 0

    async def main(simulation: Simulation) -> None:
        nonlocal counted
        brokers = Brokers(simulation, shared=shared)
        counted = await story(brokers)
        for name in [*brokers.running]:
            await brokers.stop(name)

    run_simulation(1, main)
    return counted


CASES = [("split", False), ("merge", False), *((change, True) for change in CHANGES)]


@pytest.mark.parametrize(("change", "shared"), CASES)
@pytest.mark.parametrize("victim", ["a", "b", "c"])
def test_a_transition_survives_a_crash_before_each_request(victim: str, change: str, shared: bool) -> None:
    stays_away = shared and victim == "a"  # Then another broker must drive the change.

    def at(request: int) -> int:
        return told(
            lambda brokers: change_story(brokers, victim, request, CHANGES[change], stays_away=stays_away),
            shared=shared,
        )

    requests = at(0)
    assert requests or victim == "c", "or this test shows nothing"
    for request in range(1, requests + 1):
        at(request)


@SHARED
@pytest.mark.parametrize("victim", ["a", "c"])
def test_a_transition_that_is_aborted_is_undone_after_a_crash_before_each_request(victim: str, shared: bool) -> None:
    stays_away = shared and victim == "a"

    def at(request: int) -> int:
        return told(lambda brokers: abort_story(brokers, victim, request, stays_away=stays_away), shared=shared)

    requests = at(0)
    assert requests, "or this test shows nothing"
    for request in range(1, requests + 1):
        at(request)
