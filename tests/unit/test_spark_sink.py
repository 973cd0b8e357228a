"""What the Spark sink decides without Spark: options, columns, blocks, order, who a task is."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from itertools import pairwise
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from braid.model.errors import InvalidArgument
from braid.spark.sink import rows as sink_rows
from braid.spark.sink.options import SinkOptions
from braid.spark.sink.rows import BLOCK_BYTES, BLOCK_ROWS, by_content, checked, cut_blocks, row_bytes
from braid.spark.sink.sink import TaskCommit, check_columns, check_messages, micro_batch, stream_writer
from braid.spark.sink.task import _by_topic, blocks_of
from tests.kits.examples import share

# ── options ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def parsed(streaming: bool = False, **given: str) -> SinkOptions:
    return SinkOptions.parse(given, streaming=streaming)


def test_options_are_taken_in_any_case_with_defaults() -> None:
    options = parsed(TOPIC="orders", Compression="ZSTD", TxnAppId="etl", txnversion="7", ORDERING="content", tls="true")
    assert options.topic == "public/default/orders"
    assert (options.compression, options.txn_app, options.txn_version) == ("zstd", "etl", 7)
    assert (options.ordering, options.tls) == ("content", True)
    plain = parsed()
    assert (plain.topic, plain.compression, plain.txn_app, plain.ordering) == ("", None, "", "arrival")


def test_what_spark_adds_by_itself_is_no_unknown_option() -> None:
    assert parsed(streaming=True, topic="orders", checkpointLocation="/tmp/x").topic == "public/default/orders"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"topik": "orders"}, "option topik is unknown: did you mean topic"),
        ({"startingOffsets": "latest"}, "option startingOffsets is unknown"),
        ({"topic": "a/b"}, "option topic: "),
        ({"url": "http://x"}, "option url: "),
        ({"timeout": "soon"}, "option timeout is 'soon'"),
        ({"compression": "brotli"}, "option compression is 'brotli': it must be none, lz4 or zstd"),
        ({"verifyInput": "no"}, "option verifyInput is 'no': it must be true or false"),
        ({"ordering": "random"}, "option ordering is 'random': it must be arrival or content"),
        ({"txnAppId": "etl"}, "option txnAppId was given alone"),
        ({"txnVersion": "1"}, "option txnVersion was given alone"),
        ({"txnAppId": "etl", "txnVersion": "-1"}, "option txnVersion is '-1'"),
        ({"txnAppId": "etl", "txnVersion": str(1 << 32)}, "option txnVersion is '4294967296'"),
        ({"txnAppId": "", "txnVersion": "1"}, "option txnAppId is ''"),
    ],
)
def test_a_wrong_option_is_named(given: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text.replace("(", r"\(")):
        SinkOptions.parse({"topic": "orders", **given}, streaming=False)


def test_a_streaming_query_has_its_own_version() -> None:
    with pytest.raises(InvalidArgument, match="option txnAppId was given: a streaming query writes under its own id"):
        parsed(streaming=True, topic="orders", txnAppId="etl", txnVersion="1")


# ── columns ──────────────────────────────────────────────────────────────────────────────────────────────────────────


TYPES: dict[str, DataType] = {
    "binary": BinaryType(),
    "string": StringType(),
    "int": IntegerType(),
    "long": LongType(),
    "timestamp": TimestampType(),
    "timestamp_ntz": TimestampNTZType(),
    "map<string,binary>": MapType(StringType(), BinaryType()),
    "map<string,string>": MapType(StringType(), StringType()),
    "map<string,int>": MapType(StringType(), IntegerType()),
}


def schema_of(ddl: str) -> StructType:
    """Spark's own parser is in Java."""
    columns = [column.split(" ") for column in ddl.split(", ")]
    return StructType([StructField(name, TYPES[kind]) for name, kind in columns])


@pytest.mark.parametrize(
    "ddl",
    [
        "value binary",
        "value string",
        "key binary, value binary",
        "key string, value string, headers map<string,binary>, timestamp timestamp",
        "headers map<string,string>, value binary, topic string",
    ],
)
def test_columns_of_a_record_are_taken(ddl: str) -> None:
    check_columns(schema_of(ddl), parsed(topic="orders"))


