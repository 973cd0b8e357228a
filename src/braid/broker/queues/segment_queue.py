"""One queue: a subscription's messages of one segment, on the segment's owner.

    log ─ confirmed ─► QueueState.take ─► QueueChannel ─► consumer
                            ▲                                │ acks, nacks
                            └──────── answer ◄───────────────┘
                                        │ events
                                        ▼
                              journal (and followers) ─ confirmed ─► cursor, replies

The order of evidence is: messages, events, memory of clients. A message is handed out when the log has confirmed it. An
ack changes the state in memory immediately, so the consumer's next messages do not wait for a disk. The reply waits
until enough disks have the event (I9). Then the cursor follows: it stands at the first message that is not settled, so
retention, pruning and drained marks know of queues what they know of streams.

Messages travel in the batches that their producers made, because a broker never opens a batch. A channel that has just
got a batch is not sent it again for more of its messages.

Nothing here waits: `pump` hands out what it can, and runs again when the log rises, an answer comes, a lease runs out,
or a batch was read from a file. One task reads files and chunks, if the hot cache does not have the batch.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

from msgspec.structs import replace

from braid.broker.error_mapping import to_client, to_reader
from braid.broker.metrics import TopicMetrics
from braid.broker.queues.channel import QueueChannel, QueueSettings
from braid.broker.queues.queue_counts import QueueCounts
from braid.model.errors import (
    BraidError,
    BrokenInvariant,
    Fenced,
    InvalidArgument,
    LogClosed,
    NotServing,
    SubscriptionNotFound,
)
from braid.model.ids import Epoch, Offset
from braid.model.names import SegmentName
from braid.model.queue.events import MAX_REASON_CHARS, QueueEvents, QueueImage, QueueSnapshot, Returned
from braid.model.queue.state import Answer, QueueState, without
from braid.ports.clock import Clock
from braid.ports.disk import Disk
from braid.ports.tasks import end
from braid.storage.log.watermark import Watermark
from braid.storage.queue_journal import QueueJournal, read_image
from braid.storage.reader import StoredBatch
from braid.storage.segment import SegmentStorage
from braid.wire.operations import END_OF_SEGMENT, QueueAnswer

READ_BYTES: Final = 1 << 20
SHARED_TURN: Final = 32
"""How many messages one of several consumers gets before it is the next one's turn."""
DEADLINE_STEPS: Final = 300
"""A lease is longer than the ack time-out by at most one part of so many: 0.1 s of 30 s."""
TURN_STEPS: Final = 500
"""Batches of one turn of the loop: a limit of age that is set late may settle a million, in 20 µs each."""
READ_AGAIN_S: Final = 1.0
"""After a read has failed."""
LEASE_AGAIN_S: Final = 0.05
"""How often a queue looks whether the lease of its broker was renewed after all."""
MAX_ANSWERED: Final = 100_000
"""The most messages that one answer may tell of."""
CHECKS: Final = 5
"""How often a check looks again because the queue has changed meanwhile."""
MAX_DELAY_US: Final = 366 * 86_400 * 1_000_000
HOLDERS_US: Final = 1_500_000
"""How long a new owner waits for consumers that may hold messages. No client pauses for longer than a second before it
tries to connect again."""
LEASE_BITS: Final = 31
"""Leases of one epoch: msgpack has numbers of 64 bits, and an epoch takes 32."""

_log: Final = logging.getLogger(__name__)


class QueueCursors(Protocol):
    """The cursors of the segment (`Cursors`)."""

    def offset(self, subscription: str) -> Offset | None: ...

    def placement(self, subscription: str) -> int: ...

    def advance(self, subscription: str, offset: Offset) -> bool: ...


