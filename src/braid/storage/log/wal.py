"""WAL files: their names, what is known about one, and walking through the batches in it.

A log's hot part is a folder of files `{base_offset:020d}.wal`. The newest is open and preallocated: batches, then
zeros. All others are closed: cut to size, with a footer after the batches, and thereby chunks (chunk.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from braid.model.batch.header import HEADER_BYTES, MAGIC, MAX_OFFSET, BatchHeader, parse_header, verify
from braid.model.errors import BatchError
from braid.model.ids import Epoch, Offset
from braid.ports.disk import DiskFile
from braid.storage.chunk import ByteSource, Index, encode_footer
from braid.storage.log.producers import ProducerTable

SUFFIX: Final = ".wal"
_NAME: Final = re.compile(r"(\d{20})\.wal")
WINDOW_BYTES: Final = 4 << 20
"""How much a walk reads at a time: large enough for the disk's full speed, small enough for many walks together."""


def wal_name(base_offset: int) -> str:
    return f"{base_offset:020d}{SUFFIX}"


def base_of(name: str) -> Offset | None:
    """Return the base offset that a file's name states; None for a name that is not a WAL file's."""
    match = _NAME.fullmatch(name)
    return Offset(int(match[1])) if match and int(match[1]) <= MAX_OFFSET else None


class Damage(msgspec.Struct, frozen=True):
    """Records that had been confirmed and cannot be read. Their bytes stay where they are."""

    file: str
    position: int
    first_offset: Offset
    next_offset: Offset
    reason: str


class WalFile(msgspec.Struct):
    """What is known about one file. Owned by its log; `index` of a closed file is loaded when first needed."""

    name: str
    base_offset: Offset
    next_offset: Offset
    batch_bytes: int
    size: int
    first_epoch: Epoch
    last_epoch: Epoch
    max_timestamp: int
    closed: bool = False
    sealed: bool = False
    index: Index | None = None
    damage: tuple[Damage, ...] = ()
    epochs: set[Epoch] = set()
    """The epochs of its batches. All of them: an owner that never began may have written the last one."""
    incarnation: int = 0
    """That of its last batch; 0 if it has none."""
    record_epoch: Epoch = Epoch(0)
    """That of its last record; 0 if it has none, or if it is not known."""

    @property
    def records(self) -> int:
        return self.next_offset - self.base_offset


class FrameWalk:
    """Walks from batch to batch, as long as each is whole, continues the offsets and does not go back in epochs.

    An epoch has one incarnation, so that changes only together with the epoch; 0 is one that is not known yet.

    It stops at the first thing that is not the batch expected there and says why in `reason`; `position` is then the
    end of what is good. A batch that crosses the end of a read is read again from its own start, so the good end is
    never overstated.
    """

    def __init__(
        self, source: ByteSource, end: int, position: int, expected: int, epoch: int = 0, incarnation: int = 0
    ) -> None:
        self._source = source
        self._end = end
        self.position = position
        self.expected = expected
        self.epoch = epoch
        self.incarnation = incarnation
        self.reason: str | None = None

    async def next_window(self) -> list[tuple[int, BatchHeader]]:
        """Return the positions and headers of the next whole batches; empty when the walk has stopped."""
        found: list[tuple[int, BatchHeader]] = []
        length = WINDOW_BYTES
        while not found and self.reason is None:
            window_start = self.position
            data = await self._source.read(window_start, min(length, self._end - window_start))
            at_end = window_start + len(data) >= self._end
            at = 0
            while True:
                try:
                    header = parse_header(data, at) if len(data) - at >= HEADER_BYTES else None
                    if header is None or at + header.size > len(data):
                        if at_end or len(data) == 0:
                            self.reason = self._end_reason(data, at, header)
                        elif at == 0:
                            length = header.size if header else length + HEADER_BYTES
                        break
                    verify(data, at)
                except BatchError as error:
                    self.reason = str(error)
                    break
                if header.base_offset != self.expected or not self.may_follow(header):
                    self.reason = (
                        f"the batch at byte {window_start + at} has offset {header.base_offset}, epoch {header.epoch} "
                        f"and incarnation {header.incarnation:08x}; expected offset {self.expected} and epoch "
                        f"{self.epoch} with incarnation {self.incarnation:08x}, or a later epoch"
                    )
                    break
                found.append((window_start + at, header))
                self.expected = header.next_offset
                self.epoch = header.epoch
                self.incarnation = header.incarnation
                at += header.size
            self.position = window_start + at
        return found

    def may_follow(self, header: BatchHeader) -> bool:
        """Tell whether epoch and incarnation can come after the ones before."""
        if header.epoch == self.epoch:
            return self.incarnation in (0, header.incarnation)
        return header.epoch > self.epoch

    def _end_reason(self, data: bytes, at: int, header: BatchHeader | None) -> str:
        left = len(data) - at
        if header is not None:
            return f"the batch at byte {self.position + at} has {header.size} bytes, the file ends after {left}"
        return "end of file" if left == 0 else f"the file ends in the middle of a header, after {left} bytes"


