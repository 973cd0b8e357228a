"""Moving, recovering, draining and balancing by calls: on a memory store, with owners that only keep their records."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from braid.broker.admin.cluster import ActivateBroker, Balance, DrainBroker
from braid.metadata import paths
from braid.metadata.store import Put
from braid.model.cluster import Registration
from braid.model.errors import (
    BraidError,
    BrokerNotActive,
    BrokerNotFound,
    InvalidArgument,
    MoveRefused,
    NotServing,
    SegmentNotFound,
    ShuttingDown,
    TimedOut,
    TopicNotFound,
)
from braid.model.ids import Epoch, Offset
from braid.model.load import LoadReport, SegmentLoad
from braid.model.ownership import OwnershipState
from braid.storage.history.catalog import Frontier
from braid.testing.sim.loop import Simulation
from tests.kits.leader import LEASE_TTL_S, ORDERS, record, unable
from tests.kits.record_cluster import started
from tests.kits.waiting import until


async def test_a_move_answers_when_the_segments_are_served_where_they_were_to_go(simulation: Simulation) -> None:
    cluster = await started(simulation)
    names = await cluster.serve(2)
    found = await cluster.move(to="b")
    assert [(each["segment"], each["from"], each["to"], each["epoch"], each["moved"]) for each in found] == [
        (0, "a", "b", 4, True),
        (1, "a", "b", 4, True),
    ]
    assert all(0 < each["seconds"] < 1 for each in found)
    assert [cluster.find(name).state for name in names] == [OwnershipState.SERVING] * 2


async def test_one_segment_moves_alone_and_to_whoever_has_least(simulation: Simulation) -> None:
    cluster = await started(simulation)
    names = await cluster.serve(3)
    await cluster.move(segment=0, to="b")
    (found,) = await cluster.move(segment=1)
    assert found["to"] == "c"
    assert [cluster.find(name).owner for name in names] == ["b", "c", "a"]


async def test_segments_that_go_wherever_it_fits_are_spread(simulation: Simulation) -> None:
    cluster = await started(simulation)
    await cluster.serve(6)
    assert sorted(each["to"] for each in await cluster.move()) == ["b"] * 3 + ["c"] * 3


async def test_what_is_there_already_is_said_to_be(simulation: Simulation) -> None:
    cluster = await started(simulation)
    (name,) = await cluster.serve(1, refusal="a move that was wanted before failed")
    (found,) = await cluster.move(to="a")
    assert (found["moved"], found["seconds"], found["epoch"]) == (False, 0.0, 3)
    assert cluster.find(name).move is None


@pytest.mark.parametrize(("to", "error"), [("d", BrokerNotFound), ("c", BrokerNotActive)])
async def test_a_target_that_is_unknown_or_drained_is_refused_with_the_names_of_those_that_are_there(
    to: str, error: type[BraidError], simulation: Simulation
) -> None:
    cluster = await started(simulation)
    (name,) = await cluster.serve(1)
    await cluster.call(DrainBroker(broker="c"))
    with pytest.raises(error, match=r"broker [cd] .*active brokers are: a, b"):
        await cluster.move(to=to)
    assert cluster.find(name).move is None


async def test_a_segment_that_moves_elsewhere_is_refused_and_nothing_is_changed(simulation: Simulation) -> None:
    cluster = await started(simulation)
    names = await cluster.serve(2)
    cluster.owners["a"].hands_over = False
    await cluster.candidates["a"].put(names[1], record("SERVING", "a", 3, to="c"))
    with pytest.raises(MoveRefused, match="is moving to c already"):
        await cluster.move(to="b")
    assert cluster.find(names[0]) == record("SERVING", "a", 3)


async def test_two_who_ask_for_the_same_move_wait_for_the_same(simulation: Simulation) -> None:
    cluster = await started(simulation)
    await cluster.serve(1)
    first, second, third = await asyncio.gather(cluster.move(to="b"), cluster.move(to="b"), cluster.move(segment=0))
    assert [found[0]["epoch"] for found in (first, second, third)] == [4, 4, 4]


async def test_a_move_that_the_owner_gives_up_says_why(simulation: Simulation) -> None:
    cluster = await started(simulation)
    (name,) = await cluster.serve(1)
    cluster.owners["a"].refuses = "there is no room"
    with pytest.raises(MoveRefused, match="did not move to b: there is no room"):
        await cluster.move(to="b")
    assert cluster.find(name).owner == "a"


async def test_a_move_to_a_broker_that_dies_says_where_the_segment_went(simulation: Simulation) -> None:
    cluster = await started(simulation)
    await cluster.serve(1)
    cluster.owners["b"].opens = False
    moving = asyncio.create_task(cluster.move(to="b"))
    await asyncio.sleep(1)
    cluster.kill("b")
    with pytest.raises(MoveRefused, match=r"did not get to b.*[ac] serves it"):
        await moving


async def test_a_move_that_takes_too_long_goes_on(simulation: Simulation) -> None:
    cluster = await started(simulation)
    (name,) = await cluster.serve(1)
    cluster.owners["b"].opens = False
    with pytest.raises(TimedOut, match="0 of 1 segments have arrived within 3 s"):
        await cluster.move(to="b", timeout=3)
    cluster.owners["b"].opens = True
    cluster.owners["b"]._changed.set()
    await until(lambda: cluster.find(name).state is OwnershipState.SERVING)


async def test_a_broker_that_stops_lets_nobody_wait(simulation: Simulation) -> None:
    cluster = await started(simulation)
    await cluster.serve(1)
    cluster.owners["b"].opens = False
    moving = asyncio.create_task(cluster.move(to="b"))
    await asyncio.sleep(1)
    cluster.candidates["a"].view.end_waits()
    with pytest.raises(ShuttingDown):
        await moving


async def test_without_another_active_broker_nothing_can_move(simulation: Simulation) -> None:
    cluster = await started(simulation)
    await cluster.serve(1)
    for broker in ("b", "c"):
        await cluster.call(DrainBroker(broker=broker))
    with pytest.raises(MoveRefused, match="no other broker is active"):
        await cluster.move()


async def test_a_segment_whose_owner_is_gone_cannot_be_moved_but_recovered(simulation: Simulation) -> None:
    cluster = await started(simulation)
    (name,) = await cluster.serve(1, owner="b")
    await cluster.gone("b")
    with pytest.raises(MoveRefused, match=r"its owner b is down.*recover"):
        await cluster.move(to="c")
    frontier = Frontier(Epoch(3), "b", True, Epoch(0), Offset(17))
    key = paths.current_chunk(ORDERS.path, name.descriptor)
    await cluster.store.txn([], [Put(key, msgspec.json.encode(frontier))])
    with pytest.raises(InvalidArgument, match=r"nothing was changed. If it were: .*chunks reach offset 17"):
        await cluster.recover(to="c")
    assert cluster.find(name) == record("SERVING", "b", 3)
    (found,) = await cluster.recover(to="c", accept_loss=True)
    assert (found["from"], found["to"], found["epoch"]) == ("b", "c", 4)
    assert "chunks reach offset 17" in found["loss"]


async def test_what_has_a_live_owner_is_not_recovered(simulation: Simulation) -> None:
    cluster = await started(simulation)
    (name,) = await cluster.serve(1, owner="b")
    with pytest.raises(MoveRefused, match=r"nothing of topic .* is to be recovered.*owners: b.*move it"):
        await cluster.recover(to="c", accept_loss=True)
    assert cluster.find(name) == record("SERVING", "b", 3)


async def test_what_has_an_owner_that_is_back_before_the_call_has_heard_of_it_is_not_recovered(
    simulation: Simulation,
) -> None:
    cluster = await started(simulation)
    (name,) = await cluster.serve(1, owner="b")
    await cluster.gone("b")
    recovering = asyncio.create_task(cluster.recover(to="c", accept_loss=True))
    back = Registration(address="b:6660", admin="").to_json()
    await cluster.store.txn([], [Put(paths.broker("b"), back)])
    with pytest.raises(MoveRefused, match="or b is back; look again"):
        await recovering
    assert cluster.find(name) == record("SERVING", "b", 3)


async def test_whoever_recovers_a_segment_whose_history_is_on_one_disk_is_told_that_all_of_it_is_lost(
    simulation: Simulation,
) -> None:
    cluster = await started(simulation)
    (name,) = await cluster.serve(1, owner="b", holders=("b",))
    await cluster.gone("b")
    with pytest.raises(InvalidArgument, match="all of its history lies on b and is lost"):
        await cluster.recover(to="c", accept_loss=False)
    assert cluster.find(name) == record("SERVING", "b", 3, holders=("b",))
    found = await cluster.recover(to="c", accept_loss=True)
    assert "all of its history lies on b" in found[0]["loss"]
    recovered = cluster.find(name)
    assert recovered is not None
    assert (recovered.owner, recovered.holders) == ("c", ())


async def test_a_segment_that_its_owner_cannot_open_is_recovered_although_the_owner_is_there(
    simulation: Simulation,
) -> None:
    cluster = await started(simulation)
    (name,) = await cluster.serve(1)
    lost = record("ASSIGNED", "b", 4, failures=unable("b"))
    cluster.owners["b"].cannot_open = "b has no files"
    await cluster.candidates["a"].put(name, lost)
    with pytest.raises(MoveRefused, match=r"its owner b cannot open it: b has no files.*recover the segment"):
        await cluster.move(to="c")
    with pytest.raises(InvalidArgument, match="what b confirmed from there on is lost"):
        await cluster.recover()
    assert cluster.find(name) == lost
    (found,) = await cluster.recover(accept_loss=True)
    assert (found["from"], found["to"], found["epoch"]) == ("b", "a", 5)
    assert cluster.find(name).failures == ()


async def test_a_segment_that_its_owner_cannot_open_moves_if_another_broker_can_read_all_of_it(
    simulation: Simulation,
) -> None:
    """The leader has tried every broker; an operator has mended one."""
    cluster = await started(simulation)
    (name,) = await cluster.serve(1)
    cluster.owners["b"].cannot_open = "b has no files"
    failed = record("ASSIGNED", "b", 4, clean=True, failures=unable("a", "b", "c"))
    await cluster.candidates["a"].put(name, failed)
    (found,) = await cluster.move(to="c")
    assert (found["from"], found["to"], found["epoch"]) == ("b", "c", 5)


async def test_a_segment_moves_only_to_a_broker_that_holds_its_history(simulation: Simulation) -> None:
    cluster = await started(simulation)
    (name,) = await cluster.serve(1)
    cluster.owners["b"].cannot_open = "b has no files"
    failed = record("ASSIGNED", "b", 4, clean=True, holders=("b", "d"), failures=unable("b"))
    await cluster.candidates["a"].put(name, failed)
    with pytest.raises(MoveRefused, match="only b and d hold its history"):
        await cluster.move(to="c")
    with pytest.raises(MoveRefused, match="no other broker that is active can have it"):
        await cluster.move()
    assert cluster.find(name) == failed


async def test_a_segment_whose_holders_are_all_gone_is_recovered(simulation: Simulation) -> None:
    cluster = await started(simulation)
    (name,) = await cluster.serve(1)
    cluster.owners["b"].opens = False
    await cluster.candidates["a"].put(name, record("SEALED", "b", 4, to="c", holders=("b", "c")))
    await cluster.gone("b")
    with pytest.raises(MoveRefused, match="nothing of topic"):
        await cluster.recover(accept_loss=True, segment=0)
    await cluster.candidates["a"].put(name, record("SEALED", "b", 6, to="c", holders=("b", "c")))
    await cluster.gone("c")
    with pytest.raises(InvalidArgument, match="all of its history lies on b and c and is lost"):
        await cluster.recover()
    (found,) = await cluster.recover(accept_loss=True)
    assert found["to"] == "a"


async def test_an_accepted_loss_is_not_carried_out_if_the_lost_broker_is_back_and_the_next_one_has_died(
    simulation: Simulation,
) -> None:
    cluster = await started(simulation)
    (name,) = await cluster.serve(1, owner="b")
    await cluster.gone("b")
    cluster.owners["c"].opens = cluster.owners["a"].opens = False
    recovering = asyncio.create_task(cluster.recover(to="c", accept_loss=True))
    await until(lambda: cluster.find(name).owner == "c")
    await cluster.gone("c")
    await until(lambda: cluster.find(name).owner == "a")
    await cluster.start("b")
    with pytest.raises(MoveRefused, match=r"did not get to c.*b serves it"):
        await recovering
    assert (cluster.find(name).owner, cluster.find(name).state) == ("b", OwnershipState.SERVING)


async def test_a_move_that_takes_too_long_says_what_it_waits_for(simulation: Simulation) -> None:
    cluster = await started(simulation)
    await cluster.serve(1)
    cluster.owners["a"].hands_over = False
    with pytest.raises(TimedOut, match="segment 0: broker a is preparing to hand it over"):
        await cluster.move(to="b", timeout=3)
    cluster.owners["b"].opens = False
    cluster.owners["a"].hands_over = True
    cluster.owners["a"]._changed.set()
    with pytest.raises(TimedOut, match="segment 0: broker b is opening it"):
        await cluster.move(to="b", timeout=3)


async def test_what_is_not_there_cannot_move(simulation: Simulation) -> None:
    cluster = await started(simulation)
    with pytest.raises(TopicNotFound):
        await cluster.move()
    await cluster.serve(1)
    with pytest.raises(SegmentNotFound, match="no segment 7"):
        await cluster.move(segment=7)


async def test_what_is_being_opened_can_move_in_a_moment(simulation: Simulation) -> None:
    cluster = await started(simulation)
    (name,) = await cluster.serve(1)
    cluster.owners["b"].opens = False
    await cluster.candidates["a"].put(name, record("ASSIGNED", "b", 5, clean=True))
    with pytest.raises(NotServing, match="try again"):
        await cluster.move(to="c")
    joined = asyncio.create_task(cluster.move(to="b"))
    await asyncio.sleep(1)
    cluster.owners["b"].opens = True
    cluster.owners["b"]._changed.set()
    (found,) = await joined
    assert (found["to"], found["epoch"]) == ("b", 5)


async def test_brokers_are_listed_with_their_states_and_what_they_own(simulation: Simulation) -> None:
    cluster = await started(simulation)
    await cluster.serve(3, owner="b")
    await cluster.move(segment=0, to="c")
    await until(lambda: cluster.candidates["a"].leader.leading)
    found = await cluster.brokers()
    assert [(each["id"], each["state"], each["segments"], each["leader"]) for each in found.values()] == [
        ("a", "active", 0, True),
        ("b", "active", 2, False),
        ("c", "active", 1, False),
    ]
    assert found["a"]["address"] == "a:6660"
    await cluster.gone("b")
    gone = (await cluster.brokers())["b"]
    assert (gone["state"], gone["segments"], gone["address"]) == ("down", 2, "")


async def test_a_broker_is_drained_and_comes_back_when_it_is_activated(simulation: Simulation) -> None:
    cluster = await started(simulation)
    names = await cluster.serve(20, owner="b")
    asked = await cluster.call(DrainBroker(broker="b"))
    assert (asked["state"], asked["segments"]) == ("draining", 20)
    await until(lambda: not [name for name in names if cluster.find(name).owner == "b"])
    drained = (await cluster.brokers())["b"]
    assert (drained["state"], drained["segments"]) == ("drained", 0)
    # It stays so, also when it comes back from its maintenance.
    cluster.kill("b")
    await asyncio.sleep(LEASE_TTL_S + 1)
    await cluster.start("b")
    assert (await cluster.brokers())["b"]["state"] == "drained"
    assert (await cluster.call(ActivateBroker(broker="b")))["state"] == "active"
    (found,) = await cluster.move(segment=0, to="b")
    assert found["to"] == "b"


async def test_a_broker_that_cannot_be_drained_says_which_segments_stay_and_why(simulation: Simulation) -> None:
    cluster = await started(simulation)
    names = await cluster.serve(2, owner="b")
    cluster.owners["b"].refuses = "there is no room"
    cluster.owners["b"].cannot_open = "b has no files"
    await cluster.candidates["a"].put(names[1], record("ASSIGNED", "b", 4, failures=unable("b")))
    assert (await cluster.brokers())["b"]["obstacles"] == []
    await cluster.call(DrainBroker(broker="b"))
    await until(lambda: cluster.find(names[0]).refusal)
    found = (await cluster.brokers())["b"]
    assert (found["state"], found["segments"]) == ("draining", 2)
    assert found["obstacles"] == [
        "segment 0 of public/default/orders: there is no room",
        "segment 1 of public/default/orders: broker b cannot open it: b has no files",
    ]


async def test_a_broker_that_nobody_knows_can_be_neither_drained_nor_activated(simulation: Simulation) -> None:
    cluster = await started(simulation)
    for call in (DrainBroker(broker="d"), ActivateBroker(broker="d")):
        with pytest.raises(BrokerNotFound, match="there is no broker d; the brokers are a, b, c"):
            await cluster.call(call)


async def test_balancing_by_hand_says_what_it_would_do_or_why_nothing(simulation: Simulation) -> None:
    cluster = await started(simulation)
    (name,) = await cluster.serve(1)
    found = await cluster.call(Balance(dry_run=True))
    assert (found["dryRun"], found["moves"], found["begun"]) == (True, [], 0)
    assert found["notes"][0]["remark"] == "stale"
    assert cluster.find(name).move is None


async def test_balancing_by_hand_begins_what_it_shows(simulation: Simulation) -> None:
    cluster = await started(simulation)
    names = await cluster.serve(4)
    now = cluster.simulation.clock.now_us()
    busy = tuple(SegmentLoad(topic_path=ORDERS.path, segment_id=name.id, bytes_in_per_s=5 << 20) for name in names)
    for id_, segments in {"a": busy, "b": (), "c": ()}.items():
        report = LoadReport(at=now, bytes_in_per_s=5 * len(segments) << 20, segments=len(segments), busiest=segments)
        await cluster.store.txn([], [Put(paths.load(id_), report.to_json())])
    await until(lambda: len(cluster.candidates["a"].members.loads) == 3)
    shown = await cluster.call(Balance(dry_run=True))
    assert [each["from"] for each in shown["moves"]] == ["a", "a"]
    assert shown["spreadAfter"] < shown["spreadBefore"]
    begun = await cluster.call(Balance())
    assert (begun["moves"], begun["begun"]) == (shown["moves"], 2)
    await until(lambda: sorted(cluster.find(name).owner for name in names) == ["a", "a", "b", "c"])
