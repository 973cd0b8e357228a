"""Replacing chunks in the catalog: one transaction, under the owner's fence, once."""

from __future__ import annotations

import asyncio

import pytest

from braid.metadata import paths
from braid.metadata.memory import Fault, MemoryStore
from braid.metadata.store import MAX_TXN_OPERATIONS
from braid.model.errors import BrokenInvariant, ConditionFailed, Fenced, InvalidArgument
from braid.model.ids import Epoch, Offset
from braid.storage.history.catalog import MAX_REPLACED_CHUNKS, Catalog, ChunkDescriptor
from tests.kits.storage import DESCRIPTOR, TOPIC, World


def chunk(base: int, end: int, name: str = "") -> ChunkDescriptor:
    name = name or f"{base}.chunk"
    return ChunkDescriptor(Offset(base), Offset(end), Epoch(1), name, 100, 80, 0, 0, 0, 0xFFFF)


async def loaded(store: MemoryStore) -> Catalog:
    catalog = Catalog(store, TOPIC, DESCRIPTOR)
    await catalog.load()
    return catalog


async def filled(store: MemoryStore, chunks: int = 4) -> Catalog:
    """Of ten offsets each."""
    catalog = await loaded(store)
    await catalog.claim(Epoch(1), "a")
    await catalog.begin()
    for number in range(chunks):
        await catalog.commit(chunk(number * 10, number * 10 + 10))
    return catalog


def bases(catalog: Catalog) -> list[tuple[int, int]]:
    return [(each.base_offset, each.next_offset) for each in catalog.chunks]


JOINED = chunk(10, 30, "joined.chunk")


async def test_neighbours_are_replaced_in_one_transaction_and_the_next_owner_loads_the_new_one(world: World) -> None:
    a = await filled(world.store)
    before = (await world.store.list("/")).revision
    await a.replace(a.chunks[1:3], JOINED)
    assert bases(a) == [(0, 10), (10, 30), (30, 40)]
    listing = await world.store.list("/")
    assert listing.revision == before + 1
    written = {entry.key for entry in listing.entries if entry.revision == listing.revision}
    assert written == {paths.chunk(TOPIC, DESCRIPTOR, Offset(10)), paths.current_chunk(TOPIC, DESCRIPTOR)}
    b = await loaded(world.store)
    assert (b.chunks, b.next_offset, b.revision) == (a.chunks, 40, a.revision)
    assert [found and found.object for found in map(b.find, (9, 10, 29, 30))] == [
        "0.chunk",
        "joined.chunk",
        "joined.chunk",
        "30.chunk",
    ]
    await a.commit(chunk(40, 50))
    assert (await loaded(world.store)).chunks == a.chunks, "history grows on behind it"


async def test_a_fenced_owner_replaces_nothing(world: World) -> None:
    a = await filled(world.store)
    b = await loaded(world.store)
    await b.claim(Epoch(2), "b")
    before = await world.store.list("/")
    with pytest.raises(Fenced, match="epoch 1 has lost it"):
        await a.replace(a.chunks[1:3], JOINED)
    with pytest.raises(Fenced, match="epoch 1 has lost it"):
        await a.check_held()
    assert await world.store.list("/") == before
    assert len(a.chunks) == 4, "nor does it believe that it did"
    await b.check_held()


async def test_a_lost_answer_counts_once_and_a_repeated_call_finds_it_done(world: World) -> None:
    a = await filled(world.a.store)
    old = a.chunks[1:3]
    left = [Fault.UNCERTAIN]
    world.a.store.fault = lambda request: left.pop() if request == "txn" and left else Fault.NONE
    before = (await world.store.list("/")).revision
    await a.replace(old, JOINED)
    await a.replace(old, JOINED)
    assert (await world.store.list("/")).revision == before + 1
    assert (await loaded(world.store)).chunks == a.chunks


async def test_only_neighbours_that_are_there_can_be_replaced(world: World) -> None:
    a = await filled(world.store)
    everything = list(a.chunks)
    await a.remove(a.chunks[:1])
    for wrong in ([], everything[:2], [everything[1], everything[3]], [everything[2], everything[1]], [chunk(10, 99)]):
        with pytest.raises(ConditionFailed, match="not neighbours"):
            await a.replace(wrong, JOINED)
    assert bases(a) == [(10, 20), (20, 30), (30, 40)]


@pytest.mark.parametrize(("base", "end"), [(10, 29), (11, 30), (0, 30), (10, 31)])
async def test_a_replacement_that_would_leave_a_gap_or_an_overlap_breaks_an_invariant(
    base: int, end: int, world: World
) -> None:
    a = await filled(world.store)
    with pytest.raises(BrokenInvariant, match="I1"):
        await a.replace(a.chunks[1:3], chunk(base, end, "joined.chunk"))
    assert len((await loaded(world.store)).chunks) == 4


async def test_as_many_chunks_as_a_transaction_holds_are_replaced_at_once_and_no_more(world: World) -> None:
    assert MAX_REPLACED_CHUNKS == MAX_TXN_OPERATIONS - 1
    a = await filled(world.store, MAX_REPLACED_CHUNKS + 1)
    end = 10 * len(a.chunks)
    with pytest.raises(InvalidArgument, match="at most 127"):
        await a.replace(a.chunks, chunk(0, end, "joined.chunk"))
    await a.replace(a.chunks[:-1], chunk(0, end - 10, "joined.chunk"))
    assert bases(await loaded(world.store)) == [(0, end - 10), (end - 10, end)]


async def test_replacing_exporting_and_retention_at_the_same_time_do_not_fence_each_other(world: World) -> None:
    a = await filled(world.store, 6)
    await asyncio.gather(
        a.replace(a.chunks[1:3], JOINED),
        a.commit(chunk(60, 70)),
        a.remove(a.chunks[:1]),
        a.replace(a.chunks[3:5], chunk(30, 50, "other.chunk")),
    )
    assert bases(a) == [(10, 30), (30, 50), (50, 60), (60, 70)]
    assert (await loaded(world.store)).chunks == a.chunks
