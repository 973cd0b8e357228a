"""What a client does when segments have other owners: redirects, pushes that are late, brokers that do not answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from random import Random
from typing import Any

import pytest

from braid.client.client import Client, connect
from braid.client.pool import PRUNE_AFTER_S, SIGN_OF_LIFE_S
from braid.client.routing import LOOKUP_TIMEOUT_S, OwnerSearch
from braid.model.batch.header import BatchHeader, parse_header
from braid.model.errors import BraidError, ConnectFailed, ConnectionLost, Moved, NotServing, TopicNotFound
from braid.model.message import MessageId
from braid.ports.network import Address
from braid.testing.scripted_broker import Refuse, ScriptedBroker, Step
from braid.testing.sim.loop import Simulation
from braid.testing.sim.network import SimulatedNetwork
from braid.wire.operations import Kind, Route

PATH = "public/default/orders"
PORT = 6660


class World:
    def __init__(self, simulation: Simulation) -> None:
        self.loop = simulation.loop
        self.network = SimulatedNetwork(Random(simulation.seed))
        self.brokers = {name: ScriptedBroker(self.network.host(name)) for name in ("one", "two", "three")}
        self.one, self.two, self.three = self.brokers.values()

    def client(self, *names: str, **options: Any) -> Client:
        url = "braid://" + ",".join(f"{name}:{PORT}" for name in names)
        given: dict[str, Any] = {"timeout": 30.0, "random": Random(1), **options}
        return connect(url, network=self.network.host("client"), **given)

    def own(self, owner: str, epoch: int, *brokers: ScriptedBroker) -> None:
        """From now on these brokers say that."""
        for broker in brokers:
            broker.set_owner(PATH, f"{owner}:{PORT}" if owner else "", epoch)

    def share(self, *brokers: ScriptedBroker) -> None:
        """They keep one log, as a segment's does that moves between them."""
        for broker in brokers[1:]:
            broker.logs = brokers[0].logs


@contextlib.asynccontextmanager
async def running_world(simulation: Simulation) -> AsyncIterator[World]:
    world = World(simulation)
    for name, broker in world.brokers.items():
        await broker.start(name, PORT)
        broker.add_topic(PATH)
    yield world
    for broker in world.brokers.values():
        await broker.stop()


def owner_of(client: Client) -> tuple[str, int]:
    segment = client.routing._maps[PATH].by_id[0]
    return segment.owner, segment.epoch


# ── the map ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_redirect_counts_at_once_and_nothing_older_undoes_it(simulation: Simulation) -> None:
    async with running_world(simulation) as world, world.client("one") as client:
        await client.routing.topic(PATH)
        client.routing.redirect(PATH, 0, Moved("gone", f"two:{PORT}", 5))
        assert owner_of(client) == (f"two:{PORT}", 5)
        for epoch in (3, 4):  # Pushes with newer generations, by a broker that does not know yet.
            world.own("three", epoch, world.one)
            world.one.push()
            await asyncio.sleep(0.1)
            assert owner_of(client) == (f"two:{PORT}", 5)
            await client.routing.refresh(PATH)
            assert owner_of(client) == (f"two:{PORT}", 5)
        client.routing.redirect(PATH, 0, Moved("gone", f"three:{PORT}", 4))
        client.routing.redirect(PATH, 0, Moved("gone", f"three:{PORT}", 5))
        assert owner_of(client) == (f"two:{PORT}", 5)
        world.own("three", 6, world.one)
        world.one.push()
        await asyncio.sleep(0.1)
        assert owner_of(client) == (f"three:{PORT}", 6)


async def test_a_redirect_fills_in_an_owner_that_the_map_does_not_have_yet(simulation: Simulation) -> None:
    async with running_world(simulation) as world:
        world.own("", 4, world.one)
        async with world.client("one") as client:
            topic = await client.routing.topic(PATH)
            with pytest.raises(NotServing):
                topic.owner(0)
            client.routing.redirect(PATH, 0, Moved("nobody knows", "", 9))
            assert owner_of(client) == ("", 4)
            client.routing.redirect(PATH, 0, Moved("there", f"two:{PORT}", 4))
            assert owner_of(client) == (f"two:{PORT}", 4)


