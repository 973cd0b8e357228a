"""Decides how a follower's copy becomes a beginning of its owner's log. A pure function of what both have.

    the copy                                                  and then
    leaves the log (`parting`)                                it is cut there
    ends with another batch than the log has there            it begins anew
    ends before the owner's first file                        it begins anew
    ends where the log has ended, and chunks hold the log     nothing is sent: it lacks no record
    is followed by a batch of the file that it writes, or     the owner sends from there on
    by a new file
    ends with a file that has control batches alone, of an    that file is cut away
    owner that did not come to serve
    holds all of the log, whose newest file is closed         the owner begins a file
    none of these                                             the session fails

The first line that fits counts. After a repair the owner looks again. Each repair is tried once in a session: a copy
that needs it again is damaged in a way that nothing here mends.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

import msgspec

from braid.model.ids import Epoch, Offset
from braid.model.log.epochs import EpochStarts, parting
from braid.model.log.replication import LogPosition
from braid.storage.frames import BatchMark, FramePlace


class CopyState(msgspec.Struct, frozen=True):
    """What a follower answers about its copy."""

    position: LogPosition
    record_epoch: Epoch
    """Of its last record; 0: it has none."""
    last: BatchMark | None
    """Its last batch with records, if its files have one."""
    file_base: Offset | None
    """Where its newest file begins; None: it has no file."""
    member: bool
    credit: int


class LogEvidence(msgspec.Struct, frozen=True):
    """What the owner's log has, beside such a copy."""

    starts: EpochStarts
    """Its epochs, the present one included."""
    base_offset: Offset
    """Where its first file begins."""
    position: LogPosition
    is_in_chunks: bool
    """Whether the log has ended, and chunks hold all of it."""
    last: BatchMark | None
    """The batch that ends where the copy ends, if the owner's files have it."""
    next: FramePlace | None
    """The place of the first batch that the copy does not have; None: the copy cannot go on from here."""
    end: FramePlace
    """The place after the last batch."""


class Repair(Enum):
    CUT = "cut"
    """Cut the copy where it leaves the log."""
    BEGIN_ANEW = "begin-anew"
    CUT_EMPTY_FILE = "cut-empty-file"
    """Cut the copy's newest file away, which has no records."""
    BEGIN_FILE = "begin-file"
    """Let the owner's log begin a file, in which the copy can go on."""


class Step(msgspec.Struct, frozen=True):
    """A repair, after which the owner looks again."""

    repair: Repair
    why: str
    end: Offset = Offset(0)
    """Where a copy ends that is cut."""


class Send(msgspec.Struct, frozen=True):
    """The copy is a beginning of the log."""

    place: FramePlace
    """What is sent next."""
    held: LogPosition
    """What counts as held."""


def align(copy: CopyState, log: LogEvidence, tried: Collection[Repair] = ()) -> Step | Send | None:
    """Return what to do about a copy; None: nothing here helps. `tried` are the repairs of this session."""
    step = _aligned(copy, log)
    return None if isinstance(step, Step) and step.repair in tried else step


def _aligned(copy: CopyState, log: LogEvidence) -> Step | Send | None:
    held, end = copy.position, copy.position.end
    parted_at = parting(log.starts, end, copy.record_epoch)
    if parted_at is not None:
        return Step(Repair.CUT, f"it leaves the log at offset {parted_at} and reaches {end}", parted_at)
    if None not in (copy.last, log.last) and copy.last != log.last:
        return Step(Repair.BEGIN_ANEW, "its last batch is not the one of the log")
    if log.next is None and log.base_offset > end:
        return Step(Repair.BEGIN_ANEW, f"it ends at {end}, before the first file here")
    if log.is_in_chunks and end == log.position.end:
        # The log's seal stands in a file of which chunks hold all the records: the copy has nothing to put it into.
        return Send(log.end, log.position)
    if log.next is None:
        return None
    if log.next.file_base in (copy.file_base, end):
        return Send(log.next, held)
    if copy.file_base == end:
        return Step(Repair.CUT_EMPTY_FILE, "its newest file has no records", end)
    if end == log.position.end:
        return Step(Repair.BEGIN_FILE, "chunks hold all of the log, and its newest file is closed")
    return None
