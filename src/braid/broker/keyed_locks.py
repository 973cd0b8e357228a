"""Locks by key: users of one key take turns, users of different keys do not wait for each other. Keys that are not in
use take no memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec


class _CountedLock(msgspec.Struct):
    lock: asyncio.Lock
    users: int = 0
    """The tasks that hold the lock or wait for it."""


class KeyedLocks:
    def __init__(self) -> None:
        self._locks: dict[str, _CountedLock] = {}

    @asynccontextmanager
    async def of(self, key: str) -> AsyncIterator[None]:
        counted = self._locks.get(key)
        if counted is None:
            counted = self._locks[key] = _CountedLock(asyncio.Lock())
        counted.users += 1
        try:
            async with counted.lock:
                yield
        finally:
            counted.users -= 1
            if not counted.users:
                del self._locks[key]
