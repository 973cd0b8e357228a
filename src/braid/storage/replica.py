"""One copy of a segment's log on a follower: opened, cut back, begun anew, and what it has promised.

A copy begins at the frontier of the catalog: chunks hold what is before it. So a new follower costs the tail of the
log, not its history. What a copy knows of producers comes from the catalog, too, as far as its own files do not say it.

Every step can be repeated after a crash. A copy is cut from its end: the checkpoint goes first, because it would call
the rest a loss; then the newest files; then the end of the file that has the cut. After a crash in between, the copy
is still a beginning of the log, and only too long. A copy that loses what it held is no member any more *before* it
loses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable

import msgspec

from braid.model.errors import BraidError, Fenced, OutOfSequence, RecoveryConflict
from braid.model.ids import Epoch, Offset
from braid.model.log.replication import LogPosition
from braid.model.topic import Durability
from braid.ports.disk import Disk, FolderLock, lock_folder
from braid.storage.context import StorageContext
from braid.storage.frames import BatchMark, LogFrames
from braid.storage.history.catalog import Catalog
from braid.storage.history.manifest import segment_folder
from braid.storage.log import checkpoint as checkpoints
from braid.storage.log import promise as promises
from braid.storage.log.context import MAX_FILE_BYTES, FileConfig, LogConfig, LogContext
from braid.storage.log.promise import ReplicaMark
from braid.storage.log.recovery import RecoveredLog, recover, repair
from braid.storage.log.replica_log import ReplicaLog
from braid.storage.log.wal import FrameWalk, WalFile, base_of
from braid.storage.retention import reclaimable
from braid.storage.segment_recovery import add_known_producers, remove_file

_AS_THE_OWNER = FileConfig(file_bytes=MAX_FILE_BYTES, file_age_s=math.inf)
"""The owner's pieces say where files begin."""


