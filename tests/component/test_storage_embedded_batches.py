"""Batches that are somebody's data: whole, aligned, with right checksums, in the middle of a value. They are never
taken for the log's own, whatever becomes of the header before them."""

from __future__ import annotations

import asyncio

import pytest

from braid.metadata.memory import Fault
from braid.model.batch.header import HEADER_BYTES, MAX_OFFSET, parse_header
from braid.model.errors import InvalidArgument, MetadataUnavailable
from braid.model.ids import Epoch
from braid.storage.cache import HotCache
from braid.storage.chunk import RUN_BYTES, decode_footer
from braid.storage.log.context import LogConfig, LogContext
from braid.storage.log.wal import base_of, wal_name
from braid.storage.segment import SegmentStorage
from braid.testing.sim.disk import SimulatedDisk
from braid.testing.sim.loop import Simulation
from tests.kits.storage import WAL_FOLDER, World, fill, make_batch, read_all, stamped_batch, with_files

FIRST = f"{WAL_FOLDER}/{wal_name(0)}"
SECTOR = 512
BIG = with_files(file_bytes=1 << 20)

foreign_places = pytest.mark.parametrize(
    ("offset", "epoch"),
    [
        pytest.param(2, 1, id="the very next offset"),
        pytest.param(500, 1, id="a later offset"),
        pytest.param(500, 99, id="a later offset and epoch"),
        pytest.param(MAX_OFFSET - 1000, 1, id="an offset near the end of all offsets"),
    ],
)


def mirror(offset: int, epoch: int, *, before: int = 2 * SECTOR - HEADER_BYTES) -> bytearray:
    """A batch whose value holds another batch, in a sector behind the one with its header."""
    return make_batch(1, bytes(before) + stamped_batch(offset, body=b"foreign", epoch=epoch))


async def values(segment: SegmentStorage, offset: int = 0) -> list[bytes]:
    return [read.body for read in await read_all(segment, offset)]


async def goes_on(segment: SegmentStorage, offset: int) -> None:
    """The next record gets this offset, and nothing foreign is read."""
    appended = segment.append(make_batch(1, b"next"))
    await segment.log.confirm(appended)
    assert appended.base_offset == offset
    assert (await values(segment, offset)) == [b"next"]


@pytest.mark.parametrize("seed", range(100))
async def test_a_power_loss_in_the_middle_of_a_mirrored_batch_is_a_torn_tail(seed: int, world: World) -> None:
    segment = await world.a.open()
    await fill(segment, 1)
    segment.append(mirror(500, 1 + seed % 2))
    await asyncio.sleep(world.simulation.random.uniform(0, 0.002))
    world.a.crash()
    segment = await world.a.open()
    assert segment.recovered.damage == []
    assert segment.log.end in (1, 2)
    await goes_on(segment, segment.log.end)


@foreign_places
async def test_a_mirrored_batch_behind_an_unreadable_header_is_not_believed(
    offset: int, epoch: int, world: World
) -> None:
    segment = await world.a.open()
    await fill(segment, 1)
    position = segment.log.files[-1].batch_bytes
    await segment.log.confirm(segment.append(mirror(offset, epoch)))
    world.a.disk.kill()
    world.a.start()
    world.a.disk.corrupt(FIRST, position, bytes(HEADER_BYTES))
    segment = await world.a.open()
    assert segment.recovered.damage == []
    assert segment.recovered.torn_bytes > 0
    await goes_on(segment, 1)


@foreign_places
async def test_damage_to_a_mirrored_batch_ends_at_the_next_batch_of_the_log(
    offset: int, epoch: int, world: World
) -> None:
    segment = await world.a.open()
    await fill(segment, 1)
    position = segment.log.files[-1].batch_bytes
    await segment.log.confirm(segment.append(mirror(offset, epoch)))
    await fill(segment, 3)
    world.a.disk.kill()
    world.a.start()
    world.a.disk.corrupt(FIRST, position, bytes(HEADER_BYTES))
    segment = await world.a.open()
    (damage,) = segment.recovered.damage
    assert (damage.position, damage.first_offset, damage.next_offset) == (position, 1, 2)
    assert len(await values(segment, 2)) == 3
    await goes_on(segment, 5)


