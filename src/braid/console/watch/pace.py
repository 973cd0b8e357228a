"""How often the console asks: often enough for people, and seldom enough for brokers.

A broker's answer costs it at most the time that it takes. So a question whose answers take `t` is asked at most every
`COST * t`: that costs one broker less than half a percent of a core. The quickest of the last answers counts, because
everything above it is waiting.
"""

from __future__ import annotations

from collections import deque
from typing import Final

COST: Final = 200.0
MAX_S: Final = 10.0
REMEMBERED: Final = 5
ENOUGH: Final = 3
"""So many answers show what a question costs. A broker's first one is slow: it loads its admin port."""


class Pace:
    def __init__(self, watched_s: float, idle_s: float) -> None:
        """Ask every `watched_s` while a page is open, and every `idle_s` otherwise, or less often."""
        self._watched_s = watched_s
        self._idle_s = idle_s
        self._took: deque[float] = deque(maxlen=REMEMBERED)
        self._asked_at = -float("inf")

    def asked(self, at: float, took_s: float) -> None:
        self._asked_at = at
        self._took.append(took_s)

    def hurry(self) -> None:
        """Let the next look ask, whatever the time."""
        self._asked_at = -float("inf")

    def interval_s(self, *, watched: bool) -> float:
        least = self._watched_s if watched else self._idle_s
        cost_s = min(self._took) if len(self._took) >= ENOUGH else 0.0
        return max(least, min(MAX_S, COST * cost_s))

    def due(self, now: float, *, watched: bool) -> bool:
        return now - self._asked_at >= self.interval_s(watched=watched) - 0.05