class SegmentQueue:
    def __init__(
        self,
        name: SegmentName,
        subscription: str,
        epoch: Epoch,
        storage: SegmentStorage,
        cursors: QueueCursors,
        journal: QueueJournal,
        image: QueueImage,
        *,
        disk: Disk,
        clock: Clock,
        may_confirm: Callable[[], bool],
        agreed: Callable[[int, Mapping[str, int]], int] = lambda own, _: own,
        message_ttl_us: Callable[[], int | None] = lambda: None,
        metrics: TopicMetrics,
        on_failure: Callable[[BraidError], None],
        held_back: Iterable[tuple[int, int]] = (),
    ) -> None:
        """`image` is what all evidence adds up to. `agreed` returns the number that enough replicas hold, of this
        broker's and those of the followers. Messages of the ranges `held_back` may be with consumers that are about to
        come back."""
        self.name: Final = name
        self.subscription: Final = subscription
        self._epoch = epoch
        self._storage = storage
        self._cursors = cursors
        self._journal = journal
        self._disk = disk
        self._clock = clock
        self._may_confirm = may_confirm
        self._agreed = agreed
        self._message_ttl_us = message_ttl_us
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self.placement = image.placement
        self._state = QueueState(
            image.settled,
            self._from_store(image.returned.values()),
            first_lease=(epoch << LEASE_BITS) + 1,
            held_back=held_back,
            held_until=self._now() + HOLDERS_US,
        )
        self.confirmed: Final = Watermark(0)
        """Of the journal's numbers: enough disks have these events."""
        self._held: dict[str, int] = {}
        """By follower: the number up to which its disk has the events."""
        self._bases: deque[tuple[int, int]] = deque()
        """Numbers, and where the cursor goes when they are confirmed."""
        self._channels: dict[int, QueueChannel] = {}
        self._turns: deque[int] = deque()
        """The channels, the one first whose turn it is."""
        self._settings = QueueSettings(30_000_000, 0)
        self._read: list[StoredBatch] = []
        """Batches that were read last, without a gap."""
        self._reading: asyncio.Task[None] | None = None
        self._oldest: tuple[int, int] = (-1, 0)
        """The oldest unsettled offset whose time is known, and the time."""
        self._last_deadline = 0
        self._next_expiry: int | None = None
        """When the next messages are too old that no channel takes."""
        self._dead: set[int] = set()
        """Messages that were handed out as dead letters and are not settled."""
        self._delivered = self._redelivered = self._dead_lettered = 0
        self._timer: asyncio.TimerHandle | None = None
        self._lease_timer: asyncio.TimerHandle | None = None
        self._stopped = False
        self._is_being_placed = False
        self.on_events: list[Callable[[int, QueueEvents | QueueSnapshot], None]] = []
        """Called with the number of what the journal takes: followers are sent it."""
        journal.on_failure = on_failure
        journal.durable.follow(self.recount)
        # The evidence may come from several disks: this one, and enough others, are to have all of it.
        self._begin_journal()
        self._note_base()

    # Consumers.

    def attach(
        self, channel: QueueChannel, settings: QueueSettings, holds: Sequence[tuple[int, int, int]] = ()
    ) -> list[int]:
        """Begin to hand out messages on a channel, later: the reply to its opening goes first. Its consumer `holds`
        messages of this placement already, some under several leases; return those that are not its own any more."""
        self._check_open()
        self._check_ranges([(start, stop) for start, stop, _ in holds])
        self._settings = settings
        lost = self._state.keep_all(channel.key, holds, self._deadline(self._now()))
        self._channels[channel.key] = channel
        self._turns.append(channel.key)
        self._loop.call_soon(self.pump)
        return lost

    def detach(self, key: int, *, leave: bool) -> None:
        """Forget a channel. If its consumer leaves, its messages are handed out again now; otherwise it may be back,
        and their leases run on."""
        if self._channels.pop(key, None) is None:
            return
        self._turns.remove(key)
        if leave and not self._is_over:
            self._note_returned(self._state.leave(key, self._now()))
            self.pump()
        self._state.forget(key)

    def answer(self, answer: QueueAnswer) -> tuple[int, list[int]]:
        """Take acks, nacks and extensions. Returns the number that is confirmed when everything of this is stored, and
        the messages that others have now: what was said about these does not count."""
        self._check_open()
        self._check_answer(answer)
        stale: list[int] = []
        settled: list[tuple[int, int]] = []
        returned: list[Returned] = []
        now = self._now()
        for start, stop, lease in answer.acks:
            refused = self._state.ack(start, stop, lease)
            stale += refused
            settled += without(start, stop, refused)
            if self._dead:
                buried = self._dead.intersection(range(start, stop)).difference(refused)
                self._dead_lettered += len(buried)
                self._dead -= buried
        for offset, lease, delay_us, seen, reason in answer.nacks:
            not_before = now + min(max(delay_us, 0), MAX_DELAY_US)
            outcome, event = self._state.nack(offset, lease, not_before, seen=seen, reason=reason[:MAX_REASON_CHARS])
            if event is not None:
                returned.append(event)
            elif outcome is Answer.STALE:
                stale.append(offset)
        for offset, lease, more_us in answer.extensions:
            if self._state.extend(offset, lease, now + min(max(more_us, 0), MAX_DELAY_US)) is Answer.STALE:
                stale.append(offset)
        self._note(QueueEvents(tuple(settled), self._to_store(returned)))
        self.pump()
        return self._journal.last_number, stale

    # What the log, the clock and followers do.

    def pump(self) -> None:
        """Hand out what can be handed out now. Nothing after the broker's lease: another owner may have confirmed acks
        since (I9)."""
        if self._is_over or self._reading is not None:
            return
        if not self._may_confirm():
            self._wait_for_lease()
            return
        now = self._now()
        self._note_returned(self._state.expire(now))
        self._next_expiry = None
        steps = 0
        # A turn is taken only for a message: otherwise a consumer that does not answer could have every turn.
        while (offset := self._state.peek(now, self._storage.log.confirmed.value)) is not None:
            channel = self._next_channel()
            # What is too old is settled also while nobody takes messages: otherwise retention would keep it.
            if (channel is None and self._message_ttl_us() is None) or not self._hand_out(channel, offset, now):
                break
            steps += 1
            if steps == TURN_STEPS:
                break
        self._end_if_drained()
        self._wake_later(now, go_on=steps == TURN_STEPS)

    def on_held(self, follower: str, number: int) -> None:
        """Hear how far a follower's disk is; 0: it does not count any more."""
        self._held[follower] = number
        self.recount()

    def recount(self) -> None:
        """Raise `confirmed` to what enough disks have, and let the cursor follow."""
        if self._journal.durable.error is not None:
            self.confirmed.fail(self._journal.durable.error)
            return
        number = self._agreed(self._journal.durable.value, self._held)
        if number <= self.confirmed.value:
            return
        if not self._may_confirm():
            self._wait_for_lease()
            return
        base = None
        while self._bases and self._bases[0][0] <= number:
            base = self._bases.popleft()[1]
        if base is not None:
            try:
                self._cursors.advance(self.subscription, Offset(base))
            except (Fenced, SubscriptionNotFound):
                return  # Another owner has the segment, or the subscription was deleted: this queue is about to end.
        self.confirmed.advance(number)
        self._end_if_drained()

    def first_unsettled(self, count: int) -> list[tuple[int, int]]:
        """Return the ranges of the first `count` messages that are not settled: ready, leased or delayed."""
        return list(self._state.first_unsettled(count, self._storage.log.confirmed.value))

    def after_skipping(self, count: int) -> QueueSnapshot:
        """Return what is known of the queue if its first messages that are not settled were settled, so many of them.
        Answers do not count from now on: the caller sets the queue to another place."""
        self._is_being_placed = True
        image = QueueImage.of(self.snapshot())
        image.apply(QueueEvents(tuple(self.first_unsettled(count))))
        return image.snapshot()

    def resume(self) -> None:
        """Take answers again, at this place or at another one."""
        self._is_being_placed = False

    def reset(self, image: QueueImage) -> None:
        """Begin anew at another place, with what is known there: the subscription was set there. The channels are
        closed already."""
        self.placement = image.placement
        self._state = QueueState(
            image.settled, self._from_store(image.returned.values()), first_lease=self._state.next_lease
        )
        self._bases.clear()
        self._dead.clear()
        self._begin_journal()
        self.pump()

    # What operators ask.

    def counts(self) -> QueueCounts:
        now, end = self._now(), self._storage.log.confirmed.value
        leased, delayed = self._state.leased, self._state.delayed(now)
        base = self._state.settled.base
        return QueueCounts(
            ready=self._state.unsettled(end) - leased - delayed,
            leased=leased,
            delayed=delayed,
            oldest_us=self._oldest[1] if self._oldest[0] == base < end else 0,
            consumers=tuple(sorted(channel.consumer for channel in self._channels.values())),
            blocked=self._state.blocked,
            delivered=self._delivered,
            redelivered=self._redelivered,
            dead_lettered=self._dead_lettered,
        )

    def snapshot(self) -> QueueSnapshot:
        settled = self._state.settled
        return QueueSnapshot(self.placement, settled.base, tuple(settled), self._to_store(self._state.returned()))

    @property
    def last_number(self) -> int:
        return self._journal.last_number

    @property
    def failure(self) -> BraidError | None:
        """Why the journal has failed. A queue that was stopped has not."""
        failure = self._journal.failure
        return None if isinstance(failure, LogClosed) else failure

    async def check(self) -> list[str]:
        """Compare what the disk says with what is in memory and with the log; return what does not agree."""
        for _ in range(CHECKS):
            number, snapshot = self.last_number, self.snapshot()
            await self._journal.durable.reached(number)
            image = await read_image(self._disk, self._journal.folder)
            if number == self.last_number:
                break
        else:
            return []  # It changes all the time: the next audit may meet it at rest.
        if image is None:
            return [f"the queue {self.subscription} has no journal"]
        stored, log, name = image.snapshot(), self._storage.log, self.subscription
        cursor = self._cursors.offset(name)
        found = []
        if stored.facts != snapshot.facts:
            found.append(f"the journal of the queue {name} does not have what its owner knows")
        if stored.end > log.end:
            found.append(f"the queue {name} knows of message {stored.end - 1}, and the log ends at {log.end}")
        if cursor is not None and cursor > stored.base:
            found.append(f"the cursor of the queue {name} is at {cursor}, and message {stored.base} is not settled")
        return found

    @property
    def durable(self) -> int:
        """The number up to which this broker's disk has the events."""
        return self._journal.durable.value

    @property
    def held(self) -> Mapping[str, int]:
        """By follower: the number up to which its disk has the events."""
        return self._held

    # The end.

    def close_channels(self, code: str, message: str, *, retriable: bool) -> None:
        for channel in list(self._channels.values()):
            channel.close(code, message, retriable=retriable)

    async def stop(self) -> QueueSnapshot:
        """Take no more answers. When this returns, everything that was taken is confirmed or never will be. Returns
        what is known of the queue."""
        self._stopped = True
        for timer in (self._timer, self._lease_timer):
            if timer is not None:
                timer.cancel()
        reading, self._reading = self._reading, None
        await end(reading)
        await self._journal.close()
        self.confirmed.fail(LogClosed(f"the queue {self.subscription} of {self.name} is closed"))
        return replace(self.snapshot(), leased=tuple(self._state.leased_ranges()))

    # Steps.

    def _now(self) -> int:
        """Return µs of a clock that nobody sets: leases and delays run by it."""
        return int(self._clock.monotonic() * 1e6)

    def _to_store(self, returned: Iterable[Returned]) -> tuple[Returned, ...]:
        """Write times as other brokers read them: µs since 1970."""
        now, since_1970 = self._now(), self._clock.now_us()
        return tuple(each.between_clocks(now, since_1970) for each in returned if not each.is_like_new)

    def _from_store(self, returned: Iterable[Returned]) -> list[Returned]:
        now, since_1970 = self._now(), self._clock.now_us()
        return [each.between_clocks(since_1970, now) for each in returned]

    @property
    def _is_over(self) -> bool:
        """Tell whether nothing can be stored any more: the segment is being closed, or opened again."""
        return self._stopped or self._journal.durable.error is not None

    def _check_open(self) -> None:
        if self._is_over:
            raise LogClosed(f"the queue {self.subscription} of {self.name} is closed")
        if self._is_being_placed:
            raise NotServing(f"the queue {self.subscription} of {self.name} is being set to another place")

    def _check_answer(self, answer: QueueAnswer) -> None:
        """Refuse an answer as a whole, before anything of it counts."""
        ranges = [(start, stop) for start, stop, _ in answer.acks]
        ranges += [(offset, offset + 1) for offset, *_ in answer.nacks]
        ranges += [(offset, offset + 1) for offset, *_ in answer.extensions]
        self._check_ranges(ranges)

    def _check_ranges(self, ranges: Sequence[tuple[int, int]]) -> None:
        log = self._storage.log
        for start, stop in ranges:
            if not 0 <= start < stop <= log.end:
                raise InvalidArgument(
                    f"messages {start} to {stop} cannot be answered: the segment holds 0 to {log.end}"
                )
        if sum(stop - start for start, stop in ranges) > MAX_ANSWERED:
            raise InvalidArgument(f"an answer may tell of {MAX_ANSWERED:,} messages; send several")
        if max((stop for _, stop in ranges), default=0) > log.confirmed.value:
            # An earlier owner has confirmed and handed out these messages; this one is about to confirm them again.
            raise NotServing(f"{self.name} has not confirmed its last messages again since it has another owner")

    def _next_channel(self) -> QueueChannel | None:
        """Return the next channel that takes messages, and let the others come after it."""
        for _ in range(len(self._turns)):
            key = self._turns[0]
            self._turns.rotate(-1)
            channel = self._channels[key]
            if channel.takes(self._state.held(key)):
                return channel
        return None

    def _hand_out(self, channel: QueueChannel | None, offset: Offset, now: int) -> bool:
        """Hand out messages of the batch at this offset, or settle them if they are too old. False if the batch must be
        read first, or no channel takes messages."""
        if offset < self._storage.earliest:
            self._expire_messages(offset, self._storage.earliest)
            return True
        batch = self._find(offset)
        if batch is None:
            self._reading = self._loop.create_task(self._read_from(offset), name=f"read for queue of {self.name}")
            return False
        header = batch.header
        base = self._state.settled.base
        if header.base_offset <= base < header.next_offset:
            self._oldest = (base, header.min_timestamp)
        ttl_us = self._message_ttl_us()
        if ttl_us is not None and header.max_timestamp + ttl_us <= self._clock.now_us():
            self._expire_messages(header.base_offset, header.next_offset)
            return True
        if channel is None:
            if ttl_us is not None:
                self._next_expiry = now + header.max_timestamp + ttl_us - self._clock.now_us()
            return False
        free = channel.prefetch - self._state.held(channel.key)
        count = free if len(self._channels) == 1 else min(free, SHARED_TURN)
        settings = self._settings
        handed = self._state.take(channel.key, count, header.base_offset, header.next_offset, now, self._deadline(now))
        if not handed:
            return False
        channel.send(batch, handed, settings.max_deliveries, self._storage.log.confirmed.value)
        count = sum(each.end - each.start for each in handed)
        self._metrics.delivered_records += count
        self._delivered += count
        for each in handed:
            if each.deliveries:
                self._redelivered += each.end - each.start
                if 0 < settings.max_deliveries <= each.deliveries:
                    self._dead.update(range(each.start, each.end))
        return True

    def _deadline(self, now: int) -> int:
        """Return when a lease ends that is given now. Leases of about the same time share the number, because there may
        be many of them: each is a little longer than it has to be."""
        timeout_us = self._settings.ack_timeout_us
        step = max(1_000, timeout_us // DEADLINE_STEPS)
        deadline = (now + timeout_us) // step * step + step
        if deadline != self._last_deadline:
            self._last_deadline = deadline
        return self._last_deadline

    def _expire_messages(self, start: int, end: int) -> None:
        """Settle messages that nobody is to have any more."""
        self._state.settle(start, end)
        self._dead = {each for each in self._dead if not start <= each < end}
        self._note(QueueEvents(((start, end),)))

    def _find(self, offset: Offset) -> StoredBatch | None:
        at = bisect_right(self._read, offset, key=lambda batch: batch.header.base_offset) - 1
        if at >= 0 and offset < self._read[at].header.next_offset:
            return self._read[at]
        log = self._storage.log
        cached = self._storage.sources.cache.get(log.number, offset, READ_BYTES, log.confirmed.value)
        if cached:
            self._read = [StoredBatch(header, data) for header, data in cached]
            return self._read[0]
        return None

    async def _read_from(self, offset: Offset) -> None:
        try:
            batches = await self._storage.reader(offset).read_available(READ_BYTES)
            self._read = [batch for batch in batches if batch.header.count]
            if not self._read:
                raise BrokenInvariant(f"I1: nothing is at offset {offset} of {self.name}, which is confirmed")
        except BraidError as error:
            if not self._stopped:
                _log.warning("offset %d of %s cannot be read: %s", offset, self.name, error)
                failure = to_client(to_reader(error))
                self.close_channels(failure.code, str(failure), retriable=True)
                await asyncio.sleep(READ_AGAIN_S)
        finally:
            self._reading = None
        self.pump()

    def _note_returned(self, returned: Iterable[Returned]) -> None:
        self._note(QueueEvents(returned=self._to_store(returned)))

    def _note(self, events: QueueEvents) -> None:
        """Store events that are true in memory."""
        if not events.settled and not events.returned:
            return
        if self._journal.is_long:
            self._begin_journal()
        else:
            number = self._journal.append(events)
            for callback in self.on_events:
                callback(number, events)
        self._note_base()

    def _begin_journal(self) -> None:
        snapshot = self.snapshot()
        number = self._journal.begin_anew(snapshot)
        for callback in self.on_events:
            callback(number, snapshot)

    def _note_base(self) -> None:
        base = self._state.settled.base
        if not self._bases or self._bases[-1][1] != base:
            self._bases.append((self._journal.last_number, base))

    def _wait_for_lease(self) -> None:
        """Go on when the lease was only renewed late: a process that stood still may find its timers and its disk
        before the answer to its last renewal. If the lease is lost, this queue is about to be stopped."""
        if self._lease_timer is None and not self._stopped:
            self._lease_timer = self._loop.call_later(LEASE_AGAIN_S, self._on_lease_timer)

    def _on_lease_timer(self) -> None:
        self._lease_timer = None
        self.recount()
        self.pump()

    @property
    def is_drained(self) -> bool:
        """Tell whether the log has ended with no message that is not settled, and that is stored."""
        return (
            self._storage.ended
            and self._state.settled.base >= self._storage.log.end
            and not self._bases
            and self.confirmed.value >= self._journal.last_number
        )

    def _end_if_drained(self) -> None:
        """Tell consumers that nothing is left and nothing will come."""
        log = self._storage.log
        if self._channels and self.is_drained:
            self.close_channels(END_OF_SEGMENT, f"the segment ends at offset {log.end}", retriable=False)

    def _wake_later(self, now: int, *, go_on: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        times = (self._state.next_deadline, self._state.next_due, self._next_expiry)
        # A waiting message that is due, and finds no consumer with room, needs no timer.
        later = [each for each in times if each is not None and each > now]
        if go_on:
            self._timer = self._loop.call_later(0, self.pump)
        elif later:
            self._timer = self._loop.call_later((min(later) - now) / 1e6 + 0.0005, self.pump)
