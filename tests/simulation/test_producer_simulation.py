"""A producer against a broker that loses replies, cuts links and refuses, and splits and merges the topic meanwhile:
each record once, in order, where it said."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

import pytest

from braid.client.client import Client, connect
from braid.client.producing.open_batch import Receipt
from braid.client.producing.producer import Producer
from braid.model.batch.columns import decode_messages
from braid.model.batch.header import BatchHeader
from braid.model.errors import (
    BraidError,
    LogBusy,
    LogFailed,
    MetadataUncertain,
    NotServing,
    Overloaded,
    PermissionDenied,
    ShuttingDown,
    StaleRoute,
    TimedOut,
)
from braid.model.layout import HashRange
from braid.model.message import MessageId
from braid.testing.scripted_broker import Refuse, ScriptedBroker, Step
from braid.testing.sim.loop import Simulation, run_simulation
from braid.testing.sim.network import SimulatedNetwork
from braid.wire.operations import Route

TOPIC = "public/default/orders"
RETRIABLE = (LogBusy, Overloaded, NotServing, StaleRoute, ShuttingDown, MetadataUncertain)


class FlakyScript:
    """Misbehaves until `calm` is set."""

    def __init__(self, random: Random, *, final: bool) -> None:
        self.random = random
        self.calm = False
        self.badness = random.choice([0.02, 0.1, 0.3])
        self.final = final
        self.final_errors = 0

    def __call__(self, route: Route, header: BatchHeader) -> Step | Refuse:
        random = self.random
        if self.calm or random.random() >= self.badness:
            return Step.CONFIRM
        if self.final and random.random() < 0.3:
            self.final_errors += 1
            final: list[Step | Refuse] = [Refuse(PermissionDenied("not today")), Step.SILENCE, Step.IGNORE]
            return random.choice(final)
        passing: list[Step | Refuse] = [
            Step.CUT_BEFORE,
            Step.CUT_AFTER,
            Refuse(random.choice(RETRIABLE)("try again")),
            Refuse(LogFailed("the sync failed"), stored=random.random() < 0.5),
        ]
        return random.choice(passing)


class Sent:
    """What the application gave, by writer in order, and what it was told."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.ids: dict[str, MessageId] = {}
        self.errors: dict[str, BraidError] = {}


async def publish(producer: Producer, random: Random, sent: Sent, records: int) -> None:
    """Give records in every way there is; returns when all are settled.

    A `submit` overtakes a `send` that waits for room, as it cannot wait; so with little room there are only sends.
    """
    only_send = producer.options.max_in_flight_bytes < 1_000
    receipts: list[tuple[str, Receipt]] = []
    tasks: list[asyncio.Task[None]] = []

    async def send(name: str, key: str) -> None:
        try:
            sent.ids[name] = await producer.send(name, key=key)
        except BraidError as error:
            sent.errors[name] = error

    async def send_many(names: list[str], key: str) -> None:
        try:
            ids = await producer.send_many([(key, name) for name in names])
        except BraidError as error:
            # Which of them failed is not told; the log says it.
            sent.errors.update(dict.fromkeys(names, error))
        else:
            sent.ids.update(zip(names, ids))

    number = 0
    while number < records:
        key = f"key-{random.randrange(6)}"
        way = 0.5 if only_send else random.random()
        if way < 0.45:
            name = f"{key}:{number}"
            sent.order.append(name)
            receipts.append((name, producer.submit(name, key=key)))
            number += 1
        elif way < 0.9:
            name = f"{key}:{number}"
            sent.order.append(name)
            tasks.append(asyncio.create_task(send(name, key)))
            await asyncio.sleep(0)  # so that it is given before the next one
            number += 1
        else:
            names = [f"{key}:{number + each}" for each in range(random.randint(1, 12))]
            sent.order += names
            await send_many(names, key)
            number += len(names)
        if random.random() < 0.1:
            await asyncio.sleep(random.uniform(0, 0.05))
    await asyncio.gather(*tasks)
    for name, receipt in receipts:
        try:
            sent.ids[name] = await receipt
        except BraidError as error:
            sent.errors[name] = error


def stored(broker: ScriptedBroker) -> dict[int, list[str]]:
    """By segment; parents come before their children."""
    return {
        segment: [message.value.decode() for batch in log.batches for message in decode_messages(batch)]
        for (_, segment), log in sorted(broker.logs.items())
    }


def check(sent: Sent, logs: dict[int, list[str]]) -> None:
    times = Counter(name for log in logs.values() for name in log)
    assert not [name for name, count in times.items() if count > 1], "I10: stored twice"
    for name, where in sent.ids.items():
        assert name not in sent.errors
        if where.offset >= 0:
            assert logs[where.segment][where.offset] == name
        else:
            assert name in logs[where.segment]
    place = {name: number for number, name in enumerate(sent.order)}
    by_key: dict[str, int] = {}
    for log in logs.values():
        for name in log:
            key = name.split(":")[0]
            assert by_key.get(key, -1) < place[name], f"I4: {name} is out of order"
            by_key[key] = place[name]


