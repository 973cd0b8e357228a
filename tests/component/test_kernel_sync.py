"""Syncs by the kernel: each ends once, on the loop, with what really happened."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

import caio
import pytest

from braid.ports import kernel_sync
from braid.ports.kernel_sync import SYNCS_AT_ONCE, KernelSyncs
from tests.kits.kernel_aio import needs_kernel_aio

pytestmark = pytest.mark.real_loop


@contextlib.asynccontextmanager
async def open_syncs() -> AsyncIterator[KernelSyncs]:
    syncs = KernelSyncs(asyncio.get_running_loop())
    yield syncs
    syncs.close()


def with_syncs(main: Callable[[KernelSyncs], Awaitable[None]]) -> None:
    async def run() -> None:
        async with open_syncs() as syncs:
            await main(syncs)

    asyncio.run(run())


@pytest.fixture
def descriptor(tmp_path: Path) -> Any:
    number = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    yield number
    os.close(number)


class FakeContext:
    """A kernel whose syncs end with these results, all at once."""

    results: ClassVar[list[int]] = []
    fileno = -1

    def __init__(self, _count: int) -> None:
        self.fileno = os.eventfd(0, os.EFD_NONBLOCK)
        self._operations: list[Any] = []

    def submit(self, operation: Any) -> int:
        self._operations.append(operation)
        os.eventfd_write(self.fileno, 1)
        return 1

    def poll(self) -> int:
        return os.eventfd_read(self.fileno)

    def process_events(self) -> None:
        for operation, result in zip(self._operations, self.results, strict=True):
            operation.callback(result)
        self._operations.clear()


class FakeOperation:
    callback: Callable[[int], None]

    @classmethod
    def fdsync(cls, _descriptor: int) -> FakeOperation:
        return cls()

    def set_callback(self, callback: Callable[[int], None]) -> None:
        self.callback = callback


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    class FakeAio:
        Context = FakeContext
        Operation = FakeOperation

    monkeypatch.setattr(FakeContext, "results", [])
    monkeypatch.setattr(kernel_sync, "load", lambda: FakeAio)
    return FakeContext.results


@needs_kernel_aio
async def test_a_sync_ends_with_0_and_not_before_the_loop_turns(descriptor: int) -> None:
    async with open_syncs() as syncs:
        ended: asyncio.Future[int] = syncs.loop.create_future()
        assert syncs.start(descriptor, ended.set_result)
        assert not ended.done()
        assert await asyncio.wait_for(ended, 30) == 0


@needs_kernel_aio
async def test_many_syncs_at_once_each_end_once(descriptor: int) -> None:
    async with open_syncs() as syncs:
        ended: asyncio.Queue[int] = asyncio.Queue()
        for _ in range(20):
            begun = [syncs.start(descriptor, ended.put_nowait) for _ in range(SYNCS_AT_ONCE)]
            assert [await asyncio.wait_for(ended.get(), 30) for each in begun if each] == [0] * sum(begun)
            assert all(begun)
        assert ended.empty()


@needs_kernel_aio
async def test_there_is_an_end_to_what_is_taken_at_once(descriptor: int) -> None:
    async with open_syncs() as syncs:
        ended: asyncio.Queue[int] = asyncio.Queue()
        begun = [syncs.start(descriptor, ended.put_nowait) for _ in range(SYNCS_AT_ONCE + 5)]
        assert begun == [True] * SYNCS_AT_ONCE + [False] * 5
        for _ in range(SYNCS_AT_ONCE):
            await asyncio.wait_for(ended.get(), 30)
        assert syncs.start(descriptor, ended.put_nowait)
        await asyncio.wait_for(ended.get(), 30)


@pytest.mark.parametrize("refusal", [0, OverflowError(), ValueError(), SystemError()])
async def test_what_the_kernel_refuses_is_not_begun(
    descriptor: int, refusal: int | Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(FakeContext):
        def submit(self, operation: Any) -> int:
            if isinstance(refusal, Exception):
                raise refusal
            return refusal

    class FakeAio:
        Context = Refusing
        Operation = FakeOperation

    monkeypatch.setattr(kernel_sync, "load", lambda: FakeAio)
    async with open_syncs() as syncs:
        assert not syncs.start(descriptor, lambda _: pytest.fail("it was not begun"))


@needs_kernel_aio
def test_closing_tells_of_what_is_under_way_also_without_the_loop(descriptor: int) -> None:
    heard: list[int] = []

    async def begin() -> KernelSyncs:
        syncs = KernelSyncs(asyncio.get_running_loop())
        for _ in range(5):
            assert syncs.start(descriptor, heard.append)
        return syncs

    syncs = asyncio.run(begin())
    syncs.close()
    assert heard == [0] * 5


@needs_kernel_aio
async def test_what_cannot_be_synced_is_not_begun() -> None:
    async with open_syncs() as syncs:
        reader, writer = os.pipe()
        assert not syncs.start(writer, lambda _: pytest.fail("it was not begun"))
        os.close(reader)
        os.close(writer)
        assert not syncs.start(writer, lambda _: pytest.fail("it was not begun"))
        await asyncio.sleep(0.01)


async def test_the_number_of_an_error_is_told(results: list[int]) -> None:
    async with open_syncs() as syncs:
        results.extend([(1 << 64) - errno.EIO, 0, (1 << 64) - errno.ENOSPC])
        ended: asyncio.Queue[int] = asyncio.Queue()
        for _ in results:
            syncs.start(3, ended.put_nowait)
        assert [await asyncio.wait_for(ended.get(), 30) for _ in results] == [errno.EIO, 0, errno.ENOSPC]


async def test_one_who_raises_does_not_keep_the_others_from_hearing(results: list[int]) -> None:
    async with open_syncs() as syncs:
        results.extend([0, 0, 0])
        raised: list[object] = []
        syncs.loop.set_exception_handler(lambda _, context: raised.append(context.get("exception")))
        ended: asyncio.Queue[int] = asyncio.Queue()

        def fail(_: int) -> None:
            raise ValueError("mine")

        for on_synced in (ended.put_nowait, fail, ended.put_nowait):
            syncs.start(3, on_synced)
        assert [await asyncio.wait_for(ended.get(), 30) for _ in range(2)] == [0, 0]
        assert [str(each) for each in raised] == ["mine"]


async def test_a_wake_up_without_an_event_is_no_error(results: list[int]) -> None:
    async with open_syncs() as syncs:
        assert not results
        syncs._on_event()


@needs_kernel_aio
def test_closing_leaves_no_descriptor_behind(descriptor: int) -> None:
    async def main(syncs: KernelSyncs) -> None:
        ended: asyncio.Future[int] = syncs.loop.create_future()
        syncs.start(descriptor, ended.set_result)
        await ended

    with_syncs(main)
    before = len(os.listdir("/proc/self/fd"))
    kept: list[KernelSyncs] = []

    async def keep(syncs: KernelSyncs) -> None:
        await main(syncs)
        kept.append(syncs)

    for _ in range(3):
        with_syncs(keep)
    assert len(os.listdir("/proc/self/fd")) == before


@needs_kernel_aio
async def test_a_system_without_them_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    assert KernelSyncs.of(loop) is not None
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "caio", None)
        assert KernelSyncs.of(loop) is None
    with monkeypatch.context() as patch:
        patch.setattr(caio, "linux_aio", None)
        assert KernelSyncs.of(loop) is None

    class Forbidden:
        Operation = FakeOperation

        @staticmethod
        def Context(_count: int) -> Any:  # noqa: N802 (caio's name)
            raise SystemError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(kernel_sync, "load", lambda: Forbidden)
    assert KernelSyncs.of(loop) is None
