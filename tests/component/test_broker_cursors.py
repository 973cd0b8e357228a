"""Cursors of one segment: never lost by an orderly stop, never ahead of the log, never written by a former owner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from braid.broker.config import CursorConfig
from braid.broker.cursors.cursors import Cursors
from braid.broker.cursors.stored_cursors import MAX_CURSORS_PER_TXN
from braid.metadata import paths
from braid.metadata.memory import Fault, MemoryStore
from braid.metadata.store import Condition, Delete, Operation, Put, TxnResult
from braid.model.errors import (
    Fenced,
    InvalidArgument,
    MetadataCorrupt,
    MetadataUnavailable,
    MetadataUncertain,
    SubscriptionNotFound,
)
from braid.model.ids import Epoch, Offset
from braid.model.ownership import Ownership, OwnershipState
from braid.model.stored_record import encode
from braid.model.subscription import Cursor, Placing
from braid.testing.sim.loop import Simulation
from tests.kits.control import ORDERS, counted, faults, own, plain_segment
from tests.kits.cursors import NAME, opened, placement, stored


async def test_a_placed_cursor_is_stored_when_place_returns(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    cursors = (await opened(store)).cursors
    await cursors.place(Placing("billing", Offset(40)))
    assert await stored(store) == cursors.offset("billing") == cursors.lowest() == 40
    await cursors.place(Placing("billing", Offset(7)))  # a seek goes backwards, too
    assert await stored(store) == cursors.offset("billing") == 7
    again = (await opened(store)).cursors
    assert again.all() == {"billing": 7}


async def test_an_ack_moves_a_cursor_forwards_only(simulation: Simulation) -> None:
    cursors = (await opened(MemoryStore(simulation.clock))).cursors
    await cursors.place(Placing("billing", Offset(40)))
    assert cursors.advance("billing", Offset(50))
    assert not cursors.advance("billing", Offset(50))
    assert not cursors.advance("billing", Offset(41))
    assert cursors.offset("billing") == 50


async def test_an_ack_of_what_nobody_can_have_seen_is_refused(simulation: Simulation) -> None:
    cursors = (await opened(MemoryStore(simulation.clock), end=100)).cursors
    await cursors.place(Placing("billing", Offset(0)))
    with pytest.raises(InvalidArgument, match="100"):
        cursors.advance("billing", Offset(101))
    with pytest.raises(InvalidArgument):
        await cursors.place(Placing("billing", Offset(101)))
    with pytest.raises(InvalidArgument):
        await cursors.place(Placing("billing", Offset(-1)))
    with pytest.raises(SubscriptionNotFound):
        cursors.advance("nobody", Offset(1))
    assert cursors.all() == {"billing": 0}


async def test_acks_are_stored_after_the_time_that_is_configured(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    cursors = (await opened(store, config=CursorConfig(flush_s=2.0))).cursors
    await cursors.place(Placing("billing", Offset(0)))
    cursors.start()
    await asyncio.sleep(50.0)
    cursors.advance("billing", Offset(10))
    await asyncio.sleep(1.9)
    assert await stored(store) == 0
    await asyncio.sleep(0.2)
    assert await stored(store) == 10
    await cursors.stop()


async def test_many_acks_are_stored_without_waiting_for_the_time(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    cursors = (await opened(store, config=CursorConfig(flush_s=1_000.0, flush_acks=5))).cursors
    await cursors.place(Placing("billing", Offset(0)))
    cursors.start()
    for offset in range(1, 5):
        cursors.advance("billing", Offset(offset))
    await asyncio.sleep(10.0)
    assert await stored(store) == 0
    cursors.advance("billing", Offset(5))
    await asyncio.sleep(0.1)
    assert await stored(store) == 5
    await cursors.stop()


async def test_nothing_is_asked_of_the_store_while_nothing_changes(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    cursors = (await opened(store)).cursors
    await cursors.place(Placing("billing", Offset(0)))
    cursors.start()
    cursors.advance("billing", Offset(1))
    await asyncio.sleep(10.0)
    requests = counted(store)
    steps = simulation.loop.steps
    await asyncio.sleep(10_000.0)
    assert requests == []
    assert simulation.loop.steps - steps < 10, "an idle segment has no timer"
    await cursors.stop()
    assert requests == []


async def test_an_orderly_stop_stores_every_ack(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    cursors = (await opened(store)).cursors
    await cursors.place(Placing("billing", Offset(0)))
    cursors.start()
    cursors.advance("billing", Offset(99))
    await cursors.stop()
    assert await stored(store) == 99


async def test_a_durable_ack_stores_its_own_cursor_now(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    cursors = (await opened(store)).cursors
    await cursors.place(Placing("billing", Offset(0)))
    await cursors.place(Placing("audit", Offset(0)))
    cursors.advance("billing", Offset(9))
    cursors.advance("audit", Offset(8))
    await cursors.flush("billing")
    assert await stored(store) == 9
    assert await stored(store, "audit") == 0
    await cursors.flush()
    assert await stored(store, "audit") == 8


async def test_many_cursors_are_stored_in_few_transactions(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    cursors = (await opened(store)).cursors
    names = [f"s{number}" for number in range(2 * MAX_CURSORS_PER_TXN + 1)]
    for name in names:
        await cursors.place(Placing(name, Offset(0)))
        cursors.advance(name, Offset(3))
    requests = counted(store)
    await cursors.flush()
    assert requests == ["txn"] * 3
    for name in names:
        assert await stored(store, name) == 3


async def test_a_cursor_is_never_stored_beyond_what_the_log_has_synced_and_is_stored_when_it_has(
    simulation: Simulation,
) -> None:
    """Durability `memory`: records may be seen and acked before they are on the disk."""
    store = MemoryStore(simulation.clock)
    segment = await opened(store, end=10)
    cursors = segment.cursors
    await cursors.place(Placing("billing", Offset(0)))
    cursors.start()
    segment.grow(50, synced=20)
    cursors.advance("billing", Offset(45))
    await cursors.flush()
    assert await stored(store) == 20
    assert cursors.offset("billing") == 45
    assert cursors.lowest() == 20, "after a crash the records from 20 on are wanted again"
    segment.grow(50, synced=50)  # no ack comes any more
    await asyncio.sleep(5.0)
    assert await stored(store) == 45
    segment.grow(90, synced=60)
    await cursors.place(Placing("audit", Offset(90)))  # a subscription that starts at the latest
    assert cursors.offset("audit") == 90
    assert await stored(store, "audit") == 60
    segment.grow(90)
    await asyncio.sleep(5.0)
    assert await stored(store, "audit") == 90
    await cursors.stop()


async def test_a_cursor_beyond_the_end_of_the_log_is_reported_and_set_to_the_end(
    caplog: pytest.LogCaptureFixture, simulation: Simulation
) -> None:
    """Cursors beyond records that were lost would skip those that take their offsets."""
    store = MemoryStore(simulation.clock)
    await (await opened(store, end=100)).cursors.place(Placing("billing", Offset(80)))
    with caplog.at_level(logging.WARNING):
        cursors = (await opened(store, end=30)).cursors
    assert cursors.offset("billing") == 30
    assert "billing" in caplog.text
    assert "80" in caplog.text
    await cursors.flush()
    assert await stored(store) == 30


async def test_removing_a_cursor_removes_it_from_the_store(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    cursors = (await opened(store)).cursors
    await cursors.place(Placing("billing", Offset(0)))
    cursors.advance("billing", Offset(5))
    await cursors.remove("billing")
    await cursors.remove("billing")
    assert await stored(store) is None
    assert cursors.all() == {}
    assert cursors.lowest() is None
    await cursors.flush()
    assert await stored(store) is None, "nothing writes it back"


async def test_a_placement_changes_with_each_seek_and_with_no_ack(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    cursors = (await opened(store)).cursors
    assert cursors.placement("billing") == 0
    seen = []
    for offset in (0, 50, 50, 7):
        await cursors.place(Placing("billing", Offset(offset)))
        seen.append(cursors.placement("billing"))
        cursors.advance("billing", Offset(offset + 10))
        await cursors.flush()
        assert cursors.placement("billing") == await placement(store) == seen[-1]
    assert seen == sorted(set(seen))
    again = (await opened(store)).cursors
    assert again.placement("billing") == seen[-1], "another owner is no other place"


async def test_no_placement_comes_back_when_a_subscription_is_made_again(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    seen = []
    for _ in range(3):
        cursors = (await opened(store)).cursors
        for _ in range(3):
            await cursors.place(Placing("billing", Offset(0)))
            seen.append(cursors.placement("billing"))
            await cursors.remove("billing")
            assert cursors.placement("billing") == 0
    assert seen == sorted(set(seen))


async def test_a_cursor_that_was_stored_before_there_were_placements_is_read(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    key = paths.cursor(ORDERS.path, NAME.descriptor, "billing")
    await store.txn([], [Put(key, b'{"offset":40,"epoch":1}')])
    cursors = (await opened(store)).cursors
    assert (cursors.offset("billing"), cursors.placement("billing")) == (40, 0)


async def test_a_cursor_that_is_set_to_the_end_has_another_placement_before_anything_is_appended(
    simulation: Simulation,
) -> None:
    store = MemoryStore(simulation.clock)
    cursors = (await opened(store, end=100)).cursors
    await cursors.place(Placing("billing", Offset(80)))
    await cursors.place(Placing("audit", Offset(20)))
    billing, audit = cursors.placement("billing"), cursors.placement("audit")
    shorter = (await opened(store, end=60)).cursors
    assert await stored(store) == shorter.offset("billing") == 60
    assert await placement(store) == shorter.placement("billing") > billing
    assert shorter.placement("audit") == audit
    longer = (await opened(store, end=90)).cursors
    assert longer.offset("billing") == 60, "what took the lost offsets is still to be consumed"


async def test_a_log_that_may_have_lost_records_places_every_cursor_anew(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    cursors = (await opened(store)).cursors
    names = [f"subscription-{number}" for number in range(2 * MAX_CURSORS_PER_TXN)]
    for name in names:
        await cursors.place(Placing(name, Offset(40)))
    before = {name: cursors.placement(name) for name in names}
    ownership = await own(store, NAME, epoch=2)
    again = Cursors(store, NAME, Epoch(2), ownership, lambda: Offset(100), CursorConfig(), now_us=lambda: 1)
    await again.load(lossy=True)
    assert again.all() == dict.fromkeys(names, 40)
    for name in names:
        assert again.placement(name) == await placement(store, name)
        assert again.placement(name) not in before.values()


async def test_a_former_owner_writes_nothing_and_acks_are_refused_from_then_on(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    cursors = (await opened(store)).cursors
    await cursors.place(Placing("billing", Offset(0)))
    cursors.start()
    cursors.advance("billing", Offset(10))
    await own(store, NAME, owner="broker-2", epoch=2)
    await asyncio.sleep(5.0)
    assert await stored(store) == 0
    with pytest.raises(Fenced, match="another owner"):
        cursors.advance("billing", Offset(11))
    for write in (cursors.place(Placing("billing", Offset(3))), cursors.remove("billing"), cursors.flush()):
        with pytest.raises(Fenced):
            await write
    await cursors.stop()
    assert await stored(store) == 0


async def test_a_change_of_state_under_the_same_owner_and_epoch_does_not_fence(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    cursors = (await opened(store)).cursors
    await cursors.place(Placing("billing", Offset(0)))
    cursors.advance("billing", Offset(10))
    key = paths.ownership(ORDERS.path, NAME.descriptor)
    draining = Ownership(state=OwnershipState.DRAINING, owner="broker-1", epoch=Epoch(1))
    await store.txn([], [Put(key, draining.to_json())])
    await cursors.stop()
    assert await stored(store) == 10


async def test_no_cursor_is_stored_after_its_segment_was_sealed(simulation: Simulation) -> None:
    """A sweep had a subscription's cursor to place while the segment was handed over."""
    store = MemoryStore(simulation.clock)
    cursors = (await opened(store)).cursors
    await cursors.place(Placing("billing", Offset(0)))
    sealed = Ownership(state=OwnershipState.SEALED, owner="broker-1", epoch=Epoch(1))
    await store.txn([], [Put(paths.ownership(ORDERS.path, NAME.descriptor), sealed.to_json())])
    for write in (cursors.place(Placing("mailer", Offset(0))), cursors.place(Placing("billing", Offset(3)))):
        with pytest.raises(Fenced, match="sealed"):
            await write
    assert await stored(store) == 0
    assert await stored(store, "mailer") is None


