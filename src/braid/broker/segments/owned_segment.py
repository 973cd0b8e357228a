"""A segment as its owner serves it: its log, its cursors, its publishers and its readers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Final

from braid.broker.cursors.cursors import Cursors
from braid.broker.error_mapping import to_client
from braid.broker.queues.segment_queues import SegmentQueues
from braid.broker.replicas.replication import Replication
from braid.broker.segments.delivery import DeliveryChannel
from braid.broker.segments.publish import PublishQueue
from braid.broker.segments.read_grants import ReadGrants
from braid.model.errors import BraidError
from braid.model.ids import Offset
from braid.model.log.epochs import EpochStarts
from braid.model.log.replication import FollowerStatus
from braid.model.names import SegmentName
from braid.model.ownership import Ownership
from braid.model.topic import Durability, Topic
from braid.storage.retention import RetentionPolicy
from braid.storage.segment import SegmentStorage

_log: Final = logging.getLogger(__name__)


FOLLOWERS_S: Final = 2.0
"""How long a segment that is being closed waits for its followers. Producers send again what was not confirmed."""
NOTE_CONSUMED_US: Final = 3_600_000_000
"""How old the stored time of a subscription may be that has consumed everything."""


class SegmentRetention:
    """What a segment's topic lets retention delete, and what its subscriptions hold back; the housekeeper asks."""

    def __init__(
        self,
        name: SegmentName,
        storage: SegmentStorage,
        cursors: Cursors,
        topic: Callable[[], Topic | None],
        now_us: Callable[[], int],
        newer_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """`newer_bytes` returns how much the segments hold that came after this one."""
        self.held: dict[str, int] = {}
        """By subscription: bytes that have outlived the policy and wait for it. Known from the last round."""
        self._name = name
        self._storage = storage
        self._cursors = cursors
        self._topic = topic
        self._now_us = now_us
        self._newer_bytes = newer_bytes
        self._forgotten: set[str] = set()
        """Subscriptions that retention no longer waits for. The log has said so, once."""

    def policy(self) -> RetentionPolicy:
        topic = self._topic()
        if topic is None:
            return RetentionPolicy()
        policies = topic.policies
        max_bytes = policies.retention_bytes
        return RetentionPolicy(
            max_age_s=policies.retention_ms / 1000 if policies.retention_ms is not None else None,
            max_bytes=max(0, max_bytes - self._newer_bytes()) if max_bytes is not None else None,
            delete_unconsumed=policies.retention_ignores_subscriptions,
        )

    def needed_from(self) -> Offset | None:
        """Return the first offset that retention has to keep for a subscription."""
        self._cursors.note_drained()  # The last round may have deleted all that a subscription had before it.
        policy, topic = self.policy(), self._topic()
        held = {} if policy.delete_unconsumed else self._storage.held_back(policy, self._cursors.all())
        waits_ms = topic.policies.retention_waits_for_subscriptions_ms if topic is not None else None
        if waits_ms is None:
            self.held = held
            return self._cursors.lowest()
        now_us = self._now_us()
        moved_since = now_us - waits_ms * 1000
        self._cursors.note_consumed(now_us - NOTE_CONSUMED_US)
        forgotten = {name for name, moved_at in self._cursors.all_moved_at().items() if moved_at < moved_since}
        self.held = {name: size for name, size in held.items() if name not in forgotten}
        newly = (held.keys() & forgotten) - self._forgotten
        for name in newly:
            _log.warning(
                "%s: retention does not wait for subscription %s any more, which has not moved for %d s: records that "
                "it has not consumed are deleted",
                self._name, name, (now_us - self._cursors.moved_at(name)) // 1_000_000,
            )  # fmt: skip
        self._forgotten = (self._forgotten & forgotten) | newly
        return self._cursors.lowest(moved_since)


class OwnedSegment:
    def __init__(
        self,
        name: SegmentName,
        topic: Topic,
        record: Ownership,
        storage: SegmentStorage,
        cursors: Cursors,
        queues: SegmentQueues,
        publishes: PublishQueue,
        retention: SegmentRetention,
        on_failure: Callable[[OwnedSegment, BraidError], None],
        replication: Replication | None = None,
    ) -> None:
        self.name: Final = name
        self.topic_id: Final = topic.id
        self.epoch: Final = record.epoch
        self.storage: Final = storage
        self.cursors: Final = cursors
        self.queues: Final = queues
        self.publishes: Final = publishes
        self.retention: Final = retention
        self.replication: Final = replication
        """How the log gets to its followers; None: the segment is not replicated."""
        self.inherited = bool(record.inherited) or storage.log.end > 0
        """Whether the log has records, or has begun with its parents' producer tables."""
        self.serving = True
        self._exports_end = False
        self.takes_publishes = False
        """Whether publishes go to the log: the layout has the segment. Of a SEALED one, the log has ended and only
        answers retries (I6)."""
        self.follow_layout(topic)
        self.read_grants: Final = ReadGrants()
        self._channels: dict[DeliveryChannel, None] = {}
        self._delivered_bytes = 0
        """By channels that have ended."""
        self._on_failure = on_failure
        # Consumers hear of a rise before producers: they get new records, producers only the confirm of their own.
        storage.log.confirmed.follow(self._on_confirmed, first=True)

    @property
    def followers(self) -> tuple[FollowerStatus, ...]:
        """How far the copies of other brokers are; empty: the segment is not replicated."""
        return self.replication.followers if self.replication is not None else ()

    def follow_layout(self, topic: Topic | None) -> None:
        """Take publishes as the topic's layout and policies say; None if there is no topic any more."""
        self.takes_publishes = False
        if self.serving and topic is not None and topic.id == self.topic_id:
            self.publishes.policies = topic.policies
            info = topic.layout.segments.get(self.name.id)
            if info is not None:
                can_judge = self.inherited or not info.parent_ids  # What was stored before (I10).
                self.takes_publishes = self.storage.log.sealed or (info.is_active and can_judge)
                if self.storage.log.sealed and not info.is_active and not self._exports_end:
                    self._exports_end = True  # Not before the children take publishes: producers wait for them.
                    self.storage.export_end()
            self.queues.pump()  # The limit of messages' age may be another one.

    async def flush(self) -> None:
        """Return when everything that was taken is confirmed, or when followers do not confirm it for FOLLOWERS_S."""
        log = self.storage.log
        await log.flush()
        if self.replication is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FOLLOWERS_S):
                    await log.confirmed.reached(log.end)

    async def stop_replication(self) -> None:
        if self.replication is not None:
            await self.replication.stop()

    def stop_serving(self) -> None:
        self.serving = False
        self.takes_publishes = False

    @property
    def earliest(self) -> Offset:
        return self.storage.earliest

    @property
    def end(self) -> Offset:
        """The first offset that consumers may not see yet."""
        return Offset(self.storage.log.confirmed.value)

    @property
    def epochs(self) -> EpochStarts:
        """Which epoch has written which offsets: by this the segment judges the positions of readers."""
        return self.storage.catalog.epochs

    @property
    def durability(self) -> Durability:
        return self.storage.log.config.durability

    @property
    def failure(self) -> BraidError | None:
        """Why the log, or the journal of a queue, takes nothing more; None while they do."""
        return self.storage.log.failure or self.queues.failure

    @property
    def sealed(self) -> bool:
        """Whether nothing will ever follow `end`."""
        return self.storage.ended

    @property
    def delivered_bytes(self) -> int:
        """Bytes sent to all consumers since the segment was opened."""
        return self._delivered_bytes + sum(channel.delivered_bytes for channel in self._channels)

    async def sync_to(self, offset: Offset) -> None:
        """Return when everything below `offset` is synced: no cursor is stored beyond the synced end. A log that syncs
        only now and then is synced for this."""
        if offset > self.storage.log.synced.value:
            await self.storage.log.flush()

    async def offset_at_time(self, timestamp_us: int) -> Offset:
        """Find the first offset of the first batch with a record at or after this time; without one, the end."""
        offset = await self.storage.sources.offset_at_time(timestamp_us)
        reader = self.storage.reader(max(offset, self.earliest))
        while batches := await reader.read_available():
            for header, _ in batches:
                if header.max_timestamp >= timestamp_us:
                    return header.base_offset
        return self.end

    async def replace_chunks(self, old: Sequence[str], new: str) -> int:
        await self.storage.replace_chunks(old, new)
        return len(self.storage.catalog.chunks)

    def has_outlived_retention(self) -> bool:
        """Tell whether the log has ended and nothing of it needs to be kept any more."""
        return self.storage.has_outlived(self.retention.policy(), self.retention.needed_from())

    def producer_rows(self) -> bytes:
        return self.storage.log.producer_rows()

    async def check_can_end(self) -> None:
        """Raise the error of a log that could not end: it has failed, its disk is full, or replicas are missing."""
        await self.storage.log.prepare_seal()

    def add_channel(self, channel: DeliveryChannel) -> None:
        self._channels[channel] = None
        channel.pump()

    def forget_channel(self, channel: DeliveryChannel) -> None:
        if channel in self._channels:
            del self._channels[channel]
            self._delivered_bytes += channel.delivered_bytes

    def close_channels(self, subscription: str, closed_code: str, message: str) -> None:
        """End the channels of a subscription. Unless the code is that of a final error, they may be opened again."""
        error = BraidError.by_code.get(closed_code)
        retriable = error is None or error.retriable
        for channel in [each for each in self._channels if each.subscription == subscription]:
            channel.close(closed_code, message, retriable=retriable)
        self.queues.close_channels(closed_code, message, retriable=retriable, subscription=subscription)

    def fail_channels(self, error: BraidError) -> None:
        for channel in list(self._channels):
            channel.fail(error)
        told = to_client(error)
        self.queues.close_channels(told.code, str(told), retriable=told.retriable)

    async def store_cursors(self, *, handing_over: bool) -> None:
        """Take no more acks, and store the cursors. If another broker is to go on, the states of queues, too."""
        states = await self.queues.stop()
        await self.cursors.stop(states if handing_over else None)

    def _on_confirmed(self) -> None:
        """Deliver after a rise of the watermark, and report its failure. The log's commit calls this, so the error of a
        channel must not leave it."""
        for channel in list(self._channels):
            try:
                channel.deliver()
            except Exception:
                _log.exception("a channel of %s broke", self.name)
                channel.drop()
        try:
            self.queues.pump()
        except Exception:
            _log.exception("the queues of %s broke", self.name)
        error = self.storage.log.confirmed.error
        if error is not None and self.sealed:
            self.cursors.note_drained()
        elif error is not None and self.serving:
            self._on_failure(self, error)
