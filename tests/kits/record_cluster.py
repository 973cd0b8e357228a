"""A cluster that is records only, on a memory store: leaders, owners that keep their records, and calls."""

from __future__ import annotations

from typing import Any, cast

from braid.broker.admin.call import AdminCall
from braid.broker.admin.cluster import ListBrokers
from braid.broker.admin.moves import MoveTopic, RecoverTopic
from braid.broker.admin.services import CallServices
from braid.broker.auth import ANONYMOUS, Access
from braid.cluster.leader import LeaderConfig
from braid.metadata.memory import MemoryStore
from braid.model.names import SegmentName
from braid.model.ownership import Ownership
from braid.model.topic import TopicPolicies
from braid.testing.sim.loop import Process, Simulation
from tests.kits.leader import ORDERS, Candidate, Owner, names_of, record
from tests.kits.waiting import until


class RecordCluster:
    """Brokers as far as records go. Calls are made at a."""

    def __init__(self, simulation: Simulation, config: LeaderConfig | None = None) -> None:
        self.simulation = simulation
        self.store = MemoryStore(simulation.clock)
        self.candidates: dict[str, Candidate] = {}
        self.owners: dict[str, Owner] = {}
        self.processes: dict[str, Process] = {}
        self.services: CallServices
        self._config = config

    async def start(self, *ids: str) -> None:
        for id_ in ids:
            candidate = Candidate(self.simulation, self.store.client(), id_, self._config)
            self.processes[id_] = self.simulation.process(id_)
            await self.processes[id_].start(candidate.start())
            self.candidates[id_] = candidate

            async def play(candidate: Candidate = candidate) -> Owner:
                return Owner(candidate).start()

            self.owners[id_] = await self.processes[id_].start(play())

    def kill(self, id_: str) -> None:
        self.candidates.pop(id_).store.disconnect()
        self.processes[id_].kill()

    async def serve(self, segments: int, owner: str = "a", **fields: Any) -> list[SegmentName]:
        """A topic whose segments are all served by one broker."""
        a = self.candidates["a"]
        names = names_of(segments)
        for name in names:
            await a.put(name, record("SERVING", owner, 3, **fields))
        await a.topics.create(ORDERS, segments=segments, policies=TopicPolicies(), properties={})
        return names

    def find(self, name: SegmentName) -> Ownership:
        found = self.candidates["a"].owners.find(name)
        assert found is not None
        return found

    async def gone(self, id_: str) -> None:
        self.kill(id_)
        await until(lambda: not self.candidates["a"].members.is_live(id_))

    async def call(self, call: AdminCall) -> Any:
        return await call.carry_out(self.services, ANONYMOUS)

    async def move(self, **arguments: Any) -> list[dict[str, Any]]:
        result = await self.call(MoveTopic(topic="orders", **arguments))
        assert result["topic"] == str(ORDERS)
        return cast("list[dict[str, Any]]", result["segments"])

    async def recover(self, **arguments: Any) -> list[dict[str, Any]]:
        result = await self.call(RecoverTopic(topic="orders", **arguments))
        return cast("list[dict[str, Any]]", result["segments"])

    async def brokers(self) -> dict[str, dict[str, Any]]:
        return {each["id"]: each for each in await self.call(ListBrokers())}


async def started(simulation: Simulation, *ids: str, config: LeaderConfig | None = None) -> RecordCluster:
    """Brokers a, b and c, unless others are named; a leads."""
    cluster = RecordCluster(simulation, config)
    await cluster.start(*(ids or ("a", "b", "c")))
    services = cast("CallServices", cluster.candidates["a"])
    services.access = Access(None)
    cluster.services = services
    return cluster
