"""Decides what happens to the batches of a failed round. segment_writer.py explains rounds and the rules."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple

from braid.model.batch.identity import CANNOT_TELL, NOT_KNOWN
from braid.model.errors import (
    BraidError,
    BrokenInvariant,
    LogBusy,
    Moved,
    NotServing,
    OutOfSequence,
    Overloaded,
    SegmentSealed,
    StaleRoute,
)

NOT_STORED: Final = (LogBusy, Overloaded, NotServing, Moved, StaleRoute, OutOfSequence, SegmentSealed)
"""Refusals which say that this copy of the batch was not stored and will not be."""


class RetryAction(Enum):
    """The fate of a batch when its round is over."""

    AGAIN = "again"
    """Send the batch again under its number."""
    RENUMBER = "renumber"
    """Send the batch under a new producer id: it is certainly not stored."""
    FAIL = "fail"
    """Its error is final."""
    UNKNOWN = "unknown"
    """The batch cannot be sent again, and whether it is stored is not known."""


class BatchOutcome(NamedTuple):
    """A batch as decisions see it."""

    stored: bool
    error: BraidError | None
    doubtful: bool
    first_sequence: int
    next_sequence: int = 0


def decide_retries(outcomes: Sequence[BatchOutcome]) -> list[RetryAction]:
    """Decide about the batches of a round, oldest first. The oldest that is not stored decides about the rest."""
    actions: list[RetryAction] = []
    again = False  # an earlier batch goes again under its number: later batches are decided another time
    gap = False  # an earlier batch is not stored and never will be under its number
    for batch in outcomes:
        error = batch.error
        if batch.stored or again:
            actions.append(RetryAction.AGAIN)
            continue
        if error is None:
            raise BrokenInvariant("I10: a batch without an answer was judged")
        out_of_sequence = isinstance(error, OutOfSequence)
        if not gap and error.retriable:
            actions.append(RetryAction.AGAIN)
            again = True
            continue
        if not (out_of_sequence or error.retriable) or (out_of_sequence and not gap and not batch.first_sequence):
            actions.append(RetryAction.FAIL)
        else:
            actions.append(RetryAction.UNKNOWN if batch.doubtful else RetryAction.RENUMBER)
        gap = True
    return actions


class EndedAction(Enum):
    """The fate of a batch whose segment's log has ended."""

    SETTLE = "settle"
    """It is stored, at an offset that is not known."""
    HAND_OVER = "hand over"
    """It is certainly not stored."""
    FAIL = "fail"
    """Its error is final."""
    AGAIN = "again"
    """Send it again: it has no certain answer yet."""
    UNKNOWN = "unknown"
    """The log has forgotten the producer, and the batch may be stored."""


def decide_ended(outcomes: Sequence[BatchOutcome], next_sequence: int, *, asked: bool) -> list[EndedAction]:
    """Decide about the batches that were sent to a log which has ended, oldest first.

    `next_sequence` says how far the log has the producer. With `asked`, that is all that is known. Otherwise the log
    itself has answered; it knows the offsets, so a batch without its answer is sent again.
    """
    # A batch after number 0 follows batches that this log has confirmed, so the log has known the producer.
    unknown = next_sequence == NOT_KNOWN and bool(outcomes) and outcomes[0].first_sequence > 0
    forgotten = unknown or next_sequence == CANNOT_TELL
    actions: list[EndedAction] = []
    for batch in outcomes:
        if asked and batch.next_sequence <= next_sequence:
            actions.append(EndedAction.SETTLE)
        elif not asked and not isinstance(batch.error, SegmentSealed):
            final = batch.error is not None and not (batch.error.retriable or isinstance(batch.error, OutOfSequence))
            actions.append(EndedAction.FAIL if final else EndedAction.AGAIN)
        else:
            actions.append(EndedAction.UNKNOWN if forgotten and batch.doubtful else EndedAction.HAND_OVER)
    return actions
