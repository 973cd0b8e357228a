"""Messages: their numbers, their bytes, and errors on their way to the other side."""

from __future__ import annotations

import msgspec
import pytest

from braid.model.errors import (
    BraidError,
    LogDamaged,
    NotServing,
    OffsetOutOfRange,
    PositionDiverged,
    ProtocolError,
    ServiceError,
    TopicNotFound,
)
from braid.wire import operations
from braid.wire.operations import (
    AdminRequest,
    Credit,
    ErrorBody,
    Hello,
    Kind,
    Leave,
    Open,
    TopologyRequest,
    decode,
    encode,
    error_body,
    error_from,
)


def test_kinds_fit_into_a_byte_and_zero_is_nobodys() -> None:
    assert all(0 < kind <= 255 for kind in Kind)


def test_a_message_is_an_array_of_its_fields_in_order() -> None:
    assert encode(Hello("braid", 1, 2, "me", "secret", ("a",))) == (b"\x96\xa5braid\x01\x02\xa2me\xa6secret\x91\xa1a")
    assert encode(Credit(3, 1 << 20)) == b"\x92\x03\xce\x00\x10\x00\x00"


def test_new_fields_come_last_and_have_defaults() -> None:
    for body in operations._Body.__subclasses__():
        required = len(body.__struct_fields__) - len(body.__struct_defaults__)
        assert body.__struct_config__.array_like, body
        assert required >= 0


def test_a_body_is_decoded_from_a_view_as_well() -> None:
    assert decode(Leave, memoryview(encode(Leave(7)))) == Leave(7)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Leave, b""),
        (Leave, b"\x91"),
        (Leave, b"\x91\x01\x01"),
        (Leave, b"\x81\x01\x01"),
        (Leave, b"\x91\xa1x"),
        (Leave, b"\x91\xc0"),
        (TopologyRequest, b"\x91\xdd\xff\xff\xff\xff"),
        (TopologyRequest, b"\xdd\xff\xff\xff\xff"),
        (TopologyRequest, b"\x91\x91\xa2\xff\xfe"),
        (AdminRequest, b"\x92\xa1a\x81\xa1b" + b"\x91" * 100_000 + b"\xc0"),
        (AdminRequest, b"\x92\xa1a\x81\x01\x01"),
        (AdminRequest, b"\x92\xa1a\xdf\xff\xff\xff\xff"),
    ],
    ids=[
        "nothing",
        "an array without its fields",
        "bytes behind the array",
        "a map",
        "text for a number",
        "nil for a number",
        "four thousand million topics",
        "four thousand million fields",
        "text that is no UTF-8",
        "a hundred thousand arrays in each other",
        "a number as a name",
        "a map without its entries",
    ],
)
def test_bytes_that_are_no_message_are_a_protocol_error(kind: type[operations._Body], body: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"a frame's body is no {kind.__name__}"):
        decode(kind, body)


def test_every_error_arrives_as_the_same_class_with_message_code_and_retriable() -> None:
    for code, kind in BraidError.by_code.items():
        error = kind.__new__(kind, "what is so")
        error.args = ("what is so",)
        got = error_from(decode(ErrorBody, encode(error_body(error))))
        assert type(got) is kind
        assert (str(got), got.code, got.retriable) == ("what is so", code, kind.retriable)


def test_an_errors_own_fields_arrive_with_it() -> None:
    got = error_from(decode(ErrorBody, encode(error_body(OffsetOutOfRange("gone", 17, 40)))))
    assert isinstance(got, OffsetOutOfRange)
    assert (got.earliest, got.end) == (17, 40)
    diverged = error_from(decode(ErrorBody, encode(error_body(PositionDiverged("other records", 17, 40, 21)))))
    assert isinstance(diverged, PositionDiverged)
    assert (diverged.earliest, diverged.end, diverged.parted_at) == (17, 40, 21)
    damaged = error_from(decode(ErrorBody, encode(error_body(LogDamaged("damaged", 3, 5)))))
    assert isinstance(damaged, LogDamaged)
    assert (damaged.first_offset, damaged.next_offset) == (3, 5)


def test_what_an_error_keeps_for_itself_does_not_travel() -> None:
    error = NotServing("not here")
    vars(error).update(owner="b:1", _secret="x", blob=b"bytes", nothing=None)
    assert error_body(error).details == {"owner": "b:1"}


def test_a_code_from_the_future_keeps_its_code_and_says_whether_to_retry() -> None:
    got = error_from(ErrorBody("moon-is-full", "come back later", True))
    assert type(got) is BraidError
    assert (got.code, got.retriable, str(got)) == ("moon-is-full", True, "come back later")
    assert got.again().code == "moon-is-full"
    assert error_body(got) == ErrorBody("moon-is-full", "come back later", True)


@pytest.mark.parametrize("name", ["args", "__class__", "__dict__", "code", "retriable", "again", "by_code", "_x", ""])
def test_details_cannot_change_what_every_error_has(name: str) -> None:
    got = error_from(ErrorBody("topic-not-found", "no topic", False, {name: "evil", "owner": "b:1"}))
    assert isinstance(got, TopicNotFound)
    assert issubclass(type(got), ServiceError)
    assert (got.code, got.retriable, got.args) == ("topic-not-found", False, ("no topic",))
    assert vars(got).get("owner") == "b:1"
    assert callable(got.again)


def test_optional_fields_may_be_left_out() -> None:
    body = msgspec.msgpack.encode([1, "public/default/t", 5, 0, 100])
    assert decode(Open, body) == Open(1, "public/default/t", 5, 0, 100, session=0, offset=0)
