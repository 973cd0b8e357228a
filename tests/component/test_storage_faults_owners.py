"""Owners that come back, meet each other, and find metadata that is wrong (I1, I2, I3)."""

from __future__ import annotations

import msgspec
import pytest

from braid.metadata import paths
from braid.metadata.memory import MemoryStore
from braid.metadata.store import Delete, Put
from braid.model.errors import (
    Fenced,
    LogSealed,
    MetadataUnavailable,
    MetadataUncertain,
    RecoveryConflict,
    RecoveryUnsafe,
)
from braid.model.ids import Offset, Revision
from braid.storage.history.catalog import Frontier, SealedState
from braid.storage.history.manifest import read_segment_manifest
from braid.storage.retention import RetentionPolicy
from braid.storage.segment import SegmentStorage
from tests.kits.fault_scenes import (
    DESCRIPTOR,
    TOPIC,
    Broker,
    Scene,
    batch,
    read_all,
    refusal,
)

pytestmark = pytest.mark.seed(0)


FRONTIER = paths.current_chunk(TOPIC, DESCRIPTOR)


async def test_a_metadata_read_error_during_opening_is_raised_and_never_offset_zero(scene: Scene) -> None:
    """Seen elsewhere: A metadata *read error* during recovery is taken as "empty topic": offset 0."""
    a, b = scene.broker("a"), scene.broker("b")
    segment = await a.open()
    await scene.publish(segment, 5)
    await a.run(segment.hand_over())
    b.store.disconnect()
    with pytest.raises(MetadataUnavailable):
        await b.open()
    assert b.disk.paths() == []
    b.store.reconnect()
    segment = await b.open()
    assert segment.log.end == 5
    await scene.check(segment)


async def test_metadata_that_is_older_than_the_disk_opens_nothing_and_names_both(scene: Scene) -> None:
    a = scene.broker("a")
    segment = await a.open()
    await scene.publish(segment, 5)
    old = await scene.store.get(FRONTIER)
    assert old is not None
    a.kill()
    segment = await a.open()
    await scene.publish(segment, 5)
    a.kill()
    await scene.store.txn([], [Put(FRONTIER, old.value)])
    content = {path: a.disk.content(path) for path in a.disk.paths()}
    with pytest.raises(RecoveryConflict, match=r"written in epoch 2, but the metadata knows only 1 "):
        await a.open(epoch=3)
    a.store = MemoryStore(scene.clock)
    with pytest.raises(RecoveryConflict, match=r"local batches of epoch 2, but no owner was ever recorded"):
        await a.open(epoch=3)
    assert {path: a.disk.content(path) for path in a.disk.paths()} == content


async def test_chunks_beyond_the_local_files_are_a_conflict_that_names_both(scene: Scene) -> None:
    a = scene.broker("a")
    segment = await a.open()
    await scene.publish(segment, 5)
    a.kill()
    frontier = (await scene.catalog()).frontier
    assert frontier is not None
    ahead = msgspec.structs.replace(frontier, next_offset=Offset(9))
    await scene.store.txn([], [Put(FRONTIER, msgspec.json.encode(ahead))])
    with pytest.raises(RecoveryConflict, match=r"chunks reach offset 9, but the local batches .* end at 5"):
        await a.open()


class Lease:
    held = True

    def is_valid(self) -> bool:
        return self.held


async def replaced(scene: Scene) -> tuple[Broker, SegmentStorage, Lease, SegmentStorage]:
    """A zombie on `a` with an exported, a closed and an open file, whose lease is over; and its successor on `b`."""
    a, b, lease = scene.broker("a"), scene.broker("b"), Lease()
    zombie = await a.open(may_confirm=lease.is_valid)
    await scene.publish(zombie, 4)
    await zombie.log.rotate()
    await zombie.exporter.export_closed()
    lost = await scene.publish(zombie, 2)
    await zombie.log.rotate()
    lost += await scene.publish(zombie, 1)
    lease.held = False
    successor = await b.open(accept_loss=True)
    for offset in lost:
        del scene.confirmed[offset]
    await scene.publish(successor, 5)
    return a, zombie, lease, successor


async def metadata(scene: Scene) -> object:
    return (await scene.store.list("/")).entries


