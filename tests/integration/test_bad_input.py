"""A real broker, and clients that send what no client should: a clear error, the broker lives, memory is bounded."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from crc32c import crc32c

from braid.broker.connections.session import COMMIT_FRAMES
from braid.model.batch.columns import encode_batch
from braid.model.batch.header import Flag, control_batch, verify
from braid.model.errors import (
    BatchCorrupt,
    BatchTooLarge,
    BatchTruncated,
    BatchUnsupported,
    BraidError,
    ConnectionLost,
    FrameTooLarge,
    InvalidArgument,
    InvalidName,
    NotAvailable,
    NotServing,
    OffsetOutOfRange,
    OutOfSequence,
    Overloaded,
    ProtocolError,
    SegmentNotFound,
    StaleRoute,
    SubscriptionNotFound,
    TopicNotFound,
    UnknownOperation,
    UnsupportedVersion,
)
from braid.model.hashing import key_hash
from braid.wire.frame import FIRST_FRAME_BYTES, MAX_BODY_BYTES, MAX_FRAME_BYTES, PREFIX, Flags, encode_frame
from braid.wire.operations import (
    MAGIC,
    VERSION,
    Ack,
    AdminRequest,
    Assignment,
    Close,
    Credit,
    Delivery,
    Hello,
    HelloReply,
    Join,
    Joined,
    Kind,
    Leave,
    Need,
    Open,
    Opened,
    Positions,
    PositionsRequest,
    Published,
    Release,
    Route,
    Topology,
    TopologyRequest,
    decode,
    encode,
)
from tests.kits.raw_client import HELLO, Ended, RawClient, WatchedBroker, tracebacks
from tests.kits.tls_files import make_certificate
from tests.kits.waiting import wait_until

PLENTY = 1 << 20
MEGABYTES = 1_000_000
SHORT: dict[str, Any] = {"hello_timeout_s": 0.5, "heartbeat_s": 1.0, "max_connections": 5, "max_channels": 3}
SOON_S = 15.0
"""Some three seconds, on a machine that has other things to do."""

topic_numbers = iter(range(1_000_000))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedBroker]:
    with WatchedBroker(tmp_path_factory.mktemp("broker")) as broker:
        yield broker
        broker.end()


@pytest.fixture(scope="module")
def running_short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedBroker]:
    """With limits that are quickly reached."""
    settings: dict[str, Any] = {"limits": SHORT, "groups": {"session_grace_s": 0.1}}
    with WatchedBroker(tmp_path_factory.mktemp("broker"), **settings) as broker:
        yield broker
        broker.end()


def survives(broker: WatchedBroker) -> Iterator[WatchedBroker]:
    before = broker.resident_bytes
    yield broker
    assert broker.running, f"the broker died:\n{broker.log[-4000:]}"
    with contextlib.ExitStack() as stack:
        wait_until(lambda: can_connect(broker), "the broker takes connections again")
        client = stack.enter_context(broker.connect())
        topic = make_topic(client)
        assert client.ask(Kind.PUBLISH, topic.route, Published, a_batch()) == Published(0, False)
    assert tracebacks(broker.log) == []
    assert broker.resident_bytes - before < 100 * MEGABYTES


def can_connect(broker: WatchedBroker) -> bool:
    try:
        broker.connect().socket.close()
    except (BraidError, Ended):
        return False
    return True


@pytest.fixture
def broker(running: WatchedBroker) -> Iterator[WatchedBroker]:
    yield from survives(running)


@pytest.fixture
def short(running_short: WatchedBroker) -> Iterator[WatchedBroker]:
    yield from survives(running_short)


class MadeTopic:
    def __init__(self, path: str, topology: Topology) -> None:
        (self.described,) = topology.topics
        self.path = path
        self.id = self.described.topic_id

    @property
    def route(self) -> Route:
        return self.to(0)

    def to(self, segment: int) -> Route:
        return Route(self.path, self.id, segment, self.described.layout_epoch)

    def open(
        self, channel: int = 1, *, segment: int = 0, credit: int = PLENTY, session: int = 0, offset: int = -1
    ) -> Open:
        return Open(channel, self.path, self.id, segment, credit, session, offset)

    def open_as(self, assignment: Assignment, channel: int = 1, *, term: int = 0, grant: int = 0) -> Open:
        """For the subscription `s`, at the grant that the assignment gives, or one that is so much higher."""
        read_grant = (assignment.term + term, assignment.grants[0] + grant)
        return Open(channel, self.path, self.id, assignment.segments[0], PLENTY, 0, 0, "s", *read_grant)


def make_topic(client: RawClient, segments: int = 1) -> MadeTopic:
    path = f"public/default/topic-{next(topic_numbers)}"
    client.admin("create_topic", topic=path, segments=segments)
    return MadeTopic(path, client.topic(path))


def a_batch(*values: bytes, **options: Any) -> bytearray:
    return encode_batch(list(values) or [b"value"], now_us=1_700_000_000_000_000, **options)


def refusal(broker: WatchedBroker, data: bytes, *, hello: bool) -> BraidError:
    """How the broker ends a connection on which this came."""
    with broker.connect(hello=hello) as client:
        client.socket.sendall(data)
        reason = client.ended_with()
        assert reason is not None, "the broker did not say why"
        return reason


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
        Kind.POSITIONS, Kind.ADMIN,
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


# ── operations ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "kind", [0, 5, 15, 99, 200, 255, Kind.DELIVER, Kind.ASSIGN, Kind.NEED, Kind.CLOSED, Kind.EXPEL]
)
def test_operations_that_the_broker_does_not_take_are_answered_and_the_connection_lives(
    broker: WatchedBroker, kind: int
) -> None:
    with broker.connect() as client:
        for body in (b"", encode(Delivery(1, 1)), b"\xc1" * 1_000):
            with pytest.raises(UnknownOperation):
                client.reply(client.send(kind, body))
        client.send(kind, b"", request=0)
        client.ping()


def test_fields_and_payloads_that_nobody_asked_for_are_ignored(broker: WatchedBroker) -> None:
    with broker.connect() as client:
        client.reply(client.send(Kind.PING, b"\xc1garbage", b"payload" * 100))
        topic = make_topic(client)
        client.ask(Kind.TOPOLOGY, [[topic.path], 0, "from", "the future"], Topology, b"payload")


@pytest.mark.parametrize(
    "name",
    ["", "no such topic", "a/b", "a/b/c/d", "../../etc/passwd", "public/default/..", "ä/ö/ü", "x" * 10_000, "\0"],
)
def test_names_that_cannot_be_are_refused_by_every_operation(broker: WatchedBroker, name: str) -> None:
    with broker.connect() as client:
        for kind, body in (
            (Kind.TOPOLOGY, TopologyRequest((name,))),
            (Kind.POSITIONS, PositionsRequest(name)),
            (Kind.JOIN, Join(name, "s", "c")),
            (Kind.JOIN, Join("public/default/t", name, "c")),
            (Kind.JOIN, Join("public/default/t", "s", name)),
            (Kind.OPEN, Open(1, name, 1, 0, 100)),
        ):
            with pytest.raises(InvalidName):
                client.reply(client.send(kind, body))
        with pytest.raises(InvalidName):
            client.ask(Kind.PUBLISH, Route(name, 1, 0, 0), Published, a_batch())
        with pytest.raises(InvalidName):
            client.admin("create_topic", topic=name)
        client.ping()


def test_topics_that_do_not_exist_are_not_found_by_every_operation(broker: WatchedBroker) -> None:
    ghost = "public/default/ghost"
    with broker.connect() as client:
        assert client.topic(ghost).topics[0].topic_id == 0
        for ask in (
            lambda: client.ask(Kind.PUBLISH, Route(ghost, 1, 0, 0), Published, a_batch()),
            lambda: client.ask(Kind.POSITIONS, PositionsRequest(ghost), Positions),
            lambda: client.ask(Kind.JOIN, Join(ghost, "s", "c"), Joined),
            lambda: client.ask(Kind.OPEN, Open(1, ghost, 1, 0, 100), Opened),
            lambda: client.admin("get_topic", topic=ghost),
            lambda: client.admin("topic_stats", topic=ghost),
            lambda: client.admin("delete_topic", topic=ghost),
        ):
            with pytest.raises(TopicNotFound, match="ghost"):
                ask()
        client.ping()


def test_admin_calls_of_the_wrong_shape_are_refused(broker: WatchedBroker) -> None:
    with broker.connect() as client:
        for call, arguments in (
            ("no_such_call", {}),
            ("__init__", {}),
            ("close", {}),
            ("create_topic", {}),
            ("create_topic", {"topic": 5}),
            ("create_topic", {"topic": "fine", "segments": "two"}),
            ("create_topic", {"topic": "fine", "segments": 0}),
            ("create_topic", {"topic": "fine", "segments": -1}),
            ("create_topic", {"topic": "fine", "segments": 1 << 40}),
            ("create_topic", {"topic": "fine", "unknown": 1}),
            ("create_topic", {"topic": "fine", "policies": {"durability": "hope"}}),
            ("seek_subscription", {"topic": "fine"}),
        ):
            with pytest.raises(BraidError) as raised:
                client.admin(call, **arguments)
            assert isinstance(raised.value, InvalidArgument | NotAvailable), (call, arguments)
        client.ping()


# ── publishing ───────────────────────────────────────────────────────────────────────────────────────────────────────


def changed(batch: bytearray, at: int, kind: str, value: int) -> bytearray:
    """The batch with one header field changed, under a checksum that is right."""
    struct.pack_into(kind, batch, at, value)
    struct.pack_into("<I", batch, 92, crc32c(memoryview(batch)[:92]))
    return batch


def flipped(batch: bytearray, at: int) -> bytearray:
    batch[at] ^= 1
    return batch


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: flipped(a_batch(), 20), BatchCorrupt),
        (lambda: flipped(a_batch(), 150), BatchCorrupt),
        (lambda: a_batch()[:95], BatchTruncated),
        (lambda: a_batch()[:-8], BatchTruncated),
        (lambda: a_batch() + bytes(8), InvalidArgument),
        (lambda: a_batch() + a_batch(), InvalidArgument),
        (lambda: bytearray(200), BatchCorrupt),
        (lambda: bytearray(b"x"), BatchTruncated),
        (lambda: changed(a_batch(), 4, "B", 9), BatchUnsupported),
        (lambda: changed(a_batch(), 5, "B", 9), BatchUnsupported),
        (lambda: changed(a_batch(), 6, "<H", 0x100), BatchUnsupported),
        (lambda: changed(a_batch(), 12, "<I", 0xFFFF_FFF0), BatchTooLarge),
        (lambda: changed(a_batch(), 16, "<I", 0xFFFF_FFF0), BatchTooLarge),
        (lambda: changed(a_batch(), 24, "<I", 0xFFFF_FFF0), BatchTooLarge),
        (lambda: changed(a_batch(), 24, "<I", 0), BatchCorrupt),
        (lambda: control_batch(Flag.SEAL), InvalidArgument),
        (lambda: control_batch(Flag.BEGIN), InvalidArgument),
        (lambda: a_batch(producer_id=77, first_sequence=5), OutOfSequence),
        (lambda: bytearray(MAX_FRAME_BYTES - 4096), BatchTooLarge),
    ],
    ids=["header checksum", "body checksum", "cut header", "cut body", "zeros behind it", "two batches", "zeros",
         "a byte", "version", "codec", "flags", "body length", "raw length", "count", "no records", "seal", "begin",
         "sequence", "too large"],
)  # fmt: skip
def test_a_batch_that_is_wrong_is_refused_and_nothing_is_stored(
    broker: WatchedBroker, make: Callable[[], bytearray], error: type[BraidError]
) -> None:
    with broker.connect() as client:
        topic = make_topic(client)
        with pytest.raises(error):
            client.ask(Kind.PUBLISH, topic.route, Published, make())
        assert client.ask(Kind.PUBLISH, topic.route, Published, a_batch()).base_offset == 0
        (positions,) = client.ask(Kind.POSITIONS, PositionsRequest(topic.path), Positions).segments
        assert (positions.earliest, positions.end, positions.sealed) == (0, 1, False)


def test_what_a_producer_writes_into_the_owners_half_does_not_count(broker: WatchedBroker) -> None:
    batch = changed(a_batch(b"a", b"b"), 64, "<Q", 1_000_000)
    with broker.connect() as client:
        topic = make_topic(client)
        assert client.ask(Kind.PUBLISH, topic.route, Published, batch).base_offset == 0
        client.ask(Kind.OPEN, topic.open(), Opened)
        payload = client.push(Kind.DELIVER).payload
        assert payload is not None
        assert verify(payload).next_offset == 2


def test_routes_that_are_not_the_topics_are_refused(broker: WatchedBroker) -> None:
    with broker.connect() as client:
        topic = make_topic(client, segments=2)
        epoch = topic.described.layout_epoch
        for route in (
            Route(topic.path, topic.id + 1, 0, epoch),
            Route(topic.path, 0, 0, epoch),
            Route(topic.path, topic.id, 2, epoch),
            Route(topic.path, topic.id, -1, epoch),
            Route(topic.path, topic.id, (1 << 64) - 1, epoch),
            Route(topic.path, topic.id, 0, epoch + 1),
            Route(topic.path, topic.id, 0, -1),
        ):
            with pytest.raises(StaleRoute):
                client.ask(Kind.PUBLISH, route, Published, a_batch())
        lower = next(key for key in (b"key-%d" % n for n in range(99)) if key_hash(key) < 0x8000)
        with pytest.raises(StaleRoute, match="key hashes"):
            client.ask(Kind.PUBLISH, topic.to(1), Published, a_batch(keys=[lower]))
        assert client.ask(Kind.PUBLISH, topic.to(0), Published, a_batch(keys=[lower])).base_offset == 0


def test_a_publish_that_could_never_be_confirmed_ends_the_connection(broker: WatchedBroker) -> None:
    with broker.connect() as client:
        topic = make_topic(client)
    without_id = encode_frame(Kind.PUBLISH, encode(topic.route), payload_bytes=len(a_batch())) + a_batch()
    assert isinstance(refusal(broker, without_id, hello=True), ProtocolError)
    without_batch = encode_frame(Kind.PUBLISH, encode(topic.route), request=1)
    assert isinstance(refusal(broker, without_batch, hello=True), ProtocolError)


@pytest.mark.parametrize(("count", "padding"), [(3_000, 1), (600, 400_000)], ids=["many", "large"])
def test_routes_that_differ_in_fields_from_the_future_cost_bounded_memory(
    broker: WatchedBroker, count: int, padding: int
) -> None:
    before = broker.resident_bytes
    with broker.connect() as client:
        topic = make_topic(client)
        requests = []
        for number in range(count):
            body = [topic.path, topic.id, 0, topic.described.layout_epoch, "x" * padding, number]
            requests.append(client.send(Kind.PUBLISH, body, a_batch()))
            if len(requests) == 20:
                for request in requests:
                    client.reply(request)
                requests.clear()
        assert broker.resident_bytes - before < 100 * MEGABYTES


# ── consuming ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_credits_that_cannot_be_are_refused(broker: WatchedBroker) -> None:
    with broker.connect() as client:
        topic = make_topic(client)
        for credit in (-1, (1 << 31) + 1, (1 << 64) - 1, -(1 << 63)):
            with pytest.raises(InvalidArgument, match="a credit of"):
                client.ask(Kind.OPEN, topic.open(credit=credit), Opened)
    for credit in (0, -1, (1 << 31) + 1, (1 << 64) - 1):
        with broker.connect() as client:
            client.ask(Kind.OPEN, topic.open(), Opened)
            client.send(Kind.CREDIT, Credit(1, credit), request=0)
            assert isinstance(client.ended_with(), ProtocolError)


def test_credit_adds_up_to_its_limit_and_credit_for_unknown_channels_is_ignored(broker: WatchedBroker) -> None:
    with broker.connect() as client:
        topic = make_topic(client)
        client.ask(Kind.OPEN, topic.open(credit=0), Opened)
        for _ in range(10):
            client.send(Kind.CREDIT, Credit(1, 1 << 31), request=0)
            client.send(Kind.CREDIT, Credit(99, 1 << 31), request=0)
        client.ask(Kind.PUBLISH, topic.route, Published, a_batch())
        assert client.push(Kind.DELIVER).payload is not None


def test_nothing_is_delivered_beyond_the_credit(broker: WatchedBroker) -> None:
    with broker.connect() as client:
        topic = make_topic(client)
        batch = a_batch(b"x" * 1_000)
        client.ask(Kind.OPEN, topic.open(credit=len(batch) - 1), Opened)
        for _ in range(3):
            client.ask(Kind.PUBLISH, topic.route, Published, batch)
        need = decode(Need, client.push(Kind.NEED).body)
        assert need == Need(1, len(batch))
        client.ping()
        assert client.pushes == []
        client.send(Kind.CREDIT, Credit(1, 1), request=0)
        delivered = client.push(Kind.DELIVER)
        assert delivered.payload is not None
        assert len(delivered.payload) == len(batch)
        client.ping()
        assert [frame.kind for frame in client.pushes if frame.kind == Kind.DELIVER] == []


@pytest.mark.parametrize("channel", [0, -1, 1 << 32, (1 << 64) - 1])
def test_channel_numbers_that_cannot_be_end_the_connection(broker: WatchedBroker, channel: int) -> None:
    with broker.connect() as client:
        topic = make_topic(client)
        client.send(Kind.OPEN, topic.open(channel))
        assert isinstance(client.ended_with(), ProtocolError)


def test_a_channel_number_that_is_in_use_ends_the_connection(broker: WatchedBroker) -> None:
    with broker.connect() as client:
        topic = make_topic(client)
        client.ask(Kind.OPEN, topic.open(7), Opened)
        client.send(Kind.OPEN, topic.open(7))
        assert isinstance(client.ended_with(), ProtocolError)


def test_opening_what_is_not_there_is_refused(broker: WatchedBroker) -> None:
    with broker.connect() as client:
        topic = make_topic(client)
        client.ask(Kind.PUBLISH, topic.route, Published, a_batch(b"a", b"b"))
        refused: list[tuple[Open, type[BraidError]]] = [
            (topic.open(segment=5), SegmentNotFound),
            (topic.open(segment=-1), SegmentNotFound),
            (topic.open(segment=(1 << 64) - 1), SegmentNotFound),
            (Open(1, topic.path, topic.id + 1, 0, 100), TopicNotFound),
            (topic.open(session=12345), InvalidArgument),
            (topic.open(session=-1), InvalidArgument),
            (Open(1, topic.path, topic.id, 0, 100, 0, 0, "nobody", 1, 1), NotServing),
            (topic.open(offset=3), OffsetOutOfRange),
            (topic.open(offset=-2), OffsetOutOfRange),
            (topic.open(offset=(1 << 64) - 1), OffsetOutOfRange),
        ]
        for request, error in refused:
            with pytest.raises(error) as raised:
                client.ask(Kind.OPEN, request, Opened)
            if isinstance(raised.value, OffsetOutOfRange):
                assert (raised.value.earliest, raised.value.end) == (0, 2)
        assert client.ask(Kind.OPEN, topic.open(offset=2), Opened) == Opened(2, 2)


def joined(client: RawClient, topic: MadeTopic, consumer: str = "worker") -> Assignment:
    session = client.ask(Kind.JOIN, Join(topic.path, "s", consumer, "earliest"), Joined).session
    while True:
        assignment = decode(Assignment, client.push(Kind.ASSIGN).body)
        if assignment.session == session and assignment.segments:
            return assignment


def test_acks_that_cannot_be_are_refused_and_move_nothing(broker: WatchedBroker) -> None:
    with broker.connect() as client:
        topic = make_topic(client)
        client.ask(Kind.PUBLISH, topic.route, Published, a_batch(b"a", b"b"))
        client.ask(Kind.OPEN, topic.open_as(joined(client, topic), 1), Opened)
        client.ask(Kind.OPEN, topic.open(2), Opened)
        for ack, error in (
            (Ack(1, 3), InvalidArgument),
            (Ack(1, (1 << 64) - 1), InvalidArgument),
            (Ack(1, 3, True), InvalidArgument),
            (Ack(2, 1), InvalidArgument),
            (Ack(99, 1), NotServing),
            (Ack(-1, 1), NotServing),
        ):
            with pytest.raises(error):
                client.reply(client.send(Kind.ACK, ack))
            client.send(Kind.ACK, ack, request=0)
        client.reply(client.send(Kind.ACK, Ack(1, 1)))
        for behind in (0, -1, -(1 << 63), 1):
            client.reply(client.send(Kind.ACK, Ack(1, behind, True)))
        described = client.admin("get_subscription", topic=topic.path, subscription="s")
        assert described["segments"]["0"]["offset"] == 1


def test_a_segment_is_opened_by_who_has_it_and_by_nobody_with_an_older_word(broker: WatchedBroker) -> None:
    with broker.connect() as first, broker.connect() as second:
        topic = make_topic(first)
        held = joined(first, topic, "a")
        other = second.ask(Kind.JOIN, Join(topic.path, "s", "b", "earliest"), Joined)
        first.ask(Kind.OPEN, topic.open_as(held, 7), Opened)
        for older in ({"grant": -1}, {"term": -1}, {"term": -1, "grant": 10}):
            with pytest.raises(NotServing, match="out of date"):
                second.ask(Kind.OPEN, topic.open_as(held, **older), Opened)
        for release in (Release(held.session, 0), Release(999, 0)):
            with pytest.raises(NotServing):
                second.reply(second.send(Kind.RELEASE, release))
        second.reply(second.send(Kind.RELEASE, Release(other.session, 0)))
        second.reply(second.send(Kind.LEAVE, Leave(held.session)))
        again = first.ask(Kind.OPEN, topic.open_as(held, 8), Opened)
        assert (again.offset, again.end) == (0, 0)


def test_joins_that_cannot_be_are_refused(broker: WatchedBroker) -> None:
    with broker.connect() as client:
        topic = make_topic(client)
        refused: list[tuple[Join, type[BraidError]]] = [
            (Join(topic.path, "s", "c", "yesterday"), InvalidArgument),
            (Join(topic.path, "s", "c", "latest", "pigeon"), InvalidArgument),
            (Join(topic.path, "s", "c", "latest", "queue"), NotAvailable),
            (Join(topic.path, "s", "c", "latest", "stream", False), SubscriptionNotFound),
        ]
        for join, error in refused:
            with pytest.raises(error):
                client.ask(Kind.JOIN, join, Joined)
        assert client.admin("list_subscriptions", topic=topic.path) == []
        for leave in (Leave(0), Leave(-5), Leave((1 << 64) - 1)):
            client.reply(client.send(Kind.LEAVE, leave))
        client.reply(client.send(Kind.CLOSE, Close(12345)))


@pytest.mark.parametrize("timestamp", [0, -1, -(1 << 63), 1 << 62, (1 << 64) - 1])
def test_positions_at_any_time_are_answered(broker: WatchedBroker, timestamp: int) -> None:
    with broker.connect() as client:
        topic = make_topic(client)
        client.ask(Kind.PUBLISH, topic.route, Published, a_batch(b"a", b"b"))
        (positions,) = client.ask(Kind.POSITIONS, PositionsRequest(topic.path, timestamp), Positions).segments
        assert positions.at_time == (0 if timestamp <= 0 else 2)


# ── chance ───────────────────────────────────────────────────────────────────────────────────────────────────────────

REQUESTS: dict[Kind, type[Any]] = {
    Kind.TOPOLOGY: TopologyRequest,
    Kind.PUBLISH: Route,
    Kind.JOIN: Join,
    Kind.RELEASE: Release,
    Kind.LEAVE: Leave,
    Kind.OPEN: Open,
    Kind.CREDIT: Credit,
    Kind.ACK: Ack,
    Kind.CLOSE: Close,
    Kind.POSITIONS: PositionsRequest,
}
CALLS = (
    "list_topics", "create_topic", "get_topic", "topic_stats", "create_subscription",
    "list_subscriptions", "get_subscription", "delete_subscription", "seek_subscription", "skip_subscription",
    "split_segment", "merge_segments", "repartition_topic", "move_topic", "get_auto_scale_policy", "create_segment",
    "list_brokers", "drain_broker", "topology",
)  # fmt: skip
ARGUMENTS = (
    "topic", "subscription", "segments", "segment", "start", "kind", "to", "timestamp", "offsets", "force", "policies",
    "properties", "tenant", "namespace", "count", "broker", "policy", "descriptor", "at",
)  # fmt: skip
NUMBERS = (0, 1, 2, 3, 7, -1, -2, 100, 1 << 20, 1 << 31, 1 << 32, 1 << 53, (1 << 63) - 1, 1 << 63, -(1 << 63))


def any_message(random: Random, kind: type[Any], words: tuple[str, ...]) -> Any:
    """A message of the right types with values from anywhere."""
    hints = get_type_hints(kind)
    return kind(*(any_value(random, hints[name], words) for name in kind.__struct_fields__))


def any_value(random: Random, kind: Any, words: tuple[str, ...]) -> Any:
    if kind is int:
        return random.choice(NUMBERS)
    if kind is str:
        return random.choice(words)
    if kind is bool:
        return random.random() < 0.5
    if get_origin(kind) is tuple:
        return tuple(any_value(random, get_args(kind)[0], words) for _ in range(random.randrange(3)))
    return random.choice((None, *NUMBERS))


def any_argument(random: Random, words: tuple[str, ...], depth: int = 2) -> Any:
    match random.randrange(8 if depth else 5):
        case 0:
            return random.choice(NUMBERS)
        case 1 | 2:
            return random.choice(words)
        case 3:
            return random.choice((None, True, False, 1.5, float("inf"), b"bytes"))
        case 4:
            return random.choice(("", "\0", "x" * 300, "../..", "é"))
        case 5:
            return [any_argument(random, words, depth - 1) for _ in range(random.randrange(3))]
        case _:
            return {random.choice(words): any_argument(random, words, depth - 1) for _ in range(random.randrange(3))}


@pytest.mark.parametrize("seed", range(8))
def test_whatever_a_client_asks_for_is_answered_or_refused_and_breaks_nothing(broker: WatchedBroker, seed: int) -> None:
    random = Random(seed)
    with broker.connect() as setup:
        topic = make_topic(setup, segments=2)
        setup.ask(Kind.PUBLISH, topic.route, Published, a_batch(b"a", b"b"))
    words = (topic.path, topic.path, topic.path, "s", "c", "earliest", "latest", "stream", "queue", "", "a/b", "0", "1")
    outcomes: list[str] = []
    client = broker.connect()
    try:
        for _ in range(400):
            kind, body, payload = any_request(random, topic, words)
            code = outcome(client, kind, body, payload)
            assert code != "broken-invariant", body
            outcomes.append(code)
            if code in ("ended", "protocol"):
                client.socket.close()
                client = broker.connect()
    finally:
        client.socket.close()
    assert outcomes.count("answered") > 50
    assert len(set(outcomes)) > 5
    with broker.connect() as setup:
        setup.admin("delete_topic", topic=topic.path, force=True)


def any_request(random: Random, topic: MadeTopic, words: tuple[str, ...]) -> tuple[Kind, Any, bytearray]:
    if random.random() < 0.4:
        arguments = {name: any_argument(random, words) for name in random.sample(ARGUMENTS, random.randrange(5))}
        if random.random() < 0.8:
            arguments["topic"] = topic.path
        return Kind.ADMIN, AdminRequest(random.choice(CALLS), arguments), bytearray()
    kind = random.choice(list(REQUESTS))
    body = any_message(random, REQUESTS[kind], words)
    if random.random() < 0.5:
        body = with_ids(body, topic)
    return kind, body, a_batch(producer_id=random.choice((0, 5))) if random.random() < 0.7 else bytearray()


def outcome(client: RawClient, kind: Kind, body: Any, payload: bytearray) -> str:
    """`answered`, `ended`, or the code of the error."""
    try:
        request = client.send(kind, body, payload)
        if kind != Kind.CREDIT:
            client.reply(request)
    except (Ended, ConnectionError):
        return "ended"
    except BraidError as error:
        return error.code
    return "answered"


def with_ids(body: Any, topic: MadeTopic) -> Any:
    """The message with names and ids that exist, so that it gets further."""
    right = {
        "topic": topic.path, "topic_id": topic.id, "layout_epoch": topic.described.layout_epoch, "segment": 0,
        "subscription": "s", "consumer": "c", "start": "earliest", "kind": "stream", "create": True, "credit": PLENTY,
    }  # fmt: skip
    known = body.__struct_fields__
    return msgspec.structs.replace(body, **{name: value for name, value in right.items() if name in known})


# ── silence, slowness and crowds ─────────────────────────────────────────────────────────────────────────────────────


def test_a_connection_without_a_hello_is_closed_in_time(short: WatchedBroker) -> None:
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(short.connect(hello=False)) for _ in range(3)]
        whole = encode_frame(Kind.HELLO, encode(HELLO), request=1)
        for client, data in zip(clients, (b"", b"\x10", whole[:-1]), strict=True):
            client.socket.sendall(data)
        for client in clients:
            assert isinstance(client.ended_with(), ConnectionLost)
    assert time.monotonic() - started < SOON_S


def test_half_a_frame_and_then_silence_is_closed_in_time(short: WatchedBroker) -> None:
    frame = encode_frame(Kind.PUBLISH, b"x" * 30, request=1, payload_bytes=1_000) + bytes(1_000)
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(short.connect()) for _ in range(4)]
        for client, cut in zip(clients, (1, 16, 20, 500), strict=True):
            client.socket.sendall(frame[:cut])
        for client in clients:
            assert isinstance(client.ended_with(), ConnectionLost)
    assert time.monotonic() - started < SOON_S


def test_a_client_that_says_nothing_is_closed_and_one_that_pings_is_not(short: WatchedBroker) -> None:
    with short.connect() as silent, short.connect() as lively:
        assert silent.hello.heartbeat_ms == 1_000
        stop = threading.Event()

        def ping() -> None:
            while not stop.wait(0.2):
                lively.ping()

        pinging = threading.Thread(target=ping)
        pinging.start()
        try:
            reason = silent.ended_with()
        finally:
            stop.set()
            pinging.join()
        assert isinstance(reason, ConnectionLost)
        assert "no whole frame came" in str(reason)
        lively.ping()


def test_a_slow_loris_that_sends_a_byte_now_and_then_is_closed(short: WatchedBroker) -> None:
    with short.connect() as client:
        client.socket.sendall(PREFIX.pack(1_000_000, 0, 1, Kind.PUBLISH, 0, 0))
        started = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - started < 2 * SOON_S:
                client.socket.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() - started < SOON_S, "a byte is no sign of life"


def test_more_connections_than_the_limit_are_refused_with_a_reason(short: WatchedBroker) -> None:
    limit = SHORT["max_connections"]
    with contextlib.ExitStack() as stack:
        wait_until(lambda: short.open_sockets < 20, "earlier connections are gone")
        clients: list[RawClient] = []
        refused: BraidError | None = None
        for _ in range(limit + 1):
            try:
                clients.append(stack.enter_context(short.connect()))
            except Overloaded as error:
                refused = error
        assert len(clients) == limit
        assert refused is not None
        assert f"{limit} clients are connected" in str(refused)
        with short.connect(hello=False) as unannounced:
            assert isinstance(unannounced.ended_with(), Overloaded)
        clients[0].ping()
        clients[0].socket.close()
        wait_until(lambda: can_connect(short), "there is room again")


def test_more_channels_than_the_limit_are_refused(short: WatchedBroker) -> None:
    with short.connect() as client:
        topic = make_topic(client)
        for number in range(1, SHORT["max_channels"] + 1):
            client.ask(Kind.OPEN, topic.open(number), Opened)
        with pytest.raises(Overloaded, match="channels"):
            client.ask(Kind.OPEN, topic.open(50), Opened)
        client.reply(client.send(Kind.CLOSE, Close(1)))
        client.ask(Kind.OPEN, topic.open(51), Opened)


def test_a_connection_may_ask_for_any_number_of_topics_but_not_for_a_million_at_once(broker: WatchedBroker) -> None:
    with broker.connect() as client:
        paths = tuple(f"public/default/t-{number}" for number in range(4_000))
        for more in ("", "", "-more"):
            asked = tuple(path + more for path in paths)
            assert len(client.ask(Kind.TOPOLOGY, TopologyRequest(asked), Topology).topics) == 4_000
        started = time.monotonic()
        with pytest.raises(Overloaded):
            client.ask(Kind.TOPOLOGY, TopologyRequest(("a",) * 1_500_000), Topology)
        client.ping()
        assert time.monotonic() - started < 3, "a million names hold nobody up"


def test_a_client_that_floods_the_broker_with_requests_gets_every_answer(broker: WatchedBroker) -> None:
    """More requests than the limit at once: the broker stops reading for a while and drops nothing."""
    with broker.connect() as client:
        topic = make_topic(client)
        requests = [client.send(Kind.POSITIONS, PositionsRequest(topic.path)) for _ in range(6_000)]
        for request in requests:
            client.reply(request)


def test_a_thousand_connections_that_do_nothing_cost_little_and_disturb_nobody(broker: WatchedBroker) -> None:
    before = broker.resident_bytes
    with contextlib.ExitStack() as stack:
        idle = []
        for _ in range(1_000):
            idle.append(stack.enter_context(broker.connect(hello=False)))
            idle[-1].send(Kind.HELLO, HELLO)
        for client in idle:
            client.next_frame()
        with broker.connect() as client:
            topic = make_topic(client)
            started = time.monotonic()
            for offset in range(200):
                assert client.ask(Kind.PUBLISH, topic.route, Published, a_batch()).base_offset == offset
            assert time.monotonic() - started < SOON_S
        cost = (broker.resident_bytes - before) / len(idle)
        assert cost < 64 * 1024, f"an idle connection costs {cost:.0f} bytes"
    wait_until(lambda: broker.open_sockets < 50, "the sockets are closed")


def test_a_consumer_that_never_reads_costs_bounded_memory_and_disturbs_nobody(broker: WatchedBroker) -> None:
    """It grants all the credit there is and takes nothing, while 300 MB are published and read by another one."""
    batch = a_batch(b"x" * 1_000_000)
    count = 300
    with broker.connect() as stuck, broker.connect() as publisher, broker.connect() as reader:
        topic = make_topic(publisher)
        for number in range(1, 11):
            stuck.ask(Kind.OPEN, topic.open(number, credit=1 << 31), Opened)
        reader.ask(Kind.OPEN, topic.open(1, credit=1 << 31), Opened)
        before = broker.resident_bytes
        failures: list[BaseException] = []

        def publish() -> None:
            try:
                waiting = [publisher.send(Kind.PUBLISH, topic.route, batch) for _ in range(4)]
                for _ in range(count - 4):
                    publisher.reply(waiting.pop(0))
                    waiting.append(publisher.send(Kind.PUBLISH, topic.route, batch))
                for request in waiting:
                    publisher.reply(request)
            except BaseException as error:
                failures.append(error)

        publishing = threading.Thread(target=publish)
        publishing.start()
        offset, most = 0, 0
        while offset < count:
            payload = reader.push(Kind.DELIVER).payload
            assert payload is not None
            at = 0
            while at < len(payload):
                header = verify(payload, at)
                assert header.base_offset == offset
                offset = header.next_offset
                at += header.size
            most = max(most, broker.resident_bytes)
        publishing.join()
        assert failures == []
        assert most - before < 120 * MEGABYTES, f"memory grew by {(most - before) / MEGABYTES:.0f} MB"
        stuck_bytes = stuck.socket.recv(1 << 20)
        assert stuck_bytes, "it gets what waits for it when it reads at last"


def test_a_stuck_consumer_loses_its_segments_to_another(short: WatchedBroker) -> None:
    batch = a_batch(b"x" * 4_000_000)
    with short.connect() as stuck, short.connect() as other:
        topic = make_topic(other)
        stuck.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        held = joined(stuck, topic, "a")
        stuck.ask(Kind.OPEN, msgspec.structs.replace(topic.open_as(held), credit=1 << 31), Opened)
        for _ in range(10):
            other.ask(Kind.PUBLISH, topic.route, Published, batch)
        session = other.ask(Kind.JOIN, Join(topic.path, "s", "b", "earliest"), Joined).session
        stop = threading.Event()

        def ping() -> None:
            while not stop.wait(0.2):
                other.send(Kind.PING, request=0)

        pinging = threading.Thread(target=ping)
        pinging.start()
        try:
            while not (assignment := decode(Assignment, other.push(Kind.ASSIGN).body)).segments:
                pass
        finally:
            stop.set()
            pinging.join()
        assert assignment.session == session
        opened = other.ask(Kind.OPEN, topic.open_as(assignment), Opened)
        assert (opened.offset, opened.end) == (0, 10)


def test_a_publisher_that_never_reads_its_confirms_is_not_read_from_for_ever(broker: WatchedBroker) -> None:
    """Its confirms fill its buffers; then the broker stops reading from it, and others go on."""
    with broker.connect() as rude, broker.connect() as client:
        topic = make_topic(client)
        rude.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        rude.socket.settimeout(1.0)
        frame = encode_frame(Kind.POSITIONS, encode(PositionsRequest("x" * 2_000)), request=1)
        before = broker.resident_bytes
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 400 * MEGABYTES:
                sent += rude.socket.send(frame * 50)
        assert sent < 400 * MEGABYTES, "the broker went on reading"
        assert broker.resident_bytes - before < 50 * MEGABYTES
        for offset in range(50):
            assert client.ask(Kind.PUBLISH, topic.route, Published, a_batch()).base_offset == offset


# ── TLS ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_handshakes_that_fail_or_never_end_leave_nothing_behind(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    tls = {"certificate": str(certificate), "key": str(key)}
    broker = WatchedBroker(tmp_path, limits={"hello_timeout_s": 0.5, "max_connections": 10}, tls=tls)
    context = ssl.create_default_context(cafile=str(certificate))

    def answers() -> bool:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(broker.address, timeout=5) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as wrapped,
        ):
            wrapped.sendall(encode_frame(Kind.HELLO, encode(HELLO), request=1))
            prefix = wrapped.recv(16)
            return len(prefix) == 16 and prefix[13] == Flags.REPLY
        return False

    with broker:
        assert answers()
        for data in (b"GET / HTTP/1.1\r\n\r\n", encode_frame(Kind.HELLO, encode(HELLO), request=1), b"\x16\x03\x01"):
            for _ in range(10):
                with socket.create_connection(broker.address, timeout=5) as plain:
                    plain.sendall(data)
        with contextlib.ExitStack() as stack:
            for _ in range(9):
                stack.enter_context(socket.create_connection(broker.address, timeout=5))
            wait_until(answers, "those who began no handshake have made room")
        wait_until(answers, "the broker still takes connections")
        assert tracebacks(broker.log) == []
        broker.end()
