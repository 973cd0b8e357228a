"""Election and lease keeping over every store: one leader at a time, and a next one when it goes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from braid.metadata.election import Election, Leadership
from braid.metadata.keepalive import LeaseKeeper
from braid.metadata.store import Lease, Put, Store
from braid.model.errors import LeaseLost

if TYPE_CHECKING:
    from tests.conformance.conftest import Backend

KEY = "/cluster/leader"


def election(backend: Backend, client: Store) -> Election:
    return Election(client, KEY, backend.clock)


async def holds(client: Store, leadership: Leadership) -> bool:
    return (await client.txn([leadership.fence], [])).succeeded


async def test_the_first_candidate_leads_at_once(backend: Backend) -> None:
    client = await backend.client()
    lease = await backend.lease(client)
    leadership = await election(backend, client).campaign(b"a", lease)
    assert leadership.lease == lease.id
    assert await holds(client, leadership)
    leader = await election(backend, client).leader()
    assert leader is not None
    assert (leader.value, leader.lease, leader.revision) == (b"a", lease.id, leadership.revision)


async def test_leadership_is_handed_over_when_the_leader_resigns(backend: Backend) -> None:
    first, second = await backend.client(), await backend.client()
    leases = [await backend.lease(first), await backend.lease(second)]
    old = await election(backend, first).campaign(b"a", leases[0])
    waiting = asyncio.create_task(election(backend, second).campaign(b"b", leases[1]))
    await election(backend, first).resign(old)
    new = await waiting
    assert new.revision > old.revision
    assert not await holds(first, old)
    assert await holds(first, new)
    await election(backend, first).resign(old)
    assert await holds(first, new)


async def test_leadership_is_handed_over_when_the_lease_is_revoked(backend: Backend) -> None:
    first, second = await backend.client(), await backend.client()
    lease, next_lease = await backend.lease(first), await backend.lease(second)
    await election(backend, first).campaign(b"a", lease)
    waiting = asyncio.create_task(election(backend, second).campaign(b"b", next_lease))
    await lease.revoke()
    assert (await waiting).lease == next_lease.id


async def test_leadership_is_handed_over_when_the_lease_expires_and_not_before(backend: Backend) -> None:
    first, second = await backend.client(), await backend.client()
    lease, next_lease = await backend.lease(first, backend.shortest_ttl_s), await backend.lease(second)
    await election(backend, first).campaign(b"a", lease)
    assert (await election(backend, second).campaign(b"b", next_lease)).lease == next_lease.id
    assert backend.clock.monotonic() >= lease.deadline


async def test_a_campaign_under_the_same_lease_is_won_again(backend: Backend) -> None:
    client = await backend.client()
    lease = await backend.lease(client)
    first = await election(backend, client).campaign(b"a", lease)
    assert await election(backend, client).campaign(b"a", lease) == first


async def test_at_most_one_candidate_leads_at_any_time(backend: Backend) -> None:
    clients = [await backend.client() for _ in range(4)]
    leading: list[int] = []
    order: list[int] = []

    async def take_turns(number: int) -> None:
        candidate = election(backend, clients[number])
        lease = await backend.lease(clients[number])
        for _ in range(3):
            leadership = await candidate.campaign(b"%d" % number, lease)
            leading.append(number)
            assert leading == [number]
            assert await holds(clients[number], leadership)
            leading.remove(number)
            order.append(number)
            await candidate.resign(leadership)

    await asyncio.gather(*(take_turns(number) for number in range(len(clients))))
    assert sorted(order) == sorted([*range(len(clients))] * 3)


async def test_a_candidate_whose_lease_ends_while_it_waits_hears_of_it(backend: Backend) -> None:
    first, second = await backend.client(), await backend.client()
    await election(backend, first).campaign(b"a", await backend.lease(first))
    lease = await backend.lease(second, backend.shortest_ttl_s)
    with pytest.raises(LeaseLost):
        await election(backend, second).campaign(b"b", lease)


async def test_keys_beside_the_leaders_key_do_not_disturb(backend: Backend) -> None:
    first, second = await backend.client(), await backend.client()
    await backend.write(first, Put(KEY + "2", b"x"), Put(KEY + "/x", b"x"))
    lease = await backend.lease(first)
    observed = election(backend, second).observe()
    assert await anext(observed) is None
    await election(backend, first).campaign(b"a", lease)
    leader = await anext(observed)
    assert leader is not None
    assert leader.key == KEY
    await observed.aclose()


async def test_an_observer_sees_every_leader_and_every_gap(backend: Backend) -> None:
    client, watcher = await backend.client(), await backend.client()
    observed = election(backend, watcher).observe()
    assert await anext(observed) is None
    for number in range(3):
        lease = await backend.lease(client)
        await election(backend, client).campaign(b"%d" % number, lease)
        leader = await anext(observed)
        assert leader is not None
        assert (leader.value, leader.lease) == (b"%d" % number, lease.id)
        await lease.revoke()
        assert await anext(observed) is None
    await observed.aclose()


async def test_a_keeper_keeps_a_lease_beyond_its_time_to_live(backend: Backend) -> None:
    client = await backend.client()
    lease = await backend.lease(client, backend.steady_ttl_s)
    await backend.write(client, Put("/a", b"1", lease.id))
    async with LeaseKeeper(lease, backend.clock) as keeper:
        await asyncio.sleep(lease.ttl_s * 1.25)
        assert keeper.loss is None
        assert keeper.deadline > backend.clock.monotonic()
        assert await client.get("/a") is not None


async def test_a_keeper_reports_once_that_the_lease_is_gone(backend: Backend) -> None:
    client = await backend.client()
    losses: list[LeaseLost] = []
    lease: Lease = await backend.lease(client, backend.shortest_ttl_s)
    async with LeaseKeeper(lease, backend.clock, losses.append) as keeper:
        await lease.revoke()
        loss = await keeper.wait_lost()
        assert keeper.deadline <= backend.clock.monotonic()
        assert await keeper.wait_lost() is loss
    assert losses == [loss]