async def test_a_deleted_topic_is_not_brought_back_by_a_stale_push(simulation: Simulation) -> None:
    async with running_world(simulation) as world, world.client("one") as client:
        await client.routing.topic(PATH)
        old = world.one.generation, world.one.topics[PATH]
        world.one.generation += 5
        del world.one.topics[PATH]
        with pytest.raises(TopicNotFound):
            await client.routing.refresh(PATH)
        now = world.one.generation
        world.one.generation, world.one.topics[PATH] = old[0] + 1, old[1]
        world.one.push()
        await asyncio.sleep(0.1)
        del world.one.topics[PATH]
        world.one.generation = now
        with pytest.raises(TopicNotFound):
            await client.routing.topic(PATH)


async def test_who_waits_for_a_change_is_woken_by_the_push_that_names_a_later_owner(simulation: Simulation) -> None:
    async with running_world(simulation) as world, world.client("one") as client:
        await client.routing.topic(PATH)
        started = world.loop.time()
        assert await client.routing.changed(PATH, 0, 0, 60), "it is so already"
        assert not await client.routing.changed(PATH, 0, 1, 2)
        assert not any(client.routing._waiting.values()), "who has waited in vain is forgotten"
        assert world.loop.time() - started == pytest.approx(2)
        waiting = asyncio.create_task(client.routing.changed(PATH, 0, 1, 60))
        for owner, epoch in (("", 1), ("", 2), ("two", 2)):
            await asyncio.sleep(1)
            assert not waiting.done()
            world.own(owner, epoch, world.one)
            world.one.push()
        await asyncio.sleep(0.1)
        assert waiting.done()
        assert await waiting


async def test_what_was_pushed_or_fetched_is_acked_to_who_told_it(simulation: Simulation) -> None:
    async with running_world(simulation) as world, world.client("one") as client:
        await client.routing.topic(PATH)
        first = world.one.generation
        world.own("two", 2, world.one)
        world.one.push()
        await asyncio.sleep(0.1)
        await client.routing.refresh(PATH)
        await asyncio.sleep(0.1)
        assert world.one.acks == [first, first + 1, first + 1]


# ── whom to ask ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_when_the_link_that_pushes_is_lost_another_broker_is_asked_to(simulation: Simulation) -> None:
    async with running_world(simulation) as world, world.client("one", "two") as client:
        await client.routing.topic(PATH)
        first = world.one if world.one.lookups else world.two
        other = world.two if first is world.one else world.one
        await first.stop()
        await asyncio.sleep(1)
        assert other.lookups == 1, "nobody has asked for the topic since"
        world.own("three", 2, other)
        other.push()
        await asyncio.sleep(0.1)
        assert owner_of(client) == (f"three:{PORT}", 2)


async def test_owners_are_asked_when_the_brokers_that_were_given_are_gone(simulation: Simulation) -> None:
    async with running_world(simulation) as world:
        world.own("three", 2, world.one, world.three)
        async with world.client("one") as client:
            await client.routing.topic(PATH)
            await world.one.stop()
            await asyncio.sleep(2)
            assert world.three.lookups == 1


async def test_a_broker_that_does_not_answer_holds_up_no_lookup(simulation: Simulation) -> None:
    async with running_world(simulation) as world, world.client("one", "two") as client:
        await client.routing.topic(PATH)
        first = world.one if world.one.lookups else world.two
        first.silent = True
        started = world.loop.time()
        await client.routing.refresh(PATH)
        assert world.loop.time() - started < LOOKUP_TIMEOUT_S + 1
        first.silent = False


async def test_a_lookup_that_nobody_answers_may_be_tried_again(simulation: Simulation) -> None:
    async with running_world(simulation) as world, world.client("one") as client:
        world.one.silent = True
        with pytest.raises(ConnectionLost, match="was asked about topic") as failure:
            await client.routing.refresh(PATH)
        assert failure.value.retriable
        world.one.silent = False


