"""Whole brokers on a metadata store that a build of another version has written to."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from braid.admin.metrics import Exposition
from braid.metadata import paths
from braid.metadata.store import Put
from braid.model.errors import NotServing, RecordUnreadable, SubscriptionNotFound
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import PATH, Brokers, running_brokers
from tests.kits.waiting import until

Json = dict[str, Any]


async def rewrite(brokers: Brokers, prefix: str, change: Callable[[Json], None]) -> list[str]:
    """Change all records below a prefix, as another build might; return their keys."""
    changed = []
    for entry in (await brokers.store.list(prefix)).entries:
        if not entry.lease and entry.value.startswith(b"{"):
            record = msgspec.json.decode(entry.value)
            change(record)
            await brokers.store.txn([], [Put(entry.key, msgspec.json.encode(record))])
            changed.append(entry.key)
    return changed


def with_a_field_of_the_future(record: Json) -> None:
    record["tier"] = "gold"
    for each in (record.get("policies"), *record.get("layout", {}).get("segments", {}).values()):
        if each is not None:
            each["tier"] = "gold"


def metric(brokers: Brokers, name: str) -> float:
    families = Exposition(brokers.any(), Counter())._broker_families()
    return next(sample.value for family in families for sample in family.samples if sample.name == name)


async def test_brokers_serve_what_a_later_build_has_stored_and_keep_its_fields(simulation: Simulation) -> None:
    async with running_brokers(simulation, ("a", "b")) as brokers:
        async with brokers.client() as client:
            await client.admin.create_topic("orders", 2)
            await client.admin.create_subscription("orders", "billing", start="earliest")
            async with client.producer("orders") as producer:
                await producer.send_many([b"%d" % number for number in range(100)])
        await brokers.stop("a")
        await brokers.stop("b")
        changed = await rewrite(brokers, "/", with_a_field_of_the_future)
        assert {key.split("/")[1] for key in changed} == {"topics", "segments", "storage"}
        await brokers.start("a", "b")
        async with brokers.client() as client:
            await until(lambda: bool(brokers.owner(0) and brokers.owner(1)))
            await brokers.move(0, "b" if brokers.owner(0) == "a" else "a")
            async with client.producer("orders") as producer:
                await producer.send_many([b"%d" % number for number in range(100, 200)])
            async with client.stream_consumer("orders", subscription="billing") as consumer:
                for _ in range(200):
                    message = await consumer.receive()
                    assert message is not None
                    await consumer.ack(message)
            shown = await client.admin.topic("orders")
            assert shown["segments"]["0"]["tier"] == "gold"
        lost = [
            entry.key
            for key in changed
            if (entry := await brokers.store.get(key)) is not None and b'"tier":"gold"' not in entry.value
        ]
        assert lost == []
        topic = await brokers.store.get(paths.layout(PATH))
        assert topic is not None
        assert topic.value.count(b'"tier":"gold"') == 4, "of the topic, its policies and its segments"


async def test_a_topic_that_cannot_be_read_is_reported_and_its_clients_wait(simulation: Simulation) -> None:
    async with running_brokers(simulation, ("a",)) as brokers:
        async with brokers.client() as client:
            await client.admin.create_topic("orders", 2)
        await brokers.stop("a")
        await rewrite(brokers, paths.layout(PATH), lambda record: record["policies"].update(durability="quantum"))
        await brokers.start("a")
        async with brokers.client(timeout=60) as client:
            sending = asyncio.create_task(_send(client))
            stats = await client.admin.topic_stats("orders")
            assert sorted(stats["segments"]) == ["0", "1"]
            reasons = {stats["unavailable"], *(each["unavailable"] for each in stats["segments"].values())}
            assert len(reasons) == 1
            assert "quantum" in reasons.pop()
            assert await client.admin.list_topics() == ["topic://public/default/orders"]
            assert metric(brokers, "braid_metadata_unreadable_records") == 1
            assert metric(brokers, "braid_segments_unavailable") == 2
            async with brokers.client(timeout=5) as hasty:
                with pytest.raises(RecordUnreadable, match="quantum"):
                    await hasty.admin.topic("orders")
                with pytest.raises(RecordUnreadable, match="quantum"):
                    await _send(hasty)
            assert not sending.done()
            await rewrite(brokers, paths.layout(PATH), lambda record: record["policies"].update(durability="fsync"))
            await sending
            assert metric(brokers, "braid_metadata_unreadable_records") == 0
            assert metric(brokers, "braid_segments_unavailable") == 0


async def _send(client: Any) -> None:
    async with client.producer("orders") as producer:
        await producer.send(b"paid", key=b"customer-7")


async def test_a_segment_whose_record_cannot_be_read_is_reported_with_the_reason(simulation: Simulation) -> None:
    async with running_brokers(simulation, ("a",)) as brokers:
        async with brokers.client() as client:
            await client.admin.create_topic("orders", 2)
        await brokers.stop("a")
        (key, _) = await rewrite(brokers, paths.topic_segments_prefix(PATH), lambda record: None)
        await rewrite(brokers, key, lambda record: record.update(state="PAUSED"))
        await brokers.start("a")
        async with brokers.client() as client:
            stats = await client.admin.topic_stats("orders")
            assert "PAUSED" in stats["segments"]["0"]["unavailable"]
            assert stats["segments"]["1"]["unavailable"] is None
        with pytest.raises(RecordUnreadable, match="PAUSED"):
            brokers.any().segments.get(PATH, 0)
        assert not isinstance(brokers.any().segments.not_here(PATH, 0), NotServing)


async def test_a_subscription_or_a_cursor_that_cannot_be_read_is_named(simulation: Simulation) -> None:
    async with running_brokers(simulation, ("a",)) as brokers:
        async with brokers.client() as client:
            await client.admin.create_topic("orders")
            await client.admin.create_subscription("orders", "billing")
        await brokers.stop("a")
        key, cursor = paths.subscription(PATH, "billing"), paths.cursor(PATH, "0000-ffff-0", "billing")
        await rewrite(brokers, key, lambda record: record.update(kind="quantum"))
        await rewrite(brokers, cursor, lambda record: record.update(offset="seven"))
        await brokers.start("a")
        async with brokers.client(timeout=5) as client:
            stats = await client.admin.topic_stats("orders")
            assert f"the Subscription at {key} cannot be read" in stats["subscriptions"]["billing"]["unreadable"]
            assert f"the Cursor at {cursor} cannot be read" in stats["segments"]["0"]["unavailable"]


@pytest.mark.parametrize("damage", [b"\xff{", b'{"id": 7, "kind": "quantum"}', b"[]"])
async def test_a_subscription_that_cannot_be_read_is_shown_with_the_reason_and_can_be_deleted(
    damage: bytes, simulation: Simulation
) -> None:
    async with running_brokers(simulation, ("a",)) as brokers, brokers.client(timeout=5) as client:
        await client.admin.create_topic("orders")
        for name in ("billing", "mailer"):
            await client.admin.create_subscription("orders", name, start="earliest")
        await client.producer("orders").send(b"one")
        key = paths.subscription(PATH, "billing")
        await brokers.store_of("a").txn([], [Put(key, damage)])
        billing, mailer = await client.admin.subscriptions("orders")
        assert (billing["kind"], billing["createdAt"], billing["backlog"]) == (None, None, 1)
        assert f"the Subscription at {key} cannot be read" in billing["unreadable"]
        assert (mailer["kind"], mailer["unreadable"]) == ("stream", None)
        stats = await client.admin.topic_stats("orders")
        assert stats["subscriptions"] == {"billing": billing, "mailer": mailer}
        assert await client.admin.subscription("orders", "billing") == billing
        with pytest.raises(RecordUnreadable):
            await client.admin.create_subscription("orders", "billing")
        await client.admin.split("orders", 0)
        await client.admin.delete_subscription("orders", "billing")
        assert [each["name"] for each in await client.admin.subscriptions("orders")] == ["mailer"]
        assert all("billing" not in each.cursors.all() for each in brokers.any().segments.all())
        with pytest.raises(SubscriptionNotFound):
            await client.admin.delete_subscription("orders", "billing")


async def test_a_topic_with_a_subscription_that_cannot_be_read_can_be_deleted(simulation: Simulation) -> None:
    async with running_brokers(simulation, ("a",)) as brokers, brokers.client(timeout=5) as client:
        await client.admin.create_topic("orders")
        await client.admin.create_subscription("orders", "billing")
        await brokers.store_of("a").txn([], [Put(paths.subscription(PATH, "billing"), b"?")])
        await client.admin.delete_topic("orders")
        await client.admin.create_topic("orders")
        assert await client.admin.subscriptions("orders") == []
