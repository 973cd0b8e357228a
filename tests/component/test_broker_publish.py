"""Publishing to one segment: what goes to the disk together, and what each connection is told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from braid.broker.metrics import BrokerMetrics
from braid.broker.segments.publish import PublishQueue
from braid.model.batch.header import assemble
from braid.model.batch.identity import DERIVED
from braid.model.errors import BatchError, BatchTooLarge, BraidError, OutOfSequence, StaleRoute
from braid.model.layout import HashRange
from braid.model.topic import TopicPolicies
from braid.storage.log import producers
from braid.storage.log.context import LogConfig
from braid.storage.log.log import Log
from braid.testing.batches import opaque_batch, opaque_header
from braid.testing.sim.disk import DiskFaults, SimulatedDisk
from braid.testing.sim.loop import Simulation
from braid.wire.frame import FrameReader
from braid.wire.operations import Kind, Published, decode
from tests.kits import poison
from tests.kits.storage import NotingDisk, open_log
from tests.kits.waiting import until

BODY = b"x" * 104


class Connection:
    """Writes down what it is told; what it was told before a flush has left."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Published]] = []
        self.left: list[list[tuple[int, Published]]] = []
        self.bytes = 0
        self.refused: list[tuple[int, BraidError]] = []

    def confirm(self, frame: bytes, size: int) -> None:
        reader = FrameReader()
        reader.buffer()[: len(frame)] = frame
        (found,) = reader.received(len(frame))
        assert (found.kind, found.flags, found.payload) == (Kind.PUBLISH, 1, None)
        self._waiting.append((found.request, decode(Published, found.body)))
        self.bytes += size

    def refuse(self, request: int, size: int, error: BraidError) -> None:
        self.refused.append((request, error))
        self.bytes += size

    def flush(self) -> None:
        self.left.append(self._waiting)
        self._waiting = []


WAITED_S = 5.0
"""How long before `take` the batches of a test came."""


class Bench:
    def __init__(self, disk: SimulatedDisk, noting: NotingDisk, log: Log) -> None:
        self.disk = disk
        self.noting = noting
        self.log = log
        self.metrics = BrokerMetrics()
        loop = asyncio.get_running_loop()
        self.queue = PublishQueue(
            log,
            HashRange(0, 0x7FFF),
            self.metrics,
            self.metrics.topic("orders"),
            loop.time,
            TopicPolicies(),
        )

    def take(self, connection: Connection, request: int, *, producer: int = 0, sequence: int = 0) -> int:
        batch = opaque_batch(BODY, producer=producer, sequence=sequence)
        self.queue.take(memoryview(batch), connection, request, asyncio.get_running_loop().time() - WAITED_S)
        return len(batch)

    async def answered(self) -> None:
        await until(lambda: not len(self.queue))


@contextlib.asynccontextmanager
async def open_bench(simulation: Simulation) -> AsyncIterator[Bench]:
    disk = SimulatedDisk(simulation.random)
    noting = NotingDisk(disk)
    log = await open_log(noting, simulation, config=LogConfig())
    noting.writes.clear()
    yield Bench(disk, noting, log)
    await log.abandon()


async def test_batches_that_came_together_are_written_at_once_and_confirmed_in_one_write_for_each_connection(
    simulation: Simulation,
) -> None:
    async with open_bench(simulation) as bench:
        one, two = Connection(), Connection()
        size = bench.take(one, 11)
        bench.take(two, 21)
        bench.take(one, 12)
        assert bench.noting.writes == []
        bench.queue.commit()
        assert [write.buffers for write in bench.noting.writes] == [3], "in the turn in which they came"
        await bench.answered()
        assert one.left == [[(11, Published(0, False)), (12, Published(2, False))]]
        assert two.left == [[(21, Published(1, False))]]
        assert one.bytes == 2 * size
        assert bench.metrics.publish_latency_s.count == bench.metrics.batch_bytes.count == 3
        assert bench.metrics.publish_latency_s.sum >= 3 * WAITED_S, "counted from the time at which they came"


