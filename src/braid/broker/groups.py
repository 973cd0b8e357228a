"""The consumers of ordered subscriptions, and which of them has which segment.

A consumer's session is kept in the metadata store from its joining to its leaving. Whether it is connected is known
here, in memory, only: one that loses its connection keeps its segments for a while (its *grace*) and takes up again
where it was if it comes back. After a restart every stored session gets a new grace. So neither the restart of a
consumer nor that of a broker makes segments wander.

Who should have what is `assign`, a pure function. Who has what is `holders`, and the way from one to the other keeps
I4, never two holders of one segment at once:

    held by A, should be B's    → A is pushed an assignment without it and has release_timeout_s to give it back;
                                  then its channel is closed for it
    given back, or A is gone    → B is pushed an assignment with it

A segment that was asked back goes to nobody before it is given back, not even to A itself: A's answer may be under way.

One object owns all this state, and changes it without waiting in between. Whatever happens only notes what is so and
asks for one pass over the group, in the loop's next turn, which gives out segments and pushes assignments: so a caller
of `join` knows its session's number before the first assignment is pushed, and a member that calls back changes nothing
under anybody's feet. Store writes of one consumer take turns; a session that has ended, but whose key the store did not
let go, is removed in the background.
"""

from __future__ import annotations

import asyncio
import logging
from itertools import count
from typing import Final, Protocol

import msgspec

from braid.broker.config import GroupConfig
from braid.broker.topics import Topics
from braid.broker.turns import Turns
from braid.metadata import paths
from braid.metadata.store import Compare, Delete, Put, Store
from braid.model.errors import (
    BraidError,
    ConsumerReplaced,
    MetadataError,
    MetadataUncertain,
    ShuttingDown,
    SubscriptionNotFound,
    TopicNotFound,
)
from braid.model.ids import Revision, SegmentId
from braid.model.names import TopicName, check_name
from braid.model.subscription import ConsumerSession, encode
from braid.ports.clock import Clock
from braid.scaling.assignment import assign

log = logging.getLogger(__name__)

MAX_TRIES: Final = 5
RETRY_S: Final = 1.0
"""How long the removal of a session waits after the store did not answer."""


class Member(Protocol):
    """A consumer's connection, as far as its group knows it. None of these may wait."""

    def assign(self, number: int, segments: tuple[int, ...]) -> None:
        """Push the whole assignment."""

    def revoke(self, segment: int) -> None:
        """Close its channel on this segment now, if it has one."""

    def expelled(self, error: BraidError) -> None:
        """It is no consumer any more, for the reason given: another of the same name took its place, or there is
        nothing to consume. Close its channels now."""


class Consumer(msgspec.Struct, frozen=True):
    """For statistics."""

    segments: tuple[int, ...]
    connected: bool


class _Session(msgspec.Struct, eq=False):
    group: _Group
    consumer: str
    number: int
    """Another one after each connecting."""
    member: Member | None = None
    """None while it is disconnected."""
    grace: asyncio.TimerHandle | None = None
    pushed: tuple[int, ...] | None = None
    pushes: int = 0

    def stop_grace(self) -> None:
        if self.grace is not None:
            self.grace.cancel()
            self.grace = None


class _Group(msgspec.Struct, eq=False):
    """The consumers of one subscription."""

    topic: TopicName
    topic_id: int
    subscription: str
    sessions: dict[str, _Session] = {}
    """By the consumer's name."""
    holders: dict[SegmentId, _Session] = {}
    asked_back: dict[SegmentId, asyncio.TimerHandle] = {}
    """Segments that their holder is to give back, and when it is no longer waited for."""
    pass_is_due: bool = False

    def held_by(self, session: _Session) -> tuple[SegmentId, ...]:
        """What it has and may keep."""
        return tuple(
            segment
            for segment, holder in sorted(self.holders.items())
            if holder is session and segment not in self.asked_back
        )

    def free(self, segment: SegmentId) -> None:
        self.holders.pop(segment, None)
        timer = self.asked_back.pop(segment, None)
        if timer is not None:
            timer.cancel()


