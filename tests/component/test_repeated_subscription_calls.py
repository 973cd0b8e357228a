"""Subscriptions whose calls come twice, late, beside others, or end without anybody knowing how."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from braid.broker.groups.subscriptions import SeekRequest, Subscriptions
from braid.broker.segments.segment_access import LocalAccess, PlaceCursor, RemoveCursor
from braid.metadata import paths
from braid.metadata.memory import Fault
from braid.metadata.store import Delete, Put
from braid.model.errors import BraidError, ConditionFailed, MetadataUncertain, SubscriptionExists, SubscriptionNotFound
from braid.model.ids import NO_REQUEST, Offset, RequestId, SegmentId
from braid.model.stored_record import encode
from braid.model.subscription import Subscription
from braid.model.topic import Topic
from braid.testing.sim.loop import Simulation, run_simulation
from tests.kits.control import ORDERS, faults_at
from tests.kits.subscriptions import KEY, STREAM, World


def with_subscription(test: Callable[[World], Awaitable[None]]) -> None:
    """`billing` stands at offset 0 of two segments of a hundred records."""

    async def main(simulation: Simulation) -> None:
        world = await World.make(simulation)
        await world.create()
        await test(world)
        await world.topics.view.stop()

    run_simulation(1, main)


async def test_a_create_that_is_repeated_finds_its_own_subscription_and_nobody_elses(simulation: Simulation) -> None:
    world = await World.make(simulation)

    def create(request_id: int) -> Awaitable[Subscription]:
        return world.subs.create(ORDERS, "billing", kind=STREAM, start="earliest", request_id=RequestId(request_id))

    first = await create(5)
    world[0].cursors.advance("billing", Offset(50))
    assert await create(5) == first
    assert world.offsets() == [50, 0]
    for other in (6, NO_REQUEST):
        with pytest.raises(SubscriptionExists):
            await create(other)
    await world.subs.delete(ORDERS, "billing")
    assert (await create(5)).id != first.id
    await world.topics.view.stop()


async def test_a_deletion_that_comes_late_does_not_touch_the_next_subscription_of_that_name(
    simulation: Simulation,
) -> None:
    world = await World.make(simulation)
    assert await world.subs.identify(ORDERS, "billing") == (0, {})
    old = await world.create()
    assert (await world.subs.identify(ORDERS, "billing"))[0] == old.id
    await world.subs.delete(ORDERS, "billing", old.id)
    new = await world.create()
    for late in (old.id, 0):
        with pytest.raises(SubscriptionNotFound):
            await world.subs.delete(ORDERS, "billing", late)
    assert await world.subs.get(ORDERS, "billing") == new
    assert world.offsets() == [0, 0]
    assert len(world[0].closed) == 1, "the new one's channels stay open"
    await world.subs.delete(ORDERS, "billing", new.id)
    await world.topics.view.stop()


async def test_a_deletion_by_id_finishes_what_an_earlier_one_has_left(simulation: Simulation) -> None:
    world = await World.make(simulation)
    await world.create()
    await world.store.txn([], [Delete(KEY)])
    gone, placements = await world.subs.identify(ORDERS, "billing")
    assert gone == 0
    assert len(placements) == 2
    await world.subs.delete(ORDERS, "billing", gone)
    assert await world.stored_cursors() == 0
    await world.topics.view.stop()


SEEKS: dict[str, Callable[[Subscriptions, SeekRequest], Awaitable[dict[SegmentId, Offset]]]] = {
    "to an end": lambda subs, request: subs.seek_to(ORDERS, "billing", "latest", request),
    "to a time": lambda subs, request: subs.seek_to_time(ORDERS, "billing", 1, request),
    "to offsets": lambda subs, request: subs.seek_to_offsets(ORDERS, "billing", {SegmentId(0): Offset(70)}, request),
    "forward": lambda subs, request: subs.skip(ORDERS, "billing", SegmentId(0), 30, request),
}


@pytest.mark.parametrize("way", SEEKS)
async def test_a_seek_that_is_repeated_or_late_changes_nothing(way: str, simulation: Simulation) -> None:
    world = await World.make(simulation)
    await world.create()
    _, known = await world.subs.identify(ORDERS, "billing")
    request = SeekRequest(RequestId(7), known)
    offsets = await SEEKS[way](world.subs, request)
    reached = world.offsets()
    assert await SEEKS[way](world.subs, request) == offsets
    assert world.offsets() == reached
    await world.subs.seek_to_offsets(ORDERS, "billing", {SegmentId(0): Offset(3)})
    for late in (request, SeekRequest(RequestId(8), known)):
        with pytest.raises(ConditionFailed):
            await SEEKS[way](world.subs, late)
    assert world.offsets()[0] == 3
    await world.topics.view.stop()


@pytest.mark.parametrize("way", SEEKS)
def test_a_seek_whose_answer_and_read_back_were_lost_says_so_and_blocks_nothing(way: str) -> None:
    async def test(world: World) -> None:
        world.store.fault = faults_at(("txn", Fault.UNCERTAIN), ("list", Fault.UNAVAILABLE))
        with pytest.raises(MetadataUncertain):
            await SEEKS[way](world.subs, SeekRequest())
        world.store.fault = lambda _: Fault.NONE
        await asyncio.sleep(100)
        await world.subs.seek_to_offsets(ORDERS, "billing", {SegmentId(0): Offset(50)})
        assert world.offsets()[0] == 50

    with_subscription(test)


def test_seeks_without_ids_at_the_same_time_happen_one_after_the_other() -> None:
    async def test(world: World) -> None:
        await asyncio.gather(
            world.subs.seek_to(ORDERS, "billing", "latest"),
            world.subs.skip(ORDERS, "billing", SegmentId(0), 5),
            world.subs.seek_to(ORDERS, "billing", "earliest"),
        )
        assert world.offsets() == [0, 0]

    with_subscription(test)


def test_a_seek_without_ids_that_waits_for_an_owner_does_not_undo_a_later_one() -> None:
    async def test(world: World) -> None:
        away = world.segments.served.pop((ORDERS.path, 0))
        waiting = asyncio.ensure_future(world.subs.seek_to(ORDERS, "billing", "latest"))
        await asyncio.sleep(1)
        placed = SeekRequest(RequestId(5), (await world.subs.identify(ORDERS, "billing"))[1])
        elsewhere = LocalAccess(away)
        await elsewhere.ask(PlaceCursor(world.placing(Offset(7), placed)))
        world.segments.served[ORDERS.path, 0] = away
        with pytest.raises(BraidError):
            await waiting
        assert world.offsets()[0] == 7

    with_subscription(test)


def test_skipping_everything_does_not_bring_back_what_is_acked_meanwhile() -> None:
    async def test(world: World) -> None:
        segment = world[0]
        segment.grow(110)
        segment.cursors.advance("billing", Offset(110))
        assert await world.subs.skip_all(ORDERS, "billing") == {0: 110, 1: 100}

    with_subscription(test)


def test_a_late_seek_does_not_touch_the_next_subscription_though_its_cursor_was_left() -> None:
    async def test(world: World) -> None:
        id_, since = await world.subs.identify(ORDERS, "billing")
        away = world.segments.served.pop((ORDERS.path, 0))
        await world.subs.delete(ORDERS, "billing", id_)
        world.segments.served[ORDERS.path, 0] = away
        await world.create()
        to = {SegmentId(0): Offset(90)}
        with pytest.raises(ConditionFailed):
            await world.subs.seek_to_offsets(ORDERS, "billing", to, SeekRequest(RequestId(5), since))
        _, now = await world.subs.identify(ORDERS, "billing")
        with pytest.raises(SubscriptionNotFound):
            await world.subs.seek_to_offsets(ORDERS, "billing", to, SeekRequest(RequestId(5), now, id_))
        assert world.offsets() == [0, 0]

    with_subscription(test)


def test_a_cursor_that_stays_keeps_its_channels() -> None:
    async def test(world: World) -> None:
        await LocalAccess(world[0]).ask(RemoveCursor("billing"))
        assert world.offsets() == [0, 0]
        assert world[0].closed == []

    with_subscription(test)


def test_a_deletion_without_an_id_means_the_one_that_it_found() -> None:
    """The answer to its write was lost, and when it looks, another subscription, or topic, has the name."""

    async def test(world: World) -> None:
        layout = paths.layout(ORDERS.path)
        entry = await world.store.get(layout)
        assert entry is not None
        next_topic = msgspec.structs.replace(Topic.from_json(entry.value), id=77)

        def made_again(put: Put) -> Callable[[str], Fault]:
            seen: list[str] = []

            def fault(request: str) -> Fault:
                seen.append(request)
                if (
                    request == "get"
                    and "txn" in seen
                    and seen.count("get") == 1 + seen[: seen.index("txn")].count("get")
                ):
                    world.store._server.txn([], [put])
                return Fault.UNCERTAIN if request == "txn" and seen.count("txn") == 1 else Fault.NONE

            return fault

        world.store.fault = made_again(Put(KEY, encode(Subscription(id=77))))
        await world.subs.delete(ORDERS, "billing")
        assert (await world.subs.get(ORDERS, "billing")).id == 77
        world.store.fault = made_again(Put(layout, next_topic.to_json()))
        with pytest.raises(BraidError):
            await world.topics.mark_deleting(ORDERS)
        entry = await world.store.get(layout)
        assert entry is not None
        assert not Topic.from_json(entry.value).deleting

    with_subscription(test)
