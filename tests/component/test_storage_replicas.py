"""A follower's copy of a log: what it takes, what it promises, how it is cut, and how it becomes the log."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from braid.broker.segment_folders import remove_segment
from braid.model.batch.header import HEADER_BYTES, Flag, control_batch, parse_header, stamp
from braid.model.errors import BatchCorrupt, DiskFull, Fenced, LogBusy, OutOfSequence, RecoveryUnsafe
from braid.model.ids import Epoch, Offset
from braid.model.names import SegmentName
from braid.storage.context import StorageMode
from braid.storage.frames import LogFrames
from braid.storage.log import promise as promises
from braid.storage.log.promise import NAME as MARK
from braid.storage.recovery_start import RecoverySource
from braid.storage.replica import ReplicaStorage
from braid.storage.retention import RetentionPolicy
from braid.testing.sim.disk import DiskFaults
from tests.kits.storage import (
    DESCRIPTOR,
    TOPIC,
    WAL_FOLDER,
    World,
    make_batch,
    run,
    stamped_batch,
)
from tests.kits.storage_copies import REPLICATED, append, at, open_owner, open_replica, send
from tests.kits.waiting import until

ROOM_FOR_A_PROMISE = 100
"""Bytes: too few for a file of the log."""


def test_a_copy_holds_what_its_owner_wrote_in_files_that_begin_at_the_same_offsets() -> None:
    async def main(world: World) -> None:
        owner, replica = await open_owner(world.a), await open_replica(world.b)
        await append(owner, 100)
        assert await send(owner, world.a, replica) == at(1, 100) == owner.log.position
        assert [file.base_offset for file in replica._log.files] == [file.base_offset for file in owner.log.files]
        assert len(owner.log.files) > 2

    run(main)


def test_a_copy_is_as_long_after_a_crash_as_it_said() -> None:
    async def main(world: World) -> None:
        owner, replica = await open_owner(world.a), await open_replica(world.b)
        await append(owner, 50)
        held = await send(owner, world.a, replica)
        again = await open_replica(world.b.crash())
        assert (again.position, again.record_epoch) == (held, 1)
        await append(owner, 50)
        assert await send(owner, world.a, again) == at(1, 100)

    run(main)


def test_a_copy_takes_only_what_continues_it() -> None:
    async def main(world: World) -> None:
        replica = await open_replica(world.b)
        await replica.promise(Epoch(2))

        def refused(*batches: bytes, base: int = 0) -> bool:
            try:
                replica.apply(Epoch(2), Offset(base), bytearray(b"".join(batches)))
            except OutOfSequence:
                return True
            return False

        assert refused(stamped_batch(1, epoch=2))  # A gap.
        assert refused(stamped_batch(0, epoch=2), stamped_batch(2, epoch=2))  # A gap inside the piece.
        assert refused(stamped_batch(0, epoch=2), stamped_batch(1, epoch=1))  # A step back in epochs.
        assert refused(stamped_batch(0, epoch=2), base=7)  # Another file.
        assert replica.position == at(0, 0)
        assert not refused(stamped_batch(0, epoch=2))
        assert refused(stamped_batch(0, epoch=2))  # It has that one.

    run(main)


def test_a_copy_takes_only_whole_batches() -> None:
    """The follower compares checksums as an owner does. It takes all of a piece or nothing."""

    async def main(world: World) -> None:
        replica = await open_replica(world.b)
        await replica.promise(Epoch(2))
        damaged = bytearray(stamped_batch(1, epoch=2))
        damaged[HEADER_BYTES] ^= 1
        with pytest.raises(BatchCorrupt):
            replica.apply(Epoch(2), Offset(0), bytearray(stamped_batch(0, epoch=2)) + damaged)
        assert replica.position == at(0, 0)

    run(main)


def test_a_copy_takes_no_more_than_may_wait_for_its_disk() -> None:
    async def main(world: World) -> None:
        batch = stamped_batch(0)
        few = msgspec.structs.replace(REPLICATED, max_pending_bytes=len(batch))
        replica = await ReplicaStorage.open(world.b.context, TOPIC, DESCRIPTOR, few)
        number = replica.apply(Epoch(1), Offset(0), bytearray(batch))
        with pytest.raises(LogBusy):
            replica.apply(Epoch(1), Offset(0), bytearray(stamped_batch(1)))
        assert await replica.held(number) == at(1, 1)
        replica.apply(Epoch(1), Offset(0), bytearray(stamped_batch(1)))

    run(main)


def test_a_promise_outlives_a_crash_and_shuts_lower_epochs_out() -> None:
    async def main(world: World) -> None:
        replica = await open_replica(world.b)
        await replica.promise(Epoch(5))
        again = await open_replica(world.b.crash())
        assert again.promised == 5
        with pytest.raises(Fenced):
            again.apply(Epoch(4), Offset(0), bytearray(stamped_batch(0, epoch=4)))
        with pytest.raises(Fenced):
            await again.promise(Epoch(4))
        await again.promise(Epoch(5))

    run(main)


def test_an_owner_without_room_for_its_first_batch_leaves_a_replicated_log_to_others() -> None:
    """Without replicas it would serve readers. Here only its followers can tell what is confirmed."""

    async def main(world: World) -> None:
        await append(await open_owner(world.a), 20)
        broker = world.a.crash()
        broker.disk.faults = DiskFaults(capacity_bytes=broker.disk._device.names.total_bytes() + ROOM_FOR_A_PROMISE)
        with pytest.raises(DiskFull):
            await open_owner(broker)
        mark = await promises.read(broker.context.disk, WAL_FOLDER)
        assert mark.promised == 2, "it came as far as its first batch"

    run(main)


def test_an_owner_does_not_open_below_what_its_own_disk_has_promised() -> None:
    async def main(world: World) -> None:
        replica = await open_replica(world.b)
        await replica.promise(Epoch(5))
        await replica.close()
        with pytest.raises(Fenced, match="has promised epoch 5"):
            await open_owner(world.b)
        assert (await open_replica(world.b)).promised == 5

    run(main)


def test_a_promise_counts_the_batches_that_were_taken_before_it() -> None:
    """Their owner is told that this disk holds them, and may confirm them after the vote."""

    async def main(world: World) -> None:
        replica = await open_replica(world.b)
        number = replica.apply(Epoch(1), Offset(0), bytearray(stamped_batch(0, epoch=1)))
        held = asyncio.ensure_future(replica.held(number))
        promising = asyncio.ensure_future(replica.promise(Epoch(2)))
        await asyncio.sleep(0)
        with pytest.raises(Fenced):
            replica.apply(Epoch(1), Offset(0), bytearray(stamped_batch(1, epoch=1)))
        assert await promising == at(1, 1) == await held
        replica.apply(Epoch(2), Offset(0), bytearray(stamped_batch(1, epoch=2)))
        assert await replica.promise(Epoch(2)) == at(2, 2), "asked again"

    run(main)


def test_a_copy_on_a_disk_that_was_lost_is_no_member() -> None:
    async def main(world: World) -> None:
        replica = await open_replica(world.b)
        assert not replica.member
        await replica.admit()
        again = await open_replica(world.b.crash())
        assert again.member
        await again.close()
        for path in list(world.b.disk.paths()):
            await world.b.context.disk.remove(path)
        assert not (await open_replica(world.b.start())).member

    run(main)


def test_a_copy_that_is_dropped_is_no_member() -> None:
    async def main(world: World) -> None:
        owner, replica = await open_owner(world.a), await open_replica(world.b)
        await append(owner, 5)
        await send(owner, world.a, replica)
        await replica.promise(Epoch(3))
        await replica.admit()
        await replica.reset()
        assert (replica.position, replica.member, replica.promised) == (at(0, 0), False, 3)

    run(main)


@pytest.mark.parametrize("end", range(0, 60, 7))
def test_a_copy_is_cut_back_to_any_offset_and_goes_on(end: int) -> None:
    async def main(world: World) -> None:
        owner, replica = await open_owner(world.a), await open_replica(world.b)
        await append(owner, 60)
        await send(owner, world.a, replica)
        await replica.cut_back(Offset(end))
        assert replica.position == at(1 if end else 0, end)
        again = await open_replica(world.b.crash())
        assert again.position == at(1 if end else 0, end)
        assert await send(owner, world.a, again) == at(1, 60)
        assert [file.base_offset for file in again._log.files] == [file.base_offset for file in owner.log.files]

    run(main)


@pytest.mark.parametrize("half_milliseconds", range(1, 18))
def test_a_crash_in_the_middle_of_a_cut_leaves_a_beginning_of_the_log(half_milliseconds: int) -> None:
    async def main(world: World) -> None:
        owner, replica = await open_owner(world.a), await open_replica(world.b)
        await append(owner, 100)
        await send(owner, world.a, replica)
        await replica.admit()
        cutting = world.simulation.loop.create_task(replica.cut_back(Offset(30)))
        await asyncio.sleep(half_milliseconds * 0.0005)
        again = await open_replica(world.b.crash())
        await asyncio.gather(cutting, return_exceptions=True)
        assert again.member, "it was taken for damaged"
        assert 30 <= again.position.end <= 100
        await again.cut_back(Offset(30))
        assert await send(owner, world.a, again) == at(1, 100)

    run(main)


def test_an_owner_finds_the_first_batch_that_a_copy_does_not_have() -> None:
    async def main(world: World) -> None:
        owner = await open_owner(world.a)
        await append(owner, 30)
        frames = LogFrames(owner.log, world.a.context.handles)
        begin, size = len(control_batch(Flag.BEGIN)), len(make_batch())
        assert await frames.after(at(0, 0)) == (0, 0)
        assert await frames.after(at(1, 0)) == (0, begin)
        assert await frames.after(at(1, 3)) == (0, begin + 3 * size)
        assert await frames.after(at(1, 30)) == frames.end
        assert await frames.after(at(1, 31)) is None

    run(main)


def test_a_new_copy_begins_at_the_frontier_and_knows_the_producers_before_it() -> None:
    async def main(world: World) -> None:
        owner = await open_owner(world.a)
        await append(owner, 30, producer=7)
        owner.log.note_replicated(Offset(30))
        await owner.export_now()
        await append(owner, 3, producer=8)
        replica = await open_replica(world.b)
        assert (replica.base, replica.position.end) == (30, 30)
        held = await send(owner, world.a, replica)
        await owner.abandon()
        await replica.close()
        heir = await open_owner(world.b, elected=held)
        assert heir.start.source is RecoverySource.LOCAL
        assert heir.append(make_batch(producer=7, sequence=29)).duplicate
        assert heir.append(make_batch(producer=8, sequence=2)).duplicate
        assert not heir.append(make_batch(producer=7, sequence=30)).duplicate

    run(main)


def test_a_new_copy_begins_with_the_file_after_the_frontier() -> None:
    """The file before it is still there. Chunks have the control batch of a later owner at that file's end."""

    async def main(world: World) -> None:
        owner = await open_owner(world.a)
        await append(owner, 3)
        await owner.abandon()
        owner = await open_owner(world.a)
        owner.log.note_replicated(Offset(3))
        await owner.export_now()
        await append(owner, 4)
        assert [file.base_offset for file in owner.log.files] == [0, 3]
        replica = await open_replica(world.b)
        assert (await send(owner, world.a, replica)).end == 7

    run(main)


