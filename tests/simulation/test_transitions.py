"""Changes of a topic's layout on whole brokers, in virtual time (decision 34)."""

from __future__ import annotations

import pytest

from braid.model.errors import TransitionRefused, TransitionRunning
from braid.model.hashing import key_hash
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import PATH, Brokers, running_brokers
from tests.kits.waiting import until


async def a_topic(brokers: Brokers, segments: int = 1) -> None:
    await brokers.call("a", "create_topic", topic="orders", segments=segments)
    await until(lambda: all(brokers.owner(segment) for segment in range(segments)))


def active(brokers: Brokers) -> dict[int, str]:
    return {segment.segment_id: str(segment.hash_range) for segment in brokers.any().topics.get(PATH).layout.active}


@pytest.mark.parametrize("shared", [True, False])
async def test_a_split_replaces_a_segment_by_its_halves(simulation: Simulation, shared: bool) -> None:
    async with running_brokers(simulation, shared=shared) as brokers, brokers.client() as client:
        await a_topic(brokers)
        await client.admin.create_subscription("orders", "billing")
        async with client.producer("orders") as producer:
            for number in range(20):
                await producer.send(b"%d" % number, key=b"key-%d" % (number % 5))
        done = await brokers.call("b", "split_segment", topic="orders", segment=0)
        assert (done["parents"], done["children"], done["epoch"]) == ([0], [1, 2], 1)
        assert active(brokers) == {1: "0000-7fff", 2: "8000-ffff"}
        async with brokers.client() as later, later.producer("orders") as producer:
            for number in range(20, 40):
                key = b"key-%d" % (number % 5)
                sent = await producer.send(b"%d" % number, key=key)
                assert sent.segment == (1 if key_hash(key) < 0x8000 else 2)


async def test_a_merge_joins_neighbours_and_a_repartition_changes_the_number(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers:
        await a_topic(brokers, 4)
        done = await brokers.call("c", "merge_segments", topic="orders", segments=[2, 1])
        assert (done["parents"], done["children"]) == ([1, 2], [4])
        assert active(brokers) == {0: "0000-3fff", 4: "4000-bfff", 3: "c000-ffff"}
        await brokers.call("a", "repartition_topic", topic="orders", segments=2)
        assert active(brokers) == {5: "0000-7fff", 6: "8000-ffff"}
        with pytest.raises(TransitionRefused, match="has 2 segments of equal size already"):
            await brokers.call("a", "repartition_topic", topic="orders", segments=2)


async def test_one_transition_at_a_time(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers:
        await a_topic(brokers, 2)
        transitions = brokers.running["a"].group_host.transitions
        from braid.model.names import TopicName
        from braid.model.transition import plan_split

        await transitions.begin(TopicName.parse("orders"), lambda layout: plan_split(layout, 0))
        with pytest.raises(TransitionRunning, match="segments 0 are being replaced"):
            await brokers.call("b", "split_segment", topic="orders", segment=1)
