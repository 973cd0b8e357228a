"""Which consumer has which segment while layouts change: children only after every ancestor is drained (I4), and a
parent that is read again only when its descendants were given back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from braid.metadata import paths
from braid.metadata.store import Delete, Operation, Put
from braid.model.ids import Offset
from braid.model.layout import Layout
from braid.model.names import SegmentName
from braid.model.stored_record import encode
from braid.model.subscription import Drained
from braid.testing.sim.loop import Simulation
from tests.kits.control import ORDERS, Recorder
from tests.kits.groups import CONFIG, World
from tests.kits.layouts import merge, split


async def change(world: World, changed: Callable[[Layout], Layout]) -> None:
    """Write another layout."""
    topic = world.topics.get(ORDERS.path)
    topic = msgspec.structs.replace(topic, layout=changed(topic.layout))
    await write(world, Put(paths.layout(ORDERS.path), topic.to_json()))


async def write(world: World, *operations: Operation) -> None:
    result = await world.store.txn([], operations)
    await world.topics.view.caught_up(result.revision)
    await asyncio.sleep(0.1)


def key(world: World, segment: int, subscription: str = "billing") -> str:
    name = SegmentName.of(ORDERS, world.topics.get(ORDERS.path).layout.segment(segment))
    return paths.drained(ORDERS.path, name.descriptor, subscription)


async def drain(world: World, *segments: int) -> None:
    await write(world, *(Put(key(world, segment), encode(Drained(end=Offset(9)))) for segment in segments))


async def set_back(world: World, *segments: int) -> None:
    await write(world, *(Delete(key(world, segment)) for segment in segments))


async def test_children_come_when_their_parent_is_drained_and_the_parent_goes(simulation: Simulation) -> None:
    world = await World.make(simulation, segments=1)
    _, a = await world.join("a")
    _, b = await world.join("b")
    await change(world, lambda layout: split(layout, 0))
    assert (a.latest(), b.latest()) == ((0,), ())
    await write(world, Put(key(world, 0, "audit"), encode(Drained(end=Offset(9)))))
    assert (a.latest(), b.latest()) == ((0,), ()), "another subscription"
    await drain(world, 0)
    assert (a.latest(), b.latest()) == ((1,), (2,))
    assert world.readers.reading == {1: a, 2: b}
    await world.close()


async def test_children_do_not_wait_until_the_drained_parent_was_given_back(simulation: Simulation) -> None:
    world = await World.make(simulation, segments=1)
    _, a = await world.join("a", gives_back=False)
    await change(world, lambda layout: split(layout, 0))
    await drain(world, 0)
    assert a.latest() == (1, 2)
    await asyncio.sleep(CONFIG.release_timeout_s + 1)
    assert world.members() == {"a": (1, 2)}
    await world.close()


async def test_after_two_quick_splits_every_generation_waits_for_the_one_before_it(simulation: Simulation) -> None:
    world = await World.make(simulation, segments=1)
    _, a = await world.join("a")
    await change(world, lambda layout: split(split(layout, 0), 1))
    assert a.latest() == (0,)
    await drain(world, 0)
    assert a.latest() == (1, 2)
    await drain(world, 1)
    assert a.latest() == (2, 3, 4)
    await world.close()


async def test_a_merged_segment_waits_for_all_of_its_parents(simulation: Simulation) -> None:
    world = await World.make(simulation, segments=2)
    _, a = await world.join("a")
    await change(world, lambda layout: merge(layout, 0, 1))
    await drain(world, 1)
    assert a.latest() == (0,)
    await drain(world, 0)
    assert a.latest() == (2,)
    await world.close()


async def test_a_parent_that_was_set_back_is_given_out_when_its_descendants_were_given_back(
    simulation: Simulation,
) -> None:
    world = await World.make(simulation, segments=1)
    first, a = await world.join("a", gives_back=False)
    second, b = await world.join("b", gives_back=False)
    await change(world, lambda layout: split(split(layout, 0), 1))
    world.give_back(first, a, 0)
    await drain(world, 0, 1)
    world.give_back(first, a, 0)
    assert (a.latest(), b.latest()) == ((2, 3), (4,))
    await set_back(world, 0)
    assert (a.latest(), b.latest()) == ((), ()), "all of them are asked for"
    world.give_back(first, a, 2)
    world.give_back(second, b, 4)
    await asyncio.sleep(0.1)
    assert (a.latest(), b.latest()) == ((), ()), "3 is still being read"
    world.give_back(first, a, 3)
    await asyncio.sleep(0.1)
    assert (a.latest(), b.latest()) == ((0,), ())
    await drain(world, 0)
    assert (a.latest(), b.latest()) == ((2, 3), (4,)), "1 has stayed drained"
    await world.close()


async def test_a_descendant_that_is_not_given_back_delays_its_ancestor_for_the_release_timeout(
    simulation: Simulation,
) -> None:
    world = await World.make(simulation, segments=1)
    await change(world, lambda layout: split(layout, 0))
    await drain(world, 0)
    _, a = await world.join("a", gives_back=False)
    await asyncio.sleep(1)
    assert a.latest() == (1, 2)
    await set_back(world, 0)
    await asyncio.sleep(CONFIG.release_timeout_s - 0.5)
    assert a.latest() == ()
    await asyncio.sleep(1)
    assert a.latest() == (0,)
    await world.close()


async def test_a_disconnected_holder_of_a_descendant_delays_nobody(simulation: Simulation) -> None:
    """Its owner keeps it out (broker/groups/order_gate.py)."""
    world = await World.make(simulation, segments=1)
    await change(world, lambda layout: split(layout, 0))
    await drain(world, 0)
    first, a = await world.join("a")
    await world.join("b")
    await asyncio.sleep(1)
    world.lose(first, a)
    await set_back(world, 0)
    assert world.members() == {"a": (0,), "b": ()}
    await world.close()


@pytest.mark.parametrize("drained", [(), (0,), (0, 1)])
async def test_the_next_controller_comes_to_the_same_result(drained: tuple[int, ...], simulation: Simulation) -> None:
    world = await World.make(simulation, segments=1)
    for name in ("a", "b"):
        await world.join(name)
    await change(world, lambda layout: split(split(layout, 0), 1))
    await drain(world, *drained)
    before = world.members()
    await world.restart()
    for name in ("a", "b"):
        await world.join(name)
    await asyncio.sleep(1)
    assert world.members() == before
    await world.close()


@pytest.mark.parametrize("seed", range(30))
async def test_whatever_happens_no_segment_is_read_beside_an_ancestor(seed: int, simulation: Simulation) -> None:
    """Consumers come and go and are slow, segments are split, merged, drained and set back. A consumer that opens a
    segment finds no open ancestor that is to be read, and no open descendant."""
    random = simulation.random
    world = await World.make(simulation, segments=random.randrange(1, 4))
    connected: dict[str, tuple[int, Recorder]] = {}

    def slowly(number: int, member: Recorder, segment: int) -> None:
        delay_s = random.random() * (CONFIG.release_timeout_s - 1)
        asyncio.get_running_loop().call_later(delay_s, world.give_back, number, member, segment)

    def check() -> None:
        layout = world.topics.get(ORDERS.path).layout
        drained = world.drained.of(ORDERS.path, "billing")
        for segment in world.readers.reading:
            to_read = {ancestor for ancestor in layout.ancestors(segment) if ancestor not in drained}
            assert not to_read & world.readers.reading.keys()

    for _ in range(120):
        layout = world.topics.get(ORDERS.path).layout
        drained = world.drained.of(ORDERS.path, "billing")
        name, action = random.choice("abc"), random.random()
        if action < 0.3 and name not in connected:
            member = Recorder(world.readers, name)
            number = await world.groups.join(ORDERS, "billing", name, member)
            member.give_back = lambda segment, number=number, member=member: slowly(number, member, segment)  # type: ignore[misc]
            connected[name] = number, member
        elif action < 0.4 and name in connected:
            number, member = connected.pop(name)
            member.end()
            await world.groups.leave(number)
        elif action < 0.5 and len(layout.segments) < 20:
            active = [segment.segment_id for segment in layout.active]
            at = random.randrange(len(active))
            if len(active) > 1 and random.random() < 0.5:
                left = max(at - 1, 0)
                await change(world, lambda layout: merge(layout, active[left], active[left + 1]))  # noqa: B023
            else:
                await change(world, lambda layout: split(layout, active[at]))  # noqa: B023
        elif action < 0.8:
            held = [segment for segment in world.readers.reading if not layout.segment(segment).is_active]
            if held:
                await drain(world, random.choice(held))
        elif action < 0.85 and (closed := drained - world.readers.reading.keys()):
            await set_back(world, random.choice(sorted(closed)))
        for _ in range(random.randrange(5)):
            await asyncio.sleep(random.random())
            check()
    if connected:
        await asyncio.sleep(60)
        layout = world.topics.get(ORDERS.path).layout
        while sealed := [each for each in world.readers.reading if not layout.segment(each).is_active]:
            await drain(world, *sealed)
            await asyncio.sleep(10)
        assert sorted(world.readers.reading) == sorted(segment.segment_id for segment in layout.active)
    await world.close()
