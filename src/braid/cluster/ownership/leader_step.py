"""Decides what the cluster leader has to do now. Pure functions of one state of the metadata.

    a segment's record is                              and then
    missing                                            it is assigned to the least loaded brokers
    SEALED                                             it is assigned: to `move.to` if that broker can have it
    ASSIGNED, clean, to a broker that is gone          it is assigned anew
    ASSIGNED, clean, to a broker that cannot open it   it is assigned to a broker that has not tried yet
    ASSIGNED, a loss is accepted, and a broker that    it is assigned to that broker; if it had replicas, they are to
    was given up for it is back                        vote → RECOVERING: nothing needs to be lost
    not clean, with replicas, its owner is gone or     its replicas are to vote → RECOVERING, as soon as enough of them
    cannot open it                                     are there
    RECOVERING                                         its replicas vote (broker/replicas)
    RECOVERING or elected, a loss is accepted, and a   its replicas are to vote again: nothing needs to be lost
    replica that was given up for it is back
    elected, a loss is accepted, and too few replicas  other brokers take the places of those that are gone
    are there to confirm a record
    not clean, all replicas confirm a record, and      those that are there vote → RECOVERING; then other brokers take
    some of them stay away                             the places of the others
    lost (below)                                       it waits; if the topic's policy is `continue`, for its time only
    SERVING, of a live broker that drains              it gets a move, a few at a time
    SERVING, of a live broker, with other replicas     it gets a change of its replicas, a few at a time
    than it is to have (replica_sets.py)
    SERVING, of a live broker with too much load       it gets a move, when nothing of the above is to do (balancing/)

The leader does nothing else: a live broker opens the segments that are assigned to it, and hands over its segments that
have a move (the package's docstring has the whole table). So the leader has nothing to remember. The next leader looks
at the records and comes to the same result; deciding again on decided records does nothing.

A broker *can have* a segment if it is live, is not to be drained, and is one of the record's holders where these are
named. A segment that no broker can have waits (`waiting` tells for which brokers).

A segment is *lost* when its records are only on disks of brokers that are gone or cannot open it: of its owner, or, if
the record is clean, of its holders. A loss that is accepted gives these disks up: then any broker can have the segment.
A segment with replicas is lost when too few of them are there to vote, or to confirm a record after that. A loss that
is accepted lets fewer vote, and others take the places of those that are gone. Only if no replica is there, any broker
can have the segment. Until it serves, the replicas that were given up keep what they have: they get no new copies, if
other brokers suffice, and vote as soon as one of them is back. Of several holders, the one that is back gets the
segment.

An owner that is there and cannot open the segment is the same as an owner that is gone, with one difference. The policy
`continue` accepts a loss only for failures that last: it does not give up records because a disk is full for a while.

I2: a record that is not clean goes to another broker only by a vote of enough replicas, or with `accept_loss`, which
only the topic's policy (here) or an operator (by a call) can say. The write compares that the brokers that are given up
are still gone (`Decision.gone`). An owner that cannot open the segment needs no such comparison: it would have changed
the record.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from enum import Enum
from typing import Final

import msgspec

from braid.cluster.balancing.plan import BalancePlan
from braid.cluster.balancing.policy import BalancePolicy
from braid.cluster.balancing.recent_moves import BALANCE
from braid.cluster.ownership.replica_sets import (
    EMPTIED,
    REPLACE_AFTER_S,
    Patience,
    ReplicaSet,
    change_of,
    has_enough,
    may_need_change,
    next_set,
    stays_away,
)
from braid.cluster.placement import Tally, place_all
from braid.cluster.snapshot import Placed, Snapshot, coming_replicas
from braid.model.cluster import SegmentRef
from braid.model.ids import Revision
from braid.model.names import SegmentName
from braid.model.ownership import Move, Ownership, OwnershipState
from braid.model.topic import OwnerLoss

DRAINED_AT_ONCE: Final = BalancePolicy().drain_moves_at_once
"""Moves in flight off one draining broker, unless the policy says otherwise."""
CHANGES_AT_ONCE: Final = 8
"""Changes of replicas in flight that one broker takes part in, as an owner or as a new follower: each copies a tail."""
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
    """A loss was accepted, and a broker that was given up came back before another one served the segment."""
    RECOVERING = "recovering"
    """Its owner is gone or cannot open it; its replicas are to vote."""
    CONTINUED = "continued"
    """It is lost for as long as the topic's policy waits; a loss is accepted."""
    DRAINED = "drained"
    """Its owner is to own nothing."""
    REPLICAS = "replicas"
    """Its replicas are to change, or are not to change any more."""
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
    """The segment goes on when one of these comes back, or enough of them; empty: when more brokers are active."""
    since: float | None = None
    """When the first of them was seen to be gone; None: they are there, but may not be given segments."""
    until: float | None = None
    """When the topic's policy lets another broker continue, if one can; None: it does not."""
    reason: str = ""
    """Why it waits, if that is more than brokers that are gone."""


