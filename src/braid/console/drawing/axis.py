"""Where the axes have their ticks, and the words at them."""

from __future__ import annotations

import math
from typing import Final

from msgspec import Struct

from braid.console.drawing.strands import RING, Window

STEPS_S: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 14_400, 21_600, 43_200, 86_400)
TICK_PX: Final = 110.0
"""Ticks are at least so far from each other."""
HASH_TICK_PX: Final = 34.0


class Tick(Struct, frozen=True):
    at: float
    """In pixels."""
    text: str


def time_ticks(window: Window, now: float) -> list[Tick]:
    """Return ticks at round distances from now, from left to right."""
    wanted = (window.end - window.start) * TICK_PX / window.width
    step = next((each for each in STEPS_S if each >= wanted), STEPS_S[-1] * math.ceil(wanted / STEPS_S[-1]))
    first = math.ceil((now - window.end) / step)
    last = math.floor((now - window.start) / step)
    return [Tick(window.x(now - number * step), ago_text(number * step)) for number in range(last, first - 1, -1)]


def ago_text(seconds: float) -> str:
    """Return `now`, `−45 s`, `−3 min`, `−1 h 30 min`."""
    rounded = round(seconds)
    if rounded <= 0:
        return "now"
    if rounded < 60:
        return f"−{rounded} s"
    minutes, rest = divmod(rounded, 60)
    if minutes < 60:
        return f"−{minutes} min {rest} s" if rest else f"−{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"−{hours} h {minutes} min" if minutes else f"−{hours} h"


def hash_ticks(window: Window) -> list[Tick]:
    """Return ticks at round hashes, from the top."""
    step = RING // 2
    while step > 1 and window.height * step / (window.last_hash - window.first_hash) >= 2 * HASH_TICK_PX:
        step //= 2
    first, last = math.ceil(window.first_hash / step), math.floor(min(window.last_hash, RING - 1) / step)
    ticks = [Tick(window.y(number * step), f"{number * step:04x}") for number in range(first, last + 1)]
    return [*ticks, Tick(window.height, "ffff")] if window.last_hash >= RING else ticks
