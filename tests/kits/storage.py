"""What the tests of the storage layer share: batches, brokers on simulated disks, and a disk that takes notes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from braid.metadata.memory import MemoryStore
from braid.model.batch.header import NO_KEYS, BatchHeader, assemble, body_of, stamp
from braid.model.ids import Epoch, Offset
from braid.ports.disk import Buffer, Disk, DiskFile, FileStat, FolderLock
from braid.storage.cache import HotCache
from braid.storage.chunk import Index, encode_footer
from braid.storage.context import StorageContext, StorageMode
from braid.storage.handles import FooterCache, ReadHandles
from braid.storage.log.context import FileConfig, LogConfig, LogContext
from braid.storage.log.log import Appended, Log
from braid.storage.log.preallocated import PreallocatedFiles
from braid.storage.log.producers import ProducerTable
from braid.storage.log.recovery import recover, repair
from braid.storage.objects.store import Objects
from braid.storage.segment import SegmentStorage
from braid.testing.batches import opaque_header
from braid.testing.sim.clock import START_US
from braid.testing.sim.disk import SimulatedDisk
from braid.testing.sim.loop import Simulation, run_simulation
from braid.testing.sim.objects import MemoryObjects

T = TypeVar("T")

TOPIC, DESCRIPTOR = "public/default/orders", "0000-ffff-0"
SEGMENT_FOLDER = f"{TOPIC}/{DESCRIPTOR}"
WAL_FOLDER = f"wal/{SEGMENT_FOLDER}"
SMALL_FILES = FileConfig(file_bytes=4_096, first_reserve_bytes=1_024)
SMALL = LogConfig(files=SMALL_FILES)
"""A file holds its BEGIN and some 20 batches of 100 bytes."""


def make_header(
    count: int = 1,
    body: bytes = b"x" * 100,
    *,
    producer: int = 0,
    sequence: int = 0,
    times: tuple[int, int] = (START_US, START_US),
    key_hashes: tuple[int, int] = NO_KEYS,
    base_offset: int = 0,
    epoch: int = 0,
) -> BatchHeader:
    header = opaque_header(body, count, producer=producer, sequence=sequence, times=times, key_hashes=key_hashes)
    return msgspec.structs.replace(header, base_offset=Offset(base_offset), epoch=Epoch(epoch))


def make_batch(
    count: int = 1,
    body: bytes = b"x" * 100,
    *,
    producer: int = 0,
    sequence: int = 0,
    times: tuple[int, int] = (START_US, START_US),
    key_hashes: tuple[int, int] = NO_KEYS,
) -> bytearray:
    """A batch as a producer sends it. The body is opaque to the storage layer."""
    header = make_header(count, body, producer=producer, sequence=sequence, times=times, key_hashes=key_hashes)
    return assemble(header, body)


def stamped_batch(
    base_offset: int, count: int = 1, body: bytes = b"x" * 100, *, epoch: int = 1, incarnation: int = 77
) -> bytes:
    """A batch as it stands in a file."""
    header = make_header(count, body)
    batch = assemble(header, body)
    stamp(batch, header, Offset(base_offset), START_US, Epoch(epoch), incarnation, 0)
    return bytes(batch)


def make_chunk(base_offset: int, batches: int, *, epoch: int = 1, body: bytes = b"x" * 100) -> bytes:
    """A whole chunk of `batches` one-record batches."""
    data, index = b"", Index()
    for offset in range(base_offset, base_offset + batches):
        index.add(make_header(body=body, base_offset=offset), len(data))
        data += stamped_batch(offset, body=body, epoch=epoch)
    return data + encode_footer(
        base_offset=base_offset,
        next_offset=base_offset + batches,
        batch_bytes=len(data),
        first_epoch=epoch,
        last_epoch=epoch,
        sealed=False,
        index=index,
        producers=ProducerTable(),
    )


class Bytes:
    """Bytes in memory as a source to read from; counts the reads."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.reads = 0

    async def read(self, position: int, length: int) -> bytes:
        self.reads += 1
        return self.data[position : position + length]


