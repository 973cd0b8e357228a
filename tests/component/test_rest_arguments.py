"""What REST makes of a request: the arguments of a call, by the route and the fields that its class declares."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlencode

import pytest
from fastapi import Request

from braid.admin.rest import ENDPOINTS
from braid.broker.admin.call import CALLS, read_call
from braid.model.errors import InvalidArgument
from braid.model.subscription import SubscriptionKind
from braid.model.topic import Durability, PolicyChanges

BY_OPERATION = {endpoint.operation: endpoint for endpoint in ENDPOINTS}
ORDERS = {"tenant": "public", "namespace": "default", "topic": "orders"}
BILLING = {**ORDERS, "subscription": "billing"}
TOPIC = {"topic": "public/default/orders"}
SUBSCRIPTION = {**TOPIC, "subscription": "billing"}


def request(path: dict[str, str], query: dict[str, str], body: Any) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"" if body is None else json.dumps(body).encode(), "more_body": False}

    return Request(
        {
            "type": "http",
            "method": "POST",
            "path_params": path,
            "query_string": urlencode(query).encode(),
            "headers": [(b"content-type", b"application/json")],
        },
        receive,
    )


TAKEN: dict[str, tuple[str, dict[str, str], dict[str, str], Any, dict[str, Any]]] = {
    "the names of a path that are one topic": ("get_topic", ORDERS, {}, None, TOPIC),
    "names of a path that are arguments": (
        "list_topics", {"tenant": "a", "namespace": "b"}, {}, None, {"tenant": "a", "namespace": "b"},
    ),
    "another name and a number": (
        "split_segment", {**ORDERS, "segmentId": "7"}, {"at": "8000"}, None,
        {**TOPIC, "segment": 7, "at": "8000", "into": 2},
    ),
    "two names for the elements of a list": (
        "merge_segments", {**ORDERS, "segmentId1": "4", "segmentId2": "3"}, {}, None, {**TOPIC, "segments": [4, 3]},
    ),
    "a default": ("create_topic", ORDERS, {}, None, {**TOPIC, "segments": 1, "existOk": False}),
    "a body that is one argument": (
        "create_topic", ORDERS, {"numInitialSegments": "3"}, {"durability": "memory"},
        {**TOPIC, "segments": 3, "existOk": False, "policies": PolicyChanges(durability=Durability.MEMORY)},
    ),
    "a null that removes a limit": (
        "update_topic", ORDERS, {}, {"retentionMs": None}, {**TOPIC, "policies": PolicyChanges(retention_ms=None)},
    ),
    "a body of arguments": ("seek", BILLING, {}, {"offsets": {"0": 7}}, {**SUBSCRIPTION, "offsets": {"0": 7}}),
    "a body of two": ("seek", BILLING, {}, {"offsets": {"0": 7}, "epochs": {"0": 3}},
                      {**SUBSCRIPTION, "offsets": {"0": 7}, "epochs": {"0": 3}}),
    "neither a body nor a query": ("seek", BILLING, {}, None, SUBSCRIPTION),
    "yes, in a word": ("delete_topic", ORDERS, {"force": "true"}, None, {**TOPIC, "force": True}),
    "no, in a word": ("delete_topic", ORDERS, {"force": "false"}, None, {**TOPIC, "force": False}),
    "a broker that is called yes": ("move_topic", ORDERS, {"to": "true"}, None, {**TOPIC, "to": "true"}),
    "a word of an enum": (
        "create_subscription", BILLING, {"kind": "queue"}, None,
        {
            **SUBSCRIPTION, "kind": SubscriptionKind.QUEUE, "start": "earliest",
            "ackTimeoutMs": 30_000, "maxDeliveries": 0, "deadLetterTopic": "", "query": False,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize(("operation", "path", "query", "body", "arguments"), list(TAKEN.values()), ids=list(TAKEN))
async def test_a_request_becomes_the_arguments_of_its_call(
    operation: str, path: dict[str, str], query: dict[str, str], body: Any, arguments: dict[str, Any]
) -> None:
    endpoint = BY_OPERATION[operation]
    found = await endpoint.arguments(request(path, query, body))
    assert found == arguments
    assert isinstance(read_call(endpoint.call, endpoint.kind, found), CALLS[endpoint.call])


REFUSED: dict[str, tuple[str, dict[str, str], dict[str, str], Any, str]] = {
    "a misspelt parameter": ("create_topic", ORDERS, {"segments": "2"}, None, "it takes numInitialSegments"),
    "a misspelt field": ("create_topic", ORDERS, {}, {"durabilty": "fsync"}, "it takes durability, replicas"),
    "a parameter where there is none": ("get_topic", ORDERS, {"x": "1"}, None, "it takes none"),
    "an argument that REST does not offer": ("move_topic", ORDERS, {"timeout": "1"}, None, "it takes segment, to"),
    "a number for yes": ("delete_topic", ORDERS, {"force": "1"}, None, "choose 'true' or 'false'"),
    "a word that is none": ("seek", BILLING, {"to": "middle"}, None, "choose 'earliest' or 'latest'"),
    "a nested word that is none": ("create_topic", ORDERS, {}, {"onOwnerLoss": "x"}, "choose 'wait' or 'continue'"),
    "an argument that this route needs": ("skip", BILLING, {"segment": "1"}, None, "missing required field `count`"),
    "a body that this route needs": ("set_auto_scale_policy", ORDERS, {}, None, "the body of set_auto_scale_policy"),
    "null in a word": ("move_topic", ORDERS, {"segment": "null"}, None, "Expected `int`, got `str`"),
    "null for an argument": ("seek", BILLING, {}, {"offsets": None}, "got `null`"),
    "what only the wire takes": ("seek", BILLING, {"timestamp": "-1"}, None, ">= 0"),
}


@pytest.mark.parametrize(("operation", "path", "query", "body", "words"), list(REFUSED.values()), ids=list(REFUSED))
async def test_a_request_is_refused_with_words_that_help(
    operation: str, path: dict[str, str], query: dict[str, str], body: Any, words: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await BY_OPERATION[operation].arguments(request(path, query, body))
    assert words in str(refused.value)
