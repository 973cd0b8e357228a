"""Topics made by hand in a folder, as brokers leave them in storage: any layout, real records, chunks and manifests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from braid.model.batch.encode import encode_batch
from braid.model.batch.header import Codec, parse_header, stamp
from braid.model.ids import Epoch, LayoutEpoch, Offset, Revision, SegmentId
from braid.model.layout import HashRange, Layout, SegmentInfo, SegmentState
from braid.storage.chunk import Index, encode_footer
from braid.storage.history.catalog import ChunkDescriptor
from braid.storage.history.exporter import chunk_name
from braid.storage.history.manifest import SegmentManifest, TopicManifest
from braid.storage.log.producers import ProducerTable

PATH = "public/default/orders"
FULL = HashRange(0, 0xFFFF)


class Record(NamedTuple):
    value: bytes
    key: bytes | None = None
    timestamp: int = 1_000_000
    """µs since 1970."""
    headers: dict[str, bytes] | None = None


class Shape(NamedTuple):
    """Of a segment."""

    hashes: HashRange
    parents: tuple[int, ...] = ()


def layout_of(shapes: Sequence[Shape]) -> Layout:
    """Segments by id; those that are parents are sealed. One change of layout for each generation."""
    created = [0] * len(shapes)
    for number, shape in enumerate(shapes):
        created[number] = 1 + max((created[parent] for parent in shape.parents), default=-1)
    infos = {}
    for number, (hashes, parents) in enumerate(shapes):
        children = tuple(SegmentId(each) for each, shape in enumerate(shapes) if number in shape.parents)
        infos[SegmentId(number)] = SegmentInfo(
            SegmentId(number),
            hashes,
            SegmentState.SEALED if children else SegmentState.ACTIVE,
            tuple(map(SegmentId, parents)),
            children,
            LayoutEpoch(created[number]),
            LayoutEpoch(created[children[0]] if children else 0),
        )
    return Layout(LayoutEpoch(max(created)), SegmentId(len(shapes)), infos)


def _encoded(records: Sequence[Record], codec: Codec) -> bytearray:
    return encode_batch(
        [record.value for record in records],
        keys=[record.key for record in records],
        timestamps=[record.timestamp for record in records],
        headers=[record.headers for record in records],
        now_us=0,
        codec=codec,
    )


class HandMadeTopic:
    def __init__(self, folder: Path, shapes: Sequence[Shape] = (Shape(FULL),)) -> None:
        self.folder = folder
        self.layout = layout_of(shapes)
        self.storage = f"file://{folder}"
        self.options = {"manifest": self.storage, "topic": "orders"}
        self.chunks: dict[int, list[ChunkDescriptor]] = {segment: [] for segment in self.layout.segments}
        self.revision = 1
        self.write_manifests()

    def descriptor(self, segment: int) -> str:
        return f"{self.layout.segment(segment).hash_range}-{segment}"

    def path(self, segment: int, chunk: int) -> Path:
        return self.folder / PATH / self.descriptor(segment) / self.chunks[segment][chunk].object

    def end(self, segment: int) -> int:
        return self.chunks[segment][-1].next_offset if self.chunks[segment] else 0

    def add_chunk(
        self,
        segment: int,
        *batches: Sequence[Record] | bytearray,
        epoch: int = 1,
        codec: Codec = Codec.NONE,
        at: int | None = None,
        runs: bool = False,
    ) -> ChunkDescriptor:
        """A chunk of these batches behind the last one of the segment, or `at` another place: records, or a batch as a
        producer sent it. `runs`: each batch is a run in the index."""
        first = offset = self.end(segment) if at is None else at
        data, index = bytearray(), Index()
        for records in batches:
            batch = records if isinstance(records, bytearray) else _encoded(records, codec)
            header = stamp(batch, parse_header(batch), Offset(offset), 5_000_000, Epoch(epoch), 7, 0)
            index.add(header, len(data), starts_run=runs)
            data += batch
            offset = header.next_offset
        footer = encode_footer(
            base_offset=first,
            next_offset=offset,
            batch_bytes=len(data),
            first_epoch=epoch,
            last_epoch=epoch,
            sealed=False,
            index=index,
            producers=ProducerTable(),
        )
        low, high = index.key_hashes
        chunk = ChunkDescriptor(
            base_offset=Offset(first),
            next_offset=Offset(offset),
            epoch=Epoch(epoch),
            object=chunk_name(first, offset, epoch),
            size=len(data) + len(footer),
            batch_bytes=len(data),
            min_timestamp=index.min_timestamp,
            max_timestamp=index.max_timestamp,
            min_key_hash=low,
            max_key_hash=high,
        )
        self.chunks[segment].append(chunk)
        self.chunks[segment].sort(key=lambda each: each.base_offset)
        path = self.folder / PATH / self.descriptor(segment) / chunk.object
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(data) + footer)
        self.write_manifests()
        return chunk

    def forget(self, segment: int, chunk: int, *, delete: bool = True) -> ChunkDescriptor:
        """Take a chunk out of the manifests, as retention does, and delete it."""
        path = self.path(segment, chunk)
        gone = self.chunks[segment].pop(chunk)
        self.write_manifests()
        if delete:
            path.unlink()
        return gone

    def write_manifests(self) -> None:
        self.revision += 1
        topic = TopicManifest(PATH, Revision(self.revision), self.layout)
        self._write(self.folder / PATH, topic)
        for segment, chunks in self.chunks.items():
            info = self.layout.segment(segment)
            manifest = SegmentManifest(
                topic=PATH,
                descriptor=self.descriptor(segment),
                revision=Revision(self.revision),
                epoch=Epoch(1),
                next_offset=Offset(self.end(segment)),
                sealed=not info.is_active,
                chunks=tuple(chunks),
            )
            self._write(self.folder / PATH / self.descriptor(segment), manifest)

    def _write(self, folder: Path, manifest: msgspec.Struct) -> None:
        (folder / "manifests").mkdir(parents=True, exist_ok=True)
        (folder / "manifests" / f"{self.revision:020d}.json").write_bytes(msgspec.json.encode(manifest))


def records(first: int, count: int, **same: object) -> list[Record]:
    """Values that say their own number."""
    return [Record(b"%d" % number, **same) for number in range(first, first + count)]  # type: ignore[arg-type]
