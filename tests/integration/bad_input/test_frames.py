"""Bytes that are no frames, frames that come in one piece, and the first frame of a connection."""

from __future__ import annotations

import contextlib
import socket
import ssl

import pytest

from braid.broker.connections.session import COMMIT_FRAMES
from braid.model.errors import BraidError, FrameTooLarge, ProtocolError, UnsupportedVersion
from braid.wire.frame import FIRST_FRAME_BYTES, MAX_BODY_BYTES, MAX_FRAME_BYTES, PREFIX, Flags, encode_frame
from braid.wire.operations import MAGIC, VERSION, Hello, HelloReply, Kind, Published, decode, encode
from tests.kits.bad_input import MEGABYTES, a_batch, make_topic, refusal
from tests.kits.raw_client import HELLO, Ended, WatchedBroker
from tests.kits.waiting import wait_until

pytestmark = pytest.mark.processes


# ── many frames in one piece ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("count", [COMMIT_FRAMES, COMMIT_FRAMES + 1, 3 * COMMIT_FRAMES])
def test_publishes_that_come_in_one_piece_are_all_confirmed_in_order(broker: WatchedBroker, count: int) -> None:
    with broker.connect() as client:
        topics = [make_topic(client), make_topic(client)]
        frames = b""
        for number in range(count):
            for topic in topics:
                batch = a_batch(b"%d" % number)
                request = 1_000 * topics.index(topic) + number + 100
                frames += encode_frame(Kind.PUBLISH, encode(topic.route), request=request, payload_bytes=len(batch))
                frames += batch
        client.socket.sendall(frames)
        for first in (100, 1_100):
            replies = [decode(Published, client.reply(first + number).body) for number in range(count)]
            assert [reply.base_offset for reply in replies] == list(range(count))


def test_frames_without_a_publish_come_in_one_piece_too(broker: WatchedBroker) -> None:
    with broker.connect() as client:
        requests = range(100, 100 + 2 * COMMIT_FRAMES)
        client.socket.sendall(b"".join(encode_frame(Kind.PING, request=request) for request in requests))
        for request in requests:
            client.reply(request)


