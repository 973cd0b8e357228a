"""Drained marks of one segment: beside each cursor at the end of an ended log, and beside no other."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

from braid.broker.config import CursorConfig
from braid.broker.cursors.cursors import Cursors
from braid.broker.cursors.stored_cursors import MAX_CURSORS_PER_TXN
from braid.metadata import paths
from braid.metadata.memory import Fault, MemoryStore
from braid.metadata.store import Delete, Put
from braid.model.errors import MetadataUncertain
from braid.model.ids import Epoch, Offset, SegmentId
from braid.model.layout import FULL_RANGE
from braid.model.names import SegmentName
from braid.model.stored_record import decode
from braid.model.subscription import Cursor, Drained, Placing
from braid.testing.sim.loop import Simulation
from tests.kits.control import ORDERS, PlainSegment, counted, faults, own, plain_segment

NAME = SegmentName(ORDERS, FULL_RANGE, SegmentId(0))
SLOW = CursorConfig(flush_s=1_000.0)
END = 100


async def opened(store: MemoryStore, *, ended: bool = True, end: int = END) -> PlainSegment:
    return await plain_segment(store, NAME, end=end, ended=ended, config=SLOW)


async def marked(store: MemoryStore) -> list[str]:
    """The subscriptions that have a mark, each beside a cursor at the end."""
    listing = await store.client("looker-on").list(paths.segment_prefix(ORDERS.path, NAME.descriptor))
    cursors = {
        paths.subscription_of_cursor(entry.key): decode(Cursor, entry.value).offset
        for entry in listing.entries
        if paths.subscription_of_cursor(entry.key) is not None
    }
    marks = {
        found[2]: decode(Drained, entry.value).end
        for entry in listing.entries
        if (found := paths.drained_of(entry.key)) is not None
    }
    assert marks.items() <= cursors.items()
    return sorted(marks)


async def test_the_last_ack_of_an_ended_log_is_stored_with_its_mark_immediately(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    cursors = (await opened(store)).cursors
    await cursors.place(Placing("billing", Offset(0)))
    cursors.start()
    cursors.advance("billing", Offset(99))
    await asyncio.sleep(1)
    assert await marked(store) == []
    cursors.advance("billing", Offset(END))
    await asyncio.sleep(0.01)
    assert await marked(store) == ["billing"]
    await cursors.stop()


async def test_the_end_of_a_log_that_goes_on_is_no_mark(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    cursors = (await opened(store, ended=False)).cursors
    await cursors.place(Placing("billing", Offset(END)))
    await cursors.flush()
    assert await marked(store) == []


async def test_a_subscription_at_the_end_is_drained_when_the_log_ends(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    segment = await opened(store, ended=False)
    cursors = segment.cursors
    await cursors.place(Placing("billing", Offset(0)))
    await cursors.place(Placing("audit", Offset(END)))
    cursors.start()
    cursors.advance("billing", Offset(50))
    segment.end_log()
    await asyncio.sleep(0.01)
    assert await marked(store) == ["audit"]
    await cursors.stop()


async def test_an_ack_that_is_not_stored_yet_when_the_log_ends_is_stored_with_its_mark(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    segment = await opened(store, ended=False)
    await segment.cursors.place(Placing("billing", Offset(0)))
    segment.cursors.start()
    segment.cursors.advance("billing", Offset(END))
    segment.end_log()
    await asyncio.sleep(0.01)
    assert await marked(store) == ["billing"]
    await segment.cursors.stop()


@pytest.mark.parametrize("start", [0, END])
async def test_a_new_subscription_at_the_end_of_an_ended_log_is_drained_from_the_start(
    start: int, simulation: Simulation
) -> None:
    store = MemoryStore(simulation.clock)
    cursors = (await opened(store)).cursors
    await cursors.begin("billing", Offset(start))
    assert await marked(store) == ([] if start == 0 else ["billing"])


async def test_an_empty_log_is_drained_by_everybody(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    cursors = (await opened(store, end=0)).cursors
    await cursors.begin("billing", Offset(0))
    assert await marked(store) == ["billing"]


async def test_a_seek_backwards_takes_the_mark_away_in_the_same_transaction(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    cursors = (await opened(store)).cursors
    await cursors.place(Placing("billing", Offset(END)))
    assert await marked(store) == ["billing"]
    requests = counted(store)
    await cursors.place(Placing("billing", Offset(40)))
    assert requests == ["txn"]
    assert await marked(store) == []
    await cursors.place(Placing("billing", Offset(END)))
    assert await marked(store) == ["billing"]


async def test_a_skip_to_the_end_drains(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    cursors = (await opened(store)).cursors
    await cursors.place(Placing("billing", Offset(40)))
    await cursors.place(Placing("billing", Offset(0), skip=1_000))
    assert await marked(store) == ["billing"]


async def test_a_removed_cursor_leaves_no_mark(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    cursors = (await opened(store)).cursors
    await cursors.place(Placing("billing", Offset(END)))
    await cursors.remove("billing")
    assert (await store.list(paths.segment_prefix(ORDERS.path, NAME.descriptor) + "drained/")).entries == ()


async def test_a_mark_without_a_cursor_does_not_count_for_the_next_subscription_of_that_name(
    simulation: Simulation,
) -> None:
    store = MemoryStore(simulation.clock)
    await store.txn([], [Put(paths.drained(ORDERS.path, NAME.descriptor, "billing"), b'{"end":100}')])
    cursors = (await opened(store)).cursors
    await cursors.begin("billing", Offset(0))
    assert await marked(store) == []


async def test_an_opening_makes_the_marks_right(simulation: Simulation) -> None:
    """An owner may die between the end of its log and the mark, and a cursor may lose its place with its records."""
    store = MemoryStore(simulation.clock)
    cursors = (await opened(store, ended=False)).cursors
    await cursors.place(Placing("billing", Offset(END)))
    await cursors.place(Placing("audit", Offset(40)))
    assert await marked(store) == []
    await opened(store)
    assert await marked(store) == ["billing"]
    await store.txn([], [Delete(paths.drained(ORDERS.path, NAME.descriptor, "billing"))])
    await opened(store)
    assert await marked(store) == ["billing"]
    await opened(store, ended=False)
    assert await marked(store) == [], "the log has lost its end, and goes on"


async def test_a_loss_that_is_accepted_takes_the_marks_away_until_the_log_is_open(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    await (await opened(store)).cursors.place(Placing("billing", Offset(END)))
    ownership = await own(store, NAME, epoch=2)
    unknown = Cursors(store, NAME, Epoch(2), ownership, lambda: Offset(1 << 62), SLOW, now_us=lambda: 1)
    await unknown.load(lossy=True)
    assert await marked(store) == []
    await plain_segment(store, NAME, end=60, ended=True, epoch=3)
    assert await marked(store) == ["billing"], "what is left of the log ends at 60"


async def test_a_subscription_whose_rest_retention_has_deleted_is_drained(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    earliest = 0
    ownership = await own(store, NAME)
    cursors = Cursors(
        store, NAME, Epoch(1), ownership, lambda: Offset(END), SLOW,
        now_us=lambda: 1, drained=lambda offset: max(offset, earliest) >= END,
    )  # fmt: skip
    await cursors.load()
    await cursors.place(Placing("billing", Offset(40)))
    cursors.start()
    mark = paths.drained(ORDERS.path, NAME.descriptor, "billing")
    earliest = 60
    cursors.note_drained()
    await asyncio.sleep(0.01)
    assert await store.get(mark) is None
    earliest = END
    cursors.note_drained()
    await asyncio.sleep(0.01)
    assert await store.get(mark) is not None
    await cursors.stop()


async def test_many_cursors_are_drained_within_the_limit_of_a_transaction(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    segment = await opened(store, ended=False)
    names = sorted(f"s{number}" for number in range(2 * MAX_CURSORS_PER_TXN + 1))
    for name in names:
        await segment.cursors.place(Placing(name, Offset(0)))
        segment.cursors.advance(name, Offset(END))
    segment.end_log()
    requests = counted(store)
    await segment.cursors.flush()
    assert requests == ["txn"] * 3
    assert await marked(store) == names


@pytest.mark.parametrize("offset", [40, END])
async def test_a_seek_whose_answer_is_lost_leaves_the_mark_that_fits_the_place(
    offset: int, simulation: Simulation
) -> None:
    store = MemoryStore(simulation.clock)
    cursors = (await opened(store)).cursors
    await cursors.place(Placing("billing", Offset(END - offset if offset == END else END)))
    store.fault = faults(Fault.UNCERTAIN)
    await cursors.place(Placing("billing", Offset(offset)))
    assert await marked(store) == (["billing"] if offset == END else [])


async def test_a_seek_that_is_not_known_to_have_happened_is_undone_with_its_mark(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    cursors = (await opened(store)).cursors
    await cursors.place(Placing("billing", Offset(END)))
    number = count()
    store.fault = lambda _: Fault.UNCERTAIN if next(number) == 0 else Fault.UNAVAILABLE
    with pytest.raises(MetadataUncertain):
        await cursors.place(Placing("billing", Offset(40)))
    store.fault = lambda _: Fault.NONE
    assert await marked(store) == [], "the seek was stored, though nobody was told"
    await cursors.flush()
    assert cursors.offset("billing") == END
    assert await marked(store) == ["billing"]


@pytest.mark.parametrize("seed", range(30))
async def test_whatever_the_store_does_marks_fit_their_cursors(seed: int, simulation: Simulation) -> None:
    """Random faults on every request, acks, seeks, the end of the log and crashes of its owner. `marked` looks at one
    revision of the store after each step."""
    store = MemoryStore(simulation.clock)
    random = simulation.random
    segment = await plain_segment(store, NAME, end=5)
    await segment.cursors.place(Placing("billing", Offset(0)))
    segment.cursors.start()
    for step in range(150):
        store.fault = lambda _: random.choices([*Fault], [8, 1, 1])[0]
        if step == 50:
            segment.end_log()
        action = random.random()
        if action < 0.1:
            await asyncio.gather(
                segment.cursors.place(Placing("billing", Offset(random.randrange(6)))), return_exceptions=True
            )
        elif action < 0.15:  # The owner dies, and comes back in the next epoch.
            store.fault = lambda _: Fault.NONE
            await asyncio.gather(segment.cursors.stop(), return_exceptions=True)
            segment = await plain_segment(store, NAME, end=5, ended=step >= 50, epoch=step + 2)
            segment.cursors.start()
        else:
            segment.cursors.advance("billing", Offset(random.randrange(6)))
        await asyncio.sleep(random.random())
        await marked(store)
    store.fault = lambda _: Fault.NONE
    segment.cursors.advance("billing", Offset(5))
    await segment.cursors.stop()
    assert await marked(store) == ["billing"]
