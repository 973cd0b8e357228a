"""How fast objects are stored and fetched, beside what the same machine does with a plain file in the same run.

    python -m benchmarks.objects [--quick]

S3 is a real server (SeaweedFS) on the loopback interface and the same processors, so its numbers are its own as much as
the client's. Reads are warm: the page cache holds what was just written. Rates are MiB/s, the median of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from uuid import uuid4

from benchmarks.report import Report
from braid.ports.os_disk import OsDisk
from braid.storage.objects.disk import DiskObjects
from braid.storage.objects.store import Objects
from braid.storage.objects.urls import open_objects
from tests.kits.s3_server import CREDENTIALS, running_s3_server

MIB = 1 << 20
PART_BYTES = 256 << 10
"""Chunks are made of batches of about this size."""

Rates = dict[str, list[float]]


async def timed(rates: Rates, what: str, size: int, action: Callable[[], Awaitable[object]]) -> None:
    start = time.perf_counter()
    await action()
    rates.setdefault(what, []).append(size / MIB / (time.perf_counter() - start))


async def raw(rates: Rates, folder: str, content: bytes) -> None:
    path = f"{folder}/raw"

    async def write() -> None:
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.write(descriptor, content)
        os.fdatasync(descriptor)
        os.close(descriptor)

    async def read() -> None:
        descriptor = os.open(path, os.O_RDONLY)
        assert len(os.pread(descriptor, len(content), 0)) == len(content)
        os.close(descriptor)

    await timed(rates, "put", len(content), write)
    await timed(rates, "get", len(content), read)
    os.unlink(path)


async def through(objects: Objects, rates: Rates, content: bytes) -> None:
    name = f"bench/{uuid4().hex}"
    parts = [memoryview(content)[start : start + PART_BYTES] for start in range(0, len(content), PART_BYTES)]

    async def get() -> None:
        assert len(await objects.read(name, 0, len(content))) == len(content)

    await timed(rates, "put", len(content), lambda: objects.create(name, parts))
    await timed(rates, "get", len(content), get)
    await objects.delete(name)


async def measure(report: Report, folder: str, s3_url: str, sizes_mib: list[int], rounds: int) -> None:
    disk = OsDisk()
    stores = {"disk": DiskObjects(disk, f"{folder}/objects"), "s3": open_objects(s3_url, disk=disk)}
    for size_mib in sizes_mib:
        content = os.urandom(size_mib * MIB)
        rates: dict[str, Rates] = {"raw file": {}, **{name: {} for name in stores}}
        for name, objects in stores.items():
            for _ in range(rounds):
                if name == "disk":
                    await raw(rates["raw file"], folder, content)
                await through(objects, rates[name], content)
            os.sync()  # The S3 server leaves dirty pages; the next phase must not pay for them.
        for store, by_action in rates.items():
            for action, values in by_action.items():
                rate = statistics.median(values)
                limit = statistics.median(rates["raw file"][action])
                report.add(f"{action} {store}", rate, "MiB/s", object_mib=size_mib, of_raw=rate / limit, rounds=rounds)
    for objects in stores.values():
        await objects.close()
    await disk.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Object stores against plain files.")
    parser.add_argument("--quick", action="store_true", help="small objects, one round: shows that it still runs")
    options = parser.parse_args()
    os.environ.update(CREDENTIALS)
    report = Report("objects")
    with tempfile.TemporaryDirectory(prefix="braid-bench-") as folder, running_s3_server() as server:
        sizes_mib, rounds = ([1], 1) if options.quick else ([8, 64], 7)
        asyncio.run(measure(report, folder, server.url("bench"), sizes_mib, rounds))
    report.print()
    report.write_jsonl()


if __name__ == "__main__":
    main()
