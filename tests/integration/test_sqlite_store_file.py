"""The SQLite store and its file: what it keeps, what it forgets, and what it says when the file is not what it was."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import apsw
import pytest

from braid.metadata.history import HistoryLimits, watching
from braid.metadata.sqlite import file as sqlite_file
from braid.metadata.sqlite import sessions as sqlite_sessions
from braid.metadata.sqlite.store import POLL_S, SqliteStore
from braid.metadata.store import Compare, Put
from braid.model.errors import InvalidArgument, LeaseLost, MetadataCompacted, MetadataError, MetadataUnavailable
from braid.model.ids import Revision
from tests.kits.open_files import no_file_left

pytestmark = pytest.mark.real_loop


START = Revision(0)


class ManualClock:
    """Shows what the test says."""

    def __init__(self) -> None:
        self.time = 1_000.0

    def now_us(self) -> int:
        return round(self.time * 1_000_000)

    def monotonic(self) -> float:
        return self.time


def run(main: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main

    asyncio.run(bounded())


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "metadata.db")


async def test_what_was_written_is_there_after_closing_and_opening(path: str) -> None:
    store = await SqliteStore.open(path)
    result = await store.txn([], [Put("/a", b"1"), Put("/b", b"2")])
    await store.close()
    store = await SqliteStore.open(path)
    listing = await store.list("")
    assert [(entry.key, entry.value, entry.revision) for entry in listing.entries] == [
        ("/a", b"1", result.revision),
        ("/b", b"2", result.revision),
    ]
    assert (await store.txn([], [Put("/c", b"3")])).revision == listing.revision + 1
    await store.close()


def test_every_commit_is_synced_and_the_journal_is_a_wal(path: str) -> None:
    file = sqlite_file.MetadataFile(path, "CREATE TABLE t (x)")
    assert file.connection.pragma("synchronous") == 2
    assert file.connection.pragma("journal_mode") == "wal"
    file.close()


async def test_a_lease_is_renewed_without_new_room_on_the_disk(path: str) -> None:
    """So a broker whose disk is full keeps its lease, and goes on serving readers."""
    store = await SqliteStore.open(path)
    lease = await store.grant_lease(60)

    def room(file: str) -> tuple[int, int]:
        """The length of a file, and how much of the disk it has."""
        return os.stat(file).st_size, os.stat(file).st_blocks * 512

    wal = room(f"{path}-wal")
    assert min(wal) >= sqlite_file.WAL_RESERVED_BYTES
    for _ in range(50):  # More pages than those after which SQLite begins the WAL again.
        await store.txn([], [Put("/a", b"x" * 64_000)])
    assert room(f"{path}-wal") == wal
    database = room(path)
    for _ in range(100):
        await lease.renew()
    assert (room(f"{path}-wal"), room(path)) == (wal, database)
    await store.close()


async def test_what_was_written_is_there_after_a_crash_although_the_journal_is_longer_than_its_pages(
    path: str, tmp_path: Path
) -> None:
    store = await SqliteStore.open(path)
    for number in range(100):
        await store.txn([], [Put(f"/{number}", b"x" * 1_000)])
    copy = tmp_path / "copy.db"
    for suffix in ("", "-wal"):  # As a crash leaves them.
        shutil.copy(path + suffix, f"{copy}{suffix}")
    await store.close()
    recovered = await SqliteStore.open(str(copy))
    assert len((await recovered.list("/")).entries) == 100
    await recovered.close()


def test_a_closed_store_leaves_no_session_behind(path: str) -> None:
    async def main() -> None:
        stores = [await SqliteStore.open(path) for _ in range(3)]
        assert len(os.listdir(path + ".sessions")) == 6
        for store in stores:
            await store.close()

    run(main())
    assert os.listdir(path + ".sessions") == []


async def test_closing_ends_the_leases_of_the_store_at_once(path: str) -> None:
    store, other = await SqliteStore.open(path), await SqliteStore.open(path)
    lease, kept = await store.grant_lease(600.0), await other.grant_lease(600.0)
    await store.txn([], [Put("/a", b"", lease.id), Put("/b", b"", kept.id)])
    await store.close()
    assert [entry.key for entry in (await other.list("")).entries] == ["/b"]
    with pytest.raises(LeaseLost):
        await lease.renew()
    await other.close()


async def test_no_read_shows_a_key_of_an_expired_lease(path: str) -> None:
    """At the very moment at which it expires, before any timer has had a chance."""
    clock = ManualClock()
    store, other = await SqliteStore.open(path, clock=clock), await SqliteStore.open(path, clock=clock)
    for read in ("get", "list", "txn"):
        lease = await store.grant_lease(5.0)
        await store.txn([], [Put("/a", b"", lease.id)])
        clock.time = lease.deadline - 0.001
        assert await other.get("/a") is not None
        clock.time = lease.deadline
        match read:
            case "get":
                assert await other.get("/a") is None
            case "list":
                assert (await other.list("/a")).entries == ()
            case "txn":
                assert (await other.txn([Compare("/a", START)], [])).succeeded
        with pytest.raises(LeaseLost):
            await lease.renew()
    await store.close()
    await other.close()


async def test_a_failed_transaction_reports_a_revision_that_exists(path: str) -> None:
    """It ended an expired lease on its way: the revision of that deletion is real although nothing else was written."""
    clock = ManualClock()
    store = await SqliteStore.open(path, clock=clock)
    lease = await store.grant_lease(5.0)
    written = await store.txn([], [Put("/a", b"", lease.id), Put("/b", b"")])
    clock.time += 5.0
    failed = await store.txn([Compare("/b", START)], [Put("/b", b"2")])
    assert not failed.succeeded
    assert failed.revision == written.revision + 1 == (await store.list("")).revision
    async with watching(store, "/a", written.revision) as watch:
        assert (await anext(watch)).revision == failed.revision
    await store.close()


async def test_after_a_reboot_all_leases_are_over(path: str) -> None:
    clock = ManualClock()
    before = await SqliteStore.open(path, clock=clock, boot="first boot")
    lease = await before.grant_lease(600.0)
    await before.txn([], [Put("/a", b"", lease.id), Put("/b", b"")])
    clock.time = 1.0
    after = await SqliteStore.open(path, clock=clock, boot="second boot")
    assert [entry.key for entry in (await after.list("")).entries] == ["/b"]
    await after.close()
    await before.close()


@pytest.mark.parametrize("limits", [HistoryLimits(revisions=50), HistoryLimits(max_bytes=50 * 1_002)])
async def test_the_history_in_the_file_is_bounded(path: str, limits: HistoryLimits) -> None:
    store = await SqliteStore.open(path, limits=limits)
    revisions: list[int] = []
    for written in range(1, 301):
        head = (await store.txn([], [Put("/a", b"x" * 1_000)])).revision
        rows = apsw.Connection(path).execute("SELECT revision FROM events")
        revisions = [revision for (revision,) in rows]
        assert min(40, written) <= len(revisions) <= 50
        assert revisions[-1] == head
    fresh = await SqliteStore.open(path, limits=limits)
    with pytest.raises(MetadataCompacted):
        await anext(fresh.watch("/a", Revision(revisions[0] - 2)))
    watch = fresh.watch("/a", Revision(revisions[0] - 1))
    assert [(await anext(watch)).revision for _ in revisions] == revisions
    await fresh.close()
    await store.close()


async def test_a_store_that_slept_through_a_compaction_says_so_to_its_watches_and_goes_on(path: str) -> None:
    sleeper, other = await SqliteStore.open(path), await SqliteStore.open(path)
    await other.txn([], [Put("/a", b"0")])
    watch = sleeper.watch("/a", START)
    assert (await anext(watch)).revision == 1
    waiting = asyncio.ensure_future(anext(watch))
    awake = threading.Event()
    sleeping = sleeper._thread.call(awake.wait)
    for number in range(5):
        await other.txn([], [Put("/a", b"%d" % number)])
    await other.compact()
    awake.set()
    await sleeping
    with pytest.raises(MetadataCompacted):
        await waiting
    watch = sleeper.watch("/a", (await sleeper.list("/a")).revision)
    last = await other.txn([], [Put("/a", b"new")])
    assert (await anext(watch)).revision == last.revision
    await sleeper.close()
    await other.close()


async def test_a_watch_hears_a_change_whose_ring_was_lost(path: str) -> None:
    store, other = await SqliteStore.open(path), await SqliteStore.open(path)
    for file in Path(path + ".sessions").glob("*.bell"):
        file.unlink()
    watch = store.watch("/a", START)
    for revision in range(1, 4):
        waiting = asyncio.ensure_future(anext(watch))
        await other.txn([], [Put("/a", b"%d" % revision)])
        assert (await waiting).revision == revision
    await store.close()
    await other.close()


async def test_a_ring_arrives_where_paths_are_longer_than_a_socket_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("braid.metadata.sqlite.store.POLL_S", 50.0)
    folder = tmp_path / ("long" * 50)
    folder.mkdir()
    path = str(folder / "metadata.db")
    store, other = await SqliteStore.open(path), await SqliteStore.open(path)
    watch = store.watch("/a", START)
    waiting = asyncio.ensure_future(anext(watch))
    await other.txn([], [Put("/a", b"1")])
    assert (await asyncio.wait_for(waiting, 20)).revision == 1
    await store.close()
    await other.close()


async def test_a_writer_that_hangs_makes_writes_unavailable_and_leaves_reads_alone(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_sessions, "LOCK_PATIENCE_S", 0.2)
    store = await SqliteStore.open(path)
    await store.txn([], [Put("/a", b"1")])
    held = os.open(path + ".lock", os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(MetadataUnavailable, match=r"metadata\.db\.lock .* stopped or hanging process"):
        await store.txn([], [Put("/a", b"2")])
    entry = await store.get("/a")
    assert entry is not None
    assert entry.value == b"1"
    os.close(held)
    await store.txn([], [Put("/a", b"3")])
    await store.close()


async def test_a_foreign_lock_on_the_database_is_unavailable_not_absent(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_file, "BUSY_TIMEOUT_MS", 100)
    store = await SqliteStore.open(path)
    foreign = apsw.Connection(path)
    foreign.execute("BEGIN IMMEDIATE")
    with pytest.raises(MetadataUnavailable, match=r"metadata\.db.*BusyError"):
        await store.txn([], [Put("/a", b"1")])
    foreign.execute("ROLLBACK")
    assert (await store.txn([Compare("/a", START)], [Put("/a", b"1")])).succeeded
    foreign.close()
    await store.close()


async def test_a_corrupt_file_is_unavailable_not_empty(path: str) -> None:
    store = await SqliteStore.open(path)
    for number in range(50):
        await store.txn([], [Put(f"/{number}", b"x" * 1_000)])
    await store.close()
    content = bytearray(Path(path).read_bytes())
    content[4_096:44_096] = b"\xa5" * 40_000
    Path(path).write_bytes(content)
    with pytest.raises(MetadataUnavailable, match=r"metadata\.db.*CorruptError"):
        store = await SqliteStore.open(path)


@pytest.mark.parametrize("content", [b"this is not a database" * 500, b"SQLite format 3\x00" + b"\x00" * 5_000])
def test_a_file_that_is_no_database_is_refused(path: str, content: bytes) -> None:
    Path(path).write_bytes(content)
    with pytest.raises((MetadataUnavailable, InvalidArgument), match=r"metadata\.db"):
        asyncio.run(SqliteStore.open(path))
    assert Path(path).read_bytes() == content


def test_a_folder_in_place_of_the_file_and_a_missing_folder_are_unavailable(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder", tmp_path / "missing" / "metadata.db"):
        with pytest.raises(MetadataUnavailable, match=path.name):
            asyncio.run(SqliteStore.open(str(path)))


def test_a_database_of_another_program_or_of_the_future_is_left_alone(path: str) -> None:
    foreign = apsw.Connection(path)
    foreign.execute("CREATE TABLE mine (x)")
    foreign.close()
    with pytest.raises(InvalidArgument, match="another program"):
        asyncio.run(SqliteStore.open(path))

    future = apsw.Connection(path)
    future.pragma("application_id", sqlite_file.APPLICATION_ID)
    future.pragma("user_version", sqlite_file.SCHEMA_VERSION + 1)
    future.close()
    with pytest.raises(MetadataError, match="schema version 2"):
        asyncio.run(SqliteStore.open(path))


def test_a_network_filesystem_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("braid.metadata.sqlite.filesystem.filesystem_of", lambda *_: "nfs4")
    with pytest.raises(InvalidArgument, match=r"network filesystem \(nfs4\).*etcd"):
        asyncio.run(SqliteStore.open(path))


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_file_that_is_deleted_or_replaced_under_an_open_store_is_noticed(path: str, replaced: bool) -> None:
    """Otherwise this process would go on alone on a file that nobody else sees."""
    store = await SqliteStore.open(path)
    await store.txn([], [Put("/a", b"1")])
    watch = store.watch("/b", START)
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    os.rename(path, path + ".away")
    if replaced:
        Path(path).write_bytes(b"")
    with pytest.raises(MetadataUnavailable, match=r"metadata\.db"):
        await store.get("/a")
    with pytest.raises(MetadataUnavailable):
        await store.txn([], [Put("/a", b"2")])
    with pytest.raises(MetadataUnavailable):
        await waiting
    await store.close()


async def test_a_store_that_continues_another_begins_with_a_later_revision(path: str) -> None:
    store = await SqliteStore.open(path)
    watch = store.watch("/", START)
    await store.skip_to(Revision(1_000))
    with pytest.raises(MetadataCompacted):
        await anext(watch)
    assert (await store.txn([], [Put("/a", b"1")])).revision == 1_001
    await store.skip_to(Revision(5))
    assert (await store.list("")).revision == 1_001
    await store.close()


async def test_a_store_goes_on_when_its_process_has_had_no_file_left(path: str) -> None:
    store = await SqliteStore.open(path)
    other = await SqliteStore.open(path)  # Its session is looked at with each poll.
    async with watching(store, "/", START) as watch:
        with no_file_left():
            with pytest.raises(MetadataUnavailable, match="Too many open files"):
                await store._thread.call(store._bury_dead_sessions)
            await asyncio.sleep(2 * POLL_S)
            await store.txn([], [Put("/a", b"1")])
        changes = await anext(watch)
        assert [event.key for event in changes.events] == ["/a"]
    await other.close()
    await store.close()