class ReplicaStorage:
    def __init__(
        self,
        context: StorageContext,
        topic_path: str,
        descriptor: str,
        config: LogConfig,
        lock: FolderLock,
        mark: ReplicaMark,
    ) -> None:
        self._context = context
        self._keys = (topic_path, descriptor)
        self._folder = folder_of(context, topic_path, descriptor)
        self._config = msgspec.structs.replace(config, durability=Durability.REPLICATED, files=_AS_THE_OWNER)
        self._lock = lock
        self._mark = mark
        self._promising = Epoch(0)
        """The epoch that is being promised: the promise may not be on the disk yet."""
        self._log: ReplicaLog

    @classmethod
    async def open(cls, context: StorageContext, topic_path: str, descriptor: str, config: LogConfig) -> ReplicaStorage:
        """Open the copy on this broker's disk. Where there is none, or one that ends before the frontier, or a damaged
        one, it begins at the frontier."""
        folder = folder_of(context, topic_path, descriptor)
        await context.disk.make_folder(folder)
        lock = await lock_folder(context.disk, folder)
        try:
            mark = await promises.read(context.disk, folder)
            replica = cls(context, topic_path, descriptor, config, lock, mark)
            await replica._open_log()
            return replica
        except BaseException:
            await lock.release()
            raise

    @property
    def disk(self) -> Disk:
        return self._context.disk

    @property
    def folder(self) -> str:
        return self._folder

    @property
    def position(self) -> LogPosition:
        """What the disk holds."""
        return self._log.position

    def reached(self, offset: Offset) -> asyncio.Future[None]:
        """Return a future that is done when the disk holds everything below this offset."""
        return self._log.synced.reached(offset)

    @property
    def record_epoch(self) -> Epoch:
        return self._log.record_epoch

    @property
    def base(self) -> Offset:
        """The first offset that the copy holds; its end if it holds none."""
        return self._log.base_offset

    @property
    def file_base(self) -> Offset | None:
        """Where the newest file begins; None if there is none."""
        return self._log.files[-1].base_offset if self._log.files else None

    @property
    def promised(self) -> Epoch:
        return Epoch(max(self._mark.promised, self._promising, self._log.position.epoch))

    @property
    def member(self) -> bool:
        return self._mark.member

    @property
    def failure(self) -> BraidError | None:
        return self._log.failure

    async def promise(self, epoch: Epoch) -> LogPosition:
        """Take no batch of a lower epoch any more, for ever. Returns what the disk holds, when it has all batches that
        were taken before: their owner is told of them."""
        if epoch < self.promised:
            raise Fenced(f"the copy under {self._folder} has promised epoch {self.promised}, and {epoch} is over")
        self._promising = epoch
        if epoch > self._mark.promised:
            await self._note(msgspec.structs.replace(self._mark, promised=epoch))
        await self._log.flush()
        return self.position

    async def admit(self) -> None:
        """Become a member: the owner has seen this copy hold everything that is confirmed."""
        if not self._mark.member:
            await self._note(msgspec.structs.replace(self._mark, member=True))

    def apply(self, epoch: Epoch, file_base: Offset, piece: bytearray | memoryview) -> int:
        """Take a piece of the log of the owner in this epoch (`ReplicaLog.apply`)."""
        if epoch < self.promised:
            raise Fenced(f"the copy under {self._folder} has promised epoch {self.promised}, and {epoch} is over")
        return self._log.apply(file_base, piece)

    async def held(self, number: int) -> LogPosition:
        return await self._log.held(number)

    async def last_batch(self) -> BatchMark | None:
        """Return what tells the copy's last records from others at the same offsets; None if it holds no record."""
        return await LogFrames(self._log, self._context.handles).mark_before(self.position.end)

    async def refresh(self) -> None:
        """Look at the catalog again, if the copy holds no record. The frontier may have gone on, and the log may have
        inherited producers of other logs since the copy was opened."""
        if self.base == self.position.end:
            await self._end_log(self._log.abandon)
            await self._open_log()

    async def cut_back(self, end: Offset) -> None:
        """Drop all records from offset `end` on, and all control batches that stand there or after it."""
        if end > self.position.end:
            return
        if end < self.base:
            raise OutOfSequence(f"the copy under {self._folder} begins at {self.base} and cannot be cut back to {end}")
        files = list(self._log.files)
        cut = await self._place_of(files, end)
        await self._end_log(self._log.abandon)
        await remove_file(self._context.disk, f"{self._folder}/{checkpoints.NAME}")
        for file in reversed(files):
            if cut is None or file.base_offset > cut[0].base_offset:
                await remove_file(self._context.disk, f"{self._folder}/{file.name}")
        if cut is not None:
            await self._truncate(*cut)
        await self._open_log()
        if self.position.end != end:
            raise OutOfSequence(f"the copy under {self._folder} ends at {self.position.end}, and was cut at {end}")

    async def reset(self) -> None:
        """Drop the copy and begin at the frontier. It is no member any more."""
        await self._end_log(self._log.abandon)
        await self._begin_anew()
        await self._open_log()

    async def drop_covered(self, offset: Offset) -> None:
        """Remove files that are not needed any more: chunks hold everything below this offset."""
        gone = reclaimable(self._log.files, covered=offset, keep_bytes=0)
        if gone:
            self._log.forget_files({file.name for file in gone})
            for file in gone:  # The oldest first: what is left has no gap.
                path = f"{self._folder}/{file.name}"
                await self._context.handles.forget(self._log.number, path)
                await remove_file(self._context.disk, path)

    async def close(self) -> None:
        """Stop in order, when the disk has all that was taken. The newest file stays open: the owner's goes on."""
        with contextlib.suppress(BraidError):  # What could not be stored was not answered either.
            await self._log.flush()
        await self._stop(self._log.abandon)

    async def abandon(self) -> None:
        await self._stop(self._log.abandon)

    async def _stop(self, stop: Callable[[], Awaitable[None]]) -> None:
        try:
            with contextlib.suppress(BraidError):  # What could not be stored was not answered either.
                await self._end_log(stop)
        finally:
            await self._lock.release()

    async def _end_log(self, stop: Callable[[], Awaitable[None]]) -> None:
        try:
            await stop()
        finally:
            await self._context.handles.forget_all(self._log.number)

    async def _note(self, mark: ReplicaMark) -> None:
        await promises.write(self._context.disk, self._folder, mark)
        self._mark = mark

    async def _open_log(self) -> None:
        catalog = Catalog(self._context.store, *self._keys)
        await catalog.load()
        found = await self._recover(catalog)
        if found.files and found.files[0].base_offset > catalog.next_offset:
            # Nobody has what is between chunks and files: a removal of this copy did not come to its end.
            await self._begin_anew()
            found = RecoveredLog()
        if found.next_offset < catalog.next_offset:
            # It was never counted for what chunks hold and it does not: a member stays one.
            await self._remove_files()
            found = RecoveredLog(next_offset=catalog.next_offset)
        elif found.files and found.files[-1].closed:
            found = await self._reopen_newest(found)
        await add_known_producers(self._context, catalog, segment_folder(*self._keys), found)
        if found.files:
            await repair(self._context.disk, self._folder, found)
        log = ReplicaLog(
            LogContext(
                disk=self._context.disk,
                folder=self._folder,
                epoch=Epoch(max(self._mark.promised, 1)),
                incarnation=1,  # Both are the owner's, in every batch.
                clock=self._context.clock,
                config=self._config,
                cache=self._context.cache,
            ),
            found,
        )
        await log.open()
        self._log = log

    async def _recover(self, catalog: Catalog) -> RecoveredLog:
        """Find out what the folder holds. A damaged copy is worth nothing: others have the log.

        If chunks have the whole of a log that has ended, nothing is lost: a member stays one. Of such a log an owner
        may keep the checkpoint alone, which then speaks of files that are not there."""
        try:
            found = await recover(self._context.disk, self._folder)
            if not found.damage:
                return found
        except RecoveryConflict:
            pass
        if catalog.frontier is not None and catalog.frontier.complete:
            await self._remove_files()
        else:
            await self._begin_anew()
        return RecoveredLog()

    async def _reopen_newest(self, found: RecoveredLog) -> RecoveredLog:
        """Take the footer off the newest file. This broker was the owner and has closed the file; the next owner's file
        that begins at the same offset goes on."""
        newest = found.files[-1]
        await remove_file(self._context.disk, f"{self._folder}/{checkpoints.NAME}")  # It says how long the file is.
        await self._truncate(newest, newest.batch_bytes)
        return await recover(self._context.disk, self._folder)

    async def _truncate(self, file: WalFile, size: int) -> None:
        opened = await self._context.disk.open(f"{self._folder}/{file.name}")
        try:
            await opened.truncate(size)
            await opened.sync()
        finally:
            await opened.close()

    async def _begin_anew(self) -> None:
        await self._note(msgspec.structs.replace(self._mark, member=False))
        await self._remove_files()

    async def _remove_files(self) -> None:
        await remove_file(self._context.disk, f"{self._folder}/{checkpoints.NAME}")
        names = [stat.name for stat in await self._context.disk.list(self._folder) if base_of(stat.name) is not None]
        for name in sorted(names, reverse=True):
            await remove_file(self._context.disk, f"{self._folder}/{name}")

    async def _place_of(self, files: list[WalFile], end: Offset) -> tuple[WalFile, int] | None:
        """Return the file that has the cut, and the byte of it. None if nothing stays."""
        for file in files:
            if file.base_offset >= end:
                return None
            if file.next_offset >= end:
                return file, await self._byte_of(file, end)
        return None

    async def _byte_of(self, file: WalFile, end: Offset) -> int:
        """Return the byte after the last record below `end`."""
        opened = await self._context.disk.open(f"{self._folder}/{file.name}")
        try:
            position = 0
            walk = FrameWalk(opened, file.batch_bytes, 0, file.base_offset)
            while window := await walk.next_window():
                for at, header in window:
                    if header.base_offset >= end:
                        return position
                    if header.next_offset > end:
                        raise OutOfSequence(f"{self._folder} cannot be cut at offset {end}, inside a batch")
                    position = at + header.size
            return position
        finally:
            await opened.close()


def folder_of(context: StorageContext, topic_path: str, descriptor: str) -> str:
    """Return the folder on the broker's disk that holds its copy of a segment's log."""
    return f"{context.folder}/{topic_path}/{descriptor}"
