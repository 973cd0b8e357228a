"""Records as lines, and the place where a look begins: without a broker."""

from __future__ import annotations

import datetime

import click
import msgspec
import pytest

from braid.cli.commands.produce import parse_headers, split_keys, with_headers
from braid.cli.terminal.record_lines import json_table, record_object
from braid.cli.terminal.start_point import START, AtOffset, AtTime, StartPoint, first_offset, parse_start
from braid.model.errors import BraidError
from braid.model.message import Message
from braid.wire.operations import SegmentPositions

NOON_US = 1_794_744_000_000_000
HOUR_US = 3_600_000_000


# Where a look begins.


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("earliest", "earliest"),
        ("latest", "latest"),
        ("-1h", AtTime(NOON_US - HOUR_US)),
        ("-90s", AtTime(NOON_US - 90_000_000)),
        ("-99999999999999d", AtTime(-(1 << 63))),
        ("2026-11-15T11:00:00Z", AtTime(NOON_US - HOUR_US)),
        ("2026-11-15T11:00:00", AtTime(NOON_US - HOUR_US)),
        ("2026-11-15 13:00+02:00", AtTime(NOON_US - HOUR_US)),
        ("0", AtOffset(0)),
        ("1500", AtOffset(1_500)),
        ("-5", AtOffset(-5)),
    ],
)
def test_a_place_to_begin_is_read_as_people_write_it(text: str, start: StartPoint) -> None:
    assert parse_start(text, NOON_US) == start


@pytest.mark.parametrize("text", ["", "noon", "-", "-1y", "1h", "--", "1.5", "-1h30m", "9" * 30, "٣"])
def test_anything_else_is_refused_with_examples(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is no place to begin: write earliest, latest, -1h"):
        START.convert(text, None, None)


@pytest.mark.parametrize(
    ("start", "offset"),
    [
        ("earliest", 10),
        ("latest", 90),
        (AtTime(NOON_US), 40),
        (AtOffset(50), 50),
        (AtOffset(0), 10),
        (AtOffset(1_000), 90),
        (AtOffset(-5), 85),
        (AtOffset(-1_000), 10),
    ],
)
def test_a_place_becomes_an_offset_that_exists(start: StartPoint, offset: int) -> None:
    assert first_offset(start, SegmentPositions(0, 10, 90, sealed=False, at_time=40)) == offset


def test_a_time_before_the_first_record_is_the_first_record() -> None:
    assert first_offset(AtTime(0), SegmentPositions(0, 10, 90, sealed=False, at_time=3)) == 10


# JSON.


def test_what_is_printed_as_json_is_read_again() -> None:
    messages = [
        Message(b"paid", b"customer-7", NOON_US, 3, {"trace": b"a1"}, 1, "public/default/orders"),
        Message("größe\n".encode(), None, NOON_US + 1, 4),
        Message(b"\xff\x00", b"\xfe", -1, 5, {"raw": b"\xff", "text": b"x"}),
        Message(b"", b"", NOON_US, 6),
    ]
    table = json_table([msgspec.json.encode(record_object(message)) for message in messages], {})
    assert table["value"].to_pylist() == [message.value for message in messages]
    assert table["key"].to_pylist() == [message.key for message in messages]
    assert table["timestamp"].cast("int64").to_pylist() == [message.timestamp_us for message in messages]
    assert [dict(pairs) for pairs in table["headers"].to_pylist()] == [message.headers for message in messages]


def test_a_line_needs_only_a_value() -> None:
    table = json_table([b'{"value": "paid"}'], {"source": b"shop"})
    assert table.to_pylist() == [
        {"key": None, "value": b"paid", "timestamp": None, "headers": [("source", b"shop")]},
    ]
    line = b'{"value": "", "headers": {"source": "till"}, "timestamp": "2026-11-15T12:00:00Z"}'
    own = json_table([line], {"source": b"shop"})
    assert own["headers"].to_pylist() == [[("source", b"till")]]
    assert own["timestamp"].to_pylist() == [datetime.datetime(2026, 11, 15, 12, tzinfo=datetime.UTC)]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"paid", "malformed"),
        (b"17", "Expected `object`"),
        (b"{}", "it has no value"),
        (b'{"value": null}', "it has no value"),
        (b'{"value": 17}', "Expected `str | null`"),
        (b'{"vaule": "x"}', "unknown field `vaule`"),
        (b'{"value": "x", "valueBase64": "eA=="}', "as text and as Base64"),
        (b'{"valueBase64": "%"}', "its Base64 is wrong"),
        (b'{"value": "x", "timestamp": "2026-11-15T12:00:00"}', "has no zone"),
        (b'{"value": "x", "timestamp": 1794744000000}', "it looks like milliseconds"),
        (b'{"value": "x", "timestamp": 1794744000000000000}', "it looks like nanoseconds"),
        (b'{"value": "x", "headers": {"a": 1}}', "Expected `str`"),
        (b"\xff" * 100_000, "line 8 is no record"),
    ],
)
def test_a_line_that_is_no_record_is_named_with_its_number(line: bytes, why: str) -> None:
    with pytest.raises(BraidError, match=r"^line 8 is no record, such as \{") as raised:
        json_table([b'{"value": "good"}', line], {}, first=7)
    assert why in str(raised.value)
    assert len(str(raised.value)) < 600


# Headers of each record.


def test_headers_are_given_as_name_and_value() -> None:
    assert parse_headers(["source=shop", "formula=a=b", "empty="]) == {
        "source": b"shop",
        "formula": b"a=b",
        "empty": b"",
    }
    for wrong in (["source"], ["=shop"], ["a=1", "a=2"]):
        with pytest.raises(click.BadParameter):
            parse_headers(wrong)


def test_each_row_gets_the_headers() -> None:
    plain = split_keys([b"a", b"b"], None)
    assert with_headers(plain, {}) is plain
    table = with_headers(split_keys([b"k:a", b"k:b"], b":"), {"source": b"shop"})
    assert table["headers"].to_pylist() == [[("source", b"shop")]] * 2
    assert table["key"].to_pylist() == [b"k", b"k"]
