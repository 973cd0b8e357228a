"""Where on the ring of key hashes the load of a topic is: bars out of the histograms of its segments. Pure.

    records/s
        ▂                 █
        █▂▂               █         the ring is the width; a bar is a part of a segment's range
      ▂▂████▂▂▂▂▂▂│▂▂▂▂▂▂▂█▂▂▂┊▂
      0000        8000          ffff

The height of a bar is its density, records in a second for each hash, on one scale for all segments. So bars of one
width can be compared, and the area of a segment's bars is its traffic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from braid.console.drawing.strands import RING

HEIGHT: Final = 100.0
MIN_BAR: Final = 1.5
"""Of the height: a part with few records is not a part without any."""
STANDS_OUT: Final = 2.0
"""Times the mean density of the topic: what has less is not called hot."""


class Bar(Struct, frozen=True, kw_only=True):
    segment: int
    first_hash: int
    last_hash: int
    per_s: float
    share: float
    """Of the segment's records."""
    height: float = 0.0

    @property
    def density(self) -> float:
        return self.per_s / (self.last_hash - self.first_hash + 1)


class HashLoad(Struct, frozen=True):
    bars: tuple[Bar, ...]
    """From the first hash of the ring on."""
    hottest: Bar | None
    """The densest one, if it stands out."""


def draw_hash_load(segments: Mapping[str, Any]) -> HashLoad:
    """Lay out the `segments` of an answer about key hashes. No bars if no record with a key has come lately."""
    given = sorted(segments.items(), key=lambda item: item[1]["hashRange"]["start"])
    bars = [bar for id_, found in given for bar in _bars(int(id_), found)]
    highest = max((each.density for each in bars), default=0.0)
    if not highest:
        return HashLoad((), None)
    known = sum(each.last_hash - each.first_hash + 1 for each in bars)
    mean = sum(each.per_s for each in bars) / known
    placed = tuple(_with_height(each, highest) for each in bars)
    # A segment of which few records are known has hot ranges by chance.
    known_well = [each for each in placed if segments[str(each.segment)]["splitHelps"] is not None]
    densest = max(known_well, key=lambda each: each.density, default=None)
    stands_out = densest is not None and len(placed) > 1 and densest.density >= STANDS_OUT * mean
    return HashLoad(placed, densest if stands_out else None)


def _bars(segment: int, found: Mapping[str, Any]) -> list[Bar]:
    start, end, shares = found["hashRange"]["start"], found["hashRange"]["end"], found["shares"]
    edges = (
        [start - (-number * (end + 1 - start) // len(shares)) for number in range(len(shares) + 1)] if shares else []
    )
    return [
        Bar(
            segment=segment,
            first_hash=edges[number],
            last_hash=edges[number + 1] - 1,
            per_s=share * found["recordsInPerS"],
            share=share,
        )
        for number, share in enumerate(shares)
    ]


def _with_height(bar: Bar, highest: float) -> Bar:
    return replace(bar, height=max(MIN_BAR, bar.density / highest * HEIGHT) if bar.per_s else 0.0)


def outline(bars: list[Bar]) -> str:
    """Return the steps of neighbouring bars as one shape, in a picture as wide as the ring."""
    steps = "".join(f"V{HEIGHT - bar.height:.2f}H{bar.last_hash + 1}" for bar in bars)
    return f"M{bars[0].first_hash},{HEIGHT:.0f}{steps}V{HEIGHT:.0f}Z"


def percent_of_ring(key_hash: float) -> str:
    return f"{key_hash * 100 / RING:.3f}%"