def test_a_copy_knows_the_producers_of_records_that_retention_deleted_before_it_began() -> None:
    """Where brokers share no storage, the owner's files are the history. No chunk tells of those that are gone."""

    async def main(world: World) -> None:
        for broker in (world.a, world.b):
            broker.start(mode=StorageMode.LOCAL)
        owner = await open_owner(world.a)
        await append(owner, 1, producer=7)
        await append(owner, 99, producer=8)
        owner.log.note_replicated(Offset(100))
        await owner.apply_retention(RetentionPolicy(max_bytes=6_000))
        replica = await open_replica(world.b)
        assert replica.base == owner.earliest > 1
        held = await send(owner, world.a, replica)
        await owner.abandon()
        await replica.close()
        heir = await open_owner(world.b, elected=held)
        assert heir.append(make_batch(producer=7, sequence=0)).duplicate
        assert not heir.append(make_batch(producer=7, sequence=1)).duplicate

    run(main)


def test_a_copy_whose_removal_did_not_come_to_its_end_is_no_witness_and_begins_anew() -> None:
    """The broker stops in the middle, and becomes a replica again. Oldest files go first, so the rest looks like a copy
    that chunks complete."""

    async def main(world: World) -> None:
        for broker in (world.a, world.b):
            broker.start(mode=StorageMode.LOCAL)
        owner, replica = await open_owner(world.a), await open_replica(world.b)
        await append(owner, 60)
        await send(owner, world.a, replica)
        await replica.admit()
        await replica.close()
        files = len([each for each in world.b.disk.paths() if each.endswith(".wal")])
        removal = asyncio.ensure_future(remove_segment(world.b.context, SegmentName.at(TOPIC, DESCRIPTOR)))
        await until(lambda: len([each for each in world.b.disk.paths() if each.endswith(".wal")]) == files - 2)
        removal.cancel()
        replica = await open_replica(world.b)
        assert (replica.position.end, replica.member) == (0, False)

    run(main)