async def test_a_machine_that_swallows_everything_delays_nobody_much(simulation: Simulation) -> None:
    async with running_world(simulation) as world:
        world.network.cut("client", "one")
        for seed in range(4):
            client = world.client("one", "two", random=Random(seed))
            started = world.loop.time()
            async with client:
                assert world.loop.time() - started < 1
                assert client.pool.links()[0].address == Address("two", PORT)


async def test_a_broker_that_lost_its_segments_and_gives_no_sign_of_life_is_let_go(simulation: Simulation) -> None:
    async with running_world(simulation) as world:
        world.own("two", 2, world.one)
        async with world.client("one") as client:
            link = await client.routing.owner_link(PATH, 0)
            world.two.silent = True
            request = link.request(Kind.POSITIONS)
            world.own("three", 3, world.one)
            world.one.push()
            started = world.loop.time()
            with pytest.raises(ConnectionLost, match="no sign of life"):
                await request
            assert world.loop.time() - started < SIGN_OF_LIFE_S + 1
            alive = await client.routing.owner_link(PATH, 0)
            world.own("one", 4, world.one)
            world.one.push()
            await asyncio.sleep(2 * SIGN_OF_LIFE_S)
            assert alive.alive, "it answered"


# ── links that nobody needs ──────────────────────────────────────────────────────────────────────────────────────────


async def test_a_link_that_no_route_names_is_closed_after_a_while_if_nobody_uses_it(simulation: Simulation) -> None:
    async with running_world(simulation) as world:
        world.own("two", 2, world.one)
        async with world.client("one") as client:
            link = await client.routing.owner_link(PATH, 0)
            await asyncio.sleep(2 * PRUNE_AFTER_S)
            assert link.alive, "it is named"
            started = world.loop.time()
            world.own("three", 3, world.one)
            world.one.push()
            await client.routing.changed(PATH, 0, 2, 1)
            await asyncio.sleep(PRUNE_AFTER_S - 1)
            assert link.alive, "it may be needed again"
            await link.lost
            assert world.loop.time() - started < PRUNE_AFTER_S + 10
            assert [each.address.host for each in client.pool.links()] == ["one"], "that one was given"
            again = await client.pool.link(Address("two", PORT))
            assert again.alive


async def test_a_link_that_is_used_or_named_again_is_not_closed(simulation: Simulation) -> None:
    async with running_world(simulation) as world:
        world.own("two", 2, world.one)
        async with world.client("one") as client:
            link = await client.routing.owner_link(PATH, 0)
            channel = link.open_channel(object())  # type: ignore[arg-type]
            world.own("three", 3, world.one)
            world.one.push()
            await asyncio.sleep(3 * PRUNE_AFTER_S)
            assert link.alive, "it has a channel"
            link.forget_channel(channel)
            world.own("two", 4, world.one)
            world.one.push()
            await asyncio.sleep(3 * PRUNE_AFTER_S)
            assert link.alive, "it is named again"


# ── producers ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Moving:
    """A segment that goes from one broker to another when so many publishes were seen. The first one pushes that, or
    only refuses, and its map stays as it was."""

    def __init__(self, world: World, after: int, outage_s: float, *, tells: bool) -> None:
        self.world, self.after, self.outage_s, self.tells = world, after, outage_s, tells
        self.seen = 0
        self.moved_at: float | None = None
        world.share(world.one, world.two)
        for broker in (world.one, world.two):
            broker.script = lambda route, header, broker=broker: self(broker, route, header)  # type: ignore[misc]

    def __call__(self, broker: ScriptedBroker, _route: Route, _header: BatchHeader) -> Step | Refuse:
        self.seen += 1
        if self.moved_at is None and self.seen > self.after:
            self.moved_at = self.world.loop.time()
            if self.tells:
                self.world.own("", 1, self.world.one)
                self.world.one.push()
            self.world.loop.call_later(self.outage_s, self._serve)
        if self.moved_at is None:
            return Step.CONFIRM
        if self.world.loop.time() < self.moved_at + self.outage_s:
            return Refuse(Moved("it is moving", "", 1))
        return Step.CONFIRM if broker is self.world.two else Refuse(Moved("it has moved", f"two:{PORT}", 2))

    def _serve(self) -> None:
        self.world.own("two", 2, self.world.two)
        if self.tells:
            self.world.own("two", 2, self.world.one)
            self.world.one.push()


