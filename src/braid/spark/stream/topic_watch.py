"""A streaming query's view of its topic, on the driver, and the age of that view.

Without pacing, Spark would ask for new records some 90 times a second. A refresh comes at most every tenth of a second,
and more rarely if it takes long, so that a query spends only a small part of its own time and of the brokers' time on
it. A query that finds nothing new in the last view waits for the next refresh. It cannot answer from the last view:
Spark's `processAllAvailable` means the records that existed when it was called.

A refresh asks one broker for the ends of the segments, and does not ask storage. The list of chunks matters only when a
micro-batch is planned, and only if the known chunks end too early. Owners have all records that are not in chunks, so
an old list costs only speed. Without brokers, every refresh reads the manifests, and refreshes are rarer.

A broker may know an older layout than the query, for a moment. The watch shows none that is older than the offset that
the query goes on from: it asks again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import msgspec

from braid.client.retry import retrying
from braid.scan.connection import ScanConnection
from braid.scan.planning import Range
from braid.scan.snapshot import SegmentSnapshot, TopicSnapshot
from braid.spark.stream.offsets import StreamOffset, is_behind, still_behind
from braid.wire.operations import Kind, Positions, PositionsRequest, encode

if TYPE_CHECKING:
    from braid.client.client import Client

FRESH_S: Final = 0.1
"""On average, half of it adds to the time from publishing to reading; a micro-batch takes longer than that."""
FRESH_MANIFESTS_S: Final = 1.0
"""Manifests change when a file is exported, every few seconds at most."""
MAX_FRESH_S: Final = 2.0
REFRESH_SHARE: Final = 0.1
"""How much of its time a query spends on refreshes, at most."""
BEHIND_S: Final = 10.0
"""How long the query waits for a layout that it has seen before."""
FRESH_CHUNKS_S: Final = 1.0
"""How long the query keeps a list of chunks that ends too early."""


class TopicWatch:
    """Belongs to the thread that uses it."""

    def __init__(
        self,
        connection: ScanConnection,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._connection = connection
        self._clock = clock
        self._sleep = sleep
        self._seen: TopicSnapshot | None = None
        self._reached: StreamOffset | None = None
        """No snapshot that is older than this offset is shown."""
        self._fresh_until = 0.0
        self._chunks_fresh_until = 0.0

    def reached(self, offset: StreamOffset) -> None:
        """Note the offset that the query goes on from."""
        self._reached = offset
        if self._seen is not None and is_behind(self._seen, offset):
            self._seen = None

    def snapshot(self) -> TopicSnapshot:
        """Return the topic as it was a moment ago."""
        if self._seen is not None and self._clock() < self._fresh_until:
            return self._seen
        return self.refresh()

    def wait_and_refresh(self) -> TopicSnapshot:
        """Wait until the last view is old enough, then refresh it."""
        self._sleep(max(0.0, self._fresh_until - self._clock()))
        return self.refresh()

    def refresh(self) -> TopicSnapshot:
        begun = self._clock()
        known = self._seen
        if known is not None and self._connection.has_brokers:
            again = self._connection.call(_positions_of_now(self._connection.client, known))
            if again is not None:
                return self._keep(again, begun)
        return self._refresh_everything(begun)

    def with_chunks_for(self, wanted: Iterable[Range]) -> TopicSnapshot:
        """Return the topic with all chunks that hold these records, if there are such chunks."""
        seen = self.snapshot()
        enough = all(_chunks_end(seen, each.segment) >= each.until for each in wanted)
        if enough or self._clock() < self._chunks_fresh_until:
            return seen
        return self._refresh_everything(self._clock())

    def offsets_at(self, timestamp_us: int) -> dict[int, int]:
        """Return for each segment an offset close to the first record of this time or later, and not after it."""
        if not self._connection.has_brokers:
            return {number: _chunk_at(segment, timestamp_us) for number, segment in self.snapshot().segments.items()}
        client = self._connection.client
        answer = self._connection.call(_ask_positions(client, self._connection.options.topic, timestamp_us))
        return {place.segment: place.at_time for place in answer.segments}

    def _refresh_everything(self, begun: float) -> TopicSnapshot:
        self._seen = None
        seen = self._connection.snapshot()
        while self._reached is not None and is_behind(seen, self._reached):
            if self._clock() >= begun + BEHIND_S:
                raise still_behind(seen, self._reached)
            self._sleep(FRESH_S)
            seen = self._connection.snapshot()
        self._chunks_fresh_until = self._clock() + FRESH_CHUNKS_S
        return self._keep(seen, begun)

    def _keep(self, seen: TopicSnapshot, begun: float) -> TopicSnapshot:
        self._seen = seen
        now = self._clock()
        least = FRESH_S if self._connection.has_brokers else FRESH_MANIFESTS_S
        self._fresh_until = now + min(max(least, (now - begun) / REFRESH_SHARE), MAX_FRESH_S)
        return seen


async def _ask_positions(client: Client, topic: str, timestamp_us: int | None = None) -> Positions:
    body = encode(PositionsRequest(topic, timestamp_us))

    async def ask() -> Positions:
        link = await client.pool.any()
        return await link.ask(Kind.POSITIONS, body, Positions, client.timeout_s)

    deadline = asyncio.get_running_loop().time() + client.timeout_s
    return await retrying(ask, deadline, client.backoff())


async def _positions_of_now(client: Client, known: TopicSnapshot) -> TopicSnapshot | None:
    """Return `known` with the present ends of its segments; None if the segments or the topic are others now."""
    answer = await _ask_positions(client, known.topic)
    places = {place.segment: place for place in answer.segments}
    if answer.topic_id != known.topic_id or places.keys() != known.segments.keys():
        return None
    segments = {
        number: msgspec.structs.replace(
            segment,
            earliest=places[number].earliest,
            end=places[number].end,
            sealed=places[number].sealed,
            epochs=places[number].epochs,
        )
        for number, segment in known.segments.items()
    }
    return msgspec.structs.replace(known, segments=segments)


def _chunks_end(snapshot: TopicSnapshot, segment: int) -> int:
    chunks = snapshot.segments[segment].chunks if segment in snapshot.segments else ()
    return chunks[-1].next_offset if chunks else 0


def _chunk_at(segment: SegmentSnapshot, timestamp_us: int) -> int:
    return next((chunk.base_offset for chunk in segment.chunks if chunk.max_timestamp >= timestamp_us), segment.end)
