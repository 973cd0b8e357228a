"""What `braid consume` reads: a subscription, or a topic from some place on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, Protocol

from braid.cli.terminal.start_point import AtTime, StartPoint, first_offset
from braid.client.retry import retrying
from braid.model.errors import NotServing, SegmentNotFound
from braid.model.names import TopicName
from braid.wire.operations import Kind, Positions, PositionsRequest, encode

if TYPE_CHECKING:
    from braid.client.client import Client
    from braid.client.consuming.checkpoint import CheckpointConsumer
    from braid.client.consuming.consumer import Consumer
    from braid.client.consuming.delivery import ReceivedBatch
    from braid.client.consuming.stream import StreamConsumer

SERVED_S: Final = 10.0
"""How long to wait for a segment that is being opened."""


class Reading(Protocol):
    """What the command reads: a subscription, or a topic from some place on."""

    @property
    def consumer(self) -> Consumer: ...

    async def ends(self) -> dict[int, int]:
        """Return the present end of each segment that has records left."""

    async def on_idle(self, ends: dict[int, int]) -> None:
        """Remove the ends that will not be reached here."""

    def leading(self, batch: ReceivedBatch) -> int:
        """Return how many records at the begin of this batch are not wanted."""

    def ack(self, segment: int, offset: int) -> None:
        """Ack everything below `offset`."""


class Subscribed:
    """Reads what is left of a subscription, and acks it."""

    def __init__(self, client: Client, topic: str, subscription: str, consumer: StreamConsumer) -> None:
        self.consumer: Final = consumer
        self._client = client
        self._topic = topic
        self._subscription = subscription

    async def ends(self) -> dict[int, int]:
        """Find the end of each segment. Wait for segments that no broker serves: their records must not be left out."""

        async def ends() -> dict[int, int]:
            layout = (await self._client.routing.topic(self.consumer.topic)).by_id
            segments = await self._progress()
            if missing := sorted(layout.keys() - segments.keys()):
                raise NotServing(f"segment {missing[0]} of {self._topic} is not served by the broker that was asked")
            return {segment: each["end"] for segment, each in segments.items() if not _is_consumed(each, each["end"])}

        return await retrying(ends, asyncio.get_running_loop().time() + SERVED_S, self._client.backoff())

    async def on_idle(self, ends: dict[int, int]) -> None:
        """Leave out what other consumers of the subscription have consumed."""
        for segment, each in (await self._progress()).items():
            if _is_consumed(each, ends.get(segment, 0)):
                ends.pop(segment, None)

    def leading(self, batch: ReceivedBatch) -> int:  # noqa: ARG002 (a subscription begins exactly at its cursor)
        return 0

    def ack(self, segment: int, offset: int) -> None:
        self.consumer.mark_acked(segment, offset)

    async def _progress(self) -> dict[int, dict[str, int]]:
        found = await self._client.admin.subscription(self._topic, self._subscription)
        return {int(segment): each for segment, each in found["segments"].items()}


class Looking:
    """Reads a topic from some place on, and leaves nothing on the brokers."""

    def __init__(self, consumer: CheckpointConsumer, ends: dict[int, int], since_us: int | None) -> None:
        self.consumer: Final = consumer
        self._ends = ends
        self._since_us = since_us
        self._begun: set[int] = set()
        """Segments of which a record of the wanted time was seen."""

    async def ends(self) -> dict[int, int]:
        return dict(self._ends)

    async def on_idle(self, ends: dict[int, int]) -> None:
        pass

    def leading(self, batch: ReceivedBatch) -> int:
        """Count the records before the wanted time: reading begins with the batch that holds the first record of it."""
        if self._since_us is None or batch.segment in self._begun:
            return 0
        times = batch.columns(("timestamp",)).column(0).cast("int64").to_pylist()
        before = next((number for number, time_us in enumerate(times) if time_us >= self._since_us), len(times))
        if before < len(times):
            self._begun.add(batch.segment)
        return before

    def ack(self, segment: int, offset: int) -> None:
        pass


def _is_consumed(progress: dict[str, int], end: int) -> bool:
    """Whether the subscription has nothing before `end`; retention may have deleted the rest of a sealed segment."""
    return progress["offset"] >= end or bool(progress.get("drained"))


@asynccontextmanager
async def subscribed(client: Client, topic: str, subscription: str, start: str) -> AsyncIterator[Reading]:
    async with client.stream_consumer(topic, subscription, start=start) as consumer:
        yield Subscribed(client, topic, subscription, consumer)


@asynccontextmanager
async def looking(client: Client, topic: str, start: StartPoint, segments: Sequence[int]) -> AsyncIterator[Reading]:
    since_us = start.time_us if isinstance(start, AtTime) else None
    request = encode(PositionsRequest(TopicName.parse(topic).path, since_us))

    async def positions() -> Positions:
        link = await client.pool.any()
        return await link.ask(Kind.POSITIONS, request, Positions, client.timeout_s)

    found = await retrying(positions, asyncio.get_running_loop().time() + SERVED_S, client.backoff())
    by_id = {each.segment: each for each in found.segments}
    if missing := sorted(set(segments) - by_id.keys()):
        raise SegmentNotFound(f"{topic} has no segment {missing[0]}; it has {', '.join(map(str, sorted(by_id)))}")
    chosen = [by_id[segment] for segment in segments or by_id]
    first = {each.segment: first_offset(start, each) for each in chosen}
    ends = {each.segment: each.end for each in chosen if first[each.segment] < each.end}
    async with client.checkpoint_consumer(topic, start=first) as consumer:
        yield Looking(consumer, ends, since_us)
