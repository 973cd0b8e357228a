"""The moves that were begun lately, as this broker saw them in the records. Balancing rests after them.

Every broker watches, not only the leader, so that a new leader keeps the rests and the cap of the last one.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from braid.cluster.balancing.balance import remembered
from braid.cluster.balancing.policy import BalancePolicy
from braid.cluster.owners import Owners, SegmentKey
from braid.model.cluster import RecentMove, SegmentRef
from braid.model.ids import SegmentId
from braid.model.ownership import Move
from braid.ports.clock import Clock

BALANCE: Final = "balance"
"""The id of the moves that balancing begins."""
MAX_REMEMBERED: Final = 20_000
"""The youngest (I12). Draining a large broker can begin thousands in an hour."""


class RecentMoves:
    def __init__(self, owners: Owners, clock: Clock) -> None:
        self._owners = owners
        self._clock = clock
        self._past: deque[RecentMove] = deque(maxlen=MAX_REMEMBERED)
        self._under_way: dict[SegmentKey, Move] = {}
        owners.table.on_change.append(self._on_change)

    def remembered(self, policy: BalancePolicy) -> tuple[RecentMove, ...]:
        kept = remembered(self._past, policy, self._clock.now_us())
        self._past = deque(kept, maxlen=MAX_REMEMBERED)
        return kept

    def _on_change(self, key: SegmentKey) -> None:
        record = self._owners.table.get(key)
        if record is None or record.move is None:
            self._under_way.pop(key, None)
            return
        if self._under_way.get(key) == record.move:
            return  # It only went on: drains, is sealed.
        self._under_way[key] = record.move
        path, descriptor = key
        self._past.append(
            RecentMove(
                segment=SegmentRef(path, SegmentId(int(descriptor.rpartition("-")[2]))),
                source=record.owner,
                target=record.move.to,
                at=self._clock.now_us(),
                automatic=record.move.id == BALANCE,
            )
        )
