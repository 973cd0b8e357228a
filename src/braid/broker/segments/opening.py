"""Opening a segment that was given to this broker: its folder, its log, its cursors, and the record SERVING.

The record becomes SERVING in one transaction with the storage's *begin*. From then on the segment is this broker's in
this epoch, and every write about it (cursors, chunks) compares that record. An opening that fails leaves nothing but
the epoch, if it came far enough to claim the catalog in it; the next opening then takes another epoch. The record says
why the segment cannot be opened (`failures`): immediately if records are missing or contradict each other, otherwise
when it has lasted for TELL_AFTER_S.

Where a loss was accepted, the same transaction carries it out. So it compares that the brokers that were given up are
still gone. A broker that is back gets the segment from the leader (cluster/ownership/leader_step.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

from braid.broker.config import BrokerConfig
from braid.broker.cursors.cursors import Cursors
from braid.broker.metrics import BrokerMetrics
from braid.broker.queues.evidence import gather
from braid.broker.queues.segment_queues import SegmentQueues
from braid.broker.replicas.copies import ReplicaCopies
from braid.broker.replicas.queue_copies import QUEUE_READ
from braid.broker.replicas.replication import Replication
from braid.broker.segment_folders import own_folder
from braid.broker.segments.owned_segment import OwnedSegment, SegmentRetention
from braid.broker.segments.publish import PublishQueue
from braid.broker.segments.segment_access import Ask
from braid.broker.topics import Topics
from braid.cluster.members import Members, still_gone
from braid.cluster.owners import Owners
from braid.cluster.ownership import owner_step
from braid.metadata import paths
from braid.metadata.store import Compare, Condition, Operation, Put
from braid.metadata.view import Known
from braid.model.errors import (
    BraidError,
    ConditionFailed,
    DiskError,
    Fenced,
    MetadataError,
    NotEnoughReplicas,
    NotServing,
)
from braid.model.ids import Epoch, Offset, Revision, SegmentId
from braid.model.names import SegmentName
from braid.model.ownership import Ownership, OwnershipState
from braid.model.stored_record import decode
from braid.model.topic import Durability, Topic
from braid.ports.tasks import TaskScope, completed
from braid.storage.context import StorageContext, StorageMode
from braid.storage.history.catalog import Frontier
from braid.storage.history.housekeeper import Housekeeper
from braid.storage.log.context import FileConfig, LogConfig
from braid.storage.recovery_start import RecoverySource
from braid.storage.segment import SegmentStorage

KEEP_LOCAL_BYTES: Final = 256 << 20
"""Of each segment whose history is in shared storage, for readers that lag a little: they read the local disk."""
TELL_AFTER_S: Final = 10.0
"""How long an opening may fail for a reason that time may mend before the record says so."""
ASK_S: Final = 10.0
RELEASE_S: Final = 0.1
"""How often an owner looks whether the store has everything of an ended log."""
NO_END: Final = Offset((1 << 63) - 1)

Replicate = Callable[[SegmentName, int, Ownership], Replication]
"""Makes the replication of a segment, of the topic with this id, under this record."""

_log: Final = logging.getLogger(__name__)


class Opening:
    def __init__(
        self,
        context: StorageContext,
        config: BrokerConfig,
        metrics: BrokerMetrics,
        topics: Topics,
        owners: Owners,
        members: Members,
        housekeeper: Housekeeper,
        may_act: Callable[[], bool],
        write_manifest: Callable[[str], Awaitable[None]],
        copies: ReplicaCopies,
        replicate: Replicate,
        ask: Ask,
    ) -> None:
        """`copies` are those that this broker keeps as a follower, `replicate` makes the replication of a segment that
        it is to own. `ask` calls another broker. `write_manifest` writes the manifest of the topic of this path, and
        raises nothing."""
        self._context = context
        self._config = config
        self._metrics = metrics
        self._topics = topics
        self._owners = owners
        self._members = members
        self._housekeeper = housekeeper
        self._may_act = may_act
        self._write_manifest = write_manifest
        self._copies = copies
        self._replicate = replicate
        self._ask = ask
        self._releasing = TaskScope[SegmentName]()
        self._stopped = False

    async def open(
        self,
        name: SegmentName,
        topic: Topic,
        record: Ownership,
        revision: Revision,
        *,
        on_failure: Callable[[OwnedSegment, BraidError], None],
        on_fenced: Callable[[Cursors, Fenced], None],
    ) -> OwnedSegment:
        """Open a segment in the record's epoch, which this broker has since `revision`. When this returns, the view
        shows the record SERVING."""
        replicated = owner_step.durability(record, topic.policies) is Durability.REPLICATED
        if replicated:
            self._check_replicas(record)
            await self._owners.view.caught_up(revision)
        await self._write_manifest(name.topic.path)
        await self._copies.release(name)
        await completed(own_folder(self._context, name, topic.id))  # A deletion that cancels this removes the folder.
        if record.accept_loss:
            await self._accept_loss(name, record, revision)
        await self._gather_queues(name, topic.id, record)
        replication = self._replicate(name, topic.id, record) if replicated else None
        opened: list[SegmentQueues] = []
        segment: OwnedSegment | None = None

        def fail(error: BraidError) -> None:
            if segment is not None:
                on_failure(segment, error)

        try:
            storage = await self._open_storage(name, topic, record, revision, replication, opened)
        except BaseException:
            if replication is not None:
                await replication.stop()
            raise
        try:
            cursors = await self._load_cursors(name, topic, record, storage, on_fenced)
            await self._owners.view.caught_up(storage.begun_at)
            queues = self._queues_of(name, record.epoch, storage, cursors, replication, fail)
            opened.append(queues)
            await queues.load()
            queues.release_if_drained()
        except BaseException:
            if replication is not None:
                await replication.stop()
            for each in opened:
                await each.stop()
            await storage.abandon()
            raise
        if replication is not None:
            storage.exporter.on_exported = replication.on_exported
        cursors.start()
        publishes = PublishQueue(
            storage.log,
            name.range,
            self._metrics,
            self._metrics.topic(name.topic.path),
            asyncio.get_running_loop().time,
            topic.policies,
        )
        retention = SegmentRetention(
            name,
            storage,
            cursors,
            lambda: self._topics.find(name.topic.path),
            self._context.clock.now_us,
            lambda: self._newer_bytes(name),
        )
        self._housekeeper.add(storage, retention.policy, retention.needed_from, keep_local_bytes=KEEP_LOCAL_BYTES)
        _log_recovery(name, storage)
        segment = OwnedSegment(
            name, topic, record, storage, cursors, queues, publishes, retention, on_failure, replication
        )
        return segment

    def _check_replicas(self, record: Ownership) -> None:
        """Refuse to open a segment that could not confirm anything: each attempt costs an epoch."""
        here = self._context.broker_id
        replicas = record.replicas or (here,)
        gone = [each for each in replicas if each != here and not self._members.is_live(each)]
        if len(replicas) - len(gone) < record.write_quorum:
            raise NotEnoughReplicas(
                f"{record.write_quorum} of its {len(replicas)} replicas must hold a record; these are down: "
                f"{', '.join(gone)}"
            )

    async def stop(self) -> None:
        self._stopped = True
        await self._releasing.cancel()

    async def take(self, name: SegmentName, known: Known[Ownership], tried: Epoch) -> tuple[Ownership, Revision]:
        """Return the record under which this broker may open its segment now, and the record's revision. The broker
        takes the next epoch if it has served the segment, or if its last attempt, in the epoch `tried`, came too far.
        """
        record = known.value
        is_new = record.state is OwnershipState.ASSIGNED
        if is_new and not (record.epoch == tried and await self._has_claimed(name, record.epoch)):
            return record, known.revision
        record = record.taken_again()
        revision = await self._owners.swap(name, known.revision, record)
        if revision is None:
            raise Fenced(f"{name} was given to another owner")
        return record, revision

    async def note_failure(self, name: SegmentName, epoch: Epoch, error: BraidError, failing_since: float) -> None:
        """Write into the record why this broker cannot open the segment, unless that is there already."""
        if isinstance(error, Fenced):
            return  # The segment is not this broker's any more.
        mendable = error.retriable or isinstance(error, DiskError)  # A disk may fail once and then work.
        if mendable and self._context.clock.monotonic() - failing_since < TELL_AFTER_S:
            return
        try:
            known = self._owners.known(name)
            if known is None or known.value.state is not OwnershipState.ASSIGNED:
                return
            if not known.value.is_held_by(self._context.broker_id, epoch):
                return
            told = known.value.unopened(str(error), lasting=not error.retriable)
            if told == known.value:
                return
            revision = await self._owners.swap(name, known.revision, told)
            if revision is not None:
                await self._owners.view.caught_up(revision)
        except MetadataError as failure:
            _log.warning("%s: the record does not say that it cannot be opened: %s", name, failure)

    async def _has_claimed(self, name: SegmentName, epoch: Epoch) -> bool:
        """Tell whether an opening in this epoch has claimed the catalog: the epoch cannot be used again."""
        entry = await self._context.store.get(paths.current_chunk(name.topic.path, name.descriptor))
        return entry is not None and decode(Frontier, entry.value).epoch >= epoch

    async def _accept_loss(self, name: SegmentName, record: Ownership, revision: Revision) -> None:
        """Place all cursors anew, before the record forgets that a loss was accepted: if the opening fails after that,
        no consumer may go on at a position in the lost records."""
        unchanged = Compare(paths.ownership(name.topic.path, name.descriptor), revision)
        cursors = Cursors(
            self._context.store,
            name,
            record.epoch,
            unchanged,
            lambda: NO_END,
            self._config.cursors,
            now_us=self._context.clock.now_us,
        )
        await cursors.load(lossy=True)

    async def _open_storage(
        self,
        name: SegmentName,
        topic: Topic,
        record: Ownership,
        revision: Revision,
        replication: Replication | None,
        queues: Sequence[SegmentQueues],
    ) -> SegmentStorage:
        config = LogConfig(
            durability=owner_step.durability(record, topic.policies),
            files=FileConfig(file_bytes=self._config.file_bytes),
            on_sync=self._metrics.sync_latency_s.observe,
        )
        ownership = paths.ownership(name.topic.path, name.descriptor)
        given_up = self._still_given_up(record)
        holders = (self._context.broker_id,) if self._context.mode is StorageMode.LOCAL else ()
        try:
            return await SegmentStorage.open(
                self._context,
                name.topic.path,
                name.descriptor,
                record.epoch,
                config,
                topic_id=topic.id,
                may_confirm=self._may_act,
                accept_loss=record.accept_loss,
                elected=record.elected,
                replicate=replication.begin if replication is not None else None,
                conditions=[Compare(ownership, revision), *still_gone(given_up)],
                operations=lambda end: [Put(ownership, record.serving(holders, end).to_json())],
                on_complete=lambda: self._completed(name, record.epoch, queues),
            )
        except ConditionFailed as error:
            back = f", or {' or '.join(given_up)} is back with what was given up" if given_up else ""
            raise Fenced(f"{name} was given to another owner while it was being opened{back}") from error

    def _still_given_up(self, record: Ownership) -> list[str]:
        """Return the brokers that must be gone if this broker is to serve the segment without their records. A broker
        that is back and cannot open the segment is no reason to wait."""
        return [
            broker
            for broker in record.given_up
            if broker != self._context.broker_id and record.failure_of(broker) is None
        ]

    def _completed(
        self, name: SegmentName, epoch: Epoch, queues: Sequence[SegmentQueues]
    ) -> tuple[Sequence[Condition], Sequence[Operation]]:
        """Make the record of a log that has ended clean: when its owner is gone, any broker can go on. Not while the
        disks of its owner and followers hold acks: `_release` does it when its queues are drained."""
        if not queues or not queues[0].are_stored_drained:
            if queues:
                queues[0].release_if_drained()
            return (), ()
        known = self._owners.known(name)
        if known is None or not known.value.is_held_by(self._context.broker_id, epoch):
            raise Fenced(f"{name} has another owner")
        if known.value.state is OwnershipState.ASSIGNED:
            raise NotServing(f"{name} is not served yet")
        if known.value.state is not OwnershipState.SERVING or self._context.mode is StorageMode.LOCAL:
            return (), ()
        key = paths.ownership(name.topic.path, name.descriptor)
        return [Compare(key, known.revision)], [Put(key, known.value.complete().to_json())]

    async def _gather_queues(self, name: SegmentName, topic_id: int, record: Ownership) -> None:
        """Bring what other replicas know of queues to this broker's disk, after a vote."""
        context = self._context

        async def ask(broker: str, subscriptions: list[str]) -> Any:
            arguments = {"segment": str(name), "topic_id": topic_id, "epoch": record.epoch}
            return await self._ask(broker, QUEUE_READ, {**arguments, "subscriptions": subscriptions}, timeout_s=ASK_S)

        folder = f"{context.folder}/{name.topic.path}/{name.descriptor}"
        await gather(context.store, context.disk, folder, name, record, context.broker_id, ask)

    def _queues_of(
        self,
        name: SegmentName,
        epoch: Epoch,
        storage: SegmentStorage,
        cursors: Cursors,
        replication: Replication | None,
        on_failure: Callable[[BraidError], None],
    ) -> SegmentQueues:
        async def keep_record() -> None:
            # A write that makes the record clean may be under way. This one comes after it, or lets it fail.
            surely = queues.loaded and storage.ended
            await self._swap_record(name, epoch, lambda each: each.incomplete() if each.clean else each, surely=surely)

        def release_record() -> None:
            shared = self._context.mode is not StorageMode.LOCAL  # Otherwise nobody else can read the log.
            if shared and not self._stopped and name not in self._releasing:
                self._releasing.start(name, release(), name=f"complete {name}")

        async def release() -> None:
            """Make the record clean when chunks have the log, and the store has the cursors: journals count no more
            after that (I9)."""
            while storage.ended and queues.are_drained and self._is_held(name, epoch):
                if storage.catalog.next_offset >= storage.log.end and queues.are_stored_drained:
                    await self._release(name, epoch, queues)
                    return
                cursors.note_drained()
                await asyncio.sleep(RELEASE_S)

        queues = SegmentQueues(
            name,
            epoch,
            storage,
            cursors,
            disk=self._context.disk,
            clock=self._context.clock,
            metrics=self._metrics.topic(name.topic.path),
            may_confirm=self._may_act,
            agreed=replication.agreed if replication is not None else lambda own, _: own,
            message_ttl_us=lambda: _message_ttl_us(self._topics.find(name.topic.path)),
            keep_record=keep_record,
            release_record=release_record,
            on_failure=on_failure,
        )
        if replication is not None:
            replication.follow_queues(queues)
        return queues

    async def _release(self, name: SegmentName, epoch: Epoch, queues: SegmentQueues) -> None:
        """Make the record clean of a log that has ended, is in chunks, and whose queues are drained."""

        def complete(record: Ownership) -> Ownership:
            # A queue may have been created since the last try.
            return record.complete() if queues.are_stored_drained and not record.clean else record

        if self._context.mode is not StorageMode.LOCAL:
            try:
                await self._swap_record(name, epoch, complete)
            except BraidError as error:
                _log.info("%s is complete, and its record does not say so yet: %s", name, error)

    def _is_held(self, name: SegmentName, epoch: Epoch) -> bool:
        record = self._owners.find(name)
        return record is not None and record.is_held_by(self._context.broker_id, epoch)

    async def _swap_record(
        self, name: SegmentName, epoch: Epoch, change: Callable[[Ownership], Ownership], *, surely: bool = False
    ) -> None:
        """Change the record of a segment that this broker serves; return when the view shows it. If there is nothing to
        change, nothing is written, unless it must `surely` be so in the store."""
        while True:
            known = self._owners.known(name)
            if known is None or not known.value.is_held_by(self._context.broker_id, epoch):
                raise Fenced(f"{name} has another owner")
            if known.value.state is not OwnershipState.SERVING:
                return
            changed = change(known.value)
            if changed == known.value and not surely:
                return
            revision = await self._owners.swap(name, known.revision, changed)
            if revision is not None:
                await self._owners.view.caught_up(revision)
                return
            # The store has a newer record, and the view may be far behind: no writing until it has caught up.
            await self._owners.view.until(partial(self._is_newer, name, known.revision), ASK_S)

    def _is_newer(self, name: SegmentName, revision: Revision) -> bool:
        known = self._owners.known(name)
        return known is None or known.revision != revision

    async def _load_cursors(
        self,
        name: SegmentName,
        topic: Topic,
        record: Ownership,
        storage: SegmentStorage,
        on_fenced: Callable[[Cursors, Fenced], None],
    ) -> Cursors:
        cursors = Cursors(
            self._context.store,
            name,
            record.epoch,
            Compare(paths.ownership(name.topic.path, name.descriptor), storage.begun_at),
            lambda: storage.log.durable,
            self._config.cursors,
            now_us=self._context.clock.now_us,
            end=lambda: Offset(storage.log.confirmed.value),
            drained=lambda offset: storage.ended and max(offset, storage.earliest) >= storage.log.end,
            on_fenced=lambda error: on_fenced(cursors, error),
        )
        await cursors.load(lossy=_may_have_lost(storage, topic))
        return cursors

    def _newer_bytes(self, name: SegmentName) -> int:
        """Return how much the descendants of a segment hold, as far as load reports tell."""
        path = name.topic.path
        topic = self._topics.find(path)
        if topic is None or name.id not in topic.layout.segments:
            return 0
        newer = {each for each in topic.layout.lineage(name.id) if each > name.id}
        loads = [load for report in self._members.loads.all().values() for load in report.busiest] if newer else []
        sizes: dict[SegmentId, int] = {}
        for load in loads:
            if load.topic_path == path and load.segment_id in newer:
                # Two brokers report a segment that has just moved.
                sizes[load.segment_id] = max(load.history_bytes, sizes.get(load.segment_id, 0))
        return sum(sizes.values())


def _message_ttl_us(topic: Topic | None) -> int | None:
    """Return how old a message may be that a queue delivers; None: any age."""
    ttl_ms = topic.policies.message_ttl_ms if topic is not None else None
    return ttl_ms * 1_000 if ttl_ms is not None else None


def _log_recovery(name: SegmentName, storage: SegmentStorage) -> None:
    """Log what an operator should know of the recovery."""
    cut, damage = storage.recovered.torn_bytes, len(storage.recovered.damage)
    if cut or damage:
        _log.warning("%s: recovery cut %d torn bytes and found %d damaged places", name, cut, damage)
    if storage.start.loss_accepted:
        _log.warning("%s goes on at offset %d: the records from there on are lost", name, storage.start.offset)


def _may_have_lost(storage: SegmentStorage, topic: Topic) -> bool:
    """Whether records that consumers have seen may be gone: a loss was accepted, or the topic confirms, or confirmed,
    before it syncs and its log was not closed in order."""
    if storage.start.loss_accepted or storage.start.source is not RecoverySource.LOCAL:
        return storage.start.loss_accepted
    return topic.ever_memory and not storage.recovered.closed_in_order
