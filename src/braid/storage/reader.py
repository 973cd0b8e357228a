"""Reading a log: one object that moves both ways between cache, local files, chunks and the live tail.

A reader has one piece of state, the offset that it wants next. For each read it looks up which place holds that offset
now: the hot cache, a local file, or a chunk. So a reader that falls behind slides from the cache back to files and
chunks, and a reader that catches up slides forward again; being slow never ends it. From every source, the next batch
must begin exactly where the last one ended, or contain the wanted offset if the reader starts inside a batch: this is
checked at every seam (I1). A reader never reads beyond the `confirmed` watermark (I7), and waits there for more.

Batches come whole. A reader that starts in the middle of one skips the records before its offset itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Final, NamedTuple

from braid.model.batch.header import HEADER_BYTES, BatchHeader, parse_header, verify
from braid.model.errors import (
    BatchError,
    BatchTruncated,
    BrokenInvariant,
    ChunkCorrupt,
    DiskError,
    FileMissing,
    LogDamaged,
    ObjectMissing,
    StorageError,
)
from braid.model.ids import Offset
from braid.ports.disk import Buffer
from braid.ports.tasks import cancel
from braid.storage.cache import HotCache
from braid.storage.chunk import RUN_BYTES, ByteSource, Index
from braid.storage.handles import NO_LOG, FooterCache, ReadHandles
from braid.storage.history.catalog import Catalog, ChunkDescriptor
from braid.storage.log.log import Log
from braid.storage.log.wal import Damage, WalFile
from braid.storage.objects.store import Objects

DEFAULT_READ_BYTES: Final = 1 << 20
_TRIES: Final = 5
"""How often a read looks again when the file or chunk that it wanted was removed or exported meanwhile."""


class StoredBatch(NamedTuple):
    header: BatchHeader
    data: Buffer


class WalBytes:
    """A file of a log, as long as the log has not ended. The next log may use the name for another file, so bytes that
    were read while the log ended do not count either."""

    def __init__(self, handles: ReadHandles, log: Log, path: str) -> None:
        self._handles = handles
        self._log = log
        self._path = path

    async def read(self, position: int, length: int) -> bytes:
        _check_not_ended(self._log)
        try:
            data = await self._handles.read(self._log.number, self._path, position, length)
        except DiskError:
            _check_not_ended(self._log)
            raise
        _check_not_ended(self._log)
        return data


class ObjectBytes:
    def __init__(self, objects: Objects, name: str) -> None:
        self._objects = objects
        self._name = name

    async def read(self, position: int, length: int) -> bytes:
        return await self._objects.read(self._name, position, length)


class StoredFile(NamedTuple):
    """A WAL file or a chunk: the same bytes, in two places."""

    owner: int
    """The owner of its footer in the cache: the log's number, or `NO_LOG`."""
    name: str
    source: ByteSource
    next_offset: Offset
    batch_bytes: int
    size: int
    known_index: Index | None
    """None where the footer has the index."""


