"""Where a broker keeps history × where metadata lives: one life of a segment, with nothing simulated.

Two brokers with disks of their own; chunks on a disk, in a folder that both see, or in a real S3 server; metadata in
SQLite or in a real etcd.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import pytest

from braid.metadata import paths
from braid.metadata.etcd.store import EtcdStore
from braid.metadata.sqlite.store import SqliteStore
from braid.metadata.store import Store
from braid.model.batch.header import body_of, verify
from braid.model.errors import Fenced
from braid.model.ids import Epoch
from braid.ports.clock import SystemClock
from braid.ports.os_disk import OsDisk
from braid.storage.cache import HotCache
from braid.storage.context import StorageContext, StorageMode
from braid.storage.handles import FooterCache, ReadHandles
from braid.storage.history.manifest import read_segment_manifest, segment_folder
from braid.storage.objects.disk import DiskObjects
from braid.storage.objects.remote import RemoteObjects
from braid.storage.objects.store import Objects
from braid.storage.objects.urls import open_objects
from braid.storage.retention import RetentionPolicy
from braid.storage.segment import SegmentStorage
from tests.conformance.objects_factories import s3_for_tests
from tests.kits.etcd_server import run_test, shared_etcd_server
from tests.kits.s3_server import S3Server
from tests.kits.storage import DESCRIPTOR, SEGMENT_FOLDER, SMALL, TOPIC, Read, make_batch, read_all
from tests.kits.waiting import until

pytestmark = pytest.mark.processes


PATIENCE_S = 30.0
PRODUCER = 7
RECORDS = 2
"""In each batch."""
KEEP_ALL = RetentionPolicy()
KEEP_NOTHING = RetentionPolicy(max_bytes=1, delete_unconsumed=True)


class Case(NamedTuple):
    mode: StorageMode
    metadata: str
    heir: str
    """Whom broker `a` hands the segment to."""

    def __str__(self) -> str:
        return f"{self.mode.value}-{self.metadata}-to-{self.heir}"


PLACES = (
    (StorageMode.LOCAL, "a"),
    (StorageMode.LOCAL, "b"),
    (StorageMode.SHARED_FS, "b"),
    (StorageMode.OBJECT_STORE, "b"),
)
CASES = [Case(mode, metadata, heir) for mode, heir in PLACES for metadata in ("sqlite", "etcd")]


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Server]:
    with s3_for_tests() as server:
        yield server


class Site:
    """What all brokers of one test share, and the brokers."""

    def __init__(self, case: Case, root: Path, s3: S3Server | None) -> None:
        self.case = case
        self.root = root
        self._s3_url = s3.url(f"modes/{uuid4().hex}") if s3 is not None else ""
        self._key_prefix = f"/modes/{uuid4().hex}"
        self._epoch = 0
        self._open = AsyncExitStack()
        self.shelves: dict[str, StorageContext] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Site]:
        async with asyncio.timeout(PATIENCE_S), self._open:
            for name in ("a", "b"):
                self.shelves[name] = await self._context(name)
            yield self

    async def _context(self, name: str) -> StorageContext:
        disk = OsDisk(2)
        self._open.push_async_callback(disk.close)
        store = await self._store()
        self._open.push_async_callback(store.close)
        objects = self._objects(disk)
        self._open.push_async_callback(objects.close)
        return StorageContext(
            broker_id=name,
            disk=disk,
            folder=str(self.root / name),
            store=store,
            objects=objects,
            mode=self.case.mode,
            clock=SystemClock(),
            cache=HotCache(1),
            handles=ReadHandles(disk),
            footers=FooterCache(),
            preallocated=None,
            random=random.Random(name),
        )

    async def _store(self) -> Store:
        if self.case.metadata == "sqlite":
            return await SqliteStore.open(str(self.root / "metadata.db"))
        return await EtcdStore.open([shared_etcd_server().address], key_prefix=self._key_prefix)

    def _objects(self, disk: OsDisk) -> Objects:
        match self.case.mode:
            case StorageMode.LOCAL:
                return DiskObjects(disk, str(self.root / "a" / "objects"))
            case StorageMode.SHARED_FS:
                return DiskObjects(disk, str(self.root / "shared"))
            case StorageMode.OBJECT_STORE:
                objects = open_objects(self._s3_url, disk=disk)
                assert isinstance(objects, RemoteObjects)
                return objects

    async def open(self, broker: str, *, accept_loss: bool = False) -> SegmentStorage:
        self._epoch += 1
        context, epoch = self.shelves[broker], Epoch(self._epoch)
        segment = await SegmentStorage.open(context, TOPIC, DESCRIPTOR, epoch, SMALL, accept_loss=accept_loss)
        self._open.push_async_callback(segment.abandon)
        return segment

    def wal_files(self, broker: str) -> list[str]:
        return sorted(path.name for path in (self.root / broker / TOPIC / DESCRIPTOR).glob("*.wal*"))

    async def metadata(self) -> object:
        return (await self.shelves["a"].store.list(paths.STORAGE_PREFIX)).entries

    async def contents(self) -> dict[str, bytes]:
        """Every object of the segment."""
        objects = self.shelves["a"].objects
        return {stat.name: await objects.read(stat.name, 0, stat.size) for stat in await objects.list(SEGMENT_FOLDER)}

    async def read_manifest(self) -> list[Read]:
        """History as someone reads it who has the objects and nothing else."""
        objects = self.shelves["b"].objects
        manifest = await read_segment_manifest(objects, TOPIC, DESCRIPTOR)
        assert manifest is not None
        found: list[Read] = []
        for chunk in manifest.chunks:
            data = await objects.read(f"{segment_folder(TOPIC, DESCRIPTOR)}/{chunk.object}", 0, chunk.size)
            assert len(data) == chunk.size
            at = 0
            while at < chunk.batch_bytes:
                header = verify(data, at)
                if not header.is_control:
                    found.append(Read(header.base_offset, header.count, bytes(body_of(data, header, at))))
                at += header.size
        assert found, "the manifest names no chunk"
        assert manifest.next_offset == found[-1].offset + found[-1].records
        return found


class Publisher:
    """Sends numbered batches, and remembers which stand where."""

    def __init__(self) -> None:
        self.stored: list[Read] = []
        self.number = 0

    def batch(self, number: int) -> bytearray:
        return make_batch(RECORDS, self.body(number), producer=PRODUCER, sequence=number * RECORDS)

    def body(self, number: int) -> bytes:
        return b"%d" % number + b"." * 200

    async def send(self, segment: SegmentStorage, batches: int) -> None:
        for _ in range(batches):
            appended = segment.append(self.batch(self.number))
            assert not appended.duplicate
            assert appended.base_offset == segment.log.end - RECORDS
            await segment.log.confirm(appended)
            self.stored.append(Read(appended.base_offset, RECORDS, self.body(self.number)))
            self.number += 1

    def forget_from(self, offset: int) -> None:
        """What stood there was lost with the broker that had it; the application goes on from there."""
        self.stored = [read for read in self.stored if read.offset < offset]
        self.number = len(self.stored)


def closed_end(segment: SegmentStorage) -> int:
    return max(file.next_offset for file in segment.log.files if file.closed)


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Site:
    case: Case = request.param
    remote = case.mode is StorageMode.OBJECT_STORE
    return Site(case, tmp_path, request.getfixturevalue("s3_server") if remote else None)


def each_case(test: Callable[[Site], None]) -> Callable[[Site], None]:
    return pytest.mark.parametrize("site", CASES, ids=str, indirect=True)(test)


async def first_life(site: Site, publisher: Publisher) -> SegmentStorage:
    """`a` stores 40 batches in several files; where the mode exports, chunks have replaced the older ones."""
    segment = await site.open("a")
    await publisher.send(segment, 40)
    assert len(segment.log.files) > 2
    if not site.case.mode.exports_continuously:
        assert await site.contents() == {}
        assert await segment.apply_retention(KEEP_ALL) == 0
        return segment
    await until(lambda: segment.catalog.next_offset == closed_end(segment))
    assert await segment.exporter.export_closed() == 0  # returns when the manifest stands as well
    exported = [read for read in publisher.stored if read.offset < segment.catalog.next_offset]
    assert await site.read_manifest() == exported
    before = site.wal_files("a")
    reclaimed = await segment.apply_retention(KEEP_ALL)
    assert reclaimed > 0
    assert site.wal_files("a") == before[reclaimed:]
    # The oldest records are in chunks only, the newest in the log only.
    assert segment.log.base_offset > 0
    assert segment.catalog.next_offset < segment.log.end
    return segment


@each_case
def test_history_is_read_across_chunks_and_log_and_goes_on_at_the_next_owner(site: Site) -> None:
    async def story() -> None:
        async with site.running():
            publisher = Publisher()
            first = await first_life(site, publisher)
            assert await read_all(first) == publisher.stored
            end = first.log.end
            sealed = await first.hand_over()
            assert sealed.last_committed_offset == end - 1
            assert site.wal_files("a") == []
            assert await site.read_manifest() == publisher.stored

            second = await site.open(site.case.heir)
            assert second.log.end == end
            assert second.catalog.sealed is None
            last = publisher.number - 1
            assert second.append(publisher.batch(last)) == (end - RECORDS, end, True)
            assert second.append(publisher.batch(0)).duplicate
            assert second.log.end == end
            await publisher.send(second, 20)
            assert publisher.stored[40].offset == end
            assert await read_all(second) == publisher.stored
            await second.hand_over()
            assert await site.read_manifest() == publisher.stored

    run_test(story())


@each_case
def test_an_owner_that_was_replaced_changes_nothing_that_counts(site: Site) -> None:
    async def story() -> None:
        async with site.running():
            publisher = Publisher()
            await (await first_life(site, publisher)).hand_over()
            old = await site.open(site.case.heir)
            await old.exporter.stop()
            await publisher.send(old, 5)
            await old.log.rotate()
            assert closed_end(old) > old.catalog.next_offset

            new = await site.open("b" if site.case.heir == "a" else "a", accept_loss=True)
            publisher.forget_from(new.log.end)
            assert len(publisher.stored) == 40
            await publisher.send(new, 3)
            await new.exporter.export_closed()  # its manifest stands: from here on it writes nothing by itself
            metadata, contents = await site.metadata(), await site.contents()
            with pytest.raises(Fenced):
                await old.exporter.export_closed()
            with pytest.raises(Fenced):
                await old.apply_retention(KEEP_NOTHING)
            with pytest.raises(Fenced):
                await old.hand_over()
            assert await site.metadata() == metadata
            left = await site.contents()
            assert left.items() >= contents.items()
            # What it stored before it was refused has a name of its own epoch, and nobody refers to it.
            orphans = left.keys() - contents.keys()
            assert all(name.endswith(f"-{old.log.epoch:010d}.chunk") for name in orphans)

            assert await read_all(new) == publisher.stored
            await new.hand_over()
            assert await site.read_manifest() == publisher.stored
            assert await new.sweep() == len(orphans) == 1
            assert await site.read_manifest() == publisher.stored

    run_test(story())
