"""A replicated topic under random faults, seed after seed (kits/replicated_world.py)."""

from __future__ import annotations

from collections import Counter
from functools import cache, partial

import pytest

from braid.testing.sim.loop import run_simulation
from tests.kits.replicated_world import ReplicatedWorld, run_world

pytestmark = pytest.mark.xdist_group("replicated-worlds")  # The last test looks at the worlds of the others.

SEEDS = range(8)
world_of_seed = cache(lambda seed: run_simulation(seed, partial(run_world, kind=ReplicatedWorld)))


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_lost_repeated_or_out_of_order(seed: int) -> None:
    world: ReplicatedWorld = world_of_seed(seed)
    assert len(world.confirmed) > 20
    assert sum(world.faults.values()) > 5


def test_seeds_meet_every_fault() -> None:
    met: Counter[str] = Counter()
    for seed in SEEDS:
        met += world_of_seed(seed).faults
    assert set(met) == {"kill", "power", "lose", "cut", "freeze", "away", "stop", "move"}
