"""Any sequence of deliveries, answers, time-outs and fail-overs, beside a model that looks at one message at a time."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from braid.model.ids import Offset
from braid.model.queue.events import Returned
from braid.model.queue.settled import SettledOffsets
from braid.model.queue.state import Answer, QueueLimits, QueueState

LEASE_US = 100
LIMITS = QueueLimits(settled_ranges=8, waiting=12, delayed=12, remembered=4)


class Delivery(NamedTuple):
    offset: int
    lease: int


class QueueMachine(RuleBasedStateMachine):
    @initialize(base=st.integers(0, 5))
    def begin(self, base: int) -> None:
        self.now = 0
        self.end = base
        self.settled = set(range(base))
        self.deliveries: dict[int, int] = {}
        """How often each message was returned, as the events say."""
        self.holder: dict[int, int] = {}
        """The last lease of each message, of this owner."""
        self.over: set[int] = set()
        """Leases' messages that were returned: they wait."""
        self.not_before: dict[int, int] = {}
        self.deadline: dict[int, int] = {}
        self.given: list[Delivery] = []
        """Everything that consumers ever got."""
        self.settled_under: dict[int, int] = {}
        """The leases under which the last messages were settled that had come back."""
        self.inherited_end = 0
        self.settled_here: set[int] = set()
        """Of earlier owners' messages, those that were settled under leases of this one."""
        self.first_lease = 1
        self.base = base
        self.held_back: set[int] = set()
        self.held_until = 0
        self.state = QueueState(SettledOffsets(base), limits=LIMITS)

    @rule(count=st.integers(1, 6))
    def publish(self, count: int) -> None:
        self.end += count

    @rule(count=st.integers(1, 6), consumer=st.integers(0, 2))
    def take(self, count: int, consumer: int) -> None:
        blocked = self.state.blocked
        first = self.state.peek(self.now, self.end)
        handed = self.state.take(consumer, count, 0, self.end, self.now, self.now + LEASE_US)
        assert (handed[0].start if handed else None) == first
        offsets = [offset for each in handed for offset in range(each.start, each.end)]
        assert len(offsets) == len(set(offsets)) <= count
        for each in handed:
            for offset in range(each.start, each.end):
                assert offset < self.end
                assert offset not in self.settled
                assert offset not in self.holder or offset in self.over, "somebody has it"
                assert self.not_before.get(offset, 0) <= self.now
                assert not self._is_held(offset), "its consumer may come back"
                assert each.deliveries == self.deliveries.get(offset, 0)
                assert offset in self.not_before or not blocked
                self.holder[offset] = each.lease
                self.deadline[offset] = self.now + LEASE_US
                self.over.discard(offset)
                self.not_before.pop(offset, None)
                self.given.append(Delivery(offset, each.lease))
        if len(offsets) < count and not self.state.blocked:
            assert not self._ready(), "a message is ready, and a consumer wants one"

    def _ready(self) -> list[int]:
        return [
            offset
            for offset in range(self.end)
            if offset not in self.settled
            and (offset not in self.holder or offset in self.over)
            and self.not_before.get(offset, 0) <= self.now
            and not self._is_held(offset)
        ]

    def _is_held(self, offset: int) -> bool:
        return offset in self.held_back and self.now < self.held_until and offset not in self.over

    def _expected(self, delivery: Delivery) -> Answer:
        offset, lease = delivery
        if offset in self.settled:
            given_again = lease < self.first_lease and offset in self.settled_here
            return Answer.STALE if given_again or lease < self.settled_under.get(offset, 0) else Answer.REPEATED
        last = self.holder.get(offset)
        if (last or 0) < lease < self.first_lease:  # No consumer has got it from this owner, or later from another one.
            return Answer.TAKEN
        return Answer.TAKEN if last == lease else Answer.STALE

    @rule(data=st.data(), more=st.integers(0, 3))
    def ack(self, data: st.DataObject, more: int) -> None:
        if self.given:
            offset, lease = data.draw(st.sampled_from(self.given))
            offsets = range(offset, min(offset + 1 + more, self.end))
            expected = {each: self._expected(Delivery(each, lease)) for each in offsets}
            stale = self.state.ack(offsets.start, offsets.stop, lease)
            assert stale == [each for each in offsets if expected[each] is Answer.STALE]
            for each in offsets:
                if expected[each] is Answer.TAKEN:
                    self._settle(each)
                    if self.deliveries.get(each):
                        self.settled_under[each] = lease
                        self.settled_under = dict(list(self.settled_under.items())[-LIMITS.remembered :])
            self._note_settled_here([each for each in offsets if each not in stale], lease)

    @rule(data=st.data(), delay=st.integers(0, 300), seen=st.booleans())
    def nack(self, data: st.DataObject, delay: int, seen: bool) -> None:
        if self.given:
            delivery = data.draw(st.sampled_from(self.given))
            expected = self._expected(delivery)
            answer, returned = self.state.nack(*delivery, self.now + delay, seen=seen)
            if answer is Answer.STALE and expected is Answer.TAKEN:
                assert len(self.not_before) >= min(LIMITS.waiting, LIMITS.delayed), "nobody else has got it"
                assert delivery.offset not in self.not_before.keys() | self.deadline.keys()
                return
            assert answer is expected
            assert (returned is not None) is (expected is Answer.TAKEN)
            if returned is not None:
                assert returned.not_before == self.now + delay
                waits = delivery.offset in self.not_before
                self._return(returned, counts=seen and not waits, lease=delivery.lease)

    @rule(data=st.data(), more=st.integers(1, 300))
    def extend(self, data: st.DataObject, more: int) -> None:
        if self.given:
            offset, lease = data.draw(st.sampled_from(self.given))
            answer = self.state.extend(offset, lease, self.now + more)
            if offset in self.settled:
                assert answer is self._expected(Delivery(offset, lease))
            elif self.holder.get(offset) == lease and offset not in self.over:
                assert answer is Answer.TAKEN
                self.deadline[offset] = self.now + more
            else:
                assert answer is Answer.STALE

    @rule(data=st.data())
    def answer_late(self, data: st.DataObject) -> None:
        if late := [each for each in self.given if each.offset in self.settled]:
            delivery = data.draw(st.sampled_from(late))
            assert self.state.nack(*delivery, self.now) == (self._expected(delivery), None)

    @rule(data=st.data(), consumer=st.integers(0, 2))
    def come_back(self, data: st.DataObject, consumer: int) -> None:
        """A consumer has another channel, perhaps at another owner, and names a message that it still has."""
        if self.given:
            delivery = data.draw(st.sampled_from(self.given))
            offset, lease = delivery
            expected = self._expected(delivery)
            lost = self.state.keep(consumer, offset, offset + 1, lease, self.now + LEASE_US)
            assert lost == ([] if expected is Answer.TAKEN else [offset])
            if expected is Answer.TAKEN:
                self.holder[offset] = lease
                self.deadline[offset] = max(self.now + LEASE_US, self.deadline.get(offset, 0))
                self.over.discard(offset)
                self.not_before.pop(offset, None)

    @rule(passed=st.integers(1, 150))
    def wait(self, passed: int) -> None:
        self.now += passed
        due = {each for each, deadline in self.deadline.items() if deadline <= self.now}
        returned = self.state.expire(self.now)
        assert {each.offset for each in returned} == due
        for each in returned:
            self._return(each, counts=True, lease=self.holder[each.offset])

    @rule(data=st.data(), length=st.integers(1, 4))
    def outlive(self, data: st.DataObject, length: int) -> None:
        """Messages are too old, or retention has deleted them."""
        if self.end:
            start = data.draw(st.integers(0, self.end - 1))
            self.state.settle(start, min(start + length, self.end))
            for offset in range(start, min(start + length, self.end)):
                self._settle(offset)

    @rule(patience=st.integers(0, 150), orderly=st.booleans())
    def fail_over(self, patience: int, orderly: bool) -> None:
        """Another owner begins with what a checkpoint and events say. Nobody has a lease of it. It holds back what the
        last owner says to be leased, or everything."""
        returned = list(self.state.returned())
        assert all(each.deliveries or each.reason for each in returned), "what is only delayed is not stored"
        settled = SettledOffsets(self.state.settled.base, self.state.settled)
        held_back = self.state.leased_ranges() if orderly else [(0, self.end)]
        self.held_back = {offset for start, end in held_back for offset in range(start, end)}
        self.held_until = self.now + patience
        self.inherited_end = max(self.held_back, default=-1) + 1
        self.settled_under = {}
        self.settled_here = set()
        self.first_lease += 1_000
        self.state = QueueState(
            settled,
            returned,
            first_lease=self.first_lease,
            limits=LIMITS,
            held_back=held_back,
            held_until=self.held_until,
        )
        self.holder.clear()
        self.over.clear()
        self.deadline.clear()
        self.not_before = {each.offset: each.not_before for each in returned}

    def _note_settled_here(self, offsets: list[int], lease: int) -> None:
        if lease < self.first_lease:
            return
        fits = False
        for at, offset in enumerate(offsets):
            known = self.settled_here
            begins = at == 0 or offsets[at - 1] != offset - 1
            if begins:  # What is not a part of the first run is a range.
                first_gap = next(each for each in range(self.end + 1) if each not in known)
                ranges = sum(each > first_gap and each - 1 not in known for each in known)
                fits = ranges < LIMITS.remembered
            if fits and offset < self.inherited_end:
                known.add(offset)

    def _settle(self, offset: int) -> None:
        self.settled.add(offset)
        for found in (self.holder, self.not_before, self.deadline):
            found.pop(offset, None)
        self.over.discard(offset)

    def _return(self, returned: Returned, *, counts: bool, lease: int) -> None:
        offset = returned.offset
        self.deliveries[offset] = self.deliveries.get(offset, 0) + counts
        assert returned.deliveries == self.deliveries[offset]
        self.holder[offset] = lease
        self.over.add(offset)
        self.not_before[offset] = returned.not_before
        self.deadline.pop(offset, None)

    @invariant()
    def settled_is_settled(self) -> None:
        if not hasattr(self, "state"):
            return
        state = self.state
        assert {offset for offset in range(self.end) if offset in state.settled} == self.settled
        assert state.settled.base not in state.settled
        assert state.unsettled(Offset(self.end)) == self.end - len(self.settled)
        assert state.leased == len(self.deadline)
        assert sum(state.held(consumer) for consumer in range(3)) == state.leased
        assert len(state._due) <= 2 * state.waiting + 65
        assert len(state._deadlines) <= 2 * state.leased + 65


TestQueueState = QueueMachine.TestCase