def decide(
    snapshot: Snapshot,
    now: float,
    cooling_down: Collection[SegmentRef] = (),
    *,
    drained_at_once: int = DRAINED_AT_ONCE,
    replace_after_s: float = REPLACE_AFTER_S,
) -> list[Decision]:
    """Decide what to assign, drain, place and copy. `now` is on the clock of `gone_since`. `cooling_down` are segments
    whose move was given up just now: others that must leave the same broker go first."""
    patience = Patience(now, replace_after_s)
    # Adding up all loads is most of the work, and mostly nothing is to be placed.
    tally = functools.cache(snapshot.tally)
    decisions: list[Decision] = []
    missing: list[Placed] = []
    replicated: list[Placed] = []
    for each in snapshot.segments():
        if each.known is None:
            missing.append(each)
            continue
        record = each.known.value
        if each.topic.policies.replicas > 1 or record.replicas or record.change is not None:
            replicated.append(each)
        decision = _assign(snapshot, each, record, each.known.revision, tally, patience)
        if decision is not None:
            decisions.append(decision)
    if any(broker.state in EMPTIED for broker in snapshot.brokers.values()):
        decisions += _drain(snapshot, tally(), cooling_down, drained_at_once)
    if missing:
        decisions += _place(snapshot, missing, tally(), patience)
    return decisions + _change_replicas(snapshot, replicated, tally, patience)


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
            if not _able(snapshot, ()) or not has_enough(snapshot, each.topic.policies):
                reason = _too_few(snapshot, each)
                found.append(Waiting(segment=each.name, state=None, brokers=(), reason=reason))
        elif is_served(snapshot, record):
            continue
        elif not record.clean and record.replicas:
            gone = tuple(broker for broker in record.replicas if not snapshot.is_live(broker))
            found.append(_waits(snapshot, each, record, gone, vote_text(snapshot, record)))
        elif not record.clean:
            found.append(_waits(snapshot, each, record, (record.owner,)))
        elif not _untried(snapshot, record):
            tries = (record.owner,) if record.failure_of(record.owner) is not None else ()
            found.append(_waits(snapshot, each, record, record.holders or tries))
        elif not has_enough(snapshot, each.topic.policies, record.replicas):
            found.append(_waits(snapshot, each, record, (), _too_few(snapshot, each)))
    return found


def _too_few(snapshot: Snapshot, each: Placed) -> str:
    active, policies = len(_able(snapshot, ())), each.topic.policies
    if policies.replicas == 1:
        return ""
    return f"{policies.write_quorum} replicas must confirm a record, and {active} brokers are active"


def vote_text(snapshot: Snapshot, record: Ownership) -> str:
    """Say what a segment waits for whose replicas are to vote, as far as the metadata tells."""
    gone = [broker for broker in record.replicas if not snapshot.is_live(broker)]
    there, named = len(record.replicas) - len(gone), ", ".join(record.replicas)
    down = f"{' and '.join(gone)} {'is' if len(gone) == 1 else 'are'} down"
    if there < record.keepers_needed:
        return f"{record.keepers_needed} of its replicas {named} must vote, and {down}"
    if there < record.write_quorum:
        return f"{record.write_quorum} of its replicas {named} must hold a record, and {down}"
    failure = record.failure_of(record.owner) if snapshot.is_live(record.owner) else None
    lost = f"cannot open it ({failure.reason})" if failure is not None else "is lost"
    return f"its owner {record.owner} {lost}, and {record.keepers_needed} of its replicas {named} must vote"


def _waits(snapshot: Snapshot, each: Placed, record: Ownership, brokers: tuple[str, ...], reason: str = "") -> Waiting:
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
        reason=reason or (failure.reason if failure is not None else ""),
    )


