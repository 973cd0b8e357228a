"""The network, as far as Braid uses one: byte streams between protocols, as asyncio defines them.

`SocketNetwork` is TCP on the running loop; `testing/sim/network.py` is the simulated one. Errors are `OSError`, as
everywhere in asyncio: `ConnectionRefusedError` when nothing listens, others as the system reports them. `connect` has
no time limit of its own: a host that does not answer takes minutes, so callers set one.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

P = TypeVar("P", bound=asyncio.BaseProtocol)

LISTEN_BACKLOG = 1_024
"""A thousand clients that reconnect at the same time after a restart are not refused."""
ACCEPTED_TOGETHER = 64
"""asyncio accepts so many connections in one iteration of the loop. All of them are open before the first can be
refused, so the number bounds by how much a crowd exceeds the limit of connections."""
TLS_HANDSHAKE_S = 10.0
"""A client that connects and then says nothing has its socket for so long; asyncio's default is a minute."""


def reason_of(error: OSError | UnicodeError, host: str) -> str:
    """Say why an address cannot be used, in the words of the system; asyncio's own words repeat the address."""
    if isinstance(error, UnicodeError):
        return f"{host[:200]!r} is no host name"
    if isinstance(error, socket.gaierror):
        return f"the host name {host!r} cannot be resolved ({error.strerror})"
    return os.strerror(error.errno) if error.errno else str(error)


def listen_failure(error: OSError | UnicodeError, host: str) -> str:
    """Say why nothing can listen on an address, and what the likely cause is."""
    taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
    return f"{reason_of(error, host)}{'; is another broker running?' if taken else ''}"


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Listener(Protocol):
    @property
    def address(self) -> Address:
        """Return where it listens; the port is the real one if 0 was asked for."""

    async def close(self) -> None:
        """Accept no more. Connections that exist go on. Closing twice is fine."""


@runtime_checkable
class Accepted(Protocol):
    """A listener's protocol that wants to know when a TLS handshake has failed."""

    def on_accepted(self) -> None:
        """Hear that the handshake is over: if the connection is not made by now, it never will be."""


class Network(Protocol):
    async def connect(self, host: str, port: int, protocol_factory: Callable[[], P]) -> tuple[asyncio.Transport, P]: ...

    async def listen(self, host: str, port: int, protocol_factory: Callable[[], asyncio.BaseProtocol]) -> Listener: ...


async def listen_again(servers: list[asyncio.Server], create: Callable[..., Awaitable[asyncio.Server]]) -> None:
    """Replace each server by what `create` makes of its socket, without a moment in which nothing listens. Connections
    that exist go on. A server keeps the TLS context that it was made with, and a context cannot forget an authority or
    a session: so it takes another server to accept with other certificates."""
    made: list[asyncio.Server] = []
    try:
        for listening in [each for server in servers for each in server.sockets]:
            own = listening.dup()
            try:
                made.append(await create(sock=own))
            except BaseException:
                own.close()
                raise
    except BaseException:
        for server in made:
            server.close()
        raise
    for server in servers:
        server.close()
    servers[:] = made


class SocketListener:
    address: Address

    def __init__(self, protocol_factory: Callable[[], asyncio.BaseProtocol]) -> None:
        self._protocol_factory = protocol_factory
        self._servers: list[asyncio.Server] = []

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        server = await self._create(tls, host=host, port=port)
        self._servers.append(server)
        self.address = Address(*server.sockets[0].getsockname()[:2])

    async def renew(self, tls: ssl.SSLContext | None) -> None:
        """Accept with another TLS context."""
        await listen_again(self._servers, partial(self._create, tls))

    async def close(self) -> None:
        # Not `wait_closed`: since Python 3.12 it waits for the connections too.
        for server in self._servers:
            server.close()

    async def _create(self, tls: ssl.SSLContext | None, **where: Any) -> asyncio.Server:
        server = await asyncio.get_running_loop().create_server(
            _told_of_failure(self._protocol_factory) if tls is not None else self._protocol_factory,
            ssl=tls,
            ssl_handshake_timeout=TLS_HANDSHAKE_S if tls is not None else None,
            backlog=ACCEPTED_TOGETHER,
            **where,
        )
        for each in server.sockets:
            with socket.fromfd(each.fileno(), each.family, each.type) as listening:
                listening.listen(LISTEN_BACKLOG)
        return server


class SocketNetwork:
    """TCP, and TLS where a context is given. Small frames leave immediately: asyncio sets TCP_NODELAY on every stream
    socket, on both sides."""

    def __init__(self, *, client_tls: ssl.SSLContext | None = None, server_tls: ssl.SSLContext | None = None) -> None:
        self.client_tls = client_tls
        self.server_tls = server_tls
        self._listeners: list[SocketListener] = []

    async def renew(self, *, client_tls: ssl.SSLContext, server_tls: ssl.SSLContext) -> None:
        """Use other TLS contexts for the connections that are made from now on; those that exist go on."""
        for listener in self._listeners:
            await listener.renew(server_tls)
        self.client_tls, self.server_tls = client_tls, server_tls

    async def connect(self, host: str, port: int, protocol_factory: Callable[[], P]) -> tuple[asyncio.Transport, P]:
        return await asyncio.get_running_loop().create_connection(protocol_factory, host, port, ssl=self.client_tls)

    async def listen(
        self, host: str, port: int, protocol_factory: Callable[[], asyncio.BaseProtocol]
    ) -> SocketListener:
        listener = SocketListener(protocol_factory)
        await listener.listen(host, port, self.server_tls)
        self._listeners.append(listener)
        return listener


def _told_of_failure(protocol_factory: Callable[[], asyncio.BaseProtocol]) -> Callable[[], asyncio.BaseProtocol]:
    """asyncio makes the protocol before the TLS handshake, and does not tell it when that fails. The handshake is a
    part of the task in which the protocol is made: when that ends, the connection is made, or never will be."""

    def accept() -> asyncio.BaseProtocol:
        protocol = protocol_factory()
        accepting = asyncio.current_task()
        if accepting is not None and isinstance(protocol, Accepted):
            accepting.add_done_callback(lambda _: protocol.on_accepted())
        return protocol

    return accept
