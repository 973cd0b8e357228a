"""A topic moves between brokers while it is used; then a whole cluster is pulled about under load.

    python examples/timeline.py [--metadata etcd://HOST:PORT,…]

First the timeline: broker-0 stores messages 0..21, a consumer has read up to 13, the topic moves to broker-1, which
goes on at 22 and stores 22..27; the consumer reads 14..27. Then the same without a pause in the work: producers and
consumers run while segments move, one broker is drained, one is stopped in order, and one is killed and comes back.

Three `braid serve` processes, one metadata store (SQLite, unless another is named), one folder for history that they
share. What is shown is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
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
SEGMENTS = 6
PRODUCERS = 3
CONSUMERS = 2
BURST = 20
PERIOD_S = 0.05
COLOURS = sys.stdout.isatty() and "NO_COLOR" not in os.environ


async def main(folder: Path, metadata: str) -> None:
    config = folder / "broker.toml"
    config.write_text("lease_ttl_s = 5\n")
    async with AsyncExitStack() as stack:
        brokers = [broker_process(folder, number, metadata) for number in range(3)]
        for broker in brokers:
            stack.push(broker)  # It ends with the stack, wherever this stops.
        await asyncio.gather(*(asyncio.to_thread(broker.start) for broker in brokers))
        url = format_url([broker.address for broker in brokers])
        client = await stack.enter_async_context(braid.connect(url, timeout=PATIENCE_S))
        await timeline(client, brokers)
        await live_load(client, brokers)


# The timeline.


async def timeline(client: Client, brokers: list[BrokerProcess]) -> None:
    title("Broker-0 stores 22 messages. A consumer reads up to 13.")
    await client.admin.create_topic("orders")
    await client.admin.move("orders", to="broker-0")
    await publish(client, range(22))
    detail("stored and synced", "0..21 by broker-0")
    await consume(client, range(14))
    detail("consumed", "0..13, and the cursor is stored")

    title("The topic moves to broker-1.")
    (moved,) = (await client.admin.move("orders", to="broker-1"))["segments"]
    detail("moved", f"from {moved['from']} to {moved['to']}, which serves it in epoch {moved['epoch']}")
    async with asyncio.timeout(PATIENCE_S):  # They go when the other has taken over.
        while list(brokers[0].data.glob("wal/public/default/orders/**/*.wal")):  # noqa: ASYNC110 (another process acts)
            await asyncio.sleep(0.01)
    detail("files left at broker-0", "0")

    title("Broker-1 goes on at 22 and stores 6 messages. The consumer goes on at 14.")
    await publish(client, range(22, 28))
    detail("stored and synced", "22..27 by broker-1")
    await consume(client, range(14, 28))
    detail("consumed", "14..27, without a gap")


async def publish(client: Client, numbers: range) -> None:
    async with client.producer("orders") as producer:
        for number in numbers:
            message_id = await producer.send(b"message %d" % number)
            assert message_id.offset == number, message_id


async def consume(client: Client, numbers: range) -> None:
    async with client.stream_consumer("orders", subscription="billing", start="earliest") as consumer:
        for number in numbers:
            message = await consumer.receive(timeout=PATIENCE_S)
            assert message is not None
            assert (message.offset, message.value) == (number, b"message %d" % number), message
            await consumer.ack(message)


# The same under load.


async def live_load(client: Client, brokers: list[BrokerProcess]) -> None:
    title(f"{PRODUCERS} producers and {CONSUMERS} consumers work on {SEGMENTS} segments of three brokers. Meanwhile:")
    await client.admin.create_topic("live", segments=SEGMENTS)
    async with Load(client).running() as load:
        await load.phase("nothing", asyncio.sleep(1.0))
        await load.phase("10 segments move", move_some(client, 10))
        await load.phase("broker-1 is drained", drain(client, "broker-1"))
        await client.admin.activate("broker-1")
        await load.phase("broker-2 is stopped in order", asyncio.to_thread(brokers[2].stop))
        await asyncio.to_thread(brokers[2].start)
        await load.phase("every segment moves", move_some(client, SEGMENTS))
        await load.phase("broker-0 is killed with SIGKILL and comes back", kill_and_start(brokers[0]))
    await load.check()


async def move_some(client: Client, count: int) -> None:
    chosen = random.Random(4)
    for number in range(count):
        topic = await client.admin.topic_stats("live")
        owner = topic["segments"][str(number % SEGMENTS)]["owner"]
        to = chosen.choice([f"broker-{other}" for other in range(3) if f"broker-{other}" != owner])
        await client.admin.move("live", segment=number % SEGMENTS, to=to)


async def drain(client: Client, broker: str) -> None:
    state = await client.admin.drain(broker)
    while state["state"] == "draining":
        await asyncio.sleep(0.02)
        (state,) = [each for each in await client.admin.brokers() if each["id"] == broker]
    assert (state["state"], state["segments"]) == ("drained", 0), state


class Load:
    """Knows what was confirmed and what was consumed, and how long anybody had to wait."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._sent = 0
        self._confirmed: dict[tuple[int, int], bytes] = {}
        self._consumed: Counter[tuple[int, int]] = Counter()
        self._values: Counter[bytes] = Counter()
        self._slowest_s = 0.0
        self._quiet_s = 0.0
        self._heard = 0.0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        producers = [asyncio.create_task(self._produce(number)) for number in range(PRODUCERS)]
        consumers = [asyncio.create_task(self._consume(f"worker-{number}")) for number in range(CONSUMERS)]
        self._tasks = [*producers, *consumers]
        try:
            await self._until_consumed(1)
            yield self
            self._stopping = True
            await asyncio.gather(*producers)
            await self._until_consumed(len(self._confirmed))
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def phase(self, what: str, happening: Awaitable[object]) -> None:
        """Let it happen, and say how long it took and how long anybody waited meanwhile."""
        self._slowest_s = self._quiet_s = 0.0
        began = time.monotonic()
        await happening
        took_s = time.monotonic() - began
        await self._until_consumed(len(self._confirmed) + PRODUCERS * BURST)  # What began meanwhile counts here.
        pauses = f"a producer waited {self._slowest_s * 1e3:,.0f} ms, consumers {self._quiet_s * 1e3:,.0f} ms at most"
        detail(what, f"{took_s:.2f} s; {pauses}")

    async def check(self) -> None:
        title("In the end:")
        missing = [place for place in self._confirmed if not self._consumed[place]]
        twice = [value for value, count in self._values.items() if count > 1]
        again = sum(count - 1 for count in self._consumed.values())
        detail("sent and confirmed", f"{self._sent:,} and {len(self._confirmed):,} records")
        detail("lost", f"{len(missing)}")
        detail("stored twice", f"{len(twice)}")
        detail("delivered again", f"{again}")
        detail("errors seen by the application", "0")
        assert self._sent == len(self._confirmed)
        assert not missing
        assert not twice

    async def _produce(self, number: int) -> None:
        async with self._client.producer("live", timeout=PATIENCE_S) as producer:
            count = 0
            while not self._stopping:
                values = [b"%d-%d" % (number, count + each) for each in range(BURST)]
                began = time.monotonic()
                receipts = [producer.submit(value, key=value) for value in values]
                self._sent += BURST
                for value, receipt in zip(values, receipts, strict=True):
                    message_id = await receipt
                    self._confirmed[message_id.segment, message_id.offset] = value
                self._slowest_s = max(self._slowest_s, time.monotonic() - began)
                count += BURST
                await asyncio.sleep(PERIOD_S)

    async def _consume(self, name: str) -> None:
        async with self._client.stream_consumer("live", subscription="work", name=name, start="earliest") as consumer:
            while True:
                batch = await consumer.receive_batch()
                assert batch is not None
                now = time.monotonic()
                if self._heard:
                    self._quiet_s = max(self._quiet_s, now - self._heard)
                self._heard = now
                for message in batch.messages():
                    place = message.segment, message.offset
                    self._consumed[place] += 1
                    if self._consumed[place] == 1:
                        self._values[message.value] += 1
                await consumer.ack(batch)

    async def _until_consumed(self, records: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self._consumed) < records:
                for task in self._tasks:
                    if task.done() and task.exception() is not None:
                        task.result()  # Raises what the application saw.
                await asyncio.sleep(0.01)


# Brokers.


def broker_process(folder: Path, number: int, metadata: str) -> BrokerProcess:
    return BrokerProcess(
        folder / f"broker-{number}",
        *("--config", str(folder / "broker.toml"), "--id", f"broker-{number}"),
        *("--metadata", metadata, "--storage", f"file://{folder}/history"),
    )


async def kill_and_start(broker: BrokerProcess) -> None:
    await asyncio.to_thread(broker.kill)
    await asyncio.to_thread(broker.start)


def title(text: str) -> None:
    say(f"\n\x1b[1m{text}\x1b[0m" if COLOURS else f"\n{text}")


def detail(what: str, value: str) -> None:
    say(f"    {what:<46} {value}")


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--metadata", default="")
    chosen_metadata: str = arguments.parse_args().metadata
    logging.getLogger("braid").setLevel(logging.ERROR)  # The client warns of what it rides over: here that is wanted.
    with tempfile.TemporaryDirectory(prefix="braid-timeline-") as temporary:
        asyncio.run(main(Path(temporary), chosen_metadata or f"sqlite:{temporary}/metadata.db"))
