"""How a follower's copy becomes a beginning of its owner's log, as a table of what both have."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from braid.broker.replicas.alignment import CopyState, LogEvidence, Repair, Send, Step, align
from braid.model.ids import Epoch, Offset
from braid.model.log.replication import LogPosition
from braid.storage.frames import BatchMark, FramePlace

OURS, OTHER = BatchMark(90, 10, 1, 2, 3), BatchMark(90, 10, 7, 2, 3)
"""The batch before offset 100: of the log, and another one."""
STARTS = ((Epoch(2), Offset(0)), (Epoch(5), Offset(60)))


def position(end: int, epoch: int = 5) -> LogPosition:
    return LogPosition(epoch=Epoch(epoch), end=Offset(end))


def place(file_base: int, byte: int = 64) -> FramePlace:
    return FramePlace(Offset(file_base), byte)


COPY = CopyState(position=position(100), record_epoch=Epoch(5), last=OURS, file_base=Offset(40), member=True, credit=8)
LOG = LogEvidence(
    starts=STARTS,
    base_offset=Offset(40),
    position=position(120),
    is_in_chunks=False,
    last=OURS,
    next=place(40),
    end=place(110, 900),
)
FORMER = {"position": position(100, 2), "record_epoch": Epoch(2)}
"""Of a copy whose owner of epoch 2 wrote beyond the beginning of epoch 5."""
BLANK = {"position": position(0, 0), "record_epoch": Epoch(0), "last": None, "file_base": None, "member": False}
CLOSED = {"position": position(100), "next": place(80), "end": place(80)}
"""Of a log that ends where the copy ends, in a file that the copy has not."""


def what(copy: dict[str, Any], log: dict[str, Any], *tried: Repair) -> object:
    """The repair, with where the copy is cut; what is sent next, with what counts as held; or None."""
    found = align(msgspec.structs.replace(COPY, **copy), msgspec.structs.replace(LOG, **log), tried)
    match found:
        case Step(Repair.CUT | Repair.CUT_EMPTY_FILE as repair, _, end):
            return repair, end
        case Step(repair):
            return repair
        case Send(to, held):
            return to, held.end
    return found


@pytest.mark.parametrize(
    ("copy", "log", "expected"),
    [
        # It is a beginning of the log.
        ({}, {}, (place(40), 100)),
        ({}, {"last": None}, (place(40), 100)),
        ({"last": None}, {}, (place(40), 100)),
        ({"file_base": Offset(100)}, {"next": place(100, 0)}, (place(100, 0), 100)),
        ({}, {"next": place(100, 0)}, (place(100, 0), 100)),
        (BLANK, {"base_offset": Offset(0), "last": None, "next": place(0, 0)}, (place(0, 0), 0)),
        # It may hold more than the owner's disk has written.
        ({"position": position(130)}, {"last": None, "next": place(40)}, (place(40), 130)),
        # It leaves the log.
        (FORMER, {}, (Repair.CUT, 60)),
        (FORMER, {"next": None}, (Repair.CUT, 60)),
        ({**FORMER, "last": OTHER}, {}, (Repair.CUT, 60)),
        ({**FORMER, "position": position(60, 2)}, {}, (place(40), 60)),
        # Its last batch is another one.
        ({"last": OTHER}, {}, Repair.BEGIN_ANEW),
        ({"last": OTHER}, {"next": None}, Repair.BEGIN_ANEW),
        # The owner's files begin after it.
        (BLANK, {"last": None, "next": None}, Repair.BEGIN_ANEW),
        ({}, {"base_offset": Offset(101), "last": None, "next": None}, Repair.BEGIN_ANEW),
        # Its newest file is one of control batches, which the log has not.
        ({"file_base": Offset(100)}, {}, (Repair.CUT_EMPTY_FILE, 100)),
        ({"file_base": Offset(100)}, CLOSED, (Repair.CUT_EMPTY_FILE, 100)),
        # It holds everything, and the owner's newest file is closed.
        ({}, CLOSED, Repair.BEGIN_FILE),
        ({"file_base": None}, CLOSED, Repair.BEGIN_FILE),
        # The log has ended, and chunks hold it.
        ({}, {**CLOSED, "is_in_chunks": True}, (place(80), 100)),
        ({"file_base": Offset(100)}, {**CLOSED, "is_in_chunks": True}, (place(80), 100)),
        ({}, {**CLOSED, "is_in_chunks": True, "next": None}, (place(80), 100)),
        ({"last": OTHER}, {**CLOSED, "is_in_chunks": True}, Repair.BEGIN_ANEW),
        # Nothing helps: it ends inside a batch, or in a file that the log has not.
        ({}, {"next": None}, None),
        ({}, {"next": place(80)}, None),
    ],
)
def test_the_first_rule_that_fits_counts(copy: dict[str, Any], log: dict[str, Any], expected: object) -> None:
    assert what(copy, log) == expected


@pytest.mark.parametrize(
    ("copy", "log", "repair"),
    [
        (FORMER, {}, Repair.CUT),
        ({"last": OTHER}, {}, Repair.BEGIN_ANEW),
        ({"file_base": Offset(100)}, {}, Repair.CUT_EMPTY_FILE),
        ({}, CLOSED, Repair.BEGIN_FILE),
    ],
)
def test_no_repair_is_tried_twice(copy: dict[str, Any], log: dict[str, Any], repair: Repair) -> None:
    assert what(copy, log, *(each for each in Repair if each is not repair)) is not None
    assert what(copy, log, repair) is None


def test_a_log_that_has_ended_counts_its_seal_as_held() -> None:
    sealed = msgspec.structs.replace(position(100), sealed=True)
    log = msgspec.structs.replace(LOG, **{**CLOSED, "position": sealed, "is_in_chunks": True})
    assert align(COPY, log) == Send(place(80), sealed)
