"""What the drawing of a braid is made of: the strands of a topic, and the window through which it is seen.

A strand is a segment. It has a place on the ring of key hashes, a time of birth and of its end, owners one after the
other, and traffic. Times are seconds since 1970. All of it are values, which the watch of the cluster makes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Final

from msgspec import Struct, structs

RING: Final = 0x10000
NOBODY: Final = ""
"""The owner of a strand that no broker serves."""


class Change(Enum):
    """How a strand came to its owner."""

    FIRST = "first"
    """The first that is known."""
    MOVED = "moved"
    FAILED_OVER = "failed over"
    """The owner before was down."""
    REOPENED = "reopened"
    """The same broker opened the segment again."""
    UNSERVED = "unserved"


class Tenure(Struct, frozen=True):
    """The time that one broker owned a segment."""

    owner: str
    since: float
    how: Change = Change.FIRST


class Strand(Struct, frozen=True, kw_only=True):
    segment: int
    first_hash: int
    last_hash: int
    parents: tuple[int, ...] = ()
    children: tuple[int, ...] = ()
    born: float
    sealed: float | None = None
    """None while the segment takes writes."""
    timed: bool = True
    """Whether `born` was seen. If not, it only keeps the order."""
    tenures: tuple[Tenure, ...] = ()
    """In order; the first begins at birth."""
    times: Sequence[float] = ()
    rates: Sequence[float] = ()
    """Records in each second, measured at `times`."""

    def rate_at(self, time: float) -> float:
        """Return the rate that was measured last before this time, or first after it."""
        if not self.times:
            return 0.0
        return self.rates[max(0, bisect_right(self.times, time) - 1)]


def with_expected_rates(strands: Iterable[Strand]) -> list[Strand]:
    """Give each strand that was not measured yet the traffic of its parents, by the share of their ranges that it took
    over. Otherwise a split of a busy segment looks like the end of its traffic, until the children are measured."""
    given = list(strands)
    known: dict[int, Strand] = {}
    for strand in sorted(given, key=lambda each: each.born):
        if not strand.times:
            parents = [known[each] for each in strand.parents if each in known]
            expected = sum(each.rate_at(strand.born) * _shared(each, strand) for each in parents)
            strand = structs.replace(strand, times=(strand.born,), rates=(expected,))
        known[strand.segment] = strand
    return [known[each.segment] for each in given]


def _shared(parent: Strand, child: Strand) -> float:
    """Return the part of the parent's range that the child has, from 0 to 1."""
    first, last = max(parent.first_hash, child.first_hash), min(parent.last_hash, child.last_hash)
    return max(0, last + 1 - first) / (parent.last_hash + 1 - parent.first_hash)


class Window(Struct, frozen=True, kw_only=True):
    """The part of time and ring that is drawn, and its size in pixels, without margins."""

    start: float
    end: float
    first_hash: float = 0.0
    last_hash: float = float(RING)
    """Exclusive."""
    width: float = 1000.0
    height: float = 420.0

    def x(self, time: float) -> float:
        return (time - self.start) / (self.end - self.start) * self.width

    def y(self, key_hash: float) -> float:
        return (key_hash - self.first_hash) / (self.last_hash - self.first_hash) * self.height

    def time(self, x: float) -> float:
        return self.start + x / self.width * (self.end - self.start)


MIN_SECONDS: Final = 5.0
MIN_HASHES: Final = 16.0


def zoomed(window: Window, factor: float, x: float, y: float, *, bounds: Window, ring: bool = True) -> Window:
    """Return the window after a zoom around a pixel: a factor below 1 shows less. It stays inside `bounds`. Without
    `ring`, only time is zoomed."""
    at = window.time(x)
    seconds = min(max((window.end - window.start) * factor, MIN_SECONDS), bounds.end - bounds.start)
    start = at - (at - window.start) / (window.end - window.start) * seconds
    start = min(max(start, bounds.start), bounds.end - seconds)
    first, last = window.first_hash, window.last_hash
    if ring:
        hashes = min(max((last - first) * factor, MIN_HASHES), float(RING))
        first += y / window.height * (last - first - hashes)
        first = min(max(first, 0.0), RING - hashes)
        last = first + hashes
    return Window(
        start=start, end=start + seconds, first_hash=first, last_hash=last, width=window.width, height=window.height
    )


def panned(window: Window, dx: float, dy: float, *, bounds: Window) -> Window:
    """Return the window after a drag by so many pixels, inside `bounds`."""
    seconds, hashes = window.end - window.start, window.last_hash - window.first_hash
    start = window.start - dx / window.width * seconds
    start = min(max(start, bounds.start), max(bounds.start, bounds.end - seconds))
    first = min(max(window.first_hash - dy / window.height * hashes, 0.0), RING - hashes)
    return Window(
        start=start,
        end=start + seconds,
        first_hash=first,
        last_hash=first + hashes,
        width=window.width,
        height=window.height,
    )
