"""A client and a broker that delivers what a test says."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from braid.client.client import Client, connect
from braid.client.consuming.stream import StreamConsumer
from braid.model.message import Message
from braid.testing.sim.loop import Simulation
from braid.testing.sim.network import SimulatedNetwork
from tests.kits.scripted_broker import ScriptedBroker

WINDOW = 64 << 10


@contextlib.asynccontextmanager
async def connected(
    simulation: Simulation, broker: ScriptedBroker | None = None, *, timeout: float = 30.0
) -> AsyncIterator[tuple[ScriptedBroker, Client]]:
    broker = broker if broker is not None else ScriptedBroker()
    network = SimulatedNetwork(simulation.random, latency_s=(1e-4, 1e-3))
    await broker.listen(network.host("broker"))
    client = connect(
        "braid://broker:6660",
        network=network.host("client"),
        clock=simulation.clock,
        random=simulation.random,
        timeout=timeout,
    )
    async with client:
        yield broker, client


def with_records(count: int, segments: int = 1, *, per_batch: int = 1) -> ScriptedBroker:
    broker = ScriptedBroker(segments)
    for number in range(segments):
        for first in range(0, count, per_batch):
            last = min(first + per_batch, count)
            broker.segments[number].append(*(b"%d/%d" % (number, each) for each in range(first, last)))
    return broker


async def receive(consumer: StreamConsumer, count: int) -> list[Message]:
    messages: list[Message] = []
    for _ in range(count):
        message = await consumer.receive(timeout=60)
        assert message is not None, f"only {len(messages)} of {count} messages came"
        messages.append(message)
    return messages


def offsets(messages: list[Message]) -> list[int]:
    return [message.offset for message in messages]
