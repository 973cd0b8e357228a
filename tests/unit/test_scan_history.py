"""`braid.history` over hand-made topics in a folder: columns, bounds, order, and what it says when it cannot read."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import braid
from braid.model.errors import BatchUnreadable, DataLoss, InvalidArgument, OffsetOutOfRange, TopicNotFound
from braid.model.layout import HashRange
from braid.scan.columns import TOPIC_SCHEMA
from braid.spark.source.schema import SOURCE_SCHEMA, arrow_schema
from tests.kits import poison
from tests.kits.hand_made_topic import FULL, HandMadeTopic, Record, Shape, records

LOW, HIGH = HashRange(0, 0x7FFF), HashRange(0x8000, 0xFFFF)
SECOND = 1_000_000


def rows(topic: HandMadeTopic, **arguments: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = braid.history("orders", storage=topic.storage, **arguments).read_all().to_pylist()
    return found


def values(topic: HandMadeTopic, **arguments: Any) -> list[bytes]:
    return [row["value"] for row in rows(topic, columns=["value"], **arguments)]


def numbers(first: int, until: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, until)]


def at(second: int) -> datetime.datetime:
    return datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(seconds=second)


@pytest.fixture
def family(tmp_path: Path) -> HandMadeTopic:
    """Segment 0 was split into 1 and 2; each has two chunks."""
    topic = HandMadeTopic(tmp_path, [Shape(FULL), Shape(LOW, (0,)), Shape(HIGH, (0,))])
    topic.add_chunk(0, records(0, 5), records(5, 5))
    topic.add_chunk(0, records(10, 10))
    for segment in (1, 2):
        topic.add_chunk(segment, records(100 * segment, 10))
        topic.add_chunk(segment, records(100 * segment + 10, 10))
    return topic


def test_the_columns_are_those_of_the_spark_source() -> None:
    assert arrow_schema(SOURCE_SCHEMA) == TOPIC_SCHEMA


def test_rows_are_what_was_published(tmp_path: Path) -> None:
    topic = HandMadeTopic(tmp_path)
    topic.add_chunk(0, [Record(b"a", b"alpha", 5 * SECOND, {"trace": b"t1"}), Record(b"b", None, 6 * SECOND)], epoch=4)
    same = {"segment": 0, "epoch": 4}
    assert rows(topic) == [
        {
            **same,
            "offset": 0,
            "key": b"alpha",
            "value": b"a",
            "timestamp": at(5),
            "headers": [("trace", b"t1")],
            "keyHash": 0xA9C0,
        },
        {**same, "offset": 1, "key": None, "value": b"b", "timestamp": at(6), "headers": [], "keyHash": 0},
    ]


def test_a_reader_has_only_the_columns_asked_for_in_the_order_asked(family: HandMadeTopic) -> None:
    reader = braid.history("orders", storage=family.storage, columns=("value", "offset"))
    assert reader.schema.names == ["value", "offset"]
    table = reader.read_all()
    assert table.schema.types == [pa.binary(), pa.int64()]
    table.validate(full=True)


def test_all_records_come_once_and_parents_before_their_children(family: HandMadeTopic) -> None:
    assert values(family) == numbers(0, 20) + numbers(100, 120) + numbers(200, 220)


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({"start": {0: 17}}, numbers(17, 20) + numbers(100, 120) + numbers(200, 220)),
        ({"end": {0: 3, 1: 0, 2: 0}}, numbers(0, 3)),
        ({"start": {0: 8, 1: "END", 2: 19}, "end": {0: 12}}, numbers(8, 12) + numbers(219, 220)),
        ({"start": {"0": 20, "1": 20}, "end": {2: 1}}, numbers(200, 201)),
        ({"start": {0: "END", 1: "END", 2: "END"}}, []),
    ],
)
def test_offsets_bound_a_read_in_each_segment(
    family: HandMadeTopic, bounds: dict[str, Any], expected: list[bytes]
) -> None:
    assert values(family, **bounds) == expected


def test_times_bound_a_read_and_the_end_is_exclusive(tmp_path: Path) -> None:
    topic = HandMadeTopic(tmp_path)
    for first in (0, 10, 20):
        topic.add_chunk(0, [Record(b"%d" % number, timestamp=number * SECOND) for number in range(first, first + 10)])
    assert values(topic, start=at(5), end=at(25)) == numbers(5, 25)
    assert values(topic, start="1970-01-01T01:00:12+01:00", end="1970-01-01T00:00:20Z") == numbers(12, 20)
    topic.path(0, 0).write_bytes(b"damaged")
    topic.path(0, 2).write_bytes(b"damaged")
    assert values(topic, start=at(10), end=at(20)) == numbers(10, 20), "chunks outside of the bounds are not read"


def test_the_schema_says_where_the_read_ends_and_the_next_read_continues_there(family: HandMadeTopic) -> None:
    reader = braid.history("orders", storage=family.storage, columns=["value"], end={0: 7, 1: 0, 2: "END"})
    metadata = {name.decode(): value.decode() for name, value in reader.schema.metadata.items()}
    assert metadata == {
        "braid.topic": "public/default/orders",
        "braid.live": "false",
        "braid.next": '{"0": 7, "1": 0, "2": 20}',
    }
    first = [row["value"] for row in reader.read_all().to_pylist()]
    rest = values(family, start=json.loads(metadata["braid.next"]))
    assert sorted(first + rest) == sorted(values(family))
    by_time = braid.history("orders", storage=family.storage, end=at(1))
    assert b"braid.next" not in by_time.schema.metadata


def test_a_reader_that_is_not_used_or_not_used_up_leaves_no_thread(family: HandMadeTopic) -> None:
    import threading

    before = threading.active_count()
    braid.history("orders", storage=family.storage)
    reader = braid.history("orders", storage=family.storage)
    reader.read_next_batch()
    del reader
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"columns": ["value", "colour"]}, "argument columns names 'colour', which a topic does not have"),
        ({"columns": "value"}, "argument columns is 'value': list at least one of segment, offset"),
        ({"columns": []}, "argument columns is"),
        ({"columns": ["key", "key"]}, "each only once"),
        ({"start": 17}, "argument start is 17: it must be offsets by segment"),
        ({"start": "yesterday"}, "argument start is 'yesterday': it must be a time in ISO 8601"),
        ({"end": "2026-11-15T18:00:00"}, "argument end is 2026-11-15T18:00:00, which has no time zone"),
        ({"start": {"a": 1}}, "argument start names segment 'a'"),
        ({"start": {0: -1}}, "argument start names offset -1"),
        ({"start": {7: 1}}, "argument start names segment 7, which topic public/default/orders does not have"),
        ({"start": {0: 9}, "end": {0: 3}}, "argument start and argument end ask for offsets 9 up to 3"),
        ({"start": "2026-01-02T00:00:00Z", "end": "2026-01-01T00:00:00Z"}, "which is before start"),
        ({"storage": "ftp://here"}, "argument storage: cannot open objects"),
        ({"url": "http://here"}, "is no broker URL"),
    ],
)
def test_a_wrong_argument_is_named(family: HandMadeTopic, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        braid.history("orders", **{"storage": family.storage, **arguments})
    assert says in str(caught.value)


def test_an_offset_beyond_the_end_is_refused(family: HandMadeTopic) -> None:
    with pytest.raises(OffsetOutOfRange, match="argument end names offset 21"):
        braid.history("orders", storage=family.storage, end={0: 21})


def test_a_topic_without_a_manifest_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(TopicNotFound, match="correct the topic's name or the storage's URL"):
        braid.history("orders", storage=f"file://{tmp_path}")


def test_a_chunk_that_is_lost_is_an_error_unless_the_reader_accepts_it(family: HandMadeTopic) -> None:
    family.path(0, 0).unlink()
    reader = braid.history("orders", storage=family.storage, columns=["value"])
    with pytest.raises(DataLoss, match=r"offsets 0 to 9 of segment 0 .* set argument fail_on_data_loss to false"):
        reader.read_all()
    assert values(family, fail_on_data_loss=False, end={1: 0, 2: 0}) == numbers(10, 20)


def test_a_batch_that_cannot_be_decoded_is_an_error_unless_the_reader_skips_it(tmp_path: Path) -> None:
    topic = HandMadeTopic(tmp_path)
    topic.add_chunk(0, records(0, 3), *poison.shown_by_the_body().values())
    with pytest.raises(BatchUnreadable, match="Set argument bad_records to skip"):
        values(topic)
    assert values(topic, bad_records="skip") == numbers(0, 3)


def test_a_damaged_chunk_is_always_an_error(family: HandMadeTopic) -> None:
    path = family.path(0, 1)
    data = bytearray(path.read_bytes())
    data[90] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(braid.BraidError, match="damaged"):
        values(family, fail_on_data_loss=False, bad_records="skip")
