"""Footers and frames: what is written comes back, and damage is never taken for data."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from braid.model.errors import ChunkCorrupt
from braid.model.ids import Offset
from braid.storage.chunk import RUN_BYTES, Index, decode_footer, encode_footer, footer_size, read_footer
from braid.storage.log.producers import ProducerTable
from braid.storage.log.wal import FrameWalk, next_batch_after_damage, whole_batch_at
from tests.kits.examples import share
from tests.kits.storage import Bytes, make_chunk, make_header, stamped_batch

U16, U64, I64 = st.integers(0, 2**16 - 1), st.integers(0, 2**62), st.integers(-(2**62), 2**62)
RECORDS = st.integers(1, 2**22)

batches = st.lists(st.tuples(st.integers(1, 1_000), st.integers(1, 2 * RUN_BYTES), I64, I64, U16, U16), max_size=12)
producers = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 50)), max_size=40)


def make_index(described: list[tuple[int, int, int, int, int, int]]) -> Index:
    index, offset, position = Index(), 0, 0
    for count, size, low, high, low_hash, high_hash in described:
        header = make_header(
            count, base_offset=offset, times=(min(low, high), max(low, high)), key_hashes=(low_hash, high_hash)
        )
        index.add(header, position)
        offset, position = offset + count, position + size
    return index


def make_producers(described: list[tuple[int, int]]) -> ProducerTable:
    table, sequences, offset = ProducerTable(), dict.fromkeys(range(1, 5), 0), 0
    for producer, count in described:
        table.apply(make_header(count, producer=producer, sequence=sequences[producer]), Offset(offset))
        sequences[producer] += count
        offset += count
    return table


@settings(deadline=None, derandomize=True)
@given(batches, producers, st.tuples(U64, RECORDS, U64, U64), st.booleans())
def test_a_footer_round_trips(
    described: list[tuple[int, int, int, int, int, int]],
    stored: list[tuple[int, int]],
    numbers: tuple[int, int, int, int],
    sealed: bool,
) -> None:
    base, records, first_epoch, last_epoch = numbers
    index, table = make_index(described), make_producers(stored)
    data = encode_footer(
        base_offset=base,
        next_offset=base + records,
        batch_bytes=1 << 30,
        first_epoch=first_epoch,
        last_epoch=last_epoch,
        sealed=sealed,
        index=index,
        producers=table,
    )
    footer = decode_footer(data)
    assert (footer.base_offset, footer.next_offset, footer.batch_bytes) == (base, base + records, 1 << 30)
    assert (footer.first_epoch, footer.last_epoch, footer.sealed) == (first_epoch, last_epoch, sealed)
    assert footer.index.runs == index.runs
    assert b"".join(footer.producers.rows()) == b"".join(table.rows())
    assert footer.size == footer_size(data) == len(data)
    for run, after in zip(index.runs, index.runs[1:]):
        assert index.position_of(run.offset) == index.position_of(after.offset - 1) == run.position


CHUNK = make_chunk(5, 8)
FOOTER = asyncio.run(read_footer(Bytes(CHUNK), len(CHUNK)))


@settings(deadline=None, derandomize=True, max_examples=share(300))
@given(st.lists(st.tuples(st.integers(0, FOOTER.size - 1), st.integers(0, 255)), min_size=1, max_size=5))
def test_a_footer_with_any_bytes_changed_is_corrupt_or_unchanged_in_meaning(changes: list[tuple[int, int]]) -> None:
    data = bytearray(CHUNK)
    for position, value in changes:
        data[FOOTER.batch_bytes + position] = value
    try:
        footer = asyncio.run(read_footer(Bytes(bytes(data)), len(data)))
    except ChunkCorrupt:
        return
    assert (footer.base_offset, footer.next_offset, footer.index.runs) == (5, 13, FOOTER.index.runs)
    assert data[:-4] == CHUNK[:-4], "only the padding at the very end is free"


@settings(deadline=None, derandomize=True, max_examples=share(200))
@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_no_footer(data: bytes) -> None:
    try:
        asyncio.run(read_footer(Bytes(data), len(data)))
    except ChunkCorrupt:
        return
    raise AssertionError("arbitrary bytes were taken for a footer")


@settings(deadline=None, derandomize=True)
@given(st.integers(0, len(CHUNK) - 1))
def test_a_chunk_that_was_cut_has_no_footer(length: int) -> None:
    try:
        asyncio.run(read_footer(Bytes(CHUNK[:length]), length))
    except ChunkCorrupt:
        return
    raise AssertionError("a cut chunk was taken for a whole one")


INCARNATION = 12345
bodies = st.lists(st.binary(max_size=40), min_size=1, max_size=8)


async def walk_all(data: bytes, incarnation: int = 0) -> tuple[FrameWalk, list[tuple[int, int]]]:
    walk = FrameWalk(Bytes(data), len(data), 0, 0, epoch=1 if incarnation else 0, incarnation=incarnation)
    found: list[tuple[int, int]] = []
    while window := await walk.next_window():
        found.extend((position, header.base_offset) for position, header in window)
    return walk, found


def frames_of(contents: list[bytes]) -> tuple[bytes, list[int]]:
    """The frames, and where each begins; the last number is the end."""
    data, starts = b"", [0]
    for offset, body in enumerate(contents):
        data += stamped_batch(offset, body=body, incarnation=INCARNATION)
        starts.append(len(data))
    return data, starts


@settings(deadline=None, derandomize=True, max_examples=share(200))
@given(bodies, st.data())
def test_a_walk_over_a_cut_file_ends_at_the_last_whole_frame(contents: list[bytes], draw: st.DataObject) -> None:
    data, starts = frames_of(contents)
    length = draw.draw(st.integers(0, len(data)))
    walk, found = asyncio.run(walk_all(data[:length]))
    whole = sum(start <= length for start in starts) - 1
    assert walk.position == starts[whole]
    assert found == [(start, offset) for offset, start in enumerate(starts[:whole])]
    assert walk.reason is not None


@settings(deadline=None, derandomize=True, max_examples=share(300))
@given(bodies, st.data())
def test_a_walk_over_flipped_bits_ends_before_the_damage_and_raises_nothing(
    contents: list[bytes], draw: st.DataObject
) -> None:
    data, starts = frames_of(contents)
    flipped = bytearray(data)
    at = draw.draw(st.integers(0, len(data) - 1))
    flipped[at] ^= draw.draw(st.integers(1, 255))
    frame = sum(start <= at for start in starts) - 1
    in_padding = at >= starts[frame] + 96 + len(contents[frame])
    walk, found = asyncio.run(walk_all(bytes(flipped), INCARNATION))
    assert walk.position == (len(data) if in_padding else starts[frame])
    assert found == [(start, offset) for offset, start in enumerate(starts[:-1]) if start < walk.position]
    if not in_padding:
        behind = asyncio.run(next_batch_after_damage(Bytes(bytes(flipped)), walk, len(data), {}, all_synced=True))
        expected = (starts[frame + 1], frame + 1) if frame + 1 < len(contents) else None
        assert (behind and (behind[0], behind[1].base_offset)) == expected


@settings(deadline=None, derandomize=True, max_examples=share(200))
@given(st.binary(max_size=600), st.integers(0, 700))
def test_a_walk_over_anything_raises_nothing(data: bytes, position: int) -> None:
    walk, found = asyncio.run(walk_all(data))
    assert (walk.position, found) == (0, [])
    assert walk.reason is not None
    assert asyncio.run(whole_batch_at(Bytes(data), position, len(data))) is None
    assert asyncio.run(next_batch_after_damage(Bytes(data), walk, len(data), {}, all_synced=True)) is None
