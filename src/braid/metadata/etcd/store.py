"""Metadata in etcd v3, for clusters of brokers on several machines (etcd 3.4 or later).

Reads are linearizable: they see every write that was confirmed before they began, whichever endpoint answers.
`client.py` decides which requests may be repeated, `outcome.py` what an error means, and `watch.py` how a watch
survives.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Final
from weakref import WeakSet

try:
    import grpc  # noqa: F401
    from google.protobuf import descriptor_pool  # noqa: F401
except ImportError as missing:
    raise ImportError(
        f"metadata in etcd needs the package {missing.name!r}, which is not installed; "
        "install it with: pip install 'braidmq[etcd]'"
    ) from missing

from braid.metadata.etcd.channel import Endpoint, EtcdTls, channel_credentials
from braid.metadata.etcd.client import DEFAULT_TIMEOUT_S, EtcdClient, Login
from braid.metadata.etcd.keyspace import Keyspace
from braid.metadata.etcd.messages import (
    LEASE_GRANT,
    LEASE_KEEP_ALIVE,
    LEASE_REVOKE,
    RANGE,
    STATUS,
    TXN,
    LeaseGrantRequest,
    LeaseKeepAliveRequest,
    LeaseRevokeRequest,
    RangeRequest,
    StatusRequest,
)
from braid.metadata.etcd.watch import EtcdWatch
from braid.metadata.lease import HeldLease
from braid.metadata.limits import check_ttl
from braid.metadata.store import Condition, Entry, Listing, Operation, TxnResult
from braid.model.errors import InvalidArgument, LeaseLost, MetadataCompacted, MetadataUnavailable
from braid.model.ids import Revision
from braid.ports.clock import Clock, SystemClock

__all__ = ["EtcdStore", "EtcdTls"]

OLDEST_VERSION: Final = (3, 4)
"""The first one that answers questions for a watch's progress."""
PAGE_KEYS: Final = 500
"""Keys in one answer of a listing, so that a long listing does not meet the deadline of one call."""

LIST_ATTEMPTS: Final = 5


