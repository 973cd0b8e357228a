"""The arithmetic of `braid bench move`: waits by slots of time, what is lost and what came twice, and the ratios."""

from __future__ import annotations

import pytest

from braid.cli.bench.move import MoveResult, ratios_of
from braid.cli.bench.steady import Arrivals, Waits
from braid.cli.bench.workload import SLOT_NS, Steady

MS = 1_000_000


def test_each_slot_of_time_keeps_its_longest_wait() -> None:
    waits = Waits()
    for due_ms, waited_ms in ((0, 3), (5, 9), (9, 1), (20, 4)):
        waits.add(due_ms * MS, (due_ms + waited_ms) * MS)

    assert waits.by_slot_ms == {0: 9.0, 20 * MS // SLOT_NS: 4.0}


def test_the_longest_wait_of_a_time_counts_records_that_were_due_in_it() -> None:
    steady = Steady(waited_ms={0: 50.0, 1: 7.0, 2: 8.0, 3: 60.0})

    assert steady.longest_ms(1 * SLOT_NS, 3 * SLOT_NS - 1) == 8.0
    assert steady.longest_ms(7 * SLOT_NS, 9 * SLOT_NS) == 0.0


@pytest.mark.parametrize(
    ("numbers", "lost", "twice"),
    [
        ([0, 1, 2], 0, 0),
        ([0, 3, 4], 2, 0),
        ([0, 1, 0, 1, 2], 0, 2),
        ([0, 2, 1], 1, 1),
        ([], 0, 0),
    ],
)
def test_missing_numbers_are_lost_and_smaller_ones_came_twice(numbers: list[int], lost: int, twice: int) -> None:
    arrivals = Arrivals()
    for number in numbers:
        arrivals.add(number)

    assert (arrivals.lost, arrivals.twice) == (lost, twice)


def test_records_of_a_key_are_counted_by_themselves() -> None:
    arrivals = Arrivals(keys=3)
    for number in (0, 3, 2, 6, 1, 10, 9):
        arrivals.add(number)
    assert (arrivals.lost, arrivals.twice) == (2, 0), "4 and 7 are missing before 10"
    assert arrivals.missing(12) == 3, "5, 8 and 11"
    assert arrivals.missing(3) == 0
    arrivals.add(4)
    assert arrivals.twice == 1, "it came behind a later one of its key"


def row(history: int, storage: str, ms: float) -> MoveResult:
    times = [ms, ms, 100 * ms]
    return MoveResult(
        history_bytes=history,
        storage=storage,
        moves=3,
        records=1,
        move_ms=times,
        producer_ms=times,
        consumer_ms=times,
        rest_ms=1.0,
        lost=0,
        twice=0,
        errors=0,
    )


def test_the_last_history_is_compared_with_the_first_by_medians_where_storage_is_shared() -> None:
    rows = [row(10, "shared_fs", 10.0), row(20, "shared_fs", 90.0), row(40, "shared_fs", 12.0)]

    assert ratios_of(rows) == {"move": 1.2, "producer": 1.2, "consumer": 1.2}
    assert ratios_of(rows[:1]) == {}
    assert ratios_of([row(10, "local", 10.0), row(20, "local", 90.0)]) == {}
