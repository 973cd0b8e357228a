"""A broker that does what a test tells it, for tests of the client's consumers in virtual time.

It answers what every broker answers, keeps segments as lists of batches, never sends beyond credit, and remembers every
frame that it got. What a test wants to go wrong, it does by hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from braid.model.batch.columns import encode_batch
from braid.model.batch.header import BatchHeader, parse_header, stamp
from braid.model.errors import BraidError, NotServing, OffsetOutOfRange, TopicNotFound
from braid.model.ids import Epoch, Offset
from braid.testing.sim.network import SimulatedHost
from braid.wire.connection import Connection
from braid.wire.frame import MAX_FRAME_BYTES, Frame
from braid.wire.operations import (
    END_OF_SEGMENT,
    VERSION,
    Ack,
    Assignment,
    Close,
    Closed,
    Credit,
    Delivery,
    HelloReply,
    Join,
    Joined,
    Kind,
    Leave,
    Need,
    Open,
    Opened,
    Positions,
    PositionsRequest,
    Release,
    SegmentPositions,
    SegmentRoute,
    TopicRoute,
    Topology,
    TopologyRequest,
    decode,
    encode,
)

TOPIC = "public/default/orders"
PORT = 6660
BODIES: dict[int, type[Any]] = {
    Kind.JOIN: Join,
    Kind.LEAVE: Leave,
    Kind.RELEASE: Release,
    Kind.OPEN: Open,
    Kind.CREDIT: Credit,
    Kind.ACK: Ack,
    Kind.CLOSE: Close,
    Kind.POSITIONS: PositionsRequest,
}


def stamped(values: Sequence[bytes], base_offset: int) -> bytearray:
    batch = encode_batch(values, now_us=1_000)
    header: BatchHeader = parse_header(batch)
    stamp(batch, header, Offset(base_offset), 1_000, Epoch(1), 7, 0)
    return batch


class Segment:
    def __init__(self, parents: tuple[int, ...] = ()) -> None:
        self.batches: list[bytearray] = []
        self.earliest = 0
        self.end = 0
        self.cursor = 0
        self.stored = 0
        """The cursor as a crash would leave it."""
        self.placement = 1
        self.sealed = False
        self.parents = parents
        self.children: tuple[int, ...] = ()

    def append(self, *values: bytes) -> None:
        self.batches.append(stamped(values, self.end))
        self.end += len(values)

    def append_batch(self, batch: bytearray) -> None:
        """A batch as a producer sent it."""
        header = stamp(batch, parse_header(batch), Offset(self.end), 1_000, Epoch(1), 7, 0)
        self.batches.append(batch)
        self.end = header.next_offset

    def since(self, offset: int) -> bytearray | None:
        """The batch that holds this offset."""
        return next((batch for batch in self.batches if parse_header(batch).next_offset > offset), None)


class Channel:
    def __init__(self, peer: Peer, open_: Open, offset: int) -> None:
        self.peer = peer
        self.number = open_.channel
        self.segment = open_.segment
        self.subscription = open_.subscription
        self.read_grant = (open_.term, open_.grant)
        self.offset = offset
        self.credit = open_.credit
        self.needed = 0
        self.sent_bytes = 0
        self.granted_bytes = open_.credit
        self.over = False
        self.finished = False
        """Everything was sent; acks are still taken."""

    def pump(self) -> None:
        segment = self.peer.broker.segments[self.segment]
        while (
            not self.over and not self.finished and not self.peer.broker.silent and self.credit >= max(self.needed, 1)
        ):
            batch = segment.since(self.offset)
            if batch is None:
                if segment.sealed:
                    self.finished = True
                    self.peer.push(Kind.CLOSED, Closed(self.number, END_OF_SEGMENT, "it ends here", retriable=False))
                return
            if len(batch) > self.credit:
                self.needed = len(batch)
                self.peer.push(Kind.NEED, Need(self.number, len(batch)))
                return
            self.needed = 0
            batches = [batch]
            if self.peer.broker.together:
                batches = segment.batches[segment.batches.index(batch) :]
            self.deliver(*batches)
            self.offset = parse_header(batches[-1]).next_offset

    def deliver(self, *batches: bytearray) -> None:
        size = sum(map(len, batches))
        self.credit -= size
        self.sent_bytes += size
        body = encode(Delivery(self.number, self.peer.broker.segments[self.segment].end))
        self.peer.connection.send(Kind.DELIVER, body, [bytes(batch) for batch in batches])

    def close(self, code: str, message: str, *, retriable: bool) -> None:
        if not self.over:
            self.over = True
            self.peer.channels.pop(self.number, None)
            self.peer.push(Kind.CLOSED, Closed(self.number, code, message, retriable))

    def fail(self, error: BraidError) -> None:
        self.close(error.code, str(error), retriable=error.retriable)


class Peer:
    """One connection."""

    def __init__(self, broker: ScriptedBroker) -> None:
        self.broker = broker
        self.connection = Connection(self, frame_limit=MAX_FRAME_BYTES)
        self.channels: dict[int, Channel] = {}
        self.sessions: set[int] = set()
        self.lost = False
        broker.peers.append(self)

    def on_connected(self, connection: Connection) -> None:
        pass

    def on_congestion(self, congested: bool) -> None:
        pass

    def on_lost(self, error: BraidError) -> None:
        self.lost = True
        self.channels.clear()

    def push(self, kind: Kind, body: Any) -> None:
        self.connection.send(kind, encode(body))

    def on_frames(self, frames: Sequence[Frame]) -> None:
        for frame in frames:
            if frame.kind in BODIES:
                self.broker.frames.append(decode(BODIES[frame.kind], frame.body))
            if self.broker.silent:
                continue
            refusal = self.broker.refusals.get(frame.kind)
            if refusal:
                self.connection.reply_error(frame.kind, frame.request, refusal.pop(0))
                continue
            try:
                self.connection.reply(frame, self._answer(frame))
            except BraidError as error:
                self.connection.reply_error(frame.kind, frame.request, error)
            self.broker.after(frame)

    def _answer(self, frame: Frame) -> bytes:
        broker = self.broker
        match frame.kind:
            case Kind.HELLO:
                return encode(HelloReply(VERSION, "scripted", MAX_FRAME_BYTES, 10_000))
            case Kind.TOPOLOGY:
                broker.asked += 1
                return encode(Topology(broker.generation, broker.routes(decode(TopologyRequest, frame.body))))
            case Kind.JOIN:
                return self._join()
            case Kind.OPEN:
                return self._open(decode(Open, frame.body))
            case Kind.CREDIT:
                credit = decode(Credit, frame.body)
                if (channel := self.channels.get(credit.channel)) is not None:
                    channel.credit += credit.bytes
                    channel.granted_bytes += credit.bytes
                    channel.pump()
            case Kind.ACK:
                ack = decode(Ack, frame.body)
                if (channel := self.channels.get(ack.channel)) is None:
                    raise NotServing("the channel is closed")
                segment = broker.segments[channel.segment]
                segment.cursor = max(segment.cursor, ack.offset)
                if ack.durable:
                    segment.stored = segment.cursor
            case Kind.CLOSE:
                if (channel := self.channels.pop(decode(Close, frame.body).channel, None)) is not None:
                    channel.over = True
            case Kind.POSITIONS:
                return encode(Positions(broker.topic_id, broker.positions()))
            case _:
                pass
        return b""

    def _join(self) -> bytes:
        self.broker.last_session += 1
        session = self.broker.last_session
        self.sessions = {session}
        self.broker.numbers[session] = 0
        if self.broker.assignment is not None:
            asyncio.get_running_loop().call_soon(self.broker.assign, *self.broker.assignment)
        return encode(Joined(session, self.broker.topic_id, created=True))

    def _open(self, request: Open) -> bytes:
        segment = self.broker.segments[request.segment]
        if request.topic_id != self.broker.topic_id:
            raise TopicNotFound("another topic has this name now")
        offset = segment.cursor if request.subscription else request.offset
        if not segment.earliest <= offset <= segment.end:
            raise OffsetOutOfRange("not there", segment.earliest, segment.end)
        channel = self.channels[request.channel] = Channel(self, request, offset)
        self.broker.opened.append(channel)
        asyncio.get_running_loop().call_soon(channel.pump)
        return encode(Opened(offset, segment.end, segment.placement))


class ScriptedBroker:
    def __init__(self, segments: int = 1) -> None:
        self.segments = {number: Segment() for number in range(segments)}
        self.topic_id = 11
        self.generation = 1
        self.asked = 0
        """How often clients asked for the topology."""
        self.assignment: tuple[int, ...] | None = tuple(self.segments)
        """What each new session is assigned; None: nothing by itself."""
        self.peers: list[Peer] = []
        self.frames: list[Any] = []
        self.opened: list[Channel] = []
        self.refusals: dict[int, list[BraidError]] = {}
        """What requests of a kind are answered with, one each."""
        self.silent = False
        self.together = False
        """Whether a delivery has all batches that there are."""
        self.last_session = 0
        self.term = 1
        self.grants: dict[int, int] = {}
        """By segment, if it is not 1."""
        self.numbers: dict[int, int] = {}
        self._host: SimulatedHost | None = None

    async def listen(self, host: SimulatedHost) -> None:
        await host.listen("", PORT, lambda: Peer(self).connection)

    def routes(self, request: TopologyRequest) -> tuple[TopicRoute, ...]:
        segments = tuple(
            SegmentRoute(number, 0, 0xFFFF, not each.children, each.parents, each.children, f"broker:{PORT}", 1)
            for number, each in self.segments.items()
        )
        known = self.topic_id if request.topics == (TOPIC,) else 0
        return tuple(TopicRoute(topic, known, self.generation, segments if known else ()) for topic in request.topics)

    def positions(self) -> tuple[SegmentPositions, ...]:
        return tuple(
            SegmentPositions(number, each.earliest, each.end, each.sealed, (each.earliest + each.end) // 2)
            for number, each in self.segments.items()
        )

    def split(self, parent: int, *children: int) -> None:
        self.generation += 1
        self.segments[parent].sealed = True
        self.segments[parent].children = children
        for child in children:
            self.segments[child] = Segment((parent,))
        self.push_routes()
        self.pump()

    def push_routes(self) -> None:
        """Tell all clients of the layout, as brokers do when it changes."""
        for peer in self.peers:
            if not peer.lost:
                peer.push(Kind.TOPOLOGY, Topology(self.generation, self.routes(TopologyRequest((TOPIC,), 0))))

    def append(self, segment: int, *values: bytes) -> None:
        self.segments[segment].append(*values)
        self.pump()

    def pump(self) -> None:
        for peer in self.peers:
            for channel in list(peer.channels.values()):
                channel.pump()

    def after(self, frame: Frame) -> None:
        """A test may want to do something then."""

    @property
    def channels(self) -> list[Channel]:
        return [channel for peer in self.peers for channel in peer.channels.values()]

    def assign(self, *segments: int) -> None:
        """Push an assignment to the newest session."""
        for peer in self.peers:
            if self.last_session in peer.sessions and not peer.lost:
                self.numbers[self.last_session] += 1
                number = self.numbers[self.last_session]
                grants = tuple(self.grants.get(segment, 1) for segment in segments)
                peer.push(Kind.ASSIGN, Assignment(self.last_session, number, segments, self.term, grants))

    def got(self, kind: type[Any]) -> list[Any]:
        return [frame for frame in self.frames if isinstance(frame, kind)]

    def seek(self, segment: int, offset: int) -> None:
        self.segments[segment].cursor = self.segments[segment].stored = offset
        self.segments[segment].placement += 1
        for channel in self.channels:
            if channel.segment == segment:
                channel.close("reset", "the subscription was set to another place", retriable=True)

    def cut(self) -> None:
        """Every connection breaks now."""
        for peer in self.peers:
            peer.connection.abort(BraidError("cut by the test"))
