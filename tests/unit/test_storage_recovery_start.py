"""Where an owner begins: tables of evidence and outcome, in the order of precedence."""

from __future__ import annotations

import pytest

from braid.model.errors import RecoveryConflict, RecoveryUnsafe
from braid.model.ids import Epoch, Offset
from braid.storage.history.catalog import Frontier, SealedState
from braid.storage.recovery_start import LocalEvidence, RecoverySource, Start, resolve_recovery_start


def frontier(
    epoch: int, next_offset: int, *, begun: bool = True, continues: int | None = None, end: int | None = None
) -> Frontier:
    before = epoch - 1 if continues is None else continues
    ends = Offset(end) if end is not None else None
    return Frontier(Epoch(epoch), f"broker-{epoch}", begun, Epoch(before), Offset(next_offset), end=ends)


def sealed(last: int, epoch: int) -> SealedState:
    return SealedState(last, Epoch(epoch), f"broker-{epoch}", 0)


def local(base: int, end: int, *epochs: int) -> LocalEvidence:
    return LocalEvidence(Offset(base), Offset(end), frozenset(map(Epoch, epochs)))


Evidence = tuple[SealedState | None, Frontier | None, LocalEvidence | None]

STARTS: dict[str, tuple[Evidence, tuple[int, RecoverySource]]] = {
    "nothing at all: a new log": ((None, None, None), (0, RecoverySource.EMPTY)),
    "claimed, but nobody ever began": ((None, frontier(1, 0, begun=False), None), (0, RecoverySource.EMPTY)),
    "three claims in a row, nobody ever began": (
        (None, frontier(3, 0, begun=False, continues=0), None),
        (0, RecoverySource.EMPTY),
    ),
    "a claim that left its BEGIN and died before it had begun": (
        (None, frontier(1, 0, begun=False), local(0, 0, 1)),
        (0, RecoverySource.EMPTY),
    ),
    "sealed at 21: the timeline goes on at 22": ((sealed(21, 1), frontier(1, 22), None), (22, RecoverySource.SEALED)),
    "sealed without a single record": ((sealed(-1, 1), frontier(1, 0), None), (0, RecoverySource.SEALED)),
    "sealed, then claimed by one that never began": (
        (sealed(21, 1), frontier(2, 22, begun=False), None),
        (22, RecoverySource.SEALED),
    ),
    "sealed comes before local batches of the same owner": (
        (sealed(21, 1), frontier(1, 22), local(0, 22, 1)),
        (22, RecoverySource.SEALED),
    ),
    "sealed comes before an old owner's longer local batches": (
        (sealed(21, 2), frontier(2, 22), local(0, 50, 1)),
        (22, RecoverySource.SEALED),
    ),
    "sealed comes before a later claim's bare BEGIN": (
        (sealed(21, 1), frontier(2, 22, begun=False), local(0, 22, 1, 2)),
        (22, RecoverySource.SEALED),
    ),
    "local batches of the last owner, nothing exported": (
        (None, frontier(1, 0), local(0, 22, 1)),
        (22, RecoverySource.LOCAL),
    ),
    "local batches reach beyond the chunks": ((None, frontier(1, 10), local(0, 22, 1)), (22, RecoverySource.LOCAL)),
    "local batches end where the chunks end": ((None, frontier(1, 22), local(22, 22, 1)), (22, RecoverySource.LOCAL)),
    "local batches begin where the chunks end": ((None, frontier(1, 10), local(10, 22, 1)), (22, RecoverySource.LOCAL)),
    "local batches begin inside the chunks": ((None, frontier(1, 15), local(10, 22, 1)), (22, RecoverySource.LOCAL)),
    "a later claim never began, so the files of the one before are the log": (
        (None, frontier(2, 10, begun=False), local(0, 22, 1)),
        (22, RecoverySource.LOCAL),
    ),
    "two later claims never began": (
        (None, frontier(3, 10, begun=False, continues=1), local(0, 22, 1)),
        (22, RecoverySource.LOCAL),
    ),
    "a later claim left its BEGIN here and never began": (
        (None, frontier(2, 10, begun=False), local(0, 22, 1, 2)),
        (22, RecoverySource.LOCAL),
    ),
    "the last of several owners on this disk": (
        (None, frontier(3, 10), local(0, 22, 1, 2, 3)),
        (22, RecoverySource.LOCAL),
    ),
    "an ended log that chunks hold, its owner is elsewhere": (
        (None, frontier(1, 22, end=22), None),
        (22, RecoverySource.CHUNKS),
    ),
    "an ended log that chunks hold, and an older owner's batches": (
        (None, frontier(2, 22, end=22), local(0, 30, 1)),
        (22, RecoverySource.CHUNKS),
    ),
    "an ended log, served by others since, that chunks hold": (
        (None, frontier(4, 22, begun=False, continues=1, end=22), None),
        (22, RecoverySource.CHUNKS),
    ),
    "an ended log whose files are here": (
        (None, frontier(1, 10, end=22), local(0, 22, 1)),
        (22, RecoverySource.LOCAL),
    ),
}


@pytest.mark.parametrize(("evidence", "expected"), STARTS.values(), ids=STARTS)
def test_evidence_decides_the_start(evidence: Evidence, expected: tuple[int, RecoverySource]) -> None:
    for accept_loss in (False, True):
        start = resolve_recovery_start(
            sealed=evidence[0], frontier=evidence[1], local=evidence[2], accept_loss=accept_loss
        )
        assert start == Start(Offset(expected[0]), expected[1]), "and consent to a loss changes nothing here"


