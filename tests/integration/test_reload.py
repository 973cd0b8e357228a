"""SIGHUP: the broker takes over new certificates, keys and its log level, and goes on."""

from __future__ import annotations

import contextlib
import signal
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jwt
import msgspec
import pytest

from braid.model.errors import Unauthenticated
from braid.wire.operations import HelloReply, Kind
from tests.kits.raw_client import HELLO, RawClient, WatchedBroker, tracebacks
from tests.kits.tls_files import make_certificate
from tests.kits.waiting import wait_until

pytestmark = pytest.mark.processes

OLD, NEW = "the old secret: at least 32 bytes", "the new secret: at least 32 bytes"


def token(secret: str) -> str:
    return jwt.encode({"sub": "ann"}, secret, "HS256")


def settings(folder: Path) -> dict[str, Any]:
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    tls = {"certificate": str(certificate), "key": str(key)}
    return {
        "log_level": "warning",
        "tls": {**tls, "peer_ca": str(certificate)},
        "admin_tls": tls,
        "auth": {"secret_file": str(folder / "secret"), "superusers": ["ann"]},
    }


def settings_with_clients(folder: Path) -> dict[str, Any]:
    """Clients must show a certificate that an authority of `clients.pem` has signed."""
    found = settings(folder)
    for port in ("tls", "admin_tls"):
        found[port] = {**found[port], "client_ca": str(folder / "clients.pem")}
    return found


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[WatchedBroker]:
    make_certificate(tmp_path)
    (tmp_path / "secret").write_text(OLD)
    with WatchedBroker(tmp_path, **settings(tmp_path)) as broker:
        yield broker
        assert tracebacks(broker.log) == []
        broker.end()


@contextlib.contextmanager
def connected(broker: WatchedBroker, secret: str, folder: Path | None = None) -> Iterator[RawClient]:
    """Trusts the certificate that lies in the file now, and shows the one in `folder`."""
    client = RawClient(broker.address, hello=False)
    context = ssl.create_default_context(cafile=str(broker.data.parent / "certificate.pem"))
    if folder is not None:
        context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    client.socket = context.wrap_socket(client.socket, server_hostname="127.0.0.1")
    with client:
        client.ask(Kind.HELLO, msgspec.structs.replace(HELLO, token=token(secret)), HelloReply)
        yield client


def admin_certificate(broker: WatchedBroker) -> str:
    url = urlsplit(broker.ready["adminUrl"])
    assert url.hostname is not None
    assert url.port is not None
    return ssl.get_server_certificate((url.hostname, url.port))


def hang_up(broker: WatchedBroker, expected: str) -> None:
    before = broker.log.count(expected)
    broker.signal(signal.SIGHUP)
    wait_until(lambda: broker.log.count(expected) > before, expected)


def test_a_broker_takes_over_new_files_when_it_is_told_to_and_keeps_the_old_ones_if_they_are_wrong(
    broker: WatchedBroker, tmp_path: Path
) -> None:
    first = (tmp_path / "certificate.pem").read_text()
    assert admin_certificate(broker) == first
    with connected(broker, OLD) as client:
        (tmp_path / "certificate.pem").write_text("no certificate")
        hang_up(broker, "nothing has changed")
        assert admin_certificate(broker) == first
        client.ping()
        make_certificate(tmp_path)
        (tmp_path / "secret").write_text(NEW)
        hang_up(broker, "are reloaded")
        second = (tmp_path / "certificate.pem").read_text()
        assert second != first
        assert admin_certificate(broker) == second
        reason = client.ended_with()
        assert isinstance(reason, Unauthenticated)
        assert "has changed" in str(reason)
    with pytest.raises(Unauthenticated), connected(broker, OLD):
        pass
    with connected(broker, NEW) as client:
        config = tmp_path / "broker.toml"
        config.write_text(config.read_text().replace('"warning"', '"info"\ncache_bytes = 1000000'))
        assert "ann created topic" not in broker.log
        hang_up(broker, "cache_bytes changed too")
        client.admin("create_topic", topic="orders")
        assert "ann created topic" in broker.log


def let_in(broker: WatchedBroker, folder: Path, port: int) -> bool:
    """Whether a client with the certificate of this folder is let in."""
    context = ssl.create_default_context(cafile=str(broker.data.parent / "certificate.pem"))
    context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    with socket.create_connection(("127.0.0.1", port), timeout=20) as plain:
        try:
            with context.wrap_socket(plain, server_hostname="127.0.0.1") as secure:
                secure.sendall(b"no protocol at all\r\n\r\n")
                return bool(secure.recv(1))  # With TLS 1.3, the client hears only here that it was refused.
        except (ssl.SSLError, ConnectionResetError):
            return False


def test_an_authority_that_was_removed_is_not_trusted_any_more(tmp_path: Path) -> None:
    make_certificate(tmp_path)
    (tmp_path / "secret").write_text(OLD)
    folders = [tmp_path / "kept", tmp_path / "removed"]
    for folder in folders:
        folder.mkdir()
        make_certificate(folder, folder.name)
    kept, removed = ((folder / "certificate.pem").read_text() for folder in folders)
    (tmp_path / "clients.pem").write_text(kept + removed)
    with WatchedBroker(tmp_path, **settings_with_clients(tmp_path)) as broker:
        admin = urlsplit(broker.ready["adminUrl"]).port
        assert admin is not None
        ports = (broker.address.port, admin)
        assert [let_in(broker, folder, port) for folder in folders for port in ports] == [True] * 4
        with connected(broker, OLD, folders[1]) as client:
            (tmp_path / "clients.pem").write_text(kept)
            hang_up(broker, "are reloaded")
            assert isinstance(client.ended_with(), Unauthenticated)
        assert [let_in(broker, folder, port) for folder in folders for port in ports] == [True, True, False, False]
        with connected(broker, OLD, folders[0]) as client:
            client.ping()
            (tmp_path / "clients.pem").write_text(kept + removed)
            hang_up(broker, "are reloaded")
            client.ping()
        assert let_in(broker, folders[1], ports[0])
        assert tracebacks(broker.log) == []
        broker.end()
