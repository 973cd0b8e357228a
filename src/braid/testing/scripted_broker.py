"""A broker at the level of the wire that keeps its logs in memory and misbehaves on request: for tests of clients.

It stores batches as a broker does, in order, deduplicated by the same table, and answers HELLO, PING, TOPOLOGY, PUBLISH
and STORED. Before each publish it asks its `script` what to do; ADMIN calls go to `on_admin`. A test changes the layout
of a topic in the two steps that clients can tell apart: `seal` ends the parents, `replace` shows their children.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import msgspec

from braid.model.batch.header import BatchHeader, parse_header, stamp
from braid.model.errors import (
    BraidError,
    ConnectionLost,
    NotServing,
    OutOfSequence,
    SegmentSealed,
    StaleRoute,
    TopicNotFound,
    UnknownOperation,
)
from braid.model.ids import Epoch, Offset
from braid.model.layout import HashRange
from braid.ports.network import Address, Listener, Network
from braid.storage.log.producers import ProducerTable, inherited
from braid.wire.connection import Connection
from braid.wire.frame import MAX_FRAME_BYTES, Frame
from braid.wire.operations import (
    VERSION,
    AdminReply,
    AdminRequest,
    Hello,
    HelloReply,
    Kind,
    Published,
    Route,
    SegmentRoute,
    Stored,
    StoredRequest,
    TopicRoute,
    Topology,
    TopologyAck,
    TopologyRequest,
    decode,
    encode,
)


class Step(Enum):
    """What to do with a publish."""

    CONFIRM = "confirm"
    CUT_BEFORE = "cut before"
    """Abort the connection; nothing is stored."""
    CUT_AFTER = "cut after"
    """Store it, then abort the connection without an answer."""
    SILENCE = "silence"
    """Store it and never answer."""
    IGNORE = "ignore"
    """Neither store it nor answer."""


class Refuse(msgspec.Struct, frozen=True):
    error: BraidError
    stored: bool = False
    """Whether it is stored all the same, as when a sync fails after the write."""


class Log:
    """One segment's log."""

    def __init__(self, parents: Sequence[Log] = ()) -> None:
        self.producers: ProducerTable = inherited([parent.producers for parent in parents])
        self.batches: list[bytearray] = []
        self.end = 0
        self.ended = False

    def store(self, data: bytearray) -> tuple[int, bool]:
        """The base offset, and whether it had been stored before."""
        header = parse_header(data)
        try:
            duplicate = self.producers.check(header)
        except OutOfSequence:
            if not self.ended:
                raise
            duplicate = None
        if duplicate is not None:
            return (-1 if duplicate.base_offset is None else duplicate.base_offset), True
        if self.ended:
            next_sequence = self.producers.next_sequence(header.producer_id)
            raise SegmentSealed(f"the log ends at offset {self.end}", self.end, next_sequence)
        base = Offset(self.end)
        self.batches.append(data)
        stamp(data, header, base, 0, Epoch(1), 1, 0)
        self.producers.apply(header, base)
        self.end += header.count
        return base, False


Script = Callable[[Route, BatchHeader], Step | Refuse]


def always_confirm(_route: Route, _header: BatchHeader) -> Step:
    return Step.CONFIRM


