"""The state that a controller keeps of one subscription's consumers, or of one group of checkpoint consumers: values,
and the small changes that keep them consistent. Only `Groups` (broker/groups/groups.py) holds and changes them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator
from typing import Protocol

import msgspec

from braid.metadata.store import Compare
from braid.model.errors import BraidError
from braid.model.ids import SegmentId
from braid.model.names import TopicName
from braid.wire.operations import ENDED, GroupPosition


class Assigned(msgspec.Struct, frozen=True):
    """All segments that a consumer has now."""

    number: int
    """Counts the assignments of one session."""
    segments: tuple[int, ...]
    term: int
    grants: tuple[int, ...]
    """One for each segment, signed."""
    positions: tuple[GroupPosition, ...] = ()
    """Where to begin, as far as a group of checkpoint consumers knows it."""


class Member(Protocol):
    """A consumer's connection, as its group sees it. These calls must not wait."""

    def assign(self, assigned: Assigned) -> None:
        """Push an assignment."""

    def expelled(self, error: BraidError) -> None:
        """Tell the consumer that its session has ended, and why: another consumer of the same name took its place, the
        topic or the subscription was deleted, or this broker is no longer the controller."""


class ConsumerStatus(msgspec.Struct, frozen=True):
    """A consumer as reports show it."""

    segments: tuple[int, ...]
    connected: bool


class Control(msgspec.Struct, eq=False):
    """A topic whose controller is this broker."""

    term: int
    fence: Compare
    grants: Iterator[int]
    """Shared by all groups of the topic, so that no grant comes twice when a group ends and begins anew."""


class MemberSession(msgspec.Struct, eq=False):
    """A consumer's place in its group. It outlives the consumer's connection until the grace has passed."""

    group: Group
    consumer: str
    number: int
    """A new number each time that the consumer connects."""
    member: Member | None = None
    """None while the consumer is disconnected."""
    grace: asyncio.TimerHandle | None = None
    pushed: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """The segments that were pushed last, and the numbers of their grants."""
    pushes: int = 0

    def stop_grace(self) -> None:
        if self.grace is not None:
            self.grace.cancel()
            self.grace = None


class Group(msgspec.Struct, eq=False):
    """The consumers of one subscription, or of one group of checkpoint consumers."""

    topic: TopicName
    topic_id: int
    subscription: str
    """Or the key of the group."""
    control: Control
    sessions: dict[str, MemberSession] = {}
    """By the consumer's name."""
    holders: dict[SegmentId, MemberSession] = {}
    grants: dict[SegmentId, int] = {}
    """The number of the grant under which each segment's holder has it."""
    asked_back: dict[SegmentId, asyncio.TimerHandle] = {}
    """Segments that their holder must give back, and the timers that end the wait."""
    pass_is_due: bool = False
    positions: dict[SegmentId, GroupPosition] = {}
    """Of checkpoint consumers: the furthest that they have told."""

    @property
    def ended(self) -> frozenset[SegmentId]:
        """The segments of which checkpoint consumers say that they have read them to their ends."""
        return frozenset(segment for segment, position in self.positions.items() if position.offset == ENDED)

    @property
    def complete(self) -> bool:
        """Whether all stored sessions have come back to this controller, or are over."""
        return all(session.number for session in self.sessions.values())

    def note(self, position: GroupPosition) -> None:
        """Keep a position that a checkpoint consumer told, if it is the furthest of its segment."""
        segment = SegmentId(position.segment)
        known = self.positions.get(segment)
        if known is None or (known.offset != ENDED and (position.offset == ENDED or position.offset > known.offset)):
            self.positions[segment] = position

    def forget_all_but(self, segments: Iterable[SegmentId]) -> None:
        """Forget the positions of segments that the topic does not have any more."""
        for segment in self.positions.keys() - segments:
            del self.positions[segment]

    def holds_unread(self, segments: Collection[SegmentId]) -> bool:
        """Whether a consumer still has records of a segment that the topic has lost. No layout tells the descendants of
        that segment any more, and the consumer must be done with its records before they are read."""
        return any(segment not in segments and segment not in self.ended for segment in self.holders)

    def held_by(self, session: MemberSession) -> tuple[SegmentId, ...]:
        """The segments that the session has and may keep."""
        return tuple(
            segment
            for segment, holder in sorted(self.holders.items())
            if holder is session and segment not in self.asked_back
        )

    def give(self, segment: SegmentId, session: MemberSession) -> None:
        self.holders[segment] = session
        self.grants[segment] = next(self.control.grants)

    def free(self, segment: SegmentId) -> None:
        self.holders.pop(segment, None)
        self.grants.pop(segment, None)
        timer = self.asked_back.pop(segment, None)
        if timer is not None:
            timer.cancel()
