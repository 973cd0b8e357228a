"""A machine is lost under load, with its disk: nothing that was confirmed is lost, and its replicas are made again.

    python examples/lost_machine.py

Three `braid serve` processes, each with a disk of its own, keep three replicas of a topic. A record is confirmed when
two of them have it on disk. While a producer and a consumer work, the owner of the topic is killed with SIGKILL, and
its data folder is deleted. Another broker goes on. Then a new machine starts under the old name, with an empty disk,
and gets copies of everything. What is shown is checked.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import braid
from braid.client.client import Client
from braid.testing.processes import BrokerProcess
from braid.wire.address import format_url

PATIENCE_S = 60.0
TOPIC = "orders"
BURST = 20
PERIOD_S = 0.02
COLOURS = sys.stdout.isatty() and "NO_COLOR" not in os.environ


async def main(folder: Path) -> None:
    async with AsyncExitStack() as stack:
        brokers = {f"broker-{number}": broker_process(folder, number) for number in range(3)}
        for broker in brokers.values():
            stack.push(broker)  # It ends with the stack, wherever this stops.
        await asyncio.gather(*(asyncio.to_thread(broker.start) for broker in brokers.values()))
        url = format_url([broker.address for broker in brokers.values()])
        client = await stack.enter_async_context(braid.connect(url, timeout=PATIENCE_S))
        await until_active(client, len(brokers))
        await client.admin.create_topic(TOPIC, replicas=3, confirm=2)
        await until_in_sync(client)
        await lose_a_machine(client, brokers)


async def lose_a_machine(client: Client, brokers: dict[str, BrokerProcess]) -> None:
    title("Three brokers keep three replicas of a topic. Two of them confirm a record.")
    await show_replicas(client)
    async with Load(client).running() as load:
        await load.goes_on()
        lost = (await replicas(client))["owner"]
        detail("confirmed before", f"{load.confirmed:,} records")

        title(f"{lost}, which owns the topic, is killed with SIGKILL. Its data folder is deleted.")
        load.longest_s = 0.0
        await asyncio.to_thread(brokers[lost].kill)
        await asyncio.to_thread(shutil.rmtree, brokers[lost].data)
        await load.goes_on()
        owner = (await replicas(client))["owner"]
        assert owner != lost
        detail("the topic goes on", f"at {owner}; a record waited {load.longest_s * 1e3:,.0f} ms at most")

        title(f"A new machine starts under the name {lost}, with an empty disk.")
        began = time.monotonic()
        await asyncio.to_thread(brokers[lost].start)
        await until_in_sync(client)
        detail("its replica is made again", f"{time.monotonic() - began:.1f} s, with the start of the broker")
        await show_replicas(client)

        title(f"Now {owner} is lost, too: the new replica counts.")
        await asyncio.to_thread(brokers[owner].kill)
        await asyncio.to_thread(shutil.rmtree, brokers[owner].data)
        await load.goes_on()
        detail("the topic goes on", f"at {(await replicas(client))['owner']}")
    await load.check()


class Load:
    """One producer that numbers its records, and one consumer that checks the numbers: 0, 1, 2, … without a gap."""

    def __init__(self, client: Client) -> None:
        self.confirmed = 0
        self.longest_s = 0.0
        """That a burst waited for its confirms."""
        self._client = client
        self._consumed = 0
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        producing, consuming = asyncio.create_task(self._produce()), asyncio.create_task(self._consume())
        self._tasks = [producing, consuming]
        try:
            yield self
            self._stopping = True
            await producing
            await self._until_consumed(self.confirmed)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def goes_on(self, records: int = 1_000) -> None:
        """Return when so many more records are confirmed and consumed."""
        await self._until_consumed(self.confirmed + records)

    async def check(self) -> None:
        title("In the end:")
        found = 0
        async with self._client.checkpoint_consumer(TOPIC, start="earliest") as reader:
            while found < self.confirmed:
                batch = await reader.receive_batch(timeout=PATIENCE_S)
                assert batch is not None, f"the topic ends at {found}"
                assert [int(value) for value in batch.values()] == list(range(found, found + len(batch)))
                found += len(batch)
        detail("sent and confirmed", f"{self.confirmed:,} records")
        detail("lost", f"{self.confirmed - found}")
        detail("out of order", "0")
        detail("longest pause", f"{self.longest_s * 1e3:,.0f} ms")
        assert found == self._consumed == self.confirmed

    async def _produce(self) -> None:
        async with self._client.producer(TOPIC, timeout=PATIENCE_S) as producer:
            while not self._stopping:
                began = time.monotonic()
                receipts = [producer.submit(b"%d" % (self.confirmed + each)) for each in range(BURST)]
                for receipt in receipts:
                    message_id = await receipt
                    assert message_id.offset == self.confirmed, message_id
                    self.confirmed += 1
                self.longest_s = max(self.longest_s, time.monotonic() - began)
                await asyncio.sleep(PERIOD_S)

    async def _consume(self) -> None:
        async with self._client.stream_consumer(TOPIC, subscription="billing", start="earliest") as consumer:
            while True:
                batch = await consumer.receive_batch()
                assert batch is not None
                for value in batch.values():
                    number = int(value)
                    assert number <= self._consumed, f"{number} came, and {self._consumed} did not"
                    self._consumed = max(self._consumed, number + 1)
                await consumer.ack(batch)

    async def _until_consumed(self, records: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self._consumed < records:
                for task in self._tasks:
                    if task.done() and task.exception() is not None:
                        task.result()  # Raises what the application saw.
                await asyncio.sleep(0.01)


# Replicas.


async def replicas(client: Client) -> dict[str, Any]:
    segment: dict[str, Any] = (await client.admin.topic_replicas(TOPIC))["segments"]["0"]
    return segment


async def until_in_sync(client: Client) -> None:
    """Return when every replica has all records."""

    async def states() -> list[str]:
        return sorted(each["state"] for each in (await replicas(client))["replicas"])

    async with asyncio.timeout(PATIENCE_S):
        while await states() != ["in-sync", "in-sync", "owner"]:  # noqa: ASYNC110 (other processes act)
            await asyncio.sleep(0.02)


async def until_active(client: Client, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while len(await client.admin.brokers()) < count:  # noqa: ASYNC110 (other processes act)
            await asyncio.sleep(0.02)


async def show_replicas(client: Client) -> None:
    for each in (await replicas(client))["replicas"]:
        detail(each["broker"], each["state"])


# Brokers.


def broker_process(folder: Path, number: int) -> BrokerProcess:
    return BrokerProcess(
        folder / f"broker-{number}",
        *("--id", f"broker-{number}", "--storage", "local", "--metadata", f"sqlite:{folder}/metadata.db"),
    )


def title(text: str) -> None:
    say(f"\n\x1b[1m{text}\x1b[0m" if COLOURS else f"\n{text}")


def detail(what: str, value: str) -> None:
    say(f"    {what:<46} {value}")


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    logging.getLogger("braid").setLevel(logging.ERROR)  # The client warns of what it rides over: here that is wanted.
    with tempfile.TemporaryDirectory(prefix="braid-lost-machine-") as temporary:
        asyncio.run(main(Path(temporary)))
