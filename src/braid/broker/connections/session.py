"""The broker's side of one connection.

A session handles frames in the order in which they come. Some are handled immediately: publishes take their place in
the log, credit is granted, acks are noted. A request that must wait for metadata or storage (questions.py) runs in a
task of its own, so that the frames after it do not wait.

The cost of a connection is bounded (I12). The session counts requests that are not answered yet, their bytes, bytes of
batches that are not confirmed, and bytes that the peer does not read. Above any of the limits the broker stops reading
from the connection. Nothing that the client sent is dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final

from braid.broker.auth import Action, Principal
from braid.broker.connections.membership import Memberships
from braid.broker.connections.questions import ANSWERS, Questions
from braid.broker.connections.queue_channels import QueueChannels
from braid.broker.connections.services import Services, segment_in_layout
from braid.broker.error_mapping import to_client
from braid.broker.segments.delivery import MAX_CREDIT, DeliveryChannel
from braid.broker.segments.publish import PublishQueue
from braid.broker.segments.read_grants import ReadGrant
from braid.broker.segments.segments import OwnedSegment
from braid.model.errors import (
    BraidError,
    BrokenInvariant,
    InvalidArgument,
    NotServing,
    OffsetOutOfRange,
    Overloaded,
    PermissionDenied,
    PositionDiverged,
    ProtocolError,
    ShuttingDown,
    StaleRoute,
    TopicNotFound,
    Unauthenticated,
    UnknownOperation,
    UnsupportedVersion,
    cut,
    quote,
)
from braid.model.ids import Offset
from braid.model.log.epochs import parting
from braid.model.names import TopicName
from braid.model.subscription import is_group
from braid.ports.tasks import TaskScope
from braid.wire.connection import Connection
from braid.wire.frame import REPLY, Frame
from braid.wire.operations import (
    MAGIC,
    RESET,
    VERSION,
    Ack,
    Close,
    Credit,
    Hello,
    HelloReply,
    Kind,
    Open,
    Opened,
    PeerReply,
    PeerRequest,
    Progress,
    QueueAnswer,
    QueueOpen,
    Release,
    Route,
    TopologyAck,
    decode,
    encode,
)

MAX_ROUTES: Final = 1_024
"""Publish routes that a connection remembers by their bytes."""
MAX_ROUTE_BYTES: Final = 1_024
"""No client has a reason to send a longer route; a longer one is looked up each time."""
COMMIT_FRAMES: Final = 16
"""When many frames come together, the commit of the first so many begins while the next are handled."""
EARLIEST: Final = -1
_PUBLISH: Final = int(Kind.PUBLISH)
"""A plain number, because publishes come by the thousand, and a member of an enum takes longer to compare."""

_log: Final = logging.getLogger(__name__)


class Session:
    def __init__(self, services: Services, on_end: Callable[[Session], None]) -> None:
        self._services = services
        self._limits: Final = services.limits
        self._metrics: Final = services.metrics
        self._on_end = on_end
        self.connection: Connection = Connection(
            self,
            on_unfinished=partial(services.unfinished_frames.note, self),
            on_large_write=self._on_large_write,
        )
        services.unsent_bytes.add(self.connection)
        self.principal: Principal | None = None
        self.client = ""
        self._loop = asyncio.get_running_loop()
        self.framed_at = self._loop.time()
        """When the peer last completed a frame; before the first frame, when it connected."""
        self.acked_generation: int | None = None
        """The highest generation of routing that the peer has acked; None until it acks one."""
        self._routes: dict[bytes, OwnedSegment] = {}
        """The segments of earlier publishes by the bytes of their routes."""
        self._channels: dict[int, tuple[DeliveryChannel, OwnedSegment]] = {}
        self._memberships = Memberships(
            self.connection,
            services.topics,
            services.subscriptions,
            services.groups,
            max_consumers=self._limits.max_consumers,
        )
        self.questions = Questions(services, self.connection, self._memberships)
        self._queues = QueueChannels(services, self.connection)
        self._uncommitted: PublishQueue | None = None
        """The queue of the latest publishes, whose commit has not begun yet."""
        self._requests = 0
        self._bytes = 0
        self._congested = False
        self._waits_for_room = False
        self._paused = False
        self._peer_read_bytes = -1
        """How many bytes the peer had read when `stuck_s` last looked."""
        self._peer_read_at = 0.0
        self._tasks = TaskScope[object]()

    # Calls of the connection.

    def on_connected(self, connection: Connection) -> None:  # noqa: ARG002
        self.framed_at = self._loop.time()

    def on_frames(self, frames: Sequence[Frame]) -> None:
        self.framed_at = self.connection.heard_at
        self.connection.cork()
        try:
            for number, frame in enumerate(frames, 1):
                if frame.flags:
                    raise ProtocolError("a client sent a reply; brokers ask clients nothing")
                try:
                    self._on_frame(frame)
                except ProtocolError as error:
                    if isinstance(error, UnknownOperation) and self.principal is not None:
                        self._refuse(frame, error)
                        continue
                    self._count_error(frame.kind, error)
                    peer = self.connection.peer
                    _log.info("%s broke the protocol: %s", peer, error, extra={"peer": peer})
                    raise
                except BraidError as error:
                    self._refuse(frame, error)
                if not number % COMMIT_FRAMES and self._uncommitted is not None:
                    self._uncommitted.commit()
        finally:
            self._commit_publishes(None)
            self.connection.flush()

    def _on_frame(self, frame: Frame) -> None:
        if self.principal is None:
            if frame.kind != Kind.HELLO:
                raise ProtocolError("the first frame of a connection is HELLO")
            return self._on_hello(frame)
        if frame.kind == _PUBLISH:
            return self._on_publish(frame)
        handler = _IMMEDIATE.get(frame.kind)
        if handler is not None:
            self._metrics.requests[_name_of(frame.kind)] += 1
            return handler(self, frame)
        if frame.kind not in ANSWERS:
            raise UnknownOperation(f"operation {frame.kind} is unknown to this broker, which speaks version {VERSION}")
        self._metrics.requests[_name_of(frame.kind)] += 1
        return self._answer_later(frame, self.questions.answer(frame, self.principal))

    def _answer_later(self, frame: Frame, work: Coroutine[Any, Any, bytes]) -> None:
        self._count_in(len(frame.body))
        self._tasks.start(object(), self._answer(frame, work), name=_name_of(frame.kind))

    async def _answer(self, frame: Frame, work: Awaitable[bytes]) -> None:
        try:
            body = await work
            self.connection.reply(frame, body)
        except BraidError as error:
            self._refuse(frame, error)
        except Exception as error:
            _log.exception("%s broke", _name_of(frame.kind))
            self._refuse(frame, BrokenInvariant(f"{_name_of(frame.kind)} broke in the broker: {quote(error)}"))
        finally:
            self._count_out(len(frame.body))

    def _refuse(self, frame: Frame, error: BraidError) -> None:
        error = to_client(error)
        self._count_error(frame.kind, error)
        if isinstance(error, Unauthenticated | PermissionDenied):
            who = self.principal.name if self.principal is not None else "?"
            about = {
                "peer": self.connection.peer,
                "principal": who,
                "operation": _name_of(frame.kind),
                "code": error.code,
            }
            _log.warning("%s was refused %s: %s", self.connection.peer, _name_of(frame.kind), error, extra=about)
        self.connection.reply_error(frame.kind, frame.request, error)

    def _count_error(self, kind: int, error: BraidError) -> None:
        self._metrics.errors[_name_of(kind), error.code] += 1

    def on_congestion(self, congested: bool) -> None:
        self._congested = congested
        self._pause_or_resume()
        if not congested:
            self._services.unsent_bytes.note(self.connection)
            for channel, _ in list(self._channels.values()):
                channel.pump()
            self._queues.pump()

    def _on_large_write(self) -> None:
        self._services.unsent_bytes.note(self.connection)

    def wait_for_room(self, waits: bool) -> None:
        self._waits_for_room = waits
        self._pause_or_resume()

    def on_lost(self, error: BraidError) -> None:  # noqa: ARG002
        self._services.unfinished_frames.note(self, 0)
        self._services.unsent_bytes.forget(self.connection)
        for task in self._tasks:
            task.cancel()
        for channel, _ in list(self._channels.values()):
            channel.drop()
        self._queues.lost()
        self._memberships.lost()
        self._on_end(self)

    # Limits.

    def _count_in(self, size: int) -> None:
        self._requests += 1
        self._bytes += size
        if self._requests >= self._limits.max_requests_in_flight or self._bytes >= self._limits.max_bytes_in_flight:
            self._pause_or_resume()

    def _count_out(self, size: int) -> None:
        self._requests -= 1
        self._bytes -= size
        if self._paused:
            self._pause_or_resume()

    def _pause_or_resume(self) -> None:
        full = (
            self._congested
            or self._waits_for_room
            or self._requests >= self._limits.max_requests_in_flight
            or self._bytes >= self._limits.max_bytes_in_flight
        )
        if full and not self._paused:
            self._paused = True
            self.connection.pause_reading()
        elif not full and self._paused:
            self._paused = False
            self.framed_at = self._loop.time()  # The peer seemed silent because the broker did not read.
            self.connection.resume_reading()

    @property
    def paused(self) -> bool:
        return self._paused

    def stuck_s(self, now: float) -> float:
        """How long the peer has read nothing although bytes wait for it, as far as earlier calls could tell."""
        read_bytes = self.connection.sent_bytes - self.connection.waiting_bytes
        if not self._congested or read_bytes != self._peer_read_bytes:
            self._peer_read_bytes, self._peer_read_at = read_bytes, now
        return now - self._peer_read_at

    # Hello.

    def _on_hello(self, frame: Frame) -> None:
        hello = decode(Hello, frame.body)
        try:
            if hello.magic != MAGIC:
                raise ProtocolError("the peer does not speak Braid's protocol")
            if not self._services.ready:
                raise NotServing(f"broker {self._services.id} is starting; try again in a moment")
            if not hello.lowest_version <= VERSION <= hello.highest_version:
                raise UnsupportedVersion(
                    f"the client speaks versions {hello.lowest_version} to {hello.highest_version}, "
                    f"this broker version {VERSION}: upgrade the older of the two"
                )
            self.principal = self._services.access.authenticate(hello.token)
        except BraidError as error:
            self._refuse(frame, error)
            self.connection.close(error)
            return
        self.client = hello.client[:200]
        self.connection.frames.limit = self._limits.max_frame_bytes
        reply = HelloReply(
            VERSION, self._services.id, self._limits.max_frame_bytes, round(self._limits.heartbeat_s * 1000)
        )
        self.connection.reply(frame, encode(reply))

    def may(self, action: Action, topic: TopicName) -> None:
        assert self.principal is not None
        self._services.access.check(self.principal, action, topic.tenant, topic.namespace, topic.name)

    def expired(self, now: float) -> bool:
        """Whether the token with which this connection began has run out; `now` in Unix seconds."""
        return self.principal is not None and self.principal.expired(now)

    # Publishing.

    def _on_publish(self, frame: Frame) -> None:
        self._metrics.requests["publish"] += 1
        if frame.payload is None:
            raise ProtocolError("a publish without a batch")
        if not frame.request:
            raise ProtocolError("a publish without a request id could never be confirmed")
        segment = self._routes.get(frame.body)
        if segment is None or not segment.takes_publishes:
            segment = self._route(frame.body)
        if self._services.closing:
            raise ShuttingDown(f"broker {self._services.id} is stopping")
        publishes = segment.publishes
        if publishes is not self._uncommitted:
            self._commit_publishes(publishes)
        size = len(frame.payload)
        self._count_in(size)
        try:
            publishes.take(frame.payload, self, frame.request, self.framed_at)
        except BaseException:
            self._count_out(size)
            raise

    def _commit_publishes(self, following: PublishQueue | None) -> None:
        """Begin the commit of batches that came for one segment in a row, in the loop iteration in which they came."""
        uncommitted, self._uncommitted = self._uncommitted, following
        if uncommitted is not None:
            uncommitted.commit()

    def _route(self, body: bytes) -> OwnedSegment:
        route = decode(Route, body)
        topic = TopicName.parse(route.topic)
        self.may(Action.PRODUCE, topic)
        found = self._services.topics.get(topic.path)
        if found.id != route.topic_id:
            raise StaleRoute(f"topic {topic.path} was deleted and created again since it was looked up")
        segment = segment_in_layout(self._services, topic.path, found, route.segment)
        if not segment.takes_publishes:
            raise StaleRoute(
                f"the layout of topic {topic.path} has epoch {found.layout.epoch}, and segment {route.segment} takes "
                f"no writes in it"
            )
        if len(body) <= MAX_ROUTE_BYTES:
            # Segments that are not served here any more would stay in memory as long as the connection.
            self._routes = {known: each for known, each in self._routes.items() if each.takes_publishes}
            if len(self._routes) >= MAX_ROUTES:
                self._routes.clear()
            self._routes[body] = segment
        return segment

    def confirm(self, frame: bytes, size: int) -> None:
        self._requests -= 1
        self._bytes -= size
        self.connection.queue(frame)

    def refuse(self, request: int, size: int, error: BraidError) -> None:
        self._count_out(size)
        self._count_error(Kind.PUBLISH, error)
        self.connection.reply_error(Kind.PUBLISH, request, error)

    def flush(self) -> None:
        if self._paused:
            self._pause_or_resume()
        self.connection.flush()

    # Consuming.

    def _on_open(self, frame: Frame) -> None:
        request = decode(Open, frame.body)
        if not 0 < request.channel < 1 << 32 or request.channel in self._channels or request.channel in self._queues:
            raise ProtocolError(f"channel {request.channel} cannot be opened: take a new number from 1 on")
        if not 0 <= request.credit <= MAX_CREDIT:
            raise InvalidArgument(f"a credit of {request.credit} bytes is not allowed: give 0 to {MAX_CREDIT}")
        if len(self._channels) >= self._limits.max_channels:
            raise Overloaded(f"this connection has {len(self._channels)} channels, as many as it may have")
        if request.session:
            raise InvalidArgument(
                "a session opens no channel: name the subscription, with the term and grant of ASSIGN"
            )
        topic = TopicName.parse(request.topic)
        self.may(Action.CONSUME, topic)
        segment = self._services.segments.get(topic.path, request.segment)
        if segment.topic_id != request.topic_id:
            raise TopicNotFound(f"topic {topic.path} was deleted and created again since it was looked up")
        offset = self._first_offset(segment, request)
        channel = DeliveryChannel(
            request.channel,
            self.connection,
            segment.storage,
            offset,
            request.credit,
            subscription=request.subscription or None,
            read_bytes=self._limits.read_bytes,
            read_ahead=self._services.read_ahead,
            unsent_bytes=self._services.unsent_bytes,
            metrics=self._metrics.topic(topic.path),
            on_end=self._forget_channel,
        )
        self._channels[request.channel] = (channel, segment)
        placement = segment.cursors.placement(request.subscription) if request.subscription else 0
        self.connection.reply(frame, encode(Opened(offset, segment.end, placement)))
        segment.add_channel(channel)

    def _first_offset(self, segment: OwnedSegment, request: Open) -> Offset:
        subscription = request.subscription
        if not subscription:
            return self._asked_offset(segment, request)
        if is_group(subscription):
            asked = self._asked_offset(segment, request)
            self._take_read_grant(segment, request)
            return asked
        offset = segment.cursors.offset(subscription)
        if offset is None:
            raise NotServing(f"subscription {cut(subscription)} has no cursor on segment {request.segment} yet")
        self._services.order_gate.check(segment, subscription)
        self._take_read_grant(segment, request)
        # If the topic's policy allows it, retention may have deleted records that the subscription did not consume.
        return max(offset, segment.earliest)

    def _take_read_grant(self, segment: OwnedSegment, request: Open) -> None:
        """Let this channel be the only one of its subscription, or of its group, on the segment."""
        subscription, read_grant = request.subscription, ReadGrant(request.term, request.grant)
        segment.read_grants.check(subscription, read_grant)
        controller = self._services.controllers.known(segment.name.topic.path)
        self._services.grant_signer.check(segment.topic_id, subscription, request.segment, read_grant, controller)
        segment.read_grants.take(subscription, read_grant)
        segment.close_channels(subscription, RESET, "the segment went to another consumer, or to another channel")

    def _asked_offset(self, segment: OwnedSegment, request: Open) -> Offset:
        if request.offset == EARLIEST:
            return segment.earliest
        parted_at = parting(segment.epochs, request.offset, request.after_epoch)
        if parted_at is not None:
            raise PositionDiverged(
                f"offset {request.offset} of segment {request.segment} follows a record of epoch "
                f"{request.after_epoch}, which is lost: from offset {parted_at} on this log holds other records",
                segment.earliest,
                segment.end,
                parted_at,
            )
        if not segment.earliest <= request.offset <= segment.end:
            raise OffsetOutOfRange(
                f"offset {request.offset} of segment {request.segment} is not there: it holds {segment.earliest} "
                f"to {segment.end}; begin at one of these, or at the earliest",
                segment.earliest,
                segment.end,
            )
        return Offset(request.offset)

    def _forget_channel(self, channel: DeliveryChannel) -> None:
        found = self._channels.pop(channel.number, None)
        if found is not None:
            found[1].forget_channel(channel)

    def _on_credit(self, frame: Frame) -> None:
        credit = decode(Credit, frame.body)
        if not 0 < credit.bytes <= MAX_CREDIT:
            raise ProtocolError(f"a credit of {credit.bytes} bytes is not allowed: give 1 to {MAX_CREDIT}")
        if (found := self._channels.get(credit.channel)) is not None:
            found[0].grant(credit.bytes)

    def _on_ack(self, frame: Frame) -> None:
        ack = decode(Ack, frame.body)
        found = self._channels.get(ack.channel)
        if found is None:
            raise NotServing(f"channel {ack.channel} is closed: its acks count no more")
        channel, segment = found
        if channel.subscription is None or not channel.takes_acks:
            raise InvalidArgument("this channel belongs to no subscription: its consumer keeps the positions itself")
        segment.cursors.advance(channel.subscription, Offset(ack.offset))
        if not ack.durable:
            self.connection.reply(frame)
            return
        self._answer_later(frame, self._flush_cursor(segment, channel.subscription))

    async def _flush_cursor(self, segment: OwnedSegment, subscription: str) -> bytes:
        await segment.sync_to(segment.cursors.offset(subscription) or Offset(0))
        await segment.cursors.flush(subscription)
        return b""

    def _on_close(self, frame: Frame) -> None:
        close = decode(Close, frame.body)
        if not self._queues.close(close.channel) and (found := self._channels.get(close.channel)) is not None:
            found[0].drop()
        self.connection.reply(frame)

    def _on_queue_open(self, frame: Frame) -> None:
        request = decode(QueueOpen, frame.body)
        topic = TopicName.parse(request.topic)
        self.may(Action.CONSUME, topic)
        if request.channel in self._channels:
            raise ProtocolError(f"channel {request.channel} cannot be opened: take a new number from 1 on")
        self._answer_later(frame, self._queues.open(request, topic))

    def _on_queue_answer(self, frame: Frame) -> None:
        # Taken now, in the order in which answers come; only the reply waits for disks. It needs no task.
        stored, reply = self._queues.answer(decode(QueueAnswer, frame.body))
        self._count_in(len(frame.body))
        stored.add_done_callback(partial(self._on_queue_answer_stored, frame, reply))

    def _on_queue_answer_stored(self, frame: Frame, reply: bytes, stored: asyncio.Future[None]) -> None:
        self._count_out(len(frame.body))
        match stored.exception():
            case None:
                self.connection.reply(frame, reply)
            case BraidError() as error:
                self._refuse(frame, error)

    def _on_ping(self, frame: Frame) -> None:
        self.connection.reply(frame)

    # Membership.

    def _on_release(self, frame: Frame) -> None:
        self._memberships.release(decode(Release, frame.body))
        self.connection.reply(frame)

    def _on_progress(self, frame: Frame) -> None:
        self._memberships.progress(decode(Progress, frame.body))

    # Routing.

    def _on_topology_ack(self, frame: Frame) -> None:
        self.acked_generation = max(self.acked_generation or 0, decode(TopologyAck, frame.body).generation)

    def adopted_generation(self, pushed_generation: int) -> int | None:
        """The generation that the peer's routing shows; None if the peer never acks. A peer that has acked all that it
        was told has the routing of `pushed_generation`, up to which changes were pushed: nothing that it asked for has
        changed since. Otherwise a client of one topic would hold up the transitions of all others."""
        acked = self.acked_generation
        if acked is None or acked < self.questions.told_generation:
            return acked
        return max(acked, pushed_generation)

    # Between brokers.

    def _on_peer(self, frame: Frame) -> None:
        assert self.principal is not None
        if not self.principal.peer:
            raise PermissionDenied(f"{self.principal.name!r} may not ask this: it is for brokers of the cluster alone")
        size = len(frame.payload) if frame.payload is not None else 0
        self._count_in(size)
        self._tasks.start(object(), self._answer_peer(frame, size), name="peer")

    async def _answer_peer(self, frame: Frame, size: int) -> None:
        """Send errors back as they are: the other broker knows what a fenced log means."""
        try:
            request = decode(PeerRequest, frame.body)
            result = await self._services.peer_calls.answer(request, b"" if frame.payload is None else frame.payload)
            self.connection.send(Kind.PEER, encode(PeerReply(result)), request=frame.request, flags=REPLY)
        except BraidError as error:
            self._count_error(Kind.PEER, error)
            self.connection.reply_error(Kind.PEER, frame.request, error)
        except Exception as error:
            _log.exception("a peer's call broke")
            broken = BrokenInvariant(f"a call broke in broker {self._services.id}: {quote(error)}")
            self.connection.reply_error(Kind.PEER, frame.request, broken)
        finally:
            self._count_out(size)


def _name_of(kind: int) -> str:
    return _NAMES.get(kind, "unknown")


_NAMES: Final[Mapping[int, str]] = {int(kind): kind.name.lower() for kind in Kind}

_IMMEDIATE: Final[Mapping[int, Callable[[Session, Frame], None]]] = {
    Kind.PING: Session._on_ping,
    Kind.TOPOLOGY_ACK: Session._on_topology_ack,
    Kind.OPEN: Session._on_open,
    Kind.CREDIT: Session._on_credit,
    Kind.ACK: Session._on_ack,
    Kind.CLOSE: Session._on_close,
    Kind.RELEASE: Session._on_release,
    Kind.PROGRESS: Session._on_progress,
    Kind.QUEUE_OPEN: Session._on_queue_open,
    Kind.QUEUE_ANSWER: Session._on_queue_answer,
    Kind.PEER: Session._on_peer,
}
