"""Decides what the cluster leader has to do now. Pure functions of one state of the metadata.

    a segment's record is                              and then
    missing                                            it is assigned to the least loaded broker
    SEALED                                             it is assigned: to `move.to` if that broker can have it
    ASSIGNED, clean, to a broker that is gone          it is assigned anew
    ASSIGNED, clean, to a broker that cannot open it   it is assigned to a broker that has not tried yet
    ASSIGNED, a loss is accepted, and a broker that    it is assigned to that broker: nothing needs to be lost
    was given up for it is back
    lost (below)                                       it waits; if the topic's policy is `continue`, for its time only
    SERVING, of a live broker that drains              it gets a move, a few at a time
    SERVING, of a live broker with too much load       it gets a move, when nothing of the above is to do (balancing/)

The leader does nothing else: a live broker opens the segments that are assigned to it, and hands over its segments that
have a move (the package's docstring has the whole table). So the leader has nothing to remember. The next leader looks
at the records and comes to the same result; deciding again on decided records does nothing.

A broker *can have* a segment if it is live, is not to be drained, and is one of the record's holders where these are
named. A segment that no broker can have waits (`waiting` tells for which brokers).

A segment is *lost* when its records are only on disks of brokers that are gone or cannot open it: of its owner, or, if
the record is clean, of its holders. A loss that is accepted gives these disks up: then any broker can have the segment.
An owner that is there and cannot open the segment is the same as an owner that is gone, with one difference. The policy
`continue` accepts a loss only for failures that last: it does not give up records because a disk is full for a while.

I2: a record that is not clean goes to another broker only with `accept_loss`, which only the topic's policy (here) or
an operator (by a call) can say. The write compares that the brokers that are given up are still gone (`Decision.gone`).
An owner that cannot open the segment needs no such comparison: it would have changed the record.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection
from enum import Enum
from typing import Final

import msgspec

from braid.cluster.balancing.plan import BalancePlan
from braid.cluster.balancing.policy import BalancePolicy
from braid.cluster.balancing.recent_moves import BALANCE
from braid.cluster.placement import Tally, place_all
from braid.cluster.snapshot import Placed, Snapshot
from braid.model.cluster import BrokerState, SegmentRef
from braid.model.ids import Revision
from braid.model.names import SegmentName
from braid.model.ownership import Move, Ownership, OwnershipState
from braid.model.topic import OwnerLoss

DRAINED_AT_ONCE: Final = BalancePolicy().drain_moves_at_once
"""Moves in flight off one draining broker, unless the policy says otherwise."""
EMPTIED: Final = (BrokerState.DRAINING, BrokerState.DRAINED)
DRAIN: Final = "drain"
"""The id of the moves off a draining broker."""


class Reason(Enum):
    PLACED = "placed"
    """It had no record."""
    HANDED_OVER = "handed-over"
    """It was sealed."""
    REASSIGNED = "reassigned"
    """Its owner went before it served, or cannot open it."""
    RETURNED = "returned"
    """A loss was accepted, and the broker that was given up came back before another one served the segment."""
    CONTINUED = "continued"
    """It is lost for as long as the topic's policy waits; a loss is accepted."""
    DRAINED = "drained"
    """Its owner is to own nothing."""
    BALANCED = "balanced"
    """Its owner has more to do than others."""


class Decision(msgspec.Struct, frozen=True):
    segment: SegmentName
    revision: Revision
    """Of the record that it was decided on; 0: there was none."""
    record: Ownership
    """That is to stand instead."""
    reason: Reason
    gone: tuple[str, ...] = ()
    """Brokers that must still be gone when this is written: one that is back has lost nothing."""


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """A segment that no broker serves or is about to serve."""

    segment: SegmentName
    state: OwnershipState | None
    """None: it has no record yet."""
    brokers: tuple[str, ...]
    """The segment goes on when one of these comes back; empty: when any broker is active."""
    since: float | None = None
    """When the first of them was seen to be gone; None: they are there, but may not be given segments."""
    until: float | None = None
    """When the topic's policy lets another broker continue, if one can; None: it does not."""
    reason: str = ""
    """Why its owner, which is there, cannot open it."""


def decide(
    snapshot: Snapshot, now: float, cooling_down: Collection[SegmentRef] = (), *, drained_at_once: int = DRAINED_AT_ONCE
) -> list[Decision]:
    """Decide what to assign, drain and place. `now` is on the clock of `gone_since`. `cooling_down` are segments whose
    move was given up just now: others that must leave the same broker go first."""
    # Adding up all loads is most of the work, and mostly nothing is to be placed.
    tally = functools.cache(snapshot.tally)
    decisions: list[Decision] = []
    missing: list[Placed] = []
    for each in snapshot.segments():
        if each.known is None:
            missing.append(each)
            continue
        decision = _assign(snapshot, each, each.known.value, each.known.revision, tally, now)
        if decision is not None:
            decisions.append(decision)
    if any(broker.state in EMPTIED for broker in snapshot.brokers.values()):
        decisions += _drain(snapshot, tally(), cooling_down, drained_at_once)
    if missing:
        decisions += _place(missing, tally())
    return decisions


