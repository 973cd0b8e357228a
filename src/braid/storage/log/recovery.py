"""Finding out what a log's folder holds, after any kind of end.

Recovery believes batches. It takes files that the checkpoint lists, with unchanged sizes, as they are, and walks all
others from their first batch. The bytes after the last good batch of the newest file are one of three things:

- zeros: the preallocated rest, a clean end;
- a **torn tail**: bytes of writes that were never synced, and so never confirmed. They are cut off;
- **damage**: something says that records there had been synced: a whole batch further on whose `commit_lag` reaches
  back beyond them, the checkpoint, or simply a later file. Damage is reported, and every byte of it stays: the file is
  never appended to, exported or deleted. The log goes on after the damage, so no confirmed offset is given out twice
  (I1).

Good batches at the very end may exist only in the page cache (the process was killed, or a sync failed and the kernel
forgot). So batches that are not known to be synced are written again and synced before they count as stored (I2, I7).

`recover` only reads; `repair` then changes the files. Between the two, recovery_start.py decides whether these files
are still the log at all.
"""

from __future__ import annotations

import msgspec

from braid.model.batch.header import HEADER_BYTES
from braid.model.errors import ChunkCorrupt, RecoveryConflict
from braid.model.ids import Epoch, Offset
from braid.ports.disk import Disk, DiskFile, FileStat
from braid.storage.chunk import Footer, Index, read_footer
from braid.storage.log import checkpoint as checkpoints
from braid.storage.log.checkpoint import ClosedFile, LogCheckpoint
from braid.storage.log.producers import ProducerTable
from braid.storage.log.wal import (
    WINDOW_BYTES,
    Damage,
    FrameWalk,
    WalFile,
    base_of,
    close_file,
    last_nonzero,
    next_batch_after_damage,
    wal_name,
    whole_batch_at,
)


class Tail(msgspec.Struct, frozen=True):
    """The end of the newest file."""

    file: WalFile
    synced_position: int
    """Everything before this byte is known to be durable."""
    good_end: int
    """Everything before this byte is whole."""
    garbage_end: int
    """Torn bytes stand between the good end and here."""


class Unclosed(msgspec.Struct, frozen=True):
    """A file whose batches are all good, but whose footer is not."""

    file: WalFile
    producers: ProducerTable


class RecoveredLog(msgspec.Struct):
    """What is in a folder, and what `repair` has to do about it."""

    files: list[WalFile] = []
    next_offset: Offset = Offset(0)
    epochs: set[Epoch] = set()
    """Every epoch of which a batch was found."""
    incarnation: int = 0
    """That of the last batch; 0 if there is none."""
    sealed: bool = False
    producers: ProducerTable = msgspec.field(default_factory=ProducerTable)
    producers_complete: bool = False
    """False when the table covers only these files: producers that stored something before them are not known."""
    tail: Tail | None = None
    unclosed: list[Unclosed] = []
    damage: list[Damage] = []
    foreign: list[str] = []
    """Files with names that no log gives; recovery leaves them alone."""
    checkpoint_used: bool = False
    closed_in_order: bool = True
    """Whether the newest file was closed. If so, nothing that was ever written is missing; otherwise, batches that were
    written and not synced may be missing."""

    @property
    def last_epoch(self) -> Epoch:
        return max(self.epochs, default=Epoch(0))

    @property
    def torn_bytes(self) -> int:
        return self.tail.garbage_end - self.tail.good_end if self.tail is not None else 0

    @property
    def base_offset(self) -> Offset:
        return self.files[0].base_offset if self.files else self.next_offset


async def recover(disk: Disk, folder: str) -> RecoveredLog:
    """Find out what the folder holds. Changes nothing."""
    checkpoint = await checkpoints.read(disk, folder)
    listed = {file.name: file for file in checkpoint.closed} if checkpoint else {}
    try:
        return await _Recovery(disk, folder, checkpoint).run(listed)
    except ChunkCorrupt:
        # A footer that the checkpoint relies on is bad. The batches are still there: read them all.
        return await _Recovery(disk, folder, checkpoint).run({})


async def repair(disk: Disk, folder: str, recovered: RecoveredLog) -> None:
    """Cut the torn tail, make the good one durable, and close what should be closed. Can be repeated.

    The names come first: the process that created these files may have been killed before their names were durable, and
    a file without a name loses every record that is confirmed into it (I2)."""
    await disk.sync_folder(folder)
    for unclosed in recovered.unclosed:
        file = await disk.open(f"{folder}/{unclosed.file.name}")
        try:
            await close_file(file, unclosed.file, unclosed.producers)
        finally:
            await file.close()
    if recovered.tail is not None:
        file = await disk.open(f"{folder}/{recovered.tail.file.name}")
        try:
            await _repair_tail(file, recovered.tail)
        finally:
            await file.close()


