"""Which epoch wrote which offsets of a log, and whether a reader's position lies on that log.

    ((3, 0), (5, 40), (9, 75))     epoch 3 wrote offsets 0 to 39, epoch 5 wrote 40 to 74, epoch 9 writes from 75 on

An offset alone does not say which record a reader has read. When an owner begins below the end that a former owner had
shown (a loss was accepted, or a machine lost its power before it had synced), new records take the offsets of lost
ones. A reader that goes on at its old offset would then skip the new records before it, without noticing. So a position
is an offset *and the epoch of the record before it*. An epoch has one owner, which writes each offset once, so the pair
names one record.

An owner adds its epoch and its first offset to the list when it begins. Entries at or above that offset go: their
records are not on this log. A position that was read in epoch e then lies on the log exactly if it is not above the
first offset of the epochs after e; that offset is also where the reader's history and the log part.

The list is bounded and may begin late. It still never accuses a position that is right: below its first entry nothing
is known, and what is not known is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from braid.model.ids import Epoch, Offset

EpochStarts = tuple[tuple[Epoch, Offset], ...]
"""For each epoch that has records, and for the present one: the epoch and its first offset. Both rise."""

UNKNOWN_EPOCH: Final = Epoch(0)
"""Owners count from 1."""
MAX_EPOCH_STARTS: Final = 64
"""The list is in every frontier and in every answer to POSITIONS. An owner that wrote nothing leaves no entry, so this
is the number of moves and restarts of a busy segment that a reader may sleep through and still be checked exactly."""


def begin_epoch(starts: EpochStarts, epoch: Epoch, first: Offset) -> EpochStarts:
    """Return the list of a log whose next owner, in `epoch`, begins at offset `first`."""
    kept = tuple(start for start in starts if start[1] < first)
    return (*kept, (epoch, first))[-MAX_EPOCH_STARTS:]


def epoch_before(starts: Sequence[tuple[int, int]], offset: int) -> Epoch:
    """Return the epoch of the record before `offset`; UNKNOWN_EPOCH if there is none, or if it is not known."""
    return next((Epoch(epoch) for epoch, first in reversed(starts) if first < offset), UNKNOWN_EPOCH)


def parting(starts: Sequence[tuple[int, int]], offset: int, after_epoch: int) -> Offset | None:
    """Return the offset at which the log parts from the history of a reader that has read up to `offset`, the last
    record in `after_epoch`. None if the position lies on the log, or if that is not known."""
    if after_epoch == UNKNOWN_EPOCH:
        return None
    end = next((first for epoch, first in starts if epoch > after_epoch), offset)
    return Offset(end) if end < offset else None