def balancing_decisions(snapshot: Snapshot, plan: BalancePlan) -> list[Decision]:
    """Decide the moves of a plan, on the records that it was made on."""
    targets = {move.segment: move.target for move in plan.moves}
    return [
        Decision(
            each.name,
            each.known.revision,
            each.known.value.moving(Move(to=targets[each.ref], id=BALANCE)),
            Reason.BALANCED,
        )
        for each in snapshot.segments()
        if each.ref in targets and each.known is not None and each.known.value.state is OwnershipState.SERVING
    ]


def waiting(snapshot: Snapshot) -> list[Waiting]:
    found: list[Waiting] = []
    for each in snapshot.segments():
        record = each.known.value if each.known is not None else None
        if record is None:
            if not _able(snapshot, ()):
                found.append(Waiting(segment=each.name, state=None, brokers=()))
        elif is_served(snapshot, record):
            continue
        elif not record.clean:
            found.append(_waits(snapshot, each, record, (record.owner,)))
        elif not _untried(snapshot, record):
            tries = (record.owner,) if record.failure_of(record.owner) is not None else ()
            found.append(_waits(snapshot, each, record, record.holders or tries))
    return found


def _waits(snapshot: Snapshot, each: Placed, record: Ownership, brokers: tuple[str, ...]) -> Waiting:
    gone = [since for broker in brokers if (since := _unavailable_since(snapshot, each, record, broker)) is not None]
    lost_since = _lost_since(snapshot, each, record)
    policies = each.topic.policies
    ends = policies.on_owner_loss is OwnerLoss.CONTINUE and lost_since is not None
    failure = record.failure_of(record.owner) if snapshot.is_live(record.owner) else None
    return Waiting(
        segment=each.name,
        state=record.state,
        brokers=brokers,
        since=min(gone, default=None),
        until=lost_since + policies.owner_loss_after_ms / 1000 if ends and lost_since is not None else None,
        reason=failure.reason if failure is not None else "",
    )


def is_served(snapshot: Snapshot, record: Ownership) -> bool:
    """Tell whether the record's owner serves the segment, or is about to: it has the segment, is there, and has not
    failed to open it."""
    return record.is_owned and snapshot.is_live(record.owner) and record.failure_of(record.owner) is None


def is_lost(snapshot: Snapshot, record: Ownership) -> bool:
    """Tell whether records of the segment are only on disks of brokers that are gone or cannot open it."""
    return bool(record.keepers) and all(
        not snapshot.is_live(broker) or record.failure_of(broker) is not None for broker in record.keepers
    )


def given_up(snapshot: Snapshot, record: Ownership) -> tuple[str, ...]:
    """Return the brokers that a loss gives up because they are gone."""
    return tuple(broker for broker in record.keepers if not snapshot.is_live(broker))


def _lost_since(snapshot: Snapshot, each: Placed, record: Ownership) -> float | None:
    """Return since when the segment is lost; None if it is not, or if time may mend it."""
    since = [_unavailable_since(snapshot, each, record, broker) for broker in record.keepers]
    known = [at for at in since if at is not None]
    return max(known) if known and len(known) == len(since) else None


def _unavailable_since(snapshot: Snapshot, each: Placed, record: Ownership, broker: str) -> float | None:
    """Return since when the broker is gone or has a failure that lasts; None if neither is so."""
    failure = record.failure_of(broker)
    unable = snapshot.unable_since.get((each.key, broker)) if failure is not None and failure.lasting else None
    gone = snapshot.gone_since.get(broker) if not snapshot.is_live(broker) else None
    return min((at for at in (unable, gone) if at is not None), default=None)


def _able(snapshot: Snapshot, holders: Collection[str]) -> list[str]:
    return [broker for broker in snapshot.brokers if snapshot.is_active(broker) and (not holders or broker in holders)]


def _untried(snapshot: Snapshot, record: Ownership) -> list[str]:
    """Return the brokers that can have a segment which its owner does not serve. A broker that could not open it is
    asked again only if the owner is gone: otherwise the owner goes on trying."""
    able = _able(snapshot, record.holders)
    untried = [broker for broker in able if record.failure_of(broker) is None]
    return untried if untried or snapshot.is_live(record.owner) else able


