"""A queue of a broker that is a process of its own, killed while a consumer acks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import braid
from braid.testing.processes import BrokerProcess
from tests.kits.waiting import WAIT_S, until

pytestmark = pytest.mark.processes

MESSAGES = 3_000
KILLS = 3


def test_kill_9_under_acks_undoes_no_confirmed_ack_and_loses_no_message(tmp_path: Path) -> None:
    confirmed: set[int] = set()
    stale: set[int] = set()

    async def work(client: braid.Client) -> None:
        async with client.queue_consumer("orders", "work", prefetch=50) as consumer:

            async def ack(message: braid.QueueMessage) -> None:
                try:
                    await consumer.ack(message)
                    confirmed.add(int(message.value))
                except braid.errors.AckStale:
                    stale.add(int(message.value))

            acking: set[asyncio.Task[None]] = set()
            async for message in consumer:
                assert int(message.value) not in confirmed, "I9: a message came after its ack was confirmed"
                task = asyncio.create_task(ack(message))
                acking.add(task)
                task.add_done_callback(acking.discard)

    async def main(broker: BrokerProcess) -> None:
        async with braid.connect(broker.url, timeout=WAIT_S) as client:
            await client.admin.create_topic("orders", segments=2)
            await client.admin.create_subscription("orders", "work", kind="queue", ack_timeout_ms=2_000)
            async with client.producer("orders") as producer:
                for number in range(MESSAGES):
                    producer.submit(b"%d" % number, key=b"%d" % number)
            working = asyncio.create_task(work(client))
            for kill in range(1, KILLS + 1):
                before = kill * MESSAGES // (KILLS + 2)
                await until(lambda before=before: working.done() or len(confirmed) > before)  # type: ignore[misc]
                broker.kill()
                await asyncio.to_thread(broker.start)
            await until(lambda: working.done() or len(confirmed) == MESSAGES, WAIT_S)
            assert not working.done(), working.exception()
            working.cancel()
            await asyncio.wait([working])
        broker.kill()
        await asyncio.to_thread(broker.start)
        async with braid.connect(broker.url, timeout=WAIT_S) as client:
            async with client.queue_consumer("orders", "work") as consumer:
                assert await consumer.receive(timeout=3) is None
            assert (await client.admin.subscription("orders", "work"))["backlog"] == 0

    with BrokerProcess(tmp_path / "data") as broker:
        asyncio.run(main(broker))
        assert broker.stop() == 0
    assert confirmed == set(range(MESSAGES))
