"""The hot cache: the latest batches of all logs of a broker, bounded in bytes and in number.

It only saves readers at the live tail a trip to a file, and is small on purpose: the page cache holds the files too.
First in, first out; a reader that finds nothing here goes to the files.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from braid.model.batch.header import BatchHeader
from braid.ports.disk import Buffer

DEFAULT_CACHE_BYTES = 16 << 20
MOST_BATCHES: Final = 16_384
"""The objects around a batch take some 700 bytes: for small batches, most of the memory."""

CachedBatch = tuple[BatchHeader, Buffer]


class HotCache:
    def __init__(self, max_bytes: int = DEFAULT_CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        # A plain dict finds its first key by walking over all that were removed before it.
        self._batches: OrderedDict[tuple[int, int], CachedBatch] = OrderedDict()
        self.hits = 0
        self.misses = 0
        """Reads that found something here, and reads that did not."""

    @property
    def used_bytes(self) -> int:
        return self._bytes

    def put(self, log: int, header: BatchHeader, data: Buffer) -> None:
        """Keep a batch of the log with this number. Control batches hold nothing that a reader wants."""
        size = len(data)
        if header.count == 0 or size > self._max_bytes:
            return
        key = (log, header.base_offset)
        if key in self._batches:
            return
        self._batches[key] = (header, data)
        self._bytes += size
        while self._bytes > self._max_bytes or len(self._batches) > MOST_BATCHES:
            _, (_, evicted) = self._batches.popitem(last=False)
            self._bytes -= len(evicted)

    def peek(self, log: int, offset: int) -> BatchHeader | None:
        """Return the header of the batch that begins at `offset`, if it is here. This counts as no read."""
        batch = self._batches.get((log, offset))
        return batch[0] if batch is not None else None

    def get(self, log: int, offset: int, max_bytes: int, limit: int) -> list[CachedBatch]:
        """Return batches without a gap, from `offset` on and below `limit`: one if cached, or up to `max_bytes`."""
        found: list[CachedBatch] = []
        batch = self._batches.get((log, offset))
        while batch is not None and batch[0].next_offset <= limit:
            max_bytes -= len(batch[1])
            if found and max_bytes < 0:
                break
            found.append(batch)
            batch = self._batches.get((log, batch[0].next_offset))
        if found:
            self.hits += 1
        else:
            self.misses += 1
        return found