class Groups:
    def __init__(self, store: Store, topics: Topics, clock: Clock, config: GroupConfig) -> None:
        self._store = store
        self._topics = topics
        self._clock = clock
        self._config = config
        self._groups: dict[tuple[str, str], _Group] = {}
        self._sessions: dict[int, _Session] = {}
        """Those that are connected, by number."""
        self._numbers = count(1)
        self._to_remove: dict[tuple[TopicName, str, str], None] = {}
        """Sessions whose keys are to go: topic, subscription, consumer."""
        self._removing: asyncio.Task[None] | None = None
        self._turns = Turns()
        """By the session's key: whoever writes it."""
        self._endings = 0
        """Counts deleted topics and subscriptions: who waited for the store meanwhile looks again."""
        self._closed = False

    async def load(self) -> None:
        """Take over the stored sessions: each gets its grace. The topics are loaded before."""
        listing = await self._store.list(paths.TOPICS_PREFIX)
        for entry in listing.entries:
            found, path = paths.consumer_of(entry.key), paths.topic_of(entry.key)
            if found is not None and path is not None and self._topics.find(path) is not None:
                subscription, consumer = found
                group = self._group(TopicName(*paths.topic_parts(path)), subscription)
                session = group.sessions[consumer] = _Session(group, consumer, 0)
                self._begin_grace(session)
                self._ask_for_pass(group)
        self._topics.on_change.append(self._on_topic_change)

    async def join(self, topic: TopicName, subscription: str, consumer: str, member: Member) -> int:
        """The number of the session. Its first assignment is pushed in the loop's next turn.

        A consumer of the same name that is connected is replaced; one that is not is continued."""
        check_name("consumer", consumer)
        async with self._turns.of(paths.consumer(topic.path, subscription, consumer)):
            while True:
                self._check_open()
                self._topics.get(topic.path)
                endings = self._endings
                if consumer not in self.consumers(topic.path, subscription):
                    await self._store_session(topic, subscription, consumer)
                self._check_open()
                if endings == self._endings:
                    return self._enter(self._group(topic, subscription), consumer, member)

    def released(self, session: int, segment: int) -> None:
        """The session gave a segment back; its channel is closed. One that was not asked for, or that came too late,
        changes nothing."""
        found = self._sessions.get(session)
        segment_id = SegmentId(segment)
        if found is not None and found.group.holders.get(segment_id) is found and segment in found.group.asked_back:
            found.group.free(segment_id)
            self._ask_for_pass(found.group)

    async def leave(self, session: int) -> None:
        """Orderly: its segments go to others at once. Leaving twice is fine."""
        found = self._sessions.pop(session, None)
        if found is None:
            return
        group, member = found.group, found.member
        self._forget(found)
        if member is not None:
            for segment in [segment for segment, holder in group.holders.items() if holder is found]:
                member.revoke(segment)
        self._free_all(found)
        try:
            await self._delete_session(group.topic, group.subscription, found.consumer)
        except MetadataError:
            # It has left, whatever the store says.
            self._remove_later(group.topic, group.subscription, found.consumer)
        except asyncio.CancelledError:
            self._remove_later(group.topic, group.subscription, found.consumer)
            raise

    def disconnected(self, session: int) -> None:
        """Its connection is gone, and its channels with it. It keeps its segments until its grace has passed."""
        found = self._sessions.pop(session, None)
        if found is None:
            return
        found.member = None
        found.pushed = None
        self._free_asked_back(found)
        if not self._closed:
            self._begin_grace(found)
            self._ask_for_pass(found.group)

    def holds(self, session: int, segment: int) -> bool:
        """Whether this session may open a channel on this segment now."""
        found = self._sessions.get(session)
        return (
            found is not None
            and found.group.holders.get(SegmentId(segment)) is found
            and segment not in found.group.asked_back
        )

    def members(self, path: str, subscription: str) -> dict[str, tuple[int, ...]]:
        """By the consumer's name, the segments that it has."""
        return {name: consumer.segments for name, consumer in self.consumers(path, subscription).items()}

    def consumers(self, path: str, subscription: str) -> dict[str, Consumer]:
        group = self._groups.get((path, subscription))
        if group is None:
            return {}
        return {
            name: Consumer(
                tuple(segment for segment, holder in sorted(group.holders.items()) if holder is session),
                session.member is not None,
            )
            for name, session in sorted(group.sessions.items())
        }

    def connected(self, path: str, subscription: str | None = None) -> list[str]:
        """The names of the connected consumers, of one subscription or of all."""
        return sorted(
            session.consumer
            for session in self._sessions.values()
            if session.group.topic.path == path and subscription in (None, session.group.subscription)
        )

    def forget(self, topic: TopicName, subscription: str) -> None:
        """The subscription was deleted, and its sessions with it, connected or not."""
        self._endings += 1
        group = self._groups.get((topic.path, subscription))
        if group is not None:
            for consumer in group.sessions:
                self._remove_later(topic, subscription, consumer)
            self._end(group, SubscriptionNotFound(f"subscription {subscription} of {topic} was deleted"))

    async def close(self) -> None:
        """Sessions stay stored: who comes back after a restart continues."""
        self._closed = True
        for group in self._groups.values():
            for timer in group.asked_back.values():
                timer.cancel()
            for session in group.sessions.values():
                session.stop_grace()
        if self._on_topic_change in self._topics.on_change:
            self._topics.on_change.remove(self._on_topic_change)
        task, self._removing = self._removing, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    # Sessions.

    def _group(self, topic: TopicName, subscription: str) -> _Group:
        key = (topic.path, subscription)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(topic, self._topics.get(topic.path).id, subscription)
        return group

    def _enter(self, group: _Group, consumer: str, member: Member) -> int:
        session = group.sessions.get(consumer)
        if session is None:
            session = group.sessions[consumer] = _Session(group, consumer, 0)
        elif session.member is not None:
            self._replace(session, session.member)
        session.stop_grace()
        session.number, session.member = next(self._numbers), member
        session.pushed, session.pushes = None, 0
        self._sessions[session.number] = session
        self._ask_for_pass(group)
        return session.number

    def _replace(self, session: _Session, old: Member) -> None:
        """The old connection loses its channels now; the session keeps its segments for the new one."""
        group = session.group
        del self._sessions[session.number]
        old.expelled(
            ConsumerReplaced(
                f"another consumer with the name {session.consumer} joined subscription {group.subscription} of "
                f"{group.topic} and took this one's place; give every consumer a name of its own"
            )
        )
        self._free_asked_back(session)

    def _begin_grace(self, session: _Session) -> None:
        loop = asyncio.get_running_loop()
        session.grace = loop.call_later(self._config.session_grace_s, self._on_grace_over, session)

    def _on_grace_over(self, session: _Session) -> None:
        session.grace = None
        self._forget(session)
        self._free_all(session)
        self._remove_later(session.group.topic, session.group.subscription, session.consumer)

    def _forget(self, session: _Session) -> None:
        group = session.group
        session.stop_grace()
        session.member = None
        del group.sessions[session.consumer]
        if not group.sessions:
            del self._groups[group.topic.path, group.subscription]

    def _free_all(self, session: _Session) -> None:
        group = session.group
        for segment in [segment for segment, holder in group.holders.items() if holder is session]:
            group.free(segment)
        self._ask_for_pass(group)

    def _free_asked_back(self, session: _Session) -> None:
        """Its channels are closed: what it was to give back need not be waited for."""
        group = session.group
        for segment in [segment for segment in group.asked_back if group.holders.get(segment) is session]:
            group.free(segment)

    def _end(self, group: _Group, reason: BraidError) -> None:
        """No consumer of this group has anything any more."""
        for segment in [*group.holders]:
            group.free(segment)
        for session in [*group.sessions.values()]:
            self._sessions.pop(session.number, None)
            member = session.member
            self._forget(session)
            if member is not None:
                member.expelled(reason)

    def _check_open(self) -> None:
        if self._closed:
            raise ShuttingDown("no consumer can join: this broker is shutting down")

    def _on_topic_change(self, path: str) -> None:
        """A topic that is deleted, or is another one of the same name, has none of these consumers."""
        topic = self._topics.find(path)
        if topic is None:
            self._endings += 1
        for group in [group for group in self._groups.values() if group.topic.path == path]:
            if topic is not None and topic.id == group.topic_id:
                self._ask_for_pass(group)
            else:
                self._end(group, TopicNotFound(f"topic {group.topic} was deleted"))

    # Giving out segments.

    def _ask_for_pass(self, group: _Group) -> None:
        if not group.pass_is_due:
            group.pass_is_due = True
            asyncio.get_running_loop().call_soon(self._pass, group)

    def _pass(self, group: _Group) -> None:
        """One step from who has what to who should have what."""
        group.pass_is_due = False
        topic = self._topics.find(group.topic.path)
        if self._closed or topic is None:
            return
        # Layouts do not change yet: no segment has ancestors that would have to be drained.
        wanted = assign(topic.layout, frozenset(), group.sessions)
        for consumer, segments in wanted.items():
            session = group.sessions[consumer]
            for segment in segments:
                holder = group.holders.get(segment)
                if holder is None or (holder is not session and holder.member is None):
                    group.holders[segment] = session  # One that is not connected has no channel to close.
                elif holder is not session and segment not in group.asked_back:
                    self._ask_back(group, segment)
        for session in [*group.sessions.values()]:
            self._push(session)

    def _ask_back(self, group: _Group, segment: SegmentId) -> None:
        loop = asyncio.get_running_loop()
        timeout_s = self._config.release_timeout_s
        group.asked_back[segment] = loop.call_later(timeout_s, self._on_release_overdue, group, segment)

    def _on_release_overdue(self, group: _Group, segment: SegmentId) -> None:
        holder = group.holders[segment]
        assert holder.member is not None, "what a disconnected consumer was to give back is free at once"
        log.warning(
            "consumer %s of subscription %s of %s did not give back segment %d within %g s: its channel is closed",
            holder.consumer, group.subscription, group.topic, segment, self._config.release_timeout_s,
        )  # fmt: skip
        holder.member.revoke(segment)
        group.free(segment)
        self._ask_for_pass(group)

    def _push(self, session: _Session) -> None:
        segments = session.group.held_by(session)
        if session.member is not None and segments != session.pushed:
            session.pushed = segments
            session.pushes += 1
            session.member.assign(session.pushes, segments)

    # The store.

    async def _store_session(self, topic: TopicName, subscription: str, consumer: str) -> None:
        """Only with the session's turn. After any failure nothing of it stays, now or a little later."""
        value = encode(ConsumerSession(joined_at=self._clock.now_us()))
        subscription_key = paths.subscription(topic.path, subscription)
        key = paths.consumer(topic.path, subscription, consumer)
        try:
            for _ in range(MAX_TRIES):
                joined = await self._store.get(subscription_key)
                if joined is None:
                    raise SubscriptionNotFound(f"there is no subscription {subscription} of {topic} to join")
                # A key that is there is the leftover of a session that is gone, or this write, whose answer was lost.
                entry = await self._store.get(key)
                if entry is not None and entry.value == value:
                    return
                before = Compare(key, entry.revision if entry is not None else Revision(0))
                try:
                    result = await self._store.txn(
                        [Compare(subscription_key, joined.revision), before], [Put(key, value)]
                    )
                except MetadataUncertain:
                    continue
                if result.succeeded:
                    return
            raise MetadataUncertain(
                f"it is not known whether consumer {consumer} joined subscription {subscription} of {topic}; join again"
            )
        except (BraidError, asyncio.CancelledError):
            self._remove_later(topic, subscription, consumer)
            raise

    async def _delete_session(self, topic: TopicName, subscription: str, consumer: str) -> None:
        """Does nothing if a consumer of this name has joined again."""
        key = paths.consumer(topic.path, subscription, consumer)
        async with self._turns.of(key):
            for _ in range(MAX_TRIES):
                if consumer in self.consumers(topic.path, subscription):
                    return
                entry = await self._store.get(key)
                if entry is None:
                    return
                try:
                    result = await self._store.txn([Compare(key, entry.revision)], [Delete(key)])
                except MetadataUncertain:
                    continue
                if result.succeeded:
                    return
        raise MetadataUncertain(f"it is not known whether the session of consumer {consumer} was removed; try again")

    def _remove_later(self, topic: TopicName, subscription: str, consumer: str) -> None:
        self._to_remove[topic, subscription, consumer] = None
        if self._removing is None and not self._closed:
            self._removing = asyncio.create_task(self._remove_all(), name="remove consumer sessions")

    async def _remove_all(self) -> None:
        while self._to_remove:
            topic, subscription, consumer = ended = next(iter(self._to_remove))
            try:
                await self._delete_session(topic, subscription, consumer)
            except MetadataError as error:
                log.warning("the session of consumer %s cannot be removed, trying again: %s", consumer, error)
                await asyncio.sleep(RETRY_S)
            else:
                del self._to_remove[ended]
        self._removing = None
