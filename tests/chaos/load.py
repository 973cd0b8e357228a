"""The work on one topic: producers with keys, a subscription of two consumers that ack, and a reader with checkpoints.

A record's value is `producer:key:number:padding`; each producer counts for each key. What clients see is judged while
they see it, and noted for the comparison at the end:

- no offset is confirmed for two records, and no producer hears of an error (I1);
- a subscription skips no number of a producer and key, so a key's records come in order (I4, I5);
- a reader gets every offset of a segment once, one after the other (I1), also across its checkpoints.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from random import Random
from typing import Final, NamedTuple

from braid.client.client import Client
from braid.client.consuming.delivery import ReceivedBatch
from braid.client.producing.producer import Producer

PRODUCERS: Final = 2
CONSUMERS: Final = 2
KEYS: Final = 12
BURST: Final = 12
PERIOD_S: Final = 0.05
PADDINGS: Final = (0, 100, 4_000)
"""Some records are large, so that logs begin new files."""
PATIENCE_S: Final = 300.0
"""How long a client rides out whatever happens. It is far above the longest fault."""
SOME_S: Final = 1.0


class Place(NamedTuple):
    segment: int
    offset: int


Line = tuple[str, str]
"""A producer and a key: their records have an order."""


class BrokenPromise(AssertionError):
    """What a client has seen breaks a promise."""


def parse(value: bytes) -> tuple[Line, int]:
    producer, key, number, _ = value.decode().split(":")
    return (producer, key), int(number)


class LineOrder:
    """Checks that the numbers of each producer and key come in order, and none is left out. They may come again."""

    def __init__(self, whose: str) -> None:
        self._whose = whose
        self.next: Counter[Line] = Counter()
        self.again = 0

    def see(self, values: Iterable[bytes]) -> None:
        for value in values:
            line, number = parse(value)
            if number > self.next[line]:
                raise BrokenPromise(f"I4: {self._whose} got {value[:40]!r} and has not seen number {self.next[line]}")
            if number == self.next[line]:
                self.next[line] += 1
            else:
                self.again += 1


class Load:
    def __init__(self, client: Client, topic: str, random: Random) -> None:
        self.topic = topic
        self.sent: Counter[Line] = Counter()
        """By producer and key: the next number."""
        self.confirmed: dict[Place, bytes] = {}
        self.consumed = LineOrder(f"the subscription of {topic}")
        self.read: dict[int, list[bytes]] = {}
        """By segment: the values that the reader has seen, from offset 0 on."""
        self.longest_s = 0.0
        """That a burst waited for its confirms."""
        self.longest_at = 0.0
        self.resumed = 0
        """How often the reader began again at its checkpoint."""
        self._client = client
        self._random = random
        self._stopping = False
        self._producers: list[asyncio.Task[None]] = []
        self._others: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._producers = [asyncio.create_task(self._produce(f"p{each}")) for each in range(PRODUCERS)]
        consumers = [asyncio.create_task(self._consume(f"worker-{each}")) for each in range(CONSUMERS)]
        self._others = [*consumers, asyncio.create_task(self._read())]

    def check(self) -> None:
        """Raise what a client has met."""
        for task in (*self._producers, *self._others):
            if task.done() and not task.cancelled():
                task.result()

    async def stop_producers(self) -> None:
        """Return when everything that was sent is confirmed."""
        self._stopping = True
        await asyncio.gather(*self._producers)

    def all_seen(self) -> bool:
        """Tell whether the subscription and the reader have come to the end."""
        read = sum(map(len, self.read.values()))
        return self.consumed.next == self.sent and read >= len(self.confirmed)

    async def end(self) -> None:
        """End all clients now. Each cancellation ends one wait of a client that closes in order."""
        tasks = [*self._producers, *self._others]
        while any(not task.done() for task in tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=0.5)

    # Clients.

    async def _produce(self, name: str) -> None:
        async with self._client.producer(self.topic, timeout=PATIENCE_S) as producer:
            while not self._stopping:
                await self._burst(producer, name)
                await asyncio.sleep(self._random.choice((0, PERIOD_S, PERIOD_S, 4 * PERIOD_S)))

    async def _burst(self, producer: Producer, name: str) -> None:
        values = []
        for _ in range(BURST):
            line = name, f"key-{self._random.randrange(KEYS)}"
            padding = "." * self._random.choice(PADDINGS)
            values.append(f"{name}:{line[1]}:{self.sent[line]}:{padding}".encode())
            self.sent[line] += 1
        began = time.monotonic()
        receipts = [producer.submit(value, key=value.split(b":")[1]) for value in values]
        for value, receipt in zip(values, receipts, strict=True):
            message_id = await receipt
            place = Place(message_id.segment, message_id.offset)
            if place in self.confirmed:
                raise BrokenPromise(
                    f"I1: {place} was confirmed for {self.confirmed[place][:40]!r} and for {value[:40]!r}"
                )
            self.confirmed[place] = value
        waited_s = time.monotonic() - began
        if waited_s > self.longest_s:
            self.longest_s, self.longest_at = waited_s, began

    async def _consume(self, name: str) -> None:
        async with self._client.stream_consumer(
            self.topic, subscription="work", name=name, start="earliest"
        ) as consumer:
            while True:
                batch = await consumer.receive_batch()
                assert batch is not None
                self.consumed.see(batch.values())
                await consumer.ack(batch)

    async def _read(self) -> None:
        """Read for a while, then begin again at the checkpoint."""
        start: str | bytes = "earliest"
        while True:
            batches = self._random.randrange(20, 400)
            async with self._client.checkpoint_consumer(self.topic, start=start) as reader:
                for _ in range(batches):
                    batch = await reader.receive_batch(timeout=SOME_S)
                    if batch is not None:
                        self._note(batch)
                start = reader.checkpoint()
            self.resumed += 1

    def _note(self, batch: ReceivedBatch) -> None:
        seen = self.read.setdefault(batch.segment, [])
        if batch.base_offset != len(seen):
            raise BrokenPromise(
                f"I1: the reader of {self.topic} got offset {batch.base_offset} of segment {batch.segment}, "
                f"and {len(seen)} is the next one"
            )
        seen += batch.values()


async def read_topic(client: Client, topic: str, ends: dict[int, int]) -> dict[int, list[bytes]]:
    """Return the whole topic as a newcomer reads it: the values of each segment. Each key's records come in order."""
    found: dict[int, list[bytes]] = {segment: [] for segment in ends}
    order = LineOrder(f"a new reader of {topic}")
    async with client.checkpoint_consumer(topic, start="earliest") as reader:
        while any(len(found[segment]) < end for segment, end in ends.items()):
            batch = await reader.receive_batch(timeout=PATIENCE_S / 5)
            if batch is None:
                raise BrokenPromise(
                    f"I2: {topic} ends early: { ({each: len(found[each]) for each in found}) } of {ends}"
                )
            if batch.base_offset != len(found.setdefault(batch.segment, [])):
                raise BrokenPromise(f"I1: segment {batch.segment} of {topic} has a gap before {batch.base_offset}")
            values = batch.values()
            found[batch.segment] += values
            order.see(values)
    if order.again:
        raise BrokenPromise(f"I10: {topic} holds {order.again} records twice")
    return found
