"""The administrative calls, on a whole broker in virtual time: arguments, results, and bad moments."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from braid.broker.auth import ANONYMOUS
from braid.broker.broker import Broker
from braid.metadata import paths
from braid.metadata.memory import Fault
from braid.metadata.store import Put
from braid.model.cluster import Registration
from braid.model.errors import (
    InvalidArgument,
    MetadataUnavailable,
    SegmentNotFound,
    ShuttingDown,
    SubscriptionBusy,
    SubscriptionExists,
    SubscriptionNotFound,
    TopicExists,
    TopicNotFound,
)
from braid.model.ids import Epoch, Offset
from braid.model.layout import Layout
from braid.model.stored_record import encode
from braid.model.subscription import Cursor
from braid.model.topic import Durability, Topic
from braid.testing.batches import opaque_batch
from braid.testing.sim.loop import Simulation
from braid.testing.sim.objects import MemoryObjects
from tests.kits.calls import Call, caller
from tests.kits.control import ORDERS, Machine, Readers, Recorder, faults
from tests.kits.waiting import until

MANY = dict.fromkeys(map(str, range(5_000)), 0)


async def keys_of_topics(machine: Machine) -> list[str]:
    prefixes = (paths.TOPICS_PREFIX, paths.SEGMENTS_PREFIX, paths.STORAGE_PREFIX)
    return [entry.key for prefix in prefixes for entry in (await machine.store.list(prefix)).entries]


@contextlib.asynccontextmanager
async def served(simulation: Simulation) -> AsyncIterator[tuple[Broker, Call]]:
    broker = await Machine(simulation).start()
    yield broker, caller(broker)
    await broker.close()


async def publish(broker: Broker, segment: int, records: int, path: str = ORDERS.path) -> None:
    log = broker.segments.get(path, segment).storage.log
    await log.confirmed.reached(log.append(opaque_batch(b"body", records)).next_offset)


async def test_a_topic_is_created_shown_and_listed(simulation: Simulation) -> None:
    async with served(simulation) as (broker, call):
        created = await call(
            "create_topic",
            topic="orders",
            segments=2,
            policies={"durability": "memory", "retentionMs": 1_000},
            properties={"team": "billing"},
        )
        assert created == await call("get_topic", topic="topic://public/default/orders")
        assert created == {
            "name": "topic://public/default/orders",
            "topicId": broker.topics.get(ORDERS.path).id,
            "epoch": 0,
            "nextSegmentId": 2,
            "segments": {
                "0": {
                    "segmentId": 0, "hashRange": {"start": 0, "end": 0x7FFF}, "state": "ACTIVE",
                    "parentIds": [], "childIds": [], "createdAtEpoch": 0, "sealedAtEpoch": 0,
                },
                "1": {
                    "segmentId": 1, "hashRange": {"start": 0x8000, "end": 0xFFFF}, "state": "ACTIVE",
                    "parentIds": [], "childIds": [], "createdAtEpoch": 0, "sealedAtEpoch": 0,
                },
            },
            "properties": {"team": "billing"},
            "policies": {
                "durability": "memory", "replicas": 1, "writeQuorum": 1, "retentionMs": 1_000, "retentionBytes": None,
                "retentionIgnoresSubscriptions": False, "retentionWaitsForSubscriptionsMs": None,
                "onOwnerLoss": "wait", "ownerLossAfterMs": 60_000,
                "maxDecodedBytes": 64 << 20, "maxBatchRecords": 1 << 20, "messageTtlMs": None,
            },
            "createdAt": broker.topics.get(ORDERS.path).created_at,
            "owners": {"0": "broker-1", "1": "broker-1"}, "replicas": {}, "warnings": [],
        }  # fmt: skip
        await call("create_topic", topic="acme/sales/other")
        assert await call("list_topics", tenant="public", namespace="default") == ["topic://public/default/orders"]
        assert await call("list_topics", tenant="acme", namespace="nothing") == []
        with pytest.raises(TopicExists):
            await call("create_topic", topic="orders")


async def test_a_layout_is_shown_as_it_is_stored(simulation: Simulation) -> None:
    async with served(simulation) as (broker, call):
        await call("create_topic", topic="orders", properties={"team": "billing"})
        await call("split_segment", topic="orders", segment=0)
        shown = await call("get_layout", topic="orders")
        stored = json.loads(broker.topics.get(ORDERS.path).layout.to_json())
        assert {name: shown.pop(name) for name in stored} == stored
        owners = dict.fromkeys(("0", "1", "2"), "broker-1")
        assert shown == {"name": "topic://public/default/orders", "owners": owners, "transition": None}


async def test_a_created_topic_can_be_written_at_once(simulation: Simulation) -> None:
    async with served(simulation) as (broker, call):
        await call("create_topic", topic="orders", segments=3)
        for segment in range(3):
            await publish(broker, segment, 1)


async def test_stats_show_what_is_there_and_how_far_subscriptions_are(simulation: Simulation) -> None:
    async with served(simulation) as (broker, call):
        await call("create_topic", topic="orders", segments=2)
        await call("create_subscription", topic="orders", subscription="billing", start="earliest")
        await publish(broker, 0, 10)
        broker.segments.get(ORDERS.path, 0).cursors.advance("billing", Offset(4))
        broker.metrics.topic(ORDERS.path).published_records = 10
        await broker.groups.join(ORDERS, "billing", "worker-1", Recorder(Readers(), "worker-1"))
        await asyncio.sleep(0.1)
        stats = await call("topic_stats", topic="orders")
        assert {key: stats[key] for key in ("name", "epoch", "publishedRecords", "deliveredRecords")} == {
            "name": "topic://public/default/orders", "epoch": 0, "publishedRecords": 10, "deliveredRecords": 0,
        }  # fmt: skip
        first = stats["segments"]["0"]
        assert (log_bytes := first.pop("bytes")) > 0
        assert first == {
            "segmentId": 0, "hashRange": {"start": 0, "end": 0x7FFF}, "state": "ACTIVE", "owner": "broker-1",
            "epoch": 1, "replicas": [], "earliestOffset": 0, "endOffset": 10, "records": 10, "bytesInPerS": 0,
            "bytesOutPerS": 0, "recordsInPerS": 0, "chunks": 0, "chunkBytes": 0, "exportedOffset": 0,
            "logBytes": log_bytes, "hotKeyHashes": None, "hotKeyShare": None, "unavailable": None,
        }  # fmt: skip
        billing = await call("get_subscription", topic="orders", subscription="billing")
        assert billing == {
            "name": "billing",
            "kind": "stream",
            "createdAt": billing["createdAt"],
            "movedAt": billing["movedAt"],
            "heldBytes": 0,
            "backlog": 6,
            "segments": {
                "0": {"offset": 4, "earliest": 0, "end": 10, "backlog": 6, "drained": False, "queue": None},
                "1": {"offset": 0, "earliest": 0, "end": 0, "backlog": 0, "drained": False, "queue": None},
            },
            "unavailable": {},
            "consumers": {"worker-1": {"segments": [0, 1], "connected": True}},
            "undrained": [],
            "unreadable": None,
            "queue": None,
            "query": False,
        }
        assert billing["createdAt"] <= billing["movedAt"] < billing["createdAt"] + 1_000_000
        assert stats["subscriptions"] == {"billing": billing}
        assert await call("list_subscriptions", topic="orders") == [billing]


async def test_a_segment_that_is_not_served_shows_that_its_numbers_are_not_known(simulation: Simulation) -> None:
    async with served(simulation) as (broker, call):
        await call("create_topic", topic="orders")
        segments, broker.segments._served = broker.segments._served, {}
        stats = await call("topic_stats", topic="orders")
        assert stats["segments"]["0"]["owner"] == "broker-1"
        assert stats["segments"]["0"]["endOffset"] is None
        assert stats["segments"]["0"]["unavailable"] == "its owner does not serve it at the moment"
        broker.segments._served = segments


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("create_topic", {}, "topic"),
        ("create_topic", {"topic": 5}, "topic"),
        ("create_topic", {"topic": "a/b"}, "no topic name"),
        ("create_topic", {"topic": "orders", "segments": "2"}, "int"),
        ("create_topic", {"topic": "orders", "segments": True}, "int"),
        ("create_topic", {"topic": "orders", "segments": 0}, "1 to"),
        ("create_topic", {"topic": "orders", "segments": 10**6}, "1 to"),
        ("create_topic", {"topic": "orders", "policies": {"durability": "paper"}}, "paper"),
        ("create_topic", {"topic": "orders", "policies": {"durabillity": "fsync"}}, "durabillity"),
        ("create_topic", {"topic": "orders", "policies": {"retentionMs": -1}}, "retention_ms"),
        ("create_topic", {"topic": "orders", "policies": {"replicas": 9}}, "replicas"),
        ("create_topic", {"topic": "orders", "properties": {"a": 1}}, "str"),
        ("update_topic", {"topic": "there", "policies": {"durabillity": "fsync"}}, "durabillity"),
        ("update_topic", {"topic": "there", "policies": {"?": "{}"}}, "unknown field"),
        ("update_topic", {"topic": "there", "policies": {"retentionMs": -1}}, "retention_ms"),
        ("update_topic", {"topic": "there", "policies": {"durability": None}}, "null"),
        ("create_topic", {"topic": "orders", "segment": 1}, "topic, segments, policies, properties"),
        ("list_topics", {"tenant": "a b", "namespace": "n"}, "tenant name"),
        ("list_brokers", {"all": True}, "it takes none"),
        ("list_brokers", MANY, "no argument '0', '1', '2', …; it takes none"),
        ("create_subscription", {"topic": "there", "subscription": ""}, "subscription name"),
        ("create_subscription", {"topic": "there", "subscription": "s", "start": "5"}, "earliest"),
        ("create_subscription", {"topic": "there", "subscription": "s", "kind": "exclusive"}, "exclusive"),
        ("get_subscription", {"topic": "there", "subscription": "../x"}, "subscription name"),
        ("seek_subscription", {"topic": "there", "subscription": "billing"}, "exactly one of"),
        ("seek_subscription", {"topic": "there", "subscription": "billing", "to": "latest", "timestamp": 1}, "exactly"),
        ("seek_subscription", {"topic": "there", "subscription": "billing", "to": "x"}, "earliest"),
        ("seek_subscription", {"topic": "there", "subscription": "billing", "offsets": {}}, "at least one"),
        ("seek_subscription", {"topic": "there", "subscription": "billing", "offsets": {"x": 1}}, "segment id"),
        ("seek_subscription", {"topic": "there", "subscription": "billing", "offsets": {"0": 99}}, "from 0 to 0"),
        ("seek_subscription", {"topic": "there", "subscription": "billing", "offsets": {"0": -1}}, "from 0 to 0"),
        ("seek_subscription", {"topic": "there", "subscription": "billing", "offsets": {"0": 0, "00": 0}}, "twice"),
        (
            "seek_subscription",
            {"topic": "there", "subscription": "billing", "offsets": MANY},
            "5000 offsets are given; 4096",
        ),
        ("seek_subscription", {"topic": "there", "subscription": "billing", "timestamp": 1 << 60}, "milliseconds"),
        (
            "seek_subscription",
            {"topic": "there", "subscription": "billing", "timestamp": 1 << 50},
            "this one is too high",
        ),
        ("seek_subscription", {"topic": "there", "subscription": "billing", "timestamp": 1_700_000_000}, "before 1973"),
        ("skip_subscription", {"topic": "there", "subscription": "billing", "segment": 0}, "together"),
        ("skip_subscription", {"topic": "there", "subscription": "billing", "segment": 0, "count": 0}, "1 or more"),
        ("explode", {}, "the calls are abort_transition"),
    ],
)
async def test_wrong_arguments_are_refused_with_a_sentence(
    name: str, arguments: dict[str, Any], error: str, simulation: Simulation
) -> None:
    async with served(simulation) as (_broker, call):
        await call("create_topic", topic="there")
        await call("create_subscription", topic="there", subscription="billing")
        with pytest.raises(InvalidArgument, match=error):
            await call(name, **arguments)
        assert await call("list_topics", tenant="public", namespace="default") == ["topic://public/default/there"]
        assert [each["name"] for each in await call("list_subscriptions", topic="there")] == ["billing"]


async def test_what_is_not_there_is_not_found(simulation: Simulation) -> None:
    async with served(simulation) as (_broker, call):
        for name in ("get_topic", "delete_topic", "topic_stats", "list_subscriptions"):
            with pytest.raises(TopicNotFound, match="orders"):
                await call(name, topic="orders")
        await call("create_topic", topic="orders")
        of_nobody = {"topic": "orders", "subscription": "nobody"}
        for name in ("get_subscription", "delete_subscription", "skip_subscription"):
            with pytest.raises(SubscriptionNotFound, match="nobody"):
                await call(name, **of_nobody)
        with pytest.raises(SubscriptionNotFound):
            await call("seek_subscription", **of_nobody, to="latest")
        await call("create_subscription", topic="orders", subscription="billing")
        with pytest.raises(SegmentNotFound):
            await call("skip_subscription", topic="orders", subscription="billing", segment=7, count=1)
        with pytest.raises(SubscriptionExists):
            await call("create_subscription", topic="orders", subscription="billing")


async def test_what_consumers_see_before_it_is_synced_can_be_acked_and_started_from(simulation: Simulation) -> None:
    """Durability `memory`: a confirm, and so a consumer, does not wait for the disk."""
    async with served(simulation) as (broker, call):
        await call("create_topic", topic="orders", policies={"durability": "memory"})
        await publish(broker, 0, 10)
        segment = broker.segments.get(ORDERS.path, 0)
        assert segment.storage.log.synced.value < segment.end, "or this test shows nothing"
        created = await call("create_subscription", topic="orders", subscription="billing", start="latest")
        assert created["segments"]["0"]["offset"] == 10
        await publish(broker, 0, 5)
        assert segment.cursors.advance("billing", Offset(15))


async def test_a_broker_that_stops_lets_nobody_wait_for_a_deletion_and_ends_it_when_it_starts_again(
    simulation: Simulation,
) -> None:
    machine = Machine(simulation)
    broker = await machine.start()
    call = caller(broker)
    await call("create_topic", topic="orders", segments=3)
    deleting = asyncio.ensure_future(call("delete_topic", topic="orders"))
    await until(lambda: broker.topics.find(ORDERS.path) is None)
    await broker.close()
    with pytest.raises(ShuttingDown):
        await deleting
    broker = await machine.start()
    await until(lambda: not broker.topics.all())
    assert await keys_of_topics(machine) == []
    await broker.close()


async def test_seeking_and_skipping(simulation: Simulation) -> None:
    async with served(simulation) as (broker, call):
        await call("create_topic", topic="orders", segments=2)
        await publish(broker, 0, 10)
        await publish(broker, 1, 5)
        of_billing = {"topic": "orders", "subscription": "billing"}
        assert (await call("create_subscription", **of_billing, start="latest"))["backlog"] == 0
        assert await call("seek_subscription", **of_billing, to="earliest") == {"offsets": {"0": 0, "1": 0}}
        assert await call("seek_subscription", **of_billing, offsets={"0": 7}) == {"offsets": {"0": 7}}
        in_the_future = 200_000_000_000_000
        assert await call("seek_subscription", **of_billing, timestamp=in_the_future) == {"offsets": {"0": 10, "1": 5}}
        assert await call("seek_subscription", **of_billing, timestamp=0) == {"offsets": {"0": 0, "1": 0}}
        meant = {"timestamp": 1_500, "unit": "ms"}
        assert await call("seek_subscription", **of_billing, **meant) == {"offsets": {"0": 10, "1": 5}}
        assert await call("seek_subscription", **of_billing, timestamp=-1) == {"offsets": {"0": 0, "1": 0}}
        assert await call("skip_subscription", **of_billing, segment=1, count=2) == {"offsets": {"1": 2}}
        assert (await call("get_subscription", **of_billing))["backlog"] == 13
        assert await call("skip_subscription", **of_billing, segment=None, count=None) == {"offsets": {"0": 10, "1": 5}}
        # Over the wire, the keys of a map may be numbers.
        result = await broker.front_door.calls.call("seek_subscription", {**of_billing, "offsets": {1: 3}}, ANONYMOUS)
        assert result == {"offsets": {"1": 3}}


async def test_a_topic_or_subscription_with_connected_consumers_is_deleted_only_by_force(
    simulation: Simulation,
) -> None:
    async with served(simulation) as (broker, call):
        await call("create_topic", topic="orders")
        for name in ("billing", "audit"):
            await call("create_subscription", topic="orders", subscription=name)
        member = Recorder(Readers(), "worker-1")
        await broker.groups.join(ORDERS, "billing", "worker-1", member)
        await asyncio.sleep(0.1)
        with pytest.raises(SubscriptionBusy, match="worker-1"):
            await call("delete_subscription", topic="orders", subscription="billing")
        with pytest.raises(SubscriptionBusy, match="worker-1"):
            await call("delete_topic", topic="orders", force=False)
        await call("delete_subscription", topic="orders", subscription="audit")
        await call("delete_subscription", topic="orders", subscription="billing", force=True)
        assert isinstance(member.expulsion, SubscriptionNotFound)
        assert await call("list_subscriptions", topic="orders") == []
        await call("create_subscription", topic="orders", subscription="billing")
        await broker.groups.join(ORDERS, "billing", "worker-1", Recorder(Readers(), "worker-1"))
        await call("delete_topic", topic="orders", force=True)
        assert broker.groups.of_topic(ORDERS.path) == {}


async def test_a_deleted_topic_leaves_nothing_and_its_name_can_be_used_again(simulation: Simulation) -> None:
    machine = Machine(simulation)
    broker = await machine.start()
    call = caller(broker)
    old = await call("create_topic", topic="orders", segments=2)
    await call("create_subscription", topic="orders", subscription="billing")
    await publish(broker, 0, 10)
    await call("delete_topic", topic="orders")
    assert await keys_of_topics(machine) == []
    assert not [path for path in machine.disk.paths() if "orders" in path]
    new = await call("create_topic", topic="orders")
    assert new["topicId"] != old["topicId"]
    assert (await call("topic_stats", topic="orders"))["segments"]["0"]["endOffset"] == 0
    await broker.close()


@pytest.mark.parametrize("at", range(12))
async def test_a_deletion_that_is_interrupted_anywhere_is_finished_by_asking_again_or_by_the_next_start(
    at: int, simulation: Simulation
) -> None:
    for by_restart in (False, True):
        machine = Machine(simulation)
        broker = await machine.start()
        call = caller(broker)
        await call("create_topic", topic="orders", segments=2)
        await call("create_subscription", topic="orders", subscription="billing")
        requests = 0

        def fail(_: str) -> Fault:
            nonlocal requests
            requests += 1
            return Fault.UNAVAILABLE if requests == at + 1 else Fault.NONE

        machine.store.fault = fail
        failed = False
        try:
            await call("delete_topic", topic="orders")
        except MetadataUnavailable:
            failed = True
        machine.store.fault = lambda _: Fault.NONE
        marked = broker.topics.find(ORDERS.path) is None
        if failed and by_restart:
            await broker.close()
            broker = await machine.start()
        elif failed:
            await caller(broker)("delete_topic", topic="orders")
        if marked or not by_restart:
            assert await keys_of_topics(machine) == []
            assert not [path for path in machine.disk.paths() if "orders" in path]
        else:
            await publish(broker, 0, 1)  # it had not begun: the topic is as it was
        await broker.close()


async def test_a_deletion_goes_on_when_the_one_who_asked_is_gone(simulation: Simulation) -> None:
    async with served(simulation) as (broker, call):
        await call("create_topic", topic="orders")
        marked = asyncio.Event()
        broker.topics.on_change.append(lambda _: marked.set())
        asking = asyncio.ensure_future(call("delete_topic", topic="orders"))
        await marked.wait()
        assert broker.topics.all()[ORDERS.path].deleting
        asking.cancel()
        await until(lambda: not broker.topics.all())
        await broker.front_door.calls.close()


async def test_a_topic_whose_creator_never_heard_of_it_is_served_all_the_same(simulation: Simulation) -> None:
    machine = Machine(simulation)
    broker = await machine.start()
    call = caller(broker)
    answers = iter([Fault.UNCERTAIN, Fault.UNAVAILABLE])  # the write's, and that of reading it back
    machine.store.fault = lambda _: next(answers, Fault.NONE)
    with pytest.raises(MetadataUnavailable):
        await call("create_topic", topic="orders")
    await until(lambda: len(broker.segments.of_topic(ORDERS.path)) == 1)
    await publish(broker, 0, 1)
    with pytest.raises(TopicExists):
        await call("create_topic", topic="orders")
    await broker.close()


async def test_cursors_without_a_subscription_are_swept_at_start(simulation: Simulation) -> None:
    machine = Machine(simulation)
    broker = await machine.start()
    await caller(broker)("create_topic", topic="orders")
    await caller(broker)("create_subscription", topic="orders", subscription="billing")
    await broker.close()
    key = paths.cursor(ORDERS.path, "0000-ffff-0", "ghost")
    await machine.store.txn([], [Put(key, encode(Cursor(offset=Offset(0), epoch=Epoch(1))))])
    broker = await machine.start()
    assert await machine.store.get(key) is None
    assert broker.segments.get(ORDERS.path, 0).cursors.all() == {"billing": 0}
    await broker.close()


async def test_a_lost_answer_does_not_create_a_topic_twice(simulation: Simulation) -> None:
    machine = Machine(simulation)
    broker = await machine.start()
    machine.store.fault = faults(Fault.UNCERTAIN)
    created = await caller(broker)("create_topic", topic="orders")
    assert created["topicId"] == broker.topics.get(ORDERS.path).id
    await publish(broker, 0, 1)
    await broker.close()


async def test_brokers_and_topology_are_shown(simulation: Simulation) -> None:
    machine = Machine(simulation)
    broker = await machine.start()
    call = caller(broker)
    await call("create_topic", topic="orders", segments=2)
    other = Registration(address="elsewhere:6660", admin="", version="1")
    await machine.store.txn([], [Put(paths.broker("broker-2"), other.to_json())])
    first, second = await call("list_brokers")
    assert first == {
        "id": "broker-1", "address": "machine:6660", "admin": "127.0.0.1:8660", "state": "active",
        "version": first["version"], "startedAt": broker.cluster.registration.started_at, "labels": {}, "segments": 2,
        "replicas": 0, "leader": True, "load": first["load"], "obstacles": [],
    }  # fmt: skip
    assert (second["id"], second["segments"]) == ("broker-2", 0)
    topology = await call("topology")
    assert topology["generation"] == broker.front_door.topology.generation
    (orders,) = topology["topics"]
    assert (orders["topic"], orders["topicId"]) == (ORDERS.path, broker.topics.get(ORDERS.path).id)
    assert [(each["segmentId"], each["owner"], each["epoch"]) for each in orders["segments"]] == [
        (0, "machine:6660", 1),
        (1, "machine:6660", 1),
    ]
    assert orders["segments"][1]["hashRange"] == {"start": 0x8000, "end": 0xFFFF}
    await broker.close()


async def test_a_change_of_layout_is_listed_while_it_is_under_way(simulation: Simulation) -> None:
    async with served(simulation) as (_, call):
        await call("create_topic", topic="orders")
        assert await call("list_changes") == []
        split = asyncio.ensure_future(call("split_segment", topic="orders", segment=0))
        found: list[dict[str, Any]] = []
        while not found:  # A turn of the loop goes by in each call.
            found = [each for each in await call("list_changes") if each["kind"] == "layout"]
        (change,) = found
        assert (change["topic"], change["segments"], change["children"]) == (ORDERS.path, [0], [1, 2])
        assert (change["step"], change["since"] > 0) == ("CREATING", True)
        await split
        assert await call("list_changes") == []


async def test_a_topic_that_is_being_deleted_is_shown_to_nobody(simulation: Simulation) -> None:
    machine = Machine(simulation)
    broker = await machine.start()
    gone = Topic(id=7, layout=Layout.initial(1), deleting=True)
    await machine.store.txn([], [Put(paths.layout(ORDERS.path), gone.to_json())])
    await until(lambda: ORDERS.path in broker.topics.all())
    call = caller(broker)
    assert await call("list_topics", tenant="public", namespace="default") == []
    assert (await call("topology"))["topics"] == []
    with pytest.raises(TopicNotFound):
        await call("get_topic", topic="orders")
    await broker.close()


@pytest.mark.parametrize("storage", ["local", "file:///history", "s3://bucket/prefix?region=eu"])
async def test_readers_are_told_where_storage_is_unless_each_broker_keeps_its_own(
    storage: str, simulation: Simulation
) -> None:
    machine = Machine(simulation)
    machine.config = msgspec.structs.replace(machine.config, storage=storage)
    broker = await machine.start(MemoryObjects(simulation.clock) if storage != "local" else None)
    call = caller(broker)
    await call("create_topic", topic="orders")
    assert await call("topic_storage", topic="orders") == {"storage": "" if storage == "local" else storage}
    with pytest.raises(TopicNotFound):
        await call("topic_storage", topic="absent")
    await broker.close()


async def test_policies_that_are_given_change_and_the_others_stay(simulation: Simulation) -> None:
    async with served(simulation) as (broker, call):
        await call("create_topic", topic="orders", policies={"retentionMs": 1_000, "retentionBytes": 5})
        changed = await call("update_topic", topic="orders", policies={"retentionMs": None, "onOwnerLoss": "continue"})
        assert changed == await call("get_topic", topic="orders")
        policies = changed["policies"]
        assert (policies["retentionMs"], policies["retentionBytes"]) == (None, 5)
        assert (policies["onOwnerLoss"], policies["durability"]) == ("continue", "fsync")
        assert broker.segments.get(ORDERS.path, 0).epoch == 1, "it goes on being served"
        await call("update_topic", topic="orders", policies={})
        with pytest.raises(TopicNotFound):
            await call("update_topic", topic="orders", policies={}, topicId=changed["topicId"] + 1)
        with pytest.raises(TopicNotFound):
            await call("update_topic", topic="nothing", policies={})
        with pytest.raises(InvalidArgument):
            await call("update_topic", topic="orders", policies={"durability": "replicated"})
        assert changed == await call("get_topic", topic="orders")


async def test_a_new_durability_holds_for_the_next_publish(simulation: Simulation) -> None:
    async with served(simulation) as (broker, call):
        await call("create_topic", topic="orders", policies={"durability": "memory"})
        await publish(broker, 0, 3)
        await call("update_topic", topic="orders", policies={"durability": "fsync"})
        await until(lambda: [each.epoch for each in broker.segments.of_topic(ORDERS.path)] == [2])
        segment = broker.segments.get(ORDERS.path, 0)
        assert (segment.durability, segment.end) == (Durability.FSYNC, 3)
        await publish(broker, 0, 1)
        assert segment.end == segment.storage.log.synced.value == 4
        assert broker.topics.get(ORDERS.path).ever_memory, "what was confirmed before it was synced stays in doubt"


async def test_a_topic_that_may_exist_stays_as_it_is(simulation: Simulation) -> None:
    async with served(simulation) as (_, call):
        created = await call("create_topic", topic="orders", segments=2, existOk=True)
        again = await call("create_topic", topic="orders", policies={"retentionMs": 5}, existOk=True)
        assert again == created
        with pytest.raises(TopicExists):
            await call("create_topic", topic="orders")


async def test_stats_show_how_much_comes_in_and_goes_out(simulation: Simulation) -> None:
    async with served(simulation) as (broker, call):
        await call("create_topic", topic="orders", segments=2)
        await asyncio.sleep(60)
        segment = broker.segments.get(ORDERS.path, 0)
        segment.publishes.taken_bytes += 600_000
        await asyncio.sleep(6)
        first, second = (await call("topic_stats", topic="orders"))["segments"].values()
        assert 1_000 < first["bytesInPerS"] <= 600_000 / 5
        assert first["bytesOutPerS"] == second["bytesInPerS"] == second["bytesOutPerS"] == 0
