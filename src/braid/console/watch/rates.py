"""Rates out of counters that are read now and then."""

from __future__ import annotations

from typing import Final

KEPT: Final = 0.5
"""How much of the last rate stays in the next one: a batch that arrives just after a look must not look like a gap."""


class Rates:
    """By key: how fast each counter grows. A counter that shrinks has begun again, and costs one look."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, ...], tuple[float, float]] = {}
        self._rates: dict[tuple[str, ...], float] = {}

    def seen(self, key: tuple[str, ...], value: float, at: float) -> float | None:
        """Note the counter's value and return its rate; None if it is not known yet."""
        last = self._last.get(key)
        if last is not None and at <= last[0]:
            return self._rates.get(key)
        self._last[key] = (at, value)
        if last is None or value < last[1]:
            return self._rates.get(key)
        rate = (value - last[1]) / (at - last[0])
        before = self._rates.get(key)
        self._rates[key] = now = rate if before is None else before * KEPT + rate * (1 - KEPT)
        return now

    def forget_before(self, at: float) -> None:
        """Forget counters that were not seen since."""
        for key in [key for key, (seen_at, _) in self._last.items() if seen_at < at]:
            del self._last[key]
            self._rates.pop(key, None)
