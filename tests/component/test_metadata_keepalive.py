"""The lease keeper in virtual time: it renews in time, and it never believes in a lease that it could not renew."""

from __future__ import annotations

import asyncio
import math

import pytest

from braid.metadata.keepalive import LeaseKeeper, next_renewal
from braid.metadata.memory import Fault, MemoryStore
from braid.metadata.store import Put
from braid.model.errors import LeaseLost
from braid.testing.sim.loop import Simulation

TTL_S = 9.0


@pytest.mark.parametrize(
    ("deadline", "now", "failed", "expected"),
    [
        (109.0, 100.0, False, 103.0),  # fresh: after a third of its time
        (109.0, 108.0, False, 103.0),  # overdue: at once
        (109.0, 103.0, True, 103.75),  # failed: again soon
        (109.0, 108.9, True, 109.0),  # never after the deadline
    ],
)
def test_when_to_renew_next(deadline: float, now: float, failed: bool, expected: float) -> None:
    assert next_renewal(deadline, TTL_S, now, failed=failed) == expected


async def test_a_lease_is_kept_for_as_long_as_the_store_answers(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    requests: list[str] = []

    def count(request: str) -> Fault:
        requests.append(request)
        return Fault.NONE

    store.fault = count
    lease = await store.grant_lease(TTL_S)
    await store.txn([], [Put("/a", b"1", lease.id)])
    async with LeaseKeeper(lease, simulation.clock) as keeper:
        await asyncio.sleep(900.0)
        assert keeper.loss is None
        assert await store.get("/a") is not None
    assert 290 <= requests.count("renew") <= 305


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.UNCERTAIN])
async def test_a_lease_that_cannot_be_renewed_is_lost_at_its_deadline_and_not_later(
    fault: Fault, simulation: Simulation
) -> None:
    """With lost answers the store renews and keeps the lease; the holder cannot know and must give up all the same."""
    store = MemoryStore(simulation.clock)
    losses: list[LeaseLost] = []
    async with LeaseKeeper(await store.grant_lease(TTL_S), simulation.clock, losses.append) as keeper:
        await asyncio.sleep(100.0)
        store.fault = lambda _: fault
        deadline = keeper.deadline
        loss = await keeper.wait_lost()
        assert deadline <= simulation.clock.monotonic() < deadline + 0.01
        store.fault = lambda _: Fault.NONE
        await asyncio.sleep(100.0)
        assert keeper.loss is loss
        assert keeper.deadline == -math.inf
    assert losses == [loss]


async def test_a_short_failure_is_survived(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    async with LeaseKeeper(await store.grant_lease(TTL_S), simulation.clock) as keeper:
        for _ in range(20):
            store.disconnect()
            await asyncio.sleep(TTL_S / 2)
            store.reconnect()
            await asyncio.sleep(TTL_S / 2)
        assert keeper.loss is None


async def test_a_lease_that_the_store_dropped_is_reported_without_waiting_for_the_deadline(
    simulation: Simulation,
) -> None:
    store = MemoryStore(simulation.clock)
    lease = await store.grant_lease(TTL_S)
    async with LeaseKeeper(lease, simulation.clock) as keeper:
        await store.client().revoke_lease(lease.id)
        deadline = lease.deadline
        await keeper.wait_lost()
        assert simulation.clock.monotonic() < deadline


class HangingLease:
    """A renewal that never comes back."""

    id = 7
    ttl_s = TTL_S
    deadline = TTL_S

    async def renew(self) -> None:
        await asyncio.Event().wait()

    async def revoke(self) -> None:
        raise NotImplementedError


async def test_a_renewal_that_hangs_does_not_hide_the_loss(simulation: Simulation) -> None:
    async with LeaseKeeper(HangingLease(), simulation.clock) as keeper:
        await keeper.wait_lost()
        assert simulation.clock.monotonic() == pytest.approx(TTL_S)


class BuggyLease(HangingLease):
    async def renew(self) -> None:
        raise ZeroDivisionError


async def test_a_bug_in_a_renewal_ends_the_lease_and_is_raised(simulation: Simulation) -> None:
    keeper = LeaseKeeper(BuggyLease(), simulation.clock)
    keeper.start()
    await keeper.wait_lost()
    with pytest.raises(ZeroDivisionError):
        await keeper.stop()
