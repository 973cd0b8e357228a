"""What SIGHUP does: the broker reads its configuration again and takes over what can change while it runs.

That is the log level, the keys and grants of `[auth]`, and the certificates of `[tls]` and `[admin_tls]`. Everything
new is read and checked first; if anything is wrong, nothing changes. New certificates are for new connections. Clients
whose key or authority may not be trusted any more must connect again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from braid.broker.auth import Access
from braid.broker.connections.tls import peer_tls, server_tls, trusts_less
from braid.model.errors import BraidError, InvalidConfig, Unauthenticated
from braid.ports.network import SocketNetwork

if TYPE_CHECKING:
    from braid.admin.server import AdminServer
    from braid.broker.broker import Broker
    from braid.broker.config import BrokerConfig

RELOADED: Final = frozenset({"log_level", "auth", "tls", "admin_tls"})

_log: Final = logging.getLogger(__name__)


class Reload:
    def __init__(
        self, read: Callable[[], BrokerConfig], config: BrokerConfig, broker: Broker, admin: AdminServer
    ) -> None:
        """`read` reads the configuration as it is now; `config` is what it returned last."""
        self._read = read
        self._config = config
        self._broker = broker
        self._admin = admin
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self) -> None:
        """Start a reload; it follows one that is under way."""
        task = asyncio.get_running_loop().create_task(self._reload(), name="reload")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reload(self) -> None:
        async with self._turn:
            try:
                config = self._read()
                await self._take(config)
            except BraidError as error:
                _log.error("SIGHUP: the configuration is not reloaded, and nothing has changed: %s", error)
                return
            except OSError as error:
                _log.error("SIGHUP: the ports cannot be opened again: %s; send it again", error)
                return
            self._note(config)

    def _note(self, config: BrokerConfig) -> None:
        before, self._config = self._config, config
        late = [
            name
            for name in config.__struct_fields__
            if name not in RELOADED and getattr(before, name) != getattr(config, name)
        ]
        _log.warning("SIGHUP: log level, keys, grants and certificates are reloaded")
        if late:
            _log.warning("SIGHUP: %s changed too; start the broker again for that", ", ".join(late))

    async def _take(self, config: BrokerConfig) -> None:
        for section in ("auth", "tls", "admin_tls"):
            if (getattr(config, section) is None) != (getattr(self._config, section) is None):
                raise InvalidConfig(f"[{section}] was added or removed: start the broker again for that")
        access = Access(config.auth)
        tls = (peer_tls(config.tls), server_tls(config.tls)) if config.tls is not None else None
        admin_tls = server_tls(config.admin_tls) if config.admin_tls is not None else None
        # Everything is known to be good from here on.
        network, server = self._broker.resources.network, self._broker.front_door.server
        if tls is not None and isinstance(network, SocketNetwork):
            before = network.server_tls
            await network.renew(client_tls=tls[0], server_tls=tls[1])
            if before is not None and trusts_less(tls[1], before):
                server.end_clients(Unauthenticated("the broker trusts other authorities now: connect again"))
        if admin_tls is not None:
            await self._admin.renew(admin_tls)
        if self._broker.front_door.access.take(access):
            server.end_clients(Unauthenticated("the key by which tokens are checked has changed: connect again"))
        logging.getLogger().setLevel(config.log_level.upper())
