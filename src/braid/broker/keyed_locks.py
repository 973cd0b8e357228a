"""One at a time for each key; different keys do not wait for each other. Keys that nobody uses cost nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec


class _Turn(msgspec.Struct):
    lock: asyncio.Lock
    users: int = 0
    """Who has the lock, and who waits for it."""


class KeyedLocks:
    def __init__(self) -> None:
        self._locks: dict[str, _Turn] = {}

    @asynccontextmanager
    async def of(self, key: str) -> AsyncIterator[None]:
        turn = self._locks.get(key)
        if turn is None:
            turn = self._locks[key] = _Turn(asyncio.Lock())
        turn.users += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.users -= 1
            if not turn.users:
                del self._locks[key]