async def closed_file(world: World, offset: int, epoch: int) -> tuple[int, int]:
    """A closed file of two runs, the first of which ends with a mirrored batch; without its checkpoint. Returns where
    that batch stands, and the offset of the second run."""
    segment = await world.a.open(BIG)
    await fill(segment, 2)
    position = segment.log.files[-1].batch_bytes
    await segment.log.confirm(segment.append(mirror(offset, epoch, before=RUN_BYTES)))
    await fill(segment, 3)
    await segment.close()
    world.a.disk.kill()
    world.a.start()
    await world.a.noting.remove(f"{WAL_FOLDER}/wal.ckpt")
    second = decode_footer(world.a.disk.content(FIRST)).index.runs[1]
    assert second.offset == 3
    return position, second.offset


@foreign_places
async def test_damage_in_a_closed_file_ends_at_the_next_run_of_its_index(offset: int, epoch: int, world: World) -> None:
    position, next_offset = await closed_file(world, offset, epoch)
    world.a.disk.corrupt(FIRST, position, bytes(HEADER_BYTES))
    segment = await world.a.open(BIG)
    (damage,) = segment.recovered.damage
    assert (damage.position, damage.first_offset, damage.next_offset) == (position, 2, next_offset)
    assert len(await values(segment, next_offset)) == 3
    await goes_on(segment, 6)


@foreign_places
async def test_a_closed_file_whose_beginning_is_lost_is_read_from_the_next_run_of_its_index(
    offset: int, epoch: int, world: World
) -> None:
    position, next_offset = await closed_file(world, offset, epoch)
    world.a.disk.corrupt(FIRST, 0, bytes(position + HEADER_BYTES))
    segment = await world.a.open(BIG)
    (damage,) = segment.recovered.damage
    assert (damage.position, damage.first_offset, damage.next_offset) == (0, 0, next_offset)
    assert len(await values(segment, next_offset)) == 3
    await goes_on(segment, 6)


@pytest.mark.parametrize("checkpoint", [True, False])
async def test_a_lost_first_batch_of_the_newest_file_is_damage_by_the_incarnation_of_the_file_before(
    checkpoint: bool, world: World
) -> None:
    segment = await world.a.open()
    await fill(segment, 2)
    await segment.log.rotate()
    await fill(segment, 1)
    await fill(segment, 1)
    await asyncio.sleep(1)
    world.a.disk.kill()
    world.a.start()
    if not checkpoint:
        await world.a.noting.remove(f"{WAL_FOLDER}/wal.ckpt")
    world.a.disk.corrupt(f"{WAL_FOLDER}/{wal_name(2)}", 0, bytes(HEADER_BYTES))
    segment = await world.a.open()
    assert segment.recovered.checkpoint_used == checkpoint
    (damage,) = segment.recovered.damage
    assert (damage.first_offset, damage.next_offset) == (2, 3)
    await goes_on(segment, 4)


async def test_what_follows_on_a_believed_batch_proves_damage_also_in_a_later_epoch(world: World) -> None:
    segment = await world.a.open()
    for number in range(3):  # one group: offset 2 alone says nothing of offset 1
        segment.append(make_batch(1, b"%d" % number))
    await segment.log.flush()
    position = segment.log.files[-1].batch_bytes
    world.a.disk.kill()
    world.a.start()
    await fill(await world.a.open(), 2)
    world.a.disk.kill()
    world.a.start()
    size = parse_header(world.a.disk.content(FIRST), HEADER_BYTES).size
    world.a.disk.corrupt(FIRST, position - 2 * size, bytes(HEADER_BYTES))
    segment = await world.a.open()
    (damage,) = segment.recovered.damage
    assert (damage.first_offset, damage.next_offset) == (1, 2)
    assert segment.log.end == 5


