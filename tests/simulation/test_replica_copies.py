"""The copies that brokers keep of replicated segments: who may change them, and when they go."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from braid.broker.replicas.copies import ReplicaCopies
from braid.model.errors import Fenced, NotServing
from braid.storage.log.promise import NAME as MARK
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import PATH, Brokers, record_of
from tests.kits.replicas import check, complete, replicated, send
from tests.kits.waiting import until


def copies_of(brokers: Brokers, name: str) -> ReplicaCopies:
    return brokers.running[name].segment_host.replicas


def about(brokers: Brokers, epoch: int) -> dict[str, Any]:
    """What the owner of an epoch says of the segment when it begins a session."""
    (segment,) = brokers.running[brokers.owner(0)].segments.of_topic(PATH)
    return {
        "segment": str(segment.name),
        "topic_id": segment.topic_id,
        "epoch": epoch,
        "session": 1,
        "revision": 0,
    }


async def test_a_copy_is_removed_only_when_no_request_changes_it_and_no_record_names_it(
    simulation: Simulation,
) -> None:
    async with replicated(simulation) as (brokers, client, producer):
        await send(producer, 0, 20)
        await complete(brokers)
        before, segment = {*record_of(brokers).replicas}, about(brokers, epoch=1)["segment"]
        async with AsyncExitStack() as requests:
            for name in before:
                await requests.enter_async_context(copies_of(brokers, name)._locks.of(segment))
            await client.admin.set_replicas("orders", 2)
            await until(lambda: len(record_of(brokers).replicas) == 2)
            (left,) = before - {*record_of(brokers).replicas}
            await asyncio.sleep(30)
            (mark,) = [path for path in brokers.disks[left].paths() if path.endswith(f"/{MARK}")]
            file = brokers.disks[left].files()[mark]
            await client.admin.set_replicas("orders", 3)
            await until(lambda: record_of(brokers).keeps_copy(left))
        await complete(brokers)
        assert brokers.disks[left].files()[mark] is file, "the copy went on, and nobody has removed it"
        await send(producer, 20, 30)
        await check(client, 30)


async def test_a_copy_is_begun_only_by_the_owner_of_the_record_s_epoch_and_never_on_the_owner(
    simulation: Simulation,
) -> None:
    async with replicated(simulation) as (brokers, client, producer):
        await send(producer, 0, 10)
        await client.admin.move("orders")  # Nobody has promised the next epoch: no vote was held.
        owner = await complete(brokers)
        epoch = record_of(brokers).epoch
        follower = next(each for each in record_of(brokers).replicas if each != owner)
        with pytest.raises(Fenced, match=rf"has come to epoch {epoch}"):
            await copies_of(brokers, follower).begin(about(brokers, epoch - 1))
        with pytest.raises(NotServing, match="owns"):
            await copies_of(brokers, owner).begin(about(brokers, epoch))
        await send(producer, 10, 20)
        await check(client, 20)
