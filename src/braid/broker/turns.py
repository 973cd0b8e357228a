"""Turns for work that clients ask for and that may take the loop milliseconds: one in each iteration of the loop.

A thousand questions may arrive together. Answered in one iteration, they would hold up everything else that the broker
does for seconds: confirms, deliveries, the renewal of its lease. With turns, each iteration pays for one question, and
the questions of all connections are answered in the order in which they came.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False
        """Whether this iteration's turn is taken."""

    async def take(self) -> None:
        """Return when it is the caller's turn."""
        loop = asyncio.get_running_loop()
        if self._taken:
            turn = loop.create_future()
            self._waiting.append(turn)
            await turn
        else:
            self._taken = True
            loop.call_soon(self._give_next)

    def _give_next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # Its caller may have been cancelled.
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._give_next)
                return
        self._taken = False
