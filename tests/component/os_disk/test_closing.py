"""What happens to calls under way when the real disk closes."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from braid.model.errors import DiskError
from braid.ports.os_disk import OsDisk, OsFile
from tests.kits.os_disk import open_descriptors_of, open_disk

pytestmark = pytest.mark.real_loop


class Gate:
    """Stands in for `os.fdatasync` and holds each call until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()
        self.descriptors: list[str] = []

    def __call__(self, descriptor: int) -> None:
        self.entered.set()
        assert self.opened.wait(30)
        self.descriptors.append(os.readlink(f"/proc/self/fd/{descriptor}"))


async def entered(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.entered.wait, 30)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_close_waits_for_calls_in_flight_and_refuses_new_ones(
    folder: str, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    """Otherwise the number of the descriptor could belong to another file when the thread uses it."""
    gate = Gate()
    monkeypatch.setattr(os, "fdatasync", gate)
    async with open_disk() as disk:
        file = await disk.open(f"{folder}/f", create=True)
        sync = asyncio.create_task(file.sync())
        await entered(gate)
        if cancelled:
            sync.cancel()
        closing = [asyncio.create_task(file.close()) for _ in range(2)]
        other = await disk.open(f"{folder}/g", create=True)
        assert not any(task.done() for task in closing)
        with pytest.raises(DiskError, match="closed"):
            await file.write(0, [b"x"], sync=False)
        gate.opened.set()
        await asyncio.gather(*closing)
        assert gate.descriptors == [f"{folder}/f"]
        assert open_descriptors_of(f"{folder}/f") == []
        await asyncio.gather(sync, return_exceptions=True)
        await file.close()
        await other.close()


async def test_close_waits_for_the_last_of_several_calls(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, quick = Gate(), Gate()
    monkeypatch.setattr(os, "fdatasync", slow)
    monkeypatch.setattr(os, "ftruncate", lambda descriptor, _: quick(descriptor))
    async with open_disk() as disk:
        file = await disk.open(f"{folder}/f", create=True)
        syncing, cutting = asyncio.create_task(file.sync()), asyncio.create_task(file.truncate(0))
        await entered(slow)
        await entered(quick)
        closing = asyncio.create_task(file.close())
        await asyncio.sleep(0)
        quick.opened.set()
        await cutting
        assert open_descriptors_of(f"{folder}/f") == [f"{folder}/f"]
        slow.opened.set()
        await asyncio.gather(syncing, closing)
        assert open_descriptors_of(f"{folder}/f") == []


def test_close_waits_for_a_call_that_was_cancelled_before_a_thread_took_it(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()

    async def main() -> None:
        disk = OsDisk(threads=1)
        first = await disk.open(f"{folder}/f", create=True)
        second = await disk.open(f"{folder}/g", create=True)
        monkeypatch.setattr(os, "fdatasync", gate)
        holding = asyncio.create_task(first.sync())
        await entered(gate)
        waiting = asyncio.create_task(second.sync())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        closing = asyncio.create_task(second.close())
        gate.opened.set()
        await asyncio.gather(holding, closing)
        assert gate.descriptors == [f"{folder}/f", f"{folder}/g"], "what was given is done, on its own file"
        await disk.close()

    asyncio.run(main())
    assert open_descriptors_of(folder) == []


async def test_a_cancelled_open_leaks_no_descriptor(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started, proceed = threading.Event(), threading.Event()
    real = OsDisk._open

    def slow(self: OsDisk, path: str, create: bool) -> OsFile:
        started.set()
        assert proceed.wait(30)
        return real(self, path, create)

    monkeypatch.setattr(OsDisk, "_open", slow)
    disk = OsDisk(threads=1)
    opening = asyncio.create_task(disk.open(f"{folder}/f", create=True))
    assert await asyncio.to_thread(started.wait, 30)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    proceed.set()
    await disk.list(folder)  # The one thread has ended the open before it begins this.
    assert open_descriptors_of(folder) == []
    assert [stat.name for stat in await disk.list(folder)] == ["f"]
    await disk.close()


async def test_closing_the_disk_closes_its_files_and_refuses_calls(folder: str) -> None:
    disk = OsDisk()
    file = await disk.open(f"{folder}/f", create=True)
    await disk.close()
    await disk.close()
    assert open_descriptors_of(folder) == []
    with pytest.raises(DiskError, match="closed"):
        await file.size()
    with pytest.raises(DiskError, match="closed"):
        await disk.list(folder)
    await file.close()
