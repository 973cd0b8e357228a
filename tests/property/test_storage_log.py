"""A segment against a list: whatever is done to it in whatever order, it holds what the list holds (I1, I2, I10)."""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from braid.model.topic import Durability
from braid.storage.context import StorageMode
from braid.storage.log.context import FileConfig, LogConfig
from braid.storage.retention import RetentionPolicy
from braid.storage.segment import SegmentStorage
from tests.kits.examples import share
from tests.kits.storage import Read, World, make_batch, read_all, run


class Step(Enum):
    APPEND = "append"
    """Batches of some size, and wait until they are confirmed."""
    QUEUE = "queue"
    """The same, without waiting: a crash may lose them."""
    RETRY = "retry"
    ROTATE = "rotate"
    REOPEN = "reopen"
    KILL = "kill"
    CRASH = "crash"
    EXPORT = "export"
    RECLAIM = "reclaim"
    READ = "read"
    MOVE = "move"


class Operation(NamedTuple):
    step: Step
    number: int
    """How many, how large, from where: each step takes of it what it needs."""


operations = st.lists(st.builds(Operation, st.sampled_from(Step), st.integers(0, 40)), min_size=8, max_size=40)


class Model:
    """The segment, and the list of what was appended to it."""

    def __init__(self, world: World, mode: StorageMode, durability: Durability, file_bytes: int) -> None:
        self.world = world
        self.mode = mode
        self.config = LogConfig(
            durability=durability, files=FileConfig(file_bytes=file_bytes, first_reserve_bytes=512), memory_sync_s=0.01
        )
        self.broker = world.a.start(mode=mode, cache_bytes=1_500, max_open=2)
        self.appended: list[Read] = []
        self.confirmed = 0
        """How many of the list's batches were confirmed at the level that a crash respects."""
        self.segment: SegmentStorage

    async def open(self) -> None:
        self.broker.start(mode=self.mode, cache_bytes=1_500, max_open=2)
        self.segment = await self.broker.open(self.config)
        assert self.segment.recovered.damage == []
        assert self.confirmed <= await self.check() <= len(self.appended)
        del self.appended[self.kept :]
        assert self.segment.log.end == self.end
        self.confirmed = len(self.appended)

    @property
    def end(self) -> int:
        return self.appended[-1].offset + self.appended[-1].records if self.appended else 0

    async def check(self) -> int:
        """What is stored is a first part of the list; returns how long it is."""
        stored = await read_all(self.segment, 0, 700)
        assert stored == self.appended[: len(stored)]
        self.kept = len(stored)
        return self.kept

    def append(self, number: int) -> None:
        for each in range(number % 7 + 1):
            body = bytes([number]) * ((number * 37 + each * 411) % 900)
            sequence = len(self.appended)
            count = 1 + number % 3
            appended = self.segment.append(make_batch(count, body, producer=1, sequence=self.end))
            assert (appended.base_offset, appended.duplicate) == (self.end, False), f"batch {sequence}"
            self.appended.append(Read(self.end, count, body))

    async def do(self, step: Step, number: int) -> None:
        segment = self.segment
        match step:
            case Step.APPEND:
                self.append(number)
                await segment.log.confirmed.reached(self.end)
                if self.config.durability is Durability.FSYNC:
                    self.confirmed = len(self.appended)
            case Step.QUEUE:
                self.append(number)
                await asyncio.sleep(number / 10_000)
            case Step.RETRY:
                for batch in self.appended[-1 - number % 8 :]:
                    again = segment.append(make_batch(batch.records, batch.body, producer=1, sequence=batch.offset))
                    assert (again.base_offset, again.duplicate) == (batch.offset, True)
            case Step.ROTATE:
                await segment.log.rotate()
                self.confirmed = len(self.appended)
            case Step.REOPEN:
                await segment.close()
                self.confirmed = len(self.appended)
                await self.open()
            case Step.KILL:
                await segment.exporter.stop()
                self.broker.disk.kill()
                await self.open()
            case Step.CRASH:
                await segment.exporter.stop()
                self.broker.disk.crash()
                await self.open()
            case Step.EXPORT:
                await segment.exporter.export_closed()
            case Step.RECLAIM:
                await segment.apply_retention(RetentionPolicy(), keep_local_bytes=number * 200)
            case Step.READ:
                await self.read(number)
            case Step.MOVE:
                sealed = await segment.hand_over()
                assert sealed.last_committed_offset == self.end - 1
                self.confirmed = len(self.appended)
                self.broker = self.world.b if self.broker is self.world.a else self.world.a
                await self.open()

    async def read(self, number: int) -> None:
        confirmed = self.segment.log.confirmed.value
        start = confirmed * number // 40
        if start == confirmed:
            assert await self.segment.reader(start).read_available() == []
            return
        found = await read_all(self.segment, start, number * 50)
        assert found == [
            batch
            for batch in self.appended
            if batch.offset + batch.records > start and batch.offset < found[-1].offset + found[-1].records
        ]
        assert found[-1].offset + found[-1].records >= confirmed


@settings(deadline=None, derandomize=True, max_examples=share(300))
@given(
    operations,
    st.sampled_from([StorageMode.SHARED_FS, StorageMode.LOCAL]),
    st.sampled_from([Durability.FSYNC, Durability.FSYNC, Durability.MEMORY]),
    st.sampled_from([600, 2_000, 20_000]),
    st.integers(0, 1_000),
)
def test_a_segment_is_a_list(
    steps: list[Operation], mode: StorageMode, durability: Durability, file_bytes: int, seed: int
) -> None:
    async def main(world: World) -> None:
        model = Model(world, mode, durability, file_bytes)
        await model.open()
        for operation in steps:
            await model.do(*operation)
        await model.do(Step.REOPEN, 0)
        await model.do(Step.MOVE, 0)
        assert await model.check() == len(model.appended)

    run(main, seed)