class Write(NamedTuple):
    path: str
    position: int
    buffers: int
    sync: bool


class NotingDisk:
    """Any disk, with notes of what was written, synced, read, opened and removed."""

    def __init__(self, inner: Disk) -> None:
        self._inner = inner
        self.writes: list[Write] = []
        self.syncs: list[str] = []
        self.reads: list[str] = []
        self.removed: list[str] = []
        self.open_files = 0
        self.most_open_files = 0

    async def open(self, path: str, *, create: bool = False) -> DiskFile:
        file = await self._inner.open(path, create=create)
        self.open_files += 1
        self.most_open_files = max(self.most_open_files, self.open_files)
        return NotingFile(self, path, file)

    async def prepare(self, path: str, size: int) -> None:
        await self._inner.prepare(path, size)

    async def list_folders(self, folder: str) -> list[str]:
        return await self._inner.list_folders(folder)

    async def list(self, folder: str) -> list[FileStat]:
        return await self._inner.list(folder)

    async def stat(self, path: str) -> FileStat:
        return await self._inner.stat(path)

    async def make_folder(self, folder: str) -> None:
        await self._inner.make_folder(folder)

    async def lock(self, folder: str) -> FolderLock:
        return await self._inner.lock(folder)

    async def sync_folder(self, folder: str) -> None:
        await self._inner.sync_folder(folder)

    async def rename(self, source: str, target: str) -> None:
        await self._inner.rename(source, target)

    async def publish(self, source: str, target: str) -> None:
        await self._inner.publish(source, target)

    async def link(self, source: str, target: str) -> None:
        await self._inner.link(source, target)

    async def remove(self, path: str) -> None:
        self.removed.append(path)
        await self._inner.remove(path)

    async def remove_folder(self, folder: str) -> None:
        await self._inner.remove_folder(folder)


class NotingFile:
    def __init__(self, disk: NotingDisk, path: str, inner: DiskFile) -> None:
        self._disk = disk
        self._path = path
        self._inner = inner
        self._open = True

    async def write(self, position: int, buffers: Sequence[Buffer], *, sync: bool) -> None:
        self._disk.writes.append(Write(self._path, position, len(buffers), sync))
        await self._inner.write(position, buffers, sync=sync)

    def start_write(
        self, position: int, buffers: Sequence[Buffer], *, sync: bool, on_end: Callable[[BaseException | None], None]
    ) -> None:
        self._disk.writes.append(Write(self._path, position, len(buffers), sync))
        self._inner.start_write(position, buffers, sync=sync, on_end=on_end)

    async def sync(self) -> None:
        self._disk.syncs.append(self._path)
        await self._inner.sync()

    async def read(self, position: int, length: int) -> bytes:
        self._disk.reads.append(self._path)
        return await self._inner.read(position, length)

    async def reserve(self, size: int) -> None:
        await self._inner.reserve(size)

    async def truncate(self, size: int) -> None:
        await self._inner.truncate(size)

    async def size(self) -> int:
        return await self._inner.size()

    async def close(self) -> None:
        if self._open:
            self._open = False
            self._disk.open_files -= 1
        await self._inner.close()


