"""What the audit asks owners about their queues: journals that agree with memory, log and cursor, and others."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from braid.client.client import Client
from braid.storage.queue_journal import MAGIC, SUFFIX, QueueJournal
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import Brokers
from tests.kits.queues import queue_of, take


async def settle_some(client: Client) -> None:
    """Of 20 messages, settle the first 5 and one out of order, and return one."""
    async with client.queue_consumer("orders", "work") as consumer:
        messages = await take(consumer, 20)
        for message in (*messages[:5], messages[8]):
            await consumer.ack(message)
        await consumer.nack(messages[6], delay=3_600, reason="later")


async def test_a_sound_queue_has_no_finding_under_work_and_after_a_crash(simulation: Simulation) -> None:
    async with queue_of(simulation, messages=20, segments=1) as (brokers, client):
        assert await client.admin.check_queues("orders") == {}
        await settle_some(client)
        assert await client.admin.check_queues("orders") == {}
        brokers.kill("a")
        await brokers.start("a")
        assert await client.admin.check_queues("orders") == {}


def journals(brokers: Brokers) -> list[str]:
    return [each for each in brokers.disks["a"].paths() if each.endswith(SUFFIX)]


@contextlib.asynccontextmanager
async def planted(brokers: Brokers, **changes: Any) -> AsyncIterator[None]:
    """Let the disk hold another checkpoint than the owner has written."""
    disk = brokers.disks["a"]
    (path,) = journals(brokers)
    journal = await QueueJournal.open(disk.mount(), path.rpartition("/")[0])
    assert journal.image is not None
    await journal.durable.reached(journal.begin_anew(replace(journal.image.snapshot(), **changes)))
    yield
    await journal.close()


@pytest.mark.parametrize(
    ("changes", "findings"),
    [
        (
            {"settled": ((8, 9), (40, 41))},
            [
                "the journal of the queue work does not have what its owner knows",
                "the queue work knows of message 40, and the log ends at 20",
            ],
        ),
        ({"settled": ()}, ["the journal of the queue work does not have what its owner knows"]),
        ({"returned": ()}, ["the journal of the queue work does not have what its owner knows"]),
        (
            {"base": 3},
            [
                "the journal of the queue work does not have what its owner knows",
                "the cursor of the queue work is at 5, and message 3 is not settled",
            ],
        ),
    ],
    ids=["ack of no message", "forgotten ack", "forgotten delivery", "cursor ahead"],
)
async def test_a_journal_that_disagrees_is_found(
    simulation: Simulation, changes: dict[str, Any], findings: list[str]
) -> None:
    async with queue_of(simulation, messages=20) as (brokers, client):
        await settle_some(client)
        async with planted(brokers, **changes):
            assert await client.admin.check_queues("orders") == {0: findings}


async def test_a_journal_that_was_damaged_under_its_owner_is_a_finding_and_no_error(simulation: Simulation) -> None:
    async with queue_of(simulation, messages=20) as (brokers, client):
        await settle_some(client)
        disk = brokers.disks["a"]
        (path,) = journals(brokers)
        second = disk.content(path).index(MAGIC, 4)
        disk.corrupt(path, second + 25, b"\xff\xff")
        assert await client.admin.check_queues("orders") == {0: [f"{path} is damaged at byte {second}"]}
