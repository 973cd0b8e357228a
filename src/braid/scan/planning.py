"""Which task reads which offsets: a pure function from a snapshot and ranges of offsets to partitions.

    ranges ──► pieces in order ──► partitions
               chunk │ chunk │ owner        a partition is a run of pieces, read in that order by one task

**Order.** All pieces of a topic form one line: parents before children, and rising offsets within each segment.
Partitions are cut from that line, so everything in a partition comes before everything in the next one. A key's records
are in the order in which they were written, across splits and merges (I4). Each wanted offset is in exactly one
partition (I11).

**Where from.** Offsets in a chunk of the snapshot are read from storage; all others from the segment's owner: the hot
tail, and chunks that the snapshot does not show yet. So a snapshot that is a moment too old costs speed, never records.

**Batch reads** are cut by bytes: a chunk above the target size is divided by offsets, and small chunks share a task.
Chunks that cannot have a wanted row, by time or key hash, are left out.

**Micro-batches** are cut by records, from the ranges alone. A replayed micro-batch must give the same rows in the same
order to the same partition number. Otherwise a sink that recognises repeated work by partition and row number would
store some rows twice and lose others. The ends of chunks and later exports change only the pieces inside a partition. A
segment is not divided while there are at least as many segments as partitions, so the records of a key stay in one
task, in order.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, Protocol

import msgspec

from braid.model.errors import BrokenInvariant
from braid.model.ids import Epoch
from braid.model.log.epochs import UNKNOWN_EPOCH, epoch_before
from braid.scan.snapshot import TopicSnapshot
from braid.storage.history.catalog import ChunkDescriptor
from braid.storage.history.manifest import segment_folder

TARGET_BYTES: Final = 128 << 20
"""Of one task, as in Spark's own file sources. A task takes some 20 ms to start, 128 MiB some 300 ms to read."""
MAX_PARTITIONS: Final = 100_000
"""Each partition is an object on the driver and a task in the plan; larger reads get larger partitions."""


_ROUNDING: Final = 1e-6


class Range(msgspec.Struct, frozen=True, order=True):
    """The offsets from `first` up to but not including `until`."""

    segment: int
    first: int
    until: int

    @property
    def records(self) -> int:
        return max(0, self.until - self.first)


class ChunkPiece(msgspec.Struct, frozen=True):
    """Offsets that a task reads from storage."""

    segment: int
    first: int
    until: int
    chunk: ChunkDescriptor
    folder: str
    """The folder of the segment's objects, relative to the storage URL."""

    @property
    def name(self) -> str:
        return f"{self.folder}/{self.chunk.object}"


class OwnerPiece(msgspec.Struct, frozen=True):
    """Offsets that a task reads from the segment's owner."""

    segment: int
    first: int
    until: int


Piece = ChunkPiece | OwnerPiece


class Partition:
    """The pieces that one task reads, in this order."""

    def __init__(
        self,
        pieces: Iterable[Piece],
        *,
        topic: str = "",
        topic_id: int = 0,
        storage: str = "",
        descriptors: dict[int, str] | None = None,
        epochs: dict[int, Epoch] | None = None,
        not_before: int | None = None,
    ) -> None:
        self.pieces: Final = tuple(pieces)
        self.topic: Final = topic
        self.topic_id: Final = topic_id
        self.storage: Final = storage
        self.descriptors: Final = descriptors or {}
        """Of its segments: the executor finds a newer manifest by them if a chunk is gone."""
        self.epochs: Final = epochs or {}
        """By segment, the epoch of the last wanted record, if it is known. A record of a later epoch has taken the
        place of a lost one since the read was planned."""
        self.not_before: Final = not_before
        """Of a micro-batch, in µs: older rows are left out."""

    @property
    def records(self) -> int:
        return sum(piece.until - piece.first for piece in self.pieces)

    @property
    def ranges(self) -> list[Range]:
        """Return the offsets to read: neighbouring pieces make one range."""
        found: list[Range] = []
        for piece in self.pieces:
            last = found[-1] if found else None
            if last is not None and (last.segment, last.until) == (piece.segment, piece.first):
                found[-1] = Range(last.segment, last.first, piece.until)
            else:
                found.append(Range(piece.segment, piece.first, piece.until))
        return found


