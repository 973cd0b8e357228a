"""Queues of brokers that are processes of their own, killed while a consumer acks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import braid
from braid.model.errors import AckStale
from braid.testing.processes import BrokerProcess
from tests.kits.cluster_process import ClusterProcess, owners
from tests.kits.waiting import WAIT_S, until

pytestmark = pytest.mark.processes

MESSAGES = 3_000
KILLS = 3
PART = 1_000
"""Of the messages of a cluster, for each broker that is killed."""


class Worker:
    """Consumes a queue, and acks each message in a task of its own. No message may come after its ack."""

    def __init__(self, client: braid.Client) -> None:
        self.confirmed: set[int] = set()
        self._client = client
        self._working: asyncio.Task[None] | None = None

    async def confirms(self, count: int) -> None:
        """Return when so many acks are confirmed."""
        working = self._working
        assert working is not None
        await until(lambda: working.done() or len(self.confirmed) >= count, WAIT_S)
        assert not working.done(), working.exception()

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        self._working = asyncio.create_task(self._work())
        try:
            yield
        finally:
            self._working.cancel()
            await asyncio.wait([self._working])

    async def _work(self) -> None:
        async with (
            self._client.queue_consumer("orders", "work", prefetch=50) as consumer,
            asyncio.TaskGroup() as acking,
        ):
            async for message in consumer:
                assert int(message.value) not in self.confirmed, "I9: a message came after its ack was confirmed"
                acking.create_task(self._ack(consumer, message))

    async def _ack(self, consumer: braid.QueueConsumer, message: braid.QueueMessage) -> None:
        with contextlib.suppress(AckStale):  # The message comes again.
            await consumer.ack(message)
            self.confirmed.add(int(message.value))


async def make_queue(client: braid.Client, **topic: Any) -> None:
    await client.admin.create_topic("orders", **topic)
    await client.admin.create_subscription("orders", "work", kind="queue", ack_timeout_ms=2_000)


def send(producer: braid.Producer, numbers: range) -> None:
    for number in numbers:
        producer.submit(b"%d" % number, key=b"%d" % number)


async def check_empty(url: str) -> None:
    async with braid.connect(url, timeout=WAIT_S) as client:
        async with client.queue_consumer("orders", "work") as consumer:
            assert await consumer.receive(timeout=3) is None
        assert (await client.admin.subscription("orders", "work"))["backlog"] == 0


def test_kill_9_under_acks_undoes_no_confirmed_ack_and_loses_no_message(tmp_path: Path) -> None:
    async def main(broker: BrokerProcess) -> None:
        async with braid.connect(broker.url, timeout=WAIT_S) as client:
            await make_queue(client, segments=2)
            async with client.producer("orders") as producer:
                send(producer, range(MESSAGES))
            worker = Worker(client)
            async with worker.working():
                for kill in range(1, KILLS + 1):
                    await worker.confirms(kill * MESSAGES // (KILLS + 2))
                    broker.kill()
                    await asyncio.to_thread(broker.start)
                await worker.confirms(MESSAGES)
        broker.kill()
        await asyncio.to_thread(broker.start)
        await check_empty(broker.url)
        assert worker.confirmed == set(range(MESSAGES))

    with BrokerProcess(tmp_path / "data") as broker:
        asyncio.run(main(broker))
        assert broker.stop() == 0


def test_kill_9_of_each_broker_in_turn_undoes_no_confirmed_ack_of_a_replicated_queue(tmp_path: Path) -> None:
    """First the owner, then the others. Each stays away until its part is acked, so its disk is not needed for that."""

    async def main(cluster: ClusterProcess) -> None:
        async with braid.connect(cluster.url, timeout=WAIT_S) as client:
            await make_queue(client, segments=1, replicas=3, confirm=2)
            first = (await owners(client, "orders"))[0]
            worker = Worker(client)
            async with worker.working(), client.producer("orders") as producer:
                for kill, victim in enumerate((first, *cluster.others(first))):
                    await in_sync(client)
                    send(producer, range(kill * PART, (kill + 1) * PART))
                    await worker.confirms(kill * PART + PART // 10)
                    cluster[victim].kill()
                    await worker.confirms((kill + 1) * PART)  # The other two go on.
                    await asyncio.to_thread(cluster[victim].start)
            assert worker.confirmed == set(range(3 * PART))
        await check_empty(cluster.url)

    with ClusterProcess(tmp_path, shared=False) as cluster:
        asyncio.run(main(cluster))


async def in_sync(client: braid.Client) -> None:
    """Return when all replicas of the topic count."""

    async def are_in_sync() -> bool:
        segment = (await client.admin.topic_replicas("orders"))["segments"]["0"]
        return sorted(each["state"] for each in segment["replicas"]) == ["in-sync", "in-sync", "owner"]

    await until(are_in_sync, WAIT_S)
