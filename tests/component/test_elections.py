"""Votes, as the cluster leader holds them: real records, and replicas that answer as the test says."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from braid.broker.replicas.elections import Elections
from braid.model.errors import ConnectionLost
from braid.model.ids import Epoch, Offset
from braid.model.log.replication import LogPosition, Promise
from braid.model.names import SegmentName
from braid.model.ownership import Ownership, OwnershipState
from braid.model.topic import Durability, OwnerLoss, TopicPolicies
from braid.ports.disk import Buffer
from braid.testing.sim.loop import Simulation
from tests.kits.leader import ORDERS, names_of, record, unable
from tests.kits.record_cluster import RecordCluster, started
from tests.kits.waiting import until

THREE = TopicPolicies(durability=Durability.REPLICATED, replicas=3, write_quorum=2)
CONTINUE = msgspec.structs.replace(THREE, on_owner_loss=OwnerLoss.CONTINUE, owner_loss_after_ms=30_000)


class Voters:
    """Replicas of segments. Each answers for all segments that it holds as much of them."""

    def __init__(self) -> None:
        self.ends: dict[str, int] = {}
        """By broker; a broker that is not here does not answer."""
        self.waits: dict[str, asyncio.Event] = {}
        """By broker: it answers only after this."""
        self.strangers: set[str] = set()
        """They are no members."""

    async def call(
        self,
        broker_id: str,
        name: str,
        arguments: dict[str, Any],
        payload: Sequence[Buffer] = (),
        timeout_s: float = 0,
    ) -> Any:
        assert name == "copy_promise"
        if broker_id in self.waits:
            await self.waits[broker_id].wait()
        if broker_id not in self.ends:
            raise ConnectionLost(f"{broker_id} is gone")
        position = LogPosition(epoch=Epoch(2), end=Offset(self.ends[broker_id]))
        member = broker_id not in self.strangers
        return [
            msgspec.to_builtins(Promise(broker=broker_id, epoch=epoch, position=position, member=member))
            for _, _, epoch in arguments["segments"]
        ]

    async def no_copy(self, arguments: dict[str, Any]) -> Any:
        raise AssertionError("the leader holds no replica here")


@asynccontextmanager
async def votes(simulation: Simulation, **ends: int) -> AsyncIterator[tuple[RecordCluster, Voters, Elections]]:
    """A cluster whose leader a holds votes of the replicas b, c and d."""
    cluster = await started(simulation, "a", "b", "c", "d")
    leader = cluster.candidates["a"]
    for owner in cluster.owners.values():
        owner.opens = False
    voters = Voters()
    voters.ends = ends
    elections = Elections(
        "a",
        leader.topics,
        leader.owners,
        leader.members,
        leader.clock,
        voters.no_copy,
        voters.call,
        lambda: leader.leader.fence,
    )
    try:
        yield cluster, voters, elections
    finally:
        await elections.stop()


async def recovering(
    cluster: RecordCluster, segments: int = 1, policies: TopicPolicies = THREE, **fields: Any
) -> list[SegmentName]:
    """Segments of one topic whose replicas are to vote."""
    names = names_of(segments)
    for name in names:
        lost = record("RECOVERING", "b", 3, replicas=("b", "c", "d"), write_quorum=2, **fields)
        await cluster.candidates["a"].put(name, lost)
    await cluster.candidates["a"].topics.create(ORDERS, segments=segments, policies=policies, properties={})
    return names


async def assigned(cluster: RecordCluster, name: SegmentName) -> Ownership:
    await until(lambda: cluster.find(name).state is OwnershipState.ASSIGNED)
    return cluster.find(name)


async def test_a_replica_that_cannot_serve_does_not_win_before_the_others_have_answered(
    simulation: Simulation,
) -> None:
    """It holds the most, and answers among the first two. With the third one, the others suffice."""
    async with votes(simulation, b=15, c=10, d=12) as (cluster, voters, elections):
        voters.waits["d"] = asyncio.Event()
        (name,) = await recovering(cluster, failures=unable("b"))
        elections.look()
        await asyncio.sleep(1)
        assert cluster.find(name).state is OwnershipState.RECOVERING
        voters.waits["d"].set()
        found = await assigned(cluster, name)
        assert (found.owner, found.elected) == ("d", LogPosition(epoch=Epoch(2), end=Offset(12)))


async def test_the_segments_of_a_lost_broker_go_to_its_followers_alike(simulation: Simulation) -> None:
    """Each of them opens its share at the same time."""
    async with votes(simulation, c=10, d=10) as (cluster, _, elections):
        names = await recovering(cluster, segments=100)
        elections.look()
        owners = Counter([(await assigned(cluster, name)).owner for name in names])
        assert owners == {"c": 50, "d": 50}


async def test_a_replica_that_cannot_serve_wins_if_it_alone_may_hold_everything(simulation: Simulation) -> None:
    async with votes(simulation, b=15, c=10) as (cluster, _, elections):
        (name,) = await recovering(cluster, failures=unable("b"))
        elections.look()
        assert (await assigned(cluster, name)).owner == "b"


async def test_of_replicas_whose_loss_is_accepted_one_that_can_serve_wins(simulation: Simulation) -> None:
    """Two of three are no members any more, so the vote cannot find everything."""
    async with votes(simulation, b=15, c=10, d=12) as (cluster, voters, elections):
        voters.strangers = {"c", "d"}
        (name,) = await recovering(cluster, failures=unable("b"), accept_loss=True)
        elections.look()
        found = await assigned(cluster, name)
        assert (found.owner, found.accept_loss) == ("d", True)


async def test_the_policy_continue_ends_a_vote_of_too_few_members(simulation: Simulation) -> None:
    """All replicas are there. Two of them have lost their disks."""
    async with votes(simulation, b=15, c=0, d=0) as (cluster, voters, elections):
        voters.strangers = {"c", "d"}
        (name,) = await recovering(cluster, policies=CONTINUE)
        elections.look()
        await asyncio.sleep(29)
        assert cluster.find(name).state is OwnershipState.RECOVERING
        assert not cluster.find(name).accept_loss
        await asyncio.sleep(3)
        found = cluster.find(name)
        assert (found.state, found.owner, found.accept_loss) == (OwnershipState.ASSIGNED, "b", True)


async def test_a_vote_of_too_few_members_waits_for_an_operator_otherwise(simulation: Simulation) -> None:
    async with votes(simulation, b=15, c=0, d=0) as (cluster, voters, elections):
        voters.strangers = {"c", "d"}
        (name,) = await recovering(cluster)
        elections.look()
        await asyncio.sleep(300)
        assert cluster.find(name).state is OwnershipState.RECOVERING
        assert not cluster.find(name).accept_loss


async def test_the_policy_continue_waits_for_a_replica_that_does_not_answer(simulation: Simulation) -> None:
    async with votes(simulation, b=15, c=0) as (cluster, voters, elections):
        voters.strangers = {"c"}
        (name,) = await recovering(cluster, policies=CONTINUE)
        elections.look()
        await asyncio.sleep(300)
        assert not cluster.find(name).accept_loss, "d is there, and may be a member"


async def test_an_owner_that_was_elected_and_died_before_it_served_goes_on_when_it_is_back(
    simulation: Simulation,
) -> None:
    """A loss was accepted, and blank brokers have joined it. Nothing more is lost, so no second loss is accepted."""
    async with votes(simulation, b=15, c=0, d=0) as (cluster, voters, elections):
        voters.strangers = {"c", "d"}
        position = LogPosition(epoch=Epoch(2), end=Offset(15))
        (name,) = await recovering(cluster, elected=position)
        elections.look()
        found = await assigned(cluster, name)
        assert (found.owner, found.accept_loss) == ("b", False)


async def test_an_owner_that_was_elected_and_lost_its_disk_does_not_go_on_alone(simulation: Simulation) -> None:
    async with votes(simulation, b=0, c=0, d=0) as (cluster, voters, elections):
        voters.strangers = {"c", "d"}
        (name,) = await recovering(cluster, elected=LogPosition(epoch=Epoch(2), end=Offset(15)))
        elections.look()
        await asyncio.sleep(60)
        assert cluster.find(name).state is OwnershipState.RECOVERING
