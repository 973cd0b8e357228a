"""Objects as files: durability on a filesystem is ours to enforce, so we do, through the disk port.

An object comes to life under a draft's name in the folder where it will live: make the folder, write, sync, and only
then `publish` it under its own name, which refuses to replace. So a name holds a whole, durable object or nothing, and
of several creators one wins. What a crash leaves is a draft. Its name starts with `~`, which no object's name may
contain, so `list` never shows it and `sweep` knows it. Names of drafts are random: if two writers ever shared one, the
first could publish what the second had half written.

A name cannot be an object and a folder at once here, as it can be on S3; Braid's names never are both.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence

from braid.model.errors import (
    DiskError,
    DiskFull,
    FileMissing,
    FileTaken,
    ObjectExists,
    ObjectMissing,
    ObjectStoreUnavailable,
)
from braid.ports.disk import Buffer, Disk, DiskFile, FileStat
from braid.storage.handles import NO_LOG, ReadHandles
from braid.storage.object_names import checked_folder, checked_name, checked_range, is_name
from braid.storage.objects import ObjectStat

DRAFT_MARK = "~"
WRITE_BYTES = 2 << 20
"""Written and synced at once. All at once would be faster (1.4 GB/s against 0.9), but the log's small syncs on the same
device then wait for it (docs/decisions/0004)."""

OPEN_FILES = 64
"""Objects never change, so a file that was read is kept open for the next range. One that another process has deleted
may be read until it is closed."""

READ_BYTES = 8 << 20
"""A read takes memory for all that it was asked for, so a larger one first looks how much there is."""


class DiskObjects:
    def __init__(self, disk: Disk, root: str, *, random: random.Random | None = None) -> None:
        self._disk = disk
        self._root = root.rstrip("/")
        self._random = random or _system_random
        self._handles = ReadHandles(disk, OPEN_FILES)

    def __repr__(self) -> str:
        return f"DiskObjects({self._root!r})"

    async def create(self, name: str, parts: Sequence[Buffer]) -> None:
        folder, leaf = self._place(name)
        draft = f"{folder}/{DRAFT_MARK}{self._random.getrandbits(64):016x}"
        with self._answers("create", name):
            # Also when the folder is there: another creator may have made it and not yet synced its name.
            await self._disk.make_folder(folder)
            file = await self._disk.open(draft, create=True)
            try:
                await _fill(file, parts)
                await file.close()
                await self._disk.publish(draft, f"{folder}/{leaf}")
            except BaseException:
                with contextlib.suppress(DiskError):
                    await file.close()
                    await self._disk.remove(draft)
                raise

    async def read(self, name: str, start: int, length: int) -> bytes:
        folder, leaf = self._place(name)
        checked_range(name, start, length)
        with self._answers("read", name):
            path = f"{folder}/{leaf}"
            if length > READ_BYTES:
                length = min(length, max(0, (await self._disk.stat(path)).size - start))
            return await self._handles.read(NO_LOG, path, start, length)

    async def stat(self, name: str) -> ObjectStat:
        folder, leaf = self._place(name)
        with self._answers("look at", name):
            file = await self._disk.stat(f"{folder}/{leaf}")
            return ObjectStat(name, file.size, file.modified_us)

    async def list(self, prefix: str) -> list[ObjectStat]:
        checked_folder(prefix)
        with self._answers("list", prefix):
            found = [
                ObjectStat(_joined(folder, file.name), file.size, file.modified_us)
                for folder, file in await self._files(prefix)
                if is_name(file.name)
            ]
        return sorted(found)

    async def delete(self, name: str) -> None:
        folder, leaf = self._place(name)
        with self._answers("delete", name), contextlib.suppress(FileMissing):
            await self._handles.forget(NO_LOG, f"{folder}/{leaf}")
            await self._disk.remove(f"{folder}/{leaf}")

    async def sweep(self, older_than_us: int) -> int:
        """Remove the drafts last written before this moment (µs since 1970) and say how many.

        A draft that young may be at work; choose a moment that no upload reaches back to. One that is removed all the
        same fails its creator with `ObjectStoreUnavailable`, and harms nothing.
        """
        removed = 0
        with self._answers("sweep drafts below", self._root):
            for folder, file in await self._files(""):
                if file.name.startswith(DRAFT_MARK) and file.modified_us < older_than_us:
                    with contextlib.suppress(FileMissing):
                        await self._disk.remove(f"{self._folder(folder)}/{file.name}")
                        removed += 1
        return removed

    async def close(self) -> None:
        """The disk belongs to whoever opened it."""
        await self._handles.close()

    async def _files(self, prefix: str) -> Sequence[tuple[str, FileStat]]:
        """Every file below `prefix` with its folder, in no particular order."""
        found: list[tuple[str, FileStat]] = []
        folders = [prefix]
        while folders:
            folder = folders.pop()
            found += [(folder, file) for file in await self._disk.list(self._folder(folder))]
            folders += [_joined(folder, name) for name in await self._disk.list_folders(self._folder(folder))]
        return found

    def _place(self, name: str) -> tuple[str, str]:
        folder, _, leaf = checked_name(name).rpartition("/")
        return self._folder(folder), leaf

    def _folder(self, folder: str) -> str:
        return f"{self._root}/{folder}" if folder else self._root

    @contextlib.contextmanager
    def _answers(self, doing: str, name: str) -> Iterator[None]:
        """Turn what the disk says into what `Objects` promises. A full disk stays one: somebody must make room."""
        try:
            yield
        except FileTaken as error:
            raise ObjectExists(f"cannot create object {name!r}: {self._root} already holds one of that name") from error
        except FileMissing as error:
            if doing == "create":
                raise ObjectStoreUnavailable(
                    f"could not create object {name!r}: its draft or folder was removed meanwhile; try again"
                ) from error
            raise ObjectMissing(f"cannot {doing} object {name!r}: {self._root} holds none of that name") from error
        except DiskFull:
            raise
        except DiskError as error:
            raise ObjectStoreUnavailable(f"could not {doing} object {name!r} in {self._root}: {error}") from error


_system_random = random.SystemRandom()


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


async def _fill(file: DiskFile, parts: Sequence[Buffer]) -> None:
    position = 0
    for buffers in pieces(parts, WRITE_BYTES):
        await file.write(position, buffers, sync=True)
        position += sum(map(len, buffers))
    if position == 0:
        await file.sync()


def pieces(parts: Sequence[Buffer], limit: int) -> Iterator[list[memoryview]]:
    """The same bytes in groups of `limit` bytes (the last may be smaller), cut but never copied."""
    group: list[memoryview] = []
    room = limit
    for part in parts:
        view = memoryview(part).cast("B")
        while len(view) >= room:
            yield [*group, view[:room]]
            view, group, room = view[room:], [], limit
        if view:
            group.append(view)
            room -= len(view)
    if group:
        yield group
