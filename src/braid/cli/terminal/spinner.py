"""The line that a command shows on a terminal while it waits for the cluster. In a pipe it shows nothing."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from braid.cli.terminal.output import duration_text

T = TypeVar("T")
TICK_S: Final = 0.1


@contextmanager
def status_line(text: str) -> Iterator[Callable[[str], None]]:
    """Show a line. Yields the function that changes its text."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True, highlight=False).status(text) as status:
        yield status.update


async def with_elapsed(work: Awaitable[T], text: str, show: Callable[[str], None]) -> T:
    """Wait, and show how long the wait has taken."""
    task = asyncio.ensure_future(work)
    began = time.monotonic()
    try:
        while not task.done():
            show(f"{text} ({duration_text(time.monotonic() - began)})")
            await asyncio.wait([task], timeout=TICK_S)
        return task.result()
    finally:
        task.cancel()
