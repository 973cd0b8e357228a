"""Tables that follow the store together: one revision for all of them, whatever happens to the watch."""

from __future__ import annotations

import asyncio
import random

import pytest

from braid.metadata.history import HistoryLimits
from braid.metadata.memory import MemoryStore
from braid.metadata.store import Delete, Put
from braid.metadata.view import TURN_CHANGES, Table, View
from braid.model.errors import MetadataCorrupt, ShuttingDown
from braid.model.ids import Revision
from braid.testing.sim.loop import Simulation
from tests.kits.waiting import until


def _number(value: bytes) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise MetadataCorrupt(f"{value!r} is no number") from error


def _table(prefix: str) -> Table[str, int]:
    return Table(prefix, lambda key: key.removeprefix(prefix) or None, _number, lambda name: prefix + name)


async def test_what_one_transaction_wrote_appears_in_all_tables_at_once(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    view = View(store)
    left, right = view.add(_table("/left/")), view.add(_table("/right/"))
    await view.load()
    seen = []
    left.on_change.append(lambda name: seen.append((name, left.get(name), right.get(name), view.generation)))
    right.on_change.append(lambda name: seen.append((name, left.get(name), right.get(name), view.generation)))
    for number in range(20):
        value = b"%d" % number
        written = await store.txn([], [Put("/left/a", value), Put("/right/a", value), Put("/else/x", value)])
        await view.caught_up(written.revision)
    assert len(seen) == 40
    assert all(one == other for _, one, other, _ in seen)
    assert [generation for *_, generation in seen] == sorted(generation for *_, generation in seen)
    await view.stop()


async def test_the_generation_rises_with_writes_that_no_table_shows(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    view = View(store)
    view.add(_table("/left/"))
    await view.load()
    changes = view.changes
    written = await store.txn([], [Put("/cursors/x", b"1")])
    await view.caught_up(written.revision)
    assert view.generation == written.revision
    assert view.changes == changes
    await view.stop()


async def test_a_view_that_is_behind_takes_turns_with_other_work(simulation: Simulation) -> None:
    """A repartition of a topic changes a thousand records. Leases are renewed meanwhile."""
    store = MemoryStore(simulation.clock)
    view = View(store)
    table = view.add(_table("/left/"))
    await view.load()
    in_a_row: list[int] = [0]
    table.on_change.append(lambda _: in_a_row.append(in_a_row.pop() + 1))
    writing = asyncio.gather(*(store.txn([], [Put(f"/left/{number}", b"1")]) for number in range(500)))
    while sum(in_a_row) < 500:
        await asyncio.sleep(0)
        in_a_row.append(0)
    assert max(in_a_row) == TURN_CHANGES
    await writing
    await view.stop()


async def test_a_record_that_cannot_be_read_costs_neither_its_last_state_nor_the_others(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    await store.txn([], [Put("/left/a", b"1"), Put("/left/b", b"2")])
    view = View(store)
    table = view.add(_table("/left/"))
    await view.load()
    written = await store.txn([], [Put("/left/a", b"what?"), Put("/left/b", b"3")])
    await view.caught_up(written.revision)
    assert table.all() == {"a": 1, "b": 3}
    await view.stop()


async def test_unchanged_holds_for_what_is_there_and_for_what_is_not(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    view = View(store)
    table = view.add(_table("/left/"))
    await view.load()
    absent = table.unchanged("a")
    written = await store.txn([absent], [Put("/left/a", b"1")])
    assert written.succeeded
    assert not (await store.txn([absent], [Put("/left/a", b"2")])).succeeded
    await view.caught_up(written.revision)
    assert (await store.txn([table.unchanged("a")], [Delete("/left/a")])).succeeded
    await view.stop()


@pytest.mark.parametrize("seed", range(20))
async def test_after_a_compaction_the_tables_are_what_the_store_has(seed: int, simulation: Simulation) -> None:
    """The history is so short that the view has to list again and again, while others write."""
    store = MemoryStore(simulation.clock, limits=HistoryLimits(revisions=2))
    rng = random.Random(seed)
    view = View(store.client())
    left, right = view.add(_table("/left/")), view.add(_table("/right/"))
    await view.load()

    async def write() -> None:
        for number in range(60):
            key = f"/{rng.choice(['left', 'right', 'else'])}/{rng.randrange(4)}"
            await store.txn([], [Delete(key) if rng.random() < 0.3 else Put(key, b"%d" % number)])
            if rng.random() < 0.5:
                await asyncio.sleep(rng.random() / 100)

    await write()
    last = await store.txn([], [Put("/left/last", b"1")])
    await until(lambda: view.generation >= last.revision)
    for table, prefix in ((left, "/left/"), (right, "/right/")):
        entries = (await store.list(prefix)).entries
        assert table.all() == {entry.key.removeprefix(prefix): int(entry.value) for entry in entries}
    await view.stop()


async def test_whoever_waits_for_a_view_that_stops_is_told(simulation: Simulation) -> None:
    view = View(MemoryStore(simulation.clock))
    await view.load()
    waiting = asyncio.create_task(view.caught_up(Revision(1_000)))
    await asyncio.sleep(0.1)
    await view.stop()
    with pytest.raises(ShuttingDown):
        await waiting
    with pytest.raises(ShuttingDown):
        await view.caught_up(Revision(1_000))


async def test_until_asks_again_after_each_change_of_a_table_and_only_then(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    view = View(store)
    table = view.add(_table("/left/"))
    await view.load()
    asked = 0

    def is_two() -> bool:
        nonlocal asked
        asked += 1
        return table.get("a") == 2

    waiting = asyncio.create_task(view.until(is_two, 60))
    for put in (Put("/left/a", b"1"), Put("/cursors/x", b"1"), Put("/left/a", b"2")):
        written = await store.txn([], [put])
        await view.caught_up(written.revision)
        await asyncio.sleep(1)
    assert await waiting
    assert asked == 3
    assert await view.until(is_two, 0), "what holds already is not waited for"
    assert not await view.until(lambda: False, 5)
    await view.stop()


async def test_what_changed_while_somebody_acted_is_not_waited_for(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    view = View(store)
    view.add(_table("/left/"))
    await view.load()
    seen = view.changes
    written = await store.txn([], [Put("/left/a", b"1")])
    await view.caught_up(written.revision)
    began = simulation.clock.monotonic()
    assert await view.changed_since(seen, 60)
    assert simulation.clock.monotonic() == began
    assert not await view.changed_since(view.changes, 5)
    await view.stop()


@pytest.mark.parametrize("how", ["the view stops", "the broker is about to stop"])
async def test_nobody_waits_for_a_broker_that_stops(how: str, simulation: Simulation) -> None:
    view = View(MemoryStore(simulation.clock))
    await view.load()
    waiting = asyncio.create_task(view.until(lambda: False, 60))
    await asyncio.sleep(1)
    if how == "the view stops":
        await view.stop()
    else:
        view.end_waits()
    for wait in (waiting, view.until(lambda: False, 60)):
        with pytest.raises(ShuttingDown):
            await wait
    assert simulation.clock.monotonic() < 5
    await view.stop()


async def test_a_record_that_cannot_be_read_is_told_from_one_that_is_not_there(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    await store.txn([], [Put("/left/a", b"what?"), Put("/left/b", b"2")])
    view = View(store)
    table = view.add(_table("/left/"))
    await view.load()
    assert "a" not in table
    assert "/left/a: b'what?' is no number" in str(table.unreadable("a"))
    assert (table.unreadable("b"), table.unreadable("c")) == (None, None)
    assert view.unreadable() == 1
    assert not (await store.txn([table.unchanged("a")], [Put("/left/a", b"1")])).succeeded
    for write in (Put("/left/a", b"1"), Put("/left/a", b"what?"), Delete("/left/a")):
        written = await store.txn([], [write])
        await view.caught_up(written.revision)
        assert view.unreadable() == (write == Put("/left/a", b"what?"))
    await view.stop()


async def test_a_new_listing_forgets_the_records_that_could_not_be_read_and_are_gone(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock, limits=HistoryLimits(revisions=2))
    await store.txn([], [Put("/left/a", b"what?")])
    client = store.client()
    view = View(client)
    view.add(_table("/left/"))
    await view.load()
    assert view.unreadable() == 1
    client.disconnect()
    await store.txn([], [Delete("/left/a")])
    for number in range(10):
        await store.txn([], [Put("/else/x", b"%d" % number)])
    last = await store.txn([], [Put("/else/x", b"last")])
    client.reconnect()
    await view.caught_up(last.revision)
    assert view.unreadable() == 0
    await view.stop()
