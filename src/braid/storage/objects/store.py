"""Where chunks and manifests live: a flat space of immutable, named objects.

One interface, two implementations: `disk.py` over the disk port (`local` and `shared_fs`), because durability
on a filesystem is ours to enforce, and `remote.py` over obstore (S3 and the other clouds of that library).

Names are `/`-separated paths of the characters `A-Za-z0-9._-=%`. A name is created once and never overwritten. Errors:
`ObjectExists`, `ObjectMissing`, and `ObjectStoreUnavailable` for everything that is not an answer: it may be tried
again, and after a failed `create` the object may or may not exist. `DiskFull` where the store is a disk.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

from braid.model.errors import ChunkCorrupt, ObjectExists, ObjectStoreUnavailable
from braid.ports.disk import Buffer


class ObjectStat(NamedTuple):
    name: str
    size: int
    modified_us: int


class Objects(Protocol):
    async def create(self, name: str, parts: Sequence[Buffer]) -> None:
        """Store a new object, whole and durable, or raise `ObjectExists`. Of several creators one wins."""

    async def read(self, name: str, start: int, length: int) -> bytes:
        """Return exactly these bytes; fewer only where the object ends. `ObjectMissing` if it is not there."""

    async def stat(self, name: str) -> ObjectStat:
        """Describe an object. `ObjectMissing` if it is not there."""

    async def list(self, prefix: str) -> list[ObjectStat]:
        """List all objects below the folder `prefix` (a name without its last `/`), at any depth, by name."""

    async def delete(self, name: str) -> None:
        """Delete an object. Deleting an object that is not there is fine."""

    async def delete_below(self, prefix: str) -> None:
        """Delete all objects below the folder `prefix`, for good. After an error, call this again: an object that a
        listing does not show any more may still come back with a crash, until a call has returned."""

    async def remove_empty_folders(self, prefix: str) -> None:
        """Remove the folder `prefix`, and those below it, as far as no object is in them. Only a filesystem has
        folders; elsewhere nothing is to do."""

    async def close(self) -> None: ...


async def create_once(
    objects: Objects, name: str, data: bytes, *, create: Callable[[], Awaitable[None]] | None = None
) -> None:
    """Store an object and look whether it is there. An equal object of an earlier try counts as stored. `create` is
    another way to create it."""
    try:
        await (objects.create(name, [data]) if create is None else create())
    except ObjectExists:
        same_size = (await objects.stat(name)).size == len(data)
        if not same_size or await objects.read(name, 0, len(data)) != data:
            raise ChunkCorrupt(f"object {name} exists and holds something else; nothing was overwritten") from None
        return
    stored = await objects.stat(name)
    if stored.size != len(data):
        await objects.delete(name)  # ours, and of no use: the next try stores it again
        raise ObjectStoreUnavailable(f"object {name} was stored with {len(data)} bytes, but has {stored.size}")
