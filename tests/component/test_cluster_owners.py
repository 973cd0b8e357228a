"""The ownership records of a cluster, and the one way to change them."""

from __future__ import annotations

from braid.cluster.owners import SWAPS_TOGETHER, Owners, Swap, grouped
from braid.metadata import paths
from braid.metadata.memory import Fault, MemoryStore
from braid.metadata.store import MAX_TXN_OPERATIONS, Compare, Delete, Put
from braid.metadata.view import View
from braid.model.ids import Revision
from braid.model.names import SegmentName
from braid.model.ownership import Ownership
from braid.testing.sim.loop import Simulation
from tests.kits.control import faults
from tests.kits.leader import names_of

NAME = SegmentName.parse("segment://public/default/orders/0000-ffff-0")
KEY = paths.ownership(NAME.topic.path, NAME.descriptor)
FIRST = Ownership.first("a")


async def test_a_key_that_names_no_segment_is_left_aside_and_the_others_are_followed(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    owners = Owners(View(store))
    await owners.view.load()
    bad = "/segments/public/default/orders/not-a-segment/ownership"
    await store.txn([], [Put(bad, FIRST.to_json())])
    written = await store.txn([], [Put(KEY, FIRST.to_json())])
    await owners.view.caught_up(written.revision)
    assert owners.of_topic(NAME.topic.path) == {NAME.descriptor: FIRST}
    gone = await store.txn([], [Delete(KEY)])
    await owners.view.caught_up(gone.revision)
    assert owners.of_topic(NAME.topic.path) == {}
    await owners.view.stop()


async def test_a_swap_whose_answer_was_lost_is_told_by_what_stands_there(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    owners = Owners(View(store))
    await owners.view.load()
    store.fault = faults(Fault.UNCERTAIN)
    made = await owners.swap(NAME, Revision(0), FIRST)
    assert made is not None
    entry = await store.get(KEY)
    assert entry is not None
    assert (entry.revision, Ownership.from_json(entry.value)) == (made, FIRST)
    assert await owners.swap(NAME, Revision(0), Ownership.first("b")) is None
    store.fault = faults(Fault.UNCERTAIN)
    assert await owners.swap(NAME, Revision(0), Ownership.first("b")) is None
    await owners.view.stop()


def swaps(count: int, *conditions: Compare) -> list[Swap]:
    """First records of as many segments."""
    return [Swap(name, Revision(0), FIRST, conditions) for name in names_of(count)]


async def test_many_records_change_in_few_transactions(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    owners = Owners(View(store))
    await owners.view.load()
    made = await owners.swap_all(swaps(2 * SWAPS_TOGETHER + 1, Compare("/leader", Revision(0))))
    assert len({*made}) == 3
    assert None not in made
    await owners.view.caught_up(Revision(max(each for each in made if each is not None)))
    assert len(owners.table.all()) == 2 * SWAPS_TOGETHER + 1
    await owners.view.stop()


async def test_a_record_that_has_changed_keeps_no_other_one_from_changing(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    owners = Owners(View(store))
    await owners.view.load()
    wanted = swaps(4)
    path, descriptor = wanted[2].name.topic.path, wanted[2].name.descriptor
    await store.txn([], [Put(paths.ownership(path, descriptor), Ownership.first("b").to_json())])
    made = await owners.swap_all(wanted)
    assert [each is not None for each in made] == [True, True, False, True]
    await owners.view.stop()


async def test_no_record_changes_when_a_condition_of_all_fails(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    owners = Owners(View(store))
    await owners.view.load()
    await store.txn([], [Put("/leader", b"b")])
    assert await owners.swap_all(swaps(40, Compare("/leader", Revision(0)))) == [None] * 40
    assert not (await store.list(paths.SEGMENTS_PREFIX)).entries
    await owners.view.stop()


def test_a_group_of_records_fits_into_one_transaction() -> None:
    """Each record may bring conditions of its own."""
    wanted = [
        each._replace(conditions=tuple(Compare(f"/{number}/{each.name.id}", Revision(0)) for number in range(9)))
        for each in swaps(30)
    ]
    found = list(grouped(wanted))
    assert [each for group in found for each in group] == wanted
    assert [len(group) for group in found] == [12, 12, 6]
    assert 12 * 10 <= MAX_TXN_OPERATIONS < 13 * 10
