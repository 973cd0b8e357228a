"""The log against the limits of the same disk, in one run. Run: `python -m benchmarks.storage [--quick]`

Rates are compared with raw calls of the same process on the same files: `pwrite` + `fdatasync` of the same bytes,
`pread` of the same files. Raw writes go once into a file that grows and once into one that was written out before,
because that is what the log's spare files are. Cold reads drop the files from the page cache first.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from benchmarks.report import Report
from braid.metadata.memory import MemoryStore
from braid.model.batch.columns import decode_arrow, encode_batch
from braid.model.batch.header import verify
from braid.model.ids import Epoch
from braid.model.topic import Durability
from braid.ports.allocator import keep_freed_memory
from braid.ports.clock import SystemClock
from braid.ports.os_disk import OsDisk
from braid.storage.cache import HotCache
from braid.storage.context import StorageContext, StorageMode
from braid.storage.handles import FooterCache, ReadHandles
from braid.storage.log.checkpoint import NAME as CHECKPOINT
from braid.storage.log.context import FileConfig, LogConfig
from braid.storage.log.log import Appended
from braid.storage.log.preallocated import PreallocatedFiles
from braid.storage.log.recovery import recover, repair
from braid.storage.objects.disk import DiskObjects
from braid.storage.retention import RetentionPolicy
from braid.storage.segment import SegmentStorage

NOW_US = 1_790_000_000_000_000
BATCH_BYTES = (16 << 10, 256 << 10, 1 << 20)
RECORD_BYTES = (100, 1024)
IN_FLIGHT_BYTES = 4 << 20
"""Per log, as a producer that does not wait for each batch would have; with 100 logs, a hundredth each."""
READ_BYTES = 8 << 20
TOPIC = "public/default/bench"


def make_batches(record_bytes: int, batch_bytes: int, count: int) -> list[bytearray]:
    records = max(1, batch_bytes // (record_bytes + 12))
    chance = random.Random(1)
    batch = encode_batch([chance.randbytes(record_bytes) for _ in range(records)], now_us=NOW_US)
    return [bytearray(batch) for _ in range(count)]


@contextmanager
def scratch(folder: str | None) -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="braid-bench-", dir=folder)
    try:
        yield path
    finally:
        shutil.rmtree(path)


def raw_write_rate(folder: str, batch_bytes: int, total: int, *, prepared: bool) -> float:
    """Bytes per second of `pwrite` + `fdatasync`, one batch at a time."""
    path = f"{folder}/raw"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        if prepared:
            for _ in range(0, total, 1 << 20):
                os.write(fd, bytes(1 << 20))
            os.fsync(fd)
        data = random.Random(2).randbytes(batch_bytes)
        started = time.perf_counter()
        for position in range(0, total, batch_bytes):
            os.pwrite(fd, data, position)
            os.fdatasync(fd)
        return total / (time.perf_counter() - started)
    finally:
        os.close(fd)
        os.unlink(path)


class Bench:
    """One broker's storage on a real disk."""

    def __init__(self, folder: str, file_bytes: int, mode: StorageMode = StorageMode.LOCAL) -> None:
        self.disk = OsDisk()
        self.clock = SystemClock()
        self.spares = PreallocatedFiles(self.disk, f"{folder}/spare", file_bytes)
        self.folder = f"{folder}/wal"
        self.files = FileConfig(file_bytes=file_bytes)
        self.context = StorageContext(
            broker_id="bench",
            disk=self.disk,
            folder=self.folder,
            store=MemoryStore(self.clock),
            objects=DiskObjects(self.disk, f"{folder}/objects"),
            mode=mode,
            clock=self.clock,
            cache=HotCache(0),
            handles=ReadHandles(self.disk),
            footers=FooterCache(),
            preallocated=self.spares,
            random=random.Random(3),
        )
        self.epoch = 0

    async def segment(self, name: str, durability: Durability = Durability.FSYNC) -> SegmentStorage:
        self.epoch += 1
        config = LogConfig(durability=durability, files=self.files)
        return await SegmentStorage.open(self.context, TOPIC, name, Epoch(self.epoch), config)

    async def close(self) -> None:
        await self.spares.close()
        await self.context.handles.close()
        await self.disk.close()


async def publish(segment: SegmentStorage, batches: list[bytearray], total: int, in_flight_bytes: int) -> None:
    """Verify, append, and wait for confirms as a broker does for one pipelining producer."""
    log = segment.log
    waiting: deque[tuple[Appended, int]] = deque()
    outstanding = 0
    sent = 0
    turn = 0
    while sent < total:
        batch = batches[turn % len(batches)]
        turn += 1
        header = verify(batch)
        waiting.append((log.append(batch, header), len(batch)))
        sent += len(batch)
        outstanding += len(batch)
        while outstanding > in_flight_bytes or len(waiting) >= len(batches):
            appended, size = waiting.popleft()
            await log.confirm(appended)
            outstanding -= size
    while waiting:
        await log.confirm(waiting.popleft()[0])


