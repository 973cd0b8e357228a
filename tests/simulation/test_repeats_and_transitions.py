"""Tasks that are repeated while their topic is split, merged and repartitioned, and long after it: each row is stored
once, the rows of a key in order, and what cannot be known any more is refused (I4, I10, I11)."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Sequence
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from braid.client.client import Client
from braid.client.producing.repeatable_producer import RepeatableProducer, Written
from braid.model.errors import BraidError, NotAvailable, RepeatDiffers, RepeatTooLate
from braid.testing.sim.loop import Simulation, run_simulation
from tests.kits.brokers import PATH, Brokers, running_brokers
from tests.kits.waiting import until

ROWS = 30
"""Of a block."""
KEYS = 9


def block(number: int, label: str = "") -> Any:
    rows = range(number * ROWS, (number + 1) * ROWS)
    values = [f"{label}{row}".encode() for row in rows]
    if number % 5 == 4:
        return pa.table({"value": values})
    keys = [None if row % 10 == 9 else b"key-%d" % (row % KEYS) for row in rows]
    return pa.table({"value": values, "key": pa.array(keys, pa.binary())})


def blocks(count: int, label: str = "") -> list[Any]:
    return [block(number, label) for number in range(count)]


def producer_of(client: Client, *, era: int = 0, part: int = 0) -> RepeatableProducer:
    return client.repeatable_producer("orders", app="query", part=part, era=era)


async def attempt(client: Client, tables: Sequence[Any], *, era: int = 0, part: int = 0, pause_s: float = 0) -> Written:
    async with producer_of(client, era=era, part=part) as producer:
        for table in tables:
            await producer.add(table)
            await asyncio.sleep(pause_s)
        return await producer.finish()


async def dying_attempt(client: Client, tables: Sequence[Any], *, era: int = 0, part: int = 0) -> None:
    """Gives the blocks and dies: what is under way is not waited for."""
    async with producer_of(client, era=era, part=part) as producer:
        for table in tables:
            await producer.add(table)


async def check(client: Client, expected: Sequence[Sequence[Any]]) -> None:
    """Check that the rows of each writer's tables are there, once, and those of a key in order."""
    wanted = [value for tables in expected for table in tables for value in table.column("value").to_pylist()]
    found: dict[bytes | None, list[bytes]] = defaultdict(list)
    count = 0
    async with client.checkpoint_consumer("orders", start="earliest") as reader:
        while (batch := await reader.receive_batch(timeout=10)) is not None:
            for message in batch.messages():
                found[message.key].append(message.value)
                count += 1
    assert sorted(value for values in found.values() for value in values) == sorted(wanted), f"I10: {count} rows"
    for tables in expected:
        own = {value: at for at, value in enumerate(v for table in tables for v in table.column("value").to_pylist())}
        for key, values in found.items():
            places = [own[value] for value in values if value in own]
            assert key is None or places == sorted(places), f"I4: {key!r}"


async def change(client: Client, *steps: str) -> None:
    for step in steps:
        name, *numbers = step.split()
        await getattr(client.admin, name)("orders", *map(int, numbers))


CHANGES = [
    ("split 0",),
    ("split 0", "merge 1 2"),
    ("split 0", "split 1", "merge 4 2"),
    ("repartition 3", "repartition 2", "repartition 1"),
]


@pytest.mark.parametrize("changes", CHANGES, ids=" ".join)
@pytest.mark.parametrize("stored", [0, 1, 7, 12])
async def test_a_task_that_was_begun_before_any_changes_is_completed_after_them(
    stored: int, changes: Sequence[str], simulation: Simulation
) -> None:
    tables = blocks(12)
    async with running_brokers(simulation) as brokers, brokers.client(timeout=60) as client:
        await client.admin.create_topic("orders")
        await dying_attempt(client, tables[:stored])
        for done, step in enumerate(changes, 1):
            await change(client, step)
            if done < len(changes):
                await dying_attempt(client, tables[: stored + done])
        written = await attempt(client, tables)
        assert (written.records, written.past) == (12 * ROWS, False)
        again = await attempt(client, tables)
        assert (again.records, again.duplicates) == (12 * ROWS, 12 * ROWS)
        await attempt(client, blocks(3, "next-"), era=1)
        assert (await attempt(client, tables)).past
        await check(client, [[*tables], blocks(3, "next-")])


async def test_segments_of_the_first_layout_that_are_merged_tell_how_far_each_of_them_came(
    simulation: Simulation,
) -> None:
    """They know the writer under one id, and only one of them has rows of this era."""
    tables = blocks(6)
    one_key = pa.table({"value": [b"first"], "key": pa.array([b"key-1"], pa.binary())})
    async with running_brokers(simulation) as brokers, brokers.client(timeout=60) as client:
        await client.admin.create_topic("orders", segments=3)
        await attempt(client, blocks(2, "early-"))
        await attempt(client, [one_key], era=1)
        await change(client, "merge 0 1", "merge 3 2")
        await attempt(client, [one_key, *tables], era=1)
        await attempt(client, [one_key, *tables], era=1)
        await check(client, [blocks(2, "early-"), [one_key, *tables]])


