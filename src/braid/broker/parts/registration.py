"""This broker's registration in the metadata, and the lease under which it is stored.

The lease is the broker's right to act (I3). Without a lease, a broker confirms nothing, writes nothing for a segment,
and controls no topic. A lost lease does not come back: the broker registers again, under a new lease.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import braid
from braid.broker.config import BrokerConfig
from braid.metadata import paths
from braid.metadata.keepalive import LeaseKeeper
from braid.metadata.store import Compare, Lease, Put, Store
from braid.model.cluster import QUEUES, RACK, REPLICAS, TRANSITIONS, BrokerState, Registration
from braid.model.errors import InvalidConfig, LeaseLost, MetadataError, MetadataUncertain
from braid.model.ids import Revision
from braid.ports.clock import Clock

REGISTER_RETRY_S: Final = 0.05
LEASES_OF_PREDECESSOR: Final = 2
"""So many times the lease of a broker that was killed may last: etcd gives every lease its whole time again when
another of its servers leads."""
MARGIN_S: Final = 1.0
"""A store looks for leases that have ended only now and then."""


class BrokerRegistration:
    def __init__(self, config: BrokerConfig, store: Store, clock: Clock) -> None:
        self.address = ""
        """The address that other brokers and clients connect to. Set before the first `register`."""
        self.started_at: Final = clock.now_us()
        self._config = config
        self._key = paths.broker(config.id)
        self._store = store
        self._clock = clock
        self._keeper: LeaseKeeper | None = None

    def may_act(self) -> bool:
        return self._keeper is not None and self._keeper.may_act()

    @property
    def lease(self) -> Lease:
        """The lease that was granted last; it may be lost."""
        assert self._keeper is not None
        return self._keeper.lease

    async def register(self) -> None:
        """Register under a new lease. If a broker of the same id was killed, wait as long as its lease may last. The
        store may grant a longer lease than it was asked for."""
        lease = await self._store.grant_lease(self._config.lease_ttl_s)
        give_up_at = self._clock.monotonic() + LEASES_OF_PREDECESSOR * lease.ttl_s + MARGIN_S
        while not await self._has_registered(lease):
            if self._clock.monotonic() >= give_up_at:
                await lease.revoke()
                raise InvalidConfig(
                    f"a broker with the id {self._config.id} is running; give this broker another id with --id"
                )
            await asyncio.sleep(REGISTER_RETRY_S)
            await lease.renew()
        self._keeper = LeaseKeeper(lease, self._clock)
        self._keeper.start()

    async def _has_registered(self, lease: Lease) -> bool:
        """Write the registration, if there is none of this id; tell whether it stands under this lease."""
        put = Put(self._key, self._record(BrokerState.ACTIVE).to_json(), lease.id)
        try:
            return (await self._store.txn([Compare(self._key, Revision(0))], [put])).succeeded
        except MetadataUncertain:
            entry = await self._store.get(self._key)
            return entry is not None and entry.lease == lease.id

    async def announce(self, state: BrokerState) -> Revision:
        """Write another state into the registration; return the revision of that write."""
        result = await self._store.txn([], [Put(self._key, self._record(state).to_json(), self.lease.id)])
        return result.revision

    async def wait_lost(self) -> LeaseLost:
        """Return when the lease is lost, after its renewal has stopped."""
        assert self._keeper is not None
        loss = await self._keeper.wait_lost()
        await self._keeper.stop()
        return loss

    async def unregister(self) -> None:
        if self._keeper is not None:
            await self._keeper.stop()
            with contextlib.suppress(MetadataError):
                await self._keeper.lease.revoke()

    def _record(self, state: BrokerState) -> Registration:
        return Registration(
            address=self.address,
            admin=self._config.admin,
            state=state.value,
            version=braid.__version__,
            started_at=self.started_at,
            labels=self._config.labels | ({RACK: self._config.rack} if self._config.rack else {}),
            features=(TRANSITIONS, REPLICAS, QUEUES),
        )
