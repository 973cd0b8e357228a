"""The chunk: an immutable piece of a log. A closed WAL file *is* a chunk; exporting copies it.

    batches │ index │ producer rows │ trailer

After the batches stands a footer: a sparse index (one entry for each run of about 64 KiB of batches, with the run's
offset, position, times and key hashes), the producer table as it was after the last batch, and a fixed trailer at the
very end that says where everything lies. A reader fetches the tail of the object once and then knows which bytes hold
the offset, time or key range that it wants. The format is written down in docs/formats/chunk.md.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from typing import Final, Protocol

import msgspec
from crc32c import crc32c

from braid.model.batch.header import HEADER_BYTES, NO_KEYS, BatchHeader
from braid.model.errors import ChunkCorrupt
from braid.model.ids import Epoch, Offset
from braid.storage.log.producers import ROW_BYTES, ProducerTable

MAGIC: Final = b"BRDC"
VERSION: Final = 1
RUN_BYTES: Final = 64 << 10
"""How far apart index entries are: a reader that wants one record reads at most a run and a batch too much."""
FOOTER_READ_BYTES: Final = 64 << 10
"""The first guess at a footer's size: it holds the footer of a 64 MiB chunk with some hundred producers."""
MAX_FOOTER_BYTES: Final = 64 << 20
MAX_CHUNK_BYTES: Final = 16 << 30

_INDEX: Final = struct.Struct(
    "<"
    "Q"  #  0 offset of the run's first record
    "Q"  #  8 position of the run's first batch
    "q"  # 16 lowest timestamp in the run
    "q"  # 24 highest timestamp
    "H"  # 32 lowest key hash  } lowest > highest: no keys
    "H"  # 34 highest key hash }
    "I"  # 36 batches in the run
)
_TRAILER: Final = struct.Struct(
    "<"
    "Q"  #  0 first offset
    "Q"  #  8 next offset after the chunk
    "Q"  # 16 bytes of batches
    "Q"  # 24 epoch of the first batch
    "Q"  # 32 epoch of the last batch
    "I"  # 40 index entries
    "I"  # 44 producer rows
    "I"  # 48 flags: 1 = ends with a seal
    "I"  # 52 crc32c of index and producer rows
    "B"  # 56 version
    "3x"  # 57
    "4s"  # 60 magic
    "I"  # 64 crc32c of the 64 bytes … up to and including the magic
    "4x"  # 68
)
TRAILER_BYTES: Final = _TRAILER.size
_TRAILER_CRC_AT: Final = 64
_SEALED: Final = 1

assert TRAILER_BYTES == 72


class IndexEntry(msgspec.Struct, gc=False):
    """One run of batches in the sparse index. The last entry of a file that is being written grows with the file."""

    offset: Offset
    position: int
    min_timestamp: int
    max_timestamp: int
    min_key_hash: int
    max_key_hash: int
    batches: int


class Index:
    """The sparse index of one file or chunk, growing while batches are written.

    Timestamps of one run need not rise, so looking for a time means the first run whose highest time reaches it.
    """

    def __init__(self) -> None:
        self.runs: list[IndexEntry] = []

    def add(self, header: BatchHeader, position: int, *, starts_run: bool = False) -> None:
        """Add a batch. `starts_run` where it does not follow the batch before it: after damage."""
        if header.count == 0:
            return
        runs = self.runs
        if starts_run or not runs or position - runs[-1].position >= RUN_BYTES:
            runs.append(
                IndexEntry(
                    header.base_offset,
                    position,
                    header.min_timestamp,
                    header.max_timestamp,
                    header.min_key_hash,
                    header.max_key_hash,
                    1,
                )
            )
            return
        last = runs[-1]
        last.batches += 1
        if header.min_timestamp < last.min_timestamp:
            last.min_timestamp = header.min_timestamp
        if header.max_timestamp > last.max_timestamp:
            last.max_timestamp = header.max_timestamp
        if header.min_key_hash < last.min_key_hash:
            last.min_key_hash = header.min_key_hash
        if header.max_key_hash > last.max_key_hash:
            last.max_key_hash = header.max_key_hash

    def position_of(self, offset: int) -> int:
        """Return where to start reading for `offset`: at or before its batch."""
        at = bisect_right(self.runs, offset, key=lambda run: run.offset) - 1
        return self.runs[at].position if at >= 0 else 0

    def offset_at_time(self, timestamp: int) -> Offset | None:
        """Return the first offset of the first run that holds a record at or after `timestamp`."""
        return next((run.offset for run in self.runs if run.max_timestamp >= timestamp), None)

    @property
    def min_timestamp(self) -> int:
        return min((run.min_timestamp for run in self.runs), default=0)

    @property
    def max_timestamp(self) -> int:
        return max((run.max_timestamp for run in self.runs), default=0)

    @property
    def key_hashes(self) -> tuple[int, int]:
        low = min((run.min_key_hash for run in self.runs), default=NO_KEYS[0])
        return low, max((run.max_key_hash for run in self.runs), default=NO_KEYS[1])


