"""The consumers of ordered subscriptions and of groups of checkpoint consumers, and the segments that each has.

The groups of a topic live on one broker, its controller (broker/groups/controllers.py). The broker that the first
consumer joins becomes the controller; a consumer that asks another broker is sent there. A broker that is no longer the
controller forgets the groups and tells their consumers to join again, at the next controller.

A consumer's session is kept in the metadata store from its joining to its leaving. Only the controller knows, in
memory, whether the consumer is connected. A consumer that loses its connection keeps its segments for a while (its
*grace*), and goes on where it was if it comes back in that time. A new controller gives every stored session a new
grace. So segments do not change hands when a consumer or a broker restarts.

`assign`, a pure function, says which consumer should have a segment; `holders` says which consumer has it. On the way
from `holders` to `assign`, consumers get time to finish their work:

    A has it, B should have it  → A is pushed an assignment without it and has release_timeout_s to give it back
    given back, or A is gone    → B is pushed an assignment with it

No consumer should have a segment that its subscription has drained, or one with an ancestor that is not drained. After
a seek backwards the ancestor is to be read again: its consumers wait until all of its descendants were given back.

A group of checkpoint consumers has no cursors and no drained marks. Its consumers tell how far they have come, and what
they have read to its end; each consumer goes on where the last one was. The end of a segment counts when the topic's
record says that its log ends: otherwise one consumer could keep all others from the records to come. After a fail-over
the group waits for all stored sessions: only together do its consumers know what has ended.

A segment that was asked back goes to no consumer before it is given back, not even to A: A's answer may be under way.
This module does not keep A from reading on. Instead, a segment gets a higher *grant* each time that it is given to a
consumer, and the segment's owner closes A's channel when B shows its own grant (broker/segments/read_grants.py). A
consumer that connects again gets new grants, too: a process of the same name that still runs elsewhere is then out of
date.

One object owns all this state, and changes it without waiting in between. An event only notes a fact and asks for one
pass over the group, in the loop's next iteration. The pass gives out segments and pushes assignments. So a caller of
`join` knows its session's number before the first assignment is pushed, and a member that calls back during a pass only
asks for the next one. broker/groups/sessions.py writes the stored sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from itertools import count
from typing import Final

from braid.broker.config import GroupConfig
from braid.broker.groups.controllers import Controllers
from braid.broker.groups.group import Assigned, ConsumerStatus, Control, Group, Member, MemberSession
from braid.broker.groups.sessions import StoredSessions
from braid.broker.keyed_locks import KeyedLocks
from braid.broker.segments.read_grants import GrantSigner
from braid.broker.topics import Topics
from braid.cluster.drained import DrainedKey, DrainedSegments
from braid.metadata import paths
from braid.metadata.store import Compare, Entry, Store
from braid.metadata.view import Table
from braid.model.errors import (
    BraidError,
    ConsumerReplaced,
    MetadataError,
    NotServing,
    ShuttingDown,
    SubscriptionNotFound,
    TopicNotFound,
)
from braid.model.ids import SegmentId
from braid.model.names import TopicName, check_name
from braid.model.stored_record import decode
from braid.model.subscription import Subscription, is_group
from braid.ports.clock import Clock
from braid.scaling.assignment import assign
from braid.wire.operations import ENDED, GroupPosition

_log: Final = logging.getLogger(__name__)

_Key = tuple[str, str]
"""A topic's path, and a subscription's name or a group's key."""


