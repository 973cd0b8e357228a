"""What a restore may write: the backup, carried forward to what the history shows. Pure functions.

A backup is older than the cluster was when it lost its metadata. Since then owners have confirmed records, exported
chunks, deleted old ones, and been replaced. The history knows most of this: every owner writes a manifest when it
begins and when its catalog changes, and every batch on a disk carries the epoch of its owner. So each segment's catalog
is taken from the newest manifest, and the newest log on a disk tells the last owner.

What must hold afterwards:

- **I1, I2.** No owner may begin below what another has confirmed. The frontier's epoch is never raised without
  evidence. So an owner whose disk is newer than the metadata, or that lacks the last writer's batches, still refuses to
  open the segment (storage/recovery_start.py).
- **I3.** No epoch is given twice: objects, promises of replicas and batches carry it. So every ownership record goes
  forward by `EPOCH_JUMP`, more than owners can have come since the backup.
- **I5.** A cursor of the backup is at most where it was: records are delivered again, none is skipped.
- **I6.** A layout that is older than the history has segments whose logs have ended, and lacks their children. Nothing
  can carry it forward, so it is refused.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from braid.cli.backup.snapshot import Snapshot
from braid.metadata import paths
from braid.model.errors import BraidError
from braid.model.ids import Epoch, Offset, Revision
from braid.model.names import SegmentName, TopicName
from braid.model.ownership import Ownership, OwnershipState
from braid.model.stored_record import decode, encode
from braid.model.topic import Topic
from braid.storage.history.catalog import ChunkDescriptor, Frontier, SealedState
from braid.storage.history.manifest import SegmentManifest, TopicManifest

EPOCH_JUMP: Final = 1 << 16
"""A segment changes its owner, or its owner restarts, so often at most between a backup and the loss."""
MAX_EPOCH: Final = (1 << 32) - 1
"""A batch's header has 32 bits for it."""


class DiskLog(msgspec.Struct, frozen=True, kw_only=True):
    """A segment's log on one broker's disk."""

    broker: str
    base_offset: Offset
    next_offset: Offset
    epochs: frozenset[Epoch]

    @property
    def position(self) -> tuple[Epoch, Offset]:
        return max(self.epochs), self.next_offset


class History(NamedTuple):
    manifests: dict[str, TopicManifest | None]
    """By a topic's path: all topics that storage has anything of."""
    segments: dict[tuple[str, str], SegmentManifest | None]
    """By topic and descriptor."""
    objects: dict[str, int]
    """Sizes by name."""
    disks: dict[tuple[str, str], list[DiskLog]]
    revisions: list[int]
    """Of all manifests."""


class Catalog(msgspec.Struct, frozen=True, kw_only=True):
    frontier: Frontier | None
    sealed: SealedState | None
    chunks: tuple[ChunkDescriptor, ...]


class Problem(msgspec.Struct, frozen=True):
    """Why a topic cannot be restored."""

    topic: str
    text: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    values: dict[str, bytes]
    """What the store gets, by key."""
    problems: tuple[Problem, ...]
    carried_forward: tuple[str, ...] = ()
    """Segments whose catalog or owner is newer than in the backup."""
    not_in_storage: tuple[str, ...] = ()
    """Topics of which the storage has nothing, although each owner writes a manifest: perhaps it is another storage."""


class Contradiction(Exception):
    """The backup cannot be carried forward to what the history shows."""


