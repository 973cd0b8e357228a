"""Leases: a holder that is alive keeps its keys, one that is not loses them, and no holder believes for too long."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

import pytest

from braid.metadata.memory import MemoryStore
from braid.metadata.store import Compare, Delete, Event, Put
from braid.model.errors import InvalidArgument, LeaseLost
from braid.model.ids import Revision
from tests.kits.waiting import until

if TYPE_CHECKING:
    from tests.conformance.conftest import Backend


async def test_a_key_under_a_lease_names_it(backend: Backend) -> None:
    client = await backend.client()
    lease = await backend.lease(client)
    start = await backend.revision(client)
    revision = await backend.write(client, Put("/a", b"1", lease.id))
    entry = await client.get("/a")
    assert entry is not None
    assert entry.lease == lease.id != 0
    (changes,) = await backend.take(backend.watch(client, "/a", start), 1)
    assert changes.events == (Event("/a", b"1", revision, lease.id),)


async def test_leases_have_different_ids(backend: Backend) -> None:
    clients = [await backend.client() for _ in range(2)]
    leases = [await backend.lease(client) for client in clients * 3]
    await leases[-1].revoke()
    leases.append(await backend.lease(clients[0]))
    assert len({lease.id for lease in leases}) == len(leases)


async def test_revoking_deletes_the_keys_of_the_lease_in_one_transaction(backend: Backend) -> None:
    client, other = await backend.client(), await backend.client()
    lease, kept = await backend.lease(client), await backend.lease(client)
    await backend.write(client, Put("/a", b"1", lease.id), Put("/b", b"1", lease.id))
    await backend.write(client, Put("/c", b"1", lease.id), Put("/d", b"1", kept.id), Put("/e", b"1"))
    start = await backend.revision(client)
    watch = backend.watch(other, "/", start)
    await lease.revoke()
    assert [entry.key for entry in (await other.list("/")).entries] == ["/d", "/e"]
    (changes,) = await backend.take(watch, 1)
    assert sorted(event.key for event in changes.events) == ["/a", "/b", "/c"]
    assert all(event.value is None and event.revision == changes.revision for event in changes.events)


async def test_revoking_twice_is_fine(backend: Backend) -> None:
    client = await backend.client()
    lease = await backend.lease(client)
    await lease.revoke()
    await lease.revoke()


async def test_a_lease_that_is_not_renewed_expires_and_a_watch_hears_of_it(backend: Backend) -> None:
    client, other = await backend.client(), await backend.client()
    lease = await backend.lease(client, backend.shortest_ttl_s)
    revision = await backend.write(client, Put("/a", b"1", lease.id), Put("/b", b"1", lease.id), Put("/c", b"1"))
    (changes,) = await backend.take(backend.watch(other, "/", revision), 1)
    assert backend.clock.monotonic() >= lease.deadline
    assert sorted(event.key for event in changes.events) == ["/a", "/b"]
    assert all(event.value is None for event in changes.events)
    assert [entry.key for entry in (await other.list("/")).entries] == ["/c"]


async def test_the_keys_of_an_expired_lease_are_gone_also_for_a_reader_that_does_not_watch(backend: Backend) -> None:
    client, other = await backend.client(), await backend.client()
    lease = await backend.lease(client, backend.shortest_ttl_s)
    await backend.write(client, Put("/a", b"1", lease.id))

    async def is_gone() -> bool:
        return await other.get("/a") is None

    await until(is_gone)
    assert backend.clock.monotonic() >= lease.deadline
    assert (await other.txn([Compare("/a", Revision(0))], [Put("/a", b"2")])).succeeded


async def test_renewing_keeps_a_lease_beyond_its_time_to_live(backend: Backend) -> None:
    client = await backend.client()
    lease = await backend.lease(client, backend.steady_ttl_s)
    first_deadline = lease.deadline
    await backend.write(client, Put("/a", b"1", lease.id))
    while backend.clock.monotonic() < first_deadline + lease.ttl_s / 4:
        await asyncio.sleep(lease.ttl_s / 8)
        await lease.renew()
    assert await client.get("/a") is not None


async def test_renewing_moves_the_deadline_and_nothing_else(backend: Backend) -> None:
    client = await backend.client()
    lease = await backend.lease(client)
    revision = await backend.write(client, Put("/a", b"1", lease.id))
    before = lease.deadline
    await asyncio.sleep(0.001)
    await lease.renew()
    assert lease.deadline > before
    assert await backend.revision(client) == revision


async def test_the_deadline_counts_from_before_the_request(backend: Backend) -> None:
    client = await backend.client()
    if isinstance(client, MemoryStore):
        client.delay_s = lambda: 0.01  # Otherwise a request takes no time here, and this test would show nothing.
    before = backend.clock.monotonic()
    lease = await backend.lease(client, 20.0)
    after = backend.clock.monotonic()
    assert lease.ttl_s >= 20.0
    assert before + lease.ttl_s <= lease.deadline <= after + lease.ttl_s
    before = backend.clock.monotonic()
    renewing = asyncio.create_task(lease.renew())
    await asyncio.sleep(0)
    sent = backend.clock.monotonic()
    await renewing
    assert before + lease.ttl_s <= lease.deadline <= sent + lease.ttl_s


async def test_renewing_after_expiry_raises_and_the_deadline_stays_in_the_past(backend: Backend) -> None:
    client = await backend.client()
    lease = await backend.lease(client, backend.shortest_ttl_s)
    await backend.write(client, Put("/a", b"1", lease.id))
    await anext(backend.watch(client, "/a", await backend.revision(client)))
    with pytest.raises(LeaseLost):
        await lease.renew()
    assert lease.deadline <= backend.clock.monotonic()


async def test_a_lease_that_was_given_up_cannot_be_renewed_and_its_holder_may_not_act(backend: Backend) -> None:
    client = await backend.client()
    lease = await backend.lease(client)
    await lease.revoke()
    assert lease.deadline <= backend.clock.monotonic()
    with pytest.raises(LeaseLost):
        await lease.renew()


async def test_a_put_under_a_lease_that_does_not_exist_raises_and_writes_nothing(backend: Backend) -> None:
    client = await backend.client()
    lease = await backend.lease(client)
    await backend.write(client, Put("/old", b"1"))
    await lease.revoke()
    before = await client.list("/")
    for unknown in (lease.id, 987_654_321):
        with pytest.raises(LeaseLost):
            await client.txn([], [Put("/a", b"1"), Delete("/old"), Put("/b", b"1", unknown)])
    assert await client.list("/") == before


async def test_a_key_that_is_put_again_belongs_to_the_last_lease_only(backend: Backend) -> None:
    client = await backend.client()
    first, second = await backend.lease(client), await backend.lease(client)
    await backend.write(client, Put("/a", b"1", first.id), Put("/b", b"1", first.id), Put("/c", b"1"))
    await backend.write(client, Put("/a", b"2", second.id), Put("/b", b"2"), Put("/c", b"2", second.id))
    await first.revoke()
    assert [entry.key for entry in (await client.list("/")).entries] == ["/a", "/b", "/c"]
    await second.revoke()
    assert [entry.key for entry in (await client.list("/")).entries] == ["/b"]


async def test_a_lease_without_keys_ends_without_a_revision(backend: Backend) -> None:
    client = await backend.client()
    revision = await backend.write(client, Put("/a", b"1"))
    lease = await backend.lease(client)
    await lease.revoke()
    assert await backend.revision(client) == revision


async def test_another_client_may_put_keys_under_a_lease(backend: Backend) -> None:
    holder, other = await backend.client(), await backend.client()
    lease = await backend.lease(holder)
    await backend.write(other, Put("/a", b"1", lease.id))
    await lease.revoke()
    assert await other.get("/a") is None


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, math.inf, math.nan, 1e9])
async def test_a_time_to_live_that_makes_no_sense_is_refused(backend: Backend, ttl_s: float) -> None:
    client = await backend.client()
    with pytest.raises(InvalidArgument):
        await client.grant_lease(ttl_s)