# ── bytes that are no frames ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("hello", [False, True], ids=["at once", "after hello"])
@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost:6660\r\nAccept: */*\r\n\r\n",
        bytes.fromhex("160301020001000 1fc0303".replace(" ", "")) + bytes(range(1, 200)),
        b"\xff" * 100_000,
        bytes(range(256)) * 8,
        PREFIX.pack(0, 0, 1, Kind.PING, 0x40, 0),
        PREFIX.pack(0, 0, 1, Kind.PING, 0, 1),
        PREFIX.pack(10, 11, 1, Kind.PING, 0, 0),
        PREFIX.pack(4, 1, 1, Kind.PING, 0, 0),
    ],
    ids=["http", "tls", "ones", "counting", "unknown flag", "not zero", "body longer than frame", "cut padding"],
)
def test_bytes_that_are_no_frames_are_refused_with_a_reason(broker: WatchedBroker, data: bytes, hello: bool) -> None:
    assert isinstance(refusal(broker, data, hello=hello), ProtocolError)


def test_a_tls_client_on_the_plain_port_fails_its_handshake(broker: WatchedBroker) -> None:
    context = ssl.create_default_context()
    with socket.create_connection(broker.address, timeout=10) as plain, pytest.raises((ssl.SSLError, OSError)):
        context.wrap_socket(plain, server_hostname="localhost")


@pytest.mark.parametrize(
    ("hello", "length", "limit"),
    [
        (False, FIRST_FRAME_BYTES + 1, FIRST_FRAME_BYTES),
        (False, 0xFFFF_FFFF, FIRST_FRAME_BYTES),
        (True, MAX_FRAME_BYTES + 1, MAX_FRAME_BYTES),
        (True, 0xFFFF_FFFF, MAX_FRAME_BYTES),
    ],
)
def test_a_frame_above_the_limit_is_refused_when_it_is_announced(
    broker: WatchedBroker, hello: bool, length: int, limit: int
) -> None:
    reason = refusal(broker, PREFIX.pack(length, 0, 1, Kind.PING, 0, 0), hello=hello)
    assert isinstance(reason, FrameTooLarge)
    assert f"{length} bytes was announced; the limit is {limit}" in str(reason)


def test_a_body_above_its_limit_is_refused_when_it_is_announced(broker: WatchedBroker) -> None:
    size = MAX_BODY_BYTES + 1
    assert isinstance(refusal(broker, PREFIX.pack(size, size, 1, Kind.ADMIN, 0, 0), hello=True), ProtocolError)


def test_a_hundred_large_frames_that_are_announced_and_never_come_cost_next_to_nothing(broker: WatchedBroker) -> None:
    before = broker.resident_bytes
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(broker.connect()) for _ in range(100)]
        for client in clients:
            client.socket.sendall(PREFIX.pack(MAX_FRAME_BYTES, 0, 1, Kind.PUBLISH, 0, 0) + b"x")
        with broker.connect() as other:
            other.ping()
            assert broker.resident_bytes - before < 50 * MEGABYTES
    wait_until(lambda: broker.open_sockets < 50, "the sockets are closed")


def test_bodies_that_cannot_be_decoded_are_refused(broker: WatchedBroker) -> None:
    kinds = [
        Kind.TOPOLOGY, Kind.JOIN, Kind.RELEASE, Kind.LEAVE, Kind.OPEN, Kind.CREDIT, Kind.ACK, Kind.CLOSE,
        Kind.POSITIONS, Kind.ADMIN, Kind.STORED,
    ]  # fmt: skip
    deep = b"\x92\xa1a\x81\xa1b" + b"\x91" * 100_000 + b"\xc0"
    bodies = [b"", b"\xc1", b"\x90", b"\x80", b"\x91\x91\xa2\xff\xfe", b"\xdd\xff\xff\xff\xff", b"\x93\x01", deep]
    for kind in kinds:
        for body in bodies:
            with broker.connect() as client, pytest.raises((ProtocolError, Ended)):
                client.reply(client.send(kind, body))


# ── hello ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [Kind.PING, Kind.PUBLISH, Kind.ADMIN, Kind.DELIVER, 200, 0])
def test_the_first_frame_has_to_be_hello(broker: WatchedBroker, kind: int) -> None:
    reason = refusal(broker, encode_frame(kind, b"", request=1), hello=False)
    assert isinstance(reason, ProtocolError)
    assert "the first frame of a connection is HELLO" in str(reason)


@pytest.mark.parametrize(
    ("hello", "error"),
    [
        (Hello("kafka", 1, 1, "me"), ProtocolError),
        (Hello("", 1, 1, "me"), ProtocolError),
        (Hello(MAGIC, 0, 0, "old"), UnsupportedVersion),
        (Hello(MAGIC, VERSION + 1, VERSION + 9, "from the future"), UnsupportedVersion),
        (Hello(MAGIC, 5, -5, "confused"), UnsupportedVersion),
        (Hello(MAGIC, 1 << 63, (1 << 64) - 1, "huge"), UnsupportedVersion),
    ],
)
def test_a_hello_that_cannot_be_accepted_is_answered_and_the_connection_closed(
    broker: WatchedBroker, hello: Hello, error: type[BraidError]
) -> None:
    with broker.connect(hello=False) as client:
        with pytest.raises(error):
            client.ask(Kind.HELLO, hello, HelloReply)
        with pytest.raises(Ended):
            client.next_frame()


def test_a_newer_client_that_also_speaks_this_version_is_welcome(broker: WatchedBroker) -> None:
    with broker.connect(hello=False) as client:
        body = [MAGIC, VERSION, VERSION + 3, "newer", "", ["teleport"], {"unknown": "field"}]
        assert client.ask(Kind.HELLO, body, HelloReply).version == VERSION
        client.ping()


def test_hello_with_garbage_as_its_body_is_refused(broker: WatchedBroker) -> None:
    for body in (b"", b"\xc1", b"\x91\x01", b"\x94\xa5braid\x01\x01\xa2\xff\xfe"):
        assert isinstance(refusal(broker, encode_frame(Kind.HELLO, body, request=1), hello=False), ProtocolError)


def test_a_long_client_name_and_a_long_token_do_no_harm(broker: WatchedBroker) -> None:
    with broker.connect(hello=False) as client:
        reply = client.ask(Kind.HELLO, Hello(MAGIC, 1, 1, "x" * 30_000, "t" * 30_000), HelloReply)
        assert reply.version == VERSION


def test_a_second_hello_changes_nothing(broker: WatchedBroker) -> None:
    with broker.connect() as client:
        with pytest.raises(ProtocolError):
            client.ask(Kind.HELLO, HELLO, HelloReply)
        with contextlib.suppress(Ended, ConnectionError):
            client.ping()


def test_a_client_that_sends_replies_is_refused(broker: WatchedBroker) -> None:
    for flags in (Flags.REPLY, Flags.ERROR, Flags.REPLY | Flags.ERROR):
        reason = refusal(broker, encode_frame(Kind.PING, b"", request=1, flags=flags), hello=True)
        assert isinstance(reason, ProtocolError)
