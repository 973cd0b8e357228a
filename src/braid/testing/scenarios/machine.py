"""A machine that runs a real broker in a simulation: its disk survives, its processes do not."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from random import Random

import msgspec

from braid.broker.broker import Broker
from braid.broker.config import BrokerConfig
from braid.metadata import paths
from braid.metadata.memory import Fault, MemoryStore
from braid.metadata.store import Condition, Operation, Put, TxnResult
from braid.model.cluster import Registration
from braid.testing.sim.clock import SimulatedClock
from braid.testing.sim.disk import NO_FAULTS, DiskFaults, SimulatedDisk
from braid.testing.sim.loop import OUTSIDE, Process, Simulation
from braid.testing.sim.network import SimulatedNetwork
from braid.testing.sim.objects import Faults, FaultyObjects, MemoryObjects

DEAD = Faults(fails_before=1.0)
SLOW_DISK = DiskFaults(sync_s=(0.02, 0.3))
"""A disk on a network that is overloaded: while anything is published, a write waits for its sync."""


class BrokerMachine:
    def __init__(
        self,
        simulation: Simulation,
        network: SimulatedNetwork,
        store: MemoryStore,
        config: BrokerConfig,
        shared: MemoryObjects | None,
    ) -> None:
        """`shared` is the storage that all brokers share, if they share any."""
        self.id = config.id
        self.lease_ttl_s = config.lease_ttl_s
        self.disk = SimulatedDisk(simulation.random)
        self.last_disk: SimulatedDisk | None = None
        """The disk that was lost, until a broker with another one is open: its last answers may still be under way."""
        self.process: Process | None = None
        self.broker: Broker | None = None
        """Set while the broker is open."""
        self.frozen = False
        self.lagging = False
        """Its broker does not hear what others write to the metadata store."""
        self.busy = False
        """A fault is stopping, starting or freezing this machine."""
        self.disk_failed = False
        """Whether the disk was replaced, or has failed syncs and reads: only then may its records be given up."""
        self.disk_was_full = False
        """Whether the disk has had a limit: then its broker may serve readers without room to begin."""
        self.earlier = False
        """Whether its next process is of a version that does not know changes of the layout."""
        self.upgraded_at = -math.inf
        """When the last process of such a version was replaced; infinite while there is one."""
        self.metadata: MemoryStore | None = None
        """The present process's connection to the metadata store."""
        self.objects: FaultyObjects | None = None
        """The present process's connection to the shared storage."""
        self.clock: SimulatedClock = simulation.clock
        """The present process's clock: wrong by an amount of its own."""
        self.jumped_at = -math.inf
        """When the clock last jumped."""
        self.metadata_faults = 0.0
        self.metadata_delay_s = (0.0, 0.0)
        """The delay of a request to the metadata store, and of its answer."""
        self.object_faults = Faults()
        self._simulation = simulation
        self._random: Random = simulation.random
        self._network = network
        self._store = store
        self._config = config
        self._shared = shared
        self._peers: dict[str, None] = {}
        self._crash_at: int | None = None
        """So many more writes to the metadata store."""
        self._crash: Callable[[], None] = lambda: None

    @property
    def up(self) -> bool:
        return self.broker is not None and not self.frozen

    def meet(self, host: str) -> None:
        """Let connections with `host` break as soon as the broker's process is killed: a kernel closes them."""
        self._peers[host] = None

    # ── its process ──────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self) -> asyncio.Task[Broker]:
        """Start a process that opens the broker. It may crash at any time."""
        assert self.process is None
        if self._shared is not None:
            self.objects = FaultyObjects(self._shared, self._random, self.object_faults)
        self.process = self._simulation.process(self.id)
        self.metadata = self._store.client(self.id)
        if self.earlier:
            _announce_no_features(self.metadata)
        self.metadata.fault = self._metadata_fault
        self.metadata.delay_s = self._draw_metadata_delay
        self.clock = self._simulation.clock.skewed(self._random.randrange(-5_000_000, 5_000_000))
        return self.process.start(
            Broker.open(
                self._config,
                network=self._network.host(self.id),
                store=self.metadata,
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

    def crash(self, *, power_loss: bool) -> None:
        """The machine loses power, or the process is killed."""
        if self.process is None:
            return
        if self.objects is not None:
            self.objects.faults = DEAD  # Nothing that the killed process still tries arrives.
            self.objects = None
        self._crash_at = None
        if power_loss:
            self.disk.crash()
        else:
            self.disk.kill()
            for peer in self._peers:
                self._network.reset(self.id, peer)
        self._network.crash(self.id)
        assert self.metadata is not None
        self.metadata.disconnect()
        self.process.kill()
        self.process = self.broker = self.metadata = None
        self.frozen = False

    def freeze(self) -> None:
        """The process stands still, and its network with it."""
        assert self.process is not None
        self.frozen = True
        self.process.freeze()
        for peer in self._peers:
            self._network.cut(self.id, peer)

    def thaw(self, *, asleep: bool = True) -> None:
        """A machine that was `asleep` hears of what was sent meanwhile a little later. Otherwise only the process stood
        still: it finds what has arrived before it notices how late it is."""
        if self.process is not None and self.frozen:
            self.frozen = False
            self.process.thaw()
            self._network.heal(self.id)
            if not asleep:
                asyncio.get_running_loop().call_soon(self._network.arrive, self.id, context=OUTSIDE)

    def jump_clock(self, seconds: int) -> None:
        self.jumped_at = self._simulation.clock.monotonic()
        self.clock.jump(seconds * 1_000_000)

    # ── its disk, its storage and its metadata store ─────────────────────────────────────────────────────────────────

    def replace_disk(self) -> None:
        """Put an empty disk into a machine that does not run."""
        assert self.process is None
        self.last_disk = self.disk
        self.disk = SimulatedDisk(self._random, faults=self.disk.faults)
        self.disk_failed = True

    def misbehave(self, *, syncs_fail: bool) -> None:
        random = self._random
        failing = [DiskFaults(sync_failure=0.02), DiskFaults(sync_failure=0.1)] if syncs_fail else []
        self.disk.faults = random.choice(
            [
                NO_FAULTS,
                SLOW_DISK,
                DiskFaults(stall=0.02, stall_s=(0.05, 1.5)),
                DiskFaults(read_failure=0.1),
                DiskFaults(capacity_bytes=random.randrange(100_000, 2_000_000)),
                *failing,
            ]
        )
        self.disk_was_full |= self.disk.faults.capacity_bytes is not None
        self.disk_failed |= bool(self.disk.faults.sync_failure or self.disk.faults.read_failure)
        self.metadata_faults = random.choice([0.0, 0.0, 0.2])

    def disturb_objects(self) -> None:
        self._set_object_faults(
            self._random.choice(
                [
                    Faults(),
                    Faults(fails_before=0.1, fails_after=0.1, breaks_read=0.05, loses_upload=0.1),
                    Faults(slow=0.3, slowest_s=1.0),
                    Faults(fails_before=1.0),
                ]
            )
        )

    def behave(self) -> None:
        self.disk.faults = NO_FAULTS
        self.metadata_faults = 0.0
        self.metadata_delay_s = (0.0, 0.0)
        self._set_object_faults(Faults())
        if self.metadata is not None:
            self.metadata.reconnect()
            self.metadata.catch_up()

    def crash_at_write(self, number: int, crash: Callable[[], None]) -> None:
        """Call `crash` around the `number`th next write to the metadata store: before it arrives, or after."""
        self._crash_at, self._crash = number, crash

    def forget_crash(self) -> None:
        self._crash_at = None

    def _set_object_faults(self, faults: Faults) -> None:
        self.object_faults = faults
        if self.objects is not None:
            self.objects.faults = faults

    def _draw_metadata_delay(self) -> float:
        return self._random.uniform(*self.metadata_delay_s) if self.metadata_delay_s[1] else 0.0

    def _metadata_fault(self, request: str) -> Fault:
        if request == "txn" and self._crash_at is not None:
            self._crash_at -= 1
            if self._crash_at == 0:
                self._crash_at = None
                self._later(self._random.randint(1, 4), self._crash)
        luck = self._random.random()
        if luck < self.metadata_faults / 2:
            return Fault.UNAVAILABLE
        return Fault.UNCERTAIN if luck < self.metadata_faults else Fault.NONE

    def _later(self, turns: int, action: Callable[[], None]) -> None:
        """A request takes one turn of the loop to arrive, and another one to be answered."""
        loop = asyncio.get_running_loop()
        if turns == 1:
            loop.call_soon(action, context=OUTSIDE)
        else:
            loop.call_soon(self._later, turns - 1, action, context=OUTSIDE)


def _announce_no_features(store: MemoryStore) -> None:
    """Let a broker register as one of an earlier version does. Otherwise it does what this version does."""
    txn = store.txn

    async def txn_of_earlier_version(conditions: Sequence[Condition], operations: Sequence[Operation]) -> TxnResult:
        return await txn(conditions, [_earlier(each) for each in operations])

    store.txn = txn_of_earlier_version  # type: ignore[method-assign]


def _earlier(operation: Operation) -> Operation:
    if not isinstance(operation, Put) or not operation.key.startswith(paths.BROKERS_PREFIX):
        return operation
    registered = msgspec.structs.replace(Registration.from_json(operation.value), version="0.0.9", features=())
    return Put(operation.key, registered.to_json(), operation.lease)
