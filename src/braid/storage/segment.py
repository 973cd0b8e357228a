"""One segment's storage on its owner: log, catalog, exporter and readers, opened and ended in the right order.

Opening, each step repeatable after a crash before the next:

0. lock the local folder: a hung process that wakes up must not write into files that another one has taken over;
1. read all evidence (metadata, local files) and decide where to start (recovery_start.py);
2. **claim**: fence every earlier owner out of the catalog;
3. put local files that are not part of the log out of the way;
4. open the log and make its first batch, a BEGIN, durable: here, and on enough replicas;
5. **begin**: one transaction says that this owner has begun, and removes the sealed state.

Only then may anything be appended. Steps 1 to 3 are in segment_recovery.py. On a full disk, where step 4 finds no room,
step 5 lets the owner serve readers of its local files, and does not say that it has begun.

Handing over for a move runs the other way: stop the log and export the tail (`finish`), write the sealed state
(`seal`), and only then drop the local files (`drop_files`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from braid.metadata.store import Condition, Operation
from braid.model.batch.header import BatchHeader
from braid.model.errors import DiskFull, Fenced, InvalidArgument, LogBusy, NotAvailable
from braid.model.ids import Epoch, Offset, Revision
from braid.model.log.replication import LogPosition
from braid.model.names import SegmentName
from braid.ports.disk import FolderLock, lock_folder
from braid.ports.tasks import completed
from braid.storage.chunk import Footer, Index, read_footer
from braid.storage.context import StorageContext, StorageMode
from braid.storage.history.catalog import Catalog, ChunkDescriptor, ProducerObject, SealedState
from braid.storage.history.compaction import check_joined, chosen, may_go
from braid.storage.history.exporter import Exporter, Rider
from braid.storage.history.manifest import segment_folder
from braid.storage.history.object_names import topic_id_of
from braid.storage.history.producer_objects import is_outdated, store_producers
from braid.storage.log import checkpoint as checkpoints
from braid.storage.log import promise as promises
from braid.storage.log.context import LogConfig, LogContext
from braid.storage.log.log import Appended, Log
from braid.storage.log.producers import ProducerTable
from braid.storage.log.promise import ReplicaMark
from braid.storage.log.recovery import RecoveredLog
from braid.storage.log.wal import WalFile
from braid.storage.objects.disk import DiskObjects
from braid.storage.objects.store import ObjectStat
from braid.storage.reader import LogReader, Sources
from braid.storage.recovery_start import RecoverySource, Start
from braid.storage.retention import Aged, RetentionPolicy, expired, held_back, reclaimable, removable
from braid.storage.segment_recovery import last_footer, recover_segment, remove_file

MAX_INHERITED_BYTES: Final = 16 << 10
"""A larger producer table that a log begins with becomes an object. Storing an object takes longer than a transaction,
and producers wait for it."""


class SegmentStorage:
    def __init__(
        self,
        context: StorageContext,
        topic_path: str,
        descriptor: str,
        lock: FolderLock,
        log: Log,
        catalog: Catalog,
        exporter: Exporter,
        start: Start,
        recovered: RecoveredLog,
        begun_at: Revision,
        topic_id: int,
    ) -> None:
        self.log = log
        self.catalog = catalog
        self.exporter = exporter
        self.start = start
        self.recovered = recovered
        """What recovery found and did, for the broker's log."""
        self.begun_at = begun_at
        """The metadata revision of the transaction that began this ownership."""
        self._context = context
        self._topic_id = topic_id
        self._lock = lock
        # Files that the log has forgotten and that are still to be removed. Oldest first, and a removal that fails is
        # tried again before any later file goes: otherwise the next recovery would find a gap and call it damage.
        self._leaving: list[str] = []
        self._housekeeping = asyncio.Lock()
        self._objects_folder = segment_folder(topic_path, descriptor)
        self.sources = Sources(
            log,
            catalog,
            context.objects,
            self._objects_folder,
            cache=context.cache,
            handles=context.handles,
            footers=context.footers,
        )

    @classmethod
    async def open(
        cls,
        context: StorageContext,
        topic_path: str,
        descriptor: str,
        epoch: Epoch,
        config: LogConfig,
        *,
        topic_id: int = 0,
        may_confirm: Callable[[], bool] = lambda: True,
        accept_loss: bool = False,
        elected: LogPosition | None = None,
        replicate: Callable[[Log, Catalog], Awaitable[None]] | None = None,
        conditions: Sequence[Condition] = (),
        operations: Callable[[Offset | None], Sequence[Operation]] = lambda _end: (),
        on_complete: Rider = lambda: ((), ()),
    ) -> SegmentStorage:
        """Open a segment in this epoch. `conditions`, and what `operations` returns for the end of a log that has
        ended, or for None, become part of the transaction that begins the ownership. What `on_complete` returns becomes
        part of the one after which chunks hold a log that has ended.

        Of a segment with replicas, `elected` is what a vote says that this broker holds, if there was one. `replicate`
        begins to copy the log to the followers, and returns when enough of them hold its first batch."""
        SegmentName.at(topic_path, descriptor)  # They become folders, keys and object names: refuse bad ones.
        if epoch < 1:
            raise InvalidArgument(f"{epoch} is no epoch: the first owner's is 1")
        folder = f"{context.folder}/{topic_path}/{descriptor}"
        await completed(context.disk.make_folder(folder))
        async with contextlib.AsyncExitStack() as undo:  # When a step fails, undo the steps before it.
            lock = await lock_folder(context.disk, folder)
            undo.push_async_callback(lock.release)
            catalog = Catalog(context.store, topic_path, descriptor)
            await catalog.load()
            history = segment_folder(topic_path, descriptor)
            start, found, continued = await recover_segment(
                context,
                catalog,
                folder,
                history,
                epoch,
                accept_loss=accept_loss,
                elected=elected,
                replicated=replicate is not None,
            )
            file_closed = asyncio.Event()
            log_context = LogContext(
                disk=context.disk,
                folder=folder,
                epoch=epoch,
                incarnation=context.random.randrange(1, 1 << 32),
                clock=context.clock,
                config=config,
                cache=context.cache,
                preallocated=context.preallocated,
                may_confirm=may_confirm,
                on_closed_file=file_closed.set,
            )
            if replicate is not None:
                await _promise(context, folder, epoch)
            # Of a log that has ended, enough replicas hold everything: its end was noted after that.
            replicated = continued.next_offset if continued.sealed else catalog.next_offset
            log = Log(log_context, continued, replicated=replicated)
            undo.push_async_callback(log.abandon)
            exporter = Exporter(
                log,
                catalog,
                context.objects,
                context.handles,
                topic_path,
                descriptor,
                file_closed,
                context.random,
                topic_id,
                on_complete,
                _link(context),
            )
            if replicate is not None:
                log.confirmed.follow(exporter.on_confirmed)
            begun_at = await _begin(log, catalog, start, replicate, conditions, operations)
            if context.mode.exports_continuously:
                exporter.start()
            undo.pop_all()
        return cls(context, topic_path, descriptor, lock, log, catalog, exporter, start, found, begun_at, topic_id)

    def append(self, batch: bytearray | memoryview, header: BatchHeader | None = None) -> Appended:
        return self.log.append(batch, header)

    def reader(self, offset: int) -> LogReader:
        return LogReader(self.sources, offset)

    @property
    def exports_continuously(self) -> bool:
        """Tell whether closed files become chunks by themselves; otherwise only a move makes chunks."""
        return self._context.mode.exports_continuously

    @property
    def earliest(self) -> Offset:
        return self.sources.earliest

    @property
    def ended(self) -> bool:
        """Tell whether the log has ended for ever, readers may see all of it, and its seal is durable: a reader that
        hears of the end does not look for more."""
        return self.log.seal_is_durable and self.log.confirmed.value >= self.log.end

    @property
    def unexported_bytes(self) -> int:
        """Return how many bytes of batches are not in chunks yet."""
        covered = self.catalog.next_offset
        return sum(file.batch_bytes for file in self.log.files if file.next_offset > covered)

    async def export_now(self) -> None:
        """Make chunks of what the log holds now, while the log goes on. A full log is exported to its end."""
        if not self.log.is_full:
            await self.log.rotate()
        await self.exporter.export_closed()

    async def end_log(
        self, rider: Callable[[Offset], tuple[Sequence[Condition], Sequence[Operation]]] | None = None
    ) -> Offset:
        """End the log for ever: no owner appends anything to it any more. Return the offset at which it ends. One
        transaction notes the end, and does what `rider` returns for it. If this fails, call it again. Producers wait
        for this; `export_end` does the rest."""
        end = await self.log.seal()
        also = rider(end) if rider is not None else ((), ())
        await self.catalog.note_end(end, *also, at_us=self._context.clock.now_us())
        return end

    def export_end(self) -> None:
        """Have the last file of an ended log exported in the background now, not when the file is old."""
        self.log.close_file()
        self.exporter.look()

    async def inherit(
        self, producers: ProducerTable, conditions: Sequence[Condition], operations: Sequence[Operation]
    ) -> None:
        """Begin with what the logs that this one continues know of their producers (`inherited`). Nothing was appended
        yet. When this returns, the next owner knows it too. If this fails, call it again."""
        rows = b"".join(producers.rows())
        kept = rows if len(rows) <= MAX_INHERITED_BYTES else await self._store_inherited(producers)
        await self.catalog.inherit(kept, conditions, operations)
        self.log.inherit(producers)

    async def _store_inherited(self, producers: ProducerTable) -> ProducerObject:
        footer = Footer(
            Offset(0),
            Offset(0),
            0,
            self.log.epoch,
            self.log.epoch,
            sealed=False,
            index=Index(),
            producers=producers,
            size=0,
        )
        await self.catalog.check_held()  # An owner that was replaced leaves no object.
        stored = await store_producers(
            self._context.objects, self._objects_folder, footer, self.log.epoch, self._topic_id
        )
        assert stored is not None
        return stored

    async def finish(self) -> None:
        """Close the log and export all of it. If this fails, call it again."""
        if self.log.is_replicated and self.log.ended is None and self.log.confirmed.value < self.log.end:
            # Followers get nothing more from a log that is closed.
            raise LogBusy(f"records from offset {self.log.confirmed.value} on are not confirmed yet; try again")
        await self.exporter.stop()
        async with self._housekeeping:  # No retention changes the catalog from here on.
            await self.log.close()
        if self.log.failure is not None and not self.log.is_full:
            raise self.log.failure.again()
        await self.exporter.export_closed()
        if self.catalog.next_offset < self.log.end:
            raise LogBusy(f"records from offset {self.catalog.next_offset} on are not confirmed yet; try again")

    async def seal(self, conditions: Sequence[Condition] = (), operations: Sequence[Operation] = ()) -> SealedState:
        """End this ownership, after `finish`: write the sealed state in one transaction with `operations`. If this
        fails, call it again; then call `drop_files`."""
        sealed = SealedState(
            last_committed_offset=self.log.end - 1,
            epoch=self.catalog.last_writer,
            broker_id=self._context.broker_id,
            timestamp=self._context.clock.now_us(),
            ended=self.log.sealed,
        )
        return await self.catalog.seal(sealed, conditions, operations)

    async def drop_files(self) -> None:
        """Remove the local files, after `seal`: chunks hold everything."""
        with contextlib.suppress(DiskFull):  # The next owner writes a manifest too, and this makes room.
            await self.exporter.write_manifest()
        # The checkpoint first: left alone, it would call the missing files a loss.
        await self._remove_files([checkpoints.NAME, *self._leaving, *(file.name for file in self.log.files)])
        await self._release_files()

    async def hand_over(
        self, conditions: Sequence[Condition] = (), operations: Sequence[Operation] = ()
    ) -> SealedState:
        """End this ownership so that any broker can continue. If this fails in between, call it again."""
        await self.finish()
        sealed = await self.seal(conditions, operations)
        await self.drop_files()
        return sealed

    async def apply_retention(
        self, policy: RetentionPolicy, *, needed_from: Offset | None = None, keep_local_bytes: int = 0
    ) -> int:
        """Delete what has outlived the policy, and local files that chunks cover; return how many were deleted."""
        async with self._housekeeping:
            if self.log.ended is not None:
                raise self.log.ended
            return await self._apply_retention(policy, needed_from, keep_local_bytes)

    async def _apply_retention(self, policy: RetentionPolicy, needed_from: Offset | None, keep_local_bytes: int) -> int:
        now_us = self._context.clock.now_us()
        chunks = self.catalog.chunks
        tail = [file for file in self.log.files if file.next_offset > self.catalog.next_offset]
        total = sum(chunk.size for chunk in chunks) + sum(file.batch_bytes for file in tail)
        aged = [Aged(chunk.next_offset, chunk.size, chunk.max_timestamp) for chunk in chunks]
        continuous = self._context.mode.exports_continuously
        count = expired(aged, policy, total_bytes=total, now_us=now_us, needed_from=needed_from, keep_newest=continuous)
        old = chunks[:count]
        if old:
            await self.catalog.remove(old, await self._kept_producers(old))
            await self.exporter.write_manifest()
            for chunk in old:
                await self._context.objects.delete(f"{self._objects_folder}/{chunk.object}")
        gone = reclaimable(
            self.log.files,
            covered=self.catalog.next_offset,
            keep_bytes=keep_local_bytes,
            earliest=self.catalog.earliest,
        )
        if not continuous and not self.catalog.chunks:
            closed = self._closed_history()
            aged = [Aged(file.next_offset, file.size, file.max_timestamp) for file in closed]
            total -= sum(chunk.size for chunk in old)
            closed = closed[: expired(aged, policy, total_bytes=total, now_us=now_us, needed_from=needed_from)]
            if closed:
                await self.catalog.skip_to(closed[-1].next_offset, await self._producers_of(closed[-1]))
            gone += closed
        self.log.forget_files({file.name for file in gone})
        self._leaving += [file.name for file in gone]
        for name in list(self._leaving):
            await self._remove_files([name])
            self._leaving = [each for each in self._leaving if each != name]
        return len(old) + len(gone)

    async def _producers_of(self, file: WalFile) -> bytes:
        """Return what a closed file knows of producers, as far as a log that continues this one would need it."""
        opened = await self._context.disk.open(f"{self.log.folder}/{file.name}")
        try:
            footer = await read_footer(opened, file.size)
        finally:
            await opened.close()
        return b"".join(footer.producers.handed_on().rows())

    def _closed_history(self) -> list[WalFile]:
        """Return the closed files that are history themselves, because no chunk is."""
        return [file for file in removable(self.log.files) if file.next_offset > self.catalog.next_offset]

    def has_outlived(self, policy: RetentionPolicy, needed_from: Offset | None) -> bool:
        """Tell whether the log has ended and all of it has outlived the policy. Then the whole segment may go. An empty
        segment stays as long as a record would that was written at its end: repeats of writes ask all ancestors
        (decision 40)."""
        if not self.log.seal_is_durable or policy.keeps_all:
            return False
        chunks = self.catalog.chunks
        tail = [file for file in self.log.files if file.next_offset > self.catalog.next_offset]
        pieces = [Aged(chunk.next_offset, chunk.size, chunk.max_timestamp) for chunk in chunks]
        pieces += [Aged(file.next_offset, file.size, file.max_timestamp) for file in tail if file.records]
        if not self.log.end and self.catalog.frontier is not None:
            pieces = [Aged(Offset(0), 1, self.catalog.frontier.ended_at)]
        total = sum(piece.size for piece in pieces)
        now_us = self._context.clock.now_us()
        return expired(pieces, policy, total_bytes=total, now_us=now_us, needed_from=needed_from) == len(pieces)

    async def _kept_producers(self, leaving: Sequence[ChunkDescriptor]) -> ProducerObject | None:
        """Store what the newest chunk's footer knows of producers, if that chunk is to be removed."""
        stays = leaving[-1] is not self.catalog.chunks[-1]
        if stays or self.catalog.producers is not None or not self.log.knows_producers:
            return None
        await self.catalog.check_held()  # An owner that was replaced leaves no object.
        footer = await last_footer(self._context, self.catalog, self._objects_folder)
        return await store_producers(
            self._context.objects, self._objects_folder, footer, self.log.epoch, self._topic_id
        )

    def held_back(self, policy: RetentionPolicy, cursors: Mapping[str, Offset]) -> dict[str, int]:
        """Return the bytes that have outlived the policy and that subscriptions have not consumed, by subscription."""
        if policy.keeps_all:
            return {}
        chunks = self.catalog.chunks
        tail = [file for file in self.log.files if file.next_offset > self.catalog.next_offset]
        total = sum(chunk.size for chunk in chunks) + sum(file.batch_bytes for file in tail)
        aged = [Aged(chunk.next_offset, chunk.size, chunk.max_timestamp) for chunk in chunks]
        continuous = self._context.mode.exports_continuously
        if not continuous and not chunks:
            aged = [Aged(file.next_offset, file.size, file.max_timestamp) for file in self._closed_history()]
        now_us = self._context.clock.now_us()
        count = expired(aged, policy, total_bytes=total, now_us=now_us, needed_from=None, keep_newest=continuous)
        return held_back(aged[:count], cursors)

    async def replace_chunks(self, old: Sequence[str], new: str) -> ChunkDescriptor:
        """Put the joined chunk `new`, an object that compaction has made (compaction.py), in the place of the chunks
        with these objects. Can be repeated."""
        if not self._context.mode.exports_continuously:
            raise NotAvailable("chunks on a broker's own disk are not compacted: they are made when a segment moves")
        async with self._housekeeping:  # Neither a sweep nor retention runs while chunks are swapped.
            joined = next((chunk for chunk in self.catalog.chunks if chunk.object == new), None)
            if joined is None:
                replaced = chosen(self.catalog.chunks, old)
                now_us = self._context.clock.now_us()
                joined = await check_joined(
                    self._context.objects, self._context.footers, self._objects_folder, replaced, new, now_us
                )
                await self.catalog.replace(replaced, joined)
            await self.exporter.write_manifest()
            return joined

    async def sweep(self) -> int:
        """Delete objects that no catalog refers to: uploads whose transaction never happened, and, after a while, the
        objects that compaction has made or replaced."""
        async with self._housekeeping:
            now_us = self._context.clock.now_us()  # Before the listing, so that no object looks older than it is.
            stats = {
                stat.name.rpartition("/")[2]: stat for stat in await self._context.objects.list(self._objects_folder)
            }
            orphans = [name for name in stats if self._is_orphan(name) and self._may_go(name, stats, now_us)]
            if orphans:
                await self.catalog.check_held()
            removed = 0
            for name in orphans:
                if self._is_orphan(name):
                    await self._context.objects.delete(stats[name].name)
                    removed += 1
            return removed

    def _may_go(self, name: str, stats: Mapping[str, ObjectStat], now_us: int) -> bool:
        if not name.endswith(".chunk") or self._is_of_another_topic(name):
            return True
        holder = self.catalog.find(int(name.partition("-")[0]))
        return may_go(stats[name], stats.get(holder.object) if holder is not None else None, now_us)

    def _is_orphan(self, name: str) -> bool:
        """Ask the catalog as it is now: the exporter may have added the chunk since it was listed."""
        base = name.partition("-")[0]
        chunk = name.endswith(".chunk") and base.isdigit() and int(base) < self.catalog.next_offset
        outdated = is_outdated(name, self.catalog.next_offset, self.log.epoch)
        if not chunk and not outdated and not self._is_of_another_topic(name):
            return False
        return all(each.object != name for each in self.catalog.objects)

    def _is_of_another_topic(self, name: str) -> bool:
        """Tell whether an upload of a deleted topic of the same name has left this object."""
        return self._topic_id != 0 and topic_id_of(name) not in (0, self._topic_id)

    async def close(self) -> None:
        """Stop in order: the same broker opens the segment again, from its files."""
        await self.exporter.stop()
        await self.log.close()
        await self._release_files()

    async def abandon(self) -> None:
        """Stop immediately, without writing anything: another broker owns the segment, or this process is to die."""
        await self.exporter.stop()
        await self.log.abandon()
        await self._release_files()

    async def _release_files(self) -> None:
        await self._context.handles.forget_all(self.log.number)
        self._context.footers.forget_all(self.log.number)
        await self._lock.release()

    async def _remove_files(self, names: list[str]) -> None:
        for name in names:
            path = f"{self.log.folder}/{name}"
            await self._context.handles.forget(self.log.number, path)
            self._context.footers.forget(self.log.number, path)
            await remove_file(self._context.disk, path)


