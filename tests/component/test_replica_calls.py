"""The calls about the replicas of a topic, on a broker in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from braid.broker.broker import Broker
from braid.metadata import paths
from braid.metadata.store import Put
from braid.model.cluster import REPLICAS, Registration
from braid.model.errors import (
    InvalidArgument,
    NotAvailable,
    TopicNotFound,
)
from braid.model.ownership import ReplicaChange
from braid.model.topic import Durability
from braid.testing.sim.loop import Simulation
from tests.kits.calls import Call, caller
from tests.kits.control import ORDERS, Machine
from tests.kits.waiting import until


@contextlib.asynccontextmanager
async def served(simulation: Simulation) -> AsyncIterator[tuple[Broker, Call]]:
    broker = await Machine(simulation).start()
    yield broker, caller(broker)
    await broker.close()


@pytest.mark.parametrize(
    ("policies", "said"),
    [
        ({"durability": "replicated"}, "ask for replicas, for instance 3"),
        ({"replicas": 3, "durability": "fsync"}, "leave the durability out, or ask for 1 replica"),
        ({"replicas": 3, "durability": "memory"}, "not 'memory'"),
        ({"replicas": 3, "writeQuorum": 4}, "use 1 to 3"),
        ({"writeQuorum": 2}, "use 1 to 1"),
    ],
    ids=str,
)
async def test_replicas_and_durability_that_do_not_fit_are_refused_with_what_to_write(
    policies: dict[str, Any], said: str, simulation: Simulation
) -> None:
    async with served(simulation) as (broker, call):
        with pytest.raises(InvalidArgument, match=said):
            await call("create_topic", topic="orders", policies=policies)
        assert broker.topics.all() == {}


async def test_a_topic_without_replicas_shows_its_owner_alone(simulation: Simulation) -> None:
    async with served(simulation) as (broker, call):
        await call("create_topic", topic="orders")
        shown = await call("topic_replicas", topic="orders")
        assert shown == {
            "name": "topic://public/default/orders", "replicas": 1, "writeQuorum": 1,
            "segments": {"0": {
                "segmentId": 0, "hashRange": {"start": 0, "end": 0xFFFF}, "owner": "broker-1", "writeQuorum": 1,
                "replicas": [{"broker": "broker-1", "state": "owner", "behind": None, "end": None, "error": ""}],
                "change": None, "unavailable": None,
            }},
            "warnings": [],
        }  # fmt: skip
        assert await call("set_replicas", topic="orders", replicas=1) == shown
        with pytest.raises(InvalidArgument, match="start more"):
            await call("set_replicas", topic="orders", replicas=3)
        with pytest.raises(InvalidArgument, match="use 1 to 1"):
            await call("set_replicas", topic="orders", writeQuorum=2)
        for name in ("topic_replicas", "set_replicas"):
            with pytest.raises(TopicNotFound):
                await call(name, topic="absent")
        with pytest.raises(TopicNotFound):
            await call("set_replicas", topic="orders", topicId=1)
        assert broker.topics.get(ORDERS.path).policies.replicas == 1


async def test_replicas_that_are_asked_for_become_the_topics_policies(simulation: Simulation) -> None:
    machine = Machine(simulation)
    broker = await machine.start()
    call = caller(broker)
    await call("create_topic", topic="orders")
    other = Registration(address="elsewhere:6660", admin="", features=(REPLICAS,))
    await machine.store.txn([], [Put(paths.broker("broker-2"), other.to_json())])
    await until(lambda: broker.cluster.members.is_active("broker-2"))
    shown = await call("set_replicas", topic="orders", replicas=3)
    assert (shown["replicas"], shown["writeQuorum"]) == (3, 2)
    assert broker.topics.get(ORDERS.path).policies.durability is Durability.REPLICATED
    await until(lambda: broker.cluster.owners.of_topic(ORDERS.path)["0000-ffff-0"].change is not None)
    record = broker.cluster.owners.of_topic(ORDERS.path)["0000-ffff-0"]
    assert record.change == ReplicaChange(replicas=("broker-1", "broker-2"), write_quorum=2)
    await broker.close()


async def test_a_topic_needs_as_many_brokers_as_must_confirm(simulation: Simulation) -> None:
    async with served(simulation) as (broker, call):
        await call("create_topic", topic="orders")
        for name, topic in (("create_topic", "more"), ("update_topic", "orders")):
            with pytest.raises(InvalidArgument, match=r"2 replicas confirm.*1 broker is active.*start more"):
                await call(name, topic=topic, policies={"replicas": 3})
        assert broker.topics.find("public/default/more") is None
        assert broker.topics.get(ORDERS.path).policies.replicas == 1


async def test_a_cluster_with_a_broker_that_does_not_know_replicas_refuses_them(simulation: Simulation) -> None:
    async with served(simulation) as (broker, call):
        await call("create_topic", topic="orders")
        old = Registration(address="old:6660", admin="", version="0.1.0")
        await broker.resources.store.txn([], [Put(paths.broker("old"), old.to_json())])
        await until(lambda: broker.cluster.members.is_live("old"))
        for name, arguments in (("create_topic", {"topic": "more"}), ("update_topic", {"topic": "orders"})):
            with pytest.raises(NotAvailable, match=r"broker old runs version 0\.1\.0.*upgrade it first"):
                await call(name, **arguments, policies={"replicas": 3})
        assert broker.topics.find("public/default/more") is None
        assert broker.topics.get(ORDERS.path).policies.replicas == 1


async def test_a_topic_with_replicas_waits_for_brokers_that_are_about_to_register(simulation: Simulation) -> None:
    machine = Machine(simulation)
    broker = await machine.start()
    creating = asyncio.ensure_future(caller(broker)("create_topic", topic="orders", policies={"replicas": 3}))
    await asyncio.sleep(1)
    other = Registration(address="elsewhere:6660", admin="", features=(REPLICAS,))
    await machine.store.txn([], [Put(paths.broker("broker-2"), other.to_json())])
    assert (await creating)["policies"]["replicas"] == 3
    await broker.close()


async def test_a_topic_that_does_not_fail_over_by_itself_says_so(simulation: Simulation) -> None:
    machine = Machine(simulation)
    broker = await machine.start()
    other = Registration(address="elsewhere:6660", admin="", features=(REPLICAS,))
    await machine.store.txn([], [Put(paths.broker("broker-2"), other.to_json())])
    made = await caller(broker)("create_topic", topic="orders", policies={"replicas": 2})
    (warning,) = made["warnings"]
    assert warning.startswith("all 2 replicas must confirm a record")
    changed = await caller(broker)("update_topic", topic="orders", policies={"replicas": 3})
    assert changed["warnings"] == []
    shown = await caller(broker)("set_replicas", topic="orders", replicas=2)
    assert shown["warnings"] == [warning]
    await broker.close()
