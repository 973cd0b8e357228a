"""The bare loop: the least that a durable broker in Python has to do. Braid is compared with this limit.

    python -m benchmarks.bare_loop [--quick]        its own table
    benchmarks/broker.py                            the same loop and Braid in turns, in one run

One server process, one producer, one consumer, as in Braid; of Braid's code only the setting of the C library's
allocator. There are no topics, no checksums, no cursors, no deduplication, no limits and no recovery. What is the same:
frames with a length in front, received into the frame's own buffer; batches of columns; a thread that writes what has
gathered and syncs it before each confirm, into a file whose blocks were written out before (or, if asked for, only
reserved); confirms by request id; consumers served by `pread` and `write`.

    frame   length u32 · records u32 · request u32 · kind u32, then `length` bytes
    PUBLISH value offsets, int32 × (records + 1), and the values' bytes       → CONFIRM, same request, no bytes
    FOLLOW  first byte of the log, u64                                        → the log's bytes: the frames as published

The file is used in a ring: a round that only publishes may write more than it holds, one that reads must not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import queue
import random
import selectors
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import pyarrow as pa

from benchmarks.report import Report
from braid.cli.bench.machine import cpu_s
from braid.ports.allocator import keep_freed_memory

ROOT: Final = Path(__file__).parents[1]
PREFIX: Final = struct.Struct("<4I")
PAIR: Final = struct.Struct("<2i")
TIME: Final = struct.Struct("<Q")
PUBLISH, CONFIRM, FOLLOW = range(3)

SCRATCH_BYTES: Final = 16 << 10
READ_BYTES: Final = 1 << 20
GROUP: Final = 1_000
"""Frames in one write; the system takes at most 1,024 pieces."""
IN_FLIGHT: Final = 8
WARM_UP_S: Final = 0.5
"""The start of a latency measurement; its records do not count."""
SWITCH_INTERVAL_S: Final = 0.0005


class Frame(NamedTuple):
    records: int
    request: int
    kind: int
    data: memoryview
    """The whole frame, prefix included."""


class Peer(asyncio.BufferedProtocol):
    """One end of a connection: frames in, and small frames out in one write for each turn of the loop."""

    def __init__(self, on_frames: Callable[[Peer, list[Frame]], None]) -> None:
        self.transport: asyncio.Transport = cast("asyncio.Transport", None)
        self.writable = True
        self.on_writable: Callable[[], None] = lambda: None
        self._on_frames = on_frames
        self._scratch = bytearray(SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self._own: memoryview | None = None
        self._end = 0
        self._out: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(1 << 20)

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        self.on_writable()

    def send_small(self, frame: bytes) -> None:
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.append(frame)

    def _flush(self) -> None:
        self.transport.write(b"".join(self._out))
        self._out.clear()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 (asyncio asks)
        return (self._view if self._own is None else self._own)[self._end :]

    def buffer_updated(self, count: int) -> None:
        self._end += count
        if (own := self._own) is not None:
            if self._end == len(own):
                self._own, self._end = None, 0
                self._on_frames(self, [_frame(own)])
            return
        frames = []
        at, end = 0, self._end
        while end - at >= PREFIX.size:
            size = PREFIX.size + PREFIX.unpack_from(self._scratch, at)[0]
            if at + size > end:
                if size > SCRATCH_BYTES - at:
                    self._own = memoryview(bytearray(size))
                    self._own[: end - at] = self._view[at:end]
                break
            frames.append(_frame(memoryview(bytearray(self._view[at : at + size]))))
            at += size
        if self._own is None and at:
            self._scratch[: end - at] = self._scratch[at:end]
        self._end = end - at
        if frames:
            self._on_frames(self, frames)


def _frame(data: memoryview) -> Frame:
    _, records, request, kind = PREFIX.unpack_from(data)
    return Frame(records, request, kind, data)


# The server.


class Server:
    def __init__(self, path: str, file_bytes: int, prepared: bool) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT)
        if prepared:
            for _ in range(0, file_bytes, 8 << 20):
                os.write(self._fd, bytes(8 << 20))
        else:
            os.posix_fallocate(self._fd, 0, file_bytes)
        os.fsync(self._fd)
        self._file_bytes = file_bytes
        self._end = 0
        """The end of the synced and confirmed bytes."""
        self._gathered: queue.SimpleQueue[tuple[Frame, Peer]] = queue.SimpleQueue()
        self._followers: dict[Peer, int] = {}
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._write, daemon=True).start()

    def on_frames(self, peer: Peer, frames: list[Frame]) -> None:
        for frame in frames:
            if frame.kind == PUBLISH:
                self._gathered.put((frame, peer))
            else:
                self._followers[peer] = TIME.unpack_from(frame.data, PREFIX.size)[0]
                peer.on_writable = lambda: self._serve(peer)
                self._serve(peer)

    def _write(self) -> None:
        """Run the thread: write the gathered frames, sync, report. Meanwhile the next frames gather."""
        at = 0
        while True:
            group = [self._gathered.get()]
            with contextlib.suppress(queue.Empty):
                while len(group) < GROUP:
                    group.append(self._gathered.get_nowait())
            parts = [frame.data for frame, _ in group]
            size = sum(map(len, parts))
            if at + size > self._file_bytes:
                at = 0
            assert os.pwritev(self._fd, parts, at) == size
            os.fdatasync(self._fd)
            at += size
            self._loop.call_soon_threadsafe(self._confirm, group, at)

    def _confirm(self, group: list[tuple[Frame, Peer]], end: int) -> None:
        for frame, peer in group:
            peer.send_small(PREFIX.pack(0, 0, frame.request, CONFIRM))
        self._end = end
        for peer in self._followers:
            self._serve(peer)

    def _serve(self, peer: Peer) -> None:
        at = self._followers[peer]
        while at < self._end and peer.writable:
            data = os.pread(self._fd, min(READ_BYTES, self._end - at), at)
            peer.transport.write(data)
            at += len(data)
        self._followers[peer] = at


async def serve(path: str, file_bytes: int, prepared: bool) -> None:
    server = Server(path, file_bytes, prepared)
    listener = await asyncio.get_running_loop().create_server(lambda: Peer(server.on_frames), "127.0.0.1", 0)
    print(listener.sockets[0].getsockname()[1], flush=True)
    await listener.serve_forever()


# The clients. Each is a process that prints what it measured as one line of JSON.


class Publisher:
    """Sends frames and has a future for each confirm."""

    def __init__(self) -> None:
        self.waiting: dict[int, asyncio.Future[None]] = {}
        self.peer = Peer(self._on_frames)
        self._requests = 0

    async def connect(self, port: int) -> None:
        self._loop = asyncio.get_running_loop()
        await self._loop.create_connection(lambda: self.peer, "127.0.0.1", port)

    def _on_frames(self, peer: Peer, frames: list[Frame]) -> None:  # noqa: ARG002
        for frame in frames:
            self.waiting.pop(frame.request).set_result(None)

    def _expect(self) -> asyncio.Future[None]:
        self._requests += 1
        self.waiting[self._requests] = future = self._loop.create_future()
        return future

    def send_batch(self, values: list[bytes]) -> asyncio.Future[None]:
        _, offsets, data = pa.array(values, pa.binary()).buffers()
        future = self._expect()
        size = 4 * len(values) + 4
        prefix = PREFIX.pack(size + len(data), len(values), self._requests, PUBLISH)
        self.peer.transport.write(prefix + memoryview(offsets)[:size])
        self.peer.transport.write(memoryview(data))
        return future

    def send_one(self, value: bytes) -> asyncio.Future[None]:
        future = self._expect()
        size = PAIR.size + len(value)
        self.peer.send_small(PREFIX.pack(size, 1, self._requests, PUBLISH) + PAIR.pack(0, len(value)) + value)
        return future


async def publish_batches(port: int, records: int, size: int, batch_bytes: int) -> dict[str, float]:
    """Publish batches from lists of bytes, `IN_FLIGHT` of them unconfirmed."""
    publisher = Publisher()
    await publisher.connect(port)
    count = max(1, batch_bytes // size)
    lists = [make_values(count, size, seed) for seed in range(4)]
    waiting: deque[asyncio.Future[None]] = deque()

    async def send(batches: int) -> dict[str, float]:
        started, cpu = time.perf_counter(), time.process_time()
        for turn in range(batches):
            waiting.append(publisher.send_batch(lists[turn % len(lists)]))
            if len(waiting) >= IN_FLIGHT:
                await waiting.popleft()
        while waiting:
            await waiting.popleft()
        return measured(batches * count, started, cpu)

    await send(2 * IN_FLIGHT)
    return await send(max(1, records // count))


async def publish_singles(port: int, records: int, size: int, tasks: int) -> dict[str, float]:
    """Publish batches of one record from `tasks` publishers, each of which waits for its confirm."""
    publisher = Publisher()
    await publisher.connect(port)
    value = make_values(1, size, 0)[0]

    async def one(count: int) -> None:
        for _ in range(count):
            await publisher.send_one(value)

    async def send(count: int) -> dict[str, float]:
        started, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(one(count) for _ in range(tasks)))
        return measured(count * tasks, started, cpu)

    await send(max(1, 200 // tasks))
    return await send(max(1, records // tasks))


async def consume(port: int, records: int, form: str) -> dict[str, float]:
    """Read the log from its beginning, as Arrow arrays or as bytes objects."""
    done = asyncio.get_running_loop().create_future()
    seen = 0

    def on_frames(peer: Peer, frames: list[Frame]) -> None:  # noqa: ARG001
        nonlocal seen
        for frame in frames:
            buffer = pa.py_buffer(frame.data)
            start = PREFIX.size + 4 * frame.records + 4
            parts = [None, buffer.slice(PREFIX.size, 4 * frame.records + 4), buffer.slice(start)]
            column = pa.Array.from_buffers(pa.binary(), frame.records, parts)
            seen += len(column) if form == "arrow" else len(column.to_pylist())
        if seen >= records and not done.done():
            done.set_result(None)

    peer = Peer(on_frames)
    await asyncio.get_running_loop().create_connection(lambda: peer, "127.0.0.1", port)
    started, cpu = time.perf_counter(), time.process_time()
    peer.send_small(PREFIX.pack(TIME.size, 0, 0, FOLLOW) + TIME.pack(0))
    await done
    return measured(seen, started, cpu)


async def latency_send(port: int, rate: float, seconds: float, size: int) -> dict[str, float]:
    """Send single records on schedule, even when earlier records are late."""
    publisher = Publisher()
    await publisher.connect(port)
    padding = bytes(size - TIME.size)
    futures = [publisher.send_one(TIME.pack(due_ns) + padding) async for due_ns in schedule(rate, seconds)]
    await asyncio.gather(*futures)
    return {}


async def latency_receive(port: int, rate: float, seconds: float) -> dict[str, float]:
    done = asyncio.get_running_loop().create_future()
    taken: list[int] = []

    def on_frames(peer: Peer, frames: list[Frame]) -> None:  # noqa: ARG001
        for frame in frames:
            value = bytes(frame.data[PREFIX.size + PAIR.size :])
            taken.append(time.monotonic_ns() - TIME.unpack_from(value)[0])
        if len(taken) >= int(rate * seconds) and not done.done():
            done.set_result(None)

    peer = Peer(on_frames)
    await asyncio.get_running_loop().create_connection(lambda: peer, "127.0.0.1", port)
    peer.send_small(PREFIX.pack(TIME.size, 0, 0, FOLLOW) + TIME.pack(0))
    print("ready", flush=True)
    await done
    return percentiles_ms(taken[int(rate * WARM_UP_S) :])


async def schedule(rate: float, seconds: float) -> Any:
    """Yield the due time of each record, in monotonic ns, when it has come. Late records follow immediately."""
    begin_ns = time.monotonic_ns() + 50_000_000
    for number in range(int(rate * seconds)):
        due_ns = begin_ns + int(number * 1e9 / rate)
        if (wait_ns := due_ns - time.monotonic_ns()) > 0:
            await asyncio.sleep(wait_ns / 1e9)
        yield due_ns


def percentiles_ms(taken_ns: list[int]) -> dict[str, float]:
    taken_ns.sort()
    last = len(taken_ns) - 1
    shares = {"p50": 0.5, "p99": 0.99, "p999": 0.999, "worst": 1.0}
    return {name: taken_ns[int(last * share)] / 1e6 for name, share in shares.items()}


def make_values(count: int, size: int, seed: int) -> list[bytes]:
    data = random.Random(seed).randbytes(size * count)
    return [data[at : at + size] for at in range(0, len(data), size)]


def measured(records: int, started: float, cpu: float) -> dict[str, float]:
    seconds = time.perf_counter() - started
    return {"records": records, "seconds": seconds, "rate": records / seconds, "cpu_s": time.process_time() - cpu}


CLIENTS: Final[dict[str, Callable[..., Any]]] = {
    "serve": serve,
    "publish": publish_batches,
    "singles": publish_singles,
    "consume": consume,
    "latency_send": latency_send,
    "latency_receive": latency_receive,
}


def run_process(role: str, arguments: dict[str, Any]) -> None:
    keep_freed_memory()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # epoll takes whole milliseconds; a sender that must be on time needs microseconds.
    selector = selectors.SelectSelector() if role == "latency_send" else selectors.EpollSelector()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        print(json.dumps(runner.run(CLIENTS[role](**arguments))), flush=True)


# Starting the processes.


class BareLoop:
    """A running server, and its measurements. Each measurement starts its own client processes.

    Rates come with the processor time of client and server, which other processes change less.
    """

    def __init__(self, port: int, pid: int) -> None:
        self.port = port
        self._pid = pid

    def publish(self, records: int, size: int, batch_bytes: int) -> dict[str, float]:
        return self._measure("publish", records=records, size=size, batch_bytes=batch_bytes)

    def singles(self, records: int, size: int, tasks: int) -> dict[str, float]:
        return self._measure("singles", records=records, size=size, tasks=tasks)

    def consume(self, records: int, form: str) -> dict[str, float]:
        return self._measure("consume", records=records, form=form)

    def latency(self, rate: float, seconds: float, size: int) -> dict[str, float]:
        seconds += WARM_UP_S
        receiver = _start("latency_receive", port=self.port, rate=rate, seconds=seconds)
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        _finish(_start("latency_send", port=self.port, rate=rate, seconds=seconds, size=size))
        return _finish(receiver)

    def _measure(self, role: str, **arguments: Any) -> dict[str, float]:
        before = cpu_s(self._pid)
        answer = _finish(_start(role, port=self.port, **arguments))
        return answer | {"server_cpu_s": cpu_s(self._pid) - before}


@contextmanager
def bare_loop(folder: str, file_bytes: int, *, prepared: bool = True) -> Iterator[BareLoop]:
    """Run a server with a fresh log in `folder`."""
    path = f"{folder}/bare.log"
    server = _start("serve", path=path, file_bytes=file_bytes, prepared=prepared)
    try:
        assert server.stdout is not None
        yield BareLoop(int(server.stdout.readline()), server.pid)
    finally:
        server.kill()
        server.communicate()
        os.unlink(path)


def _start(role: str, **arguments: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.bare_loop", role, json.dumps(arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def _finish(process: subprocess.Popen[str]) -> dict[str, float]:
    answer, _ = process.communicate(timeout=120)
    if process.returncode:
        raise SystemExit(f"a process of the bare loop ended with {process.returncode}")
    result: dict[str, float] = json.loads(answer)
    return result


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] in CLIENTS:
        run_process(sys.argv[1], json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs, not how fast")
    quick = parser.parse_args().quick
    report = Report("bare-loop")
    share = 50 if quick else 1
    with tempfile.TemporaryDirectory(prefix="braid-bench-") as folder:
        for size in (100, 1024):
            records = (400_000_000 // size) // share
            file_bytes = (16 << 20) if quick else (512 << 20)
            for batch_bytes in (256 << 10, 1 << 20):
                with bare_loop(folder, file_bytes) as loop:
                    answer = loop.publish(records, size, batch_bytes)
                    report.add("publish", answer["rate"], "records/s", record=size, batch=batch_bytes)
                    for form in ("arrow", "bytes"):
                        answer = loop.consume(int(answer["records"]), form)
                        report.add(f"consume as {form}", answer["rate"], "records/s", record=size, batch=batch_bytes)
        for tasks in (1, 64):
            with bare_loop(folder, 64 << 20) as loop:
                answer = loop.singles((100_000 if tasks > 1 else 10_000) // share, 100, tasks)
            report.add(f"single records, {tasks} waiting", answer["rate"], "records/s", record=100)
        for rate in (1_000, 10_000):
            with bare_loop(folder, 64 << 20) as loop:
                answer = loop.latency(rate, 0.3 if quick else 4.0, 100)
            for name, value in answer.items():
                report.add(f"latency at {rate}/s {name}", value, "ms", record=100)
    report.print()
    report.write_jsonl()


if __name__ == "__main__":
    main()
