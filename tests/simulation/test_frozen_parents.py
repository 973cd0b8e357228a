"""A split whose parent's owner stands still, as with SIGSTOP, or whose parent cannot end at the moment. A frozen owner
breaks no connection, so only heartbeats and the lease show it. Clients wait for a bounded time, the change says what it
waits for, and everything goes on afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from braid.client.consuming.stream import StreamConsumer
from braid.model.errors import NotEnoughReplicas, TimedOut
from braid.model.transition import TransitionStep
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import PATH, Brokers, running_brokers
from tests.kits.waiting import until

LEASE_S = 10.0
PATIENCE_S = 25.0
"""How long the producer waits for an answer."""
FROZEN_S = 60.0


async def when_sealing(brokers: Brokers, owner: str, act: Callable[[], None]) -> None:
    """Act when the intent says that the parents end, and before the owner hears of it."""
    done = asyncio.get_running_loop().create_future()
    topics = brokers.running[owner].topics

    def look(path: str) -> None:
        topic = topics.find(path)
        if topic is not None and topic.transition is not None and topic.transition.step is TransitionStep.SEALING:
            topics.on_change.remove(look)
            act()
            done.set_result(None)

    topics.on_change.insert(0, look)
    await done


async def values(consumer: StreamConsumer, count: int) -> list[bytes]:
    messages = [await consumer.receive(timeout=60) for _ in range(count)]
    for message in messages:
        assert message is not None
        await consumer.ack(message)
    return [message.value for message in messages if message is not None]


async def waits_for(brokers: Brokers, asked: str) -> tuple[str, ...]:
    return await brokers.running[asked].group_host.transitions.waits_for(PATH)


@pytest.mark.parametrize("sealing", [False, True], ids=["before-the-seal", "during-the-seal"])
async def test_a_split_waits_for_a_frozen_owner_visibly_and_clients_wait_for_a_bounded_time(
    simulation: Simulation, sealing: bool
) -> None:
    loop = asyncio.get_running_loop()
    async with running_brokers(simulation) as brokers, brokers.client(timeout=60) as client:
        await client.admin.create_topic("orders")
        await until(lambda: bool(brokers.owner(0)))
        owner = brokers.owner(0)
        other = next(name for name in brokers.running if name != owner)
        async with (
            client.stream_consumer("orders", "billing", name="worker") as consumer,
            client.producer("orders", timeout=PATIENCE_S) as producer,
        ):
            await producer.send_many([(b"key", b"%d" % number) for number in range(5)])
            assert await values(consumer, 5) == [b"%d" % number for number in range(5)]
            if not sealing:
                brokers.freeze(owner)
            splitting = asyncio.create_task(
                brokers.call(other, "split_segment", topic="orders", segment=0, timeout=FROZEN_S * 2)
            )
            if sealing:
                await when_sealing(brokers, owner, lambda: brokers.freeze(owner))
            began = loop.time()
            sending = asyncio.create_task(producer.send(b"in doubt", key=b"key"))
            await until(lambda: not brokers.running[other].cluster.members.is_live(owner))
            assert loop.time() - began < LEASE_S + 5

            async def says_why() -> bool:
                return await waits_for(brokers, other) == (f"the owner of segment 0, {owner}, is down",)

            await until(says_why, within_s=10)
            shown = await brokers.call(other, "get_layout", topic="orders")
            assert shown["transition"]["waitsFor"] == [*await waits_for(brokers, other)]
            assert shown["transition"]["step"] == ("SEALING" if sealing else "CREATING")
            with pytest.raises(TimedOut):
                await sending
            assert loop.time() - began < PATIENCE_S + 5
            assert await consumer.receive(timeout=1) is None
            assert not splitting.done()
            await asyncio.sleep(began + FROZEN_S - loop.time())
            brokers.thaw(owner)
            done = await splitting
            assert done["children"] == [1, 2]
            await producer.send(b"after", key=b"key")
            rest = await values(consumer, 1)
            if rest != [b"after"]:
                rest += await values(consumer, 1)
            assert rest in ([b"after"], [b"in doubt", b"after"]), "stored once, or not at all, and in order"
            assert await consumer.receive(timeout=5) is None
        assert brokers.any().topics.get(PATH).transition is None


async def test_a_split_whose_parent_cannot_end_says_why_whichever_broker_is_asked(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers, brokers.client(timeout=60) as client:
        await client.admin.create_topic("orders")
        await until(lambda: bool(brokers.owner(0)))
        owner = brokers.owner(0)
        log = brokers.running[owner].segments.get(PATH, 0).storage.log
        splitting = asyncio.create_task(brokers.call(owner, "split_segment", topic="orders", segment=0))
        await when_sealing(brokers, owner, lambda: log.hold(NotEnoughReplicas("a replica is down")))
        for asked in brokers.running:
            assert await waits_for(brokers, asked) == (
                "the log of segment 0 is being ended",
                "the log of segment 0 cannot end now: a replica is down",
            )
        log.resume()
        assert (await splitting)["children"] == [1, 2]
