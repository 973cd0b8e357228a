"""The ownership record as a state machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from braid.model.errors import BrokenInvariant, MetadataCorrupt
from braid.model.ids import Epoch, Offset
from braid.model.log.replication import LogPosition
from braid.model.ownership import TRANSITIONS, Move, Ownership, OwnershipState, ReplicaChange

FIRST = Ownership.first("b1")
SERVING = FIRST.serving(("b1",))
MOVING = SERVING.moving(Move(to="b2", id="m"))
DRAINING = MOVING.draining()
SEALED = DRAINING.sealed(("b1", "b2"))

REPLICAS = ("b1", "b2", "b3")
PLACED = Ownership.first("b1", REPLICAS, 2)
REPLICATED = PLACED.serving()
RECOVERING = REPLICATED.recovering()
POSITION = LogPosition(epoch=Epoch(1), end=Offset(17))
VOTED = RECOVERING.voted("b2", POSITION)
CHANGE = ReplicaChange(replicas=("b1", "b2", "b4"), write_quorum=3)
CHANGING = REPLICATED.changing(CHANGE)


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


@pytest.mark.parametrize("state", OwnershipState)
def test_every_transition_that_the_table_does_not_name_is_refused(state: OwnershipState) -> None:
    record = {
        OwnershipState.ASSIGNED: VOTED,
        OwnershipState.SERVING: REPLICATED,
        OwnershipState.DRAINING: REPLICATED.draining(),
        OwnershipState.SEALED: REPLICATED.draining().sealed(),
        OwnershipState.RECOVERING: RECOVERING,
    }[state]
    steps: dict[OwnershipState, Callable[[], Ownership]] = {
        OwnershipState.SERVING: record.serving,
        OwnershipState.DRAINING: record.draining,
        OwnershipState.SEALED: record.sealed,
        OwnershipState.ASSIGNED: lambda: record.assigned(record.owner, accept_loss=True),
        OwnershipState.RECOVERING: record.recovering,
    }
    assert set(steps) == set(OwnershipState) == set(TRANSITIONS)
    for wanted, step in steps.items():
        if wanted in TRANSITIONS[state]:
            assert step().state is wanted
        else:
            with pytest.raises(BrokenInvariant, match="I3"):
                step()


def test_a_segment_whose_owner_is_gone_recovers_in_the_next_epoch() -> None:
    for record in (REPLICATED, REPLICATED.moving(Move(to="b2")), REPLICATED.draining(), REPLICATED.taken_again()):
        found = record.recovering()
        assert (found.state, found.owner, found.epoch, found.move) == (
            OwnershipState.RECOVERING, "b1", record.epoch + 1, None,
        )  # fmt: skip
        assert (found.replicas, found.write_quorum, found.clean) == (REPLICAS, 2, False)
    unable = REPLICATED.taken_again().unopened("no files", lasting=True)
    assert unable.recovering().failures == unable.failures
    assert RECOVERING.recovering().epoch == RECOVERING.epoch + 1


def test_the_vote_assigns_in_the_epoch_that_was_promised() -> None:
    assert (VOTED.state, VOTED.owner, VOTED.epoch, VOTED.elected) == (
        OwnershipState.ASSIGNED, "b2", RECOVERING.epoch, POSITION,
    )  # fmt: skip
    assert not VOTED.accept_loss
    assert not VOTED.clean
    assert VOTED.taken_again().elected == POSITION, "the owner's disk must hold it, however often the owner tries"
    assert VOTED.serving().elected is None
    assert VOTED.recovering().elected is None, "the next vote finds its own"
    lossy = RECOVERING.voted("b2", POSITION, accept_loss=True, given_up=("b3", "b1"))
    assert (lossy.accept_loss, lossy.given_up, lossy.elected) == (True, ("b1", "b3"), POSITION)
    assert not lossy.recovering().accept_loss, "the next vote may find more"


def test_only_a_replica_of_a_recovering_segment_is_elected() -> None:
    with pytest.raises(BrokenInvariant, match="I3"):
        RECOVERING.voted("b4", POSITION)
    for record in (PLACED, REPLICATED, VOTED):
        with pytest.raises(BrokenInvariant, match="I3"):
            record.voted("b2", POSITION)


def test_a_segment_that_is_clean_or_has_no_replicas_does_not_recover() -> None:
    for record in (FIRST, SERVING, PLACED, REPLICATED.complete(), REPLICATED.draining().sealed()):
        with pytest.raises(BrokenInvariant, match="I3"):
            record.recovering()


def test_a_replicated_segment_goes_to_another_broker_only_by_a_vote_a_seal_or_an_accepted_loss() -> None:
    for record in (REPLICATED, REPLICATED.draining(), REPLICATED.taken_again(), RECOVERING, VOTED):
        with pytest.raises(BrokenInvariant, match="I2"):
            record.assigned("b3")
        assert record.assigned("b3", accept_loss=True).accept_loss
    assert REPLICATED.draining().sealed().assigned("b3").replicas == REPLICAS


def test_the_last_owner_has_nothing_while_the_replicas_vote() -> None:
    assert not RECOVERING.is_held_by("b1", RECOVERING.epoch)
    for step in (RECOVERING.taken_again, lambda: RECOVERING.kept("its target is gone")):
        with pytest.raises(BrokenInvariant, match="I3"):
            step()


def test_the_owner_is_one_of_the_replicas_and_enough_of_them_can_confirm() -> None:
    with pytest.raises(BrokenInvariant, match="I2"):
        Ownership.first("b4", REPLICAS, 2)
    sealed = REPLICATED.draining().sealed()
    with pytest.raises(BrokenInvariant, match="I2"):
        sealed.assigned("b4")
    assert sealed.assigned("b4", replicas=("b4", "b2"), write_quorum=2).replicas == ("b4", "b2")
    for replicas, write_quorum in ((("b1", "b2"), 3), (("b1", "b1"), 1), (("b1", "b2"), 0), ((), 2)):
        with pytest.raises(BrokenInvariant, match="I2"):
            REPLICATED.replicas_changed(replicas, write_quorum)


def test_the_owner_that_serves_changes_the_replicas() -> None:
    changed = REPLICATED.replicas_changed(("b1", "b2", "b4"), 3)
    assert (changed.state, changed.epoch, changed.replicas, changed.write_quorum) == (
        OwnershipState.SERVING, 1, ("b1", "b2", "b4"), 3,
    )  # fmt: skip
    for record in (PLACED, RECOVERING, VOTED, REPLICATED.draining()):
        with pytest.raises(BrokenInvariant, match="I3"):
            record.replicas_changed(("b1", "b2"), 2)


def test_the_leader_asks_the_owner_that_serves_for_other_replicas() -> None:
    assert (CHANGING.state, CHANGING.epoch, CHANGING.change) == (OwnershipState.SERVING, 1, CHANGE)
    assert (CHANGING.replicas, CHANGING.write_quorum) == (REPLICAS, 2), "the owner has not done it yet"
    done = CHANGING.replicas_changed(CHANGE.replicas, CHANGE.write_quorum)
    assert (done.replicas, done.write_quorum, done.change) == (CHANGE.replicas, 3, None)
    assert CHANGING.changing(None) == REPLICATED, "the leader can take it back"
    for record in (PLACED, REPLICATED.moving(Move(to="b2")), REPLICATED.draining(), RECOVERING, VOTED):
        with pytest.raises(BrokenInvariant, match="I3"):
            record.changing(CHANGE)


def test_a_segment_becomes_replicated_and_unreplicated_by_a_change() -> None:
    more = SERVING.changing(ReplicaChange(replicas=REPLICAS, write_quorum=2)).replicas_changed(REPLICAS, 2)
    assert (more.replicas, more.write_quorum) == (REPLICAS, 2)
    fewer = more.changing(ReplicaChange(replicas=(), write_quorum=1)).replicas_changed((), 1)
    assert fewer == SERVING


@pytest.mark.parametrize(
    ("replicas", "write_quorum"),
    [(("b2", "b3"), 2), (("b1", "b2"), 3), (("b1", "b1"), 1), (("b1", "b2"), 0), ((), 2)],
)
def test_a_change_names_the_owner_and_enough_replicas(replicas: tuple[str, ...], write_quorum: int) -> None:
    with pytest.raises(BrokenInvariant, match="I2"):
        REPLICATED.changing(ReplicaChange(replicas=replicas, write_quorum=write_quorum))


def test_a_change_ends_with_the_owner_s_epoch_and_with_a_move() -> None:
    for record in (
        CHANGING.taken_again(),
        CHANGING.assigned("b1"),
        CHANGING.assigned("b2", accept_loss=True),
        CHANGING.draining().kept("its target is gone"),
        CHANGING.recovering(),
        CHANGING.moving(Move(to="b2")),
    ):
        assert record.change is None
        assert record.replicas == REPLICAS, "what the owner had not done yet does not count"
    assert CHANGING.ended(Offset(7)).change == CHANGE


def test_an_assignment_changes_replicas_only_where_nothing_can_be_lost() -> None:
    for record in (REPLICATED, REPLICATED.draining(), REPLICATED.taken_again()):
        with pytest.raises(BrokenInvariant, match="I2"):
            record.assigned("b1", replicas=("b1", "b4"), write_quorum=2)
        assert record.assigned("b1", replicas=REPLICAS, write_quorum=2).replicas == REPLICAS
        lost = record.assigned("b4", replicas=("b4", "b5"), write_quorum=2, accept_loss=True)
        assert (lost.replicas, lost.clean) == (("b4", "b5"), True)
    assert PLACED.assigned("b4", replicas=("b4", "b1"), write_quorum=1).replicas == ("b4", "b1")


def test_a_loss_is_accepted_for_a_vote_in_its_own_epoch() -> None:
    losing = RECOVERING.losing(("b3", "b1"))
    assert (losing.state, losing.epoch, losing.accept_loss, losing.given_up) == (
        OwnershipState.RECOVERING, RECOVERING.epoch, True, ("b1", "b3"),
    )  # fmt: skip
    assert losing.losing(("b2",)).given_up == REPLICAS
    assert losing.recovering().given_up == (), "the next vote may find more"
    assert not losing.recovering().accept_loss
    begun = REPLICATED.recovering(accept_loss=True, given_up=("b3", "b1"))
    assert begun == losing
    for record in (PLACED, REPLICATED, REPLICATED.draining(), VOTED):
        with pytest.raises(BrokenInvariant, match="I2"):
            record.losing(("b1",))


def test_what_no_other_disk_holds_is_kept_by_enough_of_the_replicas() -> None:
    assert (REPLICATED.keepers, REPLICATED.keepers_needed) == (REPLICAS, 2)
    assert (RECOVERING.keepers, RECOVERING.keepers_needed) == (REPLICAS, 2)
    assert (REPLICATED.replicas_changed(REPLICAS, 3).keepers_needed, SERVING.keepers_needed) == (1, 1)
    assert (PLACED.keepers, SEALED.keepers_needed) == ((), 1)


def test_records_survive_the_store_and_one_of_an_older_version_is_read() -> None:
    for record in (FIRST, SERVING, MOVING, DRAINING, SEALED, PLACED, REPLICATED, RECOVERING, VOTED, CHANGING):
        assert Ownership.from_json(record.to_json()) == record
    old = Ownership.from_json(b'{"state":"SERVING","owner":"b1","epoch":7}')
    assert (old.epoch, old.clean, old.holders, old.move) == (7, False, (), None)
    assert (old.replicas, old.write_quorum, old.elected, old.change) == ((), 1, None, None)
    with pytest.raises(MetadataCorrupt):
        Ownership.from_json(b'{"state":"RULING"}')
