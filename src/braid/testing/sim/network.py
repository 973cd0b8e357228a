"""A network of named hosts in virtual time: byte streams that are slow, cut in odd places, broken or silent.

A connection is two `StreamEnd`s. Bytes stay in the sender's buffer until they arrive, a random piece at a time; so
order is kept, and bytes that a cut link swallows are sent again when it heals, as TCP does. What goes wrong:

- `cut(a, b)`: packets vanish. Connections stay open and say nothing; `connect` waits. `heal` ends it.
- `reset(a, b)`: every connection between the two breaks now, on both sides.
- `crash(host)`: its own ends are dead and silent, nothing there is called again. Each peer learns of it after a while,
  or never, as the seed says; if the host is up again (`host(name)`), a peer that still sends is reset.
- A peer that stops reading fills the sender's buffer: `pause_writing`. A sender that does not obey and passes the
  buffer's limit breaks I12: `BufferOverrun`.

Protocols are called in the context in which they began to listen or to connect, so what they start belongs to the same
simulated process.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
from collections.abc import Callable
from random import Random
from typing import Any, TypeVar

from braid.ports.network import Address
from braid.testing.sim.loop import OUTSIDE

P = TypeVar("P", bound=asyncio.BaseProtocol)

HIGH_WATER_BYTES = 64 * 1_024
KERNEL_BYTES = 64 * 1_024
"""What a closed connection still sends although its protocol has been told that it is over."""
BUFFER_LIMIT_BYTES = 64 << 20
"""Far above every high-water mark in use: only a sender that ignores `pause_writing` gets there."""
CONNECT_WAITS_S = (1, 2, 4, 8, 16, 32, 64)
"""When Linux repeats a connection request that nobody answers, until it gives up."""
WHOLE = 0.5
"""How likely the bytes that wait arrive in one piece, rather than cut at a random place."""
NEVER_NOTICED = 0.3
"""How likely a peer hears nothing at all of a crash."""
NOTICED_S = (0.0, 10.0)
FIRST_FREE_PORT = 40_000


class BufferOverrun(AssertionError):
    """A sender went on after `pause_writing` without bound (I12)."""


class SimulatedNetwork:
    def __init__(
        self,
        random: Random,
        *,
        latency_s: tuple[float, float] = (100e-6, 5e-3),
        loss: float = 0.0,
        retransmit_s: tuple[float, float] = (0.2, 3.0),
    ) -> None:
        self.random = random
        self.latency_s = latency_s
        self.loss = loss
        """The probability that a piece is lost once and so takes `retransmit_s` longer."""
        self.retransmit_s = retransmit_s
        self._hosts: dict[str, SimulatedHost] = {}
        self._cuts: set[tuple[str, str]] = set()
        self._ends: dict[StreamEnd, None] = {}

    def host(self, name: str) -> SimulatedHost:
        """The host of this name; after a crash a new one, which is up again."""
        host = self._hosts.get(name)
        if host is None or not host.up:
            host = self._hosts[name] = SimulatedHost(self, name)
            self._wake()
        return host

    def cut(self, a: str, b: str, *, one_way: bool = False) -> None:
        """Let packets from `a` to `b` vanish, and those from `b` to `a` too unless `one_way`."""
        self._cuts |= {(a, b)} if one_way else {(a, b), (b, a)}

    def heal(self, a: str | None = None, b: str | None = None) -> None:
        """End the cuts between two hosts, all cuts of one host, or all."""
        self._cuts = {pair for pair in self._cuts if not {a, b} - {None} <= set(pair)}
        self._wake()

    def arrive(self, name: str) -> None:
        """Let everything that is on its way to a host arrive now. A kernel goes on receiving while a process stands
        still: the process finds these bytes before its timers."""
        for end in tuple(self._ends):
            if end.peer.host.name == name:
                end.send_now()

    def reset(self, a: str, b: str) -> None:
        for end in tuple(self._ends):
            if {end.host.name, end.peer.host.name} == {a, b}:
                end.lose(ConnectionResetError(errno.ECONNRESET, f"connection between {a} and {b} was reset"))

    def crash(self, name: str) -> None:
        host = self.find(name)
        host.up = False
        host.listeners.clear()
        for end in [end for end in self._ends if end.host is host]:
            end.lose(None)
            if self.random.random() >= NEVER_NOTICED:
                error = ConnectionResetError(errno.ECONNRESET, f"{name} has crashed")
                self.later(end.peer.lose, error, delay_s=self.random.uniform(*NOTICED_S))

    def find(self, name: str) -> SimulatedHost:
        if name not in self._hosts:
            raise OSError(errno.EHOSTUNREACH, f"there is no host called {name} in this network")
        return self._hosts[name]

    def carries(self, source: SimulatedHost, target: SimulatedHost) -> bool:
        return (source.name, target.name) not in self._cuts and self._hosts[target.name].up

    def delay_s(self) -> float:
        lost = self.loss > 0 and self.random.random() < self.loss
        return self.random.uniform(*self.latency_s) + (self.random.uniform(*self.retransmit_s) if lost else 0.0)

    def later(self, callback: Callable[..., object], *arguments: Any, delay_s: float | None = None) -> None:
        delay = self.delay_s() if delay_s is None else delay_s
        asyncio.get_running_loop().call_later(delay, callback, *arguments, context=OUTSIDE)

    def add(self, end: StreamEnd) -> None:
        self._ends[end] = None

    def forget(self, end: StreamEnd) -> None:
        self._ends.pop(end, None)

    def _wake(self) -> None:
        for end in tuple(self._ends):
            end.send_soon()


class SimulatedHost:
    """Implements `braid.ports.network.Network` for what runs on this host."""

    def __init__(self, network: SimulatedNetwork, name: str) -> None:
        self.network = network
        self.name = name
        self.up = True
        self.listeners: dict[int, SimulatedListener] = {}
        self._next_port = FIRST_FREE_PORT

    async def listen(
        self,
        host: str,  # noqa: ARG002 — a simulated host has one address
        port: int,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
    ) -> SimulatedListener:
        self._check_up()
        port = port or self.free_port()
        if port in self.listeners:
            raise OSError(errno.EADDRINUSE, f"port {port} of {self.name} is in use")
        self.listeners[port] = SimulatedListener(self, port, protocol_factory)
        return self.listeners[port]

    async def connect(self, host: str, port: int, protocol_factory: Callable[[], P]) -> tuple[asyncio.Transport, P]:
        for wait_s in CONNECT_WAITS_S:
            self._check_up()
            await asyncio.sleep(self.network.delay_s())
            target = self.network.find(host)
            if self.network.carries(self, target) and self.network.carries(target, self):
                break
            await asyncio.sleep(wait_s)
        else:
            raise TimeoutError(errno.ETIMEDOUT, f"{host} does not answer {self.name}")
        listener = target.listeners.get(port)
        if listener is None:
            await asyncio.sleep(self.network.delay_s())
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"nobody listens on port {port} of {host}")
        near = StreamEnd(self, self.free_port(), contextvars.copy_context())
        listener.accept(near)
        try:
            await asyncio.sleep(self.network.delay_s())
            self._check_up()
        except BaseException:
            near.abort()
            raise
        protocol = protocol_factory()
        near.begin(protocol)
        return near, protocol

    def free_port(self) -> int:
        self._next_port += 1
        return self._next_port

    def _check_up(self) -> None:
        if not self.up:
            raise OSError(errno.ENETDOWN, f"{self.name} has crashed: take `network.host({self.name!r})` again")


class SimulatedListener:
    def __init__(self, host: SimulatedHost, port: int, factory: Callable[[], asyncio.BaseProtocol]) -> None:
        self.address = Address(host.name, port)
        self._host = host
        self._factory = factory
        self._context = contextvars.copy_context()

    def accept(self, near: StreamEnd) -> None:
        far = StreamEnd(self._host, self.address.port, self._context.copy())
        near.peer, far.peer = far, near
        self._host.network.add(near)
        self._host.network.add(far)
        asyncio.get_running_loop().call_soon(self._begin, far, context=far.context)

    async def close(self) -> None:
        if self._host.listeners.get(self.address.port) is self:
            del self._host.listeners[self.address.port]

    def _begin(self, far: StreamEnd) -> None:
        if not far.over:
            far.begin(self._factory())


class StreamEnd(asyncio.Transport):
    """One side of a connection. Owns the bytes that it still has to send."""

    peer: StreamEnd

    def __init__(self, host: SimulatedHost, port: int, context: contextvars.Context) -> None:
        super().__init__()
        self.host = host
        self.address = Address(host.name, port)
        self.context = context
        self.over = False
        """Nothing is sent or received any more."""
        self._network = host.network
        self._protocol: asyncio.BaseProtocol | None = None
        self._buffer = bytearray()
        self._high = HIGH_WATER_BYTES
        self._low = HIGH_WATER_BYTES // 4
        self._reading = False
        self._pausing = False
        self._closing = False
        self._told = False
        self._sending = False
        self._end_asked = False
        self._end_sent = False

    # What the network does with this end.

    def begin(self, protocol: asyncio.BaseProtocol) -> None:
        """Called in the protocol's own context."""
        self._protocol = protocol
        self._reading = True
        protocol.connection_made(self)
        self.peer.send_soon()

    def send_soon(self) -> None:
        if not (self._sending or self.over) and (self._buffer or (self._end_asked and not self._end_sent)):
            self._sending = True
            self._network.later(self._send)

    def send_now(self) -> None:
        if self._buffer and not self.over:
            self._send()

    def lose(self, error: Exception | None) -> None:
        """The connection is over here, whatever the other side knows of it. The protocol is told if its host is up."""
        if not self.over:
            self.over = True
            self._buffer.clear()
            self._network.forget(self)
            self._tell(error)

    def _tell(self, error: Exception | None) -> None:
        if not self._told:
            self._told = self._closing = True
            if self._protocol is not None:
                loop = asyncio.get_running_loop()
                loop.call_soon(self._connection_lost, self._protocol, error, context=self.context)

    def _connection_lost(self, protocol: asyncio.BaseProtocol, error: Exception | None) -> None:
        if self.host.up:
            protocol.connection_lost(error)

    def _send(self) -> None:
        self._sending = False
        peer = self.peer
        if self.over or not self._network.carries(self.host, peer.host):
            return
        if peer.over:
            self.lose(ConnectionResetError(errno.ECONNRESET, f"{peer.address} has no such connection any more"))
            return
        if peer._closing:
            self._buffer.clear()  # Nobody will read this.
        elif not peer._reading:
            return
        elif self._buffer:
            size = len(self._buffer)
            if self._network.random.random() >= WHOLE:
                size = self._network.random.randint(1, size)
            del self._buffer[: peer._receive(bytes(self._buffer[:size]))]
        self._after_sending()

    def _after_sending(self) -> None:
        if self.over:
            return
        if self._pausing and len(self._buffer) <= self._low:
            self._pausing = False
            if not self._told and self._protocol is not None:
                self.context.run(self._protocol.resume_writing)
        if self._closing and len(self._buffer) <= KERNEL_BYTES:
            self._tell(None)
        if not self._buffer and self._end_asked and not self._end_sent:
            self._end_sent = True
            self.peer._receive_end()
            if self._closing:
                self.lose(None)
        self.send_soon()

    def _receive(self, data: bytes) -> int:
        """How many of the bytes the protocol took: a buffered protocol may have less room."""
        protocol = self._protocol
        if isinstance(protocol, asyncio.BufferedProtocol):
            room = memoryview(self.context.run(protocol.get_buffer, len(data))).cast("B")
            size = min(len(room), len(data))
            room[:size] = data[:size]
            self.context.run(protocol.buffer_updated, size)
            return size
        assert isinstance(protocol, asyncio.Protocol)
        self.context.run(protocol.data_received, data)
        return len(data)

    def _receive_end(self) -> None:
        if self._closing or self.over:
            return
        assert isinstance(self._protocol, asyncio.Protocol | asyncio.BufferedProtocol)
        if not self.context.run(self._protocol.eof_received):
            self.close()

    # What the protocol does with its transport.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._end_asked and not self._closing:
            raise RuntimeError("cannot write after write_eof()")
        if self._closing or self.over or not data:
            return
        self._buffer += data
        if len(self._buffer) > BUFFER_LIMIT_BYTES:
            raise BufferOverrun(
                f"I12: {len(self._buffer)} bytes wait to be sent from {self.address}; obey pause_writing"
            )
        self._pause_if_high()
        self.send_soon()

    def _pause_if_high(self) -> None:
        if len(self._buffer) > self._high and not self._pausing:
            self._pausing = True
            assert self._protocol is not None
            self._protocol.pause_writing()

    def write_eof(self) -> None:
        self._end_asked = True
        self.send_soon()

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        if not self._closing:
            self._closing = self._end_asked = True
            if self._end_sent:
                self.lose(None)
            elif len(self._buffer) <= KERNEL_BYTES:
                self._tell(None)
            self.send_soon()

    def abort(self) -> None:
        if not self.over:
            peer = self.peer
            self.lose(None)
            self._network.later(self._reset_peer, peer)

    def _reset_peer(self, peer: StreamEnd) -> None:
        if self._network.carries(self.host, peer.host):
            peer.lose(ConnectionResetError(errno.ECONNRESET, f"{self.address} aborted the connection"))

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self.peer.send_soon()

    def is_reading(self) -> bool:
        return self._reading and not self._closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = high if high is not None else (HIGH_WATER_BYTES if low is None else 4 * low)
        self._low = low if low is not None else self._high // 4
        if not 0 <= self._low <= self._high:
            raise ValueError(f"high ({self._high}) must be at least low ({self._low}), and low at least 0")
        self._pause_if_high()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def get_write_buffer_size(self) -> int:
        return len(self._buffer)

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": tuple(self.peer.address), "sockname": tuple(self.address)}.get(name, default)
