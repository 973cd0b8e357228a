"""What the conformance suite cannot ask of every store: prefixes, pages, fragments, restarts of the one server."""

from __future__ import annotations

import asyncio
import itertools
import uuid

import pytest

from braid.metadata.etcd.store import PAGE_KEYS, EtcdStore, EtcdTls
from braid.metadata.history import watching
from braid.metadata.store import Compare, Put
from braid.model.errors import (
    InvalidArgument,
    MetadataCompacted,
    MetadataUnavailable,
)
from braid.model.ids import Revision
from tests.kits.etcd_server import FAST_ELECTION, etcd_server, free_ports, run_test, shared_etcd_server

pytestmark = pytest.mark.processes


async def open_shared(key_prefix: str | None = None) -> EtcdStore:
    return await EtcdStore.open([shared_etcd_server().address], key_prefix=key_prefix or f"/test/{uuid.uuid4().hex}")


async def put(store: EtcdStore, key: str, value: bytes) -> Revision:
    result = await store.txn([], [Put(key, value)])
    assert result.succeeded
    return result.revision


def test_clusters_with_different_prefixes_do_not_see_each_other() -> None:
    async def run() -> None:
        name = f"/test/{uuid.uuid4().hex}"
        one, two = await open_shared(name), await open_shared(name + "2")
        start = (await one.list("")).revision
        await put(two, "/k", b"two")
        assert await one.get("/k") is None
        assert (await one.list("")).entries == ()
        async with watching(one, "", start) as watch:
            await put(one, "/k", b"one")
            assert [event.value for event in (await anext(watch)).events] == [b"one"]
        await one.close()
        await two.close()

    run_test(run())


def test_a_listing_of_several_pages_shows_one_revision_while_others_write() -> None:
    async def run() -> None:
        reader, writer = await open_shared(name := f"/test/{uuid.uuid4().hex}"), await open_shared(name)
        keys = [f"/k{number:05}" for number in range(2 * PAGE_KEYS + 10)]
        for start in range(0, len(keys), 100):
            await writer.txn([], [Put(key, b"") for key in keys[start : start + 100]])
        done = asyncio.Event()

        async def rewrite_first_and_last() -> None:
            for number in itertools.count():
                await writer.txn([], [Put(keys[0], b"%d" % number), Put(keys[-1], b"%d" % number)])
                if done.is_set():
                    return

        writing = asyncio.create_task(rewrite_first_and_last())
        revisions: set[Revision] = set()
        while len(revisions) < 10:
            listing = await reader.list("/k")
            assert [entry.key for entry in listing.entries] == keys
            assert listing.entries[0].value == listing.entries[-1].value
            assert max(entry.revision for entry in listing.entries) <= listing.revision
            revisions.add(listing.revision)
        done.set()
        await writing
        await reader.close()
        await writer.close()

    run_test(run())


def test_a_transaction_is_delivered_whole_when_etcd_fragments_its_responses() -> None:
    async def run() -> None:
        store = await open_shared()
        start = (await store.list("")).revision
        blob = b"x" * 400_000
        written = [
            (await store.txn([], [Put(key, blob) for key in ("/a", "/b", "/c")])).revision for _ in range(8)
        ]  # 9.6 MB: a reader that is behind gets them in several fragments
        async with watching(store, "", start) as watch:
            seen = [await anext(watch) for _ in written]
        assert [changes.revision for changes in seen] == written
        assert all([event.key for event in changes.events] == ["/a", "/b", "/c"] for changes in seen)
        await store.close()

    run_test(run())


def test_a_reader_that_is_slower_than_the_writer_still_gets_every_revision() -> None:
    async def run() -> None:
        store = await open_shared()
        async with watching(store, "", (await store.list("")).revision) as watch:
            first = await put(store, "/k", b"0")
            assert (await anext(watch)).revision == first
            written = [await put(store, "/k", b"x" * 10_000) for _ in range(500)]
            assert [(await anext(watch)).revision for _ in written] == written
        await store.close()

    run_test(run())


def test_a_watch_of_a_compacted_revision_says_so() -> None:
    async def run() -> None:
        store = await open_shared()
        start = await put(store, "/k", b"1")
        await put(store, "/k", b"2")
        shared_etcd_server().compact()
        async with watching(store, "", start) as watch:
            with pytest.raises(MetadataCompacted, match="list the prefix again"):
                await anext(watch)
        async with watching(store, "", (await store.list("")).revision) as watch:
            latest = await put(store, "/k", b"3")
            assert (await anext(watch)).revision == latest
        await store.close()

    run_test(run())


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_watch_and_a_lease_survive_a_restart_of_the_server(how: str) -> None:
    async def run() -> None:
        with etcd_server(*FAST_ELECTION) as server:
            store = await EtcdStore.open([server.address])
            lease = await store.grant_lease(30)
            async with watching(store, "", Revision(0)) as watch:
                first = await store.txn([], [Put("/k", b"1", lease.id)])
                assert (await anext(watch)).revision == first.revision
                waiting = asyncio.ensure_future(anext(watch))
                getattr(server, how)()
                server.start()
                server.wait_until_healthy()
                # The process just started: its first answer may need a new connection, which reads wait for.
                entry = await store.get("/k")
                assert entry is not None
                assert entry.value == b"1"
                deadline = lease.deadline
                await lease.renew()
                assert lease.deadline > deadline
                second = await store.txn([Compare("/k", first.revision)], [Put("/k", b"2")])
                assert (await waiting).revision == second.revision
            await store.close()

    run_test(run())


def test_a_watch_of_a_closed_store_raises_instead_of_waiting_for_ever() -> None:
    async def run() -> None:
        store = await open_shared()
        waiting = asyncio.ensure_future(anext(store.watch("", (await store.list("")).revision)))
        await store.get("/k")  # one round trip, so the reader waits by now
        await store.close()
        with pytest.raises(MetadataUnavailable, match="closed"):
            await waiting
        with pytest.raises(MetadataUnavailable, match="closed"):
            await store.get("/k")

    run_test(run())


def test_opening_without_a_server_says_which_endpoints_were_tried() -> None:
    async def run() -> None:
        addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
        with pytest.raises(MetadataUnavailable) as raised:
            await EtcdStore.open(addresses, timeout_s=0.5)
        assert all(address in str(raised.value) for address in addresses)

    run_test(run())


@pytest.mark.parametrize(
    ("endpoints", "user", "tls", "message"),
    [
        ([], None, None, "no endpoint"),
        (["etcd.example"], None, None, "HOST:PORT"),
        (["http://127.0.0.1:2379"], None, None, "HOST:PORT"),
        (["127.0.0.1:2379"], "braid", None, "together"),
        (["127.0.0.1:2379"], None, EtcdTls(ca="/nowhere/ca.crt"), "/nowhere/ca.crt"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    endpoints: list[str], user: str | None, tls: EtcdTls | None, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        run_test(EtcdStore.open(endpoints, user=user, tls=tls))