class Groups:
    def __init__(
        self,
        topics: Topics,
        controllers: Controllers,
        drained: DrainedSegments,
        clock: Clock,
        config: GroupConfig,
        signer: GrantSigner,
    ) -> None:
        self._store: Store = topics.view.store
        self._topics = topics
        self._controllers = controllers
        self._drained = drained
        self._subscriptions: Table[_Key, Subscription] = topics.view.add(
            Table(
                paths.TOPICS_PREFIX,
                _subscription_of,
                lambda data: decode(Subscription, data),
                lambda key: paths.subscription(*key),
            )
        )
        self._clock = clock
        self._config = config
        self._signer = signer
        self._controls: dict[str, Control] = {}
        """By topic: the topics whose controller is this broker."""
        self._groups: dict[_Key, Group] = {}
        self._sessions: dict[int, MemberSession] = {}
        """The connected sessions by number."""
        self._numbers = count(clock.now_us())
        """For sessions. A number from before a restart is never given out again: a client that has not noticed the
        restart yet may use it, over the connection of another consumer."""
        self._stored = StoredSessions(topics.view, clock, self._fence, self._is_member)
        self._claims = KeyedLocks()
        """By topic: one task at a time makes this broker the controller."""
        self._endings = 0
        """Counts deleted topics and subscriptions: `join` starts again if one ended while it waited for the store."""
        self._closed = False

    def start(self) -> None:
        """Follow the changes of the metadata from now on."""
        self._topics.on_change.append(self._on_topic_change)
        self._controllers.table.on_change.append(self._on_controller_change)
        self._controllers.start()
        self._subscriptions.on_change.append(self._on_subscription_change)
        self._drained.table.on_change.append(self._on_drained_change)

    async def control(self, topic: TopicName) -> None:
        """Return when this broker is the topic's controller and has its groups. `Moved` if another broker is."""
        path = topic.path
        async with self._claims.of(path):
            self._check_open()
            if path in self._controls:
                return
            await self._controllers.claim(path, self._topics.unchanged(path))
            fence = self._controllers.fence(path)
            listing = await self._store.list(paths.subscriptions_prefix(path))
            self._check_open()
            if self._controllers.fence(path) != fence:
                raise NotServing(f"the controller of topic {path} is changing; try again in a moment")
            self._controls[path] = Control(fence.revision, fence, count(1))
            self._take_over(topic, listing.entries)

    def _take_over(self, topic: TopicName, entries: tuple[Entry, ...]) -> None:
        """Take over the stored sessions; each gets a new grace."""
        subscriptions = {paths.subscription_of(entry.key) for entry in entries}
        for subscription, consumer in filter(None, (paths.consumer_of(entry.key) for entry in entries)):
            if subscription in subscriptions or is_group(subscription):
                group = self._group(topic, subscription)
                session = group.sessions[consumer] = MemberSession(group, consumer, 0)
                self._begin_grace(session)
                self._ask_for_pass(group)
            else:
                self._stored.remove_later(topic, subscription, consumer)

    async def join(
        self,
        topic: TopicName,
        subscription: str,
        consumer: str,
        member: Member,
        positions: Iterable[GroupPosition] = (),
        *,
        topic_id: int = 0,
    ) -> int:
        """Return the number of the session. Its first assignment is pushed in the loop's next iteration. `Moved` if
        another broker is the topic's controller. A checkpoint consumer tells the positions that it knows, and of which
        topic: those of a deleted topic would let its group skip records of the next one. `TopicNotFound` if the topic
        of this name has another id.

        A connected consumer of the same name is replaced; a disconnected one is continued."""
        check_name("consumer", consumer)
        if topic_id not in (0, self._topics.get(topic.path).id):
            await self._topics.stored(topic.path)  # This broker's view may be older than the consumer's.
        await self.control(topic)
        async with self._stored.turn(topic, subscription, consumer):
            while True:
                control = self._control_of(topic, topic_id)
                endings = self._endings
                if not self._is_member(topic, subscription, consumer):
                    await self._stored.put(topic, subscription, consumer, control.fence)
                if endings == self._endings and self._control_of(topic, topic_id) is control:
                    group = self._group(topic, subscription)
                    self._note(group, positions)
                    return self._enter(group, consumer, member)

    def _control_of(self, topic: TopicName, topic_id: int) -> Control:
        self._check_open()
        if topic_id not in (0, self._topics.get(topic.path).id):
            raise TopicNotFound(f"topic {topic} was deleted and created again since the consumer joined it")
        control = self._controls.get(topic.path)
        if control is None:
            raise NotServing(f"this broker does not run the subscriptions of topic {topic} any more; join again")
        return control

    def released(self, session: int, segment: int) -> None:
        """Free a segment that the session gave back; its channel is closed. A release that was not asked for, or that
        came too late, changes nothing."""
        found = self._sessions.get(session)
        segment_id = SegmentId(segment)
        if found is not None and found.group.holders.get(segment_id) is found and segment in found.group.asked_back:
            found.group.free(segment_id)
            self._ask_for_pass(found.group)

    def progress(self, session: int, positions: Iterable[GroupPosition]) -> None:
        """Note what a checkpoint consumer tells of its positions."""
        found = self._sessions.get(session)
        if found is not None:
            self._note(found.group, positions)
            self._ask_for_pass(found.group)

    async def leave(self, session: int) -> None:
        """End a session in order: its segments go to other consumers immediately. Leaving twice is fine."""
        found = self._sessions.pop(session, None)
        if found is None:
            return
        group = found.group
        self._forget(found)
        self._free_all(found)
        try:
            await self._stored.remove(group.topic, group.subscription, found.consumer)
        except MetadataError:
            # The consumer has left, whatever the store says.
            self._stored.remove_later(group.topic, group.subscription, found.consumer)
        except asyncio.CancelledError:
            self._stored.remove_later(group.topic, group.subscription, found.consumer)
            raise

    def disconnected(self, session: int) -> None:
        """Begin the grace of a session that lost its connection. The consumer keeps its segments, and may read on,
        until the grace has passed."""
        found = self._sessions.pop(session, None)
        if found is None:
            return
        found.member = None
        found.pushed = None
        self._free_asked_back(found)
        if not self._closed:
            self._begin_grace(found)
            self._ask_for_pass(found.group)

    def members(self, path: str, subscription: str) -> dict[str, tuple[int, ...]]:
        """The segments of each consumer, by the consumer's name."""
        return {name: consumer.segments for name, consumer in self.consumers(path, subscription).items()}

    def consumers(self, path: str, subscription: str) -> dict[str, ConsumerStatus]:
        group = self._groups.get((path, subscription))
        if group is None:
            return {}
        return {
            name: ConsumerStatus(
                tuple(segment for segment, holder in sorted(group.holders.items()) if holder is session),
                session.member is not None,
            )
            for name, session in sorted(group.sessions.items())
        }

    def subscription_names(self, path: str) -> list[str]:
        """The names of a topic's subscriptions, as the view shows them, on whichever broker."""
        return [name for topic, name in self._subscriptions.all() if topic == path]

    def of_topic(self, path: str) -> dict[str, dict[str, ConsumerStatus]]:
        """The consumers of a topic by subscription and name; none if another broker is the topic's controller."""
        return {
            subscription: self.consumers(path, subscription) for topic, subscription in self._groups if topic == path
        }

    def positions(self, path: str) -> dict[str, dict[SegmentId, int]]:
        """The positions that checkpoint consumers of a topic have told, by the keys of their groups."""
        return {
            key: {segment: position.offset for segment, position in sorted(group.positions.items())}
            for (topic, key), group in self._groups.items()
            if topic == path and is_group(key)
        }

    def forget(self, topic: TopicName, subscription: str) -> None:
        """End all sessions of a deleted subscription, connected or not."""
        self._endings += 1
        group = self._groups.get((topic.path, subscription))
        if group is not None:
            for consumer in group.sessions:
                self._stored.remove_later(topic, subscription, consumer)
            self._end(group, SubscriptionNotFound(f"subscription {subscription} of {topic} was deleted"))

    def lose_all(self, reason: BraidError) -> None:
        """End all groups: the broker has lost its lease, so it controls no topic, though the view still shows it."""
        for path in [*self._controls]:
            self._lose(path, reason)

    async def close(self) -> None:
        """Give up all topics, so that other brokers can control them. Sessions stay stored: a consumer that joins again
        continues."""
        self._closed = True
        self.lose_all(ShuttingDown("this broker is stopping; join again"))
        with contextlib.suppress(ValueError):  # Closed for the second time, or never started.
            self._topics.on_change.remove(self._on_topic_change)
            self._controllers.table.on_change.remove(self._on_controller_change)
            self._subscriptions.on_change.remove(self._on_subscription_change)
            self._drained.table.on_change.remove(self._on_drained_change)
        await self._controllers.stop()
        await self._stored.close()

    # Sessions.

    def _note(self, group: Group, positions: Iterable[GroupPosition]) -> None:
        known = self._topics.get(group.topic.path).segments
        for position in positions:
            if position.segment in known and position.offset >= ENDED:
                group.note(position)

    def _fence(self, topic: TopicName) -> Compare | None:
        control = self._controls.get(topic.path)
        return control.fence if control is not None else None

    def _is_member(self, topic: TopicName, subscription: str, consumer: str) -> bool:
        group = self._groups.get((topic.path, subscription))
        return group is not None and consumer in group.sessions

    def _group(self, topic: TopicName, subscription: str) -> Group:
        key = (topic.path, subscription)
        group = self._groups.get(key)
        if group is None:
            control = self._controls[topic.path]
            group = self._groups[key] = Group(topic, self._topics.get(topic.path).id, subscription, control)
        return group

    def _enter(self, group: Group, consumer: str, member: Member) -> int:
        session = group.sessions.get(consumer)
        if session is None:
            session = group.sessions[consumer] = MemberSession(group, consumer, 0)
        elif session.member is not None:
            self._replace(session, session.member)
        session.stop_grace()
        session.number, session.member = next(self._numbers), member
        session.pushed, session.pushes = None, 0
        for segment in [segment for segment, holder in group.holders.items() if holder is session]:
            group.give(segment, session)  # A process of the same name that still runs elsewhere has an old grant now.
        self._sessions[session.number] = session
        self._ask_for_pass(group)
        return session.number

    def _replace(self, session: MemberSession, old: Member) -> None:
        """The session keeps its segments, for the new connection."""
        group = session.group
        del self._sessions[session.number]
        old.expelled(
            ConsumerReplaced(
                f"another consumer with the name {session.consumer} joined subscription {group.subscription} of "
                f"{group.topic} and took this one's place; give every consumer a name of its own"
            )
        )
        self._free_asked_back(session)

    def _begin_grace(self, session: MemberSession) -> None:
        loop = asyncio.get_running_loop()
        session.grace = loop.call_later(self._config.session_grace_s, self._on_grace_over, session)

    def _on_grace_over(self, session: MemberSession) -> None:
        session.grace = None
        self._forget(session)
        self._free_all(session)
        self._stored.remove_later(session.group.topic, session.group.subscription, session.consumer)

    def _forget(self, session: MemberSession) -> None:
        group = session.group
        session.stop_grace()
        session.member = None
        del group.sessions[session.consumer]
        if not group.sessions:
            del self._groups[group.topic.path, group.subscription]

    def _free_all(self, session: MemberSession) -> None:
        group = session.group
        for segment in [segment for segment, holder in group.holders.items() if holder is session]:
            group.free(segment)
        self._ask_for_pass(group)

    def _free_asked_back(self, session: MemberSession) -> None:
        """Free what the session was asked to give back: it has no connection to answer on."""
        group = session.group
        for segment in [segment for segment in group.asked_back if group.holders.get(segment) is session]:
            group.free(segment)

    def _end(self, group: Group, reason: BraidError) -> None:
        """End all sessions of the group, and tell the connected consumers why."""
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
        """End the groups of a topic that was deleted, or replaced by a new topic of the same name."""
        topic = self._topics.find(path)
        if topic is None:
            self._endings += 1
        for group in [group for group in self._groups.values() if group.topic.path == path]:
            if topic is not None and topic.id == group.topic_id:
                self._ask_for_pass(group)
            else:
                self._end(group, TopicNotFound(f"topic {group.topic} was deleted"))

    def _on_subscription_change(self, key: _Key) -> None:
        """End the group of a deleted subscription, whichever broker deleted it."""
        path, subscription = key
        if key not in self._subscriptions and path in self._controls:
            self.forget(TopicName(*paths.topic_parts(path)), subscription)

    def _on_drained_change(self, key: DrainedKey) -> None:
        if (group := self._groups.get((key.path, key.subscription))) is not None:
            self._ask_for_pass(group)

    def _on_controller_change(self, path: str) -> None:
        control = self._controls.get(path)
        if control is not None and not (
            self._controllers.is_here(path) and self._controllers.fence(path) == control.fence
        ):
            self._lose(path, NotServing(f"another broker runs the subscriptions of topic {path} now; join again"))

    def _lose(self, path: str, reason: BraidError) -> None:
        """End the groups of a topic that this broker no longer controls. The next controller goes on from the stored
        sessions."""
        del self._controls[path]
        for group in [group for group in self._groups.values() if group.topic.path == path]:
            self._end(group, reason)

    # Giving out segments.

    def _ask_for_pass(self, group: Group) -> None:
        if not group.pass_is_due:
            group.pass_is_due = True
            asyncio.get_running_loop().call_soon(self._pass, group)

    def _pass(self, group: Group) -> None:
        """Take one step from `holders` to what `assign` wants."""
        group.pass_is_due = False
        topic = self._topics.find(group.topic.path)
        if self._closed or topic is None:
            return
        layout = topic.layout
        if not is_group(group.subscription):
            drained = self._drained.of(group.topic.path, group.subscription)
        elif group.complete:
            group.forget_all_but({*topic.segments, *group.holders})
            drained = frozenset(filter(topic.has_ended, group.ended))
        else:
            return  # When the last session is back, or over, there is another pass.
        wanted = {
            segment: group.sessions[consumer]
            for consumer, segments in assign(layout, drained, group.sessions).items()
            for segment in segments
        }
        for segment, holder in [*group.holders.items()]:
            if wanted.get(segment) is not holder and segment not in group.asked_back:
                if holder.member is not None:
                    self._ask_back(group, segment)
                else:
                    group.free(segment)  # A disconnected holder would not hear that it must give it back.
        if not (is_group(group.subscription) and group.holds_unread(topic.segments)):
            held = group.holders.keys() & layout.segments.keys()
            blocked = {ancestor for segment in held for ancestor in layout.ancestors(segment)}
            for segment, session in wanted.items():
                if segment not in held and segment not in blocked:
                    group.give(segment, session)
        for session in [*group.sessions.values()]:
            self._push(session)

    def _ask_back(self, group: Group, segment: SegmentId) -> None:
        loop = asyncio.get_running_loop()
        timeout_s = self._config.release_timeout_s
        group.asked_back[segment] = loop.call_later(timeout_s, self._on_release_overdue, group, segment)

    def _on_release_overdue(self, group: Group, segment: SegmentId) -> None:
        holder = group.holders[segment]
        assert holder.member is not None, "a disconnection frees the segments that were asked back"
        _log.warning(
            "consumer %s of subscription %s of %s did not give back segment %d within %g s: another consumer gets it",
            holder.consumer, group.subscription, group.topic, segment, self._config.release_timeout_s,
        )  # fmt: skip
        group.free(segment)
        self._ask_for_pass(group)

    def _push(self, session: MemberSession) -> None:
        group = session.group
        segments = group.held_by(session)
        numbers = tuple(group.grants[segment] for segment in segments)
        if session.member is not None and (segments, numbers) != session.pushed:
            session.pushed = segments, numbers
            session.pushes += 1
            term = group.control.term
            grants = tuple(
                self._signer.signed(group.topic_id, group.subscription, segment, term, number)
                for segment, number in zip(segments, numbers)
            )
            known = (group.positions[segment] for segment in segments if segment in group.positions)
            positions = tuple(position for position in known if position.offset != ENDED)  # It takes writes.
            session.member.assign(Assigned(session.pushes, segments, term, grants, positions))


def _subscription_of(key: str) -> _Key | None:
    path, subscription = paths.topic_of(key), paths.subscription_of(key)
    return (path, subscription) if path is not None and subscription is not None else None
