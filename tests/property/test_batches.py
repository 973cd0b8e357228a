"""Every fast way of the batch format against a slow one, for any records that Hypothesis can think of."""

import subprocess
import sys
from itertools import pairwise
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.model.batch.columns import decode_arrow, decode_messages, encode_batch, encode_table, largest_body
from braid.model.batch.header import MAX_OFFSET, Codec, stamp, verify
from braid.model.hashing import key_hash
from braid.model.ids import Epoch, Offset
from braid.model.message import Message
from tests.kits.examples import share
from tests.property import fuzz_batches

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
SHORT_BYTES = st.binary(max_size=40)
HEADERS = st.dictionaries(st.text(max_size=8), SHORT_BYTES, max_size=3)
RECORD = st.tuples(SHORT_BYTES, st.none() | SHORT_BYTES, INT64 | st.just(5), st.none() | HEADERS)
RECORDS = st.lists(RECORD, min_size=1, max_size=40)
WHICH = st.tuples(st.booleans(), st.booleans(), st.booleans())
UNHURRIED = settings(deadline=None)
"""How long an example takes is the machine's business."""
NOW_US = 1_700_000_000_000_000

Records = list[tuple[bytes, bytes | None, int, dict[str, bytes] | None]]


def columns_of(records: Records, which: tuple[bool, bool, bool]) -> dict[str, Any]:
    values, keys, timestamps, headers = map(list, zip(*records))
    optional = zip(("keys", "timestamps", "headers"), (keys, timestamps, headers), which)
    return {"values": values, **{name: column for name, column, wanted in optional if wanted}}


def expected_messages(columns: dict[str, Any], base_offset: int) -> list[Message]:
    """The records, one by one, as the definition of what any way of encoding must give back."""
    messages = []
    for row, value in enumerate(columns["values"]):
        key = columns["keys"][row] if "keys" in columns else None
        timestamp = columns["timestamps"][row] if "timestamps" in columns else NOW_US
        headers = (columns["headers"][row] if "headers" in columns else None) or {}
        messages.append(Message(value, key, timestamp, base_offset + row, headers))
    return messages


@given(RECORDS, WHICH, st.sampled_from(Codec), st.integers(0, MAX_OFFSET - 40))
@UNHURRIED
def test_any_records_come_back_as_they_were(
    records: Records, which: tuple[bool, bool, bool], codec: Codec, base_offset: int
) -> None:
    columns = columns_of(records, which)
    batch = encode_batch(**columns, now_us=NOW_US, codec=codec)
    header = stamp(
        batch, verify(batch), Offset(base_offset), append_time=0, epoch=Epoch(1), incarnation=9, commit_lag=0
    )
    expected = expected_messages(columns, base_offset)
    assert [as_tuple(message) for message in decode_messages(batch)] == list(map(as_tuple, expected))
    table = decode_arrow(batch)
    hashes = [0 if message.key is None else key_hash(message.key) for message in expected]
    assert table.column("offset").to_pylist() == [message.offset for message in expected]
    assert table.column("key").to_pylist() == [message.key for message in expected]
    assert table.column("value").to_pylist() == [message.value for message in expected]
    assert table.column("timestamp").cast(pa.int64()).to_pylist() == [message.timestamp_us for message in expected]
    assert table.column("headers").to_pylist() == [list(message.headers.items()) for message in expected]
    assert table.column("key_hash").to_pylist() == hashes
    assert header.count == len(expected)
    assert header.min_timestamp == min(message.timestamp_us for message in expected)
    assert header.max_timestamp == max(message.timestamp_us for message in expected)
    keyed = [found for found, message in zip(hashes, expected) if message.key is not None]
    assert (header.min_key_hash, header.max_key_hash) == ((min(keyed), max(keyed)) if keyed else (0xFFFF, 0))


def as_tuple(message: Message) -> tuple[object, ...]:
    return message.value, message.key, message.timestamp_us, message.offset, dict(message.headers)