class Sources:
    """Everything that holds records of one segment on its owner."""

    def __init__(
        self,
        log: Log,
        catalog: Catalog,
        objects: Objects,
        folder: str,
        *,
        cache: HotCache,
        handles: ReadHandles,
        footers: FooterCache,
    ) -> None:
        """`folder` is where the segment's objects lie."""
        self.log = log
        self.catalog = catalog
        self.cache = cache
        self._objects = objects
        self._folder = folder
        self._handles = handles
        self._footers = footers

    @property
    def earliest(self) -> Offset:
        """The first offset that can still be read. Local files may begin before it: retention changes the catalog
        first, and a crash, or a disk that fails, may leave files that it was about to remove."""
        return self.catalog.earliest

    def files_with(self, offset: int) -> Iterator[StoredFile]:
        """Return the files and chunks that hold `offset`, the nearest first."""
        for file in reversed(self.log.files):
            if file.base_offset <= offset < file.next_offset and self.damage_at(offset) is None:
                yield self.wal_file(file)
        chunk = self.catalog.find(offset)
        if chunk is not None:
            yield self.chunk_file(chunk)

    def damage_at(self, offset: int) -> Damage | None:
        damages = (damage for file in self.log.files for damage in file.damage)
        return next((damage for damage in damages if damage.first_offset <= offset < damage.next_offset), None)

    def wal_file(self, file: WalFile) -> StoredFile:
        path = f"{self.log.folder}/{file.name}"
        source = WalBytes(self._handles, self.log, path)
        return StoredFile(self.log.number, path, source, file.next_offset, file.batch_bytes, file.size, file.index)

    def chunk_file(self, chunk: ChunkDescriptor) -> StoredFile:
        name = f"{self._folder}/{chunk.object}"
        source = ObjectBytes(self._objects, name)
        return StoredFile(NO_LOG, name, source, chunk.next_offset, chunk.batch_bytes, chunk.size, None)

    async def index_of(self, stored: StoredFile) -> Index:
        """Return the index of a file or chunk. An unreadable footer costs time, not records: without an index, the
        batches are read from the first one on."""
        try:
            if stored.known_index is not None:
                return stored.known_index
            return (await self._footers.get(stored.owner, stored.name, stored.source, stored.size)).index
        except ChunkCorrupt:
            return Index()

    async def offset_at_time(self, timestamp: int) -> Offset:
        """Find an offset before which no record is at or after `timestamp`, close to the first such record; if there is
        no such record, the end."""
        end = Offset(self.log.confirmed.value)
        for chunk in self.catalog.chunks:
            if chunk.max_timestamp >= timestamp:
                index = await self.index_of(self.chunk_file(chunk))
                return index.offset_at_time(timestamp) or chunk.base_offset
        for file in self.log.files:
            if file.max_timestamp >= timestamp and file.next_offset > self.catalog.next_offset:
                index = await self.index_of(self.wal_file(file))
                return min(end, index.offset_at_time(timestamp) or file.base_offset)
        return end


class LogReader:
    def __init__(self, sources: Sources, offset: int) -> None:
        self._sources = sources
        self.offset = Offset(offset)
        """The offset that the next read begins with. Set it to seek."""

    async def read(self, max_bytes: int = DEFAULT_READ_BYTES) -> list[StoredBatch]:
        """Return the next batches: at least one, about `max_bytes` at most. At the live tail, wait for the next one."""
        confirmed = self._sources.log.confirmed
        while True:
            limit = max(confirmed.value, self.offset)
            if batches := await self._read_below(limit, max_bytes):
                return batches
            # Also when the limit lies inside a batch: it is given out when all of it is confirmed.
            await confirmed.reached(limit + 1)

    async def read_available(self, max_bytes: int = DEFAULT_READ_BYTES) -> list[StoredBatch]:
        """Do the same, but return an empty list at the live tail instead of waiting."""
        return await self._read_below(self._sources.log.confirmed.value, max_bytes)

    async def _read_below(self, limit: int, max_bytes: int) -> list[StoredBatch]:
        """Empty when no whole batch from the wanted offset on lies below the limit."""
        if self.offset >= limit:
            return []
        batches = await self._fetch(limit, max_bytes)
        for header, _ in batches:
            if not header.base_offset <= self.offset < header.next_offset:
                raise BrokenInvariant(f"I1: offset {self.offset} was expected, and a batch of {header} came")
            self.offset = header.next_offset
        return batches

    async def ahead(self, max_bytes: int = DEFAULT_READ_BYTES) -> AsyncIterator[list[StoredBatch]]:
        """Yield everything up to the live tail; the next read is under way while the caller works on the last one."""
        handed_out = self.offset
        next_read = asyncio.ensure_future(self.read_available(max_bytes))
        try:
            while batches := await next_read:
                handed_out = batches[-1].header.next_offset
                next_read = asyncio.ensure_future(self.read_available(max_bytes))
                await asyncio.sleep(0)  # lets it begin, also if the caller never waits for anything
                yield batches
        finally:
            await cancel([next_read])
            self.offset = handed_out  # A caller that stopped early goes on here: batches read ahead are unread again.

    async def _fetch(self, limit: int, max_bytes: int) -> list[StoredBatch]:
        sources, offset = self._sources, self.offset
        if offset < sources.earliest:  # The cache may still have it, but what follows it is gone.
            raise sources.catalog.out_of_range(offset, sources.earliest, limit)
        cached = sources.cache.get(sources.log.number, offset, max_bytes, limit)
        if cached:
            return [StoredBatch(header, data) for header, data in cached]
        error: StorageError = sources.catalog.out_of_range(offset, sources.earliest, limit)
        for _ in range(_TRIES):
            gone = False
            for stored in sources.files_with(offset):
                _check_not_ended(sources.log)
                try:
                    return await self._read_file(stored, limit, max_bytes)
                except (FileMissing, ObjectMissing) as missing:
                    error, gone = missing, True
                except (LogDamaged, DiskError) as unreadable:
                    error = unreadable
            if not gone:
                break
        damage = sources.damage_at(offset)
        if damage is not None:
            text = f"offsets {damage.first_offset}–{damage.next_offset - 1} are damaged in {damage.file}"
            raise LogDamaged(f"{text}: {damage.reason}", offset, damage.next_offset)
        raise error

    async def _read_file(self, stored: StoredFile, limit: int, max_bytes: int) -> list[StoredBatch]:
        index: Index | None = None
        try:
            index = await self._sources.index_of(stored)
            return await read_batches(stored.source, index, stored.batch_bytes, self.offset, limit, max_bytes)
        except (BatchError, ChunkCorrupt) as error:
            until = _next_run(index, self.offset, stored.next_offset)
            text = f"{stored.name} cannot be read at offset {self.offset}: {error}"
            raise LogDamaged(text, self.offset, until) from error


