"""Decides whether a segment may move as an operator asks, and how the move ended. Pure functions.

A request puts a `Move` into the record; the owner and the leader do the rest (model/ownership.py). The caller watches
the record. A move has arrived when the segment is SERVING at the target. A move has failed when the owner keeps the
segment, for a reason that the record tells, or when the segment came to another broker.

A segment that its owner cannot open has nothing to hand over. If its record is clean, a request assigns it directly;
otherwise only an accepted loss gives it to another broker.
"""

from __future__ import annotations

from typing import NamedTuple

from braid.cluster.ownership.leader_step import anew, is_lost, next_owner, target_of
from braid.cluster.ownership.replica_sets import Patience
from braid.cluster.placement import Tally
from braid.cluster.snapshot import Placed, Snapshot
from braid.model.errors import (
    BraidError,
    BrokerNotActive,
    BrokerNotFound,
    MoveRefused,
    NotServing,
    SegmentNotFound,
    cut,
)
from braid.model.ids import Revision
from braid.model.names import SegmentName
from braid.model.ownership import Move, OpeningFailure, Ownership, OwnershipState


class MoveRequest(NamedTuple):
    """Where one segment is to go."""

    segment: SegmentName
    source: str
    target: str
    """A broker's id; empty: any other broker."""
    revision: Revision
    record: Ownership
    begins: bool
    """Whether the record has to be changed. If not, the segment is there, or the same move was requested before."""
    instead: Ownership | None = None
    """The record that is to stand instead, where it is not the present one with a move."""
    by_vote: bool = False
    """Whether the replicas choose the broker."""

    @property
    def is_there(self) -> bool:
        return self.source == self.target and self.record.state is OwnershipState.SERVING

    def begun(self, id_: str) -> Ownership:
        """Return the record with the request in it."""
        return self.instead or self.record.moving(Move(to=self.target, id=id_))


def select_segments(snapshot: Snapshot, path: str, segment_id: int | None) -> list[Placed]:
    """Return all segments of a topic, or one of them. `SegmentNotFound`"""
    found = [
        each
        for each in snapshot.segments()
        if each.path == path and (segment_id is None or each.info.segment_id == segment_id)
    ]
    if not found:
        raise SegmentNotFound(f"topic {path} has no segment {segment_id}")
    return found


def check_target(snapshot: Snapshot, to: str) -> None:
    """Raise `BrokerNotFound` or `BrokerNotActive` unless the broker may be given segments."""
    if snapshot.is_active(to):
        return
    there = ", ".join(broker for broker in snapshot.brokers if snapshot.is_active(broker)) or "none"
    if snapshot.is_live(to):
        why = "its version does not know replicas" if snapshot.brokers[to].outdated else "it is not active"
        raise BrokerNotActive(f"broker {to} cannot be given segments: {why}; the active brokers are: {there}")
    raise BrokerNotFound(f"broker {cut(to)} cannot be given segments: it is not there; the active brokers are: {there}")


