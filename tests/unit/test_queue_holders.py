"""Which of several consumers keeps a message after its owner has changed."""

from __future__ import annotations

from braid.model.ids import Offset
from braid.model.queue.events import Returned
from braid.model.queue.settled import SettledOffsets
from braid.model.queue.state import Answer, QueueLimits, QueueState

OLD, LATER, FIRST = 10, 20, 100


def test_the_consumer_that_got_a_message_last_keeps_it_though_another_comes_back_first() -> None:
    """The lease of the first had run out when an earlier owner gave the message to the second."""
    state = QueueState(SettledOffsets(), first_lease=FIRST)
    assert state.keep(1, 0, 1, OLD, 1_000) == []
    assert state.keep(2, 0, 1, LATER, 1_000) == []
    assert (state.held(1), state.held(2)) == (0, 1)
    assert state.nack(0, OLD, 0)[0] is Answer.STALE
    assert state.ack(0, 1, LATER) == []


def test_an_answer_under_the_last_lease_counts_though_an_older_one_was_named() -> None:
    state = QueueState(SettledOffsets(), first_lease=FIRST)
    state.keep(1, 0, 1, OLD, 1_000)
    assert state.ack(0, 1, LATER) == []
    assert (state.leased, state.held(1)) == (0, 0)


def test_an_answer_after_another_consumer_settled_the_message_is_stale_also_at_another_owner() -> None:
    """Nothing was delivered twice by this owner: only the lease tells that an earlier one gave the message away."""
    state = QueueState(SettledOffsets(), first_lease=FIRST, held_back=[(0, 2)], held_until=1_000)
    (handed,) = state.take(1, 1, 0, 2, 1_000, 2_000)
    assert state.ack(0, 1, handed.lease) == []
    assert state.ack(0, 2, OLD) == [0]  # Nobody else has got message 1.
    assert state.nack(0, OLD, 0) == (Answer.STALE, None)
    assert state.extend(0, OLD, 3_000) is Answer.STALE
    assert state.ack(0, 1, handed.lease) == []


def test_settled_messages_that_had_come_back_are_remembered_up_to_a_limit() -> None:
    state = QueueState(SettledOffsets(), limits=QueueLimits(remembered=2))
    (slow,) = state.take(1, 3, 0, 3, 0, 1_000)
    state.expire(1_000)
    (fast,) = state.take(2, 3, 0, 3, 1_000, 2_000)
    assert state.ack(0, 3, fast.lease) == []
    assert state.ack(0, 3, slow.lease) == [1, 2]


def test_ranges_that_were_taken_over_and_settled_are_remembered_up_to_a_limit() -> None:
    limits = QueueLimits(remembered=2)
    state = QueueState(SettledOffsets(), first_lease=FIRST, held_back=[(0, 9)], held_until=1_000, limits=limits)
    (handed,) = state.take(1, 9, 0, 9, 1_000, 2_000)
    for offset in (2, 4, 6):
        assert state.ack(offset, offset + 1, handed.lease) == []
    assert state.ack(0, 9, OLD) == [0, 1, 2, 3, 4, 5, 7, 8]  # 6 is forgotten, and the others are leased.


def test_an_owner_stores_when_a_message_is_due_and_not_for_how_long_it_waits_for_holders() -> None:
    """The time that is stored is that of a clock on a wall. The next owner may have another one."""
    returned = [Returned(Offset(each), 1, not_before) for each, not_before in enumerate((0, 1_000, 9_000, 0))]
    state = QueueState(SettledOffsets(), returned, first_lease=FIRST, held_back=[(0, 3)], held_until=1_500)
    assert [each.not_before for each in state.returned()] == [0, 1_000, 9_000, 0]
    assert state.peek(0, 4) == 3
    assert state.peek(1_500, 4) == 3, "it is due for the longest time"
