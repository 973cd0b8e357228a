"""Reading durable history by range, from objects alone: no broker, no metadata store, no local file.

What to read comes from a manifest (manifest.py) or a catalog; where it stands comes from the chunks' footers. Batches
come whole: the first and the last may reach beyond the range that was asked for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Final

from braid.model.errors import BatchError, ChunkCorrupt, LogDamaged, OffsetOutOfRange
from braid.model.ids import Offset
from braid.storage.catalog import ChunkDescriptor
from braid.storage.handles import NO_LOG, FooterCache
from braid.storage.manifest import SegmentManifest, segment_folder
from braid.storage.objects import Objects
from braid.storage.reader import Batch, ObjectBytes, read_batches

DEFAULT_READ_BYTES: Final = 8 << 20
"""Large, because whoever reads history reads much of it, and a remote store answers slowly."""


class HistoryReader:
    """One segment's chunks, as a manifest lists them. What is read is fixed by the manifest."""

    def __init__(self, objects: Objects, manifest: SegmentManifest, footers: FooterCache | None = None) -> None:
        self._objects = objects
        self._folder = segment_folder(manifest.topic, manifest.descriptor)
        self._chunks: Sequence[ChunkDescriptor] = manifest.chunks
        self._footers = footers or FooterCache()
        self.next_offset = manifest.next_offset
        """Where the manifest's history ends."""

    @property
    def earliest(self) -> Offset:
        return self._chunks[0].base_offset if self._chunks else self.next_offset

    async def read(self, first: int, until: int, max_bytes: int = DEFAULT_READ_BYTES) -> AsyncIterator[list[Batch]]:
        """The batches that hold the offsets from `first` up to but not including `until`, in order."""
        if first < self.earliest or until > self.next_offset:
            text = f"offsets {first}–{until} of {self._folder} were asked for; chunks hold"
            text = f"{text} {self.earliest}–{self.next_offset}"
            raise OffsetOutOfRange(text, self.earliest, self.next_offset)
        offset = first
        for chunk in self._chunks:
            while chunk.base_offset <= offset < min(chunk.next_offset, until):
                batches = await self._read_chunk(chunk, offset, max_bytes)
                wanted = [batch for batch in batches if batch.header.base_offset < until]
                offset = wanted[-1].header.next_offset
                yield wanted
        if offset < until:
            raise LogDamaged(f"no chunk of {self._folder} holds offset {offset}", offset, until)

    async def _read_chunk(self, chunk: ChunkDescriptor, offset: int, max_bytes: int) -> list[Batch]:
        name = f"{self._folder}/{chunk.object}"
        source = ObjectBytes(self._objects, name)
        try:
            footer = await self._footers.get(NO_LOG, name, source, chunk.size)
            return await read_batches(source, footer.index, chunk.batch_bytes, offset, chunk.next_offset, max_bytes)
        except (BatchError, ChunkCorrupt) as error:
            raise LogDamaged(f"{name} cannot be read at offset {offset}: {error}", offset, chunk.next_offset) from error
