"""Decides what a broker has to do about one segment now. A pure function of its record and of what the broker serves.

    the record names                                        the broker
    this broker, and it does not serve the segment          opens it
    this broker, the epoch that it serves                   serves on
    this broker, the epoch that it serves, log has failed   abandons it and opens it again
    this broker, the epoch that it serves, new durability   closes it in order and opens it again
    this broker, the epoch that it serves, a parent         ends its log, when the transition is so far
    this broker, the epoch that it serves, a child          inherits, when the logs of all its parents have ended
    this broker, the epoch that it serves, a move           hands it over, also if its disk is full
    this broker, another epoch than it serves               lets it go
    another broker or none, or it is SEALED or RECOVERING   lets it go, if it serves it

A broker opens a segment in the epoch of its record only if the record is ASSIGNED and it was not tried in that epoch;
otherwise it takes the segment again first, in the next epoch. A move that is in the record goes on when the segment is
served.

Nothing here depends on an event that must not be missed. The broker asks after each change of a record, each failure
and each end of its own work; the same question has the same answer.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from braid.model.ids import Epoch, SegmentId
from braid.model.ownership import Ownership, OwnershipState
from braid.model.topic import Durability, Topic, TopicPolicies
from braid.model.transition import TransitionStep


class OwnerAction(Enum):
    NOTHING = "nothing"
    """The broker serves the segment as the record says, or will ask again."""
    OPEN = "open"
    REOPEN = "reopen"
    """Abandon the segment, because its log has failed; it is opened in the next epoch."""
    RENEW = "renew"
    """Close the segment in order, because its log has another durability than its topic; it is opened in the next
    epoch."""
    HAND_OVER = "hand-over"
    END_LOG = "end-log"
    """End the log for ever: a transition replaces the segment by its children."""
    INHERIT = "inherit"
    """Take over the producer tables of the segments that this one replaces."""
    LET_GO = "let-go"
    """Stop serving immediately: another owner, or another epoch, has the segment (I3)."""
    NOT_OURS = "not-ours"
    """Serve nothing: another broker owns the segment, or none does."""


class TransitionRole(Enum):
    NONE = "none"
    PARENT = "parent"
    """Its log is to end."""
    CHILD = "child"
    """It is to inherit: the logs of all its parents have ended."""


def decide(
    record: Ownership | None,
    broker_id: str,
    served: Epoch | None,
    *,
    failed: bool = False,
    full: bool = False,
    renewed: bool = False,
    busy: bool = False,
    known: bool = True,
    role: TransitionRole = TransitionRole.NONE,
) -> OwnerAction:
    """Return what the broker has to do.

    `served` is the epoch in which it serves the segment, None if it does not. `failed` tells whether the log of that
    epoch has failed, perhaps while the broker was busy; `full`, whether only because its disk is full. A full log can
    be handed over, and that makes room. `renewed` tells whether the topic has got another durability than that log was
    opened with. While the broker is `busy` with the segment, nothing else begins. `known` tells whether a topic has the
    segment: one that no topic has is being created or removed, and is neither opened nor handed over. `role` is what a
    transition wants of the segment now (`transition_role`).
    """
    if busy:
        return OwnerAction.NOTHING
    if served is not None:
        if record is None or not record.is_held_by(broker_id, served):
            return OwnerAction.LET_GO
        moves = record.move is not None and known
        if failed and not (full and moves):
            return OwnerAction.REOPEN
        serving = record.state is OwnershipState.SERVING
        if role is not TransitionRole.NONE and serving and not failed:
            return OwnerAction.END_LOG if role is TransitionRole.PARENT else OwnerAction.INHERIT
        if moves:
            return OwnerAction.HAND_OVER
        return OwnerAction.RENEW if renewed and serving else OwnerAction.NOTHING
    if record is None or record.owner != broker_id or not record.is_owned:
        return OwnerAction.NOT_OURS
    return OwnerAction.OPEN if known else OwnerAction.NOTHING


def durability(record: Ownership, policies: TopicPolicies) -> Durability:
    """Return what confirms of the segment wait for. While it has followers, they count, whatever its topic says now."""
    return Durability.REPLICATED if len(record.replicas) > 1 else policies.durability


def transition_role(
    topic: Topic, segment_id: SegmentId, record_of: Callable[[SegmentId], Ownership | None], *, inherited: bool = True
) -> TransitionRole:
    """Return what a transition wants of the segment's owner now.

    `inherited` tells whether the log has records or has begun with its parents' producer tables. It has not if what its
    last owner had was given up before the first record came; then it inherits again, also after the commit."""
    info, transition = topic.segments.get(segment_id), topic.transition
    record = record_of(segment_id) if info is not None else None
    if info is None or record is None:
        return TransitionRole.NONE
    if segment_id in topic.layout.segments:
        if info.is_active and info.parent_ids and not inherited:
            return TransitionRole.CHILD  # Before it ends: its children inherit what it has inherited.
        ends = transition is not None and transition.step is TransitionStep.SEALING and segment_id in transition.parents
        return TransitionRole.PARENT if ends and record.ended_at is None else TransitionRole.NONE
    if transition is None or transition.step is not TransitionStep.SEALING or record.inherited == transition.id:
        return TransitionRole.NONE
    # Their owners end them in order. The last one says most often that it is too early: a merge may have 1,000 parents.
    parents = map(record_of, reversed(info.parent_ids))
    all_ended = all(parent is not None and parent.ended_at is not None for parent in parents)
    return TransitionRole.CHILD if all_ended else TransitionRole.NONE
