"""An asyncio event loop in virtual time, for simulations.

The loop is asyncio's own, with the one thing replaced that touches the world: the selector. Where a real selector would
sleep until the next timer, this one moves the clock there. So nothing waits, an hour costs nothing, and the same seed
runs the same callbacks in the same order (asyncio runs ready callbacks first in, first out; what varies by the seed is
how long the simulated disk and network take).

A simulation ends with an error when

- a task failed and nobody looked at its result, or a callback raised: what would be a line in a log is a failure here;
- nothing can ever happen again: no callback is ready, no timer runs, yet the main coroutine waits (`SimulationStuck`);
- it takes more steps than its limit, so a loop without progress ends (`SimulationStuck`).

Every error carries a note with the seed. What the loop cannot make deterministic: the order of a `set` of strings or
of objects. Code under simulation sorts them, or keeps a dict.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from braid.testing.sim.clock import SimulatedClock

T = TypeVar("T")

STEP_LIMIT = 20_000_000
"""About a minute of a real processor; simulations that are meant to take longer say so."""
TEARDOWN_STEPS = 1_000_000
"""How many steps the tasks that are left at the end may take to react to being cancelled."""
TASKS_NAMED = 20
"""How many waiting tasks `SimulationStuck` lists."""


class SimulationFailed(AssertionError):
    """A task failed and nobody looked at its result, or a callback raised. The cause is chained."""


class SimulationStuck(AssertionError):
    """Nothing more can happen, or the step limit was reached. The message names the tasks that wait."""


class SimulatedLoop(asyncio.BaseEventLoop):
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, seed: int, *, step_limit: int = STEP_LIMIT) -> None:
        super().__init__()
        self.set_debug(False)
        self.seed = seed
        self.steps = 0
        self.step_limit = step_limit
        self._now = 0.0
        # `BaseEventLoop` asks its selector for events once in each round; see `select`.
        self._selector = self
        self._suspects: list[asyncio.Task[Any]] = []
        self._callback_failure: SimulationFailed | None = None
        self._frozen: dict[Process | None, list[asyncio.Handle]] = {}
        """What frozen processes would do if they could."""
        self.task_numbers = itertools.count(1)
        self.set_task_factory(_create_task)

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> tuple[()]:
        """The heart: no time passes while something is ready; then time jumps to the next timer."""
        self.steps += 1 + len(self._ready)
        if self._frozen:
            self._hold_back()
        if self._callback_failure is not None:
            raise self._callback_failure
        if timeout is None:
            raise SimulationStuck(f"nothing is ready and no timer runs; {self._waiting()}")
        if self.steps > self.step_limit:
            raise SimulationStuck(f"no end after {self.steps} steps; {self._waiting()}")
        if timeout > 0:
            self._now += timeout
        return ()

    def freeze(self, process: Process) -> None:
        """From the next round on: the present one is being counted down."""
        self._frozen.setdefault(process, [])

    def thaw(self, process: Process) -> None:
        """Run what it missed: first what was ready, in its order, then the timers that are due."""
        for handle in self._frozen.pop(process, ()):
            if handle.cancelled():
                continue
            if isinstance(handle, asyncio.TimerHandle):
                handle._scheduled = True  # type: ignore[attr-defined]
                heapq.heappush(self._scheduled, handle)
            else:
                self._ready.append(handle)

    def _hold_back(self) -> None:
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            held = self._frozen.get(_process_of(handle))
            (self._ready if held is None else held).append(handle)
        timers = [timer for timer in self._scheduled if _process_of(timer) in self._frozen]
        if timers:
            self._scheduled = [timer for timer in self._scheduled if _process_of(timer) not in self._frozen]
            heapq.heapify(self._scheduled)
        for timer in sorted(timers):
            timer._scheduled = False  # type: ignore[attr-defined]  # A cancel must not count it as one of the heap's.
            self._frozen[_process_of(timer)].append(timer)

    def _process_events(self, event_list: object) -> None:
        """There are no file descriptors, so there are no events."""

    def _write_to_self(self) -> None:
        """There are no threads, so there is nothing to wake up."""

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: object) -> Any:  # noqa: ARG002
        raise RuntimeError(
            f"a simulation has no threads, but {func!r} was to run in one; do it through a port that can be simulated"
        )

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if isinstance(context.get("task") or context.get("future"), asyncio.Task):
            return  # The garbage collector found a failed task; `unhandled` knows it already.
        if self._callback_failure is None:
            self._callback_failure = SimulationFailed(f"{context.get('message')}: {context.get('exception')!r}")
            self._callback_failure.__cause__ = context.get("exception")

    def watch_task(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task._exception is not None:
            self._suspects.append(task)

    def unhandled(self) -> asyncio.Task[Any] | None:
        """The first task that failed and whose result nobody has taken."""
        # Asking for `exception()` would count as taking the result, so this looks at asyncio's own mark.
        return next((task for task in self._suspects if task._log_traceback), None)

    def forget_failures(self) -> None:
        for task in self._suspects:
            task.exception()
        self._suspects.clear()
        self._callback_failure = None

    def _waiting(self) -> str:
        names = sorted(_whereabouts(task) for task in asyncio.all_tasks(self))
        more = f" and {len(names) - TASKS_NAMED} more" if len(names) > TASKS_NAMED else ""
        return f"{len(names)} tasks wait: {'; '.join(names[:TASKS_NAMED])}{more}"


def _whereabouts(task: asyncio.Task[Any]) -> str:
    frames = task.get_stack(limit=1)
    place = f" in {frames[-1].f_code.co_qualname} line {frames[-1].f_lineno}" if frames else ""
    return f"{task.get_name()}{place}"


def _create_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    assert isinstance(loop, SimulatedLoop)
    task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **options)
    # asyncio counts tasks for the whole process; a seed must not depend on the seeds before it.
    task.set_name(options.get("name") or f"task {next(loop.task_numbers):07}")
    process = _process.get()
    if process is None:
        task.add_done_callback(loop.watch_task, context=OUTSIDE)
    else:
        process._tasks[task] = None
        task.add_done_callback(process._task_done, context=OUTSIDE)
    return task


_process: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


def _process_of(handle: asyncio.Handle) -> Process | None:
    return handle._context.get(_process)  # type: ignore[attr-defined, no-any-return]


OUTSIDE = contextvars.Context()
"""The context of what belongs to no process: the simulated disk and network schedule their callbacks in it."""


class Process:
    """What dies as one: the tasks started here, and every task and timer that they start.

    `kill` cancels the tasks, so their `finally` blocks run, which `kill -9` would not allow. What they can still do
    must do no harm: give a process a mounted disk (`SimulatedDisk.mount`) and a host of the network, and end these
    first.
    """

    def __init__(self, loop: SimulatedLoop, name: str) -> None:
        self._loop = loop
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self.name = name
        self.killed = False

    def start(self, coroutine: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        context = contextvars.copy_context()
        context.run(_process.set, self)
        return context.run(self._loop.create_task, coroutine, name=name or self.name)

    @property
    def tasks(self) -> list[str]:
        """Those that have not ended, and where each is."""
        return sorted(_whereabouts(task) for task in self._tasks)

    def freeze(self) -> None:
        """Nothing of it runs, as with SIGSTOP, or on a machine that sleeps. Whoever may call it from outside, such as
        the network, has to be cut off too."""
        self._loop.freeze(self)

    def thaw(self) -> None:
        self._loop.thaw(self)

    def kill(self) -> None:
        self.thaw()
        self.killed = True
        for timer in self._loop._scheduled:
            if _process_of(timer) is self:
                timer.cancel()
        for task in tuple(self._tasks):
            task.cancel()

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        if not self.killed:
            self._loop.watch_task(task)
        elif not task.cancelled():
            task.exception()  # The dead report nothing.


class Simulation:
    """What the main coroutine of a simulation is given."""

    def __init__(self, seed: int, loop: SimulatedLoop) -> None:
        self.seed = seed
        self.loop = loop
        self.random = random.Random(seed)
        self.clock = SimulatedClock(loop.time)

    def process(self, name: str) -> Process:
        return Process(self.loop, name)


def run_simulation(seed: int, main: Callable[[Simulation], Awaitable[T]], *, step_limit: int = STEP_LIMIT) -> T:
    """Run `main` in virtual time. Its error, or the error of a task that nobody looked at, is raised with the seed."""
    return run_to_end(Simulation(seed, SimulatedLoop(seed, step_limit=step_limit)), main)


def run_to_end(simulation: Simulation, main: Callable[[Simulation], Awaitable[T]]) -> T:
    """Run `main` on the loop of a simulation that has not run yet, and close that loop."""
    seed, loop = simulation.seed, simulation.loop

    async def run() -> T:
        return await main(simulation)

    try:
        asyncio.set_event_loop(loop)
        try:
            result = loop.run_until_complete(loop.create_task(run(), name="main"))
        except SimulationStuck as stuck:
            _raise_unhandled(loop, stuck)
            raise
        _raise_unhandled(loop, None)
    except BaseException as error:
        error.add_note(f"simulation with seed {seed}, at {loop.time():.6f} s of virtual time, step {loop.steps}")
        if task := loop.unhandled():
            error.add_note(f"task {task.get_name()} had failed before and nobody looked: {task._exception!r}")
        try:
            _tear_down(loop)
        except SimulationStuck as stuck:  # What failed first is what counts.
            error.add_note(f"what was left did not end: {stuck}")
        raise
    _tear_down(loop)
    return result


def _raise_unhandled(loop: SimulatedLoop, stuck: SimulationStuck | None) -> None:
    if loop._callback_failure is not None:
        raise loop._callback_failure
    task = loop.unhandled()
    if task is not None:
        cause = task.exception()
        after = f"; then: {stuck}" if stuck else ""
        raise SimulationFailed(f"task {task.get_name()} failed and nobody looked: {cause!r}{after}") from cause


def _tear_down(loop: SimulatedLoop) -> None:
    """End what is left. Its failures no longer count: the simulation has its result."""
    try:
        loop.step_limit = loop.steps + TEARDOWN_STEPS
        loop.forget_failures()
        left = sorted(asyncio.all_tasks(loop), key=asyncio.Task.get_name)
        for task in left:
            task.cancel()
        loop.run_until_complete(_ended(left))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.forget_failures()
    finally:
        asyncio.set_event_loop(None)
        loop.close()


async def _ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
