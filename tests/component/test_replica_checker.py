"""The checker of replicas believes disks, and no broker."""

from __future__ import annotations

import pytest

from braid.model.ids import Offset
from braid.storage.log.producers import ProducerTable
from braid.testing.checkers.history import PromiseBroken
from braid.testing.checkers.replica_checker import BatchContent, ReplicaChecker, check_same_producers
from tests.kits.storage import DESCRIPTOR, TOPIC, World, run
from tests.kits.storage_copies import append, open_owner, open_replica, send

SEGMENT = f"{TOPIC}/{DESCRIPTOR}"


def test_a_confirm_needs_a_second_disk_that_holds_the_record_and_the_mark_of_a_member() -> None:
    async def main(world: World) -> None:
        owner, replica = await open_owner(world.a), await open_replica(world.b)
        checker, disks = ReplicaChecker("wal"), {"a": world.a.disk, "b": world.b.disk}
        await append(owner, 3)
        for admitted in (False, True):
            if admitted:
                await replica.admit()
            with pytest.raises(PromiseBroken, match="has confirmed offset 2"):
                checker.check_confirmed(SEGMENT, 2, disks, "a", 2)
        await send(owner, world.a, replica)
        checker.check_confirmed(SEGMENT, 2, disks, "a", 2)
        await append(owner, 1)
        with pytest.raises(PromiseBroken, match="has confirmed offset 3"):
            checker.check_confirmed(SEGMENT, 3, disks, "a", 2)
        await replica.reset()
        with pytest.raises(PromiseBroken, match="members are \\['a'\\]"):
            checker.check_confirmed(SEGMENT, 2, disks, "a", 2)

    run(main)


def test_a_copy_is_compared_with_the_log_batch_by_batch() -> None:
    async def main(world: World) -> None:
        owner, replica = await open_owner(world.a), await open_replica(world.b)
        await append(owner, 30)
        await send(owner, world.a, replica)
        checker = ReplicaChecker("wal")
        log = {each.base_offset: each for each in checker.copies.all_batches(world.a.disk, SEGMENT)}
        checker.check_whole(SEGMENT, world.b.disk, "b", log, 0, 30)
        with pytest.raises(PromiseBroken, match="ends at 30, and the log at 31"):
            checker.check_whole(SEGMENT, world.b.disk, "b", log, 0, 31)
        other: BatchContent = log[7]._replace(body_crc=1)
        with pytest.raises(PromiseBroken, match="and the log BatchContent"):
            checker.check_whole(SEGMENT, world.b.disk, "b", {**log, 7: other}, 0, 30)
        first = next(each for each in world.b.disk.paths() if each.endswith(".wal"))
        await world.b.disk.remove(first)
        with pytest.raises(PromiseBroken, match="begins with"):
            checker.check_whole(SEGMENT, world.b.disk, "b", log, 0, 30)

    run(main)


def test_a_copy_that_does_not_know_a_producer_is_noticed() -> None:
    async def main(world: World) -> None:
        owner = await open_owner(world.a)
        await append(owner, 3, producer=7)
        owner.log.note_replicated(Offset(3))
        table = owner.log._writer._producers
        check_same_producers("s", "b", table, table.copy())
        with pytest.raises(PromiseBroken, match="knows other producers"):
            check_same_producers("s", "b", table, ProducerTable())

    run(main)