@given(SHORT_BYTES, st.none() | SHORT_BYTES, INT64, st.integers(0, 1 << 32))
@UNHURRIED
def test_the_short_way_of_a_batch_of_one_writes_the_bytes_of_the_general_way(
    value: bytes, key: bytes | None, timestamp: int, sequence: int
) -> None:
    arguments: dict[str, Any] = {"now_us": timestamp, "producer_id": 9, "first_sequence": sequence}
    short = encode_batch([value], keys=[key], **arguments)
    general = encode_batch([value], keys=[key], headers=[None], **arguments)  # naming headers takes the general way
    assert short == general
    assert (
        encode_batch([value], keys=[key], timestamps=[timestamp], producer_id=9, first_sequence=sequence, now_us=0)
        == short
    )
    body = decode_arrow(short)
    assert decode_messages(short) == [Message(body["value"][0].as_py(), body["key"][0].as_py(), timestamp, 0)]


@given(RECORDS, WHICH, st.lists(st.integers(0, 40), max_size=4), st.integers(0, 5), st.integers(0, 5), st.booleans())
@UNHURRIED
def test_a_table_however_it_is_cut_gives_the_bytes_that_lists_give(
    records: Records, which: tuple[bool, bool, bool], cuts: list[int], before: int, behind: int, null_maps: bool
) -> None:
    columns = columns_of(records, which)
    types = {"values": pa.binary(), "keys": pa.binary(), "timestamps": pa.timestamp("us", tz="UTC")}
    names = {"values": "value", "keys": "key", "timestamps": "timestamp"}
    arrays = {names[name]: pa.array(columns[name], kind) for name, kind in types.items() if name in columns}
    if "headers" in columns:
        rows = [None if row is None and null_maps else list((row or {}).items()) for row in columns["headers"]]
        arrays["headers"] = pa.array(rows, pa.map_(pa.string(), pa.binary()))
    table = pa.table(arrays)
    edges = sorted({0, len(records), *(cut for cut in cuts if cut < len(records))})
    pieces = [table.slice(start, end - start) for start, end in pairwise(edges)]
    cut = pa.concat_tables([table.slice(0, before), *pieces, table.slice(0, behind)])
    cut = cut.slice(min(before, len(records)), len(records))
    assert encode_table(cut, now_us=NOW_US) == encode_batch(**columns, now_us=NOW_US)


@given(RECORDS, WHICH)
@UNHURRIED
def test_the_size_bound_is_never_below_the_size(records: Records, which: tuple[bool, bool, bool]) -> None:
    columns = columns_of(records, which)
    pairs = [pair for row in columns.get("headers", ()) for pair in (row or {}).items()]
    payload = sum(map(len, columns["values"])) + sum(len(key or b"") for key in columns.get("keys", ()))
    payload += sum(len(name.encode()) + len(value) for name, value in pairs)
    size = verify(encode_batch(**columns, now_us=NOW_US)).raw_length
    assert size <= largest_body(len(records), payload, len(pairs))


@given(st.binary(max_size=400))
@settings(UNHURRIED, max_examples=share(300))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    fuzz_batches.read_everything(data)


@given(RECORDS, st.sampled_from(Codec), st.randoms(use_true_random=False))
@settings(UNHURRIED, max_examples=share(300))
def test_any_damage_under_right_checksums_is_read_or_refused(records: Records, codec: Codec, chance: Any) -> None:
    batch = encode_batch(**columns_of(records, (True, True, True)), now_us=NOW_US, codec=codec)
    fuzz_batches.read_everything(chance.choice(fuzz_batches.KINDS)(chance, batch))


def test_thousands_of_damaged_batches_crash_nothing() -> None:
    command = [sys.executable, fuzz_batches.__file__, "--rounds", "8000", "--seed", "1"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert result.stdout.startswith("8000 damaged batches")
