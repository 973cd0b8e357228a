"""Replicated segments of whole brokers in virtual time: a topic `orders` of one segment, and its copies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from braid.client.client import Client
from braid.client.producing.producer import Producer
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import PATH, Brokers, read_all, running_brokers
from tests.kits.waiting import until


def in_sync(brokers: Brokers) -> list[str]:
    """The followers whose copies count and hold everything, as the owner knows it."""
    found = brokers.running[owner].segments.of_topic(PATH) if (owner := brokers.owner(0)) else []
    followers = [each for segment in found[:1] for each in segment.followers]
    return [each.broker for each in followers if each.in_sync and each.member and not each.behind]


async def complete(brokers: Brokers, followers: int = 2) -> str:
    """Wait until so many followers count; return the owner."""
    await until(lambda: len(in_sync(brokers)) == followers)
    return brokers.owner(0)


async def send(producer: Producer, start: int, end: int) -> None:
    for number in range(start, end):
        await producer.send(b"%d" % number)


async def send_all(producer: Producer, values: list[bytes]) -> None:
    for value in values:
        await producer.send(value)


async def check(client: Client, count: int) -> None:
    """Every record is there once, in order."""
    assert await read_all(client, count) == [b"%d" % number for number in range(count)]


@asynccontextmanager
async def replicated(
    simulation: Simulation, names: tuple[str, ...] = ("a", "b", "c"), *, shared: bool = True, confirm: int = 2
) -> AsyncIterator[tuple[Brokers, Client, Producer]]:
    async with running_brokers(simulation, names, shared=shared) as brokers, brokers.client(timeout=120) as client:
        await client.admin.create_topic("orders", replicas=3, confirm=confirm)
        async with client.producer("orders") as producer:
            await complete(brokers)
            yield brokers, client, producer