@pytest.mark.parametrize(
    ("ddl", "text"),
    [
        ("key binary", "there is no column value"),
        ("value binary, offset long", r"the column offset \(bigint\) is none of a record's"),
        ("value int", "the column value is int; it must be binary or string: cast it"),
        ("value binary, key long", "the column key is bigint"),
        ("value binary, headers map<string,int>", "the column headers is map<string,int>"),
        ("value binary, timestamp long", "the column timestamp is bigint; it must be timestamp"),
        ("value binary, timestamp timestamp_ntz", "the column timestamp is timestamp_ntz"),
        ("value binary, topic binary", "the column topic is binary"),
        ("value binary, value binary", "one is there twice"),
    ],
)
def test_other_columns_and_types_are_named(ddl: str, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        check_columns(schema_of(ddl), parsed(topic="orders"))


def test_somebody_must_say_where_to_write() -> None:
    with pytest.raises(InvalidArgument, match="option topic is missing, and so is a column topic"):
        check_columns(schema_of("value binary"), parsed())
    check_columns(schema_of("value binary, topic string"), parsed())


def test_a_topic_is_only_added_to() -> None:
    with pytest.raises(InvalidArgument, match="only be added to"):
        stream_writer({"topic": "orders"}, schema_of("value binary"), overwrite=True)


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def batch(values: list[Any], **columns: Any) -> Any:
    return pa.RecordBatch.from_pydict({"value": pa.array(values, pa.binary()), **columns})


def test_text_becomes_bytes_and_headers_of_text_too() -> None:
    rows = pa.RecordBatch.from_pydict(
        {
            "value": pa.array(["ä", ""], pa.string()),
            "key": pa.array(["k", None], pa.large_string()),
            "headers": pa.array([[("a", "ö")], None], pa.map_(pa.string(), pa.string())),
        }
    )
    assert checked(rows, 0, default_topic=True).to_pylist() == [
        {"value": "ä".encode(), "key": b"k", "headers": [("a", "ö".encode())]},
        {"value": b"", "key": None, "headers": None},
    ]


HEADERS = pa.map_(pa.string(), pa.binary())


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (batch([b"a", None]), "the column value is null in row 101 of this partition: a record's value may be empty"),
        (
            batch([b"a"], timestamp=pa.array([None], pa.timestamp("us", "UTC"))),
            "the column timestamp is null in row 100",
        ),
        (
            batch([b"a", b"b"], topic=pa.array(["x", None])),
            "the column topic is null in row 101 .*: name a topic there, or set option topic",
        ),
        (batch([b"a"], headers=pa.array([[("h", None)]], HEADERS)), "the column headers has a null value"),
    ],
)
def test_what_a_record_cannot_have_is_refused_with_its_row(rows: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        checked(rows, 100, default_topic=False)


def test_rows_go_to_their_topics_in_their_order() -> None:
    names = ["a", None, "t/n/b", "a", None]
    table = pa.table({"value": [b"%d" % n for n in range(5)], "topic": pa.array(names, pa.string())})
    found = {topic: rows.column("value").to_pylist() for topic, rows in _by_topic(table, "public/default/rest")}
    assert found == {
        "public/default/a": [b"0", b"3"],
        "public/default/rest": [b"1", b"4"],
        "t/n/b": [b"2"],
    }
    assert all("topic" not in rows.column_names for _, rows in _by_topic(table, "public/default/rest"))


def test_rows_that_spell_one_topic_in_several_ways_keep_their_order() -> None:
    """They may have one key."""
    names = ["a", None, "topic://public/default/a", "b", "public/default/a", None, "a"]
    table = pa.table({"value": [b"%d" % n for n in range(7)], "topic": pa.array(names, pa.string())})
    found = [(topic, rows.column("value").to_pylist()) for topic, rows in _by_topic(table, "public/default/a")]
    assert found == [("public/default/a", [b"0", b"1", b"2", b"4", b"5", b"6"]), ("public/default/b", [b"3"])]


# ── blocks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def sliced(table: Any, random: Random) -> Iterator[Any]:
    """The same rows as Spark may hand them over: in any slices, copied or not, some empty."""
    start = 0
    while start < table.num_rows:
        count = random.choice([0, 1, 2, 7, 100, table.num_rows])
        part = table.slice(start, count)
        yield part if random.random() < 0.5 else pa.table(part.to_pydict(), schema=table.schema)
        start += count


SCHEMA = pa.schema(
    [("key", pa.binary()), ("value", pa.binary()), ("headers", HEADERS), ("timestamp", pa.timestamp("us", "UTC"))]
)
TIME = datetime.datetime(2026, 11, 15, tzinfo=datetime.UTC)
ROW = st.fixed_dictionaries(
    {
        "key": st.none() | st.binary(max_size=3),
        "value": st.binary(max_size=60),
        "headers": st.none() | st.lists(st.tuples(st.sampled_from("ab"), st.binary(max_size=9)), max_size=2),
        "timestamp": st.sampled_from([TIME, TIME + datetime.timedelta(seconds=1)]),
    }
)


@settings(max_examples=share(150))
@given(st.lists(ROW, max_size=120), st.integers(0, 1 << 32), st.integers(1, 40), st.integers(1, 600))
def test_blocks_are_a_function_of_the_rows_alone(
    rows: list[dict[str, Any]], seed: int, block_rows: int, block_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sink_rows, "BLOCK_ROWS", block_rows)
        patch.setattr(sink_rows, "BLOCK_BYTES", block_bytes)
        table = pa.Table.from_pylist(rows, schema=SCHEMA)
        whole = list(cut_blocks([table]))
        random = Random(seed)
        again = list(cut_blocks(sliced(table, random)))
        assert [block.to_pylist() for block in again] == [block.to_pylist() for block in whole]
        assert [row for block in whole for row in block.to_pylist()] == table.to_pylist()
        for block in whole:
            assert 1 <= block.num_rows <= block_rows
            assert block.num_rows == 1 or row_bytes(block).sum() <= block_bytes
        for block, after in pairwise(whole):  # No block ends before it must.
            full = block.num_rows == block_rows
            assert full or row_bytes(block).sum() + row_bytes(after)[0] > block_bytes


def test_the_limits_hold_for_small_rows_and_for_large_ones() -> None:
    small = pa.table({"value": pa.array([b"x"] * (2 * BLOCK_ROWS + 5), pa.binary())})
    assert [block.num_rows for block in cut_blocks([small])] == [BLOCK_ROWS, BLOCK_ROWS, 5]
    large = pa.table({"value": pa.array([b"a", b"x" * (BLOCK_BYTES + 1), b"b", b"c"], pa.binary())})
    assert [block.num_rows for block in cut_blocks([large])] == [1, 1, 2]


TIED_ROW = st.fixed_dictionaries(
    {
        "key": st.sampled_from([None, b"k"]),
        "value": st.sampled_from([b"", b"v"]),
        "headers": st.none() | st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([b"", b"x"])), max_size=2),
        "timestamp": st.just(TIME),
    }
)
"""Rows of which many differ in their headers alone."""


