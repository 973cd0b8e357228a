"""The simulation's checker of ownership records: which changes of replicas and votes it allows."""

from __future__ import annotations

import msgspec
import pytest

from braid.model.ids import Epoch, Offset
from braid.model.log.replication import LogPosition
from braid.model.ownership import Move, Ownership, ReplicaChange
from braid.storage.history.catalog import Frontier
from braid.testing.checkers.history import PromiseBroken
from braid.testing.checkers.ownership_checker import _check_end, _check_transition, _Kept

SEGMENT = ("public/default/orders", "0000-ffff-0")
PLACED = Ownership.first("a", ("a", "b", "c"), 2)
SERVING = PLACED.serving()
CHANGE = ReplicaChange(replicas=("a", "b", "d"), write_quorum=3)
CHANGING = SERVING.changing(CHANGE)
SEALED = SERVING.moving(Move(to="b")).draining().sealed()
RECOVERING = SERVING.recovering()
LOSING = RECOVERING.losing(("a",))
ELECTED = RECOVERING.voted("b", LogPosition(epoch=Epoch(1), end=Offset(5)))
ELSEWHERE = SERVING.assigned("d", replicas=("d", "e"), write_quorum=2, accept_loss=True, given_up=("a", "b", "c"))


def altered(record: Ownership, **changes: object) -> Ownership:
    return msgspec.structs.replace(record, **changes)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (SERVING, CHANGING),
        (CHANGING, SERVING),
        (CHANGING, SERVING.changing(ReplicaChange(replicas=(), write_quorum=1))),
        (CHANGING, CHANGING.replicas_changed(CHANGE.replicas, CHANGE.write_quorum)),
        (CHANGING, CHANGING.moving(Move(to="b"))),
        (CHANGING, CHANGING.taken_again()),
        (CHANGING, CHANGING.recovering()),
        (SEALED, SEALED.assigned("d", replicas=("d", "b"), write_quorum=2)),
        (PLACED, PLACED.assigned("d", replicas=("d", "b"), write_quorum=2)),
        (SERVING, SERVING.assigned("d", replicas=("d",), write_quorum=1, accept_loss=True)),
        (RECOVERING, RECOVERING.recovering()),
        (RECOVERING, LOSING),
        (LOSING, LOSING.losing(("c",))),
        (LOSING, LOSING.recovering()),
        (SERVING, SERVING.recovering(accept_loss=True, given_up=("a",))),
        (RECOVERING, ELECTED),
        (ELECTED, ELECTED.recovering()),
        (SERVING, ELSEWHERE),
        (ELSEWHERE, ELSEWHERE.assigned("e")),
        (ELSEWHERE, ELSEWHERE.restored("c")),
        (ELSEWHERE, ELSEWHERE.serving()),
    ],
)
def test_what_leader_and_owner_may_write_is_allowed(old: Ownership, new: Ownership) -> None:
    _check_transition(SEGMENT, old, new)


@pytest.mark.parametrize(
    ("old", "new", "promise"),
    [
        (SERVING, SERVING.replicas_changed(CHANGE.replicas, 2), "I2"),
        (CHANGING, CHANGING.replicas_changed(("a", "b"), 2), "I2"),
        (CHANGING, CHANGING.replicas_changed(CHANGE.replicas, 2), "I2"),
        (CHANGING, altered(CHANGING, replicas=CHANGE.replicas, write_quorum=3), "I2"),
        (PLACED, altered(SERVING, replicas=("a", "b")), "I2"),
        (SERVING, altered(SERVING.taken_again(), replicas=("a", "d")), "I2"),
        (CHANGING, altered(CHANGING.draining(), replicas=CHANGE.replicas, write_quorum=3, change=None), "I2"),
        (SERVING, altered(SERVING.taken_again(), change=CHANGE), "I3"),
        (CHANGING, altered(CHANGING, move=Move(to="b")), "I3"),
        (RECOVERING, altered(LOSING, replicas=("b", "c")), "I3"),
        (LOSING, altered(RECOVERING, given_up=()), "I3"),
        (LOSING, altered(LOSING, given_up=()), "I3"),
        (RECOVERING, altered(RECOVERING, epoch=Epoch(9)), "I3"),
        (RECOVERING, altered(ELECTED, epoch=Epoch(3)), "I3"),
        (RECOVERING, altered(ELECTED, owner="d"), "I3"),
        (PLACED, altered(PLACED.serving().recovering(), clean=False), "I3"),
        (ELSEWHERE, altered(ELSEWHERE.restored("c"), replicas=("c", "d")), "I2"),
        (ELSEWHERE, altered(ELSEWHERE.restored("c"), epoch=SERVING.epoch), "I2"),
        (SERVING, altered(ELSEWHERE, replicas=("d", "c")), "I2"),
    ],
)
def test_what_could_lose_a_record_is_not(old: Ownership, new: Ownership, promise: str) -> None:
    with pytest.raises(PromiseBroken, match=promise):
        _check_transition(SEGMENT, old, new)


ENDED = Ownership.first("a").serving().ended(Offset(5))
LOST = ENDED.assigned("b", accept_loss=True, given_up=("a",))


def ended_in_catalog(end: int | None) -> Frontier:
    return Frontier(
        Epoch(1),
        "a",
        begun=True,
        continues=Epoch(0),
        next_offset=Offset(0),
        end=Offset(end) if end is not None else None,
    )


def test_an_accepted_loss_may_end_a_log_earlier_if_record_and_catalog_agree() -> None:
    _check_end(SEGMENT, LOST, _Kept(LOST.serving(end=Offset(2)), ended_in_catalog(2)))


@pytest.mark.parametrize(
    ("old", "new", "end"),
    [
        (LOST, LOST.serving(), 2),
        (LOST, LOST.serving(end=Offset(2)), None),
        (ENDED.taken_again(), ENDED.taken_again().serving(end=Offset(2)), 2),
        (ENDED, altered(ENDED, ended_at=None), 5),
    ],
)
def test_an_end_is_said_once_and_alike_in_both_places(old: Ownership, new: Ownership, end: int | None) -> None:
    with pytest.raises(PromiseBroken, match="I1"):
        _check_end(SEGMENT, old, _Kept(new, ended_in_catalog(end)))
