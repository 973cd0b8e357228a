"""One connection to one broker, from the side that asks: a client's, or another broker's. Requests with their replies,
and pushes.

Everything in a process that talks to one broker uses one link. Requests are pipelined; each has a future. Pushes go to
the receiver that is registered under the channel or session that they name. When the connection ends, every open
request fails with the reason, and every registered receiver is told once. A link does not reconnect (client/pool.py
does, and broker/peers/links.py). A broker that is silent while an answer is due loses its link within seconds
(silence.py), otherwise after three heartbeats.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol, TypeVar

from msgspec.structs import replace

from braid.model.errors import (
    BraidError,
    ConnectFailed,
    ConnectionLost,
    ProtocolError,
    TimedOut,
    Unauthenticated,
    UnsupportedVersion,
)
from braid.ports.disk import Buffer
from braid.ports.network import Address, Network, reason_of
from braid.wire.address import format_address
from braid.wire.connection import Connection
from braid.wire.frame import ERROR, MAX_FRAME_BYTES, MAX_REQUEST_ID, REPLY, Frame
from braid.wire.operations import (
    HERE,
    MAGIC,
    VERSION,
    Assignment,
    B,
    Closed,
    Delivery,
    ErrorBody,
    Expelled,
    Hello,
    HelloReply,
    Kind,
    Need,
    QueueDelivery,
    Topology,
    TopologyAck,
    decode,
    encode,
    error_from,
)
from braid.wire.silence import Look, Silence
from braid.wire.wakeup import wake

SILENT_PERIODS: Final = 3
"""So many heartbeat periods without a byte from the broker end the link."""

TURN_FRAMES: Final = 16
"""Of many replies that came together, so many are handled before their waiters resume."""
EARLY_SESSIONS: Final = 64
"""Sessions for which something was pushed before they were opened here; only the last push to each is kept."""

T = TypeVar("T")

OnReply = Callable[[Frame | None, BraidError | None], None]
"""Gets the reply, or the error of the broker's answer or of the link's end."""


class ChannelReceiver(Protocol):
    """Gets the broker's pushes on one channel."""

    def on_delivery(self, delivery: Delivery, payload: memoryview) -> None: ...

    def on_need(self, need: Need) -> None: ...

    def on_closed(self, error: Closed | BraidError) -> None:
        """Hear that the broker closed the channel, or that the link is over. A receiver that expects nothing more
        forgets the channel."""


class QueueReceiver(Protocol):
    """Gets the broker's pushes on one channel of a queue."""

    def on_queue_delivery(self, delivery: QueueDelivery, payload: memoryview | None) -> None: ...

    def on_closed(self, error: Closed | BraidError) -> None:
        """Hear that the broker closed the channel, or that the link is over. Nothing follows."""


class SessionReceiver(Protocol):
    """Gets the broker's pushes for one consumer's session."""

    def on_assignment(self, assignment: Assignment) -> None: ...

    def on_session_lost(self, error: BraidError) -> None:
        """Hear that the link is over, or that another consumer took the name. Nothing follows."""


