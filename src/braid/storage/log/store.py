"""What every copy of a log is: files, a group commit that appends to them, and how far the disk has come.

An owner's log (log.py) and a follower's copy (replica_log.py) differ in where their batches come from. The owner gives
batches their offsets; a follower takes them as the owner has stamped them. All else is the same, and is here: batches
go to the disk in groups, watermarks rise, files are closed in order, and the first failure ends it all.

A failed write or sync ends the log: nothing counts any more, now or by a later sync that happens to work. The log must
be opened again, and recovery finds out what the disk really holds.

A full disk is the one failure that leaves no doubt. What was written is all there, and it is all that there is: the
log *is full*, ends after the last batch that was written, and can still be read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Final, NamedTuple

from braid.model.errors import BraidError, DiskFull, Fenced, LogClosed, LogFailed
from braid.model.ids import Epoch, Offset
from braid.model.log.replication import LogPosition
from braid.storage.log.commit import CommitGroup, GroupCommit
from braid.storage.log.context import LogContext
from braid.storage.log.recovery import RecoveredLog
from braid.storage.log.wal import WalFile
from braid.storage.log.watermark import Watermark
from braid.storage.log.writer import WalWriter

_log_numbers: Final = itertools.count(1)


class PlacedGroup(NamedTuple):
    """Batches that stand in a file, one after the other."""

    file_base: Offset
    """Where the file begins."""
    start: int
    """The byte of the file at which the first batch stands."""
    group: CommitGroup


class LogStore:
    """One copy of a segment's log on one broker. Everything here runs on one event loop."""

    def __init__(self, context: LogContext, recovered: RecoveredLog) -> None:
        self.folder: Final = context.folder
        self.config: Final = context.config
        self.number: Final = next(_log_numbers)
        self.written: Final = Watermark(recovered.next_offset)
        self.synced: Final = Watermark(recovered.next_offset)
        self._on_written: Callable[[], None] | None = None
        self._writer: Final = WalWriter(context, list(recovered.files), recovered.producers.copy())
        self._commit: Final = GroupCommit(context, self._writer, self, recovered.next_offset)
        self._cache = context.cache
        self._failure: BraidError | None = None
        self._closed = False
        self._released = False
        # In numbers of batches, because control batches take no offset.
        self._flushed = Watermark(0)

    @property
    def files(self) -> list[WalFile]:
        """The local files, oldest first; the newest may still grow."""
        return self._writer.files

    @property
    def base_offset(self) -> Offset:
        """The first offset that the local files hold."""
        return self.files[0].base_offset if self.files else self.end

    @property
    def end(self) -> Offset:
        """The offset that the next record gets."""
        return Offset(self.written.value)

    @property
    def position(self) -> LogPosition:
        """How far the files reach. Where each group is synced, their disk holds all of it."""
        last = next((file for file in reversed(self.files) if file.last_epoch), None)
        if last is None:
            return LogPosition(end=Offset(self.written.value))
        return LogPosition(epoch=last.last_epoch, end=Offset(self.written.value), sealed=last.sealed)

    @property
    def record_epoch(self) -> Epoch:
        """The epoch of the last record in the files; 0 if there is none, or if it is not known."""
        return next((file.record_epoch for file in reversed(self.files) if file.records), Epoch(0))

    @property
    def pending_bytes(self) -> int:
        return self._commit.pending_bytes

    @property
    def failure(self) -> BraidError | None:
        return self._failure

    @property
    def ended(self) -> BraidError | None:
        """Tell why this log serves no readers any more: it was closed or abandoned, or has failed. The next owner may
        give the names of its files to other files. A full disk stops only writers, until the log is closed."""
        failed = self._failure is not None and not self.is_full
        return self._refusal() if failed or self._released or self._closed else None

    @property
    def is_full(self) -> bool:
        """Tell whether the log has stopped only because its disk is full."""
        return isinstance(self._failure, DiskFull)

    async def close_newest(self) -> None:
        """Close the newest file of a full log. Its footer may fit into what the file has on the disk; `DiskFull` if it
        does not."""
        await self._commit.settled()
        await self._writer.close_newest()

    def footer_of_newest(self) -> bytes:
        """Return the footer that makes a chunk of the newest file of a full log: the disk has no room for it."""
        return self._writer.footer()

    async def flush(self) -> None:
        """Return when everything that was taken so far is synced, whatever the durability level."""
        self._commit.want_sync()
        await self._flushed.reached(self._commit.last_number)

    async def rotate(self) -> None:
        """Close the current file, if it has records, so that it can be exported."""
        self._commit.want_rotation()
        await self._flushed.reached(self._commit.last_number)
        await self._commit.rotated()
        if self._failure is not None:
            raise self._failure.again()

    def close_file(self) -> None:
        """Have the current file closed, if it has records. Does not wait for it."""
        self._commit.want_rotation()

    async def close(self) -> None:
        """Stop in order: write and sync everything, close the file, leave a checkpoint. Closing twice is fine."""
        if self._closed or self._failure is not None:
            return await self._release()
        self._closed = True
        try:
            await self.rotate()
            self._writer.want_checkpoint(self.synced.value)
        finally:
            await self._release()

    async def abandon(self) -> None:
        """Stop without writing anything more, as after a lost lease. A write in flight may still reach the disk."""
        self._fail(LogClosed(f"the log under {self.folder} was abandoned"))
        await self._release()

    def forget_files(self, names: set[str]) -> None:
        """Drop closed files that the caller is about to remove: chunks cover them, or retention has expired."""
        if self._closed or self._failure is not None:
            raise self._refusal()
        self._writer.forget(names)
        self._writer.want_checkpoint(self.synced.value)

    def watch(
        self, on_start: Callable[[PlacedGroup], None] | None, on_written: Callable[[], None] | None = None
    ) -> None:
        """Call `on_start` with each group when the disk begins to write it, and `on_written` when the disk has taken
        one. None: call nobody any more."""

        def started(group: CommitGroup) -> None:
            assert on_start is not None
            newest = self.files[-1]
            on_start(PlacedGroup(newest.base_offset, newest.batch_bytes, group))

        self._commit.on_start = started if on_start is not None else None
        self._on_written = on_written

    # What the commit tells us.

    def on_written(self, group: CommitGroup) -> None:
        """Raise the watermarks over the group: callers that wait for it go on."""
        end = group.headers[-1].next_offset
        self.written.advance(end)
        if group.synced and self._failure is None:
            self.on_synced(group.last_number, end)
        if self._on_written is not None and self._failure is None:
            self._on_written()

    def on_synced(self, number: int, next_offset: Offset) -> None:
        self.synced.advance(next_offset)
        self._flushed.advance(number)

    def on_commit_failed(self, error: BraidError) -> None:
        self._fail(error)

    # The end.

    def _refusal(self) -> BraidError:
        if self._failure is not None:
            return self._failure.again()
        return LogClosed(f"the log under {self.folder} is closed")

    def _fail(self, cause: BraidError) -> None:
        if self._failure is not None:
            return
        if isinstance(cause, DiskFull | Fenced | LogClosed):
            self._failure = cause
        else:
            self._failure = LogFailed(f"the log under {self.folder} has stopped confirming: {cause}")
            self._failure.__cause__ = cause
        self._commit.stop()
        self._fail_watermarks(self._failure)

    def _watermarks(self) -> tuple[Watermark, ...]:
        """Return the watermarks that count records."""
        return self.written, self.synced

    def _fail_watermarks(self, error: BraidError) -> None:
        for watermark in (*self._watermarks(), self._flushed):
            watermark.fail(error)

    async def _release(self) -> None:
        self._released = True
        await self._commit.end()
        self._fail_watermarks(self._refusal())
