"""Subscriptions: they exist with all their cursors or not at all, and a seek counts from the moment it is stored."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from braid.broker.groups.subscriptions import Progress
from braid.metadata import paths
from braid.metadata.memory import Fault
from braid.metadata.store import Delete, Put
from braid.model.errors import (
    InvalidArgument,
    InvalidName,
    LogDamaged,
    MetadataUnavailable,
    NotAvailable,
    NotServing,
    SegmentNotFound,
    SubscriptionExists,
    SubscriptionKindConflict,
    SubscriptionNotFound,
    TopicNotFound,
)
from braid.model.ids import Offset, SegmentId
from braid.model.names import TopicName
from braid.model.stored_record import encode
from braid.model.subscription import Placing, Subscription, SubscriptionKind
from braid.testing.sim.loop import Simulation
from braid.wire import operations
from tests.kits.control import ORDERS, faults, make_topic
from tests.kits.layouts import merge, split
from tests.kits.subscriptions import KEY, STREAM, World
from tests.kits.waiting import until


@pytest.mark.parametrize(("start", "offsets"), [("earliest", [30, 0]), ("latest", [100, 100])])
async def test_a_new_subscription_has_a_stored_cursor_on_every_segment(
    start: str, offsets: list[int], simulation: Simulation
) -> None:
    world = await World.make(simulation)
    world[0].earliest = Offset(30)
    created = await world.create(start)
    assert created == Subscription(id=created.id, kind=STREAM, created_at=simulation.clock.now_us())
    assert created.id > 0
    assert world.offsets() == offsets
    assert await world.stored_cursors() == 2
    assert await world.subs.get(ORDERS, "billing") == created
    assert await world.subs.list(ORDERS) == {"billing": created}
    with pytest.raises(SubscriptionExists):
        await world.create(start)
    await world.topics.view.stop()


async def test_ensure_creates_once_and_then_finds(simulation: Simulation) -> None:
    world = await World.make(simulation)

    async def join(create: bool = True) -> tuple[Subscription, bool]:
        return await world.subs.ensure(ORDERS, "billing", kind=STREAM, start="earliest", create=create)

    with pytest.raises(SubscriptionNotFound):
        await join(create=False)
    with pytest.raises(SubscriptionNotFound, match=r"never created, or it was deleted; a queue is created before"):
        await world.subs.delete(ORDERS, "billing")
    (first, created), (second, again) = await asyncio.gather(join(), join())
    assert (created, again) == (True, False)
    assert first == second
    world[0].cursors.advance("billing", Offset(50))
    assert await join() == (first, False)
    assert await join(create=False) == (first, False)
    assert world.offsets() == [50, 0], "a subscription that exists stays where it is"
    await world.topics.view.stop()


async def test_a_subscription_of_another_kind_is_a_conflict(simulation: Simulation) -> None:
    world = await World.make(simulation)
    await world.store.txn([], [Put(KEY, encode(Subscription(kind=SubscriptionKind.QUEUE)))])
    with pytest.raises(SubscriptionKindConflict, match="queue"):
        await world.subs.ensure(ORDERS, "billing", kind=STREAM, start="latest", create=True)
    await world.subs.create(ORDERS, "mailer", kind=SubscriptionKind.QUEUE, start="latest")
    assert all("mailer" in segment.cursors.queues for segment in world.segments.of_topic(ORDERS.path))
    await world.topics.view.stop()


async def test_no_queue_is_created_beside_a_broker_that_does_not_know_queues(simulation: Simulation) -> None:
    world = await World.make(simulation)
    world.subs._without_queues = lambda: ["old"]
    with pytest.raises(NotAvailable, match="broker old is of a version that does not know queues"):
        await world.subs.create(ORDERS, "mailer", kind=SubscriptionKind.QUEUE, start="latest")
    assert world.offsets("mailer") == [None, None]
    await world.topics.view.stop()


async def test_wrong_names_places_and_topics_are_refused(simulation: Simulation) -> None:
    world = await World.make(simulation)
    with pytest.raises(InvalidName):
        await world.create(name="a/b")
    with pytest.raises(InvalidArgument, match="earliest"):
        await world.create(start="middle")
    await world.topics.mark_deleting(ORDERS)
    for call in (world.create(), world.subs.get(ORDERS, "billing"), world.subs.list(ORDERS)):
        with pytest.raises(TopicNotFound):
            await call
    assert await world.stored_cursors() == 0
    await world.topics.view.stop()


async def test_a_subscription_needs_every_segment(simulation: Simulation) -> None:
    """One that begins without a cursor on a segment that is away would skip what comes there."""
    world = await World.make(simulation)
    away = world.segments.served.pop((ORDERS.path, 1))
    with pytest.raises(NotServing):
        await world.create()
    assert not await world.exists()
    world.segments.served[ORDERS.path, 1] = away
    await world.create()
    await world.topics.view.stop()


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.UNCERTAIN])
@pytest.mark.parametrize("at", range(3))
async def test_a_store_that_fails_during_a_creation_leaves_no_subscription_without_cursors(
    at: int, fault: Fault, simulation: Simulation
) -> None:
    world = await World.make(simulation)
    world.store.fault = faults(*[Fault.NONE] * at, fault)
    if fault is Fault.UNCERTAIN:
        await world.create()
    else:
        with pytest.raises(MetadataUnavailable):
            await world.create()
        assert not await world.exists()
        await world.create()
    assert await world.exists()
    assert world.offsets() == [0, 0]
    await world.topics.view.stop()


async def test_nothing_is_created_below_a_topic_that_is_deleted_at_that_moment(simulation: Simulation) -> None:
    """Another broker marks the topic; this one's view does not show it yet."""
    for turns in range(8):
        world = await World.make(simulation)
        creating = asyncio.ensure_future(world.create())
        for _ in range(turns):
            await asyncio.sleep(0)
        await world.topics.mark_deleting(ORDERS)
        created_before = await world.exists()
        result = (await asyncio.gather(creating, return_exceptions=True))[0]
        assert created_before == (isinstance(result, Subscription) and await world.exists())
        assert created_before or isinstance(result, TopicNotFound)
        await world.topics.view.stop()


