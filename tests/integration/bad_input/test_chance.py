"""Requests that chance has made."""

from __future__ import annotations

from random import Random
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest

from braid.model.errors import BraidError
from braid.wire.operations import (
    Ack,
    AdminRequest,
    Close,
    Credit,
    Join,
    Kind,
    Leave,
    Open,
    PositionsRequest,
    Progress,
    Published,
    Release,
    Route,
    StoredRequest,
    TopologyRequest,
)
from tests.kits.bad_input import PLENTY, MadeTopic, a_batch, make_topic
from tests.kits.raw_client import Ended, RawClient, WatchedBroker

pytestmark = pytest.mark.processes


# ── chance ───────────────────────────────────────────────────────────────────────────────────────────────────────────

REQUESTS: dict[Kind, type[Any]] = {
    Kind.TOPOLOGY: TopologyRequest,
    Kind.PUBLISH: Route,
    Kind.JOIN: Join,
    Kind.RELEASE: Release,
    Kind.LEAVE: Leave,
    Kind.PROGRESS: Progress,
    Kind.OPEN: Open,
    Kind.CREDIT: Credit,
    Kind.ACK: Ack,
    Kind.CLOSE: Close,
    Kind.POSITIONS: PositionsRequest,
    Kind.STORED: StoredRequest,
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
        if kind not in (Kind.CREDIT, Kind.PROGRESS):  # These have no answer.
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
