"""Reading durable history by range, from objects alone: no broker, no metadata store, no local file.

What to read comes from a manifest (manifest.py) or a catalog; where it stands comes from the chunks' footers. The index
in a footer cuts the chunk into runs of whole batches, so a range of offsets becomes a few spans of bytes, with one read
for each; runs that cannot hold wanted records are left out. Every batch is checked, and each must begin where the one
before it ended (I1). Batches come whole: the first and the last may reach beyond the range that was asked for.

Plain functions say which spans to read and what is in their bytes, also for readers that fetch bytes in another way.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Final, NamedTuple

from braid.model.batch.header import HEADER_BYTES, BatchHeader, parse_header, verify
from braid.model.errors import BatchCorrupt, BatchError, BatchTruncated, ChunkCorrupt, LogDamaged, OffsetOutOfRange
from braid.model.ids import Offset
from braid.storage.chunk import Footer, IndexEntry
from braid.storage.handles import NO_LOG, FooterCache
from braid.storage.history.catalog import ChunkDescriptor
from braid.storage.history.manifest import SegmentManifest, segment_folder
from braid.storage.objects.store import Objects
from braid.storage.reader import ObjectBytes, StoredBatch

DEFAULT_READ_BYTES: Final = 8 << 20
"""Large, because readers of history read much of it, and a remote store answers slowly."""


class Span(NamedTuple):
    """Bytes of a chunk that hold whole batches, with the records from `first` up to but not including `until`."""

    position: int
    length: int
    first: int
    until: int


def spans(
    footer: Footer, first: int, until: int, max_bytes: int, wanted: Callable[[IndexEntry], bool] = lambda _: True
) -> list[Span]:
    """Return what to read for these offsets, of `wanted` runs only: spans of at most `max_bytes`, or of one run."""
    runs = footer.index.runs
    found: list[Span] = []
    for number, run in enumerate(runs):
        following = runs[number + 1] if number + 1 < len(runs) else None
        end = following.position if following is not None else footer.batch_bytes
        next_offset = following.offset if following is not None else footer.next_offset
        if next_offset <= first or not wanted(run):
            continue
        if run.offset >= until or first >= until:
            break
        last = found[-1] if found else None
        if last is not None and last.position + last.length == run.position and end - last.position <= max_bytes:
            found[-1] = Span(last.position, end - last.position, last.first, next_offset)
        else:
            found.append(Span(run.position, end - run.position, run.offset, next_offset))
    return found


def batches_in(data: bytes, span: Span, name: str) -> list[StoredBatch]:
    """Return the batches of a span, checked. `LogDamaged`, which names object and offset, if one of them is bad."""
    view = memoryview(data)
    if len(data) < span.length:
        place = f"bytes {span.position} to {span.position + span.length} were read, and some are missing"
        raise LogDamaged(f"{name} cannot be read at offset {span.first}: {place}", span.first, span.until)
    found = _walk(span, name, lambda at: verify(view, at))
    return [StoredBatch(header, view[at : at + header.size]) for at, header in found]


def headers_in(read: Callable[[int, int], bytes], span: Span, name: str) -> list[BatchHeader]:
    """Return the headers of a span's batches, each checked; `read` gives bytes of the object. Bodies are neither read
    nor checked."""
    found = _walk(span, name, lambda at: parse_header(read(span.position + at, HEADER_BYTES)))
    return [header for _, header in found]


def _walk(span: Span, name: str, header_at: Callable[[int], BatchHeader]) -> Iterator[tuple[int, BatchHeader]]:
    """Batches that have records, with their places in the span, each beginning where the one before it ended (I1)."""
    at, expected = 0, span.first
    try:
        while at < span.length:
            header = header_at(at)
            if header.count:  # A control batch marks a place; it has no records.
                if header.base_offset != expected:
                    raise BatchCorrupt(f"a batch at byte {span.position + at} begins at offset {header.base_offset}")
                expected = header.next_offset
                yield at, header
            at += header.size
        if expected != span.until:
            raise BatchTruncated(f"batches end at offset {expected}, and the index says {span.until}")
    except BatchError as error:
        raise LogDamaged(f"{name} cannot be read at offset {expected}: {error}", expected, span.until) from error


async def footer_of(objects: Objects, footers: FooterCache, name: str, chunk: ChunkDescriptor) -> Footer:
    """Return the footer of a chunk, if it agrees with what the catalog says of it."""
    try:
        footer = await footers.get(NO_LOG, name, ObjectBytes(objects, name), chunk.size)
        if (footer.base_offset, footer.next_offset) != (chunk.base_offset, chunk.next_offset):
            raise ChunkCorrupt(
                f"its footer speaks of offsets {footer.base_offset}–{footer.next_offset}, the catalog of "
                f"{chunk.base_offset}–{chunk.next_offset}"
            )
    except ChunkCorrupt as error:
        raise LogDamaged(
            f"{name} cannot be read at offset {chunk.base_offset}: {error}", chunk.base_offset, chunk.next_offset
        ) from error
    return footer


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

    async def read(
        self, first: int, until: int, max_bytes: int = DEFAULT_READ_BYTES
    ) -> AsyncIterator[list[StoredBatch]]:
        """Yield the batches that hold the offsets from `first` up to but not including `until`, in order."""
        if first < self.earliest or until > self.next_offset:
            text = f"offsets {first}–{until} of {self._folder} were asked for; chunks hold"
            text = f"{text} {self.earliest}–{self.next_offset}"
            raise OffsetOutOfRange(text, self.earliest, self.next_offset)
        offset = first
        for chunk in self._chunks:
            if chunk.base_offset <= offset < min(chunk.next_offset, until):
                name = f"{self._folder}/{chunk.object}"
                footer = await footer_of(self._objects, self._footers, name, chunk)
                for span in spans(footer, offset, until, max_bytes):
                    data = await self._objects.read(name, span.position, span.length)
                    batches = batches_in(data, span, name)
                    yield [
                        each for each in batches if offset < each.header.next_offset and each.header.base_offset < until
                    ]
                    offset = span.until
        if offset < until:
            raise LogDamaged(f"no chunk of {self._folder} holds offset {offset}", offset, until)
