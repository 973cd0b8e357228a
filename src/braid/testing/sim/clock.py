"""A clock on virtual time. Each broker of a simulation may have its own, wrong by its own amount."""

from __future__ import annotations

from collections.abc import Callable

START_US = 1_767_225_600_000_000
"""Simulations begin on 2026-01-01 00:00 UTC."""


class SimulatedClock:
    def __init__(self, time: Callable[[], float], *, skew_us: int = 0) -> None:
        self._time = time
        self.skew_us = skew_us
        """How far the wall clock is ahead of the true one. May be set at any time: that is a jump."""

    def now_us(self) -> int:
        return START_US + round(self._time() * 1_000_000) + self.skew_us

    def monotonic(self) -> float:
        """Virtual time. It never jumps, whatever the wall clock does."""
        return self._time()

    def jump(self, us: int) -> None:
        """Move the wall clock by `us`, backwards if negative, as a correction by an operator or by NTP would."""
        self.skew_us += us

    def skewed(self, us: int) -> SimulatedClock:
        """Another clock on the same time whose wall clock differs from this one's by `us`."""
        return SimulatedClock(self._time, skew_us=self.skew_us + us)
