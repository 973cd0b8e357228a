"""From strands to shapes: the geometry of a braid. Pure, so that every rule of the picture has a test.

    hash
     0000 ─────────╮ ╭──────────────    a split: the parent's ribbon parts into those of its children
                   ╞═╡
     ffff ─────────╯ ╰───────●──────    a move: the ribbon changes its colour

Time runs to the right, and the ring of key hashes downwards. Each segment has a lane, as high as its share of the ring.
Its ribbon lies in the middle of the lane, and its thickness is its traffic, on one scale for all ribbons. So the
ribbons of the children are together as thick as their parent's was, and a hot range is a ribbon that fills its lane.

Where a layout changes, a link joins each parent with each child whose range it shares. Its edges leave and arrive
horizontally (cubic Bézier curves), so no ribbon has a corner. A link takes at most `LINK_PX` to either side of the
change, and never more than its strands have room for.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final

from msgspec import Struct

from braid.console.drawing.strands import NOBODY, Change, Strand, Tenure, Window, with_expected_rates

FILL: Final = 0.7
"""The most of its lane that a ribbon takes."""
MIN_RIBBON_PX: Final = 1.6
LINK_PX: Final = 34.0
BLEND_PX: Final = 18.0
"""How far a colour runs into the next one after a move."""
MIN_STEP_PX: Final = 14.0
"""Between two points of a ribbon's edge: more of them cannot be seen."""
OVERLAP_PX: Final = 0.6
"""Shapes that continue each other overlap a little: otherwise a seam shows between them."""
LABEL_PX: Final = 15.0
"""A lane that is less high has no label."""


class Ribbon(Struct, frozen=True, kw_only=True):
    """A strand while one broker owns it."""

    segment: int
    owner: str
    before: str | None
    """The owner before, whose colour runs into this ribbon; None if there is none."""
    left: float
    right: float
    path: str
    since: float
    rate: float
    """At the right end."""
    timed: bool


class Link(Struct, frozen=True, kw_only=True):
    """From a parent to a child."""

    parent: int
    child: int
    source: str
    target: str
    """Owners."""
    left: float
    right: float
    path: str
    timed: bool


class Lane(Struct, frozen=True, kw_only=True):
    segment: int
    left: float
    right: float
    top: float
    bottom: float


class Mark(Struct, frozen=True, kw_only=True):
    """A move, a fail-over, or a change of layout."""

    kind: str
    segment: int
    x: float
    y: float
    at: float
    text: str


class Label(Struct, frozen=True, kw_only=True):
    """What stands right of a strand that goes on."""

    segment: int
    y: float
    owner: str
    rate: float


class Braid(Struct, frozen=True, kw_only=True):
    window: Window
    lanes: list[Lane]
    links: list[Link]
    ribbons: list[Ribbon]
    marks: list[Mark]
    labels: list[Label]
    scale: float
    """Pixels for one record in a second."""


def draw_braid(strands: Iterable[Strand], window: Window) -> Braid:
    """Lay out the part of the strands that the window shows."""
    known = {each.segment: each for each in with_expected_rates(strands) if _is_seen(each, window)}
    scale = _scale(known.values(), window)
    shapes = _Shapes(known, window, scale)
    lanes = [shapes.lane(each) for each in known.values()]
    links = [link for each in known.values() for link in shapes.links_to(each)]
    ribbons = [ribbon for each in known.values() for ribbon in shapes.ribbons(each)]
    marks = [mark for each in known.values() for mark in shapes.marks(each)]
    labels = [label for each in known.values() if (label := shapes.label(each)) is not None]
    return Braid(window=window, lanes=lanes, links=links, ribbons=ribbons, marks=marks, labels=labels, scale=scale)


def _is_seen(strand: Strand, window: Window) -> bool:
    return (
        strand.born < window.end
        and (strand.sealed is None or strand.sealed > window.start)
        and strand.first_hash < window.last_hash
        and strand.last_hash + 1 > window.first_hash
    )


def _scale(strands: Iterable[Strand], window: Window) -> float:
    """Return the pixels for one record in a second, with which every ribbon fits into its lane. The limit is rounded to
    half an octave, so that the picture does not breathe with every sample."""
    smallest = math.inf
    for strand in strands:
        low = bisect_left(strand.times, window.start)
        high = bisect_right(strand.times, window.end)
        peak = max(strand.rates[max(0, low - 1) : high], default=0.0)
        if peak > 0:
            smallest = min(smallest, FILL * _lane_px(strand, window) / peak)
    return 0.0 if smallest is math.inf else 2 ** (math.floor(math.log2(smallest) * 2) / 2)