class ScriptedBroker:
    def __init__(self, network: Network, script: Script = always_confirm) -> None:
        self.network = network
        self.script = script
        self.on_admin: Callable[[str, dict[str, Any]], Any] | None = None
        """Returns the call's result, raises its error; `CUT` cuts the connection after it."""
        self.topics: dict[str, TopicRoute] = {}
        self.logs: dict[tuple[str, int], Log] = {}
        self.generation = 1
        self.answer_delay_s: Callable[[], float] | None = None
        """Answers of one connection stay in order."""
        self.hellos: list[Hello] = []
        self.acks: list[int] = []
        """Generations that clients said they had adopted."""
        self.lookups = 0
        self.stored: list[StoredRequest] = []
        """Every STORED that it got."""
        self.silent = False
        """Whether it answers nothing that it is asked."""
        self.refuse_hello: BraidError | None = None
        self.max_frame_bytes = MAX_FRAME_BYTES
        self.address = Address("", 0)
        self._listener: Listener | None = None
        self._peers: dict[_Peer, None] = {}

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> Address:
        self._listener = await self.network.listen(host, port, lambda: _Peer(self).connection)
        self.address = self._listener.address
        return self.address

    async def stop(self) -> None:
        """Accept no more, and cut every connection."""
        if self._listener is not None:
            await self._listener.close()
        self.cut_all()

    def cut_all(self) -> None:
        for peer in tuple(self._peers):
            peer.connection.abort(ConnectionLost("cut by the script"))

    def add_topic(self, path: str, segments: int = 1, topic_id: int = 7, layout_epoch: int = 0) -> None:
        width = (1 << 16) // segments
        routes = tuple(
            SegmentRoute(number, number * width, (number + 1) * width - 1, True, (), (), self._own_address, 1)
            for number in range(segments)
        )
        self.generation += 1
        self.topics[path] = TopicRoute(path, topic_id, layout_epoch, routes, "", segments)
        for number in range(segments):
            self.logs.setdefault((path, number), Log())

    def seal(self, path: str, *segments: int) -> None:
        """End the logs of these segments."""
        for segment in segments:
            self.logs[path, segment].ended = True

    def replace(self, path: str, parents: Sequence[int], *ranges: HashRange) -> list[int]:
        """Let children of these ranges take the place of the parents, and return their ids. Push tells clients."""
        route = self.topics[path]
        first = 1 + max(segment.id for segment in route.segments)
        hashes = {segment.id: HashRange(segment.first_hash, segment.last_hash) for segment in route.segments}
        segments = {segment.id: segment for segment in route.segments}
        for child, child_hashes in enumerate(ranges, first):
            mine = tuple(parent for parent in parents if hashes[parent].overlap(child_hashes) is not None)
            segments[child] = SegmentRoute(
                child, child_hashes.start, child_hashes.end, True, mine, (), self._own_address, 1
            )
            self.logs[path, child] = Log([self.logs[path, parent] for parent in mine])
        for parent in parents:
            children = tuple(each for each in range(first, first + len(ranges)) if parent in segments[each].parents)
            segments[parent] = msgspec.structs.replace(segments[parent], active=False, children=children)
        self.generation += 1
        self.topics[path] = msgspec.structs.replace(
            route, layout_epoch=route.layout_epoch + 1, segments=tuple(segments.values())
        )
        return list(range(first, first + len(ranges)))

    @property
    def _own_address(self) -> str:
        return f"{self.address.host}:{self.address.port}"

    def set_owner(self, path: str, owner: str, epoch: int = 1, segment: int | None = None) -> None:
        """Say that another broker serves the topic, or one segment of it."""
        route = self.topics[path]
        segments = tuple(
            msgspec.structs.replace(each, owner=owner, epoch=epoch) if segment in (None, each.id) else each
            for each in route.segments
        )
        self.generation += 1
        self.topics[path] = msgspec.structs.replace(route, segments=segments)

    def owned_log(self, path: str, topic_id: int, segment: int) -> Log:
        """The log of a segment that this broker serves."""
        topic = self.topics.get(path)
        if topic is None:
            raise TopicNotFound(f"topic {path} does not exist")
        if topic.topic_id != topic_id:
            raise StaleRoute(f"topic {path} was created again")
        route = next((each for each in topic.segments if each.id == segment), None)
        if route is None or route.owner != self._own_address:
            raise NotServing(f"segment {segment} is not served here")
        return self.logs[path, segment]

    def push(self) -> None:
        """Tell every connection what is known of all topics."""
        body = encode(Topology(self.generation, tuple(self.topics.values())))
        for peer in self._peers:
            peer.connection.send(Kind.TOPOLOGY, body)


CUT = object()
"""What `on_admin` returns to do the call and lose its answer."""


