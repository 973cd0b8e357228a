"""The arithmetic of `braid bench`: percentiles, the schedule of records, and who sends how many."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

import pytest

from braid.cli.bench.worker import WorkMeter, schedule
from braid.cli.bench.workload import percentiles_ms


def test_percentiles_are_taken_from_the_sorted_samples_in_milliseconds() -> None:
    samples = [number * 1_000_000 for number in range(1_000, -1, -1)]

    assert percentiles_ms(samples) == {"p50": 500.0, "p99": 990.0, "p99.9": 999.0, "worst": 1_000.0}


def test_no_samples_have_no_percentiles() -> None:
    assert percentiles_ms([]) == {}


def test_records_are_due_at_equal_distances_and_never_come_before_their_time() -> None:
    async def collect() -> list[tuple[int, int]]:
        return [(due_ns, time.monotonic_ns()) async for due_ns in schedule(rate=1_000, records=20)]

    collected = asyncio.run(collect())

    assert {later[0] - sooner[0] for sooner, later in pairwise(collected)} == {1_000_000}
    assert all(due_ns <= came_ns for due_ns, came_ns in collected)


def test_a_sender_that_was_held_up_keeps_to_its_schedule() -> None:
    """Otherwise the records that it could not send would not count as late: the omission that makes stalls vanish."""

    async def collect() -> list[int]:
        due: list[int] = []
        async for due_ns in schedule(rate=1_000, records=40):
            if not due:
                time.sleep(0.05)  # noqa: ASYNC251 (the loop itself is held up)
            due.append(due_ns)
        return due

    due = asyncio.run(collect())

    assert [due_ns - due[0] for due_ns in due] == [number * 1_000_000 for number in range(40)]


@pytest.mark.parametrize(("records", "stride"), [(10, 3), (9, 3), (1, 3), (3, 100)])
def test_a_meter_hands_out_each_record_once(records: int, stride: int) -> None:
    async def take_all() -> list[int]:
        meter = WorkMeter(records, 100)
        taken = []
        while count := meter.take(stride):
            taken.append(count)
        meter.done = sum(taken)
        assert meter.finish().value_bytes == records * 100
        return taken

    taken = asyncio.run(take_all())

    assert sum(taken) == records
    assert max(taken) <= stride
