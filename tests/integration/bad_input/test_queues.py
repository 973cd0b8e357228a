"""Clients that break the rules of queues: absurd numbers, leases and ranges, and consumers that never read."""

from __future__ import annotations

from typing import Any

import pytest

from braid.model.errors import BraidError, InvalidArgument, NotServing, Overloaded
from braid.wire.operations import (
    Kind,
    Published,
    QueueAnswer,
    QueueAnswered,
    QueueDelivery,
    QueueOpen,
    QueueOpened,
    decode,
)
from tests.kits.bad_input import MEGABYTES, MadeTopic, a_batch, make_topic
from tests.kits.raw_client import RawClient, WatchedBroker

U63, U64 = 1 << 63, (1 << 64) - 1


def make_queue(client: RawClient, messages: int = 5, value: bytes = b"x") -> MadeTopic:
    topic = make_topic(client)
    client.admin("create_subscription", topic=topic.path, subscription="s", kind="queue", ackTimeoutMs=60_000)
    for _ in range(messages):
        client.ask(Kind.PUBLISH, topic.route, Published, a_batch(value))
    return topic


def opening(topic: MadeTopic, channel: int = 1, /, **changes: Any) -> list[Any]:
    fields = {
        "channel": channel,
        "topic": topic.path,
        "topic_id": topic.id,
        "segment": 0,
        "subscription": "s",
        "consumer": "c",
        "prefetch": 10,
        "placement": 0,
        "holds": (),
    }
    return list((fields | changes).values())


@pytest.mark.parametrize(
    "changes",
    [
        {"channel": 0},
        {"channel": -1},
        {"channel": 1 << 32},
        {"prefetch": 0},
        {"prefetch": -1},
        {"prefetch": 100_001},
        {"prefetch": U63},
        {"segment": -1},
        {"segment": U64},
        {"topic_id": U64},
        {"subscription": ""},
        {"subscription": "../s"},
        {"subscription": "s" * 1_000_000},
        {"topic": "t" * 1_000_000},
        {"placement": -1, "holds": ((5, 4, 1),)},
        {"holds": (("a", 1, 1),)},
        {"holds": 7},
    ],
    ids=str,
)
def test_an_opening_that_cannot_be_is_refused_and_harms_nobody(broker: WatchedBroker, changes: dict[str, Any]) -> None:
    with broker.connect() as good, broker.connect() as client:
        topic = make_queue(good)
        request = client.send(Kind.QUEUE_OPEN, opening(topic, **changes))
        if changes.get("placement") == -1:  # Of another placement: what it holds does not count.
            client.reply(request)
        else:
            with pytest.raises(BraidError):
                client.reply(request)
        good.ask(Kind.QUEUE_OPEN, QueueOpen(*opening(topic)), QueueOpened)


@pytest.mark.parametrize(
    "holds", [((0, 0, 1),), ((3, 1, 1),), ((-1, 1, 1),), ((0, 6, 1),), ((0, U64, 1),), ((0, 1, -1), (0, U63, 1))]
)
def test_messages_that_cannot_be_held_are_refused(broker: WatchedBroker, holds: tuple[Any, ...]) -> None:
    with broker.connect() as client:
        topic = make_queue(client)
        opened = client.ask(Kind.QUEUE_OPEN, QueueOpen(*opening(topic)), QueueOpened)
        with pytest.raises(InvalidArgument):
            client.reply(client.send(Kind.QUEUE_OPEN, opening(topic, 2, placement=opened.placement, holds=holds)))


@pytest.mark.parametrize(
    "answer",
    [
        {"acks": ((0, 0, 1),)},
        {"acks": ((4, 2, 1),)},
        {"acks": ((0, 6, 1),)},
        {"acks": ((-1, 1, 1),)},
        {"acks": ((0, U63, 1),)},
        {"acks": ((0, U64, U64),)},
        {"nacks": ((-1, 1, 0, True, ""),)},
        {"nacks": ((5, 1, 0, True, ""),)},
        {"nacks": ((U64, 1, 0, True, ""),)},
        {"extensions": ((5, 1, 1),)},
        {"extensions": ((-U63, 1, 1),)},
        {"acks": ((0, 5, 1),) * 20_001},
        {"prefetch": -1},
        {"prefetch": U63},
    ],
    ids=lambda answer: str(answer)[:40],
)
def test_an_answer_that_cannot_be_is_refused_as_a_whole(broker: WatchedBroker, answer: dict[str, Any]) -> None:
    with broker.connect() as client:
        topic = make_queue(client)
        client.ask(Kind.QUEUE_OPEN, QueueOpen(*opening(topic)), QueueOpened)
        delivery = decode(QueueDelivery, client.push(Kind.QUEUE_DELIVER).body)
        (first, *_) = delivery.runs
        with pytest.raises(InvalidArgument):
            client.ask(Kind.QUEUE_ANSWER, QueueAnswer(1, **answer), QueueAnswered)
        answered = client.ask(
            Kind.QUEUE_ANSWER, QueueAnswer(1, ((first.start, first.end, first.lease),)), QueueAnswered
        )
        assert answered.stale == ()


