"""An owner that is stopped, loses its lease, is replaced, and goes on (I3). Run as a script, this file is the owner.

The owner appends and confirms under a lease that a real keeper renews. At a moment of its own choice, with one batch
appended and not yet confirmed, it says so and waits for a byte: so the test knows what it has said when the signal
comes, and nothing depends on where exactly it is hit. Then it is stopped for longer than its lease lasts.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

import pytest

from braid.metadata import paths
from braid.metadata.history import watching
from braid.metadata.keepalive import LeaseKeeper
from braid.metadata.sqlite.store import SqliteStore
from braid.metadata.store import Put, Store
from braid.model.errors import BraidError, RecoveryUnsafe
from braid.model.ids import Epoch
from braid.ports.clock import SystemClock
from braid.ports.os_disk import OsDisk
from braid.storage.cache import HotCache
from braid.storage.context import StorageContext, StorageMode
from braid.storage.handles import FooterCache, ReadHandles
from braid.storage.history.manifest import read_segment_manifest
from braid.storage.objects.disk import DiskObjects
from braid.storage.retention import RetentionPolicy
from braid.storage.segment import SegmentStorage
from tests.kits.storage import DESCRIPTOR, SEGMENT_FOLDER, SMALL, TOPIC, fill, make_batch, read_offsets
from tests.kits.waiting import wait_until

pytestmark = pytest.mark.processes


ROOT = Path(__file__).parents[2]
PATIENCE_S = 15.0
TTL_S = 2.0
RENEWALS = 2
"""So many the owner sees before it stops: it has been kept alive by them, not by its first grant."""
OWNERSHIP = paths.ownership(TOPIC, DESCRIPTOR)
EXPORTED = 10
KEEP_NOTHING = RetentionPolicy(max_bytes=1, delete_unconsumed=True)


class Broker:
    def __init__(self, root: str, name: str, disk: OsDisk, store: Store) -> None:
        self.store = store
        self.objects = DiskObjects(disk, f"{root}/objects")
        self._context = StorageContext(
            broker_id=name,
            disk=disk,
            folder=f"{root}/{name}",
            store=store,
            objects=self.objects,
            mode=StorageMode.SHARED_FS,
            clock=SystemClock(),
            cache=HotCache(),
            handles=ReadHandles(disk),
            footers=FooterCache(),
            preallocated=None,
            random=random.Random(name),
        )

    async def open(
        self, epoch: int, *, may_confirm: Callable[[], bool] = lambda: True, accept_loss: bool = False
    ) -> SegmentStorage:
        return await SegmentStorage.open(
            self._context, TOPIC, DESCRIPTOR, Epoch(epoch), SMALL, may_confirm=may_confirm, accept_loss=accept_loss
        )

    async def contents(self) -> dict[str, bytes]:
        stats = await self.objects.list(SEGMENT_FOLDER)
        return {stat.name: await self.objects.read(stat.name, 0, stat.size) for stat in stats}


@asynccontextmanager
async def running_broker(root: str, name: str) -> AsyncIterator[Broker]:
    disk = OsDisk(2)
    store = await SqliteStore.open(f"{root}/metadata.db")
    try:
        yield Broker(root, name, disk, store)
    finally:
        await store.close()
        await disk.close()


# ── the owner ────────────────────────────────────────────────────────────────────────────────────────────────────────


def say(line: str) -> None:
    print(line, flush=True)


async def own(root: str) -> None:
    clock = SystemClock()
    async with running_broker(root, "a") as broker:
        lease = await broker.store.grant_lease(TTL_S)
        await broker.store.txn([], [Put(OWNERSHIP, b"a", lease.id)])
        async with LeaseKeeper(lease, clock) as keeper:
            segment = await broker.open(1, may_confirm=keeper.may_act)
            await fill(segment, EXPORTED)
            await segment.log.rotate()
            await segment.exporter.stop()
            await segment.exporter.export_closed()
            # A closed file that is not exported yet, for later.
            await fill(segment, 1)
            await segment.log.rotate()
            say(f"confirmed {segment.log.end}")
            renewals, deadline = 0, keeper.deadline
            async with asyncio.timeout(PATIENCE_S):
                while renewals < RENEWALS:
                    await segment.log.confirm(segment.append(make_batch()))
                    say(f"confirmed {segment.log.end}")
                    if keeper.deadline != deadline:
                        renewals, deadline = renewals + 1, keeper.deadline
            unconfirmed = segment.append(make_batch())
            say(f"waiting {unconfirmed.next_offset}")
            os.read(sys.stdin.fileno(), 1)

            async def confirm_more() -> None:
                await segment.log.confirm(segment.append(make_batch()))

            await attempt("confirm", lambda: segment.log.confirm(unconfirmed))
            await attempt("append", confirm_more)
            await attempt("export", segment.exporter.export_closed)
            await attempt("retention", lambda: segment.apply_retention(KEEP_NOTHING))
            await attempt("hand over", segment.hand_over)
            await keeper.wait_lost()
            say("lease lost")
            await segment.abandon()


async def attempt(what: str, act: Callable[[], Awaitable[object]]) -> None:
    try:
        await act()
    except BraidError as error:
        say(f"{what}: {type(error).__name__}")
    else:
        say(f"{what}: done")


# ── the test ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Owner:
    def __init__(self, root: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        )
        self.confirmed = 0

    @property
    def _output(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def read_until_it_waits(self) -> int:
        """Returns the end of what it has appended."""
        for line in self._output:
            what, number = line.split()
            if what == "waiting":
                return int(number)
            assert int(number) > self.confirmed
            self.confirmed = int(number)
        raise AssertionError("the owner ended by itself")

    def stop(self) -> None:
        """Stop it when none of its threads works any more: one that is stopped in the middle of a transaction would
        keep the metadata file locked. Its loop stands still, so no thread gets new work."""
        self._wait_for_threads("S")
        self.process.send_signal(signal.SIGSTOP)
        self._wait_for_threads("T")

    def _wait_for_threads(self, state: str) -> None:
        threads = Path(f"/proc/{self.process.pid}/task")
        wait_until(
            lambda: all((thread / "stat").read_text().rpartition(") ")[2][0] == state for thread in threads.iterdir()),
            f"all threads of the owner are in state {state}",
        )

    def go_on(self) -> list[str]:
        """Everything that it says until it ends."""
        self.process.send_signal(signal.SIGCONT)
        said, _ = self.process.communicate("\n", timeout=PATIENCE_S)
        assert self.process.returncode == 0
        return said.splitlines()

    def destroy(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    owner = Owner(tmp_path)
    yield owner
    owner.destroy()


async def until_deleted(store: Store, key: str) -> None:
    listing = await store.list(key)
    if not listing.entries:
        return
    async with watching(store, key, listing.revision) as watch:
        async for changes in watch:
            if any(event.key == key and event.value is None for event in changes.events):
                return


@pytest.mark.real_loop
async def test_an_owner_that_slept_through_its_lease_confirms_nothing_more_and_changes_nothing(
    tmp_path: Path, owner: Owner
) -> None:
    appended = owner.read_until_it_waits()
    assert EXPORTED < owner.confirmed < appended
    async with asyncio.timeout(PATIENCE_S), running_broker(str(tmp_path), "b") as broker:
        entry = await broker.store.get(OWNERSHIP)
        assert entry is not None
        assert entry.value == b"a"
        owner.stop()
        await until_deleted(broker.store, OWNERSHIP)
        with pytest.raises(RecoveryUnsafe):
            await broker.open(2)
        segment = await broker.open(2, accept_loss=True)
        assert segment.log.end == EXPORTED
        await fill(segment, 3)
        await segment.log.rotate()
        await segment.exporter.stop()
        await segment.exporter.export_closed()
        metadata = (await broker.store.list(paths.STORAGE_PREFIX)).entries
        manifest = await read_segment_manifest(broker.objects, TOPIC, DESCRIPTOR)
        contents = await broker.contents()

        assert owner.go_on() == [
            "confirm: Fenced",
            "append: Fenced",
            "export: Fenced",
            "retention: Fenced",
            "hand over: Fenced",
            "lease lost",
        ]
        assert (await broker.store.list(paths.STORAGE_PREFIX)).entries == metadata
        assert await read_segment_manifest(broker.objects, TOPIC, DESCRIPTOR) == manifest
        left = await broker.contents()
        assert left.items() >= contents.items()
        # What it uploaded before it was refused bears its own epoch, and no catalog names it.
        assert all(name.endswith(f"-{1:010d}.chunk") for name in left.keys() - contents.keys())
        await segment.sweep()
        assert await broker.contents() == contents
        assert await read_offsets(segment) == [*range(EXPORTED + 3)]
        await fill(segment, 1)
        await segment.close()


if __name__ == "__main__":
    asyncio.run(own(sys.argv[1]))
