"""A replicated topic under random faults, seed after seed (kits/replicated_world.py)."""

from __future__ import annotations

from collections import Counter

import pytest

from braid.testing.sim.loop import run_simulation
from tests.kits.replicated_world import run_world

SEEDS = range(8)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_lost_repeated_or_out_of_order(seed: int) -> None:
    world = run_simulation(seed, run_world)
    assert len(world.confirmed) > 100
    assert sum(world.faults.values()) > 10


def test_seeds_meet_every_fault() -> None:
    """The worlds of all seeds together: a fault that none of them meets tests nothing."""
    met: Counter[str] = Counter()
    for seed in SEEDS:
        met += run_simulation(seed, run_world).faults
    assert set(met) == {"kill", "power", "lose", "cut", "freeze", "away", "stop", "move"}
