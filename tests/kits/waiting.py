"""Waits for conditions that nothing announces."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

VIRTUAL_S = 300.0
"""Virtual time costs nothing. In real time the test's own timeout comes first."""
WAIT_S = 60.0
"""For other processes. They need seconds, and a processor that other tests use too."""
FIRST_PAUSE_S, LONGEST_PAUSE_S, GROWTH = 0.001, 0.02, 1.1


async def until(condition: Callable[[], object | Awaitable[object]], within_s: float = VIRTUAL_S) -> None:
    """Return when the condition holds, in virtual or in real time. The condition may be a coroutine function."""
    loop = asyncio.get_running_loop()
    deadline, pause_s = loop.time() + within_s, FIRST_PAUSE_S
    while True:
        holds = condition()
        if await holds if inspect.isawaitable(holds) else holds:
            return
        assert loop.time() < deadline, f"the condition did not become true within {within_s:g} s"
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * GROWTH, LONGEST_PAUSE_S)


def wait_until(condition: Callable[[], object], what: str, within_s: float = WAIT_S) -> None:
    """Return when another process or thread has made it so. Without an event loop."""
    deadline, pause_s = time.monotonic() + within_s, FIRST_PAUSE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(pause_s)
        pause_s = min(pause_s * GROWTH, LONGEST_PAUSE_S)
