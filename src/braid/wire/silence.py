"""Notices soon that a broker stands still while an answer is due. Pure decisions; `Link` acts on them.

A frozen process keeps its connections open, and says nothing. The heartbeat ends such a link after three periods, so
after half a minute. While a request waits, that is too long:

    no byte for PING_AFTER_S, and an answer is due        a PING asks for a sign of life
    no byte for ANSWER_S after the PING                   the link is over

A broker answers a PING immediately, also while it works on a long call. So a long call is never cut. Three things look
like silence and are none, and get more time:

- The bytes that were sent are still on their way: the PING comes after them. A slow link gets a second for each
  UPLOAD_BYTES_PER_S.
- The broker does not read, because this connection has much unanswered (`BrokerLimits`). From BUSY_BYTES or
  BUSY_REQUESTS on, only the heartbeat counts.
- This process itself stood still: the timer is late, and bytes may wait in the socket. It asks again.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

PING_AFTER_S: Final = 2.0
ANSWER_S: Final = 4.0
"""Longer than a garbage collection or a busy machine delays an answer."""
UPLOAD_BYTES_PER_S: Final = 1 << 20
BUSY_BYTES: Final = 16 << 20
BUSY_REQUESTS: Final = 1_024
LATE_S: Final = 1.0


class Look(Enum):
    LATER = "later"
    PING = "ping"
    OVER = "over"


class Silence:
    """What one link knows about its broker's silence. Times are the loop's."""

    __slots__ = ("_due_at", "_pinged_at")

    def __init__(self) -> None:
        self._due_at = 0.0
        self._pinged_at: float | None = None

    def begin(self, now: float) -> float:
        """Note that an answer is due from now on; return when to look."""
        self._pinged_at = None
        return self._next(now + PING_AFTER_S)

    def look(self, now: float, quiet_since: float, requests: int, unanswered_bytes: int) -> tuple[Look, float]:
        """Return what to do, and when to look again. `quiet_since` is when the broker last sent a byte, or when an
        answer became due, if that was later."""
        is_late = now - self._due_at > LATE_S
        if self._pinged_at is not None and quiet_since > self._pinged_at:
            self._pinged_at = None
        if now < quiet_since + PING_AFTER_S:  # As the time was computed: floats must not differ by a rounding.
            return Look.LATER, self._next(quiet_since + PING_AFTER_S)
        if requests >= BUSY_REQUESTS or unanswered_bytes >= BUSY_BYTES:
            self._pinged_at = None
            return Look.LATER, self._next(now + PING_AFTER_S)
        if self._pinged_at is not None and not is_late:
            return Look.OVER, now
        self._pinged_at = now
        return Look.PING, self._next(now + ANSWER_S + unanswered_bytes / UPLOAD_BYTES_PER_S)

    def _next(self, at: float) -> float:
        self._due_at = at
        return at
