"""This broker's registration in the metadata, and the lease that it stands under.

The lease is the broker's right to act (I3): without one it confirms nothing, writes nothing in the name of a segment,
and controls no topic. A lease that was lost does not come back; the broker registers again, under a new one.
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
from braid.model.cluster import BrokerState
from braid.model.errors import InvalidConfig, LeaseLost, MetadataError
from braid.model.ids import Revision
from braid.model.registration import Registration
from braid.ports.clock import Clock

REGISTER_RETRY_S: Final = 0.05


class BrokerRegistration:
    def __init__(self, config: BrokerConfig, store: Store, clock: Clock) -> None:
        self.address = ""
        """What other brokers and clients are told to connect to. Set before the first `register`."""
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
        """The last one that was granted; it may be lost."""
        assert self._keeper is not None
        return self._keeper.lease

    async def register(self) -> None:
        """Register under a new lease. Wait for a killed broker of the same id as long as its lease may last."""
        lease = await self._store.grant_lease(self._config.lease_ttl_s)
        record = self._record(BrokerState.ACTIVE)
        give_up_at = self._clock.monotonic() + self._config.lease_ttl_s
        while True:
            put = Put(self._key, record.to_json(), lease.id)
            result = await self._store.txn([Compare(self._key, Revision(0))], [put])
            if result.succeeded:
                break
            if self._clock.monotonic() >= give_up_at:
                await lease.revoke()
                raise InvalidConfig(
                    f"a broker with the id {self._config.id} is running; give this one another with --id"
                )
            await asyncio.sleep(REGISTER_RETRY_S)
            await lease.renew()
        self._keeper = LeaseKeeper(lease, self._clock)
        self._keeper.start()

    async def announce(self, state: BrokerState) -> Revision:
        """Write another state into the registration; returns the revision that has it."""
        result = await self._store.txn([], [Put(self._key, self._record(state).to_json(), self.lease.id)])
        return result.revision

    async def wait_lost(self) -> LeaseLost:
        """Return when the lease is lost, and nothing keeps it any more."""
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
            labels=self._config.labels,
        )
