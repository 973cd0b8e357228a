"""A queue of a replicated topic under random faults, seed after seed (kits/queue_world.py)."""

from __future__ import annotations

from functools import partial

import pytest

from braid.testing.sim.loop import run_simulation
from tests.kits.queue_world import QueueWorld
from tests.kits.replicated_world import run_world


@pytest.mark.parametrize("seed", range(6))
def test_no_confirmed_ack_is_undone_and_every_message_is_settled(seed: int) -> None:
    world = run_simulation(seed, partial(run_world, kind=QueueWorld))
    assert len(world.settled) > 20
    assert sum(world.faults.values()) > 5
