"""What balancing would do, and why: the moves in their order, their effect, and what prevented more.

The leader carries out the same value that a dry run shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import msgspec

from braid.cluster.placement import Tally
from braid.model.cluster import ClusterLoad, SegmentRef


class Remark(Enum):
    """Why there are no moves, or no more of them."""

    BALANCED = "balanced"
    QUIET = "quiet"
    """Uneven, but so little happens that no move is worth it."""
    ALONE = "alone"
    """Fewer than two brokers are available."""
    STALE = "stale"
    """A live broker has no report, or an old one: decisions would be about another cluster."""
    IN_FLIGHT = "in-flight"
    """As many moves as may run at the same time are running, or were just proposed."""
    CAPPED = "capped"
    """As many moves as may begin in an hour have begun."""
    COOLING = "cooling"
    """Moves would help, of segments or brokers that took part in one a short time ago."""
    UNBALANCEABLE = "unbalanceable"
    """One segment alone is more than a broker's fair share; wherever it goes, there is too much."""
    STUCK = "stuck"
    """No single move narrows the spread by as much as it costs."""


class Note(msgspec.Struct, frozen=True, kw_only=True):
    remark: Remark
    text: str
    """A sentence for an operator."""
    broker: str | None = None
    segment: SegmentRef | None = None


class Proposed(msgspec.Struct, frozen=True, kw_only=True):
    segment: SegmentRef
    source: str
    target: str
    bytes_in_per_s: int
    bytes_out_per_s: int
    history_bytes: int
    reason: str
    spread_before: float
    """Load of the busiest available broker by the mean of all of them, before this move and after those above it."""
    spread_after: float


class BrokerLoad(msgspec.Struct, frozen=True, kw_only=True):
    broker: str
    bytes_per_s_before: int
    bytes_per_s_after: int
    segments_before: int
    segments_after: int


class BalancePlan(msgspec.Struct, frozen=True, kw_only=True):
    moves: tuple[Proposed, ...]
    notes: tuple[Note, ...]
    brokers: tuple[BrokerLoad, ...]
    """Every broker, in order of their ids."""
    spread_before: float
    spread_after: float
    """Expected, once all moves are done and if no rate changes."""


class PlanDraft:
    """The plan while it is made: the moves so far, and the cluster as it would be after them."""

    def __init__(self, view: ClusterLoad) -> None:
        self.tally = Tally(view.brokers, view.loads, view.owned)
        self.moves: list[Proposed] = []
        self.sources: set[str] = set()
        self.targets: set[str] = set()
        """No broker is both a source and a target in one plan. The moves run at the same time: in any order of their
        ends, no broker is ever busier than the busiest was."""
        self._spread = self.tally.spread()
        self._before = {broker: self._load(broker) for broker in self.tally.segments}

    def move(self, segment: SegmentRef, source: str, target: str, reason: str) -> None:
        before = self.tally.spread()
        self.tally.remove(segment, source)
        self.tally.add(segment, target)
        self.sources.add(source)
        self.targets.add(target)
        load = self.tally.reported.get(segment)
        self.moves.append(
            Proposed(
                segment=segment,
                source=source,
                target=target,
                bytes_in_per_s=0 if load is None else load.bytes_in_per_s,
                bytes_out_per_s=0 if load is None else load.bytes_out_per_s,
                history_bytes=0 if load is None else load.history_bytes,
                reason=reason,
                spread_before=before,
                spread_after=self.tally.spread(),
            )
        )

    def finish(self, notes: Sequence[Note]) -> BalancePlan:
        return BalancePlan(
            moves=tuple(self.moves),
            notes=tuple(notes),
            brokers=tuple(
                BrokerLoad(
                    broker=broker,
                    bytes_per_s_before=before[0],
                    segments_before=before[1],
                    bytes_per_s_after=self._load(broker)[0],
                    segments_after=self._load(broker)[1],
                )
                for broker, before in sorted(self._before.items())
            ),
            spread_before=self._spread,
            spread_after=self.tally.spread(),
        )

    def _load(self, broker: str) -> tuple[int, int]:
        return self.tally.bytes_per_s[broker], len(self.tally.segments[broker])
