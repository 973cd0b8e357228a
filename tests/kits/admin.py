"""A broker with its admin port, in a thread of its own, and plain HTTP requests to it."""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
import threading
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from braid.admin.port import AdminPort
from braid.admin.server import AdminServer
from braid.broker.broker import Broker
from braid.broker.config import BrokerConfig
from braid.broker.connections.tls import server_tls
from braid.ports.network import Address

T = TypeVar("T")

TOPICS = "/admin/v2/scalable/public/default"
ORDERS = f"{TOPICS}/orders"


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        assert self.headers["content-type"].startswith("application/json"), self
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The code of an error, whose body must be as promised."""
        body = self.json
        assert body.keys() == {"code", "message", "retriable"}
        assert isinstance(body["message"], str)
        assert body["message"]
        assert isinstance(body["retriable"], bool)
        code = body["code"]
        assert isinstance(code, str)
        return code


class AdminBroker:
    def __init__(self, loop: asyncio.AbstractEventLoop, broker: Broker, admin: AdminServer, tls: bool) -> None:
        self.broker = broker
        self.admin = admin
        self.address = admin.address
        self.url = f"{'https' if tls else 'http'}://{admin.address.host}:{admin.address.port}"
        self._loop = loop
        self._tls = tls

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something on the broker's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        raw: bytes | Iterator[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        token: str = "",
        trust: ssl.SSLContext | None = None,
    ) -> Answer:
        if self._tls:
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                *self.address, context=trust, timeout=20
            )
        else:
            connection = http.client.HTTPConnection(*self.address, timeout=20)
        given = dict(headers or {})
        if token:
            given["Authorization"] = f"Bearer {token}"
        if body is not None:
            raw = json.dumps(body).encode()
            given.setdefault("Content-Type", "application/json")
        try:
            connection.request(method, path, raw, given)
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()


@contextmanager
def admin_broker(folder: Path, config: BrokerConfig | None = None, **settings: Any) -> Iterator[AdminBroker]:
    """A real broker on free ports, its data in `folder`."""
    config = config or BrokerConfig(data=str(folder / "data"), listen="127.0.0.1:0", admin="127.0.0.1:0", **settings)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="broker")
    thread.start()

    def run(work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    async def open_all() -> tuple[Broker, AdminServer]:
        port = AdminPort.take(Address("127.0.0.1", 0))
        broker = await Broker.open(msgspec.structs.replace(config, admin=str(port.address)))
        tls = server_tls(config.admin_tls) if config.admin_tls is not None else None
        return broker, AdminServer(broker, port, tls)

    try:
        broker, admin = run(open_all())
        try:
            yield AdminBroker(loop, broker, admin, config.admin_tls is not None)
        finally:
            run(broker.close())
            run(admin.close())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
