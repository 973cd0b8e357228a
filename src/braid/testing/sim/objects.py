"""Object stores for tests and simulations: one in memory, and one that makes any other misbehave.

Both are deterministic: `MemoryObjects` gives way to the loop exactly once per call, `FaultyObjects` takes all its luck
from the `random.Random` that it is given, one draw of the same shape per call.
"""

from __future__ import annotations

import asyncio
import enum
import random
from collections import Counter
from collections.abc import Sequence

import msgspec

from braid.model.errors import ObjectExists, ObjectMissing, ObjectStoreUnavailable
from braid.ports.clock import Clock
from braid.ports.disk import Buffer
from braid.storage.objects.names import checked_folder, checked_name, checked_range
from braid.storage.objects.store import Objects, ObjectStat


class MemoryObjects:
    """A dictionary. Owners may share one; closing it changes nothing, so one owner's end does not touch the others.

    Without a clock, the times of objects count creations: 1, 2, 3, …
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock
        self._contents: dict[str, tuple[ObjectStat, bytes]] = {}
        self._created = 0

    async def create(self, name: str, parts: Sequence[Buffer]) -> None:
        checked_name(name)
        await asyncio.sleep(0)
        if name in self._contents:
            raise ObjectExists(f"cannot create object {name!r}: the memory already holds one of that name")
        self._created += 1
        content = b"".join(parts)
        modified_us = self._clock.now_us() if self._clock else self._created
        self._contents[name] = ObjectStat(name, len(content), modified_us), content

    async def read(self, name: str, start: int, length: int) -> bytes:
        checked_range(name, start, length)
        return (await self._get(name))[1][start : start + length]

    async def stat(self, name: str) -> ObjectStat:
        return (await self._get(name))[0]

    async def list(self, prefix: str) -> list[ObjectStat]:
        below = f"{checked_folder(prefix)}/" if prefix else ""
        await asyncio.sleep(0)
        return sorted(stat for stat, _ in self._contents.values() if stat.name.startswith(below))

    async def delete(self, name: str) -> None:
        checked_name(name)
        await asyncio.sleep(0)
        self._contents.pop(name, None)

    async def delete_below(self, prefix: str) -> None:
        for stat in await self.list(prefix):
            del self._contents[stat.name]

    async def remove_empty_folders(self, prefix: str) -> None:
        pass

    async def close(self) -> None:
        pass

    async def _get(self, name: str) -> tuple[ObjectStat, bytes]:
        checked_name(name)
        await asyncio.sleep(0)
        try:
            return self._contents[name]
        except KeyError:
            raise ObjectMissing(f"cannot find object {name!r}: the memory holds none of that name") from None


class Fault(enum.Enum):
    FAILS_BEFORE = "fails before"
    """Nothing happens, and the caller is told that the store did not answer."""
    FAILS_AFTER = "fails after"
    """It happens, and the caller is told that the store did not answer."""
    BREAKS_READ = "breaks read"
    """Half of the bytes are fetched, then the connection breaks."""
    LOSES_UPLOAD = "loses upload"
    """The caller is told that the object is stored, and it is not."""


class Faults(msgspec.Struct, frozen=True):
    """How often (0 to 1) a call suffers each fault; at most one each, so together at most 1. Slowness comes on top."""

    fails_before: float = 0.0
    fails_after: float = 0.0
    breaks_read: float = 0.0
    loses_upload: float = 0.0
    slow: float = 0.0
    slowest_s: float = 10.0
    """A slow call waits up to this long, in the loop's time, before it does anything."""

    def chosen(self, luck: float, *, reads: bool = False, creates: bool = False) -> Fault | None:
        """The fault for a call whose luck is this number in [0, 1)."""
        shares = (
            (Fault.FAILS_BEFORE, self.fails_before),
            (Fault.FAILS_AFTER, self.fails_after),
            (Fault.BREAKS_READ, self.breaks_read if reads else 0.0),
            (Fault.LOSES_UPLOAD, self.loses_upload if creates else 0.0),
        )
        for fault, share in shares:
            if luck < share:
                return fault
            luck -= share
        return None


class FaultyObjects:
    """`faults` may be replaced at any time: `objects.faults = Faults()` heals the store. `suffered` counts."""

    def __init__(self, inner: Objects, random: random.Random, faults: Faults) -> None:
        self._inner = inner
        self._random = random
        self.faults = faults
        self.suffered: Counter[Fault] = Counter()

    async def create(self, name: str, parts: Sequence[Buffer]) -> None:
        fault = await self._before("create", name, creates=True)
        if fault is Fault.LOSES_UPLOAD:
            # A store that loses what it took still knows what it has.
            await self._refuse_existing(name)
            return
        await self._inner.create(name, parts)
        self._after("create", name, fault)

    async def read(self, name: str, start: int, length: int) -> bytes:
        fault = await self._before("read", name, reads=True)
        if fault is Fault.BREAKS_READ:
            await self._inner.read(name, start, length // 2)
            raise _no_answer("read", name, "the connection broke half-way")
        content = await self._inner.read(name, start, length)
        self._after("read", name, fault)
        return content

    async def stat(self, name: str) -> ObjectStat:
        fault = await self._before("look at", name)
        stat = await self._inner.stat(name)
        self._after("look at", name, fault)
        return stat

    async def list(self, prefix: str) -> list[ObjectStat]:
        fault = await self._before("list", prefix)
        stats = await self._inner.list(prefix)
        self._after("list", prefix, fault)
        return stats

    async def delete(self, name: str) -> None:
        fault = await self._before("delete", name)
        await self._inner.delete(name)
        self._after("delete", name, fault)

    async def delete_below(self, prefix: str) -> None:
        fault = await self._before("delete what is below", prefix)
        await self._inner.delete_below(prefix)
        self._after("delete what is below", prefix, fault)

    async def remove_empty_folders(self, prefix: str) -> None:
        await self._inner.remove_empty_folders(prefix)

    async def close(self) -> None:
        await self._inner.close()

    async def _before(self, doing: str, name: str, *, reads: bool = False, creates: bool = False) -> Fault | None:
        luck, slow_luck, slowness = self._random.random(), self._random.random(), self._random.random()
        faults = self.faults
        if slow_luck < faults.slow:
            await asyncio.sleep(slowness * faults.slowest_s)
        fault = faults.chosen(luck, reads=reads, creates=creates)
        if fault is not None:
            self.suffered[fault] += 1
        if fault is Fault.FAILS_BEFORE:
            raise _no_answer(doing, name, "the request was lost")
        return fault

    def _after(self, doing: str, name: str, fault: Fault | None) -> None:
        if fault is Fault.FAILS_AFTER:
            raise _no_answer(doing, name, "the answer was lost")

    async def _refuse_existing(self, name: str) -> None:
        try:
            await self._inner.stat(name)
        except ObjectMissing:
            return
        raise ObjectExists(f"cannot create object {name!r}: the store already holds one of that name")


def _no_answer(doing: str, name: str, why: str) -> ObjectStoreUnavailable:
    return ObjectStoreUnavailable(f"could not {doing} object {name!r}: {why} (an injected fault)")