class World:
    """One object store, one metadata store, and brokers with disks of their own. Epochs count up by themselves."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.clock = simulation.clock
        self.objects = MemoryObjects(simulation.clock)
        self.store = MemoryStore(simulation.clock)
        self.epoch = 0
        self.a = Broker(self, "a")
        self.b = Broker(self, "b")


class Broker:
    """A machine. `start` begins a new process on it: nothing but the disk survives from the one before."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.disk = SimulatedDisk(world.simulation.random)
        self.start()

    def start(
        self,
        *,
        mode: StorageMode = StorageMode.SHARED_FS,
        objects: Objects | None = None,
        cache_bytes: int = 1 << 20,
        max_open: int = 16,
        preallocated: PreallocatedFiles | None = None,
    ) -> Broker:
        self.noting = NotingDisk(self.disk.mount())
        self.store = self.world.store.client(self.name)
        self.context = StorageContext(
            broker_id=self.name,
            disk=self.noting,
            folder="wal",
            store=self.store,
            objects=objects or self.world.objects,
            mode=mode,
            clock=self.world.clock,
            cache=HotCache(cache_bytes),
            handles=ReadHandles(self.noting, max_open),
            footers=FooterCache(),
            preallocated=preallocated,
            random=self.world.simulation.random,
        )
        return self

    def crash(self) -> Broker:
        """Lose power and start again in the same mode."""
        self.disk.crash()
        return self.start(mode=self.context.mode, objects=self.context.objects)

    async def open(
        self,
        config: LogConfig = SMALL,
        *,
        may_confirm: Callable[[], bool] = lambda: True,
        accept_loss: bool = False,
    ) -> SegmentStorage:
        self.world.epoch += 1
        return await SegmentStorage.open(
            self.context,
            TOPIC,
            DESCRIPTOR,
            Epoch(self.world.epoch),
            config,
            may_confirm=may_confirm,
            accept_loss=accept_loss,
        )

    def wal_names(self) -> list[str]:
        """The names of the files in the segment's folder."""
        folder = WAL_FOLDER + "/"
        names = [path.removeprefix(folder) for path in self.disk.paths() if path.startswith(folder)]
        return [name for name in names if "/" not in name]


def run(main: Callable[[World], Awaitable[T]], seed: int = 1) -> T:
    """Run `main` in virtual time, in a world of its own."""

    async def start(simulation: Simulation) -> T:
        return await main(World(simulation))

    return run_simulation(seed, start)


async def open_log(
    disk: Disk,
    simulation: Simulation,
    epoch: int = 1,
    config: LogConfig = SMALL,
    *,
    cache: HotCache | None = None,
    preallocated: PreallocatedFiles | None = None,
    may_confirm: Callable[[], bool] = lambda: True,
) -> Log:
    """A log by itself, on whatever its folder holds."""
    recovered = await recover(disk, "log")
    await repair(disk, "log", recovered)
    context = LogContext(
        disk=disk,
        folder="log",
        epoch=Epoch(epoch),
        incarnation=simulation.random.randrange(1, 1 << 32),
        clock=simulation.clock,
        config=config,
        cache=cache or HotCache(),
        preallocated=preallocated,
        may_confirm=may_confirm,
    )
    log = Log(context, recovered)
    await log.open()
    return log


async def fill(target: SegmentStorage | Log, batches: int, *, body: bytes = b"x" * 100, count: int = 1) -> None:
    """Append batches whose bodies end with their own offsets, and wait until all are confirmed."""
    log = target.log if isinstance(target, SegmentStorage) else target
    appended: Appended | None = None
    for _ in range(batches):
        appended = log.append(make_batch(count, body + b"%d" % log.end))
    if appended is not None:
        await log.confirm(appended)


class Read(NamedTuple):
    offset: int
    records: int
    body: bytes


async def read_all(segment: SegmentStorage, offset: int = 0, max_bytes: int = 1 << 20) -> list[Read]:
    """Everything that is confirmed from `offset` on."""
    reader = segment.reader(offset)
    found: list[Read] = []
    while batches := await reader.read_available(max_bytes):
        found.extend(Read(h.base_offset, h.count, bytes(body_of(data, h))) for h, data in batches)
    return found


async def read_offsets(segment: SegmentStorage, offset: int = 0, max_bytes: int = 1 << 20) -> list[int]:
    """The offsets of the records in the batches from `offset` on."""
    batches = await read_all(segment, offset, max_bytes)
    return [each for batch in batches for each in range(batch.offset, batch.offset + batch.records)]


def with_files(config: LogConfig = SMALL, **changes: object) -> LogConfig:
    return msgspec.structs.replace(config, files=msgspec.structs.replace(config.files, **changes))
