"""Leader election: the candidate that creates the key leads, for as long as the key exists.

The key lives under the leader's lease, so a leader that dies loses the key by itself. A candidate that finds the key
taken watches it *from the revision at which it was seen taken*: the deletion cannot happen unseen in between. When an
answer is lost, the key itself tells which candidate holds it: the lease in the entry is the candidate's own or not.

A leader leads while it holds the key. Everything that it writes should carry `leadership.fence` among its conditions,
and it should stop acting when its lease's deadline passes (I3).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import msgspec

from braid.metadata.history import watching
from braid.metadata.store import Compare, Delete, Entry, Lease, Put, Store
from braid.model.errors import LeaseLost, MetadataCompacted, MetadataUnavailable, MetadataUncertain
from braid.model.ids import Revision
from braid.ports.clock import Clock

RETRY_S = 0.1
"""How long a candidate waits before it asks a store again that did not answer."""


class Leadership(msgspec.Struct, frozen=True):
    key: str
    revision: Revision
    """The key's revision. It never returns to a former value, so it counts the leaders."""
    lease: int

    @property
    def fence(self) -> Compare:
        """Return a condition that holds while this leader leads."""
        return Compare(self.key, self.revision)


class Election:
    def __init__(self, store: Store, key: str, clock: Clock) -> None:
        self._store = store
        self._key = key
        self._clock = clock

    async def campaign(self, value: bytes, lease: Lease) -> Leadership:
        """Wait until this candidate leads. `LeaseLost` when its lease ends first.

        The store may be away meanwhile; the candidate asks again. A campaign that is cancelled may have won just then:
        revoke the lease, or campaign again with the same one.
        """
        while True:
            if self._clock.monotonic() >= lease.deadline:
                raise LeaseLost(f"the campaign for {self._key!r} ended: the deadline of lease {lease.id} has passed")
            try:
                leadership = await self._try(value, lease)
                if leadership is not None:
                    return leadership
            except (MetadataUncertain, MetadataUnavailable):
                await asyncio.sleep(RETRY_S)

    async def resign(self, leadership: Leadership) -> None:
        """Give the key up, if this candidate still holds it. Resigning twice is fine."""
        await self._store.txn([leadership.fence], [Delete(self._key)])

    async def leader(self) -> Entry | None:
        return await self._store.get(self._key)

    async def observe(self) -> AsyncGenerator[Entry | None, None]:
        """Yield the leader's entry now, and again whenever it changes; None while there is no leader. Errors of the
        first reading are raised, and so are those of a new reading after the watch fell below the history's floor."""
        while True:
            listing = await self._store.list(self._key)
            yield next((entry for entry in listing.entries if entry.key == self._key), None)
            try:
                async with watching(self._store, self._key, listing.revision) as watch:
                    async for changes in watch:
                        for event in changes.events:
                            if event.key == self._key and event.value is None:
                                yield None
                            elif event.key == self._key and event.value is not None:
                                yield Entry(event.key, event.value, event.revision, event.lease)
            except MetadataCompacted:
                continue

    async def _try(self, value: bytes, lease: Lease) -> Leadership | None:
        """Take the key if it is free. Returns None when another candidate held it and it is time to try again."""
        result = await self._store.txn([Compare(self._key, Revision(0))], [Put(self._key, value, lease.id)])
        if result.succeeded:
            return Leadership(self._key, result.revision, lease.id)
        holder = await self._store.get(self._key)
        if holder is not None and holder.lease == lease.id:
            # An earlier attempt of this candidate, whose answer was lost.
            return Leadership(self._key, holder.revision, lease.id)
        # Not longer than the lease lasts, so that a candidate whose lease has ended finds out; a candidate whose lease
        # was renewed comes back here.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(lease.deadline - self._clock.monotonic()):
                await self._wait_until_deleted(result.revision)
        return None

    async def _wait_until_deleted(self, after: Revision) -> None:
        try:
            async with watching(self._store, self._key, after) as watch:
                async for changes in watch:
                    if any(event.key == self._key and event.value is None for event in changes.events):
                        return
        except MetadataCompacted:
            return  # The history that would show a deletion is gone; trying again tells.
