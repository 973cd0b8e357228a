"""Producers on whole brokers whose topic is split, merged and repartitioned under them, in virtual time: each record is
stored once, the records of a key in order, and every id names the place of its record."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from braid.client.client import Client
from braid.client.producing.open_batch import Receipt
from braid.client.producing.producer import Producer
from braid.model.message import Message
from braid.testing.sim.loop import Simulation, run_simulation
from tests.kits.brokers import PATH, Brokers, running_brokers
from tests.kits.waiting import until

KEYS = [b"key-%d" % number for number in range(12)]
CHANGES = ("split 0", "split 1", "merge 3 4", "repartition 3", "repartition 1")
Fault = Callable[[Brokers], Coroutine[Any, Any, None]]


class Load:
    """Publishes numbered records, each key in turn, until it is stopped."""

    def __init__(self, producer: Producer) -> None:
        self.receipts: list[Receipt] = []
        self.producer = producer
        self._task = asyncio.create_task(self._run())
        self._stopped = False

    async def _run(self) -> None:
        while not self._stopped:
            for _ in range(5):
                number = len(self.receipts)
                self.receipts.append(self.producer.submit(b"%d" % number, key=KEYS[number % len(KEYS)]))
            await asyncio.sleep(0.003)

    async def halt(self) -> None:
        self._stopped = True
        await self._task

    async def stop(self) -> None:
        """Stop when all records are stored."""
        await self.halt()
        await self.producer.flush()


async def change(client: Client, what: str) -> None:
    name, *numbers = what.split()
    await getattr(client.admin, name)("orders", *map(int, numbers))


async def read(client: Client, count: int) -> list[Message]:
    """Read so many records; a consumer reads parents before their children."""
    found: list[Message] = []
    async with client.checkpoint_consumer("orders", start="earliest") as reader:
        while len(found) < count:
            batch = await reader.receive_batch(timeout=60)
            assert batch is not None, f"{len(found)} of {count} records are there"
            found += batch.messages()
        assert await reader.receive_batch(timeout=5) is None, "I10: a record is there twice"
    return found


async def check(client: Client, receipts: list[Receipt]) -> None:
    found = await read(client, len(receipts))
    by_key = {key: [int(message.value) for message in found if message.key == key] for key in KEYS}
    for number, key in enumerate(KEYS):
        assert by_key[key] == list(range(number, len(receipts), len(KEYS))), f"I4, I10: {key!r}"
    places = {int(message.value): message.id for message in found}
    for number, receipt in enumerate(receipts):
        told = receipt.result()
        assert told.segment == places[number].segment
        assert told.offset in (-1, places[number].offset)


async def calm(brokers: Brokers) -> None:
    pass


async def cuts(brokers: Brokers) -> None:
    """Connections of the client break all the time."""
    for _ in range(40):
        await asyncio.sleep(brokers.simulation.random.uniform(0.0, 0.05))
        for name in brokers.running:
            brokers.network.reset("client", name)


async def restarts(brokers: Brokers) -> None:
    """The owner of the first segment that ends stops in order, and comes back."""
    await until(lambda: brokers.any().topics.get(PATH).layout.epoch > 0)
    owner = brokers.owner(0)
    if owner:
        await brokers.stop(owner)
        await asyncio.sleep(0.5)
        await brokers.start(owner)


async def kills(brokers: Brokers) -> None:
    """The owner of the first segment dies while its log ends, and comes back."""
    owner = await sealing(brokers, 0)
    brokers.kill(owner)
    await asyncio.sleep(3.0)
    await brokers.start(owner)


async def sealing(brokers: Brokers, segment: int) -> str:
    """Wait until the segment's log ends, and return its owner."""

    def owner() -> str:
        for name, broker in brokers.running.items():
            for owned in broker.segments.of_topic(PATH):
                if owned.name.id == segment and owned.storage.log.sealed:
                    return name
        return ""

    await until(owner)
    return owner()


@pytest.mark.parametrize("fault", [calm, cuts, restarts, kills])
@pytest.mark.parametrize("seed", range(3))
def test_a_producer_runs_through_any_changes_of_its_topic(fault: Fault, seed: int) -> None:
    async def main(simulation: Simulation) -> None:
        async with running_brokers(simulation) as brokers, brokers.client(timeout=120.0) as client:
            await client.admin.create_topic("orders")
            async with client.producer("orders") as producer:
                load = Load(producer)
                await asyncio.sleep(0.1)
                faulty = asyncio.create_task(fault(brokers))
                for what in CHANGES:
                    await change(client, what)
                    await asyncio.sleep(0.1)
                await faulty
                await asyncio.sleep(0.1)
                await load.stop()
                assert producer._only is not None, "the topic has one segment again"
                assert not producer._retired
            await check(client, load.receipts)

    run_simulation(seed, main)


async def test_a_child_answers_for_a_parent_that_the_client_cannot_reach(simulation: Simulation) -> None:
    async with running_brokers(simulation, ("a", "b")) as brokers, brokers.client(timeout=120.0) as client:
        await client.admin.create_topic("orders")
        await until(lambda: brokers.owner(0))
        owner = brokers.owner(0)
        other = "b" if owner == "a" else "a"
        load = Load(await client.producer("orders").open())
        await asyncio.sleep(0.1)
        brokers.network.cut(owner, "client", one_way=True)  # The owner stores what comes, and its replies are lost.
        await asyncio.sleep(0.1)
        await load.halt()
        await brokers.call(other, "split_segment", topic="orders", segment=0)
        assert other in {brokers.owner(child) for child in (1, 2)}
        brokers.network.cut("client", owner)
        brokers.network.reset("client", owner)
        await until(lambda: not load.producer._retired and load.producer.layout_epoch == 1)
        assert brokers.running[other].metrics.requests["stored"]
        brokers.network.heal()
        await load.stop()
        assert -1 in {receipt.result().offset for receipt in load.receipts}
        await check(client, load.receipts)
