"""How a client finds brokers and keeps what it knows of topics."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest

from braid.client.client import Client, connect
from braid.client.retry import Backoff, retrying
from braid.model.errors import (
    BraidError,
    ConnectFailed,
    LogBusy,
    TopicNotFound,
    Unauthenticated,
)
from braid.testing.scripted_broker import ScriptedBroker
from braid.testing.sim.loop import Simulation
from braid.testing.sim.network import SimulatedNetwork

PATH = "public/default/orders"


class World:
    def __init__(self, simulation: Simulation) -> None:
        self.loop = simulation.loop
        self.network = SimulatedNetwork(Random(simulation.seed))
        self.brokers = {name: ScriptedBroker(self.network.host(name)) for name in ("one", "two")}

    def client(self, url: str = "braid://one:6660,two:6660", **options: Any) -> Client:
        return connect(url, network=self.network.host("client"), random=Random(1), **{"timeout": 5.0, **options})


@contextlib.asynccontextmanager
async def running_world(simulation: Simulation) -> AsyncIterator[World]:
    world = World(simulation)
    for name, broker in world.brokers.items():
        await broker.start(name, 6660)
    yield world
    for broker in world.brokers.values():
        await broker.stop()


async def test_any_broker_that_answers_will_do(simulation: Simulation) -> None:
    async with running_world(simulation) as world:
        await world.brokers["one"].stop()
        for _ in range(5):
            async with world.client() as client:
                assert client.pool.connected() is not None
        assert len(world.brokers["two"].hellos) == 5


async def test_connecting_is_tried_until_the_timeout_and_then_names_all_brokers(simulation: Simulation) -> None:
    async with running_world(simulation) as world:
        for broker in world.brokers.values():
            await broker.stop()
        started = world.loop.time()
        with pytest.raises(ConnectFailed, match=r"one:6660.*two:6660"):
            await world.client().open()
        assert 3 < world.loop.time() - started <= 5


async def test_a_broker_that_starts_late_is_waited_for(simulation: Simulation) -> None:
    async with running_world(simulation) as world:
        for broker in world.brokers.values():
            await broker.stop()
        client = world.client()
        opening = asyncio.create_task(client.open())
        await asyncio.sleep(2)
        await world.brokers["two"].start("two", 6660)
        await opening
        await client.close()


async def test_a_refused_token_is_final_and_a_function_is_asked_at_every_connect(simulation: Simulation) -> None:
    async with running_world(simulation) as world:
        tokens = iter(["first", "second"])
        broker = world.brokers["one"]
        async with world.client("braid://one:6660", token=lambda: next(tokens)) as client:
            broker.cut_all()
            await asyncio.sleep(0.1)
            await client.pool.any()
            assert [hello.token for hello in broker.hellos] == ["first", "second"]
        broker.refuse_hello = Unauthenticated("who are you?")
        started = world.loop.time()
        with pytest.raises(Unauthenticated):
            await world.client("braid://one:6660").open()
        assert world.loop.time() - started < 1


async def test_a_topic_is_fetched_once_and_pushes_replace_it_only_if_newer(simulation: Simulation) -> None:
    async with running_world(simulation) as world:
        broker = world.brokers["one"]
        broker.add_topic(PATH, segments=2)
        async with world.client("braid://one:6660") as client:
            first, second = await asyncio.gather(client.routing.topic(PATH), client.routing.topic(PATH))
            assert first is second
            assert first.find_active(0x7FFF).id == 0
            assert first.find_active(0x8000).id == 1
            broker.set_owner(PATH, "two:6660")
            assert await client.routing.topic(PATH) is first
            broker.push()
            await asyncio.sleep(0.1)
            moved = await client.routing.topic(PATH)
            assert moved.owner(0).host == "two"
            broker.generation -= 5
            broker.set_owner(PATH, "one:6660")
            broker.push()
            await asyncio.sleep(0.1)
            assert await client.routing.topic(PATH) is moved
            assert (await client.routing.refresh(PATH)).owner(0).host == "two"


async def test_a_topic_that_is_absent_is_said_so_and_asked_again_later(simulation: Simulation) -> None:
    async with running_world(simulation) as world:
        broker = world.brokers["one"]
        async with world.client("braid://one:6660") as client:
            with pytest.raises(TopicNotFound):
                await client.routing.topic(PATH)
            broker.add_topic(PATH)
            assert (await client.routing.topic(PATH)).topic_id == 7


async def test_retrying_ends_at_the_deadline_with_the_last_error_and_at_once_with_a_final_one(
    simulation: Simulation,
) -> None:
    loop = simulation.loop
    tries = 0

    async def fail() -> None:
        nonlocal tries
        tries += 1
        raise LogBusy(f"try {tries}")

    with pytest.raises(LogBusy) as caught:
        await retrying(fail, loop.time() + 3, Backoff(Random(1)))
    assert str(caught.value) == f"try {tries}"
    assert 2 < loop.time() <= 3
    assert tries > 4

    async def refuse() -> None:
        raise BraidError("never")

    with pytest.raises(BraidError, match="never"):
        await retrying(refuse, loop.time() + 3, Backoff(Random(1)))
