"""What the memory store does beyond the common contract: faults, and expiry in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from braid.metadata.history import HistoryLimits, watching
from braid.metadata.memory import Fault, MemoryStore
from braid.metadata.store import Compare, Put
from braid.model.errors import LeaseLost, MetadataCompacted, MetadataUnavailable, MetadataUncertain
from braid.model.ids import Revision
from braid.testing.sim.loop import Simulation, run_simulation

START = Revision(0)


async def test_a_request_that_does_not_arrive_changes_nothing(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    client = store.client("broker-1")
    client.fault = lambda _: Fault.UNAVAILABLE
    with pytest.raises(MetadataUnavailable, match="broker-1"):
        await client.txn([], [Put("/a", b"1")])
    with pytest.raises(MetadataUnavailable):
        await client.get("/a")
    with pytest.raises(MetadataUnavailable):
        await client.list("/")
    assert await store.get("/a") is None


async def test_a_request_whose_answer_is_lost_has_happened(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    client = store.client()
    client.fault = lambda request: Fault.UNCERTAIN if request == "txn" else Fault.NONE
    with pytest.raises(MetadataUncertain):
        await client.txn([Compare("/a", START)], [Put("/a", b"1")])
    entry = await client.get("/a")
    assert entry is not None
    assert entry.value == b"1"


async def test_a_read_is_never_uncertain(simulation: Simulation) -> None:
    client = MemoryStore(simulation.clock)
    client.fault = lambda _: Fault.UNCERTAIN
    with pytest.raises(MetadataUnavailable):
        await client.get("/a")


async def test_a_renewal_whose_answer_is_lost_does_not_move_the_deadline(simulation: Simulation) -> None:
    client = MemoryStore(simulation.clock)
    lease = await client.grant_lease(10.0)
    deadline = lease.deadline
    await asyncio.sleep(5.0)
    client.fault = lambda _: Fault.UNCERTAIN
    with pytest.raises(MetadataUnavailable):
        await lease.renew()
    assert lease.deadline == deadline


async def test_losing_the_connection_between_request_and_answer_makes_a_write_uncertain(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    client = store.client()
    writing = asyncio.create_task(client.txn([], [Put("/a", b"1")]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert store.history.revision == 1
    assert not writing.done()
    client.disconnect()
    with pytest.raises(MetadataUncertain):
        await writing

    client.reconnect()
    reading = asyncio.create_task(client.get("/a"))
    client.disconnect()
    with pytest.raises(MetadataUnavailable):
        await reading


async def test_a_watch_of_a_disconnected_client_is_silent_and_then_catches_up(simulation: Simulation) -> None:
    """Also when the last change that it missed was not its own: it must not skip to the head meanwhile."""
    store = MemoryStore(simulation.clock)
    client = store.client()
    async with watching(client, "/a", START) as watch:
        reading = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(1.0)
        client.disconnect()
        await store.txn([], [Put("/a", b"1")])
        await store.txn([], [Put("/other", b"1")])
        await asyncio.sleep(1.0)
        assert not reading.done()
        client.reconnect()
        assert (await reading).revision == 1
        await store.txn([], [Put("/a", b"2")])
        assert (await anext(watch)).revision == 3


def test_an_interrupted_watch_resumes_without_loss_or_repetition() -> None:
    async def main(simulation: Simulation) -> None:
        store = MemoryStore(simulation.clock)
        received: list[Revision] = []
        async with watching(store, "/a", START) as watch:
            for number in range(30):
                await store.txn([], [Put("/a" if number % 3 else "/b", b"%d" % number)])
            while len(received) < 20:
                received.append((await anext(watch)).revision)
                if simulation.random.random() < 0.5:
                    store.interrupt()
        assert received == [number + 1 for number in range(30) if number % 3]

    for seed in range(20):
        run_simulation(seed, main)


async def test_a_read_of_a_watch_that_is_cancelled_loses_nothing(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    async with watching(store, "/a", START) as watch:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(watch), 1.0)
        await store.txn([], [Put("/a", b"1")])
        assert (await anext(watch)).revision == 1


async def test_a_watch_that_falls_behind_the_history_is_told_so(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock, limits=HistoryLimits(revisions=5))
    async with watching(store, "/a", START) as watch, watching(store, "/a", Revision(5)) as recent:
        for number in range(10):
            await store.txn([], [Put("/a", b"%d" % number)])
        with pytest.raises(MetadataCompacted, match="list the prefix again"):
            await anext(watch)
        assert [(await anext(recent)).revision for _ in range(5)] == [6, 7, 8, 9, 10]


async def test_a_watch_that_waits_never_falls_behind_however_much_else_is_written(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock, limits=HistoryLimits(revisions=5))
    async with watching(store, "/quiet", START) as watch:
        reading = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        for number in range(100):
            await store.txn([], [Put("/loud", b"%d" % number)])
        await store.txn([], [Put("/quiet", b"1")])
        assert (await reading).revision == 101


async def test_a_closed_watch_leaves_nothing_behind(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    watch = store.watch("/a", START)
    reading = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    assert store.history.waiting == 1
    await watch.aclose()
    with pytest.raises(StopAsyncIteration):
        await reading
    assert store.history.waiting == 0


async def test_a_lease_expires_at_its_time_without_any_request(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    granted_at = simulation.clock.monotonic()
    lease = await store.grant_lease(10.0)
    await store.txn([], [Put("/a", b"1", lease.id)])
    async with watching(store, "/a", Revision(1)) as watch:
        changes = await anext(watch)
    assert changes.events[0].value is None
    assert granted_at + 10.0 <= simulation.clock.monotonic() < granted_at + 10.1
    assert lease.deadline <= simulation.clock.monotonic()


async def test_the_leases_of_a_closed_client_end_for_their_holder_at_once_and_for_others_by_their_time(
    simulation: Simulation,
) -> None:
    store = MemoryStore(simulation.clock)
    client = store.client()
    lease = await client.grant_lease(10.0)
    await client.txn([], [Put("/a", b"1", lease.id)])
    await client.close()
    assert lease.deadline < simulation.clock.monotonic()
    with pytest.raises(LeaseLost):
        await lease.renew()
    assert await store.get("/a") is not None
    await asyncio.sleep(10.1)
    assert await store.get("/a") is None
