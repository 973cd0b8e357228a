"""The queue channels of one connection: opened, answered on, closed."""

from __future__ import annotations

import asyncio
from typing import Final

from braid.broker.connections.services import Services, segment_in_layout
from braid.broker.queues.channel import QueueChannel, QueueSettings
from braid.broker.queues.segment_queue import SegmentQueue
from braid.broker.segments.segment_access import follow_cursor
from braid.model.errors import (
    InvalidArgument,
    NotServing,
    Overloaded,
    ProtocolError,
    SubscriptionKindConflict,
    TopicNotFound,
)
from braid.model.names import TopicName, check_name
from braid.model.subscription import Placing, SubscriptionKind
from braid.wire.connection import Connection
from braid.wire.operations import QueueAnswer, QueueAnswered, QueueOpen, QueueOpened, encode

MAX_PREFETCH: Final = 100_000
MAX_CONSUMER_CHARS: Final = 200


class QueueChannels:
    def __init__(self, services: Services, connection: Connection) -> None:
        self._services = services
        self._connection = connection
        self._channels: dict[int, tuple[QueueChannel, SegmentQueue]] = {}

    def __len__(self) -> int:
        return len(self._channels)

    def __contains__(self, number: int) -> bool:
        return number in self._channels

    async def open(self, request: QueueOpen, topic: TopicName) -> bytes:
        """Begin to hand out messages of a segment's queue; the caller has checked that the peer may consume."""
        if not 0 < request.channel < 1 << 32 or request.channel in self._channels:
            raise ProtocolError(f"channel {request.channel} cannot be opened: take a new number from 1 on")
        _check_prefetch(request.prefetch)
        self._check_room()
        name = check_name("subscription", request.subscription)
        subscription = await self._services.subscriptions.get(topic, name)
        if subscription.kind is not SubscriptionKind.QUEUE:
            raise SubscriptionKindConflict(
                f"subscription {name} of {topic} is a {subscription.kind.value} subscription, it cannot be used as a "
                f"queue one; use another name"
            )
        found = self._services.topics.get(topic.path)
        if found.id != request.topic_id:
            raise TopicNotFound(f"topic {topic.path} was deleted and created again since it was looked up")
        segment = segment_in_layout(self._services, topic.path, found, request.segment)
        offset = segment.cursors.offset(name)
        if offset is None:
            raise NotServing(f"subscription {name} has no cursor on segment {request.segment} yet")
        if name not in segment.cursors.queues:  # Another call has created the cursor, as that of a stream.
            await segment.cursors.place(Placing(name, offset, queue=True))
            await follow_cursor(segment, name)
        queue = segment.queues.get(name)
        if self._connection.closing or request.channel in self._channels:
            raise NotServing("the connection is closing")
        self._check_room()  # Others may have been opened meanwhile.
        channel = QueueChannel(
            request.channel,
            self._connection,
            name,
            request.consumer[:MAX_CONSUMER_CHARS],
            request.prefetch,
            metrics=self._services.metrics.topic(topic.path),
            on_end=self._on_end,
        )
        policies = subscription.queue
        settings = QueueSettings(policies.ack_timeout_ms * 1_000, policies.max_deliveries)
        lost = queue.attach(channel, settings, request.holds if request.placement == queue.placement else ())
        self._channels[request.channel] = (channel, queue)
        return encode(QueueOpened(queue.placement, policies.ack_timeout_ms, policies.dead_letter_topic, tuple(lost)))

    def _check_room(self) -> None:
        if len(self._channels) >= self._services.limits.max_channels:
            raise Overloaded(f"this connection has {len(self._channels)} queue channels, as many as it may have")

    def answer(self, request: QueueAnswer) -> tuple[asyncio.Future[None], bytes]:
        """Take what a consumer says about its messages. Returns a future that is done when this is stored, and the
        reply to send then."""
        found = self._channels.get(request.channel)
        if found is None:
            raise NotServing(f"channel {request.channel} is closed: open another one, and answer there")
        channel, queue = found
        if request.prefetch:
            _check_prefetch(request.prefetch)
            channel.prefetch = request.prefetch
        channel.leaving = channel.leaving or request.leaving
        number, stale = queue.answer(request)
        return queue.confirmed.reached(number), encode(QueueAnswered(tuple(stale)))

    def close(self, number: int) -> bool:
        """Close a channel because its consumer leaves; False if there is no such queue channel."""
        found = self._channels.pop(number, None)
        if found is not None:
            found[0].ended = True
            found[1].detach(found[0].key, leave=True)
        return found is not None

    def pump(self) -> None:
        """Send what could not be sent while the connection took no more."""
        for _, queue in list(self._channels.values()):
            queue.pump()

    def lost(self) -> None:
        """Hear that the connection is gone: leases run on, the consumers may be back."""
        for channel, _ in list(self._channels.values()):
            channel.drop()

    def _on_end(self, channel: QueueChannel) -> None:
        found = self._channels.pop(channel.number, None)
        if found is not None:
            found[1].detach(channel.key, leave=False)


def _check_prefetch(prefetch: int) -> None:
    if not 1 <= prefetch <= MAX_PREFETCH:
        raise InvalidArgument(f"a prefetch of {prefetch} messages is not allowed: give 1 to {MAX_PREFETCH}")