async def _promise(context: StorageContext, folder: str, epoch: Epoch) -> None:
    """Promise the epoch, as its followers do. This broker's files are the log, so it is a member."""
    mark = await promises.read(context.disk, folder)
    if mark.promised > epoch:
        raise Fenced(f"the copy under {folder} has promised epoch {mark.promised}, and {epoch} is over")
    await promises.write(context.disk, folder, ReplicaMark(promised=epoch, member=True))


async def _begin(
    log: Log,
    catalog: Catalog,
    start: Start,
    replicate: Callable[[Log, Catalog], Awaitable[None]] | None,
    conditions: Sequence[Condition],
    operations: Callable[[Offset | None], Sequence[Operation]],
) -> Revision:
    """Open the log and say in the catalog that this owner has begun; returns the revision of that.

    A full disk has no room for the first batch. If the log is on this disk, no other broker can serve it. So this owner
    then serves readers as a log does that has become full, and has not begun. Recovery has synced what they read."""
    try:
        await log.open()
    except DiskFull:
        if replicate is not None:
            raise  # Other replicas can serve the log, and its followers are not asked what is confirmed.
        if start.source is not RecoverySource.LOCAL or not log.is_full:
            raise
        return await catalog.hold(conditions, operations(None))
    if replicate is not None:
        await replicate(log, catalog)
    end = log.end if log.sealed else None
    lost = start.loss_accepted and start.source is RecoverySource.CHUNKS
    return await catalog.begin(conditions, operations(end), first=log.end, end=end, lost=lost)


def _link(context: StorageContext) -> Callable[[str, str], Awaitable[None]] | None:
    """Return how a file of the log becomes an object without a copy, where both lie on the broker's own disk."""
    objects = context.objects
    return objects.link if context.mode is StorageMode.LOCAL and isinstance(objects, DiskObjects) else None
