"""How long producers wait for a change of the layout: in steps that follow each other, not in milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from braid.broker.segments.succession import MAX_WRITING
from braid.cluster.ownership import owner_step
from braid.metadata import paths
from braid.metadata.store import Condition, Operation, Put
from braid.model.topic import Topic
from braid.model.transition import TransitionStep
from braid.storage.segment import SegmentStorage
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import PATH, Brokers, running_brokers
from tests.kits.waiting import until

ONE_WAY_S = 0.05
"""How long a request takes to get to the metadata store, and its answer to come back."""


class Pause:
    """Notes what is written between the step SEALING and the commit."""

    def __init__(self, brokers: Brokers) -> None:
        self.began_at = self.ended_at = 0.0
        self.transactions: list[list[str]] = []
        """The keys of each."""
        self._clock = brokers.simulation.clock
        brokers.store.observe(self._on_txn)

    @property
    def seconds(self) -> float:
        return self.ended_at - self.began_at

    def _on_txn(self, _conditions: Sequence[Condition], operations: Sequence[Operation]) -> None:
        keys = [operation.key for operation in operations]
        puts = {operation.key: operation.value for operation in operations if isinstance(operation, Put)}
        if paths.layout(PATH) in puts:
            transition = Topic.from_json(puts[paths.layout(PATH)]).transition
            if transition is None and self.began_at:
                self.ended_at = self._clock.monotonic()
            elif transition is not None and transition.step is TransitionStep.SEALING:
                self.began_at = self._clock.monotonic()
        elif self.began_at and not self.ended_at:
            self.transactions.append(keys)


async def paused_by(brokers: Brokers, before: int, change: str, **arguments: Any) -> Pause:
    async with brokers.client() as client:
        await brokers.call("a", "create_topic", topic="orders", segments=before)
        await until(lambda: all(brokers.owner(segment) for segment in range(before)))
        async with client.producer("orders") as producer:
            await producer.send_many([(b"%d" % number, b"value") for number in range(100)])
        for name in brokers.running:
            brokers.store_of(name).delay_s = lambda: ONE_WAY_S
        pause = Pause(brokers)
        await brokers.call("a", change, topic="orders", **arguments)
        return pause


CHANGES = pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 7), (7, 1)], ids=lambda count: str(count))


@CHANGES
async def test_producers_wait_for_three_transactions_however_many_segments_change(
    simulation: Simulation, before: int, after: int
) -> None:
    async with running_brokers(simulation, ("a", "b")) as brokers:
        pause = await paused_by(brokers, before, "repartition_topic", segments=after)
        assert pause.seconds < 3.5 * ONE_WAY_S, "the parents' ends, the children's inheritance, the commit"


@CHANGES
async def test_a_change_of_the_layout_writes_once_for_each_segment_before_producers_go_on(
    simulation: Simulation, before: int, after: int
) -> None:
    async with running_brokers(simulation, ("a", "b")) as brokers:
        pause = await paused_by(brokers, before, "repartition_topic", segments=after)
        of_segments = [keys for keys in pause.transactions if any("/chunks/" in key for key in keys)]
        assert len(of_segments) == before + after
        assert all(len(keys) == 2 and keys[1].endswith("/ownership") for keys in of_segments), (
            "tails are exported afterwards"
        )


async def decisions_of(simulation: Simulation, monkeypatch: pytest.MonkeyPatch, after: int) -> int:
    """Return how often owners look at a segment while one segment becomes so many."""
    count = 0
    decide = owner_step.decide

    def counted(*arguments: Any, **options: Any) -> owner_step.OwnerAction:
        nonlocal count
        count += 1
        return decide(*arguments, **options)

    async with running_brokers(simulation, ("a", "b")) as brokers:
        await brokers.call("a", "create_topic", topic="orders", segments=1)
        await until(lambda: bool(brokers.owner(0)))
        with monkeypatch.context() as patch:
            patch.setattr(owner_step, "decide", counted)
            await brokers.call("a", "repartition_topic", topic="orders", segments=after)
    return count


async def test_owners_look_at_a_segment_a_few_times_however_many_change(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They look at each change of its record, and not at all segments of the topic."""
    for after in (8, 64):
        assert await decisions_of(simulation, monkeypatch, after) < 16 * after


class AtOnce:
    """Counts the calls that are under way."""

    def __init__(self) -> None:
        self.most = 0
        self._now = 0

    def during(self, work: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def counted(*arguments: Any) -> Any:
            self._now += 1
            self.most = max(self.most, self._now)
            try:
                return await work(*arguments)
            finally:
                self._now -= 1

        return counted


async def test_a_broker_does_a_little_at_a_time_for_a_change_of_many_segments(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loop has other clients, and its lease to renew."""
    ends, inheritances = AtOnce(), AtOnce()
    monkeypatch.setattr(SegmentStorage, "end_log", ends.during(SegmentStorage.end_log))
    monkeypatch.setattr(SegmentStorage, "inherit", inheritances.during(SegmentStorage.inherit))
    async with running_brokers(simulation, ("a",)) as brokers:
        await brokers.call("a", "create_topic", topic="orders", segments=1)
        for segments in (100, 1):
            await brokers.call("a", "repartition_topic", topic="orders", segments=segments)
    assert ends.most == inheritances.most == MAX_WRITING


async def test_a_change_waits_no_longer_than_needed_for_the_cursors_of_the_children(simulation: Simulation) -> None:
    async with running_brokers(simulation, ("a", "b")) as brokers, brokers.client() as client:
        await brokers.call("a", "create_topic", topic="orders", segments=1)
        await until(lambda: bool(brokers.owner(0)))
        await client.admin.create_subscription("orders", "billing")
        began = simulation.clock.monotonic()
        await brokers.call("a", "repartition_topic", topic="orders", segments=4)
        assert simulation.clock.monotonic() - began < 0.3
