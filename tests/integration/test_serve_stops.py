"""How `braid serve` ends: in order when it is told to, with exit code 1 when its broker has broken."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from braid.admin.port import AdminPort
from braid.admin.server import AdminServer
from braid.broker.auth import ANONYMOUS
from braid.broker.broker import Broker
from braid.broker.config import BrokerConfig, TlsConfig
from braid.broker.connections.tls import server_tls
from braid.cli.commands.serve import serve_until
from braid.metadata import paths
from braid.metadata.lease import HeldLease
from braid.metadata.memory import MemoryStore
from braid.metadata.store import Condition, Operation, Put, TxnResult
from braid.model.errors import InvalidConfig
from braid.ports.clock import SystemClock
from braid.ports.network import Address
from tests.kits.tls_files import make_certificate
from tests.kits.waiting import until

TOPICS = "/admin/v2/scalable/public/default"
WAIT_S = 30.0


class Store(MemoryStore):
    """Its writes can be held up; and it can break where nobody expects it."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.held: asyncio.Event | None = None
        """Writes about topics wait for it."""
        self.waiting = asyncio.Event()
        self.leases: list[HeldLease] = []
        self.broken = False

    async def txn(self, conditions: Sequence[Condition], operations: Sequence[Operation]) -> TxnResult:
        about_topics = any(isinstance(each, Put) and each.key.startswith(paths.TOPICS_PREFIX) for each in operations)
        if self.held is not None and about_topics:
            self.waiting.set()
            await self.held.wait()
        return await super().txn(conditions, operations)

    async def grant_lease(self, ttl_s: float) -> HeldLease:
        if self.broken:
            raise LookupError("a bug")
        self.leases.append(await super().grant_lease(ttl_s))
        return self.leases[-1]


async def started(folder: Path, store: Store, tls: ssl.SSLContext | None = None) -> tuple[Broker, AdminServer]:
    port = AdminPort.take(Address("127.0.0.1", 0))
    config = BrokerConfig(
        data=str(folder / "data"), listen="127.0.0.1:0", admin=str(port.address), lease_ttl_s=2, spare_files=0
    )
    broker = await Broker.open(config, store=store)
    return broker, AdminServer(broker, port, tls)


async def ask(admin: AdminServer, method: str, path: str) -> tuple[int, Any]:
    reader, writer = await asyncio.open_connection(*admin.address)
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: {admin.address}\r\nConnection: close\r\n\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), json.loads(body)


def test_while_it_stops_it_says_that_it_is_not_ready_and_ends_what_was_asked_before(tmp_path: Path) -> None:
    async def main() -> None:
        store = Store()
        broker, admin = await started(tmp_path, store)
        assert await ask(admin, "GET", "/readyz") == (200, {"status": "ready"})
        store.held = asyncio.Event()
        stop = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(serve_until(stop, broker, admin))
        asked_before = asyncio.create_task(ask(admin, "PUT", f"{TOPICS}/orders"))
        await store.waiting.wait()
        stop.set_result(None)
        while not broker.closing:  # noqa: ASYNC110 — nothing tells
            await asyncio.sleep(0.001)

        status, body = await ask(admin, "GET", "/readyz")
        assert (status, body["code"]) == (503, "not-ready")
        status, body = await ask(admin, "GET", TOPICS)
        assert (status, body["code"]) == (503, "shutting-down")
        assert (await ask(admin, "GET", "/healthz"))[0] == 200

        assert not serving.done()
        store.held.set()
        assert (await asked_before)[0] == 201
        assert await serving == 0
        with pytest.raises(ConnectionRefusedError):
            await ask(admin, "GET", "/readyz")

    asyncio.run(asyncio.wait_for(main(), WAIT_S))


