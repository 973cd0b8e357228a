"""Since when brokers are gone, as far as this broker has seen.

The metadata store does not tell: a registration that ended leaves no trace. Every broker watches, not only the leader,
so that a new leader need not begin to count again. A broker that has just started counts from its start.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from braid.cluster.members import Members
from braid.ports.clock import Clock

MAX_REMEMBERED: Final = 10_000
"""How many brokers that are gone are remembered; beyond this limit, those that went first are forgotten."""


class Downtime:
    def __init__(self, members: Members, clock: Clock) -> None:
        self._members = members
        self._clock = clock
        self._since: dict[str, float] = {}
        members.brokers.on_change.append(self._on_change)

    def since(self, brokers: Iterable[str]) -> dict[str, float]:
        """Return when each of these brokers that is not live was seen to be gone, on the clock's `monotonic()`. A
        broker that was never seen counts as gone from the first call that names it."""
        now = self._clock.monotonic()
        return {id_: self._since.setdefault(id_, now) for id_ in sorted(brokers) if not self._members.is_live(id_)}

    def _on_change(self, broker: str) -> None:
        if self._members.is_live(broker):
            self._since.pop(broker, None)
        else:
            self._since.setdefault(broker, self._clock.monotonic())
            while len(self._since) > MAX_REMEMBERED:
                del self._since[next(iter(self._since))]