def _check_not_ended(log: Log) -> None:
    if (refusal := log.ended) is not None:
        raise refusal


def _next_run(index: Index | None, offset: int, end: int) -> int:
    """Return where reading can go on after an unreadable batch: at the next place that the index knows."""
    runs = index.runs if index is not None else []
    return next((run.offset for run in runs if run.offset > offset), end)


async def read_batches(
    source: ByteSource, index: Index, batch_end: int, offset: int, limit: int, max_bytes: int
) -> list[StoredBatch]:
    """Return batches from the one that holds `offset` on, as far as they are below `limit`; none when the first is not.
    They have about `max_bytes`, but there is one at least."""
    position = index.position_of(offset)
    # The index knows the run; the batch is found inside it by walking. With little credit that must not become a read
    # for each header.
    length = max(max_bytes, RUN_BYTES)
    while True:
        wanted = min(max(length, HEADER_BYTES), batch_end - position)
        data = await source.read(position, wanted)
        view = memoryview(data)
        batches: list[StoredBatch] = []
        at, expected, room, ended = 0, offset, max_bytes, False
        needed = HEADER_BYTES
        try:
            while at + HEADER_BYTES <= len(data):
                header = parse_header(data, at)
                needed = header.size
                if header.next_offset > expected:
                    if header.base_offset > expected:
                        raise BatchTruncated(f"offset {expected} is missing: next comes offset {header.base_offset}")
                    if header.next_offset > limit:
                        ended = True
                        break
                    if at + needed > len(data) or (batches and needed > room):
                        break
                    verify(data, at)
                    batches.append(StoredBatch(header, view[at : at + needed]))
                    expected = header.next_offset
                    room -= needed
                at += needed
                needed = HEADER_BYTES
        except BatchError:
            if not batches:  # The batches before the bad one are good; the next read begins at it and raises.
                raise
        if batches or ended:
            if 2 * (max_bytes - room) < len(data):  # A few batches must not keep the whole run in memory.
                return [StoredBatch(header, bytes(part)) for header, part in batches]
            return batches
        if position + len(data) >= batch_end or len(data) < wanted:
            raise BatchTruncated(f"offset {offset} is not where the index says, at or after byte {position}")
        # Only batches before the wanted one, or a part of it: read on from there.
        position += at
        length = max(max_bytes, RUN_BYTES, needed)
