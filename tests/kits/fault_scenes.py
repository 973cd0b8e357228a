"""Brokers with simulated disks that meet disasters: what the "bad days" tests share.

A `Scene` is a metadata store and an object store; a `Broker` is a machine beside them. A broker's trap ends it at a
chosen step: before, during or after its n-th call to disk, objects or metadata.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from braid.metadata.memory import Fault, MemoryStore
from braid.metadata.store import Condition, Entry, Listing, Operation, TxnResult
from braid.model.batch.header import (
    HEADER_BYTES,
    Flag,
    body_of,
    control_batch,
    parse_header,
    stamp,
)
from braid.model.errors import BraidError, FileMissing, StorageError
from braid.model.ids import Epoch, Offset
from braid.model.topic import Durability
from braid.ports.disk import Buffer, Disk, DiskFile, FileStat, FolderLock
from braid.storage.cache import HotCache
from braid.storage.context import StorageContext, StorageMode
from braid.storage.handles import FooterCache, ReadHandles
from braid.storage.history.catalog import Catalog
from braid.storage.log.context import FileConfig, LogConfig
from braid.storage.log.wal import wal_name
from braid.storage.objects.store import Objects, ObjectStat
from braid.storage.reader import LogReader
from braid.storage.segment import SegmentStorage
from braid.testing.batches import opaque_batch
from braid.testing.sim.disk import Crashed, SimulatedDisk
from braid.testing.sim.loop import Process, Simulation, run_simulation
from braid.testing.sim.objects import Faults, FaultyObjects, MemoryObjects

T = TypeVar("T")

TOPIC, DESCRIPTOR = "public/default/orders", "0000-ffff-0"
FOLDER = f"wal/{TOPIC}/{DESCRIPTOR}"
CHECKPOINT = f"{FOLDER}/wal.ckpt"
OBJECTS = f"{TOPIC}/{DESCRIPTOR}"
BATCH_BYTES = 136
"""Of `batch()` with the default size: 96 bytes of header, 40 of body."""


def batch(value: int, *, producer: int = 0, sequence: int = 0, count: int = 1, size: int = 40) -> bytearray:
    """A batch whose body says which one it is."""
    body = f"{value}".encode().ljust(size)
    return opaque_batch(body, count, producer=producer, sequence=sequence)


def wal_path(base_offset: int) -> str:
    return f"{FOLDER}/{wal_name(base_offset)}"


def simulate(main: Callable[[Scene], Coroutine[Any, Any, T]], *, seed: int = 0, **config: Any) -> T:
    """Run `main` with a scene of its own, in virtual time."""

    async def run(simulation: Simulation) -> T:
        return await main(Scene(simulation, **config))

    return run_simulation(seed, run)


class Scene:
    def __init__(
        self,
        simulation: Simulation,
        *,
        mode: StorageMode = StorageMode.LOCAL,
        durability: Durability = Durability.FSYNC,
        file_bytes: int = 1 << 20,
        file_age_s: float = 600.0,
        cache_bytes: int = 0,
    ) -> None:
        """In mode LOCAL nothing is exported behind the test's back; the objects are shared all the same."""
        self.simulation = simulation
        self.random = simulation.random
        self.clock = simulation.clock
        self.mode = mode
        self.cache_bytes = cache_bytes
        self.config = LogConfig(
            durability=durability,
            files=FileConfig(file_bytes=file_bytes, file_age_s=file_age_s, first_reserve_bytes=1_024),
        )
        self.store = MemoryStore(self.clock)
        self.objects = MemoryObjects(self.clock)
        self.epoch = 0
        self.confirmed: dict[int, int] = {}
        """Offset and value of every batch that was confirmed."""
        self.next_value = 0

    def broker(self, name: str) -> Broker:
        return Broker(self, name)

    async def publish(self, segment: SegmentStorage, count: int = 1, *, size: int = 40) -> list[int]:
        """Confirm `count` batches of one record each, together; returns their offsets."""
        appended = [segment.append(batch(self.next_value + n, size=size)) for n in range(count)]
        first, self.next_value = self.next_value, self.next_value + count
        for n, each in enumerate(appended):
            await segment.log.confirm(each)
            assert each.base_offset is not None
            assert each.base_offset not in self.confirmed, "I1: an offset was confirmed twice"
            self.confirmed[each.base_offset] = first + n
        return [each.next_offset - 1 for each in appended]

    def append_unconfirmed(self, segment: SegmentStorage, count: int) -> None:
        for _ in range(count):
            segment.append(batch(self.next_value))
            self.next_value += 1

    async def check(self, segment: SegmentStorage, start: int = 0) -> None:
        """I1, I2: offsets run on from `start`, and each confirmed batch stands at its offset."""
        stored = await read_all(segment.reader(start))
        assert [offset for offset, _ in stored] == list(range(start, start + len(stored))), "I1"
        kept = {offset: value for offset, value in self.confirmed.items() if offset >= start}
        assert kept.items() <= dict(stored).items(), "I2"
        values = [value for _, value in stored]
        assert len(values) == len(set(values)), "I10"

    async def catalog(self) -> Catalog:
        catalog = Catalog(self.store, TOPIC, DESCRIPTOR)
        await catalog.load()
        return catalog


