"""The console's state: who is logged in, one watch for each token, one client for each token."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import ssl
import time
from typing import TYPE_CHECKING, Final

import httpx
from msgspec import Struct

from braid.client.client import connect
from braid.console.rest import API, Rest, RestError
from braid.console.sessions import Sessions
from braid.console.watch.cluster_watch import ClusterWatch

if TYPE_CHECKING:
    from braid.client.client import Client

KEEP_S: Final = 1_800.0
"""A watch that no page has used for so long ends, but for the one without a token: it keeps the braids' history."""
MAX_WATCHES: Final = 64
CLIENT_TIMEOUT_S: Final = 15.0

_log: Final = logging.getLogger(__name__)


class ConsoleConfig(Struct, frozen=True, kw_only=True):
    admin_urls: tuple[str, ...]
    """Admin ports of brokers; the others are found."""
    url: str = ""
    """Where clients connect; empty: where the brokers say."""
    tls_ca: str = ""
    host: str = "127.0.0.1"
    port: int = 8670
    allowed_hosts: tuple[str, ...] = ()
    """Names, beside addresses, by which browsers may call this console."""
    read_only: bool = False
    reports_topic: str = "braid-reports"
    secure_cookies: bool = False
    """Whether browsers reach the console by HTTPS, through a proxy."""


class Console:
    def __init__(self, config: ConsoleConfig) -> None:
        self.config: Final = config
        self.sessions: Final = Sessions()
        verify = ssl.create_default_context(cafile=config.tls_ca) if config.tls_ca else True
        self._http = httpx.AsyncClient(verify=verify, trust_env=False, limits=httpx.Limits(max_connections=100))
        self._watches: dict[str, ClusterWatch] = {}
        self._clients: dict[str, Client] = {}
        self._reaper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.watch("").start()
        self._reaper = asyncio.get_running_loop().create_task(self._reap(), name="end unused watches")

    async def close(self) -> None:
        if self._reaper is not None:
            self._reaper.cancel()
            await asyncio.wait([self._reaper])
        for watch in self._watches.values():
            await watch.close()
        for client in self._clients.values():
            with contextlib.suppress(Exception):
                await client.abandon()
        await self._http.aclose()

    def rest(self, token: str) -> Rest:
        return Rest(self._http, self.config.admin_urls, token)

    async def requires_login(self) -> bool:
        """Tell whether brokers want tokens. Nobody knows while none of them answers; there is nothing to show then."""
        try:
            await self.rest("").get(f"{API}/scalable/public/default")
        except RestError as error:
            return error.status == 401
        return False

    async def accepts(self, token: str) -> str | None:
        """Return why brokers refuse a token; None if they take it."""
        if not token.isascii():
            return "That is no token: it has characters that no token has."
        try:
            await self.rest(token).get(f"{API}/scalable/public/default")
        except RestError as error:
            return None if error.status == 403 else str(error)
        return None

    def watch(self, token: str) -> ClusterWatch:
        """Return the watch of everybody who has this token. It runs from now on."""
        key = hashlib.sha256(token.encode()).hexdigest()
        found = self._watches.get(key)
        if found is None:
            found = self._watches[key] = ClusterWatch(self.rest(token))
            found.start()
        found.last_used = time.monotonic()
        return found

    def client(self, token: str) -> Client:
        """Return a client for records. It connects when it is used."""
        key = hashlib.sha256(token.encode()).hexdigest()
        found = self._clients.get(key)
        if found is None:
            url = self.config.url or self._url_of(self.watch(token))
            found = self._clients[key] = connect(
                url, token=token, tls=self.config.tls_ca or None, timeout=CLIENT_TIMEOUT_S, name="braid-console"
            )
        return found

    def _url_of(self, watch: ClusterWatch) -> str:
        addresses = [each.address for each in watch.view.brokers if each.address and each.up]
        return f"braid://{','.join(addresses)}" if addresses else "braid://127.0.0.1:6660"

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(60)
            now = time.monotonic()
            own = hashlib.sha256(b"").hexdigest()
            by_age = sorted(self._watches.items(), key=lambda item: item[1].last_used)
            excess = len(by_age) - MAX_WATCHES
            for number, (key, watch) in enumerate(by_age):
                if key != own and not watch.watched and (number < excess or now - watch.last_used > KEEP_S):
                    del self._watches[key]
                    await watch.close()
                    if (client := self._clients.pop(key, None)) is not None:
                        await client.abandon()
