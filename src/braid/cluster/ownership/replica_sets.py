"""Decides which brokers are to hold the copies of a segment. Pure functions of one state of the metadata.

A topic asks for n replicas, and for w of them to confirm a record. The set of a segment changes at two moments:

    it is assigned,   no record can be lost, so any brokers will do: those of the last set that are active, then the
    and is clean      least loaded others, then those of the last set that are away for a short time
    it is served      the leader asks its owner for another set (`Ownership.change`), because
                      - the topic asks for another n or w
                      - a follower's broker drains
                      - a follower's broker is gone for longer than `replace_after_s`, and another can take its place
                      - the set lacks replicas, and a broker is there that could be one
                      - two replicas share a rack, and a broker of another rack is there

A set has fewer than n replicas where there are fewer brokers, but at least w, or it could confirm nothing: without w
brokers that are there, a segment is not assigned, and a change is not asked for. A broker that drains leaves the set
even if no other can take its place, as long as w remain: an operator wants it empty.

A change that is under way stays as it is while it can be carried out. Otherwise the leader decides anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from braid.cluster.placement import Tally, choose_replicas
from braid.cluster.snapshot import Placed, Snapshot
from braid.model.cluster import BrokerState
from braid.model.ownership import Ownership, ReplicaChange
from braid.model.topic import TopicPolicies

REPLACE_AFTER_S: Final = 600.0
"""How long a broker is gone before others copy the segments of which it held replicas, unless a broker's configuration
says otherwise."""
EMPTIED: Final = (BrokerState.DRAINING, BrokerState.DRAINED)


class ReplicaSet(NamedTuple):
    replicas: tuple[str, ...]
    """Empty: the segment is not replicated."""
    write_quorum: int

    @classmethod
    def of(cls, record: Ownership) -> ReplicaSet:
        return cls(record.replicas, record.write_quorum)


NOT_REPLICATED: Final = ReplicaSet((), 1)


class Patience(NamedTuple):
    """What decisions that wait for a time are made with."""

    now: float
    """On the clock of `Snapshot.gone_since`."""
    replace_after_s: float = REPLACE_AFTER_S


def has_enough(snapshot: Snapshot, policies: TopicPolicies, last: Iterable[str] = ()) -> bool:
    """Tell whether enough brokers are there to confirm a record of a segment with these policies. `last` are its
    replicas until now: of these, a broker that drains will do."""
    there = {broker for broker in snapshot.brokers if snapshot.is_active(broker)}
    return len(there.union(broker for broker in last if _drains(snapshot, broker))) >= policies.write_quorum


def next_set(
    snapshot: Snapshot,
    each: Placed,
    last: Ownership | None,
    owner: str,
    tally: Tally,
    patience: Patience,
    *,
    without: Collection[str] = (),
) -> ReplicaSet | None:
    """Return the replicas of a segment that is assigned to this owner and whose record is clean; None if too few
    brokers are there. `last` is its record until now. Brokers of `without` get no replica."""
    policies = each.topic.policies
    if policies.replicas == 1:
        return NOT_REPLICATED
    old = [broker for broker in last.replicas if broker not in without] if last is not None else []
    available = [broker for broker in tally.available if broker not in without]
    active = [broker for broker in old if snapshot.is_active(broker)]
    # The broker that the segment leaves has all of it.
    chosen = tuple(dict.fromkeys([owner, *(broker for broker in active if last is not None and broker == last.owner)]))
    chosen = choose_replicas(each.ref, chosen, policies.replicas, tally, candidates=active)
    chosen = choose_replicas(each.ref, chosen, policies.replicas, tally, candidates=available)
    if len(chosen) < policies.write_quorum:
        draining = [broker for broker in old if _drains(snapshot, broker) and broker not in chosen]
        chosen = (*chosen, *draining)[: policies.write_quorum]
    if len(chosen) < policies.write_quorum:
        return None
    away = [broker for broker in old if broker not in chosen and not _leaves(snapshot, broker, patience)]
    return ReplicaSet((*chosen, *away)[: policies.replicas], policies.write_quorum)


def change_of(
    snapshot: Snapshot, each: Placed, record: Ownership, tally: Tally, patience: Patience
) -> ReplicaChange | None:
    """Return what the owner, which serves the segment, is to make of its replicas; None: they stay as they are."""
    if record.change is not None and _is_possible(snapshot, each.topic.policies, record, record.change):
        return record.change
    wanted = _wanted_set(snapshot, each, record, tally, patience)
    if wanted.write_quorum == record.write_quorum and set(wanted.replicas) == set(record.replicas):
        return None
    return ReplicaChange(replicas=wanted.replicas, write_quorum=wanted.write_quorum)


def may_need_change(snapshot: Snapshot, each: Placed, record: Ownership, patience: Patience) -> bool:
    """Tell whether `change_of` could return another change than the record has. This is cheap: most segments need
    none."""
    policies = each.topic.policies
    if policies.replicas == 1:
        return bool(record.replicas) or record.change is not None
    return (
        record.change is not None
        or (len(record.replicas), record.write_quorum) != (policies.replicas, policies.write_quorum)
        or any(_leaves(snapshot, broker, patience) for broker in record.replicas)
        or _is_crowded(snapshot, record.replicas)
    )


def _wanted_set(snapshot: Snapshot, each: Placed, record: Ownership, tally: Tally, patience: Patience) -> ReplicaSet:
    """Return the best set that can be had now; the present one if that is best."""
    policies, owner, present = each.topic.policies, record.owner, ReplicaSet.of(record)
    if policies.replicas == 1:
        return NOT_REPLICATED
    count, quorum = policies.replicas, policies.write_quorum
    old = record.replicas or (owner,)
    staying = [broker for broker in old if broker == owner or not _leaves(snapshot, broker, patience)]
    if len(staying) > count:
        there = [broker for broker in staying if snapshot.is_live(broker)]
        chosen = choose_replicas(each.ref, (owner,), count, tally, candidates=there)
        chosen = (*chosen, *(broker for broker in staying if broker not in chosen))[:count]
    else:
        others = [broker for broker in tally.available if broker not in old]
        chosen = choose_replicas(each.ref, tuple(staying), count, tally, candidates=others)
    # A broker that is gone may come back: its copy is worth more than none.
    gone = [broker for broker in old if broker not in chosen and not snapshot.is_live(broker)]
    draining = [broker for broker in old if broker not in chosen and snapshot.is_live(broker)]
    chosen = (*chosen, *gone)[:count]
    if len(chosen) < quorum:
        chosen = (*chosen, *draining)[:quorum]
    if sum(map(snapshot.is_live, chosen)) < quorum:
        return present
    if set(chosen) == set(old):
        chosen = _in_more_racks(chosen, owner, tally)
    return ReplicaSet(chosen, quorum)


def _in_more_racks(replicas: tuple[str, ...], owner: str, tally: Tally) -> tuple[str, ...]:
    """Replace a follower that shares its rack by a broker of a rack that has none, if there is such a broker."""
    racks = [tally.racks.get(broker, "") for broker in replicas]
    crowded = [
        broker
        for broker, rack in zip(replicas, racks, strict=True)
        if broker != owner and rack and racks.count(rack) > 1
    ]
    scores = tally.scores()
    new = min(
        (broker for broker in tally.available if tally.racks[broker] and tally.racks[broker] not in racks),
        key=lambda broker: (scores[broker], broker),
        default=None,
    )
    if not crowded or new is None:
        return replicas
    leaving = max(crowded, key=lambda broker: (scores.get(broker, 0.0), broker))
    return tuple(new if broker == leaving else broker for broker in replicas)


def _is_possible(snapshot: Snapshot, policies: TopicPolicies, record: Ownership, change: ReplicaChange) -> bool:
    """Tell whether a change that was asked for is still what the topic wants, and the brokers for it are there."""
    if policies.replicas == 1:
        return not change.replicas
    added = [broker for broker in change.replicas if broker not in record.replicas]
    return (
        change.write_quorum == policies.write_quorum
        and 0 < len(change.replicas) <= policies.replicas
        and all(snapshot.is_active(broker) or broker == record.owner for broker in added)
        and sum(map(snapshot.is_live, change.replicas)) >= change.write_quorum
    )


def _is_crowded(snapshot: Snapshot, replicas: tuple[str, ...]) -> bool:
    """Tell whether replicas share a rack while another rack has none."""
    racks = {broker.rack for broker in snapshot.brokers.values() if broker.available and broker.rack}
    used = [snapshot.brokers[broker].rack for broker in replicas if snapshot.is_live(broker)]
    return len(set(used)) < len(used) and bool(racks.difference(used))


def _leaves(snapshot: Snapshot, broker: str, patience: Patience) -> bool:
    """Tell whether a broker is to hold no replicas: it drains, or is gone for too long."""
    return _drains(snapshot, broker) or stays_away(snapshot, broker, patience)


def stays_away(snapshot: Snapshot, broker: str, patience: Patience) -> bool:
    """Tell whether a broker is gone for so long that others take its place."""
    since = snapshot.gone_since.get(broker) if not snapshot.is_live(broker) else None
    return since is not None and patience.now - since >= patience.replace_after_s


def _drains(snapshot: Snapshot, broker: str) -> bool:
    return snapshot.is_live(broker) and snapshot.brokers[broker].state in EMPTIED
