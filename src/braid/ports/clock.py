"""Time. Waiting goes through asyncio, whose loop the simulation replaces; reading a clock goes through here."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_us(self) -> int:
        """Wall-clock time in microseconds since 1970, for timestamps that people and other machines read."""

    def monotonic(self) -> float:
        """Seconds that never jump, for deadlines. It goes on while the machine is suspended."""


class SystemClock:
    def now_us(self) -> int:
        return time.time_ns() // 1_000

    def monotonic(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)
