"""A move, with a crash of each broker that has a part in it before each of its requests to the metadata store: so after
each step that others can see. Whatever the moment, the segment is served again, offsets go on without a gap or a
repeat, what was confirmed is there once, and the consumer goes on behind what it took (I1, I2, I4, I10)."""

from __future__ import annotations

import asyncio

import pytest

from braid.broker.broker import Broker
from braid.client.producing.producer import Producer
from braid.metadata import paths
from braid.metadata.store import Compare, Put
from braid.model.errors import BraidError
from braid.model.names import SegmentName, TopicName
from braid.model.ownership import Move, Ownership, OwnershipState
from braid.testing.sim.loop import Simulation, run_simulation
from tests.kits.brokers import PATH, SHARED, Brokers
from tests.kits.crash_point import CrashPoint
from tests.kits.waiting import until

BEFORE = 22
BEHIND = 6
CURSOR = 14
"""The next offset of the subscription when the move begins."""


async def the_segment(broker: Broker) -> SegmentName:
    return SegmentName.of(TopicName.parse(PATH), broker.topics.get(PATH).layout.segment(0))


async def ask_for_move(brokers: Brokers, to: str) -> None:
    """As an operator does whose broker has nothing else to do with the move."""
    name = await the_segment(brokers.any())
    key = paths.ownership(name.topic.path, name.descriptor)
    entry = await brokers.store.get(key)
    assert entry is not None
    wish = Ownership.from_json(entry.value).moving(Move(to=to, id="test"))
    assert (await brokers.store.txn([Compare(key, entry.revision)], [Put(key, wish.to_json())])).succeeded


def settled(brokers: Brokers) -> bool:
    broker = brokers.any()
    name = SegmentName.of(TopicName.parse(PATH), broker.topics.get(PATH).layout.segment(0))
    record = broker.cluster.owners.find(name)
    return record is not None and record.state is OwnershipState.SERVING and record.move is None


async def story(brokers: Brokers, victim: str, at: int) -> int:
    """How many requests the victim made, if it was not killed. `a` leads, `b` has the segment, `c` is to get it."""
    await brokers.start("a")
    await until(lambda: brokers.running["a"].cluster.leader.leading)
    await brokers.start("b", "c")
    async with brokers.client(timeout=120.0) as client:
        await client.admin.create_topic("orders")
        if brokers.owner(0) != "b":
            await brokers.move(0, "b")
        async with (
            client.producer("orders") as producer,
            client.stream_consumer("orders", "billing", name="worker", start="earliest") as consumer,
        ):
            for number in range(BEFORE):
                assert (await producer.send(b"%d" % number)).offset == number
            for number in range(CURSOR):
                message = await consumer.receive(timeout=60)
                assert message is not None
                assert message.value == b"%d" % number
                await consumer.ack(message)
            point = CrashPoint(brokers, victim, at)
            await ask_for_move(brokers, to="c")
            sending = asyncio.create_task(send_rest(producer))
            if at:
                await until(lambda: point.hit or (sending.done() and settled(brokers)))
                if not point.hit:
                    point.disarm()
                    sending.result()
                    return point.seen  # It had less to do this time.
                await until(lambda: victim not in brokers.running)
                await brokers.start(victim)
            await sending
            for number in range(CURSOR, BEFORE + BEHIND):
                message = await consumer.receive(timeout=60)
                assert message is not None
                assert (message.value, message.offset) == (b"%d" % number, number)
                await consumer.ack(message)
        await until(lambda: settled(brokers))
        if not at:
            assert brokers.owner(0) == "c"
        async with client.checkpoint_consumer("orders", start="earliest") as reader:
            found: list[bytes] = []
            while len(found) < BEFORE + BEHIND:
                batch = await reader.receive_batch(timeout=60)
                assert batch is not None
                found += [message.value for message in batch.messages()]
            assert found == [b"%d" % number for number in range(BEFORE + BEHIND)]
    return point.seen


async def send_rest(producer: Producer) -> None:
    for number in range(BEFORE, BEFORE + BEHIND):
        sent = await producer.send(b"%d" % number)
        assert sent.offset == number


def requests_of(victim: str, *, shared: bool) -> int:
    counted = 0

    async def main(simulation: Simulation) -> None:
        nonlocal counted
        brokers = Brokers(simulation, shared=shared)
        counted = await story(brokers, victim, at=0)
        for name in [*brokers.running]:
            await brokers.stop(name)

    run_simulation(1, main)
    return counted


@SHARED
@pytest.mark.parametrize("victim", ["a", "b", "c"], ids=["leader", "old owner", "new owner"])
def test_a_crash_after_any_step_of_a_move_loses_nothing_and_repeats_nothing(victim: str, shared: bool) -> None:
    total = requests_of(victim, shared=shared)
    assert total > 0
    for at in range(1, total + 1):

        async def main(simulation: Simulation, at: int = at) -> None:
            brokers = Brokers(simulation, shared=shared)
            try:
                await story(brokers, victim, at)
            except (AssertionError, BraidError, TimeoutError) as error:
                raise AssertionError(f"{victim} killed before its request {at} of {total}: {error!r}") from error
            for name in [*brokers.running]:
                await brokers.stop(name)

        run_simulation(1, main)
