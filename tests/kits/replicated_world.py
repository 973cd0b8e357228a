"""A replicated topic under random faults: killed brokers, lost power and disks, cut networks, frozen processes, moves.

One producer sends numbers, one after the other, and notes which were confirmed, and where. One reader follows. At the
end everything is mended, and the topic is read once more:

- I1, I10: the topic holds the numbers in order, each once;
- I2: a confirmed number is at the offset that was confirmed;
- I7: what the reader saw is a beginning of the topic.

A disk is lost only while every replica holds everything: otherwise more copies would be gone than the topic can spare.

`python -m tests.kits.replicated_world --first 100 --seeds 50` runs many seeds, longer than the tests do.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TypeVar

from braid.client.client import Client
from braid.model.errors import BraidError
from braid.model.message import Message
from braid.ports.tasks import TaskScope, end
from braid.testing.checkers.ownership_checker import OwnershipChecker
from braid.testing.sim.loop import Simulation, run_simulation
from tests.kits.brokers import PATH, Brokers, running_brokers
from tests.kits.waiting import until

BROKERS = ("a", "b", "c", "d")
FAULTS_S = 60.0
LONG_S = 180.0
"""For runs of many seeds."""
SETTLED_S = 600.0

W = TypeVar("W", bound="ReplicatedWorld")


class ReplicatedWorld:
    def __init__(self, simulation: Simulation, brokers: Brokers, client: Client, replicas: int, confirm: int) -> None:
        self.random = Random(simulation.random.random())
        self.brokers = brokers
        self.client = client
        self.replicas = replicas
        self.confirm = confirm
        self.faults: Counter[str] = Counter()
        self.confirmed: dict[int, int] = {}
        """By number: the offset."""
        self.seen: list[tuple[int, int]] = []
        """Offset and number, as the reader got them."""
        self.broken: list[BaseException] = []
        """What the checker of the metadata has found."""
        self.down: set[str] = set()
        self.apart: set[str] = set()
        """Brokers that are frozen, or cut off from others or from the store."""
        self._tasks = TaskScope[object]()

    async def run(self, duration_s: float) -> None:
        await self.client.admin.create_topic("orders", replicas=self.replicas, confirm=self.confirm)
        await until(self.complete)
        sending, reading = asyncio.ensure_future(self._send()), asyncio.ensure_future(self._read())
        loop = asyncio.get_running_loop()
        until_s = loop.time() + duration_s
        while loop.time() < until_s:
            await asyncio.sleep(self.random.expovariate(0.4))
            await self._fault()
            assert not self.broken, self.broken
            assert not sending.done(), sending.exception()
            assert not reading.done(), reading.exception()
        await self._settle()
        await self._check(sending, reading)

    def counts(self) -> str:
        """Say how much has happened beside faults."""
        return f"{len(self.confirmed)} confirmed"

    def complete(self) -> bool:
        """Tell whether every replica holds everything, as the owner knows it."""
        for broker in self.brokers.running.values():
            for segment in broker.segments.of_topic(PATH):
                record = broker.cluster.owners.find(segment.name)
                followers = segment.followers
                return (
                    segment.serving
                    and record is not None
                    and len(record.replicas) == self.replicas
                    and set(record.replicas) == {broker.id, *(each.broker for each in followers)}
                    and all(each.in_sync and each.member for each in followers)
                    and all(each.position.end >= segment.storage.log.replicated.value for each in followers)
                )
        return False

    # Clients.

    async def _send(self) -> None:
        async with self.client.producer("orders") as producer:
            number = 0
            while True:
                message_id = await producer.send(b"%d" % number)
                self.confirmed[number] = message_id.offset
                number += 1
                await asyncio.sleep(self.random.choice((0, 0.001, 0.05, 0.2)))

    async def _read(self) -> None:
        async with self.client.checkpoint_consumer("orders", start="earliest") as reader:
            while True:
                batch = await reader.receive_batch(timeout=1)
                for message in batch.messages() if batch is not None else ():
                    self._note(message)

    def _note(self, message: Message) -> None:
        offset, number = message.id.offset, int(message.value)
        assert (offset, number) == (len(self.seen), len(self.seen)), f"I1: number {number} stands at offset {offset}"
        self.seen.append((offset, number))

    # Faults.

    async def _fault(self) -> None:
        faults = [self._kill, self._power, self._lose, self._cut, self._freeze, self._away, self._stop, self._move]
        fault = self.random.choice(faults)
        name = fault.__name__.strip("_")
        if await fault():
            self.faults[name] += 1

    def _victim(self) -> str | None:
        """A broker that runs well. At most one is down or apart at a time, most of the time."""
        if len(self.down | self.apart) >= self.random.choice((1, 1, 1, 2, 3)):
            return None
        well = [each for each in self.brokers.running if each not in self.apart]
        return self.random.choice(well) if well else None

    async def _kill(self) -> bool:
        if (name := self._victim()) is None:
            return False
        self.brokers.kill(name)
        self._back_later(name)
        return True

    async def _power(self) -> bool:
        if (name := self._victim()) is None:
            return False
        self.brokers.kill(name)
        self.brokers.disks[name].crash()
        self._back_later(name)
        return True

    async def _lose(self) -> bool:
        if self.down or self.apart or not self.complete() or (name := self._victim()) is None:
            return False
        self.brokers.kill(name)
        self.brokers.lose_disk(name)
        self._back_later(name)
        return True

    async def _stop(self) -> bool:
        if (name := self._victim()) is None:
            return False
        self.down.add(name)
        await self.brokers.stop(name)
        self._back_later(name)
        return True

    async def _cut(self) -> bool:
        if (name := self._victim()) is None:
            return False
        others = [each for each in BROKERS if each != name and self.random.random() < 0.6]
        for other in others:
            self.brokers.network.cut(name, other)
        self._mend_later(name, lambda: self.brokers.network.heal(name))
        return True

    async def _freeze(self) -> bool:
        if (name := self._victim()) is None:
            return False
        self.brokers.freeze(name)
        self._mend_later(name, lambda: self.brokers.thaw(name))
        return True

    async def _away(self) -> bool:
        """The store does not answer this broker."""
        if (name := self._victim()) is None:
            return False
        store = self.brokers.store_of(name)
        store.disconnect()
        self._mend_later(name, store.reconnect)
        return True

    async def _move(self) -> bool:
        """An operator moves the segment. The move may fail."""

        async def move(to: str) -> None:
            try:
                await self.client.admin.move("orders", to=to, timeout=10)
            except BraidError:
                return

        self._tasks.start(object(), move(self.random.choice(BROKERS)), name="move")
        return True

    def _back_later(self, name: str) -> None:
        self.down.add(name)

        async def back() -> None:
            await asyncio.sleep(self.random.choice((0, 0.5, 3, 12, 25)))
            await self.brokers.start(name)
            self.down.discard(name)

        self._tasks.start(object(), back(), name=f"start {name}")

    def _mend_later(self, name: str, mend: Callable[[], None]) -> None:
        self.apart.add(name)

        async def mended() -> None:
            await asyncio.sleep(self.random.choice((0.2, 1, 4, 12, 25)))
            mend()
            self.apart.discard(name)

        self._tasks.start(object(), mended(), name=f"mend {name}")

    # The end.

    async def _settle(self) -> None:
        await until(lambda: not self.down and not self.apart, SETTLED_S)
        await until(self.complete, SETTLED_S)

    async def _check(self, sending: asyncio.Future[None], reading: asyncio.Future[None]) -> None:
        before = len(self.confirmed)
        await until(lambda: len(self.confirmed) > before + 5)
        sending.cancel()
        await asyncio.wait([sending])
        expected = max(self.confirmed) + 1
        await until(lambda: len(self.seen) >= expected)
        reading.cancel()
        await asyncio.wait([reading])
        assert not self.broken, self.broken
        for number, offset in self.confirmed.items():
            assert offset == number, f"I2: number {number} was confirmed at offset {offset}"
        found: list[int] = []
        async with self.client.checkpoint_consumer("orders", start="earliest") as reader:
            while len(found) < len(self.seen):
                batch = await reader.receive_batch(timeout=60)
                assert batch is not None, f"I2: the topic ends at {len(found)}, and {len(self.seen)} were seen"
                found += [int(message.value) for message in batch.messages()]
        assert found == list(range(len(found))), "I1: the topic holds other records than the reader saw"


async def run_world(simulation: Simulation, kind: type[W], duration_s: float = FAULTS_S) -> W:
    random = Random(simulation.random.random())
    replicas, confirm = random.choice(((3, 2), (3, 2), (3, 3), (2, 2), (4, 2), (4, 3)))
    shared = random.random() < 0.6
    async with (
        running_brokers(simulation, BROKERS, shared=shared) as brokers,
        brokers.client(*BROKERS, timeout=3_600) as client,
    ):
        world = kind(simulation, brokers, client, replicas, confirm)
        checker = OwnershipChecker(brokers.store, lambda _: None)
        watching = asyncio.create_task(checker.watch(world.broken.append))
        await world.run(duration_s)
        await end(watching)
        return world


def main(kind: type[ReplicatedWorld], description: str) -> None:
    logging.disable()
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=20)
    options = parser.parse_args()
    failed = 0
    for seed in range(options.first, options.first + options.seeds):
        try:
            world = run_simulation(seed, partial(run_world, kind=kind, duration_s=LONG_S))
            print(f"{seed}: {world.counts()}, {dict(world.faults)}", flush=True)
        except Exception as error:
            failed += 1
            print(f"{seed}: FAILED: {error!r}", flush=True)
    print(f"{options.seeds} seeds, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main(ReplicatedWorld, "Run replicated topics under random faults.")
