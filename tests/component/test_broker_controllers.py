"""One controller for each topic, whichever broker is asked first; what an old one does counts no more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from random import Random

import pytest

from braid.broker.config import GroupConfig
from braid.broker.groups.controllers import NO_LEASE, Controller, Controllers
from braid.broker.groups.groups import Groups
from braid.broker.segments.read_grants import GrantSigner
from braid.broker.topics import Topics
from braid.cluster.drained import DrainedSegments
from braid.cluster.members import Members
from braid.metadata import paths
from braid.metadata.memory import Fault, MemoryStore
from braid.metadata.store import Delete, Lease, Put
from braid.metadata.view import View
from braid.model.cluster import Registration
from braid.model.errors import BraidError, Moved, NotServing, ShuttingDown, SubscriptionNotFound, TopicNotFound
from braid.model.stored_record import encode
from braid.model.subscription import Subscription
from braid.testing.sim.loop import Simulation
from tests.kits.control import ORDERS, Readers, Recorder, faults, make_topic
from tests.kits.waiting import until

CONFIG = GroupConfig(session_grace_s=10.0, release_timeout_s=5.0)
PATH = ORDERS.path


class Node:
    """A broker, as far as its groups need one."""

    def __init__(self, simulation: Simulation, store: MemoryStore, name: str) -> None:
        self.name = name
        self.store = store.client(name)
        self.view = View(self.store)
        self.topics = Topics(self.view, simulation.clock, simulation.random)
        self.members = Members(self.view)
        self.lease: Lease | None = None
        self.controllers = Controllers(self.view, self.members, name, self.lease_id)
        drained = DrainedSegments(self.view)
        self.groups = Groups(
            self.topics, self.controllers, drained, simulation.clock, CONFIG, GrantSigner(lambda: "secret")
        )

    def lease_id(self) -> int:
        return self.lease.id if self.lease is not None else NO_LEASE

    async def register(self) -> None:
        self.lease = await self.store.grant_lease(80_000)
        record = Registration(address=f"{self.name}:6660", admin="", version="1", started_at=0).to_json()
        await self.store.txn([], [Put(paths.broker(self.name), record, self.lease.id)])

    async def start(self) -> None:
        await self.register()
        await self.view.load()
        self.groups.start()

    async def lose_lease(self) -> None:
        """As a broker that was cut off learns it: before its view shows anything."""
        assert self.lease is not None
        lease, self.lease = self.lease, None
        self.groups.lose_all(NotServing("the lease is lost"))
        await lease.revoke()

    async def stop(self) -> None:
        await self.groups.close()
        await self.view.stop()


class World:
    def __init__(self, simulation: Simulation) -> None:
        self.store = MemoryStore(simulation.clock)
        self.nodes = {name: Node(simulation, self.store, name) for name in "abc"}
        self.readers = Readers()

    @classmethod
    async def make(cls, simulation: Simulation) -> World:
        world = cls(simulation)
        for node in world.nodes.values():
            await node.start()
        await make_topic(world.nodes["a"].topics, segments=4)
        await world.store.txn([], [Put(paths.subscription(PATH, "billing"), encode(Subscription()))])
        await world.caught_up()
        return world

    async def caught_up(self) -> None:
        revision = (await self.store.list("/")).revision
        for node in self.nodes.values():
            await node.view.caught_up(revision)

    async def join(self, at: str, name: str) -> Recorder:
        member = Recorder(self.readers, name)
        number = await self.nodes[at].groups.join(ORDERS, "billing", name, member)

        def give_back(segment: int) -> None:
            member.gave_back(segment)
            self.nodes[at].groups.released(number, segment)

        member.give_back = give_back
        return member

    async def stop(self) -> None:
        for node in self.nodes.values():
            await node.stop()


@contextlib.asynccontextmanager
async def running_world(simulation: Simulation) -> AsyncIterator[World]:
    world = await World.make(simulation)
    yield world
    await world.stop()


async def test_who_is_asked_first_becomes_the_controller_and_the_others_say_who_it_is(simulation: Simulation) -> None:
    async with running_world(simulation) as world:
        a, b, _ = world.nodes.values()
        assert a.controllers.address(PATH) == ""
        member = await world.join("a", "one")
        await asyncio.sleep(0.1)
        assert member.latest() == (0, 1, 2, 3)
        assert a.controllers.is_here(PATH)
        await world.caught_up()
        assert not b.controllers.is_here(PATH)
        assert b.controllers.address(PATH) == a.controllers.address(PATH) == "a:6660"
        with pytest.raises(Moved) as moved:
            await world.join("b", "two")
        assert moved.value.owner == "a:6660"
        with pytest.raises(NotServing):
            b.controllers.fence(PATH)


@pytest.mark.parametrize("seed", range(20))
async def test_of_brokers_that_are_asked_at_the_same_moment_one_wins(seed: int, simulation: Simulation) -> None:
    async with running_world(simulation) as world:
        random = Random(seed)

        async def join(at: str, number: int) -> Recorder:
            for _ in range(random.randrange(20)):
                await asyncio.sleep(0)
            return await world.join(at, f"at-{at}-{number}")

        joins = [join(name, number) for name in "abc" for number in range(2)]
        outcomes = await asyncio.gather(*joins, return_exceptions=True)
        winners = [outcome for outcome in outcomes if isinstance(outcome, Recorder)]
        assert len(winners) == 2
        assert all(isinstance(outcome, Recorder | Moved) for outcome in outcomes)
        await world.caught_up()
        assert all(winner.expulsion is None for winner in winners)
        assert sum(node.controllers.is_here(PATH) for node in world.nodes.values()) == 1


async def test_a_broker_whose_view_is_behind_does_not_take_a_topic_from_its_controller(simulation: Simulation) -> None:
    async with running_world(simulation) as world:
        a, b, _ = world.nodes.values()
        await b.view.stop()
        await a.groups.control(ORDERS)
        with pytest.raises(BraidError):
            await b.groups.control(ORDERS)
        entry = await world.store.get(paths.controller(PATH))
        assert entry is not None
        assert Controller.from_json(entry.value).broker == "a"
        assert a.controllers.is_here(PATH)


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.UNCERTAIN])
async def test_a_claim_whose_answer_is_lost_is_read_back(fault: Fault, simulation: Simulation) -> None:
    async with running_world(simulation) as world:
        a = world.nodes["a"]
        a.store.fault = faults(fault)
        if fault is Fault.UNAVAILABLE:
            with pytest.raises(BraidError):
                await a.groups.control(ORDERS)
        await a.groups.control(ORDERS)
        assert a.controllers.is_here(PATH)


async def test_a_broker_without_a_lease_and_a_topic_that_is_gone_get_no_controller(simulation: Simulation) -> None:
    async with running_world(simulation) as world:
        a, b, _ = world.nodes.values()
        await a.lose_lease()
        with pytest.raises(NotServing, match="lost its lease"):
            await a.groups.control(ORDERS)
        await b.topics.mark_deleting(ORDERS)
        with pytest.raises(TopicNotFound):
            await b.groups.control(ORDERS)
        assert await world.store.get(paths.controller(PATH)) is None


@pytest.mark.parametrize("how", ["stops", "loses its lease"])
async def test_the_next_controller_gives_the_same_segments_to_the_same_names_in_a_higher_term(
    how: str, simulation: Simulation
) -> None:
    async with running_world(simulation) as world:
        a, b, _ = world.nodes.values()
        before = [await world.join("a", name) for name in ("one", "two")]
        await asyncio.sleep(0.1)
        had = {member.name: member.read_grants for member in before}
        assert {name: tuple(read_grants) for name, read_grants in had.items()} == {"one": (0, 2), "two": (1, 3)}
        await (a.groups.close() if how == "stops" else a.lose_lease())
        for member in before:
            assert isinstance(member.expulsion, NotServing | ShuttingDown), "which may be tried again"
        await world.caught_up()
        after = [await world.join("b", "one")]
        await asyncio.sleep(1)
        assert after[0].latest() == (0, 2), "who has not come back yet keeps its own for its grace"
        after.append(await world.join("b", "two"))
        await asyncio.sleep(0.1)
        assert b.controllers.is_here(PATH)
        for member in after:
            assert tuple(member.read_grants) == tuple(had[member.name])
            assert all(read_grant > had[member.name][segment] for segment, read_grant in member.read_grants.items())
            assert len(member.assigned) == 1, "nothing wandered"


async def test_an_old_controller_that_was_cut_off_can_write_nothing_and_expels_its_members_when_it_hears(
    simulation: Simulation,
) -> None:
    async with running_world(simulation) as world:
        a, _, _ = world.nodes.values()
        member = await world.join("a", "one")
        await asyncio.sleep(0.1)
        fence = a.controllers.fence(PATH)
        await world.store.txn([], [Delete(paths.controller(PATH))])
        with pytest.raises(NotServing):
            await a.groups._stored.put(ORDERS, "billing", "late", fence)
        await world.caught_up()
        await asyncio.sleep(0.1)
        assert isinstance(member.expulsion, NotServing)
        assert a.groups.members(PATH, "billing") == {}
        entry = await world.store.get(paths.consumer(PATH, "billing", "one"))
        assert entry is not None, "the next controller goes on from it"
        assert await world.store.get(paths.consumer(PATH, "billing", "late")) is None


async def test_sessions_whose_consumers_do_not_come_to_the_new_controller_end_after_their_grace(
    simulation: Simulation,
) -> None:
    async with running_world(simulation) as world:
        a, b, _ = world.nodes.values()
        for name in ("one", "two"):
            await world.join("a", name)
        await a.groups.close()
        await world.caught_up()
        member = await world.join("b", "two")
        await asyncio.sleep(CONFIG.session_grace_s + 1)
        assert member.latest() == (0, 1, 2, 3)
        await until(lambda: b.groups.members(PATH, "billing") == {"two": (0, 1, 2, 3)})
        assert await world.store.get(paths.consumer(PATH, "billing", "one")) is None


async def test_a_subscription_that_is_deleted_anywhere_ends_its_group(simulation: Simulation) -> None:
    async with running_world(simulation) as world:
        member = await world.join("a", "one")
        await world.store.txn([], [Delete(paths.subscription(PATH, "billing"))])
        await world.caught_up()
        assert isinstance(member.expulsion, SubscriptionNotFound)
        await until(lambda: not world.nodes["a"].groups.members(PATH, "billing"))
        await asyncio.sleep(1)
        assert await world.store.get(paths.consumer(PATH, "billing", "one")) is None


async def test_grants_rise_also_for_a_group_that_ended_and_began_anew(simulation: Simulation) -> None:
    async with running_world(simulation) as world:
        a = world.nodes["a"]
        first = Recorder(world.readers, "one")
        number = await a.groups.join(ORDERS, "billing", "one", first)
        await asyncio.sleep(0.1)
        had = first.read_grants
        first.end()
        await a.groups.leave(number)
        assert a.groups.members(PATH, "billing") == {}
        second = await world.join("a", "two")
        await asyncio.sleep(0.1)
        assert all(read_grant > had[segment] for segment, read_grant in second.read_grants.items())
        assert len(second.read_grants) == 4
