"""Which administrative calls a role may make, and which requests of producers and consumers."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import jwt
import pytest

from braid.broker.auth import Principal
from braid.broker.config import AuthConfig, Grant
from braid.model.batch.encode import encode_batch
from braid.model.errors import ClientClosed, InvalidName, PermissionDenied, SegmentNotFound, TransitionRefused
from braid.ports.network import Address
from braid.testing.sim.loop import Simulation
from braid.wire.link import connect_link
from braid.wire.operations import Join, Kind, Open, PositionsRequest, Route, StoredRequest, TopologyRequest, encode
from tests.kits.calls import caller
from tests.kits.control import Machine
from tests.kits.links import ignore

SECRET = b"x" * 32

GRANTS = (
    Grant(role="producer", on="public/default/orders", allow=("produce",)),
    Grant(role="consumer", on="public/default/orders", allow=("consume",)),
    Grant(role="owner", on="public/default", allow=("admin",)),
    Grant(role="operator", on="*", allow=("admin",)),
    Grant(role="stranger", on="public/default/other", allow=("produce", "consume")),
)

TOPIC_CALLS: dict[str, dict[str, Any]] = {
    "get_topic": {},
    "topic_stats": {},
    "topic_storage": {},
    "topic_replicas": {},
    "set_replicas": {"replicas": 1},
    "list_subscriptions": {},
    "get_subscription": {"subscription": "billing"},
    "create_subscription": {"subscription": "new"},
    "seek_subscription": {"subscription": "billing", "to": "latest"},
    "skip_subscription": {"subscription": "billing"},
    "delete_subscription": {"subscription": "billing"},
    "get_layout": {},
    "split_segment": {"segment": 0},
    "merge_segments": {"segments": [0, 1]},
    "repartition_topic": {"segments": 2},
    "abort_transition": {},
    "get_auto_scale_policy": {},
    "set_auto_scale_policy": {"policy": {}},
    "delete_auto_scale_policy": {},
    "propose_auto_scaling": {},
    "get_key_hashes": {},
    "create_segment": {"descriptor": "0000-ffff-9"},
    "terminate_segment": {"descriptor": "0000-ffff-9"},
    "delete_segment": {"descriptor": "0000-ffff-9"},
    "delete_topic": {},
}
KNOW = {"get_topic", "get_layout", "topic_stats", "topic_replicas", "list_subscriptions", "get_subscription"}
OF_SEGMENTS = {"create_segment", "terminate_segment", "delete_segment"}
"""As PIP-468 has it: not for the topic's own administrators."""
NAMESPACE_CALLS: dict[str, dict[str, Any]] = {
    f"{verb}_namespace_auto_scale_policy": {"tenant": "public", "namespace": "default"}
    for verb in ("get", "set", "delete")
}
SUBSCRIBE = {name for name in TOPIC_CALLS if name.endswith("_subscription")}
ALLOWED = {
    "producer": KNOW,
    "consumer": KNOW | SUBSCRIBE | {"topic_storage"},
    "owner": set(TOPIC_CALLS) - OF_SEGMENTS | {"create_topic", *NAMESPACE_CALLS},
    "operator": {
        *TOPIC_CALLS,
        *NAMESPACE_CALLS,
        "create_topic",
        "list_brokers",
        "list_changes",
        "topology",
        "drain_broker",
    },
    "stranger": set[str](),
    "nobody": set[str](),
}


@pytest.mark.parametrize("role", ALLOWED)
async def test_who_may_do_what(role: str, tmp_path: Path, simulation: Simulation) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 32)
    auth = AuthConfig(secret_file=str(secret), superusers=("root",), grants=GRANTS)
    broker = await Machine(simulation, auth).start()
    root = caller(broker, Principal("root", ("root",), None))
    call = caller(broker, Principal("somebody", (role,), None))
    for topic in ("orders", "other"):
        await root("create_topic", topic=topic)
    await root("create_subscription", topic="orders", subscription="billing")

    async def may(name: str, **arguments: Any) -> bool:
        try:
            await call(name, **arguments)
        except (SegmentNotFound, TransitionRefused):
            return True
        except PermissionDenied:
            return False
        return True

    allowed = {name for name, rest in TOPIC_CALLS.items() if await may(name, topic="orders", **rest)}
    if await may("create_topic", topic="made-now"):
        allowed.add("create_topic")
    cluster: dict[str, dict[str, Any]] = {
        "list_brokers": {}, "list_changes": {}, "topology": {}, "drain_broker": {"broker": "broker-1"},
    }  # fmt: skip
    for name, arguments in (cluster | NAMESPACE_CALLS).items():
        if await may(name, **arguments):
            allowed.add(name)
    assert allowed == ALLOWED[role]
    listed = await call("list_topics", tenant="public", namespace="default")
    seen = {name.rpartition("/")[2] for name in listed}
    assert (
        seen
        == {
            "producer": {"orders"},
            "consumer": {"orders"},
            "owner": {"other", "made-now"},  # it has just deleted orders
            "operator": {"other", "made-now"},
            "stranger": {"other"},
            "nobody": set[str](),
        }[role]
    )
    await broker.close()


async def test_who_may_not_know_of_a_topic_cannot_tell_whether_it_exists(
    tmp_path: Path, simulation: Simulation
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 32)
    broker = await Machine(simulation, AuthConfig(secret_file=str(secret))).start()
    call = caller(broker, Principal("somebody", ("nobody",), None))
    for name, rest in TOPIC_CALLS.items():
        with pytest.raises(PermissionDenied):
            await call(name, topic="absent", **rest)
    with pytest.raises(InvalidName):
        await call("get_topic", topic="a b")
    await broker.close()


async def test_producers_and_consumers_need_a_grant_of_their_own(tmp_path: Path, simulation: Simulation) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    machine = Machine(simulation, AuthConfig(secret_file=str(secret), superusers=("root",), grants=GRANTS))
    broker = await machine.start()
    await caller(broker, Principal("root", ("root",), None))("create_topic", topic="orders")
    path, topic_id = "public/default/orders", broker.topics.get("public/default/orders").id
    requests = {
        Kind.PUBLISH: encode(Route(path, topic_id, 0, 0)),
        Kind.STORED: encode(StoredRequest(path, topic_id, 0, (1,))),
        Kind.JOIN: encode(Join(path, "billing", "worker")),
        Kind.POSITIONS: encode(PositionsRequest(path)),
        Kind.OPEN: encode(Open(1, path, topic_id, 0, 0)),
        Kind.TOPOLOGY: encode(TopologyRequest((path,))),
    }
    may: dict[str, set[Kind]] = {}
    for role in ("producer", "consumer", "owner", "stranger"):
        token = jwt.encode({"sub": "somebody", "roles": [role]}, SECRET, "HS256")
        link = await connect_link(
            machine.host, Address("machine", 6660), client="test", token=token, timeout_s=5, on_topology=ignore
        )
        may[role] = set()
        for kind, body in requests.items():
            with contextlib.suppress(PermissionDenied):
                await link.request(kind, body, [encode_batch([b"value"], now_us=0)] if kind is Kind.PUBLISH else [])
                may[role].add(kind)
        link.close(ClientClosed("the test is over"))
    assert may == {
        "producer": {Kind.PUBLISH, Kind.STORED, Kind.TOPOLOGY},
        "consumer": {Kind.JOIN, Kind.POSITIONS, Kind.OPEN, Kind.TOPOLOGY},
        "owner": {Kind.TOPOLOGY},
        "stranger": set(),
    }
    await broker.close()
