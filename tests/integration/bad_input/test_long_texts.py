"""Texts of megabytes where a name or a word belongs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from braid.admin.rest import ENDPOINTS
from braid.broker.admin.call import CALLS
from braid.broker.connections.questions import MAX_CALL_BYTES
from braid.model.errors import BraidError
from braid.wire.frame import FIRST_FRAME_BYTES, MAX_BODY_BYTES
from braid.wire.operations import (
    MAGIC,
    VERSION,
    AdminRequest,
    Hello,
    Join,
    Kind,
    Open,
    PeerRequest,
    PositionsRequest,
    Published,
    StoredRequest,
    TopologyRequest,
)
from tests.kits.bad_input import MadeTopic, a_batch, make_topic
from tests.kits.raw_client import RawClient, WatchedBroker

pytestmark = pytest.mark.processes

DIGITS = "7" * (MAX_BODY_BYTES - 1_024)
CALL_DIGITS = "7" * (MAX_CALL_BYTES - 1_024)
"""As much as an administrative call may have."""
QUOTED = "7" * 201
"""More of the input than an error may repeat."""
SOON_S = 5.0
"""An answer takes some 20 ms. Searching four megabytes with a quadratic pattern takes hours."""


def operations(topic: MadeTopic) -> Iterator[tuple[Kind, Any]]:
    """Each operation that has texts, once for each of them."""
    whole = (
        (Kind.PUBLISH, topic.route),
        (Kind.JOIN, Join(topic.path, "s", "c", "earliest", "stream")),
        (Kind.OPEN, Open(1, topic.path, topic.id, 0, 1, 0, 0, "s", 1, 1)),
        (Kind.POSITIONS, PositionsRequest(topic.path)),
        (Kind.STORED, StoredRequest(topic.path, topic.id, 0, (7,))),
        (Kind.ADMIN, AdminRequest("list_brokers", {})),
        (Kind.PEER, PeerRequest("put_history", {})),
    )
    for kind, message in whole:
        for name in message.__struct_fields__:
            if isinstance(getattr(message, name), str):
                yield kind, msgspec.structs.replace(message, **{name: DIGITS})
    yield Kind.TOPOLOGY, TopologyRequest((DIGITS,))


def calls(topic: MadeTopic) -> Iterator[AdminRequest]:
    """Each administrative call, once for each of its arguments, and once with an argument that it does not have."""
    for call, kind in sorted(CALLS.items()):
        fields = msgspec.structs.fields(kind)
        usual: dict[str, Any] = {"topic": topic.path, "subscription": "s", "broker": "broker-1", "tenant": "t"}
        usual = {each.encode_name: usual[each.encode_name] for each in fields if each.encode_name in usual}
        for each in fields:
            for value in (CALL_DIGITS, [CALL_DIGITS], {"durability": CALL_DIGITS}, {CALL_DIGITS: 1}):
                yield AdminRequest(call, {**usual, each.encode_name: value})
        yield AdminRequest(call, {**usual, CALL_DIGITS: 1})


def refusal(client: RawClient, kind: Kind, body: Any) -> BraidError | None:
    """The broker's error; None if it did what was asked."""
    payload = a_batch() if kind is Kind.PUBLISH else bytearray()
    started = time.monotonic()
    try:
        client.reply(client.send(kind, body, payload))
    except BraidError as error:
        return error
    finally:
        assert time.monotonic() - started < SOON_S, body
    return None


def test_every_operation_answers_quickly_and_repeats_little_of_a_long_text(broker: WatchedBroker) -> None:
    with broker.connect() as client, broker.connect() as healthy:
        topic = make_topic(healthy)
        asked = [*operations(topic), *((Kind.ADMIN, request) for request in calls(topic))]
        assert len(asked) > 4 * len(ENDPOINTS), "all calls are known"
        for kind, body in asked:
            error = refusal(client, kind, body)
            assert error is not None, body
            assert error.code != "broken-invariant", error
            assert QUOTED not in str(error), f"{kind.name} repeats its input"
            assert len(str(error)) < 2_000
            healthy.ping()
        assert healthy.ask(Kind.PUBLISH, topic.route, Published, a_batch()) == Published(0, False)
    assert QUOTED not in broker.log


@pytest.mark.parametrize("field", ["magic", "client", "token"])
def test_a_hello_with_long_texts_is_answered(broker: WatchedBroker, field: str) -> None:
    hello = Hello(MAGIC, VERSION, VERSION, "client", "")
    long = msgspec.structs.replace(hello, **{field: "7" * (FIRST_FRAME_BYTES - 100)})
    with broker.connect(hello=False) as client:
        client.send(Kind.HELLO, long)
        assert len(client.next_frame().body) < 1_000
    assert QUOTED not in broker.log
