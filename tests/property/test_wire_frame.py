"""Whatever is sent, in whatever pieces it arrives."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Iterator
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.model.errors import BraidError, FrameTooLarge, ProtocolError
from braid.wire import operations
from braid.wire.frame import PREFIX, SCRATCH_BYTES, Frame, FrameReader, encode_frame
from braid.wire.operations import ErrorBody, decode, encode, error_body, error_from
from tests.kits.examples import share

BODIES: list[type[operations._Body]] = sorted(operations._Body.__subclasses__(), key=lambda each: each.__name__)


class Sent(msgspec.Struct, frozen=True):
    kind: int
    flags: int
    request: int
    body: bytes
    payload: bytes

    def encoded(self) -> bytes:
        size = len(self.payload)
        frame = encode_frame(self.kind, self.body, request=self.request, flags=self.flags, payload_bytes=size)
        return frame + self.payload


def is_same(frame: Frame, sent: Sent) -> bool:
    payload = b"" if frame.payload is None else bytes(frame.payload)
    head = (frame.kind, frame.flags, frame.request, frame.body)
    return head == (sent.kind, sent.flags, sent.request, sent.body) and payload == sent.payload


def lengths() -> st.SearchStrategy[int]:
    """Around everything at which the reader decides something."""
    edges = [0, 1, 7, 8, 9, 4_079, 4_080, 4_081, 4_096, 4_097, SCRATCH_BYTES - 17, SCRATCH_BYTES - 16, SCRATCH_BYTES]
    return st.sampled_from(edges) | st.integers(0, 200) | st.integers(0, 3 * SCRATCH_BYTES)


def filled(length: int, byte: int) -> bytes:
    return bytes((byte + at) & 0xFF for at in range(251)) * (length // 251 + 1)


frames_sent = st.builds(
    lambda kind, flags, request, body, payload, byte: Sent(
        kind, flags, request, filled(body, byte)[:body], filled(payload, byte + 1)[:payload]
    ),
    st.integers(0, 255),
    st.integers(0, 3),
    st.integers(0, (1 << 32) - 1),
    lengths(),
    lengths(),
    st.integers(0, 255),
)


@settings(max_examples=share(300), deadline=None)
@given(st.lists(frames_sent, max_size=8), st.lists(st.integers(1, 40_000), min_size=1, max_size=60))
def test_frames_cut_at_any_places_come_out_the_same(sent: list[Sent], pieces: list[int]) -> None:
    stream = b"".join(each.encoded() for each in sent)
    reader = FrameReader()
    came: list[Frame] = []
    at = number = 0
    while at < len(stream):
        room = reader.buffer()
        size = min(len(room), pieces[number % len(pieces)], len(stream) - at)
        room[:size] = stream[at : at + size]
        came += reader.received(size)
        at += size
        number += 1
    assert len(came) == len(sent)
    assert all(map(is_same, came, sent))
    assert reader.partial_bytes == 0


garbage = st.one_of(
    st.binary(max_size=400),
    st.builds(
        lambda fields, rest: PREFIX.pack(*fields) + rest,
        st.tuples(
            st.integers(0, 2_000) | st.integers(0, (1 << 32) - 1),
            st.integers(0, 2_000) | st.integers(0, (1 << 32) - 1),
            st.integers(0, (1 << 32) - 1),
            st.integers(0, 255),
            st.integers(0, 3) | st.integers(0, 255),
            st.just(0) | st.integers(0, 65_535),
        ),
        st.binary(max_size=3_000),
    ),
)


@settings(max_examples=share(300), deadline=None)
@given(st.lists(garbage, min_size=1, max_size=5), st.sampled_from([0, 100, 5_000, 100_000]))
def test_garbage_ends_in_a_protocol_error_and_allocates_no_more_than_the_limit(parts: list[bytes], limit: int) -> None:
    reader = FrameReader(limit)
    stream = b"".join(parts)
    at = 0
    tracemalloc.start()
    try:
        while at < len(stream):
            room = reader.buffer()
            assert len(room)
            size = min(len(room), len(stream) - at)
            room[:size] = stream[at : at + size]
            at += size
            for frame in reader.received(size):
                assert len(frame.body) + len(frame.payload or b"") <= limit
    except (ProtocolError, FrameTooLarge):
        assert len(reader.buffer())
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < limit + len(stream) + 20_000


# ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────────

anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def values(kind: Any) -> st.SearchStrategy[Any]:
    if kind is Any:
        return anything
    if kind is int:
        return st.integers(-(1 << 63), (1 << 64) - 1)
    if kind is str:
        return st.text(max_size=20)
    if kind is bool:
        return st.booleans()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return messages(kind)
    if get_origin(kind) is tuple and get_args(kind)[-1] is ...:
        return st.lists(values(get_args(kind)[0]), max_size=3).map(tuple)
    if get_origin(kind) is tuple:
        return st.tuples(*map(values, get_args(kind)))
    if get_origin(kind) is dict:
        return st.dictionaries(st.text(max_size=8), anything, max_size=3)
    if set(get_args(kind)) == {int, type(None)}:
        return st.none() | values(int)
    raise AssertionError(f"say how to make a {kind}")


def messages(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind)
    return st.tuples(*(values(hints[name]) for name in kind.__struct_fields__)).map(lambda fields: kind(*fields))


def test_there_are_bodies_to_test() -> None:
    assert len(BODIES) > 20


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_every_message_comes_out_as_it_went_in(kind: type[operations._Body]) -> None:
    @settings(max_examples=share(40), deadline=None)
    @given(messages(kind))
    def check(message: operations._Body) -> None:
        assert decode(kind, encode(message)) == message

    check()


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_fields_from_the_future_are_skipped(kind: type[operations._Body]) -> None:
    @settings(max_examples=share(15), deadline=None)
    @given(messages(kind), st.lists(anything, min_size=1, max_size=3))
    def check(message: operations._Body, news: list[Any]) -> None:
        fields = [*msgspec.msgpack.decode(encode(message)), *news]
        assert decode(kind, msgspec.msgpack.encode(fields)) == message

    check()


def shortened(kind: type[msgspec.Struct]) -> Iterator[int]:
    """How many fields an older peer may send of this message."""
    fields, defaults = kind.__struct_fields__, kind.__struct_defaults__
    return iter(range(len(fields) - len(defaults), len(fields)))


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_fields_that_an_older_peer_does_not_send_get_their_defaults(kind: type[operations._Body]) -> None:
    @settings(max_examples=share(15), deadline=None)
    @given(messages(kind))
    def check(message: operations._Body) -> None:
        sent = msgspec.msgpack.decode(encode(message))
        for count in shortened(kind):
            got = decode(kind, msgspec.msgpack.encode(sent[:count]))
            filled_in = kind(*(getattr(message, name) for name in kind.__struct_fields__[:count]))
            assert got == filled_in

    check()


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_a_message_without_a_field_that_it_must_have_is_refused(kind: type[operations._Body]) -> None:
    required = len(kind.__struct_fields__) - len(kind.__struct_defaults__)
    if required:
        with pytest.raises(ProtocolError, match=kind.__name__):
            decode(kind, msgspec.msgpack.encode([]))


@settings(max_examples=share(300), deadline=None)
@given(st.binary(max_size=60) | anything.map(msgspec.msgpack.encode) | st.lists(anything).map(msgspec.msgpack.encode))
def test_garbage_as_a_body_is_a_protocol_error(body: bytes) -> None:
    """The same garbage as a body of every kind: to make it takes longer than to refuse it."""
    for kind in BODIES:
        with contextlib.suppress(ProtocolError):
            decode(kind, body)


@settings(max_examples=share(100), deadline=None)
@given(
    st.sampled_from(sorted(BraidError.by_code)) | st.text(max_size=10),
    st.text(max_size=20),
    st.booleans(),
    st.dictionaries(st.text(max_size=8) | st.sampled_from(["args", "__class__", "code", "again", "owner"]), anything),
)
def test_any_error_that_a_peer_tells_becomes_one_that_can_be_raised_and_told_again(
    code: str, message: str, retriable: bool, details: dict[str, Any]
) -> None:
    error = error_from(ErrorBody(code, message, retriable, details))
    assert isinstance(error, BraidError)
    assert (error.code, str(error)) == (code, message)
    again = error_from(decode(ErrorBody, encode(error_body(error.again()))))
    assert (type(again), again.code, str(again)) == (type(error), code, message)
    assert vars(again) == vars(error)
