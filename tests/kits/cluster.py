"""Several brokers' control sides in one simulation: one store, one network, views, peers, sessions; segments are just
numbers (control_kit.py), given to whom a test says."""

from __future__ import annotations

import asyncio
from typing import cast

import msgspec

from braid.broker.auth import Access
from braid.broker.config import Limits
from braid.broker.connections.server import Server
from braid.broker.connections.services import Services
from braid.broker.connections.unfinished_frames import UnfinishedFrames
from braid.broker.groups.cursor_sweep import CursorSweep
from braid.broker.groups.subscriptions import Subscriptions
from braid.broker.metrics import BrokerMetrics
from braid.broker.peers.calls import PeerCalls
from braid.broker.peers.links import Peers, cluster_secret
from braid.broker.segments.segment_access import SegmentAccesses, answer_for
from braid.broker.topics import Topics
from braid.broker.topology import TopologyView
from braid.broker.turns import Turns
from braid.broker.unsent_bytes import UnsentBytes
from braid.cluster.members import Members
from braid.cluster.owners import Owners
from braid.metadata import paths
from braid.metadata.memory import MemoryStore
from braid.metadata.store import Delete, Put
from braid.metadata.view import View
from braid.model.cluster import REPLICAS, Registration
from braid.model.errors import ClientClosed
from braid.model.ids import Offset
from braid.model.layout import SegmentInfo
from braid.model.names import SegmentName
from braid.model.ownership import Ownership, OwnershipState
from braid.model.topic import Topic
from braid.ports.network import Address
from braid.testing.sim.loop import Simulation
from braid.testing.sim.network import SimulatedNetwork
from braid.wire.link import Link, connect_link
from braid.wire.operations import Kind, Topology, TopologyRequest, encode
from tests.kits.control import ORDERS, PlainSegment, PlainSegments, make_topic, plain_segment
from tests.kits.waiting import until

PORT = 6660


class Node:
    """What a broker is to others, without a disk."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.id = name
        self.ready, self.closing = True, False
        self.groups = None
        """These tests have no consumers."""
        self.limits, self.metrics, self.access = Limits(), BrokerMetrics(), Access(None)
        self.turns = Turns()
        self.unfinished_frames = UnfinishedFrames(self.limits.max_unfinished_bytes, asyncio.get_running_loop().time)
        self.unsent_bytes = UnsentBytes(self.limits.max_unsent_bytes)
        self.store = cluster.store.client(name)
        self.view = View(self.store)
        self.topics = Topics(self.view, cluster.simulation.clock, cluster.simulation.random)
        self.owners, self.members = Owners(self.view), Members(self.view)
        host = cluster.network.host(name)
        self.peers, self.peer_calls = Peers(name, self.members, host), PeerCalls()
        self.segments = PlainSegments()
        answer_for(self.segments, self.peer_calls)
        self.accesses = SegmentAccesses(name, self.segments, self.owners, self.members, self.peers.call)
        self.subscriptions = Subscriptions(
            self.store, self.topics, self.accesses, cluster.simulation.clock, cluster.simulation.random
        )
        self.cursor_sweep = CursorSweep(self.store, self.topics, self.segments, self.subscriptions)
        self.topology = TopologyView(name, self.topics, self.owners, self.members)
        self.topology.own_address = self.topology.told_address = f"{name}:{PORT}"
        self.server = Server(cast("Services", self), host, cluster.simulation.clock)

    async def start(self) -> None:
        await self.server.listen(Address(self.id, PORT))
        self.peers.secret = self.access.peer_secret = await cluster_secret(self.store)
        await self.register(self.topology.own_address)
        await self.view.load()

    async def register(self, address: str) -> None:
        await self.store.txn(
            [], [Put(paths.broker(self.id), Registration(address=address, admin="", features=(REPLICAS,)).to_json())]
        )

    async def unregister(self) -> None:
        await self.store.txn([], [Delete(paths.broker(self.id))])

    def __getitem__(self, segment: int) -> PlainSegment:
        return self.segments.get(ORDERS.path, segment)

    async def stop(self) -> None:
        await self.cursor_sweep.stop()
        await self.peers.close()
        await self.server.close()
        await self.peer_calls.close()
        await self.view.stop()


class Cluster:
    """Use it with `async with`."""

    def __init__(self, simulation: Simulation, *ids: str) -> None:
        self.simulation = simulation
        self.store = MemoryStore(simulation.clock)
        self.network = SimulatedNetwork(simulation.random)
        self.nodes = {name: Node(self, name) for name in ids}
        self.topic: Topic

    async def __aenter__(self) -> Cluster:
        for node in self.nodes.values():
            await node.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for node in self.nodes.values():
            await node.stop()

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    async def make_topic(self, *owners: str, end: int = 100) -> None:
        """With a segment for each of these, its owner."""
        first = next(iter(self.nodes.values()))
        self.topic = await make_topic(first.topics, segments=len(owners))
        for segment_id, owner in enumerate(owners):
            await self.serve(segment_id, owner, end=end)
        await self.agree()

    def info(self, segment_id: int) -> SegmentInfo:
        return next(info for info in self.topic.layout.segments.values() if info.segment_id == segment_id)

    def name(self, segment_id: int) -> SegmentName:
        return SegmentName.of(ORDERS, self.info(segment_id))

    async def serve(self, segment_id: int, owner: str, *, epoch: int = 1, end: int = 100) -> PlainSegment:
        node = self.nodes[owner]
        segment = await plain_segment(
            node.store, self.name(segment_id), end=end, topic_id=self.topic.id, owner=owner, epoch=epoch
        )
        node.segments.served[ORDERS.path, segment_id] = segment
        return segment

    async def put(self, segment_id: int, state: OwnershipState) -> None:
        """Change the state of a segment's record, and nothing else of it."""
        name = self.name(segment_id)
        key = paths.ownership(name.topic.path, name.descriptor)
        entry = await self.store.get(key)
        assert entry is not None
        record = msgspec.structs.replace(Ownership.from_json(entry.value), state=state)
        await self.store.txn([], [Put(key, record.to_json())])

    def withdraw(self, segment_id: int, owner: str) -> PlainSegment:
        return self.nodes[owner].segments.served.pop((ORDERS.path, segment_id))

    async def agree(self) -> None:
        """Return when all views show what is stored now."""
        now = (await self.store.list("/")).revision
        for node in self.nodes.values():
            await node.view.caught_up(now)

    def cursor(self, segment_id: int, owner: str, subscription: str = "billing") -> Offset | None:
        return self.nodes[owner][segment_id].cursors.offset(subscription)


class ClientLink:
    """A client's connection to one node, which notes what is pushed to it."""

    def __init__(self) -> None:
        self.link: Link
        self.pushes: list[Topology] = []

    @classmethod
    async def open(cls, cluster: Cluster, node: str, token: str = "") -> ClientLink:
        client = cls()
        client.link = await connect_link(
            cluster.network.host("client"),
            Address(node, PORT),
            client="test",
            token=token,
            timeout_s=5,
            on_topology=client.pushes.append,
        )
        return client

    async def watch(self, *topics: str) -> Topology:
        return await self.link.ask(Kind.TOPOLOGY, encode(TopologyRequest(topics)), Topology, 5)

    async def next_push(self) -> Topology:
        await until(lambda: bool(self.pushes))
        return self.pushes.pop(0)

    async def settled(self) -> None:
        """Return when whatever the node had to tell has come."""
        await self.link.request(Kind.PING)
        await self.link.request(Kind.PING)

    def close(self) -> None:
        self.link.close(ClientClosed("the test is over"))
