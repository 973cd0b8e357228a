"""The ownership record as a state machine."""

from __future__ import annotations

import pytest

from braid.model.errors import BrokenInvariant, MetadataCorrupt
from braid.model.ids import Epoch
from braid.model.ownership import Move, Ownership, OwnershipState

FIRST = Ownership.first("b1")
SERVING = FIRST.serving(("b1",))
MOVING = SERVING.moving(Move(to="b2", id="m"))
DRAINING = MOVING.draining()
SEALED = DRAINING.sealed(("b1", "b2"))


def test_a_move_goes_through_every_state_and_ends_with_the_next_epoch() -> None:
    assert [each.state.value for each in (FIRST, SERVING, MOVING, DRAINING, SEALED)] == [
        "ASSIGNED", "SERVING", "SERVING", "DRAINING", "SEALED",
    ]  # fmt: skip
    assert {each.epoch for each in (FIRST, SERVING, MOVING, DRAINING, SEALED)} == {1}
    assert SEALED.move == Move(to="b2", id="m")
    taken = SEALED.assigned("b2")
    assert (taken.state, taken.owner, taken.epoch, taken.move) == (OwnershipState.ASSIGNED, "b2", 2, None)
    assert taken.holders == ("b1", "b2")
    assert taken.serving(("b2",)).holders == ("b2",)


def test_what_was_confirmed_and_not_sealed_cannot_be_continued_elsewhere_without_accepting_the_loss() -> None:
    for record in (SERVING, MOVING, DRAINING, SERVING.taken_again(), DRAINING.taken_again()):
        with pytest.raises(BrokenInvariant, match="I2"):
            record.assigned("b2")
    lost = SERVING.assigned("b2", accept_loss=True)
    assert (lost.clean, lost.accept_loss, lost.epoch) == (True, True, 2)
    assert lost.assigned("b3").accept_loss, "a broker that died before it served has nothing to lose"
    assert not lost.serving().accept_loss


def test_clean_is_true_until_somebody_serves_and_again_when_it_is_sealed() -> None:
    assert FIRST.clean
    assert FIRST.taken_again().clean
    assert SEALED.clean
    assert SEALED.assigned("b2").clean
    for record in (SERVING, MOVING, DRAINING, SERVING.taken_again()):
        assert not record.clean


def test_an_owner_that_restarts_keeps_the_wish_to_move_in_a_new_epoch() -> None:
    for record in (SERVING, MOVING, DRAINING):
        again = record.taken_again()
        assert (again.state, again.owner, again.epoch, again.move) == (
            OwnershipState.ASSIGNED, "b1", 2, record.move,
        )  # fmt: skip


def test_a_move_that_is_given_up_leaves_its_reason_and_no_wish() -> None:
    kept = MOVING.kept("b2 is gone")
    assert (kept.state, kept.epoch, kept.move, kept.refusal) == (OwnershipState.SERVING, 1, None, "b2 is gone")
    back = DRAINING.kept("storage is full")
    assert (back.state, back.epoch, back.move, back.refusal) == (OwnershipState.ASSIGNED, 2, None, "storage is full")
    assert kept.moving(Move(to="b3")).refusal == ""


def test_an_owner_that_cannot_open_says_why_and_keeps_its_epoch() -> None:
    told = SERVING.taken_again().unopened("no files", lasting=True)
    assert (told.state, told.owner, told.epoch, told.clean) == (OwnershipState.ASSIGNED, "b1", 2, False)
    failure = told.failure_of("b1")
    assert failure is not None
    assert (failure.reason, failure.lasting) == ("no files", True)
    assert told.unopened("no files", lasting=True) == told, "it is written once"
    assert told.taken_again().failures == told.failures
    assert told.serving().failures == ()
    assert len(told.unopened("x" * 10_000, lasting=True).to_json()) < 2_000


def test_brokers_that_could_not_open_are_remembered_until_one_is_to_try_again() -> None:
    first = SEALED.assigned("b2").unopened("no chunks", lasting=True)
    second = first.assigned("b1").unopened("no disk", lasting=False)
    assert [each.broker for each in second.failures] == ["b1", "b2"]
    assert [each.broker for each in second.assigned("b2").failures] == ["b1"]


def test_only_an_owner_that_is_to_open_can_fail_to() -> None:
    for record in (SERVING, DRAINING, SEALED):
        with pytest.raises(BrokenInvariant, match="I3"):
            record.unopened("no files", lasting=True)


def test_disks_that_are_given_up_are_named_until_the_segment_is_served() -> None:
    lost = SERVING.assigned("b2", accept_loss=True, given_up=("b1",))
    assert lost.given_up == ("b1",)
    assert lost.assigned("b3").given_up == ("b1",)
    assert lost.assigned("b3").serving().given_up == ()


def test_what_no_other_disk_holds_is_kept_by_the_owner_or_if_the_record_is_clean_by_its_holders() -> None:
    assert SERVING.keepers == ("b1",)
    assert SEALED.keepers == ("b1", "b2")
    assert DRAINING.sealed().keepers == ()


def test_owner_and_epoch_hold_it_until_it_is_sealed() -> None:
    for record in (SERVING, MOVING, DRAINING):
        assert record.is_held_by("b1", Epoch(1))
        assert not record.is_held_by("b2", Epoch(1))
        assert not record.is_held_by("b1", Epoch(2))
    assert not SEALED.is_held_by("b1", Epoch(1))


def test_records_survive_the_store_and_one_of_an_older_version_is_read() -> None:
    for record in (FIRST, SERVING, MOVING, DRAINING, SEALED):
        assert Ownership.from_json(record.to_json()) == record
    old = Ownership.from_json(b'{"state":"SERVING","owner":"b1","epoch":7}')
    assert (old.epoch, old.clean, old.holders, old.move) == (7, False, (), None)
    assert (old.replicas, old.write_quorum, old.elected, old.change) == ((), 1, None, None)
    with pytest.raises(MetadataCorrupt):
        Ownership.from_json(b'{"state":"RULING"}')
