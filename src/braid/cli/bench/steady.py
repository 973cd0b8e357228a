"""A producer and a consumer at a steady rate, in a benchmark's worker process. They measure how long records wait, and
check that each record arrives once.

Every record carries its number and the time at which it was due. The sender keeps its schedule even when earlier
records are late. So a pause delays every record that is due meanwhile, and the longest wait is the length of the pause.
The clock is monotonic; all processes of one machine share it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from braid.cli.bench.workload import SLOT_NS, Done, Steady, SteadyReceive, SteadySend
from braid.model.errors import BraidError

if TYPE_CHECKING:
    from braid.client.producing.open_batch import Receipt

TICK_S: Final = 0.001
"""The records of this much time are sent together."""
RECORD: Final = struct.Struct("<QQ")
"""A record: the time at which it was due, and its number."""
LAST: Final = 0
"""The due time of the last record, as a mark of the end. Its number is how many there were before it."""
LATE_S: Final = 10.0
"""How long records of other segments are waited for when the last one has come."""


class Waits:
    """Keeps the longest wait in each slot of time."""

    def __init__(self) -> None:
        self.by_slot_ms: dict[int, float] = {}

    def add(self, due_ns: int, now_ns: int) -> None:
        slot, waited_ms = due_ns // SLOT_NS, (now_ns - due_ns) / 1e6
        if waited_ms > self.by_slot_ms.get(slot, 0.0):
            self.by_slot_ms[slot] = waited_ms


class Arrivals:
    """Counts missing and repeated records, which are numbered from 0; those of one key arrive in order. A record that
    comes too late, behind a later one of its key, counts as missing and as repeated."""

    def __init__(self, keys: int = 1) -> None:
        self._next = list(range(keys))
        self.lost = 0
        self.twice = 0

    def add(self, number: int) -> None:
        keys = len(self._next)
        expected = self._next[number % keys]
        if number < expected:
            self.twice += 1
            return
        self.lost += (number - expected) // keys
        self._next[number % keys] = number + keys

    def missing(self, total: int) -> int:
        """Return how many of so many records have not come, and were not counted as lost."""
        keys = len(self._next)
        return sum(max(0, -((expected - total) // keys)) for expected in self._next)


async def steady_send(work: SteadySend, on_ready: Callable[[], None]) -> Done:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    padding = bytes(max(0, work.size - RECORD.size))
    keys = [b"%d" % key if work.keys > 1 else None for key in range(work.keys)]
    waits = Waits()
    errors = 0
    sent: deque[tuple[int, Receipt]] = deque()
    some = asyncio.Event()

    async def follow() -> None:
        """Take the confirms, in the order in which the records were sent."""
        nonlocal errors
        while True:
            while sent:
                due_ns, receipt = sent[0]
                try:
                    await receipt
                except BraidError:
                    errors += 1
                waits.add(due_ns, time.monotonic_ns())
                sent.popleft()
            some.clear()
            await some.wait()

    async with work.target.connect() as client, client.producer(work.topic) as producer:
        on_ready()
        following = asyncio.create_task(follow())
        began, cpu = time.monotonic_ns(), time.process_time()
        number = 0
        while not stopping.is_set():
            elapsed_ns = time.monotonic_ns() - began
            due = int(elapsed_ns * work.rate / 1e9)
            for each in range(number, due):
                due_ns = began + int(each * 1e9 / work.rate)
                key = keys[each % work.keys]
                sent.append((due_ns, producer.submit(RECORD.pack(due_ns, each) + padding, key=key)))
            if due > number:
                number = due
                some.set()
            await asyncio.sleep(TICK_S)
        with contextlib.suppress(BraidError):  # The task that takes the confirms counts it.
            await producer.flush()
        while sent:  # noqa: ASYNC110 (at the end, for a moment)
            await asyncio.sleep(TICK_S)
        following.cancel()
        await producer.send(RECORD.pack(LAST, number) + padding)
        seconds = (time.monotonic_ns() - began) / 1e9
        steady = Steady(errors=errors, waited_ms=waits.by_slot_ms)
        return Done(number, number * work.size, seconds, time.process_time() - cpu, steady=steady)


async def steady_receive(work: SteadyReceive, on_ready: Callable[[], None]) -> Done:
    waits = Waits()
    arrivals = Arrivals(work.keys)
    async with (
        work.target.connect() as client,
        client.stream_consumer(work.topic, work.subscription, name="bench", start="latest") as consumer,
    ):
        on_ready()
        began, cpu = time.monotonic(), time.process_time()
        size = 0
        total: int | None = None
        while total is None or arrivals.missing(total):
            batch = await consumer.receive_batch(None if total is None else LATE_S)
            if batch is None:
                break
            now_ns = time.monotonic_ns()
            for value in batch.values():
                due_ns, number = RECORD.unpack_from(value)
                size = len(value)
                if due_ns == LAST:
                    total = number
                else:
                    arrivals.add(number)
                    waits.add(due_ns, now_ns)
            await consumer.ack(batch)
        missing = arrivals.missing(total or 0)
        steady = Steady(lost=arrivals.lost + missing, twice=arrivals.twice, waited_ms=waits.by_slot_ms)
        count = (total or 0) - missing
        return Done(count, count * size, time.monotonic() - began, time.process_time() - cpu, steady=steady)
