"""Election over a store that fails: no answer is trusted twice, and at most one leader acts at a time (I3)."""

from __future__ import annotations

import asyncio

import pytest

from braid.metadata.election import Election
from braid.metadata.keepalive import LeaseKeeper
from braid.metadata.memory import Fault, MemoryStore
from braid.metadata.store import Compare, Put
from braid.model.errors import LeaseLost, MetadataError
from braid.model.ids import Revision
from braid.testing.sim.loop import Simulation

KEY = "/cluster/leader"


async def test_a_win_whose_answer_was_lost_is_recognised(simulation: Simulation) -> None:
    client = MemoryStore(simulation.clock)
    lease = await client.grant_lease(10.0)
    faults = [Fault.UNCERTAIN]
    client.fault = lambda request: faults.pop() if request == "txn" and faults else Fault.NONE
    leadership = await Election(client, KEY, simulation.clock).campaign(b"a", lease)
    assert leadership.revision == 1
    assert (await client.txn([leadership.fence], [])).succeeded


async def test_a_lost_answer_is_not_taken_for_a_win_when_another_leads(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    first, second = store.client(), store.client()
    lease, own = await first.grant_lease(10.0), await second.grant_lease(60.0)
    await Election(first, KEY, simulation.clock).campaign(b"a", lease)
    faults = [Fault.UNCERTAIN, Fault.UNCERTAIN]
    second.fault = lambda request: faults.pop() if request == "txn" and faults else Fault.NONE
    leadership = await Election(second, KEY, simulation.clock).campaign(b"b", own)
    assert leadership.lease == own.id
    assert simulation.clock.monotonic() >= lease.deadline


async def test_a_candidate_rides_through_a_store_that_is_away(simulation: Simulation) -> None:
    client = MemoryStore(simulation.clock)
    lease = await client.grant_lease(60.0)
    client.disconnect()
    campaign = asyncio.create_task(Election(client, KEY, simulation.clock).campaign(b"a", lease))
    await asyncio.sleep(30.0)
    client.reconnect()
    assert (await campaign).lease == lease.id


async def test_a_candidate_gives_up_when_its_deadline_passes_although_the_store_is_away(simulation: Simulation) -> None:
    client = MemoryStore(simulation.clock)
    lease = await client.grant_lease(5.0)
    client.disconnect()
    with pytest.raises(LeaseLost, match="deadline"):
        await Election(client, KEY, simulation.clock).campaign(b"a", lease)
    assert simulation.clock.monotonic() < 5.2


async def test_a_candidate_behind_a_compacted_history_tries_again(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    first, second = store.client(), store.client()
    lease, own = await first.grant_lease(100.0), await second.grant_lease(100.0)
    await Election(first, KEY, simulation.clock).campaign(b"a", lease)
    campaign = asyncio.create_task(Election(second, KEY, simulation.clock).campaign(b"b", own))
    await asyncio.sleep(1.0)
    second.disconnect()
    await lease.revoke()
    store.compact()
    second.reconnect()
    assert (await campaign).lease == own.id
    assert simulation.clock.monotonic() < 2.0


class Candidate:
    """Campaigns again and again, and while it leads, writes its number under its fence."""

    def __init__(self, simulation: Simulation, client: MemoryStore, number: int, leading: dict[int, float]) -> None:
        self._clock = simulation.clock
        self._random = simulation.random
        self._client = client
        self._number = number
        self._leading = leading
        self.terms = 0

    async def run(self) -> None:
        election = Election(self._client, KEY, self._clock)
        while True:
            try:
                lease = await self._client.grant_lease(3.0)
                async with LeaseKeeper(lease, self._clock) as keeper:
                    leadership = await election.campaign(b"%d" % self._number, lease)
                    await self._lead(keeper, leadership.fence)
                    await election.resign(leadership)
            except MetadataError:
                await asyncio.sleep(0.1)

    async def _lead(self, keeper: LeaseKeeper, fence: Compare) -> None:
        self.terms += 1
        until = self._clock.monotonic() + self._random.random() * 10
        while self._clock.monotonic() < min(until, keeper.deadline):
            self._leading[self._number] = keeper.deadline
            acting = [number for number, deadline in self._leading.items() if deadline > self._clock.monotonic()]
            assert acting == [self._number], f"{acting} act at the same time"
            result = await self._client.txn([fence], [Put("/acted", b"%d" % self._number)])
            if not result.succeeded:
                break
            await asyncio.sleep(self._random.random() * 0.2)
        self._leading.pop(self._number, None)


@pytest.mark.parametrize("seed", range(25))
async def test_at_most_one_leader_acts_whatever_the_store_does(seed: int, simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    clients = [store.client(f"candidate {number}") for number in range(3)]
    random = simulation.random

    def fault(_request: str) -> Fault:
        return random.choices([Fault.NONE, Fault.UNAVAILABLE, Fault.UNCERTAIN], [90, 5, 5])[0]

    leading: dict[int, float] = {}
    candidates = [Candidate(simulation, client, number, leading) for number, client in enumerate(clients)]
    for client in clients:
        client.fault = fault
    tasks = [asyncio.create_task(candidate.run()) for candidate in candidates]
    for _ in range(40):
        client = random.choice(clients)
        random.choice([client.disconnect, client.reconnect, client.interrupt, client.reconnect])()
        if random.random() < 0.1:
            store.compact()
        await asyncio.sleep(random.random() * 4)
        for task in tasks:
            assert not task.done() or task.result()
    for client in clients:
        client.fault = lambda _request: Fault.NONE
        client.reconnect()
    terms = sum(candidate.terms for candidate in candidates)
    await asyncio.sleep(60.0)
    assert sum(candidate.terms for candidate in candidates) > terms > 0
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert (await store.list("/acted")).revision > Revision(0)
