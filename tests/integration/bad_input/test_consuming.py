"""Credits, channels, acks and joins that a broker must refuse."""

from __future__ import annotations

import pytest

from braid.model.errors import (
    BraidError,
    InvalidArgument,
    NotServing,
    OffsetOutOfRange,
    ProtocolError,
    SegmentNotFound,
    SubscriptionNotFound,
    TopicNotFound,
)
from braid.wire.operations import (
    Ack,
    Close,
    Credit,
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
    decode,
)
from tests.kits.bad_input import a_batch, joined, make_topic
from tests.kits.raw_client import WatchedBroker

pytestmark = pytest.mark.processes


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
            (Join(topic.path, "s", "c", "latest", "queue"), InvalidArgument),
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
