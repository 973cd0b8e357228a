"""Subscriptions of segments wherever they are: any broker makes, moves and deletes them, also while segments move."""

from __future__ import annotations

import asyncio

import pytest

from braid.broker.segments.segment_access import FindPositions, GetFollowers, GetProgress, PlaceCursor, RemoveCursor
from braid.metadata import paths
from braid.metadata.memory import Fault
from braid.model.errors import (
    InvalidArgument,
    MetadataUnavailable,
    Moved,
    NotServing,
    SubscriptionExists,
    SubscriptionNotFound,
    TopicNotFound,
)
from braid.model.ids import NO_REQUEST, Epoch, Offset, SegmentId
from braid.model.log.replication import FollowerStatus, LogPosition
from braid.model.ownership import OwnershipState
from braid.model.subscription import DEFAULT_QUEUE, Placing, Subscription, SubscriptionKind
from braid.testing.sim.loop import Simulation
from braid.wire.operations import RESET, Kind, Positions, PositionsRequest, SegmentPositions, encode
from tests.kits.cluster import ClientLink, Cluster, Node
from tests.kits.control import ORDERS, faults
from tests.kits.waiting import until

STREAM = SubscriptionKind.STREAM


async def create(node: Node, start: str = "earliest", name: str = "billing") -> Subscription:
    return await node.subscriptions.create(ORDERS, name, kind=STREAM, start=start)


async def ensure(node: Node, start: str) -> bool:
    _, created = await node.subscriptions.ensure(ORDERS, "billing", kind=STREAM, start=start, create=True)
    return created


async def stored_cursors(cluster: Cluster) -> int:
    listing = await cluster.store.list(paths.topic_segments_prefix(ORDERS.path))
    return sum(paths.subscription_of_cursor(entry.key) is not None for entry in listing.entries)


async def test_a_broker_subscribes_to_segments_of_others(simulation: Simulation) -> None:
    async with Cluster(simulation, "a", "b", "c") as cluster:
        await cluster.make_topic("a", "b")
        cluster["b"][1].earliest = Offset(30)
        for through, subscription in (("a", "one"), ("b", "two"), ("c", "three")):
            await create(cluster[through], "earliest", subscription)
            assert cluster.cursor(0, "a", subscription) == 0
            assert cluster.cursor(1, "b", subscription) == 30
        await create(cluster["c"], "latest", "four")
        assert (cluster.cursor(0, "a", "four"), cluster.cursor(1, "b", "four")) == (100, 100)
        assert set(await cluster["a"].subscriptions.list(ORDERS)) == {"one", "two", "three", "four"}
        await cluster["a"].subscriptions.delete(ORDERS, "two")
        assert cluster.cursor(1, "b", "two") is None
        assert cluster["b"][1].closed == [("two", "subscription-not-found", None)]
        with pytest.raises(SubscriptionNotFound):
            await cluster["c"].subscriptions.delete(ORDERS, "two")


async def test_seeks_reach_the_owners_and_close_the_channels_there(simulation: Simulation) -> None:
    async with Cluster(simulation, "a", "b", "c") as cluster:
        await cluster.make_topic("a", "b")
        subs = cluster["c"].subscriptions
        await create(cluster["c"])
        cluster["b"][1].times = [1_000, 2_000, 3_000]
        assert await subs.seek_to(ORDERS, "billing", "latest") == {0: 100, 1: 100}
        assert await subs.seek_to_time(ORDERS, "billing", 2_500) == {0: 100, 1: 2}
        assert await subs.seek_to_offsets(ORDERS, "billing", {SegmentId(1): Offset(40)}) == {1: 40}
        assert await subs.skip(ORDERS, "billing", SegmentId(1), 5) == {1: 45}
        assert (cluster.cursor(0, "a"), cluster.cursor(1, "b")) == (100, 45)
        assert cluster["b"][1].closed == [("billing", RESET, offset) for offset in (100, 2, 40, 45)]
        with pytest.raises(InvalidArgument, match="0 to 100"):
            await subs.seek_to_offsets(ORDERS, "billing", {SegmentId(0): Offset(1), SegmentId(1): Offset(101)})
        assert (cluster.cursor(0, "a"), cluster.cursor(1, "b")) == (100, 45), "all places are found first"


