"""What a writer decides when a round is over: a table of answers and fates."""

from __future__ import annotations

import pytest

from braid.client.producing.retry_decision import BatchOutcome, RetryAction, decide_retries
from braid.model.errors import BraidError, BrokenInvariant, ConnectionLost, LogBusy, OutOfSequence, PermissionDenied

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