class _Peer:
    """One connection, from the broker's side."""

    def __init__(self, broker: ScriptedBroker) -> None:
        self._broker = broker
        self._last_answer_at = 0.0
        self.connection = Connection(self, frame_limit=MAX_FRAME_BYTES)

    def on_connected(self, connection: Connection) -> None:  # noqa: ARG002
        self._broker._peers[self] = None

    def on_congestion(self, congested: bool) -> None:
        pass

    def on_lost(self, error: BraidError) -> None:  # noqa: ARG002
        self._broker._peers.pop(self, None)

    def on_frames(self, frames: Sequence[Frame]) -> None:
        for frame in frames:
            try:
                self._on_frame(frame)
            except BraidError as error:
                self._answer(frame, error)
            if self.connection.closing:
                return

    def _on_frame(self, frame: Frame) -> None:
        broker = self._broker
        match frame.kind:
            case Kind.HELLO:
                broker.hellos.append(decode(Hello, frame.body))
                if broker.refuse_hello is not None:
                    raise broker.refuse_hello.again()
                reply = HelloReply(VERSION, "scripted", broker.max_frame_bytes, 10_000)
                self.connection.reply(frame, encode(reply))
            case Kind.PING:
                self._answer(frame, b"")
            case Kind.TOPOLOGY:
                broker.lookups += 1
                asked = decode(TopologyRequest, frame.body).topics
                routes = tuple(broker.topics.get(path) or TopicRoute(path, 0, 0, ()) for path in asked)
                self._answer(frame, encode(Topology(broker.generation, routes)))
            case Kind.TOPOLOGY_ACK:
                broker.acks.append(decode(TopologyAck, frame.body).generation)
            case Kind.PUBLISH:
                self._publish(frame)
            case Kind.STORED:
                request = decode(StoredRequest, frame.body)
                broker.stored.append(request)
                log = broker.owned_log(request.topic, request.topic_id, request.segment)
                found = tuple(log.producers.next_sequence(each) for each in request.producers)
                eras = tuple(log.producers.last_era(each) for each in request.producers)
                self._answer(frame, encode(Stored(found, log.ended, eras)))
            case Kind.ADMIN:
                self._admin(frame)
            case _:
                raise UnknownOperation(f"the scripted broker has no operation {frame.kind}")

    def _publish(self, frame: Frame) -> None:
        broker = self._broker
        assert frame.payload is not None
        route, data = decode(Route, frame.body), bytearray(frame.payload)
        step = broker.script(route, parse_header(data))
        if step is Step.CUT_BEFORE:
            self.connection.abort(ConnectionLost("cut by the script"))
            return
        if step is Step.IGNORE:
            return
        if isinstance(step, Refuse) and not step.stored:
            raise step.error.again()
        base, duplicate = broker.owned_log(route.topic, route.topic_id, route.segment).store(data)
        if step is Step.CUT_AFTER:
            self.connection.abort(ConnectionLost("cut by the script"))
        elif isinstance(step, Refuse):
            raise step.error.again()
        elif step is Step.CONFIRM:
            self._answer(frame, encode(Published(base, duplicate)))

    def _admin(self, frame: Frame) -> None:
        assert self._broker.on_admin is not None
        request = decode(AdminRequest, frame.body)
        result = self._broker.on_admin(request.call, request.arguments)
        if result is CUT:
            self.connection.abort(ConnectionLost("cut by the script"))
        else:
            self._answer(frame, encode(AdminReply(result)))

    def _answer(self, frame: Frame, answer: bytes | BraidError) -> None:
        if self._broker.silent:
            return
        delay_s = self._broker.answer_delay_s
        if delay_s is None:
            self._send(frame, answer)
            return
        loop = asyncio.get_running_loop()
        self._last_answer_at = max(self._last_answer_at, loop.time() + delay_s())
        loop.call_at(self._last_answer_at, self._send, frame, answer)

    def _send(self, frame: Frame, answer: bytes | BraidError) -> None:
        if isinstance(answer, bytes):
            self.connection.reply(frame, answer)
        else:
            self.connection.reply_error(frame.kind, frame.request, answer)
