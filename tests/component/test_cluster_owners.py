"""The ownership records of a cluster, and the one way to change them."""

from __future__ import annotations

from braid.cluster.owners import Owners
from braid.metadata import paths
from braid.metadata.memory import Fault, MemoryStore
from braid.metadata.store import Delete, Put
from braid.metadata.view import View
from braid.model.ids import Revision
from braid.model.names import SegmentName
from braid.model.ownership import Ownership
from braid.testing.sim.loop import Simulation
from tests.kits.control import faults

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