@pytest.mark.parametrize("changes", CHANGES, ids=" ".join)
async def test_attempts_beside_each_other_run_through_any_changes(
    changes: Sequence[str], simulation: Simulation
) -> None:
    tables = blocks(40)
    async with running_brokers(simulation) as brokers, brokers.client(timeout=60) as client:
        async with brokers.client(timeout=60) as one, brokers.client(timeout=60) as other:
            await client.admin.create_topic("orders")
            running = asyncio.gather(attempt(one, tables, pause_s=0.02), attempt(other, tables, pause_s=0.03))
            await asyncio.sleep(0.1)
            await change(client, *changes)
            written = await running
        assert [each.records for each in written] == [40 * ROWS] * 2
        await check(client, [tables])


async def test_a_repeat_with_other_rows_is_refused_after_a_split(simulation: Simulation) -> None:
    tables = blocks(6)
    async with running_brokers(simulation) as brokers, brokers.client(timeout=60) as client:
        await client.admin.create_topic("orders")
        await attempt(client, tables)
        await change(client, "split 0")
        for other in ([block(0, "x"), *tables[1:]], [tables[0].slice(1), *tables[1:]], tables[:5]):
            with pytest.raises(RepeatDiffers):
                await attempt(client, other)
        await check(client, [tables])


async def test_a_repeat_is_refused_when_the_segment_that_it_began_in_has_left_the_layout(
    simulation: Simulation,
) -> None:
    tables = blocks(6)
    async with running_brokers(simulation) as brokers, brokers.client(timeout=60) as client:
        await client.admin.create_topic("orders", retention_ms=1_000)
        await attempt(client, blocks(2, "complete-"))
        await dying_attempt(client, tables[:3], era=1)
        await change(client, "split 0", "merge 1 2")
        await dying_attempt(client, tables[:1], era=1, part=1)
        await change(client, "split 3")
        await until(lambda: [*brokers.any().topics.get(PATH).layout.segments] == [4, 5], 3_600)
        for part in (0, 1):
            with pytest.raises(RepeatTooLate, match="has left the layout"):
                await attempt(client, tables, era=1, part=part)
        assert (await attempt(client, tables, era=2)).duplicates == 0
        assert (await attempt(client, tables, era=2)).duplicates == 6 * ROWS
        assert (await attempt(client, tables, era=1)).past, "a later era has begun"
        assert (await attempt(client, tables, era=0, part=2)).duplicates == 0, "a new writer"


async def test_a_task_is_completed_long_after_the_merge_with_an_empty_segment(simulation: Simulation) -> None:
    rows = pa.table({"value": [b"1", b"2"], "key": pa.array([b"key-1", b"key-1"], pa.binary())})
    async with running_brokers(simulation) as brokers, brokers.client(timeout=60) as client:
        await client.admin.create_topic("orders", segments=2)
        await attempt(client, [rows])
        await change(client, "merge 0 1")
        await asyncio.sleep(3_600)
        assert [*brokers.any().topics.get(PATH).layout.segments] == [0, 1, 2], "the topic keeps all for ever"
        assert (await attempt(client, [rows])).duplicates == 2


async def test_an_empty_segment_stays_as_long_as_records_of_its_time_would(simulation: Simulation) -> None:
    """Its sibling has rows under the id that all first segments share. Without the empty segment, nobody could say that
    the others are in no segment that is gone."""
    rows = pa.table({"value": [b"1", b"2"], "key": pa.array([b"key-1", b"key-1"], pa.binary())})
    async with running_brokers(simulation) as brokers, brokers.client(timeout=60) as client:
        await client.admin.create_topic("orders", segments=2, retention_ms=3_600_000)
        await attempt(client, [rows])
        await change(client, "merge 0 1")
        await asyncio.sleep(1_800)
        assert (await attempt(client, [rows])).duplicates == 2
        await until(lambda: [*brokers.any().topics.get(PATH).layout.segments] == [2], 3_600)


async def test_a_child_says_nothing_of_its_parents_before_its_owner_knows_them(simulation: Simulation) -> None:
    """The store has the tables that the child inherits, and the answer to its owner is under way."""
    tables = blocks(6)
    async with running_brokers(simulation, ("a", "b")) as brokers, brokers.client(timeout=60) as client:
        leader = next(name for name, each in brokers.running.items() if each.cluster.leader.leading)
        (owner,) = brokers.running.keys() - {leader}
        await client.admin.drain(leader)
        await client.admin.create_topic("orders")
        await attempt(client, tables)
        brokers.store_of(owner).delay_s = lambda: 0.5
        await change(client, "split 0")
        assert not any(each.inherited for each in brokers.running[owner].segments.of_topic(PATH) if each.name.id)
        assert (await attempt(client, tables)).duplicates == 6 * ROWS
        await check(client, [tables])


