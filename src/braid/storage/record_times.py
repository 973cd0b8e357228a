"""When the record at an offset was written, from what its owner has in memory: no file is read.

Operators want to know how old the oldest record is that waits: for a subscription, or for its export. They ask often,
and for many segments together. So the answer comes from the hot cache, where it is exact, or else from the run of the
sparse index, the file or the chunk that holds the offset. Of such a stretch only the first and the last time are known;
records are taken to be spread evenly between them. The times are those of the records: of their producers' clocks.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from braid.storage.log.wal import WalFile
    from braid.storage.reader import Sources


class Stretch(NamedTuple):
    """Records that follow each other, and the times between which they were written, in µs since 1970."""

    first: int
    next: int
    began_us: int
    ended_us: int

    def time_at(self, offset: int) -> int:
        """Return when the record at `offset` was written, as if all records had the same distance in time."""
        last = max(self.next - 1, self.first)
        if last == self.first:
            return self.began_us
        part = (min(max(offset, self.first), last) - self.first) / (last - self.first)
        return self.began_us + round(part * max(self.ended_us - self.began_us, 0))


def written_at(sources: Sources, offset: int) -> int | None:
    """Return when the record at `offset` was written, in µs since 1970; None if no record is known there."""
    cached = sources.cache.peek(sources.log.number, offset)
    if cached is not None:
        return cached.min_timestamp
    files = sources.log.files
    for at in range(len(files) - 1, -1, -1):
        if files[at].base_offset <= offset < files[at].next_offset:
            return _stretch_of(sources, at, offset).time_at(offset)
    chunk = sources.catalog.find(offset)
    if chunk is None:
        return None
    return Stretch(chunk.base_offset, chunk.next_offset, chunk.min_timestamp, chunk.max_timestamp).time_at(offset)


def _stretch_of(sources: Sources, at: int, offset: int) -> Stretch:
    """Return the stretch of the log's file number `at` that holds `offset`."""
    file = sources.log.files[at]
    if file.index is not None and file.index.runs:
        runs = file.index.runs
        number = max(bisect_right(runs, offset, key=lambda run: run.offset) - 1, 0)
        ends = runs[number + 1].offset if number + 1 < len(runs) else file.next_offset
        return Stretch(runs[number].offset, ends, runs[number].min_timestamp, runs[number].max_timestamp)
    began_us = _time_before(sources, at, file) or file.max_timestamp
    return Stretch(file.base_offset, file.next_offset, began_us, file.max_timestamp)


def _time_before(sources: Sources, at: int, file: WalFile) -> int:
    """Return the time of the record before a file whose index is on disk: its first record came soon after. 0: none."""
    if at > 0:
        return sources.log.files[at - 1].max_timestamp
    chunk = sources.catalog.find(file.base_offset - 1)
    return chunk.max_timestamp if chunk is not None else 0
