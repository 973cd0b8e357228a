"""An owner's log as its followers get it: pieces of its files, batch after batch, control batches included.

A follower says how far its copy reaches, and `after` finds the place of the first batch that it does not have. From
there on, a place is a file and a byte in it: the bytes of a file never change once they are written. Readers stop at
what is confirmed; followers do not, because a record is confirmed when they have it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from braid.model.batch.header import HEADER_BYTES, BatchHeader, parse_header
from braid.model.errors import ChunkCorrupt, FileMissing
from braid.model.ids import Offset
from braid.model.log.replication import LogPosition
from braid.storage.chunk import Index, read_footer
from braid.storage.handles import ReadHandles
from braid.storage.log.store import LogStore
from braid.storage.log.wal import WalFile

WINDOW_BYTES: Final = 256 << 10
"""How much a search for a place reads at a time. Runs of the index are 64 KiB long."""


class FramePlace(NamedTuple):
    file_base: Offset
    """Where the file begins."""
    position: int
    """A byte of the file, at which a batch begins or the batches end."""


class Piece(NamedTuple):
    """Whole batches of one file."""

    place: FramePlace
    data: bytes

    @property
    def next(self) -> FramePlace:
        return FramePlace(self.place.file_base, self.place.position + len(self.data))


class BatchMark(NamedTuple):
    """What tells a batch from every other one that may stand at its offset."""

    base_offset: int
    records: int
    body_crc: int
    producer_id: int
    first_sequence: int


class LogFrames:
    def __init__(self, log: LogStore, handles: ReadHandles) -> None:
        self._log = log
        self._handles = handles

    @property
    def end(self) -> FramePlace:
        """The place after everything that is written."""
        files = self._log.files
        return FramePlace(files[-1].base_offset, files[-1].batch_bytes) if files else FramePlace(self._log.end, 0)

    async def after(self, position: LogPosition) -> FramePlace | None:
        """Return the place of the first batch that a copy with this position does not have. None if the copy ends
        before the first local file, or inside a batch: it cannot go on from here."""
        if not self._log.base_offset <= position.end <= self._log.end:
            return None
        if not position.epoch and any(file.base_offset == position.end for file in self._log.files):
            # A copy without a batch begins with a file. Control batches at the end of the file before are in chunks.
            return FramePlace(position.end, 0)
        for file in self._log.files:
            if file.next_offset >= position.end:
                found = await self._search(file, position)
                if found is not None:
                    return found if found.position >= 0 else None
        return self.end

    async def mark_before(self, offset: int) -> BatchMark | None:
        """Return the mark of the last batch with records below `offset`; None if no local file has it."""
        file = next((each for each in self._log.files if each.base_offset < offset <= each.next_offset), None)
        if file is None:
            return None
        at, found = (await self._index(file)).position_of(offset - 1), None
        while at < file.batch_bytes:
            data = await self._read(file, at, min(WINDOW_BYTES, file.batch_bytes - at))
            start, end = at, at + len(data)
            while end - at >= HEADER_BYTES:
                header = parse_header(data, at - start)
                if header.base_offset >= offset:
                    return found
                if header.count:
                    found = BatchMark(
                        header.base_offset,
                        header.count,
                        header.body_crc,
                        header.producer_id,
                        header.first_sequence,
                    )
                at += header.size
        return found

    async def read(self, place: FramePlace, max_bytes: int) -> Piece | None:
        """Return the batches from a place on, one at least, about `max_bytes` at most. None at the end of what is
        written. `FileMissing` if the log does not have the file any more."""
        if place == self.end:
            return None
        files = self._log.files
        at = next((at for at, file in enumerate(files) if file.base_offset == place.file_base), None)
        if at is None:
            raise FileMissing(f"{self._log.folder} has no file any more that begins at offset {place.file_base}")
        if place.position >= files[at].batch_bytes:
            if at + 1 == len(files):
                return None
            at, place = at + 1, FramePlace(files[at + 1].base_offset, 0)
        left = files[at].batch_bytes - place.position
        if not left:
            return None
        data = await self._read(files[at], place.position, min(max_bytes, left))
        whole = _whole_batches(data)
        if not whole:  # The first batch is larger than what was read.
            data = await self._read(files[at], place.position, parse_header(data).size)
            whole = len(data)
        return Piece(place, data[:whole])

    async def _search(self, file: WalFile, position: LogPosition) -> FramePlace | None:
        """Look for the place in a file; None if the file has nothing after the position. A negative place says that a
        batch stands across the position."""
        at = (await self._index(file)).position_of(position.end - 1)
        while at < file.batch_bytes:
            data = await self._read(file, at, min(WINDOW_BYTES, file.batch_bytes - at))
            start, end = at, at + len(data)
            while end - at >= HEADER_BYTES:
                header = parse_header(data, at - start)
                if _comes_after(header, position):
                    return FramePlace(file.base_offset, at)
                if header.next_offset > position.end:
                    return FramePlace(file.base_offset, -1)
                at += header.size
        return None

    async def _index(self, file: WalFile) -> Index:
        if file.index is not None:
            return file.index
        try:
            return (await read_footer(_Bytes(self, file), file.size)).index
        except ChunkCorrupt:
            return Index()  # It costs time: the batches are read from the first one on.

    async def _read(self, file: WalFile, position: int, length: int) -> bytes:
        return await self._handles.read(self._log.number, f"{self._log.folder}/{file.name}", position, length)


class _Bytes:
    def __init__(self, frames: LogFrames, file: WalFile) -> None:
        self._frames = frames
        self._file = file

    async def read(self, position: int, length: int) -> bytes:
        return await self._frames._read(self._file, position, length)


def _comes_after(header: BatchHeader, position: LogPosition) -> bool:
    """Tell whether a copy with this position does not have the batch. At one offset stand the BEGINs of several owners,
    in the order of their epochs, and at most one seal of each."""
    if header.base_offset != position.end:
        return header.base_offset > position.end
    if header.count or header.epoch > position.epoch:
        return True
    return header.is_seal and header.epoch == position.epoch and not position.sealed


def _whole_batches(data: bytes) -> int:
    """Return how many bytes at the beginning of `data` are whole batches."""
    at = 0
    while len(data) - at >= HEADER_BYTES:
        size = parse_header(data, at).size
        if at + size > len(data):
            break
        at += size
    return at
