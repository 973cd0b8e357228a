"""Watches: every change once, in order, a transaction's changes together, from any revision that is still there."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from braid.metadata.store import Changes, Compare, Delete, Event, Put
from braid.model.errors import InvalidArgument, MetadataCompacted, MetadataError
from braid.model.ids import Revision

if TYPE_CHECKING:
    from tests.conformance.conftest import Backend


def seen(changes: Changes) -> list[tuple[str, bytes | None]]:
    """A transaction's changes by key; the order inside a transaction is the store's own."""
    assert all(event.revision == changes.revision for event in changes.events)
    return sorted((event.key, event.value) for event in changes.events)


async def test_a_watch_delivers_what_other_clients_write(backend: Backend) -> None:
    writer, watcher = await backend.client(), await backend.client()
    watch = backend.watch(watcher, "/a/", await backend.revision(watcher))
    first = await backend.write(writer, Put("/a/x", b"1"))
    second = await backend.write(writer, Delete("/a/x"))
    assert await backend.take(watch, 2) == [
        Changes(first, (Event("/a/x", b"1", first),)),
        Changes(second, (Event("/a/x", None, second),)),
    ]


async def test_a_watch_delivers_what_its_own_client_writes(backend: Backend) -> None:
    client = await backend.client()
    watch = backend.watch(client, "/a/", await backend.revision(client))
    waiting = asyncio.create_task(backend.take(watch, 1))
    await asyncio.sleep(0)
    revision = await backend.write(client, Put("/a/x", b"1"))
    assert [changes.revision for changes in await waiting] == [revision]


async def test_a_watch_groups_the_changes_of_one_transaction(backend: Backend) -> None:
    client = await backend.client()
    start = await backend.write(client, Put("/a/old", b"0"), Put("/b/old", b"0"))
    watch = backend.watch(client, "/a/", start)
    await backend.write(client, Put("/a/x", b"1"), Put("/b/x", b"1"), Put("/a/y", b"1"), Delete("/a/old"))
    await backend.write(client, Put("/b/y", b"2"))
    await backend.write(client, Put("/a/z", b"3"))
    first, second = await backend.take(watch, 2)
    assert seen(first) == [("/a/old", None), ("/a/x", b"1"), ("/a/y", b"1")]
    assert seen(second) == [("/a/z", b"3")]


async def test_a_watch_sees_its_prefix_only(backend: Backend) -> None:
    client = await backend.client()
    watch = backend.watch(client, "/topics/orders/", await backend.revision(client))
    for key in ("/topics/orders", "/topics/orders2", "/topics/orders2/x", "/topics/order", "/other"):
        await backend.write(client, Put(key, b""))
    await backend.write(client, Put("/topics/orders/controller", b""))
    (changes,) = await backend.take(watch, 1)
    assert seen(changes) == [("/topics/orders/controller", b"")]


async def test_the_empty_prefix_watches_everything(backend: Backend) -> None:
    client = await backend.client()
    watch = backend.watch(client, "", await backend.revision(client))
    await backend.write(client, Put("a", b"1"))
    await backend.write(client, Put("/b", b"2"))
    assert [seen(changes) for changes in await backend.take(watch, 2)] == [[("a", b"1")], [("/b", b"2")]]


async def test_a_watch_from_an_old_revision_delivers_what_happened_since(backend: Backend) -> None:
    client = await backend.client()
    revisions = [await backend.write(client, Put("/a", b"%d" % number)) for number in range(10)]
    for start in (0, 4, 8):
        watch = backend.watch(client, "/a", revisions[start])
        expected = revisions[start + 1 :]
        assert [changes.revision for changes in await backend.take(watch, len(expected))] == expected


async def test_a_watch_that_is_cancelled_and_resumed_by_its_reader_loses_and_repeats_nothing(backend: Backend) -> None:
    """Each time the watch is opened anew after the last revision that was handled, as a client does that restarts."""
    client = await backend.client()
    position = await backend.revision(client)
    expected = [await backend.write(client, Put(f"/a/{number % 3}", b"%d" % number)) for number in range(20)]
    received: list[Revision] = []
    while len(received) < len(expected):
        watch = client.watch("/a/", position)
        for changes in await backend.take(watch, min(3, len(expected) - len(received))):
            received.append(changes.revision)
            position = changes.revision
        await backend.end(watch)
    assert received == expected


async def test_a_listing_and_a_watch_from_it_miss_nothing_under_concurrent_writes(backend: Backend) -> None:
    writer, watcher = await backend.client(), await backend.client()
    writes = 60

    async def write() -> None:
        for number in range(writes):
            await backend.write(writer, Put(f"/a/{number % 7}", b"%d" % number))

    writing = asyncio.create_task(write())
    while not (listing := await watcher.list("/a/")).entries:
        pass
    state = {entry.key: entry.value for entry in listing.entries}
    revision = listing.revision
    watch = backend.watch(watcher, "/a/", revision)
    while b"%d" % (writes - 1) not in state.values():
        changes = await anext(watch)
        assert changes.revision > revision
        revision = changes.revision
        state |= {event.key: event.value or b"" for event in changes.events}
    await writing
    assert state == {entry.key: entry.value for entry in (await watcher.list("/a/")).entries}


async def test_two_watchers_see_the_same(backend: Backend) -> None:
    writer, watcher = await backend.client(), await backend.client()
    start = await backend.revision(writer)
    watches = [
        backend.watch(watcher, "/a", start),
        backend.watch(watcher, "/a", start),
        backend.watch(writer, "/a", start),
    ]
    tasks = [asyncio.create_task(backend.take(watch, 30)) for watch in watches]
    expected = [await backend.write(writer, Put("/a", b"%d" % number)) for number in range(30)]
    for task in tasks:
        assert [changes.revision for changes in await task] == expected


async def test_changes_of_concurrent_writers_arrive_in_the_order_of_revisions(backend: Backend) -> None:
    clients = [await backend.client() for _ in range(3)]
    watch = backend.watch(clients[0], "/a/", await backend.revision(clients[0]))

    async def write(number: int) -> list[Revision]:
        return [await backend.write(clients[number], Put(f"/a/{number}", b"%d" % turn)) for turn in range(20)]

    written = await asyncio.gather(*(write(number) for number in range(3)))
    received = [changes.revision for changes in await backend.take(watch, 60)]
    assert received == sorted(revision for revisions in written for revision in revisions)


async def test_what_changes_nothing_is_no_event(backend: Backend) -> None:
    client = await backend.client()
    start = await backend.write(client, Put("/a", b"1"))
    watch = backend.watch(client, "/", start)
    await client.txn([], [Delete("/absent")])
    await client.txn([Compare("/a", Revision(0))], [Put("/a", b"2"), Put("/b", b"2")])
    last = await backend.write(client, Put("/a", b"3"), Delete("/absent"))
    (changes,) = await backend.take(watch, 1)
    assert changes == Changes(last, (Event("/a", b"3", last),))


async def test_a_large_backlog_arrives_whole(backend: Backend) -> None:
    client = await backend.client()
    start = await backend.revision(client)
    expected = [await backend.write(client, Put("/a", b"x" * 20_000)) for _ in range(400)]
    fresh = await backend.client()
    watch = backend.watch(fresh, "/a", start)
    assert [changes.revision for changes in await backend.take(watch, len(expected))] == expected


async def test_a_watch_that_has_seen_everything_outlives_a_compaction(backend: Backend) -> None:
    client = await backend.client()
    watch = backend.watch(client, "/quiet/", await backend.revision(client))
    for number in range(50):
        await backend.write(client, Put("/loud", b"%d" % number))
    await backend.write(client, Put("/quiet/x", b"1"))
    assert [seen(changes) for changes in await backend.take(watch, 1)] == [[("/quiet/x", b"1")]]
    await backend.forget_history()
    await backend.write(client, Put("/quiet/x", b"2"))
    assert [seen(changes) for changes in await backend.take(watch, 1)] == [[("/quiet/x", b"2")]]


async def test_a_watch_from_a_forgotten_revision_is_refused(backend: Backend) -> None:
    client = await backend.client()
    start, *_, last = [await backend.write(client, Put("/a", b"%d" % number)) for number in range(6)]
    await backend.forget_history()
    fresh = await backend.client()
    with pytest.raises(MetadataCompacted):
        await anext(backend.watch(fresh, "/a", start))
    listing = await fresh.list("/a")
    watch = backend.watch(fresh, "/a", listing.revision)
    assert [entry.revision for entry in listing.entries] == [last]
    after = await backend.write(client, Put("/a", b"new"))
    assert [changes.revision for changes in await backend.take(watch, 1)] == [after]


async def test_a_watch_from_a_revision_to_come_waits_for_it(backend: Backend) -> None:
    client = await backend.client()
    now = await backend.revision(client)
    watch = backend.watch(client, "/a", Revision(now + 2))
    *_, last = [await backend.write(client, Put("/a", b"%d" % number)) for number in range(3)]
    assert [changes.revision for changes in await backend.take(watch, 1)] == [last]


async def test_closing_a_watch_ends_the_iteration(backend: Backend) -> None:
    client = await backend.client()
    watch = client.watch("/a", await backend.revision(client))
    await backend.write(client, Put("/a", b"1"))
    assert len(await backend.take(watch, 1)) == 1
    await backend.end(watch)
    await backend.end(watch)
    with pytest.raises(StopAsyncIteration):
        await anext(watch)


async def test_a_watch_of_a_closed_client_raises_instead_of_being_silent(backend: Backend) -> None:
    client = await backend.client()
    watch = backend.watch(client, "/a", await backend.revision(client))
    waiting = asyncio.create_task(backend.take(watch, 1))
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises(MetadataError):
        await waiting


async def test_a_watch_of_a_prefix_beyond_the_limit_is_refused(backend: Backend) -> None:
    client = await backend.client()
    with pytest.raises(InvalidArgument):
        await anext(client.watch("k" * 2_000, Revision(0)))
