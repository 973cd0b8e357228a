"""The cluster leader and segments with replicas: on a memory store, with owners that only keep their records."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from braid.broker.admin.cluster import DrainBroker
from braid.cluster.leader import LeaderConfig
from braid.cluster.ownership.leader_step import Reason, decide
from braid.metadata import paths
from braid.metadata.store import Put
from braid.model.cluster import REPLICAS, BrokerState, Registration
from braid.model.errors import BrokerNotActive, InvalidArgument, MoveRefused, NotServing
from braid.model.log.replication import LogPosition
from braid.model.names import SegmentName
from braid.model.ownership import Ownership, OwnershipState
from braid.model.topic import Durability, OwnerLoss, PolicyChanges, TopicPolicies
from braid.testing.sim.loop import Simulation
from tests.kits.leader import ORDERS, names_of, record
from tests.kits.record_cluster import RecordCluster, started
from tests.kits.waiting import until

REPLACE_AFTER_S = 60.0
SOON = LeaderConfig(replace_after_s=REPLACE_AFTER_S)
THREE = TopicPolicies(durability=Durability.REPLICATED, replicas=3, write_quorum=2)
CONTINUE = TopicPolicies(
    durability=Durability.REPLICATED,
    replicas=3,
    write_quorum=2,
    on_owner_loss=OwnerLoss.CONTINUE,
    owner_loss_after_ms=30_000,
)


async def create(cluster: RecordCluster, policies: TopicPolicies = THREE) -> SegmentName:
    """A topic of one segment, when it is served."""
    await cluster.candidates["a"].topics.create(ORDERS, segments=1, policies=policies, properties={})
    (name,) = names_of(1)
    owners = cluster.candidates["a"].owners
    await until(lambda: (found := owners.find(name)) is not None and found.state is OwnershipState.SERVING)
    return name


def state_of(cluster: RecordCluster, broker: str) -> BrokerState:
    return cluster.candidates["a"].leader.snapshot().brokers[broker].state


async def test_a_topics_policies_are_brought_about_while_it_is_served(simulation: Simulation) -> None:
    cluster = await started(simulation, "a", "b", "c", "d", "e", config=SOON)
    name = await create(cluster, TopicPolicies())
    assert cluster.find(name).replicas == ()
    for changes, size, quorum in (
        (PolicyChanges(replicas=3), 3, 2),
        (PolicyChanges(write_quorum=3), 3, 3),
        (PolicyChanges(replicas=5), 5, 3),
        (PolicyChanges(replicas=2), 2, 2),
        (PolicyChanges(replicas=1), 0, 1),
    ):
        await cluster.candidates["a"].topics.update(ORDERS, changes)
        await until(
            lambda size=size, quorum=quorum: (  # type: ignore[misc]
                (len(cluster.find(name).replicas), cluster.find(name).write_quorum) == (size, quorum)
            )
        )
    assert cluster.find(name).epoch == 1, "its owner has served it all the time"


async def test_a_broker_is_drained_when_it_holds_no_replica_any_more(simulation: Simulation) -> None:
    cluster = await started(simulation, "a", "b", "c", "d", config=SOON)
    name = await create(cluster)
    owner, follower, _ = cluster.find(name).replicas
    cluster.owners[owner].copies = False
    await cluster.candidates["a"].drain(follower)
    await until(lambda: cluster.find(name).change is not None)
    assert state_of(cluster, follower) is BrokerState.DRAINING
    cluster.owners[owner].copies = True
    cluster.owners[owner].look()
    await until(lambda: state_of(cluster, follower) is BrokerState.DRAINED)
    assert follower not in cluster.find(name).replicas
    assert len(cluster.find(name).replicas) == 3


async def test_a_draining_owner_hands_over_to_a_follower_and_leaves_the_set(simulation: Simulation) -> None:
    cluster = await started(simulation, "a", "b", "c", "d", config=SOON)
    name = await create(cluster)
    owner, *followers = cluster.find(name).replicas
    await cluster.candidates["a"].drain(owner)
    await until(lambda: cluster.find(name).state is OwnershipState.SERVING and cluster.find(name).owner != owner)
    assert state_of(cluster, owner) is BrokerState.DRAINED
    found = cluster.find(name)
    assert found.owner in followers
    assert owner not in found.replicas
    assert len(found.replicas) == 3


async def test_a_follower_that_stays_away_is_replaced_after_a_time(simulation: Simulation) -> None:
    cluster = await started(simulation, "a", "b", "c", "d", config=SOON)
    name = await create(cluster)
    gone = next(broker for broker in ("b", "c", "d") if broker in cluster.find(name).replicas[1:])
    cluster.kill(gone)
    await until(lambda: not cluster.candidates["a"].members.is_live(gone))
    began = simulation.clock.monotonic()
    await until(lambda: gone not in cluster.find(name).replicas, 1_000)
    assert REPLACE_AFTER_S <= simulation.clock.monotonic() - began < REPLACE_AFTER_S + 10
    assert len(cluster.find(name).replicas) == 3


async def test_replicas_vote_as_soon_as_their_owner_is_gone(simulation: Simulation) -> None:
    cluster = await started(simulation, "a", "b", "c", config=SOON)
    name = await create(cluster)
    await cluster.candidates["a"].put(name, record("SERVING", "c", 7, replicas=("a", "b", "c"), write_quorum=2))
    cluster.kill("c")
    await until(lambda: not cluster.candidates["a"].members.is_live("c"))
    await until(lambda: cluster.find(name).state is OwnershipState.RECOVERING, 1)
    assert (cluster.find(name).epoch, cluster.find(name).accept_loss) == (8, False)


@pytest.mark.parametrize("state", ["SERVING", "RECOVERING"])
async def test_a_loss_is_not_accepted_when_a_replica_is_back_before_the_leader_has_heard_of_it(
    state: str, simulation: Simulation
) -> None:
    cluster = await started(simulation, "a", "b", "c", config=SOON)
    name = await create(cluster, CONTINUE)
    lost = record(state, "e", 7, replicas=("a", "d", "e"), write_quorum=2)
    await cluster.candidates["a"].put(name, lost)
    leader = cluster.candidates["a"].leader
    assert leader._leadership is not None
    (decision,) = decide(leader.snapshot(), simulation.clock.monotonic() + 31)
    assert (decision.reason, decision.record.given_up) == (Reason.CONTINUED, ("d", "e"))
    registered = Put(paths.broker("d"), Registration(address="d:6660", admin="").to_json())
    await cluster.store.txn([], [registered])
    assert await leader._write([decision], leader._leadership) == 0
    assert cluster.find(name) == lost


# Calls.


def replicated(state: str, owner: str = "b", **fields: Any) -> Ownership:
    return record(state, owner, 3, replicas=("a", "b", "d"), write_quorum=2, **fields)


async def replicas_of(cluster: RecordCluster, lost: Ownership) -> SegmentName:
    """A topic whose segment has the replicas a, b and d; d was never there."""
    (name,) = names_of(1)
    await cluster.candidates["a"].put(name, lost)
    policies = TopicPolicies(durability=Durability.REPLICATED, replicas=3, write_quorum=2)
    await cluster.candidates["a"].topics.create(ORDERS, segments=1, policies=policies, properties={})
    return name


async def elect(cluster: RecordCluster, name: SegmentName, owner: str) -> Ownership:
    """Play the vote of replicas of which fewer suffice; return the record that they voted on."""
    await until(lambda: cluster.find(name).state is OwnershipState.RECOVERING and cluster.find(name).accept_loss)
    voting = cluster.find(name)
    elected = voting.voted(owner, LogPosition(), accept_loss=True, given_up=voting.given_up)
    await cluster.candidates["a"].put(name, elected)
    return voting


@pytest.mark.parametrize("state", ["SERVING", "RECOVERING"])
async def test_a_segment_that_too_few_replicas_can_vote_for_is_recovered_by_those_that_are_there(
    state: str, simulation: Simulation
) -> None:
    cluster = await started(simulation)
    await cluster.gone("b")
    lost = replicated(state)
    name = await replicas_of(cluster, lost)
    said = r"2 of its replicas a, b, d must vote, and b and d are down; chunks reach offset 0; .* and a does not have"
    with pytest.raises(InvalidArgument, match=said):
        await cluster.recover()
    with pytest.raises(InvalidArgument, match="its replicas vote for its owner; name no broker"):
        await cluster.recover(to="c", accept_loss=True)
    assert cluster.find(name) == lost
    recovering = asyncio.create_task(cluster.recover(accept_loss=True))
    voting = await elect(cluster, name, "a")
    gone = ("b", "d")
    assert voting == (lost.losing(gone) if state == "RECOVERING" else lost.recovering(accept_loss=True, given_up=gone))
    (found,) = await recovering
    assert (found["from"], found["to"], found["epoch"]) == ("b", "a", voting.epoch)
    assert "a does not have" in found["loss"]


async def test_a_segment_whose_replicas_are_all_gone_is_recovered_by_others(simulation: Simulation) -> None:
    cluster = await started(simulation)
    (name,) = names_of(1)
    await cluster.candidates["a"].put(name, record("SERVING", "d", 3, replicas=("d", "e"), write_quorum=2))
    policies = TopicPolicies(durability=Durability.REPLICATED, replicas=2, write_quorum=2)
    await cluster.candidates["a"].topics.create(ORDERS, segments=1, policies=policies, properties={})
    with pytest.raises(InvalidArgument, match="what the replicas confirmed from there on is lost"):
        await cluster.recover()
    (found,) = await cluster.recover(to="c", accept_loss=True)
    assert (found["from"], found["to"], found["epoch"]) == ("d", "c", 4)
    assert len(cluster.find(name).replicas) == 2


async def test_a_vote_that_can_succeed_is_waited_for_before_a_loss_is_accepted(simulation: Simulation) -> None:
    cluster = await started(simulation)
    name = await replicas_of(cluster, replicated("RECOVERING"))
    recovering = asyncio.create_task(cluster.recover(accept_loss=True))
    await asyncio.sleep(1)
    await cluster.candidates["a"].put(name, cluster.find(name).voted("a", LogPosition()))
    with pytest.raises(MoveRefused, match=r"nothing of topic .* is to be recovered"):
        await recovering
    assert not cluster.find(name).accept_loss


async def test_a_vote_that_does_not_end_goes_on_with_fewer_though_enough_replicas_are_there(
    simulation: Simulation,
) -> None:
    """One of them came back with an empty disk: it is no witness, and only the replicas know that."""
    cluster = await started(simulation)
    voting = replicated("RECOVERING")
    name = await replicas_of(cluster, voting)
    recovering = asyncio.create_task(cluster.recover(accept_loss=True))
    assert await elect(cluster, name, "b") == voting.losing(("d",))
    (found,) = await recovering
    assert (found["from"], found["to"]) == ("b", "b")


async def test_no_loss_is_accepted_by_a_call_for_replicas_of_which_one_is_back(simulation: Simulation) -> None:
    cluster = await started(simulation)
    await cluster.gone("b")
    name = await replicas_of(cluster, replicated("SERVING"))
    recovering = asyncio.create_task(cluster.recover(accept_loss=True))
    await cluster.store.txn([], [Put(paths.broker("d"), Registration(address="d:6660", admin="").to_json())])
    with pytest.raises(MoveRefused, match="or b or d is back; look again"):
        await recovering
    assert not cluster.find(name).accept_loss


async def test_a_replicated_segment_does_not_move_while_its_replicas_take_over(simulation: Simulation) -> None:
    cluster = await started(simulation)
    name = await replicas_of(cluster, replicated("SERVING", "d"))
    with pytest.raises(NotServing, match="replicas"):
        await cluster.move(to="a")
    assert cluster.find(name).move is None


async def test_a_replicated_segment_moves_to_a_follower_first(simulation: Simulation) -> None:
    cluster = await started(simulation)
    await cluster.serve(3, owner="b")
    (*_, name) = names_of(3)
    await cluster.candidates["a"].put(name, replicated("SERVING", "a"))
    (found,) = await cluster.move(segment=2)
    assert (found["from"], found["to"]) == ("a", "b"), "c is idle, and has no copy"


async def test_a_draining_broker_says_which_replicas_nobody_else_can_hold(simulation: Simulation) -> None:
    cluster = await started(simulation)
    (name,) = names_of(1)
    await cluster.candidates["a"].put(name, record("SERVING", "a", 3, replicas=("a", "b", "c"), write_quorum=3))
    policies = TopicPolicies(durability=Durability.REPLICATED, replicas=3, write_quorum=3)
    await cluster.candidates["a"].topics.create(ORDERS, segments=1, policies=policies, properties={})
    await cluster.call(DrainBroker(broker="c"))
    shown = (await cluster.brokers())["c"]
    assert (shown["state"], shown["segments"], shown["replicas"]) == ("draining", 0, 1)
    assert shown["obstacles"] == [
        "segment 0 of public/default/orders: broker c holds a replica, and no other broker can take its place now"
    ]


async def test_a_broker_whose_version_does_not_know_replicas_gets_no_segment(simulation: Simulation) -> None:
    """It joins later. As an owner it would confirm alone; as a replica it would hold nothing."""
    cluster = await started(simulation, "a", "b")
    name = await create(cluster)
    assert sorted(cluster.find(name).replicas) == ["a", "b"]
    old = Registration(address="z:6660", admin="", version="0.1.0")
    await cluster.store.txn([], [Put(paths.broker("z"), old.to_json())])
    await until(lambda: cluster.candidates["a"].members.is_active("z"))
    await asyncio.sleep(30)
    assert (sorted(cluster.find(name).replicas), cluster.find(name).change) == (["a", "b"], None)
    with pytest.raises(BrokerNotActive, match="its version does not know replicas"):
        await cluster.move(to="z")
    new = msgspec.structs.replace(old, features=(REPLICAS,))
    await cluster.store.txn([], [Put(paths.broker("z"), new.to_json())])
    await until(lambda: len(cluster.find(name).replicas) == 3)
