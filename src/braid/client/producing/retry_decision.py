"""Decides what happens to the batches of a failed round. segment_writer.py explains rounds and the rules."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple

from braid.model.errors import (
    BraidError,
    BrokenInvariant,
    LogBusy,
    Moved,
    NotServing,
    OutOfSequence,
    Overloaded,
    StaleRoute,
)

NOT_STORED: Final = (LogBusy, Overloaded, NotServing, Moved, StaleRoute, OutOfSequence)
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
    """A batch as `decide_retries` sees it."""

    stored: bool
    error: BraidError | None
    doubtful: bool
    first_sequence: int


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