async def test_a_retry_is_told_the_offset_of_the_first_try_also_when_nothing_is_written(simulation: Simulation) -> None:
    async with open_bench(simulation) as bench:
        connection = Connection()
        bench.take(connection, 1, producer=7)
        bench.take(connection, 2, producer=7)
        bench.queue.commit()
        await bench.answered()
        writes = len(bench.noting.writes)
        bench.take(connection, 3, producer=7)
        bench.queue.commit()
        assert connection.left == [
            [(1, Published(0, False)), (2, Published(0, True))],
            [(3, Published(0, True))],
        ]
        await asyncio.sleep(1)
        assert len(bench.noting.writes) == writes


async def test_a_batch_that_has_no_place_is_refused_at_once_and_the_others_are_not_held_up(
    simulation: Simulation,
) -> None:
    async with open_bench(simulation) as bench:
        connection = Connection()
        bench.take(connection, 1)
        with pytest.raises(OutOfSequence):
            bench.take(connection, 2, producer=7, sequence=5)
        elsewhere = opaque_header(BODY, key_hashes=(0x8000, 0x9000))
        with pytest.raises(StaleRoute):
            bench.queue.take(memoryview(assemble(elsewhere, BODY)), connection, 3, 0.0)
        bench.queue.commit()
        await bench.answered()
        assert connection.left == [[(1, Published(0, False))]]


async def test_when_the_log_fails_everything_that_waits_is_refused_and_nothing_is_confirmed(
    simulation: Simulation,
) -> None:
    async with open_bench(simulation) as bench:
        connection = Connection()
        bench.disk.faults = DiskFaults(sync_failure=1.0)
        bench.take(connection, 1)
        bench.queue.commit()
        bench.take(connection, 2)
        bench.queue.commit()
        await bench.answered()
        assert [request for request, _ in connection.refused] == [1, 2]
        assert connection.left == [[]]


@pytest.mark.parametrize("what", poison.shown_by_the_header())
async def test_poison_that_the_header_shows_is_refused_and_nothing_is_stored(simulation: Simulation, what: str) -> None:
    async with open_bench(simulation) as bench:
        connection = Connection()
        with pytest.raises(BatchError):
            bench.queue.take(memoryview(poison.shown_by_the_header()[what]), connection, 1, 0.0)
        bench.take(connection, 2)
        bench.queue.commit()
        await bench.answered()
        assert connection.left == [[(2, Published(0, False))]]


@pytest.mark.parametrize("make", [lambda: poison.bomb(2 << 20), lambda: poison.crowd(200_000)], ids=["bomb", "crowd"])
async def test_a_small_batch_that_would_become_large_is_refused_by_the_limits_of_its_topic(
    simulation: Simulation, make: Callable[[], bytearray]
) -> None:
    async with open_bench(simulation) as bench:
        connection = Connection()
        batch = make()
        assert len(batch) < 10_000
        bench.queue.policies = TopicPolicies(max_decoded_bytes=2 << 20, max_batch_records=199_999)
        with pytest.raises(BatchTooLarge, match="the topic takes"):
            bench.queue.take(memoryview(batch), connection, 1, 0.0)
        bench.queue.policies = TopicPolicies()  # The limits of a topic count from the moment at which they are changed.
        bench.queue.take(memoryview(batch), connection, 2, 0.0)
        bench.queue.commit()
        await bench.answered()
        assert connection.left == [[(2, Published(0, False))]]


async def test_a_repeatable_producer_that_is_forgotten_is_counted_and_told_of_once(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(producers, "MAX_PRODUCERS", 1)
    monkeypatch.setattr(producers, "MAX_DERIVED", 3)
    async with open_bench(simulation) as bench:
        for number, forgotten in enumerate([0, 0, 0, 1, 2, 3]):
            bench.take(Connection(), number, producer=DERIVED + number)
            assert bench.metrics.topic("orders").forgotten_producers == forgotten
        bench.queue.commit()
        await bench.answered()
    assert caplog.text.count("forgets the one that wrote longest ago") == 1
