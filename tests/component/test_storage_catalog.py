"""The catalog: one transaction for descriptor, pointer and fence; and lost answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import msgspec
import pytest

from braid.metadata import paths
from braid.metadata.memory import Fault, MemoryStore
from braid.metadata.store import Compare, Condition, Operation, Put, Store, TxnResult
from braid.model.errors import BrokenInvariant, ConditionFailed, Fenced, MetadataUnavailable, MetadataUncertain
from braid.model.ids import Epoch, Offset, Revision
from braid.storage.history.catalog import MAX_UNCERTAIN_TRIES, Catalog, ChunkDescriptor, SealedState
from braid.storage.retention import RetentionPolicy
from tests.kits.storage import DESCRIPTOR, TOPIC, World, fill


def chunk(base: int, end: int, epoch: int = 1) -> ChunkDescriptor:
    return ChunkDescriptor(Offset(base), Offset(end), Epoch(epoch), f"{base}.chunk", 100, 80, 0, 0, 0, 0xFFFF)


async def loaded(store: MemoryStore) -> Catalog:
    catalog = Catalog(store, TOPIC, DESCRIPTOR)
    await catalog.load()
    return catalog


async def owned(store: MemoryStore, epoch: int, holder: str = "a") -> Catalog:
    catalog = await loaded(store)
    await catalog.claim(Epoch(epoch), holder)
    await catalog.begin()
    return catalog


async def test_what_one_owner_writes_the_next_one_loads(world: World) -> None:
    a = await owned(world.store, 1)
    await a.commit(chunk(0, 10))
    await a.commit(chunk(10, 25))
    b = await loaded(world.store)
    assert (b.chunks, b.next_offset, b.earliest, b.frontier) == (a.chunks, 25, 0, a.frontier)
    assert b.revision == a.revision
    assert [found and found.base_offset for found in map(b.find, (0, 9, 10, 24, 25, 99))] == [0, 0, 10, 10, None, None]


async def test_descriptor_and_frontier_are_one_transaction(world: World) -> None:
    a = await owned(world.store, 1)
    before = (await world.store.list("/")).revision
    await a.commit(chunk(0, 10))
    listing = await world.store.list("/")
    assert listing.revision == before + 1
    written = {entry.key for entry in listing.entries if entry.revision == listing.revision}
    assert written == {paths.chunk(TOPIC, DESCRIPTOR, Offset(0)), paths.current_chunk(TOPIC, DESCRIPTOR)}


async def test_a_claim_fences_every_write_of_the_owner_before(world: World) -> None:
    a = await owned(world.store, 1)
    await a.commit(chunk(0, 10))
    b = await loaded(world.store)
    await b.claim(Epoch(2), "b")
    before = await world.store.list("/")
    sealed = SealedState(9, Epoch(1), "a", 0)
    for write in (a.commit(chunk(10, 20)), a.begin(), a.seal(sealed, [], []), a.remove(a.chunks)):
        with pytest.raises(Fenced, match="epoch 1 has lost it"):
            await write
    assert await world.store.list("/") == before
    assert (a.next_offset, len(a.chunks)) == (10, 1), "nor does it believe that it did"


@pytest.mark.parametrize("epoch", [1, 2])
async def test_an_epoch_that_is_not_higher_claims_nothing(epoch: int, world: World) -> None:
    await owned(world.store, 2)
    late = await loaded(world.store)
    with pytest.raises(Fenced, match=rf"epoch {epoch} cannot claim .*: epoch 2 \(a\) has it"):
        await late.claim(Epoch(epoch), "b")


async def test_of_two_claims_at_once_one_wins(world: World) -> None:
    first, second = await loaded(world.store), await loaded(world.store)
    await first.claim(Epoch(1), "a")
    with pytest.raises(Fenced):
        await second.claim(Epoch(1), "b")
    with pytest.raises(Fenced):
        await second.claim(Epoch(2), "b")


async def test_the_frontier_remembers_the_last_epoch_that_began(world: World) -> None:
    a = await loaded(world.store)
    await a.claim(Epoch(1), "a")
    assert a.last_writer == 0
    await a.begin()
    assert a.last_writer == 1
    b, c = Catalog(world.store, TOPIC, DESCRIPTOR), Catalog(world.store, TOPIC, DESCRIPTOR)
    for epoch, late in ((2, b), (3, c)):
        await late.load()
        await late.claim(Epoch(epoch), "b")
        assert late.last_writer == 1, "claims that never began wrote nothing"
    await c.begin()
    assert c.last_writer == 3


async def test_the_frontier_remembers_which_epoch_wrote_which_offsets(world: World) -> None:
    a = await loaded(world.store)
    await a.claim(Epoch(1), "a")
    assert a.epochs == ()
    await a.begin(first=Offset(0))
    await a.commit(chunk(0, 10))
    unborn = await loaded(world.store)
    await unborn.claim(Epoch(2), "b")
    assert unborn.epochs == ((1, 0),), "an owner that has not begun has written nothing"
    c = await loaded(world.store)
    await c.claim(Epoch(3), "c")
    await c.begin(first=Offset(25))
    lossy = await loaded(world.store)
    assert lossy.epochs == ((1, 0), (3, 25))
    await lossy.claim(Epoch(4), "d")
    await lossy.begin(first=Offset(10))
    assert (await loaded(world.store)).epochs == ((1, 0), (4, 10))


async def test_a_seal_stands_until_the_next_owner_has_begun(world: World) -> None:
    a = await owned(world.store, 1)
    await a.commit(chunk(0, 10))
    sealed = SealedState(9, Epoch(1), "a", 123)
    await a.seal(sealed, [], [Put("/elsewhere", b"ownership")])
    assert await world.store.get("/elsewhere") is not None
    b = await loaded(world.store)
    assert b.sealed == sealed
    await b.claim(Epoch(2), "b")
    assert (await loaded(world.store)).sealed == sealed
    await b.begin()
    assert (await loaded(world.store)).sealed is None
    assert b.sealed is None


async def test_a_seal_is_all_or_nothing_with_the_conditions_of_the_move(world: World) -> None:
    a = await owned(world.store, 1)
    with pytest.raises(ConditionFailed):
        await a.seal(SealedState(-1, Epoch(1), "a", 0), [Compare("/ownership", Revision(77))], [Put("/ownership", b"")])
    assert (await loaded(world.store)).sealed is None
    assert await world.store.get("/ownership") is None


async def test_history_grows_without_gap_or_overlap_and_shrinks_from_its_old_end(world: World) -> None:
    a = await owned(world.store, 1)
    await a.commit(chunk(0, 10))
    await a.commit(chunk(0, 10))
    assert len(a.chunks) == 1, "committing it again, after a lost answer, is no second chunk"
    for wrong in (chunk(11, 20), chunk(9, 20), chunk(0, 11), chunk(10, 10)):
        with pytest.raises(BrokenInvariant, match="I1"):
            await a.commit(wrong)
    await a.commit(chunk(10, 20))
    with pytest.raises(BrokenInvariant, match="I1"):
        await a.remove(a.chunks[1:])
    with pytest.raises(BrokenInvariant, match="I2"):
        await a.seal(SealedState(18, Epoch(1), "a", 0), [], [])
    await a.remove(a.chunks[:1])
    b = await loaded(world.store)
    assert ([each.base_offset for each in b.chunks], b.earliest, b.next_offset) == ([10], 10, 20)


async def test_history_skips_only_where_no_chunk_is_and_only_forwards(world: World) -> None:
    a = await owned(world.store, 1)
    await a.skip_to(Offset(60), b"")
    await a.commit(chunk(60, 70))
    for wrong in (Offset(80), Offset(50)):
        with pytest.raises(BrokenInvariant, match="cannot skip"):
            await a.skip_to(wrong, b"")
    await a.remove(a.chunks)
    with pytest.raises(BrokenInvariant):
        await a.skip_to(Offset(69), b"")
    assert (await loaded(world.store)).next_offset == 70


async def test_a_catalog_that_was_never_claimed_writes_nothing(world: World) -> None:
    with pytest.raises(BrokenInvariant, match="never claimed"):
        await (await loaded(world.store)).begin()


async def test_an_error_while_loading_is_not_an_empty_catalog(world: World) -> None:
    await owned(world.store, 1)
    world.a.store.fault = lambda _request: Fault.UNAVAILABLE
    with pytest.raises(MetadataUnavailable):
        await loaded(world.a.store)


def in_turn(*faults: Fault) -> Callable[[str], Fault]:
    """These faults for the next transactions, then none. Reading back works."""
    left = list(faults)
    return lambda request: left.pop(0) if request == "txn" and left else Fault.NONE


async def test_a_lost_answer_of_a_write_that_happened_counts_as_success_once(world: World) -> None:
    a = await owned(world.a.store, 1)
    world.a.store.fault = in_turn(Fault.UNCERTAIN)
    before = (await world.store.list("/")).revision
    await a.commit(chunk(0, 10))
    assert (await world.store.list("/")).revision == before + 1, "it was not written twice"
    await a.commit(chunk(10, 20))
    assert (await loaded(world.store)).chunks == a.chunks


class LosesRequests(MemoryStore):
    """Transactions get lost on their way, and all that the client knows is that no answer came."""

    losses = 0

    async def txn(self, conditions, operations):  # type: ignore[no-untyped-def]
        if self.losses:
            self.losses -= 1
            raise MetadataUncertain("no answer came")
        return await super().txn(conditions, operations)


async def test_a_lost_request_is_tried_again_under_the_same_comparison(world: World) -> None:
    store = LosesRequests(world.clock)
    a = await owned(store, 1)
    store.losses = MAX_UNCERTAIN_TRIES - 1
    await a.commit(chunk(0, 10))
    assert (await loaded(store)).chunks == a.chunks
    store.losses = MAX_UNCERTAIN_TRIES
    with pytest.raises(MetadataUncertain, match="could not be written and read back"):
        await a.commit(chunk(10, 20))
    assert a.next_offset == 10
    await a.commit(chunk(10, 20))


async def test_a_lost_answer_is_fenced_when_somebody_else_has_written_since(world: World) -> None:
    store = LosesRequests(world.clock)
    a = await owned(store, 1)
    b = await loaded(store)
    await b.claim(Epoch(2), "b")
    store.losses = 1
    with pytest.raises(Fenced):
        await a.commit(chunk(0, 10))


async def test_a_store_that_does_not_answer_is_not_a_lost_fence(world: World) -> None:
    a = await owned(world.a.store, 1)
    world.a.store.fault = in_turn(Fault.UNAVAILABLE)
    with pytest.raises(MetadataUnavailable):
        await a.commit(chunk(0, 10))
    await a.commit(chunk(0, 10))


def test_the_sealed_state_reads_as_in_the_seed() -> None:
    text = msgspec.json.encode(SealedState(21, Epoch(3), "broker-a", 99))
    assert msgspec.json.decode(text) == {
        "lastCommittedOffset": 21,
        "epoch": 3,
        "brokerId": "broker-a",
        "timestamp": 99,
        "sealed": True,
        "ended": False,
    }


class LateStore:
    """Transactions that seemed lost arrive just before the next one."""

    def __init__(self, inner: MemoryStore) -> None:
        self._inner = inner
        self.lose = False
        self._late: list[tuple[list[Condition], list[Operation]]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def txn(self, conditions: Sequence[Condition], operations: Sequence[Operation]) -> TxnResult:
        if self.lose:
            self._late.append((list(conditions), list(operations)))
            raise MetadataUncertain("no answer")
        while self._late:
            await self._inner.txn(*self._late.pop(0))
        return await self._inner.txn(conditions, operations)


async def test_a_write_that_arrives_late_is_not_taken_for_the_one_that_follows_it(world: World) -> None:
    segment = await world.a.open()
    await segment.exporter.stop()
    for _ in range(3):
        await fill(segment, 5)
        await segment.log.rotate()
    await segment.exporter.export_closed()
    late = LateStore(world.a.store)
    segment.catalog._store = cast("Store", late)
    late.lose = True
    with pytest.raises(MetadataUncertain):
        await segment.apply_retention(RetentionPolicy(max_bytes=900))
    late.lose = False
    for _ in range(3):  # the late write shows up; whoever tries again gets through
        try:
            await segment.hand_over()
            break
        except MetadataUncertain:
            continue
    catalog = Catalog(world.store, TOPIC, DESCRIPTOR)
    await catalog.load()
    assert catalog.sealed is not None
    assert catalog.sealed.last_committed_offset == 14
    assert (await world.b.open()).log.end == 15


async def test_owners_keep_the_fields_of_a_frontier_that_their_build_does_not_know(world: World) -> None:
    a = await owned(world.store, 1)
    key = paths.current_chunk(TOPIC, DESCRIPTOR)
    entry = await world.store.get(key)
    assert entry is not None
    await world.store.txn([], [Put(key, entry.value[:-1] + b',"tier":"gold"}')])
    b = await owned(world.store, 2, "b")
    await b.commit(chunk(0, 10, 2))
    await b.seal(SealedState(9, Epoch(2), "b", 0), [], [])
    entry = await world.store.get(key)
    assert entry is not None
    assert b'"tier":"gold"' in entry.value
    assert a.frontier is not None