@pytest.mark.parametrize("delay_ms", range(0, 12, 2))
def test_a_copy_that_lost_a_file_in_a_removal_is_no_member(delay_ms: int) -> None:
    async def main(world: World) -> None:
        owner, replica = await open_owner(world.a), await open_replica(world.b)
        await append(owner, 60)
        await send(owner, world.a, replica)
        await replica.admit()
        await replica.close()
        files = [each for each in world.b.disk.paths() if each.endswith(".wal")]
        removal = asyncio.ensure_future(remove_segment(world.b.context, SegmentName.at(TOPIC, DESCRIPTOR)))
        await asyncio.wait([removal], timeout=delay_ms / 1_000)
        world.b.disk.crash()
        await asyncio.wait([removal])
        removal.exception()
        mark = await promises.read(world.b.disk, WAL_FOLDER)
        assert not mark.member or [each for each in world.b.disk.paths() if each.endswith(".wal")] == files

    run(main)


def test_a_copy_that_becomes_the_log_is_exported_where_the_last_chunk_ends() -> None:
    async def main(world: World) -> None:
        owner, replica = await open_owner(world.a), await open_replica(world.b)
        await append(owner, 50)
        held = await send(owner, world.a, replica)
        owner.log.note_replicated(Offset(50))
        await owner.exporter.export_closed()
        assert 0 < owner.catalog.next_offset < 50
        await owner.abandon()
        await replica.close()
        heir = await open_owner(world.b, elected=held)
        await append(heir, 50)
        heir.log.note_replicated(Offset(100))
        await heir.export_now()
        assert heir.catalog.next_offset == 100
        offsets: list[int] = []
        reader = heir.reader(0)
        while batches := await reader.read_available():
            offsets += [header.base_offset for header, _ in batches]
        assert offsets == list(range(100))

    run(main)


