"""A topic's history as it lies in storage, written by the storage layer itself; and ways to damage it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from braid.metadata.memory import MemoryStore
from braid.model.batch.header import BatchHeader, assemble, body_of, parse_header
from braid.model.batch.identity import ProducerIdentity, derived_id
from braid.model.ids import Epoch, LayoutEpoch, Offset, Revision, SegmentId
from braid.model.layout import HashRange, Layout, SegmentInfo, SegmentState
from braid.model.names import SegmentName, TopicName
from braid.storage.cache import HotCache
from braid.storage.chunk import Index, decode_footer, encode_footer
from braid.storage.context import StorageContext, StorageMode
from braid.storage.handles import FooterCache, ReadHandles
from braid.storage.history.catalog import ChunkDescriptor, ProducerObject
from braid.storage.history.exporter import chunk_name
from braid.storage.history.manifest import SegmentManifest, write_topic_manifest
from braid.storage.history.producer_objects import producers_name
from braid.storage.log.producers import ProducerTable
from braid.storage.segment import SegmentStorage
from braid.testing.sim.clock import SimulatedClock
from braid.testing.sim.disk import SimulatedDisk
from braid.testing.sim.loop import Simulation, run_simulation
from braid.testing.sim.objects import MemoryObjects
from tests.kits.storage import SMALL, make_batch

TOPIC: Final = TopicName.parse("orders")
ORDINARY: Final = 7
DERIVED: Final = derived_id("query", 1, 0)
BATCH_RECORDS: Final = 3
FILE_BATCHES: Final = 6
OWNERS: Final = 2
FILES: Final = 3
RECORDS: Final = BATCH_RECORDS * FILE_BATCHES * OWNERS * FILES
"""Of each segment: six chunks of 18 records, three of each owner."""

Batches = list[tuple[BatchHeader, bytes]]


def split(layout: Layout, parent: int) -> Layout:
    """The layout in which this segment has two children."""
    old = layout.segment(parent)
    epoch = LayoutEpoch(layout.epoch + 1)
    middle = (old.hash_range.start + old.hash_range.end) // 2
    first = layout.next_segment_id
    ranges = (HashRange(old.hash_range.start, middle), HashRange(middle + 1, old.hash_range.end))
    children = {
        SegmentId(first + number): SegmentInfo(
            SegmentId(first + number), hashes, parent_ids=(old.segment_id,), created_at_epoch=epoch
        )
        for number, hashes in enumerate(ranges)
    }
    sealed = msgspec.structs.replace(old, state=SegmentState.SEALED, child_ids=tuple(children), sealed_at_epoch=epoch)
    return Layout(
        epoch, SegmentId(first + 2), {**layout.segments, old.segment_id: sealed, **children}, layout.properties
    )


class History:
    """The objects of one topic, by name."""

    def __init__(self, layout: Layout, objects: dict[str, bytes]) -> None:
        self.layout = layout
        self.objects = objects

    def folder(self, segment: int) -> str:
        return f"{TOPIC.path}/{SegmentName.of(TOPIC, self.layout.segment(segment)).descriptor}"

    def manifest(self, segment: int) -> SegmentManifest:
        return msgspec.json.decode(self.objects[self._manifest_name(segment)], type=SegmentManifest)

    def set_manifest(self, segment: int, **changes: object) -> None:
        manifest = msgspec.structs.replace(self.manifest(segment), **changes)
        self.objects[self._manifest_name(segment)] = msgspec.json.encode(manifest)

    def chunk(self, segment: int, number: int) -> ChunkDescriptor:
        return self.manifest(segment).chunks[number]

    def content(self, segment: int, number: int) -> bytes:
        return self.objects[f"{self.folder(segment)}/{self.chunk(segment, number).object}"]

    def batches(self, segment: int, number: int) -> Batches:
        data, found, at = self.content(segment, number), [], 0
        while at < self.chunk(segment, number).batch_bytes:
            header = parse_header(data, at)
            found.append((header, bytes(body_of(data, header, at))))
            at += header.size
        return found

    def flip(self, segment: int, number: int, position: int) -> None:
        """One bit of a chunk."""
        data = bytearray(self.content(segment, number))
        data[position] ^= 4
        self.objects[f"{self.folder(segment)}/{self.chunk(segment, number).object}"] = bytes(data)

    def position(self, segment: int, number: int, batch: int) -> int:
        """Of a batch in its chunk."""
        return sum(header.size for header, _ in self.batches(segment, number)[:batch])

    def drop(self, segment: int, number: int) -> None:
        del self.objects[f"{self.folder(segment)}/{self.chunk(segment, number).object}"]

    def rewrite(self, segment: int, number: int, edit: Callable[[Batches], Batches]) -> None:
        """Put other batches into a chunk, with a footer and a descriptor that agree with them."""
        old, batches = self.chunk(segment, number), self.batches(segment, number)
        producers = ProducerTable()
        if number:
            producers = decode_footer(self.content(segment, number - 1)).producers
        self.drop(segment, number)
        data, chunk = chunk_of(edit(batches), producers, old.epoch)
        self.objects[f"{self.folder(segment)}/{chunk.object}"] = data
        chunks = [chunk if each == old else each for each in self.manifest(segment).chunks]
        self.set_manifest(segment, chunks=tuple(chunks), next_offset=chunks[-1].next_offset)

    def name_producers(self, segment: int) -> str:
        """Put the producer table of the newest chunk into an object of its own, which the manifest names; returns the
        object's name."""
        manifest = self.manifest(segment)
        footer = decode_footer(self.content(segment, len(manifest.chunks) - 1))
        data = encode_footer(
            base_offset=footer.next_offset,
            next_offset=footer.next_offset,
            batch_bytes=0,
            first_epoch=footer.last_epoch,
            last_epoch=footer.last_epoch,
            sealed=footer.sealed,
            index=Index(),
            producers=footer.producers,
        )
        named = ProducerObject(producers_name(footer.next_offset, manifest.epoch), len(data), footer.next_offset)
        self.objects[f"{self.folder(segment)}/{named.object}"] = data
        self.set_manifest(segment, producers=named)
        return named.object

    def copy(self) -> History:
        return History(self.layout, dict(self.objects))

    def save(self, folder: Path) -> str:
        """As files; returns the storage's URL."""
        for name, data in self.objects.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return f"file://{folder}"

    def _manifest_name(self, segment: int) -> str:
        folder = f"{self.folder(segment)}/manifests/"
        return max(name for name in self.objects if name.startswith(folder))


