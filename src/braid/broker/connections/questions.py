"""The questions of one connection: requests whose answers must wait for metadata or storage.

An answer may be ten thousand times as long as its question. So a connection has few questions of one kind answered at
the same time, none begins while the peer does not read, and all connections take turns (turns.py). Questions of one
kind do not wait for those of another: a client that waits for moves can still ask for routes.

While clients leave much unread (unsent_bytes.py), a long answer waits: the question is asked again when there is room.
A call that changes something does not begin before there is room for its answer. If others have taken that room
meanwhile, the connection ends: its client then knows that it must ask what has become of the call.

The session (session.py) runs each question in a task, counts it, and sends the answer or the error.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

from braid.broker.admin.call import CALLS
from braid.broker.auth import Action, Principal
from braid.broker.connections.membership import Memberships
from braid.broker.connections.services import Services, segment_in_layout
from braid.broker.topology import encoded_topology
from braid.model.errors import ConnectionLost, InvalidArgument, NotServing, Overloaded, TopicNotFound
from braid.model.names import TopicName
from braid.wire.connection import Connection
from braid.wire.frame import Frame
from braid.wire.operations import (
    AdminReply,
    AdminRequest,
    Join,
    Kind,
    Leave,
    Positions,
    PositionsRequest,
    Stored,
    StoredRequest,
    TopologyRequest,
    decode,
    encode,
)

MAX_QUESTIONS: Final = 8
"""Questions of one kind that one connection has answered at the same time; the others wait as they came."""
MAX_WATCHED_TOPICS: Final = 4_096
"""Topics whose changes are pushed to one connection: those that it asked for last."""
MAX_STORED: Final = 1_000
"""Producers in one STORED."""
MAX_CALL_BYTES: Final = 1 << 20
"""Of an administrative call, as in REST. Nothing larger can be stored, and four times as much, in half a million small
parts, would take the loop up to a second to decode."""


class Questions:
    def __init__(self, services: Services, connection: Connection, memberships: Memberships) -> None:
        self.watched: dict[str, bytes] = {}
        """The routing that was sent last for each topic whose changes are pushed to the peer, encoded."""
        self.told_generation = 0
        """The generation of the last routing that was sent to the peer, asked for or pushed."""
        self._services = services
        self._connection = connection
        self._memberships = memberships
        self._answering = defaultdict[int, asyncio.Semaphore](lambda: asyncio.Semaphore(MAX_QUESTIONS))
        """By kind: the questions that are being answered."""

    async def answer(self, frame: Frame, principal: Principal) -> bytes:
        """Return the answer to a question of one of the kinds in `ANSWERS`, when its turn has come."""
        unsent = self._services.unsent_bytes
        async with self._answering[frame.kind]:
            while True:
                await self._turn()
                answer = await ANSWERS[frame.kind](self, frame, principal)
                size = len(answer)
                if size <= unsent.share:
                    return answer
                if _changes(frame):
                    self._check_room(size)
                    return answer
                del answer  # It is not held while it waits.
                while size > unsent.share:
                    await unsent.risen()

    def _check_room(self, size: int) -> None:
        """End the connection if the answer to a call that is done cannot be held."""
        if size > self._services.unsent_bytes.left:
            error = ConnectionLost("clients have left too much unread for another answer to be held")
            self._connection.abort(error)
            raise error

    async def _turn(self) -> None:
        await self._services.turns.take()
        while self._connection.congested:  # The turn goes unused.
            await self._connection.drained()
            await self._services.turns.take()

    async def _on_topology(self, frame: Frame, principal: Principal) -> bytes:
        request = decode(TopologyRequest, frame.body)
        if len(request.topics) > MAX_WATCHED_TOPICS:  # Checked before a million names are parsed.
            raise Overloaded(f"{len(request.topics)} topics in one request; ask for {MAX_WATCHED_TOPICS} at most")
        names = [TopicName.parse(path) for path in request.topics]
        for name in names:
            self._services.access.check_may_know(principal, name)
            self._services.topics.check_readable(name.path)
        if not self._services.ready:  # Its view may be old. Another broker knows who serves the topic now.
            raise NotServing(f"broker {self._services.id} has no lease now, or is stopping; ask another broker")
        topology = self._services.topology
        for name in names:  # From here on changes of these topics are pushed to the peer.
            self.watched.pop(name.path, None)
            self.watched[name.path] = topology.encoded(name.path)
        answer = encoded_topology(topology.generation, [self.watched[name.path] for name in names])
        self.told_generation = topology.generation
        # For the topics that were asked for longest ago, a client learns of a change by a refusal (client/routing.py).
        while len(self.watched) > MAX_WATCHED_TOPICS:
            del self.watched[next(iter(self.watched))]
        return answer

    async def _on_join(self, frame: Frame, principal: Principal) -> bytes:
        join = decode(Join, frame.body)
        topic = TopicName.parse(join.topic)
        self._services.access.check_topic(principal, topic, Action.CONSUME)
        return encode(await self._memberships.join(topic, join))

    async def _on_leave(self, frame: Frame, _: Principal) -> bytes:
        await self._memberships.leave(decode(Leave, frame.body))
        return b""

    async def _on_positions(self, frame: Frame, principal: Principal) -> bytes:
        request = decode(PositionsRequest, frame.body)
        topic = TopicName.parse(request.topic)
        self._services.access.check_topic(principal, topic, Action.CONSUME)
        found = self._services.topics.get(topic.path)
        positions = await self._services.subscriptions.positions(topic, request.timestamp)
        return encode(Positions(found.id, positions))

    async def _on_stored(self, frame: Frame, principal: Principal) -> bytes:
        request = decode(StoredRequest, frame.body)
        if len(request.producers) > MAX_STORED:
            raise InvalidArgument(f"{len(request.producers)} producers in one request; ask for {MAX_STORED} at most")
        topic = TopicName.parse(request.topic)
        self._services.access.check_topic(principal, topic, Action.PRODUCE)
        found = self._services.topics.get(topic.path)
        if found.id != request.topic_id:
            raise TopicNotFound(f"topic {topic.path} was deleted and created again since it was looked up")
        segment = segment_in_layout(self._services, topic.path, found, request.segment)
        if not segment.takes_publishes:  # It would deny what its parents have stored (I10).
            raise NotServing(f"segment {request.segment} of topic {topic.path} has not taken over from its parents yet")
        log = segment.storage.log
        next_sequences = tuple(await log.next_sequences(request.producers))
        return encode(Stored(next_sequences, log.seal_is_durable, tuple(log.last_eras(request.producers))))

    async def _on_admin(self, frame: Frame, principal: Principal) -> bytes:
        if len(frame.body) > MAX_CALL_BYTES:
            raise InvalidArgument(f"a call of {len(frame.body)} bytes is above the limit of {MAX_CALL_BYTES}")
        request = decode(AdminRequest, frame.body)
        if not _only_reads(request):
            while self._services.unsent_bytes.left < MAX_CALL_BYTES:
                await self._services.unsent_bytes.risen()
                await self._turn()
        result = await self._services.calls.call(request.call, request.arguments, principal)
        return encode(AdminReply(result))


def _changes(frame: Frame) -> bool:
    """Whether the answer to a question tells of a change, so that it cannot simply be asked again."""
    if frame.kind == Kind.ADMIN:
        return not _only_reads(decode(AdminRequest, frame.body))
    return frame.kind in (Kind.JOIN, Kind.LEAVE)


def _only_reads(request: AdminRequest) -> bool:
    call = CALLS.get(request.call)
    return call is None or call.only_reads()


ANSWERS: Final[Mapping[int, Callable[[Questions, Frame, Principal], Coroutine[Any, Any, bytes]]]] = {
    Kind.TOPOLOGY: Questions._on_topology,
    Kind.JOIN: Questions._on_join,
    Kind.LEAVE: Questions._on_leave,
    Kind.POSITIONS: Questions._on_positions,
    Kind.STORED: Questions._on_stored,
    Kind.ADMIN: Questions._on_admin,
}
