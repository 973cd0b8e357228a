"""How much processor time a broker has used. Simulations have none: it would differ from run to run."""

from __future__ import annotations

import time
from typing import Protocol


class Processor(Protocol):
    def used_s(self) -> float:
        """Seconds of all threads of this process; it only grows."""


class SystemProcessor:
    def used_s(self) -> float:
        return time.process_time()


class NoProcessor:
    def used_s(self) -> float:
        return 0.0