UNSAFE: dict[str, tuple[Evidence, int]] = {
    "the last owner is elsewhere and nothing is here": ((None, frontier(1, 10), None), 10),
    "nothing was exported at all": ((None, frontier(1, 0), None), 0),
    "only an older owner's batches are here": ((None, frontier(2, 10), local(0, 22, 1)), 10),
    "a later claim never began, and the one before is elsewhere": ((None, frontier(2, 10, begun=False), None), 10),
    "an ended log whose tail was not exported": ((None, frontier(1, 10, end=22), None), 10),
    "the files here are of the claim that never began": ((None, frontier(2, 10, begun=False), local(10, 10, 2)), 10),
}


@pytest.mark.parametrize(("evidence", "chunks_end"), UNSAFE.values(), ids=UNSAFE)
def test_a_missing_tail_stops_the_opening_until_somebody_accepts_the_loss(evidence: Evidence, chunks_end: int) -> None:
    state, front, here = evidence
    assert front is not None
    with pytest.raises(RecoveryUnsafe) as caught:
        resolve_recovery_start(sealed=state, frontier=front, local=here)
    for part in (f"epoch {front.last_writer} ", f"offset {chunks_end};", front.holder, "accept the loss"):
        assert part in str(caught.value)
    start = resolve_recovery_start(sealed=state, frontier=front, local=here, accept_loss=True)
    assert start == Start(Offset(chunks_end), RecoverySource.CHUNKS, loss_accepted=True)


CONTRADICTIONS: dict[str, tuple[Evidence, tuple[str, str]]] = {
    "local batches, but no owner was ever recorded": (
        (None, None, local(0, 22, 1, 4)),
        ("local batches of epoch 4", "no owner was ever recorded"),
    ),
    "a sealed state, but no owner was ever recorded": (
        (sealed(21, 1), None, None),
        ("last_committed_offset=21", "no owner was ever recorded"),
    ),
    "the metadata is older than the disk": ((None, frontier(2, 0), local(0, 22, 1, 3)), ("epoch 3", "only 2 epochs")),
    "the metadata is older than the disk, and sealed": (
        (sealed(21, 2), frontier(2, 22), local(0, 22, 3)),
        ("epoch 3", "only 2 epochs"),
    ),
    "sealed by one, then written by another": (
        (sealed(21, 1), frontier(2, 22), None),
        ("epoch 1 sealed", "epoch 2 wrote after"),
    ),
    "sealed by one who never began": (
        (sealed(21, 2), frontier(2, 22, begun=False), None),
        ("epoch 2 sealed", "epoch 1 wrote after"),
    ),
    "sealed below the end of the chunks": (
        (sealed(21, 1), frontier(1, 30), None),
        ("last record is 21", "before offset 30"),
    ),
    "sealed above the end of the chunks": (
        (sealed(21, 1), frontier(1, 10), None),
        ("last record is 21", "before offset 10"),
    ),
    "the same owner's local batches go on behind its seal": (
        (sealed(21, 1), frontier(1, 22), local(0, 23, 1)),
        ("last record is 21", "reach offset 23"),
    ),
}


@pytest.mark.parametrize(("evidence", "both"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_evidence_that_contradicts_itself_opens_nothing_and_both_sides_are_named(
    evidence: Evidence, both: tuple[str, str]
) -> None:
    for accept_loss in (False, True):
        with pytest.raises(RecoveryConflict) as caught:
            resolve_recovery_start(sealed=evidence[0], frontier=evidence[1], local=evidence[2], accept_loss=accept_loss)
        for side in both:
            assert side in str(caught.value)


DAMAGED_FILES: dict[str, tuple[Evidence, tuple[str, str], int]] = {
    "chunks reach further than the files they were made from": (
        (None, frontier(1, 30), local(0, 22, 1)),
        ("chunks reach offset 30", "end at 22"),
        30,
    ),
    "a hole between chunks and local batches": (
        (None, frontier(1, 10), local(12, 22, 1)),
        ("chunks end at offset 10", "begin at 12"),
        10,
    ),
    "batches after the end of the log": (
        (None, frontier(1, 10, end=22), local(0, 23, 1)),
        ("ended at offset 22", "reach 23"),
        10,
    ),
}


@pytest.mark.parametrize(("evidence", "both", "chunks_end"), DAMAGED_FILES.values(), ids=DAMAGED_FILES)
def test_files_that_do_not_fit_to_the_chunks_stop_the_opening_until_somebody_accepts_the_loss(
    evidence: Evidence, both: tuple[str, str], chunks_end: int
) -> None:
    state, front, here = evidence
    with pytest.raises(RecoveryConflict) as caught:
        resolve_recovery_start(sealed=state, frontier=front, local=here)
    for side in both:
        assert side in str(caught.value)
    start = resolve_recovery_start(sealed=state, frontier=front, local=here, accept_loss=True)
    assert start == Start(Offset(chunks_end), RecoverySource.CHUNKS, loss_accepted=True)


def test_a_blank_owner_of_a_replicated_segment_points_to_the_other_replicas() -> None:
    with pytest.raises(RecoveryUnsafe, match="on its disk only"):
        resolve_recovery_start(sealed=None, frontier=frontier(1, 10), local=None)
    with pytest.raises(RecoveryUnsafe, match="replicas that hold what was confirmed beyond are to vote"):
        resolve_recovery_start(sealed=None, frontier=frontier(1, 10), local=None, replicated=True)
