"""Which segment a record goes to.

A record with a key goes to the segment whose range has the key's hash. Records without a key go to the segments in
turn: `send` and `submit` go to the next segment after each batch, `send_many` and `send_table` after each slice of
their records.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from braid.client.producing.layout_change import range_numbers, table_keys
from braid.client.producing.segment_writer import SegmentWriter
from braid.model.hashing import key_hash


class Partitioner:
    """Has the writers of one producer, and the turn of records without a key."""

    def __init__(self, writers: Sequence[SegmentWriter] = (), starts: Sequence[int] = (), keyless: int = 0) -> None:
        """`starts`: where the range of each writer's segment starts. `keyless`: the first writer of the turn."""
        self.writers: Final = writers
        self.only: Final = writers[0] if len(writers) == 1 else None
        """The writer, if the topic has one active segment."""
        self._starts = starts
        self._keyless = keyless
        """The writer that takes records without a key now."""

    def writer_of(self, key: bytes | None) -> SegmentWriter:
        if self.only is not None:
            return self.only
        if key is None:
            return self.writers[self._keyless]
        return self.writers[bisect_right(self._starts, key_hash(key)) - 1]

    def writer_numbers(self, hashes: npt.NDArray[np.uint16]) -> npt.NDArray[np.int64]:
        """Which of `writers` takes a key with this hash, for each of the hashes."""
        return np.searchsorted(np.array(self._starts), hashes, "right") - 1

    def on_closed(self, writer: SegmentWriter) -> None:
        """Give the turn to the next writer if this one, which has closed a batch, had it."""
        if self.writers[self._keyless] is writer:
            self._next_turn()

    def split(
        self, keys: Sequence[bytes | None] | None, count: int
    ) -> Iterator[tuple[SegmentWriter, npt.NDArray[np.int64]]]:
        """Divide `count` records among the writers. Yields each writer with the numbers of its records, in order."""
        keyless = self._keyless
        self._next_turn()
        if keys is None:
            yield self.writers[keyless], np.arange(count)
            return
        places = range_numbers(keys, self._starts, keyless)
        for at, writer in enumerate(self.writers):
            chosen = np.flatnonzero(places == at)
            if len(chosen):
                yield writer, chosen

    def split_table(self, rows: Any) -> Iterator[tuple[SegmentWriter, Any, npt.NDArray[np.int64] | None]]:
        """Divide the rows of a table among the writers. Yields each writer with its rows and their numbers. With one
        writer there are no numbers: its rows are all rows."""
        if self.only is not None:
            yield self.only, rows, None
            return
        keys = table_keys(rows)
        for writer, chosen in self.split(keys, rows.num_rows):
            yield writer, rows.take(pa.array(chosen)) if keys is not None else rows, chosen

    def _next_turn(self) -> None:
        self._keyless = (self._keyless + 1) % len(self.writers)