def plan_restore(snapshot: Snapshot, history: History, *, leave_out: Iterable[str] = (), local: bool = False) -> Plan:
    """Return what to write, and which topics cannot be restored. Topics in `leave_out` are not written. `local` tells
    that each broker keeps its history on its own disk."""
    values, left_out = dict(snapshot.values), set(leave_out)
    keys, seen = sorted(values), _segments_seen(history)
    topics = {path: key for key in values if (path := paths.topic_of_layout(key)) is not None}
    problems: list[Problem] = []
    carried: list[str] = []
    for path in left_out:
        values = {key: value for key, value in values.items() if not _belongs_to(key, path)}
    for path in sorted(history.manifests.keys() - topics.keys() - left_out):
        text = "the history has records of it, but the backup does not know it: it was created later, or deleted"
        problems.append(Problem(path, text))
    for path in sorted(topics.keys() - left_out):
        try:
            topic = decode(Topic, values[topics[path]], f"topic {path}")
            _check_layout(path, topic, history.manifests.get(path), seen.get(path, {}))
            for name in _segments(path, topic):
                changes = _restored_segment(snapshot.header.brokers, values, keys, topic, name, history, local=local)
                if changes.carried_forward:
                    carried.append(str(name))
                for key in changes.deleted:
                    values.pop(key, None)
                values.update(changes.puts)
        except (Contradiction, BraidError) as error:
            problems.append(Problem(path, str(error)))
    return Plan(
        values=values,
        problems=tuple(problems),
        carried_forward=tuple(carried),
        not_in_storage=tuple(sorted(topics.keys() - left_out - history.manifests.keys())),
    )


def first_revision(snapshot: Snapshot, history: History, margin: int) -> Revision:
    """Return a revision above all that clients and manifests have seen: both take only what is newer."""
    return Revision(max(snapshot.header.revision, *history.revisions, 0) + margin)


def _belongs_to(key: str, topic: str) -> bool:
    return key == paths.layout(topic) or key.startswith(
        (paths.topic_prefix(topic), paths.topic_segments_prefix(topic), paths.topic_storage_prefix(topic))
    )


def _segments(path: str, topic: Topic) -> list[SegmentName]:
    name = TopicName.parse(path)
    return [SegmentName.of(name, info) for info in topic.segments.values()]


def _segments_seen(history: History) -> dict[str, dict[str, None]]:
    """Return the descriptors of all segments that storage or a disk has, by topic."""
    found: dict[str, dict[str, None]] = {}
    for path, descriptor in (*history.segments, *history.disks):
        found.setdefault(path, {})[descriptor] = None
    return found


def _check_layout(path: str, topic: Topic, manifest: TopicManifest | None, seen: Iterable[str]) -> None:
    if manifest is not None and manifest.topic_id not in (0, topic.id):
        raise Contradiction("the topic was deleted and created again after the backup")
    if manifest is not None and manifest.layout.epoch > topic.layout.epoch:
        raise Contradiction(
            f"the backup has its layout of epoch {topic.layout.epoch}, but the history shows epoch "
            f"{manifest.layout.epoch}: segments were split, merged or dropped after the backup. Take a newer backup"
        )
    known = {name.descriptor for name in _segments(path, topic)}
    next_id = max((info.segment_id for info in topic.segments.values()), default=-1) + 1
    for descriptor in seen:
        if descriptor not in known:
            name = SegmentName.at(path, descriptor)
            if name.id >= max(topic.layout.next_segment_id, next_id):
                raise Contradiction(
                    f"the history has segment {name.id} ({descriptor}), which the layout of the backup does not know: "
                    "a change of layout began after the backup. Take a newer backup"
                )


class _Changes(NamedTuple):
    puts: dict[str, bytes]
    deleted: list[str]
    carried_forward: bool


def _restored_segment(
    brokers: Iterable[str],
    values: Mapping[str, bytes],
    keys: Sequence[str],
    topic: Topic,
    name: SegmentName,
    history: History,
    *,
    local: bool,
) -> _Changes:
    """`keys` are those of the backup, in order: a cluster has hundreds of thousands, of which a segment has few."""
    path, descriptor = name.topic.path, name.descriptor
    ownership_key = paths.ownership(path, descriptor)
    saved = _saved_catalog(values, keys, path, descriptor)
    manifest = history.segments.get((path, descriptor))
    logs = history.disks.get((path, descriptor), [])
    if ownership_key not in values:
        if logs or manifest is not None:
            raise Contradiction(f"segment {name.id} had no owner when the backup was taken, but has records now")
        return _Changes({}, [], False)
    record = decode(Ownership, values[ownership_key], f"the owner of {name}")
    catalog = carry_catalog(name, saved, manifest)
    if catalog.frontier is not None and catalog.frontier.end is not None:
        _check_end(topic, name)
    record, catalog = carry_owner(name, record, saved, catalog, logs, frozenset(brokers), local=local)
    _check_objects(name, catalog, history)
    record = msgspec.structs.replace(record, epoch=_next_epoch(name, record, catalog, manifest, logs))
    puts = {ownership_key: encode(record)}
    deleted = _below(keys, paths.segment_storage_prefix(path, descriptor))
    if catalog.frontier is not None:
        puts[paths.current_chunk(path, descriptor)] = encode(catalog.frontier)
    if catalog.sealed is not None:
        puts[paths.sealed_state(path, descriptor)] = encode(catalog.sealed)
    puts.update({paths.chunk(path, descriptor, each.base_offset): encode(each) for each in catalog.chunks})
    return _Changes(puts, deleted, catalog != saved)