def test_a_copy_that_lags_behind_the_vote_is_not_the_log() -> None:
    async def main(world: World) -> None:
        owner, replica = await open_owner(world.a), await open_replica(world.b)
        await append(owner, 20)
        await send(owner, world.a, replica)
        await append(owner, 20)
        await owner.abandon()
        await replica.close()
        with pytest.raises(RecoveryUnsafe, match="up to offset 40"):
            await open_owner(world.b, elected=at(1, 40))

    run(main)


def test_a_copy_without_files_continues_after_the_chunks_if_the_vote_says_no_more() -> None:
    async def main(world: World) -> None:
        owner = await open_owner(world.a)
        await append(owner, 30)
        owner.log.note_replicated(Offset(30))
        await owner.export_now()
        await owner.abandon()
        heir = await open_owner(world.b, elected=at(0, 30))
        assert (heir.start.source, heir.start.offset, heir.start.loss_accepted) == (RecoverySource.CHUNKS, 30, False)

    run(main)


def test_nothing_is_confirmed_readable_or_sealed_before_replicas_hold_it() -> None:
    async def main(world: World) -> None:
        owner = await open_owner(world.a)
        await append(owner, 10)
        assert (owner.log.synced.value, owner.log.confirmed.value, owner.log.durable) == (10, 0, 0)
        assert await owner.reader(0).read_available() == []
        owner.log.note_replicated(Offset(4))
        assert [header.base_offset for header, _ in await owner.reader(0).read_available()] == [0, 1, 2, 3]
        owner.log.note_replicated(Offset(10))
        sealing = world.simulation.loop.create_task(owner.log.seal())
        await asyncio.sleep(1)
        assert not owner.log.seal_is_durable
        assert not sealing.done()
        owner.log.note_seal_replicated()
        assert await sealing == 10
        assert owner.log.seal_is_durable

    run(main)


def test_an_owner_that_restarts_does_not_take_its_own_seal_for_the_end_before_replicas_hold_it() -> None:
    async def main(world: World) -> None:
        owner = await open_owner(world.a)
        await append(owner, 10)
        sealing = world.simulation.loop.create_task(owner.log.seal())
        await asyncio.sleep(0)
        await owner.log.flush()
        assert owner.log.position == at(1, 10, sealed=True)
        sealing.cancel()
        again = await open_owner(world.a.crash())
        assert not again.log.sealed
        assert again.log.confirmed.value == 0
        await append(again, 5)
        assert again.log.position == at(2, 15)

    run(main)


