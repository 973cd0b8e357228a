"""A batch that is cut by ranges: nothing is lost, nothing is there twice, and each range keeps the order."""

from __future__ import annotations

from typing import Any, NamedTuple

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from braid.client.producing.layout_change import Piece, cut_batch
from braid.client.producing.open_batch import ProducerBatch, id_at, place_of
from braid.model.batch.columns import decode_messages
from braid.model.batch.header import Codec
from braid.model.hashing import RING, key_hash
from braid.model.message import MessageId

NOW_US = 1_794_744_000_000_000


class Given(NamedTuple):
    key: bytes | None
    value: bytes
    headers: dict[str, bytes] | None
    timestamp: int | None

    @property
    def stored(self) -> tuple[bytes | None, bytes, dict[str, bytes], int]:
        return self.key, self.value, self.headers or {}, NOW_US if self.timestamp is None else self.timestamp


RECORD = st.builds(
    Given,
    st.none() | st.binary(max_size=4),
    st.binary(max_size=8),
    st.none() | st.dictionaries(st.text("abc", max_size=2), st.binary(max_size=3), max_size=2),
    st.none() | st.integers(NOW_US - 10, NOW_US + 10),
)
RECORDS = st.lists(RECORD, min_size=1, max_size=40)
STARTS = st.sets(st.integers(1, RING - 1), max_size=5).map(lambda starts: [0, *sorted(starts)])


def in_lists(records: list[Given]) -> ProducerBatch:
    """As `send` adds records."""
    batch = ProducerBatch(7, 1.0, 31.0, NOW_US)
    for record in records:
        if record.key is not None:
            batch.pad_keys().append(record.key)
        batch.values.append(record.value)
        if record.headers is not None:
            batch.add_headers(record.headers)
        if record.timestamp is not None:
            batch.add_timestamp(record.timestamp)
        batch.size += 22 + len(record.value) + len(record.key or b"")
    batch.count = len(records)
    return batch


def in_table(records: list[Given]) -> ProducerBatch:
    """As `send_table` adds them: a slice of a larger table."""
    columns: dict[str, Any] = {
        "key": pa.array([b"before", *(record.key for record in records)], pa.binary()),
        "value": pa.array([b"before", *(record.value for record in records)], pa.binary()),
        "timestamp": pa.array([None, *(record.timestamp for record in records)], pa.int64()),
        "headers": pa.array(
            [None, *(None if record.headers is None else list(record.headers.items()) for record in records)],
            pa.map_(pa.string(), pa.binary()),
        ),
    }
    batch = ProducerBatch(7, 1.0, 31.0, NOW_US)
    batch.table, batch.count, batch.size = pa.table(columns).slice(1), len(records), 1_000
    return batch


def contents(piece: ProducerBatch) -> list[tuple[bytes | None, bytes, dict[str, bytes], int]]:
    data = b"".join(bytes(part) for part in piece.encode(Codec.NONE, 5, 0))
    return [(each.key, each.value, dict(each.headers), each.timestamp_us) for each in decode_messages(data)]


def range_of(record: Given, starts: list[int]) -> int:
    if record.key is None:
        return 0
    return max(number for number, start in enumerate(starts) if start <= key_hash(record.key))


def check(batch: ProducerBatch, records: list[Given], starts: list[int]) -> list[Piece]:
    size = batch.size
    pieces = cut_batch(batch, starts)
    numbers = [number for number, _ in pieces]
    assert numbers == sorted(set(numbers))
    assert sum(piece.size for _, piece in pieces) == size
    for number, piece in pieces:
        expected = [record.stored for record in records if range_of(record, starts) == number]
        assert piece.count == len(expected) > 0
        assert contents(piece) == expected
        assert (piece.opened_at, piece.deadline) == (1.0, 31.0)
    assert sum(piece.count for _, piece in pieces) == len(records)
    return pieces


@given(records=RECORDS, starts=STARTS, table=st.booleans())
def test_each_range_gets_its_records_once_in_order(records: list[Given], starts: list[int], table: bool) -> None:
    batch = (in_table if table else in_lists)(records)
    pieces = check(batch, records, starts)
    assert (len(pieces) == 1) == (pieces[0].batch is batch), "one range takes the batch as it is"


@given(records=RECORDS, starts=STARTS, later=STARTS)
def test_a_receipt_finds_its_record_in_the_pieces_of_pieces(
    records: list[Given], starts: list[int], later: list[int]
) -> None:
    batch = in_lists(records)
    leaves = [leaf for _, piece in cut_batch(batch, starts) for _, leaf in cut_batch(piece, later)]
    for segment, leaf in enumerate(leaves):
        values = list(leaf.values)
        leaf.renew(segment)
        leaf.settle(100 * segment, None)
        for number in range(len(records)):
            found, at = place_of(batch, number)
            if found is leaf:
                assert values[at] == records[number].value
                assert id_at(batch, number) == MessageId(segment, 100 * segment + at)
