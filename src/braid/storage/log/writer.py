"""Writing a log's files: the newest one open, all others closed.

Only the log's group commit uses the writer, one call after the other. The writer does not know about confirms. It puts
batches at the end of the newest file, begins a new file when the newest one is full or old, and turns the old file into
a chunk.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Final

from braid.model.batch.header import BatchHeader
from braid.model.errors import BrokenInvariant, DiskError, DiskFull
from braid.model.ids import Epoch, Offset
from braid.ports.disk import Buffer, DiskFile
from braid.ports.tasks import completed, join
from braid.storage.chunk import Index
from braid.storage.log import checkpoint as checkpoints
from braid.storage.log.checkpoint import ClosedFile, LogCheckpoint
from braid.storage.log.context import LogContext
from braid.storage.log.producers import ProducerTable
from braid.storage.log.wal import WalFile, close_file, footer_of, wal_name
from braid.storage.retention import removable

TIMER_RESOLUTION_S: Final = 0.001
"""A timer may fire this much early and still be right."""


class WalWriter:
    def __init__(self, context: LogContext, files: list[WalFile], producers: ProducerTable) -> None:
        self.folder = context.folder
        self.files = files
        self._disk = context.disk
        self._clock = context.clock
        self._config = context.config.files
        self._preallocated = context.preallocated
        self._on_closed_file = context.on_closed_file
        self._on_sync = context.config.on_sync
        # Only what the batches in the files say: a footer that knew of a batch that is only queued would make its retry
        # look stored after a crash.
        self._producers = producers
        self._current: DiskFile | None = None
        self._reserved_bytes = 0
        self._begun_at = 0.0
        self._write_began = 0.0
        self._filled_last = False
        self._checkpoint: LogCheckpoint | None = None
        self._checkpointing: asyncio.Task[None] | None = None

    def begin_with(self, producers: ProducerTable) -> None:
        """Write footers that know these producers, too. Nothing was written yet but control batches."""
        self._producers = producers

    async def open(self) -> None:
        """Continue the newest file if it is open and whole; otherwise the next batch begins a new file."""
        await completed(self._disk.make_folder(self.folder))
        if self.files and not self.files[-1].closed and not self.files[-1].damage:
            newest = self.files[-1]
            self._current = await self._disk.open(f"{self.folder}/{newest.name}")
            self._reserved_bytes = newest.size
            self._begun_at = self._clock.monotonic()

    @property
    def age_left_s(self) -> float | None:
        """Return how long the newest file may stay open; None if no open file holds records."""
        if self._current is None or not self.files[-1].records or self._config.file_age_s == math.inf:
            return None
        return max(0.0, self._begun_at + self._config.file_age_s - self._clock.monotonic())

    @property
    def is_old(self) -> bool:
        age_left_s = self.age_left_s
        return age_left_s is not None and age_left_s < TIMER_RESOLUTION_S

    def room(self, size: int, wanted: int) -> int:
        """Return how many of the `wanted` bytes fit after the last batch now. 0 when not even the first batch, of
        `size` bytes, fits: then call `make_room` first."""
        if self._current is None:
            return 0
        newest = self.files[-1]
        left = self._config.file_bytes - newest.batch_bytes
        if size > left:
            if newest.records:
                return 0
            left = size  # A file takes one batch, however large.
        fits = min(wanted, left, self._reserved_bytes - newest.batch_bytes)
        return fits if fits >= size else 0

    def takes(self, size: int) -> bool:
        """Tell whether a batch of `size` bytes belongs into the newest file; otherwise it begins a file."""
        newest = self.files[-1]
        return not newest.records or newest.batch_bytes + size <= self._config.file_bytes

    def begins_at(self, base_offset: Offset) -> bool:
        """Tell whether the newest file is open and begins at this offset."""
        return self._current is not None and self.files[-1].base_offset == base_offset

    async def make_room(self, size: int, wanted: int, base_offset: Offset, *, new_file: bool = False) -> bool:
        """Make room for a batch of `size` bytes, in a new file if need be or if it is asked for, and for the rest of
        the `wanted` bytes as far as they belong into that file. Returns whether it closed a file, which also synced
        that file."""
        closed = False
        if self._current is not None and ((new_file and self.files[-1].records) or not self.takes(size)):
            await self.close_current()
            self._filled_last = closed = True
        current = self._current if self._current is not None else await self._open_next(base_offset)
        position = self.files[-1].batch_bytes
        needed = position + max(size, min(wanted, self._config.file_bytes - position))
        if needed > self._reserved_bytes:
            doubled = max(self._config.first_reserve_bytes, 2 * self._reserved_bytes)
            try:
                await self._reserve(current, max(needed, min(doubled, self._config.file_bytes)))
            except DiskFull:
                await self._reserve(current, needed)  # The last room of a disk is for batches, not for a reserve.
        return closed

    async def _reserve(self, current: DiskFile, size: int) -> None:
        await current.reserve(size)
        self._reserved_bytes = size

    def start_write(
        self,
        batches: Sequence[Buffer],
        headers: Sequence[BatchHeader],
        *,
        sync: bool,
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        """Put stamped batches, for which there is room, after the last batch. When the disk has them, call
        `note_written` before anything else."""
        current, newest = self._current, self.files[-1]
        assert current is not None
        if headers[0].base_offset != newest.next_offset:
            raise BrokenInvariant(f"I1: offset {headers[0].base_offset} follows {newest.next_offset} in {newest.name}")
        self._write_began = self._clock.monotonic()
        current.start_write(newest.batch_bytes, batches, sync=sync, on_end=on_end)

    def note_written(self, batches: Sequence[Buffer], headers: Sequence[BatchHeader], *, synced: bool) -> None:
        """Note that the disk has what `start_write` gave it."""
        if synced and self._on_sync is not None:
            self._on_sync(self._clock.monotonic() - self._write_began)
        newest = self.files[-1]
        assert newest.index is not None
        position = newest.batch_bytes
        add, apply = newest.index.add, self._producers.apply  # a hot loop: once for each batch that is written
        for header, batch in zip(headers, batches):
            add(header, position)
            position += len(batch)
            apply(header, header.base_offset)
            if header.max_timestamp > newest.max_timestamp:
                newest.max_timestamp = header.max_timestamp
        last = headers[-1]
        newest.batch_bytes = position
        newest.next_offset = last.next_offset
        newest.sealed = last.is_seal
        if last.count:
            newest.record_epoch = last.epoch
        else:  # A control batch holds no record.
            newest.record_epoch = next((each.epoch for each in reversed(headers) if each.count), newest.record_epoch)
        if newest.last_epoch != last.epoch:  # An owner writes in one epoch: once for each file.
            newest.first_epoch = newest.first_epoch or headers[0].epoch
            newest.last_epoch = last.epoch
            newest.epochs.update(header.epoch for header in headers)
            newest.incarnation = last.incarnation

    async def sync(self) -> None:
        if self._current is not None:
            begun = self._clock.monotonic()
            await self._current.sync()
            if self._on_sync is not None:
                self._on_sync(self._clock.monotonic() - begun)

    async def close_current(self) -> None:
        """Close the current file as a chunk. A file without records stays open: the next file would get its name."""
        if self._current is None or not self.files[-1].records:
            return
        newest = self.files[-1]
        await close_file(self._current, newest, self._producers)
        await self._current.close()
        self._current = None
        self._filled_last = False
        newest.index = None  # its footer has it
        self.want_checkpoint(newest.next_offset)
        if self._on_closed_file is not None:
            self._on_closed_file()

    async def close_newest(self) -> None:
        """Close the newest file, which is open and has records, also after `release`."""
        if self._current is None:
            self._current = await self._disk.open(f"{self.folder}/{self.files[-1].name}")
        await self.close_current()

    def footer(self) -> bytes:
        """Return the footer that would close the newest file, which is open."""
        return footer_of(self.files[-1], self._producers)

    def forget(self, names: set[str]) -> None:
        """Drop closed files from view; the caller removes them from the disk afterwards."""
        if not names <= {file.name for file in removable(self.files)}:
            raise BrokenInvariant(f"I2: of {sorted(names)}, some files must not be removed from {self.folder}")
        self.files = [file for file in self.files if file.name not in names]

    async def release(self) -> None:
        if self._checkpointing is not None:
            await completed(join([self._checkpointing]))  # Nothing of it may run after this, also if this is cancelled.
        if self._current is not None:
            await self._current.close()
            self._current = None

    async def _open_next(self, base_offset: Offset) -> DiskFile:
        name = wal_name(base_offset)
        path = f"{self.folder}/{name}"
        size = self._config.file_bytes
        if self._filled_last and self._preallocated is not None and await self._preallocated.take(path, size):
            opened = await self._disk.open(path)
            self._reserved_bytes = size
        else:
            opened = await self._disk.open(path, create=True)
            self._reserved_bytes = 0
        self._current = opened
        self._begun_at = self._clock.monotonic()
        self.files.append(WalFile(name, base_offset, base_offset, 0, 0, Epoch(0), Epoch(0), 0, index=Index()))
        return opened

    def want_checkpoint(self, synced: int) -> None:
        """Describe the files in a new checkpoint, in the background: it is a hint, and nothing waits for it."""
        closed = tuple(
            ClosedFile(
                file.name,
                file.base_offset,
                file.next_offset,
                file.batch_bytes,
                file.size,
                tuple(sorted(file.epochs)),
                file.incarnation,
                file.max_timestamp,
                file.sealed,
                file.record_epoch,
            )
            for file in self.files
            if file.closed and not file.damage
        )
        self._checkpoint = LogCheckpoint(Offset(synced), closed)
        if self._checkpointing is None:
            self._checkpointing = asyncio.get_running_loop().create_task(self._write_checkpoints())

    async def _write_checkpoints(self) -> None:
        try:
            while self._checkpoint is not None:
                checkpoint, self._checkpoint = self._checkpoint, None
                await checkpoints.write(self._disk, self.folder, checkpoint)
        except DiskError:
            # The old checkpoint stays and costs the next recovery some reading. A disk that is really in trouble
            # fails the next batch, and the batch reports it.
            self._checkpoint = None
        finally:
            self._checkpointing = None
