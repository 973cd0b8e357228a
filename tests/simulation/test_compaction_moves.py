"""Chunks are replaced at their segment's owner, through any broker, also while it moves and brokers die (I1, I3)."""

from __future__ import annotations

import asyncio

import pytest

from braid.broker.auth import ANONYMOUS
from braid.model.errors import ConditionFailed, InvalidArgument, SegmentNotFound
from braid.storage.history.compaction import plan_compaction, store_joined
from braid.storage.history.manifest import read_segment_manifest, segment_folder
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import PATH, Brokers, running_brokers, values
from tests.kits.waiting import until

DESCRIPTOR = "0000-ffff-0"
FOLDER = segment_folder(PATH, DESCRIPTOR)
TARGET = 1 << 20


async def moved_about(brokers: Brokers, moves: int = 4) -> list[bytes]:
    """A segment that every move cut a chunk of; ends at `b`. Returns what was sent."""
    sent: list[bytes] = []
    async with brokers.client() as client:
        await client.admin.create_topic("orders")
        async with client.producer("orders") as producer:
            for number in range(moves):
                for _ in range(10):
                    sent.append(b"value %d" % len(sent))
                    await producer.send(sent[-1], key=b"key")
                to = "b" if number % 2 == moves % 2 or number == moves - 1 else "c"
                await client.admin.move("orders", segment=0, to=to)
    await until(lambda: brokers.owner(0) == "b")
    return sent


async def joined(brokers: Brokers) -> tuple[list[str], str]:
    """The objects of the chunks that the manifest lists, and of the one that they were joined to."""
    assert brokers.objects is not None
    manifest = await read_segment_manifest(brokers.objects, PATH, DESCRIPTOR)
    assert manifest is not None
    [run] = plan_compaction(manifest.chunks, TARGET)
    return [chunk.object for chunk in run], await store_joined(brokers.objects, FOLDER, run)


async def read_all(brokers: Brokers, count: int) -> list[bytes]:
    async with brokers.client() as client, client.checkpoint_consumer("orders", start="earliest") as consumer:
        found: list[bytes] = []
        while len(found) < count:
            batch = await consumer.receive_batch()
            assert batch is not None
            found += values(batch.messages())
        return found


async def listed(brokers: Brokers) -> list[str]:
    assert brokers.objects is not None
    manifest = await read_segment_manifest(brokers.objects, PATH, DESCRIPTOR)
    assert manifest is not None
    return [chunk.object for chunk in manifest.chunks]


async def test_any_broker_takes_the_call_and_its_owner_swaps(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers:
        sent = await moved_about(brokers)
        old, new = await joined(brokers)
        assert len(old) > 2
        async with brokers.client("a") as client:
            answer = await client.admin.replace_chunks("orders", 0, old, new)
            again = await client.admin.replace_chunks("orders", 0, old, new)
        assert answer == again == {"topic": "topic://public/default/orders", "segment": 0, "chunks": 1}
        assert await listed(brokers) == [new]
        assert await read_all(brokers, len(sent)) == sent


async def test_a_segment_that_moves_before_the_swap_is_found_at_its_new_owner(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers:
        sent = await moved_about(brokers)
        old, new = await joined(brokers)
        moving = asyncio.ensure_future(brokers.move(0, "c"))
        await brokers.running["a"].front_door.calls.call(
            "replace_chunks", {"topic": "orders", "segment": 0, "old": old, "new": new}, ANONYMOUS
        )
        await moving
        assert (await listed(brokers))[0] == new
        assert await read_all(brokers, len(sent)) == sent


@pytest.mark.parametrize("dies_after_s", [0.0, 0.001, 0.002, 0.004, 0.01, 0.05])
async def test_an_owner_that_dies_around_the_swap_leaves_one_history_or_the_other(
    dies_after_s: float, simulation: Simulation
) -> None:
    async with running_brokers(simulation) as brokers:
        sent = await moved_about(brokers)
        old, new = await joined(brokers)
        async with brokers.client("a", "c", timeout=120) as client:
            swapping = asyncio.ensure_future(client.admin.replace_chunks("orders", 0, old, new))
            await asyncio.sleep(dies_after_s)
            brokers.kill("b")
            await asyncio.sleep(1)
            await brokers.start("b")
            await swapping  # The client tries again until the owner is back.
        assert await listed(brokers) == [new]
        assert await read_all(brokers, len(sent)) == sent


async def test_what_was_compacted_goes_on_after_the_owner_has_died_and_come_back(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers:
        sent = await moved_about(brokers)
        old, new = await joined(brokers)
        await brokers.call("c", "replace_chunks", topic="orders", segment=0, old=old, new=new)
        brokers.kill("b")
        await brokers.start("b")
        await until(lambda: brokers.owner(0) == "b")
        async with brokers.client() as client, client.producer("orders") as producer:
            sent.append(b"one more")
            await producer.send(sent[-1], key=b"key")
        await brokers.move(0, "a")
        assert (await listed(brokers))[0] == new
        assert await read_all(brokers, len(sent)) == sent


async def test_a_swap_that_is_not_possible_is_refused_and_changes_nothing(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers:
        sent = await moved_about(brokers)
        old, new = await joined(brokers)
        for wrong, error in (
            ({"segment": 7, "old": old, "new": new}, SegmentNotFound),
            ({"segment": 0, "old": old[1:], "new": new}, InvalidArgument),
            ({"segment": 0, "old": ["x.chunk", *old], "new": new}, ConditionFailed),
        ):
            with pytest.raises(error):
                await brokers.call("a", "replace_chunks", topic="orders", **wrong)
        assert await listed(brokers) == old
        assert await read_all(brokers, len(sent)) == sent
