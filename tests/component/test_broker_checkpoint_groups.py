"""The controller's side of groups of checkpoint consumers: positions in memory, sessions in the store (decision 43)."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from braid.broker.groups.group import Assigned, Control, Group
from braid.metadata import paths
from braid.metadata.store import Compare, Put
from braid.model.errors import TopicNotFound
from braid.model.ids import Revision, SegmentId
from braid.model.subscription import group_key
from braid.model.transition import plan_split
from braid.testing.sim.loop import Simulation
from braid.wire.operations import ENDED, GroupPosition
from tests.kits.control import ORDERS, Recorder
from tests.kits.groups import CONFIG, World
from tests.kits.layouts import split

ETL = group_key("etl")


class Reader(Recorder):
    """Also notes where it is to begin."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world.readers, name)
        self.positions: dict[int, int] = {}

    def assign(self, assigned: Assigned) -> None:
        self.positions = {each.segment: each.offset for each in assigned.positions}
        super().assign(assigned)


async def join(world: World, name: str, *positions: GroupPosition) -> tuple[int, Reader]:
    reader = Reader(world, name)
    number = await world.groups.join(ORDERS, ETL, name, reader, positions)
    reader.give_back = lambda segment: world.give_back(number, reader, segment)
    await asyncio.sleep(0.1)
    return number, reader


async def stored_consumers(world: World) -> list[str]:
    listing = await world.store.client("looker-on").list(paths.consumers_prefix(ORDERS.path, ETL))
    return [found[1] for entry in listing.entries if (found := paths.consumer_of(entry.key))]


async def split_first(world: World) -> None:
    topic = world.topics.get(ORDERS.path)
    changed = msgspec.structs.replace(topic, layout=split(topic.layout, 0))
    result = await world.store.txn([], [Put(paths.layout(ORDERS.path), changed.to_json())])
    await world.topics.view.caught_up(result.revision)
    await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("told", "known"),
    [((5, 3), 5), ((3, 5), 5), ((5, ENDED), ENDED), ((ENDED, 5), ENDED), ((ENDED, ENDED), ENDED)],
)
def test_the_furthest_position_counts(told: tuple[int, int], known: int) -> None:
    group = Group(ORDERS, 1, ETL, Control(1, Compare("/", Revision(1)), iter(())))
    for offset in told:
        group.note(GroupPosition(0, offset))
    assert group.positions[SegmentId(0)].offset == known
    assert group.ended == ({0} if known == ENDED else set())


async def test_the_next_consumer_of_a_segment_hears_where_the_group_is(simulation: Simulation) -> None:
    world = await World.make(simulation, segments=1)
    number, b = await join(world, "b", GroupPosition(0, 7, 2), GroupPosition(99, 1), GroupPosition(0, -2))
    assert b.positions == {0: 7}, "a segment that the topic does not have is forgotten"
    world.groups.progress(number, [GroupPosition(0, 20, 2)])
    _, a = await join(world, "a")
    assert (a.latest(), a.positions, b.latest()) == ((0,), {0: 20}, ())
    await world.close()


async def test_children_come_when_a_consumer_tells_the_end_of_their_parent(simulation: Simulation) -> None:
    world = await World.make(simulation, segments=1)
    number, a = await join(world, "a")
    _, b = await join(world, "b")
    await split_first(world)
    assert (a.latest(), b.latest()) == ((0,), ())
    world.groups.progress(number, [GroupPosition(0, ENDED)])
    await asyncio.sleep(0.1)
    assert (a.latest(), b.latest()) == ((1,), (2,))
    await world.close()


async def test_the_end_of_a_segment_that_takes_writes_is_not_believed(simulation: Simulation) -> None:
    world = await World.make(simulation, segments=2)
    number, a = await join(world, "a", GroupPosition(0, ENDED))
    world.groups.progress(number, [GroupPosition(1, ENDED)])
    await asyncio.sleep(0.1)
    assert (a.latest(), a.positions) == ((0, 1), {}), "nobody would read what comes"
    _, b = await join(world, "b")
    assert (a.latest(), b.latest(), b.positions) == ((0,), (1,), {})
    await split_first(world)
    assert (a.latest(), b.latest()) == ((1, 2), (3,)), "the consumer knew it before the controller"
    await world.close()


