"""What a restore makes of a backup and of the history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from braid.cli.backup import snapshot as snapshots
from braid.cli.backup.restoring import groups
from braid.cli.backup.rules import EPOCH_JUMP, DiskLog, History, Plan, first_revision, plan_restore
from braid.cli.backup.snapshot import Header, Snapshot
from braid.metadata import paths
from braid.metadata.memory import MemoryStore
from braid.metadata.store import Put
from braid.model.errors import InvalidArgument
from braid.model.ids import Epoch, Offset, Revision, SegmentId
from braid.model.layout import Layout
from braid.model.names import SegmentName, TopicName
from braid.model.ownership import Ownership, OwnershipState
from braid.model.stored_record import decode, encode
from braid.model.topic import Topic
from braid.model.transition import plan_split
from braid.ports.clock import SystemClock
from braid.storage.history.catalog import ChunkDescriptor, Frontier, SealedState
from braid.storage.history.manifest import SegmentManifest, TopicManifest

TOPIC = "public/default/orders"
SEGMENT = "0000-ffff-0"
LAYOUT = Layout.initial(1)
PLAN = plan_split(LAYOUT, 0)
SPLIT = msgspec.structs.replace(LAYOUT, next_segment_id=SegmentId(3)).replaced(
    PLAN.parents, dict(zip((SegmentId(1), SegmentId(2)), PLAN.ranges, strict=True))
)


def chunk(base: int, end: int, epoch: int = 3) -> ChunkDescriptor:
    name = f"{base:020d}-{end:020d}-{epoch:010d}.chunk"
    return ChunkDescriptor(Offset(base), Offset(end), Epoch(epoch), name, 100, 90, 1, 2, 0, 9)


def frontier(next_offset: int = 10, epoch: int = 3, **changes: Any) -> Frontier:
    given: dict[str, Any] = {"begun": True, "continues": Epoch(2), "epochs": ((3, 0),), **changes}
    return Frontier(epoch=Epoch(epoch), holder="one", next_offset=Offset(next_offset), **given)


def record(**changes: Any) -> Ownership:
    given: dict[str, Any] = {"state": OwnershipState.SERVING, "owner": "one", "epoch": Epoch(3), **changes}
    return Ownership(**given)


def manifest(next_offset: int, epoch: int, *chunks: ChunkDescriptor, **changes: Any) -> SegmentManifest:
    given: dict[str, Any] = {"sealed": False, "epochs": ((3, 0), (epoch, next_offset)) if epoch > 3 else ((3, 0),)}
    return SegmentManifest(
        TOPIC, SEGMENT, Revision(500), Epoch(epoch), Offset(next_offset), chunks=chunks, **{**given, **changes}
    )


def backup(
    owner: Ownership | None = None, front: Frontier | None = None, sealed: SealedState | None = None, **more: Any
) -> Snapshot:
    topic = Topic(id=7, layout=more.pop("layout", LAYOUT))
    values = {
        paths.CLUSTER_ID: b"c",
        paths.CLUSTER_SECRET: b"s",
        paths.layout(TOPIC): encode(topic),
        paths.cursor(TOPIC, SEGMENT, "billing"): b"{}",
        paths.ownership(TOPIC, SEGMENT): encode(owner or record()),
        paths.current_chunk(TOPIC, SEGMENT): encode(front or frontier()),
        paths.chunk(TOPIC, SEGMENT, Offset(0)): encode(chunk(0, 10)),
    }
    if sealed is not None:
        values[paths.sealed_state(TOPIC, SEGMENT)] = encode(sealed)
    header = Header(revision=Revision(400), created_at=1, cluster_id="c", brokers=("one", "two"))
    return Snapshot(header, values)


def history(
    segment: SegmentManifest | None = None, *logs: DiskLog, layout: Layout = LAYOUT, topic_id: int = 7, **more: Any
) -> History:
    chunks = segment.chunks if segment is not None else (chunk(0, 10),)
    return History(
        manifests={TOPIC: TopicManifest(TOPIC, Revision(450), layout, topic_id=topic_id), **more.pop("topics", {})},
        segments={(TOPIC, SEGMENT): segment, **more.pop("segments", {})},
        objects={f"{TOPIC}/{SEGMENT}/{each.object}": each.size for each in chunks},
        disks={(TOPIC, SEGMENT): list(logs)},
        revisions=[450, 500],
    )


def log(broker: str, base: int, end: int, *epochs: int) -> DiskLog:
    return DiskLog(
        broker=broker, base_offset=Offset(base), next_offset=Offset(end), epochs=frozenset(map(Epoch, epochs))
    )


def restored(plan: Plan) -> tuple[Ownership, Frontier, list[ChunkDescriptor]]:
    assert not plan.problems
    chunks = [
        decode(ChunkDescriptor, value)
        for key, value in sorted(plan.values.items())
        if key.startswith(paths.chunks_prefix(TOPIC, SEGMENT)) and paths.chunk_base(key) is not None
    ]
    return (
        decode(Ownership, plan.values[paths.ownership(TOPIC, SEGMENT)]),
        decode(Frontier, plan.values[paths.current_chunk(TOPIC, SEGMENT)]),
        chunks,
    )


def problem(plan: Plan) -> str:
    (found,) = plan.problems
    return found.text


def test_nothing_new_changes_nothing_but_the_epoch() -> None:
    saved = backup()
    plan = plan_restore(saved, history(manifest(10, 3, chunk(0, 10))))
    owner, front, chunks = restored(plan)
    assert owner == record(epoch=Epoch(3 + EPOCH_JUMP))
    assert (front.epoch, front.last_writer, front.next_offset) == (3, 3, 10)
    assert chunks == [chunk(0, 10)]
    assert plan.values.keys() == saved.values.keys()


def test_topics_that_the_storage_does_not_know_are_named() -> None:
    """Perhaps another storage was named: nothing in it contradicts the backup. Logs say less than manifests."""
    assert plan_restore(backup(), history(manifest(10, 3, chunk(0, 10)))).not_in_storage == ()
    other = History({}, {}, {}, disks={(TOPIC, SEGMENT): [log("one", 0, 10, 3)]}, revisions=[])
    assert plan_restore(backup(), other).not_in_storage == (TOPIC,)
    assert plan_restore(backup(), other, leave_out=[TOPIC]).not_in_storage == ()


def test_chunks_of_later_exports_are_taken_from_the_manifest() -> None:
    plan = plan_restore(backup(), history(manifest(30, 3, chunk(5, 20), chunk(20, 30))))
    _, front, chunks = restored(plan)
    assert (front.next_offset, front.epoch, front.begun) == (30, 3, True)
    assert chunks == [chunk(5, 20), chunk(20, 30)], "what retention has deleted since does not come back"
    assert plan.carried_forward == (f"segment://{TOPIC}/{SEGMENT}",)


def test_a_manifest_that_lags_does_not_count() -> None:
    later = history(manifest(10, 2, chunk(0, 10)))
    assert restored(plan_restore(backup(), later))[1] == frontier()


def test_a_later_owner_is_known_from_the_manifest_so_that_the_earlier_one_refuses() -> None:
    """The frontier names the later epoch as the last writer: a disk without its batches does not open the segment."""
    owner, front, _ = restored(plan_restore(backup(), history(manifest(20, 5, chunk(0, 20)))))
    assert (owner.owner, owner.epoch) == ("one", 5 + EPOCH_JUMP)
    assert (front.epoch, front.last_writer, front.continues) == (5, 5, 3)


def test_an_owner_that_claimed_and_did_not_begin_is_no_writer() -> None:
    _, front, _ = restored(plan_restore(backup(), history(manifest(10, 5, chunk(0, 10), epochs=()))))
    assert (front.epoch, front.begun, front.last_writer) == (5, False, 3)


def test_the_disk_with_the_newest_batches_tells_the_owner() -> None:
    found = history(manifest(20, 5, chunk(0, 20)), log("one", 0, 12, 3), log("two", 20, 44, 5, 6))
    owner, front, _ = restored(plan_restore(backup(), found))
    assert (owner.owner, owner.state) == ("two", OwnershipState.SERVING)
    assert owner.epoch == 6 + EPOCH_JUMP
    assert (front.epoch, front.last_writer, front.continues) == (6, 6, 5)


def test_a_restart_after_the_backup_is_known_from_the_disk() -> None:
    owner, front, _ = restored(plan_restore(backup(), history(None, log("one", 10, 44, 3, 4)), local=True))
    assert owner.owner == "one"
    assert (front.epoch, front.last_writer) == (4, 4)


def test_a_seal_counts_only_if_nobody_has_written_since() -> None:
    sealed = SealedState(last_committed_offset=9, epoch=Epoch(3), broker_id="one", timestamp=1)
    saved = backup(record(state=OwnershipState.SEALED, clean=True), sealed=sealed)
    key = paths.sealed_state(TOPIC, SEGMENT)
    assert key in plan_restore(saved, history(manifest(10, 3, chunk(0, 10)))).values
    assert "Only the disks tell" in problem(plan_restore(saved, history(manifest(10, 5, chunk(0, 10)))))
    plan = plan_restore(saved, history(manifest(10, 5, chunk(0, 10)), log("two", 10, 20, 5)))
    assert restored(plan)[0].owner == "two"
    assert not restored(plan)[0].clean, "its last batches are on the disk of its owner alone"
    assert key not in plan.values


REPLICATED = record(replicas=("one", "two"), write_quorum=2)


def test_replicas_that_went_on_need_all_disks() -> None:
    saved = backup(REPLICATED)
    assert "Only the disks tell" in problem(plan_restore(saved, history(manifest(10, 4, chunk(0, 10)))))
    assert "missing: one" in problem(plan_restore(saved, history(None, log("two", 0, 20, 3, 4))))
    found = history(None, log("two", 0, 20, 3, 4), log("one", 0, 24, 3, 4))
    assert restored(plan_restore(saved, found))[0].owner == "one", "the copy that reaches further"


def test_a_broker_that_may_have_got_a_replica_after_the_backup_is_asked_for_its_disk() -> None:
    saved = backup(record(replicas=("one", "three"), write_quorum=2))  # "two" was alive, too.
    found = history(None, log("one", 0, 20, 3, 4), log("three", 0, 20, 3, 4))
    assert "missing: two" in problem(plan_restore(saved, found))


def test_replicas_that_did_not_change_go_on_as_they_are() -> None:
    owner, _, _ = restored(plan_restore(backup(REPLICATED), history(manifest(10, 3, chunk(0, 10)))))
    assert owner == msgspec.structs.replace(REPLICATED, epoch=Epoch(3 + EPOCH_JUMP))


def without_owner() -> Snapshot:
    """A backup of a topic that was just made."""
    saved = backup()
    kept = {key: value for key, value in saved.values.items() if not key.startswith(("/segments", "/storage"))}
    return Snapshot(saved.header, kept)


def test_a_segment_without_owner_and_records_stays_without() -> None:
    plan = plan_restore(without_owner(), history(None))
    assert not plan.problems
    assert plan.values == without_owner().values


REFUSED = {
    "a later layout": (backup(), history(layout=SPLIT), "shows epoch 1"),
    "a topic of the same name": (backup(), history(topic_id=8), "deleted and created again"),
    "a child that the layout does not know": (
        backup(),
        history(segments={(TOPIC, "0000-7fff-1"): None}),
        "segment 1 (0000-7fff-1)",
    ),
    "a log that has ended": (backup(), history(manifest(10, 3, chunk(0, 10), end=Offset(10))), "has ended"),
    "a chunk that is gone": (backup(), history(None)._replace(objects={}), "1 of 1 chunks are not in storage"),
    "a gap before the disk": (
        backup(),
        history(None, log("one", 15, 20, 3, 4)),
        "they do not fit together",
    ),
    "a history that went back": (backup(), history(manifest(5, 4, chunk(0, 5))), "of another cluster"),
    "records of a segment that had no owner": (
        without_owner(),
        history(None, log("one", 0, 5, 3)),
        "had no owner when the backup was taken",
    ),
    "a manifest of a segment that had no owner": (
        without_owner(),
        history(manifest(10, 3, chunk(0, 10))),
        "had no owner when the backup was taken",
    ),
    "an unknown topic": (backup(), history(topics={"a/b/c": None}), "does not know it"),
    "no epochs left": (backup(record(epoch=Epoch((1 << 32) - 5))), history(), "no epochs left"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_carried_forward_is_refused(case: str) -> None:
    saved, found, text = REFUSED[case]
    assert text in problem(plan_restore(saved, found))


def test_local_storage_needs_the_disk_of_the_owner() -> None:
    assert "disk of one alone" in problem(plan_restore(backup(), history(), local=True))


def test_a_topic_that_is_left_out_leaves_no_key() -> None:
    plan = plan_restore(
        backup(layout=LAYOUT), history(layout=SPLIT, topics={"a/b/c": None}), leave_out=[TOPIC, "a/b/c"]
    )
    assert not plan.problems
    assert plan.values.keys() == {paths.CLUSTER_ID, paths.CLUSTER_SECRET}


def test_revisions_go_forward() -> None:
    assert first_revision(backup(), history(), 1_000) == 1_500
    assert first_revision(backup(), history()._replace(revisions=[]), 1_000) == 1_400


def test_transactions_are_bounded_and_end_with_the_cluster() -> None:
    values = {f"/k/{number:05d}": b"v" * 30_000 for number in range(300)} | {paths.CLUSTER_ID: b"c"}
    found = [*groups(values)]
    assert len(found) > 300 * 30_000 // 1_400_000
    assert {put.key: put.value for group in found for put in group} == values
    assert found[-1][-1].key == paths.CLUSTER_ID
    assert all(len(group) <= 128 for group in found)


async def test_a_backup_leaves_out_who_is_alive() -> None:
    """A restored registration would have no lease, so its broker would count as alive for ever."""
    store = MemoryStore(SystemClock())
    lease = await store.grant_lease(10)
    await store.txn(
        [], [Put(paths.CLUSTER_SECRET, b"s"), Put(paths.broker("one"), b"{}", lease.id), Put("/topics/x", b"1")]
    )
    found = await snapshots.take(store, 1)
    assert found.values == {paths.CLUSTER_SECRET: b"s", "/topics/x": b"1"}
    assert found.header.brokers == ("one",)
    await store.close()


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = str(tmp_path / "backup")
    snapshots.write(backup(), path)
    assert snapshots.read(path) == backup()
    assert [each.name for each in tmp_path.iterdir()] == ["backup"]
    assert (tmp_path / "backup").stat().st_mode & 0o777 == 0o600, "it holds the secret of the cluster"


def test_a_whole_file_of_a_newer_build_is_refused_by_its_version(tmp_path: Path) -> None:
    path = tmp_path / "backup"
    newer = msgspec.structs.replace(backup(), header=msgspec.structs.replace(backup().header, version=2))
    snapshots.write(newer, str(path))
    with pytest.raises(InvalidArgument, match="this build reads 1"):
        snapshots.read(str(path))


@pytest.mark.parametrize("damage", ["cut", "changed", "line", "newer", "nested"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "backup"
    snapshots.write(backup(), str(path))
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    path.write_bytes(
        {
            "cut": data[: len(data) // 2],
            "changed": data.replace(b'"key":"/cluster/id"', b'"key":"/cluster/ib"'),
            "line": b"".join(lines[:2] + lines[3:]),
            "nested": b'{"revision":' + b"[" * 200_000 + data,
            "newer": data.replace(b'"version":1', b'"version":2'),
        }[damage]
    )
    with pytest.raises(InvalidArgument):
        snapshots.read(str(path))


@pytest.mark.timeout(20)
def test_a_cluster_of_a_thousand_segments_is_planned_in_a_second() -> None:
    """Nobody can publish while a restore runs. It must not look at all keys for each segment."""
    values, objects = {paths.CLUSTER_ID: b"c", paths.CLUSTER_SECRET: b"s"}, {}
    layout, chunks = Layout.initial(10), [chunk(10 * number, 10 * number + 10) for number in range(10)]
    topics = [f"public/default/orders-{number}" for number in range(100)]
    for path in topics:
        values[paths.layout(path)] = encode(Topic(id=7, layout=layout))
        for info in layout.segments.values():
            descriptor = SegmentName.of(TopicName.parse(path), info).descriptor
            values[paths.ownership(path, descriptor)] = encode(record())
            values[paths.current_chunk(path, descriptor)] = encode(frontier(100))
            for each in chunks:
                values[paths.chunk(path, descriptor, each.base_offset)] = encode(each)
                objects[f"{path}/{descriptor}/{each.object}"] = each.size
    header = Header(revision=Revision(400), created_at=1, cluster_id="c", brokers=("one",))
    found = History(manifests=dict.fromkeys(topics), segments={}, objects=objects, disks={}, revisions=[450])
    plan = plan_restore(Snapshot(header, values), found)
    assert (plan.problems, plan.values.keys()) == ((), values.keys())