async def read_all(reader: LogReader, max_bytes: int = 1 << 20) -> list[tuple[int, int]]:
    """Offset and value of everything that can be read from here on."""
    stored: list[tuple[int, int]] = []
    while batches := await reader.read_available(max_bytes):
        stored += [(header.base_offset, int(bytes(body_of(data, header)))) for header, data in batches]
    return stored


class Broker:
    def __init__(self, scene: Scene, name: str) -> None:
        self.scene = scene
        self.name = name
        self.disk = SimulatedDisk(scene.random)
        self.store = scene.store.client(name)
        self.objects = FaultyObjects(scene.objects, scene.random, Faults())
        self.trap = Trap(self)
        self.process: Process | None = None

    def context(self) -> StorageContext:
        disk = TrappedDisk(self.disk.mount(), self.trap)
        return StorageContext(
            broker_id=self.name,
            disk=disk,
            folder="wal",
            store=TrappedStore(self.store, self.trap),  # type: ignore[arg-type]
            objects=TrappedObjects(self.objects, self.trap),
            mode=self.scene.mode,
            clock=self.scene.clock,
            cache=HotCache(self.scene.cache_bytes),
            handles=ReadHandles(disk, 4),
            footers=FooterCache(4),
            preallocated=None,
            random=self.scene.random,
        )

    async def open(
        self,
        *,
        epoch: int | None = None,
        context: StorageContext | None = None,
        accept_loss: bool = False,
        may_confirm: Callable[[], bool] = lambda: True,
    ) -> SegmentStorage:
        """Open the segment in a new process, in the next epoch unless told."""
        self.process = self.scene.simulation.process(self.name)
        if epoch is None:
            self.scene.epoch += 1
            epoch = self.scene.epoch
        opening = SegmentStorage.open(
            context or self.context(),
            TOPIC,
            DESCRIPTOR,
            Epoch(epoch),
            self.scene.config,
            may_confirm=may_confirm,
            accept_loss=accept_loss,
        )
        return await self.run(opening)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it in the broker's process: it dies with it, and whoever waits gets `Crashed`."""
        assert self.process is not None
        task = self.process.start(work)
        await asyncio.wait([task])
        if task.cancelled():
            raise Crashed(f"{self.name} died while it worked")
        return task.result()

    def power_loss(self) -> None:
        self.disk.crash()
        self._end()

    def kill(self) -> None:
        self.disk.kill()
        self._end()

    def _end(self) -> None:
        if self.process is not None:
            self.process.kill()

    def fail_metadata(self, number: int, fault: Fault) -> Callable[[], bool]:
        """Let the n-th metadata request from now on fail; the answer says whether it came to that."""
        requests = 0

        def choose(_request: str) -> Fault:
            nonlocal requests
            requests += 1
            return fault if requests == number else Fault.NONE

        self.store.fault = choose
        return lambda: requests >= number


