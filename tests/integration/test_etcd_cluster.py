"""Three real servers, and what happens to us when they are killed or stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress

import pytest

from braid.metadata.etcd.store import EtcdStore
from braid.metadata.history import watching
from braid.metadata.store import Changes, Compare, Put
from braid.model.errors import MetadataUnavailable, MetadataUncertain
from braid.model.ids import Revision
from tests.kits.etcd_server import FAST_ELECTION, EtcdServer, etcd_cluster, run_test
from tests.kits.waiting import wait_until

pytestmark = pytest.mark.processes


NOTICED_WITHIN_S = 10.0
"""Three seconds of silence and a reconnect, and room for a busy machine. Without the question for progress nothing
would be noticed at all."""


def leader_of(servers: Sequence[EtcdServer]) -> EtcdServer:
    return next(server for server in servers if server.is_leader())


def addresses(first: EtcdServer, servers: Sequence[EtcdServer]) -> list[str]:
    """All of them, so that a store connects to `first`."""
    return [first.address, *(server.address for server in servers if server is not first)]


def run_on_cluster(test: Callable[[list[EtcdServer]], Coroutine[None, None, None]]) -> None:
    with etcd_cluster(*FAST_ELECTION) as servers:
        run_test(test(servers))


class Counter:
    """Adds one, again and again, by compare-and-swap.

    Each transaction also writes which addition of this worker it was. So a worker that was left uncertain reads that
    key: its number is there, or the same addition is tried again; the comparison lets only one of the attempts through.
    """

    def __init__(self, store: EtcdStore, name: str) -> None:
        self._store = store
        self._key = f"/workers/{name}"
        self.added = 0
        self.uncertain = 0

    async def add_one(self) -> None:
        mine = b"%d" % (self.added + 1)
        while True:
            try:
                counter, last = await self._store.get("/counter"), await self._store.get(self._key)
                if last is not None and last.value == mine:
                    break  # the attempt that was not answered had happened
                value = b"%d" % (int(counter.value) + 1 if counter else 1)
                revision = counter.revision if counter else Revision(0)
                changed = [Put("/counter", value), Put(self._key, mine)]
                if (await self._store.txn([Compare("/counter", revision)], changed)).succeeded:
                    break
            except MetadataUncertain:
                self.uncertain += 1
            except MetadataUnavailable:
                continue  # nothing was written
        self.added += 1


def test_a_counter_stays_exact_and_its_watch_complete_when_the_leader_is_killed() -> None:
    async def test(servers: list[EtcdServer]) -> None:
        leader = leader_of(servers)
        stores = [await EtcdStore.open(addresses(leader, servers)) for _ in range(4)]
        counters = [Counter(store, f"{number}") for number, store in enumerate(stores[:3])]
        seen: list[Changes] = []

        async def count(counter: Counter) -> None:
            while counter.added < 150:
                await counter.add_one()
                if counter is counters[0] and counter.added == 50:
                    leader.kill()  # the other workers have requests in flight

        async def follow() -> None:
            async with watching(stores[3], "", Revision(0)) as watch:
                async for changes in watch:
                    seen.append(changes)
                    if any(event.key == "/end" for event in changes.events):
                        return

        following = asyncio.create_task(follow())
        await asyncio.gather(*(count(counter) for counter in counters))
        total = sum(counter.added for counter in counters)
        counter = await stores[0].get("/counter")
        assert counter is not None
        assert int(counter.value) == total
        end = await stores[0].txn([], [Put("/end", b"")])
        await following
        assert [changes.revision for changes in seen] == [*range(2, end.revision + 1)]  # a new etcd stands at 1
        values = [int(event.value or b"") for changes in seen for event in changes.events if event.key == "/counter"]
        assert values == [*range(1, total + 1)]
        for store in stores:
            await store.close()

    run_on_cluster(test)


@pytest.mark.parametrize("victim", ["follower", "leader"])
def test_a_stopped_node_is_noticed_and_watch_and_lease_go_on_elsewhere(victim: str) -> None:
    async def test(servers: list[EtcdServer]) -> None:
        leader = leader_of(servers)
        stopped = leader if victim == "leader" else next(server for server in servers if server is not leader)
        healthy = [server.address for server in servers if server is not stopped]
        watched, leased = [await EtcdStore.open(addresses(stopped, servers)) for _ in range(2)]
        writer = await EtcdStore.open(healthy)
        lease = await leased.grant_lease(60)
        async with watching(watched, "", Revision(0)) as watch:
            first = await writer.txn([], [Put("/k", b"first")])
            assert (await anext(watch)).revision == first.revision
            stopped.pause()
            stopped_at = time.monotonic()
            deadline = lease.deadline
            await lease.renew()
            assert lease.deadline > deadline
            last = first.revision
            while last < first.revision + 20:
                with suppress(MetadataUncertain):  # during an election; if it happened, the watch shows it
                    last = (await writer.txn([], [Put("/k", b"later")])).revision
            seen = [await anext(watch)]
            while seen[-1].revision < last:
                seen.append(await anext(watch))
            assert time.monotonic() - stopped_at < NOTICED_WITHIN_S
            assert [changes.revision for changes in seen] == [*range(first.revision + 1, last + 1)]
            stopped.resume()
            back = await writer.txn([], [Put("/k", b"back")])
            assert (await anext(watch)).revision == back.revision
        for store in (watched, leased, writer):
            await store.close()

    run_on_cluster(test)


def test_nothing_is_known_while_all_nodes_are_down_and_a_watch_goes_on_when_they_return() -> None:
    async def test(servers: list[EtcdServer]) -> None:
        store = await EtcdStore.open([server.address for server in servers], timeout_s=1.0)
        lease = await store.grant_lease(60)
        async with watching(store, "", Revision(0)) as watch:
            first = await store.txn([], [Put("/k", b"1")])
            assert (await anext(watch)).revision == first.revision
            waiting = asyncio.ensure_future(anext(watch))
            for server in servers:
                server.kill()
            for ask in (lambda: store.get("/k"), lambda: store.list("/"), lambda: store.get("/absent"), lease.renew):
                with pytest.raises(MetadataUnavailable):
                    await ask()
            # By now the connections are known to be gone, so a write is not sent at all: not uncertain.
            with pytest.raises(MetadataUnavailable):
                await store.txn([Compare("/k", first.revision)], [Put("/k", b"2")])
            with pytest.raises(MetadataUnavailable):
                await store.grant_lease(60)
            for server in servers:
                server.start()
            for server in servers:
                server.wait_until_healthy()
            entry = await store.get("/k")
            assert entry is not None
            assert (entry.value, entry.revision) == (b"1", first.revision)
            second = await store.txn([Compare("/k", first.revision)], [Put("/k", b"2")])
            assert (await waiting).revision == second.revision
        await store.close()

    run_on_cluster(test)


def test_a_write_to_a_node_that_does_not_answer_is_uncertain_and_the_next_one_goes_elsewhere() -> None:
    async def test(servers: list[EtcdServer]) -> None:
        leader = leader_of(servers)
        stopped = next(server for server in servers if server is not leader)
        store = await EtcdStore.open(addresses(stopped, servers))
        stopped.pause()
        with pytest.raises(MetadataUncertain, match="read and compare"):
            await store.txn([Compare("/k", Revision(0))], [Put("/k", b"1")])
        assert await store.get("/k") is None  # it sits in the stopped node; the comparison guards a second attempt
        assert (await store.txn([Compare("/k", Revision(0))], [Put("/k", b"2")])).succeeded
        stopped.resume()
        stopped.wait_until_healthy()
        entry = await store.get("/k")
        assert entry is not None
        assert entry.value == b"2"
        await store.close()

    run_on_cluster(test)


def test_a_node_that_lost_its_quorum_answers_neither_reads_nor_writes() -> None:
    async def test(servers: list[EtcdServer]) -> None:
        survivor, *others = servers
        store = await EtcdStore.open([survivor.address], timeout_s=1.0)
        for server in others:
            server.kill()
        with pytest.raises(MetadataUnavailable):
            await store.get("/k")
        # A write may meet it while it still believes in its leader. Once it does not, it says so before it takes any.
        wait_until(lambda: not survivor.has_leader(), "the node gives its leader up")
        with pytest.raises(MetadataUnavailable, match="no leader"):
            await store.txn([], [Put("/k", b"1")])
        await store.close()

    run_on_cluster(test)
