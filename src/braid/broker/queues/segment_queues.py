"""All queues of one segment, on its owner: begun with their subscriptions, set to other places, removed, handed over.

**Evidence.** What is known of a queue lies in this broker's own journal (after a vote, evidence.py has brought there
what other replicas know), and in the state that an earlier owner has stored with the cursor when it handed the segment
over. Both are joined (model/queue/events.py). It need not be known which of them knows more.

**A segment whose log has ended, and that is in chunks**, is clean: any broker may go on with it. While it has a queue
that is not drained, that is not so: acks are on the disks of its owner and its followers only. `keep_record`
tells the record before a queue is opened, and `release_record` when all are drained.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, Protocol

from braid.broker.metrics import TopicMetrics
from braid.broker.queues.queue_counts import QueueCounts
from braid.broker.queues.segment_queue import QueueCursors, SegmentQueue
from braid.model.errors import BraidError, NotServing
from braid.model.ids import Epoch
from braid.model.names import SegmentName
from braid.model.queue.events import QueueEvents, QueueImage, QueueSnapshot, joined, pack_state, unpack_state
from braid.ports.clock import Clock
from braid.ports.disk import Disk
from braid.ports.tasks import all_of
from braid.storage.queue_journal import QueueJournal, folder_of, remove_others
from braid.storage.segment import SegmentStorage
from braid.wire.operations import RESET

_log: Final = logging.getLogger(__name__)

OnEvents = Callable[[SegmentQueue, int, QueueEvents | QueueSnapshot], None]


class CursorsOfQueues(QueueCursors, Protocol):
    @property
    def queues(self) -> frozenset[str]: ...

    def handed_over(self, subscription: str) -> bytes: ...

    def is_stored_drained(self, subscription: str) -> bool: ...

    def forget_state(self, subscription: str) -> None: ...


async def _nothing() -> None:
    return None


class SegmentQueues:
    def __init__(
        self,
        name: SegmentName,
        epoch: Epoch,
        storage: SegmentStorage,
        cursors: CursorsOfQueues,
        *,
        disk: Disk,
        clock: Clock,
        metrics: TopicMetrics,
        may_confirm: Callable[[], bool],
        agreed: Callable[[int, Mapping[str, int]], int] = lambda own, _: own,
        message_ttl_us: Callable[[], int | None] = lambda: None,
        keep_record: Callable[[], Awaitable[None]] = _nothing,
        release_record: Callable[[], None] = lambda: None,
        on_failure: Callable[[BraidError], None] = lambda _: None,
    ) -> None:
        self._name = name
        self._epoch = epoch
        self._storage = storage
        self._cursors = cursors
        self._disk = disk
        self._clock = clock
        self._metrics = metrics
        self._may_confirm = may_confirm
        self._agreed = agreed
        self._message_ttl_us = message_ttl_us
        self._keep_record = keep_record
        self._release_record = release_record
        self._on_failure = on_failure
        self._queues: dict[str, SegmentQueue] = {}
        self._first: dict[str, int] = {}
        """By subscription: the number of the first checkpoint."""
        self._lock = asyncio.Lock()
        self.loaded = False
        self._states: dict[str, bytes] | None = None
        """When all queues are stopped: what is known of them."""
        self.on_events: OnEvents | None = None
        """Called with what the journals take, and the number of it: followers are sent it."""

    async def load(self) -> None:
        """Open the queues of all subscriptions that are queues, and remove the journals of those that were deleted."""
        for subscription in sorted(self._cursors.queues):
            await self._open(subscription, after_another=True)
        await self._remove_journals()
        self.loaded = True

    async def begin(self, subscription: str) -> None:
        """Open the queue of a subscription that has just got its cursor, if it is one and is not open."""
        if subscription in self._cursors.queues:
            async with self._lock:
                if subscription not in self._queues:
                    await self._open(subscription)

    @property
    def names(self) -> frozenset[str]:
        """The subscriptions that have a queue here, open or not."""
        return self._cursors.queues

    def find(self, subscription: str) -> SegmentQueue | None:
        return self._queues.get(subscription)

    def all(self) -> list[SegmentQueue]:
        return list(self._queues.values())

    def get(self, subscription: str) -> SegmentQueue:
        queue = self._queues.get(subscription)
        if queue is None:
            raise NotServing(f"subscription {subscription} has no queue on segment {self._name.id} yet")
        return queue

    @property
    def failure(self) -> BraidError | None:
        """Why the journal of a queue has failed; None if none has."""
        return next(filter(None, (queue.failure for queue in self._queues.values())), None)

    @property
    def are_drained(self) -> bool:
        """Tell whether no queue has anything left of a log that has ended, and that is stored. A queue that is not open
        yet may have."""
        opened = self._queues
        return self.names <= opened.keys() and all(queue.is_drained for queue in opened.values())

    @property
    def are_stored_drained(self) -> bool:
        """Tell whether `are_drained`, and the store knows: then no broker needs a journal any more."""
        return self.are_drained and all(map(self._cursors.is_stored_drained, self._queues))

    def release_if_drained(self) -> None:
        """Let any broker go on with a log that has ended, if no queue has anything left of it."""
        if self._storage.ended and self.are_drained:
            self._release_record()

    def counts(self) -> dict[str, QueueCounts]:
        return {subscription: queue.counts() for subscription, queue in self._queues.items()}

    async def check(self) -> list[str]:
        """Return what does not agree between queues, their journals and the log."""
        return [finding for queue in self.all() for finding in await queue.check()]

    def pump(self) -> None:
        for queue in self.all():
            queue.pump()

    def recount(self) -> None:
        for queue in self.all():
            queue.recount()

    def follow_cursor(self, subscription: str) -> None:
        """Set a queue to the place to which its cursor was set, with the state that the cursor has there."""
        queue, offset = self._queues.get(subscription), self._cursors.offset(subscription)
        placement, state = self._cursors.placement(subscription), self._cursors.handed_over(subscription)
        if queue is not None and offset is not None and queue.placement != placement:
            # Also if the call that has placed the cursor is about to do this: no old channel gets anything of the new
            # placement.
            queue.close_channels(RESET, f"subscription {subscription} was set to offset {offset}", retriable=True)
            queue.reset(joined(placement, offset, [QueueImage.of(unpack_state(state)) if state else None]))
            self._first[subscription] = queue.last_number

    async def remove(self, subscription: str) -> None:
        """End the queue of a deleted subscription, and remove its journal here and on followers."""
        async with self._lock:
            if (queue := self._queues.pop(subscription, None)) is not None:
                await queue.stop()
                await self._remove_journals()
                self._tell(queue, queue.last_number, queue.snapshot())
                self.release_if_drained()

    def close_channels(self, code: str, message: str, *, retriable: bool, subscription: str | None = None) -> None:
        for queue in self.all():
            if subscription in (None, queue.subscription):
                queue.close_channels(code, message, retriable=retriable)

    async def stop(self) -> dict[str, bytes]:
        """Stop all queues; return what the next owner is to know of each. Stopping twice is fine, also after
        a stop that was cancelled."""
        async with self._lock:
            if self._states is None:
                stopped = await all_of(queue.stop() for queue in self._queues.values())
                self._states = {name: pack_state(each, self._epoch) for name, each in zip(self._queues, stopped)}
            return self._states

    async def _open(self, subscription: str, *, after_another: bool = False) -> None:
        """Open a queue, perhaps `after_another` owner that had consumers."""
        if self._states is not None:
            raise NotServing(f"{self._name} is being handed over")
        await self._keep_record()
        placement, base = self._cursors.placement(subscription), self._cursors.offset(subscription)
        if base is None:
            raise NotServing(f"subscription {subscription} has no cursor on segment {self._name.id}")
        journal = await QueueJournal.open(self._disk, folder_of(self._storage.log.folder, subscription))
        state = self._cursors.handed_over(subscription)
        handed_over = unpack_state(state) if state else None
        image = joined(placement, base, [journal.image, QueueImage.of(handed_over) if handed_over else None])
        end = self._storage.log.confirmed.value
        if image.snapshot().end > end:
            image = _up_to(image, end)
        queue = SegmentQueue(
            self._name,
            subscription,
            self._epoch,
            self._storage,
            self._cursors,
            journal,
            image,
            disk=self._disk,
            clock=self._clock,
            may_confirm=self._may_confirm,
            agreed=self._agreed,
            message_ttl_us=self._message_ttl_us,
            metrics=self._metrics,
            on_failure=self._on_failure,
            held_back=_held_back(handed_over, self._epoch, self._storage.log.end) if after_another else (),
        )
        queue.on_events.append(lambda number, events: self._tell(queue, number, events))
        queue.confirmed.follow(lambda: self._on_confirmed(queue))
        self._queues[subscription] = queue
        self._first[subscription] = queue.last_number
        self._tell(queue, queue.last_number, queue.snapshot())

    async def _remove_journals(self) -> None:
        """Remove the journals of deleted subscriptions. What stays after a failure is removed when the segment is
        opened the next time."""
        try:
            await remove_others(self._disk, self._storage.log.folder, self.names)
        except BraidError as error:
            _log.warning("journals of deleted queues of %s are not removed yet: %s", self._name, error)

    def _tell(self, queue: SegmentQueue, number: int, events: QueueEvents | QueueSnapshot) -> None:
        if self.on_events is not None:
            self.on_events(queue, number, events)

    def _on_confirmed(self, queue: SegmentQueue) -> None:
        """Forget the state in the store when enough disks have the first checkpoint."""
        if queue.confirmed.value >= self._first[queue.subscription]:
            self._cursors.forget_state(queue.subscription)
            self.release_if_drained()


def _held_back(handed_over: QueueSnapshot | None, epoch: int, end: int) -> Sequence[tuple[int, int]]:
    """Return the ranges of messages that consumers may hold: the last owner has said which, or it was lost."""
    if handed_over is not None and handed_over.epoch == epoch - 1 and handed_over.leased is not None:
        return handed_over.leased
    return [(0, end)]


def _up_to(image: QueueImage, end: int) -> QueueImage:
    """Return the image without what it says of messages that the log does not have (I8)."""
    cut = QueueImage(image.placement, min(image.settled.base, end))
    settled = tuple((start, min(stop, end)) for start, stop in image.settled if start < end)
    cut.apply(QueueEvents(settled, tuple(each for each in image.returned.values() if each.offset < end)))
    return cut
