"""The ownership record of a replicated segment: votes, hand-overs to a copy, and changes of the replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from braid.model.errors import BrokenInvariant
from braid.model.ids import Epoch, Offset
from braid.model.log.replication import LogPosition
from braid.model.ownership import TRANSITIONS, Move, Ownership, OwnershipState, ReplicaChange

FIRST = Ownership.first("b1")
SERVING = FIRST.serving(("b1",))
SEALED = SERVING.moving(Move(to="b2", id="m")).draining().sealed(("b1", "b2"))

REPLICAS = ("b1", "b2", "b3")
PLACED = Ownership.first("b1", REPLICAS, 2)
REPLICATED = PLACED.serving()
RECOVERING = REPLICATED.recovering()
POSITION = LogPosition(epoch=Epoch(1), end=Offset(17))
VOTED = RECOVERING.voted("b2", POSITION)
CHANGE = ReplicaChange(replicas=("b1", "b2", "b4"), write_quorum=3)
CHANGING = REPLICATED.changing(CHANGE)


def altered(record: Ownership, **changes: Any) -> Ownership:
    return msgspec.structs.replace(record, **changes)


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
    assert VOTED.recovering().elected == VOTED.elected, "it has confirmed nothing since"
    assert VOTED.serving().recovering().elected is None, "the next vote finds its own"
    lossy = RECOVERING.voted("b2", POSITION, accept_loss=True, given_up=("b3", "b1"))
    assert (lossy.accept_loss, lossy.given_up, lossy.elected) == (True, ("b1", "b3"), POSITION)
    assert not lossy.recovering().accept_loss, "the next vote may find more"
    assert lossy.recovering().elected is None, "replicas that were given up may hold more"
    rejoined = lossy.rejoined(("b2", "b4", "b5"), 2)
    assert rejoined.recovering().elected == POSITION, "those that were given up are too late"


def test_an_elected_owner_gets_other_replicas_only_after_an_accepted_loss() -> None:
    lossy = RECOVERING.losing(("b1", "b3")).voted("b2", POSITION)
    assert (lossy.accept_loss, lossy.given_up) == (True, ("b1", "b3"))
    joined = lossy.rejoined(("b2", "b4", "b5"), 2)
    assert (joined.state, joined.owner, joined.epoch) == (OwnershipState.ASSIGNED, "b2", lossy.epoch + 1)
    assert (joined.replicas, joined.elected, joined.accept_loss, joined.given_up) == (
        ("b2", "b4", "b5"), POSITION, True, (),
    )  # fmt: skip
    for record in (VOTED, RECOVERING, REPLICATED, SERVING.assigned("b2", accept_loss=True)):
        with pytest.raises(BrokenInvariant, match="I2"):
            record.rejoined(("b2", "b4"), 2)


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


def test_replicas_that_were_all_given_up_count_again_until_others_serve() -> None:
    for lost in (REPLICATED, CHANGING, REPLICATED.draining(), RECOVERING, VOTED):
        assigned = lost.assigned("b4", replicas=("b4", "b5"), write_quorum=2, accept_loss=True, given_up=REPLICAS)
        assert (assigned.before, assigned.given_up, assigned.clean) == (lost, REPLICAS, True)
        again = assigned.unopened("no room", lasting=False).taken_again().assigned("b5")
        assert (again.before, again.given_up) == (lost, REPLICAS)
        restored = again.restored("b3")
        assert restored == altered(lost.recovering(), epoch=again.epoch + 1)
        assert restored.elected == lost.elected
        assert again.serving().before is None
        assert Ownership.from_json(assigned.to_json()) == assigned
        for other in (lost, again.serving(), restored):
            with pytest.raises(BrokenInvariant, match="I2"):
                other.restored("b3")


def test_a_loss_is_final_when_one_of_the_replicas_gets_another_copy() -> None:
    lost: dict[str, Any] = {"accept_loss": True, "given_up": ("b2", "b3"), "write_quorum": 1}
    for owner, replicas in [("b1", ("b1", "b4")), ("b4", ("b4", "b1")), ("b1", ())]:
        assigned = REPLICATED.assigned(owner, replicas=replicas, **lost)
        assert (assigned.before, assigned.given_up, assigned.accept_loss) == (None, (), True)
    elsewhere = REPLICATED.assigned("b4", replicas=("b4",), **lost)
    assert (elsewhere.before, elsewhere.given_up) == (REPLICATED, ("b2", "b3"))
    final = elsewhere.assigned("b4", replicas=("b4", "b3"), write_quorum=1)
    assert (final.before, final.given_up, final.accept_loss) == (None, (), True)


def test_the_broker_of_a_segment_without_replicas_is_all_that_is_given_up() -> None:
    lost = SERVING.assigned("b2", replicas=("b2", "b3"), write_quorum=2, accept_loss=True, given_up=("b1",))
    assert (lost.before, lost.given_up) == (None, ("b1",))
    assert lost.assigned("b1", replicas=()).accept_loss, "its disk may be another one"


def test_replicas_are_replaced_without_a_loss_only_where_each_of_them_holds_everything() -> None:
    all_confirm = Ownership.first("b1", REPLICAS, 3).serving().recovering().voted("b2", POSITION)
    joined = all_confirm.rejoined(("b2", "b3", "b4"), 3)
    assert (joined.replicas, joined.epoch, joined.elected) == (("b2", "b3", "b4"), all_confirm.epoch + 1, POSITION)
    assert not joined.accept_loss
    for record, replicas, quorum in [
        (VOTED, ("b2", "b3", "b4"), 2),
        (VOTED, ("b2", "b3", "b4"), 3),
        (all_confirm, ("b2", "b3", "b4"), 2),
        (all_confirm, ("b2", "b4"), 2),
        (altered(all_confirm, elected=None), ("b2", "b3", "b4"), 3),
    ]:
        with pytest.raises(BrokenInvariant, match="I2"):
            record.rejoined(replicas, quorum)


def test_what_no_other_disk_holds_is_kept_by_enough_of_the_replicas() -> None:
    assert (REPLICATED.keepers, REPLICATED.keepers_needed) == (REPLICAS, 2)
    assert (RECOVERING.keepers, RECOVERING.keepers_needed) == (REPLICAS, 2)
    assert (REPLICATED.replicas_changed(REPLICAS, 3).keepers_needed, SERVING.keepers_needed) == (1, 1)
    assert (PLACED.keepers, SEALED.keepers_needed) == ((), 1)


def test_a_segment_is_handed_to_a_copy_that_takes_the_owner_s_place() -> None:
    moving = REPLICATED.moving(Move(to="b2", id="m")).draining()
    handed = moving.handed_to("b2", POSITION)
    assert (handed.state, handed.owner, handed.epoch) == (OwnershipState.ASSIGNED, "b2", moving.epoch + 1)
    assert (handed.replicas, handed.elected, handed.move, handed.clean) == (REPLICAS, POSITION, None, False)
    assert moving.handed_to("b4", POSITION).replicas == ("b4", "b2", "b3"), "b4 holds what b1 held"
    for record in (REPLICATED, Ownership.first("b1").serving().moving(Move(to="b2", id="m")).draining()):
        with pytest.raises(BrokenInvariant, match="cannot be handed to b2"):
            record.handed_to("b2", POSITION)


def test_brokers_keep_a_copy_that_are_replicas_are_to_become_one_or_are_the_target_of_a_move() -> None:
    assert REPLICATED.copies == set(REPLICAS)
    assert CHANGING.copies == {*REPLICAS, "b4"}
    assert REPLICATED.moving(Move(to="b9", id="m")).copies == {*REPLICAS, "b9"}
    assert Ownership.first("b1").serving().moving(Move(to="b9", id="m")).copies == set()


def test_replicated_records_survive_the_store() -> None:
    for record in (PLACED, REPLICATED, RECOVERING, VOTED, CHANGING):
        assert Ownership.from_json(record.to_json()) == record
