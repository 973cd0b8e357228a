"""What may be concluded from several copies of a log (model/log/replication.py)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.model.ids import Epoch, Offset
from braid.model.log.replication import (
    LogPosition,
    Promise,
    elected,
    is_heir,
    replicated_end,
    votes_needed,
)

A, B, C = "a", "b", "c"


def promise(
    broker: str, epoch: int, end: int, *, sealed: bool = False, member: bool = True, promised: int = 9
) -> Promise:
    position = LogPosition(epoch=Epoch(epoch), end=Offset(end), sealed=sealed)
    return Promise(broker=broker, epoch=Epoch(promised), position=position, member=member)


def winner(
    *promises: Promise, replicas: tuple[str, ...] = (A, B, C), write_quorum: int = 2, avoid: tuple[str, ...] = ()
) -> str | None:
    found = elected(promises, replicas, write_quorum, Epoch(9), avoid)
    return found.broker if found is not None else None


def test_the_highest_position_is_elected() -> None:
    assert winner(promise(A, 3, 10), promise(B, 3, 12)) == B


def test_a_later_epoch_counts_more_than_a_longer_log() -> None:
    assert winner(promise(A, 3, 50), promise(B, 4, 12)) == B


def test_a_seal_counts_at_the_same_end() -> None:
    assert winner(promise(A, 3, 10), promise(B, 3, 10, sealed=True)) == B


def test_of_equal_copies_the_first_replica_is_elected() -> None:
    assert winner(promise(C, 3, 10), promise(B, 3, 10)) == B


def test_of_equal_copies_the_broker_that_owns_the_fewest_segments_is_elected() -> None:
    votes = [promise(A, 3, 10), promise(B, 3, 10), promise(C, 3, 10)]
    owned = {A: 5, B: 4}
    found = [elected(some, (A, B, C), 2, Epoch(9), avoid, owned) for some in (votes, votes[:2]) for avoid in ((), (C,))]
    assert [each.broker for each in found if each is not None] == [C, B, B, B]
    ahead = elected([promise(A, 3, 11), promise(C, 3, 10)], (A, B, C), 2, Epoch(9), owned=owned)
    assert ahead is not None
    assert ahead.broker == A, "it alone may hold everything"


def test_too_few_promises_elect_nobody() -> None:
    assert winner(promise(A, 3, 10)) is None


def test_a_blank_disk_is_no_witness() -> None:
    assert winner(promise(A, 3, 10), promise(B, 0, 0, member=False)) is None


def test_a_promise_of_another_epoch_does_not_count() -> None:
    assert winner(promise(A, 3, 10), promise(B, 3, 12, promised=8)) is None


def test_a_stranger_does_not_vote() -> None:
    assert winner(promise(A, 3, 10), promise("d", 5, 99)) is None


def test_a_replica_that_cannot_serve_does_not_win_if_the_others_suffice() -> None:
    """It holds the most; what the others lack was never confirmed."""
    assert winner(promise(A, 3, 15), promise(B, 3, 10), promise(C, 3, 12), avoid=(A,)) == C


def test_a_replica_that_cannot_serve_wins_if_the_others_do_not_suffice() -> None:
    """What the other one lacks may have been confirmed (I2)."""
    assert winner(promise(A, 3, 15), promise(B, 3, 10), avoid=(A,)) == A
    assert winner(promise(A, 3, 15), promise(B, 3, 10), promise(C, 0, 0, member=False), avoid=(A,)) == A
    assert winner(promise(A, 3, 10), promise(B, 3, 10), avoid=(A,)) == B


@pytest.mark.parametrize(
    ("found", "heir"),
    [
        (promise(A, 3, 10), True),
        (promise(A, 4, 10), True),
        (promise(A, 3, 9), False),
        (promise(A, 3, 10, member=False), False),
        (None, False),
    ],
    ids=["as it was", "it has begun", "its disk holds less", "a blank disk", "silent"],
)
def test_a_replica_that_was_elected_and_did_not_serve_needs_no_other_vote(found: Promise | None, heir: bool) -> None:
    assert is_heir(found, LogPosition(epoch=Epoch(3), end=Offset(10))) == heir
    assert not is_heir(found, None)


@given(st.data())
def test_the_winner_holds_everything_that_enough_replicas_hold(data: st.DataObject) -> None:
    replicas = tuple("abcdefg"[: data.draw(st.integers(1, 7))])
    write_quorum = data.draw(st.integers(1, len(replicas)))
    ends = {each: data.draw(st.integers(0, 20)) for each in replicas}
    answered = data.draw(st.sets(st.sampled_from(replicas)))
    avoid = tuple(data.draw(st.sets(st.sampled_from(replicas))))
    won = winner(
        *(promise(each, 3, ends[each]) for each in sorted(answered)),
        replicas=replicas, write_quorum=write_quorum, avoid=avoid,
    )  # fmt: skip
    assert (won is None) == (len(answered) < votes_needed(len(replicas), write_quorum))
    if won is not None:
        assert ends[won] >= replicated_end([Offset(end) for end in ends.values()], write_quorum)


@pytest.mark.parametrize(
    ("ends", "write_quorum", "expected"),
    [([7], 1, 7), ([7, 5], 2, 5), ([7, 5, 6], 2, 6), ([7, 5, 6], 3, 5), ([7], 2, 0)],
)
def test_the_watermark_is_the_wth_largest_end(ends: list[int], write_quorum: int, expected: int) -> None:
    assert replicated_end([Offset(end) for end in ends], write_quorum) == expected


@given(st.data())
def test_every_vote_meets_a_holder_of_each_confirmed_record(data: st.DataObject) -> None:
    replicas = data.draw(st.integers(1, 7))
    write_quorum = data.draw(st.integers(1, replicas))
    needed = votes_needed(replicas, write_quorum)
    brokers = range(replicas)
    holders = set(data.draw(st.permutations(brokers))[:write_quorum])
    assert all(holders & set(voters) for voters in itertools.combinations(brokers, needed))
