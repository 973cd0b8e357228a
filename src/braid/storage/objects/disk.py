"""Objects as files: durability on a filesystem is ours to enforce, so we do, through the disk port.

An object comes to life under a draft's name in the folder where it will live: make the folder, write, sync, and only
then `publish` it under its own name, which refuses to replace. So a name holds a whole, durable object or nothing, and
of several creators one wins. What a crash leaves is a draft. Its name starts with `~`, which no object's name may
contain, so `list` never shows it and `sweep` knows it. Names of drafts are random: if two writers ever shared one, the
first could publish what the second had half written.

A name cannot be both an object and a folder here, as it can be on S3; Braid's names never are both.
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
    ForeignFile,
    ObjectExists,
    ObjectMissing,
    ObjectStoreUnavailable,
    SyncFailed,
)
from braid.ports.disk import Buffer, Disk, DiskFile, FileStat
from braid.storage.handles import NO_LOG, ReadHandles
from braid.storage.objects.names import checked_folder, checked_name, checked_range, is_name
from braid.storage.objects.store import ObjectStat

DRAFT_MARK = "~"
WRITE_BYTES = 2 << 20
"""Written and synced together. The whole object in one sync would be faster (1.4 GB/s against 0.9), but the log's small
syncs on the same device would wait for it (docs/decisions/0004)."""

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
        draft = await self.draft(name)
        try:
            await draft.write(parts)
            await draft.publish()
        except BaseException:
            await draft.discard()
            raise

    async def link(self, name: str, path: str) -> None:
        """Create an object of a file of the same filesystem that will never change. Its bytes need no room."""
        folder, leaf = self._place(name)
        with self._answers("create", name):
            await self._disk.make_folder(folder)
            await self._disk.link(path, f"{folder}/{leaf}")

    async def draft(self, name: str) -> ObjectDraft:
        """Begin an object that comes in pieces."""
        folder, leaf = self._place(name)
        path = f"{folder}/{DRAFT_MARK}{self._random.getrandbits(64):016x}"
        with self._answers("create", name):
            # Also when the folder is there: another creator may have made it and not yet synced its name.
            await self._disk.make_folder(folder)
            return ObjectDraft(self, name, await self._disk.open(path, create=True), path, f"{folder}/{leaf}")

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

    async def delete_below(self, prefix: str) -> None:
        """Folders and drafts go too. A removal counts when a folder around it was synced since, here or by an earlier
        try; so the folder that is left in the end is synced whatever was found."""
        with self._answers("delete what is below", checked_folder(prefix)):
            await self._remove_folder(self._folder(prefix))
            await self._disk.sync_folder(self._folder(prefix.rpartition("/")[0]))

    async def remove_empty_folders(self, prefix: str) -> None:
        """The disk refuses to remove a folder that has something in it. So an object that comes at the same moment
        stays, or its creator hears that the folder is gone and tries again."""
        with self._answers("remove empty folders of", checked_folder(prefix)):
            await self._remove_if_empty(self._folder(prefix))

    async def _remove_if_empty(self, folder: str) -> None:
        for name in await self._disk.list_folders(folder):
            await self._remove_if_empty(f"{folder}/{name}")
        if not await self._disk.list(folder):
            with contextlib.suppress(DiskError):
                await self._disk.remove_folder(folder)

    async def _remove_folder(self, folder: str) -> None:
        for name in await self._disk.list_folders(folder):
            await self._remove_folder(f"{folder}/{name}")
        for file in await self._disk.list(folder):
            await self._handles.forget(NO_LOG, f"{folder}/{file.name}")
            with _unless_gone():
                await self._disk.remove(f"{folder}/{file.name}")
        with _unless_gone():
            await self._disk.remove_folder(folder)

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
        """Close the open files. The caller that opened the disk closes it."""
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
        """Turn errors of the disk into those of `Objects`. Two pass unchanged, for an operator must act: `DiskFull` and
        `ForeignFile`."""
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
        except (DiskFull, ForeignFile):
            raise
        except DiskError as error:
            raise ObjectStoreUnavailable(f"could not {doing} object {name!r} in {self._root}: {error}") from error


@contextlib.contextmanager
def _unless_gone() -> Iterator[None]:
    """Another broker may remove the same folder at the same time. One that is gone need not be synced any more: the
    folder around it is, in the end."""
    try:
        yield
    except FileMissing:
        pass
    except SyncFailed as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise


class ObjectDraft:
    """Made by `DiskObjects.draft`. Ends with `publish` or `discard`."""

    def __init__(self, objects: DiskObjects, name: str, file: DiskFile, path: str, target: str) -> None:
        self.size = 0
        self._objects = objects
        self._name = name
        self._file = file
        self._path = path
        self._target = target

    async def write(self, parts: Sequence[Buffer]) -> None:
        """Append; synced when it returns."""
        with self._objects._answers("create", self._name):
            for buffers in pieces(parts, WRITE_BYTES):
                await self._file.write(self.size, buffers, sync=True)
                self.size += sum(map(len, buffers))

    async def publish(self) -> None:
        with self._objects._answers("create", self._name):
            if not self.size:
                await self._file.sync()
            await self._file.close()
            await self._objects._disk.publish(self._path, self._target)

    async def discard(self) -> None:
        with contextlib.suppress(DiskError):
            await self._file.close()
            await self._objects._disk.remove(self._path)


_system_random = random.SystemRandom()


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def pieces(parts: Sequence[Buffer], limit: int) -> Iterator[list[memoryview]]:
    """Return the same bytes in groups of `limit` bytes (the last may be smaller), cut but never copied."""
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
