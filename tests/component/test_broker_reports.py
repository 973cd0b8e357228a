"""Whole brokers that share a store: any of them takes any call, wherever the segments are."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from braid.broker.admin.reports import ANSWER_S, OwnerReport, why_unavailable
from braid.broker.admin.segment_stats import TopicCounts
from braid.broker.auth import ANONYMOUS
from braid.broker.broker import Broker
from braid.broker.config import BrokerConfig
from braid.metadata.memory import MemoryStore
from braid.model.errors import ClientClosed, Moved, SubscriptionBusy, SubscriptionNotFound
from braid.model.ids import SegmentId
from braid.model.ownership import Move, Ownership
from braid.ports.network import Address
from braid.testing.batches import opaque_batch
from braid.testing.sim.disk import SimulatedDisk
from braid.testing.sim.loop import Simulation
from braid.testing.sim.network import SimulatedNetwork
from braid.wire.link import Link, connect_link
from braid.wire.operations import Kind, Open, Opened, Published, Route, decode, encode
from tests.kits.brokers import running_brokers
from tests.kits.control import ORDERS
from tests.kits.waiting import until


class Brokers:
    def __init__(self, simulation: Simulation, *names: str) -> None:
        self.simulation = simulation
        self.store = MemoryStore(simulation.clock)
        self.network = SimulatedNetwork(simulation.random)
        self.names = names
        self.brokers: dict[str, Broker] = {}

    async def open(self, name: str) -> Broker:
        broker = self.brokers[name] = await Broker.open(
            BrokerConfig(id=name, data="/data", listen=f"{name}:6660"),
            network=self.network.host(name),
            store=self.store.client(name),
            disk=SimulatedDisk(self.simulation.random),
            clock=self.simulation.clock,
            random=self.simulation.random,
        )
        return broker

    async def call(self, through: str, name: str, **arguments: Any) -> Any:
        return await self.brokers[through].front_door.calls.call(name, {"topic": "orders", **arguments}, ANONYMOUS)

    def owner(self, segment: int) -> str:
        route = self.brokers[self.names[0]].front_door.topology.route(ORDERS.path)
        return route.segments[segment].owner.partition(":")[0]


@contextlib.asynccontextmanager
async def opened(simulation: Simulation, *names: str, segments: int) -> AsyncIterator[Brokers]:
    """With a topic whose segments are all served."""
    cluster = Brokers(simulation, *names)
    for name in names:
        await cluster.open(name)
    await cluster.call(names[0], "create_topic", segments=segments)
    await until(lambda: all(cluster.owner(segment) for segment in range(segments)))
    for broker in cluster.brokers.values():
        await broker.cluster.view.caught_up((await cluster.store.list("/")).revision)
    yield cluster
    for broker in cluster.brokers.values():
        await broker.close()


@contextlib.asynccontextmanager
async def linked(cluster: Brokers, broker: str) -> AsyncIterator[Link]:
    link = await connect_link(
        cluster.network.host("client"),
        Address(broker, 6660),
        client="test",
        token="",
        timeout_s=5,
        on_topology=lambda _: None,
    )
    yield link
    link.close(ClientClosed("done"))


async def publish(cluster: Brokers, through: str, segment: int, records: int) -> int:
    """One batch; its offset."""
    topic = cluster.brokers[cluster.names[0]].topics.get(ORDERS.path)
    route = Route(ORDERS.path, topic.id, segment, topic.layout.epoch)
    async with linked(cluster, through) as link:
        reply = await link.request(Kind.PUBLISH, encode(route), [opaque_batch(bytes(1_024), records)])
    return decode(Published, reply.body).base_offset


async def test_any_broker_tells_of_all_segments_and_subscriptions(simulation: Simulation) -> None:
    async with opened(simulation, "a", "b", "c", segments=2) as cluster:
        owners = [cluster.owner(0), cluster.owner(1)]
        assert len(set(owners)) == 2
        await publish(cluster, owners[0], 0, 3)
        await publish(cluster, owners[1], 1, 4)
        await cluster.call("c", "create_subscription", subscription="billing", start="earliest")
        moved = await cluster.call("b", "seek_subscription", subscription="billing", offsets={"1": 3})
        assert moved == {"offsets": {"1": 3}}
        for through in cluster.names:
            stats = await cluster.call(through, "topic_stats")
            segments = stats["segments"]
            assert [segments[each]["owner"] for each in "01"] == owners
            assert [segments[each]["endOffset"] for each in "01"] == [3, 4]
            assert [segments[each]["unavailable"] for each in "01"] == [None, None]
            assert (stats["publishedBatches"], stats["publishedRecords"]) == (2, 7)
            shown = await cluster.call(through, "get_subscription", subscription="billing")
            assert shown["backlog"] == 4
            assert [shown["segments"][each]["offset"] for each in "01"] == [0, 3]
            assert shown["unavailable"] == {}
            assert stats["subscriptions"] == {"billing": shown}
            assert await cluster.call(through, "list_subscriptions") == [shown]
        await cluster.call("a", "skip_subscription", subscription="billing")
        assert (await cluster.call("c", "get_subscription", subscription="billing"))["backlog"] == 0
        await cluster.call("a", "delete_subscription", subscription="billing")
        with pytest.raises(SubscriptionNotFound):
            await cluster.call("c", "get_subscription", subscription="billing")


async def test_what_an_owner_does_not_tell_is_shown_as_unavailable_with_its_name(simulation: Simulation) -> None:
    async with opened(simulation, "a", "b", segments=2) as cluster:
        here, there = (0, 1) if cluster.owner(0) == "a" else (1, 0)
        await publish(cluster, "a", here, 3)
        await cluster.call("a", "create_subscription", subscription="billing", start="earliest")
        cluster.network.cut("a", "b")
        began = simulation.clock.monotonic()
        stats = await cluster.call("a", "topic_stats")
        assert simulation.clock.monotonic() - began <= ANSWER_S + 0.1
        lost, kept = stats["segments"][str(there)], stats["segments"][str(here)]
        assert (lost["owner"], lost["endOffset"], lost["records"]) == ("b", None, None)
        assert "broker b" in lost["unavailable"]
        assert (kept["endOffset"], kept["unavailable"]) == (3, None)
        shown = stats["subscriptions"]["billing"]
        assert (list(shown["segments"]), shown["backlog"]) == ([str(here)], 3)
        assert shown["unavailable"][str(there)]["owner"] == "b"
        cluster.network.heal()
        assert (await cluster.call("a", "topic_stats"))["segments"][str(there)]["unavailable"] is None


async def test_a_broker_that_does_not_serve_a_segment_names_the_one_that_does(simulation: Simulation) -> None:
    async with opened(simulation, "a", "b", segments=2) as cluster:
        topic = cluster.brokers["a"].topics.get(ORDERS.path)
        for segment in (0, 1):
            owner = cluster.owner(segment)
            other = "b" if owner == "a" else "a"
            with pytest.raises(Moved) as caught:
                await publish(cluster, other, segment, 1)
            assert (caught.value.owner, caught.value.epoch) == (f"{owner}:6660", 1)
            opening = encode(Open(1, ORDERS.path, topic.id, segment, 1_000))
            async with linked(cluster, other) as link:
                with pytest.raises(Moved) as caught:
                    await link.ask(Kind.OPEN, opening, Opened, 5)
            assert caught.value.owner == f"{owner}:6660"
            assert await publish(cluster, owner, segment, 1) == 0


async def test_the_topology_call_tells_what_clients_are_told(simulation: Simulation) -> None:
    async with opened(simulation, "a", "b", segments=2) as cluster:
        shown = [await broker.front_door.calls.call("topology", {}, ANONYMOUS) for broker in cluster.brokers.values()]
        assert shown[0] == shown[1]
        (orders,) = shown[0]["topics"]
        assert sorted(each["owner"] for each in orders["segments"]) == ["a:6660", "b:6660"]


async def test_consumers_are_shown_by_every_broker_wherever_their_group_is_run(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers:
        await brokers.call("a", "create_topic", topic="orders", segments=3)
        async with (
            brokers.client("b") as client,
            client.stream_consumer("orders", "billing", name="worker-1", start="earliest") as consumer,
        ):
            await until(lambda: len(consumer.segments) == 3)
            assert brokers.controller()
            for name in ("a", "b", "c"):
                found = await brokers.call(name, "get_subscription", topic="orders", subscription="billing")
                assert found["consumers"] == {"worker-1": {"segments": [0, 1, 2], "connected": True}}
                with pytest.raises(SubscriptionBusy, match="worker-1"):
                    await brokers.call(name, "delete_subscription", topic="orders", subscription="billing")
                with pytest.raises(SubscriptionBusy, match="worker-1"):
                    await brokers.call(name, "delete_topic", topic="orders")


ASSIGNED = Ownership.first("a")
SERVING = ASSIGNED.serving()
ANSWERED = OwnerReport(segments={}, cursors={}, counts=TopicCounts(**dict.fromkeys(TopicCounts.__struct_fields__, 0)))
ABSENT = msgspec.structs.replace(ANSWERED, absent={SegmentId(0): "the disk does not answer"})


@pytest.mark.parametrize(
    ("record", "answer", "reason"),
    [
        (None, ANSWERED, "no broker was given it so far"),
        (ASSIGNED, ANSWERED, "broker a is opening it"),
        (ASSIGNED, "broker a is gone", "broker a is gone"),
        (ASSIGNED.unopened("no files", lasting=True), ANSWERED, "broker a cannot open it: no files"),
        (ASSIGNED.unopened("no files", lasting=True), "broker a is gone", "broker a is gone"),
        (ASSIGNED, ABSENT, "broker a cannot open it: the disk does not answer"),
        (SERVING, ANSWERED, "its owner does not serve it at the moment"),
        (SERVING.moving(Move(to="b")).draining(), ANSWERED, "broker a is handing it over"),
        (SERVING.moving(Move(to="b")).draining().sealed(), ANSWERED, "it is moving from broker a to broker b"),
        (SERVING.moving(Move()).draining().sealed(), "broker a is gone", "it is moving from broker a to another one"),
    ],
)
def test_a_segment_that_nobody_serves_says_why(
    record: Ownership | None, answer: OwnerReport | str, reason: str
) -> None:
    assert why_unavailable(record, {"a": answer}, SegmentId(0)).reason == reason


def test_a_segment_whose_holders_are_all_gone_names_them() -> None:
    sealed = SERVING.moving(Move(to="b")).draining().sealed(("a", "b"))
    found = why_unavailable(sealed, {"a": "broker a is gone"}, SegmentId(0), ["a", "b"])
    assert found.reason == "its history is only on a and b, which are down"
    found = why_unavailable(sealed, {"a": "broker a is gone"}, SegmentId(0), ["a"])
    assert found.reason == "it is moving from broker a to broker b"
