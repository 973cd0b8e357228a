"""Which task audits which pieces, and how: it turns pieces into Arrow rows of batches and findings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, Final

import msgspec
import pyarrow as pa

from braid.client.consuming.delivery import ReceivedBatch
from braid.model.errors import BatchError, LogDamaged, ObjectMissing, OffsetOutOfRange
from braid.scan.connection import ScanConnection
from braid.scan.range_reader import range_reader
from braid.scan.snapshot import TopicSnapshot
from braid.spark.jobs.audit.queries import SEQUENCE_BIAS
from braid.spark.jobs.audit.rules import EXPIRED, Finding, SegmentFacts
from braid.spark.jobs.audit.scan import ChunkScan, LogWalk, Seen
from braid.spark.source.options import SourceOptions
from braid.storage.history.catalog import ChunkDescriptor
from braid.storage.history.manifest import segment_folder

TASK_BYTES: Final = 256 << 20
"""A task reads at most this much, if its pieces can be divided: the job shows progress, and a repeat is short."""
ROWS: Final = 8_192
"""In one Arrow batch."""

ARROW_SCHEMA: Final = pa.schema(
    [
        ("segment", pa.int32()),
        ("piece", pa.int32()),
        ("position", pa.int64()),
        ("base", pa.int64()),
        ("next", pa.int64()),
        ("count", pa.int32()),
        ("flags", pa.int32()),
        ("epoch", pa.int64()),
        ("producer", pa.int64()),
        ("sequence", pa.int64()),
        ("append", pa.int64()),
        ("crc", pa.int64()),
        ("size", pa.int32()),
        ("rule", pa.string()),
        ("object", pa.string()),
        ("text", pa.string()),
        ("since", pa.int64()),
        ("until", pa.int64()),
    ]
)


class AuditPiece(msgspec.Struct, frozen=True):
    """A chunk, or offsets that are read from their owner."""

    number: int
    """In the order of segments and offsets."""
    segment: int
    first: int
    until: int
    bytes: int
    chunk: ChunkDescriptor | None = None

    @property
    def object(self) -> str:
        return self.chunk.object if self.chunk is not None else ""


def plan_pieces(snapshot: TopicSnapshot, facts: Mapping[int, SegmentFacts]) -> list[AuditPiece]:
    """Plan a piece for every chunk that the manifests list, even if chunks overlap, and for the tails of owners."""
    pieces: list[AuditPiece] = []
    for segment in sorted(facts):
        fact = facts[segment]
        chunks = sorted(fact.manifest.chunks, key=lambda chunk: chunk.base_offset) if fact.manifest is not None else []
        for chunk in chunks:
            pieces.append(
                AuditPiece(len(pieces), segment, chunk.base_offset, chunk.next_offset, chunk.batch_bytes, chunk)
            )
        at = max(fact.earliest, fact.manifest.next_offset if fact.manifest is not None else 0)
        size = (fact.end - at) * snapshot.segments[segment].bytes_per_record
        parts = max(1, math.ceil(size / TASK_BYTES))
        cuts = [at + (fact.end - at) * part // parts for part in range(parts + 1)]
        for first, until in pairwise(cuts):
            if first < until:
                pieces.append(AuditPiece(len(pieces), segment, first, until, int(size / parts)))
    return pieces


def packed(pieces: Iterable[AuditPiece], at_least: int) -> list[list[AuditPiece]]:
    """Pack neighbouring pieces into about `at_least` tasks of equal size, or more where tasks would be too large."""
    pieces = list(pieces)
    total = sum(piece.bytes for piece in pieces)
    room = min(float(TASK_BYTES), total / max(1, at_least))
    tasks: list[list[AuditPiece]] = []
    filled = room
    for piece in pieces:
        if filled >= room:
            tasks.append([])
            filled = 0.0
        tasks[-1].append(piece)
        filled += piece.bytes
    return tasks


def scan_pieces(
    options: SourceOptions,
    topic: TopicSnapshot,
    facts: Mapping[int, SegmentFacts],
    deep: bool,
    pieces: Iterable[AuditPiece],
) -> Iterator[Any]:
    """Do the work of one task."""
    rows = _Rows()
    with ScanConnection(options) as connection:
        for piece in pieces:
            for found in _Scan(connection, topic, facts[piece.segment], piece, deep).run():
                rows.add(piece, found)
                if len(rows) >= ROWS:
                    yield rows.take()
    yield rows.take()


class _Scan:
    """The scan of one piece."""

    def __init__(
        self, connection: ScanConnection, topic: TopicSnapshot, fact: SegmentFacts, piece: AuditPiece, deep: bool
    ) -> None:
        self._connection = connection
        self._topic = topic
        self._fact = fact
        self._piece = piece
        self._deep = deep
        self._folder = segment_folder(topic.topic, fact.descriptor)

    def run(self) -> Iterator[Seen | Finding]:
        piece = self._piece
        if piece.chunk is None:
            yield from self._from_owner(piece.first, piece.until)
            return
        at = piece.first
        try:
            for found in self._from_chunk(piece.chunk):
                if isinstance(found, Seen):
                    at = found.header.next_offset
                yield found
        except ObjectMissing:
            yield from self._elsewhere(piece.chunk, at)

    def _from_chunk(self, chunk: ChunkDescriptor) -> Iterator[Seen | Finding]:
        with range_reader(self._connection, self._topic.storage).open(f"{self._folder}/{chunk.object}") as object_:
            yield from ChunkScan(self._fact, chunk, object_.size(), object_.read, deep=self._deep).run()

    def _elsewhere(self, gone: ChunkDescriptor, at: int) -> Iterator[Seen | Finding]:
        """Look into the newest manifest, because the object is gone: replaced, expired or lost."""
        topic = self._topic
        manifest = self._connection.segment_manifest(topic.storage, topic.topic, self._fact.descriptor)
        segment, until = self._fact.id, int(gone.next_offset)
        chunks = manifest.chunks if manifest is not None else ()
        if any(chunk.object == gone.object for chunk in chunks):
            text = f"the object with offsets {gone.base_offset} to {until - 1} is not in storage"
            yield Finding("missing-object", segment, gone.base_offset, gone.object, text, at, until)
            return
        earliest = chunks[0].base_offset if chunks else (manifest.next_offset if manifest is not None else 0)
        if at < earliest:
            text = f"segment {segment}: offsets {at} to {min(until, earliest) - 1} expired during the audit"
            yield Finding(EXPIRED, segment, at, gone.object, text, at, min(until, earliest))
        for chunk in chunks:
            if chunk.base_offset < until and at < chunk.next_offset:
                for found in self._from_chunk(chunk):
                    offset = found.header.base_offset if isinstance(found, Seen) else found.offset
                    if at <= offset < until:
                        yield found

    def _from_owner(self, first: int, until: int) -> Iterator[Seen | Finding]:
        """Read from the owner. A batch that begins before `first` belongs to the piece before."""
        walk, at = LogWalk(self._fact, ""), first
        while at < until:
            try:
                for delivery in self._deliveries(at, until):
                    for header in delivery.batch_headers():
                        if first <= header.base_offset < until:
                            yield from walk.next(header)
                            yield Seen(header, -1)
                        at = max(at, int(header.next_offset))
                    for header, batch in delivery.batches() if self._deep else ():
                        if first <= header.base_offset < until:
                            yield from walk.undecodable(header, batch)
                return
            except LogDamaged as error:
                until_good = min(until, max(error.next_offset, at + 1))
                yield Finding("owner-damaged", self._fact.id, at, "", str(error), at, until_good)
            except OffsetOutOfRange as error:
                until_good = min(until, max(error.earliest, at + 1)) if error.earliest > at else until
                rule, what = (
                    (EXPIRED, "expired during the audit") if error.earliest > at else ("offset-gap", "are gone")
                )
                text = f"segment {self._fact.id}: offsets {at} to {until_good - 1} {what}"
                yield Finding(rule, self._fact.id, at, "", text, at, until_good)
            except BatchError as error:
                yield Finding("owner-damaged", self._fact.id, at, "", str(error), at, until)
                return
            walk.expected = at = until_good

    def _deliveries(self, first: int, until: int) -> Iterator[ReceivedBatch]:
        topic = self._topic
        return self._connection.deliveries(topic.topic, topic.topic_id, self._fact.id, first, until)


class _Rows:
    """Collects rows by columns."""

    def __init__(self) -> None:
        self._columns: list[list[Any]] = [[] for _ in ARROW_SCHEMA]

    def __len__(self) -> int:
        return len(self._columns[0])

    def add(self, piece: AuditPiece, found: Seen | Finding) -> None:
        row: tuple[Any, ...]
        if isinstance(found, Finding):
            row = (found.segment, piece.number, 0, found.offset, found.offset, 0, 0, 0, 0, 0, 0, 0, 0,
                   found.rule, found.object, found.text, found.since, found.until)  # fmt: skip
        else:
            header, position = found
            producer = header.producer_id
            row = (
                piece.segment, piece.number, position, header.base_offset, header.next_offset, header.count,
                header.flags, header.epoch, producer - (1 << 64) if producer >> 63 else producer,
                header.first_sequence - SEQUENCE_BIAS, header.append_time, header.body_crc, header.size,
                None, None, None, None, None,
            )  # fmt: skip
        for column, value in zip(self._columns, row, strict=True):
            column.append(value)

    def take(self) -> Any:
        """Return all rows as an Arrow batch, and begin anew."""
        arrays = [pa.array(column, field.type) for column, field in zip(self._columns, ARROW_SCHEMA, strict=True)]
        self._columns = [[] for _ in ARROW_SCHEMA]
        return pa.RecordBatch.from_arrays(arrays, schema=ARROW_SCHEMA)
