"""A small shop on Braid: orders published by key, two workers that share a subscription, totals by Arrow.

python examples/shop.py [braid://host:port]     with a broker that runs; without one it starts its own
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator

import pyarrow as pa
import pyarrow.compute as pc

import braid
from braid.broker.broker import Broker
from braid.broker.config import BrokerConfig
from braid.client.client import Client

SEGMENTS = 4
CUSTOMERS = 50
ORDERS = 10_000


@contextlib.asynccontextmanager
async def a_broker() -> AsyncIterator[str]:
    """The broker of the command line, or one in this process."""
    if len(sys.argv) > 1:
        yield sys.argv[1]
        return
    with tempfile.TemporaryDirectory() as folder:
        broker = await Broker.open(BrokerConfig(data=folder, listen="127.0.0.1:0"))
        try:
            yield f"braid://127.0.0.1:{broker.address.port}"
        finally:
            await broker.close()


async def sell(client: Client) -> None:
    """One customer's orders keep their order: they share a key, so a segment."""
    async with client.producer("shop", compression="zstd") as producer:
        first = await producer.send(b"100", key=b"customer-0", headers={"currency": "EUR"})
        print("A shop publishes its orders, keyed by customer.")
        print(f"    the first order is record {first.offset} of segment {first.segment}")
        orders = [(b"customer-%d" % (n % CUSTOMERS), b"%d" % (n % 90 + 10)) for n in range(1, ORDERS)]
        await producer.send_many(orders)


async def work(client: Client, name: str, done: Counter[str], last: dict[bytes | None, int]) -> None:
    async with client.stream_consumer("shop", subscription="shipping", name=name, start="earliest") as consumer:
        while sum(done.values()) < ORDERS:
            message = await consumer.receive(timeout=1.0)
            if message is None:
                continue
            assert message.offset > last.get(message.key, -1), "an older order of this customer comes later"
            last[message.key] = message.offset
            done[name] += 1
            await consumer.ack(message)


async def both_at_work(client: Client) -> None:
    """Return when each worker has half of the segments. Otherwise the first one could do all the work."""
    async with asyncio.timeout(60):
        while True:
            workers = (await client.admin.subscription("shop", "shipping"))["consumers"].values()
            if [len(each["segments"]) for each in workers] == [SEGMENTS // 2] * 2:
                return
            await asyncio.sleep(0.02)


async def total(client: Client) -> None:
    """The same records as columns: no Python per record."""
    cents = rows = 0
    async with client.checkpoint_consumer("shop", start="earliest") as consumer:
        while rows < ORDERS:
            batch = await consumer.receive_batch()
            assert batch is not None
            values = batch.table.column("value").cast(pa.string()).cast(pa.int64())
            cents += pc.sum(values).as_py()
            rows += len(batch)
        print("A report reads the same orders as columns.")
        print(f"    {rows:,} orders are worth {cents / 100:,.2f} EUR")
        print(f"    its checkpoint, from which a later report goes on, is {len(consumer.checkpoint())} bytes long")


async def main() -> None:
    async with a_broker() as url, braid.connect(url) as client:
        await client.admin.create_topic("shop", segments=SEGMENTS)
        await client.admin.create_subscription("shop", "shipping")
        done: Counter[str] = Counter()
        last: dict[bytes | None, int] = {}
        async with asyncio.TaskGroup() as tasks:
            for name in ("anna", "ben"):
                tasks.create_task(work(client, name, done, last))
            await both_at_work(client)
            await sell(client)
        print("Anna and Ben share the subscription shipping.")
        print(f"    anna shipped {done['anna']:,} orders and ben {done['ben']:,}, each customer's in order")
        stats = await client.admin.subscription("shop", "shipping")
        print(f"    the subscription's backlog is {stats['backlog']}")
        await total(client)
        await client.admin.delete_topic("shop")


if __name__ == "__main__":
    asyncio.run(main())
