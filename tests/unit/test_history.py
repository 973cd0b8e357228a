"""Each check accepts a good history and names the promise that a bad one breaks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from braid.testing.checkers.history import (
    Confirmed,
    LogModel,
    PromiseBroken,
    Stored,
    check_confirmed_kept,
    check_continuity,
    check_once,
    check_single_writer,
)


def stored(base: int, count: int, epoch: int = 1, producer: int = 0, sequence: int = 0, digest: int = 0) -> Stored:
    return Stored(base, count, epoch, producer, sequence, digest)


def confirmed(base: int, count: int, epoch: int = 1, digest: int = 0) -> Confirmed:
    return Confirmed(base, count, epoch, 0, 0, digest)


def breaks(promise: str, check: Callable[[], object]) -> None:
    with pytest.raises(PromiseBroken) as caught:
        check()
    assert caught.value.promise == promise


def test_continuity_returns_the_next_offset() -> None:
    assert check_continuity([]) == 0
    assert check_continuity([stored(0, 3), stored(3, 0), stored(3, 2)]) == 5
    assert check_continuity([stored(7, 1)], start=7) == 8


@pytest.mark.parametrize(
    "batches",
    [[stored(1, 1)], [stored(0, 3), stored(4, 1)], [stored(0, 3), stored(2, 1)], [stored(0, 1), stored(0, 1)]],
    ids=["late start", "gap", "overlap", "repeat"],
)
def test_a_gap_or_a_repeat_breaks_i1(batches: list[Stored]) -> None:
    breaks("I1", lambda: check_continuity(batches))


def test_confirmed_batches_are_looked_for_above_the_retention_start() -> None:
    kept = [stored(5, 5), stored(10, 1)]
    check_confirmed_kept([confirmed(0, 5), confirmed(5, 5), confirmed(10, 1)], kept, start=5)
    breaks("I2", lambda: check_confirmed_kept([confirmed(0, 5)], kept))


@pytest.mark.parametrize("found", [[], [stored(0, 2, digest=9)], [stored(0, 2, epoch=2)], [stored(0, 1), stored(1, 1)]])
def test_a_confirmed_batch_that_is_missing_or_different_breaks_i2(found: list[Stored]) -> None:
    breaks("I2", lambda: check_confirmed_kept([confirmed(0, 2)], found))


def test_one_writer_after_another_is_fine_in_any_order_of_arrival() -> None:
    check_single_writer([confirmed(5, 2, epoch=3), confirmed(0, 5, epoch=1), confirmed(0, 5, epoch=1)])


@pytest.mark.parametrize(
    "confirms",
    [
        [confirmed(0, 5, epoch=1), confirmed(3, 1, epoch=2)],
        [confirmed(0, 5, epoch=1, digest=1), confirmed(0, 5, epoch=1, digest=2)],
        [confirmed(0, 9), confirmed(1, 1), confirmed(2, 1)],
        [confirmed(0, 5, epoch=2), confirmed(5, 1, epoch=1)],
    ],
    ids=["two owners", "two contents", "inside", "older owner behind"],
)
def test_two_writers_break_i3(confirms: list[Confirmed]) -> None:
    breaks("I3", lambda: check_single_writer(confirms))


def test_each_sequence_number_once_is_fine() -> None:
    check_once([stored(0, 2, producer=1, sequence=0), stored(2, 2, producer=1, sequence=2), stored(4, 2, producer=2)])
    check_once([stored(0, 2), stored(2, 2)])


def test_a_sequence_number_that_is_stored_twice_breaks_i10() -> None:
    breaks("I10", lambda: check_once([stored(0, 2, producer=1), stored(2, 2, producer=1)]))
    breaks("I10", lambda: check_once([stored(0, 3, producer=1), stored(3, 1, producer=1, sequence=2)]))


def test_the_model_checks_a_whole_read_against_all_confirms() -> None:
    model = LogModel()
    model.confirm(confirmed(0, 2))
    model.confirm(confirmed(2, 3))
    assert model.next_offset == 5
    model.check([stored(0, 2), stored(2, 3), stored(5, 1)])
    breaks("I2", lambda: model.check([stored(0, 2)]))
    breaks("I1", lambda: model.check([stored(0, 2), stored(3, 2)]))
