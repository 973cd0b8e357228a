"""A topic is split, merged and repartitioned while it is used, and its braid is drawn.

    python examples/split_and_merge.py

A program counts up for each of 200 customers, with the customer as the key. Two workers share a subscription, and check
each customer's numbers: 0, 1, 2, … without a gap. Meanwhile the segments of the topic are replaced by others, again and
again. In the end `braid topic layout` draws how that went.

Two `braid serve` processes, one metadata store, one folder for history that they share. What is shown is checked.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import braid
from braid.client.client import Client
from braid.testing.processes import BrokerProcess
from braid.wire.address import format_url

PATIENCE_S = 60.0
TOPIC = "orders"
CUSTOMERS = 200
PERIOD_S = 0.01
WORKERS = 2
COLOURS = sys.stdout.isatty() and "NO_COLOR" not in os.environ


async def main(folder: Path) -> None:
    async with AsyncExitStack() as stack:
        brokers = [broker_process(folder, number) for number in range(2)]
        for broker in brokers:
            stack.push(broker)  # It ends with the stack, wherever this stops.
        await asyncio.gather(*(asyncio.to_thread(broker.start) for broker in brokers))
        url = format_url([broker.address for broker in brokers])
        client = await stack.enter_async_context(braid.connect(url, timeout=PATIENCE_S))
        await client.admin.create_topic(TOPIC)
        title(f"A program counts for {CUSTOMERS} customers, and {WORKERS} workers follow. Meanwhile:")
        async with Load(client).running() as load:
            await load.phase("nothing", asyncio.sleep(1.0))
            await load.phase("segment 0 is split", client.admin.split(TOPIC, 0))
            await load.phase("segment 2 is split at hash c000", client.admin.split(TOPIC, 2, at="c000"))
            await load.phase("segments 1 and 3 are merged", client.admin.merge(TOPIC, 1, 3))
            await load.phase("there are 4 segments of equal size", client.admin.repartition(TOPIC, 4))
            await load.phase("there is one segment again", client.admin.repartition(TOPIC, 1))
        load.check()
        title(f"The braid of the topic, by `braid topic layout {TOPIC}`:")
        say(await drawing(url))


class Load:
    """Counts for each customer, and checks that the workers see each customer's numbers in order."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._sent: Counter[bytes] = Counter()
        self._seen: Counter[bytes] = Counter()
        """By customer: the next number."""
        self._again = 0
        self._out_of_order = 0
        self._slowest_s = 0.0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        producing = asyncio.create_task(self._produce())
        self._tasks = [producing, *(asyncio.create_task(self._work(f"worker-{each}")) for each in range(WORKERS))]
        try:
            await self._until_seen(1)
            yield self
            self._stopping = True
            await producing
            await self._until_seen(self._sent.total())
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def phase(self, what: str, happening: Awaitable[object]) -> None:
        """Let it happen, and say how long it took and how long a record waited meanwhile."""
        self._slowest_s = 0.0
        began = time.monotonic()
        await happening
        took_s = time.monotonic() - began
        await self._until_seen(self._sent.total() + CUSTOMERS)
        detail(what, f"{took_s:.2f} s; a record waited {self._slowest_s * 1e3:,.0f} ms at most")

    def check(self) -> None:
        title("In the end:")
        detail("counted", f"{self._sent.total():,} records of {len(self._sent)} customers")
        detail("not seen", f"{(self._sent - self._seen).total()}")
        detail("out of order", f"{self._out_of_order}")
        detail("seen again", f"{self._again}")
        assert self._seen == self._sent
        assert not self._out_of_order

    async def _produce(self) -> None:
        async with self._client.producer(TOPIC, timeout=PATIENCE_S) as producer:
            while not self._stopping:
                began = time.monotonic()
                receipts = []
                for customer in (b"customer-%d" % each for each in range(CUSTOMERS)):
                    receipts.append(producer.submit(b"%d" % self._sent[customer], key=customer))
                    self._sent[customer] += 1
                for receipt in receipts:
                    await receipt
                self._slowest_s = max(self._slowest_s, time.monotonic() - began)
                await asyncio.sleep(PERIOD_S)

    async def _work(self, name: str) -> None:
        async with self._client.stream_consumer(TOPIC, subscription="totals", name=name, start="earliest") as consumer:
            while True:
                batch = await consumer.receive_batch()
                assert batch is not None
                for message in batch.messages():
                    assert message.key is not None
                    self._see(message.key, int(message.value))
                await consumer.ack(batch)

    def _see(self, customer: bytes, number: int) -> None:
        expected = self._seen[customer]
        if number == expected:
            self._seen[customer] += 1
        elif number < expected:
            self._again += 1
        else:
            self._out_of_order += 1

    async def _until_seen(self, records: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self._seen.total() < records:
                for task in self._tasks:
                    if task.done() and task.exception() is not None:
                        task.result()  # Raises what the application saw.
                await asyncio.sleep(0.01)


async def drawing(url: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "braid.cli.main", "--url", url, "topic", "layout", TOPIC),
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0
    return said.decode()


def broker_process(folder: Path, number: int) -> BrokerProcess:
    return BrokerProcess(
        folder / f"broker-{number}",
        *("--id", f"broker-{number}"),
        *("--metadata", f"sqlite:{folder}/metadata.db", "--storage", f"file://{folder}/history"),
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
    with tempfile.TemporaryDirectory(prefix="braid-split-") as temporary:
        asyncio.run(main(Path(temporary)))
