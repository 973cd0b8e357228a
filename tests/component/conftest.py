"""Fixtures of tests in virtual time."""

from __future__ import annotations

import pytest

from braid.testing.sim.loop import Simulation
from tests.kits.fault_scenes import Scene
from tests.kits.storage import World


@pytest.fixture
def world(simulation: Simulation) -> World:
    return World(simulation)


@pytest.fixture
def scene(simulation: Simulation) -> Scene:
    return Scene(simulation)
