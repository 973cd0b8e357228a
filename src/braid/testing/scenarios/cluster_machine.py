"""A broker's machine in a simulated cluster: it can crash at a certain write, and its ways to others be disturbed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from braid.broker.broker import Broker
from braid.broker.config import BrokerConfig
from braid.metadata.memory import Fault, MemoryStore
from braid.testing.scenarios.broker_machine import BrokerMachine
from braid.testing.sim.loop import OUTSIDE, Simulation
from braid.testing.sim.network import SimulatedNetwork
from braid.testing.sim.objects import Faults, FaultyObjects, MemoryObjects

DEAD = Faults(fails_before=1.0)


class ClusterMachine(BrokerMachine):
    def __init__(
        self,
        simulation: Simulation,
        network: SimulatedNetwork,
        store: MemoryStore,
        config: BrokerConfig,
        shared: MemoryObjects | None,
    ) -> None:
        """`shared` is the storage that all brokers share, if they do."""
        super().__init__(simulation, network, store, config, host=config.id)
        self.id = config.id
        self.busy = False
        """Somebody is stopping, starting or freezing it."""
        self.object_faults = Faults()
        self.delay_s = (0.0, 0.0)
        """Of each way to the metadata store and back."""
        self._shared = shared
        self._crash_at: int | None = None
        """So many more writes to the metadata store."""
        self._crash: Callable[[], None] = lambda: None

    @property
    def up(self) -> bool:
        return self.broker is not None and not self.frozen

    def open(self) -> asyncio.Task[Broker]:
        if self._shared is not None:
            self.objects = FaultyObjects(self._shared, self._random, self.object_faults)
        opening = super().open()
        assert self.client is not None
        self.client.delay_s = lambda: self._random.uniform(*self.delay_s) if self.delay_s[1] else 0.0
        return opening

    def stop(self, *, power_loss: bool) -> None:
        if self.objects is not None:
            self.objects.faults = DEAD  # Whatever the killed process still tries reaches nobody.
            self.objects = None
        self._crash_at = None
        super().stop(power_loss=power_loss)

    def crash_at_write(self, number: int, crash: Callable[[], None]) -> None:
        """Call `crash` around the `number`th next write to the metadata store: before it arrives, or after."""
        self._crash_at, self._crash = number, crash

    def forget_crash(self) -> None:
        self._crash_at = None

    def disturb_objects(self) -> None:
        self.object_faults = self._random.choice(
            [
                Faults(),
                Faults(fails_before=0.1, fails_after=0.1, breaks_read=0.05, loses_upload=0.1),
                Faults(slow=0.3, slowest_s=1.0),
                Faults(fails_before=1.0),
            ]
        )
        if self.objects is not None:
            self.objects.faults = self.object_faults

    def behave(self) -> None:
        super().behave()
        self.delay_s = (0.0, 0.0)
        self.object_faults = Faults()
        if self.objects is not None:
            self.objects.faults = self.object_faults
        if self.client is not None:
            self.client.catch_up()

    def _metadata_fault(self, request: str) -> Fault:
        if request == "txn" and self._crash_at is not None:
            self._crash_at -= 1
            if self._crash_at == 0:
                self._crash_at = None
                self._later(self._random.randint(1, 4), self._crash)
        return super()._metadata_fault(request)

    def _later(self, turns: int, action: Callable[[], None]) -> None:
        """A request takes a turn of the loop to arrive and another one to be answered."""
        loop = asyncio.get_running_loop()
        if turns == 1:
            loop.call_soon(action, context=OUTSIDE)
        else:
            loop.call_soon(self._later, turns - 1, action, context=OUTSIDE)
