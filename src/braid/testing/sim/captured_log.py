"""The log of everything that a simulation runs, kept so that a failure shows what came before it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from braid.testing.sim.loop import Simulation, run_simulation

T = TypeVar("T")

KEPT_LINES: Final = 400


class LogCapture(logging.Handler):
    """Keeps the last lines of the log. A line with a traceback is a bug that was caught and logged: a failure here."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.failure: BaseException | None = None
        self._simulation = simulation

    def note(self, line: str) -> None:
        self.lines.append(f"{self._simulation.clock.monotonic():9.3f} {line}")

    def emit(self, record: logging.LogRecord) -> None:
        self.note(f"{record.levelname} {record.getMessage()}")
        if record.exc_info is not None and record.exc_info[1] is not None:
            self.failure = self.failure or record.exc_info[1]


def run_with_log(seed: int, run: Callable[[Simulation, LogCapture], Awaitable[T]], *, step_limit: int) -> T:
    """Run a simulation and keep its log; an error gets the last lines as a note."""
    log = logging.getLogger("braid")
    captured: LogCapture | None = None

    async def main(simulation: Simulation) -> T:
        nonlocal captured
        captured = LogCapture(simulation)
        log.addHandler(captured)
        return await run(simulation, captured)

    level, propagate = log.level, log.propagate
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        return run_simulation(seed, main, step_limit=step_limit)
    except BaseException as error:
        if captured is not None:
            error.add_note("\n".join(captured.lines))
        raise
    finally:
        if captured is not None:
            log.removeHandler(captured)
        log.setLevel(level)
        log.propagate = propagate
