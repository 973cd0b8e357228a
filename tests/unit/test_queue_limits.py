"""What a queue does at its limits: new messages wait, and everything else goes on."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from braid.model.queue.settled import SettledOffsets
from braid.model.queue.state import DEFAULT_LIMITS, QueueLimits, QueueState

END = 100


def state_of(**limits: int) -> QueueState:
    return QueueState(SettledOffsets(), limits=QueueLimits(**limits))


def take(state: QueueState, count: int, now: int = 0) -> list[tuple[int, int]]:
    """Take messages one by one; return offsets and leases."""
    taken = [each for _ in range(count) for each in state.take(1, 1, 0, END, now, now + 1_000)]
    return [(int(each.start), each.lease) for each in taken]


def blocked(state: QueueState) -> str:
    return state.blocked


def test_delayed_messages_leave_room_for_those_that_came_back() -> None:
    state = state_of(waiting=2, delayed=4)
    for offset, lease in take(state, 3):
        state.nack(offset, lease, 500, seen=False)
    assert blocked(state) == ""
    (first, second) = take(state, 2)
    assert (first[0], second[0]) == (3, 4), "messages after the delayed ones"
    state.nack(*first, 600)
    assert blocked(state) == ""
    state.nack(*second, 600)
    assert blocked(state) == "2 messages wait to be delivered again"


def test_so_many_delayed_messages_hold_up_new_ones_and_no_more() -> None:
    state = state_of(waiting=2, delayed=4)
    for offset, lease in take(state, 4):
        state.nack(offset, lease, 500, seen=False)
    assert blocked(state) == "4 delayed messages wait for their time"
    assert take(state, 1) == []
    assert [offset for offset, _ in take(state, 5, now=500)] == [0, 1, 2, 3, 4]


def test_a_message_that_is_only_delayed_is_not_stored() -> None:
    state = state_of()
    (delayed, failed) = take(state, 2)
    state.nack(*delayed, 500, seen=False)
    state.nack(*failed, 500, reason="no")
    assert [(each.offset, each.deliveries) for each in state.returned()] == [(1, 1)]


class Counted(dict[int, Any]):
    """Counts how often all of it was looked at."""

    scans = 0

    def __iter__(self) -> Iterator[int]:
        self.scans += 1
        return super().__iter__()


def test_a_message_that_grows_too_old_is_not_looked_for_among_all_that_wait() -> None:
    """A limit of age settles one batch after the other, beside 100,000 messages that are delayed."""
    state = state_of()
    for offset, lease in take(state, 50):
        state.nack(offset, lease, 500, seen=False)
    state._waiting = waiting = Counted(state._waiting)
    for offset in range(40, 60):
        state.settle(offset, offset + 1)
    assert waiting.scans == 0
    assert (state.waiting, state.unsettled(END)) == (40, 80)
    state.settle(0, 10**12)
    assert (waiting.scans, state.waiting, state.unsettled(END)) == (1, 0, 0)


def test_reasons_beyond_the_limit_are_not_kept_and_counts_are() -> None:
    """Consumers may return much more than may wait. Each reason takes up to 800 bytes of a journal's frame."""
    state = state_of(waiting=2)
    for offset, lease in take(state, 4):
        state.nack(offset, lease, 500, reason="no")
    (first, *_) = take(state, 1, now=500)
    state.nack(*first, 500, reason="still no")
    kept = [(each.offset, each.deliveries, each.reason) for each in state.returned()]
    assert kept == [(0, 2, "still no"), (1, 1, "no"), (2, 1, ""), (3, 1, "")]


MANY = 50_000


def bytes_for_each(fill: Callable[[QueueState], None], count: int = MANY) -> float:
    """Return the memory that a state takes for each of so many messages."""
    tracemalloc.start()
    try:
        state = state_of()
        before = tracemalloc.get_traced_memory()[0]
        fill(state)
        assert state.leased + state.waiting == count
        return (tracemalloc.get_traced_memory()[0] - before) / count
    finally:
        tracemalloc.stop()


def test_a_message_that_is_leased_alone_takes_at_most_200_bytes() -> None:
    deadline = 10**15  # An owner gives leases of about the same moment the same deadline.

    def lease_alone(state: QueueState) -> None:
        for _ in range(MANY):
            state.take(1, 1, 0, MANY, 10**14, deadline)

    assert bytes_for_each(lease_alone) <= 200


def test_a_delayed_message_takes_at_most_200_bytes() -> None:
    def delay_each(state: QueueState) -> None:
        for _ in range(MANY // 10):
            for handed in state.take(1, 10, 0, MANY, 10**14, 10**15):
                for offset in range(handed.start, handed.end):
                    state.nack(offset, handed.lease, 10**15 + offset, seen=False)

    assert bytes_for_each(delay_each) <= 200


@pytest.mark.parametrize("reason", ["", "the database is away"])
def test_a_message_that_came_back_takes_at_most_200_bytes_at_the_limit(reason: str) -> None:
    count = DEFAULT_LIMITS.waiting

    def fail_each(state: QueueState) -> None:
        while not state.blocked:
            for handed in state.take(1, 10, 0, MANY, 10**14, 10**15):
                for offset in range(handed.start, handed.end):
                    state.nack(offset, handed.lease, 10**15 + offset, reason=reason)

    assert bytes_for_each(fail_each, count) <= 200
