"""Which of several consumers keeps a message after its owner has changed."""

from __future__ import annotations

from braid.model.queue.settled import SettledOffsets
from braid.model.queue.state import Answer, QueueState

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
