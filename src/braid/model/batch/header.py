"""The record batch: the unit that is published, appended, replicated, exported and read.

A batch is one fixed header, a body, and zeros up to a multiple of 8 bytes. The header describes itself and the body, so
a file or a chunk is nothing but batches one after the other, and code that moves batches never opens a body. The header
has two halves with two authors:

    0        64 ─ the producer's half: what is in the body, who made it ─┐
    64       96 ─ the owner's half: where it stands in the log, header checksum
    96        … ─ body (columns.py), body_length bytes, then zeros to a multiple of 8

The body's checksum is the producer's and is never computed again by writers. The owner fills its half in place
(`stamp`), so an append costs one checksum pass over the body (`verify`) and no copy. Every length is checked against a
named limit before anything is allocated for it.

By `commit_lag`, recovery tells a torn write from damage. When a batch is written, everything but the last `commit_lag`
records before it was already synced. So if a batch cannot be read, and a whole batch after it says that the unreadable
one was synced, then the unreadable batch was lost after it had been confirmed: that is damage. Otherwise it is only a
tail that was never confirmed (storage/log/recovery.py).

By `incarnation`, recovery tells a batch of this log from a batch inside a record's value. A value may hold whole
batches (a mirror, a backup of another topic), and after an unreadable header no frame says where values begin. So each
opening of a log draws a random number and stamps it into every batch that it writes. Recovery believes a batch after
damage only if it has the number that the log had before the damage. This holds against batches that are embedded by
accident, and against a producer that cannot read this log. The number is no secret: a producer that reads the log sees
it, can embed a batch that carries it, and will deceive a recovery that finds the header before it unreadable.
"""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag
from typing import Final

import msgspec
from crc32c import crc32c

from braid.model.errors import BatchCorrupt, BatchTooLarge, BatchTruncated, BatchUnsupported
from braid.model.ids import Epoch, Offset, ProducerId, Sequence

MAGIC: Final = b"BRDB"
VERSION: Final = 1

MAX_BODY_BYTES: Final = 32 << 20
"""The largest stored body. Every process on a batch's way holds all of it in memory."""
MAX_RAW_BYTES: Final = 128 << 20
"""The largest body after decompression: what a reader may be made to allocate by one batch."""
MAX_RECORDS: Final = 1 << 22
"""The most records in one batch; keeps offsets and row numbers far from 32-bit edges."""
MAX_OFFSET: Final = (1 << 63) - 1
"""Offsets are signed 64-bit numbers wherever they are columns (Arrow, Spark, SQL)."""
MAX_EPOCH: Final = (1 << 32) - 1
MAX_INCARNATION: Final = (1 << 32) - 1

_HEADER: Final = struct.Struct(
    "<"
    "4s"  #  0 magic
    "B"  #   4 version
    "B"  #   5 codec of the body
    "H"  #   6 flags
    "I"  #   8 schema id: 0 is the record schema of columns.py
    "I"  #  12 body length as stored
    "I"  #  16 body length after decompression
    "I"  #  20 crc32c of the stored body
    "I"  #  24 record count; 0 in control batches
    "H"  #  28 lowest key hash of the keyed records  } lowest > highest:
    "H"  #  30 highest key hash                      } no record has a key
    "Q"  #  32 producer id; 0: no deduplication
    "Q"  #  40 sequence of the first record
    "q"  #  48 lowest timestamp, µs since 1970
    "q"  #  56 highest timestamp
    "Q"  #  64 offset of the first record           ┐
    "q"  #  72 append time, µs since 1970           │ the owner's half
    "I"  #  80 ownership epoch                      │
    "I"  #  84 incarnation; 0: not stamped           │
    "I"  #  88 commit lag, records                  │
    "I"  #  92 crc32c of the 92 bytes before        ┘
)
HEADER_BYTES: Final = _HEADER.size
_UNSUMMED: Final = struct.Struct(_HEADER.format.removesuffix("I"))
_PRODUCER: Final = struct.Struct("<QQ")
_PRODUCER_AT: Final = 32
_OWNER: Final = struct.Struct("<QqIII")
_OWNER_AT: Final = 64
_CRC: Final = struct.Struct("<I")
_CRC_AT: Final = 92

