"""A batch that is sent as several buffers is the batch in one piece, for any records and however their table is cut."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.client.producing.open_batch import ProducerBatch
from braid.client.producing.records import COLUMNAR_RECORDS, MANY_RECORDS, as_table, columns
from braid.model.batch.columns import decode_messages, encode_batch
from braid.model.batch.encode import gather_table
from braid.model.batch.header import Codec, renumber, verify
from tests.kits.examples import share

UNHURRIED = settings(deadline=None)
SHORT_BYTES = st.binary(max_size=40)
HEADERS = st.none() | st.dictionaries(st.text(max_size=8), SHORT_BYTES, max_size=3)
RECORD = st.tuples(SHORT_BYTES, st.none() | SHORT_BYTES, st.integers(0, 1 << 40) | st.just(5), HEADERS)
RECORDS = st.lists(RECORD, min_size=1, max_size=40)
NOW_US = 1_700_000_000_000_000


@given(RECORDS, st.booleans(), st.booleans(), st.booleans(), st.integers(0, 9), st.sampled_from(Codec))
@UNHURRIED
def test_the_gathered_buffers_of_a_slice_are_the_batch_of_its_records(
    records: list[Any], keyed: bool, timed: bool, headed: bool, before: int, codec: Codec
) -> None:
    values, keys, times, headers = map(list, zip(*records))
    given_columns: dict[str, Any] = {"values": values}
    arrays = {"value": pa.array(values, pa.binary())}
    if keyed:
        given_columns["keys"] = keys
        arrays["key"] = pa.array(keys, pa.binary())
    if timed:
        given_columns["timestamps"] = times
        arrays["timestamp"] = pa.array(times, pa.int64())
    if headed:
        given_columns["headers"] = headers
        rows = [list((row or {}).items()) for row in headers]
        arrays["headers"] = pa.array(rows, pa.map_(pa.string(), pa.binary()))
    table = pa.table(arrays)
    longer = pa.concat_tables([table] * 3).combine_chunks()
    numbers: dict[str, Any] = {"now_us": NOW_US, "codec": codec, "producer_id": 7, "first_sequence": 3}
    first = len(records) * (before % 3)
    gathered = gather_table(longer.slice(first, len(records)), **numbers)
    assert b"".join(gathered) == encode_batch(**given_columns, **numbers)
    assert all(len(part) == memoryview(part).nbytes for part in gathered), "a frame counts the bytes by len"


@given(st.lists(SHORT_BYTES, min_size=1, max_size=40))
@UNHURRIED
def test_a_gathered_batch_is_renumbered_by_its_first_buffer(values: list[bytes]) -> None:
    gathered = gather_table(pa.table({"value": pa.array(values, pa.binary())}), now_us=NOW_US, producer_id=1)
    front = gathered[0]
    assert isinstance(front, bytearray)
    renumber(front, 9, 17)
    whole = bytearray().join(gathered)
    assert whole == encode_batch(values, now_us=NOW_US, producer_id=9, first_sequence=17)
    assert [message.value for message in decode_messages(whole)] == values
    assert verify(whole).producer_id == 9


@given(SHORT_BYTES, st.none() | SHORT_BYTES, st.integers(0, 1 << 40), st.sampled_from(Codec))
@UNHURRIED
def test_a_lone_record_is_encoded_as_it_is_among_others(
    value: bytes, key: bytes | None, sequence: int, codec: Codec
) -> None:
    batch = ProducerBatch(0, 0.0, 1.0, NOW_US)
    if key is not None:
        batch.pad_keys().append(key)
    batch.values.append(value)
    numbers: dict[str, Any] = {"now_us": NOW_US, "codec": codec, "producer_id": 7, "first_sequence": sequence}
    general = encode_batch([value], keys=[key], headers=[None], **numbers)  # naming headers takes the general way
    assert b"".join(batch.encode(codec, 7, sequence)) == general


@given(
    st.lists(st.tuples(st.none() | SHORT_BYTES, st.binary(max_size=600)), max_size=60),
    st.booleans(),
    st.integers(1, 1 << 16),
    st.integers(1, 3 * COLUMNAR_RECORDS),
)
@settings(UNHURRIED, max_examples=share(50))
def test_the_slices_of_many_records_are_the_records(
    some: list[tuple[bytes | None, bytes]], keyed: bool, batch_bytes: int, times: int
) -> None:
    records: list[Any] = (some if keyed else [value for _, value in some]) * times
    records = records[: 2 * MANY_RECORDS // 16]
    slices = list(columns(iter(records), batch_bytes))
    assert [value for values, _ in slices for value in values] == [each[1] if keyed else each for each in records]
    if keyed:
        assert [key for _, keys in slices for key in keys or ()] == [key for key, _ in records]
    for values, keys in slices:
        table = as_table(values, keys)
        assert table["value"].to_pylist() == values
