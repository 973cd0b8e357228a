"""What the driver of a streaming query knows of its topic, and how old that is.

While there is nothing new, Spark would ask some 90 times a second whether there is. Looks at the topic are paced
instead: one in a tenth of a second, or fewer where a look takes long, so that a query spends no more than a small part
of its time, and of the brokers', on looking. Who finds nothing new in the last look waits for the next one. To answer
from the last one would be wrong as well: Spark's `processAllAvailable` means what was there when it was called.

A look asks one broker for the ends of the segments, and storage for nothing: which chunks there are matters only when
a micro-batch is planned, and even then only if the known ones do not reach far enough. What chunks do not hold is read
from the segments' owners, so chunks that are not known yet cost speed at worst. Where manifests are all there is, they
are read at every look, and looks are rarer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import msgspec

from braid.client.retry import retrying
from braid.spark.connection import SourceConnection
from braid.spark.source.planning import Range
from braid.spark.source.snapshot import SegmentSnapshot, TopicSnapshot
from braid.wire.operations import Kind, Positions, PositionsRequest, encode

if TYPE_CHECKING:
    from braid.client.client import Client

FRESH_S: Final = 0.1
"""Adds half of it to the time from publishing to reading, on average; a micro-batch takes longer than that."""
FRESH_MANIFESTS_S: Final = 1.0
"""They change when a file is exported, which is every few seconds at most."""
MAX_FRESH_S: Final = 2.0
LOOKING_SHARE: Final = 0.1
"""Of the time, at most."""
FRESH_CHUNKS_S: Final = 1.0
"""How long a list of chunks that ends too early is not asked for again."""


class TopicWatch:
    """Belongs to the thread that uses it."""

    def __init__(
        self,
        connection: SourceConnection,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._connection = connection
        self._clock = clock
        self._sleep = sleep
        self._seen: TopicSnapshot | None = None
        self._fresh_until = 0.0
        self._chunks_fresh_until = 0.0

    def look(self) -> TopicSnapshot:
        """The topic a moment ago."""
        if self._seen is not None and self._clock() < self._fresh_until:
            return self._seen
        return self.refresh()

    def refresh_if_old(self) -> TopicSnapshot:
        """The topic as it is when this returns, or a moment before; blocks as long as the last look is too recent."""
        self._sleep(max(0.0, self._fresh_until - self._clock()))
        return self.refresh()

    def refresh(self) -> TopicSnapshot:
        begun = self._clock()
        known = self._seen
        if known is not None and self._connection.has_brokers:
            again = self._connection.call(_positions_of_now(self._connection.client, known))
            if again is not None:
                return self._saw(again, begun)
        return self._look_at_everything(begun)

    def with_chunks_for(self, wanted: Iterable[Range]) -> TopicSnapshot:
        """With all chunks that hold these records, if there are such chunks."""
        seen = self.look()
        enough = all(_chunks_end(seen, each.segment) >= each.until for each in wanted)
        if enough or self._clock() < self._chunks_fresh_until:
            return seen
        return self._look_at_everything(self._clock())

    def offsets_at(self, timestamp_us: int) -> dict[int, int]:
        """For each segment an offset with no record of that time or later before it, close to the first such one."""
        if not self._connection.has_brokers:
            return {number: _chunk_at(segment, timestamp_us) for number, segment in self.look().segments.items()}
        client = self._connection.client
        answer = self._connection.call(_ask_positions(client, self._connection.options.topic, timestamp_us))
        return {place.segment: place.at_time for place in answer.segments}

    def _look_at_everything(self, begun: float) -> TopicSnapshot:
        self._seen = None
        seen = self._connection.snapshot()
        self._chunks_fresh_until = self._clock() + FRESH_CHUNKS_S
        return self._saw(seen, begun)

    def _saw(self, seen: TopicSnapshot, begun: float) -> TopicSnapshot:
        self._seen = seen
        now = self._clock()
        least = FRESH_S if self._connection.has_brokers else FRESH_MANIFESTS_S
        self._fresh_until = now + min(max(least, (now - begun) / LOOKING_SHARE), MAX_FRESH_S)
        return seen


async def _ask_positions(client: Client, topic: str, timestamp_us: int | None = None) -> Positions:
    body = encode(PositionsRequest(topic, timestamp_us))

    async def ask() -> Positions:
        link = await client.pool.any()
        return await link.ask(Kind.POSITIONS, body, Positions, client.timeout_s)

    deadline = asyncio.get_running_loop().time() + client.timeout_s
    return await retrying(ask, deadline, client.backoff())


async def _positions_of_now(client: Client, known: TopicSnapshot) -> TopicSnapshot | None:
    """`known` with the ends that its segments have now. None if it has other segments now, or is another topic."""
    answer = await _ask_positions(client, known.topic)
    places = {place.segment: place for place in answer.segments}
    if answer.topic_id != known.topic_id or places.keys() != known.segments.keys():
        return None
    segments = {
        number: msgspec.structs.replace(
            segment, earliest=places[number].earliest, end=places[number].end, sealed=places[number].sealed
        )
        for number, segment in known.segments.items()
    }
    return msgspec.structs.replace(known, segments=segments)


def _chunks_end(snapshot: TopicSnapshot, segment: int) -> int:
    chunks = snapshot.segments[segment].chunks if segment in snapshot.segments else ()
    return chunks[-1].next_offset if chunks else 0


def _chunk_at(segment: SegmentSnapshot, timestamp_us: int) -> int:
    return next((chunk.base_offset for chunk in segment.chunks if chunk.max_timestamp >= timestamp_us), segment.end)
