"""How the events of a segment's queues get from its owner to its followers.

One task for each follower sends what the owner's journals take: a checkpoint first, then events, one request at a time.
What comes while a request is under way goes together in the next one. A follower that is far behind is sent a
checkpoint instead. Each answer says that the follower's disk has it, and the queue counts that
(`SegmentQueue.on_held`).

After a failure the follower counts no more, and is sent a checkpoint again, in another session: what the owner has
given up may still come, and is refused. There is nothing to compare before: the owner knows everything that a follower
may know, because the vote that made it owner has asked (queues/evidence.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, Final

from braid.broker.queues.segment_queue import SegmentQueue
from braid.broker.queues.segment_queues import SegmentQueues
from braid.broker.replicas.queue_copies import QUEUE_APPEND, QUEUE_BEGIN, QUEUE_KEEP
from braid.broker.replicas.stream import Call
from braid.model.errors import BraidError
from braid.model.queue.events import QueueEvents, QueueSnapshot, all_events, encode

MAX_WAITING: Final = 1_000
"""So many groups of events of one queue wait for a follower; then a checkpoint takes their place."""
ANSWER_S: Final = 10.0
FIRST_PAUSE_S: Final = 0.05
MAX_PAUSE_S: Final = 5.0

_log: Final = logging.getLogger(__name__)


class QueueStream:
    """To one follower. One task sends (`run`)."""

    def __init__(
        self,
        follower: str,
        queues: SegmentQueues,
        about: dict[str, Any],
        call: Call,
        on_held: Callable[[], None],
        sessions: Iterator[int],
    ) -> None:
        """`sessions` are the numbers of all sessions of this ownership, rising: what comes late is refused by them."""
        self.follower: Final = follower
        self._queues = queues
        self._about = about
        self._call = call
        self._sessions = sessions
        self._session = 0
        self._on_held = on_held
        self._waiting: dict[str, list[tuple[int, QueueEvents]] | None] = {}
        """By subscription: numbers and events that were not sent; None: a checkpoint is to be sent."""
        self._held: dict[str, int] = {}
        self._is_tidy = False
        """Whether the follower has no journals of subscriptions that were deleted."""
        self._more = asyncio.Event()
        self._retry = asyncio.Event()

    def holds_all(self) -> bool:
        """Tell whether the follower's disk has all events that are confirmed."""
        return all(self._held.get(each.subscription, 0) >= max(each.confirmed.value, 1) for each in self._queues.all())

    def on_events(self, queue: SegmentQueue, number: int, events: QueueEvents | QueueSnapshot) -> None:
        waiting = self._waiting.setdefault(queue.subscription, [])
        if isinstance(events, QueueSnapshot) or waiting is None or len(waiting) >= MAX_WAITING:
            self._waiting[queue.subscription] = None
        else:
            waiting.append((number, events))
        self._more.set()

    def on_member(self) -> None:
        """Hear that the follower has registered, or is gone."""
        self._retry.set()

    async def run(self) -> None:
        """Send until cancelled."""
        pause_s = FIRST_PAUSE_S
        try:
            while True:
                self._session = next(self._sessions)
                self._waiting = {queue.subscription: None for queue in self._queues.all()}
                self._is_tidy = False
                self._more.set()
                try:
                    while True:
                        await self._more.wait()
                        self._more.clear()
                        await self._send()
                        pause_s = FIRST_PAUSE_S
                except BraidError as error:
                    _log.info("events of queues are not sent to %s: %s", self.follower, error)
                self._forget()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._retry.wait()
                pause_s = FIRST_PAUSE_S if self._retry.is_set() else min(2 * pause_s, MAX_PAUSE_S)
                self._retry.clear()
        finally:
            self._forget()

    async def _send(self) -> None:
        for subscription in list(self._waiting):
            queue, waiting = self._queues.find(subscription), self._waiting.pop(subscription)
            if queue is None:
                self._held.pop(subscription, None)
                self._is_tidy = False
                continue
            about = {**self._about, "subscription": subscription, "session": self._session}
            if waiting is None:
                number, data = queue.last_number, encode(queue.snapshot())
                await self._call(self.follower, QUEUE_BEGIN, about, payload=[data], timeout_s=ANSWER_S)
            elif waiting:
                number, data = waiting[-1][0], encode(all_events(events for _, events in waiting))
                await self._call(self.follower, QUEUE_APPEND, about, payload=[data], timeout_s=ANSWER_S)
            else:
                continue
            self._held[subscription] = number
            queue.on_held(self.follower, number)
            self._on_held()
        if self._queues.loaded and not self._is_tidy:
            about = {**self._about, "subscriptions": sorted(self._queues.names), "session": self._session}
            await self._call(self.follower, QUEUE_KEEP, about, timeout_s=ANSWER_S)
            self._is_tidy = True

    def _forget(self) -> None:
        """Count nothing more: the follower's disk may be another one when it is back."""
        self._held.clear()
        for queue in self._queues.all():
            queue.on_held(self.follower, 0)
