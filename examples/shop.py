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
        print(f"the first order is record {first.offset} of segment {first.segment}")
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
        print(f"{rows} orders are worth {cents}; a later run can go on from {len(consumer.checkpoint())} bytes")


async def main() -> None:
    async with a_broker() as url, braid.connect(url) as client:
        await client.admin.create_topic("shop", segments=4)
        await sell(client)
        done: Counter[str] = Counter()
        last: dict[bytes | None, int] = {}
        await asyncio.gather(*(work(client, name, done, last) for name in ("anna", "ben")))
        print(f"anna and ben shipped {sum(done.values())} orders, each customer's in order")
        await total(client)
        stats = await client.admin.subscription("shop", "shipping")
        print(f"shipping has a backlog of {stats['backlog']}")
        await client.admin.delete_topic("shop")


if __name__ == "__main__":
    asyncio.run(main())
