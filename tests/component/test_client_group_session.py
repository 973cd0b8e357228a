"""A stream consumer whose controller and whose segments' owners are different brokers, which come and go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from msgspec.structs import replace

from braid.client.client import Client, connect
from braid.model.errors import Moved, NotServing, ShuttingDown, SubscriptionNotFound
from braid.testing.sim.loop import Simulation
from braid.testing.sim.network import SimulatedNetwork
from braid.wire.operations import Expelled, Join, Kind, Leave, Open, TopicRoute, TopologyRequest
from tests.kits.client_stream import offsets, receive, with_records
from tests.kits.scripted_broker import PORT, ScriptedBroker
from tests.kits.waiting import until

Test = Callable[["Pair", Client], Awaitable[None]]


class Controller(ScriptedBroker):
    """Knows no segments: they are at the broker called `broker`."""

    def __init__(self, owner: ScriptedBroker) -> None:
        super().__init__()
        self.owner = owner
        self.controller = ""

    def routes(self, request: TopologyRequest) -> tuple[TopicRoute, ...]:
        return tuple(replace(route, controller=self.controller) for route in self.owner.routes(request))


class Pair:
    """Two brokers that may be the controller, and one that has the segments."""

    def __init__(self) -> None:
        self.owner = with_records(20)
        self.first, self.second = Controller(self.owner), Controller(self.owner)
        self.network: SimulatedNetwork


@contextlib.asynccontextmanager
async def connected(simulation: Simulation) -> AsyncIterator[tuple[Pair, Client]]:
    pair = Pair()
    pair.network = network = SimulatedNetwork(simulation.random, latency_s=(1e-4, 1e-3))
    for name, broker in (("broker", pair.owner), ("first", pair.first), ("second", pair.second)):
        await broker.listen(network.host(name))
    client = connect(
        f"braid://first:{PORT}", network=network.host("client"), clock=simulation.clock, random=simulation.random
    )
    async with client:
        yield pair, client


def expel(broker: ScriptedBroker, error: type[Any] = NotServing) -> None:
    expelled = Expelled(broker.last_session, error.code, "by the test", error.retriable)
    next(peer for peer in broker.peers if broker.last_session in peer.sessions).push(Kind.EXPEL, expelled)


async def test_a_consumer_joins_where_the_map_says(simulation: Simulation) -> None:
    async with connected(simulation) as (pair, client):
        pair.first.controller = f"second:{PORT}"
        async with client.stream_consumer("orders", "billing") as consumer:
            assert offsets(await receive(consumer, 5)) == [0, 1, 2, 3, 4]
        assert not pair.first.got(Join)
        assert len(pair.second.got(Join)) == 1
        assert len(pair.second.got(Leave)) == 1


async def test_a_consumer_that_is_sent_to_the_controller_goes_there_at_once(simulation: Simulation) -> None:
    async with connected(simulation) as (pair, client):
        pair.first.refusals[Kind.JOIN] = [Moved("not here", f"second:{PORT}", 7)]
        started = asyncio.get_running_loop().time()
        async with client.stream_consumer("orders", "billing") as consumer:
            assert asyncio.get_running_loop().time() - started < 0.1
            assert offsets(await receive(consumer, 5)) == [0, 1, 2, 3, 4]
        assert len(pair.first.got(Join)) == len(pair.second.got(Join)) == 1


@pytest.mark.parametrize("error", [NotServing, ShuttingDown, Moved])
async def test_a_lost_session_is_joined_again_while_the_channel_reads_on(
    error: type[Any], simulation: Simulation
) -> None:
    async with connected(simulation) as (pair, client):
        async with client.stream_consumer("orders", "billing", name="worker-1") as consumer:
            assert offsets(await receive(consumer, 5)) == [0, 1, 2, 3, 4]
            pair.first.refusals[Kind.JOIN] = [NotServing("not yet")] * 10
            expel(pair.first, error)
            pair.owner.append(0, b"while nobody is the controller")
            assert offsets(await receive(consumer, 16)) == list(range(5, 21))
            assert consumer.segments == (0,)
            await until(lambda: len(pair.first.got(Join)) == 12)
            pair.owner.append(0, b"later")
            assert offsets(await receive(consumer, 1)) == [21]
        assert {join.consumer for join in pair.first.got(Join)} == {"worker-1"}
        assert [join.create for join in pair.first.got(Join)] == [True] + [False] * 11
        assert len(pair.owner.opened) == 1, "the channel was not touched"


async def test_when_the_controllers_link_breaks_the_next_controller_is_found_by_the_map(simulation: Simulation) -> None:
    async with connected(simulation) as (pair, client):
        pair.first.controller = f"second:{PORT}"
        async with client.stream_consumer("orders", "billing") as consumer:
            await receive(consumer, 5)
            pair.network.crash("second")
            pair.network.reset("client", "second")
            await asyncio.sleep(2)
            pair.first.controller = ""
            pair.first.generation += 1
            await until(lambda: pair.first.got(Join))
            await asyncio.sleep(1)
            assert offsets(await receive(consumer, 15)) == list(range(5, 20))
        assert len(pair.owner.opened) == 1


async def test_a_session_that_ends_for_good_ends_the_consumer(simulation: Simulation) -> None:
    async with connected(simulation) as (pair, client):
        async with client.stream_consumer("orders", "billing") as consumer:
            await receive(consumer, 5)
            expel(pair.first, SubscriptionNotFound)
            await asyncio.sleep(0.1)
            with pytest.raises(SubscriptionNotFound):
                await consumer.receive()
        await until(lambda: not pair.owner.channels)


async def test_channels_are_opened_by_the_seat_that_was_assigned_last(simulation: Simulation) -> None:
    async with connected(simulation) as (pair, client):
        pair.first.term, pair.first.grants = 5, {0: 3}
        async with client.stream_consumer("orders", "billing") as consumer:
            await receive(consumer, 5)
            assert [(each.subscription, each.read_grant) for each in pair.owner.opened] == [("billing", (5, 3))]
            pair.first.term, pair.first.grants = 8, {0: 1}
            expel(pair.first)
            await until(lambda: len(pair.first.got(Join)) == 2)
            await asyncio.sleep(0.1)
            assert len(pair.owner.opened) == 1, "a higher grant alone is no reason to open another channel"
            pair.owner.opened[0].fail(Moved("elsewhere"))
            await until(lambda: len(pair.owner.opened) == 2)
            assert pair.owner.opened[1].read_grant == (8, 1)
            assert offsets(await receive(consumer, 15)) == list(range(5, 20))


async def test_a_seat_that_is_out_of_date_waits_for_the_next_assignment_and_no_longer(simulation: Simulation) -> None:
    async with connected(simulation) as (pair, client):
        pair.owner.refusals[Kind.OPEN] = [NotServing("out of date")] * 12
        async with client.stream_consumer("orders", "billing") as consumer:
            await until(lambda: len(pair.owner.got(Open)) == 10)  # By now it tries once a second.
            pair.owner.refusals[Kind.OPEN] = []
            pair.first.grants = {0: 2}
            started = asyncio.get_running_loop().time()
            pair.first.assign(0)
            await receive(consumer, 1)
            assert asyncio.get_running_loop().time() - started < 0.1


async def test_an_ack_that_met_a_closed_channel_goes_first_on_the_next(simulation: Simulation) -> None:
    async with connected(simulation) as (pair, client):
        consumer = client.stream_consumer("orders", "billing")
        await consumer.start()
        messages = await receive(consumer, 10)
        pair.owner.refusals[Kind.OPEN] = [NotServing("moving")] * 5
        pair.owner.opened[0].fail(Moved("it is moving"))
        await asyncio.sleep(0.01)
        await consumer.ack(messages[7])
        await until(lambda: pair.owner.segments[0].cursor == 8)
        assert len(pair.owner.opened) == 2
        pair.owner.refusals[Kind.OPEN] = [NotServing("moving")] * 5
        pair.owner.opened[1].fail(Moved("it is moving"))
        await asyncio.sleep(0.01)
        await consumer.ack(messages[8])
        await consumer.close()
        assert pair.owner.segments[0].stored == 9, "close has waited for it"


async def test_a_segment_that_is_asked_back_while_its_channel_is_closed_is_given_back_with_its_ack(
    simulation: Simulation,
) -> None:
    async with connected(simulation) as (pair, client), client.stream_consumer("orders", "billing") as consumer:
        messages = await receive(consumer, 10)
        pair.owner.refusals[Kind.OPEN] = [NotServing("moving")] * 6
        pair.owner.opened[0].fail(Moved("it is moving"))
        await asyncio.sleep(0.01)
        for message in messages:
            await consumer.ack(message)
        pair.first.assign()
        await until(lambda: not consumer.segments)
        await until(lambda: pair.owner.segments[0].cursor == 10)
