"""When to try again: after pauses that double. Each has a random part, so clients that failed together retry apart."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from braid.model.errors import BraidError

T = TypeVar("T")


class Backoff:
    """Computes the pause before the next attempt: half to all of `first_s`, then of twice that, up to `max_s`.

    The caller passes the random numbers, so that a simulation can be repeated.
    """

    __slots__ = ("_first_s", "_max_s", "_next_s", "_random")

    def __init__(self, random: random.Random, first_s: float = 0.01, max_s: float = 1.0) -> None:
        self._random = random
        self._first_s = first_s
        self._max_s = max_s
        self._next_s = first_s

    def next(self) -> float:
        delay_s = self._next_s
        self._next_s = min(2 * delay_s, self._max_s)
        return delay_s * self._random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Note a success: the next pause is the shortest again."""
        self._next_s = self._first_s


async def retrying(operation: Callable[[], Awaitable[T]], deadline: float, backoff: Backoff) -> T:
    """Run the operation and return its result. Retry after `retriable` errors until the loop's clock shows
    `deadline`."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return await operation()
        except BraidError as error:
            delay_s = backoff.next()
            if not error.retriable or loop.time() + delay_s > deadline:
                raise
        await asyncio.sleep(delay_s)
