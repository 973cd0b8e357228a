"""Clients that ask and do not read, and a broker with something long to say."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from itertools import count

import msgspec

from braid.broker.auth import ANONYMOUS
from braid.broker.broker import Broker
from braid.broker.connections.session import Session
from braid.client.client import Client, connect
from braid.testing.sim.loop import Simulation
from braid.wire.operations import MAGIC, VERSION, Hello, Kind, encode
from tests.kits.control import Machine
from tests.kits.wire import Recorder

LONG = "x" * 100_000
_numbers = count()


@contextlib.asynccontextmanager
async def running(
    simulation: Simulation, *, max_unsent_bytes: int | None = None
) -> AsyncIterator[tuple[Machine, Broker, Client]]:
    """With a topic whose description is long."""
    machine = Machine(simulation)
    if max_unsent_bytes is not None:
        limits = msgspec.structs.replace(machine.config.limits, max_unsent_bytes=max_unsent_bytes)
        machine.config = msgspec.structs.replace(machine.config, limits=limits)
    broker = await machine.start()
    client = connect(
        "braid://machine:6660", network=machine.host, clock=simulation.clock, random=simulation.random, timeout=30.0
    )
    async with client:
        arguments = {"topic": "long", "properties": {"note": LONG}}
        await broker.front_door.calls.call("create_topic", arguments, ANONYMOUS)
        yield machine, broker, client
    await broker.close()


async def rude(machine: Machine, broker: Broker) -> tuple[Recorder, asyncio.Transport, Session]:
    """A connection that has said hello and reads no more."""
    recorder = Recorder()
    name = f"rude-{next(_numbers)}"
    transport, _ = await machine.host.connect("machine", 6660, lambda: recorder.connection)
    recorder.connection.send(Kind.HELLO, encode(Hello(MAGIC, VERSION, VERSION, name)), request=1)
    await recorder.until(lambda: recorder.frames)
    recorder.frames.clear()
    transport.pause_reading()
    session = next(each for each in broker.front_door.server._sessions if each.client == name)
    return recorder, transport, session
