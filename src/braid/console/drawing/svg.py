"""Writes a braid as SVG. Its colours are custom properties of the page (`--owner-0` …), for light and dark."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from html import escape
from typing import Final

from braid.console.drawing.axis import hash_ticks, time_ticks
from braid.console.drawing.geometry import BLEND_PX, Braid, Label, Link, Mark, Ribbon
from braid.console.drawing.strands import NOBODY
from braid.console.numbers import rate_text

COLOURS: Final = 8
"""Owners beyond them share colours; labels and hints name the owner."""
MARGIN_LEFT: Final = 44.0
MARGIN_RIGHT: Final = 132.0
MARGIN_TOP: Final = 10.0
MARGIN_BOTTOM: Final = 26.0
FIRST_S: Final = datetime.datetime.min.replace(tzinfo=datetime.UTC).timestamp()
END_S: Final = datetime.datetime.max.replace(tzinfo=datetime.UTC).timestamp()
_SIGNS: Final = {
    "moved": '<circle r="5.5"/><path d="M-2.6,0H2.2M0.4,-2L2.5,0L0.4,2"/>',
    "failed-over": '<path class="sign" d="M0,-7L6.5,5H-6.5Z"/><path d="M0,-2.4V1.4M0,3.1V3.3"/>',
    "reopened": '<circle r="3.5"/>',
}


def write_svg(braid: Braid, colours: Mapping[str, int], *, now: float, watched_since: float = 0.0) -> str:
    """Return the drawing. `colours` numbers the owners; before `watched_since`, only the order of changes is known."""
    window = braid.window
    width, height = window.width + MARGIN_LEFT + MARGIN_RIGHT, window.height + MARGIN_TOP + MARGIN_BOTTOM
    blends = _Blends(colours)
    links = "".join(_link(each, blends) for each in braid.links)
    ribbons = "".join(_ribbon(each, blends) for each in braid.ribbons)
    return (
        f'<svg class="braid" viewBox="0 0 {width:.0f} {height:.0f}" data-width="{window.width:.0f}" '
        f'data-height="{window.height:.0f}" data-left="{MARGIN_LEFT:.0f}" data-top="{MARGIN_TOP:.0f}" role="img" '
        'aria-label="The strands of the topic: time to the right, key hashes downwards">'
        f"<defs>{blends.definitions}"
        f'<clipPath id="braid-clip"><rect width="{window.width:.1f}" height="{window.height:.1f}"/></clipPath></defs>'
        f'<g transform="translate({MARGIN_LEFT:.0f},{MARGIN_TOP:.0f})">{_grid(braid, now)}'
        f'<g clip-path="url(#braid-clip)">{_lanes(braid)}'
        f'<g class="strands">{links}{ribbons}</g>{_earlier(braid, watched_since)}</g>'
        f"{''.join(map(_mark, braid.marks))}{''.join(_label(each, braid, colours) for each in braid.labels)}</g></svg>"
    )


def colour(owner: str, colours: Mapping[str, int]) -> str:
    return "var(--nobody)" if owner == NOBODY else f"var(--owner-{colours.get(owner, 0) % COLOURS})"


class _Blends:
    """Gradients between the colours of two owners, over a stretch of the drawing."""

    def __init__(self, colours: Mapping[str, int]) -> None:
        self._colours = colours
        self._written: list[str] = []

    @property
    def definitions(self) -> str:
        return "".join(self._written)

    def fill(self, source: str, target: str, left: float, right: float) -> str:
        first, second = colour(source, self._colours), colour(target, self._colours)
        if first == second:
            return second
        name = f"blend-{len(self._written)}"
        self._written.append(
            f'<linearGradient id="{name}" gradientUnits="userSpaceOnUse" x1="{left:.1f}" x2="{right:.1f}" y1="0" '
            f'y2="0"><stop offset="0" style="stop-color:{first}"/><stop offset="1" style="stop-color:{second}"/>'
            "</linearGradient>"
        )
        return f"url(#{name})"


def _ribbon(each: Ribbon, blends: _Blends) -> str:
    if each.before is None:
        fill = blends.fill(each.owner, each.owner, 0, 0)
    else:
        fill = blends.fill(each.before, each.owner, each.left - BLEND_PX / 2, each.left + BLEND_PX)
    owner = f"owner {each.owner}" if each.owner else "no broker serves it"
    since = f"since {moment_text(each.since)}" if each.timed else "since before the console watched"
    tip = f"segment {each.segment}|{owner}|{since}|{rate_text(each.rate, 'records')}"
    classes = "ribbon" + ("" if each.owner else " unserved")
    return _path(classes, each.segment, tip, each.path, fill)


def _link(each: Link, blends: _Blends) -> str:
    fill = blends.fill(each.source, each.target, each.left, each.right)
    tip = f"segment {each.parent} → segment {each.child}"
    return _path("ribbon link", each.child, tip, each.path, fill)


def _path(classes: str, segment: int, tip: str, path: str, fill: str) -> str:
    about = f'data-segment="{segment}" data-tip="{escape(tip)}"'
    return f'<path class="{classes}" {about} d="{path}" style="fill:{fill}"/>'


def _lanes(braid: Braid) -> str:
    return "".join(
        f'<rect class="lane" data-segment="{each.segment}" x="{each.left:.1f}" y="{each.top + 0.75:.1f}" '
        f'width="{each.right - each.left:.1f}" height="{max(0.5, each.bottom - each.top - 1.5):.1f}" rx="3"/>'
        for each in braid.lanes
        if each.right > each.left
    )


def _grid(braid: Braid, now: float) -> str:
    window = braid.window
    times = "".join(
        f'<g transform="translate({tick.at:.1f},0)"><line class="grid" y2="{window.height:.0f}"/>'
        f'<text class="tick time" y="{window.height + 18:.0f}">{tick.text}</text></g>'
        for tick in time_ticks(window, now)
    )
    hashes = "".join(
        f'<text class="tick hash" x="-8" y="{min(max(tick.at, 5), window.height - 3) + 3.5:.1f}">{tick.text}</text>'
        for tick in hash_ticks(window)
    )
    return times + hashes


def _earlier(braid: Braid, watched_since: float) -> str:
    """Shade the time before the console watched."""
    edge = min(braid.window.x(watched_since), braid.window.width)
    if edge <= 1:
        return ""
    text = '<text class="tick" x="8" y="16">before this console watched: order, not time</text>' if edge > 280 else ""
    return f'<rect class="earlier" width="{edge:.1f}" height="{braid.window.height:.1f}"/>{text}'


def _mark(each: Mark) -> str:
    tip = f"{each.text}|{moment_text(each.at)}"
    return (
        f'<g class="mark {each.kind}" data-tip="{escape(tip)}" transform="translate({each.x:.1f},{each.y:.1f})">'
        f"{_SIGNS.get(each.kind, '')}</g>"
    )


def _label(each: Label, braid: Braid, colours: Mapping[str, int]) -> str:
    x = braid.window.width + 10
    owner = escape(each.owner or "unserved")
    return (
        f'<g class="strand-label" data-segment="{each.segment}" transform="translate({x:.0f},{each.y:.1f})">'
        f'<circle r="4" cx="2" style="fill:{colour(each.owner, colours)}"/>'
        f'<text x="12" y="4"><tspan class="name">{each.segment}</tspan> {owner}</text></g>'
    )


def moment_text(seconds: float) -> str:
    """Return a time in UTC. Producers may write times outside the years 1 to 9999: these are seconds since 1970."""
    if not FIRST_S <= seconds < END_S:
        return f"{seconds:.0f} s"
    return datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
