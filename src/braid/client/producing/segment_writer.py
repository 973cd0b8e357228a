"""One producer's way to one segment: strict order, and a batch that is sent again is stored once (I10).

A writer numbers its records 0, 1, 2, … under a random producer id. The broker stores a batch if its number continues
what it has from that producer. If it already has the batch, it replies with the offsets that it assigned the first
time; it remembers the last 8 batches. So at most 8 are in flight, and it is always safe to send the oldest unconfirmed
batch and all batches after it again, in order, with their old numbers.

A *round* is one pass of the unconfirmed batches over one link. When the broker refuses a batch or the link is lost, the
writer sends no new batch and waits until every batch of the round has its reply. (A lost link counts as a reply to
each.) Then `decide_retries` (retry_decision.py) decides about all of them together:

- The oldest batch can be retried. All batches go again, in order, after a pause and with refreshed routing. Later
  batches were out of sequence only because of the oldest.
- The oldest batch is refused for good: its records fail. The batches after it cannot be stored under their numbers any
  more, because there would be a gap. A batch goes on under a new producer id, numbered from 0, if it is certainly not
  stored under the old id: every copy was refused, by an error that says so. The other batches are *doubtful*. They
  fail with `TimedOut`: whether they are stored is not known.
- The oldest batch is out of sequence and every copy of it was refused. A broker remembers 10,000 producers, and it has
  forgotten this one. The writer goes on under a new id, too.

A reply belongs to the round of its request. The writer ignores replies of earlier rounds.

A batch that is not confirmed by its deadline fails with `TimedOut`. It keeps its place and is sent again while later
batches, which may have been stored, still have time: without it they would be out of sequence. When all sent batches
have timed out, the writer forgets them and goes on under a new id.

When the segment ends, because the topic's layout changes, the writer retires: it finds out what the segment has stored
and hands the rest to the writers of other segments (layout_change.py).

A producer with a fixed identity (repeatable_producer.py) has writers that never take another id, because another
process must be able to reproduce the same numbers. Such a writer cannot renumber or skip a batch. Its first failure
fails every waiting batch and every later one. The end of its segment is such a failure.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from braid.client.producing.departure import Departure
from braid.client.producing.open_batch import UNKNOWN_OFFSET, ProducerBatch
from braid.client.producing.retry_decision import (
    NOT_STORED,
    BatchOutcome,
    EndedAction,
    RetryAction,
    decide_ended,
    decide_retries,
)
from braid.client.routing import OwnerSearch
from braid.model.batch.header import parse_header, renumber
from braid.model.batch.identity import ERA_RECORDS, ProducerIdentity
from braid.model.errors import (
    BatchTooLarge,
    BraidError,
    ConnectionLost,
    InvalidArgument,
    ProtocolError,
    SegmentNotFound,
    SegmentSealed,
    TimedOut,
)
from braid.model.layout import HashRange
from braid.wire.frame import Frame
from braid.wire.link import Link
from braid.wire.operations import PAST_ERA, Kind, Published, decode
from braid.wire.wakeup import wake

if TYPE_CHECKING:
    from braid.client.producing.layout_change import Retirement
    from braid.client.producing.producer import Producer

MAX_BATCHES_IN_FLIGHT: Final = 8
"""As many as a broker remembers of one producer (storage/log/producers.py), so a batch that is sent again gets its
offset."""


class SegmentWriter:
    """Has at most 29 attributes: with more of them, `send` and `submit` would find them in a dict."""

    def __init__(
        self, producer: Producer, segment: int, hashes: HashRange, identity: ProducerIdentity | None = None
    ) -> None:
        self.segment: Final = segment
        self.hashes: Final = hashes
        self.parents: set[SegmentWriter] = set()
        """Retired writers that have not handed over yet. Until they have, this writer sends nothing."""
        self.open: ProducerBatch | None = None
        """The batch that takes records."""
        self.failure: BraidError | None = None
        """The error that ended this writer; only with a fixed identity."""
        self._producer = producer
        self._options = producer.options
        self._codec = producer.codec
        self._loop = asyncio.get_running_loop()
        self._closed_batches: deque[ProducerBatch] = deque()
        """Batches that take no more records and were never sent, so they have no number yet."""
        self._sent: deque[ProducerBatch] = deque()
        """Numbered batches: the oldest unconfirmed batch and all after it."""
        self._identity = identity
        self._id = identity.id if identity is not None else producer.new_id()
        self._next_sequence = identity.first_sequence if identity is not None else 0
        self._link: Link | None = None
        self._route = b""
        self._round = 0
        self._unanswered = 0
        self._broken = False
        """A batch of this round was refused: nothing new is sent until the round is over."""
        self._connecting: asyncio.Task[None] | None = None
        self._owner = OwnerSearch(producer.client.routing, producer.topic.path, segment, producer.client.backoff())
        self._last_error: BraidError | None = None
        self._log_ended = False
        """The segment takes no more batches. Those in `_sent` are certainly not stored."""
        self._retirement: Retirement | None = None
        self._asked_owner = False
        """Since it retired, this writer has tried to reach the segment's owner."""
        self._departure = Departure(self._options, self._codec, self.dispatch, self._on_timer)
        self._full_bytes = self._options.max_batch_bytes
        self.cut_bytes = self._full_bytes
        """The size at which the producer calls `on_threshold`. It is less than a full batch while the open batch waits
        for a reply, and while nothing is in flight."""

    @property
    def idle(self) -> bool:
        return not (self._sent or self._closed_batches or self.open is not None)

    @property
    def retired(self) -> bool:
        return self._retirement is not None

    # Filling.

    def begin(self) -> ProducerBatch:
        """Open a batch. Unless it waits for more records, it leaves at the end of the loop's iteration."""
        producer = self._producer
        producer.check_room()
        if self.failure is not None:
            raise self.failure.again()
        now = self._loop.time()
        batch = self.open = ProducerBatch(
            self.segment, now, now + self._options.timeout_s, producer.client.clock.now_us()
        )
        producer.watch_deadlines()
        if self._options.linger_s <= 0 or self._retirement is not None:
            self._departure.plan(self._link)
        else:
            self._departure.arm_timer(batch, in_flight=bool(self._sent))
        return batch

    def on_threshold(self) -> None:
        """React to an open batch that has `cut_bytes` bytes or the largest number of records."""
        batch = self.open
        if batch is None:
            return
        if batch.size >= self._full_bytes or len(batch.values) >= self._options.max_batch_records:
            self.close_open()
        if self.cut_bytes == self._departure.early_bytes:
            self.dispatch()
            if self._link is not None:
                self._link.connection.flush()

    def close_open(self) -> None:
        """Let the open batch take no more records."""
        if self.open is not None:
            self._closed_batches.append(self._take_open(self.open))
            if self._retirement is not None:
                self.dispatch()  # Now: records that are given later may reach an heir before the loop comes here.
            else:
                self._departure.plan(self._link)

    def add_table(self, table: object, count: int, size: int) -> ProducerBatch:
        """Add an Arrow table as one batch, after the open batch."""
        self.close_open()
        batch = self.begin()
        batch.table, batch.count, batch.size = table, count, size
        self.close_open()
        return batch

    def flush(self) -> None:
        """Send what may be sent, without lingering."""
        self.close_open()
        self.dispatch()

    def unsettled(self) -> list[ProducerBatch]:
        return [batch for batch in (*self._sent, *self._closed_batches) if not batch.done]

    def _take_open(self, batch: ProducerBatch) -> ProducerBatch:
        self.open = None
        if batch.table is None:
            batch.count = len(batch.values)
        self._producer.on_closed(self, batch)
        return batch

    def _on_timer(self) -> None:
        if self.open is not None:
            self.dispatch()

    # Sending.

    def dispatch(self) -> None:
        """Send what may be sent."""
        self.cut_bytes = self._full_bytes
        if self._broken or self._connecting is not None or self.parents:
            return
        if self._retirement is not None:
            self._hand_over(self._retirement)
            return
        link = self._link
        if link is None or not link.alive:
            if not self.idle:
                self._connect()
            return
        while len(self._sent) < MAX_BATCHES_IN_FLIGHT:
            if self._closed_batches:
                batch = self._closed_batches.popleft()
            elif self.open is not None and not self._departure.stays_open(self.open, in_flight=bool(self._sent)):
                batch = self._take_open(self.open)
            else:
                if self.open is not None:
                    self.cut_bytes = self._departure.early_bytes
                    self._departure.arm_timer(self.open, in_flight=bool(self._sent))
                return
            if self._number(batch, link):
                self._sent.append(batch)
                self._send(batch, link)

    def _number(self, batch: ProducerBatch, link: Link) -> bool:
        """Encode the batch under the next number. Returns False if it can never be sent and has failed."""
        try:
            self._check_era(batch)
            data = batch.encode(self._codec, self._id, self._next_sequence)
            size = sum(map(len, data))
            if size + len(self._route) + 8 > link.max_frame_bytes:
                raise BatchTooLarge(
                    f"a batch of {size} bytes is above the broker's limit of {link.max_frame_bytes} for a frame"
                )
        except BraidError as error:
            self.refuse(batch, error)
            return False
        except Exception as error:  # Arrow or numpy refuse a strange table; the writer must live on
            refusal = InvalidArgument(f"the records cannot be encoded: {error}")
            refusal.__cause__ = error
            self.refuse(batch, refusal)
            return False
        if self._identity is not None:
            batch.sent_header = parse_header(data[0])
        self._next_sequence += batch.count
        return True

    def _check_era(self, batch: ProducerBatch) -> None:
        if self._identity is not None:
            numbered = self._next_sequence - self._identity.first_sequence + self._identity.number
            if numbered + batch.count > ERA_RECORDS:
                raise InvalidArgument(
                    f"{numbered} records were written to segment {self.segment} in era {self._identity.era}, and "
                    f"{batch.count} more do not fit: an era numbers {ERA_RECORDS} records in a segment; write fewer "
                    f"in one era, or from more writers"
                )

    def refuse(self, batch: ProducerBatch, error: BraidError) -> None:
        """Fail a batch that cannot be sent."""
        self._settle(batch, 0, error)
        if self._identity is not None:
            self.fail_all(error)

    def _send(self, batch: ProducerBatch, link: Link) -> None:
        assert batch.data is not None
        batch.answer = None
        self._unanswered += 1
        link.call(Kind.PUBLISH, self._route, batch.data, partial(self._on_reply, batch, self._round))

    # Replies.

    def _on_reply(self, batch: ProducerBatch, of_round: int, reply: Frame | None, error: BraidError | None) -> None:
        if of_round != self._round:
            return  # The writer has left that round.
        link = self._link
        assert link is not None
        self._unanswered -= 1
        if reply is not None and error is None:
            try:
                self._on_stored(batch, decode(Published, reply.body), link)
            except ProtocolError as unreadable:
                error = ConnectionLost(f"the broker's confirm cannot be read: {unreadable}")
        if error is not None:
            if not link.alive:
                # The error that ended the link is no reply to this batch.
                error = error if isinstance(error, ConnectionLost) else ConnectionLost(f"the link ended: {error}")
            self._on_refused(batch, error)
        if self._broken:
            if not self._unanswered:
                self._end_round()
        elif self._closed_batches or self._retirement is not None:
            self.dispatch()
        elif self.open is not None:
            self._departure.plan(self._link)  # The senders that wake now may add to it.
        elif not self._sent:
            self.cut_bytes = self._departure.early_bytes

    def _on_stored(self, batch: ProducerBatch, published: Published, link: Link) -> None:
        self._owner.worked()
        self._last_error = None
        if batch.done:  # It timed out before, and is stored after all.
            batch.answer = None
            batch.data = None
        else:
            base_offset = published.base_offset
            batch.duplicate = published.duplicate
            batch.past_era = base_offset == PAST_ERA
            batch.settle(base_offset if base_offset >= 0 else UNKNOWN_OFFSET, None)
            if batch.futures:
                link.wake_at_end(batch.futures)
            self._producer.on_settled(batch)
        self._forget_stored()

    def _forget_stored(self) -> None:
        sent = self._sent
        while sent and sent[0].data is None:
            sent.popleft()

    def _on_refused(self, batch: ProducerBatch, error: BraidError) -> None:
        batch.answer = error
        if not isinstance(error, NOT_STORED):
            batch.doubtful = True
        self._broken = True
        self._last_error = error

    def _end_round(self) -> None:
        """Decide about the batches of a round in which every batch has its reply."""
        self._leave_round()
        sealed = next((batch.answer for batch in self._sent if isinstance(batch.answer, SegmentSealed)), None)
        if sealed is not None and self._identity is not None:
            self.fail_all(sealed)
            return
        if sealed is not None:
            self._settle_ended(sealed.next_sequence, asked=False)
            self.dispatch()
            return
        sent = list(self._sent)
        actions = decide_retries([_outcome(batch) for batch in sent])
        if self._identity is not None and (failed := _first_failure(sent, actions)) is not None:
            self.fail_all(failed)
            return
        cause = next(
            (batch.answer for batch, action in zip(sent, actions) if action in (RetryAction.FAIL, RetryAction.UNKNOWN)),
            None,
        )
        self._sent.clear()
        renumbered: list[ProducerBatch] = []
        for batch, action in zip(sent, actions):
            if action is RetryAction.AGAIN:
                self._sent.append(batch)
            elif action is RetryAction.RENUMBER:
                renumbered.append(batch)
            elif action is RetryAction.FAIL:
                assert batch.answer is not None
                self._settle(batch, 0, batch.answer)
            else:
                message = f"whether the records are stored is not known: a batch before them failed ({cause})"
                self._settle(batch, 0, TimedOut(message))
        if len(self._sent) < len(sent):
            self._start_anew(renumbered)
        self._forget_stored()
        if not self.idle:
            self._connect()

    def _start_anew(self, batches: Sequence[ProducerBatch]) -> None:
        """Continue under another producer id, with these batches first."""
        if self._identity is not None:
            return  # A writer with a fixed identity has no other id: it has ended.
        self._id = self._producer.new_id()
        self._next_sequence = 0
        for batch in batches:
            assert batch.data is not None
            assert not batch.doubtful
            if batch.done:
                continue  # It timed out, and its senders have their error.
            header = batch.data[0]
            assert isinstance(header, bytearray)
            renumber(header, self._id, self._next_sequence)
            batch.first_sequence = self._next_sequence
            self._next_sequence += batch.count
            self._sent.append(batch)

    def _leave_round(self) -> None:
        """End the round. Later replies to its requests are ignored."""
        self._round += 1
        self._unanswered = 0
        self._broken = False
        self._link = None

    # Connecting.

    def _connect(self) -> None:
        if self._connecting is None:
            self._connecting = self._loop.create_task(self._find_link(), name=f"writer to segment {self.segment}")
            self._connecting.add_done_callback(self._on_connected)

    def _on_connected(self, task: asyncio.Task[None]) -> None:
        self._connecting = None
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            raise error
        if self._link is not None:
            for batch in self._sent:
                if batch.data is not None:
                    self._send(batch, self._link)
        self.dispatch()

    async def _find_link(self) -> None:
        """Connect to the segment's owner. Try again until it works or there is nothing left to send to this segment."""
        while not self.idle and not (self._retirement is not None and self._settled):
            try:
                if self._log_ended:
                    await self._owner.later_layout(self._producer.layout_epoch)
                    await self._producer.topic_map()
                elif self._asked_owner and await self._ask_heirs():
                    return
                else:
                    if self._last_error is not None:
                        await self._owner.after(self._last_error)
                    await self._attach()
                    return
            except BraidError as error:
                final = not error.retriable and not isinstance(error, TimedOut)
                if final and not (self._retirement is not None and isinstance(error, SegmentNotFound)):
                    self.fail_all(error)
                    return
                self._last_error = error

    async def _attach(self) -> None:
        topic = await self._producer.topic_map()  # May retire this writer.
        if self._retirement is not None:
            if self._settled:
                return
            self._asked_owner = True
        link = await self._owner.link()
        self._route = topic.publish_route(self.segment)
        self._link = link

    # The end of the segment (layout_change.py).

    def retire(self, retirement: Retirement) -> None:
        """Send no new batch, and hand over what the segment has not stored."""
        self._retirement = retirement
        self.dispatch()

    def inherit(self, parent: SegmentWriter, batches: Sequence[ProducerBatch]) -> None:
        """Take over the batches of a retired writer. They go first: the program gave them before all others here."""
        self._closed_batches.extendleft(reversed(batches))
        self.parents.discard(parent)
        self.dispatch()

    def add_batches(self, batches: Sequence[ProducerBatch]) -> None:
        """Add batches that take no more records."""
        if batches:
            self.close_open()
            self._closed_batches.extend(batches)
            self.dispatch()

    @property
    def _settled(self) -> bool:
        """Whether it is certain what the segment has stored."""
        return self._log_ended or not self._sent

    def _hand_over(self, retirement: Retirement) -> None:
        if not self._settled:
            if self._link is None or not self._link.alive:
                self._connect()
            return
        batches = [batch for batch in (*self._sent, *self._closed_batches) if not batch.done]
        self._sent.clear()
        self._closed_batches.clear()
        self._leave_round()
        self._departure.cancel_timer()
        retirement.hand_over(batches)
        self._producer.forget_writer(self)

    async def _ask_heirs(self) -> bool:
        """Settle by what the heirs' logs have inherited. Returns False if none of them can tell."""
        assert self._retirement is not None
        next_sequence = await self._retirement.ask(self._producer, self._id)
        if next_sequence is not None:
            self._settle_ended(next_sequence, asked=True)
        return next_sequence is not None

    def _settle_ended(self, next_sequence: int, *, asked: bool) -> None:
        """Settle the batches whose fate is known now that the log has ended."""
        sent = [batch for batch in self._sent if batch.data is not None]
        actions = decide_ended([_outcome(batch) for batch in sent], next_sequence, asked=asked)
        for batch, action in zip(sent, actions):
            if action is EndedAction.SETTLE:
                self._settle(batch, UNKNOWN_OFFSET, None)
            elif action is EndedAction.FAIL:
                assert batch.answer is not None
                self._settle(batch, 0, batch.answer)
            elif action is EndedAction.UNKNOWN:
                message = "whether the records are stored is not known: their segment has ended and forgot the producer"
                self._settle(batch, 0, TimedOut(message))
        self._sent = deque(batch for batch in sent if batch.data is not None)
        self._log_ended = EndedAction.AGAIN not in actions

    # Giving up.

    def expire(self, now: float, open_age_s: float) -> None:
        """Fail batches that have passed their deadline; close a batch that has been open for this long."""
        if self._identity is not None and (late := self._late(now)) is not None:
            self.fail_all(self._timed_out(late, "whether they are stored is not known"))
            return
        if self.open is not None and now - self.open.opened_at >= open_age_s and self._options.linger_s < open_age_s:
            self.close_open()
        outcome = "they are not stored" if self._log_ended else "whether they are stored is not known"
        for batch in self._sent:
            if batch.deadline <= now and not batch.done:
                self._give_up(batch, outcome)
        if self._sent and all(batch.done for batch in self._sent):
            self._sent.clear()
            self._leave_round()
            self._start_anew(())
        for batch in [batch for batch in self._closed_batches if batch.deadline <= now]:
            self._closed_batches.remove(batch)
            self._give_up(batch, "they were not sent")
        if self.open is not None and self.open.deadline <= now:
            self._give_up(self._take_open(self.open), "they were not sent")
        self.dispatch()

    def _late(self, now: float) -> ProducerBatch | None:
        waiting = (*self._sent, *self._closed_batches)
        return next((batch for batch in waiting if batch.deadline <= now and not batch.done), None)

    def _timed_out(self, batch: ProducerBatch, outcome: str) -> TimedOut:
        why = f"; the last error: {self._last_error}" if self._last_error is not None else ""
        message = f"{batch.count} records were not confirmed within {self._options.timeout_s:g} s, {outcome}{why}"
        error = TimedOut(message)
        error.__cause__ = self._last_error
        return error

    def _give_up(self, batch: ProducerBatch, outcome: str) -> None:
        keep = batch.data  # The batch may have to be sent again, see the top of this module.
        self._settle(batch, 0, self._timed_out(batch, outcome))
        batch.data = keep

    def fail_all(self, error: BraidError) -> None:
        """Fail every batch of this writer."""
        self.close_open()
        if self._identity is not None:
            self.failure = self.failure or error
        for batch in (*self._sent, *self._closed_batches):
            self._settle(batch, 0, error)
        self._sent.clear()
        self._closed_batches.clear()
        self._leave_round()
        self._start_anew(())
        self._last_error = None

    async def stop(self) -> None:
        self._departure.cancel_timer()
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])

    def _settle(self, batch: ProducerBatch, base_offset: int, error: BraidError | None) -> None:
        if batch.done:
            batch.data = None
            return
        batch.settle(base_offset, error)
        if batch.futures:
            # Later: a sender that resumes will call this writer, which is in the middle of settling.
            self._loop.call_soon(wake, batch.futures)
        self._producer.on_settled(batch)


def _outcome(batch: ProducerBatch) -> BatchOutcome:
    stored, first = batch.data is None, batch.first_sequence
    return BatchOutcome(stored, batch.answer, batch.doubtful, first, first + batch.count)


def _first_failure(sent: Sequence[ProducerBatch], actions: Sequence[RetryAction]) -> BraidError | None:
    """Return the error of the first batch that cannot go again under its number."""
    return next((batch.answer for batch, action in zip(sent, actions) if action is not RetryAction.AGAIN), None)