class Link:
    """Made by `connect_link`, which also says hello."""

    def __init__(self, address: Address, on_topology: Callable[[Topology], None]) -> None:
        self.address: Final = address
        self.broker_id = ""
        self.max_frame_bytes = MAX_FRAME_BYTES
        self.connection = Connection(self, frame_limit=MAX_FRAME_BYTES)
        self.lost: asyncio.Future[BraidError] = asyncio.get_running_loop().create_future()
        """Done, with the reason, when the link is over."""
        self._on_topology = on_topology
        self._requests: dict[int, OnReply] = {}
        self._payloads: dict[int, int] = {}
        """The bytes of requests that carry a payload, until they are answered."""
        self._payload_bytes = 0
        self._waits_since = 0.0
        """The loop's time when a request was sent while no other one waited."""
        self._silence = Silence()
        self._silence_timer: asyncio.TimerHandle | None = None
        self._last_request = 0
        self._last_channel = 0
        self._channels: dict[int, ChannelReceiver] = {}
        self._queues: dict[int, QueueReceiver] = {}
        self._sessions: dict[int, SessionReceiver] = {}
        self._early: dict[int, Assignment | Expelled] = {}
        self._heartbeat: asyncio.TimerHandle | None = None
        self._heartbeat_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._receiving = False
        self._woken: list[asyncio.Future[None]] = []
        self._departures: list[Callable[[], None]] = []

    @property
    def alive(self) -> bool:
        return not self.connection.closing

    @property
    def idle(self) -> bool:
        """Tell whether no request, channel or session uses the link."""
        return not (self._requests or self._channels or self._queues or self._sessions)

    def request(self, kind: Kind, body: bytes = b"", payload: Sequence[Buffer] = ()) -> asyncio.Future[Frame]:
        """Send a request. The future gets the reply, or the error of the broker's answer or of the link's end."""
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self.call(kind, body, payload, partial(_settle, future))
        return future

    def call(self, kind: Kind, body: bytes, payload: Sequence[Buffer], on_reply: OnReply) -> None:
        """Send a request. `on_reply` is called once, later: with the reply, or with the error. For senders of so many
        requests that a future for each would cost."""
        if self.connection.closing:
            asyncio.get_running_loop().call_soon(on_reply, None, self.connection.end_reason().again())
            return
        number = self._last_request % MAX_REQUEST_ID + 1
        while number in self._requests:
            number = number % MAX_REQUEST_ID + 1
        self.connection.send(kind, body, payload, request=number)
        self._last_request = number
        if not self._requests:
            self._await_answer()
        self._requests[number] = on_reply
        if payload:
            self._payloads[number] = size = sum(map(len, payload))
            self._payload_bytes += size

    # When replies arrive, waiting senders resume and their next batches leave in one write, all in the same iteration
    # of the loop. If many replies arrive together, this happens several times, so that the broker has something to do
    # before the last reply is handled. A waiter that gives up meanwhile does not hear of a reply that is still to come.

    def wake_at_end(self, futures: list[asyncio.Future[None]]) -> None:
        """Resume the waiters of the futures when the replies that came together are handled; empties the list. Only a
        callback of a reply may call this."""
        self._woken += futures
        futures.clear()

    def call_at_end(self, depart: Callable[[], None]) -> None:
        """Call `depart`, which may send something, when the iteration ends."""
        if not self._departures and not self._receiving:
            self._loop.call_soon(self._depart)
        self._departures.append(depart)

    def _depart(self) -> None:
        departures, self._departures = self._departures, []
        self.connection.cork()
        try:
            for depart in departures:
                depart()
        finally:
            self.connection.flush()

    async def ask(self, kind: Kind, body: bytes, reply: type[B], timeout_s: float | None = None) -> B:
        """Send a request and decode its reply. `TimedOut` when none comes in time; the link stays."""
        frame = await within(self.request(kind, body), timeout_s, f"{kind.name} was not answered")
        return decode(reply, frame.body)

    def send(self, kind: Kind, body: bytes) -> None:
        """Send a request that has no reply."""
        self.connection.send(kind, body)

    def open_channel(self, receiver: ChannelReceiver) -> int:
        """Return a number for a new channel. From now on its pushes go to `receiver`; the caller sends OPEN."""
        self._last_channel += 1
        self._channels[self._last_channel] = receiver
        return self._last_channel

    def forget_channel(self, channel: int) -> None:
        self._channels.pop(channel, None)

    def open_queue(self, receiver: QueueReceiver) -> int:
        """Return a number for a new channel of a queue. The caller sends QUEUE_OPEN."""
        self._last_channel += 1
        self._queues[self._last_channel] = receiver
        return self._last_channel

    def forget_queue(self, channel: int) -> None:
        self._queues.pop(channel, None)

    def open_session(self, session: int, receiver: SessionReceiver) -> None:
        """Send this session's pushes to `receiver` from now on, also a push that came with the reply to JOIN."""
        early = self._early.pop(session, None)
        if self.lost.done():  # Between the reply to JOIN and now.
            receiver.on_session_lost(self.lost.result().again())
        elif isinstance(early, Expelled):
            receiver.on_session_lost(_error_of(early))
        else:
            self._sessions[session] = receiver
            if early is not None:
                receiver.on_assignment(early)

    def forget_session(self, session: int) -> None:
        self._sessions.pop(session, None)

    def resolved(self, topology: Topology) -> Topology:
        """Return the topology with this broker's address where it says HERE."""
        here = format_address(self.address)
        topics = []
        for topic in topology.topics:
            segments = (replace(each, owner=here) if each.owner == HERE else each for each in topic.segments)
            controller = here if topic.controller == HERE else topic.controller
            topics.append(replace(topic, segments=tuple(segments), controller=controller))
        return replace(topology, topics=tuple(topics))

    def ack_topology(self, generation: int) -> None:
        """Tell the broker that this process uses the routing up to this generation."""
        self.send(Kind.TOPOLOGY_ACK, encode(TopologyAck(generation)))

    def close(self, reason: BraidError) -> None:
        self.connection.close(reason)

    # What the connection calls.

    def on_connected(self, connection: Connection) -> None:
        pass

    def on_congestion(self, congested: bool) -> None:
        pass

    def on_frames(self, frames: Sequence[Frame]) -> None:
        for first in range(0, len(frames), TURN_FRAMES):
            if self.connection.closing:  # by an earlier frame, or by a waiter that resumed
                return
            self._receiving = True
            self.connection.cork()
            try:
                for frame in frames[first : first + TURN_FRAMES]:
                    if frame.flags & REPLY:
                        self._on_reply(frame)
                    else:
                        self._on_push(frame)
            finally:
                try:
                    self._end_turn()
                except BaseException:  # An error that leaves a step ends the program, but no task may hang (wakeup.py).
                    self._loop.call_soon(self.on_frames, frames[first + TURN_FRAMES :])
                    raise

    def _end_turn(self) -> None:
        try:
            while self._woken:
                woken, self._woken = self._woken, []
                wake(woken)
        finally:
            self._receiving = False
            self._depart()

    def _on_reply(self, frame: Frame) -> None:
        if not frame.request:  # The broker says why it closes the connection.
            reason = error_from(decode(ErrorBody, frame.body))
            if isinstance(reason, Unauthenticated):
                # This link's token has expired. The next link brings a fresh one, or is refused.
                reason = ConnectionLost(f"the broker ended the connection: {reason}")
            self.connection.abort(reason)
            return
        error = error_from(decode(ErrorBody, frame.body)) if frame.flags & ERROR else None
        on_reply = self._requests.pop(frame.request, None)
        self._payload_bytes -= self._payloads.pop(frame.request, 0)
        if on_reply is None:
            raise ProtocolError(f"a reply to request {frame.request} came, which was never sent")
        on_reply(frame, error)

    def _on_push(self, frame: Frame) -> None:
        match frame.kind:
            case Kind.DELIVER:
                delivery = decode(Delivery, frame.body)
                channel = self._channels.get(delivery.channel)
                if channel is not None and frame.payload is not None:
                    channel.on_delivery(delivery, frame.payload)
            case Kind.NEED:
                need = decode(Need, frame.body)
                if (channel := self._channels.get(need.channel)) is not None:
                    channel.on_need(need)
            case Kind.QUEUE_DELIVER:
                handed = decode(QueueDelivery, frame.body)
                if (queue := self._queues.get(handed.channel)) is not None:
                    queue.on_queue_delivery(handed, frame.payload)
            case Kind.CLOSED:
                closed = decode(Closed, frame.body)
                if (channel := self._channels.get(closed.channel)) is not None:
                    channel.on_closed(closed)
                elif (queue := self._queues.pop(closed.channel, None)) is not None:
                    queue.on_closed(closed)
            case Kind.ASSIGN:
                assignment = decode(Assignment, frame.body)
                if (session := self._sessions.get(assignment.session)) is not None:
                    session.on_assignment(assignment)
                else:
                    self._keep(assignment)
            case Kind.EXPEL:
                expelled = decode(Expelled, frame.body)
                if (session := self._sessions.pop(expelled.session, None)) is not None:
                    session.on_session_lost(_error_of(expelled))
                else:
                    self._keep(expelled)
            case Kind.TOPOLOGY:
                topology = decode(Topology, frame.body)
                self._on_topology(self.resolved(topology))
                self.ack_topology(topology.generation)
            case _:
                pass  # A push of a later version, which this build cannot use.

    def _keep(self, push: Assignment | Expelled) -> None:
        if isinstance(self._early.get(push.session), Expelled):
            return  # An assignment that was under way when the session ended.
        if len(self._early) >= EARLY_SESSIONS:  # The oldest belongs to a session that has left.
            del self._early[next(iter(self._early))]
        self._early[push.session] = push

    def on_lost(self, error: BraidError) -> None:
        for timer in (self._heartbeat, self._silence_timer):
            if timer is not None:
                timer.cancel()
        requests, self._requests = self._requests, {}
        for on_reply in requests.values():
            on_reply(None, error.again())
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.on_closed(error.again())
        queues, self._queues = self._queues, {}
        for queue in queues.values():
            queue.on_closed(error.again())
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            session.on_session_lost(error.again())
        if not self.lost.done():
            self.lost.set_result(error)

    # Silence while an answer is due.

    def _await_answer(self) -> None:
        self._waits_since = self._loop.time()
        if self._silence_timer is None and self._heartbeat is not None:
            due_at = self._silence.begin(self._waits_since)
            self._silence_timer = self._loop.call_at(due_at, self._look_at_silence)

    def _look_at_silence(self) -> None:
        self._silence_timer = None
        connection, now = self.connection, self._loop.time()
        if connection.closing or not self._requests:
            return
        quiet_since = max(connection.heard_at, self._waits_since)
        look, again_at = self._silence.look(now, quiet_since, len(self._requests), self._payload_bytes)
        if look is Look.OVER:
            silent_s = now - quiet_since
            connection.abort(ConnectionLost(f"broker {connection.peer} was silent for {silent_s:.0f} s"))
            return
        self._silence_timer = self._loop.call_at(again_at, self._look_at_silence)
        if look is Look.PING:
            self.request(Kind.PING).add_done_callback(_look_at)

    # Heartbeat.

    def start_heartbeat(self, period_s: float) -> None:
        self._heartbeat_s = period_s
        self._heartbeat = asyncio.get_running_loop().call_later(period_s, self._beat)

    def _beat(self) -> None:
        connection = self.connection
        if connection.closing:
            return
        loop = asyncio.get_running_loop()
        silent_s = loop.time() - connection.heard_at
        if silent_s > SILENT_PERIODS * self._heartbeat_s:
            connection.abort(ConnectionLost(f"broker {connection.peer} was silent for {silent_s:.0f} s"))
            return
        self.request(Kind.PING).add_done_callback(_look_at)
        self._heartbeat = loop.call_later(self._heartbeat_s, self._beat)