class Footer(msgspec.Struct, frozen=True):
    base_offset: Offset
    next_offset: Offset
    batch_bytes: int
    first_epoch: Epoch
    last_epoch: Epoch
    sealed: bool
    index: Index
    producers: ProducerTable
    size: int
    """Bytes of index, producer rows and trailer."""


def encode_footer(
    *,
    base_offset: int,
    next_offset: int,
    batch_bytes: int,
    first_epoch: int,
    last_epoch: int,
    sealed: bool,
    index: Index,
    producers: ProducerTable,
) -> bytes:
    entries = [
        _INDEX.pack(
            run.offset,
            run.position,
            run.min_timestamp,
            run.max_timestamp,
            run.min_key_hash,
            run.max_key_hash,
            run.batches,
        )
        for run in index.runs
    ]
    rows = list(producers.rows())
    tables = b"".join(entries + rows)
    trailer = bytearray(TRAILER_BYTES)
    _TRAILER.pack_into(
        trailer,
        0,
        base_offset,
        next_offset,
        batch_bytes,
        first_epoch,
        last_epoch,
        len(entries),
        len(rows),
        _SEALED if sealed else 0,
        crc32c(tables),
        VERSION,
        MAGIC,
        0,
    )
    struct.pack_into("<I", trailer, _TRAILER_CRC_AT, crc32c(memoryview(trailer)[:_TRAILER_CRC_AT]))
    return tables + trailer


class ByteSource(Protocol):
    """Bytes that can be read at a position: of a file or an object."""

    async def read(self, position: int, length: int) -> bytes: ...


async def read_footer(source: ByteSource, size: int) -> Footer:
    """Read the footer of a chunk of `size` bytes, usually in one read."""
    tail = await source.read(max(0, size - FOOTER_READ_BYTES), FOOTER_READ_BYTES)
    length = footer_size(tail)
    if length > len(tail):
        tail = await source.read(max(0, size - length), length)
    footer = decode_footer(tail)
    if footer.batch_bytes + footer.size != size:
        raise ChunkCorrupt(f"the trailer describes {footer.batch_bytes + footer.size} bytes, but the chunk has {size}")
    return footer


def footer_size(tail: bytes | memoryview) -> int:
    """Return how many bytes the footer has, from an object's last bytes (at least `TRAILER_BYTES` of them)."""
    _, _, _, _, _, entries, rows, *_ = _trailer(tail)
    return int(entries * _INDEX.size + rows * ROW_BYTES + TRAILER_BYTES)


def decode_footer(tail: bytes | memoryview) -> Footer:
    """Decode the footer from an object's last bytes: at least `footer_size` of them."""
    base, end, batch_bytes, first_epoch, last_epoch, entries, rows, flags, tables_crc, *_ = _trailer(tail)
    size = entries * _INDEX.size + rows * ROW_BYTES + TRAILER_BYTES
    if len(tail) < size:
        raise ChunkCorrupt(f"the footer has {size} bytes, only {len(tail)} were read")
    tables = memoryview(tail)[len(tail) - size : len(tail) - TRAILER_BYTES]
    if crc32c(tables) != tables_crc:
        raise ChunkCorrupt("the footer's checksum does not match its index and producer table")
    index = Index()
    index.runs = [IndexEntry(*fields) for fields in _INDEX.iter_unpack(tables[: entries * _INDEX.size])]
    return Footer(
        Offset(base),
        Offset(end),
        batch_bytes,
        Epoch(first_epoch),
        Epoch(last_epoch),
        bool(flags & _SEALED),
        index,
        ProducerTable.from_rows(tables[entries * _INDEX.size :]),
        size,
    )


def _trailer(tail: bytes | memoryview) -> tuple[int, ...]:
    if len(tail) < TRAILER_BYTES:
        raise ChunkCorrupt(f"a chunk ends with {TRAILER_BYTES} bytes of trailer, only {len(tail)} are there")
    view = memoryview(tail)[len(tail) - TRAILER_BYTES :]
    fields = _TRAILER.unpack(view)
    *numbers, version, magic, found_crc = fields
    if magic != MAGIC:
        raise ChunkCorrupt(f"no chunk trailer: found {magic!r} where {MAGIC!r} should be")
    if crc32c(view[:_TRAILER_CRC_AT]) != found_crc:
        raise ChunkCorrupt("the trailer's checksum does not match")
    if version != VERSION:
        raise ChunkCorrupt(f"chunk version {version}; this build reads version {VERSION}")
    base, end, batch_bytes, _, _, entries, rows, *_ = numbers
    if end < base or batch_bytes > MAX_CHUNK_BYTES or batch_bytes < 0:
        raise ChunkCorrupt(f"the trailer is impossible: offsets {base}–{end}, {batch_bytes} bytes of batches")
    if entries > batch_bytes // HEADER_BYTES or entries * _INDEX.size + rows * ROW_BYTES > MAX_FOOTER_BYTES:
        raise ChunkCorrupt(f"the trailer is impossible: {entries} index entries and {rows} producer rows")
    return tuple(numbers)