async def test_attempts_go_on_when_the_owner_dies_while_its_log_ends(simulation: Simulation) -> None:
    tables = blocks(20)
    async with running_brokers(simulation, ("a", "b")) as brokers, brokers.client(timeout=60) as client:
        await client.admin.create_topic("orders")
        await until(lambda: brokers.owner(0))
        owner = brokers.owner(0)
        running = asyncio.gather(attempt(client, tables, pause_s=0.02), attempt(client, tables, pause_s=0.01))
        changing = asyncio.create_task(change(client, "split 0"))
        await until(lambda: any(each.storage.log.sealed for each in brokers.running[owner].segments.of_topic(PATH)))
        brokers.kill(owner)
        await asyncio.sleep(3)
        await brokers.start(owner)
        await changing
        assert [each.records for each in await running] == [20 * ROWS] * 2
        await check(client, [tables])


class Chaos:
    """Two writers whose attempts die, run beside each other and are repeated until one has succeeded, while the layout
    changes and brokers die."""

    def __init__(self, brokers: Brokers) -> None:
        self.brokers = brokers
        self.random: Random = brokers.simulation.random
        self.expected: dict[int, list[Any]] = {0: [], 1: []}
        self.over = False

    async def run(self) -> None:
        troubles = [asyncio.create_task(self.transitions()), asyncio.create_task(self.kills())]
        await asyncio.gather(self.write(0), self.write(1))
        self.over = True
        await asyncio.gather(*troubles)

    async def transitions(self) -> None:
        while not self.over:
            await asyncio.sleep(self.random.uniform(0.05, 0.6))
            async with self.brokers.client(timeout=60) as client:
                with contextlib.suppress(BraidError):  # Another change runs, or a broker has died.
                    await change(client, self.drawn_change())

    def drawn_change(self) -> str:
        active = [segment.segment_id for segment in self.brokers.any().topics.get(PATH).layout.active]
        at = self.random.randrange(len(active))
        if self.random.random() < 0.3:
            return f"repartition {self.random.randint(1, 4)}"
        if len(active) > 4 or (at and self.random.random() < 0.5):
            return f"merge {active[max(at, 1) - 1]} {active[max(at, 1)]}"
        return f"split {active[at]}"

    async def kills(self) -> None:
        while not self.over:
            await asyncio.sleep(self.random.uniform(1, 4))
            name = self.random.choice([*self.brokers.running])
            self.brokers.kill(name)
            await asyncio.sleep(self.random.uniform(0.1, 3))
            await self.brokers.start(name)

    async def write(self, part: int) -> None:
        for era in range(4):
            tables = blocks(self.random.choice([1, 4, 12]), f"{part}/{era}/")
            while not await self.succeeds(part, era, tables):
                pass
            self.expected[part] += tables

    async def succeeds(self, part: int, era: int, tables: list[Any]) -> bool:
        random = self.random
        await asyncio.sleep(random.choice([0.0, 0.3, 2.0]))
        try:
            async with self.brokers.client("a", "b", timeout=random.choice([2.0, 60.0])) as client:
                if random.random() < 0.5:
                    await dying_attempt(client, tables[: random.randint(0, len(tables))], part=part, era=era)
                    return False
                pauses_s = [random.choice([0.0, 0.01, 0.1]) for _ in range(random.randint(1, 2))]
                attempts = [attempt(client, tables, part=part, era=era, pause_s=pause_s) for pause_s in pauses_s]
                done = await asyncio.gather(*attempts, return_exceptions=True)
        except (RepeatDiffers, RepeatTooLate, NotAvailable):
            raise
        except BraidError:
            return False  # It timed out, or found nobody.
        for each in done:
            if isinstance(each, RepeatDiffers | RepeatTooLate) or not isinstance(each, BraidError | Written):
                raise AssertionError from each
        return any(isinstance(each, Written) for each in done)


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_every_era_is_stored_once_and_in_order(seed: int, segments: int) -> None:
    async def main(simulation: Simulation) -> None:
        async with running_brokers(simulation, ("a", "b"), shared=bool(seed % 2)) as brokers:
            await brokers.call("a", "create_topic", topic="orders", segments=segments)
            chaos = Chaos(brokers)
            await chaos.run()
            assert brokers.any().topics.get(PATH).layout.epoch > 1
            async with brokers.client(timeout=60) as client:
                await check(client, list(chaos.expected.values()))

    run_simulation(seed, main)
