"""Replicated segments of which too many replicas are gone for good: an operator accepts the loss, and they go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from braid.client.client import Client
from braid.client.producing.producer import Producer
from braid.model.errors import InvalidArgument, MoveRefused
from braid.testing.sim.disk import DiskFaults
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import PATH, SHARED, Brokers, record_of, running_brokers
from tests.kits.replicas import check, complete, in_sync, replicated, send
from tests.kits.waiting import until

FIVE = ("a", "b", "c", "d", "e")


async def all_hold_all(brokers: Brokers) -> None:
    """Return when every follower's disk has the whole log."""
    (segment,) = brokers.running[brokers.owner(0)].segments.of_topic(PATH)
    await until(lambda: not any(each.behind for each in segment.followers))


async def lose(brokers: Brokers, *names: str) -> None:
    """Take brokers away with their disks, and let the leader notice."""
    for name in names:
        brokers.kill(name)
        brokers.lose_disk(name)
    await asyncio.sleep(30)


async def accept_on_slow_disks(brokers: Brokers, client: Client) -> asyncio.Task[Any]:
    """Accept the loss of all replicas. The brokers that run are asked to go on, and wait for their disks."""
    for name in brokers.running:
        brokers.disks[name].faults = DiskFaults(sync_s=(5.0, 5.0))
    recovering = asyncio.create_task(client.admin.recover("orders", accept_loss=True, timeout=60))
    await until(lambda: record_of(brokers).accept_loss)
    return recovering


def mend_disks(brokers: Brokers) -> None:
    for disk in brokers.disks.values():
        disk.faults = DiskFaults()


@asynccontextmanager
async def without_an_owner(
    simulation: Simulation, shared: bool
) -> AsyncIterator[tuple[Brokers, Client, Producer, str]]:
    """Four brokers and a segment that all its three replicas must confirm; its owner is lost. Yields who that was."""
    async with replicated(simulation, ("a", "b", "c", "d"), shared=shared, confirm=3) as (brokers, client, producer):
        await send(producer, 0, 20)
        owner = brokers.owner(0)
        await lose(brokers, owner)
        yield brokers, client, producer, owner


@SHARED
async def test_the_last_replica_goes_on_with_others_when_the_loss_is_accepted(
    simulation: Simulation, shared: bool
) -> None:
    """Two of three are gone for good. The third one has all of it here, and brokers that had nothing join it."""
    async with replicated(simulation, FIVE, shared=shared) as (brokers, client, producer):
        await send(producer, 0, 20)
        await all_hold_all(brokers)
        owner, follower, last = record_of(brokers).replicas
        await lose(brokers, owner, follower)
        would_lose = f"{last} holds the log up to offset 20; what was confirmed from offset 20 on is lost"
        with pytest.raises(InvalidArgument, match=rf"must vote, and {owner} and {follower} are down; {would_lose}"):
            await client.admin.recover("orders")
        done = await client.admin.recover("orders", accept_loss=True)
        assert [each["to"] for each in done["segments"]] == [last]
        await complete(brokers)
        assert not {owner, follower} & {*record_of(brokers).replicas}
        await send(producer, 20, 40)
        await check(client, 40)


@SHARED
async def test_a_segment_that_all_replicas_must_confirm_goes_on_without_one_when_that_is_accepted(
    simulation: Simulation, shared: bool
) -> None:
    """Each of the others has everything that was confirmed. Without the third one they could confirm nothing more."""
    async with without_an_owner(simulation, shared) as (brokers, client, producer, owner):
        with pytest.raises(InvalidArgument, match=rf"must hold a record, and {owner} is down"):
            await client.admin.recover("orders")
        await client.admin.recover("orders", accept_loss=True)
        await complete(brokers)
        await send(producer, 20, 40)
        await check(client, 40)


@SHARED
async def test_a_segment_that_all_replicas_must_confirm_goes_on_by_itself_when_one_stays_away(
    simulation: Simulation, shared: bool
) -> None:
    async with without_an_owner(simulation, shared) as (brokers, client, producer, owner):
        assert record_of(brokers).owner == owner, "it may come back"
        await until(lambda: owner not in record_of(brokers).replicas, within_s=700)
        await complete(brokers)
        await send(producer, 20, 40)
        await check(client, 40)
        await brokers.start(owner)
        brokers.kill(lost := brokers.owner(0))  # The new copy counts like any other.
        await until(lambda: lost not in record_of(brokers).replicas, within_s=700)
        await complete(brokers)
        await check(client, 40)