async def test_positions_are_told_by_any_broker(simulation: Simulation) -> None:
    async with Cluster(simulation, "a", "b", "c") as cluster:
        await cluster.make_topic("a", "b")
        cluster["b"][1].grow(120)
        cluster["b"][1].end_log()
        cluster["b"][1].times = [1_000, 2_000]
        client = await ClientLink.open(cluster, "c")
        for timestamp, at_time in ((None, (-1, -1)), (1_500, (100, 1))):
            answer = await client.link.ask(
                Kind.POSITIONS, encode(PositionsRequest(ORDERS.path, timestamp)), Positions, 5
            )
            assert answer == Positions(
                cluster.topic.id,
                (SegmentPositions(0, 0, 100, False, at_time[0]), SegmentPositions(1, 0, 120, True, at_time[1])),
            )
        client.close()


async def test_an_owner_says_how_far_its_followers_are(simulation: Simulation) -> None:
    async with Cluster(simulation, "a", "b") as cluster:
        await cluster.make_topic("a", "b")
        position = LogPosition(epoch=Epoch(1), end=Offset(90), sealed=False)
        follower = FollowerStatus(broker="c", position=position, in_sync=True, member=True, behind=10)
        cluster["b"][1].followers = (follower,)
        for node in cluster.nodes.values():
            access = node.accesses.now(cluster.name(1), cluster.topic.id, 5)
            assert await access.ask(GetFollowers()) == (follower,)
            assert await node.accesses.now(cluster.name(0), cluster.topic.id, 5).ask(GetFollowers()) == ()


@pytest.mark.parametrize("away", [OwnershipState.DRAINING, OwnershipState.SEALED, OwnershipState.ASSIGNED])
async def test_a_seek_in_the_middle_of_a_move_waits_for_the_next_owner(
    away: OwnershipState, simulation: Simulation
) -> None:
    async with Cluster(simulation, "a", "b", "c") as cluster:
        await cluster.make_topic("a", "b")
        await create(cluster["c"])
        await cluster.put(1, away)  # b would still answer
        await cluster.agree()
        seeking = asyncio.ensure_future(cluster["c"].subscriptions.seek_to(ORDERS, "billing", "latest"))
        await asyncio.sleep(2.7)
        assert not seeking.done()
        assert cluster.cursor(0, "a") == 0, "no cursor moves before all places are found"
        await cluster.serve(1, "a", epoch=2)
        began = simulation.clock.monotonic()
        assert await seeking == {0: 100, 1: 100}
        assert simulation.clock.monotonic() - began < 0.1, "it is the view that tells"
        assert cluster.cursor(1, "a") == 100


async def test_an_owner_that_has_just_given_a_segment_away_refuses_and_is_not_asked_again(
    simulation: Simulation,
) -> None:
    """The asking broker's view is behind: it asks the old owner first."""
    async with Cluster(simulation, "a", "b", "c") as cluster:
        await cluster.make_topic("b")
        await create(cluster["a"])
        old = cluster.withdraw(0, "b")

        async def move() -> None:
            await asyncio.sleep(0.5)
            await cluster.serve(0, "c", epoch=2)

        moving = asyncio.ensure_future(move())
        assert await cluster["a"].subscriptions.seek_to(ORDERS, "billing", "latest") == {0: 100}
        await moving
        assert cluster.cursor(0, "c") == 100
        assert old.cursors.offset("billing") == 0