def _lane_px(strand: Strand, window: Window) -> float:
    return window.y(strand.last_hash + 1) - window.y(strand.first_hash)


class _Shapes:
    def __init__(self, strands: Mapping[int, Strand], window: Window, scale: float) -> None:
        self._strands = strands
        self._window = window
        self._scale = scale
        self._reach = {each: self._reach_of(strand) for each, strand in strands.items()}
        """By segment: how far a link may reach into its strand."""

    # Where things are.

    def _reach_of(self, strand: Strand) -> float:
        end = strand.sealed if strand.sealed is not None else max(self._window.end, strand.born)
        ends = bool(strand.parents) + (strand.sealed is not None)
        length = (end - strand.born) / (self._window.end - self._window.start) * self._window.width
        return min(LINK_PX, 0.9 * length / max(1, ends))

    def _middle(self, strand: Strand) -> float:
        return (self._window.y(strand.first_hash) + self._window.y(strand.last_hash + 1)) / 2

    def _thickness(self, strand: Strand, rate: float) -> float:
        limit = max(MIN_RIBBON_PX, FILL * _lane_px(strand, self._window))
        return min(limit, max(MIN_RIBBON_PX, rate * self._scale))

    def _owner_at(self, strand: Strand, time: float) -> str:
        before = [each for each in strand.tenures if each.since <= time]
        return (before[-1] if before else strand.tenures[0]).owner if strand.tenures else NOBODY

    def _left(self, strand: Strand) -> float:
        """Where the strand's own ribbon begins: after the links from its parents."""
        x = self._window.x(strand.born)
        return x + self._reach[strand.segment] if self._parents(strand) else x

    def _right(self, strand: Strand) -> float:
        if strand.sealed is None:
            return self._window.width
        x = self._window.x(strand.sealed)
        return x - self._reach[strand.segment] if self._children(strand) else x

    def _parents(self, strand: Strand) -> list[Strand]:
        return [self._strands[each] for each in strand.parents if each in self._strands]

    def _children(self, strand: Strand) -> list[Strand]:
        return [self._strands[each] for each in strand.children if each in self._strands]

    # Shapes.

    def lane(self, strand: Strand) -> Lane:
        window = self._window
        end = window.x(strand.sealed) if strand.sealed is not None else window.width
        return Lane(
            segment=strand.segment,
            left=max(0.0, window.x(strand.born)),
            right=min(window.width, end),
            top=window.y(strand.first_hash),
            bottom=window.y(strand.last_hash + 1),
        )

    def ribbons(self, strand: Strand) -> list[Ribbon]:
        left, right = max(0.0, self._left(strand)), min(self._window.width, self._right(strand))
        if right <= left or not strand.tenures:
            return []
        found: list[Ribbon] = []
        for number, tenure in enumerate(strand.tenures):
            last = number + 1 == len(strand.tenures)
            begin = left if number == 0 else max(left, self._window.x(tenure.since))
            end = right if last else min(right, self._window.x(strand.tenures[number + 1].since))
            if end <= begin:
                continue
            before = strand.tenures[number - 1].owner if number else None
            found.append(
                Ribbon(
                    segment=strand.segment,
                    owner=tenure.owner,
                    before=before if before not in (tenure.owner, None) else None,
                    left=begin,
                    right=end,
                    path=self._outline(strand, begin - OVERLAP_PX, end + OVERLAP_PX),
                    since=tenure.since,
                    rate=strand.rate_at(self._window.time(end)),
                    timed=strand.timed,
                )
            )
        return found

    def _outline(self, strand: Strand, left: float, right: float) -> str:
        middle = self._middle(strand)
        points = [(x, self._thickness(strand, rate) / 2) for x, rate in self._profile(strand, left, right)]
        upper = smooth([(x, middle - half) for x, half in points])
        lower = smooth([(x, middle + half) for x, half in reversed(points)], begun=True)
        return f"{upper}{lower}Z"

    def _profile(self, strand: Strand, left: float, right: float) -> list[tuple[float, float]]:
        """Return pixels from left to right with the rate at each, at most one in `MIN_STEP_PX`."""
        time = self._window.time
        found = [(left, strand.rate_at(time(left)))]
        low, high = bisect_right(strand.times, time(left)), bisect_left(strand.times, time(right))
        for index in range(low, high):
            x = self._window.x(strand.times[index])
            if x - found[-1][0] >= MIN_STEP_PX and right - x >= MIN_STEP_PX:
                found.append((x, strand.rates[index]))
        found.append((right, strand.rate_at(time(right))))
        return found

    def links_to(self, child: Strand) -> list[Link]:
        """Return the links from the parents of a strand to it."""
        parents = self._parents(child)
        at = self._window.x(child.born)
        right = at + self._reach[child.segment]
        begins = self._shares(child, parents, self._window.time(right), at_birth=True)
        found: list[Link] = []
        for parent in parents:
            left = at - self._reach[parent.segment]
            siblings = self._children(parent)
            ends = self._shares(parent, siblings, self._window.time(left), at_birth=False)
            source, target = ends[siblings.index(child)], begins[parents.index(parent)]
            if right < 0 or left > self._window.width or right - left < 0.5:
                continue
            found.append(
                Link(
                    parent=parent.segment,
                    child=child.segment,
                    source=self._owner_at(parent, child.born),
                    target=self._owner_at(child, child.born),
                    left=left,
                    right=right,
                    path=bridge(left, *source, right, *target),
                    timed=child.timed,
                )
            )
        return found

    def _shares(
        self, strand: Strand, others: Sequence[Strand], time: float, *, at_birth: bool
    ) -> list[tuple[float, float]]:
        """Cut the end of a ribbon (its begin, `at_birth`) into the parts that belong to each of its neighbours, by
        their traffic. Each part is its upper and lower edge."""
        whole = self._thickness(strand, strand.rate_at(time))
        weights = []
        for other in others:
            moment = (other.sealed if other.sealed is not None else time) if at_birth else other.born
            weights.append(max(self._thickness(other, other.rate_at(moment)), MIN_RIBBON_PX))
        top = self._middle(strand) - whole / 2
        parts: list[tuple[float, float]] = []
        for weight in weights:
            bottom = top + whole * weight / sum(weights)
            parts.append((top, bottom))
            top = bottom
        return parts

    def marks(self, strand: Strand) -> list[Mark]:
        found: list[Mark] = []
        for before, tenure in pairwise(strand.tenures):
            x = self._window.x(tenure.since)
            if 0 <= x <= self._window.width and tenure.how is not Change.UNSERVED:
                found.append(self._mark(strand, tenure, before, x))
        return found

    def _mark(self, strand: Strand, tenure: Tenure, before: Tenure, x: float) -> Mark:
        came_from = before.owner
        if came_from == NOBODY:
            earlier = [each.owner for each in strand.tenures if each.since < before.since and each.owner]
            came_from = earlier[-1] if earlier else ""
        source = f" from {came_from}" if came_from and came_from != tenure.owner else ""
        return Mark(
            kind=tenure.how.value.replace(" ", "-"),
            segment=strand.segment,
            x=x,
            y=self._middle(strand),
            at=tenure.since,
            text=f"segment {strand.segment} {tenure.how.value}{source} to {tenure.owner}",
        )

    def label(self, strand: Strand) -> Label | None:
        if strand.sealed is not None or _lane_px(strand, self._window) < LABEL_PX:
            return None
        return Label(
            segment=strand.segment,
            y=min(max(self._middle(strand), 8.0), self._window.height - 8.0),
            owner=self._owner_at(strand, self._window.end),
            rate=strand.rate_at(self._window.end),
        )


