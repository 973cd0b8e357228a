"""What a queue subscription knows of one segment: which messages are settled, leased or waiting. Values only; the
caller says what time it is, and stores what must outlive a crash.

    new ──take──► leased ──ack──► settled
                    │  ▲
          nack, or  │  │ take, when it is due
          time-out  ▼  │
                   waiting

**Leases** are only here: they say which consumer has a message and until when. A consumer's answer names the number of
its lease. An answer counts while nobody else got the message: the lease may have run out, or its owner may be gone
(numbers of earlier owners are lower than `first_lease`). Otherwise the answer is stale. That also holds when the other
consumer has settled the message meanwhile, as far as this owner remembers.

**What is stored** are two kinds of events: a message is settled, and a message was returned, with the number of its
deliveries and the time before which it must not be delivered. Everything else is a message like new. So after a crash a
message may be delivered once more, but never after its ack was confirmed (I9). A message that is only delayed is like
new, too: the next consumer that gets it returns it again. So delays are kept in memory alone.

**After another owner** a message may be with a consumer that is about to come back and name it. Such messages are held
back for a moment (`held_back`), also while others are handed out.

**Bounds.** What is settled out of order, and what waits, is limited. At a limit, new messages are not handed out
(`blocked`); answers make room.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from braid.model.ids import Offset
from braid.model.queue.events import Returned
from braid.model.queue.settled import SettledOffsets

SWEEP_ABOVE: Final = 64
"""Heaps are swept when they have more than so many entries, and most of them are over."""
SHARED_PASTS: Final = 1_000
"""So many different pasts are remembered for the next message that has the same one."""


class Answer(Enum):
    """What became of a consumer's answer."""

    TAKEN = "taken"
    REPEATED = "repeated"
    """The message is settled already, and no other consumer is known to have done it."""
    STALE = "stale"
    """Another consumer has got the message since."""


class Handed(NamedTuple):
    """Messages for one consumer, one after the other."""

    start: Offset
    end: Offset
    lease: int
    deliveries: int
    """How often they were delivered before."""
    reason: str
    """Why the last delivery failed, if its consumer has said so."""


class QueueLimits(NamedTuple):
    settled_ranges: int = 10_000
    waiting: int = 10_000
    """Messages that came back: the store and each journal have them, too."""
    delayed: int = 100_000
    """Messages that wait for their time and were never delivered: only memory has them."""
    remembered: int = 10_000
    """Settled messages that several consumers have had, and ranges of those that an earlier owner may have handed out:
    a late answer to one of these is stale."""


DEFAULT_LIMITS: Final = QueueLimits()


class _Lease(msgspec.Struct, eq=False, gc=False):
    """Of one message.

    Each byte counts: a lease stands in the heap itself, not in a tuple, has no end, and is not tracked by the garbage
    collector. If the caller gives leases of the same moment the same deadline, such a message takes 173 B.
    """

    number: int
    consumer: int
    start: Offset
    deadline: int

    @property
    def offsets(self) -> range:
        return range(self.start, self.start + 1)

    def __lt__(self, other: _Lease) -> bool:
        return self.deadline < other.deadline


class _RunLease(_Lease, eq=False, gc=False):
    """Of a run of messages. Some of them may be settled or returned by now."""

    end: Offset

    @property
    def offsets(self) -> range:
        return range(self.start, self.end)


class _Past(NamedTuple):
    """Of a message that was delivered and came back."""

    deliveries: int
    reason: str


_shared_past: Final = lru_cache(maxsize=SHARED_PASTS)(_Past)
"""Messages that failed equally often, and for the same reason, share what is known of that."""


class _Waiting(msgspec.Struct, frozen=True, order=True, gc=False):
    """Of a message that came back. The heap of times has the same object: it counts while the message waits by it."""

    not_before: int
    offset: int
    lease: int
    """The last one; 0: an earlier owner gave it."""


