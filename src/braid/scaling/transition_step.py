"""Decides how far a transition may go now. A pure function of the topic's record and its segments' records.

    step        what must be so                                                          and then
    CREATING    every child is served; every parent is served, and is not moving;
                every broker knows transitions                                           SEALING, if the owners agree
    SEALING     the log of every parent has ended, and every child has inherited         the layout is committed

Before the first log ends, all of them must be able to end: so every parent must be served in CREATING. Later a parent
that is not served holds the transition up until its log has ended and its children have asked it for its producers. In
CREATING, a broker of an earlier build that has joined since the transition began holds it up, too: it could be given a
child, and would not know what to do with it. What is missing is told in sentences, because people wait for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import NamedTuple

from braid.model.cluster import TRANSITIONS, Registration
from braid.model.ids import SegmentId
from braid.model.ownership import Ownership, OwnershipState
from braid.model.transition import Transition, TransitionStep


class TransitionAction(Enum):
    WAIT = "wait"
    SEAL = "seal"
    """Nothing in the records is against it: ask the owners, then let the parents' logs end."""
    COMMIT = "commit"


class TransitionDecision(NamedTuple):
    action: TransitionAction
    missing: tuple[str, ...] = ()
    """What the transition waits for, in sentences."""


def outdated(live: Mapping[str, Registration]) -> list[str]:
    """Return which brokers do not know transitions, in sentences."""
    return [
        f"broker {broker} runs version {registration.version or 'unknown'}, which does not know changes of a layout; "
        f"upgrade it"
        for broker, registration in sorted(live.items())
        if TRANSITIONS not in registration.features
    ]


def decide(
    transition: Transition, records: Mapping[SegmentId, Ownership], live: Mapping[str, Registration]
) -> TransitionDecision:
    """`records` are those of the transition's segments, as far as there are any; `live` are the brokers."""
    if transition.step is TransitionStep.CREATING:
        missing = outdated(live)
        missing += [
            why
            for segment in (*transition.ranges, *transition.parents)
            if (why := _not_served(segment, records.get(segment), live)) is not None
        ]
        missing += [
            f"segment {parent} is moving to another broker"
            for parent in transition.parents
            if (record := records.get(parent)) is not None and record.move is not None
        ]
        action = TransitionAction.SEAL
    else:
        missing = [
            _not_served(parent, records.get(parent), live) or f"the log of segment {parent} is being ended"
            for parent in transition.parents
            if (record := records.get(parent)) is None or record.ended_at is None
        ]
        if not missing and (heirs := _without_inheritance(transition, records)):
            missing = [  # They ask the owners of their parents.
                why
                for parent in transition.parents
                if (why := _not_served(parent, records.get(parent), live)) is not None
            ]
            missing += [
                _not_served(child, records.get(child), live) or f"segment {child} has not taken over from its parents"
                for child in heirs
            ]
        action = TransitionAction.COMMIT
    return TransitionDecision(TransitionAction.WAIT if missing else action, tuple(missing))


def being_ended(
    transition: Transition, records: Mapping[SegmentId, Ownership], live: Collection[str]
) -> list[SegmentId]:
    """Return the parents that are served and have not ended: their owners know what they wait for."""
    if transition.step is not TransitionStep.SEALING:
        return []
    return [
        parent
        for parent in transition.parents
        if (record := records.get(parent)) is not None
        and record.ended_at is None
        and _not_served(parent, record, live) is None
    ]


def _without_inheritance(transition: Transition, records: Mapping[SegmentId, Ownership]) -> list[SegmentId]:
    return [
        child
        for child in transition.ranges
        if (record := records.get(child)) is None or record.inherited != transition.id
    ]


def _not_served(segment: SegmentId, record: Ownership | None, live: Collection[str]) -> str | None:
    if record is None:
        return f"segment {segment} has no owner yet"
    if record.state is OwnershipState.RECOVERING:
        return f"the replicas of segment {segment} vote"
    if record.owner not in live and record.state is not OwnershipState.SEALED:
        return f"the owner of segment {segment}, {record.owner}, is down"
    if (failure := record.failure_of(record.owner)) is not None:
        return f"broker {record.owner} cannot open segment {segment}: {failure.reason}"
    if record.state is not OwnershipState.SERVING:
        return f"segment {segment} is not served yet"
    return None
