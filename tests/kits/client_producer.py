"""A producer of a client, and a broker that does what a test says."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from random import Random
from typing import Any

from braid.client.client import Client, connect
from braid.client.producing.producer import Producer
from braid.model.batch.columns import Message, decode_messages
from braid.model.batch.header import BatchHeader, parse_header
from braid.testing.scripted_broker import ScriptedBroker
from braid.testing.sim.loop import Simulation
from braid.testing.sim.network import SimulatedNetwork

PATH = "public/default/orders"


class World:
    """A client and one scripted broker, in virtual time."""

    def __init__(self, simulation: Simulation) -> None:
        self.loop = simulation.loop
        self.network = SimulatedNetwork(Random(simulation.seed))
        self.broker = ScriptedBroker(self.network.host("broker"))
        self.clock = simulation.clock

    async def start(self, segments: int = 1) -> None:
        await self.broker.start("broker", 6660)
        self.broker.add_topic(PATH, segments)

    def client(self, **options: Any) -> Client:
        return connect(
            "braid://broker:6660", network=self.network.host("client"), clock=self.clock, random=Random(1), **options
        )

    def batches(self, segment: int = 0) -> list[BatchHeader]:
        return [parse_header(batch) for batch in self.broker.logs[PATH, segment].batches]

    def messages(self, segment: int = 0) -> list[Message]:
        return [message for batch in self.broker.logs[PATH, segment].batches for message in decode_messages(batch)]

    def values(self, segment: int = 0) -> list[bytes]:
        return [message.value for message in self.messages(segment)]


@contextlib.asynccontextmanager
async def producing(
    simulation: Simulation, *, segments: int = 1, timeout: float = 30.0, **options: Any
) -> AsyncIterator[tuple[World, Producer]]:
    world = World(simulation)
    await world.start(segments)
    async with world.client(timeout=timeout) as client, client.producer("orders", **options) as producer:
        yield world, producer
    await world.broker.stop()
