"""The holder's side of a lease: the deadline arithmetic that every store needs and must not get wrong (I3).

The deadline counts from *before* a renewal is sent, so it is never later than the store's own: the store starts
counting only when the renewal arrives. A lease that is lost or given up has a deadline in the infinite past, for ever.
"""

from __future__ import annotations

import math
from typing import Protocol

from braid.model.errors import LeaseLost, MetadataUnavailable, MetadataUncertain
from braid.ports.clock import Clock


class LeaseServer(Protocol):
    """What a store does for the leases that it granted."""

    async def renew_lease(self, lease: int) -> None:
        """Renew a lease. `LeaseLost` when it is gone."""

    async def revoke_lease(self, lease: int) -> None:
        """Revoke a lease. A lease that is gone is fine."""


class HeldLease:
    def __init__(self, server: LeaseServer, clock: Clock, lease: int, ttl_s: float, requested_at: float) -> None:
        self._server = server
        self._clock = clock
        self._id = lease
        self._ttl_s = ttl_s
        self._deadline = requested_at + ttl_s
        self._over = False

    @property
    def id(self) -> int:
        return self._id

    @property
    def ttl_s(self) -> float:
        return self._ttl_s

    @property
    def deadline(self) -> float:
        return -math.inf if self._over else self._deadline

    async def renew(self) -> None:
        if self._over:
            raise LeaseLost(f"lease {self._id} cannot be renewed: it is over; ask for a new one")
        requested_at = self._clock.monotonic()
        try:
            await self._server.renew_lease(self._id)
        except LeaseLost:
            self._over = True
            raise
        except MetadataUncertain as error:
            raise MetadataUnavailable(f"it is not known whether lease {self._id} was renewed: {error}") from error
        self._deadline = max(self._deadline, requested_at + self._ttl_s)

    async def revoke(self) -> None:
        self._over = True
        await self._server.revoke_lease(self._id)

    def end(self) -> None:
        """Count the lease as lost, because its store was closed and cannot renew it any more."""
        self._over = True
