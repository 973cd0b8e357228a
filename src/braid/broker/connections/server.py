"""The listening port: accepts connections up to the limit, and ends connections that are silent or whose token has
expired.

One timer serves all connections: a thousand idle connections cost a loop over a thousand numbers every second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from braid.broker.connections.services import Services
from braid.broker.connections.session import Session
from braid.broker.topology import encoded_topology
from braid.broker.unsent_bytes import PATIENCE_S
from braid.model.errors import BraidError, ConnectionLost, InvalidConfig, Overloaded, ShuttingDown, Unauthenticated
from braid.ports.clock import Clock
from braid.ports.network import Address, Listener, Network, listen_failure
from braid.wire.connection import Connection
from braid.wire.operations import Kind

SWEEP_S: Final = 1.0
SILENT_PERIODS: Final = 3
SLOWEST_BYTES_PER_S: Final = 64 << 10
"""A frame may take longer than the silence that ends a connection, if its bytes come at least this fast."""

DRAIN_S: Final = 1.0
"""How long a stopping broker waits for slow clients to read what is queued for them."""

_log: Final = logging.getLogger(__name__)


class Server:
    def __init__(self, services: Services, network: Network, clock: Clock) -> None:
        self._services = services
        self._network = network
        self._clock = clock
        self._sessions: dict[Session, None] = {}
        self._empty = asyncio.Event()
        """Set while no connection is open."""
        self._empty.set()
        self._listener: Listener | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._changed: dict[str, None] = {}
        """Topics whose new routing is pushed in the loop's next iteration."""
        self._pushed_generation = 0
        """All changes of routing up to this generation were pushed to the clients that asked for their topics."""
        services.topology.on_change.append(self.announce)

    async def listen(self, address: Address) -> Address:
        try:
            self._listener = await self._network.listen(address.host, address.port, self._accept)
        except (OSError, UnicodeError) as error:
            raise InvalidConfig(f"cannot listen on {address}: {listen_failure(error, address.host)}") from error
        self._sweeper = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)
        return self._listener.address

    def _accept(self) -> Connection:
        metrics = self._services.metrics
        session = Session(self._services, self._on_end)
        connection = session.connection
        self._sessions[session] = None
        self._empty.clear()
        metrics.connections += 1
        metrics.connections_total += 1
        if len(self._sessions) > self._services.limits.max_connections:
            limit = self._services.limits.max_connections
            asyncio.get_running_loop().call_soon(self._turn_away, session, Overloaded(f"{limit} clients are connected"))
        return connection

    def _turn_away(self, session: Session, error: BraidError) -> None:
        self._services.metrics.connections_refused[error.code] += 1
        peer = session.connection.peer
        _log.info("the connection of %s is ended: %s", peer, error, extra={"peer": peer, "code": error.code})
        session.connection.refuse(error)

    def end_clients(self, error: BraidError) -> None:
        """End the connections of all clients; those of other brokers stay."""
        for session in list(self._sessions):
            if session.principal is not None and not session.principal.peer:
                self._turn_away(session, error)

    def _on_end(self, session: Session) -> None:
        metrics = self._services.metrics
        if session in self._sessions:
            del self._sessions[session]
            if not self._sessions:
                self._empty.set()
            metrics.connections -= 1
            metrics.received_bytes += session.connection.received_bytes
            metrics.sent_bytes += session.connection.sent_bytes

    def traffic(self) -> tuple[int, int]:
        """Bytes received and sent, by closed and by open connections."""
        metrics = self._services.metrics
        received = metrics.received_bytes + sum(each.connection.received_bytes for each in self._sessions)
        sent = metrics.sent_bytes + sum(each.connection.sent_bytes for each in self._sessions)
        return received, sent

    def announce(self, path: str) -> None:
        """Push a topic's routing to the clients that asked for it, if it has changed. Changes of one iteration of the
        loop are pushed together."""
        if not self._changed:
            asyncio.get_running_loop().call_soon(self._push_changes)
        self._changed[path] = None

    def _push_changes(self) -> None:
        """Only changed content causes a push: a client that already has this routing gets nothing."""
        changed, self._changed = self._changed, {}
        topology = self._services.topology
        bodies: dict[str, bytes] = {}
        for session in self._sessions:
            watched = session.questions.watched
            for path in sorted(changed.keys() & watched.keys()):
                route = topology.encoded(path)
                if watched[path] != route:
                    watched[path] = route
                    if path not in bodies:
                        bodies[path] = encoded_topology(topology.generation, [route])
                    session.connection.send(Kind.TOPOLOGY, bodies[path])
                    session.questions.told_generation = topology.generation
        self._pushed_generation = topology.generation

    def adopted_generation(self) -> int | None:
        """The lowest generation that the routing of a client shows, of those that report it; None if none does."""
        shown = (each.adopted_generation(self._pushed_generation) for each in self._sessions)
        return min((generation for generation in shown if generation is not None), default=None)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        self._sweeper = loop.call_later(SWEEP_S, self._sweep)
        limits = self._services.limits
        now, wall = loop.time(), self._clock.now_us() / 1e6
        unfinished = self._services.unfinished_frames
        if isinstance(late := unfinished.late(now), Session):
            held = f"unfinished frames hold {unfinished.bytes} bytes, and that of this connection came too slowly"
            self._turn_away(late, Overloaded(f"{held}; send it again, or in smaller batches"))
        self._services.unsent_bytes.count()
        stuck: list[tuple[float, Session]] = []
        for session in list(self._sessions):
            if session.connection.closing:
                continue
            if session.expired(wall):
                self._turn_away(session, Unauthenticated("the token has expired; connect again with a new one"))
                continue
            if session.paused:  # The broker does not read from this client, so its silence says nothing.
                stuck.append((session.stuck_s(now), session))
                continue
            silent_s = now - session.framed_at
            if session.principal is None:
                if silent_s > limits.hello_timeout_s:
                    self._turn_away(session, ConnectionLost(f"no hello within {limits.hello_timeout_s:g} s"))
                continue
            patience_s = SILENT_PERIODS * limits.heartbeat_s
            patience_s += session.connection.frames.partial_bytes / SLOWEST_BYTES_PER_S
            if silent_s > patience_s:
                self._turn_away(session, ConnectionLost(f"no whole frame came for {silent_s:.0f} s"))
        self._end_stuck(stuck)

    def _end_stuck(self, paused: list[tuple[float, Session]]) -> None:
        """End connections that have read nothing for too long, the longest first. That is earlier while clients leave
        much unread."""
        unsent = self._services.unsent_bytes
        for stuck_s, session in sorted(paused, key=lambda each: each[0], reverse=True):
            patience_s = SILENT_PERIODS * self._services.limits.heartbeat_s
            if unsent.pressed:
                patience_s = min(patience_s, PATIENCE_S)
            if stuck_s <= patience_s:
                break
            error = ConnectionLost(f"the client has read nothing of what is queued for it for {stuck_s:.0f} s")
            self._services.metrics.connections_refused[error.code] += 1
            session.connection.abort(error)
            unsent.forget(session.connection)

    async def stop_listening(self) -> None:
        if self._listener is not None:
            await self._listener.close()

    async def close(self) -> None:
        """Close every connection, after writing what is queued for it as far as the client reads it in DRAIN_S."""
        await self.stop_listening()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for session in list(self._sessions):
            session.connection.refuse(ShuttingDown(f"broker {self._services.id} is stopping"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await self._empty.wait()
        for session in list(self._sessions):
            session.connection.abort(ShuttingDown(f"broker {self._services.id} is stopping"))
        await self._empty.wait()
