"""One connection to one broker: requests, their answers, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

import pytest

from braid.model.errors import ClientClosed, ConnectFailed, ConnectionLost, TimedOut, UnknownOperation
from braid.testing.loop import Simulation, run_simulation
from braid.testing.network import SimulatedNetwork
from braid.testing.scripted_broker import ScriptedBroker
from braid.wire.link import Link, connect_link
from braid.wire.operations import Kind, Topology, TopologyRequest, encode


class World:
    def __init__(self, simulation: Simulation) -> None:
        self.loop = simulation.loop
        self.network = SimulatedNetwork(Random(1))
        self.broker = ScriptedBroker(self.network.host("broker"))
        self.pushed: list[Topology] = []

    async def connect(self) -> Link:
        return await connect_link(
            self.network.host("client"),
            self.broker.address,
            client="test",
            token="secret",
            timeout_s=5.0,
            on_topology=self.pushed.append,
        )


def play(body: Callable[[World, Link], Awaitable[None]]) -> None:
    async def main(simulation: Simulation) -> None:
        world = World(simulation)
        await world.broker.start("broker", 6660)
        link = await world.connect()
        await body(world, link)
        link.close(ClientClosed("done"))
        await world.broker.stop()

    run_simulation(1, main)


def test_requests_are_pipelined_and_each_gets_its_own_answer() -> None:
    async def body(world: World, link: Link) -> None:
        world.broker.add_topic("a/b/c")
        asked = [link.ask(Kind.TOPOLOGY, encode(TopologyRequest((f"a/b/{name}",))), Topology) for name in "cde"]
        answers = await asyncio.gather(*asked)
        assert [answer.topics[0].topic for answer in answers] == ["a/b/c", "a/b/d", "a/b/e"]
        assert [bool(answer.topics[0].topic_id) for answer in answers] == [True, False, False]
        with pytest.raises(UnknownOperation):
            await link.request(Kind.JOIN)
        assert world.broker.hellos[0].token == "secret"

    play(body)


def test_a_lost_link_fails_every_open_request_and_later_ones_at_once() -> None:
    async def body(world: World, link: Link) -> None:
        world.broker.answer_delay_s = lambda: 100.0
        open_requests = [link.request(Kind.PING) for _ in range(3)]
        await asyncio.sleep(0.1)
        world.broker.cut_all()
        for request in open_requests:
            with pytest.raises(ConnectionLost):
                await request
        assert not link.alive
        assert isinstance(await link.lost, ConnectionLost)
        with pytest.raises(ConnectionLost):
            await link.request(Kind.PING)

    play(body)


def test_a_request_without_an_answer_times_out_and_the_link_lives() -> None:
    async def body(world: World, link: Link) -> None:
        delays = iter([2.0])
        world.broker.answer_delay_s = lambda: next(delays, 0.0)
        with pytest.raises(TimedOut, match="TOPOLOGY"):
            await link.ask(Kind.TOPOLOGY, encode(TopologyRequest(())), Topology, 1.0)
        await asyncio.sleep(2)
        assert link.alive
        await link.request(Kind.PING)

    play(body)


def test_a_silent_broker_is_noticed_by_the_heartbeat() -> None:
    async def body(world: World, link: Link) -> None:
        world.network.cut("client", "broker")
        error = await link.lost
        assert isinstance(error, ConnectionLost)
        assert "silent" in str(error)
        assert world.loop.time() < 60
        world.network.heal()

    play(body)


def test_nobody_who_listens_or_answers_is_a_failed_connect() -> None:
    async def body(world: World, link: Link) -> None:
        world.network.cut("client", "broker")
        with pytest.raises(ConnectFailed, match="did not answer"):
            await world.connect()
        world.network.heal()
        await world.broker.stop()
        with pytest.raises(ConnectFailed, match="cannot be reached"):
            await world.connect()

    play(body)
