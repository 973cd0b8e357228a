"""Credit, and what a delivery becomes: pure parts of the consumers."""

from __future__ import annotations

import random

import msgspec
import pytest

from braid.client.consuming.channel import MAX_WINDOW_BYTES, checked_window, credit_to_grant
from braid.client.consuming.delivery import (
    MAX_DECODED_BYTES,
    MESSAGE_BYTES,
    BatchSlice,
    ReceivedBatch,
    checked_slices,
    decoded_run,
)
from braid.model.batch.columns import RECORD_SCHEMA, decode_messages, encode_batch
from braid.model.batch.header import Flag, control_batch, parse_header, stamp
from braid.model.errors import BatchTruncated, InvalidArgument
from braid.model.ids import Epoch, Offset
from tests.kits.scripted_broker import TOPIC, stamped

WINDOW = 1_000


@pytest.mark.parametrize(
    ("waiting", "credit", "needed", "grant"),
    [
        (0, 0, 0, 1_000),  # all of it at the beginning
        (0, 501, 0, 0),  # less than half is free: later
        (0, 500, 0, 500),
        (400, 100, 0, 500),
        (600, 100, 0, 0),
        (1_000, 0, 0, 0),
        (300, 600, 700, 100),  # the next batch fits if all that is free is granted
        (300, 600, 701, 0),  # it does not: what waits has to be taken first
        (0, 600, 5_000, 4_400),  # it is larger than the window, and nothing waits: it gets what it needs
        (1, 600, 5_000, 0),
        (0, 600, 600, 0),  # it has what it needs, and less than half is free
    ],
)
def test_credit(waiting: int, credit: int, needed: int, grant: int) -> None:
    assert credit_to_grant(WINDOW, waiting, credit, needed) == grant


@pytest.mark.parametrize("seed", range(50))
def test_credit_never_exceeds_the_window_and_never_ends(seed: int) -> None:
    """A model of both sides: the broker sends batches of any size, the application takes them in its own time."""
    luck = random.Random(seed)
    sizes = [luck.choice([1, 10, 400, 999, 1_000, 1_001, 5_000]) for _ in range(300)]
    waiting: list[int] = []
    credit = needed = 0
    sent = taken = 0

    def grant() -> None:
        nonlocal credit
        credit += credit_to_grant(WINDOW, sum(waiting), credit, needed)
        assert sum(waiting) + credit <= max(WINDOW, needed)

    grant()
    while taken < len(sizes):
        can_send = sent < len(sizes) and credit >= sizes[sent]
        if sent < len(sizes) and credit and not can_send:
            needed = sizes[sent]
            grant()
            can_send = credit >= sizes[sent]
        assert can_send or waiting, f"both sides wait for the other: {credit=} {needed=}"
        if can_send and (not waiting or luck.random() < 0.5):
            credit -= sizes[sent]
            waiting.append(sizes[sent])
            needed = 0
            sent += 1
        else:
            waiting.pop(0)
            taken += 1
            grant()


def test_a_window_has_limits() -> None:
    for size in (0, MAX_WINDOW_BYTES + 1):
        with pytest.raises(InvalidArgument):
            checked_window(size)


def received(first: int = 0, *batches: bytes | bytearray) -> ReceivedBatch:
    payload = memoryview(bytearray(b"".join(batches)))
    slices = checked_slices(payload)
    return ReceivedBatch(TOPIC, 7, payload, slices, first, slices[-1].header.next_offset)


def test_several_batches_are_one_table() -> None:
    batch = received(0, stamped([b"a", b"b"], 0), stamped([b"c"], 2), stamped([b"d", b"e"], 3))
    assert len(batch) == 5
    assert batch.table.schema == RECORD_SCHEMA
    assert batch.table["value"].to_pylist() == batch.values() == [b"a", b"b", b"c", b"d", b"e"]
    assert batch.table is batch.table
    assert [(message.segment, message.topic, message.offset) for message in batch.messages()] == [
        (7, TOPIC, offset) for offset in range(5)
    ]
    assert batch.columns(["value", "offset"]).column_names == ["value", "offset"]


@pytest.mark.parametrize("first", range(6))
def test_records_before_the_wanted_one_are_left_out(first: int) -> None:
    whole = [stamped([b"0", b"1"], 0), stamped([b"2"], 2), stamped([b"3", b"4"], 3)]
    for batch in (received(first, *whole), received(0, *whole).from_offset(first)):
        assert (batch.base_offset, batch.next_offset) == (first, 5)
        expected = [b"%d" % number for number in range(first, 5)]
        assert batch.values() == expected
        assert batch.table["offset"].to_pylist() == list(range(first, 5))
        assert batch.table.num_rows == len(batch) == 5 - first
        assert [message.value for message in batch.messages()] == expected


def test_control_batches_carry_no_records() -> None:
    begin = control_batch(Flag.BEGIN)
    stamp(begin, parse_header(begin), Offset(2), 0, Epoch(2), 1, 0)
    batch = received(0, stamped([b"a", b"b"], 0), begin, stamped([b"c"], 2))
    assert batch.values() == [b"a", b"b", b"c"]
    assert batch.table.num_rows == len(batch) == 3
    alone = received(2, begin)
    assert (len(alone), alone.values(), alone.messages(), alone.table.num_rows) == (0, [], [], 0)


def test_a_table_stands_on_the_bytes_that_arrived() -> None:
    payload = memoryview(stamped([b"x" * 1_000] * 10, 0))
    slices = checked_slices(payload)
    values = ReceivedBatch(TOPIC, 0, payload, slices, 0, 10).table["value"].chunk(0)
    payload[payload.tobytes().index(b"xxxx")] = ord("y")
    assert values[0].as_py()[0:2] == b"yx", "a copy was made"


def test_half_a_batch_is_refused() -> None:
    with pytest.raises(BatchTruncated):
        checked_slices(memoryview(stamped([b"abc"] * 10, 0))[:-16])


def test_messages_say_where_they_are() -> None:
    for values in ([b"one"], [b"one", b"two"]):
        for headers in (None, [{"h": b"v"}] * len(values)):
            batch = encode_batch(values, headers=headers, now_us=5)
            for message in decode_messages(batch, segment=3, topic="t"):
                assert (message.segment, message.topic) == (3, "t")
                assert message.headers == ({"h": b"v"} if headers else {})


def of_size(raw_length: int, count: int) -> BatchSlice:
    """A batch that becomes so large, or a control batch."""
    header = parse_header(control_batch(Flag.BEGIN) if not count else stamped([b"x"], 0))
    return BatchSlice(msgspec.structs.replace(header, raw_length=raw_length, count=count), 0)


FULL, HALF = MAX_DECODED_BYTES, MAX_DECODED_BYTES // 2


@pytest.mark.parametrize(
    ("batches", "run"),
    [
        ([(100, 1)], 1),
        ([(100, 1)] * 1_000, 1_000),
        ([(FULL, 1)] * 3, 1),  # each alone is too large: one has to be
        ([(HALF - 1_000, 1)] * 3, 2),
        ([(HALF, 1), (0, 0), (HALF, 1)], 2),  # a control batch goes with those before it
        ([(0, 0), (FULL, 1), (0, 0), (0, 0), (100, 1)], 4),
        ([(0, 0), (0, 0)], 2),
        ([(100, MAX_DECODED_BYTES // MESSAGE_BYTES)] * 2, 1),  # small, but of many records
    ],
)
def test_batches_are_decoded_together_as_far_as_memory_allows(batches: list[tuple[int, int]], run: int) -> None:
    assert decoded_run([of_size(*each) for each in batches]) == run
