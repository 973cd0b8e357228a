"""The consumers of ordered subscriptions, and which of them has which segment.

The groups of a topic live on one broker, its controller (broker/groups/controllers.py). The first consumer that joins
makes it the controller; a consumer that asks another broker is sent there. When a broker is the controller no more, it
forgets the groups, and tells their consumers to join again, wherever that is.

A consumer's session is kept in the metadata store from its joining to its leaving. Whether it is connected is known
here, in memory, only: one that loses its connection keeps its segments for a while (its *grace*) and takes up again
where it was if it comes back. A new controller gives every stored session a new grace. So neither the restart of a
consumer nor that of a broker makes segments wander.

Who should have what is `assign`, a pure function. Who has what is `holders`, and the way from one to the other lets
consumers finish their work:

    held by A, should be B's    → A is pushed an assignment without it and has release_timeout_s to give it back
    given back, or A is gone    → B is pushed an assignment with it

A segment that was asked back goes to nobody before it is given back, not even to A itself: A's answer may be under way.
That A does not read on, whatever it does and hears, is not seen to here: each time that a segment is given to somebody
it gets a higher *grant*, and the segment's owner closes A's channel when B shows its own
(broker/segments/read_grants.py). Who connects anew gets new grants, too: a process of the same name that lives on
elsewhere is out of date then.

One object owns all this state, and changes it without waiting in between. Whatever happens only notes what is so and
asks for one pass over the group, in the loop's next turn, which gives out segments and pushes assignments: so a caller
of `join` knows its session's number before the first assignment is pushed, and a member that calls back changes nothing
under anybody's feet. What is stored of them is written by broker/groups/sessions.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from itertools import count
from typing import Final

from braid.broker.config import GroupConfig
from braid.broker.groups.controllers import Controllers
from braid.broker.groups.group import Assigned, ConsumerStatus, Control, Group, Member, MemberSession
from braid.broker.groups.sessions import StoredSessions
from braid.broker.keyed_locks import KeyedLocks
from braid.broker.topics import Topics
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
from braid.model.subscription import Subscription, decode
from braid.ports.clock import Clock
from braid.scaling.assignment import assign

log: Final = logging.getLogger(__name__)

_Key = tuple[str, str]
"""A topic's path and a subscription's name."""


class Groups:
    def __init__(self, topics: Topics, controllers: Controllers, clock: Clock, config: GroupConfig) -> None:
        self._store: Store = topics.view.store
        self._topics = topics
        self._controllers = controllers
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
        self._controls: dict[str, Control] = {}
        """By topic, those whose groups are here."""
        self._groups: dict[tuple[str, str], Group] = {}
        self._sessions: dict[int, MemberSession] = {}
        """Those that are connected, by number."""
        self._numbers = count(clock.now_us())
        """Of sessions. None that was given out before a restart is given out again: a client that has not heard of the
        restart yet may use it, over the connection of another consumer."""
        self._stored = StoredSessions(topics.view, clock, self._fence, self._is_member)
        self._claims = KeyedLocks()
        """By topic: whoever becomes its controller."""
        self._endings = 0
        """Counts deleted topics and subscriptions: who waited for the store meanwhile looks again."""
        self._closed = False

    def start(self) -> None:
        """From now on what happens in the metadata counts here."""
        self._topics.on_change.append(self._on_topic_change)
        self._controllers.table.on_change.append(self._on_controller_change)
        self._controllers.start()
        self._subscriptions.on_change.append(self._on_subscription_change)

    async def control(self, topic: TopicName) -> None:
        """Return when this broker is the topic's controller and has its groups. `Moved` if another one is."""
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
                raise NotServing(f"who runs the subscriptions of topic {path} is changing; try again in a moment")
            self._controls[path] = Control(fence.revision, fence, count(1))
            self._take_over(topic, listing.entries)

    def _take_over(self, topic: TopicName, entries: tuple[Entry, ...]) -> None:
        """The stored sessions: each gets its grace."""
        subscriptions = {paths.subscription_of(entry.key) for entry in entries}
        for subscription, consumer in filter(None, (paths.consumer_of(entry.key) for entry in entries)):
            if subscription in subscriptions:
                group = self._group(topic, subscription)
                session = group.sessions[consumer] = MemberSession(group, consumer, 0)
                self._begin_grace(session)
                self._ask_for_pass(group)
            else:
                self._stored.remove_later(topic, subscription, consumer)

    async def join(self, topic: TopicName, subscription: str, consumer: str, member: Member) -> int:
        """The number of the session. Its first assignment is pushed in the loop's next turn. `Moved` if another broker
        is the topic's controller.

        A consumer of the same name that is connected is replaced; one that is not is continued."""
        check_name("consumer", consumer)
        await self.control(topic)
        async with self._stored.turn(topic, subscription, consumer):
            while True:
                control = self._control_of(topic)
                endings = self._endings
                if not self._is_member(topic, subscription, consumer):
                    await self._stored.put(topic, subscription, consumer, control.fence)
                if endings == self._endings and self._control_of(topic) is control:
                    return self._enter(self._group(topic, subscription), consumer, member)

    def _control_of(self, topic: TopicName) -> Control:
        self._check_open()
        self._topics.get(topic.path)
        control = self._controls.get(topic.path)
        if control is None:
            raise NotServing(f"this broker does not run the subscriptions of topic {topic} any more; join again")
        return control

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
        group = found.group
        self._forget(found)
        self._free_all(found)
        try:
            await self._stored.remove(group.topic, group.subscription, found.consumer)
        except MetadataError:
            # It has left, whatever the store says.
            self._stored.remove_later(group.topic, group.subscription, found.consumer)
        except asyncio.CancelledError:
            self._stored.remove_later(group.topic, group.subscription, found.consumer)
            raise

    def disconnected(self, session: int) -> None:
        """Its connection is gone. It keeps its segments, and may read on, until its grace has passed."""
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
        """By the consumer's name, the segments that it has."""
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

    def of_topic(self, path: str) -> dict[str, dict[str, ConsumerStatus]]:
        """By subscription and name; none if another broker is the topic's controller."""
        return {
            subscription: self.consumers(path, subscription) for topic, subscription in self._groups if topic == path
        }

    def forget(self, topic: TopicName, subscription: str) -> None:
        """The subscription was deleted, and its sessions with it, connected or not."""
        self._endings += 1
        group = self._groups.get((topic.path, subscription))
        if group is not None:
            for consumer in group.sessions:
                self._stored.remove_later(topic, subscription, consumer)
            self._end(group, SubscriptionNotFound(f"subscription {subscription} of {topic} was deleted"))

    def lose_all(self, reason: BraidError) -> None:
        """The broker has lost its lease: it is no controller any more, though the view does not show it yet."""
        for path in [*self._controls]:
            self._lose(path, reason)

    async def close(self) -> None:
        """Others may be the controllers from now on. Sessions stay stored: who joins again continues."""
        self._closed = True
        self.lose_all(ShuttingDown("this broker is stopping; join again"))
        with contextlib.suppress(ValueError):  # It is closed for the second time, or was never started.
            self._topics.on_change.remove(self._on_topic_change)
            self._controllers.table.on_change.remove(self._on_controller_change)
            self._subscriptions.on_change.remove(self._on_subscription_change)
        await self._controllers.stop()
        await self._stored.close()

    # Sessions.

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
            group.give(segment, session)
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
        """Nobody is there who would give back what it was to give back."""
        group = session.group
        for segment in [segment for segment in group.asked_back if group.holders.get(segment) is session]:
            group.free(segment)

    def _end(self, group: Group, reason: BraidError) -> None:
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

    def _on_subscription_change(self, key: _Key) -> None:
        """One that is deleted has no consumers, wherever it was deleted."""
        path, subscription = key
        if key not in self._subscriptions and path in self._controls:
            self.forget(TopicName(*paths.topic_parts(path)), subscription)

    def _on_controller_change(self, path: str) -> None:
        control = self._controls.get(path)
        if control is not None and not (
            self._controllers.is_here(path) and self._controllers.fence(path) == control.fence
        ):
            self._lose(path, NotServing(f"another broker runs the subscriptions of topic {path} now; join again"))

    def _lose(self, path: str, reason: BraidError) -> None:
        """This broker is not the controller any more: the next one goes on from what is stored."""
        del self._controls[path]
        for group in [group for group in self._groups.values() if group.topic.path == path]:
            self._end(group, reason)

    # Giving out segments.

    def _ask_for_pass(self, group: Group) -> None:
        if not group.pass_is_due:
            group.pass_is_due = True
            asyncio.get_running_loop().call_soon(self._pass, group)

    def _pass(self, group: Group) -> None:
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
                    group.give(segment, session)  # One that is not connected would not hear that it is asked for it.
                elif holder is not session and segment not in group.asked_back:
                    self._ask_back(group, segment)
        for session in [*group.sessions.values()]:
            self._push(session)

    def _ask_back(self, group: Group, segment: SegmentId) -> None:
        loop = asyncio.get_running_loop()
        timeout_s = self._config.release_timeout_s
        group.asked_back[segment] = loop.call_later(timeout_s, self._on_release_overdue, group, segment)

    def _on_release_overdue(self, group: Group, segment: SegmentId) -> None:
        holder = group.holders[segment]
        assert holder.member is not None, "what a disconnected consumer was to give back is free at once"
        log.warning(
            "consumer %s of subscription %s of %s did not give back segment %d within %g s: it goes to another one",
            holder.consumer, group.subscription, group.topic, segment, self._config.release_timeout_s,
        )  # fmt: skip
        group.free(segment)
        self._ask_for_pass(group)

    def _push(self, session: MemberSession) -> None:
        group = session.group
        segments = group.held_by(session)
        grants = tuple(group.grants[segment] for segment in segments)
        if session.member is not None and (segments, grants) != session.pushed:
            session.pushed = segments, grants
            session.pushes += 1
            session.member.assign(Assigned(session.pushes, segments, group.control.term, grants))


def _subscription_of(key: str) -> _Key | None:
    path, subscription = paths.topic_of(key), paths.subscription_of(key)
    return (path, subscription) if path is not None and subscription is not None else None
