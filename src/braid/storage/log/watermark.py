"""An offset that only rises, with its waiters and followers."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from itertools import count

from braid.model.errors import BraidError, BrokenInvariant

_FIRST_SWEEP = 64


class Watermark:
    """The first offset that has *not* reached some state: written, synced, replicated, visible.

    A failed watermark never rises again: every waiter for a higher offset, now or later, gets the error.
    """

    __slots__ = ("_end", "_error", "_followers", "_sweep_at", "_tie", "_value", "_waiters")

    def __init__(self, value: int) -> None:
        self._value = value
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []
        self._followers: list[Callable[[], None]] = []
        self._sweep_at = _FIRST_SWEEP
        self._tie = count()
        self._error: BraidError | None = None
        self._end: tuple[int, BraidError] | None = None

    @property
    def value(self) -> int:
        return self._value

    @property
    def error(self) -> BraidError | None:
        """Tell why the watermark will never rise again; None while it may."""
        return self._error

    def follow(self, follower: Callable[[], None], *, first: bool = False) -> None:
        """Call `follower` each time the value has risen, and when the watermark has failed; it must not raise. This is
        cheaper than a waiter for each offset. With `first`, it is called before the followers that are there already.
        """
        self._followers.insert(0 if first else len(self._followers), follower)

    def advance(self, value: int) -> None:
        if value < self._value:
            raise BrokenInvariant(f"I1: a watermark would fall from {self._value} to {value}")
        if self._error is not None:
            return
        self._value = value
        waiters = self._waiters
        while waiters and waiters[0][0] <= value:
            future = heapq.heappop(waiters)[2]
            if not future.done():
                future.set_result(None)
        for follower in self._followers:
            follower()
        if self._end is not None and value >= self._end[0]:
            self.fail(self._end[1])

    def end_at(self, offset: int, error: BraidError) -> None:
        """Let the watermark fail with this error as soon as it has reached `offset`: it will never go beyond."""
        self._end = (offset, error)
        self.advance(self._value)

    def fail(self, error: BraidError) -> None:
        """Stop rising: the watermark will never go beyond its value. The first error stays."""
        if self._error is None:
            self._error = error
            for follower in self._followers:
                follower()
        waiters, self._waiters = self._waiters, []
        for _, _, future in waiters:
            if not future.done():
                future.set_exception(self._error.again())

    def reached(self, offset: int) -> asyncio.Future[None]:
        """Return a future that is done when the watermark is at or beyond `offset`."""
        future = asyncio.get_running_loop().create_future()
        if offset <= self._value:
            future.set_result(None)
        elif self._error is not None:
            future.set_exception(self._error.again())
        else:
            if len(self._waiters) >= self._sweep_at:
                self._sweep()
            heapq.heappush(self._waiters, (offset, next(self._tie), future))
        return future

    def _sweep(self) -> None:
        """Drop waiters that gave up, so that time-outs at an idle tail cost no memory (I12)."""
        self._waiters = [waiter for waiter in self._waiters if not waiter[2].done()]
        heapq.heapify(self._waiters)
        self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._waiters))
