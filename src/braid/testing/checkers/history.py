"""Checks of what clients and readers saw against what was promised. Pure functions over plain values.

A simulation collects one `Confirmed` for each publish that was confirmed, and one `Stored` for each batch that a reader
returned or a recovery found, in the order in which it came; the checks raise `PromiseBroken` with the promise's number
(docs/architecture.md). `LogModel` is the same for one segment with the list as the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec


class PromiseBroken(AssertionError):
    def __init__(self, promise: str, details: str) -> None:
        super().__init__(f"{promise} is broken: {details}")
        self.promise = promise
        self.details = details


class Confirmed(msgspec.Struct, frozen=True):
    """A batch that its producer was told is kept. A confirm of a retry repeats the first one, epoch included."""

    base_offset: int
    count: int
    epoch: int
    producer_id: int
    first_sequence: int
    digest: bytes | int
    """Of the batch's body: whatever tells two contents apart."""

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.count


class Stored(msgspec.Struct, frozen=True):
    """A batch that is in the log."""

    base_offset: int
    count: int
    epoch: int
    producer_id: int
    first_sequence: int
    digest: bytes | int

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.count


def check_continuity(stored: Iterable[Stored], start: int = 0) -> int:
    """I1: what one reader returned begins at `start` and has no gap and no repeat. Returns the next offset."""
    expected = start
    for batch in stored:
        if batch.base_offset != expected:
            kind = "gap" if batch.base_offset > expected else "repeat"
            raise PromiseBroken("I1", f"{kind}: offset {expected} was due, {batch} came")
        expected = batch.next_offset
    return expected


def check_confirmed_kept(confirmed: Iterable[Confirmed], stored: Iterable[Stored], start: int = 0) -> None:
    """I2: every confirmed batch stands in the log where the confirm said, with the same content and epoch. `start` is
    the first offset that retention has left; batches below it are not looked for."""
    by_offset = {batch.base_offset: batch for batch in stored}
    for batch in confirmed:
        if batch.next_offset <= start:
            continue
        found = by_offset.get(batch.base_offset)
        if found is None:
            raise PromiseBroken("I2", f"{batch} was confirmed and nothing is stored at {batch.base_offset}")
        if msgspec.structs.astuple(found) != msgspec.structs.astuple(batch):
            raise PromiseBroken("I2", f"{batch} was confirmed and {found} is stored in its place")


def check_single_writer(confirmed: Iterable[Confirmed]) -> None:
    """I3: no two confirms share an offset, unless one repeats the other (a retry answered twice), and a higher offset
    was never confirmed by an older owner."""
    # In order of base offsets, whatever overlaps anything overlaps its neighbour.
    for first, second in pairwise(sorted(dict.fromkeys(confirmed), key=lambda batch: (batch.base_offset, batch.epoch))):
        if second.base_offset < first.next_offset:
            raise PromiseBroken("I3", f"two owners confirmed the same offsets: {first} and {second}")
        if second.epoch < first.epoch:
            raise PromiseBroken("I3", f"an older owner confirmed behind a newer one: {first}, then {second}")


def check_once(stored: Iterable[Stored]) -> None:
    """I10: each sequence number of each producer is stored at most once. Producer 0 has no sequence numbers."""
    by_sequence = sorted(
        (batch for batch in stored if batch.producer_id and batch.count),
        key=lambda batch: (batch.producer_id, batch.first_sequence, batch.base_offset),
    )
    for first, second in pairwise(by_sequence):
        if first.producer_id == second.producer_id and second.first_sequence < first.first_sequence + first.count:
            raise PromiseBroken("I10", f"a producer's records are stored twice: {first} and {second}")


class LogModel:
    """What one segment promised so far. A simulation tells it every confirm and shows it every complete read."""

    def __init__(self) -> None:
        self.confirmed: list[Confirmed] = []

    @property
    def next_offset(self) -> int:
        """The first offset that no confirm covers."""
        return max((batch.next_offset for batch in self.confirmed), default=0)

    def confirm(self, batch: Confirmed) -> None:
        self.confirmed.append(batch)

    def check(self, stored: Sequence[Stored], start: int = 0) -> None:
        """`stored` is all that a reader who began at `start` returned, up to the end of the log."""
        check_continuity(stored, start)
        check_single_writer(self.confirmed)
        check_confirmed_kept(self.confirmed, stored, start)
        check_once(stored)