class EtcdStore:
    """Made by `open`. Implements `Store`."""

    def __init__(self, client: EtcdClient, keyspace: Keyspace, clock: Clock) -> None:
        self._client = client
        self._keyspace = keyspace
        self._clock = clock
        self._watches: set[EtcdWatch] = set()
        self._leases: WeakSet[HeldLease] = WeakSet()

    @classmethod
    async def open(
        cls,
        endpoints: Sequence[str],
        *,
        tls: EtcdTls | None = None,
        user: str | None = None,
        password: str | None = None,
        key_prefix: str = "/braid",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> EtcdStore:
        """Connect, log in and make sure that etcd answers.

        The first endpoint is used as long as it works: give each broker the nearest one first. `timeout_s` is how long
        a call looks for an endpoint that answers before it gives up.
        """
        if not endpoints:
            raise InvalidArgument("no endpoint of etcd is given; name at least one, for example '127.0.0.1:2379'")
        if (user is None) != (password is None):
            raise InvalidArgument("etcd takes user and password together; one of them is missing")
        keyspace = Keyspace(key_prefix)
        clock = clock or SystemClock()
        credentials = channel_credentials(tls) if tls is not None else None
        login = Login(user, password) if user is not None and password is not None else None
        channels = [Endpoint(address, credentials) for address in endpoints]
        client = EtcdClient(channels, login, timeout_s, clock, rng or random.Random())
        store = cls(client, keyspace, clock)
        try:
            await client.log_in(instead_of=None)
            await store._check_reachable()
        except BaseException:
            await client.close()
            raise
        return store

    async def get(self, key: str) -> Entry | None:
        request = RangeRequest(key=self._keyspace.key(key))
        answer = await self._client.call(RANGE, request, f"get {key!r}", repeatable=True)
        return self._keyspace.entry(answer.kvs[0]) if answer.kvs else None

    async def list(self, prefix: str) -> Listing:
        for _ in range(LIST_ATTEMPTS):
            with suppress(MetadataCompacted):
                return await self._list_once(prefix)
        raise MetadataUnavailable(
            f"list {prefix!r}: etcd was compacted between two pages, {LIST_ATTEMPTS} times in a row; compact less often"
        )

    async def txn(self, conditions: Sequence[Condition], operations: Sequence[Operation]) -> TxnResult:
        request = self._keyspace.txn(conditions, operations)
        keys = [repr(operation.key) for operation in operations[:3]]
        more = ", …" if len(operations) > 3 else ""
        asked = f"transaction that writes {', '.join(keys)}{more}" if keys else "transaction that writes nothing"
        answer = await self._client.call(TXN, request, asked, repeatable=False)
        return TxnResult(answer.succeeded, Revision(answer.header.revision))

    def watch(self, prefix: str, after: Revision) -> EtcdWatch:
        watch = EtcdWatch(self._client, self._keyspace, prefix, after, self._watches.discard)
        self._watches.add(watch)
        return watch

    async def grant_lease(self, ttl_s: float) -> HeldLease:
        """Grant a lease. etcd rounds the time to live up to whole seconds, and to 1.5 election time-outs."""
        check_ttl(ttl_s)
        requested_at = self._clock.monotonic()
        # Repeatable: a lease whose grant was lost holds no key and ends by itself.
        request = LeaseGrantRequest(TTL=math.ceil(ttl_s))
        answer = await self._client.call(LEASE_GRANT, request, f"grant a lease of {ttl_s:g} s", repeatable=True)
        lease = HeldLease(self, self._clock, answer.ID, float(answer.TTL), requested_at)
        self._leases.add(lease)
        return lease

    async def renew_lease(self, lease: int) -> None:
        request = LeaseKeepAliveRequest(ID=lease)
        answer = await self._client.call(LEASE_KEEP_ALIVE, request, f"renew lease {lease}", repeatable=True)
        if answer.TTL <= 0:
            raise LeaseLost(f"lease {lease} cannot be renewed: it has expired or was revoked; ask for a new one")

    async def revoke_lease(self, lease: int) -> None:
        try:
            await self._client.call(
                LEASE_REVOKE, LeaseRevokeRequest(ID=lease), f"revoke lease {lease}", repeatable=True
            )
        except LeaseLost:
            return  # The lease is gone, as the caller wanted.

    async def close(self) -> None:
        for lease in self._leases:
            lease.end()
        self._client.closed = True
        for watch in [*self._watches]:
            await watch.end()
        await self._client.close()

    async def _list_once(self, prefix: str) -> Listing:
        """Read page by page, all pages at the revision of the first."""
        start, end = self._keyspace.range_of(prefix)
        entries: list[Entry] = []
        revision = 0
        while True:
            request = RangeRequest(key=start, range_end=end, limit=PAGE_KEYS, revision=revision)
            answer = await self._client.call(RANGE, request, f"list {prefix!r}", repeatable=True)
            revision = revision or answer.header.revision
            entries.extend(self._keyspace.entry(kv) for kv in answer.kvs)
            if not answer.more:
                return Listing(tuple(entries), Revision(revision))
            start = answer.kvs[-1].key + b"\0"

    async def _check_reachable(self) -> None:
        """Check that there is a quorum, the right to read the whole prefix, and a version that this build supports."""
        start, end = self._keyspace.range_of("")
        await self._client.call(
            RANGE, RangeRequest(key=start, range_end=end, limit=1), f"open metadata {start.decode()!r}", repeatable=True
        )
        status = await self._client.call(STATUS, StatusRequest(), "ask for etcd's version", repeatable=True)
        major, minor, *_ = status.version.split(".")
        if (int(major), int(minor)) < OLDEST_VERSION:
            raise InvalidArgument(f"etcd {status.version} is too old: Braid needs {'.'.join(map(str, OLDEST_VERSION))}")
