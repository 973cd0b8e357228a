import datetime
import json
import re
import struct
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from crc32c import crc32c

from braid.model.batch import body, draft
from braid.model.batch.codec import compress, decompress
from braid.model.batch.columns import (
    COLUMNS,
    RECORD_SCHEMA,
    decode_arrow,
    decode_messages,
    encode_batch,
    encode_table,
    largest_body,
    message_lists,
)
from braid.model.batch.header import HEADER_BYTES, NO_KEYS, Codec, Flag, control_batch, parse_header, stamp, verify
from braid.model.errors import BatchCorrupt, BatchTooLarge, BatchTruncated, BatchUnsupported, InvalidArgument
from braid.model.hashing import key_hash
from braid.model.ids import Epoch, Offset
from braid.model.message import Message
from tests.vectors import make_record_batches as vectors

NOW_US = 1_700_000_000_000_000


def with_body(batch: bytearray, at: int, kind: str, value: int) -> bytearray:
    """The batch with one number of its body changed, under checksums that are right."""
    out = bytearray(batch)
    struct.pack_into(kind, out, HEADER_BYTES + at, value)
    return repaired(out)


def repaired(out: bytearray) -> bytearray:
    struct.pack_into("<I", out, 20, crc32c(memoryview(out)[HEADER_BYTES:]))
    struct.pack_into("<I", out, 92, crc32c(memoryview(out)[:92]))
    return out


def test_records_come_back_as_messages_in_order_with_their_offsets() -> None:
    batch = encode_batch(
        [b"a", b"", b"ccc"],
        keys=[b"k", None, b""],
        timestamps=[7, -3, 9],
        headers=[None, {"x": b"1", "y": "ü"}, {}],
        now_us=NOW_US,
    )
    stamp(batch, verify(batch), Offset(100), append_time=1, epoch=Epoch(1), incarnation=9, commit_lag=0)
    assert decode_messages(batch) == [
        Message(b"a", b"k", 7, 100),
        Message(b"", None, -3, 101, {"x": b"1", "y": "ü".encode()}),
        Message(b"ccc", b"", 9, 102),
    ]


def test_records_come_back_as_arrow_with_the_published_schema() -> None:
    batch = encode_batch([b"a", b"b"], keys=[b"alpha", None], headers=[{"x": b"1"}, None], now_us=NOW_US)
    records = decode_arrow(batch)
    assert records.schema == RECORD_SCHEMA
    when = datetime.datetime(2023, 11, 14, 22, 13, 20, tzinfo=datetime.UTC)
    assert records.to_pylist() == [
        {"offset": 0, "key": b"alpha", "value": b"a", "timestamp": when, "headers": [("x", b"1")], "key_hash": 0xA9C0},
        {"offset": 1, "key": None, "value": b"b", "timestamp": when, "headers": [], "key_hash": 0},
    ]


def test_a_messages_time_is_also_a_datetime() -> None:
    message = decode_messages(encode_batch([b"a"], now_us=NOW_US))[0]
    assert message.timestamp == datetime.datetime(2023, 11, 14, 22, 13, 20, tzinfo=datetime.UTC)
    assert not message.headers


def test_arrow_stands_on_the_batches_own_memory() -> None:
    batch = encode_batch(
        [b"value-%d" % number for number in range(50)],
        keys=[b"key" if number % 2 else None for number in range(50)],
        timestamps=list(range(50)),
        headers=[{"h": b"v"}] * 50,
        now_us=NOW_US,
    )
    first = pa.py_buffer(batch).address
    records = decode_arrow(batch, columns=[name for name in COLUMNS if name != "offset"])
    for column in records.columns:
        for buffer in column.buffers():
            assert buffer is None or first <= buffer.address < first + len(batch)


def test_a_batch_at_an_odd_address_is_read_from_an_aligned_copy() -> None:
    values = [b"value-%d" % number for number in range(50)]
    shifted = memoryview(b"xyz" + encode_batch(values, timestamps=range(50), now_us=NOW_US))
    records = decode_arrow(shifted, position=3)
    assert records.column("value").to_pylist() == values
    assert all(buffer is None or buffer.address % 8 == 0 for buffer in records.column("timestamp").buffers())
    assert [message.timestamp_us for message in decode_messages(shifted, position=3)] == list(range(50))