@pytest.mark.parametrize(("owner", "epoch"), [("broker-2", 1), ("broker-1", 2), ("", 0)])
async def test_whoever_owns_the_cursors_is_told_once_that_they_are_fenced(
    owner: str, epoch: int, simulation: Simulation
) -> None:
    store = MemoryStore(simulation.clock)
    told: list[Fenced] = []
    ownership = await own(store, NAME)
    end = Offset(100)
    cursors = Cursors(
        store,
        NAME,
        Epoch(1),
        ownership,
        lambda: end,
        CursorConfig(flush_s=1.0),
        now_us=lambda: 1,
        on_fenced=told.append,
    )
    await cursors.load()
    await cursors.place(Placing("billing", Offset(0)))
    cursors.start()
    if owner:
        await own(store, NAME, owner=owner, epoch=epoch)
    else:
        await store.txn([], [Delete(ownership.key)])
    cursors.advance("billing", Offset(10))
    await asyncio.sleep(1.1)
    assert len(told) == 1, "by the flush in the background, without anybody asking"
    for write in (cursors.place(Placing("billing", Offset(3))), cursors.flush()):
        with pytest.raises(Fenced):
            await write
    await cursors.stop()
    assert len(told) == 1


async def test_a_segment_that_was_lost_cannot_have_its_cursors_loaded(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    ownership = await own(store, NAME)
    await own(store, NAME, owner="broker-2", epoch=2)
    cursors = Cursors(store, NAME, Epoch(1), ownership, lambda: Offset(0), CursorConfig(), now_us=lambda: 1)
    with pytest.raises(Fenced):
        await cursors.load()


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.UNCERTAIN])
async def test_a_flush_that_fails_is_tried_again(
    fault: Fault, caplog: pytest.LogCaptureFixture, simulation: Simulation
) -> None:
    store = MemoryStore(simulation.clock)
    cursors = (await opened(store)).cursors
    await cursors.place(Placing("billing", Offset(0)))
    cursors.start()
    store.fault = lambda request: fault if request == "txn" else Fault.UNAVAILABLE
    cursors.advance("billing", Offset(10))
    await asyncio.sleep(30.0)
    store.fault = lambda _: Fault.NONE
    cursors.advance("billing", Offset(20))
    await asyncio.sleep(5.0)
    assert await stored(store) == 20
    await cursors.stop()


