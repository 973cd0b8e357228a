"""Run `async def` tests in virtual time, with pytest.

Enable the plugin in the root `conftest.py`:

    pytest_plugins = ["braid.testing.pytest_plugin"]

Every coroutine test then runs on a simulated loop of its own (`braid.testing.sim.loop`). Sleeping costs nothing, and
the same seed runs the same callbacks in the same order:

    async def test_a_lease_ends_after_its_time(store: MemoryStore) -> None:
        lease = await store.grant_lease(3_600)
        await asyncio.sleep(3_601)
        with pytest.raises(LeaseLost):
            await lease.renew()

The seed is 1. A test chooses another one by a marker or by an argument of that name:

    @pytest.mark.seed(7)
    async def test_one_seed() -> None: ...

    @pytest.mark.parametrize("seed", range(20))
    async def test_many_seeds(seed: int) -> None: ...

A failure carries a note with the seed, the virtual time and the step. A task that failed without anybody looking at its
result fails the test, and so does a test that can never go on.

Fixtures: `simulation` is the running simulation with its clock, its random numbers and its processes; `disk`,
`network`, `store` and `objects` are the simulated ports of that simulation.

A test that needs the kernel (a real disk, sockets, threads, another process) runs on asyncio's own loop instead:

    @pytest.mark.real_loop
    async def test_over_sockets() -> None: ...

    @pytest.mark.real_loop(timeout_s=10)
    async def test_that_must_end_soon() -> None: ...
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from braid.metadata.memory import MemoryStore
from braid.testing.sim.disk import SimulatedDisk
from braid.testing.sim.loop import STEP_LIMIT, SimulatedLoop, Simulation, run_to_end
from braid.testing.sim.network import SimulatedNetwork
from braid.testing.sim.objects import MemoryObjects

DEFAULT_SEED = 1
REAL_TIMEOUT_S = 100.0
"""A test on the real loop takes seconds. After this time it hangs, and its tasks say where."""

MARKERS = (
    "seed(number): run this coroutine test on the simulated loop with this seed; 1 without the marker",
    "real_loop(timeout_s=100): run this coroutine test on asyncio's own loop, in real time",
)

_simulation = pytest.StashKey[Simulation]()


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)


@pytest.fixture
def simulation(request: pytest.FixtureRequest) -> Iterator[Simulation]:
    """Give the simulation in which the test runs."""
    item = request.node
    if not is_simulated(item):
        pytest.fail(f"{item.name} does not run in a simulation: it is no coroutine, or it has the marker real_loop")
    created = Simulation(seed_of(item), SimulatedLoop(seed_of(item), step_limit=STEP_LIMIT))
    item.stash[_simulation] = created
    yield created
    created.loop.close()  # Another fixture may have failed before the test could run, and close the loop.


@pytest.fixture
def disk(simulation: Simulation) -> SimulatedDisk:
    return SimulatedDisk(simulation.random)


@pytest.fixture
def network(simulation: Simulation) -> SimulatedNetwork:
    return SimulatedNetwork(simulation.random)


@pytest.fixture
def store(simulation: Simulation) -> MemoryStore:
    return MemoryStore(simulation.clock)


@pytest.fixture
def objects(simulation: Simulation) -> MemoryObjects:
    return MemoryObjects(simulation.clock)


def is_simulated(item: pytest.Item) -> bool:
    return inspect.iscoroutinefunction(getattr(item, "obj", None)) and item.get_closest_marker("real_loop") is None


def seed_of(item: pytest.Item) -> int:
    """Return the argument `seed` if the test has one, else the marker's number, else 1."""
    callspec = getattr(item, "callspec", None)
    if callspec is not None and isinstance(seed := callspec.params.get("seed"), int):
        return seed
    marker = item.get_closest_marker("seed")
    if marker is None:
        return DEFAULT_SEED
    (number,) = marker.args
    return int(number)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    test: Callable[..., Coroutine[Any, Any, None]] = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    if is_simulated(pyfuncitem):
        _run_simulated(pyfuncitem, lambda: test(**arguments))
    else:
        asyncio.run(_bounded(test(**arguments), _timeout_s(pyfuncitem)))
    return True


def _run_simulated(item: pytest.Item, test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    simulation = item.stash.get(_simulation, None)
    if simulation is None:  # The test asked for no fixture of the simulation.
        simulation = Simulation(seed_of(item), SimulatedLoop(seed_of(item), step_limit=STEP_LIMIT))
    run_to_end(simulation, lambda _: test())


def _timeout_s(item: pytest.Item) -> float:
    marker = item.get_closest_marker("real_loop")
    return REAL_TIMEOUT_S if marker is None else float(marker.kwargs.get("timeout_s", REAL_TIMEOUT_S))


async def _bounded(test: Coroutine[Any, Any, None], timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        await test
