"""Tokens, TLS, and the end of the interface."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest

from braid.broker.config import AuthConfig, Grant, TlsConfig
from braid.model.errors import NotServing
from tests.kits.admin import ORDERS, TOPICS, AdminBroker, admin_broker
from tests.kits.tls_files import make_certificate

SECRET = "correct horse battery staple, and then some"


# Tokens and TLS.


def token(**claims: Any) -> str:
    return jwt.encode({"sub": "ann", **claims}, SECRET, "HS256")


@pytest.fixture(name="guarded", scope="module")
def _guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminBroker]:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "secret").write_text(SECRET)
    auth = AuthConfig(
        secret_file=str(folder / "secret"),
        superusers=("root",),
        grants=(Grant(role="shop", on="public/shop", allow=("admin",)),),
    )
    with admin_broker(folder, auth=auth) as broker:
        yield broker


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer not-a-token"},
        {"Authorization": "Basic YW5uOmFubg=="},
        {"Authorization": f"Bearer {token(exp=1)}"},
        {"Authorization": f"Bearer {jwt.encode({'sub': 'ann'}, 'another secret of at least 32 bytes', 'HS256')}"},
    ],
    ids=["nothing", "empty", "garbage", "basic", "expired", "forged"],
)
@pytest.mark.parametrize("path", [TOPICS, "/metrics", "/admin/v2/nothing", "/nothing", f"{TOPICS}?x=1"])
def test_without_a_valid_token_nothing_is_told(guarded: AdminBroker, path: str, headers: dict[str, str]) -> None:
    answer = guarded.ask("GET", path, headers=headers)
    assert (answer.status, answer.error) == (401, "unauthenticated")
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert headers.get("Authorization", "nothing").split()[-1].encode() not in answer.body


def test_what_says_nothing_about_data_is_open(guarded: AdminBroker) -> None:
    for path in ("/healthz", "/readyz", "/", "/docs", "/docs/swagger-ui.css", "/openapi.json"):
        assert guarded.ask("GET", path).status == 200


def test_grants_decide_what_a_token_may_do(guarded: AdminBroker) -> None:
    shop, orders = token(roles=["shop"]), "/admin/v2/scalable/public/shop/orders"
    assert guarded.ask("PUT", orders, token=shop).status == 201
    assert guarded.ask("GET", orders, token=shop).status == 200
    for method, path in (("PUT", ORDERS), ("GET", "/admin/v2/brokers"), ("GET", "/admin/v2/topology")):
        answer = guarded.ask(method, path, token=shop)
        assert (answer.status, answer.error) == (403, "permission-denied")
    assert guarded.ask("GET", "/admin/v2/scalable/public/shop", token=shop).json == ["topic://public/shop/orders"]
    assert guarded.ask("GET", "/admin/v2/scalable/public/shop", token=token(roles=["other"])).json == []
    assert guarded.ask("GET", "/admin/v2/brokers", token=token(roles=["root"])).status == 200
    assert guarded.ask("GET", "/metrics", token=token(roles=["nothing"])).status == 200
    assert guarded.ask("DELETE", orders, token=shop).status == 204


def test_the_document_says_that_tokens_are_wanted(guarded: AdminBroker) -> None:
    document = guarded.ask("GET", "/openapi.json").json
    assert document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    assert document["paths"]["/admin/v2/brokers"]["get"]["security"] == [{"token": []}]
    assert "security" not in document["paths"]["/healthz"]["get"]


def test_the_admin_port_speaks_tls(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    tls = TlsConfig(certificate=str(certificate), key=str(key))
    with admin_broker(tmp_path, admin_tls=tls) as broker:
        trust = ssl.create_default_context(cafile=str(certificate))
        assert broker.ask("GET", "/readyz", trust=trust).status == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            broker.ask("GET", "/readyz", trust=ssl.create_default_context())
        with socket.create_connection(broker.address, timeout=20) as plain:
            plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert not plain.recv(1 << 16).startswith(b"HTTP/1.1 200")


# Stopping.


def test_closing_lets_a_running_request_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with admin_broker(tmp_path) as broker:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def slow(*_: Any) -> Any:
            begun.set()
            await go_on.wait()
            raise NotServing("later")

        monkeypatch.setattr(broker.broker.front_door.calls, "call", slow)
        with socket.create_connection(broker.address, timeout=20) as connection:
            connection.sendall(f"GET {TOPICS} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())

            async def close() -> None:
                await begun.wait()
                closing = asyncio.ensure_future(broker.admin.close())
                await asyncio.sleep(0.1)
                assert not closing.done()
                go_on.set()
                await closing

            broker.run(close())
            answer = b""
            while piece := connection.recv(1 << 16):
                answer += piece
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"not-serving" in answer
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(broker.address, timeout=20)


def test_an_idle_admin_port_does_not_wake_up(broker: AdminBroker) -> None:
    async def timers() -> list[str]:
        waiting: Any = asyncio.get_running_loop()
        return [text for handle in waiting._scheduled if "uvicorn" in (text := repr(handle)) or "admin" in text]

    broker.ask("GET", "/healthz")
    deadline = time.monotonic() + 20
    while broker.run(timers()) and time.monotonic() < deadline:
        time.sleep(0.01)  # asyncio forgets cancelled timers when it gets round to it
    assert broker.run(timers()) == []