async def test_patience_ends_with_the_reason(simulation: Simulation) -> None:
    async with Cluster(simulation, "a", "b") as cluster:
        await cluster.make_topic("a", "b")
        access = cluster["a"].accesses.of(cluster.name(1), cluster.topic.id, patience_s=2)
        cluster.network.cut("a", "b")
        began = simulation.clock.monotonic()
        with pytest.raises(NotServing, match="broker b did not answer"):
            await access.ask(FindPositions())
        assert 1 < simulation.clock.monotonic() - began < 4
        cluster.network.heal()
        assert (await access.ask(FindPositions())).end == 100
        cluster.withdraw(1, "b")
        with pytest.raises((NotServing, Moved)):
            await access.ask(GetProgress())
        with pytest.raises(NotServing):
            await create(cluster["a"])
        assert await cluster.store.get(paths.subscription(ORDERS.path, "billing")) is None


async def test_a_topic_that_was_created_again_is_another_one(simulation: Simulation) -> None:
    async with Cluster(simulation, "a", "b") as cluster:
        await cluster.make_topic("b")
        old = cluster["a"].accesses.of(cluster.name(0), cluster.topic.id - 1)
        with pytest.raises(TopicNotFound, match="created again"):
            await old.ask(PlaceCursor(Placing("billing", Offset(0))))
        assert cluster.cursor(0, "b") is None


@pytest.mark.parametrize("seed", range(20))
async def test_of_two_brokers_that_create_a_subscription_one_has_and_its_cursors_stay(
    seed: int, simulation: Simulation
) -> None:
    async with Cluster(simulation, "a", "b") as cluster:
        await cluster.make_topic("a", "b")
        at_a, at_b = await asyncio.gather(ensure(cluster["a"], "earliest"), ensure(cluster["b"], "latest"))
        assert at_a != at_b
        cursors = (cluster.cursor(0, "a"), cluster.cursor(1, "b"))
        if at_a:
            assert cursors == (0, 0), "nothing is skipped that was asked for (I5)"
        assert None not in cursors
        cluster["b"][1].cursors.advance("billing", Offset(100))
        assert not await ensure(cluster["a"], "earliest")
        assert cluster.cursor(1, "b") == 100


async def test_who_comes_second_moves_nothing_of_the_first(simulation: Simulation) -> None:
    """The loser has read that there is no subscription, and comes to place its cursors when there is one."""
    async with Cluster(simulation, "a", "b") as cluster:
        await cluster.make_topic("a", "b")
        assert await cluster["b"].subscriptions._read(ORDERS, "billing") is None
        await create(cluster["a"], "latest")
        cluster["a"][0].cursors.advance("billing", Offset(100))
        with pytest.raises(SubscriptionExists):
            await create(cluster["b"])
        again = cluster["b"].subscriptions._create(ORDERS, "billing", STREAM, "earliest", NO_REQUEST, DEFAULT_QUEUE)
        late = await again
        assert late[1] is False
        assert (cluster.cursor(0, "a"), cluster.cursor(1, "b")) == (100, 100)


async def test_a_cursor_that_was_left_behind_makes_a_new_subscription_skip_nothing(simulation: Simulation) -> None:
    async with Cluster(simulation, "a", "b") as cluster:
        await cluster.make_topic("a", "b")
        await cluster["b"][1].cursors.begin("billing", Offset(50))  # and its creator is gone
        await create(cluster["a"], "earliest")
        assert (cluster.cursor(0, "a"), cluster.cursor(1, "b")) == (0, 0)


async def test_a_sweep_between_cursor_and_key_costs_the_new_subscription_nothing(simulation: Simulation) -> None:
    """The owner sees a cursor without a subscription while another broker is about to write the key."""
    async with Cluster(simulation, "a", "b") as cluster:
        await cluster.make_topic("a", "b")
        swept = 0

        async def sweep_all_along() -> None:
            nonlocal swept
            while True:
                swept += await cluster["b"].cursor_sweep.sweep()
                await asyncio.sleep(0.0001)

        sweeping = asyncio.ensure_future(sweep_all_along())
        await create(cluster["a"])
        sweeping.cancel()
        assert swept, "it did happen"
        assert (cluster.cursor(0, "a"), cluster.cursor(1, "b")) == (0, 0)
        assert await stored_cursors(cluster) == 2
        assert await cluster["b"].cursor_sweep.sweep() == 0