class Extent(Protocol):
    """The times and key hashes of a chunk, a run of batches or a batch."""

    @property
    def min_timestamp(self) -> int: ...
    @property
    def max_timestamp(self) -> int: ...
    @property
    def min_key_hash(self) -> int: ...
    @property
    def max_key_hash(self) -> int: ...


class Prune(msgspec.Struct, frozen=True):
    """Conditions for wanted rows. They may leave out only chunks and batches that certainly have no wanted row."""

    since_us: int | None = None
    """The lowest timestamp."""
    before_us: int | None = None
    """Above the highest timestamp."""
    hashes: frozenset[int] | None = None
    """The key hashes; None: all, and rows without a key."""

    def leaves_out_times(self, lowest: int, highest: int) -> bool:
        return (self.since_us is not None and highest < self.since_us) or (
            self.before_us is not None and lowest >= self.before_us
        )

    def leaves_out_hashes(self, lowest: int, highest: int) -> bool:
        return self.hashes is not None and not any(lowest <= each <= highest for each in self.hashes)

    def leaves_out(self, what: Extent) -> bool:
        """Whether there is certainly no wanted row in it."""
        return self.leaves_out_times(what.min_timestamp, what.max_timestamp) or self.leaves_out_hashes(
            what.min_key_hash, what.max_key_hash
        )


NO_PRUNING: Final = Prune()


def topological(snapshot: TopicSnapshot) -> list[int]:
    """Sort the segments: parents before children, by id among equals."""
    segments = snapshot.segments
    waiting_for = {
        segment.id: {parent for parent in segment.parents if parent in segments} for segment in segments.values()
    }
    children: dict[int, list[int]] = {}
    for segment, parents in waiting_for.items():
        for parent in parents:
            children.setdefault(parent, []).append(segment)
    ready = sorted(segment for segment, parents in waiting_for.items() if not parents)
    ordered: list[int] = []
    while ready:
        segment = heapq.heappop(ready)
        ordered.append(segment)
        for child in children.get(segment, ()):
            waiting_for[child].discard(segment)
            if not waiting_for[child]:
                heapq.heappush(ready, child)
    if len(ordered) != len(segments):
        raise BrokenInvariant(f"the segments of topic {snapshot.topic} are each other's ancestors: they have no order")
    return ordered


def plan_batch(
    snapshot: TopicSnapshot,
    ranges: Sequence[Range],
    *,
    min_partitions: int = 1,
    target_bytes: int = TARGET_BYTES,
    prune: Prune | None = None,
) -> list[Partition]:
    """Cut the ranges into partitions of at most about `target_bytes`, and into at least `min_partitions` of them. No
    partition has chunks that `prune` leaves out."""
    prune = prune or NO_PRUNING
    order = {segment: number for number, segment in enumerate(topological(snapshot))}
    pieces: list[Piece] = []
    for wanted in sorted(ranges, key=lambda each: (order[each.segment], each.first)):
        segment = snapshot.segments[wanted.segment]
        if not prune.leaves_out_hashes(segment.first_hash, segment.last_hash):
            pieces += (
                piece
                for piece in pieces_of(snapshot, wanted)
                if not (isinstance(piece, ChunkPiece) and prune.leaves_out(piece.chunk))
            )
    total = sum(_bytes(snapshot, piece) for piece in pieces)
    at_least = min(min_partitions, MAX_PARTITIONS, sum(piece.until - piece.first for piece in pieces))
    target = max(min(target_bytes, total / max(1, at_least)), total / MAX_PARTITIONS)
    packs = _packed(snapshot, pieces, target)
    while len(packs) < at_least:  # A few large records do not divide evenly.
        target /= 2
        packs = _packed(snapshot, pieces, target)
    return [_partition(snapshot, each) for each in packs]


def pieces_of(snapshot: TopicSnapshot, wanted: Range) -> list[Piece]:
    """Cut a range into pieces of chunks, and pieces of the owner for the rest."""
    segment = snapshot.segments[wanted.segment]
    folder = segment_folder(snapshot.topic, segment.descriptor)
    return cut_by_chunks(segment.chunks, folder, wanted)


