"""Questions whose answers are long: what they cost the broker when a client does not read them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from braid.broker.auth import Principal
from braid.broker.config import AuthConfig, Grant
from braid.broker.connections.membership import Memberships
from braid.broker.connections.questions import MAX_CALL_BYTES, MAX_QUESTIONS, Questions
from braid.broker.turns import Turns
from braid.model.errors import InvalidArgument, PermissionDenied
from braid.testing.sim.loop import Simulation
from braid.wire.connection import WRITE_HIGH_WATER_BYTES
from braid.wire.frame import Flags, Frame
from braid.wire.operations import AdminReply, AdminRequest, Kind, TopologyRequest, decode, encode
from tests.kits.control import Machine
from tests.kits.rude_clients import LONG, rude, running
from tests.kits.waiting import until
from tests.kits.wire import Recorder

QUESTIONS = 1_000


async def test_answers_that_nobody_reads_take_bounded_memory_and_come_when_they_are_read(
    simulation: Simulation,
) -> None:
    async with running(simulation) as (machine, broker, client):
        recorder, transport, session = await rude(machine, broker)
        question = encode(AdminRequest("get_topic", {"topic": "long"}))
        for request in range(2, QUESTIONS + 2):
            recorder.connection.send(Kind.ADMIN, question, request=request)
        most = 0
        for _ in range(50):
            await asyncio.sleep(0.05)
            most = max(most, session.connection.waiting_bytes)
            assert await client.admin.list_topics() == ["topic://public/default/long"], "others are answered meanwhile"
        assert WRITE_HIGH_WATER_BYTES <= most <= WRITE_HIGH_WATER_BYTES + (MAX_QUESTIONS + 1) * len(LONG)
        transport.resume_reading()
        await recorder.until(lambda: len(recorder.frames) == QUESTIONS, 600)
        assert {frame.request for frame in recorder.frames} == set(range(2, QUESTIONS + 2))
        assert not any(frame.flags & Flags.ERROR for frame in recorder.frames)
        described = decode(AdminReply, recorder.frames[-1].body).result
        assert described["properties"] == {"note": LONG}


async def test_the_bytes_of_questions_that_wait_count_against_the_connection(simulation: Simulation) -> None:
    async with running(simulation) as (machine, broker, _):
        recorder, _, session = await rude(machine, broker)
        question = encode(AdminRequest("get_topic", {"topic": "long"}))
        for request in range(2, 40):
            recorder.connection.send(Kind.ADMIN, question, request=request)
        await until(lambda: session.connection.congested)
        limit = broker.config.limits.max_bytes_in_flight
        large = encode(TopologyRequest(("t" * 128,) * 4_000))
        for request in range(40, 40 + 2 * limit // len(large)):
            recorder.connection.send(Kind.TOPOLOGY, large, request=request)
        await asyncio.sleep(5)
        assert session.paused
        assert session._bytes <= limit + len(large)


async def test_a_call_is_refused_unread_if_it_is_larger_than_anything_that_can_be_stored(
    simulation: Simulation,
) -> None:
    async with running(simulation) as (_, _, client):
        created = await client.admin.create_topic("longest", properties={"note": "x" * 990_000})
        assert len(created["properties"]["note"]) == 990_000
        with pytest.raises(InvalidArgument, match=f"is above the limit of {MAX_CALL_BYTES}"):
            await client.admin.create_topic("longer", properties={"note": "x" * MAX_CALL_BYTES})


async def test_questions_of_one_kind_do_not_wait_for_those_of_another(simulation: Simulation) -> None:
    """A client that has as many calls under way as it may have still gets routes."""
    async with running(simulation) as (_, broker, client):
        link = await client.pool.any()
        (session,) = broker.front_door.server._sessions
        for _ in range(MAX_QUESTIONS):
            await session.questions._answering[Kind.ADMIN].acquire()
        call = link.request(Kind.ADMIN, encode(AdminRequest("get_topic", {"topic": "long"})))
        await link.request(Kind.TOPOLOGY, encode(TopologyRequest(("public/default/long",))))
        await asyncio.sleep(1)
        assert not call.done()
        session.questions._answering[Kind.ADMIN].release()
        await call


async def test_one_turn_is_given_in_each_iteration_of_the_loop_in_order() -> None:
    turns = Turns()
    iteration = 0
    had: list[tuple[int, int]] = []
    over = asyncio.Event()

    def count() -> None:
        nonlocal iteration
        iteration += 1
        if not over.is_set():
            asyncio.get_running_loop().call_soon(count)

    async def work(number: int) -> None:
        await turns.take()
        had.append((number, iteration))

    count()
    tasks = [asyncio.ensure_future(work(number)) for number in range(20)]
    await asyncio.sleep(0)
    tasks[5].cancel()
    await asyncio.wait(tasks)
    over.set()
    assert [number for number, _ in had] == [number for number in range(20) if number != 5]
    assert len({at for _, at in had}) == len(had), "never two in one iteration"
    await turns.take()


async def test_a_dag_watch_needs_a_permission_on_its_topic(tmp_path: Path, simulation: Simulation) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 32)
    grants = (Grant(role="reader", on="public/default/orders", allow=("consume",)),)
    broker = await Machine(simulation, AuthConfig(secret_file=str(secret), grants=grants)).start()
    services, connection = broker.front_door, Recorder().connection
    memberships = Memberships(connection, services.topics, services.subscriptions, services.groups, max_consumers=8)
    questions = Questions(services, connection, memberships)
    frame = Frame(Kind.TOPOLOGY, 0, 1, encode(TopologyRequest(("public/default/orders",))), None)
    await questions.answer(frame, Principal("somebody", ("reader",), None))
    assert [*questions.watched] == ["public/default/orders"]
    with pytest.raises(PermissionDenied):
        await questions.answer(frame, Principal("somebody", ("stranger",), None))
    await broker.close()
