"""A broker that must survive, and a topic on it, for clients that break the rules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from braid.model.batch.columns import encode_batch
from braid.model.errors import BraidError
from braid.wire.operations import Assignment, Join, Joined, Kind, Open, Published, Route, Topology, decode
from tests.kits.raw_client import Ended, RawClient, WatchedBroker, tracebacks
from tests.kits.waiting import wait_until

PLENTY = 1 << 20


MEGABYTES = 1_000_000


topic_numbers = iter(range(1_000_000))


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


def joined(client: RawClient, topic: MadeTopic, consumer: str = "worker") -> Assignment:
    session = client.ask(Kind.JOIN, Join(topic.path, "s", consumer, "earliest"), Joined).session
    while True:
        assignment = decode(Assignment, client.push(Kind.ASSIGN).body)
        if assignment.session == session and assignment.segments:
            return assignment
