"""Positions against logs that lose their ends: the list of epochs judges each position as the logs themselves would."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from braid.model.ids import Epoch, Offset
from braid.model.log.epochs import EpochStarts, begin_epoch, epoch_before, parting

OWNERS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 12)), min_size=1, max_size=20)
"""Of each owner: how many records of the log before it are lost, and how many records it writes itself."""


@given(OWNERS)
def test_a_position_is_refused_exactly_if_the_log_has_lost_records_before_it(owners: list[tuple[int, int]]) -> None:
    log: list[int] = []  # the epoch of each record: within one epoch, an offset is given out once
    starts: EpochStarts = ()
    read: list[list[int]] = []
    for epoch, (lost, written) in enumerate(owners, start=1):
        del log[max(0, len(log) - lost) :]
        starts = begin_epoch(starts, Epoch(epoch), Offset(len(log)))
        log += [epoch] * written
        read.append(list(log))
        for history in read:
            for offset in range(1, len(history) + 1):
                common = next((at for at in range(offset) if log[at : at + 1] != [history[at]]), None)
                if common is not None and common == len(log):
                    continue  # No other record is there yet: that is for the end of the log to say.
                assert parting(starts, offset, history[offset - 1]) == common
        for offset in range(1, len(log) + 1):
            assert epoch_before(starts, offset) == log[offset - 1]
