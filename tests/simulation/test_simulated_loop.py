"""The loop in virtual time: deterministic, fast, and loud about what goes wrong in silence elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from braid.testing.sim.clock import START_US
from braid.testing.sim.loop import Simulation, SimulationFailed, SimulationStuck, run_simulation


def test_an_hour_passes_in_no_time() -> None:
    async def main(sim: Simulation) -> float:
        before = time.monotonic()
        await asyncio.sleep(3_600)
        assert time.monotonic() - before < 60
        return sim.loop.time()

    assert run_simulation(1, main) == pytest.approx(3_600)


def test_timers_fire_in_order_of_their_times() -> None:
    async def main(sim: Simulation) -> list[tuple[float, float]]:
        fired: list[tuple[float, float]] = []

        async def wait(seconds: float) -> None:
            await asyncio.sleep(seconds)
            fired.append((seconds, sim.loop.time()))

        await asyncio.gather(*(wait(sim.random.random() * 1e6) for _ in range(200)))
        return fired

    fired = run_simulation(7, main)
    assert fired == sorted(fired)
    assert all(asked == pytest.approx(at) for asked, at in fired)


async def noisy(sim: Simulation) -> list[tuple[int, float]]:
    trace: list[tuple[int, float]] = []
    queue: asyncio.Queue[int] = asyncio.Queue(3)

    async def produce(name: int) -> None:
        for _ in range(20):
            await asyncio.sleep(sim.random.random())
            await queue.put(name)

    async def consume() -> None:
        while True:
            name = await queue.get()
            trace.append((name, sim.loop.time()))
            await asyncio.sleep(sim.random.random() / 4)

    consumer = asyncio.create_task(consume())
    await asyncio.gather(*(produce(name) for name in range(5)))
    consumer.cancel()
    return trace


def test_the_same_seed_gives_the_same_trace_and_another_seed_another() -> None:
    assert run_simulation(5, noisy) == run_simulation(5, noisy)
    assert run_simulation(5, noisy) != run_simulation(6, noisy)


def test_time_limits_work_in_virtual_time() -> None:
    async def main(sim: Simulation) -> float:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 5)
        return sim.loop.time()

    assert run_simulation(1, main) == pytest.approx(5)


def test_a_simulation_in_which_nothing_can_happen_is_stuck_and_names_who_waits() -> None:
    async def waits_for_ever() -> None:
        await asyncio.Event().wait()

    async def main(sim: Simulation) -> None:
        await asyncio.create_task(waits_for_ever(), name="the-sleeper")

    with pytest.raises(SimulationStuck, match=r"the-sleeper in .*waits_for_ever") as caught:
        run_simulation(42, main)
    assert any("seed 42" in note for note in caught.value.__notes__)


def test_a_simulation_without_progress_ends_at_its_step_limit() -> None:
    async def main(sim: Simulation) -> None:
        def again() -> None:
            sim.loop.call_soon(again)

        again()
        await asyncio.Event().wait()

    with pytest.raises(SimulationStuck, match="no end after"):
        run_simulation(1, main, step_limit=1_000)


def test_a_task_that_fails_unseen_fails_the_simulation() -> None:
    async def fails() -> None:
        raise ValueError("unseen")

    async def main(sim: Simulation) -> None:
        task = asyncio.create_task(fails(), name="background")
        await asyncio.sleep(1)
        del task

    with pytest.raises(SimulationFailed, match=r"background.*unseen") as caught:
        run_simulation(1, main)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_stuck_simulation_blames_the_task_that_failed_before() -> None:
    async def main(sim: Simulation) -> None:
        done = asyncio.Event()

        async def fails() -> None:
            raise ValueError("should have set the event")

        task = asyncio.create_task(fails())
        await done.wait()
        del task

    with pytest.raises(SimulationFailed, match="should have set the event"):
        run_simulation(1, main)


async def test_a_task_whose_failure_was_seen_is_fine() -> None:
    async def fails() -> None:
        raise ValueError("seen")

    task = asyncio.create_task(fails())
    await asyncio.sleep(1)
    with pytest.raises(ValueError, match="seen"):
        await task


def test_a_callback_that_raises_fails_the_simulation_at_once() -> None:
    async def main(sim: Simulation) -> None:
        def callback() -> None:
            raise ValueError("in a callback")

        sim.loop.call_later(1, callback)
        await asyncio.sleep(1_000_000)

    with pytest.raises(SimulationFailed, match="in a callback") as caught:
        run_simulation(1, main)
    assert any("at 1.000000 s" in note for note in caught.value.__notes__)


def test_the_error_of_the_main_coroutine_carries_the_seed() -> None:
    async def main(sim: Simulation) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        run_simulation(77, main)
    assert any("seed 77" in note for note in caught.value.__notes__)


def test_tasks_and_generators_that_are_left_are_ended() -> None:
    ended: list[str] = []

    async def generator() -> AsyncIterator[int]:
        try:
            while True:
                yield 1
        finally:
            ended.append("generator")

    async def waits() -> None:
        try:
            await asyncio.sleep(1_000)
        finally:
            ended.append("task")

    async def main(sim: Simulation) -> AsyncIterator[int]:
        sim.process("left").start(waits())
        iterator = generator()
        await anext(iterator)
        await asyncio.sleep(1)
        return iterator

    run_simulation(1, main)
    assert sorted(ended) == ["generator", "task"]


async def test_threads_are_refused_with_a_reason() -> None:
    with pytest.raises(RuntimeError, match="no threads"):
        await asyncio.to_thread(print)


async def test_the_clock_follows_virtual_time_and_its_wall_clock_can_jump(simulation: Simulation) -> None:
    fast = simulation.clock.skewed(3_000_000)
    await asyncio.sleep(10)
    assert simulation.clock.now_us() == START_US + 10_000_000
    assert fast.now_us() == START_US + 13_000_000
    fast.jump(-8_000_000)
    assert fast.now_us() == START_US + 5_000_000
    assert simulation.clock.now_us() == START_US + 10_000_000
    assert fast.monotonic() == simulation.clock.monotonic() == simulation.loop.time()


def test_a_killed_process_ends_with_all_its_tasks_and_timers() -> None:
    async def main(sim: Simulation) -> list[str]:
        trace: list[str] = []

        async def child() -> None:
            asyncio.get_running_loop().call_later(5, trace.append, "timer of the child")
            try:
                await asyncio.sleep(5)
                trace.append("child went on")
            finally:
                trace.append("child ended")
                raise OSError("the dead report nothing")

        async def parent() -> None:
            task = asyncio.create_task(child())
            await asyncio.sleep(5)
            trace.append("parent went on")
            await task

        process = sim.process("broker")
        process.start(parent())
        sim.loop.call_later(5, trace.append, "timer of another")
        await asyncio.sleep(1)
        process.kill()
        await asyncio.sleep(10)
        return trace

    assert run_simulation(1, main) == ["child ended", "timer of another"]


def test_a_task_of_a_living_process_that_fails_unseen_fails_the_simulation() -> None:
    async def fails() -> None:
        raise ValueError("unseen")

    async def main(sim: Simulation) -> None:
        sim.process("broker").start(fails())
        await asyncio.sleep(1)

    with pytest.raises(SimulationFailed, match=r"broker.*unseen"):
        run_simulation(1, main)