async def test_an_orderly_stop_without_a_store_says_that_acks_are_not_stored(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    cursors = (await opened(store)).cursors
    await cursors.place(Placing("billing", Offset(0)))
    cursors.start()
    cursors.advance("billing", Offset(10))
    store.disconnect()
    with pytest.raises(MetadataUnavailable):
        await cursors.stop()


@pytest.mark.parametrize("fault", [Fault.NONE, Fault.UNCERTAIN])
async def test_a_lost_answer_is_read_back(fault: Fault, simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    cursors = (await opened(store)).cursors
    store.fault = faults(fault)
    await cursors.place(Placing("billing", Offset(5)))
    assert await stored(store) == cursors.offset("billing") == 5
    store.fault = faults(fault)
    cursors.advance("billing", Offset(6))
    await cursors.flush()
    assert await stored(store) == 6
    store.fault = faults(fault)
    await cursors.remove("billing")
    assert await stored(store) is None


class LateStore(MemoryStore):
    """Can keep one transaction back and say that its answer was lost."""

    keep_next = False
    kept: tuple[Sequence[Condition], Sequence[Operation]] | None = None

    async def txn(self, conditions: Sequence[Condition], operations: Sequence[Operation]) -> TxnResult:
        if self.keep_next:
            self.keep_next, self.kept = False, (conditions, operations)
            raise MetadataUncertain("the answer was lost")
        return await super().txn(conditions, operations)


async def test_an_old_write_that_arrives_late_does_not_undo_a_seek(simulation: Simulation) -> None:
    """A request that timed out may still arrive. Its conditions no longer hold then."""
    store = LateStore(simulation.clock)
    cursors = (await opened(store)).cursors
    await cursors.place(Placing("billing", Offset(0)))
    cursors.advance("billing", Offset(50))
    store.keep_next = True
    await cursors.flush()
    assert await stored(store) == 50, "the second try"
    await cursors.place(Placing("billing", Offset(10)))
    assert store.kept is not None
    assert not (await store.txn(*store.kept)).succeeded
    assert await stored(store) == 10


async def test_acks_that_come_during_a_flush_stay_dirty(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    cursors = (await opened(store)).cursors
    await cursors.place(Placing("billing", Offset(0)))
    cursors.advance("billing", Offset(1))
    flushing = asyncio.ensure_future(cursors.flush())
    await asyncio.sleep(0)
    cursors.advance("billing", Offset(2))
    await flushing
    assert await stored(store) == 1
    await cursors.flush()
    assert await stored(store) == 2


async def test_a_stored_cursor_that_cannot_be_read_is_an_error_and_no_absence(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    good = encode(Cursor(offset=Offset(1), epoch=Epoch(1)))
    await store.txn([], [Put(paths.cursor(ORDERS.path, NAME.descriptor, "billing"), good[:-1])])
    with pytest.raises(MetadataCorrupt, match="Cursor"):
        await opened(store)


@pytest.mark.parametrize("seed", range(30))
async def test_whatever_the_store_does_cursors_end_up_stored_and_never_went_ahead(
    seed: int, simulation: Simulation
) -> None:
    """Random faults on every request, acks, seeks, syncs and restarts: the store is never ahead of the synced end or of
    the acks, and an orderly stop leaves it where the acks were."""
    store = MemoryStore(simulation.clock)
    segment = await opened(store, end=10)
    cursors, random = segment.cursors, simulation.random
    await cursors.place(Placing("billing", Offset(0)))
    cursors.start()
    highest = 0
    for _ in range(200):
        store.fault = lambda _: random.choices([*Fault], [8, 1, 1])[0]
        if random.random() < 0.3:
            segment.grow(segment.end + random.randrange(5), synced=segment.end)
        offset = random.randrange(segment.end + 1)
        cursors.advance("billing", Offset(offset))
        highest = max(highest, offset)
        await asyncio.sleep(random.random())
        value = await stored(store)
        assert value is not None
        assert value <= min(highest, segment.end)
    store.fault = lambda _: Fault.NONE
    segment.grow(segment.end)
    await cursors.stop()
    assert await stored(store) == cursors.offset("billing") == highest


async def test_a_cursor_keeps_the_fields_that_this_build_does_not_know(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    key = paths.cursor(ORDERS.path, NAME.descriptor, "billing")
    await store.txn([], [Put(key, b'{"offset":1,"epoch":1,"tier":"gold"}')])
    cursors = (await opened(store)).cursors
    cursors.advance("billing", Offset(5))
    await cursors.flush()
    cursors.advance("billing", Offset(6))
    await cursors.flush()
    entry = await store.get(key)
    assert entry is not None
    assert b'"offset":6' in entry.value
    assert b'"tier":"gold"' in entry.value


async def test_a_cursor_says_when_it_moved_also_after_a_restart(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    now_us = simulation.clock.now_us
    cursors = (await plain_segment(store, NAME, end=100, now_us=now_us)).cursors
    await cursors.place(Placing("billing", Offset(0)))
    await cursors.place(Placing("mailer", Offset(7)))
    placed_at = now_us()
    await asyncio.sleep(50)
    cursors.advance("billing", Offset(10))
    assert cursors.all_moved_at() == {"billing": now_us(), "mailer": placed_at}
    await cursors.flush()
    acked_at = now_us()
    await asyncio.sleep(50)
    again = (await plain_segment(store, NAME, end=100, now_us=now_us)).cursors
    assert again.all_moved_at() == {"billing": acked_at, "mailer": placed_at}
    assert (again.lowest(), again.lowest(placed_at), again.lowest(acked_at), again.lowest(acked_at + 1)) == (
        7, 7, 10, None,
    )  # fmt: skip


async def test_a_subscription_that_has_nothing_before_it_does_not_grow_old(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    now_us = simulation.clock.now_us
    segment = await plain_segment(store, NAME, end=100, now_us=now_us)
    await segment.cursors.place(Placing("billing", Offset(100)))
    await segment.cursors.place(Placing("forgotten", Offset(99)))
    placed_at = now_us()
    await asyncio.sleep(1_000)
    requests = counted(store)
    segment.cursors.note_consumed(placed_at)
    await segment.cursors.flush()
    assert requests == [], "the stored time is young enough"
    assert segment.cursors.all_moved_at() == {"billing": now_us(), "forgotten": placed_at}
    segment.cursors.note_consumed(placed_at + 1)
    await segment.cursors.flush()
    again = (await plain_segment(store, NAME, end=100, now_us=now_us)).cursors
    assert again.all_moved_at() == {"billing": now_us(), "forgotten": placed_at}


async def test_a_cursor_of_an_earlier_version_grows_old_from_its_opening_on(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    now_us = simulation.clock.now_us
    await store.txn([], [Put(paths.cursor(ORDERS.path, NAME.descriptor, "billing"), b'{"offset":1,"epoch":1}')])
    cursors = (await plain_segment(store, NAME, end=100, now_us=now_us)).cursors
    opened_at = now_us()
    await cursors.flush()
    await asyncio.sleep(100)
    again = (await plain_segment(store, NAME, end=100, now_us=now_us)).cursors
    assert again.moved_at("billing") == opened_at
