"""Calls that take back a change of layout, or delete a segment, and come twice: the answer to a try was lost, and the
layout has gone on before the repeat arrives."""

from __future__ import annotations

import asyncio

import pytest

from braid.broker.layouts.transitions import Transitions
from braid.metadata.memory import Fault
from braid.model.errors import TransitionRefused
from braid.model.names import TopicName
from braid.model.topic import Topic
from braid.model.transition import Transition, TransitionStep, plan_split
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import PATH, Brokers, running_brokers
from tests.kits.waiting import until

NAME = TopicName.parse("orders")
LATE_S = 2.0
"""How long a broker takes for each way to the metadata store and back."""


def slow_down(brokers: Brokers, delay_s: float = LATE_S) -> None:
    for name in brokers.running:
        brokers.store_of(name).delay_s = lambda: delay_s


def lose_one_answer(brokers: Brokers, name: str) -> list[str]:
    """Lose the answer to a broker's next transaction. Returns the list into which its name goes."""
    lost: list[str] = []

    def fault(request: str) -> Fault:
        if lost or not request.startswith("txn"):
            return Fault.NONE
        lost.append(request)
        return Fault.UNCERTAIN

    brokers.store_of(name).fault = fault
    return lost


async def began(brokers: Brokers) -> Transition:
    """Begin a split that no driver goes on with."""
    begun = await brokers.any().group_host.transitions.begin(NAME, lambda layout: plan_split(layout, 0))
    assert isinstance(begun, Transition)
    await until(lambda: all(broker.topics.get(PATH).transition == begun for broker in brokers.running.values()))
    return begun


async def a_topic(brokers: Brokers) -> None:
    await brokers.call("a", "create_topic", topic="orders")
    await until(lambda: brokers.owner(0))


def lose_links(brokers: Brokers) -> None:
    for name in brokers.running:
        brokers.network.reset(name, "client")


def in_flight(brokers: Brokers) -> Transition | None:
    return brokers.any().topics.get(PATH).transition


@pytest.fixture
def undriven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transitions, "drive_later", lambda _self, _path: None)


@pytest.mark.usefixtures("undriven")
async def test_an_abort_that_is_repeated_when_the_parents_are_being_sealed_is_refused(simulation: Simulation) -> None:
    """The change goes on: the caller must not take the layout for unchanged."""
    async with running_brokers(simulation, ("a", "b")) as brokers, brokers.client() as client:
        await a_topic(brokers)
        begun = await began(brokers)
        shown = await client.admin.layout("orders")
        assert shown["transition"]["id"] == begun.id
        slow_down(brokers)
        aborting = asyncio.ensure_future(client.admin.abort_transition("orders"))
        await asyncio.sleep(LATE_S / 2)
        slow_down(brokers, 0.0)
        assert await brokers.any().topics.advance(NAME, begun.id, Topic.sealing)
        lose_links(brokers)
        with pytest.raises(TransitionRefused, match="cannot be aborted any more"):
            await aborting
        change = in_flight(brokers)
        assert change is not None
        assert change.step is TransitionStep.SEALING


@pytest.mark.usefixtures("undriven")
async def test_an_abort_that_is_repeated_takes_no_later_change_back(simulation: Simulation) -> None:
    async with running_brokers(simulation, ("a", "b")) as brokers, brokers.client() as client:
        await a_topic(brokers)
        await began(brokers)
        slow_down(brokers)
        aborting = asyncio.ensure_future(client.admin.abort_transition("orders"))
        await until(lambda: in_flight(brokers) is None)
        assert not aborting.done()
        lose_links(brokers)
        slow_down(brokers, 0.0)
        second = await began(brokers)
        await aborting
        assert in_flight(brokers) == second


@pytest.mark.usefixtures("undriven")
async def test_an_abort_whose_write_was_not_answered_finds_that_it_has_succeeded(simulation: Simulation) -> None:
    async with running_brokers(simulation, ("a", "b")) as brokers:
        await a_topic(brokers)
        await began(brokers)
        lost = lose_one_answer(brokers, "b")
        await brokers.call("b", "abort_transition", topic="orders")
        assert lost
        assert in_flight(brokers) is None
        with pytest.raises(TransitionRefused, match="there is nothing to abort"):
            await brokers.call("b", "abort_transition", topic="orders")


async def test_an_abort_of_a_change_that_has_happened_is_refused(simulation: Simulation) -> None:
    async with running_brokers(simulation, ("a", "b")) as brokers, brokers.client() as client:
        await a_topic(brokers)
        done = await client.admin.split("orders", 0)
        with pytest.raises(TransitionRefused, match="has been changed already"):
            await brokers.call("b", "abort_transition", topic="orders", transition=7, children=done["children"])
        with pytest.raises(TransitionRefused, match="there is nothing to abort"):
            await client.admin.abort_transition("orders")


async def test_a_deletion_of_a_segment_whose_write_was_not_answered_has_succeeded(simulation: Simulation) -> None:
    async with running_brokers(simulation, ("a", "b")) as brokers:
        await a_topic(brokers)
        await brokers.call("a", "split_segment", topic="orders", segment=0)
        await until(lambda: all(broker.topics.committed.get(PATH) is None for broker in brokers.running.values()))
        lost = lose_one_answer(brokers, "b")
        await brokers.call("b", "delete_segment", topic="orders", descriptor="0000-ffff-0")
        assert lost
        assert 0 not in brokers.any().topics.get(PATH).layout.segments
