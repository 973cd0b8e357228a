"""A broker's machine in a simulation of the storage layer: its disk survives, its processes do not."""

from __future__ import annotations

import asyncio
from random import Random

import msgspec

from braid.metadata.memory import Fault, MemoryStore
from braid.model.ids import Epoch
from braid.storage.cache import HotCache
from braid.storage.context import StorageContext, StorageMode
from braid.storage.handles import FooterCache, ReadHandles
from braid.storage.log.context import LogConfig
from braid.storage.log.preallocated import PreallocatedFiles
from braid.storage.objects.store import Objects
from braid.storage.segment import SegmentStorage
from braid.testing.sim.disk import NO_FAULTS, DiskFaults, SimulatedDisk
from braid.testing.sim.loop import Process, Simulation
from braid.testing.sim.objects import Faults, FaultyObjects

TOPIC, DESCRIPTOR = "public/default/simulated", "0000-ffff-0"
LEASE_S = 3.0
OPEN_TIMEOUT_S = 20.0
LARGEST_SKEW_S = 5
"""How much a machine's clock may be wrong, either way."""


class LogSetting(msgspec.Struct):
    """What all machines of one simulation share."""

    simulation: Simulation
    store: MemoryStore
    objects: Objects
    mode: StorageMode
    config: LogConfig
    with_preallocated: bool


class LogLease:
    """Renewed by the process that holds it, until it dies or is cut off."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.deadline = simulation.clock.monotonic() + LEASE_S
        self.cut = False

    def is_valid(self) -> bool:
        return self._simulation.clock.monotonic() < self.deadline

    async def renew(self) -> None:
        while not self.cut and self.is_valid():
            self.deadline = self._simulation.clock.monotonic() + LEASE_S
            await asyncio.sleep(LEASE_S / 3)


class LogMachine:
    def __init__(self, setting: LogSetting, name: str) -> None:
        self.name = name
        self.setting = setting
        self.random: Random = setting.simulation.random
        self.disk = SimulatedDisk(self.random)
        self.store = setting.store.client(name)
        self.store.fault = self._metadata_fault
        self.objects = FaultyObjects(setting.objects, self.random, Faults())
        self.metadata_faults = 0.0
        self.process: Process | None = None
        self.segment: SegmentStorage | None = None
        self.lease: LogLease | None = None

    def _metadata_fault(self, _request: str) -> Fault:
        luck = self.random.random()
        if luck < self.metadata_faults / 2:
            return Fault.UNAVAILABLE
        return Fault.UNCERTAIN if luck < self.metadata_faults else Fault.NONE

    def misbehave(self) -> None:
        random = self.random
        self.disk.faults = random.choice(
            [
                NO_FAULTS,
                DiskFaults(stall=0.02, stall_s=(0.05, 1.0)),
                DiskFaults(sync_failure=0.02),
                DiskFaults(capacity_bytes=random.randrange(200_000, 1_000_000)),
            ]
        )
        self.objects.faults = random.choice(
            [
                Faults(),
                Faults(fails_before=0.1, fails_after=0.1, breaks_read=0.05, loses_upload=0.1),
                Faults(slow=0.3, slowest_s=1.0),
            ]
        )
        self.metadata_faults = random.choice([0.0, 0.0, 0.2])

    def behave(self) -> None:
        self.disk.faults = NO_FAULTS
        self.objects.faults = Faults()
        self.metadata_faults = 0.0

    async def open(self, epoch: Epoch, *, accept_loss: bool) -> SegmentStorage:
        """Start a process that opens the segment; it may be killed at any time."""
        setting = self.setting
        self.process = setting.simulation.process(f"{self.name}-{epoch}")
        self.lease = lease = LogLease(setting.simulation)
        disk = self.disk.mount()
        preallocated = (
            PreallocatedFiles(disk, "spare", setting.config.files.file_bytes, most=1)
            if setting.with_preallocated
            else None
        )
        context = StorageContext(
            broker_id=self.name,
            disk=disk,
            folder="wal",
            store=self.store,
            objects=self.objects,
            mode=setting.mode,
            clock=setting.simulation.clock.skewed(
                self.random.randrange(-LARGEST_SKEW_S * 1_000_000, LARGEST_SKEW_S * 1_000_000)
            ),
            cache=HotCache(self.random.choice([0, 2_000, 1 << 20])),
            handles=ReadHandles(disk, 2),
            footers=FooterCache(2),
            preallocated=preallocated,
            random=self.random,
        )

        async def start() -> SegmentStorage:
            self._renewal = asyncio.get_running_loop().create_task(lease.renew())
            if preallocated is not None:
                await preallocated.open()
            return await SegmentStorage.open(
                context, TOPIC, DESCRIPTOR, epoch, setting.config, may_confirm=lease.is_valid, accept_loss=accept_loss
            )

        self.segment = await asyncio.wait_for(self.process.start(start()), OPEN_TIMEOUT_S)
        return self.segment

    def crash(self, *, power_loss: bool) -> None:
        if self.process is None:
            return
        if power_loss:
            self.disk.crash()
        else:
            self.disk.kill()
        self.process.kill()
        if self.lease is not None:
            self.lease.cut = True
        self.process, self.segment, self.lease = None, None, None