assert HEADER_BYTES == 96
assert _OWNER_AT + _OWNER.size == _CRC_AT

MAX_BATCH_BYTES: Final = HEADER_BYTES + MAX_BODY_BYTES

NO_KEYS: Final = (0xFFFF, 0)
"""The (lowest, highest) key hash of a batch in which no record has a key."""
DIRECTORY_BYTES: Final = 48
"""A raw body begins with the lengths of its buffers (body.py)."""
EMPTY_BODY_BYTES: Final = DIRECTORY_BYTES + 32
EMPTY_RECORD_BYTES: Final = 18
"""No raw body has to be longer than this and so much for each record: two offsets, a key hash and a timestamp."""
CHECKSUM_BYTES: Final = 4
"""A compressed body begins with the checksum of the raw body (codec.py)."""


class Codec(IntEnum):
    NONE = 0
    LZ4 = 1
    ZSTD = 2


class Flag(IntFlag):
    SEAL = 1
    """A control batch: the log ends here. Nothing is ever appended after it."""
    BEGIN = 2
    """A control batch: this epoch's owner has begun. The first thing that an owner makes durable."""


_SEAL: Final = int(Flag.SEAL)
"""A plain number, for code that looks at every batch: `&` of an IntFlag takes 0.7 µs."""
_KNOWN_FLAGS: Final = int(Flag.SEAL | Flag.BEGIN)
_PLAIN: Final = int(Codec.NONE)
_CODECS: Final = frozenset(int(codec) for codec in Codec)


class BatchHeader(msgspec.Struct, frozen=True, gc=False):
    codec: int
    flags: int
    schema_id: int
    body_length: int
    raw_length: int
    body_crc: int
    count: int
    min_key_hash: int
    max_key_hash: int
    producer_id: ProducerId
    first_sequence: Sequence
    min_timestamp: int
    max_timestamp: int
    base_offset: Offset = Offset(0)
    append_time: int = 0
    epoch: Epoch = Epoch(0)
    incarnation: int = 0
    commit_lag: int = 0

    @property
    def size(self) -> int:
        """Bytes of the whole batch: header, body and padding."""
        return HEADER_BYTES + ((self.body_length + 7) & ~7)  # `padded`, without the call: asked for each batch

    @property
    def next_offset(self) -> Offset:
        return Offset(self.base_offset + self.count)

    @property
    def last_sequence(self) -> Sequence:
        return Sequence(self.first_sequence + self.count - 1)

    @property
    def is_seal(self) -> bool:
        return self.flags & _SEAL != 0

    @property
    def is_control(self) -> bool:
        return self.count == 0

    @property
    def synced_before(self) -> Offset:
        """Every record below this offset had been synced when this batch was written."""
        return Offset(max(0, self.base_offset - self.commit_lag))


def padded(length: int) -> int:
    return (length + 7) & ~7