class QueueState:
    def __init__(
        self,
        settled: SettledOffsets,
        returned: Iterable[Returned] = (),
        *,
        first_lease: int = 1,
        limits: QueueLimits = DEFAULT_LIMITS,
        held_back: Iterable[tuple[int, int]] = (),
        held_until: int = 0,
    ) -> None:
        """Begin with what the events say. Leases have numbers from `first_lease` on. The messages of the ranges
        `held_back` are handed out only from `held_until` on: consumers may come back and name them."""
        self.settled: Final = settled
        self._limits = limits
        self._first_lease = self._next_lease = first_lease
        self._next = settled.base
        """Everything at or after it is new, unless it is settled, or an earlier owner's and came back."""
        self._leased: dict[int, _Lease] = {}
        """By offset. The messages of a run share one lease."""
        self._held = Counter[int]()
        """By consumer: how many messages it has leased."""
        self._deadlines: list[_Lease] = []
        """A heap of leases, some of them over."""
        self._past: dict[int, _Past] = {}
        """Of unsettled messages that were delivered before."""
        self._waiting: dict[int, _Waiting] = {}
        self._like_new = 0
        """How many of these were never delivered."""
        self._due: list[_Waiting] = []
        """A heap, some of them over."""
        self._returned_end = 0
        """From here on, an earlier owner's messages have not come back."""
        self._held_back: SettledOffsets | None = SettledOffsets(0, held_back)
        self._held_until = held_until
        self._settled_under: OrderedDict[int, int] = OrderedDict()
        """Of messages that came back before they were settled: the lease of the answer that counted, by offset."""
        self._inherited_end = self._held_back.end
        """Messages before it may be with consumers that got them from an earlier owner."""
        self._settled_here = SettledOffsets()
        """Of these, messages that were settled under leases of this owner."""
        self._held_due: dict[int, int] = {}
        """By offset: when messages are due that this owner holds back longer. The next owner holds back for itself."""
        for each in returned:
            if each.offset not in settled:
                if each.not_before < held_until and each.offset in self._held_back:
                    self._held_due[each.offset] = each.not_before
                    each = each._replace(not_before=held_until)
                self._put_back(each, lease=0)

    # What consumers ask.

    def peek(self, now: int, end: int) -> Offset | None:
        """Return the message that `take` would hand out next: the one that is due again for the longest time, otherwise
        the first new one below `end`. None if there is none."""
        self._release_held(now)
        if (due := self._first_due(now)) is not None:
            return due
        return start if not self.blocked and (start := self._first_new(end)) < end else None

    def take(self, consumer: int, count: int, start: int, end: int, now: int, deadline: int) -> list[Handed]:
        """Hand out at most `count` messages, as `peek` finds them, until one of them is not between `start` and `end`:
        these are the messages of one batch."""
        self._release_held(now)
        handed = []
        while count > 0:
            if (due := self._first_due(now)) is not None:
                if not start <= due < end:
                    break
                stop, past = self._take_due(due, min(end, due + count), now)
                run = self._hand(consumer, due, stop, deadline, past)
            elif not self.blocked and start <= (first := self._first_new(end)) < end:
                stop = self.settled.next_settled(first, min(end, first + count))
                if self._held_back is not None:
                    stop = self._held_back.next_settled(first, stop)
                if first < self._returned_end:
                    stop = next((Offset(each) for each in range(first, stop) if self._is_known(each)), stop)
                run = self._hand(consumer, first, stop, deadline, _Past(0, ""))
                self._next = stop
            else:
                break
            handed.append(run)
            count -= run.end - run.start
        return handed

    def ack(self, start: int, end: int, lease: int) -> list[int]:
        """Settle messages, but for those whose answer is stale: return these. The caller stores that the others are
        settled, and confirms it afterwards."""
        leased, past, stale = self._leased, self._past, list[int]()
        for offset in range(start, end):
            found = leased.get(offset)
            if found is not None and (found.number == lease or self._is_later(lease, found.number)):
                del leased[offset]
                self._held[found.consumer] -= 1
            elif (answer := self._check(offset, lease)) is Answer.TAKEN:
                self._stop_waiting(offset)
            else:
                if answer is Answer.STALE:
                    stale.append(offset)
                continue
            if past and past.pop(offset, None) is not None:
                self._settled_under[offset] = lease
                if len(self._settled_under) > self._limits.remembered:
                    self._settled_under.popitem(last=False)
        for first, last in without(start, end, stale):
            self.settled.add(first, last)
            if lease >= self._first_lease and len(self._settled_here) < self._limits.remembered:
                self._settled_here.add(first, min(last, self._inherited_end))
        return stale

    def nack(
        self, offset: int, lease: int, not_before: int, *, seen: bool = True, reason: str = ""
    ) -> tuple[Answer, Returned | None]:
        """Return a message, to be delivered again. A message that no program has `seen` does not count as delivered."""
        answer = self._check(offset, lease)
        if answer is Answer.TAKEN and not self._is_known(offset) and self._full:
            answer = Answer.STALE  # It is a message like new, and is delivered as one when there is room.
        if answer is not Answer.TAKEN:
            return answer, None
        return answer, self._return(offset, lease, not_before, seen=seen, reason=reason)

    def extend(self, offset: int, lease: int, deadline: int) -> Answer:
        """Set another deadline for a message that is still leased."""
        if offset in self.settled:
            return self._check(offset, lease)
        held = self._leased.get(offset)
        if held is None or held.number != lease:
            return Answer.STALE
        self._lease(_Lease(lease, held.consumer, Offset(offset), deadline))
        return Answer.TAKEN

    def keep(self, consumer: int, start: int, end: int, lease: int, deadline: int) -> list[int]:
        """Leave messages with a consumer that is back and has had them before: after a broken connection, or from an
        earlier owner. No lease gets shorter by this. Return the messages that are not its own any more: others have got
        them since, or they are settled."""
        lost = list[int]()
        for offset in range(start, end):
            if self._check(offset, lease) is not Answer.TAKEN:
                lost.append(offset)
                continue
            until = deadline
            if (held := self._leased.pop(offset, None)) is not None:
                self._held[held.consumer] -= 1
                until = max(deadline, held.deadline)
            self._stop_waiting(offset)
            if offset >= self._next:
                self._returned_end = max(self._returned_end, offset + 1)
            self._lease(_Lease(lease, consumer, Offset(offset), until))
            self._held[consumer] += 1
        return lost

    def keep_all(self, consumer: int, holds: Iterable[tuple[int, int, int]], deadline: int) -> list[int]:
        """Leave everything with a consumer that it names. It may name a message under two leases: that of an answer
        that was lost, and that of the next delivery. Such a message is lost to it only if neither counts."""
        lost, kept = set[int](), set[int]()
        for start, end, lease in holds:
            gone = self.keep(consumer, start, end, lease, deadline)
            lost.update(gone)
            kept.update({*range(start, end)}.difference(gone))
        return sorted(lost - kept)

    def leave(self, consumer: int, now: int) -> list[Returned]:
        """Return everything that a consumer has leased: it is gone, and says so."""
        if not self._held[consumer]:
            return []
        offsets = [offset for offset, lease in self._leased.items() if lease.consumer == consumer]
        return [self._return(each, self._leased[each].number, now, seen=True) for each in offsets]

    def forget(self, consumer: int) -> None:
        """Forget a consumer that is gone, unless leases of it run on."""
        if not self._held[consumer]:
            del self._held[consumer]

    # What time and the caller do.

    def expire(self, now: int) -> list[Returned]:
        """Return the messages whose leases have run out."""
        returned: list[Returned] = []
        while self._deadlines and self._deadlines[0].deadline <= now:
            lease = heapq.heappop(self._deadlines)
            offsets = [each for each in lease.offsets if self._leased.get(each) is lease]
            returned += [self._return(each, lease.number, now, seen=True) for each in offsets]
        return returned

    def settle(self, start: int, end: int) -> None:
        """Settle messages, whatever they are now: their time is over, or retention has deleted them."""
        known: Iterable[int] = range(start, end)
        if end - start > len(self._leased) + len(self._waiting):
            known = [each for found in (self._leased, self._waiting) for each in found if start <= each < end]
        for offset in known:
            if (lease := self._leased.pop(offset, None)) is not None:
                self._held[lease.consumer] -= 1
            self._stop_waiting(offset)
            self._past.pop(offset, None)
        self.settled.add(start, end)

    def first_unsettled(self, count: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of the first `count` messages below `end` that are not settled."""
        start = self.settled.first_unsettled(0)
        while count > 0 and start < end:
            stop = self.settled.next_settled(start, min(end, start + count))
            yield start, stop
            count -= stop - start
            start = self.settled.first_unsettled(stop)

    def returned(self) -> Iterator[Returned]:
        """What a checkpoint stores beside `settled`."""
        for offset, (deliveries, reason) in self._past.items():
            waiting = self._waiting.get(offset)
            not_before = waiting.not_before if waiting is not None else 0
            if not_before == self._held_until:  # Stored, this would follow the clock of this broker, however wrong.
                not_before = self._held_due.get(offset, not_before)
            yield Returned(Offset(offset), deliveries, not_before, reason)

    def leased_ranges(self) -> list[tuple[int, int]]:
        """Return the messages that consumers have, in order."""
        ranges: list[tuple[int, int]] = []
        for offset in sorted(self._leased):
            if ranges and ranges[-1][1] == offset:
                ranges[-1] = (ranges[-1][0], offset + 1)
            else:
                ranges.append((offset, offset + 1))
        return ranges

    # What operators ask.

    @property
    def blocked(self) -> str:
        """Why no new messages are handed out; empty: they are."""
        if len(self.settled) >= self._limits.settled_ranges:
            return f"{len(self.settled):,} ranges are settled out of order; settle the message at {self.settled.base}"
        return self._full

    @property
    def _full(self) -> str:
        """Why no more messages may wait; empty: they may."""
        if (returned := len(self._waiting) - self._like_new) >= self._limits.waiting:
            return f"{returned:,} messages wait to be delivered again"
        if self._like_new >= self._limits.delayed:
            return f"{self._like_new:,} delayed messages wait for their time"
        return ""

    @property
    def leased(self) -> int:
        return len(self._leased)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def next_lease(self) -> int:
        return self._next_lease

    def held(self, consumer: int) -> int:
        """How many messages this consumer has leased."""
        return self._held[consumer]

    def delayed(self, now: int) -> int:
        """How many messages wait for a time that has not come."""
        return sum(waiting.not_before > now for waiting in self._waiting.values())

    def unsettled(self, end: int) -> int:
        """How many messages below `end` are not settled."""
        return max(end - self.settled.base - self.settled.count, 0)

    @property
    def next_deadline(self) -> int | None:
        """When `expire` may have something to do."""
        return self._deadlines[0].deadline if self._deadlines else None

    @property
    def next_due(self) -> int | None:
        """When `take` may have a waiting message."""
        times = [self._held_until] if self._held_back is not None else []
        return min([*times, self._due[0].not_before] if self._due else times, default=None)

    # Steps.

    def _check(self, offset: int, lease: int) -> Answer:
        """Tell whether a consumer's answer counts."""
        if offset in self.settled:
            is_given_again = lease < self._first_lease and offset in self._settled_here
            return Answer.STALE if is_given_again or lease < self._settled_under.get(offset, 0) else Answer.REPEATED
        if (held := self._leased.get(offset)) is not None:
            return Answer.TAKEN if held.number == lease or self._is_later(lease, held.number) else Answer.STALE
        waiting = self._waiting.get(offset)
        last = waiting.lease if waiting is not None else 0
        return Answer.TAKEN if lease == last > 0 or self._is_later(lease, last) else Answer.STALE

    def _is_later(self, lease: int, last: int) -> bool:
        """Tell whether a lease of an earlier owner was given after the last one that is known here, which is not of
        this owner. Consumers may have answered, or named, an older lease first."""
        return last < lease < self._first_lease

    def _first_due(self, now: int) -> Offset | None:
        while self._due:
            first = self._due[0]
            if self._waiting.get(first.offset) is first:
                return Offset(first.offset) if first.not_before <= now else None
            heapq.heappop(self._due)
        return None

    def _take_due(self, first: Offset, limit: int, now: int) -> tuple[Offset, _Past]:
        """Take messages that are due and come one after the other, with the same past; return where they end."""
        past = self._past.get(first, _Past(0, ""))
        offset: int = first
        while True:
            heapq.heappop(self._due)
            self._stop_waiting(offset)
            offset += 1
            if offset >= limit or self._first_due(now) != offset or self._past.get(offset, _Past(0, "")) != past:
                return Offset(offset), past

    def _hand(self, consumer: int, start: Offset, end: Offset, deadline: int, past: _Past) -> Handed:
        number = self._next_lease
        self._next_lease += 1
        alone = end - start == 1
        self._lease(
            _Lease(number, consumer, start, deadline) if alone else _RunLease(number, consumer, start, deadline, end)
        )
        self._held[consumer] += end - start
        return Handed(start, end, number, past.deliveries, past.reason)

    def _lease(self, lease: _Lease) -> None:
        self._leased[lease.start] = lease  # The same number, not another object that is equal.
        for offset in lease.offsets[1:]:
            self._leased[offset] = lease
        heapq.heappush(self._deadlines, lease)
        if len(self._deadlines) > 2 * len(self._leased) + SWEEP_ABOVE:
            live = {id(each) for each in self._leased.values()}
            self._deadlines = [each for each in self._deadlines if id(each) in live]
            heapq.heapify(self._deadlines)

    def _return(self, offset: int, lease: int, not_before: int, *, seen: bool, reason: str = "") -> Returned:
        if (held := self._leased.pop(offset, None)) is not None:
            self._held[held.consumer] -= 1
        waited = self._stop_waiting(offset)
        past = self._past.get(offset, _Past(0, ""))
        # An answer after the time-out is the same delivery.
        deliveries = past.deliveries + 1 if seen and not waited else past.deliveries
        if len(self._past) >= self._limits.waiting and not past.reason:
            reason = ""  # Reasons are long, and answers are taken beyond the limit, too.
        returned = Returned(Offset(offset), deliveries, not_before, reason or past.reason)
        self._put_back(returned, lease)
        return returned

    def _put_back(self, returned: Returned, lease: int) -> None:
        offset, deliveries, not_before, reason = returned
        if offset >= self._next:
            self._returned_end = max(self._returned_end, offset + 1)
        if deliveries or reason:
            self._past[offset] = _shared_past(deliveries, reason)
        self._like_new += offset not in self._past
        self._waiting[offset] = waiting = _Waiting(not_before, offset, lease)
        heapq.heappush(self._due, waiting)
        if len(self._due) > 2 * len(self._waiting) + SWEEP_ABOVE:
            self._due = [*self._waiting.values()]
            heapq.heapify(self._due)

    def _stop_waiting(self, offset: int) -> bool:
        """Take a message out of those that wait; return whether it did. What is known of its past stays."""
        waited = self._waiting.pop(offset, None) is not None
        self._like_new -= waited and offset not in self._past
        return waited

    def _release_held(self, now: int) -> None:
        """Begin again with the first message when the time has come: those that nobody has named are new."""
        if self._held_back is not None and now >= self._held_until:
            self._held_back = None
            self._held_due.clear()
            self._returned_end = max(self._returned_end, self._next)
            self._next = self.settled.base

    def _is_known(self, offset: int) -> bool:
        """Tell whether an unsettled message is not new."""
        return offset in self._waiting or offset in self._leased

    def _first_new(self, end: int) -> Offset:
        """Return the first message that this owner has not handed out; `end` if there is none below it."""
        while self._next < end:
            start = self.settled.first_unsettled(self._next)
            if self._held_back is not None and start in self._held_back:
                self._next = self._held_back.first_unsettled(start)
                continue
            if start >= self._returned_end or not self._is_known(start):
                return Offset(min(start, end))
            self._next = start + 1
        return Offset(end)


def without(start: int, end: int, left_out: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges between `start` and `end` that have none of these offsets, which are in order."""
    for offset in left_out:
        if start < offset:
            yield start, offset
        start = offset + 1
    if start < end:
        yield start, end
