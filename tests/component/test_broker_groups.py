"""Who has which segment: sessions that outlive connections and brokers, and never two holders at once (I4)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import pytest

from braid.metadata import paths
from braid.metadata.memory import Fault, MemoryStore
from braid.metadata.store import Condition, Delete, Operation, TxnResult
from braid.model.errors import (
    BraidError,
    ConsumerReplaced,
    InvalidName,
    MetadataUnavailable,
    MetadataUncertain,
    ShuttingDown,
    SubscriptionNotFound,
    TopicNotFound,
)
from braid.testing.sim.loop import Simulation
from tests.kits.control import ORDERS, Readers, Recorder, faults
from tests.kits.groups import CONFIG, World
from tests.kits.waiting import until


async def test_the_first_consumer_gets_everything_after_its_join_has_returned(simulation: Simulation) -> None:
    world = await World.make(simulation)
    _, member = await world.join("a")
    assert member.assigned == [], "the reply to JOIN goes first"
    await asyncio.sleep(0)
    assert member.assigned == [(1, (0, 1, 2, 3))]
    assert all(world.reads(member, segment) for segment in range(4))
    assert await world.stored() == ["a"]
    await world.close()


async def test_a_consumer_without_segments_is_told_so(simulation: Simulation) -> None:
    world = await World.make(simulation, segments=1)
    await world.join("a")
    _, idle = await world.join("b")
    await asyncio.sleep(1)
    assert idle.assigned == [(1, ())]
    await world.close()


async def test_a_segment_goes_to_the_next_holder_only_when_the_last_one_has_given_it_back(
    simulation: Simulation,
) -> None:
    world = await World.make(simulation)
    first, a = await world.join("a", gives_back=False)
    await asyncio.sleep(1)
    _, b = await world.join("b")
    await asyncio.sleep(1)
    assert a.latest() == (0, 2)
    assert b.latest() == ()
    assert world.reads(a, 1), "until it gives it back"
    assert world.members() == {"a": (0, 1, 2, 3), "b": ()}
    world.give_back(first, a, 1)
    await asyncio.sleep(0.1)
    assert b.latest() == (1,)
    assert world.reads(b, 1)
    world.give_back(first, a, 3)
    await asyncio.sleep(0.1)
    assert b.latest() == (1, 3)
    assert a.revoked == []
    assert a.assigned[-1] == (2, (0, 2)), "nothing is pushed that does not change"
    await world.close()


async def test_what_is_not_given_back_in_time_is_taken_and_a_late_answer_changes_nothing(
    simulation: Simulation,
) -> None:
    world = await World.make(simulation, segments=2)
    first, a = await world.join("a", gives_back=False)
    await asyncio.sleep(1)
    _, b = await world.join("b")
    await asyncio.sleep(CONFIG.release_timeout_s - 0.1)
    assert a.revoked == []
    await asyncio.sleep(0.2)
    assert a.revoked == [1]
    assert b.latest() == (1,)
    world.groups.released(first, 1)
    world.groups.released(first, 0)  # it was never asked for
    assert world.reads(a, 0)
    await asyncio.sleep(1)
    assert world.members() == {"a": (0,), "b": (1,)}
    await world.close()


async def test_a_segment_that_was_asked_back_and_is_wanted_again_is_given_anew_after_the_answer(
    simulation: Simulation,
) -> None:
    """The answer to the first request may be under way: the segment must not seem held while its channel is closed."""
    world = await World.make(simulation, segments=2)
    first, a = await world.join("a", gives_back=False)
    await asyncio.sleep(1)
    second, _ = await world.join("b")
    await asyncio.sleep(0.1)
    await world.groups.leave(second)
    await asyncio.sleep(0.1)
    assert a.latest() == (0,)
    world.give_back(first, a, 1)
    await asyncio.sleep(0.1)
    assert a.latest() == (0, 1)
    assert world.reads(a, 1)
    await world.close()


async def test_leaving_hands_everything_on_at_once(simulation: Simulation) -> None:
    world = await World.make(simulation)
    first, a = await world.join("a")
    second, b = await world.join("b")
    await asyncio.sleep(1)
    assert (a.latest(), b.latest()) == ((0, 2), (1, 3))
    await world.groups.leave(first)
    await asyncio.sleep(0)
    assert sorted(a.revoked) == [0, 2], "also if it left its channels open"
    assert b.latest() == (0, 1, 2, 3)
    assert await world.stored() == ["b"]
    await world.groups.leave(first)
    world.groups.disconnected(first)
    await world.groups.leave(second)
    assert world.members() == {}
    assert await world.stored() == []
    await world.close()


async def test_a_lost_connection_keeps_its_segments_for_its_grace(simulation: Simulation) -> None:
    world = await World.make(simulation)
    first, a = await world.join("a")
    _, b = await world.join("b")
    await asyncio.sleep(1)
    world.lose(first, a)
    await asyncio.sleep(CONFIG.session_grace_s - 0.1)
    assert world.members() == {"a": (0, 2), "b": (1, 3)}
    assert not world.groups.consumers(ORDERS.path, "billing")["a"].connected
    assert world.groups.consumers(ORDERS.path, "billing")["b"].connected
    number, again = await world.join("a")
    await asyncio.sleep(1)
    assert number != first
    assert again.assigned == [(1, (0, 2))]
    assert b.assigned[-1][1] == (1, 3)
    await asyncio.sleep(100)
    assert world.members() == {"a": (0, 2), "b": (1, 3)}, "its grace ended when it came back"
    world.lose(number, again)
    await asyncio.sleep(CONFIG.session_grace_s + 0.1)
    assert b.latest() == (0, 1, 2, 3)
    assert await world.stored() == ["b"]
    await world.close()


async def test_coming_back_in_time_needs_no_store(simulation: Simulation) -> None:
    world = await World.make(simulation)
    first, a = await world.join("a")
    await asyncio.sleep(1)
    world.lose(first, a)
    world.store.disconnect()
    _, again = await world.join("a")
    await asyncio.sleep(1)
    assert again.latest() == (0, 1, 2, 3)
    assert world.reads(again, 3)
    world.store.reconnect()
    await world.close()


async def test_what_a_lost_consumer_was_to_give_back_moves_at_once(simulation: Simulation) -> None:
    world = await World.make(simulation, segments=2)
    first, a = await world.join("a", gives_back=False)
    await asyncio.sleep(1)
    _, b = await world.join("b")
    await asyncio.sleep(0.1)
    assert b.latest() == ()
    world.lose(first, a)
    await asyncio.sleep(0.1)
    assert b.latest() == (1,)
    assert world.members() == {"a": (0,), "b": (1,)}
    await asyncio.sleep(30)
    assert a.revoked == []
    await world.close()


async def test_a_second_consumer_of_the_same_name_takes_the_place_of_the_first(simulation: Simulation) -> None:
    world = await World.make(simulation)
    first, old = await world.join("a")
    _, b = await world.join("b")
    await asyncio.sleep(1)
    had = old.read_grants
    _, new = await world.join("a")
    assert isinstance(old.expulsion, ConsumerReplaced)
    assert "consumer with the name a" in str(old.expulsion)
    assert old.has == set()
    await asyncio.sleep(1)
    assert new.assigned == [(1, (0, 2))]
    assert all(new.read_grants[segment] > had[segment] for segment in (0, 2)), "the old process opens nothing any more"
    assert b.latest() == (1, 3)
    assert world.reads(new, 0)
    # What the old connection still says counts no more.
    world.groups.released(first, 0)
    world.groups.disconnected(first)
    await world.groups.leave(first)
    await asyncio.sleep(100)
    assert world.members() == {"a": (0, 2), "b": (1, 3)}
    assert await world.stored() == ["a", "b"]
    await world.close()


async def test_replacing_a_consumer_that_owes_a_segment_sets_the_segment_free(simulation: Simulation) -> None:
    world = await World.make(simulation, segments=2)
    await world.join("a", gives_back=False)
    await asyncio.sleep(1)
    _, b = await world.join("b")
    await asyncio.sleep(0.1)
    _, new = await world.join("a")
    await asyncio.sleep(0.1)
    assert new.latest() == (0,)
    assert b.latest() == (1,)
    await asyncio.sleep(30)
    assert new.revoked == []
    await world.close()


async def test_after_a_restart_nobody_who_comes_back_in_time_loses_a_segment(simulation: Simulation) -> None:
    world = await World.make(simulation)
    for name in ("a", "b", "c"):
        await world.join(name)
    await asyncio.sleep(1)
    before = world.members()
    await world.restart()
    await asyncio.sleep(5)
    _, b = await world.join("b")
    await asyncio.sleep(1)
    _, a = await world.join("a")
    await asyncio.sleep(1)
    assert {"a": a.latest(), "b": b.latest()} == {"a": before["a"], "b": before["b"]}
    assert len(a.assigned) == len(b.assigned) == 1, "nothing wandered"
    assert world.members() == before
    await asyncio.sleep(CONFIG.session_grace_s)
    assert await world.stored() == ["a", "b"]
    assert sorted((a.latest() or ()) + (b.latest() or ())) == [0, 1, 2, 3]
    await world.close()


@pytest.mark.parametrize("request_name", ["get", "txn"])
@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.UNCERTAIN])
async def test_a_join_that_the_store_refuses_leaves_nothing(
    request_name: str, fault: Fault, simulation: Simulation
) -> None:
    world = await World.make(simulation)
    world.store.fault = lambda request: fault if request == request_name else Fault.NONE
    joined = False
    with contextlib.suppress(MetadataUnavailable, MetadataUncertain):
        await world.join("a")
        joined = True
    world.store.fault = lambda _: Fault.NONE
    await asyncio.sleep(5)
    assert (await world.stored(), [*world.members()]) == ((["a"], ["a"]) if joined else ([], []))
    if joined:
        assert (request_name, fault) == ("txn", Fault.UNCERTAIN), "applied, and read back"
    _, member = await world.join("a")
    await asyncio.sleep(1)
    assert member.latest() == (0, 1, 2, 3)
    await world.close()


async def test_a_join_whose_connection_is_cut_meanwhile_leaves_nothing(simulation: Simulation) -> None:
    for turns in range(8):
        world = await World.make(simulation)
        joining = asyncio.ensure_future(world.groups.join(ORDERS, "billing", "a", Recorder(Readers(), "a")))
        for _ in range(turns):
            await asyncio.sleep(0)
        joining.cancel()
        try:
            world.groups.disconnected(await joining)
            await asyncio.sleep(CONFIG.session_grace_s)
        except asyncio.CancelledError:
            pass
        await asyncio.sleep(5)
        assert world.members() == {}
        assert await world.stored() == []
        await world.close()


async def test_a_leave_that_the_store_does_not_take_is_finished_later(simulation: Simulation) -> None:
    world = await World.make(simulation)
    first, _ = await world.join("a")
    second, b = await world.join("b")
    await asyncio.sleep(1)
    world.store.disconnect()
    await world.groups.leave(first)
    await asyncio.sleep(1)
    assert b.latest() == (0, 1, 2, 3)
    world.store.reconnect()
    await asyncio.sleep(5)
    assert await world.stored() == ["b"]
    world.store.fault = faults(Fault.UNCERTAIN)
    await world.groups.leave(second)
    assert await world.stored() == []
    await world.close()


async def test_a_late_removal_does_not_take_the_session_of_who_came_back(simulation: Simulation) -> None:
    world = await World.make(simulation)
    first, _ = await world.join("a")
    world.store.disconnect()
    await world.groups.leave(first)
    world.store.reconnect()
    await world.join("a")
    await asyncio.sleep(10)
    assert await world.stored() == ["a"]
    assert world.members() == {"a": (0, 1, 2, 3)}
    await world.close()


async def test_only_an_existing_subscription_of_an_existing_topic_can_be_joined(simulation: Simulation) -> None:
    world = await World.make(simulation)
    member = Recorder(Readers(), "a")
    with pytest.raises(SubscriptionNotFound):
        await world.groups.join(ORDERS, "other", "a", member)
    with pytest.raises(InvalidName):
        await world.groups.join(ORDERS, "billing", "a/b", member)
    await world.topics.mark_deleting(ORDERS)
    with pytest.raises(TopicNotFound):
        await world.groups.join(ORDERS, "billing", "a", member)
    await asyncio.sleep(1)
    assert await world.stored() == []
    await world.close()


async def test_the_consumers_of_a_deleted_subscription_have_nothing_any_more(simulation: Simulation) -> None:
    world = await World.make(simulation)
    _, a = await world.join("a")
    second, b = await world.join("b")
    await asyncio.sleep(1)
    world.lose(second, b)
    await world.store.txn([], [Delete(paths.subscription(ORDERS.path, "billing"))])
    world.groups.forget(ORDERS, "billing")
    assert isinstance(a.expulsion, SubscriptionNotFound)
    assert a.has == set()
    assert world.members() == {}
    await asyncio.sleep(100)
    assert await world.stored() == []
    with pytest.raises(SubscriptionNotFound):
        await world.join("a")
    await world.close()


async def test_nobody_joins_a_subscription_that_is_deleted_at_that_moment(simulation: Simulation) -> None:
    for turns in range(10):
        world = await World.make(simulation)
        joining = asyncio.ensure_future(world.groups.join(ORDERS, "billing", "a", Recorder(Readers(), "a")))
        for _ in range(turns):
            await asyncio.sleep(0)
        await world.store.txn([], [Delete(paths.subscription(ORDERS.path, "billing"))])
        world.groups.forget(ORDERS, "billing")
        with contextlib.suppress(SubscriptionNotFound):
            await joining
        await asyncio.sleep(5)
        assert world.members() == {}
        assert await world.stored() == []
        await world.close()


class SlowStore(MemoryStore):
    """Keeps the answer to its next transaction back until it is told to let it go."""

    answer: asyncio.Event | None = None
    applied = False

    async def txn(self, conditions: Sequence[Condition], operations: Sequence[Operation]) -> TxnResult:
        result = await super().txn(conditions, operations)
        if (answer := self.answer) is not None:
            self.answer, self.applied = None, True
            await answer.wait()
        return result


async def test_a_join_that_was_stored_before_its_subscription_was_deleted_is_undone_when_it_hears_of_it(
    simulation: Simulation,
) -> None:
    store = SlowStore(simulation.clock)
    world = await World.make(simulation, store=store)
    answer = store.answer = asyncio.Event()
    joining = asyncio.ensure_future(world.join("a"))
    await until(lambda: store.applied)
    await store.client().txn([], [Delete(paths.subscription(ORDERS.path, "billing"))])
    world.groups.forget(ORDERS, "billing")
    answer.set()
    with pytest.raises(SubscriptionNotFound):
        await joining
    await asyncio.sleep(5)
    assert world.members() == {}
    assert await world.stored() == []
    await world.close()


async def test_no_session_is_stored_below_a_subscription_that_another_broker_has_deleted(
    simulation: Simulation,
) -> None:
    for turns in range(10):
        world = await World.make(simulation)
        joining = asyncio.ensure_future(world.join("a"))
        for _ in range(turns):
            await asyncio.sleep(0)
        deleted = await world.store.txn([], [Delete(paths.subscription(ORDERS.path, "billing"))])
        await asyncio.gather(joining, return_exceptions=True)
        entry = await world.store.get(paths.consumer(ORDERS.path, "billing", "a"))
        assert entry is None or entry.revision < deleted.revision
        await world.close()


async def test_the_consumers_of_a_deleted_topic_have_nothing_any_more(simulation: Simulation) -> None:
    world = await World.make(simulation)
    number, a = await world.join("a")
    idle = [(await world.join(name))[1] for name in "bcde"][-1]
    await asyncio.sleep(1)
    assert idle.latest() == ()
    await world.topics.mark_deleting(ORDERS)
    assert isinstance(a.expulsion, TopicNotFound)
    assert isinstance(idle.expulsion, TopicNotFound), "also who has no channel that could be closed"
    assert world.members() == {}
    await world.groups.leave(number)
    await world.close()


async def test_a_closed_group_takes_nobody_and_forgets_nobody(simulation: Simulation) -> None:
    world = await World.make(simulation)
    number, a = await world.join("a")
    await asyncio.sleep(1)
    await world.groups.close()
    world.lose(number, a)  # the server closes its connections
    with pytest.raises(ShuttingDown):
        await world.join("b")
    await asyncio.sleep(100)
    assert await world.stored() == ["a"]
    await world.topics.view.stop()


@pytest.mark.parametrize("seed", range(60))
async def test_whatever_consumers_and_the_store_do_no_segment_has_two_holders_and_none_is_forgotten(
    seed: int, simulation: Simulation
) -> None:
    """Consumers join, leave, are cut, are slow and are replaced, the broker restarts, requests fail. `Recorder` checks
    at every assignment that nobody else has the segment."""
    random = simulation.random
    world = await World.make(simulation, segments=random.randrange(1, 7))
    connected: dict[str, tuple[int, Recorder]] = {}

    def slowly(number: int, member: Recorder, segment: int) -> None:
        if random.random() < 0.8:
            asyncio.get_running_loop().call_later(random.random() * 8, world.give_back, number, member, segment)

    for _ in range(150):
        world.store.fault = lambda _: random.choices([*Fault], [20, 1, 1])[0]
        name = random.choice("abcde")
        action = random.random()
        with contextlib.suppress(MetadataUnavailable, MetadataUncertain):
            if action < 0.5:
                member = Recorder(world.readers, name)
                try:
                    number = await world.groups.join(ORDERS, "billing", name, member)
                except BraidError:
                    assert not member.assigned
                    raise
                member.give_back = lambda segment, number=number, member=member: slowly(number, member, segment)  # type: ignore[misc]
                connected[name] = number, member
            elif action < 0.7 and name in connected:
                number, member = connected.pop(name)
                member.end()
                await world.groups.leave(number)
            elif action < 0.9 and name in connected:
                world.lose(*connected.pop(name))
            elif action > 0.98:
                world.store.fault = lambda _: Fault.NONE
                for number, member in connected.values():
                    world.lose(number, member)
                connected.clear()
                await world.restart()
        if random.random() < 0.5:
            await asyncio.sleep(random.random() * 4)
    world.store.fault = lambda _: Fault.NONE
    await asyncio.sleep(60)
    assert await world.stored() == sorted(connected)
    if connected:
        members = world.members()
        assert sorted(members) == sorted(connected)
        segments = sorted(world.topics.get(ORDERS.path).layout.segments)
        assert sorted(segment for held in members.values() for segment in held) == segments
        for name, (_, member) in connected.items():
            assert member.latest() == members[name]
            assert all(world.reads(member, segment) for segment in members[name])
    await world.close()
