"""The owner of a log, as a process that a test kills. It says each confirmed batch on its standard output.

A file of its own, because importing pytest would take longer than everything else that it does at its start.

python storage_owner.py ROOT EPOCH FIRST COUNT FILE_BYTES
"""

from __future__ import annotations

import asyncio
import random
import sys

from braid.metadata.sqlite.store import SqliteStore
from braid.model.ids import Epoch
from braid.ports.clock import SystemClock
from braid.ports.disk import Buffer
from braid.ports.os_disk import OsDisk
from braid.storage.cache import HotCache
from braid.storage.context import StorageContext, StorageMode
from braid.storage.handles import FooterCache, ReadHandles
from braid.storage.log.context import FileConfig, LogConfig
from braid.storage.log.log import Appended
from braid.storage.objects.disk import DiskObjects
from braid.storage.segment import SegmentStorage
from braid.testing.batches import opaque_batch

TOPIC, DESCRIPTOR = "public/default/orders", "0000-ffff-0"
PRODUCER = 7
RECORDS = 2
"""In each batch."""
IN_FLIGHT = 6
"""Below what the producer table remembers of one producer, so that every retry is answered with its offset."""


def numbered_batch(number: int) -> bytearray:
    body = f"{number}".encode().ljust(300)
    return opaque_batch(body, RECORDS, producer=PRODUCER, sequence=number * RECORDS)


class TellingObjects(DiskObjects):
    """Says what it does, so that a test can end it there."""

    async def create(self, name: str, parts: list[Buffer] | tuple[Buffer, ...]) -> None:  # type: ignore[override]
        say(f"creating {name}")
        await super().create(name, parts)
        say(f"created {name}")


def say(line: str) -> None:
    print(line, flush=True)


class Machine:
    """One broker's disk and the services that all share, in one folder."""

    def __init__(self, root: str, file_bytes: int, broker: str = "a") -> None:
        self.root = root
        self.broker = broker
        self.config = LogConfig(files=FileConfig(file_bytes=file_bytes, first_reserve_bytes=4_096))

    async def __aenter__(self) -> Machine:
        self.disk = OsDisk(2)
        self.store = await SqliteStore.open(f"{self.root}/metadata.db")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.store.close()
        await self.disk.close()

    async def open(self, epoch: int, *, telling: bool = False) -> SegmentStorage:
        context = StorageContext(
            broker_id=self.broker,
            disk=self.disk,
            folder=f"{self.root}/{self.broker}",
            store=self.store,
            objects=(TellingObjects if telling else DiskObjects)(self.disk, f"{self.root}/objects"),
            mode=StorageMode.SHARED_FS,
            clock=SystemClock(),
            cache=HotCache(10_000),
            handles=ReadHandles(self.disk),
            footers=FooterCache(),
            preallocated=None,
            random=random.Random(epoch),
        )
        return await SegmentStorage.open(context, TOPIC, DESCRIPTOR, Epoch(epoch), self.config)


async def own(root: str, epoch: int, first: int, count: int, file_bytes: int) -> None:
    """Send batches from `first` on, `count` of them or for ever, then hand over."""
    async with Machine(root, file_bytes) as machine:
        segment = await machine.open(epoch, telling=count > 0)
        in_flight: list[tuple[int, Appended]] = []
        number = first
        while count == 0 or number < first + count or in_flight:
            while len(in_flight) < IN_FLIGHT and (count == 0 or number < first + count):
                in_flight.append((number, segment.append(numbered_batch(number))))
                number += 1
            sent, appended = in_flight.pop(0)
            await segment.log.confirm(appended)
            say(f"confirmed {sent} {appended.base_offset}")
        say("handing over")
        await segment.hand_over()
        say("handed over")


if __name__ == "__main__":
    asyncio.run(own(sys.argv[1], *map(int, sys.argv[2:])))
