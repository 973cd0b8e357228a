"""Brokers on real sockets, with one SQLite file between them: they ask each other over TLS if they have it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from braid.broker.auth import ANONYMOUS
from braid.broker.broker import Broker
from braid.broker.config import BrokerConfig, BrokerTlsConfig
from braid.broker.connections.tls import peer_tls, server_tls
from braid.model.errors import ConnectFailed, InvalidConfig
from braid.ports.network import SocketNetwork
from tests.kits.tls_files import make_certificate

pytestmark = pytest.mark.real_loop


def tls_of(folder: Path, *, trusts: Path | None = None, asks_clients: bool = False) -> BrokerTlsConfig:
    folder.mkdir()
    certificate, key = make_certificate(folder)
    return BrokerTlsConfig(
        certificate=str(certificate),
        key=str(key),
        peer_ca=str(trusts or certificate),
        client_ca=str(certificate) if asks_clients else "",
    )


@contextlib.asynccontextmanager
async def running(folder: Path, name: str, tls: BrokerTlsConfig | None) -> AsyncIterator[Broker]:
    network = SocketNetwork(client_tls=peer_tls(tls), server_tls=server_tls(tls)) if tls is not None else None
    config = BrokerConfig(
        id=name,
        data=str(folder / name),
        listen="127.0.0.1:0",
        metadata=f"sqlite:{folder / 'metadata.db'}",
        tls=tls,
    )
    broker = await Broker.open(config, network=network)
    try:
        yield broker
    finally:
        await broker.close()


async def met(*brokers: Broker) -> None:
    async with asyncio.timeout(20):
        while any(len(broker.cluster.members.brokers) < len(brokers) for broker in brokers):  # noqa: ASYNC110 (nothing tells)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("secured", ["plain", "tls", "tls with certificates of clients"])
async def test_brokers_ask_each_other_for_the_segments_of_a_topic(tmp_path: Path, secured: str) -> None:
    tls = None
    if secured != "plain":
        tls = tls_of(tmp_path / "tls", asks_clients=secured != "tls")
    async with running(tmp_path, "a", tls) as a, running(tmp_path, "b", tls) as b:
        await met(a, b)
        await a.front_door.calls.call("create_topic", {"topic": "orders", "segments": 4}, ANONYMOUS)
        async with asyncio.timeout(20):
            while True:
                stats = await b.front_door.calls.call("topic_stats", {"topic": "orders"}, ANONYMOUS)
                if all(segment["unavailable"] is None for segment in stats["segments"].values()):
                    break
                await asyncio.sleep(0.01)
        assert {segment["owner"] for segment in stats["segments"].values()} == {"a", "b"}
        for broker, name in ((a, "billing"), (b, "audit")):
            arguments = {"topic": "orders", "subscription": name, "start": "earliest"}
            shown = await broker.front_door.calls.call("create_subscription", arguments, ANONYMOUS)
            assert len(shown["segments"]) == 4


async def test_a_broker_whose_certificate_is_not_trusted_is_asked_nothing(tmp_path: Path) -> None:
    good = tls_of(tmp_path / "good")
    bad = tls_of(tmp_path / "bad", trusts=Path(good.certificate))
    async with running(tmp_path, "a", good) as a, running(tmp_path, "b", bad) as b:
        await met(a, b)
        with pytest.raises(ConnectFailed, match="not trusted"):
            await a.cluster.peers.call("b", "report_topic", {})


def test_an_authority_that_cannot_be_read_is_said_at_start(tmp_path: Path) -> None:
    tls = tls_of(tmp_path / "tls", trusts=tmp_path / "nowhere.pem")
    with pytest.raises(InvalidConfig, match=r"nowhere\.pem"):
        peer_tls(tls)
