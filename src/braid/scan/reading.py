"""How a task reads: it turns a partition's pieces into checked batches, and these into Arrow batches.

    piece ─► spans of a chunk ─► bytes ─► batches ┐
    piece ─► owner ─► deliveries ───────► batches ┴─► columns ─► 16 k rows at a time

Chunks are read directly from storage, by range (range_reader.py). Columns are views of the bytes that were read
(rows.py). They are copied only when small batches are joined: each Arrow batch costs Spark as much as some thousand
rows do. A task is an executor's in Spark; without Spark, `braid.history` is the only one (history.py).

**A chunk that is gone.** The plan fixes the offsets of a task, and chunks may go meanwhile: compaction replaces them,
retention deletes them. Then the newest manifest says where the same offsets are now; the task asks the owner for the
rest, if there are brokers. Offsets that nobody has are lost: an error, or, without `fail_on_data_loss`, a warning. A
replaced chunk does not change which records a task yields. The same holds for offsets that other records have taken
since: such records have a later epoch than the plan says.

**A batch that cannot be decoded**, although its checksums are right, was written wrong by its producer. The option
`bad_records` decides: an error that names its offsets, or a warning that says how many records were skipped.

**A chunk that is damaged** is always an error, which names the object and the offset: a reader that skipped it would
silently turn damage into a shorter table.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Final

from braid.model.batch.header import MAX_EPOCH, BatchHeader
from braid.model.errors import (
    BatchError,
    BatchUnreadable,
    DataLoss,
    LogDamaged,
    ObjectMissing,
    OffsetOutOfRange,
    PositionDiverged,
)
from braid.scan.connection import ScanConnection
from braid.scan.options import ScanOptions
from braid.scan.planning import (
    NO_PRUNING,
    ChunkPiece,
    OwnerPiece,
    Partition,
    Piece,
    Prune,
    Range,
    cut_by_chunks,
)
from braid.scan.range_reader import RangeReader, range_reader
from braid.scan.rows import RowBuffer
from braid.storage.chunk import IndexEntry
from braid.storage.handles import FooterCache
from braid.storage.history.manifest import segment_folder
from braid.storage.history.ranges import footer_of, spans

ROWS: Final = 16_384
"""In an Arrow batch, unless one record batch has more."""
MAX_ROWS: Final = 50_000
MAX_BYTES: Final = 16 << 20
"""Of joined batches after decompression, unless one batch has more: large records come in smaller groups."""

_log: Final = logging.getLogger(__name__)

RawBatch = tuple[Piece, BatchHeader, memoryview]


def raw_batches(
    partition: Partition,
    options: ScanOptions,
    *,
    prune: Prune = NO_PRUNING,
    bodies: bool = True,
    connection: ScanConnection | None = None,
) -> Iterator[RawBatch]:
    """Yield the whole batches that hold the partition's offsets, in order, each checked, with its piece. Batches that
    `prune` leaves out may be missing, and so may bodies without `bodies`: only bytes that were read are checked.
    Without a `connection`, the task opens and closes its own."""
    if connection is not None:
        yield from _Reading(partition, connection, prune, bodies).batches()
        return
    with ScanConnection(options) as own:
        yield from _Reading(partition, own, prune, bodies).batches()


class _Reading:
    """The work of one task on one partition."""

    def __init__(self, partition: Partition, connection: ScanConnection, prune: Prune, bodies: bool) -> None:
        self._partition = partition
        self._connection = connection
        self._prune = prune
        self._bodies = bodies
        self._footers = FooterCache()
        self._missing: set[str] = set()
        """Objects that a manifest lists and that do not exist."""

    def batches(self) -> Iterator[RawBatch]:
        for piece in self._partition.pieces:
            yield from self._piece(piece)

    def _piece(self, piece: Piece) -> Iterator[RawBatch]:
        at, last_epoch = piece.first, self._partition.epochs.get(piece.segment, MAX_EPOCH)
        try:
            found = self._from_chunk(piece) if isinstance(piece, ChunkPiece) else self._from_owner(piece)
            for header, data in found:
                if header.base_offset >= piece.until or header.next_offset <= at:
                    continue
                if header.epoch > last_epoch:
                    raise PositionDiverged(
                        f"records of epoch {header.epoch} have taken the offsets of lost ones of epoch {last_epoch}",
                        piece.until,
                        piece.until,
                        header.base_offset,
                    )
                at = header.next_offset
                if not self._prune.leaves_out(header):
                    yield piece, header, data
        except ObjectMissing as error:
            if isinstance(piece, ChunkPiece):
                yield from self._elsewhere(piece, at, error)
            elif piece in self._partition.pieces:
                raise  # The owner lacks one of its own chunks: the task cannot know how much of the piece is lost.
            else:
                yield from self._what_is_left(piece, at, OffsetOutOfRange(str(error), piece.until, piece.until))
        except OffsetOutOfRange as error:
            yield from self._what_is_left(piece, at, error)

    def _from_chunk(self, piece: ChunkPiece) -> Iterator[tuple[BatchHeader, memoryview]]:
        connection, ranges, name = self._connection, self._ranges, piece.name
        objects = connection.objects(self._partition.storage)
        try:
            footer = connection.call(footer_of(objects, self._footers, name, piece.chunk))
            wanted = spans(footer, piece.first, piece.until, ranges.read_bytes, self._wants)
            yield from ranges.batches(name, wanted, bodies=self._bodies)
        except LogDamaged as error:
            raise LogDamaged(
                f"{error}. The object is damaged, or is not what its manifest says; nothing was skipped. Run "
                "`braid pipeline audit` to see what else is, and restore it from a copy",
                error.first_offset,
                error.next_offset,
            ) from error

    @cached_property
    def _ranges(self) -> RangeReader:
        return range_reader(self._connection, self._partition.storage)

    def _wants(self, run: IndexEntry) -> bool:
        return not self._prune.leaves_out(run)

    def _from_owner(self, piece: Piece) -> Iterator[tuple[BatchHeader, memoryview]]:
        partition = self._partition
        if not self._connection.has_brokers:
            raise OffsetOutOfRange(f"no chunk in {partition.storage} holds them", piece.until, piece.until)
        for delivery in self._connection.deliveries(
            partition.topic, partition.topic_id, piece.segment, piece.first, piece.until
        ):
            yield from delivery.batches()

    def _elsewhere(self, piece: ChunkPiece, at: int, error: ObjectMissing) -> Iterator[RawBatch]:
        """Find where the offsets from `at` on are now, because the chunk is gone."""
        self._missing.add(piece.name)
        topic, descriptor = self._partition.topic, self._partition.descriptors[piece.segment]
        manifest = self._connection.segment_manifest(self._partition.storage, topic, descriptor)
        folder = segment_folder(topic, descriptor)
        chunks = manifest.chunks if manifest is not None else ()
        there = [chunk for chunk in chunks if f"{folder}/{chunk.object}" not in self._missing]
        _log.info("%s: reading offsets %d to %d from elsewhere", error, at, piece.until - 1)
        for other in cut_by_chunks(there, folder, Range(piece.segment, at, piece.until)):
            yield from self._piece(other)

    def _what_is_left(self, piece: Piece, at: int, error: OffsetOutOfRange) -> Iterator[RawBatch]:
        """Handle a loss: some offsets from `at` on no longer exist."""
        earliest = error.earliest if error.earliest > at else piece.until
        lost = min(earliest, piece.until)
        text = (
            f"offsets {at} to {lost - 1} of segment {piece.segment} of topic {self._partition.topic} are gone: {error}"
        )
        options = self._connection.options
        name = options.called("fail_on_data_loss")
        if options.fail_on_data_loss:
            cause = "Retention has deleted them since the read was planned, or an object was lost"
            if isinstance(error, PositionDiverged):
                cause = "The topic has lost them since the read was planned"
            raise DataLoss(f"{text}. {cause}; set {name} to false to read what is left") from error
        _log.warning("%s; they are skipped, because %s is false", text, name)
        if lost < piece.until:
            yield from self._piece(OwnerPiece(piece.segment, lost, piece.until))


def record_batches(
    partition: Partition,
    options: ScanOptions,
    schema: Any,
    *,
    prune: Prune = NO_PRUNING,
    connection: ScanConnection | None = None,
) -> Iterator[Any]:
    """Yield the partition's rows within the time bounds of the options, as `pyarrow.RecordBatch`es of exactly this
    Arrow schema. Rows that `prune` leaves out may be missing."""
    bad = _BadRecords(partition.topic, options)
    buffer = RowBuffer(schema, options.starting_timestamp, options.ending_timestamp, check=bad.skip)
    bodies = buffer.opens_bodies
    for piece, header, data in raw_batches(partition, options, prune=prune, bodies=bodies, connection=connection):
        if buffer.rows and buffer.size + header.raw_length > MAX_BYTES:
            yield from _slices(buffer.take())  # Before the next batch is decompressed.
        try:
            buffer.add(piece, header, data)
        except BatchError as error:
            bad.found(piece, header, error)
            continue
        if buffer.rows >= ROWS:
            yield from _slices(buffer.take())
    if buffer.rows:
        yield from _slices(buffer.take())
    bad.warn()


class _BadRecords:
    """What a task does about batches that cannot be decoded."""

    def __init__(self, topic: str, options: ScanOptions) -> None:
        self.skip: Final = options.bad_records == "skip"
        self._name = options.called("bad_records")
        self._topic = topic
        self._skipped = 0
        self._first = ""

    def found(self, piece: Piece, header: BatchHeader, error: BatchError) -> None:
        first, until = max(piece.first, header.base_offset), min(piece.until, header.next_offset)
        text = f"offsets {first} to {until - 1} of segment {piece.segment} of topic {self._topic} cannot be decoded"
        if not self.skip:
            raise BatchUnreadable(
                f"{text}, because their producer wrote them wrong: {error}. Set {self._name} to skip to read "
                "everything else",
                piece.segment,
                first,
                until,
            ) from error
        self._skipped += until - first
        self._first = self._first or f"{text}: {error}"

    def warn(self) -> None:
        if self._skipped:
            _log.warning(
                "%d records were skipped, because %s is skip. The first: %s", self._skipped, self._name, self._first
            )


def _slices(rows: Any) -> Iterator[Any]:
    """Cut a batch of possibly millions of records into slices of the usual size."""
    for start in range(0, rows.num_rows, MAX_ROWS):
        yield rows.slice(start, MAX_ROWS)
