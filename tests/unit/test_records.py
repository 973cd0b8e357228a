"""Times as programs give them, and messages as programs show them."""

from __future__ import annotations

import datetime

import pyarrow as pa
import pytest

from braid.client.producing.records import as_microseconds, check_times
from braid.model.errors import InvalidArgument
from braid.model.message import Message, MessageId

NOON = datetime.datetime(2026, 11, 15, 12, tzinfo=datetime.UTC)
NOON_US = 1_794_744_000_000_000


def test_microseconds_of_this_era_are_taken_as_they_are() -> None:
    for timestamp in (NOON_US, 10**14, 10**17 - 1):
        assert as_microseconds(timestamp) == timestamp


@pytest.mark.parametrize(
    ("timestamp", "hint"),
    [
        (NOON_US // 1_000_000, "seconds: multiply by 1,000,000"),
        (NOON_US // 1_000, "milliseconds: multiply by 1,000"),
        (NOON_US * 1_000, "nanoseconds: divide by 1,000"),
        (0, "A datetime with its zone may be of any year"),
        (-NOON_US, "A datetime with its zone may be of any year"),
        pytest.param(10**5_000, "a huge number", id="huge"),
        (True, "is no time"),
        (1.7e15, "is no time"),
        ("x" * 10_000, "is no time"),
    ],
)
def test_a_number_in_another_unit_is_refused_with_the_cure(timestamp: object, hint: str) -> None:
    with pytest.raises(InvalidArgument, match=hint) as raised:
        as_microseconds(timestamp)
    assert len(str(raised.value)) < 400


def test_a_datetime_needs_its_zone_and_may_be_of_any_year() -> None:
    assert as_microseconds(NOON) == NOON_US
    assert as_microseconds(NOON.astimezone(datetime.timezone(datetime.timedelta(hours=5)))) == NOON_US
    assert as_microseconds(datetime.datetime(1969, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)) == -1_000_000
    with pytest.raises(InvalidArgument, match="has no zone; give it one"):
        as_microseconds(NOON.replace(tzinfo=None))


def test_the_numbers_of_a_table_are_checked_and_its_timestamps_are_not() -> None:
    check_times(pa.table({"value": ["a", "b"], "timestamp": pa.array([NOON_US, None], pa.int64())}))
    check_times(pa.table({"value": ["a"], "timestamp": pa.array([0], pa.timestamp("ms"))}))
    check_times(pa.table({"value": pa.array([], pa.binary()), "timestamp": pa.array([], pa.int64())}))
    with pytest.raises(InvalidArgument, match="milliseconds"):
        check_times(pa.table({"value": ["a", "b"], "timestamp": [NOON_US, NOON_US // 1_000]}))


def test_a_message_is_shown_in_one_short_line() -> None:
    small = Message(b"paid", b"customer-7", NOON_US, 3, {"trace": b"a1"}, 1, "public/default/orders")
    assert repr(small) == (
        f"Message(value=b'paid', key=b'customer-7', timestamp_us={NOON_US}, offset=3, headers={{'trace': b'a1'}}, "
        "segment=1, topic='public/default/orders')"
    )
    headers = {f"{number}" * 1_000: bytes(1 << 20) for number in range(100)}
    large = repr(Message(bytes(32 << 20), bytes(1 << 20), NOON_US, 3, headers))
    assert len(large) < 4_000
    assert "(33554432 bytes)" in large
    assert "… 100 headers" in large
    assert repr(Message(b"", None, 0, 0)).startswith("Message(value=b'', key=None, ")


def test_a_message_id_is_its_segment_and_offset() -> None:
    message = Message(b"v", None, 1, 7, {}, 2, "t/n/orders")
    assert message.id == MessageId(2, 7)
    assert sorted([MessageId(1, 9), MessageId(0, 10), MessageId(1, 2)]) == [
        MessageId(0, 10),
        MessageId(1, 2),
        MessageId(1, 9),
    ]
    assert str(message.id) == "MessageId(segment=2, offset=7)"