@settings(max_examples=share(100))
@given(st.lists(ROW, max_size=60) | st.lists(TIED_ROW, max_size=60), st.integers(0, 1 << 32))
def test_by_content_any_order_of_the_same_rows_becomes_the_same(rows: list[dict[str, Any]], seed: int) -> None:
    random = Random(seed)
    shuffled = random.sample(rows, len(rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sink_rows, "BLOCK_ROWS", 7)
        one, other = (
            [
                row | {"headers": row["headers"] or []}  # No headers are none, however that is said.
                for block in by_content(sliced(pa.Table.from_pylist(each, schema=SCHEMA), random))
                for row in block.to_pylist()
            ]
            for each in (rows, shuffled)
        )
    assert one == other
    assert len(one) == len(rows)
    keys = [(row["key"] is None, row["key"] or b"", row["timestamp"], row["value"]) for row in one]
    assert keys == sorted(keys)


def test_ordering_by_content_is_asked_for() -> None:
    batches = [batch([b"b"]), batch([b"a", b"c"])]

    def values(ordering: str) -> list[bytes]:
        options = parsed(topic="orders", ordering=ordering)
        return [value for block in blocks_of(batches, options) for value in block.column("value").to_pylist()]

    assert values("arrival") == [b"b", b"a", b"c"]
    assert values("content") == [b"a", b"b", b"c"]


# ── tasks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_micro_batch_is_named_by_query_and_batch_id() -> None:
    writing = micro_batch("1c9f", "17")
    assert (writing.app, writing.era, writing.skips) == ("query:1c9f", 17, False)


@pytest.mark.parametrize(
    ("query", "number"), [(None, "1"), ("q", None), ("", "1"), ("q", "x"), ("q", "-1"), ("q", str(1 << 32))]
)
def test_without_query_and_batch_id_nothing_is_written(query: str | None, number: str | None) -> None:
    with pytest.raises(InvalidArgument, match="cannot write exactly once, so it writes nothing"):
        micro_batch(query, number)


def test_a_commit_needs_the_word_of_every_task() -> None:
    check_messages([TaskCommit(0, 5, 0), TaskCommit(1, 0, 0)])
    check_messages([])
    with pytest.raises(InvalidArgument, match="a write of 2 tasks, but 1 of them did not finish"):
        check_messages([TaskCommit(0, 5, 0), None])
