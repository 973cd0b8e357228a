"""What operators are told about one queue of one segment."""

from __future__ import annotations

from typing import NamedTuple


class QueueCounts(NamedTuple):
    """What operators see of a queue."""

    ready: int
    leased: int
    delayed: int
    oldest_us: int
    """When the oldest message was written that is not settled: µs since 1970. 0: there is none, or it is not known."""
    consumers: tuple[str, ...]
    blocked: str
    """Why no new messages are handed out; empty: they are."""
    delivered: int
    """Since the owner opened the segment, like the next two."""
    redelivered: int
    """Of these, messages that were delivered before."""
    dead_lettered: int
    """Dead letters that their consumers have settled: these are in the dead-letter topic."""
