"""A shared object store that belongs to one cluster.

Two clusters on one prefix would take each other's chunks for leftovers and delete them. So the first broker that uses a
prefix marks it with the id of its cluster, and a broker of another cluster refuses it. The mark is compared before
anything is created or deleted; where the store does not answer when a broker starts, that is later.

A prefix inside that of another cluster, or around it, is refused too: a topic that the outer cluster deletes could have
the name of a folder of the inner one. Marks of outer prefixes are compared as far as this broker may read them. Marks
below are looked for once, before a prefix is marked.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Sequence
from typing import Final

import msgspec

from braid.model.errors import BraidError, InvalidConfig, ObjectExists, ObjectMissing
from braid.ports.disk import Buffer
from braid.storage.objects.store import Objects, ObjectStat

MARK: Final = ".braid-cluster.json"
"""No tenant has this name: names do not begin with a dot."""
_MAX_BYTES: Final = 64 << 10


class ClusterMark(msgspec.Struct, frozen=True, rename="camel"):
    cluster_id: str


class MarkedObjects:
    """Any object store, used by one cluster only."""

    def __init__(self, inner: Objects, cluster_id: str, outer: Sequence[Objects] = ()) -> None:
        """`outer` are the stores of the prefixes around this one."""
        self._inner = inner
        self._outer = outer
        self._mark = ClusterMark(cluster_id)
        self._verified = False

    async def verify(self) -> None:
        """Mark the store if it is not marked yet. `InvalidConfig` if it belongs to another cluster."""
        if self._verified:
            return
        await self._verify_outer()
        try:
            data = await self._inner.read(MARK, 0, _MAX_BYTES)
        except ObjectMissing:
            await self._verify_below()
            with contextlib.suppress(ObjectExists):  # Another broker was faster.
                await self._inner.create(MARK, [msgspec.json.encode(self._mark)])
            data = await self._inner.read(MARK, 0, _MAX_BYTES)
        try:
            found = msgspec.json.decode(data, type=ClusterMark)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidConfig(f"object {MARK} cannot be read ({error}): look what else uses this storage") from error
        if found != self._mark:
            raise InvalidConfig(
                f"this storage belongs to cluster {found.cluster_id}, and the metadata store to cluster "
                f"{self._mark.cluster_id}. Give each cluster a storage of its own. If the metadata was lost, restore a "
                f"backup into an empty store. If the other cluster is gone for good, delete the object {MARK} there"
            )
        self._verified = True

    async def _verify_outer(self) -> None:
        for objects in self._outer:
            try:
                found = msgspec.json.decode(await objects.read(MARK, 0, _MAX_BYTES), type=ClusterMark)
            except (
                BraidError,
                msgspec.DecodeError,
                UnicodeDecodeError,
            ):  # There is none, or this broker may not read it.
                continue
            if found != self._mark:
                raise InvalidConfig(
                    f"this storage lies inside that of cluster {found.cluster_id}. Give each cluster a storage beside "
                    "that of the other"
                )

    async def _verify_below(self) -> None:
        below = [stat.name for stat in await self._inner.list("") if stat.name.endswith(f"/{MARK}")]
        if below:
            inner = below[0].removesuffix(f"/{MARK}")
            raise InvalidConfig(
                f"the storage of another cluster lies inside this one, at {inner}. Give each cluster a storage beside "
                "that of the other"
            )

    async def create(self, name: str, parts: Sequence[Buffer]) -> None:
        await self.verify()
        await self._inner.create(name, parts)

    async def read(self, name: str, start: int, length: int) -> bytes:
        return await self._inner.read(name, start, length)

    async def stat(self, name: str) -> ObjectStat:
        return await self._inner.stat(name)

    async def list(self, prefix: str) -> builtins.list[ObjectStat]:
        return await self._inner.list(prefix)

    async def delete(self, name: str) -> None:
        await self.verify()
        await self._inner.delete(name)

    async def delete_below(self, prefix: str) -> None:
        await self.verify()
        await self._inner.delete_below(prefix)

    async def remove_empty_folders(self, prefix: str) -> None:
        await self.verify()
        await self._inner.remove_empty_folders(prefix)

    async def close(self) -> None:
        for objects in (self._inner, *self._outer):
            await objects.close()
