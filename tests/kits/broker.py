"""A real broker on a free port for tests of clients, in the test's own loop or in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator, Sequence

from braid.broker.broker import Broker
from braid.broker.config import BrokerConfig
from braid.client.client import Client
from braid.model.batch.columns import encode_batch
from braid.model.message import MessageId
from braid.wire.address import format_address
from braid.wire.operations import AdminReply, AdminRequest, Kind, Published, decode, encode


def config(data: str, listen: str = "127.0.0.1:0") -> BrokerConfig:
    return BrokerConfig(data=data, listen=listen, admin="127.0.0.1:0")


def url_of(broker: Broker) -> str:
    return f"braid://{format_address(broker.address)}"


@contextlib.asynccontextmanager
async def running_broker(data: str, listen: str = "127.0.0.1:0") -> AsyncIterator[Broker]:
    broker = await Broker.open(config(data, listen))
    try:
        yield broker
    finally:
        await broker.close()


@contextlib.contextmanager
def broker_in_a_thread(data: str) -> Iterator[str]:
    """The broker's URL. For blocking clients, which leave no loop to the test."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="broker")
    thread.start()
    try:
        broker = asyncio.run_coroutine_threadsafe(Broker.open(config(data)), loop).result(30)
        try:
            yield url_of(broker)
        finally:
            asyncio.run_coroutine_threadsafe(broker.close(), loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def admin(client: Client, call: str, **arguments: object) -> object:
    """An admin call, straight over the wire."""
    link = await client.pool.any()
    reply = await link.ask(Kind.ADMIN, encode(AdminRequest(call, arguments)), AdminReply, 30)
    return reply.result


async def publish(
    client: Client, topic: str, segment: int, values: Sequence[bytes], *, now_us: int = 1_000_000
) -> list[MessageId]:
    """One batch into one segment, straight over the wire: where a record lands does not depend on a producer."""
    routes = await client.routing.topic(f"public/default/{topic}")
    link = await client.routing.owner_link(routes.topic, segment)
    batch = encode_batch(values, now_us=now_us)
    async with asyncio.timeout(30):
        reply = await link.request(Kind.PUBLISH, routes.publish_route(segment), [batch])
    base = decode(Published, reply.body).base_offset
    return [MessageId(segment, base + index) for index in range(len(values))]
