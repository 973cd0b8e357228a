"""TLS and users, with certificates made by openssl and a server that enforces both."""

from __future__ import annotations

import base64
import subprocess
from pathlib import Path

import pytest

from braid.metadata.etcd.store import EtcdStore, EtcdTls
from braid.metadata.history import watching
from braid.metadata.store import Put
from braid.model.errors import InvalidArgument, MetadataError, MetadataUnavailable
from braid.model.ids import Revision
from tests.kits.etcd_server import FAST_ELECTION, EtcdServer, etcd_server, run_test
from tests.kits.waiting import wait_until

pytestmark = pytest.mark.processes


class Authority:
    """A certificate authority and what it signed, in one folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self.ca = str(folder / f"{name}-ca.crt")
        self._ca_key = str(folder / f"{name}-ca.key")
        _openssl(
            "req", "-x509", *_NEW_KEY, "-days", "2", "-subj", f"/CN={name}", "-keyout", self._ca_key, "-out", self.ca
        )

    def sign(self, name: str) -> tuple[str, str]:
        """A certificate for `name` on the loopback address, and its key."""
        cert, key, request, extension = (str(self._folder / f"{name}.{end}") for end in ("crt", "key", "csr", "ext"))
        Path(extension).write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
        _openssl("req", *_NEW_KEY, "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        authority = ("-CA", self.ca, "-CAkey", self._ca_key, "-CAcreateserial")
        _openssl("x509", "-req", "-in", request, *authority, "-days", "2", "-extfile", extension, "-out", cert)
        return cert, key


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def test_tls_is_verified_in_both_directions(tmp_path: Path) -> None:
    ours, other = Authority(tmp_path, "ours"), Authority(tmp_path, "other")
    server_cert, server_key = ours.sign("server")
    cert, key = ours.sign("broker")
    options = ("--cert-file", server_cert, "--key-file", server_key, "--trusted-ca-file", ours.ca, "--client-cert-auth")

    async def run(address: str) -> None:
        store = await EtcdStore.open([address], tls=EtcdTls(ca=ours.ca, cert=cert, key=key))
        async with watching(store, "", Revision(0)) as watch:
            written = await store.txn([], [Put("/k", b"v")])
            assert (await anext(watch)).revision == written.revision
        await store.close()

        unknown_authority = EtcdTls(ca=other.ca, cert=cert, key=key)
        without_certificate = EtcdTls(ca=ours.ca)
        for tls in (unknown_authority, without_certificate, None):
            with pytest.raises(MetadataUnavailable):
                await EtcdStore.open([address], tls=tls, timeout_s=0.5)

    with etcd_server(*FAST_ELECTION, *options, scheme="https") as server:
        run_test(run(server.address))


def enable_users(server: EtcdServer) -> None:
    """A root user, which etcd insists on, and `braid`, which may use the keys below /braid/ and no others."""
    server.ask("auth/user/add", {"name": "root", "password": "root"})
    server.ask("auth/role/add", {"name": "root"})
    server.ask("auth/user/grant", {"user": "root", "role": "root"})
    server.ask("auth/user/add", {"name": "braid", "password": "secret"})
    server.ask("auth/role/add", {"name": "broker"})
    keys = {name: base64.b64encode(key).decode() for name, key in (("key", b"/braid/"), ("range_end", b"/braid0"))}
    server.ask("auth/role/grant", {"name": "broker", "perm": {"permType": "READWRITE", **keys}})
    server.ask("auth/user/grant", {"user": "braid", "role": "broker"})
    server.ask("auth/enable", {})


def test_a_user_gets_exactly_what_its_role_allows() -> None:
    async def run(address: str) -> None:
        store = await EtcdStore.open([address], user="braid", password="secret")
        async with watching(store, "", Revision(0)) as watch:
            lease = await store.grant_lease(10)
            written = await store.txn([], [Put("/k", b"v", lease.id)])
            assert (await anext(watch)).revision == written.revision
            await lease.renew()
            await lease.revoke()
            assert [event.value for event in (await anext(watch)).events] == [None]
        await store.close()
        with pytest.raises(InvalidArgument, match="authentication failed"):
            await EtcdStore.open([address], user="braid", password="wrong")
        with pytest.raises(MetadataError, match="does not permit"):
            await EtcdStore.open([address], user="braid", password="secret", key_prefix="/elsewhere")
        with pytest.raises(MetadataError, match="does not permit"):
            await EtcdStore.open([address])

    with etcd_server(*FAST_ELECTION) as server:
        enable_users(server)
        run_test(run(server.address))


def test_a_watch_that_is_not_permitted_raises_even_with_a_fresh_token() -> None:
    async def run(server: EtcdServer) -> None:
        store = await EtcdStore.open([server.address], user="braid", password="secret")
        token = server.ask("auth/authenticate", {"name": "root", "password": "root"})["token"]
        server.ask("auth/user/revoke", {"name": "braid", "role": "broker"}, token)
        async with watching(store, "", Revision(0)) as watch:
            with pytest.raises(MetadataError, match="does not permit"):
                await anext(watch)
        with pytest.raises(MetadataError, match="does not permit"):
            await store.get("/k")
        with pytest.raises(MetadataError, match="does not permit"):
            await store.txn([], [Put("/k", b"")])
        await store.close()

    with etcd_server(*FAST_ELECTION) as server:
        enable_users(server)
        run_test(run(server))


def test_an_expired_token_is_replaced_without_the_caller_noticing() -> None:
    async def run(server: EtcdServer) -> None:
        uses = ("txn", "watch", "get", "grant")
        stores = [await EtcdStore.open([server.address], user="braid", password="secret") for _ in uses]
        wait_until(lambda: server.log().count("deleted a simple token") >= len(uses), "their tokens expire")
        for use, store in zip(uses, stores):
            match use:
                case "txn":
                    assert (await store.txn([], [Put("/k", b"v")])).succeeded
                case "watch":
                    async with watching(store, "", Revision(0)) as watch:
                        assert [event.key for event in (await anext(watch)).events] == ["/k"]
                case "get":
                    assert await store.get("/k") is not None
                case "grant":
                    await (await store.grant_lease(5)).renew()
        for store in stores:
            await store.close()

    with etcd_server(*FAST_ELECTION, "--auth-token-ttl", "1") as server:
        enable_users(server)
        run_test(run(server))


def test_a_restarted_server_has_forgotten_the_token_and_an_open_watch_goes_on() -> None:
    async def run(server: EtcdServer) -> None:
        store = await EtcdStore.open([server.address], user="braid", password="secret")
        async with watching(store, "", Revision(0)) as watch:
            first = await store.txn([], [Put("/k", b"1")])
            assert (await anext(watch)).revision == first.revision
            server.kill()
            server.start()
            server.wait_until_healthy()
            assert await store.get("/k") is not None
            second = await store.txn([], [Put("/k", b"2")])
            assert (await anext(watch)).revision == second.revision
        await store.close()

    with etcd_server(*FAST_ELECTION) as server:
        enable_users(server)
        run_test(run(server))
