"""The groups of one broker at a time, over a memory store, with consumers that only note what they are given."""

from __future__ import annotations

from itertools import count

from braid.broker.config import GroupConfig
from braid.broker.groups.controllers import Controllers
from braid.broker.groups.groups import Groups
from braid.broker.segments.read_grants import GrantSigner
from braid.broker.topics import Topics
from braid.cluster.drained import DrainedSegments
from braid.cluster.members import Members
from braid.metadata import paths
from braid.metadata.memory import MemoryStore
from braid.metadata.store import Put
from braid.metadata.view import View
from braid.model.stored_record import encode
from braid.model.subscription import Subscription
from braid.testing.sim.loop import Simulation
from tests.kits.control import ORDERS, Readers, Recorder, make_topic

CONFIG = GroupConfig(session_grace_s=10.0, release_timeout_s=5.0)


class World:
    """A topic with a subscription, its groups, and consumers that give back what they are asked for."""

    def __init__(self, simulation: Simulation, store: MemoryStore) -> None:
        self.simulation = simulation
        self.store = store
        self.readers = Readers()
        self.topics: Topics
        self.controllers: Controllers
        self.drained: DrainedSegments
        self.groups: Groups
        self._brokers = count(1)

    @classmethod
    async def make(cls, simulation: Simulation, segments: int = 4, store: MemoryStore | None = None) -> World:
        world = cls(simulation, store or MemoryStore(simulation.clock))
        await world.start()
        await make_topic(world.topics, segments=segments)
        await world.store.txn([], [Put(paths.subscription(ORDERS.path, "billing"), encode(Subscription()))])
        return world

    async def start(self) -> None:
        """A broker process, with a lease that outlives every test."""
        view = View(self.store)
        self.topics = Topics(view, self.simulation.clock, self.simulation.random)
        lease = await self.store.grant_lease(86_400)
        self.controllers = Controllers(view, Members(view), f"broker-{next(self._brokers)}", lambda: lease.id)
        self.drained = DrainedSegments(view)
        self.groups = Groups(
            self.topics,
            self.controllers,
            self.drained,
            self.simulation.clock,
            CONFIG,
            GrantSigner(lambda: "secret"),
        )
        await view.load()
        self.groups.start()

    async def join(self, name: str, *, gives_back: bool = True) -> tuple[int, Recorder]:
        member = Recorder(self.readers, name)
        number = await self.groups.join(ORDERS, "billing", name, member)
        if gives_back:
            member.give_back = lambda segment: self.give_back(number, member, segment)
        return number, member

    def give_back(self, number: int, member: Recorder, segment: int) -> None:
        member.gave_back(segment)
        self.groups.released(number, segment)

    def lose(self, number: int, member: Recorder) -> None:
        """The connection is cut."""
        member.end()
        self.groups.disconnected(number)

    async def restart(self) -> None:
        """Another broker process on the same store."""
        await self.close()
        await self.start()
        await self.groups.control(ORDERS)

    async def stored(self) -> list[str]:
        listing = await self.store.client("looker-on").list(paths.consumers_prefix(ORDERS.path, "billing"))
        return [found[1] for entry in listing.entries if (found := paths.consumer_of(entry.key))]

    def members(self) -> dict[str, tuple[int, ...]]:
        return self.groups.members(ORDERS.path, "billing")

    async def close(self) -> None:
        await self.groups.close()
        await self.topics.view.stop()

    def reads(self, member: Recorder, segment: int) -> bool:
        return self.readers.reading.get(segment) is member
