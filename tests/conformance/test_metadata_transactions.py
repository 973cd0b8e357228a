"""Keys, values, listings and transactions, as every store must keep them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from braid.metadata.limits import MAX_TXN_BYTES
from braid.metadata.store import (
    MAX_KEY_BYTES,
    MAX_TXN_OPERATIONS,
    MAX_VALUE_BYTES,
    Compare,
    CompareValue,
    Condition,
    Delete,
    Operation,
    Put,
)
from braid.model.errors import InvalidArgument, MetadataError
from braid.model.ids import Revision

if TYPE_CHECKING:
    from tests.conformance.conftest import Backend

ABSENT = Revision(0)


async def test_an_absent_key_is_none(backend: Backend) -> None:
    client = await backend.client()
    assert await client.get("/absent") is None


async def test_every_client_reads_what_one_client_wrote(backend: Backend) -> None:
    writer, reader = await backend.client(), await backend.client()
    revision = await backend.write(writer, Put("/key", b"value"))
    entry = await reader.get("/key")
    assert entry is not None
    assert (entry.key, entry.value, entry.revision, entry.lease) == ("/key", b"value", revision, 0)


@pytest.mark.parametrize("value", [b"", b"\x00", bytes(range(256)), b"\xff" * 1000], ids=["empty", "nul", "all", "ff"])
async def test_values_are_any_bytes(backend: Backend, value: bytes) -> None:
    client = await backend.client()
    await backend.write(client, Put("/binary", value))
    entry = await client.get("/binary")
    assert entry is not None
    assert entry.value == value


async def test_the_largest_value_and_the_longest_key_are_accepted(backend: Backend) -> None:
    client = await backend.client()
    key = "/" + "k" * (MAX_KEY_BYTES - 1)
    await backend.write(client, Put(key, b"x" * MAX_VALUE_BYTES))
    entry = await client.get(key)
    assert entry is not None
    assert len(entry.value) == MAX_VALUE_BYTES


async def test_keys_are_any_text_and_are_listed_in_order(backend: Backend) -> None:
    client = await backend.client()
    keys = ["/ключ", "/a b", "/a%20b", "/🧵", "/a", "/Z", "/é", "/\uffff"]
    await backend.write(client, *(Put(key, key.encode()) for key in keys))
    listing = await client.list("/")
    assert [entry.key for entry in listing.entries] == sorted(keys)
    assert all(entry.value == entry.key.encode() for entry in listing.entries)


async def test_a_prefix_finds_exactly_the_keys_that_start_with_it(backend: Backend) -> None:
    client = await backend.client()
    keys = ["/topics/orders", "/topics/orders/controller", "/topics/orders2", "/topics/order", "/topicsx"]
    await backend.write(client, *(Put(key, b"") for key in keys))

    async def found(prefix: str) -> list[str]:
        return [entry.key for entry in (await client.list(prefix)).entries]

    assert await found("/topics/orders/") == ["/topics/orders/controller"]
    assert await found("/topics/orders") == ["/topics/orders", "/topics/orders/controller", "/topics/orders2"]
    assert await found("/topics/") == sorted(keys[:4])
    assert await found("/absent") == []
    assert await found("") == sorted(keys)


async def test_a_listing_says_the_revision_that_it_shows(backend: Backend) -> None:
    client = await backend.client()
    revision = await backend.write(client, Put("/a", b"1"))
    assert (await client.list("/a")).revision >= revision
    assert (await client.list("/nothing")).revision >= revision


async def test_a_listing_is_one_snapshot(backend: Backend) -> None:
    """One client moves a token between two keys; whoever lists sees it in exactly one of them."""
    writer, reader = await backend.client(), await backend.client()
    await backend.write(writer, Put("/token/a", b""))

    async def move() -> None:
        for turn in range(60):
            here, there = ("/token/a", "/token/b") if turn % 2 == 0 else ("/token/b", "/token/a")
            await backend.write(writer, Delete(here), Put(there, b""))

    moving = asyncio.create_task(move())
    seen = set()
    while not moving.done():
        listing = await reader.list("/token/")
        assert len(listing.entries) == 1
        assert listing.entries[0].revision <= listing.revision
        seen.add(listing.entries[0].key)
    await moving


async def test_revisions_rise_with_every_write_and_one_transaction_has_one_revision(backend: Backend) -> None:
    client = await backend.client()
    first = await backend.write(client, Put("/a", b"1"), Put("/b", b"1"))
    second = await backend.write(client, Put("/b", b"2"), Put("/c", b"2"))
    assert first < second
    revisions = {entry.key: entry.revision for entry in (await client.list("/")).entries}
    assert revisions == {"/a": first, "/b": second, "/c": second}


async def test_writing_the_same_value_again_is_a_write(backend: Backend) -> None:
    client = await backend.client()
    first = await backend.write(client, Put("/a", b"1"))
    second = await backend.write(client, Put("/a", b"1"))
    assert second > first


async def test_a_comparison_with_revision_0_holds_only_while_the_key_is_absent(backend: Backend) -> None:
    client = await backend.client()
    create = [Compare("/once", ABSENT)], [Put("/once", b"first")]
    assert (await client.txn(*create)).succeeded
    assert not (await client.txn(*create)).succeeded
    await backend.write(client, Delete("/once"))
    assert (await client.txn(*create)).succeeded


async def test_a_comparison_with_a_revision_holds_until_the_next_write(backend: Backend) -> None:
    client = await backend.client()
    first = await backend.write(client, Put("/a", b"1"))
    second = await backend.write(client, Put("/a", b"2"), when=[Compare("/a", first)])
    assert not (await client.txn([Compare("/a", first)], [Put("/a", b"3")])).succeeded
    await backend.write(client, Delete("/a"))
    assert not (await client.txn([Compare("/a", second)], [Put("/a", b"3")])).succeeded
    assert await client.get("/a") is None


async def test_a_comparison_with_a_value_holds_for_exactly_this_value(backend: Backend) -> None:
    client = await backend.client()
    await backend.write(client, Put("/a", b"one"))
    for wrong in (b"on", b"one ", b"", b"ONE"):
        assert not (await client.txn([CompareValue("/a", wrong)], [Put("/a", b"x")])).succeeded
    assert not (await client.txn([CompareValue("/absent", b"")], [Put("/a", b"x")])).succeeded
    await backend.write(client, Put("/a", b"two"), when=[CompareValue("/a", b"one")])


async def test_all_comparisons_must_hold(backend: Backend) -> None:
    client = await backend.client()
    revision = await backend.write(client, Put("/a", b"1"))
    mixed: list[Condition] = [Compare("/a", revision), Compare("/b", ABSENT), CompareValue("/a", b"2")]
    assert not (await client.txn(mixed, [Put("/c", b"")])).succeeded
    assert (await client.txn(mixed[:2], [Put("/c", b"")])).succeeded


async def test_a_failed_transaction_writes_nothing_and_does_not_raise_the_revision(backend: Backend) -> None:
    client = await backend.client()
    await backend.write(client, Put("/keep", b"old"), Put("/drop", b"old"))
    before = await client.list("")
    result = await client.txn(
        [Compare("/keep", ABSENT)], [Put("/keep", b"new"), Delete("/drop"), Put("/other", b"new")]
    )
    assert not result.succeeded
    assert result.revision == before.revision
    assert await client.list("") == before


async def test_a_transaction_without_conditions_always_writes(backend: Backend) -> None:
    client = await backend.client()
    assert (await client.txn([], [Put("/a", b"1"), Delete("/absent")])).succeeded
    assert (await client.txn([], [Delete("/a")])).succeeded
    assert await client.get("/a") is None


async def test_a_transaction_without_operations_only_compares(backend: Backend) -> None:
    client = await backend.client()
    revision = await backend.write(client, Put("/a", b"1"))
    assert (await client.txn([Compare("/a", revision)], [])).succeeded
    assert not (await client.txn([Compare("/a", ABSENT)], [])).succeeded
    assert await backend.revision(client) == revision


async def test_deleting_what_is_not_there_changes_nothing(backend: Backend) -> None:
    client = await backend.client()
    revision = await backend.write(client, Put("/a", b"1"))
    result = await client.txn([], [Delete("/absent")])
    assert result.succeeded
    assert result.revision == revision
    assert await backend.revision(client) == revision


async def test_a_transaction_may_have_as_many_operations_as_the_limit_says(backend: Backend) -> None:
    client = await backend.client()
    keys = [f"/many/{number:03d}" for number in range(MAX_TXN_OPERATIONS)]
    revision = await backend.write(
        client, *(Put(key, b"") for key in keys), when=[Compare(key, ABSENT) for key in keys]
    )
    listing = await client.list("/many/")
    assert [(entry.key, entry.revision) for entry in listing.entries] == [(key, revision) for key in keys]


FORBIDDEN: dict[str, tuple[list[Condition], list[Operation]]] = {
    "a key twice": ([], [Put("/a", b"1"), Put("/a", b"2")]),
    "a key put and deleted": ([], [Put("/a", b"1"), Delete("/a")]),
    "an empty key": ([], [Put("", b"1")]),
    "an empty key compared": ([Compare("", ABSENT)], [Put("/a", b"1")]),
    "a long key": ([], [Put("k" * (MAX_KEY_BYTES + 1), b"")]),
    "a key that is long in bytes": ([], [Put("к" * (MAX_KEY_BYTES // 2 + 1), b"")]),
    "a key that is not Unicode": ([], [Put("/\ud800", b"")]),
    "a large value": ([], [Put("/a", b"x" * (MAX_VALUE_BYTES + 1))]),
    "a large value compared": ([CompareValue("/a", b"x" * (MAX_VALUE_BYTES + 1))], [Put("/a", b"")]),
    "too many operations": ([], [Put(f"/{number}", b"") for number in range(MAX_TXN_OPERATIONS + 1)]),
    "too many conditions": ([Compare(f"/{n}", ABSENT) for n in range(MAX_TXN_OPERATIONS + 1)], [Put("/a", b"1")]),
    "too many bytes": ([], [Put("/a", b"x" * (MAX_TXN_BYTES // 2)), Put("/b", b"x" * (MAX_TXN_BYTES // 2))]),
    "a negative revision": ([Compare("/a", Revision(-1))], [Put("/a", b"1")]),
}


@pytest.mark.parametrize("case", FORBIDDEN)
async def test_a_transaction_beyond_a_limit_is_refused_and_writes_nothing(backend: Backend, case: str) -> None:
    client = await backend.client()
    before = await client.list("")
    with pytest.raises(InvalidArgument):
        await client.txn(*FORBIDDEN[case])
    assert await client.list("") == before


async def test_reads_beyond_a_limit_are_refused(backend: Backend) -> None:
    client = await backend.client()
    for key in ("", "k" * (MAX_KEY_BYTES + 1)):
        with pytest.raises(InvalidArgument):
            await client.get(key)
    with pytest.raises(InvalidArgument):
        await client.list("k" * (MAX_KEY_BYTES + 1))


async def test_many_clients_count_by_compare_and_swap_and_lose_nothing(backend: Backend) -> None:
    clients = [await backend.client() for _ in range(4)]
    increments = 25

    async def count(number: int) -> None:
        client, done = clients[number], 0
        while done < increments:
            entry = await client.get("/counter")
            value, revision = (int(entry.value), entry.revision) if entry else (0, ABSENT)
            result = await client.txn([Compare("/counter", revision)], [Put("/counter", b"%d" % (value + 1))])
            done += result.succeeded

    await asyncio.gather(*(count(number) for number in range(len(clients))))
    entry = await clients[0].get("/counter")
    assert entry is not None
    assert int(entry.value) == len(clients) * increments


async def test_of_many_that_create_a_key_one_succeeds(backend: Backend) -> None:
    clients = [await backend.client() for _ in range(4)]
    results = await asyncio.gather(
        *(
            client.txn([Compare("/first", ABSENT)], [Put("/first", b"%d" % number), Put(f"/winner/{number}", b"")])
            for number, client in enumerate(clients)
        )
    )
    winners = [number for number, result in enumerate(results) if result.succeeded]
    assert len(winners) == 1
    entry = await clients[0].get("/first")
    assert entry is not None
    assert int(entry.value) == winners[0]
    assert [entry.key for entry in (await clients[0].list("/winner/")).entries] == [f"/winner/{winners[0]}"]


async def test_a_closed_client_raises_instead_of_answering(backend: Backend) -> None:
    client, other = await backend.client(), await backend.client()
    await backend.write(client, Put("/a", b"1"))
    await client.close()
    with pytest.raises(MetadataError):
        await client.get("/a")
    with pytest.raises(MetadataError):
        await client.list("/")
    with pytest.raises(MetadataError):
        await client.txn([], [Put("/a", b"2")])
    entry = await other.get("/a")
    assert entry is not None
    assert entry.value == b"1"


async def test_closing_twice_is_fine(backend: Backend) -> None:
    client = await backend.client()
    await client.close()
    await client.close()