def _below(keys: Sequence[str], prefix: str) -> list[str]:
    """Return the keys that begin with a prefix. `keys` are in order."""
    found = []
    for at in range(bisect_left(keys, prefix), len(keys)):
        if not keys[at].startswith(prefix):
            break
        found.append(keys[at])
    return found


def _saved_catalog(values: Mapping[str, bytes], keys: Sequence[str], path: str, descriptor: str) -> Catalog:
    frontier = values.get(paths.current_chunk(path, descriptor))
    sealed = values.get(paths.sealed_state(path, descriptor))
    chunks = [
        decode(ChunkDescriptor, values[key])
        for key in _below(keys, paths.chunks_prefix(path, descriptor))
        if paths.chunk_base(key) is not None
    ]
    return Catalog(
        frontier=decode(Frontier, frontier) if frontier is not None else None,
        sealed=decode(SealedState, sealed) if sealed is not None else None,
        chunks=tuple(sorted(chunks, key=lambda chunk: chunk.base_offset)),
    )


def carry_catalog(name: SegmentName, saved: Catalog, manifest: SegmentManifest | None) -> Catalog:
    """Return the catalog as the newest manifest shows it, or as the backup does if the manifest is not newer."""
    frontier = saved.frontier
    if manifest is None:
        return saved
    if frontier is not None and (manifest.epoch, manifest.next_offset) < (frontier.epoch, frontier.next_offset):
        return saved  # A manifest may lag.
    if frontier is not None and manifest.next_offset < frontier.next_offset:
        raise Contradiction(
            f"segment {name.id}: the backup has history up to offset {frontier.next_offset}, the newer manifest in "
            f"storage up to {manifest.next_offset}; one of them is of another cluster"
        )
    began = {epoch for epoch, _ in manifest.epochs}
    begun = manifest.epoch in began or (frontier is not None and frontier.epoch == manifest.epoch and frontier.begun)
    before = max((epoch for epoch in began if epoch < manifest.epoch), default=Epoch(0))
    if frontier is not None:
        same = frontier.epoch == manifest.epoch
        before = max(before, frontier.continues if same else frontier.last_writer)
    unchanged = frontier is not None and manifest.next_offset == frontier.next_offset
    carried = Frontier(
        epoch=manifest.epoch,
        holder=frontier.holder if frontier is not None and frontier.epoch == manifest.epoch else "",
        begun=begun,
        continues=before,
        next_offset=manifest.next_offset,
        writes=frontier.writes if frontier is not None else 0,
        producers=manifest.producers,
        inherited=frontier.inherited if frontier is not None and unchanged and manifest.producers is None else b"",
        epochs=manifest.epochs,
        end=manifest.end,
        ended_at=frontier.ended_at if frontier is not None else 0,
    )
    sealed = saved.sealed if saved.sealed is not None and saved.sealed.epoch == carried.last_writer else None
    return Catalog(frontier=carried, sealed=sealed, chunks=manifest.chunks)