async def test_deleting_closes_channels_and_removes_cursors(simulation: Simulation) -> None:
    world = await World.make(simulation)
    await world.create()
    await world.create(name="audit")
    await world.subs.delete(ORDERS, "billing")
    assert not await world.exists()
    assert world.offsets() == [None, None]
    assert world.offsets("audit") == [0, 0]
    assert await world.stored_cursors() == 2
    for segment in range(2):
        assert world[segment].closed == [("billing", "subscription-not-found", None)]
    for call in (
        world.subs.delete(ORDERS, "billing"),
        world.subs.get(ORDERS, "billing"),
        world.subs.seek_to(ORDERS, "billing", "latest"),
    ):
        with pytest.raises(SubscriptionNotFound):
            await call
    await world.topics.view.stop()


@pytest.mark.parametrize("at", range(3))
async def test_an_interrupted_deletion_is_finished_by_the_next_one_or_by_the_sweep_at_start(
    at: int, simulation: Simulation
) -> None:
    for by_sweep in (False, True):
        world = await World.make(simulation)
        await world.create()
        world.store.fault = faults(*[Fault.NONE] * at, Fault.UNAVAILABLE)
        with pytest.raises(MetadataUnavailable):
            await world.subs.delete(ORDERS, "billing")
        if by_sweep:
            assert await world.cursor_sweep.sweep() == min(at, 1), "the other segment's cursor went all the same"
        else:
            await world.subs.delete(ORDERS, "billing")
        if by_sweep and at == 0:
            assert await world.exists(), "nothing had happened yet"
            assert await world.stored_cursors() == 2
        else:
            assert not await world.exists()
            assert await world.stored_cursors() == 0
        await world.topics.view.stop()


async def test_deleting_rides_out_a_lost_answer(simulation: Simulation) -> None:
    world = await World.make(simulation)
    await world.create()
    world.store.fault = faults(Fault.UNCERTAIN, Fault.UNCERTAIN, Fault.UNCERTAIN)
    await world.subs.delete(ORDERS, "billing")
    assert not await world.exists()
    assert await world.stored_cursors() == 0
    await world.topics.view.stop()


