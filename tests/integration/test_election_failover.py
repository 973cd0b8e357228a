"""Two candidates, three etcd servers, and the death of the servers' own leader in the middle of a term."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest

from braid.metadata.election import Election, Leadership
from braid.metadata.etcd.store import EtcdStore
from braid.metadata.keepalive import LeaseKeeper
from braid.metadata.store import Put
from braid.model.errors import LeaseLost, MetadataUnavailable, MetadataUncertain
from braid.model.ids import Revision
from braid.ports.clock import Clock, SystemClock
from tests.kits.etcd_server import FAST_ELECTION, EtcdServer, etcd_cluster, run_test

pytestmark = pytest.mark.processes


KEY = "/cluster/leader"
TTL_S = 2.0
PATIENCE_S = 30.0
BEAT_S = 0.01


class Candidate:
    """Campaigns for ever; while it leads, it writes under its fence. All candidates run on one loop and one clock, so
    what they believe at one moment can be compared exactly."""

    def __init__(self, store: EtcdStore, name: str, clock: Clock, terms: list[Term]) -> None:
        self.name = name
        self._store = store
        self._clock = clock
        self._terms = terms
        self._keeper: LeaseKeeper | None = None
        self._leadership: Leadership | None = None

    def believes_to_lead(self) -> bool:
        return (
            self._leadership is not None
            and self._keeper is not None
            and self._clock.monotonic() < self._keeper.deadline
        )

    async def run(self) -> None:
        while True:
            with suppress(LeaseLost, MetadataUnavailable):
                lease = await self._store.grant_lease(TTL_S)
                async with LeaseKeeper(lease, self._clock) as self._keeper:
                    election = Election(self._store, KEY, self._clock)
                    self._leadership = await election.campaign(self.name.encode(), lease)
                    term = Term(self, self._leadership)
                    self._terms.append(term)
                    await self._lead(term)
            self._leadership = None

    async def _lead(self, term: Term) -> None:
        while self.believes_to_lead():
            term.check_alone(self._terms)
            with suppress(MetadataUncertain, MetadataUnavailable):
                result = await self._store.txn([term.leadership.fence], [Put("/work", self.name.encode())])
                if not result.succeeded:
                    term.refused += 1
                    return
                term.writes.append(result.revision)
            await asyncio.sleep(BEAT_S)


class Term:
    def __init__(self, candidate: Candidate, leadership: Leadership) -> None:
        self.candidate = candidate
        self.leadership = leadership
        self.writes: list[Revision] = []
        self.refused = 0

    def check_alone(self, terms: list[Term]) -> None:
        """A belief begins only where a campaign is won, so looking there and at every beat misses no overlap."""
        believers = {term.candidate.name for term in terms if term.candidate.believes_to_lead()}
        assert believers <= {self.candidate.name}


def check_order(terms: list[Term]) -> None:
    """Terms follow each other in the store's own order: every write lies in its term, before the next one began."""
    begins = [term.leadership.revision for term in terms]
    assert begins == sorted(set(begins))
    for term, end in zip(terms, [*begins[1:], None]):
        assert all(term.leadership.revision < write and (end is None or write < end) for write in term.writes)


async def until(condition: Callable[[], bool], running: list[asyncio.Task[None]]) -> None:
    """Wait for the condition; a candidate that ends meanwhile has failed, and says how."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            for task in running:
                if task.done():
                    task.result()
            await asyncio.sleep(BEAT_S)


def test_one_leads_at_any_time_and_somebody_leads_again_when_the_leader_of_etcd_is_killed() -> None:
    async def story(servers: list[EtcdServer]) -> None:
        clock = SystemClock()
        first = next(server for server in servers if server.is_leader())
        addresses = [first.address, *(server.address for server in servers if server is not first)]
        stores = [await EtcdStore.open(addresses) for _ in range(2)]
        terms: list[Term] = []
        candidates = [Candidate(store, name, clock, terms) for store, name in zip(stores, ("one", "two"))]
        running = {each.name: asyncio.create_task(each.run(), name=each.name) for each in candidates}
        tasks = [*running.values()]

        await until(lambda: bool(terms) and len(terms[-1].writes) > 20, tasks)
        first.kill()
        written = sum(len(term.writes) for term in terms)
        await until(lambda: sum(len(term.writes) for term in terms) > written + 20, tasks)

        # And the two servers that are left also replace a leader of ours that falls silent: its lease is not revoked.
        silent = terms[-1].candidate
        terms_before = len(terms)
        running[silent.name].cancel()
        await asyncio.wait([running.pop(silent.name)])
        await until(lambda: len(terms) > terms_before and len(terms[-1].writes) > 20, [*running.values()])
        assert terms[-1].candidate is not silent
        check_order(terms)
        assert not (await stores[0].txn([terms[terms_before - 1].leadership.fence], [Put("/work", b"late")])).succeeded

        for task in running.values():
            task.cancel()
        await asyncio.wait(running.values())
        for store in stores:
            await store.close()

    with etcd_cluster(*FAST_ELECTION) as servers:
        run_test(story(servers))