async def play(
    simulation: Simulation, *, final: bool, changes: bool = False
) -> tuple[Sent, dict[int, list[str]], FlakyScript]:
    random = simulation.random
    network = SimulatedNetwork(Random(random.random()), loss=random.choice([0.0, 0.02]))
    script = FlakyScript(random, final=final)
    broker = ScriptedBroker(network.host("broker"), script)
    if random.random() < 0.5:
        broker.answer_delay_s = lambda: random.uniform(0, 0.02)
    segments = random.choice([1, 1, 3])
    await broker.start("broker", 6660)
    broker.add_topic(TOPIC, segments)
    client: Client = connect(
        "braid://broker:6660",
        network=network.host("client"),
        clock=simulation.clock,
        random=Random(random.random()),
        timeout=4.0 if final else 600.0,
    )
    sent = Sent()
    async with (
        client,
        client.producer(
            "orders",
            max_batch_records=random.choice([3, 20, 65_536]),
            linger=random.choice([0.0, 0.0, 0.005]),
            max_in_flight_bytes=random.choice([400, 16 << 20]),
        ) as producer,
    ):
        resets = asyncio.create_task(reset_now_and_then(network, random))
        changing = asyncio.create_task(change_layouts(broker, random)) if changes else None
        await publish(producer, random, sent, 150)
        resets.cancel()
        script.calm = True
        if changing is not None:
            await changing
        await producer.send("key-0:last", key="key-0")
        sent.order.append("key-0:last")
        await asyncio.sleep(2)
    await broker.stop()
    return sent, stored(broker), script


async def reset_now_and_then(network: SimulatedNetwork, random: Random) -> None:
    for _ in range(random.randrange(5)):
        await asyncio.sleep(random.uniform(0, 0.5))
        network.reset("client", "broker")


async def change_layouts(broker: ScriptedBroker, random: Random) -> None:
    """Split and merge segments, with pauses between the end of the parents and the layout that shows their children."""
    for _ in range(random.randint(1, 6)):
        await asyncio.sleep(random.choice([0.0, random.uniform(0, 0.3)]))
        active = sorted(
            (each for each in broker.topics[TOPIC].segments if each.active), key=lambda each: each.first_hash
        )
        if len(active) == 1 or random.random() < 0.6:
            old = random.choice(active)
            at = random.randint(old.first_hash + 1, old.last_hash)
            parents, ranges = [old.id], [HashRange(old.first_hash, at - 1), HashRange(at, old.last_hash)]
        else:
            number = random.randrange(len(active) - 1)
            lower, upper = active[number : number + 2]
            parents, ranges = [lower.id, upper.id], [HashRange(lower.first_hash, upper.last_hash)]
        broker.seal(TOPIC, *parents)
        await asyncio.sleep(random.choice([0.0, 0.005, 0.2]))
        broker.replace(TOPIC, parents, *ranges)
        if random.random() < 0.7:
            broker.push()


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_a_producer_follows_every_layout_of_a_flaky_broker(first: int) -> None:
    for seed in range(first, first + 20):
        sent, logs, _ = run_simulation(seed, lambda simulation: play(simulation, final=False, changes=True))
        check(sent, logs)
        assert not sent.errors, f"seed {seed}"
        assert sorted(name for log in logs.values() for name in log) == sorted(sent.order), f"seed {seed}"


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_final_errors_and_silence_around_a_change_of_layout_duplicate_nothing(first: int) -> None:
    for seed in range(first, first + 20):
        sent, logs, _ = run_simulation(seed, lambda simulation: play(simulation, final=True, changes=True))
        check(sent, logs)
        assert {*sent.ids, *sent.errors, "key-0:last"} == set(sent.order), f"seed {seed}"
        assert all(isinstance(error, PermissionDenied | TimedOut) for error in sent.errors.values()), f"seed {seed}"


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_a_flaky_broker_ends_with_each_record_once_in_order_where_the_producer_was_told(first: int) -> None:
    for seed in range(first, first + 20):
        sent, logs, _ = run_simulation(seed, lambda simulation: play(simulation, final=False))
        check(sent, logs)
        assert not sent.errors, f"seed {seed}"
        assert sorted(name for log in logs.values() for name in log) == sorted(sent.order), f"seed {seed}"


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_final_errors_and_silence_lose_only_what_is_reported_and_duplicate_nothing(first: int) -> None:
    for seed in range(first, first + 20):
        sent, logs, script = run_simulation(seed, lambda simulation: play(simulation, final=True))
        check(sent, logs)
        # A send_many that failed does not say which of its records were stored.
        known = {*sent.ids, *sent.errors, "key-0:last"}
        assert known == set(sent.order), f"seed {seed}"
        assert all(isinstance(error, PermissionDenied | TimedOut) for error in sent.errors.values()), f"seed {seed}"
        refused = [name for name, error in sent.errors.items() if isinstance(error, PermissionDenied)]
        assert not refused or script.final_errors, f"seed {seed}"