def is_served(snapshot: Snapshot, record: Ownership) -> bool:
    """Tell whether the record's owner serves the segment, or is about to: it has the segment, is there, and has not
    failed to open it."""
    return record.is_owned and snapshot.is_live(record.owner) and record.failure_of(record.owner) is None


def is_lost(snapshot: Snapshot, record: Ownership) -> bool:
    """Tell whether records of the segment may be only on disks of brokers that are gone or cannot open it."""
    live = [broker for broker in record.keepers if snapshot.is_live(broker)]
    able = any(_is_able(record, broker) for broker in live)
    return bool(record.keepers) and (len(live) < _needed(record) or not able)


def _needed(record: Ownership) -> int:
    """Return how many of the keepers must be there, so that the segment can go on: replicas must vote, and confirm."""
    return record.keepers_needed if record.clean else max(record.keepers_needed, record.write_quorum)


def _is_able(record: Ownership, broker: str) -> bool:
    """Tell whether a broker that is there can open the segment. A replica that cannot for a while still has a vote."""
    failure = record.failure_of(broker)
    return failure is None or bool(record.replicas and not record.clean and not failure.lasting)


def given_up(snapshot: Snapshot, record: Ownership) -> tuple[str, ...]:
    """Return the brokers that a loss gives up because they are gone."""
    return tuple(broker for broker in record.keepers if not snapshot.is_live(broker))


def _lost_since(snapshot: Snapshot, each: Placed, record: Ownership) -> float | None:
    """Return since when the segment is lost; None if it is not, or if time may mend it."""
    if not is_lost(snapshot, record):
        return None
    # `spare` of the keepers are not needed: it was lost when the next one went.
    gone, spare = given_up(snapshot, record), len(record.keepers) - _needed(record)
    if len(gone) <= spare:  # It is lost because no broker that is there can open it.
        gone, spare = record.keepers, len(record.keepers) - 1
    since = [_unavailable_since(snapshot, each, record, broker) for broker in gone]
    known = sorted(at for at in since if at is not None)
    return known[spare] if len(known) == len(since) else None


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
    patience: Patience,
) -> Decision | None:
    """Decide about a segment that no broker serves or will serve."""
    if record.replicas and not record.clean:
        return _recover(snapshot, each, record, revision, tally, patience)
    back = _returned(snapshot, record)
    if back is not None:
        if back.is_owned:
            _give(tally(), each.ref, back.owner, ReplicaSet.of(back))
        return Decision(each.name, revision, back, Reason.RETURNED)
    accept_loss = False
    gone = tuple(broker for broker in record.given_up if not snapshot.is_live(broker))
    if record.state is OwnershipState.SEALED:
        reason = Reason.HANDED_OVER
    elif is_served(snapshot, record):
        return None
    else:
        reason = Reason.REASSIGNED
    if not record.clean or not _untried(snapshot, record):
        if not _may_continue(snapshot, each, record, patience.now):
            return None
        reason, accept_loss, gone = Reason.CONTINUED, True, given_up(snapshot, record)
    new = anew(snapshot, each, record, tally(), patience, accept_loss=accept_loss, given_up=gone)
    return Decision(each.name, revision, new, reason, gone) if new is not None else None


def anew(
    snapshot: Snapshot,
    each: Placed,
    record: Ownership,
    tally: Tally,
    patience: Patience,
    *,
    to: str | None = None,
    accept_loss: bool = False,
    given_up: Collection[str] = (),
) -> Ownership | None:
    """Assign a segment that no broker serves, with the replicas that it is to have; None if no broker can have it, or
    too few can have replicas. The tally counts it from now on."""
    target = to or target_of(snapshot, each.ref, record, tally, anyone=accept_loss)
    if target is None:
        return None
    tally.forget(each.ref)
    before = record.before_loss(accept_loss=accept_loss)
    copies = next_set(snapshot, each, record, target, tally, patience, without=before.keepers if before else ())
    if copies is None and before is not None:
        copies = next_set(snapshot, each, record, target, tally, patience)
    if copies is None:
        return None
    _give(tally, each.ref, target, copies)
    return record.assigned(
        target,
        replicas=copies.replicas,
        write_quorum=copies.write_quorum,
        accept_loss=accept_loss,
        given_up=given_up if accept_loss else (),
    )


