"""The chunk's footer: the index, the trailer, and what is refused."""

from __future__ import annotations

import asyncio
import struct

import pytest
from crc32c import crc32c

from braid.model.batch.header import NO_KEYS, control_batch, parse_header
from braid.model.batch.header import Flag as ControlFlag
from braid.model.errors import ChunkCorrupt
from braid.model.ids import Offset
from braid.storage import chunk as chunks
from braid.storage.chunk import (
    RUN_BYTES,
    TRAILER_BYTES,
    Index,
    decode_footer,
    encode_footer,
    footer_size,
    read_footer,
)
from braid.storage.log.producers import ProducerTable
from tests.kits.storage import Bytes, make_chunk, make_header


def index_of(*batches: tuple[int, int, int, int]) -> Index:
    """(offset, position, lowest time, highest time) of one-record batches."""
    index = Index()
    for offset, position, low, high in batches:
        index.add(make_header(base_offset=offset, times=(low, high), key_hashes=(offset, offset)), position)
    return index


THREE_RUNS = ((10, 0, 100, 200), (11, 300, 50, 60), (12, RUN_BYTES, 300, 400), (13, RUN_BYTES + 1, 250, 500),
              (14, 2 * RUN_BYTES, 150, 150))  # fmt: skip


def test_a_run_begins_every_64_kib_and_gathers_times_and_hashes() -> None:
    index = index_of(*THREE_RUNS)
    assert [(run.offset, run.position, run.batches) for run in index.runs] == [
        (10, 0, 2),
        (12, RUN_BYTES, 2),
        (14, 2 * RUN_BYTES, 1),
    ]
    assert [(run.min_timestamp, run.max_timestamp) for run in index.runs] == [(50, 200), (250, 500), (150, 150)]
    assert [(run.min_key_hash, run.max_key_hash) for run in index.runs] == [(10, 11), (12, 13), (14, 14)]
    assert (index.min_timestamp, index.max_timestamp, index.key_hashes) == (50, 500, (10, 14))


@pytest.mark.parametrize(
    ("offset", "position"),
    [(0, 0), (10, 0), (11, 0), (12, RUN_BYTES), (13, RUN_BYTES), (14, 2 * RUN_BYTES), (99, 2 * RUN_BYTES)],
)
def test_a_position_is_at_or_before_the_offsets_batch(offset: int, position: int) -> None:
    assert index_of(*THREE_RUNS).position_of(offset) == position


@pytest.mark.parametrize(("time", "offset"), [(0, 10), (200, 10), (201, 12), (500, 12), (501, None)])
def test_a_time_is_looked_for_in_the_first_run_that_reaches_it(time: int, offset: int | None) -> None:
    assert index_of(*THREE_RUNS).offset_at_time(time) == offset


def test_control_batches_are_not_indexed_and_an_empty_index_has_defaults() -> None:
    index = Index()
    index.add(parse_header(control_batch(ControlFlag.BEGIN)), 0)
    assert index.runs == []
    assert (index.position_of(5), index.offset_at_time(0)) == (0, None)
    assert (index.min_timestamp, index.max_timestamp, index.key_hashes) == (0, 0, NO_KEYS)


def test_keyless_batches_do_not_widen_the_hashes_of_a_run() -> None:
    index = Index()
    index.add(make_header(base_offset=0, key_hashes=NO_KEYS), 0)
    assert index.key_hashes == NO_KEYS
    index.add(make_header(base_offset=1, key_hashes=(5, 9)), 200)
    assert index.key_hashes == (5, 9)


def footer_bytes(index: Index | None = None, producers: ProducerTable | None = None, **changes: int) -> bytes:
    fields = {"base_offset": 10, "next_offset": 15, "batch_bytes": 1 << 20, "first_epoch": 3, "last_epoch": 4}
    return encode_footer(
        **(fields | changes), sealed=True, index=index or Index(), producers=producers or ProducerTable()
    )


def test_a_footer_round_trips() -> None:
    producers = ProducerTable()
    producers.apply(make_header(3, producer=7, sequence=4), Offset(12))
    data = footer_bytes(index_of(*THREE_RUNS), producers)
    footer = decode_footer(b"batches" + data)
    assert (footer.base_offset, footer.next_offset, footer.batch_bytes) == (10, 15, 1 << 20)
    assert (footer.first_epoch, footer.last_epoch, footer.sealed) == (3, 4, True)
    assert footer.index.runs == index_of(*THREE_RUNS).runs
    assert list(footer.producers.rows()) == list(producers.rows())
    assert footer.size == footer_size(data) == len(data)


def resealed(data: bytes, position: int, layout: str, value: object) -> bytes:
    """Change a field of the trailer and make its checksum right again: only sense can refuse it now."""
    out = bytearray(data)
    trailer = len(out) - TRAILER_BYTES
    struct.pack_into("<" + layout, out, trailer + position, value)
    struct.pack_into("<I", out, trailer + 64, crc32c(out[trailer : trailer + 64]))
    return bytes(out)


@pytest.mark.parametrize(
    ("position", "layout", "value", "message"),
    [
        (60, "4s", b"BRDX", "no chunk trailer"),
        (56, "B", 2, "chunk version 2"),
        (8, "Q", 9, "offsets 10–9"),
        (16, "Q", (16 << 30) + 1, "bytes of batches"),
        (40, "I", 0xFFFF_FFFF, "index entries"),
        (40, "I", 11_000, "index entries"),
        (44, "I", 0xFFFF_FFFF, "producer rows"),
        (52, "I", 0, "checksum does not match its index"),
        (44, "I", 1, "only"),
    ],
)
def test_a_trailer_that_makes_no_sense_is_refused_before_anything_is_allocated(
    position: int, layout: str, value: object, message: str
) -> None:
    data = footer_bytes(index_of(*THREE_RUNS))
    with pytest.raises(ChunkCorrupt, match=message):
        decode_footer(resealed(data, position, layout, value))


def test_every_field_of_the_trailer_is_under_its_checksum() -> None:
    data = footer_bytes(index_of(*THREE_RUNS))
    for position in range(len(data) - TRAILER_BYTES, len(data) - 4):
        flipped = bytearray(data)
        flipped[position] ^= 1
        with pytest.raises(ChunkCorrupt, match=r"no chunk trailer|trailer's checksum"):
            decode_footer(bytes(flipped))


def test_too_few_bytes_are_no_footer() -> None:
    data = footer_bytes(index_of(*THREE_RUNS))
    for length in (0, 1, TRAILER_BYTES - 1):
        with pytest.raises(ChunkCorrupt, match="72 bytes of trailer"):
            decode_footer(data[len(data) - length :])
    with pytest.raises(ChunkCorrupt, match="only 100 were read"):
        decode_footer(data[-100:])


def test_a_footer_usually_takes_one_read_and_a_large_one_two(monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_chunk(0, 20)
    source = Bytes(data)
    footer = asyncio.run(read_footer(source, len(data)))
    assert (footer.base_offset, footer.next_offset, source.reads) == (0, 20, 1)
    monkeypatch.setattr(chunks, "FOOTER_READ_BYTES", TRAILER_BYTES)
    source = Bytes(data)
    assert asyncio.run(read_footer(source, len(data))).index.runs == footer.index.runs
    assert source.reads == 2


def test_a_footer_that_describes_another_length_is_refused() -> None:
    data = make_chunk(0, 20)
    with pytest.raises(ChunkCorrupt, match=f"but the chunk has {len(data) + 8}"):
        asyncio.run(read_footer(Bytes(bytes(8) + data), len(data) + 8))
