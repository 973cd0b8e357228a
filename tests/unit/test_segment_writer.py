"""What a writer decides when a round is over, and when its segment has ended: tables of answers and fates."""

from __future__ import annotations

import pytest

from braid.client.producing.retry_decision import (
    BatchOutcome,
    EndedAction,
    RetryAction,
    decide_ended,
    decide_retries,
)
from braid.model.batch.identity import CANNOT_TELL, NOT_KNOWN
from braid.model.errors import (
    BraidError,
    BrokenInvariant,
    ConnectionLost,
    LogBusy,
    OutOfSequence,
    PermissionDenied,
    SegmentSealed,
)

A, R, F, U = RetryAction.AGAIN, RetryAction.RENUMBER, RetryAction.FAIL, RetryAction.UNKNOWN
BUSY, LOST, GAP, NO = LogBusy("busy"), ConnectionLost("lost"), OutOfSequence("gap"), PermissionDenied("no")


def batch(error: BraidError | None, sequence: int = 5, *, doubtful: bool = False, stored: bool = False) -> BatchOutcome:
    return BatchOutcome(stored, error, doubtful, sequence)


STORED = batch(None, stored=True)


@pytest.mark.parametrize(
    ("answers", "fates"),
    [
        pytest.param([batch(BUSY), batch(GAP), batch(GAP)], [A, A, A], id="only a consequence"),
        pytest.param([batch(LOST, doubtful=True), batch(LOST, doubtful=True)], [A, A], id="a lost link"),
        pytest.param([batch(NO), batch(GAP), batch(GAP)], [F, R, R], id="the rest is certainly not stored"),
        pytest.param([batch(NO), batch(GAP, doubtful=True), batch(GAP)], [F, U, R], id="a doubtful one in the rest"),
        pytest.param([batch(NO), batch(NO), batch(BUSY)], [F, F, R], id="two refused"),
        pytest.param([batch(BUSY), batch(NO), batch(GAP)], [A, A, A], id="refused behind one that goes again: later"),
        pytest.param([batch(GAP), batch(GAP)], [R, R], id="the broker forgot the producer"),
        pytest.param([batch(GAP, doubtful=True), batch(GAP)], [U, R], id="forgotten, and it may have been stored"),
        pytest.param([batch(GAP, 0), batch(GAP, 3)], [F, R], id="out of sequence at 0 makes no sense"),
        pytest.param([STORED, batch(GAP), batch(GAP)], [A, R, R], id="a stored one in front is no excuse"),
        pytest.param([batch(BUSY), STORED, batch(GAP)], [A, A, A], id="a stored one between"),
        pytest.param([batch(NO), STORED, batch(GAP)], [F, A, R], id="refused, yet the next is stored"),
    ],
)
def test_the_oldest_batch_that_is_not_stored_decides(answers: list[BatchOutcome], fates: list[RetryAction]) -> None:
    assert decide_retries(answers) == fates


def test_nothing_is_decided_about_a_batch_without_an_answer() -> None:
    with pytest.raises(BrokenInvariant):
        decide_retries([batch(NO), batch(None)])


SETTLE, HAND_OVER, FAIL = EndedAction.SETTLE, EndedAction.HAND_OVER, EndedAction.FAIL
AGAIN, UNKNOWN = EndedAction.AGAIN, EndedAction.UNKNOWN
SEALED = SegmentSealed("sealed", 9, 9)


def sent(first: int, error: BraidError | None = SEALED, *, doubtful: bool = False) -> BatchOutcome:
    """A batch of two records."""
    return BatchOutcome(False, error, doubtful, first, first + 2)


@pytest.mark.parametrize(
    ("outcomes", "next_sequence", "asked", "fates"),
    [
        pytest.param([sent(0), sent(2)], NOT_KNOWN, False, [HAND_OVER, HAND_OVER], id="it never had anything"),
        pytest.param([sent(4), sent(6, doubtful=True)], 4, False, [HAND_OVER, HAND_OVER], id="doubt is over"),
        pytest.param([sent(4, LOST), sent(6)], 4, False, [AGAIN, HAND_OVER], id="one without a certain answer"),
        pytest.param([sent(4, LOST), sent(6)], 6, False, [AGAIN, HAND_OVER], id="the log itself knows the offset"),
        pytest.param([sent(4, BUSY), sent(6, GAP), sent(8)], 4, False, [AGAIN, AGAIN, HAND_OVER], id="before the end"),
        pytest.param([sent(4), sent(6, NO)], 4, False, [HAND_OVER, FAIL], id="refused for good"),
        pytest.param([sent(4, doubtful=True), sent(6)], NOT_KNOWN, False, [UNKNOWN, HAND_OVER], id="forgotten"),
        pytest.param([sent(0, doubtful=True), sent(2)], CANNOT_TELL, False, [UNKNOWN, HAND_OVER], id="may forget"),
        pytest.param([sent(0, LOST), sent(2, LOST)], 2, True, [SETTLE, HAND_OVER], id="a child tells"),
        pytest.param([sent(0, LOST), sent(2, LOST)], 4, True, [SETTLE, SETTLE], id="a child has all"),
        pytest.param([sent(0, LOST, doubtful=True)], NOT_KNOWN, True, [HAND_OVER], id="a child has nothing"),
        pytest.param([sent(4, LOST, doubtful=True), sent(6)], NOT_KNOWN, True, [UNKNOWN, HAND_OVER], id="child forgot"),
        pytest.param([sent(0, None)], 0, True, [HAND_OVER], id="not sent again yet"),
        pytest.param([], NOT_KNOWN, True, [], id="nothing was sent"),
    ],
)
def test_what_an_ended_segment_says_decides_what_is_handed_over(
    outcomes: list[BatchOutcome], next_sequence: int, asked: bool, fates: list[EndedAction]
) -> None:
    assert decide_ended(outcomes, next_sequence, asked=asked) == fates
