"""A disk in memory and virtual time that loses, tears, fails and fills up, as its seed and its `faults` say.

`sectors.py` is the theory of one file's content. This module adds names, time and crashes:

- An operation is a generator. It yields how long the disk now takes and goes on after that; it belongs to the disk, not
  to its caller, so a cancelled call still happens, as it does in a thread.
- A crash lets each operation in flight take some more steps, or none, and then drops it. Whoever waits gets `Crashed`.
- Names are changed through a journal for each folder (`names.py`): a change is visible immediately and durable when its
  call returns, and then all changes before it in that folder are durable too. A crash keeps some first part of the
  rest. A process that is killed in between leaves a name that all can see and that a later crash may still take away.

Everything is drawn from the one `random`, so a seed decides all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping, Sequence
from posixpath import normpath
from random import Random
from typing import Any, TypeVar

import msgspec

from braid.model.errors import DiskError, DiskFull, FileTaken, SyncFailed
from braid.ports.disk import Buffer, FileStat
from braid.testing.sim.clock import START_US
from braid.testing.sim.loop import OUTSIDE
from braid.testing.sim.names import Names, parent
from braid.testing.sim.sectors import SectorFile

T = TypeVar("T")
Operation = Generator[float, None, T]

STEP_AFTER_CRASH = 0.5
"""How likely an operation that is in flight at a crash got one step further."""


class Crashed(DiskError, code="simulated-crash"):
    """The machine crashed under this call, or before it: nobody will see its result."""


class DiskFaults(msgspec.Struct, frozen=True):
    """Times are seconds of virtual time (from, to); failures are probabilities for each call."""

    read_s: tuple[float, float] = (20e-6, 200e-6)
    write_s: tuple[float, float] = (20e-6, 200e-6)
    sync_s: tuple[float, float] = (50e-6, 2e-3)
    """Also the time until a change of names is durable."""
    stall: float = 0.0
    """The disk takes `stall_s` for this call instead."""
    stall_s: tuple[float, float] = (0.1, 5.0)
    sync_failure: float = 0.0
    """The sync of a file, or of a changed name, raises `SyncFailed`."""
    read_failure: float = 0.0
    capacity_bytes: int | None = None
    """All files together; beyond it `DiskFull`, perhaps after a part was written."""


NO_FAULTS = DiskFaults()
"""Nothing fails. Crashes come from `crash()` alone."""


class SimulatedDisk:
    """The face of a simulated machine's disk: implements `braid.ports.disk.Disk`.

    This object works again after a crash, like the disk in the machine. `mount()` gives one that does not: a process
    that got a mounted disk can do nothing any more once the machine has crashed.
    """

    def __init__(self, random: Random, *, faults: DiskFaults = NO_FAULTS) -> None:
        self._device = _Device(random, faults)
        self._boot: int | None = None

    def mount(self) -> SimulatedDisk:
        mounted = SimulatedDisk.__new__(SimulatedDisk)
        mounted._device = self._device
        mounted._boot = self._device.boot
        return mounted

    @property
    def faults(self) -> DiskFaults:
        return self._device.faults

    @faults.setter
    def faults(self, faults: DiskFaults) -> None:
        self._device.faults = faults

    @property
    def crashes(self) -> int:
        return self._device.boot

    def crash(self) -> None:
        """Power off and on: open files are dead, what was not synced is decided by the seed."""
        self._device.crash()

    def kill(self) -> None:
        """Every process on the machine is killed: open files and mounts are dead, but the kernel keeps all it has."""
        self._device.end_processes()

    def paths(self) -> list[str]:
        """The paths of all files, sorted."""
        return sorted(self._device.names.files)

    def files(self) -> Mapping[str, SectorFile]:
        """All files by their paths, in no order."""
        return self._device.names.files

    def unlinked_writes(self) -> list[str]:
        """Return the files that had no name any more when a sync of what was written to them ended well."""
        return self._device.unlinked_writes

    def content(self, path: str) -> bytes:
        """What a read of the whole file would return now."""
        return bytes(self._device.names.file(path).content)

    def durable(self, path: str) -> bytes:
        """What every crash keeps, wherever no later write is on its way to the same place."""
        return bytes(self._device.names.file(path).durable)

    def unsynced(self, path: str) -> bool:
        """Whether a crash could change the file."""
        return self._device.names.file(path).unsynced

    def corrupt(self, path: str, position: int, data: bytes) -> None:
        """Damage the medium: these bytes now stand there, whatever was written. The length does not change."""
        self._device.names.file(path).damage(position, data)

    def flip(self, path: str, position: int, bit: int) -> None:
        """Turn one bit over."""
        byte = self._device.names.file(path).content[position]
        self.corrupt(path, position, bytes([byte ^ (1 << bit)]))

    async def open(self, path: str, *, create: bool = False) -> SimulatedFile:
        file = await self._call(self._device.create(path) if create else self._device.find(path))
        return SimulatedFile(self._device, path, file)

    async def prepare(self, path: str, size: int) -> None:
        await self._call(self._device.prepare(path, size))

    async def list_folders(self, folder: str) -> list[str]:
        return await self._call(self._device.look(lambda: self._device.names.list_folders(folder)))

    async def list(self, folder: str) -> list[FileStat]:
        return await self._call(self._device.look(lambda: self._device.names.list(folder)))

    async def stat(self, path: str) -> FileStat:
        file = await self._call(self._device.find(path))
        return FileStat(path.rpartition("/")[2], len(file.content), file.modified_us)

    async def make_folder(self, folder: str) -> None:
        await self._call(self._device.make_folder(folder))

    async def lock(self, folder: str) -> SimulatedLock:
        def take() -> SimulatedLock:
            if self._device.locks.get(folder) == self._device.boot:
                raise FileTaken(f"{folder} is in use: somebody on this machine has locked it")
            self._device.locks[folder] = self._device.boot
            return SimulatedLock(self._device, folder)

        return await self._call(self._device.look(take))

    async def sync_folder(self, folder: str) -> None:
        await self._call(self._device.sync_found_names(folder))

    async def rename(self, source: str, target: str) -> None:
        await self._call(self._device.change(lambda: self._device.names.rename(source, target), target, source))

    async def publish(self, source: str, target: str) -> None:
        await self._call(self._device.change(lambda: self._device.names.publish(source, target), target, source))

    async def link(self, source: str, target: str) -> None:
        await self._call(self._device.change(lambda: self._device.names.link(source, target), target))

    async def remove(self, path: str) -> None:
        await self._call(self._device.change(lambda: self._device.names.remove(path), path))

    async def remove_folder(self, folder: str) -> None:
        await self._call(self._device.change(lambda: self._device.names.remove_folder(folder), folder))

    async def _call(self, operation: Operation[T]) -> T:
        if self._boot is not None:
            self._device.check_boot(self._boot, "this mounted disk")
        return await self._device.start(operation)


class SimulatedLock:
    """Gone when the machine crashes or its processes are killed."""

    def __init__(self, device: _Device, folder: str) -> None:
        self._device = device
        self._folder = folder
        self._boot = device.boot

    async def release(self) -> None:
        if self._boot == self._device.boot and self._folder:
            self._device.locks.pop(self._folder, None)
        self._folder = ""


class SimulatedFile:
    """An open file. Dead after a crash; closing it is then still allowed."""

    def __init__(self, device: _Device, path: str, file: SectorFile) -> None:
        self._device = device
        self._path = path
        self._file = file
        self._boot = device.boot
        self._calls = 0
        self._closed: asyncio.Future[None] | None = None

    async def write(self, position: int, buffers: Sequence[Buffer], *, sync: bool) -> None:
        await self._call(self._device.write(self._path, self._file, position, buffers, sync))

    def start_write(
        self, position: int, buffers: Sequence[Buffer], *, sync: bool, on_end: Callable[[BaseException | None], None]
    ) -> None:
        write = self._begin(self._device.write(self._path, self._file, position, buffers, sync))
        # In the caller's context: a process that is frozen meanwhile hears of it when it thaws.
        write.add_done_callback(lambda _: on_end(write.exception()))

    async def sync(self) -> None:
        await self._call(self._device.sync(self._path, self._file))

    async def read(self, position: int, length: int) -> bytes:
        return await self._call(self._device.read(self._path, self._file, position, length))

    async def reserve(self, size: int) -> None:
        await self._call(self._device.resize(self._path, self._file, size, only_grow=True))

    async def truncate(self, size: int) -> None:
        await self._call(self._device.resize(self._path, self._file, size, only_grow=False))

    async def size(self) -> int:
        return await self._call(self._device.look(lambda: len(self._file.content)))

    async def close(self) -> None:
        if self._closed is None:
            self._closed = asyncio.get_running_loop().create_future()
            self._calls += 1
            self._end_call()
        if self._boot == self._device.boot:
            await asyncio.shield(self._closed)

    async def _call(self, operation: Operation[T]) -> T:
        return await self._begin(operation)

    def _begin(self, operation: Operation[T]) -> asyncio.Future[T]:
        self._device.check_boot(self._boot, f"the open file {self._path}")
        if self._closed is not None:
            raise DiskError(f"{self._path} was closed: open it again")
        self._calls += 1
        return self._device.start(operation, self._end_call)

    def _end_call(self) -> None:
        self._calls -= 1
        if self._calls == 0 and self._closed is not None and not self._closed.done():
            self._closed.set_result(None)


class _InFlight(msgspec.Struct, eq=False):
    operation: Operation[Any]
    future: asyncio.Future[Any]
    at_end: Callable[[], None]


class _Device:
    """Owns all state. Its public generators are the operations."""

    def __init__(self, random: Random, faults: DiskFaults) -> None:
        self.random = random
        self.faults = faults
        self.names = Names()
        self.locks: dict[str, int] = {}
        """Locked folders, with the boot in which each was locked: a lock dies with its process."""
        self.boot = 0
        self.unlinked_writes: list[str] = []
        self._in_flight: dict[_InFlight, None] = {}

    def start(self, operation: Operation[T], at_end: Callable[[], None] = lambda: None) -> asyncio.Future[T]:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        call = _InFlight(operation, future, at_end)
        self._in_flight[call] = None
        self._step(call)
        return future

    def check_boot(self, boot: int, what: str) -> None:
        if boot != self.boot:
            raise Crashed(f"{what} belongs to a machine that has crashed since: open it again after the restart")

    def crash(self) -> None:
        self.end_processes()
        self.names.crash(self.random)
        for _, file in sorted(self.names.files.items()):
            file.crash(self.random)

    def end_processes(self) -> None:
        for call in self._in_flight:
            self._step_after_crash(call)
        for call in self._in_flight:
            call.operation.close()
            if not call.future.done():
                call.future.set_exception(Crashed("the machine crashed during this call: its effect is unknown"))
            call.at_end()
        self._in_flight.clear()
        self.boot += 1

    def _step(self, call: _InFlight) -> None:
        if call not in self._in_flight:
            return
        try:
            delay = next(call.operation)
        except StopIteration as end:
            if not call.future.done():
                call.future.set_result(end.value)
        except DiskError as error:
            if not call.future.done():
                call.future.set_exception(error)
        else:
            call.future.get_loop().call_later(delay, self._step, call, context=OUTSIDE)
            return
        del self._in_flight[call]
        call.at_end()

    def _step_after_crash(self, call: _InFlight) -> None:
        try:
            while self.random.random() < STEP_AFTER_CRASH:
                next(call.operation)
        except (StopIteration, DiskError):
            pass

    # The operations. Each takes its time first, so a crash may come before it has done anything.

    def look(self, answer: Callable[[], T]) -> Operation[T]:
        yield self._delay(self.faults.read_s)
        return answer()

    def find(self, path: str) -> Operation[SectorFile]:
        return self.look(lambda: self.names.file(path))

    def change(self, change: Callable[[], T], *changed: str) -> Operation[T]:
        """Change names, then sync the folders of the paths that were `changed`."""
        yield self._delay(self.faults.write_s)
        result = change()
        yield from self._sync_names(*dict.fromkeys(parent(normpath(path)) for path in changed))
        return result

    def make_folder(self, folder: str) -> Operation[None]:
        """Each name is durable before anything is made behind it. Of a folder that is found, only that its parents are
        durable is known: its maker may have been killed before it was itself."""
        yield self._delay(self.faults.write_s)
        missing = self.names.missing_folders(folder)
        yield from self._sync_names(parent(parent(missing[0]) if missing else normpath(folder)))
        for each in missing:
            self.names.make_folder(each)
            yield from self._sync_names(parent(each))

    def sync_found_names(self, folder: str) -> Operation[None]:
        self.names.check_can_be_synced(folder)
        yield from self._sync_names(folder)

    def _sync_names(self, *folders: str) -> Operation[None]:
        number = self.names.last_change
        yield self._delay(self.faults.sync_s)
        self._let_sync_fail("the folder after a change of names")
        for folder in folders:
            self.names.make_durable(folder, number)

    def create(self, path: str) -> Operation[SectorFile]:
        file = SectorFile()
        yield from self.change(lambda: self.names.add(path, self._touched(file)), path)
        return file

    def prepare(self, path: str, size: int) -> Operation[None]:
        yield self._delay(self.faults.write_s)
        file = SectorFile()
        self.names.add(path, self._touched(file))
        number = self.names.last_change
        try:
            self._check_room(path, size)
            file.resize(size, self.random)
            yield self._delay(self.faults.sync_s)
            self._let_sync_fail(path)
        except DiskError:
            self.names.remove(path)
            raise
        file.complete_sync(file.begin_sync())
        self.names.make_durable(parent(normpath(path)), number)

    def write(
        self, path: str, file: SectorFile, position: int, buffers: Sequence[Buffer], sync: bool
    ) -> Operation[None]:
        yield self._delay(self.faults.write_s)
        # The buffers are read only now: a caller who changes them before the call has returned writes the change.
        data = b"".join(buffers)
        room = self._room(file)
        if room is not None and position + len(data) > room:
            part = self.random.randint(0, max(0, room - position))
            self._touched(file).write(position, data[:part], self.random)
            raise DiskFull(f"could not write {len(data)} bytes to {path} at {position}: {part} were, then no room")
        self._touched(file).write(position, data, self.random)
        if sync:
            yield from self.sync(path, file)
            if not self.names.has(path, file):
                self.unlinked_writes.append(path)

    def sync(self, path: str, file: SectorFile) -> Operation[None]:
        unsynced = file.begin_sync()
        yield self._delay(self.faults.sync_s)
        try:
            self._let_sync_fail(path)
        except SyncFailed:
            file.fail_sync(unsynced, self.random)
            raise
        file.complete_sync(unsynced)

    def read(self, path: str, file: SectorFile, position: int, length: int) -> Operation[bytes]:
        yield self._delay(self.faults.read_s)
        if self._chance(self.faults.read_failure):
            raise DiskError(f"could not read {length} bytes of {path} at {position}: simulated read error")
        return bytes(file.content[position : position + length])

    def resize(self, path: str, file: SectorFile, size: int, *, only_grow: bool) -> Operation[None]:
        yield self._delay(self.faults.write_s)
        if size > len(file.content):
            self._check_room(path, size - len(file.content))
        elif only_grow:
            return
        self._touched(file).resize(size, self.random)

    def _room(self, file: SectorFile) -> int | None:
        """How long the file may become, None for as long as it likes."""
        if self.faults.capacity_bytes is None:
            return None
        return len(file.content) + max(0, self.faults.capacity_bytes - self.names.total_bytes())

    def _check_room(self, path: str, growth: int) -> None:
        capacity = self.faults.capacity_bytes
        if capacity is not None and self.names.total_bytes() + growth > capacity:
            raise DiskFull(f"could not give {path} {growth} more bytes: the disk's {capacity} bytes are in use")

    def _let_sync_fail(self, what: str) -> None:
        if self._chance(self.faults.sync_failure):
            raise SyncFailed(f"could not sync {what}: simulated failure; what was written since may be lost")

    def _delay(self, span_s: tuple[float, float]) -> float:
        if self._chance(self.faults.stall):
            span_s = self.faults.stall_s
        return self.random.uniform(*span_s)

    def _chance(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    def _touched(self, file: SectorFile) -> SectorFile:
        file.modified_us = START_US + round(asyncio.get_running_loop().time() * 1_000_000)
        return file