def test_a_seal_of_which_nobody_was_told_does_not_end_the_log() -> None:
    async def main(world: World) -> None:
        owner, replica = await open_owner(world.a), await open_replica(world.b)
        await append(owner, 10)
        sealing = world.simulation.loop.create_task(owner.log.seal())
        await owner.log.flush()
        held = await send(owner, world.a, replica)
        assert held == at(1, 10, sealed=True)
        sealing.cancel()
        await owner.abandon()
        await replica.close()
        heir = await open_owner(world.b, elected=held)
        await append(heir, 5)
        assert heir.log.position == at(2, 15)
        other = await open_replica(world.a)
        assert other.position == at(1, 10, sealed=True)
        assert await send(heir, world.b, other) == at(2, 15)

    run(main)


def test_a_damaged_copy_begins_anew_and_is_no_member() -> None:
    async def main(world: World) -> None:
        owner, replica = await open_owner(world.a), await open_replica(world.b)
        await append(owner, 60)
        await send(owner, world.a, replica)
        await replica.admit()
        first = replica._log.files[0]
        await replica.close()
        file = await world.b.context.disk.open(f"{WAL_FOLDER}/{first.name}")
        await file.write(200, [b"?" * 50], sync=True)
        await file.close()
        await world.b.context.disk.remove(f"{WAL_FOLDER}/wal.ckpt")
        again = await open_replica(world.b.start())
        assert (again.position, again.member) == (at(0, 0), False)
        assert await send(owner, world.a, again) == at(1, 60)

    run(main)


def test_a_member_stays_one_without_files_of_a_log_that_has_ended_and_is_in_chunks() -> None:
    """Such an owner keeps only the checkpoint, which then speaks of files that are not there."""

    async def main(world: World) -> None:
        owner, replica = await open_owner(world.a), await open_replica(world.b)
        await append(owner, 60)
        ending = world.simulation.loop.create_task(owner.end_log())
        await owner.log.flush()
        held = await send(owner, world.a, replica)
        await replica.admit()
        owner.log.note_replicated(held.end)
        owner.log.note_seal_replicated()
        assert await ending == 60
        await owner.export_now()
        assert (frontier := owner.catalog.frontier) is not None
        assert frontier.complete
        await replica.close()
        for name in world.b.wal_names():
            if name.endswith(".wal"):
                await world.b.context.disk.remove(f"{WAL_FOLDER}/{name}")
        assert "wal.ckpt" in world.b.wal_names()
        again = await open_replica(world.b.start())
        assert (again.position.end, again.member) == (60, True)

    run(main)


def test_files_that_chunks_cover_go() -> None:
    async def main(world: World) -> None:
        owner, replica = await open_owner(world.a), await open_replica(world.b)
        await append(owner, 60)
        await send(owner, world.a, replica)
        before = len(replica._log.files)
        owner.log.note_replicated(Offset(60))
        await owner.exporter.export_closed()
        await replica.drop_covered(owner.catalog.next_offset)
        assert len(replica._log.files) < before
        again = await open_replica(world.b.crash())
        assert again.position == at(1, 60)
        assert again.base == replica.base > 0

    run(main)


def test_an_owner_with_followers_leaves_its_own_promise() -> None:
    async def main(world: World) -> None:
        owner = await open_owner(world.a)
        await owner.close()
        assert MARK in world.a.wal_names()
        replica = await open_replica(world.a)
        assert (replica.promised, replica.member) == (1, True)

    run(main)


def test_a_copy_states_its_own_lag() -> None:
    """The owner's lag says what the owner's disk had synced. On another disk it would call torn bytes damage."""

    async def main(world: World) -> None:
        replica = await open_replica(world.b)
        batch = bytearray(stamped_batch(0, epoch=1)) + bytearray(stamped_batch(1, epoch=1))
        second = memoryview(batch)[len(batch) // 2 :]
        stamp(second, parse_header(second), Offset(1), 5, Epoch(1), 77, 0)
        await replica.held(replica.apply(Epoch(1), Offset(0), batch))
        assert parse_header(second).commit_lag == 1
        assert (parse_header(second).append_time, parse_header(second).incarnation) == (5, 77)

    run(main)