def stored(broker: ScriptedBroker) -> Sequence[int]:
    return [parse_header(batch).base_offset for batch in broker.logs[PATH, 0].batches]


@pytest.mark.parametrize("outage_s", [0.0, 0.05, 0.5, 2.0])
@pytest.mark.parametrize("tells", [True, False])
async def test_a_producer_rides_through_a_move_without_a_duplicate_or_a_change_of_order(
    outage_s: float, tells: bool, simulation: Simulation
) -> None:
    async with running_world(simulation) as world:
        moving = Moving(world, 20, outage_s, tells=tells)
        ids: list[MessageId] = []
        async with world.client("one") as client, client.producer("orders") as producer:
            for number in range(300):
                ids.append(await producer.send(b"%d" % number, key=b"k"))
                if number == 20:
                    assert moving.moved_at is not None
                    late_s = world.loop.time() - moving.moved_at - outage_s
                    assert late_s < (0.1 if tells else 1.1), "a push is not waited out"
        assert [each.offset for each in ids] == list(range(300))
        assert len(stored(world.two)) == 300


async def test_pipelined_batches_that_meet_a_move_are_stored_once_and_in_order(simulation: Simulation) -> None:
    async with running_world(simulation) as world:
        Moving(world, 30, 0.3, tells=True)
        async with world.client("one") as client, client.producer("orders") as producer:
            receipts = []
            for number in range(400):
                receipts.append(producer.submit(b"%d" % number))
                await asyncio.sleep(0.001)
            ids = [await receipt for receipt in receipts]
        assert [each.offset for each in ids] == list(range(400))


async def test_a_search_waits_longer_each_time_and_begins_anew_when_something_worked(simulation: Simulation) -> None:
    async with running_world(simulation) as world, world.client("one") as client:
        search = OwnerSearch(client.routing, PATH, 0, client.backoff())
        await search.link()
        waits = []
        error: BraidError = NotServing("not yet")
        for _ in range(12):
            started = world.loop.time()
            await search.after(error)
            waits.append(world.loop.time() - started)
        assert waits[0] < 0.05
        assert all(0.5 <= wait < 1.1 for wait in waits[-3:])
        search.worked()
        started = world.loop.time()
        await search.after(error)
        assert world.loop.time() - started < 0.05


async def test_a_search_pauses_while_nobody_answers_though_the_map_names_a_later_owner_than_was_tried(
    simulation: Simulation,
) -> None:
    async with running_world(simulation) as world, world.client("one") as client:
        search = OwnerSearch(client.routing, PATH, 0, client.backoff())
        await search.link()
        world.own("one", 2, world.one)
        world.one.push()
        await client.routing.changed(PATH, 0, 1, 1)
        await world.one.stop()
        await asyncio.sleep(0.1)
        began = world.loop.time()
        for _ in range(12):
            with pytest.raises(ConnectFailed):
                await search.link()
            with contextlib.suppress(ConnectFailed):
                await search.after(ConnectionLost("it is gone"))
        assert world.loop.time() - began > 3.0


async def test_a_search_that_finds_another_owner_begins_anew(simulation: Simulation) -> None:
    """However long the last one was tried: this one may be a few milliseconds behind its record."""
    async with running_world(simulation) as world:
        world.own("one", 1, world.one)
        async with world.client("one") as client:
            search = OwnerSearch(client.routing, PATH, 0, client.backoff())
            await search.link()
            for _ in range(8):
                await search.after(NotServing("not yet"))
            world.own("two", 2, world.one)
            await client.routing.refresh(PATH)
            await search.link()
            began = world.loop.time()
            await search.after(NotServing("not open yet"))
            assert world.loop.time() - began < 0.05