def chunk_of(batches: Batches, producers: ProducerTable, epoch: int) -> tuple[bytes, ChunkDescriptor]:
    """`producers` as they were before."""
    index, data = Index(), b""
    producers = producers.copy()
    for header, body in batches:
        index.add(header, len(data))
        producers.apply(header, header.base_offset)
        data += assemble(header, body)
    first, last = batches[0][0], batches[-1][0]
    footer = encode_footer(
        base_offset=first.base_offset,
        next_offset=last.next_offset,
        batch_bytes=len(data),
        first_epoch=first.epoch,
        last_epoch=last.epoch,
        sealed=last.is_seal,
        index=index,
        producers=producers,
    )
    name = chunk_name(first.base_offset, last.next_offset, epoch)
    low, high = index.key_hashes
    return data + footer, ChunkDescriptor(
        first.base_offset,
        last.next_offset,
        Epoch(epoch),
        name,
        len(data + footer),
        len(data),
        index.min_timestamp,
        index.max_timestamp,
        low,
        high,
    )


def moved(header: BatchHeader, by: int) -> BatchHeader:
    return msgspec.structs.replace(header, base_offset=Offset(header.base_offset + by))


def make_history(layout: Layout, *, late: frozenset[int] = frozenset(), stray: frozenset[int] = frozenset()) -> History:
    """Every segment gets `RECORDS` records from an ordinary producer and a derived one, parents before children, those
    with children are sealed. Segments in `late` are written by owners whose clocks are a minute ahead; those in `stray`
    get a batch with a key of another segment."""

    async def main(simulation: Simulation) -> History:
        objects = MemoryObjects(simulation.clock)
        await write_topic_manifest(objects, TOPIC.path, Revision(1), layout)
        store = MemoryStore(simulation.clock)
        for info in layout.segments.values():
            clock = simulation.clock.skewed(60_000_000 if info.segment_id in late else 0)
            await _write_segment(simulation, objects, store, clock, info, stray=info.segment_id in stray)
        contents = {stat.name: await objects.read(stat.name, 0, stat.size) for stat in await objects.list("")}
        return History(layout, contents)

    return run_simulation(1, main)


async def _write_segment(
    simulation: Simulation,
    objects: MemoryObjects,
    store: MemoryStore,
    clock: SimulatedClock,
    info: SegmentInfo,
    *,
    stray: bool,
) -> None:
    ordinary = ORDINARY + 16 * info.segment_id
    sequences = {ordinary: 0}
    for owner in range(OWNERS):
        segment = await _open(simulation, objects, store, clock, info, owner)
        era = ProducerIdentity(DERIVED, 2 * owner).first_sequence
        sequences[DERIVED] = era
        for file in range(FILES):
            for number in range(FILE_BATCHES):
                producer = DERIVED if number % 3 == 2 else ordinary
                hashes = (info.hash_range.start, info.hash_range.end)
                if stray and (owner, file, number) == (1, 0, 3):
                    hashes = (info.hash_range.start, (info.hash_range.end + 1) % 0x10000)
                body = b"%d %d %d %d" % (info.segment_id, owner, file, number)
                batch = make_batch(
                    BATCH_RECORDS,
                    body,
                    producer=producer,
                    sequence=sequences[producer],
                    times=(clock.now_us(), clock.now_us()),
                    key_hashes=(min(hashes), max(hashes)),
                )
                await segment.log.confirm(segment.append(batch))
                sequences[producer] += BATCH_RECORDS
            if (owner, file) != (OWNERS - 1, FILES - 1):
                await segment.log.rotate()
        if owner == OWNERS - 1 and info.child_ids:
            await segment.log.seal()
        await segment.hand_over()


async def _open(
    simulation: Simulation,
    objects: MemoryObjects,
    store: MemoryStore,
    clock: SimulatedClock,
    info: SegmentInfo,
    owner: int,
) -> SegmentStorage:
    disk = SimulatedDisk(simulation.random).mount()
    context = StorageContext(
        broker_id=f"broker-{owner}",
        disk=disk,
        folder="wal",
        store=store,
        objects=objects,
        mode=StorageMode.SHARED_FS,
        clock=clock,
        cache=HotCache(1 << 20),
        handles=ReadHandles(disk, 16),
        footers=FooterCache(),
        preallocated=None,
        random=random.Random(info.segment_id * 10 + owner),
    )
    descriptor = SegmentName.of(TOPIC, info).descriptor
    return await SegmentStorage.open(context, TOPIC.path, descriptor, Epoch(owner + 1), SMALL)
