"""A broker's load: the report that it stores for the others, and the rates that the report is made of.

Every broker writes its report under its own lease, at each interval; placing and balancing (cluster/) decide by the
reports. The broker's own rates are the sums over the segments that it serves *now*: a segment that leaves takes its
share of the rates with it immediately, so that a report never counts a segment that another broker already reports.

Only the busiest segments are reported one by one. A report is bounded in their number and in bytes (I12), however many
segments a broker serves and however long their names are; the rest is in the sums.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Annotated, Final

import msgspec

from braid.model.ids import SegmentId
from braid.model.layout import HashRange
from braid.model.stored_record import StoredRecord, decode, encode

MAX_REPORTED_SEGMENTS: Final = 256
"""Balancing moves the busiest; a segment that is not among these is hardly worth a move."""
MAX_REPORT_BYTES: Final = 64_000
"""Of JSON. Each broker writes one every interval, and every leader reads all of them."""
RATE_HALF_LIFE_S: Final = 30.0
"""What happened so long ago counts half. Bursts of a few seconds move nothing; a change shows within two minutes."""

_SUMS_BYTES: Final = 1_000
"""Room for the fields beside `busiest`: nine names and numbers of at most 20 digits."""

Amount = Annotated[int, msgspec.Meta(ge=0)]


class SegmentLoad(StoredRecord, frozen=True, kw_only=True, rename="camel"):
    topic_path: str
    """`tenant/namespace/name`"""
    segment_id: SegmentId
    bytes_in_per_s: Amount = 0
    bytes_out_per_s: Amount = 0
    history_bytes: Amount = 0
    """All that its log holds, chunks and files: what a move copies where brokers share no storage."""

    @property
    def bytes_per_s(self) -> int:
        return self.bytes_in_per_s + self.bytes_out_per_s


class LoadReport(StoredRecord, frozen=True, kw_only=True, rename="camel"):
    at: int
    """µs since 1970, when it was made."""
    cpu: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Of one core, 0 to 1: a broker's work is one thread's. Threads that write to disks can take it a little above."""
    bytes_in_per_s: Amount = 0
    bytes_out_per_s: Amount = 0
    records_in_per_s: Amount = 0
    segments: Amount = 0
    """How many it serves."""
    backlog_bytes: Amount | None = None
    """What subscriptions have before them, in all its segments; None: not measured."""
    busiest: Annotated[tuple[SegmentLoad, ...], msgspec.Meta(max_length=MAX_REPORTED_SEGMENTS)] = ()
    """The most loaded first; made by `busiest_of`."""
    adopted_generation: int | None = None
    """The oldest routing that one of its clients works with, of those that tell; None if none does."""

    @property
    def bytes_per_s(self) -> int:
        return self.bytes_in_per_s + self.bytes_out_per_s

    def to_json(self) -> bytes:
        data = encode(self)
        assert len(self.busiest) <= MAX_REPORTED_SEGMENTS, "I12: made by busiest_of"
        assert len(data) <= MAX_REPORT_BYTES, "I12: made by busiest_of"
        return data

    @classmethod
    def from_json(cls, data: bytes) -> LoadReport:
        return decode(cls, data, "a broker's load report")


def busiest_of(segments: Iterable[SegmentLoad]) -> tuple[SegmentLoad, ...]:
    """Return as many of the busiest as a report may hold; the same for the same segments in any order."""
    ordered = sorted(segments, key=lambda load: (-load.bytes_per_s, load.topic_path, load.segment_id))
    room = MAX_REPORT_BYTES - _SUMS_BYTES
    kept: list[SegmentLoad] = []
    for load in ordered[:MAX_REPORTED_SEGMENTS]:
        room -= len(msgspec.json.encode(load)) + 1
        if room < 0:
            break
        kept.append(load)
    return tuple(kept)


class Meter(msgspec.Struct, frozen=True):
    """A counter that only grows, seen now and then, as a rate in which older times count less and less.

    `level` is the sum of past rates by their weights, `weight` the sum of the weights, so `per_s` is a true mean from
    the first interval on: a segment that has just arrived shows its whole rate, not a slow climb from zero."""

    total: int
    at_s: float
    """On a clock that never goes back."""
    level: float = 0.0
    weight: float = 0.0

    @property
    def per_s(self) -> float:
        return self.level / self.weight if self.weight else 0.0

    def seen(self, total: int, at_s: float) -> Meter:
        """Return the meter after one more look at the counter."""
        elapsed_s = at_s - self.at_s
        if elapsed_s <= 0:
            return self  # what was counted since is in the next look
        if total < self.total:
            # The counter began again. What it had before is unknown; the rate stays what it was.
            return Meter(total, at_s, self.level, self.weight)
        kept: float = 0.5 ** (elapsed_s / RATE_HALF_LIFE_S)
        rate = (total - self.total) / elapsed_s
        return Meter(total, at_s, self.level * kept + rate * (1 - kept), self.weight * kept + 1 - kept)


class KeyHashLoad(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """How a segment's records spread over its key hashes, lately. Shares are of all its records."""

    records: float
    """That this is known of; older ones count less."""
    split_at: int | None = None
    """The first hash of the upper part, if both parts are to have the same load, as nearly as can be; None if no record
    has a key, or if the segment has a single hash."""
    lower_share: float = 0.0
    """The part below `split_at`, without records that have no key."""
    upper_share: float = 0.0
    hottest: HashRange | None = None
    """The few hashes, often one, that have most."""
    hottest_share: float = 0.0
    shares: tuple[float, ...] = ()
    """A histogram: the share of each part of the range. The parts are of equal size, as nearly as can be. Empty unless
    it was asked for."""


def halving_cell(loads: Sequence[float]) -> int:
    """Return the cell before which half of the load is, as nearly as can be: at least 1, below the number of cells,
    which are two or more. Where empty cells leave a choice, it is the middle one."""
    below = [*accumulate(loads)]
    half = below[-1] / 2
    first = min(bisect_left(below, half), len(loads) - 1)
    candidates = [cell for cell in (first, first + 1) if 1 <= cell < len(loads)]
    best = min(candidates, key=lambda cell: abs(below[cell - 1] - half))
    lowest, end = bisect_left(below, below[best - 1]) + 1, bisect_right(below, below[best - 1])
    return (lowest + min(end, len(loads) - 1)) // 2
