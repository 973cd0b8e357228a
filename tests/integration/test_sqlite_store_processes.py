"""The SQLite store between real processes: killed, stopped and forked ones."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from braid.metadata.history import watching
from braid.metadata.sqlite.store import SqliteStore
from braid.metadata.store import Compare, Entry, Put
from braid.model.ids import Revision
from tests.kits import sqlite_worker

pytestmark = [pytest.mark.processes, pytest.mark.real_loop]


SOURCES = str(Path(__file__).parents[2] / "src")
WORKERS = 3
KILLS = 12
LONG_TTL_S = 600.0
"""A lease that ends within the test did not end by its time to live."""


class Worker:
    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, sqlite_worker.__file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": SOURCES},
        )
        self.said: list[str] = []

    def line(self) -> str:
        """The next line that it says."""
        assert self.process.stdout is not None
        self.said.append(self.process.stdout.readline().strip())
        return self.said[-1]

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Kill it, and read what it had said and nobody had read."""
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        self.process.kill()
        self.said += self.process.stdout.read().split()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    """Whatever a test starts and puts here is gone afterwards."""
    started: list[Worker] = []
    yield started
    for worker in started:
        if worker.process.stdout is not None and not worker.process.stdout.closed:
            worker.end()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "metadata.db")


def test_counters_stay_exact_while_writers_are_killed(path: str, workers: list[Worker]) -> None:
    chance = random.Random(7)
    confirmed: dict[str, int] = {}
    running: list[tuple[str, Worker]] = []

    def start() -> None:
        name = f"{len(workers)}"
        worker = Worker("count", path, name)
        workers.append(worker)
        running.append((name, worker))

    def kill() -> None:
        name, worker = running.pop(chance.randrange(len(running)))
        worker.end()
        confirmed[name] = max(map(int, worker.said), default=0)

    for _ in range(WORKERS):
        start()
    for _ in range(KILLS):
        # A kill in the middle of the work: not before the worker has counted something, and at any moment after.
        running[-1][1].line()
        time.sleep(chance.random() * 0.05)
        kill()
        start()
    while running:
        kill()

    async def read() -> list[Entry]:
        store = await SqliteStore.open(path)
        entries = [*(await store.list("/count/")).entries]
        await store.close()
        return entries

    counts = {entry.key.removeprefix("/count/"): int(entry.value) for entry in asyncio.run(read())}
    total = counts.pop("total")
    assert total == sum(counts.values()) >= 100
    # What was confirmed is there; of what was not, at most the one transaction that was under way.
    for name, count in confirmed.items():
        assert count <= counts.get(name, 0) <= count + 1
    assert apsw.Connection(path).pragma("integrity_check") == "ok"


def test_the_leases_of_a_killed_process_end_at_once(path: str, workers: list[Worker]) -> None:
    async def main() -> None:
        store = await SqliteStore.open(path)
        worker = Worker("hold", path, str(LONG_TTL_S))
        workers.append(worker)
        assert await asyncio.to_thread(worker.line) == "ready"
        listing = await store.list("/held/")
        assert [entry.key for entry in listing.entries] == ["/held/a", "/held/b"]
        async with watching(store, "/held/", listing.revision) as watch:
            worker.process.kill()
            changes = await asyncio.wait_for(anext(watch), 30)
        assert [(event.key, event.value) for event in changes.events] == [("/held/a", None), ("/held/b", None)]
        await store.close()

    asyncio.run(main())
    assert os.listdir(path + ".sessions") == []


async def test_the_leases_of_a_killed_process_end_also_when_its_forked_child_lives_on(
    path: str, workers: list[Worker]
) -> None:
    store = await SqliteStore.open(path)
    worker = Worker("hold-and-fork", path, str(LONG_TTL_S))
    workers.append(worker)
    child = int(await asyncio.to_thread(worker.line))
    try:
        async with watching(store, "/held/", (await store.list("/held/")).revision) as watch:
            worker.process.kill()
            changes = await asyncio.wait_for(anext(watch), 30)
        assert len(changes.events) == 2
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)
    await store.close()


async def test_the_lease_of_a_stopped_process_ends_by_its_time_to_live_and_the_process_learns_it(
    path: str, workers: list[Worker]
) -> None:
    store = await SqliteStore.open(path)
    worker = Worker("hold", path, "2.0")
    workers.append(worker)
    assert await asyncio.to_thread(worker.line) == "ready"
    worker.process.send_signal(signal.SIGSTOP)
    entry = await store.get("/held/a")
    if entry is not None:
        async with watching(store, "/held/", entry.revision) as watch:
            assert len((await asyncio.wait_for(anext(watch), 30)).events) == 2
    assert (await store.txn([Compare("/held/a", Revision(0))], [Put("/held/a", b"mine")])).succeeded
    worker.process.send_signal(signal.SIGCONT)
    worker.tell("renew")
    assert await asyncio.to_thread(worker.line) == "lost"
    entry = await store.get("/held/a")
    assert entry is not None
    assert entry.value == b"mine"
    await store.close()


async def test_a_watch_hears_other_processes(path: str, workers: list[Worker]) -> None:
    store = await SqliteStore.open(path)
    worker = Worker("count", path, "w")
    workers.append(worker)
    revision = 0
    async with watching(store, "/count/w", Revision(0)) as watch:
        for expected in range(1, 201):
            changes = await asyncio.wait_for(anext(watch), 30)
            assert changes.revision > revision
            assert changes.events[0].value == b"%d" % expected
            revision = changes.revision
    worker.end()
    await store.close()


def test_a_store_refuses_to_work_in_a_forked_child(path: str, workers: list[Worker]) -> None:
    worker = Worker("fork", path)
    workers.append(worker)
    assert "opened in process" in worker.line()
    assert worker.line() == "the parent goes on"
