"""What a controller remembers of one subscription's consumers (broker/groups/groups.py): values, and the small changes
that keep them consistent. Only `Groups` holds and changes them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Protocol

import msgspec

from braid.metadata.store import Compare
from braid.model.errors import BraidError
from braid.model.ids import SegmentId
from braid.model.names import TopicName


class Assigned(msgspec.Struct, frozen=True):
    """All that a consumer has now."""

    number: int
    """Counts up, for one session."""
    segments: tuple[int, ...]
    term: int
    grants: tuple[int, ...]
    """One for each segment."""


class Member(Protocol):
    """A consumer's connection, as far as its group knows it. None of these may wait."""

    def assign(self, assigned: Assigned) -> None:
        """Push it."""

    def expelled(self, error: BraidError) -> None:
        """It is no consumer here any more, for the reason given: another of the same name took its place, there is
        nothing to consume, or another broker is the controller."""


class ConsumerStatus(msgspec.Struct, frozen=True):
    """For statistics."""

    segments: tuple[int, ...]
    connected: bool


class Control(msgspec.Struct, eq=False):
    """A topic whose controller this broker is."""

    term: int
    fence: Compare
    grants: Iterator[int]
    """For all its groups, so that none comes twice when a group ends and begins anew."""


class MemberSession(msgspec.Struct, eq=False):
    group: Group
    consumer: str
    number: int
    """Another one after each connecting."""
    member: Member | None = None
    """None while it is disconnected."""
    grace: asyncio.TimerHandle | None = None
    pushed: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Segments and grants."""
    pushes: int = 0

    def stop_grace(self) -> None:
        if self.grace is not None:
            self.grace.cancel()
            self.grace = None


class Group(msgspec.Struct, eq=False):
    """The consumers of one subscription."""

    topic: TopicName
    topic_id: int
    subscription: str
    control: Control
    sessions: dict[str, MemberSession] = {}
    """By the consumer's name."""
    holders: dict[SegmentId, MemberSession] = {}
    grants: dict[SegmentId, int] = {}
    """Of the segments that have holders."""
    asked_back: dict[SegmentId, asyncio.TimerHandle] = {}
    """Segments that their holder is to give back, and when it is no longer waited for."""
    pass_is_due: bool = False

    def held_by(self, session: MemberSession) -> tuple[SegmentId, ...]:
        """What it has and may keep."""
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