def _reason_of(error: OSError | UnicodeError, host: str) -> str:
    """Describe an error in the words of TLS, or of the system."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its TLS certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({error.reason or error}): does the broker speak TLS on this port?"
    return reason_of(error, host)


def _settle(future: asyncio.Future[Frame], frame: Frame | None, error: BraidError | None) -> None:
    if future.done():
        return  # The caller gave up waiting.
    if frame is not None and error is None:
        future.set_result(frame)
    else:
        future.set_exception(error or ConnectionLost("the link ended"))
        future.exception()  # A waiter gets it; without a waiter, asyncio must not complain.


async def connect_link(
    network: Network,
    address: Address,
    *,
    client: str,
    token: str,
    timeout_s: float,
    on_topology: Callable[[Topology], None],
) -> Link:
    """Connect and say hello. `ConnectFailed` when nothing answers; an error that the broker answers is raised as is."""
    name = format_address(address)
    link = Link(address, on_topology)
    given_up = ConnectionLost(f"connecting to broker {name} was given up")
    try:
        async with asyncio.timeout(timeout_s):
            await network.connect(address.host, address.port, lambda: link.connection)
            hello = Hello(MAGIC, VERSION, VERSION, client, token)
            reply = decode(HelloReply, (await link.request(Kind.HELLO, encode(hello))).body)
        if reply.version != VERSION:
            raise UnsupportedVersion(f"broker {name} chose version {reply.version}; only {VERSION} was offered")
        if reply.heartbeat_ms <= 0:
            raise ProtocolError(f"broker {name} wants a heartbeat every {reply.heartbeat_ms} ms")
    except TimeoutError as error:
        link.connection.abort(given_up)
        raise ConnectFailed(f"broker {name} did not answer within {timeout_s:g} s") from error
    except (OSError, UnicodeError) as error:
        link.connection.abort(given_up)
        raise ConnectFailed(f"broker {name} cannot be reached: {_reason_of(error, address.host)}") from error
    except ConnectionLost as error:
        raise ConnectFailed(
            f"broker {name} closed the connection before its hello: is it a broker, and does it speak TLS? ({error})"
        ) from error
    except BaseException:
        link.connection.abort(given_up)
        raise
    link.broker_id = reply.broker_id
    link.max_frame_bytes = reply.max_frame_bytes
    link.start_heartbeat(reply.heartbeat_ms / 1000)
    return link


async def within(future: asyncio.Future[T], timeout_s: float | None, what: str) -> T:
    """Return the future's result, if it comes in time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await future
    except TimedOut:  # The broker's own answer: it gave up.
        raise
    except TimeoutError as error:
        raise TimedOut(f"{what} within {timeout_s:g} s") from error


def _error_of(expelled: Expelled) -> BraidError:
    return error_from(ErrorBody(expelled.code, expelled.message, expelled.retriable))


def _look_at(future: asyncio.Future[Frame]) -> None:
    if not future.cancelled():
        future.exception()