class _Recovery:
    """One pass over a folder, oldest file first."""

    def __init__(self, disk: Disk, folder: str, checkpoint: LogCheckpoint | None) -> None:
        self._disk = disk
        self._folder = folder
        self._checkpoint = checkpoint
        self.result = RecoveredLog()

    async def run(self, listed: dict[str, ClosedFile]) -> RecoveredLog:
        result = self.result
        stats = await self._disk.list(self._folder)
        wal_stats = [stat for stat in stats if base_of(stat.name) is not None]
        result.foreign = [
            stat.name for stat in stats if base_of(stat.name) is None and not stat.name.startswith(checkpoints.NAME)
        ]
        unchanged = [stat for stat in wal_stats if stat.name in listed and listed[stat.name].size == stat.size]
        next_bases = [base_of(stat.name) for stat in wal_stats[1:]] + [None]
        for stat, next_base in zip(wal_stats, next_bases):
            if stat in unchanged:
                self._join(_as_listed(listed[stat.name]))
                result.checkpoint_used = True
                if stat is unchanged[-1]:
                    await self._take_producers(result.files[-1])
            else:
                self._join(await self._walk_file(stat, next_base))
        self._note_lost_end()
        result.closed_in_order = not result.files or result.files[-1].closed
        return result

    def _join(self, found: WalFile) -> None:
        """Put a file after those before it: no overlap, no silent gap, no step back in epochs."""
        result = self.result
        if result.files:
            before = result.files[-1]
            if found.base_offset < result.next_offset or (found.first_epoch and found.first_epoch < result.last_epoch):
                raise RecoveryConflict(
                    f"{found.name} (offset {found.base_offset}, epoch {found.first_epoch}) does not continue "
                    f"{before.name} (up to offset {result.next_offset}, epoch {result.last_epoch}): one of the two "
                    f"does not belong into {self._folder}"
                )
            if found.base_offset > result.next_offset:
                reason = f"no batch holds offsets {result.next_offset}–{found.base_offset - 1}"
                missing = Damage(before.name, before.batch_bytes, result.next_offset, found.base_offset, reason)
                before.damage = (*before.damage, missing)
                result.damage.append(missing)
        result.files.append(found)
        result.damage.extend(found.damage)
        result.next_offset = found.next_offset
        result.epochs |= found.epochs
        result.incarnation = found.incarnation or result.incarnation
        result.sealed = found.sealed

    async def _take_producers(self, closed: WalFile) -> None:
        file = await self._disk.open(f"{self._folder}/{closed.name}")
        try:
            footer = await read_footer(file, closed.size)
        finally:
            await file.close()
        self.result.producers = footer.producers
        self.result.producers_complete = True

    async def _walk_file(self, stat: FileStat, next_base: Offset | None) -> WalFile:
        """`next_base` is where the next file begins; None for the newest file."""
        result = self.result
        file = await self._disk.open(f"{self._folder}/{stat.name}")
        try:
            footer = await _footer_or_none(file, stat.size)
            found, synced_position = await self._walk_batches(file, stat, footer, next_base)
            if footer is not None:
                found.closed = not found.damage
                result.producers = footer.producers
                result.producers_complete = True
                if next_base is None and found.closed:
                    result.tail = Tail(found, synced_position, found.size, found.size)
            elif next_base is not None:
                if found.next_offset == next_base and not found.damage:
                    result.unclosed.append(Unclosed(found, result.producers.copy()))
            elif not found.damage and (self._checkpoint is None or self._checkpoint.synced <= found.next_offset):
                garbage_end = await last_nonzero(file, found.batch_bytes, stat.size)
                result.tail = Tail(found, synced_position, found.batch_bytes, garbage_end)
            else:
                # Nothing is cut from a damaged file. Whole batches after the damage are still made durable.
                result.tail = Tail(found, synced_position, found.batch_bytes, found.batch_bytes)
            return found
        finally:
            await file.close()

    async def _walk_batches(
        self, file: DiskFile, stat: FileStat, footer: Footer | None, next_base: Offset | None
    ) -> tuple[WalFile, int]:
        """Walk over all batches, and over damage between them. Also says up to where they are surely synced.

        Batches beyond `next_base` are a tail that was torn when the next file was begun after damage. They do not
        count."""
        base = base_of(stat.name)
        assert base is not None
        index = Index()
        found = WalFile(stat.name, base, base, 0, stat.size, Epoch(0), Epoch(0), 0, index=index)
        end = footer.batch_bytes if footer else stat.size
        positions: list[tuple[int, int]] = []
        synced_offset = 0
        runs = {run.position: run.offset for run in footer.index.runs} if footer else {}
        if not self.result.files:
            runs.setdefault(HEADER_BYTES, base)  # a log's first batch is a BEGIN: where the next one stands is known
        walk = FrameWalk(file, end, 0, base, self.result.last_epoch, self.result.incarnation)
        after_damage = False
        while True:
            while window := await walk.next_window():
                for position, header in window:
                    index.add(header, position, starts_run=after_damage)
                    after_damage = after_damage and header.is_control
                    self.result.producers.apply(header, header.base_offset)
                    found.first_epoch = found.first_epoch or header.epoch
                    found.last_epoch = header.epoch
                    found.epochs.add(header.epoch)
                    found.incarnation = header.incarnation
                    found.sealed = header.is_seal
                    if header.count:
                        found.record_epoch = header.epoch
                    found.max_timestamp = max(found.max_timestamp, header.max_timestamp)
                    synced_offset = max(synced_offset, header.synced_before)
                    positions.append((header.base_offset, position))
            found.next_offset = Offset(walk.expected)
            found.batch_bytes = walk.position
            stranger = await whole_batch_at(file, walk.position, end)
            if stranger is not None:
                raise RecoveryConflict(
                    f"{self._folder}/{stat.name} has a whole batch at byte {walk.position} with offset "
                    f"{stranger.base_offset}, epoch {stranger.epoch} and incarnation {stranger.incarnation:08x}, but "
                    f"offset {walk.expected} and epoch {walk.epoch} with incarnation {walk.incarnation:08x}, or a "
                    f"later epoch, should follow there; the file or its name has been changed"
                )
            all_synced = footer is not None or next_base is not None
            after = await next_batch_after_damage(file, walk, end, runs, all_synced)
            if after is None or (next_base is not None and after[1].base_offset >= next_base):
                break
            position, header = after
            lost = Damage(stat.name, walk.position, found.next_offset, header.base_offset, walk.reason or "unreadable")
            found.damage = (*found.damage, lost)
            after_damage = True
            walk = FrameWalk(file, end, position, header.base_offset, walk.epoch, walk.incarnation)
        if footer is not None and found.next_offset < footer.next_offset:
            lost = Damage(stat.name, walk.position, found.next_offset, footer.next_offset, walk.reason or "unreadable")
            found.damage = (*found.damage, lost)
            found.next_offset = footer.next_offset
        synced = next((position for offset, position in positions if offset >= synced_offset), found.batch_bytes)
        return found, synced

    def _note_lost_end(self) -> None:
        """Records that the checkpoint knew to be durable and that no file holds any more."""
        result = self.result
        if self._checkpoint is None or self._checkpoint.synced <= result.next_offset:
            return
        synced = self._checkpoint.synced
        last = result.files[-1] if result.files else None
        missing = Damage(
            last.name if last else wal_name(result.next_offset),
            last.batch_bytes if last else 0,
            result.next_offset,
            synced,
            f"the checkpoint says that every offset below {synced} had been synced",
        )
        result.damage.append(missing)
        if last is not None:
            last.damage = (*last.damage, missing)
        result.next_offset = synced


def _as_listed(file: ClosedFile) -> WalFile:
    return WalFile(
        file.name,
        file.base_offset,
        file.next_offset,
        file.batch_bytes,
        file.size,
        min(file.epochs, default=Epoch(0)),
        max(file.epochs, default=Epoch(0)),
        file.max_timestamp,
        closed=True,
        sealed=file.sealed,
        epochs=set(file.epochs),
        incarnation=file.incarnation,
        record_epoch=file.record_epoch,
    )


async def _footer_or_none(file: DiskFile, size: int) -> Footer | None:
    try:
        return await read_footer(file, size)
    except ChunkCorrupt:
        return None


async def _repair_tail(file: DiskFile, tail: Tail) -> None:
    if tail.garbage_end > tail.good_end:
        await file.truncate(tail.good_end)
        tail.file.size = tail.good_end
    position = tail.synced_position
    while position < tail.good_end:
        data = await file.read(position, min(WINDOW_BYTES, tail.good_end - position))
        await file.write(position, [data], sync=False)
        position += len(data)
    await file.sync()
