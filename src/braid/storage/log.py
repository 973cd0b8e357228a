"""The log: one writer, group commit, three moments at which an append counts as done.

**Append** is a plain function call: it checks for a retry, assigns the offset and puts the batch in a queue. Nothing
else assigns offsets, and the queue is written in order, so the order of offsets is the order in the file (I1).

**Commit** is one task, alive only while there is something to write. It takes everything that has gathered, writes and
syncs it in one call to the disk, moves the watermarks, and looks again; what arrives meanwhile gathers for the next
round. So the disk itself is the clock: an idle disk commits a lone record at once, a busy one commits many together.
A busy disk gets its next group before the confirms of the last one go out. The task alone touches the files
(writer.py).

**Confirm** is waiting for a watermark: `written` (in the page cache) for durability `memory`, `synced` for `fsync`,
`replicated` for `replicated`, where whoever replicates moves it. The same watermark is where consumers stop (I7).

A failed write or sync ends the log: nothing is confirmed any more, now or by a later sync that happens to work. It must
be opened again, and recovery finds out what the disk really holds. Losing the lease ends it in the same way (I3).
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Final, NamedTuple

import msgspec

from braid.model.batch import (
    MAX_EPOCH,
    MAX_INCARNATION,
    MAX_OFFSET,
    BatchHeader,
    Flag,
    control_batch,
    parse_header,
    stamp,
    verify,
)
from braid.model.errors import (
    BraidError,
    BrokenInvariant,
    DiskFull,
    Fenced,
    InvalidArgument,
    LogBusy,
    LogClosed,
    LogFailed,
    LogSealed,
    OutOfSequence,
)
from braid.model.ids import Epoch, Offset
from braid.model.topic import Durability
from braid.ports.clock import Clock
from braid.ports.disk import Disk
from braid.storage.cache import HotCache
from braid.storage.recovery import Recovered
from braid.storage.spares import SpareFiles
from braid.storage.wal import WalFile
from braid.storage.watermark import Watermark
from braid.storage.writer import FileConfig, WalWriter

MAX_COMMIT_LAG: Final = 1 << 31
"""Sync at the latest when so many records are not: a batch states its lag in 32 bits."""


class LogConfig(msgspec.Struct, frozen=True, kw_only=True):
    durability: Durability = Durability.FSYNC
    files: FileConfig = FileConfig()
    max_group_bytes: int = 8 << 20
    """The most that one commit writes: bounds the time that a batch waits for the group before it."""
    max_pending_bytes: int = 64 << 20
    """The most that may wait for the disk; beyond it `append` raises LogBusy (I12)."""
    memory_sync_bytes: int = 16 << 20
    memory_sync_s: float = 1.0
    """Durability `memory` syncs after this much or this long, so that a lost machine costs about a second."""
    on_sync: Callable[[float], None] | None = None
    """Told after each commit that was synced how many seconds its write and sync took."""

    def __post_init__(self) -> None:
        if not isinstance(self.durability, Durability):
            raise InvalidArgument(
                f"{self.durability!r} is no durability: choose one of {', '.join(map(str, Durability))}"
            )
        for name in ("max_group_bytes", "max_pending_bytes", "memory_sync_bytes", "memory_sync_s"):
            if not getattr(self, name) > 0:
                raise InvalidArgument(f"{name} is {getattr(self, name)}; it must be above 0")


class Appended(NamedTuple):
    base_offset: Offset | None
    """None only for a retry of a batch so old that its place is forgotten."""
    next_offset: Offset
    duplicate: bool


class _State(Enum):
    OPEN = "open"
    SEALED = "sealed"
    CLOSED = "closed"
    FAILED = "failed"


_Pending = tuple[bytearray | memoryview, BatchHeader, Offset, int, int]
"""A batch, its header, base offset, append time and number. A plain tuple: one is made for each batch."""


_Group = tuple[list[bytearray | memoryview], list[BatchHeader], int, bool]
"""Batches that the disk has taken, their headers, the number of the last one, and whether they are synced."""

_log_numbers: Final = itertools.count(1)
_NOTHING: Final = Offset(0)


def _always() -> bool:
    return True


class Log:
    """The hot part of one segment, on one broker, in one epoch. Everything here runs on one event loop."""

    def __init__(
        self,
        disk: Disk,
        folder: str,
        recovered: Recovered,
        epoch: Epoch,
        *,
        incarnation: int,
        clock: Clock,
        config: LogConfig,
        cache: HotCache,
        spares: SpareFiles | None = None,
        may_confirm: Callable[[], bool] = _always,
        on_closed_file: Callable[[], None] | None = None,
        replicated: Offset = _NOTHING,
    ) -> None:
        """`replicated` is what is known to be on enough replicas already, if that is what confirms wait for."""
        if not 0 < epoch <= MAX_EPOCH:
            raise InvalidArgument(f"epoch {epoch} cannot open {folder}: epochs are numbers from 1 to {MAX_EPOCH}")
        if not 0 < incarnation <= MAX_INCARNATION:
            raise InvalidArgument(f"the incarnation is {incarnation}; it must be drawn from 1 to {MAX_INCARNATION}")
        if epoch <= recovered.last_epoch:
            raise Fenced(f"epoch {epoch} cannot open {folder}: epoch {recovered.last_epoch} has written there")
        self.number: Final = next(_log_numbers)
        self.folder: Final = folder
        self.epoch: Final = epoch
        self._incarnation: Final = incarnation
        self.config: Final = config
        self.written: Final = Watermark(recovered.next_offset)
        self.synced: Final = Watermark(recovered.next_offset)
        self.replicated: Final = Watermark(min(replicated, recovered.next_offset))
        self._writer = WalWriter(
            disk,
            folder,
            list(recovered.files),
            recovered.producers.copy(),
            clock=clock,
            config=config.files,
            spares=spares,
            on_closed_file=on_closed_file,
            on_sync=config.on_sync,
        )
        self._clock = clock
        self._cache = cache
        self._may_confirm = may_confirm
        self._producers = recovered.producers
        self._end = recovered.next_offset
        self._state = _State.SEALED if recovered.sealed else _State.OPEN
        self._sealed = recovered.sealed
        self._seal_number = 0
        self._failure: BraidError | None = None
        self._released = False
        self._pending: deque[_Pending] = deque()
        self._unconfirmed: deque[_Group] = deque()
        self._pending_bytes = 0
        # Batches are numbered, because control batches take no offset: what is flushed is counted in numbers.
        self._last_number = 0
        self._flushed = Watermark(0)
        self._unsynced_bytes = 0
        self._rotate_wanted = False
        self._sync_wanted = False
        self._sync_timer: asyncio.TimerHandle | None = None
        self._age_timer: asyncio.TimerHandle | None = None
        self._committing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Returns when this epoch's first batch, a BEGIN, is durable: from then on this owner has left a trace."""
        await self._writer.open()
        if self._sealed:
            self._end_watermarks()
        else:
            self._enqueue_control(Flag.BEGIN)
            await self.flush()

    @property
    def files(self) -> list[WalFile]:
        """The local files, oldest first; the newest may still grow."""
        return self._writer.files

    @property
    def base_offset(self) -> Offset:
        """The first offset that the local files hold."""
        return self.files[0].base_offset if self.files else self._end

    @property
    def end(self) -> Offset:
        """The offset that the next record gets."""
        return self._end

    @property
    def pending_bytes(self) -> int:
        return self._pending_bytes

    @property
    def sealed(self) -> bool:
        """Whether the log has ended for ever; stays true when it is closed."""
        return self._sealed

    @property
    def seal_is_durable(self) -> bool:
        return self._sealed and self._flushed.value >= self._seal_number

    @property
    def failure(self) -> BraidError | None:
        return self._failure

    @property
    def ended(self) -> BraidError | None:
        """Why this log serves no readers any more, if it was closed or abandoned or has failed: the next owner may
        give the names of its files to others. A full disk stops only writers, until the log is closed."""
        failed = self._state is _State.FAILED and not isinstance(self._failure, DiskFull)
        return self._refusal() if failed or self._released or self._state is _State.CLOSED else None

    @property
    def confirmed(self) -> Watermark:
        """What this log's durability waits for: confirms and consumers both stop here."""
        match self.config.durability:
            case Durability.MEMORY:
                return self.written
            case Durability.FSYNC:
                return self.synced
            case Durability.REPLICATED:
                return self.replicated

    def append(self, batch: bytearray | memoryview, header: BatchHeader | None = None) -> Appended:
        """Give a batch its place. It is stored when `confirmed` has reached `next_offset`.

        The log keeps the buffer and writes the owner's half of the header into it. `header` is what `verify` returned
        for this very buffer; without it, the batch is verified here.
        """
        if self._state is not _State.OPEN:
            raise self._refusal()
        if header is None:
            header = verify(batch)
        if header.count == 0:
            raise InvalidArgument("control batches are made by the log itself")
        if not isinstance(batch, bytearray) and memoryview(batch).readonly:
            raise InvalidArgument("the log writes into the buffer that it is given: pass a bytearray, not bytes")
        size = len(batch)
        if size != header.size:
            raise InvalidArgument(f"the buffer has {size} bytes, the batch in it {header.size}")
        if not self._pending:  # Those that join a group share its fate: its commit asks again.
            self._check_lease()
        elif self._pending_bytes + size > self.config.max_pending_bytes:
            raise LogBusy(f"{self._pending_bytes} bytes wait for the disk under {self.folder}; try again in a moment")
        try:
            duplicate = self._producers.check(header)
        except OutOfSequence:
            self._check_lease()  # An owner of the past does not know what its producers have stored since (I3).
            raise
        if duplicate is not None:
            self._check_lease()
            return Appended(duplicate.base_offset, duplicate.next_offset, duplicate=True)
        base = self._end
        if base + header.count > MAX_OFFSET:
            raise InvalidArgument(
                f"{header.count} records do not fit into {self.folder}: it ends at offset {base}, and the highest "
                f"offset is {MAX_OFFSET}"
            )
        self._end = Offset(base + header.count)
        self._producers.apply(header, base)
        self._enqueue(batch, header, base)
        return Appended(base, self._end, duplicate=False)

    async def confirm(self, appended: Appended) -> None:
        """Return when the append is stored at this log's durability level, and this owner may still say so (I3)."""
        await self.confirmed.reached(appended.next_offset)
        self._check_lease()

    async def flush(self) -> None:
        """Return when everything appended so far is synced, whatever the durability level."""
        self._sync_wanted = True
        self._start_commit()
        await self._flushed.reached(self._last_number)

    async def seal(self) -> Offset:
        """End the log for ever: nothing is appended behind the seal. Returns the offset at which it ends."""
        if self._state is _State.OPEN:
            self._state = _State.SEALED
            self._sealed = True
            self._enqueue_control(Flag.SEAL)
            self._seal_number = self._last_number
        elif self._state is not _State.SEALED:
            raise self._refusal()
        await self.flush()
        self._end_watermarks()
        return self._end

    def note_replicated(self, offset: Offset) -> None:
        """Every record below `offset` is durable on enough replicas, of which this one is the first."""
        if offset > self.synced.value:
            raise BrokenInvariant(f"I2: offset {offset} cannot be replicated, only {self.synced.value} is synced here")
        self._check_lease()
        self.replicated.advance(offset)

    async def rotate(self) -> None:
        """Close the current file, if it has records, so that it can be exported."""
        self._rotate_wanted = True
        await self.flush()
        while self._committing is not None and self._rotate_wanted:
            await asyncio.wait([self._committing])
        if self._failure is not None:
            raise self._failure.again()

    async def close(self) -> None:
        """Orderly stop: write and sync everything, close the file, leave a checkpoint. Closing twice is fine."""
        if self._state is _State.CLOSED or self._failure is not None:
            return await self._release()
        self._state = _State.CLOSED
        try:
            await self.rotate()
            self._writer.want_checkpoint(self.synced.value)
        finally:
            await self._release()

    async def abandon(self) -> None:
        """Stop without writing anything more, as after a lost lease. What is in flight may still reach the disk."""
        self._fail(LogClosed(f"the log under {self.folder} was abandoned"))
        await self._release()

    def forget_files(self, names: set[str]) -> None:
        """Closed files that are about to be removed: covered by chunks, or beyond retention."""
        if self._state is _State.CLOSED or self._failure is not None:
            raise self._refusal()
        self._writer.forget(names)
        self._writer.want_checkpoint(self.synced.value)

    def _enqueue_control(self, flag: Flag) -> None:
        batch = control_batch(flag)
        self._enqueue(batch, parse_header(batch), self._end)

    def _enqueue(self, batch: bytearray | memoryview, header: BatchHeader, base: Offset) -> None:
        self._last_number += 1
        self._pending.append((batch, header, base, self._clock.now_us(), self._last_number))
        self._pending_bytes += len(batch)
        self._start_commit()

    def _start_commit(self) -> None:
        if self._committing is None and self._failure is None:
            self._committing = asyncio.get_running_loop().create_task(self._commit_all())

    async def _commit_all(self) -> None:
        try:
            while self._failure is None:
                if self._pending:
                    await self._commit_group()
                elif self._sync_wanted:
                    await self._sync()
                elif self._rotate_wanted:
                    await self._writer.close_current()
                    self._rotate_wanted = False
                else:
                    break
        except BraidError as error:
            self._fail(error)
        except BaseException as error:
            # Also when somebody cancelled this task: what it was writing is neither stored nor not stored.
            self._fail(BrokenInvariant(f"committing to {self.folder} broke: {error!r}"))
            raise
        finally:
            self._committing = None

    async def _commit_group(self) -> None:
        """Write what has gathered, as far as it fits the file and the group limit, in one call to the disk."""
        first_batch, _, first_offset, _, first_number = self._pending[0]
        unclosed = self._writer.files[-1].name if self._writer.files else ""
        room = await self._writer.room_for(len(first_batch), first_offset)
        if self._has_failed():
            return  # abandoned meanwhile
        if self._unsynced_bytes and self._writer.files[-1].name != unclosed:
            self._note_synced(first_number - 1, first_offset)  # closing a file syncs it
        room = min(room, max(self.config.max_group_bytes, len(first_batch)))
        synced = self.synced.value
        batches: list[bytearray | memoryview] = []
        headers: list[BatchHeader] = []
        size, last_number = 0, 0
        pending = self._pending
        while pending:
            batch, header, base, append_time, number = pending[0]
            if size + len(batch) > room or (batches and base - synced >= MAX_COMMIT_LAG):
                break
            pending.popleft()
            last_number = number
            headers.append(stamp(batch, header, base, append_time, self.epoch, self._incarnation, base - synced))
            batches.append(batch)
            size += len(batch)
        sync = (
            self.config.durability is not Durability.MEMORY
            or self._sync_wanted
            or self._unsynced_bytes + size >= self.config.memory_sync_bytes
            or headers[-1].next_offset - synced >= MAX_COMMIT_LAG
        )
        await self._writer.write(batches, headers, size, sync=sync)
        if self._has_failed():
            return
        self._pending_bytes -= size
        self._unsynced_bytes += size
        self._arm_age_timer()
        self._unconfirmed.append((batches, headers, last_number, sync))
        if self._pending and sync:
            # The disk goes on with the next group while the confirms of this one go out.
            asyncio.get_running_loop().call_soon(self._note_groups)
        else:
            self._note_groups()

    def _note_groups(self) -> None:
        """Move the watermarks over the groups that the disk has taken, and with them confirms and readers."""
        try:
            while self._unconfirmed and self._failure is None:
                batches, headers, number, sync = self._unconfirmed.popleft()
                for header, batch in zip(headers, batches):
                    self._cache.put(self.number, header, batch)
                self._note_written(headers[-1].next_offset)
                if sync:
                    self._note_synced(number, headers[-1].next_offset)
                elif self._sync_timer is None:
                    loop = asyncio.get_running_loop()
                    self._sync_timer = loop.call_later(self.config.memory_sync_s, self._on_sync_timer)
        except BraidError as error:
            self._fail(error)

    async def _sync(self) -> None:
        number, written = self._last_number, self.written.value
        if self._unsynced_bytes:
            await self._writer.sync()
        if self._failure is None:
            self._note_synced(number, Offset(written))

    def _on_sync_timer(self) -> None:
        self._sync_timer = None
        if self._unsynced_bytes:
            self._sync_wanted = True
            self._start_commit()

    def _arm_age_timer(self) -> None:
        """So that a file is closed and exported at its age, also when nothing more arrives."""
        age_left_s = self._writer.age_left_s
        if self._age_timer is None and age_left_s is not None:
            self._age_timer = asyncio.get_running_loop().call_later(age_left_s, self._on_age_timer)

    def _on_age_timer(self) -> None:
        self._age_timer = None
        if self._writer.is_old:
            self._sync_wanted = self._rotate_wanted = True
            self._start_commit()
        else:
            self._arm_age_timer()  # another file is the newest by now

    def _note_written(self, next_offset: Offset) -> None:
        if self.config.durability is Durability.MEMORY:
            self._check_lease()
        self.written.advance(next_offset)

    def _note_synced(self, number: int, next_offset: Offset) -> None:
        self._unsynced_bytes = 0
        if not self._pending:
            self._sync_wanted = False
        self._check_lease()
        self.synced.advance(next_offset)
        self._flushed.advance(number)

    def _check_lease(self) -> None:
        if not self._may_confirm():
            raise Fenced(f"the lease on {self.folder} has run out in epoch {self.epoch}: nothing more is confirmed")

    def _has_failed(self) -> bool:
        """Asked again after each wait: the log may have been abandoned meanwhile."""
        return self._failure is not None

    def _refusal(self) -> BraidError:
        if self._failure is not None:
            return self._failure.again()
        if self._state is _State.SEALED:
            return LogSealed(f"the log under {self.folder} is sealed at offset {self._end}")
        return LogClosed(f"the log under {self.folder} is closed")

    def _fail(self, cause: BraidError) -> None:
        if self._failure is not None:
            return
        if isinstance(cause, DiskFull | Fenced | LogClosed):
            self._failure = cause
        else:
            self._failure = LogFailed(f"the log under {self.folder} has stopped confirming: {cause}")
            self._failure.__cause__ = cause
        self._state = _State.FAILED
        self._pending.clear()
        self._pending_bytes = 0
        self._fail_watermarks(self._failure)

    def _end_watermarks(self) -> None:
        """Behind a durable seal nothing will ever be reached: whoever waits there learns that this is the end."""
        error = LogSealed(f"the log under {self.folder} ends at offset {self._end}")
        for watermark in (self.written, self.synced, self.replicated):
            watermark.end_at(self._end, error)

    def _fail_watermarks(self, error: BraidError) -> None:
        for watermark in (self.written, self.synced, self.replicated, self._flushed):
            watermark.fail(error)

    async def _release(self) -> None:
        self._released = True
        for timer in (self._sync_timer, self._age_timer):
            if timer is not None:
                timer.cancel()
        self._sync_timer = self._age_timer = None
        if self._committing is not None:
            await asyncio.wait([self._committing])
        await self._writer.release()
        self._fail_watermarks(self._refusal())