async def test_a_subscription_that_is_created_again_does_not_find_its_old_place(simulation: Simulation) -> None:
    world = await World.make(simulation)
    await world.create("latest")
    await world.subs.delete(ORDERS, "billing")
    await world.create("earliest")
    assert world.offsets() == [0, 0]
    await world.topics.view.stop()


async def test_a_seek_moves_every_cursor_and_then_resets_the_channels(simulation: Simulation) -> None:
    world = await World.make(simulation)
    await world.create()
    world[0].earliest = Offset(5)
    assert await world.subs.seek_to(ORDERS, "billing", "latest") == {0: 100, 1: 100}
    assert await world.subs.seek_to(ORDERS, "billing", "earliest") == {0: 5, 1: 0}
    assert world.offsets() == [5, 0]
    assert world[0].closed == [("billing", operations.RESET, 100), ("billing", operations.RESET, 5)]
    with pytest.raises(InvalidArgument):
        await world.subs.seek_to(ORDERS, "billing", "somewhere")
    await world.topics.view.stop()


async def test_an_ack_that_is_under_way_cannot_undo_a_seek(simulation: Simulation) -> None:
    """Old channels may ack until they are closed; from then on they may not. So closing follows the new place with no
    turn of the loop in between."""
    world = await World.make(simulation)
    await world.create()
    seeking = asyncio.ensure_future(world.subs.seek_to(ORDERS, "billing", "earliest"))
    offset = 1
    while not world[0].closed:
        world[0].cursors.advance("billing", Offset(offset))
        offset += 1
        await asyncio.sleep(0)
    await seeking
    assert offset > 3, "acks did come meanwhile"
    assert world[0].cursors.offset("billing") == 0
    await world[0].cursors.flush()
    assert world.offsets() == [0, 0]
    await world.topics.view.stop()


async def test_a_seek_to_a_time_asks_each_segment(simulation: Simulation) -> None:
    world = await World.make(simulation)
    await world.create()
    world[0].times = [1_000, 2_000, 3_000]
    world[1].times = [5_000]
    assert await world.subs.seek_to_time(ORDERS, "billing", 2_500) == {0: 2, 1: 0}
    assert await world.subs.seek_to_time(ORDERS, "billing", 9_000) == {0: 100, 1: 100}
    await world.topics.view.stop()


async def test_a_seek_to_offsets_moves_only_the_segments_that_are_named_and_none_if_one_cannot_be(
    simulation: Simulation,
) -> None:
    world = await World.make(simulation)
    await world.create()
    assert await world.subs.seek_to_offsets(ORDERS, "billing", {SegmentId(1): Offset(40)}) == {1: 40}
    assert world.offsets() == [0, 40]
    world[1].earliest = Offset(10)
    for wrong in (9, 101):
        with pytest.raises(InvalidArgument, match="10 to 100"):
            await world.subs.seek_to_offsets(ORDERS, "billing", {SegmentId(0): Offset(7), SegmentId(1): Offset(wrong)})
    with pytest.raises(SegmentNotFound):
        await world.subs.seek_to_offsets(ORDERS, "billing", {SegmentId(0): Offset(7), SegmentId(9): Offset(0)})
    assert world.offsets() == [0, 40]
    await world.topics.view.stop()


async def test_skipping_leaves_out_records_of_one_segment(simulation: Simulation) -> None:
    world = await World.make(simulation)
    await world.create()
    assert await world.subs.skip(ORDERS, "billing", SegmentId(0), 30) == {0: 30}
    assert await world.subs.skip(ORDERS, "billing", SegmentId(0), 500) == {0: 100}
    world[1].earliest = Offset(60)
    assert await world.subs.skip(ORDERS, "billing", SegmentId(1), 1) == {1: 61}, "what is gone needs no skipping"
    with pytest.raises(InvalidArgument):
        await world.subs.skip(ORDERS, "billing", SegmentId(1), 0)
    await world.topics.view.stop()


