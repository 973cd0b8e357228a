"""Connections to a broker that talks TLS, by peers that do not."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import braid
from braid.broker.broker import Broker
from braid.broker.config import BrokerConfig, BrokerTlsConfig, Limits
from braid.ports import network
from tests.kits.tls_files import make_certificate
from tests.kits.waiting import until

pytestmark = pytest.mark.real_loop


TIMEOUT_S = 30.0


@asynccontextmanager
async def a_broker(folder: Path) -> AsyncIterator[Broker]:
    certificate, key = make_certificate(folder)
    config = BrokerConfig(
        data=str(folder / "data"),
        listen="127.0.0.1:0",
        tls=BrokerTlsConfig(certificate=str(certificate), key=str(key)),
        limits=Limits(hello_timeout_s=3_600),
    )
    broker = await Broker.open(config)
    try:
        yield broker
    finally:
        await broker.close()


async def test_a_failed_handshake_is_no_connection_any_more(tmp_path: Path) -> None:
    """Long before the time that a client has for its hello."""
    async with a_broker(tmp_path) as broker:
        reader, writer = await asyncio.open_connection(*broker.address)
        await until(lambda: broker.metrics.connections == 1)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await until(lambda: broker.metrics.connections == 0)
        await reader.read()
        writer.close()
        # A client that does not trust the certificate.
        with pytest.raises(ssl.SSLError):
            await asyncio.open_connection(*broker.address, ssl=ssl.create_default_context())
        await until(lambda: broker.metrics.connections_total == 2 and broker.metrics.connections == 0)
        # One that goes away in the middle.
        _, writer = await asyncio.open_connection(*broker.address)
        await until(lambda: broker.metrics.connections == 1)
        writer.close()
        await until(lambda: broker.metrics.connections == 0)
        assert broker.ready


async def test_a_client_that_never_begins_its_handshake_loses_its_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "TLS_HANDSHAKE_S", 0.05)
    async with a_broker(tmp_path) as broker:
        reader, writer = await asyncio.open_connection(*broker.address)
        async with asyncio.timeout(TIMEOUT_S):
            assert await reader.read() == b""
        await until(lambda: broker.metrics.connections == 0)
        writer.close()


async def test_clients_that_talk_tls_are_counted_as_long_as_they_are_connected(tmp_path: Path) -> None:
    async with a_broker(tmp_path) as broker:
        url = f"braid://127.0.0.1:{broker.address.port}"
        async with braid.connect(url, tls=str(tmp_path / "certificate.pem")) as client:
            assert await client.admin.list_topics() == []
            assert broker.metrics.connections == 1
        await until(lambda: broker.metrics.connections == 0)
