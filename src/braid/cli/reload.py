"""What SIGHUP does: the broker reads its configuration again and takes over what can change while it runs.

That is the log level, the keys and grants of `[auth]`, and the certificates of `[tls]` and `[admin_tls]`. Everything
new is read and checked first; if anything is wrong, nothing changes. New certificates are for new connections.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from braid.broker.auth import Access
from braid.broker.connections.tls import peer_tls, renew_tls, server_tls
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

    def __call__(self) -> None:
        try:
            config = self._read()
            self._take(config)
        except BraidError as error:
            _log.error("SIGHUP: the configuration is not reloaded, and nothing has changed: %s", error)
            return
        before, self._config = self._config, config
        late = [
            name
            for name in config.__struct_fields__
            if name not in RELOADED and getattr(before, name) != getattr(config, name)
        ]
        _log.warning("SIGHUP: log level, keys, grants and certificates are reloaded")
        if late:
            _log.warning("SIGHUP: %s changed too; start the broker again for that", ", ".join(late))

    def _take(self, config: BrokerConfig) -> None:
        for section in ("auth", "tls", "admin_tls"):
            if (getattr(config, section) is None) != (getattr(self._config, section) is None):
                raise InvalidConfig(f"[{section}] was added or removed: start the broker again for that")
        access = Access(config.auth)
        tls_to_peers = peer_tls(config.tls) if config.tls is not None else None
        for tls in (config.tls, config.admin_tls):
            if tls is not None:
                server_tls(tls)
        # Everything is known to be good from here on.
        network = self._broker.resources.network
        if config.tls is not None and isinstance(network, SocketNetwork):
            assert network.server_tls is not None
            network.client_tls = tls_to_peers
            renew_tls(network.server_tls, config.tls)
        if config.admin_tls is not None:
            assert self._admin.tls is not None
            renew_tls(self._admin.tls, config.admin_tls)
        if self._broker.front_door.access.take(access):
            changed = Unauthenticated("the key by which tokens are checked has changed: connect again")
            self._broker.front_door.server.end_clients(changed)
        logging.getLogger().setLevel(config.log_level.upper())
