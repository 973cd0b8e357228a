"""What `braid consume` reads: a subscription, a queue, or a topic from some place on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

from braid.cli.terminal.record_lines import Records
from braid.cli.terminal.start_point import AtTime, StartPoint, first_offset
from braid.client.retry import retrying
from braid.model.errors import NotServing, SegmentNotFound, SubscriptionExists
from braid.model.message import QueueMessage
from braid.model.names import TopicName
from braid.wire.operations import Kind, Positions, PositionsRequest, encode

if TYPE_CHECKING:
    from braid.client.client import Client
    from braid.client.consuming.checkpoint import CheckpointConsumer
    from braid.client.consuming.delivery import ReceivedBatch
    from braid.client.consuming.queue import QueueConsumer
    from braid.client.consuming.stream import StreamConsumer

SERVED_S: Final = 10.0
"""How long to wait for a segment that is being opened."""
GROUP: Final = 100
"""The most messages of a queue that are printed together."""
NEVER: Final = 1 << 62


Ack = Callable[[int], None]
"""Acks so many records of a delivery, the first ones."""


class Delivered(Records, Protocol):
    """Records that came together."""

    @property
    def segment(self) -> int: ...

    @property
    def base_offset(self) -> int: ...

    @property
    def next_offset(self) -> int: ...

    def __len__(self) -> int: ...


class Reading(Protocol):
    """What the command reads: a subscription, a queue, or a topic from some place on."""

    async def receive(self, timeout: float | None, limit: int | None) -> Delivered | None:
        """Return the next records, or None if none came in time. The command wants no more than `limit`."""

    async def ends(self) -> dict[int, int]:
        """Return the present end of each segment that has records left."""

    async def on_idle(self, ends: dict[int, int]) -> None:
        """Remove the ends that will not be reached here."""

    def leading(self, batch: Delivered) -> int:
        """Return how many records at the begin of this batch are not wanted."""

    def acker(self, batch: Delivered, first: int) -> Ack:
        """Return what acks records of this batch, from its record number `first` on."""


class Subscribed:
    """Reads what is left of a subscription, and acks it."""

    def __init__(self, client: Client, topic: str, subscription: str, consumer: StreamConsumer) -> None:
        self._consumer = consumer
        self._client = client
        self._topic = topic
        self._subscription = subscription

    async def receive(self, timeout: float | None, limit: int | None) -> ReceivedBatch | None:  # noqa: ARG002
        return await self._consumer.receive_batch(timeout=timeout)

    async def ends(self) -> dict[int, int]:
        """Find the end of each segment. Wait for segments that no broker serves: their records must not be left out."""

        async def ends() -> dict[int, int]:
            layout = (await self._client.routing.topic(self._consumer.topic)).by_id
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

    def leading(self, batch: Delivered) -> int:  # noqa: ARG002 (a subscription begins exactly at its cursor)
        return 0

    def acker(self, batch: Delivered, first: int) -> Ack:
        segment, offset = batch.segment, batch.base_offset + first
        return lambda count: self._consumer.mark_acked(segment, offset + count)

    async def _progress(self) -> dict[int, dict[str, int]]:
        found = await self._client.admin.subscription(self._topic, self._subscription)
        return {int(segment): each for segment, each in found["segments"].items()}


class QueueRecords:
    """Messages of a queue that came together. They have no order, so they stand for a segment that does not exist."""

    segment: Final = -1
    base_offset: Final = 0

    def __init__(self, messages: list[QueueMessage]) -> None:
        self._messages = messages

    @property
    def next_offset(self) -> int:
        return len(self._messages)

    def __len__(self) -> int:
        return len(self._messages)

    def values(self) -> list[bytes]:
        return [message.value for message in self._messages]

    def messages(self) -> list[QueueMessage]:
        return self._messages

    def columns(self, names: tuple[str, ...]) -> Any:
        import pyarrow as pa

        return pa.table(
            {name: pa.array([getattr(each, name) for each in self._messages], pa.binary()) for name in names}
        )


class Queue:
    """Reads a queue, and acks each message that was printed."""

    def __init__(self, client: Client, topic: str, subscription: str, consumer: QueueConsumer) -> None:
        self._client = client
        self._topic = topic
        self._subscription = subscription
        self._consumer = consumer
        self._empty = False
        """Whether nothing was ready when the command last looked, and nothing came since."""

    async def receive(self, timeout: float | None, limit: int | None) -> QueueRecords | None:
        most = GROUP if limit is None else min(limit, GROUP)
        messages = await self._consumer.receive_many(most, timeout)
        self._empty = self._empty and not messages
        return QueueRecords(messages) if messages else None

    async def ends(self) -> dict[int, int]:
        """Return one end that is never reached: `on_idle` knows when nothing is left."""
        return {QueueRecords.segment: NEVER}

    async def on_idle(self, ends: dict[int, int]) -> None:
        """End when nothing is ready, now and the last time: what is on its way here is not ready any more."""
        found = await self._client.admin.subscription(self._topic, self._subscription)
        empty = not found["unavailable"] and not found["queue"]["ready"]
        if empty and self._empty:
            ends.clear()
        self._empty = empty

    def leading(self, batch: Delivered) -> int:  # noqa: ARG002 (a queue delivers what it has not settled)
        return 0

    def acker(self, batch: Delivered, first: int) -> Ack:
        messages = batch.messages()[first:]

        def ack(count: int) -> None:
            for message in messages[:count]:
                assert isinstance(message, QueueMessage)
                self._consumer.note_ack(message)

        return ack


class Looking:
    """Reads a topic from some place on, and leaves nothing on the brokers."""

    def __init__(self, consumer: CheckpointConsumer, ends: dict[int, int], since_us: int | None) -> None:
        self._consumer = consumer
        self._ends = ends
        self._since_us = since_us
        self._begun: set[int] = set()
        """Segments of which a record of the wanted time was seen."""

    async def receive(self, timeout: float | None, limit: int | None) -> ReceivedBatch | None:  # noqa: ARG002
        return await self._consumer.receive_batch(timeout=timeout)

    async def ends(self) -> dict[int, int]:
        return dict(self._ends)

    async def on_idle(self, ends: dict[int, int]) -> None:
        pass

    def leading(self, batch: Delivered) -> int:
        """Count the records before the wanted time: reading begins with the batch that holds the first record of it."""
        if self._since_us is None or batch.segment in self._begun:
            return 0
        times = batch.columns(("timestamp",)).column(0).cast("int64").to_pylist()
        before = next((number for number, time_us in enumerate(times) if time_us >= self._since_us), len(times))
        if before < len(times):
            self._begun.add(batch.segment)
        return before

    def acker(self, batch: Delivered, first: int) -> Ack:  # noqa: ARG002 (nothing is acked)
        return lambda _: None


def _is_consumed(progress: dict[str, int], end: int) -> bool:
    """Whether the subscription has nothing before `end`; retention may have deleted the rest of a sealed segment."""
    return progress["offset"] >= end or bool(progress.get("drained"))


@asynccontextmanager
async def subscribed(client: Client, topic: str, subscription: str, start: str) -> AsyncIterator[Reading]:
    async with client.stream_consumer(topic, subscription, start=start) as consumer:
        yield Subscribed(client, topic, subscription, consumer)


@asynccontextmanager
async def queued(
    client: Client, topic: str, subscription: str, start: str, count: int | None
) -> AsyncIterator[Reading]:
    """Consume a queue, which is created if it is absent. No more messages than `count` are taken from others."""
    with contextlib.suppress(SubscriptionExists):
        await client.admin.create_subscription(topic, subscription, kind="queue", start=start)
    prefetch = None if count is None else min(count, GROUP)
    async with client.queue_consumer(topic, subscription, prefetch=prefetch) as consumer:
        yield Queue(client, topic, subscription, consumer)


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