def _recover(
    snapshot: Snapshot,
    each: Placed,
    record: Ownership,
    revision: Revision,
    tally: Callable[[], Tally],
    patience: Patience,
) -> Decision | None:
    """Decide about a segment whose replicas hold what no other disk does."""
    gone = given_up(snapshot, record)
    if record.accept_loss and any(map(snapshot.is_live, record.given_up)):
        return Decision(each.name, revision, record.recovering(), Reason.RETURNED)
    elected = record.state is OwnershipState.ASSIGNED and record.elected is not None and snapshot.is_live(record.owner)
    too_few = len(record.replicas) - len(gone) < record.write_quorum
    if elected and too_few and (record.accept_loss or replacing(snapshot, each, record, tally, patience)):
        return _rejoin(snapshot, each, record, revision, tally, patience)
    if is_served(snapshot, record):
        return None
    if not is_lost(snapshot, record):
        if record.state is OwnershipState.RECOVERING or not _has_heir(snapshot, record):
            return None  # Its replicas vote, or none of them can do better than its owner.
        absent = tuple(
            broker for broker in gone if broker == record.owner
        )  # One that is back continues without a vote.
        return Decision(each.name, revision, record.recovering(), Reason.RECOVERING, absent)
    if not _may_continue(snapshot, each, record, patience.now):
        if record.state is OwnershipState.RECOVERING or not replacing(snapshot, each, record, tally, patience):
            return None
        return Decision(each.name, revision, record.recovering(), Reason.RECOVERING, gone)
    new = giving_up(snapshot, each, record, tally(), patience)
    return Decision(each.name, revision, new, Reason.CONTINUED, gone) if new not in (None, record) else None


def _has_heir(snapshot: Snapshot, record: Ownership) -> bool:
    """Tell whether a vote may find another owner: a replica is there that has not failed to open the segment. If the
    last vote has found an owner that fails, the next one finds it again, unless the others suffice without it."""
    heirs = [each for each in record.replicas if snapshot.is_live(each) and record.failure_of(each) is None]
    in_vain = (
        record.elected is not None
        and record.elected.epoch < record.epoch - 1  # Otherwise a move named it, and no vote was held.
        and snapshot.is_live(record.owner)
    )
    return len(heirs) >= (record.keepers_needed if in_vain else 1)


def _rejoin(
    snapshot: Snapshot,
    each: Placed,
    record: Ownership,
    revision: Revision,
    tally: Callable[[], Tally],
    patience: Patience,
) -> Decision | None:
    """Let other brokers take the places of replicas that are gone, beside the owner that was elected."""
    copies = next_set(snapshot, each, record, record.owner, tally(), patience)
    if copies is None:
        return None
    if not record.accept_loss:
        copies = ReplicaSet(copies.replicas[: record.write_quorum], record.write_quorum)
    _give(tally(), each.ref, record.owner, copies)
    reason = Reason.CONTINUED if record.accept_loss else Reason.REASSIGNED
    return Decision(each.name, revision, record.rejoined(*copies), reason, given_up(snapshot, record))


def replacing(
    snapshot: Snapshot, each: Placed, record: Ownership, tally: Callable[[], Tally], patience: Patience
) -> bool:
    """Tell whether a segment goes on by itself without replicas that stay away, though each record needs all of them.
    Any replica that is there holds everything that was confirmed, so nothing is lost: others take the empty places."""
    gone = given_up(snapshot, record)
    there = [broker for broker in record.replicas if broker not in gone and _is_able(record, broker)]
    if not (gone and there and record.all_confirm) or record.write_quorum != each.topic.policies.write_quorum:
        return False
    if not all(stays_away(snapshot, broker, patience) for broker in gone):
        return False
    return next_set(snapshot, each, record, there[0], tally(), patience) is not None


def giving_up(
    snapshot: Snapshot, each: Placed, record: Ownership, tally: Tally, patience: Patience, *, to: str | None = None
) -> Ownership | None:
    """Accept the loss of what only replicas that are gone hold: the others vote, or if none of them can, the segment
    goes to another broker. None if no broker can have it. The write must compare that they are still gone."""
    gone = given_up(snapshot, record)
    if not any(snapshot.is_live(broker) and _is_able(record, broker) for broker in record.replicas):
        return anew(snapshot, each, record, tally, patience, to=to, accept_loss=True, given_up=gone)
    if record.state is OwnershipState.RECOVERING:
        return record.losing(gone)
    return record.recovering(accept_loss=True, given_up=gone)