def fail_object_calls(broker: Broker, numbers: Iterable[int], faults: Faults) -> None:
    """Let the calls to the object store with these numbers, counted from now, suffer; all others work."""
    numbers = frozenset(numbers)
    calls = 0

    class Chosen(Faults, frozen=True):
        def chosen(self, luck: float, *, reads: bool = False, creates: bool = False) -> Any:
            nonlocal calls
            calls += 1
            return faults.chosen(0.0, reads=reads, creates=creates) if calls in numbers else None

    broker.objects.faults = Chosen()


class Moment(enum.Enum):
    BEFORE = "before"
    DURING = "during"
    AFTER = "after"


class Ending(enum.Enum):
    POWER_LOSS = "power loss"
    KILL = "kill"


class Trap:
    """Counts the broker's steps and ends the broker at one of them."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._at = 0
        self._moment = Moment.BEFORE
        self._ending = Ending.KILL
        self.steps = 0

    def arm(self, at: int, moment: Moment, ending: Ending) -> None:
        self.steps, self._at, self._moment, self._ending = 0, at, moment, ending

    def disarm(self) -> None:
        self._at = 0

    async def around(self, call: Coroutine[Any, Any, T]) -> T:
        self.steps += 1
        if self.steps != self._at:
            return await call
        match self._moment:
            case Moment.BEFORE:
                call.close()
            case Moment.DURING:
                task = asyncio.ensure_future(call)
                task.add_done_callback(lambda task: task.cancelled() or task.exception())
                await asyncio.wait([task], timeout=self._broker.scene.random.uniform(0, 0.001))
            case Moment.AFTER:
                with contextlib.suppress(BraidError):
                    await call
        self._spring()
        raise Crashed(f"{self._broker.name} ended {self._moment.value} step {self.steps}")

    def _spring(self) -> None:
        if self._ending is Ending.KILL:
            self._broker.kill()
        else:
            self._broker.power_loss()


class TrappedDisk:
    def __init__(self, disk: Disk, trap: Trap) -> None:
        self._disk = disk
        self._trap = trap

    async def open(self, path: str, *, create: bool = False) -> DiskFile:
        return TrappedFile(await self._trap.around(self._disk.open(path, create=create)), self._trap)

    async def prepare(self, path: str, size: int) -> None:
        await self._trap.around(self._disk.prepare(path, size))

    async def stat(self, path: str) -> FileStat:
        return await self._trap.around(self._disk.stat(path))

    async def list_folders(self, folder: str) -> list[str]:
        return await self._trap.around(self._disk.list_folders(folder))

    async def list(self, folder: str) -> list[FileStat]:
        return await self._trap.around(self._disk.list(folder))

    async def make_folder(self, folder: str) -> None:
        await self._trap.around(self._disk.make_folder(folder))

    async def lock(self, folder: str) -> FolderLock:
        return await self._trap.around(self._disk.lock(folder))

    async def sync_folder(self, folder: str) -> None:
        await self._trap.around(self._disk.sync_folder(folder))

    async def rename(self, source: str, target: str) -> None:
        await self._trap.around(self._disk.rename(source, target))

    async def publish(self, source: str, target: str) -> None:
        await self._trap.around(self._disk.publish(source, target))

    async def link(self, source: str, target: str) -> None:
        await self._trap.around(self._disk.link(source, target))

    async def remove(self, path: str) -> None:
        await self._trap.around(self._disk.remove(path))

    async def remove_folder(self, folder: str) -> None:
        await self._trap.around(self._disk.remove_folder(folder))


class TrappedFile:
    def __init__(self, file: DiskFile, trap: Trap) -> None:
        self._file = file
        self._trap = trap

    async def write(self, position: int, buffers: Sequence[Buffer], *, sync: bool) -> None:
        await self._trap.around(self._file.write(position, buffers, sync=sync))

    def start_write(
        self, position: int, buffers: Sequence[Buffer], *, sync: bool, on_end: Callable[[BaseException | None], None]
    ) -> None:
        write = asyncio.ensure_future(self.write(position, buffers, sync=sync))
        write.add_done_callback(lambda _: on_end(asyncio.CancelledError() if write.cancelled() else write.exception()))

    async def sync(self) -> None:
        await self._trap.around(self._file.sync())

    async def read(self, position: int, length: int) -> bytes:
        return await self._trap.around(self._file.read(position, length))

    async def reserve(self, size: int) -> None:
        await self._trap.around(self._file.reserve(size))

    async def truncate(self, size: int) -> None:
        await self._trap.around(self._file.truncate(size))

    async def size(self) -> int:
        return await self._trap.around(self._file.size())

    async def close(self) -> None:
        await self._file.close()


class TrappedObjects:
    def __init__(self, objects: Objects, trap: Trap) -> None:
        self._objects = objects
        self._trap = trap

    async def create(self, name: str, parts: Sequence[Buffer]) -> None:
        await self._trap.around(self._objects.create(name, parts))

    async def read(self, name: str, start: int, length: int) -> bytes:
        return await self._trap.around(self._objects.read(name, start, length))

    async def stat(self, name: str) -> ObjectStat:
        return await self._trap.around(self._objects.stat(name))

    async def list(self, prefix: str) -> list[ObjectStat]:
        return await self._trap.around(self._objects.list(prefix))

    async def delete(self, name: str) -> None:
        await self._trap.around(self._objects.delete(name))

    async def delete_below(self, prefix: str) -> None:
        await self._trap.around(self._objects.delete_below(prefix))

    async def remove_empty_folders(self, prefix: str) -> None:
        await self._trap.around(self._objects.remove_empty_folders(prefix))

    async def close(self) -> None:
        await self._objects.close()


class TrappedStore:
    """The part of a metadata store that the storage layer uses."""

    def __init__(self, store: MemoryStore, trap: Trap) -> None:
        self._store = store
        self._trap = trap

    async def get(self, key: str) -> Entry | None:
        return await self._trap.around(self._store.get(key))

    async def list(self, prefix: str) -> Listing:
        return await self._trap.around(self._store.list(prefix))

    async def txn(self, conditions: Sequence[Condition], operations: Sequence[Operation]) -> TxnResult:
        return await self._trap.around(self._store.txn(conditions, operations))


async def refusal(work: Coroutine[Any, Any, object]) -> StorageError | None:
    """The storage error that it ends with, None if it works."""
    try:
        await work
    except StorageError as error:
        return error
    return None


def offsets(stored: Iterable[tuple[int, int]]) -> list[Offset]:
    return [Offset(offset) for offset, _ in stored]


def at(offset: int) -> int:
    """Where the batch with this offset begins in a log's first file, written by `publish` in one epoch."""
    return HEADER_BYTES + offset * BATCH_BYTES


async def put_file(disk: Disk, path: str, content: bytes) -> None:
    """Make the file's content this, as an operator with an editor would."""
    with contextlib.suppress(FileMissing):
        await disk.remove(path)
    file = await disk.open(path, create=True)
    await file.write(0, [content], sync=True)
    await file.close()


def files_of(broker: Broker) -> dict[str, bytes]:
    """The WAL files of the segment, by name."""
    return {
        path.rpartition("/")[2]: broker.disk.content(path)
        for path in broker.disk.paths()
        if path.startswith(f"{FOLDER}/") and path.endswith(".wal")
    }


def incarnation_of(content: bytes) -> int:
    """That of the owner who wrote the file's first batch."""
    return parse_header(content).incarnation


def stamped(value: int, offset: int, epoch: int = 1, lag: int = 0, incarnation: int = 77) -> bytes:
    data = batch(value)
    stamp(data, parse_header(data), Offset(offset), 0, Epoch(epoch), incarnation, lag)
    return bytes(data)


def begin(offset: int, epoch: int) -> bytes:
    data = control_batch(Flag.BEGIN)
    stamp(data, parse_header(data), Offset(offset), 0, Epoch(epoch), 77, 0)
    return bytes(data)