def follow(segment: SegmentStorage) -> asyncio.Task[None]:
    """Stands for a follower that is as fast as the owner: what is synced here counts as replicated."""

    async def run() -> None:
        log = segment.log
        while True:
            await log.synced.reached(log.replicated.value + 1)
            log.replicated.advance(log.synced.value)

    return asyncio.create_task(run())


async def append_rate(
    folder: str, durability: Durability, record_bytes: int, batch_bytes: int, logs: int, total: int, file_bytes: int
) -> float:
    bench = Bench(folder, file_bytes)
    await bench.spares.open()
    await bench.spares.filled()
    segments = [await bench.segment(f"0000-ffff-{number}", durability) for number in range(logs)]
    followers = [follow(segment) for segment in segments] if durability is Durability.REPLICATED else []
    in_flight = max(batch_bytes, IN_FLIGHT_BYTES // logs)
    rings = [make_batches(record_bytes, batch_bytes, 2 + in_flight // batch_bytes) for _ in segments]
    started = time.perf_counter()
    await asyncio.gather(*(publish(segment, ring, total // logs, in_flight) for segment, ring in zip(segments, rings)))
    seconds = time.perf_counter() - started
    for follower in followers:
        follower.cancel()
    for segment in segments:
        await segment.abandon()
    await bench.close()
    return total / seconds


def append_cases(report: Report, folder: str, *, quick: bool) -> None:
    # The log writes out its preallocated files before a case begins.
    total, file_bytes = (2 << 20, 4 << 20) if quick else (512 << 20, 64 << 20)
    for batch_bytes in BATCH_BYTES[:2] if quick else BATCH_BYTES:
        case_total = total // (8 if batch_bytes < 100_000 else 1)
        for logs in (1,) if quick else (1, 100):
            for record_bytes in RECORD_BYTES:
                for durability in Durability:
                    rates: list[float] = []
                    raws: list[float] = []
                    prepared: list[float] = []
                    for _ in range(1 if quick else 3):
                        # In turns, so that a slow minute of the machine meets all of them.
                        raws.append(raw_write_rate(folder, batch_bytes, case_total, prepared=False))
                        prepared.append(raw_write_rate(folder, batch_bytes, case_total, prepared=True))
                        with scratch(folder) as place:
                            appending = append_rate(
                                place, durability, record_bytes, batch_bytes, logs, case_total, file_bytes
                            )
                            rates.append(asyncio.run(appending))
                    rate = median(rates)
                    report.add(
                        f"append {durability.value}",
                        rate / 1e6,
                        "MB/s",
                        record_bytes=record_bytes,
                        batch_bytes=batch_bytes,
                        logs=logs,
                        records_per_s=rate / batch_bytes * max(1, batch_bytes // (record_bytes + 12)),
                        of_raw=rate / median(raws),
                        of_raw_prepared=rate / median(prepared),
                    )


async def recovery_seconds(
    folder: str, total: int, file_bytes: int, tail_bytes: int, *, checkpoint: bool
) -> tuple[float, int]:
    """Open a log whose process was killed: `total` bytes in closed files, and a fixed tail after them."""
    bench = Bench(folder, file_bytes)
    segment = await bench.segment("0000-ffff-0")
    batches = make_batches(1024, 256 << 10, 64)
    await publish(segment, batches, total, IN_FLIGHT_BYTES)
    await segment.log.rotate()
    await publish(segment, batches, tail_bytes, IN_FLIGHT_BYTES)
    place = segment.log.folder
    await segment.abandon()
    if not checkpoint:
        os.unlink(f"{place}/{CHECKPOINT}")
    started = time.perf_counter()
    recovered = await recover(bench.disk, place)
    await repair(bench.disk, place, recovered)
    seconds = time.perf_counter() - started
    assert recovered.checkpoint_used is checkpoint
    await bench.close()
    return seconds, recovered.next_offset


def recovery_cases(report: Report, folder: str, *, quick: bool) -> None:
    small, large, file_bytes, tail_bytes = (
        (1 << 20, 4 << 20, 1 << 20, 1 << 20) if quick else (64 << 20, 1 << 30, 64 << 20, 8 << 20)
    )
    for checkpoint in (True, False):
        seconds: dict[int, list[float]] = {small: [], large: []}
        for _ in range(1 if quick else 3):
            for total in (small, large):
                with scratch(folder) as place:
                    seconds[total].append(
                        asyncio.run(recovery_seconds(place, total, file_bytes, tail_bytes, checkpoint=checkpoint))[0]
                    )
        for total in (small, large):
            report.add(
                "recovery with checkpoint" if checkpoint else "recovery without",
                median(seconds[total]) * 1e3,
                "ms",
                log_mib=total >> 20,
                of_small=median(seconds[total]) / median(seconds[small]),
            )


def forget_cached(paths: list[str]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def raw_read_rate(paths: list[str]) -> float:
    total = 0
    started = time.perf_counter()
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        position = 0
        while data := os.pread(fd, READ_BYTES, position):
            position += len(data)
        total += position
        os.close(fd)
    return total / (time.perf_counter() - started)


async def read_into_arrow(segment: SegmentStorage) -> tuple[int, int]:
    """Every record of the segment as Arrow columns; returns records and bytes."""
    reader = segment.reader(0)
    records = size = 0
    async for batches in reader.ahead(READ_BYTES):
        for header, data in batches:
            records += decode_arrow(data, header).num_rows
            size += len(data)
    return records, size


async def chunk_rates(report: Report, folder: str, total: int, file_bytes: int, rounds: int) -> None:
    bench = Bench(folder, file_bytes, StorageMode.LOCAL)
    segment = await bench.segment("0000-ffff-0")
    await publish(segment, make_batches(100, 256 << 10, 64), total, IN_FLIGHT_BYTES)
    await segment.log.rotate()
    files = [f"{segment.log.folder}/{file.name}" for file in segment.log.files]
    size = sum(os.path.getsize(path) for path in files)
    raw_copy = raw_copy_rate(files, f"{folder}/copy")
    started = time.perf_counter()
    await segment.exporter.export_closed()
    export = size / (time.perf_counter() - started)
    report.add("export into chunks", export / 1e6, "MB/s", of_raw=export / raw_copy)
    objects = f"{folder}/objects/{TOPIC}/0000-ffff-0"
    chunks = [f"{objects}/{chunk.object}" for chunk in segment.catalog.chunks]
    await segment.apply_retention(RetentionPolicy())
    for cold in (True, False):
        raws: list[float] = []
        rates: list[float] = []
        for _ in range(rounds):
            if cold:
                forget_cached(chunks)
            raws.append(raw_read_rate(chunks))
            if cold:
                forget_cached(chunks)
            started = time.perf_counter()
            records, read = await read_into_arrow(segment)
            rates.append(read / (time.perf_counter() - started))
            assert records == segment.log.end
        name = "read chunks into Arrow, cold" if cold else "read chunks into Arrow, cached"
        report.add(name, median(rates) / 1e6, "MB/s", of_raw=median(rates) / median(raws), raw_mb_s=median(raws) / 1e6)
    await segment.abandon()
    await bench.close()


def raw_copy_rate(paths: list[str], target: str) -> float:
    """Read and write the same files, synced, in pieces of 8 MiB."""
    total = 0
    started = time.perf_counter()
    for path in paths:
        source = os.open(path, os.O_RDONLY)
        copy = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        while data := os.read(source, READ_BYTES):
            os.write(copy, data)
            total += len(data)
        os.fdatasync(copy)
        os.close(copy)
        os.close(source)
    os.unlink(target)
    return total / (time.perf_counter() - started)


def bars_of(report: Report) -> Report:
    """What the design asks for, and what this run reached."""
    bars = Report("storage-bars")

    def bar(case: str, reached: list[float], limit: float, *, at_least: bool) -> None:
        if reached:
            worst = min(reached) if at_least else max(reached)
            met = worst >= limit if at_least else worst <= limit
            bars.add(case, worst, "×", asked=f"{'≥' if at_least else '≤'} {limit}", met=met)

    def facts(case: str, fact: str, **wanted: int) -> list[float]:
        found = [row for row in report.rows if row["case"] == case and wanted.items() <= row.items()]
        return [row[fact] for row in found]

    appends = {"batch_bytes": 256 << 10, "logs": 1}
    bar(
        "fsync appends of 256 KiB, of raw write + fdatasync",
        facts("append fsync", "of_raw", **appends),
        0.7,
        at_least=True,
    )
    prepared = facts("append fsync", "of_raw_prepared", **appends)
    bar("the same, of raw into a file written out before", prepared, 0.7, at_least=True)
    bar("cold read into Arrow, of raw read", facts("read chunks into Arrow, cold", "of_raw"), 0.5, at_least=True)
    bar(
        "recovery with checkpoint, of a small log's", facts("recovery with checkpoint", "of_small"), 1.5, at_least=False
    )
    return bars


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, once: shows that it runs, not how fast")
    parser.add_argument("--folder", help="where to write (default: the temporary folder)")
    parser.add_argument("--only", choices=["append", "recovery", "chunks"])
    options = parser.parse_args()
    keep_freed_memory()
    report = Report("storage")
    with scratch(options.folder) as folder:
        if options.only in (None, "append"):
            append_cases(report, folder, quick=options.quick)
        if options.only in (None, "recovery"):
            recovery_cases(report, folder, quick=options.quick)
        if options.only in (None, "chunks"):
            total, file_bytes, rounds = (9 << 20, 4 << 20, 1) if options.quick else (1 << 30, 64 << 20, 5)
            asyncio.run(chunk_rates(report, folder, total, file_bytes, rounds))
    report.print()
    report.write_jsonl()
    bars = bars_of(report)
    bars.print()
    bars.write_jsonl()


if __name__ == "__main__":
    main()
