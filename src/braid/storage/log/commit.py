"""Group commit: appended batches go to the disk in groups, one group after the other, and the disk is the clock.

Batches gather in a queue. The queue goes to the disk in the same iteration of the event loop, in one call that writes
and syncs it. When the call has ended, the batches that gathered meanwhile go next. So an idle disk commits a lone
record immediately, and a busy disk commits many records together.

                 ┌────────────── the next group, if one has gathered ─────────────┐
                 ▼                                                                │
    enqueue ─► begin ─► write and sync ─► the disk calls back ────────────────────┴─► the listener hears of the group

No task is in this path: each step is a plain call, and the disk calls back in the iteration that the end of a sync
woke. A task would add two iterations to every commit. With cold caches, each of them costs a client that waits for a
lone record some 25 µs. A busy disk gets its next group before the listener hears of the last one and confirms it.

Rare steps run in a task: a new file, more room in it, a sync without a batch, the close of a file. With or without a
task, one step at a time is under way (`_busy`), and nothing else touches the files (writer.py).

The first failure ends the commit. The listener is told, the queue is dropped, and the result of a step that is still
under way does not count.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, NamedTuple, Protocol

from braid.model.batch.header import BatchHeader, stamp
from braid.model.errors import BraidError, BrokenInvariant
from braid.model.ids import Epoch, Offset
from braid.storage.log.context import LogContext
from braid.storage.log.writer import WalWriter

MAX_COMMIT_LAG: Final = 1 << 31
"""Sync at the latest when so many records are not synced: a batch states its lag in 32 bits."""

_Pending = tuple[bytearray | memoryview, BatchHeader, Offset, int, Epoch, int, bool, int]
"""A batch, its header; base offset, append time, epoch and incarnation that are stamped into it; whether it begins a
file; its number. A plain tuple: one is made for each batch."""


class CommitGroup(NamedTuple):
    """Batches that went to the disk together."""

    batches: list[bytearray | memoryview]
    headers: list[BatchHeader]
    last_number: int
    size: int
    synced: bool


class CommitListener(Protocol):
    """Hears of each group. A `BraidError` that it raises ends the commit."""

    def on_written(self, group: CommitGroup) -> None:
        """Hear that the disk has taken these batches, and has synced them if the group says so."""

    def on_synced(self, number: int, next_offset: Offset) -> None:
        """Hear that every batch up to this number, and every record below this offset, is synced."""

    def on_commit_failed(self, error: BraidError) -> None: ...


class GroupCommit:
    """Everything here runs on one event loop."""

    def __init__(self, context: LogContext, writer: WalWriter, listener: CommitListener, next_offset: Offset) -> None:
        self._writer = writer
        self._listener = listener
        self.on_start: Callable[[CommitGroup], None] | None = None
        """Called with each group that the disk has begun to write."""
        self._clock = context.clock
        self._epoch = context.epoch
        self._incarnation = context.incarnation
        self._max_group_bytes = context.config.max_group_bytes
        self._sync_bytes = context.config.sync_bytes
        self._sync_s = context.config.memory_sync_s
        self.pending_bytes = 0
        """Bytes in the queue, and bytes that the disk is writing."""
        self.last_number = 0
        """Batches are numbered, because control batches take no offset: what is synced is counted in numbers."""
        self._gathered: deque[_Pending] = deque()
        self._group: CommitGroup | None = None
        """The batches that the disk is writing."""
        self._written_end = self._synced_end = next_offset
        self._unsynced_bytes = 0
        self._sync_wanted = False
        self._rotate_wanted = False
        self._busy = False
        self._stopped = False
        self._task: asyncio.Task[None] | None = None
        self._rest: asyncio.Future[None] | None = None
        self._sync_timer: asyncio.TimerHandle | None = None
        self._age_timer: asyncio.TimerHandle | None = None

    # What the listener asks for.

    def enqueue(self, batch: bytearray | memoryview, header: BatchHeader, base: Offset) -> None:
        self.last_number = number = self.last_number + 1
        self._gathered.append(
            (batch, header, base, self._clock.now_us(), self._epoch, self._incarnation, False, number)
        )
        self.pending_bytes += len(batch)

    def enqueue_stamped(self, batch: bytearray | memoryview, header: BatchHeader, *, begins_file: bool) -> None:
        """Enqueue a batch that its owner, another broker, has stamped. Only its lag is stated anew: it speaks of this
        disk. `begins_file` tells whether the batch is the first one of a file."""
        self.last_number = number = self.last_number + 1
        self._gathered.append(
            (
                batch,
                header,
                header.base_offset,
                header.append_time,
                header.epoch,
                header.incarnation,
                begins_file,
                number,
            )
        )
        self.pending_bytes += len(batch)

    def begin(self) -> None:
        """Write what was enqueued. While the disk is busy, the write follows by itself."""
        if not self._busy and not self._stopped:
            self._busy = True
            self._step()

    def begin_soon(self) -> None:
        """Do the same at the end of this iteration of the loop."""
        if not self._busy and not self._stopped:
            self._busy = True
            asyncio.get_running_loop().call_soon(self._step)

    def want_sync(self) -> None:
        """Sync everything that was enqueued so far, even where the durability level would wait."""
        self._sync_wanted = True
        self.begin_soon()

    def want_rotation(self) -> None:
        """Close the newest file, if it has records, when everything that was enqueued so far is synced."""
        self._sync_wanted = self._rotate_wanted = True
        self.begin_soon()

    async def rotated(self) -> None:
        """Return when the rotation that was wanted is done or has become impossible."""
        while self._rotate_wanted and self._busy:
            await self._at_rest()

    async def make_room(self, size: int) -> None:
        """Make room for `size` bytes more in the newest file, which is open and takes them. While a step is under way,
        only wait for its end: ask again then, because it may have closed the file."""
        if not self._busy and not self._stopped:
            self._busy = True
            self._run(self._make_room(size, size, self._written_end, self.last_number + 1, new_file=False))
        if self._busy:
            await self._at_rest()

    async def settled(self) -> None:
        """Return when no step is under way."""
        while self._busy:
            await self._at_rest()

    def stop(self) -> None:
        """Begin nothing more, and drop the result of the step that is under way."""
        self._stopped = True
        self._gathered.clear()
        self.pending_bytes = 0

    async def end(self) -> None:
        """Wait for the step that is under way, and close the file."""
        for timer in (self._sync_timer, self._age_timer):
            if timer is not None:
                timer.cancel()
        self._sync_timer = self._age_timer = None
        await self.settled()
        await self._writer.release()

    # One step after the other.

    def _step(self) -> None:
        """Start the next step, while none is under way."""
        try:
            if self._sync_wanted and not self._gathered and not self._unsynced_bytes and not self._stopped:
                self._note_synced(self.last_number, self._written_end)
            if self._stopped:
                self._pause()
            elif self._gathered:
                self._write_or_make_room()
            elif self._sync_wanted:
                self._run(self._sync())
            elif self._rotate_wanted:
                self._run(self._rotate())
            else:
                self._pause()
        except BraidError as error:
            self._fail(error)
        except BaseException as error:
            self._fail(error)
            raise

    def _write_or_make_room(self) -> None:
        batch, _, base, _, _, _, begins_file, number = self._gathered[0]
        wanted = min(self.pending_bytes, max(self._max_group_bytes, len(batch)))
        new_file = begins_file and not self._writer.begins_at(base)
        room = 0 if new_file else self._writer.room(len(batch), wanted)
        if not room:
            self._run(self._make_room(len(batch), wanted, base, number, new_file=new_file))
            return
        group = self._take_group(room)
        self._writer.start_write(group.batches, group.headers, sync=group.synced, on_end=self._on_write_end)
        self._group = group
        if self.on_start is not None:
            self.on_start(group)

    def _take_group(self, room: int) -> CommitGroup:
        gathered, synced_end = self._gathered, self._synced_end
        batches: list[bytearray | memoryview] = []
        headers: list[BatchHeader] = []
        size = last_number = 0
        while gathered:
            batch, header, base, append_time, epoch, incarnation, begins_file, number = gathered[0]
            lag = base - synced_end
            if size + len(batch) > room or (batches and (begins_file or lag >= MAX_COMMIT_LAG)):
                break
            gathered.popleft()
            last_number = number
            headers.append(stamp(batch, header, base, append_time, epoch, incarnation, lag))
            batches.append(batch)
            size += len(batch)
        sync = (
            self._sync_wanted
            or self._unsynced_bytes + size >= self._sync_bytes
            or headers[-1].next_offset - synced_end >= MAX_COMMIT_LAG
        )
        return CommitGroup(batches, headers, last_number, size, sync)

    def _on_write_end(self, error: BaseException | None) -> None:
        group, self._group = self._group, None
        assert group is not None
        if self._stopped:
            self._pause()
            return
        if error is not None:
            self._fail(error)
            return
        try:
            self._note_written(group)
            if self._gathered and group.synced:
                self._step()
                if not self._has_stopped():
                    self._listener.on_written(group)
            else:
                self._listener.on_written(group)
                self._step()
        except BraidError as failure:
            self._fail(failure)
        except BaseException as failure:
            self._fail(failure)
            raise

    def _note_written(self, group: CommitGroup) -> None:
        self._writer.note_written(group.batches, group.headers, synced=group.synced)
        self.pending_bytes -= group.size
        self._written_end = group.headers[-1].next_offset
        if self._age_timer is None:
            self._arm_age_timer()
        if group.synced:
            self._synced_end = self._written_end
            self._unsynced_bytes = 0
            if not self._gathered:
                self._sync_wanted = False
        else:
            self._unsynced_bytes += group.size
            if self._sync_timer is None:
                self._sync_timer = asyncio.get_running_loop().call_later(self._sync_s, self._on_sync_timer)

    def _note_synced(self, number: int, next_offset: Offset) -> None:
        self._synced_end = next_offset
        self._unsynced_bytes = 0
        if not self._gathered:
            self._sync_wanted = False
        self._listener.on_synced(number, next_offset)

    # The rare steps, in a task.

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.get_running_loop().create_task(work)
        self._task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._task = None
        # It is not known how far a cancelled task came, so the commit fails.
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            self._step()
        else:
            self._fail(error)

    async def _make_room(self, size: int, wanted: int, base: Offset, number: int, *, new_file: bool) -> None:
        closed = await self._writer.make_room(size, wanted, base, new_file=new_file)
        if closed and self._unsynced_bytes and not self._stopped:
            self._note_synced(number - 1, base)

    async def _sync(self) -> None:
        number, end = self.last_number, self._written_end
        await self._writer.sync()
        if not self._stopped:
            self._note_synced(number, end)

    async def _rotate(self) -> None:
        await self._writer.close_current()
        self._rotate_wanted = False

    # Timers.

    def _on_sync_timer(self) -> None:
        self._sync_timer = None
        if self._unsynced_bytes:
            self.want_sync()

    def _arm_age_timer(self) -> None:
        """Have the file closed and exported at its age, also when nothing more arrives."""
        age_left_s = self._writer.age_left_s
        if age_left_s is not None:
            self._age_timer = asyncio.get_running_loop().call_later(age_left_s, self._on_age_timer)

    def _on_age_timer(self) -> None:
        self._age_timer = None
        if self._writer.is_old:
            self.want_rotation()
        else:
            self._arm_age_timer()  # another file is the newest by now

    # Coming to rest.

    def _pause(self) -> None:
        self._busy = False
        if self._rest is not None:
            self._rest.set_result(None)
            self._rest = None

    async def _at_rest(self) -> None:
        if self._rest is None:
            self._rest = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._rest)

    def _fail(self, error: BaseException) -> None:
        """Tell the listener, which stops this commit: no further step begins."""
        if not isinstance(error, BraidError):
            broken = BrokenInvariant(f"committing to {self._writer.folder} broke: {error!r}")
            broken.__cause__ = error
            error = broken
        self._listener.on_commit_failed(error)
        if self._group is None and self._task is None:
            self._pause()

    def _has_stopped(self) -> bool:
        """Asked again after each call of the listener, which may have abandoned the log."""
        return self._stopped
