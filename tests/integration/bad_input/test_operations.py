"""Operations and batches that a broker must refuse."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from crc32c import crc32c

from braid.model.batch.header import Flag, control_batch, verify
from braid.model.errors import (
    BatchCorrupt,
    BatchTooLarge,
    BatchTruncated,
    BatchUnsupported,
    BraidError,
    InvalidArgument,
    InvalidName,
    NotAvailable,
    NotServing,
    OutOfSequence,
    ProtocolError,
    StaleRoute,
    TopicNotFound,
    UnknownOperation,
)
from braid.model.hashing import key_hash
from braid.wire.frame import MAX_FRAME_BYTES, encode_frame
from braid.wire.operations import (
    Delivery,
    Join,
    Joined,
    Kind,
    Open,
    Opened,
    Positions,
    PositionsRequest,
    Published,
    Route,
    Stored,
    StoredRequest,
    Topology,
    TopologyRequest,
    encode,
)
from tests.kits.bad_input import MEGABYTES, a_batch, make_topic, refusal
from tests.kits.raw_client import WatchedBroker

pytestmark = pytest.mark.processes


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
            (Kind.STORED, StoredRequest(name, 1, 0, (7,))),
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
            lambda: client.ask(Kind.STORED, StoredRequest(ghost, 1, 0, (7,)), Stored),
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
        refusals: list[tuple[Route, type[BraidError]]] = [
            (Route(topic.path, topic.id + 1, 0, epoch), StaleRoute),
            (Route(topic.path, 0, 0, epoch), StaleRoute),
            (Route(topic.path, topic.id, 2, epoch), NotServing),
            (Route(topic.path, topic.id, -1, epoch), NotServing),
            (Route(topic.path, topic.id, (1 << 64) - 1, epoch), NotServing),
        ]
        for route, refused in refusals:
            with pytest.raises(refused):
                client.ask(Kind.PUBLISH, route, Published, a_batch())
        lower = next(key for key in (b"key-%d" % n for n in range(99)) if key_hash(key) < 0x8000)
        with pytest.raises(StaleRoute, match="key hashes"):
            client.ask(Kind.PUBLISH, topic.to(1), Published, a_batch(keys=[lower]))
        assert client.ask(Kind.PUBLISH, topic.to(0), Published, a_batch(keys=[lower])).base_offset == 0
        for offset, other_epoch in enumerate((epoch + 1, -1), 1):  # The segment's state and range count, not the epoch.
            route = Route(topic.path, topic.id, 0, other_epoch)
            assert client.ask(Kind.PUBLISH, route, Published, a_batch(keys=[lower])).base_offset == offset


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