def parse_header(data: bytes | bytearray | memoryview, position: int = 0) -> BatchHeader:
    """Read and check the header at `position`; the body need not be there yet."""
    if len(data) - position < HEADER_BYTES:
        raise BatchTruncated(f"a batch header has {HEADER_BYTES} bytes, only {len(data) - position} are left")
    (
        magic,
        version,
        codec,
        flags,
        schema_id,
        body_length,
        raw_length,
        body_crc,
        count,
        min_key_hash,
        max_key_hash,
        producer_id,
        first_sequence,
        min_timestamp,
        max_timestamp,
        base_offset,
        append_time,
        epoch,
        incarnation,
        commit_lag,
        header_crc,
    ) = _HEADER.unpack_from(data, position)
    if magic != MAGIC:
        raise BatchCorrupt(f"no record batch at byte {position}: it starts with {magic!r}, not {MAGIC!r}")
    found_crc = _checksum(data, position, position + _CRC_AT)
    if found_crc != header_crc:
        raise BatchCorrupt(f"header checksum of the batch at byte {position} is {found_crc:08x}, says {header_crc:08x}")
    if version != VERSION:
        raise BatchUnsupported(f"batch version {version}; this build reads version {VERSION}")
    if codec not in _CODECS:
        raise BatchUnsupported(f"codec {codec} is unknown to this build")
    if flags & ~_KNOWN_FLAGS:
        raise BatchUnsupported(f"flags {flags:#06x} contain bits that are unknown to this build")
    if body_length > MAX_BODY_BYTES:
        raise BatchTooLarge(f"a body of {body_length} bytes is above the limit of {MAX_BODY_BYTES}")
    if raw_length > MAX_RAW_BYTES:
        raise BatchTooLarge(f"a decompressed body of {raw_length} bytes is above the limit of {MAX_RAW_BYTES}")
    if count > MAX_RECORDS:
        raise BatchTooLarge(f"{count} records are above the limit of {MAX_RECORDS}")
    if base_offset + count > MAX_OFFSET:
        raise BatchCorrupt(f"{count} records from offset {base_offset} on end above the highest offset {MAX_OFFSET}")
    if (count == 0) != bool(flags):
        raise BatchCorrupt(f"a batch of {count} records has the control flags {flags:#06x}")
    return BatchHeader(
        codec,
        flags,
        schema_id,
        body_length,
        raw_length,
        body_crc,
        count,
        min_key_hash,
        max_key_hash,
        producer_id,
        first_sequence,
        min_timestamp,
        max_timestamp,
        base_offset,
        append_time,
        epoch,
        incarnation,
        commit_lag,
    )


def verify(data: bytes | bytearray | memoryview, position: int = 0) -> BatchHeader:
    """Check the whole batch at `position`, body included."""
    header = parse_header(data, position)
    start = position + HEADER_BYTES
    if len(data) - position < header.size:
        raise BatchTruncated(f"the batch has {header.size} bytes, only {len(data) - position} are there")
    found = _checksum(data, start, start + header.body_length)
    if found != header.body_crc:
        raise BatchCorrupt(
            f"body checksum of the batch at byte {position} (offset {header.base_offset}) is {found:08x}, "
            f"its header says {header.body_crc:08x}"
        )
    return header


def check_published(header: BatchHeader) -> None:
    """Refuse a batch of records whose header alone shows that no reader could decode it. The checksums prove only that
    the bytes are what a producer wrote; so a broker asks this before it stores them. A control batch is no batch of
    records: the log refuses it."""
    if header.count == 0:
        return
    if header.schema_id != 0:
        raise BatchUnsupported(f"schema {header.schema_id} is unknown to this build; it stores schema 0")
    raw_length, plain = header.raw_length, header.codec == _PLAIN
    if plain and raw_length != header.body_length:
        raise BatchCorrupt(f"an uncompressed body of {header.body_length} bytes says it has {raw_length}")
    if not plain and header.body_length <= CHECKSUM_BYTES:
        raise BatchCorrupt(f"a compressed body has more than {CHECKSUM_BYTES} bytes, this one {header.body_length}")
    is_long = raw_length >= EMPTY_BODY_BYTES + EMPTY_RECORD_BYTES * header.count  # Most are, and need no exact answer.
    if raw_length % 8 or (not is_long and raw_length < least_raw_length(header)):
        raise BatchCorrupt(
            f"{header.count} records with these keys and timestamps have a body of at least "
            f"{least_raw_length(header)} bytes, in steps of 8; this header says {raw_length}"
        )
    if header.min_timestamp > header.max_timestamp:
        raise BatchCorrupt(f"the lowest timestamp {header.min_timestamp} is above the highest, {header.max_timestamp}")
    key_range = header.min_key_hash, header.max_key_hash
    if header.min_key_hash > header.max_key_hash and key_range != NO_KEYS:
        raise BatchCorrupt(f"the lowest key hash {key_range[0]:04x} is above the highest, {key_range[1]:04x}")


def least_raw_length(header: BatchHeader) -> int:
    """Return the length of the raw body if all keys and values are empty and no record has headers (body.py)."""
    count = header.count
    offsets = padded(4 * (count + 1))
    length = DIRECTORY_BYTES + offsets
    if header.min_key_hash <= header.max_key_hash:
        length += offsets + padded(2 * count)
    if header.min_timestamp != header.max_timestamp:
        length += 8 * count
    return length


