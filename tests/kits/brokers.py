"""Several whole brokers of one cluster in virtual time: one store, one network, a disk for each, and one object store
if they share their history."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from braid.broker.auth import ANONYMOUS
from braid.broker.broker import Broker
from braid.broker.config import BrokerConfig
from braid.client.client import Client, connect
from braid.metadata.memory import MemoryStore
from braid.model.message import Message
from braid.model.names import SegmentName, TopicName
from braid.model.ownership import Move, Ownership, OwnershipState
from braid.storage.objects.store import Objects
from braid.testing.sim.disk import SimulatedDisk
from braid.testing.sim.loop import Process, Simulation, run_simulation
from braid.testing.sim.network import SimulatedNetwork
from braid.testing.sim.objects import MemoryObjects
from tests.kits.waiting import until

PORT = 6660
PATH = "public/default/orders"


SHARED = pytest.mark.parametrize("shared", [True, False], ids=["shared", "local"])
"""Run a test with shared storage, and with history on the brokers' own disks."""


class Brokers:
    def __init__(self, simulation: Simulation, *, shared: bool, balance: bool = False) -> None:
        self.simulation = simulation
        self.balance = balance
        self.store = MemoryStore(simulation.clock)
        self.objects: Objects | None = MemoryObjects(simulation.clock) if shared else None
        self.disks: dict[str, SimulatedDisk] = {}
        """By broker."""
        self.network = SimulatedNetwork(simulation.random, latency_s=(1e-4, 1e-3))
        self.running: dict[str, Broker] = {}
        self._processes: dict[str, Process] = {}
        self._stores: dict[str, MemoryStore] = {}

    async def start(self, *names: str) -> None:
        for name in names:
            disk = self.disks.setdefault(name, SimulatedDisk(self.simulation.random))
            config = BrokerConfig(
                id=name, data=f"/{name}", listen=f"{name}:{PORT}", file_bytes=1 << 20, balance=self.balance
            )
            process = self._processes[name] = self.simulation.process(name)
            store = self._stores[name] = self.store.client(name)
            opening = Broker.open(
                config,
                network=self.network.host(name),
                store=store,
                disk=disk.mount(),
                clock=self.simulation.clock,
                random=self.simulation.random,
                objects=self.objects,
            )
            self.running[name] = await process.start(opening)

    async def stop(self, name: str) -> None:
        """In order."""
        await self._processes[name].start(self.running[name].close())
        del self.running[name], self._processes[name]

    def freeze(self, name: str) -> None:
        """Let the process stand still, as with SIGSTOP. Its connections stay open, and nothing comes through."""
        self._processes[name].freeze()
        for peer in ("client", *self.running):
            if peer != name:
                self.network.cut(name, peer)

    def thaw(self, name: str) -> None:
        self._processes[name].thaw()
        self.network.heal(name)

    def kill(self, name: str) -> None:
        """The process is gone, and its connections break. Its lease ends when its time is over."""
        for peer in ("client", *self.running):
            if peer != name:
                self.network.reset(name, peer)
        self.network.crash(name)
        self._stores.pop(name).disconnect()
        self._processes.pop(name).kill()
        del self.running[name]
        self.disks[name].kill()

    def lose_disk(self, name: str) -> None:
        """Give a broker that is down a blank disk."""
        assert name not in self.running
        self.disks[name] = SimulatedDisk(self.simulation.random)

    @contextlib.asynccontextmanager
    async def client(self, *names: str, timeout: float = 30.0) -> AsyncIterator[Client]:
        """That knows these brokers at first; by default all that run."""
        url = "braid://" + ",".join(f"{name}:{PORT}" for name in names or self.running)
        client = connect(
            url,
            network=self.network.host("client"),
            clock=self.simulation.clock,
            random=self.simulation.random,
            timeout=timeout,
        )
        async with client:
            yield client

    async def call(self, name: str, call: str, **arguments: Any) -> Any:
        return await self.running[name].front_door.calls.call(call, arguments, ANONYMOUS)

    def store_of(self, name: str) -> MemoryStore:
        """What a broker reaches the store by: it can be cut off, or made to fail."""
        return self._stores[name]

    def any(self) -> Broker:
        return next(iter(self.running.values()))

    def owner(self, segment: int, path: str = PATH) -> str:
        """Who serves it; empty if nobody does."""
        broker = self.any()
        for descriptor, record in broker.cluster.owners.of_topic(path).items():
            if descriptor.endswith(f"-{segment}") and record.state is OwnershipState.SERVING:
                return record.owner if record.owner in self.running else ""
        return ""

    def controller(self, path: str = PATH) -> str:
        known = self.any().group_host.controllers.table.get(path)
        return known.broker if known is not None else ""

    async def move(self, segment: int, to: str) -> None:
        """Ask for it in the segment's record, as whoever wants a move does, and wait for it."""
        name, owners = segment_of(self, segment), self.any().cluster.owners
        known = owners.known(name)
        assert known is not None
        assert await owners.swap(name, known.revision, known.value.moving(Move(to=to))) is not None
        await until(lambda: self.owner(segment) == to)


def segment_of(brokers: Brokers, segment: int = 0) -> SegmentName:
    return SegmentName.of(TopicName.parse(PATH), brokers.any().topics.get(PATH).layout.segment(segment))


def record_of(brokers: Brokers, segment: int = 0) -> Ownership:
    record = brokers.any().cluster.owners.find(segment_of(brokers, segment))
    assert record is not None
    return record


@contextlib.asynccontextmanager
async def running_brokers(
    simulation: Simulation,
    names: tuple[str, ...] = ("a", "b", "c"),
    *,
    shared: bool = True,
    balance: bool = False,
    objects: Objects | None = None,
) -> AsyncIterator[Brokers]:
    """Start these brokers, and stop all that run at the end. `objects` is their shared storage, if it matters."""
    brokers = Brokers(simulation, shared=shared, balance=balance)
    if objects is not None:
        brokers.objects = objects
    await brokers.start(*names)
    yield brokers
    for name in [*brokers.running]:
        await brokers.stop(name)


def with_brokers(
    test: Callable[[Brokers], Awaitable[None]], names: tuple[str, ...] = ("a", "b", "c"), *, seed: int = 1
) -> None:
    """Run a test with a seed of its own, for tests that try many seeds."""

    async def main(simulation: Simulation) -> None:
        async with running_brokers(simulation, names) as brokers:
            await test(brokers)

    run_simulation(seed, main)


def values(messages: list[Message]) -> list[bytes]:
    return [message.value for message in messages]


async def read_all(client: Client, count: int) -> list[bytes]:
    """Read this many records of `orders` from the beginning, without a subscription."""
    found: list[bytes] = []
    async with client.checkpoint_consumer("orders", start="earliest") as reader:
        while len(found) < count:
            batch = await reader.receive_batch(timeout=60)
            assert batch is not None
            found += [message.value for message in batch.messages()]
    return found
