"""The consumers that joined over one connection. This broker is the controller of their topics, and runs their groups
(broker/groups/groups.py). Their channels are on connections to the owners of segments, which may be other brokers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from braid.broker.groups.group import Assigned
from braid.broker.groups.groups import Groups
from braid.broker.groups.subscriptions import Subscriptions
from braid.broker.topics import Topics
from braid.model.errors import BraidError, InvalidArgument, NotServing, Overloaded, quote
from braid.model.names import TopicName, check_name
from braid.model.subscription import SubscriptionKind, group_key, is_group
from braid.wire.connection import Connection
from braid.wire.operations import CHECKPOINT, Assignment, Expelled, Join, Joined, Kind, Leave, Progress, Release, encode


class Membership:
    """One consumer's place in a subscription."""

    def __init__(self, connection: Connection, on_expelled: Callable[[Membership], None]) -> None:
        self.number = 0
        """The session's number; known when the consumer has joined."""
        self._connection = connection
        self._on_expelled = on_expelled

    def assign(self, assigned: Assigned) -> None:
        """Push an assignment in the loop's next iteration, after the reply to the JOIN that caused it."""
        asyncio.get_running_loop().call_soon(self._push, assigned)

    def expelled(self, error: BraidError) -> None:
        self._on_expelled(self)
        expelled = Expelled(self.number, error.code, str(error), error.retriable)
        self._connection.send(Kind.EXPEL, encode(expelled))

    def _push(self, assigned: Assigned) -> None:
        assignment = Assignment(
            self.number, assigned.number, assigned.segments, assigned.term, assigned.grants, assigned.positions
        )
        self._connection.send(Kind.ASSIGN, encode(assignment))


class Memberships:
    def __init__(
        self,
        connection: Connection,
        topics: Topics,
        subscriptions: Subscriptions,
        groups: Groups,
        *,
        max_consumers: int,
    ) -> None:
        self._connection: Final = connection
        self._topics = topics
        self._subscriptions = subscriptions
        self._groups = groups
        self._max_consumers = max_consumers
        self._members: dict[int, Membership] = {}
        self._joining = 0

    async def join(self, topic: TopicName, join: Join) -> Joined:
        if len(self._members) + self._joining >= self._max_consumers:
            raise Overloaded(
                f"consumer {quote(join.consumer)} cannot join: {self._max_consumers} consumers have joined over this "
                "connection, as many as may; open another connection"
            )
        self._joining += 1
        try:
            return await self._join(topic, join)
        finally:
            self._joining -= 1

    async def _join(self, topic: TopicName, join: Join) -> Joined:
        check_name("consumer", join.consumer)
        if join.kind == CHECKPOINT:
            created = False
            _check_group(join.subscription)
        else:
            created = await self._ensure_subscription(topic, join)
        found = self._topics.get(topic.path)
        member = Membership(self._connection, self._forget)
        number = await self._groups.join(
            topic, join.subscription, join.consumer, member, join.positions, topic_id=join.topic_id
        )
        if self._connection.closing:
            self._groups.disconnected(number)
        else:
            member.number = number
            self._members[number] = member
        return Joined(number, found.id, created)

    async def _ensure_subscription(self, topic: TopicName, join: Join) -> bool:
        """Return whether the subscription was created now."""
        check_name("subscription", join.subscription)
        kind = _subscription_kind(join.kind)
        await self._groups.control(topic)  # First: if another broker is the controller, nothing is created here.
        _, created = await self._subscriptions.ensure(
            topic, join.subscription, kind=kind, start=join.start, create=join.create
        )
        return created

    def progress(self, progress: Progress) -> None:
        if progress.session in self._members:
            self._groups.progress(progress.session, progress.positions)

    def release(self, release: Release) -> None:
        if release.session not in self._members:
            raise NotServing(f"session {release.session} is not one of this connection: join again")
        self._groups.released(release.session, release.segment)

    async def leave(self, leave: Leave) -> None:
        """End a consumer's session. Leaving twice is fine."""
        member = self._members.pop(leave.session, None)
        if member is not None:
            await self._groups.leave(member.number)

    def lost(self) -> None:
        """The connection has ended: its consumers are disconnected, and their grace begins."""
        for number in self._members:
            self._groups.disconnected(number)
        self._members.clear()

    def _forget(self, member: Membership) -> None:
        self._members.pop(member.number, None)


def _check_group(key: str) -> None:
    if not is_group(key):
        raise InvalidArgument(f"{quote(key)} is no group of checkpoint consumers: write {group_key('NAME')}")
    check_name("group", key.removeprefix(group_key("")))


def _subscription_kind(kind: str) -> SubscriptionKind:
    if kind == SubscriptionKind.QUEUE.value:
        raise InvalidArgument("consumers of a queue do not join: they open a channel at each segment (QUEUE_OPEN)")
    if kind != SubscriptionKind.STREAM.value:
        raise InvalidArgument(
            f"consumers of kind {quote(kind)} cannot join: {SubscriptionKind.STREAM.value} and {CHECKPOINT} can"
        )
    return SubscriptionKind.STREAM
