"""One connection to one broker: requests, their answers, and its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from random import Random

import pytest

from braid.model.errors import BraidError, ClientClosed, ConnectFailed, ConnectionLost, TimedOut, UnknownOperation
from braid.testing.scripted_broker import ScriptedBroker
from braid.testing.sim.loop import Simulation
from braid.testing.sim.network import SimulatedNetwork
from braid.wire.frame import Flags, Frame
from braid.wire.link import TURN_FRAMES, Link, connect_link, within
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


@contextlib.asynccontextmanager
async def linked(simulation: Simulation) -> AsyncIterator[tuple[World, Link]]:
    world = World(simulation)
    await world.broker.start("broker", 6660)
    link = await world.connect()
    yield world, link
    link.close(ClientClosed("done"))
    await world.broker.stop()


async def test_requests_are_pipelined_and_each_gets_its_own_answer(simulation: Simulation) -> None:
    async with linked(simulation) as (world, link):
        world.broker.add_topic("a/b/c")
        asked = [link.ask(Kind.TOPOLOGY, encode(TopologyRequest((f"a/b/{name}",))), Topology) for name in "cde"]
        answers = await asyncio.gather(*asked)
        assert [answer.topics[0].topic for answer in answers] == ["a/b/c", "a/b/d", "a/b/e"]
        assert [bool(answer.topics[0].topic_id) for answer in answers] == [True, False, False]
        with pytest.raises(UnknownOperation):
            await link.request(Kind.JOIN)
        assert world.broker.hellos[0].token == "secret"


async def test_a_lost_link_fails_every_open_request_and_later_ones_at_once(simulation: Simulation) -> None:
    async with linked(simulation) as (world, link):
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


async def test_a_request_without_an_answer_times_out_and_the_link_lives(simulation: Simulation) -> None:
    async with linked(simulation) as (world, link):
        delays = iter([2.0])
        world.broker.answer_delay_s = lambda: next(delays, 0.0)
        with pytest.raises(TimedOut, match="TOPOLOGY"):
            await link.ask(Kind.TOPOLOGY, encode(TopologyRequest(())), Topology, 1.0)
        await asyncio.sleep(2)
        assert link.alive
        await link.request(Kind.PING)


async def test_a_silent_broker_is_noticed_by_the_heartbeat(simulation: Simulation) -> None:
    async with linked(simulation) as (world, link):
        world.network.cut("client", "broker")
        error = await link.lost
        assert isinstance(error, ConnectionLost)
        assert "silent" in str(error)
        assert world.loop.time() < 60
        world.network.heal()


async def test_nobody_who_listens_or_answers_is_a_failed_connect(simulation: Simulation) -> None:
    async with linked(simulation) as (world, _link):
        world.network.cut("client", "broker")
        with pytest.raises(ConnectFailed, match="did not answer"):
            await world.connect()
        world.network.heal()
        await world.broker.stop()
        with pytest.raises(ConnectFailed, match="cannot be reached"):
            await world.connect()


# ── many answers that come together ──────────────────────────────────────────────────────────────────────────────────


def answers(requests: int) -> list[Frame]:
    return [Frame(Kind.PING, Flags.REPLY, number + 1, b"", None) for number in range(requests)]


def asked(world: World, link: Link, count: int) -> list[list[object]]:
    """What each of so many requests was answered, as it comes; the broker itself says nothing."""
    world.broker.answer_delay_s = lambda: 100.0
    heard: list[list[object]] = []
    for _ in range(count):
        each: list[object] = []
        link._last_request = len(heard)
        link.call(Kind.PING, b"", (), lambda reply, error, each=each: each.append(error or reply))  # type: ignore[misc]
        heard.append(each)
    return heard


@pytest.mark.parametrize("count", [TURN_FRAMES, TURN_FRAMES + 1, 2 * TURN_FRAMES + 1])
async def test_each_of_many_answers_is_told_once(count: int, simulation: Simulation) -> None:
    async with linked(simulation) as (world, link):
        heard = asked(world, link, count)
        link.on_frames(answers(count))
        assert [len(each) for each in heard] == [1] * count


async def test_those_who_waited_for_the_first_go_on_before_the_last_is_looked_at(simulation: Simulation) -> None:
    async with linked(simulation) as (world, link):
        heard = asked(world, link, TURN_FRAMES + 1)
        seen: list[int] = []
        first = link._requests[1]

        def on_first(reply: Frame | None, error: BraidError | None) -> None:
            first(reply, error)
            link.call_at_end(lambda: seen.append(sum(map(len, heard))))

        link._requests[1] = on_first
        link.on_frames(answers(TURN_FRAMES + 1))
        assert seen == [TURN_FRAMES]
        assert sum(map(len, heard)) == TURN_FRAMES + 1


async def test_one_who_goes_on_may_close_the_link(simulation: Simulation) -> None:
    async with linked(simulation) as (world, link):
        heard = asked(world, link, 2 * TURN_FRAMES)
        first = link._requests[1]

        def on_first(reply: Frame | None, error: BraidError | None) -> None:
            first(reply, error)
            link.call_at_end(lambda: link.connection.abort(ClientClosed("enough")))

        link._requests[1] = on_first
        link.on_frames(answers(2 * TURN_FRAMES))
        await asyncio.sleep(1)
        assert [len(each) for each in heard] == [1] * (2 * TURN_FRAMES)
        assert all(isinstance(error, ClientClosed) for (error,) in heard[TURN_FRAMES:])


async def test_one_who_ends_the_program_leaves_nobody_without_an_answer(simulation: Simulation) -> None:
    async with linked(simulation) as (world, link):
        heard = asked(world, link, 2 * TURN_FRAMES + 1)
        first = link._requests[1]

        def end() -> None:
            raise SystemExit

        def on_first(reply: Frame | None, error: BraidError | None) -> None:
            first(reply, error)
            link.call_at_end(end)

        link._requests[1] = on_first
        with pytest.raises(SystemExit):
            link.on_frames(answers(2 * TURN_FRAMES + 1))
        await asyncio.sleep(1)
        assert [len(each) for each in heard] == [1] * (2 * TURN_FRAMES + 1)


async def test_a_broker_that_answers_that_it_gave_up_is_not_taken_for_one_that_does_not_answer() -> None:
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    answer.set_exception(TimedOut("segment 0 did not arrive within 60 s"))
    with pytest.raises(TimedOut, match="segment 0 did not arrive"):
        await within(answer, 5.0, "move_topic was not answered")
