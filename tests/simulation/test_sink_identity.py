"""Tasks that are repeated, beside each other and one after the other, while segments move and brokers die: each row is
stored once, in order, and a repeat that is not the same is refused before it stores anything (I10, I11)."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from braid.client.client import Client
from braid.client.producing.repeatable_producer import RepeatableProducer, Written
from braid.model.errors import BraidError, RepeatDiffers
from braid.storage.log import producers
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import SHARED, Brokers, running_brokers
from tests.kits.waiting import until

ROWS = 40
"""Of a block."""


def block(number: int, *, keys: bool = True, label: str = "") -> Any:
    rows = range(number * ROWS, (number + 1) * ROWS)
    columns: dict[str, Any] = {"value": pa.array([b"%s%d" % (label.encode(), row) for row in rows])}
    if keys:
        columns["key"] = pa.array([None if row % 10 == 9 else b"key-%d" % (row % 7) for row in rows], pa.binary())
    return pa.table(columns)


def blocks(count: int, *, keys: bool = True, label: str = "") -> list[Any]:
    return [block(number, keys=keys, label=label) for number in range(count)]


def values_of(tables: Sequence[Any]) -> list[bytes]:
    return [value for table in tables for value in table.column("value").to_pylist()]


async def a_topic(brokers: Brokers, segments: int) -> None:
    await brokers.call("a", "create_topic", topic="orders", segments=segments)
    await until(lambda: all(brokers.owner(segment) for segment in range(segments)))


def producer_of(client: Client, *, part: int = 0, era: int = 0) -> RepeatableProducer:
    return client.repeatable_producer("orders", app="query", part=part, era=era)


async def attempt(
    client: Client,
    tables: Sequence[Any],
    *,
    part: int = 0,
    era: int = 0,
    pause_s: float = 0.0,
    random: Random | None = None,
) -> Written:
    """All of it. With `random`, between two blocks it waits for up to `pause_s`."""
    async with producer_of(client, part=part, era=era) as producer:
        for table in tables:
            await producer.add(table)
            if random is not None:
                await asyncio.sleep(random.uniform(0, pause_s))
        return await producer.finish()


async def dying_attempt(client: Client, tables: Sequence[Any], count: int, *, era: int = 0, part: int = 0) -> None:
    """Gives `count` blocks and dies: what is under way is not waited for."""
    async with producer_of(client, part=part, era=era) as producer:
        for table in tables[:count]:
            await producer.add(table)


async def everything(client: Client) -> dict[int, list[tuple[bytes | None, bytes]]]:
    """The records of each segment, in order."""
    found: dict[int, list[tuple[bytes | None, bytes]]] = defaultdict(list)
    async with client.checkpoint_consumer("orders", start="earliest") as reader:
        while (batch := await reader.receive_batch(timeout=5)) is not None:
            found[batch.segment] += [(message.key, message.value) for message in batch.messages()]
    return found


def check_once_and_in_order(found: dict[int, list[tuple[bytes | None, bytes]]], tables: Sequence[Any]) -> None:
    stored = [value for records in found.values() for _, value in records]
    assert sorted(stored) == sorted(values_of(tables)), f"{len(stored)} records"
    place = {value: number for number, value in enumerate(values_of(tables))}
    for segment, records in found.items():
        places = [place[value] for _, value in records]
        # In a block, the rows of a segment keep their order; blocks keep theirs.
        assert places == sorted(places), f"segment {segment}"


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("keys", [True, False], ids=["keyed", "keyless"])
async def test_a_task_that_is_repeated_after_any_part_of_it_stores_each_row_once(
    segments: int, keys: bool, simulation: Simulation
) -> None:
    async with running_brokers(simulation, ("a",)) as brokers:
        await a_topic(brokers, segments)
        expected = []
        async with brokers.client() as client:
            for era, died_after in enumerate((0, 1, 2, 7, 8, 9, 12, 20)):
                tables = blocks(20, keys=keys, label=f"{era}-")
                await dying_attempt(client, tables, died_after, era=era)
                await dying_attempt(client, tables, died_after // 2, era=era)
                written = await attempt(client, tables, era=era)
                assert written.records == 20 * ROWS
                assert not written.past
                assert written.duplicates <= died_after * ROWS
                again = await attempt(client, tables, era=era)
                assert (again.records, again.duplicates, again.past) == (20 * ROWS, 20 * ROWS, False)
                expected += tables
            check_once_and_in_order(await everything(client), expected)


@pytest.mark.parametrize("seed", range(8))
async def test_attempts_beside_each_other_store_each_row_once(seed: int, simulation: Simulation) -> None:
    async with running_brokers(simulation, ("a", "b")) as brokers:
        random = brokers.simulation.random
        await a_topic(brokers, 2)
        tables = blocks(30)
        async with brokers.client() as one, brokers.client() as other, brokers.client() as third:
            written = await asyncio.gather(
                attempt(one, tables, pause_s=0.01, random=random),
                attempt(other, tables, pause_s=0.02, random=random),
                attempt(third, tables),
            )
            assert all(each.records == 30 * ROWS for each in written)
            assert sum(each.records - each.duplicates for each in written) == 30 * ROWS
            check_once_and_in_order(await everything(one), tables)


@SHARED
async def test_a_move_in_the_middle_is_not_noticed(shared: bool, simulation: Simulation) -> None:
    async with running_brokers(simulation, ("a", "b"), shared=shared) as brokers:
        await a_topic(brokers, 1)
        tables = blocks(40)
        async with brokers.client() as client, brokers.client() as other:
            target = "b" if brokers.owner(0) == "a" else "a"
            moving = asyncio.create_task(brokers.move(0, target))
            written = await asyncio.gather(
                attempt(client, tables, pause_s=0.02, random=brokers.simulation.random),
                attempt(other, tables, pause_s=0.02, random=brokers.simulation.random),
            )
            assert not moving.done() or brokers.owner(0) == target
            await moving
            assert sum(each.records - each.duplicates for each in written) == 40 * ROWS
            assert (await attempt(client, tables)).duplicates == 40 * ROWS, "the new owner knows them"
            check_once_and_in_order(await everything(client), tables)


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_happens_every_era_is_stored_once_and_in_order(seed: int, simulation: Simulation) -> None:
    """Two parts write era after era; attempts die, run beside each other, and are repeated until one has succeeded;
    meanwhile segments move, and brokers die and come back."""
    async with running_brokers(simulation, ("a", "b"), shared=False) as brokers:
        random = brokers.simulation.random
        await a_topic(brokers, 2)
        expected: dict[int, list[Any]] = {0: [], 1: []}
        over = False

        async def trouble() -> None:
            while not over:
                await asyncio.sleep(random.uniform(0.5, 3))
                name = random.choice([*brokers.running])
                if random.random() < 0.5:
                    segment = random.randrange(2)
                    if brokers.owner(segment) and brokers.owner(segment) != name:
                        await brokers.move(segment, name)
                else:
                    brokers.kill(name)
                    await asyncio.sleep(random.uniform(0.1, 3))
                    await brokers.start(name)

        async def succeed(part: int, era: int, tables: list[Any]) -> None:
            while True:
                try:
                    async with brokers.client("a", "b", timeout=random.choice([1.0, 30.0])) as client:
                        if random.random() < 0.5:
                            await dying_attempt(client, tables, random.randint(0, len(tables)), part=part, era=era)
                            continue
                        pause_s = random.choice([0.001, 0.05])
                        tries = [
                            attempt(client, tables, part=part, era=era, pause_s=pause_s, random=random)
                            for _ in range(random.randint(1, 2))
                        ]
                        done = await asyncio.gather(*tries, return_exceptions=True)
                        for written in done:
                            if isinstance(written, RepeatDiffers) or not isinstance(written, BraidError | Written):
                                raise AssertionError from written
                        if any(isinstance(written, Written) for written in done):
                            return
                except RepeatDiffers:
                    raise
                except BraidError:
                    pass  # It timed out, or found nobody.

        async def write(part: int) -> None:
            for era in range(4):
                tables = blocks(random.choice([1, 5, 25]), label=f"{part}/{era}/")
                await succeed(part, era, tables)
                expected[part] += tables

        troubling = asyncio.create_task(trouble())
        await asyncio.gather(write(0), write(1))
        over = True
        await troubling
        await until(lambda: all(brokers.owner(segment) for segment in range(2)))
        async with brokers.client() as client:
            found = await everything(client)
        for part, tables in expected.items():
            mark = b"%d/" % part
            own = {at: [each for each in records if each[1].startswith(mark)] for at, records in found.items()}
            check_once_and_in_order(own, tables)


SWAPPED = [block(1), block(0), *blocks(12)[2:]]
OTHER_ROW = [block(0, label="x"), *blocks(12)[1:]]
ONE_LESS = [blocks(1)[0].slice(1), *blocks(12)[1:]]


@pytest.mark.parametrize("stored", [1, 3, 8])
@pytest.mark.parametrize("repeat", [SWAPPED, OTHER_ROW, ONE_LESS], ids=["another order", "another row", "a row less"])
async def test_a_repeat_that_is_not_the_same_is_refused_before_it_stores_anything(
    stored: int, repeat: list[Any], simulation: Simulation
) -> None:
    async with running_brokers(simulation, ("a",)) as brokers:
        await a_topic(brokers, 1)
        async with brokers.client() as client:
            await attempt(client, blocks(12)[:stored])
            with pytest.raises(RepeatDiffers):
                await attempt(client, repeat)
            check_once_and_in_order(await everything(client), blocks(12)[:stored])


async def test_a_difference_far_behind_is_found_where_the_repeat_would_begin_to_store(simulation: Simulation) -> None:
    """The log remembers 8 batches. Those before cannot be compared, but then the rest cannot be the same either."""
    async with running_brokers(simulation, ("a",)) as brokers:
        await a_topic(brokers, 1)
        async with brokers.client() as client:
            await attempt(client, blocks(20))
            shifted = [blocks(21)[20], *blocks(20), block(30)]
            with pytest.raises(RepeatDiffers, match="offsets 480 to 519"):
                await attempt(client, shifted)
            check_once_and_in_order(await everything(client), blocks(20))


async def test_times_count_if_the_rows_bring_them_and_not_if_they_are_when_it_was_written(
    simulation: Simulation,
) -> None:
    async with running_brokers(simulation, ("a",)) as brokers:
        await a_topic(brokers, 1)
        async with brokers.client() as client:
            await attempt(client, blocks(2), era=0)
            await asyncio.sleep(100)
            assert (await attempt(client, blocks(2), era=0)).duplicates == 2 * ROWS

            def timed(time: int) -> list[Any]:
                return [block(0).append_column("timestamp", pa.array([time] * ROWS, pa.timestamp("us", tz="UTC")))]

            await attempt(client, timed(5), era=1)
            assert (await attempt(client, timed(5), era=1)).duplicates == ROWS
            with pytest.raises(RepeatDiffers):
                await attempt(client, timed(6), era=1)


async def test_a_repeat_after_a_later_era_says_so_and_one_that_has_fewer_rows_is_refused(
    simulation: Simulation,
) -> None:
    async with running_brokers(simulation, ("a",)) as brokers:
        await a_topic(brokers, 1)
        async with brokers.client() as client:
            early, later = blocks(3, label="4-"), blocks(20, label="5-")
            await attempt(client, early, era=4)
            await attempt(client, later, era=5)
            late = await attempt(client, early, era=4)
            assert (late.duplicates, late.past) == (3 * ROWS, True)
            with pytest.raises(RepeatDiffers, match="the first try had more rows"):
                await attempt(client, later[:5], era=5)
            check_once_and_in_order(await everything(client), [*early, *later])


@pytest.mark.parametrize("shared", [True, False], ids=["shared storage", "local storage"])
async def test_a_repeat_is_recognised_after_its_only_chunk_has_expired_and_the_segment_has_moved(
    shared: bool, simulation: Simulation
) -> None:
    """The chunk's footer had the producer table."""
    tables = blocks(2)
    async with running_brokers(simulation, shared=shared) as brokers, brokers.client(timeout=60) as client:
        await client.admin.create_topic("orders", retention_ms=1_000)
        await until(lambda: brokers.owner(0))
        first, second, third = [brokers.owner(0), *sorted(brokers.running.keys() - {brokers.owner(0)})]
        assert (await attempt(client, tables)).duplicates == 0
        async with client.producer("orders") as producer:
            await producer.send(b"ordinary")
        await brokers.move(0, second)
        await asyncio.sleep(200)  # Longer than the housekeeper's round.
        (segment,) = brokers.running[second].segment_host.segments.all()
        assert segment.earliest == segment.end
        await brokers.move(0, third)
        assert (await attempt(client, tables)).duplicates == 2 * ROWS
        (segment,) = brokers.running[third].segment_host.segments.all()
        assert segment.end == 2 * ROWS + 1
        await brokers.move(0, first)
        assert (await attempt(client, tables)).duplicates == 2 * ROWS


async def test_a_task_that_many_others_have_outlived_is_still_recognised(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a writer that 10,000 others have outlived, logs keep the last batch: through a restart, and also in the
    segments that a split has made."""
    monkeypatch.setattr(producers, "MAX_PRODUCERS", 3)
    async with running_brokers(simulation, ("a",)) as brokers:
        await a_topic(brokers, 1)
        async with brokers.client() as client:
            first, others = blocks(12), [blocks(1, label=f"{part}-") for part in range(1, 9)]
            await dying_attempt(client, first, 11)
            await attempt(client, first)
            for part, tables in enumerate(others, 1):
                await attempt(client, tables, part=part)
            await attempt(client, first)
        await brokers.stop("a")
        await brokers.start("a")
        async with brokers.client() as client:
            assert (await attempt(client, first)).records == 12 * ROWS
            await client.admin.split("orders", 0)
            assert (await attempt(client, first)).records == 12 * ROWS
            check_once_and_in_order(
                await everything(client), [*first, *(table for tables in others for table in tables)]
            )
