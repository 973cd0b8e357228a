"""Setting cursors to another place: twice, late, and when nobody knows whether that has happened."""

from __future__ import annotations

import pytest

from braid.metadata.memory import Fault, MemoryStore
from braid.model.errors import (
    ConditionFailed,
    MetadataUncertain,
    SubscriptionNotFound,
)
from braid.model.ids import Offset, RequestId
from braid.model.subscription import Placing
from braid.testing.sim.loop import Simulation
from tests.kits.control import faults_at
from tests.kits.cursors import opened, placement, stored


async def test_a_seek_that_is_repeated_recognises_its_own_place_and_leaves_the_acks_since(
    simulation: Simulation,
) -> None:
    store = MemoryStore(simulation.clock)
    cursors = (await opened(store)).cursors
    await cursors.place(Placing("billing", Offset(0)))
    seek = Placing("billing", Offset(40), request_id=RequestId(7), since=cursors.placement("billing"))
    assert await cursors.place(seek) == 40
    placement = cursors.placement("billing")
    cursors.advance("billing", Offset(50))
    assert await cursors.place(seek) == 50
    await cursors.flush()
    again = (await opened(store)).cursors  # another owner
    assert await again.place(seek) == await stored(store) == again.offset("billing") == 50
    assert again.placement("billing") == placement


@pytest.mark.parametrize("request_id", [0, 8])
async def test_a_seek_that_comes_late_does_not_undo_a_later_one(request_id: int, simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    cursors = (await opened(store)).cursors
    await cursors.place(Placing("billing", Offset(40)))
    late = Placing("billing", Offset(90), request_id=RequestId(request_id), since=cursors.placement("billing"))
    cursors.advance("billing", Offset(41))  # Acks are no seeks.
    await cursors.place(Placing("billing", Offset(0), request_id=RequestId(7), since=late.since))
    with pytest.raises(ConditionFailed, match="billing"):
        await cursors.place(late)
    again = (await opened(store)).cursors  # another owner
    with pytest.raises(ConditionFailed):
        await again.place(late)
    assert await stored(store) == cursors.offset("billing") == again.offset("billing") == 0


async def test_a_seek_that_began_before_a_loss_was_accepted_has_to_look_again(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    cursors = (await opened(store)).cursors
    await cursors.place(Placing("billing", Offset(40)))
    late = Placing("billing", Offset(20), request_id=RequestId(7), since=cursors.placement("billing"))
    await cursors.load(lossy=True)
    with pytest.raises(ConditionFailed):
        await cursors.place(late)


async def test_a_skip_counts_from_the_cursor_as_it_is_and_goes_no_further_than_the_end(simulation: Simulation) -> None:
    cursors = (await opened(MemoryStore(simulation.clock))).cursors
    await cursors.place(Placing("billing", Offset(0)))
    cursors.advance("billing", Offset(50))
    assert await cursors.place(Placing("billing", Offset(0), skip=15)) == 65
    assert await cursors.place(Placing("billing", Offset(80), skip=5)) == 85, "what is gone is not counted"
    assert await cursors.place(Placing("billing", Offset(0), skip=1 << 53)) == 100
    with pytest.raises(SubscriptionNotFound):
        await cursors.place(Placing("nobody", Offset(0), skip=1))


@pytest.mark.parametrize("lossy", [False, True])
async def test_a_seek_whose_place_was_lost_with_records_is_made_again(lossy: bool, simulation: Simulation) -> None:
    """What the seek had set is not where the cursor is any more: its repeat has to look."""
    cursors = (await opened(MemoryStore(simulation.clock))).cursors
    await cursors.place(Placing("billing", Offset(0)))
    seek = Placing("billing", Offset(40), request_id=RequestId(7), since=cursors.placement("billing"))
    await cursors.place(seek)
    await cursors.load(lossy=lossy)
    if lossy:
        with pytest.raises(ConditionFailed):
            await cursors.place(seek)
    else:
        assert await cursors.place(seek) == 40


async def test_after_a_place_of_which_nothing_is_known_store_and_memory_agree_again(simulation: Simulation) -> None:
    """The answer was lost, and so was the read-back. Nothing could be placed any more until an ack came."""
    store = MemoryStore(simulation.clock)
    cursors = (await opened(store)).cursors
    await cursors.place(Placing("billing", Offset(10)))
    before = cursors.placement("billing")
    store.fault = faults_at(("txn", Fault.UNCERTAIN), ("list", Fault.UNAVAILABLE))
    with pytest.raises(MetadataUncertain):
        await cursors.place(Placing("billing", Offset(40), request_id=RequestId(7), since=before))
    assert await stored(store) == 40
    await cursors.flush()
    assert await stored(store) == cursors.offset("billing") == 10
    assert await placement(store) == cursors.placement("billing") == before


async def test_a_subscription_that_is_made_again_takes_a_cursor_over_under_another_placement(
    simulation: Simulation,
) -> None:
    cursors = (await opened(MemoryStore(simulation.clock))).cursors
    await cursors.place(Placing("billing", Offset(10)))
    before = cursors.placement("billing")
    assert await cursors.begin("billing", Offset(60)) == 10
    assert cursors.placement("billing") != before