@SHARED
async def test_an_owner_that_is_back_replaces_the_second_of_two_replicas(simulation: Simulation, shared: bool) -> None:
    async with running_brokers(simulation, shared=shared) as brokers, brokers.client(timeout=120) as client:
        await client.admin.create_topic("orders", replicas=2)
        async with client.producer("orders") as producer:
            owner = await complete(brokers, followers=1)
            await send(producer, 0, 20)
            (follower,) = in_sync(brokers)
            brokers.kill(follower)
            brokers.kill(owner)
            await brokers.start(owner)
            await until(lambda: follower not in record_of(brokers).replicas, within_s=700)
            assert await complete(brokers, followers=1) == owner
            await send(producer, 20, 30)
            await check(client, 30)


@SHARED
async def test_replicas_that_are_back_before_others_serve_lose_nothing_though_all_were_given_up(
    simulation: Simulation, shared: bool
) -> None:
    """All three are gone, and the loss is accepted. Two of them are back while the new owner still waits for its disk:
    they vote, and neither of them was sent anything that the new owner had."""
    async with replicated(simulation, FIVE, shared=shared) as (brokers, client, producer):
        await send(producer, 0, 20)
        await all_hold_all(brokers)
        replicas = record_of(brokers).replicas
        for name in replicas:
            brokers.kill(name)
        others = [*brokers.running]
        await until(lambda: not any(map(brokers.any().cluster.members.is_live, replicas)))
        recovering = await accept_on_slow_disks(brokers, client)
        assert {*record_of(brokers).replicas} == {*others}
        await brokers.start(*replicas[1:])
        await until(lambda: record_of(brokers).replicas == replicas)
        assert not record_of(brokers).accept_loss
        with pytest.raises(MoveRefused, match="could not take it any more"):
            await recovering
        mend_disks(brokers)
        await complete(brokers, followers=1)
        await send(producer, 20, 40)
        await check(client, 40)


@SHARED
async def test_a_loss_can_be_accepted_again_when_a_replica_is_back_without_its_disk(
    simulation: Simulation, shared: bool
) -> None:
    async with replicated(simulation, FIVE, shared=shared) as (brokers, client, producer):
        await send(producer, 0, 20)
        await all_hold_all(brokers)
        replicas = record_of(brokers).replicas
        await lose(brokers, *replicas)
        recovering = await accept_on_slow_disks(brokers, client)
        await brokers.start(replicas[0])
        await until(lambda: record_of(brokers).replicas == replicas)
        recovering.cancel()
        mend_disks(brokers)
        done = await client.admin.recover("orders", accept_loss=True)
        assert [each["to"] for each in done["segments"]] == [replicas[0]]
        await complete(brokers)
        await producer.send(b"0")


async def test_clients_of_a_frozen_owner_go_on_as_soon_as_its_lease_is_over(simulation: Simulation) -> None:
    """Its connections stay open, and it says nothing. It also answers questions about routes."""
    async with replicated(simulation) as (brokers, client, producer):
        await send(producer, 0, 20)
        brokers.freeze(owner := brokers.owner(0))
        began = simulation.loop.time()
        await send(producer, 20, 21)
        assert simulation.loop.time() - began < 15
        brokers.thaw(owner)
        await complete(brokers)
        await check(client, 21)


async def test_a_broker_lists_its_history_only_when_no_copy_is_being_removed(simulation: Simulation) -> None:
    """Otherwise an owner would count on chunks that are about to go."""
    async with replicated(simulation, ("a", "b", "c", "d"), shared=False) as (brokers, client, producer):
        await send(producer, 0, 5)
        replicas = {*record_of(brokers).replicas}
        await client.admin.set_replicas("orders", 2)
        await until(lambda: len(record_of(brokers).replicas) == 2)
        record = record_of(brokers)
        (left,) = replicas - {*record.replicas}
        (segment,) = brokers.running[record.owner].segments.of_topic(PATH)
        known = brokers.running[left].cluster.owners.known(segment.name)
        assert known is not None
        host = brokers.running[left].segment_host
        about = {"segment": str(segment.name), "topic_id": segment.topic_id, "revision": known.revision}
        async with host.replicas._locks.of(str(segment.name)):  # As long as its copy is removed.
            listing = asyncio.ensure_future(host.incoming.list_history(about))
            await asyncio.sleep(5)
            assert not listing.done()
        assert await listing == {}
