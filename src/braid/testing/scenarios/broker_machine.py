"""A machine that runs a real broker in a simulation: its disk survives, its processes do not."""

from __future__ import annotations

import asyncio
from random import Random

from braid.broker.broker import Broker
from braid.broker.config import BrokerConfig
from braid.metadata.memory import Fault, MemoryStore
from braid.testing.sim.clock import SimulatedClock
from braid.testing.sim.disk import NO_FAULTS, DiskFaults, SimulatedDisk
from braid.testing.sim.loop import Process, Simulation
from braid.testing.sim.network import SimulatedNetwork
from braid.testing.sim.objects import FaultyObjects

HOST = "broker"
PORT = 6_660
URL = f"braid://{HOST}:{PORT}"


class BrokerMachine:
    def __init__(
        self,
        simulation: Simulation,
        network: SimulatedNetwork,
        store: MemoryStore,
        config: BrokerConfig,
        *,
        host: str = HOST,
    ) -> None:
        self.host = host
        self.disk = SimulatedDisk(simulation.random)
        self.process: Process | None = None
        self.broker: Broker | None = None
        """While it is open, and not frozen."""
        self.frozen = False
        self.metadata_faults = 0.0
        self.client: MemoryStore | None = None
        self.clock: SimulatedClock = simulation.clock
        """Of the present process: wrong by an amount of its own."""
        self.objects: FaultyObjects | None = None
        """Where brokers share storage: the present process's way to it."""
        self._simulation = simulation
        self._random: Random = simulation.random
        self._network = network
        self._store = store
        self._config = config
        self._peers: dict[str, None] = {}

    def meet(self, host: str) -> None:
        """A host whose connections break at once when the broker's process is killed, as a kernel sees to."""
        self._peers[host] = None

    def open(self) -> asyncio.Task[Broker]:
        """Start a process that opens the broker. It may be stopped at any time."""
        assert self.process is None
        self.process = self._simulation.process(self.host)
        self.client = self._store.client(self.host)
        self.client.fault = self._metadata_fault
        self.clock = self._simulation.clock.skewed(self._random.randrange(-5_000_000, 5_000_000))
        return self.process.start(
            Broker.open(
                self._config,
                network=self._network.host(self.host),
                store=self.client,
                disk=self.disk.mount(),
                clock=self.clock,
                random=self._random,
                objects=self.objects,
            )
        )

    def close(self) -> asyncio.Task[None]:
        """Begin to stop in order."""
        assert self.process is not None
        assert self.broker is not None
        return self.process.start(self.broker.close(), name="close broker")

    def stop(self, *, power_loss: bool) -> None:
        """The machine loses power, or the process is killed."""
        if self.process is None:
            return
        if power_loss:
            self.disk.crash()
        else:
            self.disk.kill()
            for peer in self._peers:
                self._network.reset(self.host, peer)
        self._network.crash(self.host)
        assert self.client is not None
        self.client.disconnect()
        self.process.kill()
        self.process = self.broker = self.client = None
        self.frozen = False

    def freeze(self) -> None:
        """The process stands still and its network with it."""
        assert self.process is not None
        self.frozen = True
        self.process.freeze()
        for peer in self._peers:
            self._network.cut(self.host, peer)

    def thaw(self) -> None:
        if self.process is not None and self.frozen:
            self.frozen = False
            self.process.thaw()
            self._network.heal(self.host)

    def misbehave(self, *, syncs_fail: bool) -> None:
        random = self._random
        failing = [DiskFaults(sync_failure=0.02), DiskFaults(sync_failure=0.1)] if syncs_fail else []
        self.disk.faults = random.choice(
            [
                NO_FAULTS,
                DiskFaults(stall=0.02, stall_s=(0.05, 1.5)),
                DiskFaults(read_failure=0.1),
                DiskFaults(capacity_bytes=random.randrange(100_000, 2_000_000)),
                *failing,
            ]
        )
        self.metadata_faults = random.choice([0.0, 0.0, 0.2])

    def behave(self) -> None:
        self.disk.faults = NO_FAULTS
        self.metadata_faults = 0.0
        if self.client is not None:
            self.client.reconnect()

    def _metadata_fault(self, _request: str) -> Fault:
        luck = self._random.random()
        if luck < self.metadata_faults / 2:
            return Fault.UNAVAILABLE
        return Fault.UNCERTAIN if luck < self.metadata_faults else Fault.NONE