def test_the_backlog_leaves_out_what_retention_deleted() -> None:
    assert Progress(Offset(70), Offset(0), Offset(100)).backlog == 30
    assert Progress(Offset(0), Offset(90), Offset(100)).backlog == 10
    assert Progress(Offset(100), Offset(0), Offset(100)).backlog == 0


async def test_a_seek_on_a_topic_that_syncs_now_and_then_is_not_undone_by_a_crash(simulation: Simulation) -> None:
    world = await World.make(simulation, segments=1)
    await world.create("earliest")
    world[0].grow(200, synced=150)
    await world.subs.seek_to(ORDERS, "billing", "latest")
    stored = await world.store.client("looker-on").get(paths.cursor(ORDERS.path, world[0].name.descriptor, "billing"))
    assert stored is not None
    assert b'"offset":200' in stored.value
    await world.topics.view.stop()


async def test_a_subscription_that_lacks_a_cursor_gets_one_at_the_earliest_record(simulation: Simulation) -> None:
    """Its creator was killed between a sweep, which took the cursor of a subscription without a key, and its last look
    at all segments."""
    world = await World.make(simulation)
    await world.create()
    await lose_cursor(world)
    segment = world.segments.get(ORDERS.path, 0)
    assert await world.cursor_sweep.sweep() == 0
    assert segment.cursors.offset("billing") == segment.earliest
    assert await world.stored_cursors() == 2
    await world.topics.view.stop()


async def lose_cursor(world: World) -> None:
    key = await world.store.get(KEY)
    assert key is not None
    await world.store.txn([], [Delete(KEY)])
    await world.segments.get(ORDERS.path, 0).cursors.remove("billing")
    await world.store.txn([], [Put(KEY, key.value)])


async def test_a_sweep_that_the_store_did_not_answer_is_made_again(simulation: Simulation) -> None:
    """A child of a transition gets its cursors by a sweep. Without them the transition would wait for ever."""
    world = await World.make(simulation)
    await world.create()
    await lose_cursor(world)
    world.store.fault = faults(Fault.UNAVAILABLE)
    world.cursor_sweep.sweep_later(ORDERS.path)
    await until(lambda: world.offsets() == [0, 0])
    await world.cursor_sweep.stop()
    await world.topics.view.stop()


async def test_a_topic_that_cannot_be_swept_does_not_hold_up_the_others(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one with a queue whose journal is damaged."""
    world = await World.make(simulation)
    await world.create()
    await lose_cursor(world)
    broken = TopicName("public", "default", "broken")
    topic = await make_topic(world.topics, broken)
    await world.segments.serve(world.store, broken, topic)
    await world.subs.create(broken, "work", kind=SubscriptionKind.QUEUE, start="earliest")
    segment = world.segments.get(broken.path, 0)
    segment.cursors._offsets.clear()

    async def fail(placing: Placing) -> Offset:
        raise LogDamaged("the journal is damaged", 0, 0)

    monkeypatch.setattr(segment.cursors, "place", fail)
    world.cursor_sweep.sweep_later(ORDERS.path)
    world.cursor_sweep.sweep_later(broken.path)
    await until(lambda: world.offsets() == [0, 0])
    await world.cursor_sweep.stop()
    await world.topics.view.stop()


async def test_a_seek_sets_ancestors_back_before_their_descendants(simulation: Simulation) -> None:
    """Otherwise consumers could read descendants from their new place before anybody knows that an ancestor is next."""
    world = await World.make(simulation, segments=1)
    topic = world.topics.get(ORDERS.path)
    layout = merge(split(topic.layout, 0), 1, 2)
    topic = msgspec.structs.replace(topic, layout=layout)
    written = await world.store.txn([], [Put(paths.layout(ORDERS.path), topic.to_json())])
    await world.topics.view.caught_up(written.revision)
    await world.segments.serve(world.store, ORDERS, topic, end=100)
    await world.create("latest")
    await world.subs.seek_to(ORDERS, "billing", "earliest")
    assert world.offsets() == [0, 0, 0, 0]
    stored_at = [world[segment].cursors.stored_at("billing") for segment in range(4)]
    assert stored_at[0] < min(stored_at[1:3]) <= max(stored_at[1:3]) < stored_at[3]
    await world.topics.view.stop()
