"""When queues deliver a record: what programs say becomes headers, or an error that says what to write."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest

from braid.cli.terminal.record_lines import json_table
from braid.client.producing.records import MAX_DELAY_US, delivery_times, with_times
from braid.model.errors import BraidError, InvalidArgument
from braid.model.message import DELIVER_AT, EXPIRES_AT, header_ms
from braid.model.topic import MAX_MESSAGE_TTL_MS, TopicPolicies

NOW_US = 1_800_000_000_000_500
NOON = datetime.datetime(2030, 1, 1, 12, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("given", "deliver_at_ms", "expires_at_ms"),
    [
        ({"deliver_after": 0}, 1_800_000_000_001, 0),
        ({"deliver_after": 1.5}, 1_800_000_001_501, 0),
        ({"deliver_after": datetime.timedelta(seconds=1)}, 1_800_000_001_001, 0),
        ({"deliver_at": NOON}, 1_893_499_200_000, 0),
        ({"deliver_at": 1_893_499_200_000_001}, 1_893_499_200_001, 0),
        ({"deliver_at": NOON.replace(year=1960)}, 0, 0),
        ({"ttl": 2}, 0, 1_800_000_002_000),
        ({"deliver_after": 1, "ttl": datetime.timedelta(days=1)}, 1_800_000_001_001, 1_800_086_400_000),
        ({"deliver_after": MAX_DELAY_US / 1e6}, 1_831_622_400_001, 0),
    ],
    ids=str,
)
def test_times_become_headers_that_queues_read(given: Any, deliver_at_ms: int, expires_at_ms: int) -> None:
    headers = delivery_times(NOW_US, **given)
    assert (header_ms(headers, DELIVER_AT), header_ms(headers, EXPIRES_AT)) == (deliver_at_ms, expires_at_ms)
    assert (DELIVER_AT in headers, EXPIRES_AT in headers) == ("ttl" not in given or len(given) > 1, "ttl" in given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"deliver_after": 1, "deliver_at": NOON}, "give one of them"),
        ({"deliver_after": -1}, "deliver_after is -1; give 0 to 31622400 seconds"),
        ({"deliver_after": float("nan")}, "deliver_after is nan"),
        ({"deliver_after": True}, "deliver_after is True"),
        ({"deliver_after": "1s"}, "deliver_after is '1s'; give 0 to"),
        ({"deliver_after": MAX_DELAY_US}, "give 0 to 31622400 seconds"),
        ({"deliver_at": NOON.replace(tzinfo=None)}, "has no zone"),
        ({"deliver_at": 1_893_499_200_000}, "looks like milliseconds"),
        ({"ttl": 0}, "ttl is 0; give 0.001 to 31622400 seconds"),
        ({"deliver_after": 60, "ttl": 60}, "would never be delivered: its ttl of 60 ends before it is due"),
        ({"deliver_at": NOON, "ttl": 60}, "would never be delivered"),
    ],
    ids=str,
)
def test_times_that_cannot_be_are_refused_with_what_to_give(given: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        delivery_times(NOW_US, **given)


def test_a_record_keeps_its_own_headers_and_none_is_set_twice() -> None:
    times = {EXPIRES_AT: b"7"}
    assert with_times(None, times) == times
    assert with_times({"trace": "a1"}, times) == {"trace": "a1", **times}
    with pytest.raises(InvalidArgument, match="both given"):
        with_times({EXPIRES_AT: b"9"}, times)
    wrong: Any = {"trace": 7}
    with pytest.raises(InvalidArgument, match="headers must map"):
        with_times(wrong, times)


def test_lines_of_json_may_say_when_queues_deliver_them() -> None:
    lines = [
        json.dumps(each).encode()
        for each in ({"value": "a", "deliverAfterMs": 60_000, "ttlMs": 90_000}, {"value": "b", "redeliveryCount": 3})
    ]
    first, second = (dict(each) for each in json_table(lines, {"source": b"shop"}).column("headers").to_pylist())
    assert header_ms(first, EXPIRES_AT) - header_ms(first, DELIVER_AT) in range(29_998, 30_001)
    assert first["source"] == b"shop"
    assert second == {"source": b"shop"}
    with pytest.raises(BraidError, match=r"line 1 is no record.*ttl is 0\.0; give"):
        json_table([b'{"value": "a", "ttlMs": 0}'], {})


@pytest.mark.parametrize("wrong", [0, -1, MAX_MESSAGE_TTL_MS + 1])
def test_a_topics_message_ttl_is_a_time_that_can_be(wrong: int) -> None:
    assert TopicPolicies(message_ttl_ms=MAX_MESSAGE_TTL_MS).message_ttl_ms == MAX_MESSAGE_TTL_MS
    with pytest.raises(InvalidArgument, match=f"message_ttl_ms is {wrong}; it must be 1 to"):
        TopicPolicies(message_ttl_ms=wrong)
