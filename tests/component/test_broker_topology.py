"""What clients are told of topics, and when: routes come from one revision, and pushes are caused by content alone."""

from __future__ import annotations

import asyncio

import pytest

from braid.broker.topology import TopologyView, encoded_topology
from braid.metadata import paths
from braid.metadata.store import Delete, Put
from braid.model.errors import ProtocolError
from braid.model.names import TopicName
from braid.model.ownership import Move, Ownership, OwnershipState
from braid.model.topic import TopicPolicies
from braid.testing.sim.loop import Simulation
from braid.wire.operations import HERE, Kind, SegmentRoute, TopicRoute, Topology, TopologyAck, decode, encode
from tests.kits.cluster import ClientLink, Cluster, Node
from tests.kits.control import ORDERS
from tests.kits.waiting import until

OTHER = TopicName("public", "default", "other")


def owners(route: TopicRoute) -> list[str]:
    return [segment.owner for segment in route.segments]


async def test_a_route_names_the_owners_that_serve_and_are_registered(simulation: Simulation) -> None:
    async with Cluster(simulation, "a", "b") as cluster:
        await cluster.make_topic("a", "b")
        for node in ("a", "b"):
            assert owners(cluster[node].topology.route(ORDERS.path)) == ["a:6660", "b:6660"]
        for state in (OwnershipState.DRAINING, OwnershipState.SEALED, OwnershipState.ASSIGNED):
            await cluster.put(1, state)
            await cluster.agree()
            assert owners(cluster["a"].topology.route(ORDERS.path)) == ["a:6660", ""]
        await cluster.put(1, OwnershipState.SERVING)
        await cluster["b"].unregister()
        await cluster.agree()
        assert owners(cluster["a"].topology.route(ORDERS.path)) == ["a:6660", ""]
        await cluster["b"].register("b.example:1")
        await cluster.agree()
        route = cluster["a"].topology.route(ORDERS.path)
        assert route.segments[1] == SegmentRoute(1, 0x8000, 0xFFFF, True, (), (), "b.example:1", 1)
        assert cluster["a"].topology.route(OTHER.path) == TopicRoute(OTHER.path, 0, 0, ())


async def test_a_broker_on_every_address_of_its_machine_tells_clients_here(simulation: Simulation) -> None:
    async with Cluster(simulation, "a", "b") as cluster:
        await cluster.make_topic("a", "b")
        node = cluster["a"]
        topology = TopologyView("a", node.topics, node.owners, node.members, lambda _: "a:6660")
        topology.own_address, topology.told_address = "a:6660", HERE
        told = decode(Topology, encoded_topology(7, [topology.encoded(ORDERS.path)]))
        assert told.generation == 7
        assert owners(told.topics[0]) == [HERE, "b:6660"]
        assert told.topics[0].controller == HERE
        assert owners(topology.route(ORDERS.path)) == ["a:6660", "b:6660"]
        assert topology.route(ORDERS.path).controller == "a:6660"


async def test_a_route_that_was_encoded_before_does_not_outlive_a_change(simulation: Simulation) -> None:
    async with Cluster(simulation, "a", "b") as cluster:
        await cluster.make_topic("a", "b")
        topology = cluster["a"].topology

        def told() -> list[str]:
            return owners(decode(TopicRoute, topology.encoded(ORDERS.path)))

        assert told() == ["a:6660", "b:6660"]
        await cluster["b"].register("elsewhere:1")
        await cluster.agree()
        assert told() == ["a:6660", "elsewhere:1"]
        await cluster["b"].unregister()
        await cluster.agree()
        assert told() == ["a:6660", ""]
        await cluster.put(0, OwnershipState.SEALED)
        await cluster.agree()
        assert told() == ["", ""]
        await cluster["a"].topics.mark_deleting(ORDERS)
        assert decode(TopicRoute, topology.encoded(ORDERS.path)).topic_id == 0


