"""Frames, as bytes: what the reader makes of them at the limits, in both of its paths."""

from __future__ import annotations

import resource
import struct
import tracemalloc
from collections.abc import Iterable

import pytest

from braid.model.batch.header import MAX_BATCH_BYTES
from braid.model.errors import FrameTooLarge, ProtocolError
from braid.wire.frame import (
    FIRST_FRAME_BYTES,
    MAX_BODY_BYTES,
    MAX_FRAME_BYTES,
    PREFIX,
    PREFIX_BYTES,
    READ_BYTES,
    SCRATCH_BYTES,
    Flags,
    Frame,
    FrameReader,
    encode_frame,
)

OWN_BUFFER_BYTES = 4 << 10
"""Above this, a frame that has begun gets a buffer of its own."""


def a_frame(kind: int, body: bytes = b"", payload: bytes = b"", *, request: int = 0, flags: int = 0) -> bytes:
    return encode_frame(kind, body, request=request, flags=flags, payload_bytes=len(payload)) + payload


def feed(reader: FrameReader, data: bytes, piece: int | None = None) -> list[Frame]:
    """Give the reader these bytes, at most `piece` of them at a time."""
    frames: list[Frame] = []
    at = 0
    while at < len(data):
        room = reader.buffer()
        assert len(room), "there must always be room"
        size = min(len(room), len(data) - at, piece or len(data))
        room[:size] = data[at : at + size]
        at += size
        frames += reader.received(size)
    return frames


def plain(frames: Iterable[Frame]) -> list[tuple[int, int, int, bytes, bytes | None]]:
    return [
        (each.kind, each.flags, each.request, each.body, None if each.payload is None else bytes(each.payload))
        for each in frames
    ]


def test_the_prefix_is_sixteen_little_endian_bytes() -> None:
    frame = a_frame(0x10, b"abc", b"payload!", request=0x01020304, flags=Flags.REPLY)
    assert frame == bytes.fromhex("10000000 03000000 04030201 10 01 0000") + b"abc\0\0\0\0\0payload!"


def test_a_frame_without_a_payload_has_no_padding() -> None:
    assert a_frame(2, b"abc") == bytes.fromhex("03000000 03000000 00000000 02 00 0000") + b"abc"


@pytest.mark.parametrize("body_bytes", range(17))
def test_the_payload_begins_at_a_multiple_of_eight(body_bytes: int) -> None:
    frame = a_frame(1, b"b" * body_bytes, b"P")
    assert frame.index(b"P") % 8 == 0
    assert plain(feed(FrameReader(), frame)) == [(1, 0, 0, b"b" * body_bytes, b"P")]


@pytest.mark.parametrize("piece", [None, 1, 15, 16, 17, 4_096])
@pytest.mark.parametrize(
    ("body", "payload"),
    [
        (b"", b""),
        (b"b", b""),
        (b"", b"p"),
        (b"b" * 7, b"p" * 9),
        (b"b", b"p" * (OWN_BUFFER_BYTES - 8)),
        (b"b", b"p" * (OWN_BUFFER_BYTES - 7)),
        (b"b" * (SCRATCH_BYTES - PREFIX_BYTES), b""),
        (b"b" * (SCRATCH_BYTES - PREFIX_BYTES + 1), b""),
        (b"b" * 9, b"p" * SCRATCH_BYTES),
    ],
    ids=lambda data: str(len(data)) if isinstance(data, bytes) else "",
)
def test_a_frame_comes_out_as_it_went_in(body: bytes, payload: bytes, piece: int | None) -> None:
    reader = FrameReader()
    data = b"".join(a_frame(7, body, payload, request=number, flags=Flags.REPLY) for number in range(3))
    assert plain(feed(reader, data, piece)) == [(7, 1, number, body, payload or None) for number in range(3)]
    assert reader.partial_bytes == 0


@pytest.mark.parametrize("size", [8, 64, OWN_BUFFER_BYTES, OWN_BUFFER_BYTES + 8, SCRATCH_BYTES, 1 << 20])
@pytest.mark.parametrize("body_bytes", [0, 3, 8, 30])
def test_payloads_are_aligned_writable_and_their_receivers_own(size: int, body_bytes: int) -> None:
    reader = FrameReader()
    data = a_frame(1, b"b" * body_bytes, b"p" * size)
    first, second = feed(reader, data * 2, SCRATCH_BYTES - 5)
    assert first.payload is not None
    assert second.payload is not None
    assert address_of(first.payload) % 8 == 0
    assert address_of(second.payload) % 8 == 0
    first.payload[:] = b"x" * size
    assert bytes(second.payload) == b"p" * size, "two frames share no memory"
    assert plain(feed(reader, data))[0][4] == b"p" * size
    assert bytes(first.payload) == b"x" * size, "nor with the reader"


