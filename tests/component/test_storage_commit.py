"""Group commit: what goes to the disk together and when, who hears of it, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest

from braid.model.batch.header import parse_header
from braid.model.errors import BraidError, BrokenInvariant, DiskError, LogClosed, SyncFailed
from braid.model.ids import Epoch, Offset
from braid.model.topic import Durability
from braid.storage.cache import HotCache
from braid.storage.log.commit import CommitGroup, GroupCommit
from braid.storage.log.context import FileConfig, LogConfig, LogContext
from braid.storage.log.producers import ProducerTable
from braid.storage.log.writer import WalWriter
from braid.testing.sim.disk import DiskFaults, SimulatedDisk
from braid.testing.sim.loop import Simulation
from tests.kits.storage import NotingDisk, make_batch, make_header
from tests.kits.waiting import until

FOLDER = "log"


class Told:
    """An owner that writes down what it hears, and what the disk had been given by then."""

    def __init__(self, disk: NotingDisk) -> None:
        self._disk = disk
        self.commit: GroupCommit
        self.groups: list[CommitGroup] = []
        self.writes_when_told: list[int] = []
        self.synced: list[tuple[int, int]] = []
        self.failure: BraidError | None = None
        self.refusal: BaseException | None = None

    def on_written(self, group: CommitGroup) -> None:
        self.groups.append(group)
        self.writes_when_told.append(len(self._disk.writes))
        if self.refusal is not None:
            raise self.refusal

    def on_synced(self, number: int, next_offset: Offset) -> None:
        self.synced.append((number, next_offset))

    def on_commit_failed(self, error: BraidError) -> None:
        self.failure = self.failure or error
        self.commit.stop()

    @property
    def sizes(self) -> list[int]:
        return [len(group.batches) for group in self.groups]


class Bench:
    def __init__(self, simulation: Simulation, sync_bytes: int, files: FileConfig) -> None:
        self.machine = SimulatedDisk(simulation.random)
        self.disk = NotingDisk(self.machine)
        self.owner = Told(self.disk)
        config = LogConfig(files=files, max_group_bytes=1 << 20)
        if sync_bytes:
            config = msgspec.structs.replace(config, durability=Durability.MEMORY, memory_sync_bytes=sync_bytes)
        context = LogContext(
            disk=self.disk,
            folder=FOLDER,
            epoch=Epoch(1),
            incarnation=7,
            clock=simulation.clock,
            config=config,
            cache=HotCache(),
        )
        self.writer = WalWriter(context, [], ProducerTable())
        self.commit = self.owner.commit = GroupCommit(context, self.writer, self.owner, Offset(0))
        self.next = 0

    def enqueue(self, batches: int) -> None:
        for _ in range(batches):
            self.commit.enqueue(make_batch(), make_header(), Offset(self.next))
            self.next += 1

    async def done(self, records: int) -> None:
        await until(lambda: sum(self.owner.sizes) >= records or self.owner.failure is not None)

    async def warm_up(self) -> None:
        """From here on there is a file with room in it."""
        self.enqueue(1)
        self.commit.begin()
        await self.done(1)
        await asyncio.sleep(0)
        self.disk.writes.clear()


@contextlib.asynccontextmanager
async def open_bench(
    simulation: Simulation, *, sync_bytes: int = 0, files: FileConfig | None = None
) -> AsyncIterator[Bench]:
    bench = Bench(simulation, sync_bytes, files or FileConfig())
    await bench.writer.open()
    yield bench
    bench.commit.stop()
    await bench.commit.end()


async def test_what_was_enqueued_goes_to_the_disk_in_one_write_within_the_call(simulation: Simulation) -> None:
    async with open_bench(simulation) as bench:
        await bench.warm_up()
        bench.enqueue(5)
        assert bench.disk.writes == []
        bench.commit.begin()
        assert [(write.buffers, write.sync) for write in bench.disk.writes] == [(5, True)]
        await bench.done(6)
        assert bench.owner.sizes == [1, 5]


async def test_a_commit_that_begins_soon_takes_what_the_rest_of_the_turn_brings(simulation: Simulation) -> None:
    async with open_bench(simulation) as bench:
        await bench.warm_up()
        bench.enqueue(1)
        bench.commit.begin_soon()
        bench.enqueue(2)
        assert bench.disk.writes == []
        await asyncio.sleep(0)
        assert [write.buffers for write in bench.disk.writes] == [3]


async def test_a_busy_disk_gets_its_next_group_before_the_owner_hears_of_the_last(simulation: Simulation) -> None:
    async with open_bench(simulation) as bench:
        await bench.warm_up()
        for batches in (1, 2, 3):
            bench.enqueue(batches)
            bench.commit.begin()
        assert len(bench.disk.writes) == 1
        await bench.done(7)
        assert bench.owner.sizes == [1, 1, 5]
        assert bench.owner.writes_when_told[1:] == [2, 2]


async def test_a_batch_states_what_was_not_synced_when_it_was_given_to_the_disk(simulation: Simulation) -> None:
    async with open_bench(simulation) as bench:
        await bench.warm_up()
        for _ in range(3):
            bench.enqueue(2)
            bench.commit.begin()
        await bench.done(7)
        lags = [[header.commit_lag for header in group.headers] for group in bench.owner.groups]
        assert lags == [[0], [0, 1], [0, 1, 2, 3]]
        stamped = [parse_header(batch).commit_lag for group in bench.owner.groups for batch in group.batches]
        assert stamped == [0, 0, 1, 0, 1, 2, 3]


async def test_without_a_wish_to_sync_groups_wait_for_enough_bytes_or_for_the_timer(simulation: Simulation) -> None:
    async with open_bench(simulation, sync_bytes=1000) as bench:
        await bench.warm_up()
        bench.enqueue(1)
        bench.commit.begin()
        await bench.done(2)
        assert [group.synced for group in bench.owner.groups] == [False, False]
        assert bench.owner.synced == []
        await asyncio.sleep(1.1)
        assert bench.owner.synced == [(2, 2)]
        bench.enqueue(10)
        bench.commit.begin()
        await bench.done(12)
        assert bench.owner.groups[-1].synced


async def test_a_group_ends_with_the_room_in_the_file_and_the_rest_follows_in_the_next(simulation: Simulation) -> None:
    async with open_bench(simulation, files=FileConfig(file_bytes=1000, first_reserve_bytes=300)) as bench:
        bench.enqueue(30)
        bench.commit.begin()
        await bench.done(30)
        assert bench.owner.failure is None
        assert len(bench.writer.files) > 1
        assert all(file.batch_bytes <= 1_000 for file in bench.writer.files)
        assert [file.next_offset for file in bench.writer.files[:-1]] == [
            file.base_offset for file in bench.writer.files[1:]
        ]


async def test_behind_a_failed_sync_nothing_is_believed_and_nothing_is_begun(simulation: Simulation) -> None:
    async with open_bench(simulation) as bench:
        await bench.warm_up()
        bench.machine.faults = DiskFaults(sync_failure=1.0)
        bench.enqueue(1)
        bench.commit.begin()
        bench.enqueue(4)
        await bench.done(2)
        assert isinstance(bench.owner.failure, SyncFailed)
        assert bench.commit.pending_bytes == 0
        bench.machine.faults = DiskFaults()
        bench.enqueue(1)
        bench.commit.begin()
        bench.commit.begin_soon()
        bench.commit.want_sync()
        await asyncio.sleep(10)
        assert bench.owner.sizes == [1]
        assert len(bench.disk.writes) == 1


async def test_nobody_hears_of_a_group_that_the_disk_takes_after_the_stop(simulation: Simulation) -> None:
    async with open_bench(simulation) as bench:
        await bench.warm_up()
        bench.enqueue(1)
        bench.commit.begin()
        bench.commit.stop()
        await bench.commit.end()
        assert bench.owner.sizes == [1]
        assert bench.owner.failure is None


async def test_an_owner_that_may_not_confirm_ends_the_commit_while_the_next_group_is_under_way(
    simulation: Simulation,
) -> None:
    async with open_bench(simulation) as bench:
        await bench.warm_up()
        bench.owner.refusal = LogClosed("the lease is over")
        bench.enqueue(1)
        bench.commit.begin()
        bench.enqueue(1)
        await until(lambda: bench.owner.failure is not None)
        assert bench.owner.failure is bench.owner.refusal
        assert len(bench.disk.writes) == 2
        await bench.commit.end()
        assert bench.owner.sizes == [1, 1], "nothing of the second group"


async def test_a_group_is_not_believed_if_the_next_one_could_not_be_given_to_the_disk(simulation: Simulation) -> None:
    async with open_bench(simulation) as bench:
        await bench.warm_up()
        bench.enqueue(1)
        bench.commit.begin()
        bench.enqueue(1)
        assert bench.writer._current is not None
        closing = asyncio.create_task(bench.writer._current.close())
        await until(lambda: bench.owner.failure is not None)
        await closing
        assert isinstance(bench.owner.failure, DiskError)
        assert bench.owner.sizes == [1]
        await asyncio.wait_for(bench.commit.end(), 10)


async def test_a_step_in_a_task_that_is_cancelled_before_it_began_ends_the_commit(simulation: Simulation) -> None:
    async with open_bench(simulation) as bench:
        await bench.warm_up()
        bench.commit.want_rotation()
        await asyncio.sleep(0)
        assert bench.commit._task is not None
        bench.commit._task.cancel()
        await asyncio.wait_for(bench.commit.rotated(), 10)
        assert isinstance(bench.owner.failure, BrokenInvariant)
        with pytest.raises(BrokenInvariant, match="CancelledError"):
            raise bench.owner.failure