def _assign(
    snapshot: Snapshot,
    each: Placed,
    record: Ownership,
    revision: Revision,
    tally: Callable[[], Tally],
    now: float,
) -> Decision | None:
    """Decide about a segment that no broker serves or will serve."""
    if record.state is OwnershipState.RECOVERING:
        return None  # Its replicas vote.
    back = _returned(snapshot, record)
    if back is not None:
        _give(tally(), each.ref, back)
        return Decision(each.name, revision, record.assigned(back), Reason.RETURNED)
    accept_loss = False
    gone = tuple(broker for broker in record.given_up if not snapshot.is_live(broker))
    if record.state is OwnershipState.SEALED:
        reason = Reason.HANDED_OVER
    elif is_served(snapshot, record):
        return None
    else:
        reason = Reason.REASSIGNED
    if not record.clean or not _untried(snapshot, record):
        if not _may_continue(snapshot, each, record, now):
            return None
        reason, accept_loss, gone = Reason.CONTINUED, True, given_up(snapshot, record)
    target = target_of(snapshot, each.ref, record, tally(), anyone=accept_loss)
    if target is None:
        return None
    _give(tally(), each.ref, target)
    new = record.assigned(target, accept_loss=accept_loss, given_up=gone if accept_loss else ())
    return Decision(each.name, revision, new, reason, gone)


def _returned(snapshot: Snapshot, record: Ownership) -> str | None:
    """Return a broker that was given up and is back before another one served the segment."""
    if record.owner in record.given_up and is_served(snapshot, record):
        return None
    return next(
        (broker for broker in record.given_up if snapshot.is_live(broker) and record.failure_of(broker) is None), None
    )


def _may_continue(snapshot: Snapshot, each: Placed, record: Ownership, now: float) -> bool:
    if each.is_pending and is_lost(snapshot, record):
        return True  # It has taken no publish yet: nothing can be lost.
    policies = each.topic.policies
    since = _lost_since(snapshot, each, record)
    return (
        policies.on_owner_loss is OwnerLoss.CONTINUE
        and since is not None
        and now - since >= policies.owner_loss_after_ms / 1000
    )


def target_of(
    snapshot: Snapshot, ref: SegmentRef, record: Ownership, tally: Tally, *, anyone: bool = False
) -> str | None:
    """Return the broker that gets a segment which its owner does not serve any more; None if none can have it now. With
    `anyone`, also a broker that has nothing of its history, because that loss is accepted; but first a broker that
    keeps a part of it.

    The last owner gets the segment only if no other broker can: it was to leave there, or the owner is about to stop.
    """
    wanted = record.move.to if record.move is not None else ""
    if anyone:
        allowed = _able(snapshot, record.holders) if record.holders else []
        allowed = allowed or _able(snapshot, ())
    else:
        allowed = _untried(snapshot, record)
    if wanted in allowed:
        return wanted
    return tally.least_loaded(ref, allowed=allowed, avoid=record.owner)


def _give(tally: Tally, ref: SegmentRef, target: str) -> None:
    for broker, segments in tally.segments.items():
        if ref in segments:
            tally.remove(ref, broker)
    tally.add(ref, target)


def _drain(snapshot: Snapshot, tally: Tally, cooling_down: Collection[SegmentRef], at_once: int) -> list[Decision]:
    draining = [id_ for id_, broker in snapshot.brokers.items() if broker.state in EMPTIED]
    if not tally.available:
        return []
    movable: dict[str, list[Placed]] = {broker: [] for broker in draining}
    in_flight: Counter[str] = Counter()
    for each in snapshot.segments():
        record = each.known.value if each.known is not None else None
        if record is None or record.owner not in movable:
            continue
        if record.state is OwnershipState.DRAINING or (
            record.state is OwnershipState.SERVING and record.move is not None
        ):
            in_flight[record.owner] += 1
        elif record.state is OwnershipState.SERVING and each.ref not in cooling_down:
            movable[record.owner].append(each)
    decisions: list[Decision] = []
    for broker, segments in movable.items():
        # The busiest first, so that the small ones even out what they leave uneven.
        segments.sort(key=lambda each: (-tally.rate(each.ref), each.ref))
        for each in segments[: max(at_once - in_flight[broker], 0)]:
            target = tally.least_loaded(each.ref)
            assert target is not None
            assert each.known is not None
            _give(tally, each.ref, target)
            record = each.known.value.moving(Move(to=target, id=DRAIN))
            decisions.append(Decision(each.name, each.known.revision, record, Reason.DRAINED))
    return decisions


def _place(missing: list[Placed], tally: Tally) -> list[Decision]:
    """Place all of them together, so that the segments of a topic go to different brokers."""
    found = place_all([each.ref for each in missing], tally)
    return [
        Decision(each.name, Revision(0), Ownership.first(found[each.ref]), Reason.PLACED)
        for each in missing
        if each.ref in found
    ]