async def changes_nothing(cluster: Cluster) -> None:
    """Revisions that are of no interest to whoever follows ORDERS."""
    topics = cluster["a"].topics
    await topics.create(OTHER, segments=1, policies=TopicPolicies(), properties={})
    await cluster.store.txn([], [Put(paths.drain("b"), b"")])
    await cluster.store.txn([], [Put("/storage/x", b"")])
    key = paths.ownership(ORDERS.path, cluster.name(1).descriptor)
    entry = await cluster.store.get(key)
    assert entry is not None
    record = Ownership.from_json(entry.value)
    await cluster.store.txn([], [Put(key, record.moving(Move(to="a")).to_json())])
    await cluster["b"].register("b:6660")


async def test_a_change_of_content_is_pushed_and_a_higher_generation_is_not(simulation: Simulation) -> None:
    async with Cluster(simulation, "a", "b") as cluster:
        await cluster.make_topic("a", "b")
        client = await ClientLink.open(cluster, "a")
        first = await client.watch(ORDERS.path)
        assert owners(first.topics[0]) == ["a:6660", "b:6660"]
        await changes_nothing(cluster)
        await cluster.agree()
        await client.settled()
        assert client.pushes == []
        assert cluster["a"].topology.generation > first.generation + 4

        await cluster["b"].register("b.example:1")  # started again elsewhere
        push = await client.next_push()
        assert owners(push.topics[0]) == ["a:6660", "b.example:1"]
        assert push.generation > first.generation
        await cluster["b"].unregister()  # died
        assert owners((await client.next_push()).topics[0]) == ["a:6660", ""]
        await cluster.serve(1, "a", epoch=2)  # moved
        last = await client.next_push()
        assert [(each.owner, each.epoch) for each in last.topics[0].segments] == [("a:6660", 1), ("a:6660", 2)]
        await cluster["a"].topics.mark_deleting(ORDERS)
        assert (await client.next_push()).topics[0].topic_id == 0
        await client.settled()
        assert client.pushes == []
        client.close()


async def test_changes_of_one_turn_are_told_together(simulation: Simulation) -> None:
    async with Cluster(simulation, "a", "b") as cluster:
        await cluster.make_topic("b", "b", "b")
        client = await ClientLink.open(cluster, "a")
        await client.watch(ORDERS.path)
        names = [cluster.name(segment) for segment in range(3)]
        record = Ownership(state=OwnershipState.SEALED, owner="b", epoch=1)  # type: ignore[arg-type]
        writes = [Put(paths.ownership(ORDERS.path, name.descriptor), record.to_json()) for name in names]
        await cluster.store.txn([], [*writes, Delete(paths.broker("b"))])
        assert owners((await client.next_push()).topics[0]) == ["", "", ""]
        await client.settled()
        assert client.pushes == []
        client.close()


async def test_a_change_that_is_undone_in_the_same_turn_is_told_to_nobody(simulation: Simulation) -> None:
    async with Cluster(simulation, "a", "b") as cluster:
        await cluster.make_topic("a", "b")
        client = await ClientLink.open(cluster, "a")
        await client.watch(ORDERS.path)
        seen: list[str] = []
        cluster["a"].topology.on_change.append(seen.append)
        await asyncio.gather(cluster["b"].unregister(), cluster["b"].register("b:6660"))
        await cluster.agree()
        await client.settled()
        assert seen == [ORDERS.path] * 2
        assert client.pushes == []
        client.close()


async def test_only_those_are_told_who_asked_for_the_topic(simulation: Simulation) -> None:
    async with Cluster(simulation, "a", "b") as cluster:
        await cluster.make_topic("a", "b")
        asked, other = await ClientLink.open(cluster, "a"), await ClientLink.open(cluster, "a")
        await asked.watch(ORDERS.path)
        await other.watch(OTHER.path)
        await cluster["b"].unregister()
        await asked.next_push()
        await other.settled()
        assert other.pushes == []
        asked.close()
        other.close()


async def test_who_asks_between_two_changes_is_told_the_difference_to_what_he_knows(simulation: Simulation) -> None:
    """Each connection is compared with what it was told itself."""
    async with Cluster(simulation, "a", "b") as cluster:
        await cluster.make_topic("a", "b")
        early, late = await ClientLink.open(cluster, "a"), await ClientLink.open(cluster, "a")
        await early.watch(ORDERS.path)
        await cluster["b"].unregister()
        await early.next_push()
        assert owners((await late.watch(ORDERS.path)).topics[0]) == ["a:6660", ""]
        await cluster["b"].register("b:6660")
        for client in (early, late):
            assert owners((await client.next_push()).topics[0]) == ["a:6660", "b:6660"]
            client.close()


