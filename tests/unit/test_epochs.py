"""Which epoch wrote which offsets, and which positions lie on a log: tables."""

from __future__ import annotations

import pytest

from braid.model.ids import Epoch, Offset
from braid.model.log.epochs import MAX_EPOCH_STARTS, EpochStarts, begin_epoch, epoch_before, parting


def starts(*entries: tuple[int, int]) -> EpochStarts:
    return tuple((Epoch(epoch), Offset(first)) for epoch, first in entries)


LOG = starts((3, 0), (5, 40), (9, 75))


@pytest.mark.parametrize(
    ("before", "epoch", "first", "after"),
    [
        (starts(), 1, 0, starts((1, 0))),
        (starts((1, 0)), 2, 7, starts((1, 0), (2, 7))),
        (starts((1, 0)), 2, 0, starts((2, 0))),  # epoch 1 wrote nothing
        (LOG, 10, 75, starts((3, 0), (5, 40), (10, 75))),  # epoch 9 wrote nothing, or all of it is lost
        (LOG, 10, 60, starts((3, 0), (5, 40), (10, 60))),  # a loss of records of two epochs
        (LOG, 10, 0, starts((10, 0))),  # everything is lost
        (starts(), 4, 100, starts((4, 100))),  # an older build wrote the first hundred
    ],
)
def test_an_owner_that_begins_adds_its_epoch_and_drops_those_whose_records_are_not_there(
    before: EpochStarts, epoch: int, first: int, after: EpochStarts
) -> None:
    assert begin_epoch(before, Epoch(epoch), Offset(first)) == after


@pytest.mark.parametrize(("offset", "epoch"), [(0, 0), (1, 3), (40, 3), (41, 5), (75, 5), (76, 9), (1_000, 9)])
def test_the_epoch_of_the_record_before_an_offset(offset: int, epoch: int) -> None:
    assert epoch_before(LOG, offset) == epoch


def test_below_a_list_that_begins_late_the_epoch_is_not_known() -> None:
    late = starts((5, 40), (9, 75))
    assert epoch_before(late, 40) == 0
    assert epoch_before(late, 41) == 5
    assert epoch_before((), 41) == 0


@pytest.mark.parametrize(
    ("offset", "epoch", "parted_at"),
    [
        (30, 3, None),
        (40, 3, None),  # it has read all of epoch 3
        (41, 3, 40),  # here, epoch 3 ended before that
        (74, 5, None),
        (80, 5, 75),
        (80, 9, None),
        (80, 7, 75),  # no record of epoch 7 is left
        (75, 7, None),
        (80, 12, None),  # an epoch of the future: nothing here says that it is wrong
        (80, 2, 0),
        (0, 2, None),
        (80, 0, None),  # a position without an epoch is not checked
    ],
)
def test_a_position_lies_on_the_log_up_to_where_a_later_epoch_begins(
    offset: int, epoch: int, parted_at: int | None
) -> None:
    assert parting(LOG, offset, epoch) == parted_at


def test_where_the_list_says_nothing_every_position_is_accepted() -> None:
    assert parting((), 80, 3) is None
    late = starts((5, 40), (9, 75))
    assert parting(late, 40, 2) is None
    assert parting(late, 41, 2) == 40, "those records are of epoch 5, whatever was before them"


def test_the_list_is_bounded_and_forgets_the_oldest() -> None:
    log = starts()
    for epoch in range(1, 1_000):
        log = begin_epoch(log, Epoch(epoch), Offset(10 * epoch))
    assert len(log) == MAX_EPOCH_STARTS
    assert log[-1] == (999, 9_990)
    assert parting(log, 9_000, 900) is None, "it is forgotten where epoch 900 ended"
    assert parting(log, 9_991, 998) == 9_990
