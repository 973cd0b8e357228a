"""The metadata stores: compare-and-swap, watches and the death of a process, over one SQLite file.

    python -m benchmarks.metadata [--quick]

A compare-and-swap is one `txn` that compares the key's revision and writes 100 bytes, synced to the disk, one after the
other as one caller would. Watch latency is the time from just before another process commits to the moment at which the
change is handed to the reader here. Death is the time from `kill -9` of a process to the deletion of its keys.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import Report
from braid.metadata.history import watching
from braid.metadata.memory import MemoryStore
from braid.metadata.sqlite.store import SqliteStore
from braid.metadata.store import Compare, Put, Store
from braid.model.ids import Revision
from braid.ports.clock import SystemClock

VALUE = b"x" * 100
LONG_TTL_S = 600.0


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


async def swap(store: Store, key: str, seconds: float) -> list[float]:
    """Compare and swap one key for a while; how long each took."""
    revision, taken = Revision(0), []
    until = time.perf_counter() + seconds
    while (start := time.perf_counter()) < until:
        result = await store.txn([Compare(key, revision)], [Put(key, VALUE)])
        assert result.succeeded
        revision = result.revision
        taken.append(time.perf_counter() - start)
    return taken


def add_latencies(report: Report, case: str, taken: list[float], processes: int) -> None:
    for name, share in (("p50", 0.5), ("p99", 0.99), ("worst", 1.0)):
        report.add(f"{case} {name}", percentile(taken, share) * 1_000, "ms", processes=processes)


async def measure_swaps(report: Report, path: str, seconds: float) -> None:
    for name, store in (("memory", MemoryStore(SystemClock())), ("sqlite", await SqliteStore.open(path))):
        taken = await swap(store, "/swap", seconds)
        report.add(f"{name} compare-and-swap", len(taken) / sum(taken), "1/s", processes=1)
        add_latencies(report, f"{name} compare-and-swap", taken, 1)
        await store.close()


def measure_swaps_of_two_processes(report: Report, path: str, seconds: float) -> None:
    workers = [_worker("swap", path, f"/swap/{number}", str(seconds)) for number in range(2)]
    taken: list[float] = []
    rate = 0.0
    for worker in workers:
        answer = [float(number) for number in worker.communicate()[0].split()]
        rate += len(answer) / sum(answer)
        taken += answer
    report.add("sqlite compare-and-swap", rate, "1/s", processes=2)
    add_latencies(report, "sqlite compare-and-swap", taken, 2)


async def measure_watch(report: Report, path: str, count: int) -> None:
    store = await SqliteStore.open(path)
    async with watching(store, "/stamp", (await store.list("")).revision) as watch:
        worker = _worker("stamp", path, str(count))
        taken = []
        for _ in range(count):
            changes = await anext(watch)
            taken.append(time.monotonic() - float(changes.events[0].value or b"0"))
    worker.communicate()
    add_latencies(report, "sqlite watch across processes", taken, 2)
    await store.close()


async def measure_death(report: Report, path: str, count: int) -> None:
    store = await SqliteStore.open(path)
    taken = []
    for _ in range(count):
        async with watching(store, "/held", (await store.list("")).revision) as watch:
            worker = _worker("hold", path)
            await anext(watch)
            worker.send_signal(signal.SIGKILL)
            start = time.perf_counter()
            await anext(watch)
            taken.append(time.perf_counter() - start)
            worker.communicate()
    add_latencies(report, "sqlite keys of a killed process vanish", taken, 2)
    await store.close()


async def measure_idle(report: Report, path: str, seconds: float) -> None:
    stores = [await SqliteStore.open(path) for _ in range(3)]
    start = time.process_time()
    await asyncio.sleep(seconds)
    share = (time.process_time() - start) / seconds / len(stores)
    report.add("sqlite idle, of one core", share * 100, "%", processes=1)
    for store in stores:
        await store.close()


def _worker(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.metadata", "--worker", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])


async def work(arguments: list[str]) -> None:
    match arguments:
        case ["swap", path, key, seconds]:
            store = await SqliteStore.open(path)
            print(*await swap(store, key, float(seconds)))
            await store.close()
        case ["stamp", path, count]:
            store = await SqliteStore.open(path)
            for _ in range(int(count)):
                await asyncio.sleep(0.002)
                await store.txn([], [Put("/stamp", b"%.9f" % time.monotonic())])
            await store.close()
        case ["hold", path]:
            store = await SqliteStore.open(path)
            lease = await store.grant_lease(LONG_TTL_S)
            await store.txn([], [Put("/held", b"", lease.id)])
            await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it works")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        asyncio.run(work(options.worker))
        return
    seconds, count = (0.3, 20) if options.quick else (4.0, 1_000)
    report = Report("metadata")
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "metadata.db")
        asyncio.run(measure_swaps(report, path, seconds))
        measure_swaps_of_two_processes(report, path, seconds)
        asyncio.run(measure_watch(report, path, count))
        asyncio.run(measure_death(report, path, max(2, count // 100)))
        asyncio.run(measure_idle(report, path, seconds))
    report.print()
    report.write_jsonl()


if __name__ == "__main__":
    main()