def plan_move(snapshot: Snapshot, each: Placed, to: str | None, tally: Tally, patience: Patience) -> MoveRequest:
    """Decide where a segment is to go. `MoveRefused` if it cannot move, `NotServing` if it cannot move now."""
    if each.known is None:
        raise NotServing(f"{each.name} has no owner yet; try again when it is served")
    record, revision = each.known.value, each.known.revision
    owner, moves_to = record.owner, record.move.to if record.move is not None else None
    if record.state is OwnershipState.RECOVERING:
        raise NotServing(f"{each.name} cannot move now: {move_progress(record)}; try again when it is served")
    if record.state is not OwnershipState.SEALED and not snapshot.is_live(owner):
        if record.replicas and not is_lost(snapshot, record):
            raise NotServing(f"{each.name} cannot move now: its owner {owner} is down, and its replicas take over")
        raise MoveRefused(
            f"{each.name} cannot move: its owner {owner} is down; start {owner} again, or recover "
            "the segment and accept what is lost"
        )
    made = MoveRequest(each.name, owner, to or "", revision, record, begins=False)
    if moves_to is not None:
        if to in (None, moves_to):
            return made._replace(target=moves_to)
        raise MoveRefused(
            f"{each.name} cannot move to {to}: it is moving to {moves_to or 'another broker'} already; "
            "wait until it is there"
        )
    if record.state is OwnershipState.SERVING:
        if to == owner:
            return made
        target = to if to is not None else next_owner(each.ref, record, tally)
        if target is None or target == owner:
            raise MoveRefused(f"{each.name} cannot move: {owner} has it, and no other broker is active")
        return made._replace(target=target, begins=True)
    if record.state is OwnershipState.ASSIGNED and owner == to:
        return made
    if (failure := record.failure_of(owner)) is not None:
        target = _instead_of(snapshot, each, failure, to, tally)
        new = anew(snapshot, each, record, tally, patience, to=target)
        if new is None:
            raise MoveRefused(f"{each.name} cannot move: too few brokers are active to hold its replicas")
        return made._replace(target=target, instead=new, begins=True)
    raise NotServing(f"{each.name} cannot move now: no broker serves it yet; try again in a moment")


def _instead_of(snapshot: Snapshot, each: Placed, failure: OpeningFailure, to: str | None, tally: Tally) -> str:
    """Return the broker that gets a segment which its owner cannot open. `MoveRefused` if none can have it."""
    assert each.known is not None
    record = each.known.value
    why = f"{each.name} cannot move: its owner {record.owner} cannot open it: {failure.reason}"
    if record.replicas and not record.clean and not is_lost(snapshot, record):
        raise NotServing(f"{why}; its replicas take over")
    if not record.clean:
        raise MoveRefused(f"{why}; mend that, or recover the segment and accept what is lost")
    if to is not None and record.holders and to not in record.holders:
        raise MoveRefused(f"{why}; only {' and '.join(record.holders)} hold its history")
    target = to if to is not None else target_of(snapshot, each.ref, record, tally)
    if target is None:
        raise MoveRefused(f"{why}; no other broker that is active can have it")
    return target


def move_progress(now: Ownership) -> str:
    """Say what a move that has not ended waits for."""
    failure = now.failure_of(now.owner)
    match now.state:
        case OwnershipState.ASSIGNED if failure is not None:
            return f"broker {now.owner} cannot open it: {failure.reason}"
        case OwnershipState.ASSIGNED:
            return f"broker {now.owner} is opening it"
        case OwnershipState.SERVING:
            return f"broker {now.owner} is preparing to hand it over"
        case OwnershipState.DRAINING:
            return f"broker {now.owner} is handing it over"
        case OwnershipState.SEALED:
            return "it is handed over, and no broker was given it so far"
        case OwnershipState.RECOVERING:
            return f"its owner {now.owner} is lost, and its replicas vote"


def move_result(request: MoveRequest, now: Ownership | None) -> Ownership | BraidError | None:
    """Return the record when the segment has arrived, an error when it will not arrive, None while it is moving."""
    if now is None:
        return MoveRefused(f"{request.segment} did not move: it was deleted meanwhile")
    if request.by_vote:
        assert request.instead is not None
        return now if now.state is OwnershipState.SERVING and now.epoch >= request.instead.epoch else None
    if now.move is None and now.refusal and now.owner == request.source != request.target:
        return MoveRefused(f"{request.segment} did not move to {request.target or 'another broker'}: {now.refusal}")
    if now.state is not OwnershipState.SERVING or (now.owner == request.source and now.move is not None):
        return None
    if now.owner == request.target or (not request.target and now.owner != request.source):
        return now
    return MoveRefused(
        f"{request.segment} did not get to {request.target or 'another broker'}, which could not take it any more; "
        f"{now.owner} serves it"
    )
