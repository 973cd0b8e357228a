"""Producers and a consumer that go on whatever happens to brokers, and a checker of what came out of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable

from braid.client.client import Client
from braid.client.producing.producer import Producer
from braid.model.errors import TimedOut
from tests.kits.waiting import WAIT_S

TOPIC = "orders"
BURST = 40


class Load:
    """Producers that publish numbered records as fast as they can, and a subscription that follows them. Knows what was
    confirmed, what was sent, and what was consumed."""

    def __init__(self, client: Client, topic: str = TOPIC) -> None:
        self.topic = topic
        self._client = client
        self.confirmed: dict[tuple[int, int], bytes] = {}
        self.sent: list[bytes] = []
        self.consumed: dict[int, list[int]] = {}
        self.doubtful: set[bytes] | None = None
        """While a loss is accepted: records of which their producer was told that nobody knows whether they are
        stored. Otherwise nobody is told that."""
        self._stopping = False
        self._producers: list[asyncio.Task[None]] = []
        self._consumer: asyncio.Task[None] | None = None

    def start(self, producers: int, *, rest_s: float = 0.0) -> None:
        """`rest_s`: how long each producer rests between its bursts."""
        self._producers = [asyncio.create_task(self._produce(number, rest_s)) for number in range(producers)]
        self._consumer = asyncio.create_task(self._consume())

    async def stop(self) -> None:
        """Waits until everything that was sent is confirmed and consumed."""
        assert self._consumer is not None
        self._stopping = True
        await asyncio.gather(*self._producers)
        await self.until(lambda: sum(map(len, self.consumed.values())) >= len(self.confirmed))
        self._consumer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._consumer

    async def goes_on(self, records: int = 500) -> None:
        """Return when so many more are confirmed."""
        before = len(self.confirmed)
        await self.until(lambda: len(self.confirmed) >= before + records)

    async def goes_on_in(self, segments: set[int], records: int = 100) -> None:
        """Return when so many more are confirmed in each of these segments."""
        before = Counter(segment for segment, _ in self.confirmed)

        def all_did() -> bool:
            now = Counter(segment for segment, _ in self.confirmed)
            return all(now[segment] >= before[segment] + records for segment in segments)

        await self.until(all_did)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Ends early, with what the application was told, if a producer or the consumer failed."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                for task in (*self._producers, self._consumer):
                    if task is not None and task.done() and not task.cancelled():
                        task.result()
                await asyncio.sleep(0.01)

    async def _produce(self, number: int, rest_s: float) -> None:
        async with self._client.producer(self.topic, timeout=WAIT_S) as producer:
            count = 0
            while not self._stopping:
                await self._burst(producer, number, count)
                count += BURST
                if rest_s:
                    await asyncio.sleep(rest_s)

    async def _burst(self, producer: Producer, number: int, first: int) -> None:
        values = [b"%d-%d" % (number, count) for count in range(first, first + BURST)]
        self.sent += values
        receipts = [producer.submit(value, key=value if number else None) for value in values]
        for value, receipt in zip(values, receipts):
            try:
                message_id = await receipt
            except TimedOut:
                if self.doubtful is None:
                    raise
                self.doubtful.add(value)
                continue
            assert (message_id.segment, message_id.offset) not in self.confirmed, "I1: one offset, two records"
            self.confirmed[message_id.segment, message_id.offset] = value

    async def _consume(self) -> None:
        async with self._client.stream_consumer(self.topic, subscription="follower", start="earliest") as consumer:
            while True:
                batch = await consumer.receive_batch()
                assert batch is not None
                seen = self.consumed.setdefault(batch.segment, [])
                seen += batch.table.column("offset").to_pylist()
                await consumer.ack(batch)


async def read_all(client: Client, topic: str = TOPIC) -> dict[tuple[int, int], bytes]:
    """The whole topic, as a newcomer reads it."""
    found: dict[tuple[int, int], bytes] = {}
    positions = await client.admin.topic_stats(topic)
    ends = {int(number): segment["endOffset"] for number, segment in positions["segments"].items()}
    async with client.checkpoint_consumer(topic, start="earliest") as consumer:
        while len(found) < sum(ends.values()):
            batch = await consumer.receive_batch(timeout=WAIT_S)
            assert batch is not None
            offsets = batch.table.column("offset").to_pylist()
            for offset, value in zip(offsets, batch.values()):
                assert (batch.segment, offset) not in found, "I1: an offset came twice"
                found[batch.segment, offset] = value
    for number, end in ends.items():
        assert sorted(offset for segment, offset in found if segment == number) == list(range(end)), "I1: no gap"
    return found


def check(load: Load, stored: dict[tuple[int, int], bytes]) -> None:
    assert {place: stored.get(place) for place in load.confirmed} == load.confirmed, "I2: confirmed is kept"
    check_once_and_in_order(load, stored)
    assert set(stored.values()) == set(load.sent)
    for segment, offsets in load.consumed.items():
        assert offsets == list(range(len(offsets))), f"a gap or a repeat in segment {segment}"


def check_once_and_in_order(load: Load, stored: dict[tuple[int, int], bytes]) -> None:
    twice = [value for value, count in Counter(stored.values()).items() if count > 1]
    assert not twice, f"I10: stored twice: {twice[:5]}"
    assert set(stored.values()) <= set(load.sent)
    orders: dict[tuple[int, bytes], list[int]] = {}
    for (segment, _), value in sorted(stored.items()):
        producer, _, count = value.partition(b"-")
        orders.setdefault((segment, producer), []).append(int(count))
    assert all(counts == sorted(counts) for counts in orders.values()), "the order of a producer's records"
