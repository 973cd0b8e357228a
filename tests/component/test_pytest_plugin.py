"""The plugin that runs coroutine tests: whole runs of pytest on small test files."""

from __future__ import annotations

import asyncio
import textwrap
import time

import pytest

from braid.metadata.memory import MemoryStore
from braid.testing.sim.disk import SimulatedDisk
from braid.testing.sim.loop import SimulatedLoop, Simulation
from braid.testing.sim.network import SimulatedNetwork
from braid.testing.sim.objects import MemoryObjects

CONFTEST = 'pytest_plugins = ["braid.testing.pytest_plugin"]'
IMPORTS = "import asyncio\nimport pytest\n"


def outcome(pytester: pytest.Pytester, test: str, **expected: int) -> str:
    """Run one file of tests, check the counts, and return what pytest printed."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(IMPORTS + textwrap.dedent(test))
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:schemathesis", "--strict-markers")
    result.assert_outcomes(**expected)
    return result.stdout.str()


async def test_an_hour_costs_nothing() -> None:
    before, loop = time.monotonic(), asyncio.get_running_loop()
    await asyncio.sleep(3_600)
    assert isinstance(loop, SimulatedLoop)
    assert loop.time() == pytest.approx(3_600)
    assert time.monotonic() - before < 60


async def test_the_fixtures_belong_to_the_loop_that_runs(
    simulation: Simulation, disk: SimulatedDisk, network: SimulatedNetwork, store: MemoryStore, objects: MemoryObjects
) -> None:
    assert asyncio.get_running_loop() is simulation.loop
    lease = await store.grant_lease(10)
    await disk.make_folder("folder")
    await objects.create("object", [b"x"])
    listener = await network.host("a").listen("a", 1, asyncio.Protocol)
    await asyncio.sleep(5)
    assert lease.deadline - simulation.clock.monotonic() == pytest.approx(5, abs=0.1)
    await listener.close()


async def test_the_seed_is_1(simulation: Simulation) -> None:
    assert simulation.seed == 1


@pytest.mark.seed(7)
async def test_a_marker_chooses_the_seed(simulation: Simulation) -> None:
    assert simulation.seed == simulation.loop.seed == 7


@pytest.mark.seed(7)
@pytest.mark.parametrize("seed", [3, 4])
async def test_an_argument_chooses_the_seed(seed: int, simulation: Simulation) -> None:
    assert simulation.seed == seed


@pytest.mark.real_loop
async def test_a_marker_chooses_the_real_loop() -> None:
    assert not isinstance(asyncio.get_running_loop(), SimulatedLoop)
    assert await asyncio.to_thread(lambda: 3) == 3


def test_a_failure_names_seed_time_and_step(pytester: pytest.Pytester) -> None:
    test = """
        @pytest.mark.seed(7)
        async def test_fails():
            await asyncio.sleep(2.5)
            assert 1 == 2
    """
    printed = outcome(pytester, test, failed=1)
    assert "assert 1 == 2" in printed
    assert "simulation with seed 7, at 2.500000 s of virtual time, step " in printed


def test_a_failed_task_that_nobody_looked_at_fails_the_test(pytester: pytest.Pytester) -> None:
    test = """
        async def test_fails():
            async def fail():
                raise ValueError("unseen")

            task = asyncio.create_task(fail(), name="background")
            await asyncio.sleep(1)
    """
    assert "task background failed and nobody looked" in outcome(pytester, test, failed=1)


def test_a_test_that_can_never_go_on_fails(pytester: pytest.Pytester) -> None:
    test = """
        async def test_waits(simulation):
            await asyncio.Event().wait()
    """
    assert "SimulationStuck: nothing is ready and no timer runs" in outcome(pytester, test, failed=1)


def test_a_test_on_the_real_loop_ends_after_its_timeout(pytester: pytest.Pytester) -> None:
    test = """
        @pytest.mark.real_loop(timeout_s=0.05)
        async def test_waits():
            await asyncio.Event().wait()
    """
    assert "TimeoutError" in outcome(pytester, test, failed=1)


def test_an_ordinary_test_has_no_simulation(pytester: pytest.Pytester) -> None:
    test = """
        def test_ordinary(simulation):
            pass

        @pytest.mark.real_loop
        async def test_real(store):
            pass
    """
    printed = outcome(pytester, test, errors=2)
    assert "test_ordinary does not run in a simulation" in printed
    assert "test_real does not run in a simulation" in printed


def test_a_fixture_that_fails_leaves_no_loop_open(pytester: pytest.Pytester) -> None:
    test = """
        @pytest.fixture
        def broken(simulation):
            raise ValueError("no such thing")

        async def test_never_runs(broken):
            pass
    """
    printed = outcome(pytester, test, errors=1)
    assert "no such thing" in printed
    assert "ResourceWarning" not in printed
