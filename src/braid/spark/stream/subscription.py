"""A streaming query as a subscription of its topic, so that Braid shows how far it has come and how much it lags.

The query does not need the subscription: its own checkpoint counts. But a subscription makes the query visible to
operators of the topic, and retention waits for it. So a query goes on if its subscription cannot be moved: the log says
so, and the next move makes up for it.

The subscription moves forward only. A restarted query repeats older positions. A query that begins anew at an older
position leaves the subscription where it is. The subscription belongs to the query alone: every move would reposition a
consumer that shared it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from braid.client.admin import Admin
from braid.client.consuming.checkpoint import END, Position
from braid.model.errors import BraidError, SubscriptionExists, SubscriptionNotFound
from braid.scan.connection import ScanConnection
from braid.scan.snapshot import TopicSnapshot

MOVE_TIMEOUT_S: Final = 5.0
"""How long the query waits for a move."""
PAUSE_S: Final = 10.0
"""After a failure. Otherwise every micro-batch would wait for brokers that are away."""

_log: Final = logging.getLogger(__name__)


class QuerySubscription:
    def __init__(self, connection: ScanConnection, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self._connection = connection
        self._clock = clock
        self._cursors: dict[int, int] | None = None
        """The subscription's cursors as this query knows them; None: not known."""
        self._paused_until = 0.0

    def begin(self, positions: Mapping[int, Position], snapshot: TopicSnapshot) -> None:
        """Create the subscription at these positions. An existing one stays: Spark asks for the beginning of a query
        again if its first micro-batch runs again, and `latest` is then after records that were not processed."""
        self._try(_offsets(positions, snapshot), snapshot.topic, only_if_new=True)

    def move(
        self, positions: Mapping[int, Position], snapshot: TopicSnapshot, epochs: Mapping[int, int] | None = None
    ) -> None:
        """Move the subscription here: everything before was processed, the last records in `epochs`. Creates it if it
        is missing; never raises."""
        wanted = _offsets(positions, snapshot)
        if self._cursors is None or _forward(wanted, self._cursors):
            self._try(wanted, snapshot.topic, epochs)

    def _try(
        self,
        wanted: dict[int, int],
        topic: str,
        epochs: Mapping[int, int] | None = None,
        *,
        only_if_new: bool = False,
    ) -> None:
        if self._clock() < self._paused_until:
            return
        try:
            admin = self._connection.client.admin
            work = asyncio.wait_for(self._move(admin, topic, wanted, epochs or {}, only_if_new), MOVE_TIMEOUT_S)
            self._cursors = self._connection.call(work)
        except (BraidError, TimeoutError) as error:
            self._cursors = None
            self._paused_until = self._clock() + PAUSE_S
            reason = str(error) or f"no answer for {MOVE_TIMEOUT_S:g} s"
            _log.warning(
                "subscription %s of %s does not show how far the query is: %s. The query goes on and tries again",
                self.name, topic, reason,
            )  # fmt: skip

    async def _move(
        self, admin: Admin, topic: str, wanted: dict[int, int], epochs: Mapping[int, int], only_if_new: bool
    ) -> dict[int, int]:
        cursors, created = self._cursors, False
        if cursors is None:
            cursors, created = await self._found_or_created(admin, topic)
        forward = _forward(wanted, cursors)
        if forward and (created or not only_if_new):
            moved = await admin.seek(
                topic, self.name, forward, epochs={segment: epochs[segment] for segment in forward if segment in epochs}
            )
            cursors = cursors | _by_segment(moved["offsets"])
        return cursors

    async def _found_or_created(self, admin: Admin, topic: str) -> tuple[dict[int, int], bool]:
        created = False
        try:
            found = await admin.subscription(topic, self.name)
        except SubscriptionNotFound:
            try:
                found = await admin.create_subscription(topic, self.name, start="earliest", query=True)
                created = True
            except SubscriptionExists:
                found = await admin.subscription(topic, self.name)
        return {int(segment): each["offset"] for segment, each in found["segments"].items()}, created


def _offsets(positions: Mapping[int, Position], snapshot: TopicSnapshot) -> dict[int, int]:
    """Turn positions into cursors: END is the end of the segment, and no cursor is before the earliest record."""
    found = {}
    for number, position in positions.items():
        segment = snapshot.segments.get(number)
        if segment is not None:
            offset = segment.end if position == END else position
            found[number] = max(segment.earliest, min(offset, segment.end))
    return found


def _forward(wanted: Mapping[int, int], cursors: Mapping[int, int]) -> dict[int, int]:
    return {segment: offset for segment, offset in wanted.items() if offset > cursors.get(segment, 0)}


def _by_segment(offsets: Mapping[str, Any]) -> dict[int, int]:
    return {int(segment): int(offset) for segment, offset in offsets.items()}
