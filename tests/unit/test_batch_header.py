import struct

import pytest
from crc32c import crc32c

from braid.model.batch.columns import encode_batch
from braid.model.batch.header import (
    EMPTY_BODY_BYTES,
    EMPTY_RECORD_BYTES,
    HEADER_BYTES,
    MAX_BODY_BYTES,
    MAX_RAW_BYTES,
    MAX_RECORDS,
    NO_KEYS,
    BatchHeader,
    Flag,
    assemble,
    body_of,
    check_published,
    control_batch,
    least_raw_length,
    parse_header,
    stamp,
    verify,
)
from braid.model.errors import BatchCorrupt, BatchError, BatchTooLarge, BatchTruncated, BatchUnsupported
from braid.model.ids import Epoch, Offset, ProducerId, Sequence
from tests.kits import poison


def a_batch() -> bytearray:
    return encode_batch([b"a", b"bb"], keys=[b"k", b"l"], timestamps=[3, 9], now_us=0, producer_id=5, first_sequence=40)


def with_field(kind: str, at: int, value: int) -> bytearray:
    """A batch whose header says something else, under a checksum that is right."""
    batch = a_batch()
    struct.pack_into(kind, batch, at, value)
    struct.pack_into("<I", batch, 92, crc32c(memoryview(batch)[:92]))
    return batch


def test_the_producers_half_tells_what_is_in_the_body() -> None:
    header = verify(a_batch())
    assert (header.count, header.producer_id, header.first_sequence, header.last_sequence) == (2, 5, 40, 41)
    assert (header.min_timestamp, header.max_timestamp) == (3, 9)
    assert header.min_key_hash <= header.max_key_hash
    assert header.size == len(a_batch())


def test_stamping_changes_the_owners_half_and_nothing_else() -> None:
    batch = a_batch()
    before = bytes(batch)
    header = verify(batch)
    assert (header.epoch, header.incarnation) == (0, 0), "not stamped yet"
    returned = stamp(
        batch, header, Offset(1000), append_time=77, epoch=Epoch(3), incarnation=0xFFFF_FFFE, commit_lag=12
    )
    header = verify(batch)
    assert header == returned
    assert (header.base_offset, header.next_offset, header.append_time, header.epoch) == (1000, 1002, 77, 3)
    assert header.incarnation == 0xFFFF_FFFE
    assert header.synced_before == 988
    assert batch[:64] == before[:64]
    assert batch[HEADER_BYTES:] == before[HEADER_BYTES:]


def test_assembling_a_parsed_header_with_its_body_gives_the_same_bytes() -> None:
    batch = a_batch()
    header = verify(batch)
    assert assemble(header, body_of(batch, header)) == batch


def test_batches_are_read_at_any_position_of_a_larger_buffer() -> None:
    batch = a_batch()
    assert verify(b"x" * 13 + batch + b"rest", 13) == verify(batch)


@pytest.mark.parametrize("flag", list(Flag))
def test_control_batches_have_a_flag_and_no_records(flag: Flag) -> None:
    header = verify(control_batch(flag))
    assert header.is_control
    assert header.is_seal == (flag is Flag.SEAL)
    assert header.next_offset == header.base_offset
    assert header.size == HEADER_BYTES


def test_every_single_flipped_bit_outside_the_padding_is_noticed() -> None:
    batch = a_batch()
    end = HEADER_BYTES + verify(batch).body_length
    for at in range(end):
        for bit in range(8):
            damaged = bytearray(batch)
            damaged[at] ^= 1 << bit
            with pytest.raises(BatchError):
                verify(damaged)


def test_every_truncation_is_noticed_as_one() -> None:
    batch = a_batch()
    for length in range(len(batch)):
        with pytest.raises(BatchTruncated):
            verify(batch[:length])


@pytest.mark.parametrize(
    ("kind", "at", "value", "error"),
    [
        ("<B", 4, 2, BatchUnsupported),  # version
        ("<B", 5, 9, BatchUnsupported),  # codec
        ("<H", 6, 0x8000, BatchUnsupported),  # flags
        ("<H", 6, Flag.SEAL, BatchCorrupt),  # a control flag on records
        ("<I", 12, MAX_BODY_BYTES + 1, BatchTooLarge),
        ("<I", 16, MAX_RAW_BYTES + 1, BatchTooLarge),
        ("<I", 24, MAX_RECORDS + 1, BatchTooLarge),
        ("<I", 24, 0, BatchCorrupt),  # no records and no control flag
        ("<Q", 64, (1 << 63) - 2, BatchCorrupt),  # offsets beyond a signed 64-bit number
    ],
)
def test_a_header_that_lies_under_a_right_checksum_is_refused(
    kind: str, at: int, value: int, error: type[BatchError]
) -> None:
    with pytest.raises(error):
        parse_header(with_field(kind, at, value))


def test_something_else_than_a_batch_is_said_to_be_none() -> None:
    with pytest.raises(BatchCorrupt, match="no record batch at byte 0"):
        parse_header(bytes(200))


@pytest.mark.parametrize("what", poison.shown_by_the_header())
def test_a_header_that_contradicts_itself_is_not_published(what: str) -> None:
    header = verify(poison.shown_by_the_header()[what])
    with pytest.raises(BatchUnsupported if "schema" in what else BatchCorrupt):
        check_published(header)


@pytest.mark.parametrize("what", poison.shown_by_the_body())
def test_poison_in_the_body_cannot_be_seen_in_the_header(what: str) -> None:
    check_published(verify(poison.shown_by_the_body()[what]))


@pytest.mark.parametrize("keys", [None, b""])
@pytest.mark.parametrize("times", [(5, 5), (5, 6)])
@pytest.mark.parametrize("count", [2, 7, 8, 9, 1_000])
def test_empty_records_have_the_least_raw_length(count: int, times: tuple[int, int], keys: bytes | None) -> None:
    timestamps = [times[0]] * (count - 1) + [times[1]]
    header = verify(encode_batch([b""] * count, keys=[keys] * count, timestamps=timestamps, now_us=0))
    assert least_raw_length(header) == header.raw_length
    check_published(header)


@pytest.mark.parametrize("keys", [(0, 0xFFFF), NO_KEYS])
@pytest.mark.parametrize("last_time", [0, 1])
@pytest.mark.parametrize("count", [*range(1, 17), MAX_RECORDS - 1, MAX_RECORDS])
def test_no_body_has_to_be_longer_than_what_counts_as_long(count: int, last_time: int, keys: tuple[int, int]) -> None:
    header = BatchHeader(0, 0, 0, 0, 0, 0, count, *keys, ProducerId(0), Sequence(0), 0, last_time)
    assert least_raw_length(header) <= EMPTY_BODY_BYTES + EMPTY_RECORD_BYTES * count
