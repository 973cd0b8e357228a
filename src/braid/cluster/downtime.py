"""Since when brokers are gone, and since when they cannot open a segment, as far as this broker has seen.

The metadata store does not tell: a registration that ended leaves no trace, and clocks of brokers differ. Every broker
watches, not only the leader, so that a new leader need not begin to count again. A broker that has just started counts
from its start.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from braid.cluster.members import Members
from braid.cluster.owners import Owners, SegmentKey
from braid.ports.clock import Clock

MAX_REMEMBERED: Final = 10_000
"""How many brokers that are gone are remembered; beyond this limit, those that went first are forgotten."""


Unable = tuple[SegmentKey, str]
"""A segment, and a broker that cannot open it."""


class Downtime:
    def __init__(self, members: Members, owners: Owners, clock: Clock) -> None:
        self._members = members
        self._owners = owners
        self._clock = clock
        self._since: dict[str, float] = {}
        self._unable_since: dict[SegmentKey, dict[str, float]] = {}
        """By segment and broker: failures that last. As many as the records have."""
        members.brokers.on_change.append(self._on_change)
        owners.table.on_change.append(self._on_record)

    def since(self, brokers: Iterable[str]) -> dict[str, float]:
        """Return when each of these brokers that is not live was seen to be gone, on the clock's `monotonic()`. A
        broker that was never seen counts as gone from the first call that names it."""
        now = self._clock.monotonic()
        return {id_: self._since.setdefault(id_, now) for id_ in sorted(brokers) if not self._members.is_live(id_)}

    def unable_since(self) -> dict[Unable, float]:
        """Return when each broker was seen to be unable to open a segment, on the clock's `monotonic()`."""
        return {(key, broker): at for key, found in self._unable_since.items() for broker, at in found.items()}

    def _on_record(self, key: SegmentKey) -> None:
        record = self._owners.table.get(key)
        before = self._unable_since.pop(key, {})
        if record is not None and record.failures:
            now = self._clock.monotonic()
            unable = [each.broker for each in record.failures if each.lasting]
            self._unable_since[key] = {broker: before.get(broker, now) for broker in unable}

    def _on_change(self, broker: str) -> None:
        if self._members.is_live(broker):
            self._since.pop(broker, None)
        else:
            self._since.setdefault(broker, self._clock.monotonic())
            while len(self._since) > MAX_REMEMBERED:
                del self._since[next(iter(self._since))]
