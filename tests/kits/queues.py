"""Queues of whole brokers in virtual time: a topic `orders`, a queue `work`, and programs that consume it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

from braid.broker.queues.segment_queue import SegmentQueue
from braid.client.client import Client, connect
from braid.client.consuming.queue import QueueConsumer
from braid.model.message import QueueMessage
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import PATH, PORT, Brokers, running_brokers
from tests.kits.waiting import until

QUIET_S = 5.0
"""Longer than a delivery takes, and shorter than a lease."""


@contextlib.asynccontextmanager
async def queue_of(
    simulation: Simulation,
    names: tuple[str, ...] = ("a",),
    *,
    shared: bool = True,
    messages: int = 0,
    segments: int = 1,
    topic: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[tuple[Brokers, Client]]:
    """Start brokers with a topic of so many messages, 0, 1, 2, …, and a queue with these options."""
    async with running_brokers(simulation, names, shared=shared) as brokers, brokers.client(*names) as client:
        await client.admin.create_topic("orders", segments=segments, **(topic or {}))
        await client.admin.create_subscription("orders", "work", kind="queue", **options)
        await send(client, range(messages))
        yield brokers, client


@contextlib.asynccontextmanager
async def program(brokers: Brokers, host: str) -> AsyncIterator[Client]:
    """Connect from a machine of its own, which can be cut off by this name."""
    client = connect(
        "braid://" + ",".join(f"{name}:{PORT}" for name in brokers.running),
        network=brokers.network.host(host),
        clock=brokers.simulation.clock,
        random=brokers.simulation.random,
    )
    async with client:
        yield client


def kill_program(brokers: Brokers, host: str) -> None:
    """Let the connections of a program break, and none come about again."""
    for name in brokers.running:
        brokers.network.cut(host, name)
        brokers.network.reset(host, name)


async def send(client: Client, numbers: Iterable[int], *, headers: dict[str, bytes] | None = None) -> None:
    """Send numbers, each with its own key. They go in batches, as programs send."""
    async with client.producer("orders") as producer:
        for number in numbers:
            await producer.send(b"%d" % number, key=b"%d" % number, headers=headers or {})


async def take(consumer: QueueConsumer, count: int) -> list[QueueMessage]:
    """Receive so many messages."""
    found: list[QueueMessage] = []
    while len(found) < count:
        message = await consumer.receive(timeout=60)
        assert message is not None, f"{len(found)} of {count} messages came: {numbers(found)}"
        found.append(message)
    return found


async def take_all(consumer: QueueConsumer, quiet_s: float = QUIET_S, *, ack: bool = False) -> list[QueueMessage]:
    """Receive until nothing comes for a while."""
    found: list[QueueMessage] = []
    while (message := await consumer.receive(timeout=quiet_s)) is not None:
        found.append(message)
        if ack:
            await consumer.ack(message)
    return found


def numbers(messages: Iterable[QueueMessage]) -> list[int]:
    return sorted(int(message.value) for message in messages)


async def remaining(client: Client, quiet_s: float = QUIET_S) -> list[int]:
    """Return what the queue still delivers to a new consumer, and settle it."""
    async with client.queue_consumer("orders", "work") as consumer:
        return numbers(await take_all(consumer, quiet_s, ack=True))


def queue_at(brokers: Brokers, segment: int = 0, subscription: str = "work") -> SegmentQueue:
    """The queue on the segment's owner."""
    owner = brokers.owner(segment)
    assert owner, f"nobody serves segment {segment}"
    return brokers.running[owner].segments.get(PATH, segment).queues.get(subscription)


async def served(brokers: Brokers, segment: int = 0) -> str:
    """Wait until somebody serves the segment; return who."""
    await until(lambda: brokers.owner(segment))
    return brokers.owner(segment)