async def test_a_new_subscription_whose_cursor_was_swept_skips_nothing_that_came_since(simulation: Simulation) -> None:
    """The key exists before the cursor is back: other brokers know of the subscription, and records come."""
    async with Cluster(simulation, "a", "b") as cluster:
        await cluster.make_topic("a", "b")
        segment = cluster["b"][1]
        first = segment.end

        async def sweep_once() -> None:
            swept = 0
            while not swept:
                await asyncio.sleep(0.0001)
                swept = await cluster["b"].cursor_sweep.sweep()
            segment.grow(first + 10)

        sweeping = asyncio.ensure_future(sweep_once())
        await create(cluster["a"], "latest")
        await sweeping
        assert cluster.cursor(1, "b") == first


async def test_a_cursor_is_not_removed_while_its_subscription_exists(simulation: Simulation) -> None:
    """Who found no key and comes to remove the cursor may have been overtaken."""
    async with Cluster(simulation, "a", "b") as cluster:
        await cluster.make_topic("a", "b")
        await create(cluster["a"])
        assert not await cluster["b"][1].cursors.remove("billing")
        await cluster["a"].accesses.of(cluster.name(1), cluster.topic.id).ask(RemoveCursor("billing"))
        assert cluster.cursor(1, "b") == 0
        assert await stored_cursors(cluster) == 2


async def test_what_a_deletion_does_not_reach_its_owner_sweeps(simulation: Simulation) -> None:
    async with Cluster(simulation, "a", "b") as cluster:
        await cluster.make_topic("a", "b")
        await create(cluster["a"])
        cluster.network.cut("a", "b")
        await cluster["a"].subscriptions.delete(ORDERS, "billing")
        cluster.network.heal()
        assert (cluster.cursor(0, "a"), cluster.cursor(1, "b")) == (None, 0)
        assert await cluster["a"].cursor_sweep.sweep() == 0, "each owner for its own segments"
        assert await cluster["b"].cursor_sweep.sweep() == 1
        assert await stored_cursors(cluster) == 0


async def test_whoever_takes_over_a_segment_sweeps_what_its_last_owner_missed(simulation: Simulation) -> None:
    async with Cluster(simulation, "a", "b") as cluster:
        await cluster.make_topic("a", "a", "a")
        await create(cluster["a"])
        await create(cluster["a"], name="audit")
        for segment in range(3):
            cluster.withdraw(segment, "a")
        await cluster["b"].subscriptions.delete(ORDERS, "billing")
        assert await stored_cursors(cluster) == 6, "nobody was there to remove them"
        for segment in range(3):
            await cluster.serve(segment, "b", epoch=2)
            cluster["b"].cursor_sweep.sweep_later(ORDERS.path)
        await until(lambda: all(cluster.cursor(segment, "b") is None for segment in range(3)))
        assert [cluster.cursor(segment, "b", "audit") for segment in range(3)] == [0, 0, 0]
        assert await stored_cursors(cluster) == 3


async def test_errors_of_the_owners_store_come_back_as_they_were(simulation: Simulation) -> None:
    async with Cluster(simulation, "a", "b") as cluster:
        await cluster.make_topic("b")
        await create(cluster["a"])
        cluster["b"].store.fault = faults(Fault.UNAVAILABLE)
        with pytest.raises(MetadataUnavailable):
            await cluster["a"].subscriptions.seek_to(ORDERS, "billing", "latest")
        await until(lambda: cluster.cursor(0, "b") == 0)
