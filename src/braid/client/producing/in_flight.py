"""The unconfirmed bytes of one producer, and the senders that wait until there are fewer (I12)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from braid.model.errors import BraidError


class InFlightBytes:
    def __init__(self, limit: int, on_crowded: Callable[[bool], None]) -> None:
        """`on_crowded` hears each change of `crowded`."""
        self.limit: Final = limit
        self.total = 0
        """The bytes of closed batches that are not settled."""
        self.crowded = False
        """Whether a sender has to wait: the total is above the limit, or other senders came first."""
        self._on_crowded = on_crowded
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._granted = 0
        """Senders that got room and have not resumed yet."""
        self._granted_bytes = 0

    def add(self, size: int) -> None:
        self.total += size
        if self.total > self.limit:
            self._set_crowded(True)

    def remove(self, size: int) -> None:
        self.total -= size
        if self.crowded:
            self._grant()

    async def room(self, size: int) -> None:
        """Wait, after the senders that came before, until no more than the limit is unconfirmed."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((waiter, size))
        self._set_crowded(True)
        try:
            await waiter
        finally:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._granted -= 1
                self._granted_bytes -= size
                self._grant()

    def fail(self, error: BraidError) -> None:
        """Fail every sender that waits."""
        for waiter, _ in self._waiting:
            if not waiter.done():
                waiter.set_exception(error)
        self._waiting.clear()

    def _grant(self) -> None:
        waiting = self._waiting
        while waiting and self.total + self._granted_bytes <= self.limit:
            waiter, size = waiting.popleft()
            if not waiter.done():
                self._granted += 1
                self._granted_bytes += size
                waiter.set_result(None)
        if not waiting and not self._granted and self.total <= self.limit:
            self._set_crowded(False)

    def _set_crowded(self, crowded: bool) -> None:
        if crowded is not self.crowded:
            self.crowded = crowded
            self._on_crowded(crowded)