def address_of(view: memoryview) -> int:
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def test_frames_that_arrive_together_come_out_together() -> None:
    frames = [a_frame(kind, b"body", b"payload" * kind) for kind in range(1, 40)]
    assert [each.kind for each in feed(FrameReader(), b"".join(frames))] == list(range(1, 40))


def test_partial_bytes_tells_how_much_of_an_unfinished_frame_is_here() -> None:
    reader = FrameReader()
    small, large = a_frame(1, b"b" * 100), a_frame(1, b"", b"p" * 100_000)
    for data in (small, large):
        for cut in (1, 15, 16, 17, len(data) // 2, len(data) - 1):
            assert feed(reader, data[:cut]) == []
            assert reader.partial_bytes == cut
            assert len(feed(reader, data[cut:])) == 1
            assert reader.partial_bytes == 0
    feed(reader, small + large[:20])
    assert reader.partial_bytes == 20


@pytest.mark.parametrize("limit", [0, 100, OWN_BUFFER_BYTES, 100_000])
def test_a_frame_of_exactly_the_limit_passes_and_one_byte_more_does_not(limit: int) -> None:
    assert len(feed(FrameReader(limit), a_frame(1, b"b" * limit))) == 1
    with pytest.raises(FrameTooLarge, match=f"{limit + 1} bytes was announced; the limit is {limit}"):
        feed(FrameReader(limit), a_frame(1, b"b" * (limit + 1)))


def test_the_largest_batch_fits_into_a_frame_with_the_largest_body() -> None:
    assert MAX_FRAME_BYTES >= MAX_BATCH_BYTES + MAX_BODY_BYTES
    reader = FrameReader()
    (frame,) = feed(reader, a_frame(1, b"b" * MAX_BODY_BYTES, b"p" * MAX_BATCH_BYTES))
    assert len(frame.body) == MAX_BODY_BYTES
    assert frame.payload is not None
    assert len(frame.payload) == MAX_BATCH_BYTES


def test_the_limit_can_be_raised_between_frames() -> None:
    reader = FrameReader(FIRST_FRAME_BYTES)
    large = a_frame(1, b"b" * (FIRST_FRAME_BYTES + 1))
    assert len(feed(reader, a_frame(1, b"hello"))) == 1
    reader.limit = MAX_FRAME_BYTES
    assert len(feed(reader, large)) == 1


@pytest.mark.parametrize("length", [MAX_FRAME_BYTES + 1, 0xFFFF_FFFF])
def test_a_length_above_the_limit_is_refused_before_anything_is_allocated(length: int) -> None:
    reader = FrameReader()
    with pytest.raises(FrameTooLarge):
        feed(reader, PREFIX.pack(length, 0, 0, 1, 0, 0))


def test_there_is_room_after_an_error_because_a_transport_that_is_closing_may_still_ask_for_it() -> None:
    reader = FrameReader()
    with pytest.raises(ProtocolError):
        feed(reader, b"\xff" * SCRATCH_BYTES)
    assert len(reader.buffer())


def test_a_peer_that_announces_a_large_frame_and_falls_silent_costs_what_it_sent() -> None:
    before_kib = resident_kib()
    readers = [FrameReader() for _ in range(50)]
    for reader in readers:
        feed(reader, PREFIX.pack(MAX_FRAME_BYTES, 0, 0, 1, 0, 0) + b"x")
        assert len(reader.buffer()) == READ_BYTES, "into a buffer of its own"
    assert resident_kib() - before_kib < 100_000, "fifty frames of 36 MiB were announced"


def test_a_reader_tells_what_an_unfinished_frame_holds_and_frees_it_with_its_connection() -> None:
    reader = FrameReader()
    feed(reader, PREFIX.pack(1_000, 0, 0, 1, 0, 0) + bytes(500))
    assert (reader.held_bytes, reader.partial_bytes) == (0, PREFIX_BYTES + 500), "a short frame waits in the scratch"
    feed(reader, bytes(500))
    feed(reader, PREFIX.pack(1 << 20, 0, 0, 1, 0, 0) + bytes(10_000))
    assert reader.held_bytes == PREFIX_BYTES + 10_000
    reader.release()
    assert (reader.held_bytes, reader.partial_bytes, len(reader.buffer())) == (0, 0, 0)


def test_large_frames_that_follow_each_other_take_one_read_each() -> None:
    reader = FrameReader()
    data = memoryview(b"".join(a_frame(1, b"body", b"p" * 50_000, request=number) for number in range(8)))
    reads = 0
    came: list[Frame] = []
    while data:
        room = reader.buffer()
        size = min(len(room), len(data))
        room[:size] = data[:size]
        data = data[size:]
        came += reader.received(size)
        reads += 1
        assert len(came) == max(0, reads - 1), "the first read finds out how long the first frame is"
    assert plain(came) == [(1, 0, number, b"body", b"p" * 50_000) for number in range(8)]


@pytest.mark.parametrize("arrived", range(1, PREFIX_BYTES + 1))
def test_a_frame_of_which_only_the_prefix_is_here_holds_nothing(arrived: int) -> None:
    reader = FrameReader()
    large = a_frame(1, b"", b"p" * 50_000)
    assert len(feed(reader, large + large[:arrived])) == 1
    assert (reader.held_bytes, reader.partial_bytes) == (0, arrived)
    assert feed(reader, large[arrived:30_000]) == []
    assert (reader.held_bytes, reader.partial_bytes) == (30_000, 30_000)
    assert plain(feed(reader, large[30_000:])) == [(1, 0, 0, b"", b"p" * 50_000)]


def test_small_frames_after_a_large_one_come_out_in_order() -> None:
    sent = [a_frame(1, b"", b"p" * 50_000), a_frame(2), a_frame(3, b"abc"), a_frame(4, b"", b"p" * 5_000), a_frame(5)]
    assert [each.kind for each in feed(FrameReader(), b"".join(sent))] == [1, 2, 3, 4, 5]


def test_garbage_after_a_large_frame_ends_the_stream_and_leaves_room() -> None:
    reader = FrameReader()
    with pytest.raises(ProtocolError, match="no frame"):
        feed(reader, a_frame(1, b"", b"p" * 50_000) + b"\xff" * PREFIX_BYTES)
    assert len(reader.buffer()) == SCRATCH_BYTES


def resident_kib() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() // 1024


@pytest.mark.parametrize(
    ("prefix", "complaint"),
    [
        ((0, 0, 0, 1, 4, 0), "no frame"),
        ((0, 0, 0, 1, 0x80, 0), "no frame"),
        ((0, 0, 0, 1, 0, 1), "no frame"),
        ((0, 1, 0, 1, 0, 0), "0 bytes says that its body has 1"),
        ((MAX_FRAME_BYTES, MAX_BODY_BYTES + 1, 0, 1, 0, 0), f"its body has {MAX_BODY_BYTES + 1}"),
        ((4, 3, 0, 1, 0, 0), "ends within the padding"),
        ((7, 1, 0, 1, 0, 0), "ends within the padding"),
    ],
)
def test_a_prefix_that_cannot_be_is_a_protocol_error(prefix: tuple[int, ...], complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        feed(FrameReader(), PREFIX.pack(*prefix))


def test_a_body_may_be_padded_although_no_payload_follows() -> None:
    assert plain(feed(FrameReader(), PREFIX.pack(8, 3, 0, 1, 0, 0) + b"abc" + bytes(5))) == [(1, 0, 0, b"abc", None)]


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /admin HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\n\r\n",
        bytes.fromhex("16030102000100 01fc0303") + bytes(range(1, 33)),
        b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n",
        b"\x00\x00\x00\x23\x00\x12\x00\x04\x00\x00\x00\x01\x00\x02me\x00" + bytes(20),
        b'CONNECT {"verbose":false}\r\nPING\r\n',
    ],
    ids=["http get", "http post", "http options", "tls", "ssh", "kafka", "nats"],
)
def test_other_protocols_are_recognised_as_such_at_once(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        feed(FrameReader(FIRST_FRAME_BYTES), data)


@pytest.mark.parametrize(("body_bytes", "kept"), [(100, 8_000), (3_000_000, 40_000)])
def test_who_keeps_a_payload_keeps_little_else(body_bytes: int, kept: int) -> None:
    tracemalloc.start()
    try:
        (frame,) = feed(FrameReader(), a_frame(1, b"b" * body_bytes, b"p" * 5_000))
        payload = frame.payload
        del frame
        assert tracemalloc.get_traced_memory()[0] < kept
        assert bytes(payload or b"") == b"p" * 5_000
    finally:
        tracemalloc.stop()


def test_a_body_above_its_limit_is_not_sent() -> None:
    with pytest.raises(FrameTooLarge, match=f"a body of {MAX_BODY_BYTES + 1} bytes"):
        encode_frame(1, bytes(MAX_BODY_BYTES + 1))


def test_the_highest_request_id_and_kind_travel() -> None:
    assert plain(feed(FrameReader(), a_frame(255, b"", request=0xFFFF_FFFF, flags=3)))[0][:3] == (255, 3, 0xFFFF_FFFF)
    with pytest.raises(struct.error):
        a_frame(256)


def test_a_peer_that_answers_in_http_is_named() -> None:
    with pytest.raises(ProtocolError, match="REST interface"):
        feed(FrameReader(), b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\n\r\n")