async def test_the_end_of_a_segment_counts_while_its_children_are_not_in_the_layout_yet(simulation: Simulation) -> None:
    world = await World.make(simulation, segments=2)
    _, a = await join(world, "a", GroupPosition(0, ENDED))
    topic = world.topics.get(ORDERS.path)
    sealing = topic.beginning(plan_split(topic.layout, 0), transition_id=7, created_at=0).sealing()
    result = await world.store.txn([], [Put(paths.layout(ORDERS.path), sealing.to_json())])
    await world.topics.view.caught_up(result.revision)
    _, b = await join(world, "b")
    assert (a.latest(), b.latest()) == ((1,), ())
    await world.close()


async def test_a_group_forgets_segments_that_have_left_the_layout(simulation: Simulation) -> None:
    world = await World.make(simulation, segments=1)
    number, _ = await join(world, "a", GroupPosition(0, ENDED))
    await split_first(world)
    group = world.groups._groups[ORDERS.path, ETL]
    assert group.positions.keys() == {0}
    pruned = world.topics.get(ORDERS.path).pruned(SegmentId(0))
    result = await world.store.txn([], [Put(paths.layout(ORDERS.path), pruned.to_json())])
    await world.topics.view.caught_up(result.revision)
    world.groups.progress(number, [GroupPosition(1, 5)])
    await asyncio.sleep(0.1)
    assert group.positions.keys() == {1}
    await world.close()


async def test_the_children_of_a_deleted_segment_wait_until_its_consumer_is_done_with_it(
    simulation: Simulation,
) -> None:
    world = await World.make(simulation, segments=1)
    number, a = await join(world, "a")
    _, b = await join(world, "b")
    await split_first(world)
    a.give_back = lambda _segment: None
    pruned = world.topics.get(ORDERS.path).pruned(SegmentId(0))
    result = await world.store.txn([], [Put(paths.layout(ORDERS.path), pruned.to_json())])
    await world.topics.view.caught_up(result.revision)
    await asyncio.sleep(0.1)
    assert (a.latest(), b.latest()) == ((), ()), "the application of a has records of segment 0, and stores them now"
    world.groups.released(number, 0)
    await asyncio.sleep(0.1)
    assert (a.latest(), b.latest()) == ((1,), (2,))
    await world.close()


async def test_positions_of_a_topic_that_was_deleted_are_refused(simulation: Simulation) -> None:
    world = await World.make(simulation, segments=1)
    topic_id = world.topics.get(ORDERS.path).id
    await join(world, "a")
    sleeper = Reader(world, "sleeper")
    with pytest.raises(TopicNotFound, match="created again"):
        await world.groups.join(ORDERS, ETL, "sleeper", sleeper, [GroupPosition(0, 7)], topic_id=topic_id + 1)
    assert (await stored_consumers(world), world.groups._groups[ORDERS.path, ETL].positions) == (["a"], {})
    await world.groups.join(ORDERS, ETL, "sleeper", sleeper, [GroupPosition(0, 7)], topic_id=topic_id)
    await world.close()


@pytest.mark.parametrize("comes_back", [True, False])
async def test_the_next_controller_gives_out_nothing_before_it_can_know_what_has_ended(
    comes_back: bool, simulation: Simulation
) -> None:
    world = await World.make(simulation, segments=1)
    number, _ = await join(world, "b")
    await join(world, "a")
    await split_first(world)
    world.groups.progress(number, [GroupPosition(0, ENDED)])
    await asyncio.sleep(0.1)
    await world.restart()
    _, a = await join(world, "a")
    await asyncio.sleep(CONFIG.session_grace_s / 2)
    assert a.assigned == [], "only b knows that the parent has ended"
    if comes_back:
        _, b = await join(world, "b", GroupPosition(0, ENDED))
        assert (a.latest(), b.latest()) == ((1,), (2,))
    else:
        await asyncio.sleep(CONFIG.session_grace_s)
        assert a.latest() == (0,), "nobody is left that knows"
    assert len(a.assigned) == 1
    await world.close()


async def test_a_group_has_sessions_in_the_store_as_long_as_it_has_consumers(simulation: Simulation) -> None:
    world = await World.make(simulation)
    leaving, _ = await join(world, "a")
    losing, b = await join(world, "b")
    assert await stored_consumers(world) == ["a", "b"]
    await world.groups.leave(leaving)
    world.lose(losing, b)
    assert await stored_consumers(world) == ["b"]
    await asyncio.sleep(CONFIG.session_grace_s + 1)
    assert await stored_consumers(world) == []
    assert world.groups.members(ORDERS.path, ETL) == {}
    await world.close()
