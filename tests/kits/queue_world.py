"""A queue of a replicated topic under random faults: those of replicated_world.py, with consumers that ack, return,
forget and come back.

- I9: no program sees a message that was sent after a program was told that its ack is stored. A message that was on its
  way before may still come to a program. Under one lease it comes once;
- I2: every confirmed message comes, and is settled at the end;
- I8: at the end no replica holds more of the queue than of the log.

`python -m tests.kits.queue_world --first 100 --seeds 50` runs many seeds, longer than the tests do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from braid.broker.queues.channel import QueueChannel
from braid.client.client import Client
from braid.client.consuming.queue import QueueConsumer
from braid.model.errors import AckStale, TimedOut
from braid.model.message import QueueMessage
from braid.model.queue.state import Handed
from braid.storage.reader import StoredBatch
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import PATH, Brokers
from tests.kits.replicated_world import SETTLED_S, ReplicatedWorld, main
from tests.kits.waiting import until

WORKERS = 3


class QueueWorld(ReplicatedWorld):
    def __init__(self, simulation: Simulation, brokers: Brokers, client: Client, replicas: int, confirm: int) -> None:
        super().__init__(simulation, brokers, client, replicas, confirm)
        self.settled: dict[int, float] = {}
        """By number: when a program was told that its ack is stored."""
        self.sent: dict[tuple[int, int], float] = {}
        """By offset and lease: when an owner has sent the message."""
        self.received: set[tuple[int, int]] = set()
        """Offsets and leases of messages that programs have got."""
        self.deliveries = 0
        self.stale = 0
        self._ending = False

    async def run(self, duration_s: float) -> None:
        with self._watched_channels():
            await super().run(duration_s)

    def counts(self) -> str:
        return f"{len(self.settled)} settled, {self.deliveries} deliveries, {self.stale} stale"

    async def _read(self) -> None:
        await self.client.admin.create_subscription("orders", "work", kind="queue", ack_timeout_ms=4_000)
        workers = [asyncio.ensure_future(self._work(f"worker-{each}")) for each in range(WORKERS)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers)

    async def _work(self, name: str) -> None:
        while True:
            prefetch = self.random.choice((1, 5, 100))
            async with self.client.queue_consumer("orders", "work", name=name, prefetch=prefetch) as consumer:
                for _ in range(self.random.randrange(5, 60)):
                    if (message := await consumer.receive(timeout=5)) is not None:
                        self._delivered(message)
                        await self._answer(consumer, message)

    def _delivered(self, message: QueueMessage) -> None:
        self.deliveries += 1
        number, place = int(message.value), (message.offset, message.lease)
        what = f"message {number} under lease {message.lease}"
        assert place not in self.received, f"{what} came twice"
        self.received.add(place)
        assert place in self.sent, f"no owner has sent {what}"
        settled_at = self.settled.get(number)
        assert settled_at is None or self.sent[place] <= settled_at, f"I9: {what} was sent after its confirmed ack"

    async def _answer(self, consumer: QueueConsumer, message: QueueMessage) -> None:
        chance = 1.0 if self._ending else self.random.random()
        try:
            if chance < 0.05:
                return  # The program forgets it.
            if chance < 0.15:
                await consumer.nack(message, delay=self.random.choice((0, 0.5, 3)))
                return
            if chance < 0.2:
                await consumer.extend(message, 6)
            if chance < 0.3:
                await asyncio.sleep(self.random.choice((0.1, 2, 5)))
            await consumer.ack(message)
        except AckStale:
            self.stale += 1
        except TimedOut:
            pass  # It may be stored.
        else:
            self.settled.setdefault(int(message.value), asyncio.get_running_loop().time())

    @contextmanager
    def _watched_channels(self) -> Iterator[None]:
        """Note what owners send meanwhile."""
        send = QueueChannel.send

        def sent(
            channel: QueueChannel, batch: StoredBatch, handed: Sequence[Handed], max_deliveries: int, end: int
        ) -> None:
            now = asyncio.get_running_loop().time()
            for run in handed:
                self.sent.update(((offset, run.lease), now) for offset in range(run.start, run.end))
            send(channel, batch, handed, max_deliveries, end)

        QueueChannel.send = sent  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            QueueChannel.send = send  # type: ignore[method-assign]

    async def _check(self, sending: asyncio.Future[None], reading: asyncio.Future[None]) -> None:
        before = len(self.confirmed)
        await until(lambda: len(self.confirmed) > before + 5)
        sending.cancel()
        await asyncio.wait([sending])
        self._ending = True

        def all_settled() -> bool:
            if reading.done():
                reading.result()
            return self.settled.keys() >= self.confirmed.keys()

        await until(all_settled, SETTLED_S)
        reading.cancel()
        await asyncio.wait([reading])
        assert not self.broken, self.broken
        for broker in self.brokers.running.values():
            for segment in broker.segments.of_topic(PATH):
                queue = segment.queues.get("work")
                assert queue.snapshot().end <= segment.end, "I8"
                await until(lambda queue=queue: queue.counts().ready == 0, 60)  # type: ignore[misc]


if __name__ == "__main__":
    main(QueueWorld, "Run queues of replicated topics under random faults.")