def cut_by_chunks(chunks: Iterable[ChunkDescriptor], folder: str, wanted: Range) -> list[Piece]:
    pieces: list[Piece] = []
    at = wanted.first
    for chunk in chunks:
        first, until = max(at, chunk.base_offset), min(wanted.until, chunk.next_offset)
        if first < until:
            if at < first:
                pieces.append(OwnerPiece(wanted.segment, at, first))
            pieces.append(ChunkPiece(wanted.segment, first, until, chunk, folder))
            at = until
    if at < wanted.until:
        pieces.append(OwnerPiece(wanted.segment, at, wanted.until))
    return pieces


def plan_micro_batch(
    snapshot: TopicSnapshot, ranges: Sequence[Range], *, partitions: int, not_before: int | None = None
) -> list[Partition]:
    """Cut the ranges into at most `partitions` partitions. The cut depends on the ranges and that number alone."""
    shares = micro_batch_shares(ranges, partitions)
    return [
        _partition(snapshot, [piece for part in share for piece in pieces_of(snapshot, part)], not_before)
        for share in shares
    ]


def micro_batch_shares(ranges: Sequence[Range], partitions: int) -> list[list[Range]]:
    """Divide the ranges among partitions, in the order of segment ids. Children have higher ids than their parents, so
    this order needs no snapshot."""
    ordered = sorted(each for each in ranges if each.records)
    partitions = max(1, partitions)
    if len(ordered) >= partitions:
        return _whole_ranges(ordered, partitions)
    cuts = [1] * len(ordered)
    largest = [(-float(each.records), number) for number, each in enumerate(ordered)]
    heapq.heapify(largest)
    for _ in range(partitions - len(ordered)):
        if not largest:
            break
        _, number = heapq.heappop(largest)
        if cuts[number] < ordered[number].records:
            cuts[number] += 1
            heapq.heappush(largest, (-(ordered[number].records / cuts[number]), number))
    return [[part] for each, parts in zip(ordered, cuts) for part in _evenly(each, parts)]


def _whole_ranges(ordered: Sequence[Range], partitions: int) -> list[list[Range]]:
    """Give each range, the largest first, to the partition with the fewest records."""
    shares: list[list[Range]] = [[] for _ in range(partitions)]
    loads = [(0, number) for number in range(partitions)]
    for each in sorted(ordered, key=lambda one: -one.records):
        load, number = heapq.heappop(loads)
        shares[number].append(each)
        heapq.heappush(loads, (load + each.records, number))
    return [sorted(share) for share in shares if share]


def _evenly(whole: Range, parts: int) -> list[Range]:
    cuts = [whole.first + whole.records * number // parts for number in range(parts + 1)]
    return [Range(whole.segment, first, until) for first, until in pairwise(cuts) if first < until]


def _packed(snapshot: TopicSnapshot, pieces: Iterable[Piece], target: float) -> list[list[Piece]]:
    packs: list[list[Piece]] = []
    room = 0.0
    for piece in pieces:
        size = _bytes(snapshot, piece)
        parts = _evenly(Range(piece.segment, piece.first, piece.until), max(1, math.ceil(size / target)))
        for part in parts:
            share = size / len(parts)
            if not packs or share > room + target * _ROUNDING:
                packs.append([])
                room = target
            room -= share
            packs[-1].append(msgspec.structs.replace(piece, first=part.first, until=part.until))
    return packs


def _bytes(snapshot: TopicSnapshot, piece: Piece) -> float:
    """Estimate a piece's bytes: at least one for each record, so that every piece can be divided."""
    records = piece.until - piece.first
    if isinstance(piece, ChunkPiece):
        size = piece.chunk.batch_bytes * records / max(1, piece.chunk.next_offset - piece.chunk.base_offset)
    else:
        size = snapshot.segments[piece.segment].bytes_per_record * records
    return max(size, float(records))


def _partition(snapshot: TopicSnapshot, pieces: Sequence[Piece], not_before: int | None = None) -> Partition:
    ends = {piece.segment: piece.until for piece in pieces}  # Pieces rise, so this is the last one of each segment.
    epochs = {segment: epoch_before(snapshot.segments[segment].epochs, until) for segment, until in ends.items()}
    return Partition(
        pieces,
        topic=snapshot.topic,
        topic_id=snapshot.topic_id,
        storage=snapshot.storage,
        descriptors={segment: snapshot.segments[segment].descriptor for segment in ends},
        epochs={segment: epoch for segment, epoch in epochs.items() if epoch != UNKNOWN_EPOCH},
        not_before=not_before,
    )
