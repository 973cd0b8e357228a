"""The metadata store, as small as it can be: keys and values, transactions, watches, leases.

Three implementations (`memory`, `sqlite`, `etcd`) pass one conformance suite; this page is their contract.

- Keys are strings, values bytes. Every transaction that changes something raises the store's revision by one, and every
  key that it wrote carries that revision.
- A transaction compares, and if all comparisons hold, writes: all or nothing, and no reader sees a part.
- A watch delivers every change of a prefix after a given revision: once, in order, a transaction's changes together.
- A lease's keys vanish, as one ordinary transaction, when it is revoked or not renewed for its time to live.
- **An error is never an absence.** `get` answers None only when the store said that the key does not exist. A store
  that does not answer raises `MetadataUnavailable`; a write whose answer was lost raises `MetadataUncertain` and is
  never repeated by the store itself: the caller reads back and compares.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import msgspec

from braid.model.ids import Revision

MAX_KEY_BYTES = 1_024
MAX_VALUE_BYTES = 1_000_000
"""etcd refuses requests above 1.5 MB; a value that is larger belongs into the object store."""
MAX_TXN_OPERATIONS = 128
"""etcd's default limit of operations in one transaction."""


class Entry(msgspec.Struct, frozen=True):
    key: str
    value: bytes
    revision: Revision
    """The revision that wrote this value."""
    lease: int = 0
    """The lease that the key lives under, 0 for none."""


class Listing(msgspec.Struct, frozen=True):
    entries: tuple[Entry, ...]
    """In order of keys."""
    revision: Revision
    """The store's revision that the listing shows: watch from here and nothing is missed."""


class Compare(msgspec.Struct, frozen=True):
    """Holds while `key` was last written at `revision`; 0 means: while it does not exist."""

    key: str
    revision: Revision


class CompareValue(msgspec.Struct, frozen=True):
    """Holds while `key` exists with exactly this value."""

    key: str
    value: bytes


class Put(msgspec.Struct, frozen=True):
    key: str
    value: bytes
    lease: int = 0


class Delete(msgspec.Struct, frozen=True):
    """Deletes one key. Deleting an absent key changes nothing and is not an event."""

    key: str


Condition = Compare | CompareValue
Operation = Put | Delete


class TxnResult(msgspec.Struct, frozen=True):
    succeeded: bool
    """Whether every comparison held. If not, nothing was written."""
    revision: Revision
    """After success: the revision that the written keys now carry. After failure: the store's revision."""


class Event(msgspec.Struct, frozen=True):
    key: str
    value: bytes | None
    """The new value; None when the key was deleted."""
    revision: Revision
    lease: int = 0


class Changes(msgspec.Struct, frozen=True):
    """What one transaction did under the watched prefix."""

    revision: Revision
    events: tuple[Event, ...]


class Lease(Protocol):
    """A promise to be alive. `deadline` moves with each renewal; when it has passed, the holder stops acting (I3)."""

    @property
    def id(self) -> int: ...

    @property
    def ttl_s(self) -> float: ...

    @property
    def deadline(self) -> float:
        """On the clock's `monotonic()`: counted from *before* the last successful renewal was sent, so that it is
        never later than the moment at which the store may let the lease expire."""

    async def renew(self) -> None:
        """Extend the lease. `LeaseLost` when the store has already dropped it, `MetadataUnavailable` when unknown."""

    async def revoke(self) -> None:
        """Give the lease up: its keys are deleted now. Revoking twice is fine."""


class Store(Protocol):
    async def get(self, key: str) -> Entry | None: ...

    async def list(self, prefix: str) -> Listing:
        """List all keys that start with `prefix`, from one revision."""

    async def txn(self, conditions: Sequence[Condition], operations: Sequence[Operation]) -> TxnResult:
        """Write `operations` if all `conditions` hold. A key may stand in `operations` only once (`InvalidArgument`). A
        put under a lease that does not exist raises `LeaseLost` and writes nothing."""

    def watch(self, prefix: str, after: Revision) -> AsyncIterator[Changes]:
        """Yield changes with a revision above `after`, for ever; resume when a connection breaks. `MetadataCompacted`
        when the store no longer has them: list again and watch from there. Ending the iteration (`aclose`) frees
        everything."""

    async def grant_lease(self, ttl_s: float) -> Lease: ...

    async def close(self) -> None: ...