async def test_an_owner_whose_lease_is_over_takes_and_confirms_nothing(scene: Scene) -> None:
    _, zombie, _, successor = await replaced(scene)
    end = zombie.log.end
    with pytest.raises(Fenced):
        zombie.append(batch(1_000))
    assert zombie.log.end == end
    await scene.check(successor)


async def test_what_was_taken_while_the_lease_held_is_not_confirmed_when_the_disk_is_slower_than_the_lease(
    scene: Scene,
) -> None:
    lease = Lease()
    segment = await scene.broker("a").open(may_confirm=lease.is_valid)
    appended = segment.append(batch(0))
    lease.held = False
    with pytest.raises(Fenced):
        await segment.log.confirm(appended)
    assert segment.log.confirmed.value == 0
    with pytest.raises(Fenced):
        segment.append(batch(1))


async def test_what_was_synced_before_the_lease_ended_is_not_confirmed_after_it(scene: Scene) -> None:
    lease = Lease()
    segment = await scene.broker("a").open(may_confirm=lease.is_valid)
    appended = segment.append(batch(0))
    await segment.log.flush()
    lease.held = False
    with pytest.raises(Fenced):
        await segment.log.confirm(appended)


async def attempt(work: str, zombie: SegmentStorage, successor: SegmentStorage) -> None:
    match work:
        case "export":
            await zombie.exporter.export_closed()
        case "hand over":
            await zombie.hand_over()
        case "retention":
            await zombie.apply_retention(RetentionPolicy(max_age_s=-1))
        case "remove":
            await zombie.catalog.remove(zombie.catalog.chunks[:1])
        case "begin":
            await zombie.catalog.begin()
        case "seal":
            # Even if it knew all that its successor has written.
            zombie.catalog.frontier = successor.catalog.frontier
            last = Offset(zombie.catalog.next_offset - 1)
            await zombie.catalog.seal(SealedState(last, zombie.log.epoch, "a", 0), [], [])


@pytest.mark.parametrize("work", ["export", "hand over", "retention", "remove", "seal", "begin"])
async def test_a_replaced_owner_changes_no_metadata_and_no_history(work: str, scene: Scene) -> None:
    """Seen elsewhere: No fencing: a broker that was cut off and comes back deletes or overwrites shared data."""
    a, zombie, lease, successor = await replaced(scene)
    await successor.log.rotate()
    await successor.exporter.export_closed()
    before = await metadata(scene)
    manifest = await read_segment_manifest(scene.objects, TOPIC, DESCRIPTOR)
    history = {stat.name for stat in await scene.objects.list(TOPIC)}
    lease.held = True  # Even if it wrongly believed that it still had it.
    # One that even takes its successor for itself sees a write of "its own" that it cannot remember.
    with pytest.raises(MetadataUncertain if work == "seal" else Fenced):
        await a.run(attempt(work, zombie, successor))
    assert await metadata(scene) == before
    assert await read_segment_manifest(scene.objects, TOPIC, DESCRIPTOR) == manifest
    assert history <= {stat.name for stat in await scene.objects.list(TOPIC)}


async def test_a_replaced_owners_manifest_is_never_the_newest(scene: Scene) -> None:
    a, zombie, _, successor = await replaced(scene)
    await successor.log.rotate()
    await successor.exporter.export_closed()
    await a.run(zombie.exporter.write_manifest())
    await a.run(zombie.sweep())
    manifest = await read_segment_manifest(scene.objects, TOPIC, DESCRIPTOR)
    assert manifest is not None
    assert (manifest.epoch, manifest.next_offset) == (successor.log.epoch, 9)
    await scene.check(successor)


async def test_a_zombie_that_comes_back_with_an_old_epoch_is_fenced(scene: Scene) -> None:
    a, _, _, successor = await replaced(scene)
    a.kill()
    before = await metadata(scene)
    for epoch in (1, 2):
        assert isinstance(await refusal(a.open(epoch=epoch)), Fenced | RecoveryUnsafe | RecoveryConflict)
    assert await metadata(scene) == before
    # With its successor's seal it is an owner like any other; its own tail, which was given up, is put aside.
    await successor.hand_over()
    with pytest.raises(Fenced):
        await a.open(epoch=2)
    segment = await a.open(epoch=3)
    await scene.check(segment)
    assert segment.log.end == 9


