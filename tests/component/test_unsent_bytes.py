"""One budget for the bytes that the clients of a broker leave unread."""

from __future__ import annotations

import asyncio

import pytest

from braid.broker.broker import Broker
from braid.broker.connections.session import Session
from braid.broker.unsent_bytes import PATIENCE_S, SHORT_BYTES
from braid.model.errors import ConnectionLost
from braid.testing.sim.loop import Simulation
from braid.wire.connection import WRITE_HIGH_WATER_BYTES
from braid.wire.operations import AdminRequest, Kind, Open, Topology, TopologyRequest, decode, encode
from tests.kits.control import Machine
from tests.kits.rude_clients import rude, running
from tests.kits.waiting import until
from tests.kits.wire import Recorder

QUESTION = encode(AdminRequest("get_topic", {"topic": "long"}))
CROWD = 40
EACH = 12
BUDGET = 4 << 20

Rude = tuple[Recorder, asyncio.Transport, Session]


async def crowd_of(size: int, machine: Machine, broker: Broker) -> list[Rude]:
    """Connections that ask for more than a megabyte each, and read nothing."""
    crowd = []
    for _ in range(size):
        recorder, transport, session = await rude(machine, broker)
        for request in range(2, EACH + 2):
            recorder.connection.send(Kind.ADMIN, QUESTION, request=request)
        crowd.append((recorder, transport, session))
    return crowd


def unsent(broker: Broker) -> int:
    return sum(each.connection.waiting_bytes for each in broker.front_door.server._sessions)


async def test_a_crowd_that_reads_nothing_holds_no_more_than_the_budget_and_others_go_on(
    simulation: Simulation,
) -> None:
    async with running(simulation, max_unsent_bytes=BUDGET) as (machine, broker, client):
        crowd = await crowd_of(CROWD, machine, broker)
        most = 0
        for number in range(30):
            await asyncio.sleep(0.1)
            most = max(most, unsent(broker))
            began = simulation.clock.monotonic()
            assert "topic://public/default/long" in await client.admin.list_topics()
            await client.admin.create_topic(f"topic-{number}")
            assert simulation.clock.monotonic() - began < 0.25
        assert BUDGET // 2 <= most < BUDGET + CROWD * SHORT_BYTES
        for _, transport, _ in crowd:
            transport.resume_reading()
        for recorder, _, _ in crowd:
            await recorder.until(lambda recorder=recorder: len(recorder.frames) == EACH)  # type: ignore[misc]
        await until(lambda: not broker.front_door.unsent_bytes.pressed)
        assert unsent(broker) == 0


async def test_connections_that_stand_still_end_sooner_and_only_until_there_is_room(simulation: Simulation) -> None:
    async with running(simulation, max_unsent_bytes=BUDGET) as (machine, broker, _):
        (first, *_), *_ = await crowd_of(CROWD, machine, broker)
        small, _, session = await rude(machine, broker)
        began = simulation.clock.monotonic()
        await first.until(lambda: first.lost)
        assert PATIENCE_S < simulation.clock.monotonic() - began < PATIENCE_S + 3
        await asyncio.sleep(20)
        assert not small.lost, "it has nothing unread"
        assert not session.paused


async def test_a_connection_that_stands_still_has_its_usual_time_while_there_is_room(simulation: Simulation) -> None:
    async with running(simulation) as (machine, broker, _):
        ((recorder, _, session),) = await crowd_of(1, machine, broker)
        await until(lambda: session.connection.waiting_bytes > WRITE_HIGH_WATER_BYTES)
        await asyncio.sleep(20)
        assert not recorder.lost
        await asyncio.sleep(15)
        assert recorder.lost


async def test_a_change_does_not_begin_before_its_answer_can_be_held(simulation: Simulation) -> None:
    async with running(simulation, max_unsent_bytes=1_500_000) as (machine, broker, client):
        ((_, transport, _),) = await crowd_of(1, machine, broker)
        await until(lambda: broker.front_door.unsent_bytes.pressed)
        creating = asyncio.create_task(client.admin.create_topic("later"))
        await asyncio.sleep(3)
        assert "topic://public/default/later" not in await client.admin.list_topics()
        transport.resume_reading()
        await creating


async def test_an_answer_that_tells_of_a_change_and_cannot_be_held_ends_its_connection(simulation: Simulation) -> None:
    """It never says that nothing was done."""
    async with running(simulation, max_unsent_bytes=1_500_000) as (machine, broker, _):
        await crowd_of(1, machine, broker)
        recorder, _, session = await rude(machine, broker)
        await until(lambda: broker.front_door.unsent_bytes.pressed)
        session.questions._check_room(10_000)
        with pytest.raises(ConnectionLost, match="too much unread"):
            session.questions._check_room(1_000_000)
        await recorder.until(lambda: recorder.lost)


async def test_a_large_batch_waits_for_room_and_small_ones_are_delivered(simulation: Simulation) -> None:
    async with running(simulation, max_unsent_bytes=BUDGET) as (machine, broker, client):
        for topic, value in (("large", bytes(400_000)), ("small", b"s")):
            await client.admin.create_topic(topic)
            await client.producer(topic).send(value)
        crowd = await crowd_of(CROWD, machine, broker)
        reader, reading, _ = await rude(machine, broker)
        reading.resume_reading()
        await until(lambda: broker.front_door.unsent_bytes.share < 400_000)
        paths = ("public/default/large", "public/default/small")
        reader.connection.send(Kind.TOPOLOGY, encode(TopologyRequest(paths)), request=2)
        await reader.until(lambda: reader.frames)
        routes = decode(Topology, reader.frames[0].body).topics
        for channel, (path, route) in enumerate(zip(paths, routes, strict=True), 1):
            opening = Open(channel, path, route.topic_id, 0, 1 << 20, 0, -1)
            reader.connection.send(Kind.OPEN, encode(opening), request=2 + channel)
        await asyncio.sleep(2)
        assert [len(each.payload or b"") < 1_000 for each in reader.frames if each.kind == Kind.DELIVER] == [True]
        for _, transport, _ in crowd:
            transport.resume_reading()
        await reader.until(lambda: sum(each.kind == Kind.DELIVER for each in reader.frames) == 2)
