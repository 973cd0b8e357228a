"""A client that is closed leaves nothing running, and tells whoever waits; what is tried again passes time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from braid.client.client import Client, connect
from braid.client.shared import result_of
from braid.model.errors import BraidError, ClientClosed, NotServing, OffsetOutOfRange
from braid.testing.sim.loop import Process, Simulation, run_simulation
from braid.testing.sim.network import SimulatedNetwork
from braid.wire.frame import Frame
from braid.wire.operations import Expelled, Join, Kind, Leave, Open
from tests.kits.scripted_broker import ScriptedBroker

Program = Callable[[ScriptedBroker, Client], Awaitable[None]]


def run(program: Program, broker: ScriptedBroker | None = None) -> list[str]:
    """What still runs when the program has ended, in a process of its own."""
    broker = broker if broker is not None else ScriptedBroker()

    async def main(simulation: Simulation) -> list[str]:
        network = SimulatedNetwork(simulation.random, latency_s=(1e-4, 1e-3))
        await broker.listen(network.host("broker"))
        client = connect(
            "braid://broker:6660",
            network=network.host("client"),
            clock=simulation.clock,
            random=simulation.random,
            timeout=5.0,
        )
        process: Process = simulation.process("client")

        async def body() -> None:
            await program(broker, client)

        await process.start(body())
        return process.tasks

    return run_simulation(1, main)


def goes_on(_broker: ScriptedBroker) -> None:
    pass


def says_nothing(broker: ScriptedBroker) -> None:
    broker.silent = True


def breaks_its_connections(broker: ScriptedBroker) -> None:
    broker.cut()


def serves_nobody(broker: ScriptedBroker) -> None:
    broker.refusals = {kind: [NotServing("not now")] * 1_000 for kind in (Kind.OPEN, Kind.JOIN, Kind.PUBLISH)}
    broker.cut()


@pytest.mark.parametrize("then", [goes_on, says_nothing, breaks_its_connections, serves_nobody])
@pytest.mark.parametrize("pause_s", [0.0, 0.002, 0.02, 1.5])
def test_a_client_that_is_left_by_an_error_leaves_nothing_running(
    then: Callable[[ScriptedBroker], None], pause_s: float
) -> None:
    class Mistake(Exception):
        pass

    async def use(broker: ScriptedBroker, client: Client) -> None:
        async with client:
            producer = await client.producer("orders").open()
            await client.stream_consumer("orders", "billing", start="earliest").start()
            await client.checkpoint_consumer("orders", start="earliest").start()
            producer.submit(b"never confirmed")
            await asyncio.sleep(0.05)
            then(broker)
            await asyncio.sleep(pause_s)
            raise Mistake

    async def program(broker: ScriptedBroker, client: Client) -> None:
        with pytest.raises(Mistake):
            await use(broker, client)

    assert run(program, ScriptedBroker(3)) == []


def test_a_producer_that_is_closed_while_it_opens_opens_no_more() -> None:
    async def program(broker: ScriptedBroker, client: Client) -> None:
        await client.open()
        broker.silent = True
        producer = client.producer("orders")
        opening = asyncio.create_task(producer.open())
        await asyncio.sleep(3.5)  # The first lookup was not answered; it pauses before the next.
        await producer.close()
        with pytest.raises(ClientClosed):
            await opening
        await client.close()

    assert run(program) == []


def test_who_waits_for_routing_when_the_client_is_closed_is_told_and_not_cancelled() -> None:
    async def program(broker: ScriptedBroker, client: Client) -> None:
        await client.open()
        broker.silent = True
        starting = asyncio.create_task(client.checkpoint_consumer("orders").start())
        asking = asyncio.create_task(client.routing.topic("public/default/orders"))
        await asyncio.sleep(0.1)
        await client.close()
        for waiting in (starting, asking):
            with pytest.raises(ClientClosed):
                await waiting

    assert run(program) == []


def test_who_is_cancelled_together_with_what_it_waits_for_stays_cancelled() -> None:
    async def program(_broker: ScriptedBroker, client: Client) -> None:
        shared = asyncio.create_task(asyncio.sleep(60))
        waiting = asyncio.create_task(result_of(shared))
        await asyncio.sleep(0.1)
        shared.cancel()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await client.close()

    assert run(program) == []


def test_a_consumer_that_is_closed_while_it_joins_does_not_try_again() -> None:
    async def program(broker: ScriptedBroker, client: Client) -> None:
        await client.open()
        broker.refusals = {Kind.JOIN: [NotServing("not now")] * 1_000}
        consumer = client.stream_consumer("orders", "billing", start="earliest")
        starting = asyncio.create_task(consumer.start())
        while len(broker.got(Join)) < 3:  # noqa: ASYNC110 — virtual time
            await asyncio.sleep(0.001)
        await consumer.close()
        with pytest.raises(ClientClosed):
            await starting
        assert len(broker.got(Join)) == 3
        await client.close()

    assert run(program) == []


def test_a_consumer_that_is_closed_while_its_join_is_answered_leaves_again() -> None:
    async def program(broker: ScriptedBroker, client: Client) -> None:
        await client.open()
        await client.routing.topic("public/default/orders")
        consumer = client.stream_consumer("orders", "billing", start="earliest")
        starting = asyncio.create_task(consumer.start())
        while not broker.got(Join):  # noqa: ASYNC110 — virtual time
            await asyncio.sleep(0.0001)
        await consumer.close()
        with pytest.raises(ClientClosed):
            await starting
        assert len(broker.got(Leave)) == 1
        await asyncio.sleep(0.1)
        assert broker.channels == []
        await client.close()

    assert run(program) == []


# ── trying again ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def for_ten_seconds(client: Client) -> None:
    async with client, client.stream_consumer("orders", "billing", start="earliest") as consumer:
        assert await consumer.receive(timeout=10) is None


def test_a_segment_whose_place_is_always_another_is_opened_with_pauses() -> None:
    async def program(broker: ScriptedBroker, client: Client) -> None:
        errors: list[BraidError] = [OffsetOutOfRange("not there", 0, 0) for _ in range(10_000)]
        broker.refusals = {Kind.OPEN: errors}
        await for_ten_seconds(client)
        assert 5 < len(broker.got(Open)) < 40

    assert run(program) == []


def test_a_session_that_is_lost_as_soon_as_it_is_joined_is_joined_with_pauses() -> None:
    class Expelling(ScriptedBroker):
        def after(self, frame: Frame) -> None:
            if frame.kind == Kind.JOIN:
                expelled = Expelled(self.last_session, NotServing.code, "another broker is it", True)
                self.peers[-1].push(Kind.EXPEL, expelled)

    async def program(broker: ScriptedBroker, client: Client) -> None:
        await for_ten_seconds(client)
        assert 5 < len(broker.got(Join)) < 40

    assert run(program, Expelling()) == []