async def last_nonzero(source: ByteSource, start: int, end: int) -> int:
    """Return the position after the last byte in [start, end) that is not zero; `start` if all are zero."""
    position = end
    while position > start:
        window_start = max(start, position - WINDOW_BYTES)
        data = await source.read(window_start, position - window_start)
        kept = len(data.rstrip(b"\0"))
        if kept:
            return window_start + kept
        position = window_start
    return start


async def next_batch_after_damage(
    source: ByteSource, walk: FrameWalk, end: int, runs: Mapping[int, Offset], all_synced: bool
) -> tuple[int, BatchHeader] | None:
    """Return the first batch of this log after the place where `walk` stopped, if the record that is missing there had
    once been synced; None if nothing says so.

    The whole file is known to be synced (`all_synced`), or a batch further on proves it for the missing record. A whole
    batch may also be a part of a record's value. A batch is believed if it has the epoch and incarnation of the last
    batch before the damage, or stands where the footer's index says that a batch stands (`runs`, offsets by position),
    or directly follows a batch that is believed.
    """
    first: tuple[int, BatchHeader] | None = None
    believed: FrameWalk | None = None
    position = walk.position
    while position < end:
        data = await source.read(position, min(WINDOW_BYTES, end - position))
        at = data.find(MAGIC)
        while at >= 0:
            header = await whole_batch_at(source, position + at, end)
            if header is not None and _is_believed(position + at, header, walk, runs, believed):
                first = first or (position + at, header)
                if all_synced or header.synced_before > walk.expected:
                    return first
                after = position + at + header.size
                believed = FrameWalk(source, end, after, header.next_offset, header.epoch, header.incarnation)
            at = data.find(MAGIC, at + 1)
        if position + len(data) >= end or len(data) <= len(MAGIC):
            return None
        position += len(data) - len(MAGIC) + 1
    return None


def _is_believed(
    position: int, header: BatchHeader, before: FrameWalk, runs: Mapping[int, Offset], believed: FrameWalk | None
) -> bool:
    if header.base_offset < before.expected or not before.may_follow(header):
        return False
    if before.incarnation and (header.epoch, header.incarnation) == (before.epoch, before.incarnation):
        return True
    if runs.get(position) == header.base_offset:
        return True
    if believed is None or (position, header.base_offset) != (believed.position, believed.expected):
        return False
    return believed.may_follow(header)


async def whole_batch_at(source: ByteSource, position: int, end: int) -> BatchHeader | None:
    if position % 8 or end - position < HEADER_BYTES:
        return None
    try:
        header = parse_header(await source.read(position, HEADER_BYTES))
        return verify(await source.read(position, header.size)) if position + header.size <= end else None
    except BatchError:
        return None


def footer_of(wal_file: WalFile, producers: ProducerTable) -> bytes:
    """Return the footer that makes a chunk of an open file's batches."""
    assert wal_file.index is not None
    return encode_footer(
        base_offset=wal_file.base_offset,
        next_offset=wal_file.next_offset,
        batch_bytes=wal_file.batch_bytes,
        first_epoch=wal_file.first_epoch,
        last_epoch=wal_file.last_epoch,
        sealed=wal_file.sealed,
        index=wal_file.index,
        producers=producers,
    )


async def close_file(file: DiskFile, wal_file: WalFile, producers: ProducerTable) -> None:
    """Turn an open file into a chunk: write the footer, cut the preallocated rest, make it all durable."""
    footer = footer_of(wal_file, producers)
    await file.write(wal_file.batch_bytes, [footer], sync=False)
    await file.truncate(wal_file.batch_bytes + len(footer))
    await file.sync()
    wal_file.size = wal_file.batch_bytes + len(footer)
    wal_file.closed = True
