"""The admin port: it listens from the start, and the first client that connects makes it load what answers.

FastAPI and its companions take half a second of processor time to import, more than the rest of a broker, and 22 MB of
memory. So a broker is ready without them, and one that nobody asks by HTTP never has them. They are loaded in a thread:
the loop goes on serving the broker's own clients. Until then the kernel keeps those that connected.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from braid.admin.port import AdminPort
from braid.ports.network import Address, listen_again

if TYPE_CHECKING:
    from braid.admin.connections import Connections
    from braid.broker.broker import Broker

_log: Final = logging.getLogger(__name__)


class AdminServer:
    def __init__(
        self, broker: Broker, port: AdminPort, tls: ssl.SSLContext | None, on_load: Callable[[], None] | None = None
    ) -> None:
        """Listen. The port belongs to the server from now on. `on_load` is called when everything is imported."""
        self.tls = tls
        self._broker = broker
        self._port = port
        self._on_load = on_load
        self._listeners: list[asyncio.Server] = []
        self._connections: Connections | None = None
        self._loading: asyncio.Task[None] | None = None
        self._waiting = [*port.sockets]
        """Sockets that wait for the first client."""
        loop = asyncio.get_running_loop()
        for each in self._waiting:
            loop.add_reader(each, self._on_first_client)

    @property
    def address(self) -> Address:
        return self._port.address

    def _on_first_client(self) -> None:
        self._stop_waiting()
        self._loading = asyncio.get_running_loop().create_task(self._load(), name="load the admin port")

    def _stop_waiting(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            loop.remove_reader(self._waiting.pop())

    async def _load(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._connections = await loop.run_in_executor(None, _load_connections, self._broker, self.address.host)
        except Exception:
            _log.exception("the admin port cannot answer, and is closed")
            self._port.close()
            return
        if self._on_load is not None:
            self._on_load()
        accept = self._connections.accept
        self._listeners = [await loop.create_server(accept, sock=each, ssl=self.tls) for each in self._port.sockets]

    async def renew(self, tls: ssl.SSLContext) -> None:
        """Accept with another TLS context; connections that exist go on."""
        self.tls = tls
        if self._loading is not None:
            await asyncio.wait([self._loading])  # It may listen with the context before.
        if self._connections is not None:
            create = asyncio.get_running_loop().create_server
            await listen_again(self._listeners, partial(create, self._connections.accept, ssl=tls))

    async def close(self) -> None:
        """Accept no more, let what is being answered be answered, then cut. Closing twice is fine."""
        self._stop_waiting()
        if self._loading is not None:
            if self._connections is None:
                self._loading.cancel()
            await asyncio.wait([self._loading])
        for listener in self._listeners:
            listener.close()
        self._port.close()
        if self._connections is not None:
            await self._connections.close()


def _load_connections(broker: Broker, host: str) -> Connections:
    from braid.admin.connections import Connections

    return Connections(broker, host)
