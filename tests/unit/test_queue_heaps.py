"""Leases and delays of many messages: none is forgotten when those that are over are swept out, and messages that are
handed out together have the same past."""

from __future__ import annotations

from random import Random

import pytest

from braid.model.ids import Offset
from braid.model.queue.events import Returned
from braid.model.queue.settled import SettledOffsets
from braid.model.queue.state import SWEEP_ABOVE, QueueLimits, QueueState

MANY = 10 * SWEEP_ABOVE
FAR = 10**9


@pytest.mark.parametrize("seed", range(5))
def test_leases_run_out_at_their_times_after_a_sweep(seed: int) -> None:
    random = Random(seed)
    state = QueueState(SettledOffsets())
    deadlines = {}
    for offset in range(MANY):
        deadlines[offset] = random.randrange(1, 1_000)
        (handed,) = state.take(1, 1, 0, MANY, 0, deadlines[offset])
        state.extend(offset, handed.lease, deadlines[offset])  # The first entry of the heap is over.
        if offset % 3:
            state.ack(offset, offset + 1, handed.lease)
            del deadlines[offset]
    for now in range(0, 1_001, 50):
        due = sorted(offset for offset, deadline in deadlines.items() if now - 50 < deadline <= now)
        assert sorted(each.offset for each in state.expire(now)) == due


@pytest.mark.parametrize("seed", range(5))
def test_messages_are_due_at_their_times_after_a_sweep(seed: int) -> None:
    random = Random(seed)
    state = QueueState(SettledOffsets())
    due = {}
    for offset in range(MANY):
        (handed,) = state.take(1, 1, 0, MANY, 0, FAR)
        due[offset] = random.randrange(1, 1_000)
        state.nack(offset, handed.lease, due[offset])
        if offset % 3:
            state.ack(offset, offset + 1, handed.lease)
            del due[offset]
    for now in range(0, 1_001, 50):
        handed_now = {each for run in state.take(1, MANY, 0, MANY, now, FAR) for each in range(run.start, run.end)}
        assert handed_now == {offset for offset, at in due.items() if now - 50 < at <= now}


def test_messages_with_another_past_are_handed_out_apart() -> None:
    returned = [
        Returned(Offset(offset), count, 0, why) for offset, count, why in ((0, 1, ""), (1, 1, ""), (2, 2, "no"))
    ]
    state = QueueState(SettledOffsets(), returned)
    handed = [(each.start, each.end, each.deliveries, each.reason) for each in state.take(1, 9, 0, 3, 0, FAR)]
    assert handed == [(0, 2, 1, ""), (2, 3, 2, "no")]


def test_a_lease_that_nobody_ever_had_settles_nothing() -> None:
    """What came back before this owner was there has no lease here."""
    state = QueueState(SettledOffsets(), [Returned(Offset(0), 1, 0)], first_lease=100)
    assert state.ack(0, 2, 0) == [0, 1]
    assert state.ack(0, 2, -1) == [0, 1]
    assert state.ack(0, 1, 99) == [], "an earlier owner's"


def test_a_leased_message_is_returned_also_at_the_limit() -> None:
    state = QueueState(SettledOffsets(), limits=QueueLimits(waiting=1))
    leases = [state.take(1, 1, 0, 3, 0, FAR)[0].lease for _ in range(3)]
    events = [state.nack(offset, lease, 500)[1] for offset, lease in enumerate(leases)]
    assert [each.deliveries for each in events if each is not None] == [1, 1, 1]