def carry_owner(
    name: SegmentName,
    record: Ownership,
    saved: Catalog,
    catalog: Catalog,
    logs: Iterable[DiskLog],
    brokers: frozenset[str],
    *,
    local: bool,
) -> tuple[Ownership, Catalog]:
    """Return the record with the last owner, and the catalog with its epoch, as far as disks tell."""
    newest = max(logs, key=lambda log: log.position, default=None)
    known = catalog.frontier.epoch if catalog.frontier is not None else Epoch(0)
    saved_epoch = saved.frontier.epoch if saved.frontier is not None else Epoch(0)
    seen = {log.broker for log in logs}
    if local and record.is_owned and not record.clean and record.owner not in seen and saved_epoch:
        raise Contradiction(
            f"segment {name.id}: its records are on the disk of {record.owner} alone; name its data folder by --data"
        )
    if newest is None or max(newest.epochs) <= saved_epoch:
        if known > saved_epoch and (record.replicas or not record.is_owned):
            raise Contradiction(
                f"segment {name.id}: the backup knows epoch {saved_epoch}, the history epoch {known}, so another "
                "broker may have continued it. Only the disks tell: name the data folder of every broker by --data"
            )
        return record, catalog
    if record.replicas and (missing := sorted({*brokers, *record.replicas} - seen)):
        raise Contradiction(
            f"segment {name.id}: replicas have continued it after the backup. The newest copy counts, so name the data "
            f"folders of all brokers by --data; missing: {', '.join(missing)}"
        )
    if max(newest.epochs) > known:
        catalog = _with_epoch(name, catalog, newest)
    return _owned_by(record, newest.broker), catalog


def _with_epoch(name: SegmentName, catalog: Catalog, newest: DiskLog) -> Catalog:
    """The owner of the newest batches has begun, or has left nothing but a BEGIN: either way its log is the log."""
    frontier = catalog.frontier
    if frontier is None:
        frontier = Frontier(epoch=Epoch(0), holder="", begun=False, continues=Epoch(0), next_offset=Offset(0))
    if newest.base_offset > frontier.next_offset or newest.next_offset < frontier.next_offset:
        raise Contradiction(
            f"segment {name.id}: chunks end at offset {frontier.next_offset}, and the log of {newest.broker} has "
            f"{newest.base_offset} to {newest.next_offset}: they do not fit together"
        )
    epoch = max(newest.epochs)
    carried = msgspec.structs.replace(
        frontier, epoch=epoch, holder=newest.broker, begun=True, continues=frontier.last_writer
    )
    return Catalog(frontier=carried, sealed=None, chunks=catalog.chunks)


def _owned_by(record: Ownership, broker: str) -> Ownership:
    return msgspec.structs.replace(
        record,
        state=OwnershipState.SERVING,
        owner=broker,
        move=None,
        change=None,
        elected=None,
        clean=False,
        accept_loss=False,
        given_up=(),
        failures=(),
        holders=(),
        refusal="",
        replicas=record.replicas if broker in record.replicas else (),
        write_quorum=record.write_quorum if broker in record.replicas else 1,
    )


def _check_end(topic: Topic, name: SegmentName) -> None:
    info = topic.layout.segments.get(name.id)
    in_change = topic.transition is not None and name.id in topic.transition.parents
    if info is not None and info.is_active and not in_change:
        raise Contradiction(
            f"the log of segment {name.id} has ended, but the layout of the backup writes to it: a change of layout "
            "began after the backup. Take a newer backup"
        )


def _check_objects(name: SegmentName, catalog: Catalog, history: History) -> None:
    folder = f"{name.topic.path}/{name.descriptor}"
    missing = [each.object for each in catalog.chunks if history.objects.get(f"{folder}/{each.object}") != each.size]
    if missing:
        raise Contradiction(
            f"segment {name.id}: {len(missing)} of {len(catalog.chunks)} chunks are not in storage, the first one is "
            f"{missing[0]}. Is this the storage of the cluster?"
        )


def _next_epoch(
    name: SegmentName, record: Ownership, catalog: Catalog, manifest: SegmentManifest | None, logs: Iterable[DiskLog]
) -> Epoch:
    def all_epochs() -> Iterator[int]:
        yield record.epoch
        if catalog.frontier is not None:
            yield catalog.frontier.epoch
        if manifest is not None:
            yield manifest.epoch
        yield from (chunk.epoch for chunk in catalog.chunks)
        yield from (epoch for log in logs for epoch in log.epochs)

    highest = max(all_epochs()) + EPOCH_JUMP
    if highest + EPOCH_JUMP > MAX_EPOCH:
        raise Contradiction(f"segment {name.id} has no epochs left: it was restored too often")
    return Epoch(highest)