def test_it_ends_with_exit_code_1_when_the_watch_over_its_lease_breaks(tmp_path: Path) -> None:
    async def main() -> None:
        store = Store()
        broker, admin = await started(tmp_path, store)
        store.broken = True
        await store.revoke_lease(store.leases[0].id)
        assert await serve_until(asyncio.get_running_loop().create_future(), broker, admin) == 1
        assert isinstance(broker.failed.result(), LookupError)
        with pytest.raises(ConnectionRefusedError):
            await ask(admin, "GET", "/healthz")

    asyncio.run(asyncio.wait_for(main(), WAIT_S))


def test_it_ends_with_exit_code_1_when_what_broke_also_keeps_it_from_stopping_in_order(tmp_path: Path) -> None:
    async def main() -> None:
        broker, admin = await started(tmp_path, Store())

        def broken(path: str) -> None:
            raise LookupError(path)

        broker.topics.on_change.append(broken)
        await broker.front_door.calls.call("create_topic", {"topic": "orders"}, ANONYMOUS)
        assert await serve_until(asyncio.get_running_loop().create_future(), broker, admin) == 1

    asyncio.run(asyncio.wait_for(main(), WAIT_S))


# The admin port.


def refuses(admin: AdminServer) -> bool:
    try:
        socket.create_connection(admin.address).close()
    except ConnectionRefusedError:
        return True
    return False


def test_it_stops_in_order_though_a_client_has_just_made_the_admin_port_load(tmp_path: Path) -> None:
    async def main() -> None:
        broker, admin = await started(tmp_path, Store())
        stop = asyncio.get_running_loop().create_future()
        stop.set_result(None)
        with socket.create_connection(admin.address):
            assert await serve_until(stop, broker, admin) == 0
        assert refuses(admin)
        await admin.close()

    asyncio.run(asyncio.wait_for(main(), WAIT_S))


def test_certificates_that_are_renewed_while_the_admin_port_loads_are_shown(tmp_path: Path) -> None:
    contexts: list[ssl.SSLContext] = []
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        certificate, key = make_certificate(tmp_path / name)
        contexts.append(server_tls(TlsConfig(certificate=str(certificate), key=str(key))))
    old, new = contexts

    async def main() -> None:
        broker, admin = await started(tmp_path, Store(), tls=old)
        with socket.create_connection(admin.address):
            # Then it listens, in one iteration of the loop for each socket.
            while admin._connections is None:  # noqa: ASYNC110 — nothing tells
                await asyncio.sleep(0)
            await admin.renew(new)
        shown = await asyncio.to_thread(ssl.get_server_certificate, admin.address)
        assert shown == (tmp_path / "new" / "certificate.pem").read_text()
        await broker.close()
        await admin.close()

    asyncio.run(asyncio.wait_for(main(), WAIT_S))


def test_an_admin_port_that_cannot_load_is_closed_and_the_broker_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "braid.admin.connections", None)

    async def main() -> None:
        broker, admin = await started(tmp_path, Store())
        with socket.create_connection(admin.address):
            await until(lambda: refuses(admin))
        assert broker.ready
        await broker.close()
        await admin.close()

    asyncio.run(asyncio.wait_for(main(), WAIT_S))
    assert [each.message for each in caplog.records if each.levelname == "ERROR"] == [
        "the admin port cannot answer, and is closed"
    ]


def test_any_free_admin_port_is_one_and_belongs_to_whoever_took_it_first() -> None:
    port = AdminPort.take(Address("127.0.0.1", 0))
    try:
        assert port.address.port > 0
        with pytest.raises(InvalidConfig, match=rf"cannot listen on {port.address} for admin: Address already in use"):
            AdminPort.take(port.address)
    finally:
        port.close()
    AdminPort.take(port.address).close()


def test_a_host_that_is_none_of_this_machine_is_no_admin_port() -> None:
    unknown = r"cannot listen on no\.such\.host\.invalid:0 for admin: the host name .+ cannot be resolved"
    with pytest.raises(InvalidConfig, match=unknown):
        AdminPort.take(Address("no.such.host.invalid", 0))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InvalidConfig, match="is another broker running"):
            AdminPort.take(Address("127.0.0.1", taken.getsockname()[1]))
