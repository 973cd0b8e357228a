"""Keeps a lease alive, and says once when it is lost.

The keeper renews every third of the time to live, so two renewals may fail before the deadline. When the deadline
passes without a renewal that the store confirmed, the lease counts as lost, even if the store might still have it: the
holder has stopped acting by then, and others may have started (I3). Lost is final; an answer that comes later changes
nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from braid.metadata.store import Lease
from braid.model.errors import LeaseLost, MetadataError
from braid.ports.clock import Clock
from braid.ports.tasks import end

RENEWALS_PER_TTL = 3
RETRIES_PER_TTL = 12
"""After a failed renewal the next one comes sooner."""
TIMER_RESOLUTION_S = 0.001
"""With less than this left, no renewal comes in time. Timers wake up so much too early."""


def next_renewal(deadline: float, ttl_s: float, now: float, *, failed: bool) -> float:
    """Return when to renew next, on the clock of `deadline`. Never after the deadline."""
    due = now + ttl_s / RETRIES_PER_TTL if failed else deadline - ttl_s + ttl_s / RENEWALS_PER_TTL
    return min(due, deadline)


class LeaseKeeper:
    """`async with LeaseKeeper(lease, clock) as keeper`; or `start` and `stop`. Stopping does not revoke the lease."""

    def __init__(self, lease: Lease, clock: Clock, on_loss: Callable[[LeaseLost], None] | None = None) -> None:
        self.lease = lease
        self._clock = clock
        self._on_loss = on_loss
        self._loss: LeaseLost | None = None
        self._lost = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def deadline(self) -> float:
        """Return until when the holder may act, on the clock's `monotonic()`."""
        return -math.inf if self._loss is not None else self.lease.deadline

    def may_act(self) -> bool:
        """Tell whether the holder may act now. A log asks before each confirm (`may_confirm`)."""
        return self._clock.monotonic() < self.deadline

    @property
    def loss(self) -> LeaseLost | None:
        return self._loss

    async def wait_lost(self) -> LeaseLost:
        await self._lost.wait()
        assert self._loss is not None
        return self._loss

    def start(self) -> None:
        assert self._task is None, "a keeper is started once"
        self._task = asyncio.create_task(self._keep(), name=f"keep lease {self.lease.id}")

    async def stop(self) -> None:
        await end(self._task)

    async def __aenter__(self) -> LeaseKeeper:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _keep(self) -> None:
        try:
            failure: Exception | None = await self._renew_until_lost()
        except Exception as error:
            # A bug of ours. The holder must hear of the lease's end even so.
            self._report(error)
            raise
        self._report(failure)

    async def _renew_until_lost(self) -> MetadataError | None:
        """Renew until the lease is lost; return the error of the last renewal."""
        failure: MetadataError | None = None
        while True:
            now = self._clock.monotonic()
            due = next_renewal(self.lease.deadline, self.lease.ttl_s, now, failed=failure is not None)
            await asyncio.sleep(max(due - now, 0))
            remaining_s = self.lease.deadline - self._clock.monotonic()
            if remaining_s < TIMER_RESOLUTION_S:
                return failure
            failure = None
            try:
                # A renewal that hangs must not hide that the deadline passes.
                async with asyncio.timeout(remaining_s):
                    await self.lease.renew()
            except TimeoutError:
                pass
            except LeaseLost as error:
                return error
            except MetadataError as error:
                failure = error

    def _report(self, failure: Exception | None) -> None:
        reason = (
            f"its last renewal failed: {failure}"
            if failure is not None
            else "its deadline passed before it was renewed"
        )
        self._loss = LeaseLost(f"lease {self.lease.id} is lost: {reason}; stop acting under it and ask for a new one")
        self._lost.set()
        if self._on_loss is not None:
            self._on_loss(self._loss)