def _checksum(data: bytes | bytearray | memoryview, start: int, stop: int) -> int:
    if isinstance(data, memoryview):
        return crc32c(data[start:stop])
    with memoryview(data) as view:
        return crc32c(view[start:stop])


def body_of(data: bytes | bytearray | memoryview, header: BatchHeader, position: int = 0) -> memoryview:
    """Return the stored body, as a view."""
    start = position + HEADER_BYTES
    return memoryview(data)[start : start + header.body_length]


def assemble(header: BatchHeader, body: bytes | bytearray | memoryview) -> bytearray:
    """Header and body as one mutable buffer that an owner can stamp in place."""
    out = bytearray(header.size)
    write_header(out, header)
    out[HEADER_BYTES : HEADER_BYTES + header.body_length] = body
    return out


def write_header(out: bytearray, header: BatchHeader) -> None:
    """Write the header, with its checksum, over the first bytes of `out`."""
    _HEADER.pack_into(
        out,
        0,
        MAGIC,
        VERSION,
        header.codec,
        header.flags,
        header.schema_id,
        header.body_length,
        header.raw_length,
        header.body_crc,
        header.count,
        header.min_key_hash,
        header.max_key_hash,
        header.producer_id,
        header.first_sequence,
        header.min_timestamp,
        header.max_timestamp,
        header.base_offset,
        header.append_time,
        header.epoch,
        header.incarnation,
        header.commit_lag,
        0,
    )
    _CRC.pack_into(out, _CRC_AT, crc32c(memoryview(out)[:_CRC_AT]))


def fresh_header(
    codec: int,
    body_length: int,
    raw_length: int,
    body_crc: int,
    count: int,
    key_range: tuple[int, int],
    time_range: tuple[int, int],
    producer_id: int,
    first_sequence: int,
) -> bytes:
    """Make the header of a batch of records that no owner has stamped yet."""
    lowest_hash, highest_hash = key_range
    first_time, last_time = time_range
    header = _UNSUMMED.pack(
        MAGIC, VERSION, codec, 0, 0, body_length, raw_length, body_crc, count,
        lowest_hash, highest_hash, producer_id, first_sequence, first_time, last_time, 0, 0, 0, 0, 0,
    )  # fmt: skip
    return header + _CRC.pack(crc32c(header))


def stamp(
    batch: bytearray | memoryview,
    header: BatchHeader,
    base_offset: Offset,
    append_time: int,
    epoch: Epoch,
    incarnation: int,
    commit_lag: int,
) -> BatchHeader:
    """Fill the owner's half of a verified batch, in place; returns the header as it now is."""
    commit_lag = min(commit_lag, 0xFFFF_FFFF)
    _OWNER.pack_into(batch, _OWNER_AT, base_offset, append_time, epoch, incarnation, commit_lag)
    _CRC.pack_into(batch, _CRC_AT, _checksum(batch, 0, _CRC_AT))
    return BatchHeader(
        header.codec,
        header.flags,
        header.schema_id,
        header.body_length,
        header.raw_length,
        header.body_crc,
        header.count,
        header.min_key_hash,
        header.max_key_hash,
        header.producer_id,
        header.first_sequence,
        header.min_timestamp,
        header.max_timestamp,
        base_offset,
        append_time,
        epoch,
        incarnation,
        commit_lag,
    )


def renumber(batch: bytearray, producer_id: int, first_sequence: int) -> None:
    """Give a batch that was not sent, or was refused, to another producer id and sequence, in place."""
    _PRODUCER.pack_into(batch, _PRODUCER_AT, producer_id, first_sequence)
    _CRC.pack_into(batch, _CRC_AT, crc32c(memoryview(batch)[:_CRC_AT]))


def control_batch(flag: Flag) -> bytearray:
    """Make a batch without records that marks a place in the log."""
    header = BatchHeader(
        codec=Codec.NONE,
        flags=int(flag),
        schema_id=0,
        body_length=0,
        raw_length=0,
        body_crc=0,
        count=0,
        min_key_hash=NO_KEYS[0],
        max_key_hash=NO_KEYS[1],
        producer_id=ProducerId(0),
        first_sequence=Sequence(0),
        min_timestamp=0,
        max_timestamp=0,
    )
    return assemble(header, b"")