def test_only_the_columns_asked_for_are_made() -> None:
    batch = encode_batch([b"a", b"b"], now_us=NOW_US)
    assert decode_arrow(batch, columns=("value", "offset")).to_pydict() == {"value": [b"a", b"b"], "offset": [0, 1]}
    for columns in (("value", "colour"), ()):
        with pytest.raises(InvalidArgument, match="a batch has offset, key, value"):
            decode_arrow(batch, columns=columns)


@pytest.mark.parametrize("flag", list(Flag))
def test_control_batches_decode_to_no_records(flag: Flag) -> None:
    assert decode_messages(control_batch(flag)) == []
    assert decode_arrow(control_batch(flag)).num_rows == 0
    assert decode_arrow(control_batch(flag)).schema == RECORD_SCHEMA


def test_hashes_in_the_header_span_the_keyed_records_only() -> None:
    keys = [b"key-0", None, b"key-1"]
    header = verify(encode_batch([b""] * 3, keys=keys, now_us=NOW_US))
    assert (header.min_key_hash, header.max_key_hash) == (key_hash(b"key-1"), key_hash(b"key-0"))
    for none in (None, [None] * 3):
        header = verify(encode_batch([b""] * 3, keys=none, now_us=NOW_US))
        assert (header.min_key_hash, header.max_key_hash) == NO_KEYS


def test_equal_timestamps_take_no_room() -> None:
    values = [b"x"] * 100
    same = encode_batch(values, timestamps=[5] * 100, now_us=NOW_US)
    assert same == encode_batch(values, now_us=5)
    assert len(encode_batch(values, timestamps=[5] * 99 + [6], now_us=NOW_US)) == len(same) + 800


def test_a_batch_of_one_without_a_key_is_its_value_and_152_bytes() -> None:
    assert len(encode_batch([b"12345678"], now_us=NOW_US)) == 8 + 152


# --- compression


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
def test_compressed_batches_are_smaller_and_hold_the_same(codec: Codec) -> None:
    values = [b"the same again and again %d" % number for number in range(1000)]
    plain = encode_batch(values, now_us=NOW_US)
    packed = encode_batch(values, now_us=NOW_US, codec=codec)
    assert verify(packed).codec == codec
    assert len(packed) < len(plain) / 2
    assert len(packed) % 8 == 0
    assert decode_messages(packed) == decode_messages(plain)
    assert decode_arrow(packed).equals(decode_arrow(plain))


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
def test_a_body_that_hardly_shrinks_is_stored_as_it_is(codec: Codec) -> None:
    noise = [np.random.default_rng(1).bytes(1000)]
    assert encode_batch(noise, now_us=NOW_US, codec=codec) == encode_batch(noise, now_us=NOW_US)


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
@pytest.mark.parametrize("wrong", [-9, -1, 1, 8, 4096, 1 << 20])
def test_a_body_that_decompresses_to_another_length_is_corrupt(codec: Codec, wrong: int) -> None:
    raw = b"hello world " * 100
    packed = compress(codec, raw)
    assert packed is not None
    stored = memoryview(b"".join(map(bytes, packed)))
    assert decompress(codec, stored, len(raw)) == raw
    with pytest.raises(BatchCorrupt):
        decompress(codec, stored, len(raw) + wrong)


def test_a_decompression_bomb_is_refused_before_it_is_opened() -> None:
    with pytest.raises(BatchTooLarge):
        decompress(Codec.ZSTD, memoryview(bytes(100)), 1 << 40)


# --- limits


def test_too_many_records_are_refused() -> None:
    with pytest.raises(BatchTooLarge, match="make several batches"):
        encode_batch([b""] * ((1 << 22) + 1), now_us=NOW_US)


