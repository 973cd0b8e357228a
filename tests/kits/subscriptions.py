"""The subscriptions of one broker in virtual time: a store, a topic whose segments are plain values, no disk."""

from __future__ import annotations

from braid.broker.groups.cursor_sweep import CursorSweep
from braid.broker.groups.subscriptions import SeekRequest, Subscriptions
from braid.broker.peers.links import Peers
from braid.broker.segments.segment_access import SegmentAccesses
from braid.broker.topics import Topics
from braid.cluster.members import Members
from braid.cluster.owners import Owners
from braid.metadata import paths
from braid.metadata.memory import MemoryStore
from braid.metadata.view import View
from braid.model.ids import Offset, SegmentId
from braid.model.subscription import Placing, Subscription, SubscriptionKind
from braid.testing.sim.loop import Simulation
from braid.testing.sim.network import SimulatedNetwork
from tests.kits.control import ORDERS, PlainSegment, PlainSegments, make_topic

STREAM = SubscriptionKind.STREAM
KEY = paths.subscription(ORDERS.path, "billing")


class World:
    def __init__(self, store: MemoryStore, topics: Topics, segments: PlainSegments, subs: Subscriptions) -> None:
        self.store = store
        self.topics = topics
        self.segments = segments
        self.subs = subs
        self.cursor_sweep = CursorSweep(store, topics, segments, subs)

    @classmethod
    async def make(cls, simulation: Simulation, *, segments: int = 2, end: int = 100) -> World:
        store = MemoryStore(simulation.clock)
        view = View(store)
        topics = Topics(view, simulation.clock, simulation.random)
        owners, members = Owners(view), Members(view)
        await view.load()
        topic = await make_topic(topics, segments=segments)
        served = PlainSegments()
        await served.serve(store, ORDERS, topic, end=end)
        peers = Peers("broker-1", members, SimulatedNetwork(simulation.random).host("machine"))
        accesses = SegmentAccesses("broker-1", served, owners, members, peers.call)
        subs = Subscriptions(store, topics, accesses, simulation.clock, simulation.random)
        return cls(store, topics, served, subs)

    async def create(self, start: str = "earliest", name: str = "billing") -> Subscription:
        return await self.subs.create(ORDERS, name, kind=STREAM, start=start)

    def __getitem__(self, segment: int) -> PlainSegment:
        return self.segments.get(ORDERS.path, segment)

    def offsets(self, name: str = "billing") -> list[int | None]:
        return [segment.cursors.offset(name) for segment in self.segments.of_topic(ORDERS.path)]

    def placing(self, offset: Offset, request: SeekRequest, segment: int = 0) -> Placing:
        """As another broker would ask a segment's owner for it."""
        assert request.since is not None
        return Placing("billing", offset, request_id=request.id, since=request.since[SegmentId(segment)])

    async def exists(self) -> bool:
        return await self.store.client("looker-on").get(KEY) is not None

    async def stored_cursors(self) -> int:
        listing = await self.store.client("looker-on").list(paths.topic_segments_prefix(ORDERS.path))
        return sum(paths.subscription_of_cursor(entry.key) is not None for entry in listing.entries)