@pytest.mark.parametrize("lease", [0, -1, 1, U63 - 1, U63, U64, 0xFFFFFFFF << 31])
def test_leases_that_were_never_given_settle_nothing(broker: WatchedBroker, lease: int) -> None:
    """Of earlier owners, of this one, and of owners that are to come."""
    with broker.connect() as client:
        topic = make_queue(client)
        client.ask(Kind.QUEUE_OPEN, QueueOpen(*opening(topic)), QueueOpened)
        client.push(Kind.QUEUE_DELIVER)
        said = QueueAnswer(1, ((0, 1, lease),), ((1, lease, 0, True, ""),), ((2, lease, 1_000_000),))
        assert client.ask(Kind.QUEUE_ANSWER, said, QueueAnswered).stale == (0, 1, 2)
        settled = client.admin("get_subscription", topic=topic.path, subscription="s")
        assert settled["backlog"] == 5


@pytest.mark.parametrize("delay_us", [-U63, -1, 0, U63 - 1, U64])
def test_a_delay_is_kept_within_its_limits(broker: WatchedBroker, delay_us: int) -> None:
    with broker.connect() as client:
        topic = make_queue(client, messages=1)
        client.ask(Kind.QUEUE_OPEN, QueueOpen(*opening(topic)), QueueOpened)
        (run,) = decode(QueueDelivery, client.push(Kind.QUEUE_DELIVER).body).runs
        said = QueueAnswer(1, (), ((run.start, run.lease, delay_us, True, "\x00" * 1_000),), ())
        assert client.ask(Kind.QUEUE_ANSWER, said, QueueAnswered).stale == ()
        if delay_us <= 0:
            (again,) = decode(QueueDelivery, client.push(Kind.QUEUE_DELIVER).body).runs
            assert (again.deliveries, again.reason) == (1, "\x00" * 200)
        else:
            assert client.admin("get_subscription", topic=topic.path, subscription="s")["queue"]["delayed"] == 1


def test_answers_on_channels_that_are_not_open_are_refused(broker: WatchedBroker) -> None:
    with broker.connect() as client:
        make_queue(client)
        for channel in (0, -1, 7, U64):
            with pytest.raises(NotServing):
                client.ask(Kind.QUEUE_ANSWER, QueueAnswer(channel, ((0, 1, 1),)), QueueAnswered)


def test_more_queue_channels_than_a_connection_may_have_are_refused(broker: WatchedBroker) -> None:
    """Also when they are asked for without waiting."""
    with broker.connect() as client:
        topic = make_queue(client)
        requests = [client.send(Kind.QUEUE_OPEN, opening(topic, number, prefetch=1)) for number in range(1, 5_001)]
        refused = 0
        for request in requests:
            try:
                client.reply(request)
            except Overloaded:
                refused += 1
        assert refused == 5_000 - 4_096
        client.ping()


def test_queue_consumers_that_never_read_cost_bounded_memory_and_disturb_nobody(broker: WatchedBroker) -> None:
    with broker.connect() as good, broker.connect() as stuck:
        topic = make_queue(good, 0)
        for number in range(1, 11):
            stuck.ask(Kind.QUEUE_OPEN, QueueOpen(*opening(topic, number, prefetch=100_000)), QueueOpened)
        good.ask(Kind.QUEUE_OPEN, QueueOpen(*opening(topic, prefetch=100_000)), QueueOpened)
        before, most = broker.resident_bytes, 0
        batch = a_batch(b"x" * 1_000_000)
        for _ in range(250):
            good.ask(Kind.PUBLISH, topic.route, Published, batch)
            most = max(most, broker.resident_bytes)
        got = 0
        while good.pushes:
            good.push(Kind.QUEUE_DELIVER)
            got += 1
        assert got >= 10, "the consumer that reads gets its part"
        assert most - before < 120 * MEGABYTES, f"memory grew by {(most - before) / MEGABYTES:.0f} MB"