def bridge(left: float, top: float, bottom: float, right: float, to_top: float, to_bottom: float) -> str:
    """Return the outline of a link between two upright edges. It leaves and arrives horizontally."""
    middle = (left + right) / 2
    return (
        f"M{left:.1f},{top:.1f}C{middle:.1f},{top:.1f} {middle:.1f},{to_top:.1f} {right:.1f},{to_top:.1f}"
        f"L{right:.1f},{to_bottom:.1f}C{middle:.1f},{to_bottom:.1f} {middle:.1f},{bottom:.1f} {left:.1f},{bottom:.1f}Z"
    )


def smooth(points: Sequence[tuple[float, float]], *, begun: bool = False) -> str:
    """Return a curve through the points that has no corner and never overshoots: between two points it stays between
    their heights. `begun` continues a path."""
    x, y = points[0]
    parts = [f"{'L' if begun else 'M'}{x:.1f},{y:.1f}"]
    for (x0, y0), (x1, y1) in pairwise(points):
        middle = (x0 + x1) / 2
        if abs(y1 - y0) < 0.05:
            parts.append(f"L{x1:.1f},{y1:.1f}")
        else:
            parts.append(f"C{middle:.1f},{y0:.1f} {middle:.1f},{y1:.1f} {x1:.1f},{y1:.1f}")
    return "".join(parts)