def _returned(snapshot: Snapshot, record: Ownership) -> Ownership | None:
    """Return the record of a segment to which a broker that was given up is back before another one served it."""
    back = [broker for broker in record.given_up if snapshot.is_live(broker)]
    if record.before is not None:
        return record.restored(back[0]) if back else None
    if record.owner in record.given_up and is_served(snapshot, record):
        return None
    able = next((broker for broker in back if record.failure_of(broker) is None), None)
    return record.assigned(able, replicas=(), write_quorum=1) if able is not None else None  # It had no replicas.


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
        allowed = allowed or [each for each in _able(snapshot, ()) if each not in record.keepers]
        allowed = allowed or _able(snapshot, ())
    else:
        allowed = _untried(snapshot, record)
    if wanted in allowed:
        return wanted
    return next_owner(ref, record, tally, allowed)


def next_owner(ref: SegmentRef, record: Ownership, tally: Tally, allowed: Collection[str] | None = None) -> str | None:
    """Return the broker that gets a segment, of those that are allowed: a follower, which has most of it already, or
    else the least loaded one. The last owner gets it only if no other broker can."""
    followers = [
        each
        for each in record.replicas
        if each != record.owner and record.failure_of(each) is None and (allowed is None or each in allowed)
    ]
    return tally.least_loaded(ref, allowed=followers) or tally.least_loaded(ref, allowed=allowed, avoid=record.owner)


def _give(tally: Tally, ref: SegmentRef, target: str, copies: ReplicaSet) -> None:
    tally.forget(ref)
    tally.add_copies(ref, copies.replicas)
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
            assert each.known is not None
            record = each.known.value
            target = next_owner(each.ref, record, tally)
            assert target is not None
            _give(tally, each.ref, target, ReplicaSet.of(record))
            new = record.moving(Move(to=target, id=DRAIN))
            decisions.append(Decision(each.name, each.known.revision, new, Reason.DRAINED))
    return decisions


def _place(snapshot: Snapshot, missing: list[Placed], tally: Tally, patience: Patience) -> list[Decision]:
    """Place all of them together, so that the segments of a topic go to different brokers."""
    found = place_all([each.ref for each in missing if has_enough(snapshot, each.topic.policies)], tally)
    decisions: list[Decision] = []
    for each in missing:
        copies = next_set(snapshot, each, None, found[each.ref], tally, patience) if each.ref in found else None
        if copies is not None:
            _give(tally, each.ref, found[each.ref], copies)
            decisions.append(Decision(each.name, Revision(0), Ownership.first(found[each.ref], *copies), Reason.PLACED))
    return decisions


def _change_replicas(
    snapshot: Snapshot, replicated: Iterable[Placed], tally: Callable[[], Tally], patience: Patience
) -> list[Decision]:
    """Ask owners for other replicas, a few at a time. `replicated` are the segments that have replicas, or are to."""
    due: list[tuple[Placed, Ownership]] = []
    in_flight: Counter[str] = Counter()
    for each in replicated:
        record = each.known.value if each.known is not None else None
        if record is None or record.state is not OwnershipState.SERVING or record.move is not None:
            continue
        if record.change is not None:
            in_flight.update(_at_work(record))
        if snapshot.is_active(record.owner) and may_need_change(snapshot, each, record, patience):
            due.append((each, record))
    decisions: list[Decision] = []
    for each, record in due:
        change = change_of(snapshot, each, record, tally(), patience)
        if change == record.change:
            continue
        new = record.changing(change)
        if record.change is None and any(in_flight[broker] >= CHANGES_AT_ONCE for broker in _at_work(new)):
            continue
        in_flight.update(_at_work(new))
        _give(tally(), each.ref, record.owner, ReplicaSet(coming_replicas(new), new.write_quorum))
        assert each.known is not None
        decisions.append(Decision(each.name, each.known.revision, new, Reason.REPLICAS))
    return decisions


def _at_work(record: Ownership) -> set[str]:
    """Return the brokers that a change of replicas keeps busy: the owner, and those that get a copy."""
    added = set(record.change.replicas).difference(record.replicas) if record.change is not None else set[str]()
    return {record.owner, *added}