async def test_each_opening_has_an_incarnation_of_its_own(world: World) -> None:
    for _ in range(3):
        await fill(await world.a.open(BIG), 1)
        world.a.crash()
    content, position, found = world.a.disk.content(FIRST), 0, []
    for _ in range(6):  # a BEGIN and a batch each
        header = parse_header(content, position)
        found.append((int(header.epoch), header.incarnation))
        position += header.size
    assert [epoch for epoch, _ in found] == [1, 1, 2, 2, 3, 3]
    assert len(set(found)) == len({incarnation for _, incarnation in found}) == 3
    assert all(incarnation > 0 for _, incarnation in found)


# ── what a checkpoint says of epochs ─────────────────────────────────────────────────────────────────────────────────


async def open_without_beginning(world: World, config: LogConfig) -> None:
    """An owner that claims, writes its BEGIN, and loses the metadata before it has begun."""
    requests = 0

    def fault(request: str) -> Fault:
        nonlocal requests
        requests += request == "txn"
        return Fault.UNAVAILABLE if request == "txn" and requests > 1 else Fault.NONE

    world.a.store.fault = fault
    with pytest.raises(MetadataUnavailable):
        await world.a.open(config)
    world.a.crash()


async def test_a_checkpoint_knows_every_epoch_of_a_file_also_those_between_owners_that_never_began(
    world: World,
) -> None:
    for _ in range(2):
        await fill(await world.a.open(BIG), 3)
        world.a.crash()
    await open_without_beginning(world, BIG)  # epoch 3 leaves a BEGIN behind those of epoch 2
    await open_without_beginning(world, with_files(file_bytes=512))  # epoch 4 closes the file and begins a new one
    segment = await world.a.open(BIG)
    assert segment.recovered.checkpoint_used
    assert segment.recovered.epochs == {1, 2, 3, 4}
    assert segment.recovered.files[0].epochs == {1, 2, 3}
    await goes_on(segment, 6)


# ── numbers beyond their range ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("number", [MAX_OFFSET + 1, 10**20 - 1])
async def test_a_number_above_the_highest_offset_is_no_wal_name(number: int, world: World) -> None:
    await fill(await world.a.open(), 2)
    world.a.crash()
    name = f"{number:020d}.wal"
    assert base_of(name) is None
    file = await world.a.noting.open(f"{WAL_FOLDER}/{name}", create=True)
    await file.close()
    segment = await world.a.open()
    assert (segment.recovered.foreign, segment.recovered.damage) == ([name], [])
    await goes_on(segment, 2)
    assert name in world.a.wal_names()


async def test_the_log_ends_at_the_highest_offset(world: World) -> None:
    await fill(await world.a.open(), 2)
    world.a.crash()
    assert base_of(wal_name(MAX_OFFSET)) == MAX_OFFSET
    file = await world.a.noting.open(f"{WAL_FOLDER}/{wal_name(MAX_OFFSET - 3)}", create=True)
    await file.close()
    segment = await world.a.open()
    with pytest.raises(InvalidArgument, match="the highest offset is"):
        segment.append(make_batch(4))
    appended = segment.append(make_batch(3))
    await segment.log.confirm(appended)
    assert appended.next_offset == segment.log.end == MAX_OFFSET
    world.a.crash()
    assert (await world.a.open()).log.end == MAX_OFFSET


@pytest.mark.parametrize(
    ("epoch", "incarnation", "said"),
    [(0, 1, "epoch 0"), (1 << 32, 1, f"epoch {1 << 32}"), (1, 0, "incarnation is 0"), (1, 1 << 32, "incarnation is")],
)
async def test_epochs_and_incarnations_fit_their_fields(
    epoch: int, incarnation: int, said: str, simulation: Simulation
) -> None:
    disk = SimulatedDisk(simulation.random)
    with pytest.raises(InvalidArgument, match=said):
        LogContext(
            disk=disk,
            folder="log",
            epoch=Epoch(epoch),
            incarnation=incarnation,
            clock=simulation.clock,
            config=LogConfig(),
            cache=HotCache(),
        )
