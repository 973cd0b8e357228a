"""One file as a page cache and a device see it: what a read returns, what a crash keeps.

    content   what reads return: every write, immediately
    durable   what the device surely holds
    dirty     the sectors of `content` that were written since a sync last stored them

A sync that succeeds stores the sectors that were dirty when it began. The kernel is free to store a dirty sector at any
time before that, so `write` and `resize` sometimes do it first (a sector written twice may survive a crash in its first
version). A sync that fails marks its sectors clean although they are not stored: reads still show them, a later sync
does not store them, a crash loses them ("fsyncgate"). A crash decides for each dirty sector alone: new, old, or torn in
its middle; and for the length of the file: what it was at the last sync, what it is, or between.

Lengths: `cuts` are the truncations that no sync has stored. A crash either undoes all of them or keeps them.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

SECTOR_BYTES = 512
WRITE_BACK = 0.25
"""How likely the kernel has stored a dirty sector by itself before it is overwritten or cut off."""
STORED_DESPITE_FAILURE = 0.25
"""How likely a sector reached the device in a sync that failed."""
TORN = 0.125
"""How likely a sector that a crash hit is torn rather than whole."""


class Unsynced(NamedTuple):
    """What a sync that begins now will store."""

    version: int
    size: int
    sectors: list[tuple[int, int, bytes]]
    """(sector, version, bytes)"""


class SectorFile:
    def __init__(self) -> None:
        self.content = bytearray()
        self.durable = bytearray()
        self.modified_us = 0
        self._dirty: dict[int, int] = {}
        self._cuts: list[tuple[int, int]] = []
        self._version = 0

    @property
    def unsynced(self) -> bool:
        return bool(self._dirty or self._cuts or len(self.content) != len(self.durable))

    def write(self, position: int, data: bytes, random: Random) -> None:
        if not data:
            return
        end = position + len(data)
        sectors = range(position // SECTOR_BYTES, (end - 1) // SECTOR_BYTES + 1)
        for sector in sectors:
            if sector in self._dirty and random.random() < WRITE_BACK:
                self._store(sector, self._sector(sector))
        if len(self.content) < position:
            self.content.extend(bytes(position - len(self.content)))
        self.content[position:end] = data
        self._version += 1
        self._dirty.update(dict.fromkeys(sectors, self._version))

    def resize(self, size: int, random: Random) -> None:
        if size >= len(self.content):
            self.content.extend(bytes(size - len(self.content)))
            return
        if random.random() < WRITE_BACK:
            self.complete_sync(self.begin_sync())
        del self.content[size:]
        for sector in [s for s in self._dirty if s * SECTOR_BYTES >= size]:
            del self._dirty[sector]
        self._version += 1
        self._cuts.append((self._version, size))

    def begin_sync(self) -> Unsynced:
        sectors = [(sector, version, self._sector(sector)) for sector, version in self._dirty.items()]
        return Unsynced(self._version, len(self.content), sectors)

    def complete_sync(self, unsynced: Unsynced) -> None:
        stored_cuts = [size for version, size in self._cuts if version <= unsynced.version]
        self._cuts = [(version, size) for version, size in self._cuts if version > unsynced.version]
        if stored_cuts:
            del self.durable[min(stored_cuts) :]
        self._lengthen(unsynced.size)
        for sector, version, data in unsynced.sectors:
            start = sector * SECTOR_BYTES
            self.durable[start : start + len(data)] = data
            self._mark_clean(sector, version)

    def fail_sync(self, unsynced: Unsynced, random: Random) -> None:
        for sector, version, data in unsynced.sectors:
            self._mark_clean(sector, version)
            if random.random() < STORED_DESPITE_FAILURE:
                self._store(sector, data)

    def damage(self, position: int, data: bytes) -> None:
        """Change the bytes behind everybody's back, in the cache and on the device."""
        for image in (self.content, self.durable):
            part = data[: max(0, len(image) - position)]
            image[position : position + len(part)] = part

    def crash(self, random: Random) -> None:
        """Decide what the device holds; then the cache is empty and shows the same."""
        kept = random.choice((0.0, 1.0, random.random()))
        cut = min((size for _, size in self._cuts), default=len(self.durable))
        if cut < len(self.durable) and random.random() < 0.5:
            limit = cut  # The truncation never reached the device: what was behind it is back.
            size = len(self.durable)
        else:
            del self.durable[cut:]
            limit = len(self.content)
            size = random.choice((len(self.durable), limit, random.randint(*sorted((len(self.durable), limit)))))
            self._lengthen(limit)
        for sector in self._dirty:
            start = sector * SECTOR_BYTES
            new = self._sector(sector)[: max(0, limit - start)]
            old = bytes(self.durable[start : start + len(new)])
            self.durable[start : start + len(new)] = _after_crash(old, new, kept, random)
        del self.durable[size:]
        self.content = bytearray(self.durable)
        self._dirty.clear()
        self._cuts.clear()

    def _sector(self, sector: int) -> bytes:
        return bytes(self.content[sector * SECTOR_BYTES : (sector + 1) * SECTOR_BYTES])

    def _store(self, sector: int, data: bytes) -> None:
        # While a truncation is not stored, blocks behind it have no place on the device yet.
        if not self._cuts:
            start = sector * SECTOR_BYTES
            self._lengthen(start + len(data))
            self.durable[start : start + len(data)] = data

    def _lengthen(self, size: int) -> None:
        if len(self.durable) < size:
            self.durable.extend(bytes(size - len(self.durable)))

    def _mark_clean(self, sector: int, version: int) -> None:
        if self._dirty.get(sector) == version:
            del self._dirty[sector]


def _after_crash(old: bytes, new: bytes, kept: float, random: Random) -> bytes:
    if kept in (0.0, 1.0):
        return new if kept else old
    if len(new) > 1 and random.random() < TORN:
        middle = random.randrange(1, len(new))
        return new[:middle] + old[middle:] if random.random() < kept else old[:middle] + new[middle:]
    return new if random.random() < kept else old
