"""Turning closed WAL files into chunks, in order, one at a time.

A closed file is already a chunk. To export it, read it, check every batch, store the bytes under a new name, look
whether they really are there, and add the chunk to the catalog under the fence. A crash or an error between any two
steps leaves at most an object that no catalog refers to; the next try finds it under the same name, compares and adopts
it. A file with damage is not exported, and neither is any file after it: its bytes stay where they are, and
`LogDamaged` says why history no longer grows.

A full disk may have no room to close the newest file. Such a log takes no more batches, so its newest file is exported
as it is, with a footer that exists only in memory. Where the chunks lie on the same disk, there is no room for copies
either: each file gets a second name, as a chunk, after the newest one was closed, which takes little.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

from braid.metadata.store import Condition, Operation
from braid.model.batch.header import verify
from braid.model.errors import BatchError, BraidError, ChunkCorrupt, DiskFull, LogDamaged
from braid.model.ids import Epoch, Offset
from braid.ports.tasks import cancel
from braid.storage.chunk import Footer, decode_footer
from braid.storage.handles import ReadHandles
from braid.storage.history.catalog import Catalog, ChunkDescriptor
from braid.storage.history.manifest import segment_folder, write_segment_manifest
from braid.storage.history.object_names import id_suffix
from braid.storage.log.log import Log
from braid.storage.log.wal import WalFile
from braid.storage.objects.store import Objects, create_once

BATCHES_PER_TURN: Final = 256
"""How many batches are checked before other tasks run: some hundred microseconds."""
FIRST_RETRY_S: Final = 0.2
MAX_RETRY_S: Final = 30.0

Rider = Callable[[], tuple[Sequence[Condition], Sequence[Operation]]]
"""Returns what a transaction of the catalog does beside its own work."""


def chunk_name(base_offset: int, next_offset: int, epoch: int, topic_id: int = 0) -> str:
    """Name a chunk by everything that decides its content: an equal name with other content is an error."""
    return f"{base_offset:020d}-{next_offset:020d}-{epoch:010d}{id_suffix(topic_id)}.chunk"


class Exporter:
    def __init__(
        self,
        log: Log,
        catalog: Catalog,
        objects: Objects,
        handles: ReadHandles,
        topic_path: str,
        descriptor: str,
        file_closed: asyncio.Event,
        rng: random.Random,
        topic_id: int = 0,
        on_complete: Rider = lambda: ((), ()),
        link: Callable[[str, str], Awaitable[None]] | None = None,
    ) -> None:
        """`on_complete` is called when chunks hold the whole of a log that has ended. What it returns becomes part of
        the transaction that notes this. `link` creates an object of a file, where objects lie on the log's disk."""
        self._log = log
        self._catalog = catalog
        self._objects = objects
        self._handles = handles
        self._topic_path = topic_path
        self._descriptor = descriptor
        self._topic_id = topic_id
        self._random = rng
        self._turn = asyncio.Lock()
        self._file_closed = file_closed
        self._manifest_due = True
        self._on_complete = on_complete
        self._link = link
        self._complete_noted = False
        self._awaited: Offset | None = None
        """Where a closed file ends that is not confirmed yet."""
        self._task: asyncio.Task[None] | None = None
        self.on_exported: Callable[[], None] | None = None
        """Called when chunks hold more of the log."""
        self.last_error: BraidError | None = None
        """Why the last try failed; None after a good one."""

    def start(self) -> None:
        """Export in the background from now on, whenever a file closes."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def look(self) -> None:
        """Look whether there is something to export, or to note."""
        self._file_closed.set()

    def on_confirmed(self) -> None:
        """Look again, if a closed file has waited for this: followers have it now."""
        if self._awaited is not None and self._log.confirmed.value >= self._awaited:
            self._awaited = None
            self._file_closed.set()

    async def stop(self) -> None:
        if self._task is not None:
            await cancel([self._task])
            self._task = None

    async def _run(self) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            self._file_closed.clear()
            try:
                await self.export_closed()
                retry_s = FIRST_RETRY_S
                await self._file_closed.wait()
            except BraidError as error:
                self.last_error = error
                # Trying does not cure damage or a lost fence, but it is rare and cheap, and after a repair nothing has
                # to be restarted.
                await asyncio.sleep(retry_s * self._random.uniform(0.5, 1.0))
                retry_s = min(2 * retry_s, MAX_RETRY_S)

    async def export_closed(self) -> int:
        """Export every closed file that history does not cover yet; returns how many. Raises at the first failure."""
        async with self._turn:
            exported = 0
            await self._note_end()
            for file in list(self._log.files):
                if file.next_offset <= self._catalog.next_offset or not file.records:
                    continue
                if file.damage:
                    damage = file.damage[0]
                    text = (
                        f"{file.name} is damaged at offset {damage.first_offset} and is not exported: {damage.reason}"
                    )
                    raise LogDamaged(text, damage.first_offset, damage.next_offset)
                if file.base_offset > self._catalog.next_offset:
                    first, end = self._catalog.next_offset, file.base_offset
                    text = f"{file.name} is not exported: offsets {first}–{end - 1} before it are nowhere"
                    raise LogDamaged(text, first, end)
                closed = file.closed or self._log.is_full
                if not closed or file.next_offset > self._log.confirmed.value:
                    self._awaited = file.next_offset if closed else None
                    break  # What is not confirmed is not history yet (I7).
                await self._export(file)
                exported += 1
            await self._note_end()
            if self._manifest_due:
                await self._write_manifest()
            self.last_error = None
            return exported

    async def _export(self, file: WalFile) -> None:
        if self._link is not None and self._log.is_full and not file.closed:
            await self._log.close_newest()
        data = await self._read(file)
        footer = await self._check(file, data)
        name = chunk_name(file.base_offset, file.next_offset, self._log.epoch, self._topic_id)
        await self._store(file, f"{segment_folder(self._topic_path, self._descriptor)}/{name}", data)
        min_key_hash, max_key_hash = footer.index.key_hashes
        chunk = ChunkDescriptor(
            base_offset=file.base_offset,
            next_offset=file.next_offset,
            epoch=Epoch(self._log.epoch),
            object=name,
            size=len(data),
            batch_bytes=footer.batch_bytes,
            min_timestamp=footer.index.min_timestamp,
            max_timestamp=footer.index.max_timestamp,
            min_key_hash=min_key_hash,
            max_key_hash=max_key_hash,
        )
        await self._catalog.commit(chunk)
        if self.on_exported is not None:
            self.on_exported()
        self._manifest_due = True
        await self._write_manifest()

    async def _read(self, file: WalFile) -> bytes:
        size = file.size if file.closed else file.batch_bytes
        data = await self._handles.read(self._log.number, self._path(file), 0, size)
        return data if file.closed else data + self._log.footer_of_newest()

    async def _store(self, file: WalFile, name: str, data: bytes) -> None:
        """Store a chunk: as a copy, or without one where a copy has no room."""
        if self._link is None:
            await create_once(self._objects, name, data)
            return
        if not self._log.is_full:
            with contextlib.suppress(DiskFull):
                await create_once(self._objects, name, data)
                return
        await create_once(self._objects, name, data, create=partial(self._link, name, self._path(file)))

    def _path(self, file: WalFile) -> str:
        return f"{self._log.folder}/{file.name}"

    async def _check(self, file: WalFile, data: bytes) -> Footer:
        """Check that every batch is whole and in its place. A damaged file stays local and is never published."""
        at, expected = 0, file.base_offset
        try:
            footer = decode_footer(data)
            while at < footer.batch_bytes:
                for _ in range(BATCHES_PER_TURN):
                    if at >= footer.batch_bytes:
                        break
                    header = verify(data, at)
                    if header.base_offset != expected:
                        raise ChunkCorrupt(f"offset {header.base_offset} stands where {expected} should")
                    expected = header.next_offset
                    at += header.size
                await asyncio.sleep(0)
            if expected != footer.next_offset or footer.batch_bytes + footer.size != len(data):
                raise ChunkCorrupt(f"the footer ends at offset {footer.next_offset}, the batches at {expected}")
        except (BatchError, ChunkCorrupt) as error:
            text = f"{file.name} has been damaged at offset {expected} and is not exported: {error}"
            raise LogDamaged(text, expected, file.next_offset) from error
        return footer

    async def _note_end(self) -> None:
        if not self._log.seal_is_durable:
            return
        if self._ends_here and not self._complete_noted:
            await self._catalog.note_end(self._log.end, *self._on_complete())
            self._complete_noted = True
            self._manifest_due = True  # The last chunk may have been exported long ago, or there is none.
        elif self._catalog.end is None:
            await self._catalog.note_end(self._log.end)

    async def write_manifest(self) -> None:
        """Describe the catalog as it is now, for readers without a metadata store."""
        async with self._turn:
            await self._write_manifest()

    @property
    def _ends_here(self) -> bool:
        """Tell whether chunks hold the whole of a log that has ended."""
        return self._log.seal_is_durable and self._catalog.next_offset == self._log.end

    async def _write_manifest(self) -> None:
        self._manifest_due = True
        await write_segment_manifest(
            self._objects,
            self._topic_path,
            self._descriptor,
            self._catalog,
            sealed=self._ends_here,
            topic_id=self._topic_id,
        )
        self._manifest_due = False