async def test_a_log_never_opens_in_an_epoch_that_its_own_files_have_passed(scene: Scene) -> None:
    a = scene.broker("a")
    await scene.publish(await a.open(epoch=7), 2)
    a.kill()
    for epoch in (6, 7):
        with pytest.raises(Fenced):
            await a.open(epoch=epoch)
    await scene.check(await a.open(epoch=8))


async def test_what_an_unseated_owner_had_confirmed_is_never_given_up_in_silence(scene: Scene) -> None:
    """Seen elsewhere: After a crash the new owner reuses offsets that were acked but not exported."""
    a, b = scene.broker("a"), scene.broker("b")
    segment = await a.open()
    await scene.publish(segment, 5)
    a.power_loss()
    before = await metadata(scene)
    with pytest.raises(RecoveryUnsafe, match=r"epoch 1 did not seal.*accept the loss"):
        await b.open()
    assert await metadata(scene) == before
    segment = await b.open(accept_loss=True)
    assert segment.start.loss_accepted


async def test_a_sealed_log_stays_sealed_and_can_be_opened_as_often_as_one_likes(scene: Scene) -> None:
    a = scene.broker("a")
    segment = await a.open()
    await scene.publish(segment, 3)
    assert await segment.log.seal() == 3
    for _ in range(3):
        a.power_loss()
        segment = await a.open()
        assert segment.log.sealed
        await scene.check(segment)
        with pytest.raises(LogSealed):
            segment.append(batch(99))


@pytest.mark.parametrize("rotated", [True, False])
async def test_a_sealed_log_stays_sealed_when_it_moves(rotated: bool, scene: Scene) -> None:
    a, b = scene.broker("a"), scene.broker("b")
    segment = await a.open()
    await scene.publish(segment, 3)
    if rotated:
        await segment.log.rotate()
    await segment.log.seal()
    await a.run(segment.hand_over())
    manifest = await read_segment_manifest(scene.objects, TOPIC, DESCRIPTOR)
    assert manifest is not None
    assert manifest.sealed
    for broker in (b, a):
        segment = await broker.open()
        assert segment.log.sealed
        await scene.check(segment)
        await broker.run(segment.hand_over())


async def test_one_broker_can_lose_and_regain_a_log_with_the_same_file_names(scene: Scene) -> None:
    """Open files, footers and caches of the first stay must not be taken for those of the second."""
    a, b = scene.broker("a"), scene.broker("b")
    context = a.context()
    segment = await a.open(context=context)
    for size in (400, 40, 1_200):
        await scene.publish(segment, 60, size=size)
    await segment.log.rotate()
    await scene.check(segment)
    await segment.abandon()
    scene.confirmed.clear()
    usurper = await b.open(accept_loss=True)
    await usurper.hand_over()
    segment = await a.open(context=context)
    assert segment.log.end == 0
    for size in (40, 3_000, 200):
        await scene.publish(segment, 60, size=size)
    await segment.log.rotate()
    await scene.check(segment)
    assert await read_all(segment.reader(170)) == [(n, scene.confirmed[n]) for n in range(170, 180)]


async def test_the_frontier_that_vanished_is_a_lost_fence_not_a_fresh_start(scene: Scene) -> None:
    a = scene.broker("a")
    segment = await a.open()
    await scene.publish(segment, 4)
    await segment.log.rotate()
    await scene.store.txn([], [Delete(FRONTIER)])
    with pytest.raises(Fenced, match="the frontier is gone"):
        await segment.exporter.export_closed()


async def test_each_write_of_the_frontier_is_unique(scene: Scene) -> None:
    a = scene.broker("a")
    segment = await a.open()
    values: set[bytes] = set()
    for _ in range(4):
        await scene.publish(segment, 1)
        await segment.log.rotate()
        await segment.exporter.export_closed()
        entry = await scene.store.get(FRONTIER)
        assert entry is not None
        assert entry.revision == segment.catalog.revision != Revision(0)
        assert isinstance(msgspec.json.decode(entry.value, type=Frontier), Frontier)
        values.add(entry.value)
    assert len(values) == 4