async def test_content_at_one_generation_is_the_same_for_everybody(simulation: Simulation) -> None:
    """What clients rely on when they throw away whatever is not newer than what they have."""
    async with Cluster(simulation, "a", "b", "c") as cluster:
        await cluster.make_topic("a", "b", "c")
        seen: dict[int, TopicRoute] = {}

        def look(node: Node) -> None:
            route = node.topology.route(ORDERS.path)
            assert seen.setdefault(node.topology.generation, route) == route

        for node in cluster.nodes.values():
            node.topology.on_change.append(lambda _, node=node: look(node))  # type: ignore[misc]
        for step in range(40):
            segment, owner = simulation.random.randrange(3), simulation.random.choice("abc")
            match simulation.random.randrange(4):
                case 0:
                    await cluster.serve(segment, owner, epoch=2 + step)
                case 1:
                    await cluster.put(segment, simulation.random.choice(list(OwnershipState)))
                case 2:
                    await cluster[owner].unregister()
                case _:
                    await cluster[owner].register(f"{owner}:{step}")
        await cluster.agree()
        assert len(seen) > 20
        assert len(set(map(repr, seen.values()))) > 10


async def test_the_lowest_acked_generation_is_known_of_connections_that_ack(simulation: Simulation) -> None:
    async with Cluster(simulation, "a") as cluster:
        await cluster.make_topic("a")
        server = cluster["a"].server
        clients = [await ClientLink.open(cluster, "a") for _ in range(3)]

        async def ack(client: ClientLink, generation: int) -> None:
            client.link.send(Kind.TOPOLOGY_ACK, encode(TopologyAck(generation)))
            await client.settled()

        told, _, _ = [(await client.watch(ORDERS.path)).generation for client in clients]
        assert server.adopted_generation() is None, "one that never acks holds nobody back"
        await ack(clients[0], told - 2)
        assert server.adopted_generation() == told - 2
        await ack(clients[1], told - 3)
        assert server.adopted_generation() == told - 3
        await ack(clients[1], told)
        await ack(clients[1], told - 1)
        assert server.adopted_generation() == told - 2, "an older ack takes nothing back"
        clients[0].close()
        await until(lambda: server.adopted_generation() == told)
        for client in clients[1:]:
            client.close()
        await until(lambda: server.adopted_generation() is None)


async def test_a_client_that_knows_all_that_concerns_it_has_the_newest_routing(simulation: Simulation) -> None:
    async with Cluster(simulation, "a", "b") as cluster:
        await cluster.make_topic("a")
        servers = [cluster[node].server for node in ("a", "b")]
        clients = [await ClientLink.open(cluster, node) for node in ("a", "b")]
        for client, topic in zip(clients, (ORDERS, OTHER), strict=True):
            told = await client.watch(topic.path)
            client.link.ack_topology(told.generation)
            await client.settled()
        await cluster.put(0, OwnershipState.DRAINING)
        await cluster.agree()
        await clients[0].settled()
        generation = clients[0].pushes[-1].generation
        assert not clients[1].pushes, "its topic has not changed"
        assert all(server.adopted_generation() == generation for server in servers)
        vars(clients[0].link)["ack_topology"] = lambda _generation: None
        await cluster.put(0, OwnershipState.SERVING)
        await cluster.agree()
        await clients[0].settled()
        assert servers[0].adopted_generation() == generation, "it was told more, and has not acked that"
        newest = servers[1].adopted_generation()
        assert newest == clients[0].pushes[-1].generation
        for client in clients:
            client.close()


async def test_a_malformed_ack_ends_the_connection(simulation: Simulation) -> None:
    async with Cluster(simulation, "a") as cluster:
        client = await ClientLink.open(cluster, "a")
        client.link.send(Kind.TOPOLOGY_ACK, encode(["many"]))
        async with asyncio.timeout(10):
            with pytest.raises(ProtocolError):
                raise await client.link.lost
