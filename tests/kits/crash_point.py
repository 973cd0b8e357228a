"""A broker that is killed before one of its requests to the metadata store: so after each step that others can see."""

from __future__ import annotations

import asyncio

from braid.metadata.memory import Fault
from tests.kits.brokers import Brokers


class CrashPoint:
    """Counts a broker's requests to the store from now on, and kills it before the one with the given number."""

    def __init__(self, brokers: Brokers, name: str, at: int) -> None:
        self.seen = 0
        self.hit = False
        self._brokers = brokers
        self._name = name
        self._at = at
        brokers.store_of(name).fault = self._count

    def disarm(self) -> None:
        self._at = 0

    def _count(self, request: str) -> Fault:
        if request == "renew":
            return Fault.NONE
        self.seen += 1
        if self.seen == self._at:
            self.hit = True
            asyncio.get_running_loop().call_soon(self._brokers.kill, self._name)
            return Fault.UNAVAILABLE
        return Fault.NONE
