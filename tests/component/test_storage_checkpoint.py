"""`wal.ckpt`: a hint that is whole or not there."""

from __future__ import annotations

import asyncio

import pytest

from braid.model.ids import Epoch, Offset
from braid.storage.log import checkpoint as checkpoints
from braid.storage.log.checkpoint import ClosedFile, LogCheckpoint
from braid.storage.log.recovery import recover
from braid.testing.sim.disk import SimulatedDisk
from braid.testing.sim.loop import Simulation
from tests.kits.storage import fill, open_log

ONE = ClosedFile("0.wal", Offset(0), Offset(10), 100, 150, (Epoch(1), Epoch(2), Epoch(5)), 77, 99, True)
CHECKPOINT = LogCheckpoint(Offset(25), (ONE,))


def test_a_checkpoint_round_trips() -> None:
    assert checkpoints.decode(checkpoints.encode(CHECKPOINT)) == CHECKPOINT
    assert checkpoints.decode(checkpoints.encode(LogCheckpoint(Offset(0), ()))) == LogCheckpoint(Offset(0), ())


def test_whatever_is_not_a_whole_checkpoint_is_none() -> None:
    data = checkpoints.encode(CHECKPOINT)
    for end in range(len(data)):
        assert checkpoints.decode(data[:end]) is None
    for position in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            assert checkpoints.decode(bytes(flipped)) is None
    assert checkpoints.decode(data + b"\0") is None


@pytest.mark.parametrize("seed", range(30))
async def test_a_crash_while_it_is_replaced_leaves_the_old_one_or_the_new_one(
    seed: int, simulation: Simulation
) -> None:
    disk = SimulatedDisk(simulation.random)
    await disk.make_folder("log")
    assert await checkpoints.read(disk, "log") is None
    await checkpoints.write(disk, "log", CHECKPOINT)
    newer = LogCheckpoint(Offset(30), ())
    writing = asyncio.create_task(checkpoints.write(disk, "log", newer))
    await asyncio.wait([writing], timeout=simulation.random.uniform(0, 0.005))
    whole = writing.done()
    disk.crash()
    await asyncio.wait([writing])
    writing.exception()
    found = await checkpoints.read(disk, "log")
    assert found == newer if whole else found in (CHECKPOINT, newer)
    await checkpoints.write(disk, "log", newer)
    assert await checkpoints.read(disk, "log") == newer, "what a crash left is no obstacle"


async def test_with_or_without_the_checkpoint_recovery_finds_the_same_log(simulation: Simulation) -> None:
    disk = SimulatedDisk(simulation.random)
    log = await open_log(disk, simulation)
    await fill(log, 100)
    await log.close()
    with_hint = await recover(disk, "log")
    assert with_hint.checkpoint_used
    await disk.remove("log/wal.ckpt")
    without = await recover(disk, "log")
    assert not without.checkpoint_used
    for found in (with_hint, without):
        assert (found.base_offset, found.next_offset, found.epochs, found.damage) == (0, 100, {1}, [])
        assert found.producers_complete
    summaries = [
        [(file.name, file.next_offset, file.batch_bytes, file.size, file.closed) for file in found.files]
        for found in (with_hint, without)
    ]
    assert summaries[0] == summaries[1]


async def test_an_old_checkpoint_only_costs_reading(simulation: Simulation) -> None:
    disk = SimulatedDisk(simulation.random)
    log = await open_log(disk, simulation)
    await fill(log, 60)
    await log.close()
    old = disk.content("log/wal.ckpt")
    log = await open_log(disk, simulation, epoch=2)
    await fill(log, 60)
    await log.close()
    await disk.remove("log/wal.ckpt")
    file = await disk.open("log/wal.ckpt", create=True)
    await file.write(0, [old], sync=True)
    await file.close()
    found = await recover(disk, "log")
    assert (found.next_offset, found.epochs, found.damage) == (120, {1, 2}, [])