@pytest.mark.parametrize("codec", list(Codec))
def test_too_many_bytes_are_refused_before_they_are_copied(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(draft, "joined")
    value = bytes(1 << 20)
    if codec is Codec.NONE:
        with pytest.raises(BatchTooLarge, match="split the batch"):
            encode_batch([value] * 40, now_us=NOW_US)
    with pytest.raises(BatchTooLarge, match="split the batch"):
        encode_batch([value] * 5000, now_us=NOW_US, codec=codec)
    with pytest.raises(BatchTooLarge, match="split the batch"):
        encode_batch(
            [b"x", b"y"], keys=[memoryview(value)] * 2, headers=[{"h": value * 130}] * 2, now_us=1, codec=codec
        )


def test_one_value_above_the_limit_is_refused_and_one_at_the_limit_is_not() -> None:
    fits = bytes((32 << 20) - 56)
    assert verify(encode_batch([fits], now_us=NOW_US)).body_length == 32 << 20
    with pytest.raises(BatchTooLarge):
        encode_batch([fits + b"x"], now_us=NOW_US)


def test_a_large_batch_that_compresses_is_taken() -> None:
    values = [bytes(1 << 20)] * 40
    header = verify(encode_batch(values, now_us=NOW_US, codec=Codec.ZSTD))
    assert header.raw_length > 40 << 20 > 1 << 20 > header.body_length


def test_the_size_bound_is_known_without_encoding() -> None:
    values, keys = [b"x" * 33] * 77, [b"key"] * 77
    headers = [{"ab": b"c"}] * 77
    batch = encode_batch(values, keys=keys, timestamps=range(77), headers=headers, now_us=NOW_US)
    bound = largest_body(77, 77 * (33 + 3 + 3), header_entries=77)
    assert bound - 150 < verify(batch).raw_length <= bound


# --- wrong arguments


@pytest.mark.parametrize(
    "arguments",
    [
        {"values": []},
        {"values": [b"a", "b"]},
        {"values": ["a"]},
        {"values": [None]},
        {"values": [b"a", None]},
        {"values": [b"a", 7]},
        {"values": [b"a", b"b"], "keys": [b"a"]},
        {"values": [b"a", b"b"], "keys": [b"a", "b"]},
        {"values": [b"a", b"b"], "keys": [None, "b"]},
        {"values": [b"a", b"b"], "keys": [7, 8]},
        {"values": [b"a"], "keys": ["a"]},
        {"values": [b"a"], "keys": [7]},
        {"values": [b"a", b"b"], "timestamps": [1]},
        {"values": [b"a", b"b"], "timestamps": [1, 1 << 63]},
        {"values": [b"a", b"b"], "timestamps": [1, "x"]},
        {"values": [b"a"], "timestamps": [1 << 63]},
        {"values": [b"a"], "now_us": 1 << 63},
        {"values": [b"a", b"b"], "now_us": 1 << 63},
        {"values": [b"a", b"b"], "headers": [{}]},
        {"values": [b"a"], "headers": [{7: b"x"}]},
        {"values": [b"a"], "headers": [{"x": None}]},
        {"values": [b"a"], "headers": [{"x": 7}]},
        {"values": [b"a"], "headers": [{"\ud800": b""}]},
        {"values": [b"a", memoryview(array("q", [1, 2]))]},
        {"values": [memoryview(array("q", [1, 2]))]},
    ],
)
def test_what_cannot_be_a_batch_is_refused_with_a_clear_error(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        encode_batch(**{"now_us": NOW_US, **arguments})


# --- tables

ROWS: dict[str, Any] = {
    "values": [b"a", b"", b"ccc", b"dddd", b"e"],
    "keys": [b"k1", None, b"", b"k2", None],
    "timestamps": [1_000_000, 2_000_000, 3_000_000, 4_000_000, 5_000_000],
    "headers": [{"x": b"1"}, None, {"y": b"", "z": b"3"}, None, {"x": b"5"}],
}


def row_table(binary: pa.DataType, time: pa.DataType) -> pa.Table:
    seconds = pa.array([pair // 1_000_000 for pair in ROWS["timestamps"]], pa.int64())
    return pa.table(
        {
            "headers": pa.array(
                [list((row or {}).items()) for row in ROWS["headers"]], pa.map_(pa.string(), pa.binary())
            ),
            "key": pa.array(ROWS["keys"], pa.binary()).cast(binary),
            "value": pa.array(ROWS["values"], pa.binary()).cast(binary),
            "timestamp": seconds.cast(pa.timestamp("s")).cast(time),
        }
    )


@pytest.mark.parametrize("time", [pa.timestamp("s"), pa.timestamp("ns"), pa.timestamp("ms", tz="Europe/Rome")])
@pytest.mark.parametrize(
    "binary",
    [
        pa.binary(), pa.large_binary(), pa.binary_view(), pa.string(), pa.large_string(), pa.string_view(),
        pa.dictionary(pa.int32(), pa.binary()),
    ],
)  # fmt: skip
def test_a_table_of_any_binary_and_time_type_gives_the_bytes_that_lists_give(
    binary: pa.DataType, time: pa.DataType
) -> None:
    table = row_table(binary, time)
    expected = encode_batch(**ROWS, now_us=NOW_US)
    assert encode_table(table, now_us=NOW_US) == expected
    assert encode_table(table.combine_chunks().to_batches()[0], now_us=NOW_US) == expected
    pieces = pa.concat_tables([table.slice(3), table.slice(0, 2), table.slice(2), table])
    assert encode_table(pieces.slice(2, 5), now_us=NOW_US) == expected


def test_an_integer_column_of_timestamps_is_microseconds() -> None:
    table = pa.table({"value": pa.array(["a", "b"]), "timestamp": pa.array([5, None], pa.int64())})
    assert encode_table(table, now_us=9) == encode_batch([b"a", b"b"], timestamps=[5, 9], now_us=0)


def test_null_keys_and_null_maps_may_hide_bytes_that_are_not_taken() -> None:
    visible = pa.array([b"a", b"hidden", b"c"], pa.binary())
    keys = pa.Array.from_buffers(pa.binary(), 3, [pa.py_buffer(b"\x05"), *visible.buffers()[1:]])
    maps = pa.array([[("x", b"1")], [("hidden", b"2")], []], pa.map_(pa.string(), pa.binary()))
    buffers = [pa.py_buffer(b"\x05"), maps.buffers()[1]]
    headers = pa.Array.from_buffers(maps.type, 3, buffers, children=[maps.values])
    table = pa.table({"key": keys, "value": visible, "headers": headers})
    expected = encode_batch(
        [b"a", b"hidden", b"c"], keys=[b"a", None, b"c"], headers=[{"x": b"1"}, None, None], now_us=NOW_US
    )
    assert encode_table(table, now_us=NOW_US) == expected


def test_string_values_of_headers_become_bytes() -> None:
    headers = pa.array([[("x", "ü")], []], pa.map_(pa.string(), pa.string()))
    table = pa.table({"value": pa.array([b"a", b"b"]), "headers": headers})
    assert encode_table(table, now_us=1) == encode_batch([b"a", b"b"], headers=[{"x": "ü"}, None], now_us=1)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"key": [b"a"]}, "must be value"),
        ({"value": [b"a"], "colour": [b"b"]}, "must be value"),
        ({"value": [7]}, "must be binary or string"),
        ({"value": [b"a", None]}, "1 values are null"),
        ({"value": [b"a"], "key": [1.5]}, "must be binary or string"),
        ({"value": [b"a"], "timestamp": ["now"]}, "must be timestamp or int64"),
        ({"value": [b"a"], "timestamp": pa.array([1 << 60], pa.timestamp("s"))}, "does not fit"),
        ({"value": [b"a"], "headers": [b"x"]}, "cannot become map"),
        ({"value": [b"a"], "headers": pa.array([[("x", None)]], pa.map_(pa.string(), pa.binary()))}, "may be empty"),
        ({"value": pa.array([], pa.binary())}, "at least one record"),
    ],
)
def test_a_table_that_cannot_be_a_batch_is_refused_with_a_clear_error(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        encode_table(pa.table(columns), now_us=NOW_US)


# --- bad bodies


@pytest.mark.parametrize("slot", range(12))
@pytest.mark.parametrize("change", [-1, 1, 4, 8, 0x7FFF_FFF0])
@pytest.mark.parametrize("count", [1, 9])
def test_a_wrong_length_in_the_directory_is_corrupt(slot: int, change: int, count: int) -> None:
    keys = [b"key-one", *[None] * (count - 1)]
    batch = encode_batch(
        [b"seven77"] * count, keys=keys, timestamps=range(count), headers=[{"h": b"v"}] * count, now_us=1
    )
    length = struct.unpack_from("<I", batch, HEADER_BYTES + 4 * slot)[0]
    damaged = with_body(batch, 4 * slot, "<I", (length + change) & 0xFFFF_FFFF)
    for decode in (decode_messages, decode_arrow):
        with pytest.raises(BatchCorrupt):
            decode(damaged)


@pytest.mark.parametrize("values", [[b"hello"], [b"hello", b"you"], [b"hello"] * 100])
@pytest.mark.parametrize("at", [0, 1, -1])
@pytest.mark.parametrize("wild", [-1, 1, 6, 1000, 0x7FFF_FFFF, -0x8000_0000])
def test_a_wild_offset_is_corrupt(values: list[bytes], at: int, wild: int) -> None:
    batch = encode_batch(values, now_us=NOW_US)
    damaged = with_body(batch, 48 + 4 * (at % (len(values) + 1)), "<i", wild)
    for decode in (decode_messages, decode_arrow):
        if len(values) > 1 and at == 1 and 0 <= wild <= 6:
            assert len(decode(damaged)) == len(values)  # another cut through the same bytes is a valid one
        else:
            with pytest.raises(BatchCorrupt):
                decode(damaged)


def test_header_names_that_are_not_utf8_are_corrupt() -> None:
    batch = encode_batch([b"v"], headers=[{"name": b"x"}], now_us=NOW_US)
    damaged = repaired(batch.replace(b"name", b"n\xffme"))
    for decode in (decode_messages, decode_arrow):
        with pytest.raises(BatchCorrupt, match="header"):
            decode(damaged)


def test_a_missing_timestamp_column_needs_one_time_in_the_header() -> None:
    batch = encode_batch([b"a", b"b"], now_us=5)
    struct.pack_into("<q", batch, 56, 6)
    with pytest.raises(BatchCorrupt, match="timestamps are absent"):
        decode_arrow(repaired(batch))


def test_an_uncompressed_body_has_one_length() -> None:
    batch = encode_batch([b"a"], now_us=5)
    struct.pack_into("<I", batch, 16, 128)
    with pytest.raises(BatchCorrupt, match="says it has 128"):
        decode_arrow(repaired(batch))


def test_a_schema_from_the_future_is_unsupported() -> None:
    batch = encode_batch([b"a"], now_us=5)
    struct.pack_into("<I", batch, 8, 1)
    with pytest.raises(BatchUnsupported, match="schema 1"):
        decode_arrow(repaired(batch))


def test_a_body_that_is_not_all_there_is_truncated_even_when_the_header_is_given() -> None:
    batch = encode_batch([b"a"], now_us=5)
    for decode in (decode_messages, decode_arrow):
        with pytest.raises(BatchTruncated):
            decode(batch[:-1], parse_header(batch))


# --- what another producer may write: bodies that are built by hand


def foreign_body(*, entries: int = 1, lists: bool = True, valid: bool | None = None) -> bytearray:
    one = np.ones(1, np.int64)
    hand_made = draft.Draft(1)
    if valid is not None:
        hand_made.add_validity(np.array([valid]))
        hand_made.add_binary(body.KEY_OFFSETS, one, [b"k"])
    hand_made.add_binary(body.VALUE_OFFSETS, one, [b"v"])
    if valid is not None:
        hand_made.add_array(body.KEY_HASHES, np.zeros(1, np.uint16))
    if lists:
        hand_made.add_lists(body.HEADER_LISTS, one)
    if lists or entries:
        hand_made.add_binary(body.HEADER_KEY_OFFSETS, one, [b"n"])
        hand_made.add_binary(body.HEADER_VALUE_OFFSETS, np.array([1] + [0] * (entries - 1)), [b"x"])
    return hand_made.finish(Codec.NONE, 0, 0)


@pytest.mark.parametrize(("valid", "key"), [(True, b"k"), (False, None)])
def test_one_record_may_say_by_a_bit_that_it_has_no_key(valid: bool, key: bytes | None) -> None:
    for entries in (0, 1):
        batch = foreign_body(entries=entries, lists=bool(entries), valid=valid)
        assert decode_messages(batch)[0].key == key
        assert decode_arrow(batch).column("key").to_pylist() == [key]


def test_header_columns_that_do_not_belong_together_are_corrupt() -> None:
    assert decode_messages(foreign_body())[0].headers == {"n": b"x"}
    for damaged in (foreign_body(entries=2), foreign_body(lists=False)):
        with pytest.raises(BatchCorrupt):
            decode_messages(damaged)


# --- vectors


def test_the_published_vectors_are_what_this_build_writes() -> None:
    published = json.loads((vectors.FOLDER / "vectors.json").read_text(encoding="utf-8"))
    written = vectors.vectors()
    assert published["key_hashes"] == written["key_hashes"]
    for old, new in zip(published["batches"], written["batches"], strict=True):
        assert old["records"] == new["records"]
        if old["header"]["codec"] == Codec.NONE:
            assert old == new
            assert (vectors.FOLDER / old["file"]).read_bytes() == vectors.batches()[Path(old["file"]).stem][1]


def test_the_published_vectors_are_read_as_described() -> None:
    for vector in json.loads((vectors.FOLDER / "vectors.json").read_text(encoding="utf-8"))["batches"]:
        batch = (vectors.FOLDER / vector["file"]).read_bytes()
        assert vectors.description(Path(vector["file"]).stem, vector["about"], batch) == vector
        assert len(decode_messages(batch)) == len(vector["records"])


def test_the_format_pages_worked_example_is_the_published_vector() -> None:
    page = (vectors.FOLDER.parents[2] / "docs/formats/record-batch.md").read_text(encoding="utf-8")
    rows = re.findall(r"^    [0-9a-b]0  ((?:[0-9a-f]{2} {1,2})+) ", page, re.MULTILINE)
    assert bytes.fromhex("".join(rows)) == (vectors.FOLDER / "one-keyed.batch").read_bytes()


def test_whoever_only_moves_batches_does_not_load_arrow() -> None:
    code = "import sys, braid.model.batch.header; sys.exit('pyarrow' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("values", [[b"a"], [b"a", b"b"]])
def test_a_time_that_is_no_whole_number_is_refused_at_once(values: list[bytes]) -> None:
    with pytest.raises(InvalidArgument, match="whole microseconds"):
        encode_batch(values, now_us=1.5e15)  # type: ignore[arg-type]


def test_a_codec_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="'zstd' is no codec"):
        encode_batch([b"a" * 1_000] * 10, now_us=0, codec="zstd")  # type: ignore[arg-type]


def test_records_with_very_many_headers_become_few_messages_at_a_time() -> None:
    headers = [{f"name-{number}": b"%d" % record for number in range(1_000)} for record in range(200)]
    batch = encode_batch([b""] * 200, now_us=NOW_US, headers=headers)
    opened = body.Body(batch, verify(batch))
    opened.check()
    lists = [*message_lists(opened, first=3)]
    assert [len(messages) for messages in lists] == [65, 65, 65, 2], "65,536 headers at a time, whole records"
    assert [message.headers for messages in lists for message in messages] == headers[3:]


def test_a_record_with_more_headers_than_a_list_may_have_is_decoded_whole() -> None:
    many = {f"name-{number}": b"%d" % number for number in range(150_000)}
    batch = encode_batch([b"", b"", b""], now_us=NOW_US, headers=[{"a": b"1"}, many, {"b": b"2"}])
    assert [message.headers for message in decode_messages(batch)] == [{"a": b"1"}, many, {"b": b"2"}]
