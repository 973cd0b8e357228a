"""The settled messages of a queue: everything below `base`, and ranges above it.

Consumers settle messages in any order. What is settled above the oldest unsettled message is kept as ranges that do not
touch, in two arrays: 16 bytes for a range, whatever its length. One message that nobody settles costs nothing more than
the gap that it leaves.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

from braid.model.ids import Offset


class SettledOffsets:
    def __init__(self, base: int = 0, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self.base = base
        """Everything below is settled, and the message at it is not."""
        self._starts = array("q")
        self._ends = array("q")
        """The offsets after the ranges."""
        for start, end in ranges:
            self.add(start, end)

    def __contains__(self, offset: int) -> bool:
        at = bisect_right(self._starts, offset) - 1
        return offset < self.base or (at >= 0 and offset < self._ends[at])

    def __len__(self) -> int:
        """The number of ranges above the base."""
        return len(self._starts)

    def __iter__(self) -> Iterator[tuple[Offset, Offset]]:
        """The ranges above the base, in order."""
        return ((Offset(start), Offset(end)) for start, end in zip(self._starts, self._ends))

    @property
    def count(self) -> int:
        """How many messages above the base are settled."""
        return sum(self._ends) - sum(self._starts)

    @property
    def end(self) -> int:
        """The offset after the last settled message."""
        return self._ends[-1] if self._ends else self.base

    def add(self, start: int, end: int) -> None:
        """Settle the messages from `start` up to `end`. Some of them may be settled already."""
        start = max(start, self.base)
        if start >= end:
            return
        first = bisect_left(self._ends, start)  # The first range that touches the new one, if one does.
        last = bisect_right(self._starts, end)
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        if start == self.base:
            self.base = end
            first = 0
            self._starts[:last] = self._ends[:last] = array("q")
        else:
            self._starts[first:last] = array("q", (start,))
            self._ends[first:last] = array("q", (end,))

    def first_unsettled(self, offset: int) -> Offset:
        """Return the first unsettled offset at or after this one."""
        if offset < self.base:
            return Offset(self.base)
        at = bisect_right(self._starts, offset) - 1
        return Offset(self._ends[at] if at >= 0 and offset < self._ends[at] else offset)

    def next_settled(self, offset: int, limit: int) -> Offset:
        """Return the first settled offset at or after this unsettled one; `limit` if there is none before it."""
        at = bisect_right(self._starts, offset)
        return Offset(min(self._starts[at], limit) if at < len(self._starts) else limit)
