"""A metadata store in memory, for simulation and tests: deterministic, one event loop, any number of clients.

`MemoryStore(clock)` makes a new store and its first client; `client()` makes further clients of the same store. The
shared part (`_Server`) is synchronous and never fails. Only the way between a client and the server fails, and each
client has its own: `disconnect` and `reconnect`, `lag` and `interrupt` for its watch streams, and `fault` and
`delay_s`, which a simulation sets and each request asks. A request takes two iterations of the event loop, one there
and one back, so that other tasks run between the request, its effect and its answer, as they would with a real store.
"""

from __future__ import annotations

import asyncio
import contextvars
import enum
from collections.abc import Callable, Sequence
from typing import TypeVar
from weakref import WeakSet, WeakValueDictionary

import msgspec

from braid.metadata.history import History, HistoryLimits, Page, Watch, compacted, store_closed
from braid.metadata.lease import HeldLease
from braid.metadata.limits import check_ttl, check_txn, encode_key, encode_prefix
from braid.metadata.store import (
    Changes,
    Compare,
    CompareValue,
    Condition,
    Delete,
    Entry,
    Event,
    Listing,
    Operation,
    Put,
    TxnResult,
)
from braid.model.errors import LeaseLost, MetadataUnavailable, MetadataUncertain
from braid.model.ids import Revision
from braid.ports.clock import Clock

T = TypeVar("T")
Observer = Callable[[Sequence[Condition], Sequence[Operation]], None]

TIMER_RESOLUTION_S = 0.001
"""The shortest wait for an expiry. Without it, a timer that fires a rounding error early would be set again for ever on
a loop whose virtual time does not move meanwhile."""


class Fault(enum.Enum):
    """A fault of one request on its way."""

    NONE = enum.auto()
    UNAVAILABLE = enum.auto()
    """The request does not arrive."""
    UNCERTAIN = enum.auto()
    """The request arrives and is applied; the answer is lost."""


class _LeaseState(msgspec.Struct):
    ttl_s: float
    expires_at: float
    keys: set[str]


class _Server:
    """The state that all clients share."""

    def __init__(self, clock: Clock, limits: HistoryLimits) -> None:
        self.history = History(limits, Revision(0))
        self._clock = clock
        self._entries: dict[str, Entry] = {}
        self._leases: dict[int, _LeaseState] = {}
        self._last_lease = 0
        self._timer: asyncio.TimerHandle | None = None
        self.on_txn: Observer = lambda _conditions, _operations: None

    def get(self, key: str) -> Entry | None:
        self.expire()
        return self._entries.get(key)

    def list(self, prefix: str) -> Listing:
        self.expire()
        keys = sorted(key for key in self._entries if key.startswith(prefix))
        entries = tuple(self._entries[key] for key in keys)
        return Listing(entries, self.history.revision)

    def txn(self, conditions: Sequence[Condition], operations: Sequence[Operation]) -> TxnResult:
        self.expire()
        if not all(self._holds(condition) for condition in conditions):
            return TxnResult(False, self.history.revision)
        for operation in operations:
            if isinstance(operation, Put) and operation.lease and operation.lease not in self._leases:
                raise LeaseLost(
                    f"{operation.key!r} cannot be put under lease {operation.lease}: no such lease is alive"
                )
        self.on_txn(conditions, operations)
        return TxnResult(True, self._apply(operations))

    def expires_at(self, lease: int) -> float | None:
        """Return when a lease ends unless it is renewed; None if it has ended."""
        self.expire()
        state = self._leases.get(lease)
        return state.expires_at if state is not None else None

    def grant(self, ttl_s: float) -> int:
        self._last_lease += 1
        self._leases[self._last_lease] = _LeaseState(ttl_s, self._clock.monotonic() + ttl_s, set())
        self._set_timer()
        return self._last_lease

    def renew(self, lease: int) -> None:
        self.expire()
        state = self._leases.get(lease)
        if state is None:
            raise LeaseLost(f"lease {lease} cannot be renewed: it has expired or was revoked; ask for a new one")
        state.expires_at = self._clock.monotonic() + state.ttl_s
        self._set_timer()

    def revoke(self, lease: int) -> None:
        state = self._leases.pop(lease, None)
        if state is not None:
            self._apply([Delete(key) for key in sorted(state.keys)])
            self._set_timer()

    def expire(self) -> None:
        now = self._clock.monotonic()
        for lease in [lease for lease, state in self._leases.items() if state.expires_at <= now]:
            self.revoke(lease)

    def _holds(self, condition: Condition) -> bool:
        entry = self._entries.get(condition.key)
        match condition:
            case Compare(_, revision):
                return revision == (entry.revision if entry else 0)
            case CompareValue(_, value):
                return entry is not None and entry.value == value

    def _apply(self, operations: Sequence[Operation]) -> Revision:
        revision = Revision(self.history.revision + 1)
        events: list[Event] = []
        for operation in sorted(operations, key=lambda operation: operation.key):
            old = self._entries.pop(operation.key, None)
            if old is not None and old.lease:
                self._leases_of(old).discard(old.key)
            match operation:
                case Put(key, value, lease):
                    self._entries[key] = Entry(key, bytes(value), revision, lease)
                    if lease:
                        self._leases[lease].keys.add(key)
                    events.append(Event(key, bytes(value), revision, lease))
                case Delete(key):
                    if old is not None:
                        events.append(Event(key, None, revision))
        if events:
            self.history.append(Changes(revision, tuple(events)))
        return self.history.revision

    def _leases_of(self, entry: Entry) -> set[str]:
        state = self._leases.get(entry.lease)
        return state.keys if state is not None else set()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._leases:
            wait_s = min(state.expires_at for state in self._leases.values()) - self._clock.monotonic()
            # In a context of its own: it is the server's timer, whichever client's request has set it.
            self._timer = asyncio.get_running_loop().call_later(
                max(wait_s, TIMER_RESOLUTION_S), self._on_timer, context=contextvars.Context()
            )

    def _on_timer(self) -> None:
        self.expire()
        self._set_timer()


class MemoryStore:
    """One client. `MemoryStore(clock)` also makes the store that it talks to."""

    def __init__(
        self, clock: Clock, *, limits: HistoryLimits | None = None, name: str = "client", server: _Server | None = None
    ) -> None:
        self.name = name
        self.fault: Callable[[str], Fault] = lambda _request: Fault.NONE
        """Asked before each request, with its name: get, list, txn, grant, renew, revoke."""
        self.delay_s: Callable[[], float] = lambda: 0.0
        """How long a request takes to get there, and its answer to come back."""
        self._clock = clock
        self._server = server or _Server(clock, limits or HistoryLimits())
        self._connected = True
        self._lagging = False
        self._closed = False
        self._watches: WeakValueDictionary[int, Watch] = WeakValueDictionary()
        self._watches_opened = 0
        self._leases: WeakSet[HeldLease] = WeakSet()

    def client(self, name: str = "client") -> MemoryStore:
        """Make a further client of the same store."""
        return MemoryStore(self._clock, name=name, server=self._server)

    @property
    def history(self) -> History:
        return self._server.history

    async def get(self, key: str) -> Entry | None:
        encode_key(key)
        return await self._read("get", lambda: self._server.get(key))

    async def list(self, prefix: str) -> Listing:
        encode_prefix(prefix)
        return await self._read("list", lambda: self._server.list(prefix))

    async def txn(self, conditions: Sequence[Condition], operations: Sequence[Operation]) -> TxnResult:
        conditions, operations = tuple(conditions), tuple(operations)
        check_txn(conditions, operations)
        return await self._write("txn", lambda: self._server.txn(conditions, operations))

    def watch(self, prefix: str, after: Revision) -> Watch:
        encode_prefix(prefix)
        watch = Watch(self, prefix, after)
        self._watches_opened += 1
        self._watches[self._watches_opened] = watch
        return watch

    async def grant_lease(self, ttl_s: float) -> HeldLease:
        check_ttl(ttl_s)
        requested_at = self._clock.monotonic()
        lease_id = await self._write("grant", lambda: self._server.grant(ttl_s))
        lease = HeldLease(self, self._clock, lease_id, ttl_s, requested_at)
        self._leases.add(lease)
        return lease

    async def renew_lease(self, lease: int) -> None:
        await self._write("renew", lambda: self._server.renew(lease))

    async def revoke_lease(self, lease: int) -> None:
        await self._write("revoke", lambda: self._server.revoke(lease))

    async def close(self) -> None:
        """Close this client; the store goes on. The client's leases end by themselves, like those of a dead process."""
        self._closed = True
        for lease in [*self._leases]:
            lease.end()
        self.history.wake_all()

    def disconnect(self) -> None:
        """Cut this client off: requests raise `MetadataUnavailable` and watches are silent."""
        self._connected = False

    def reconnect(self) -> None:
        """Connect this client again: requests work, and watches go on where they stopped."""
        self._connected = True
        self.history.wake_all()

    def lag(self) -> None:
        """Silence this client's watches, while requests are answered: the client knows less and less."""
        self._lagging = True

    def catch_up(self) -> None:
        self._lagging = False
        self.history.wake_all()

    def interrupt(self) -> None:
        """Break this client's watch streams; each resumes after the last change that it handed out."""
        for watch in [*self._watches.values()]:
            watch.interrupt()

    def observe(self, observer: Observer) -> None:
        """Show each transaction of any client to `observer`, when its conditions hold and before it is applied."""
        self._server.on_txn = observer

    def compact(self) -> None:
        """Forget the history up to now."""
        self.history.forget()

    def check_watch(self) -> bool:
        if self._closed:
            raise store_closed("watch")
        return self._connected and not self._lagging

    async def older(self, prefix: str, after: Revision) -> Page:
        raise compacted(prefix, after, self.history.floor)

    async def _read(self, request: str, answer: Callable[[], T]) -> T:
        if await self._send(request) is not Fault.NONE:
            raise self._unavailable(request)
        result = answer()
        await self._receive(self._unavailable(request))
        return result

    async def _write(self, request: str, apply: Callable[[], T]) -> T:
        fault = await self._send(request)
        if fault is Fault.UNAVAILABLE:
            raise self._unavailable(request)
        uncertain = MetadataUncertain(
            f"{request} of {self.name!r} was sent and its answer was lost; read back and compare"
        )
        result = apply()
        await self._receive(uncertain)
        if fault is Fault.UNCERTAIN:
            raise uncertain
        return result

    async def _send(self, request: str) -> Fault:
        if self._closed:
            raise store_closed(request)
        fault = self.fault(request)
        await asyncio.sleep(self.delay_s())
        return fault if self._connected else Fault.UNAVAILABLE

    async def _receive(self, lost: Exception) -> None:
        await asyncio.sleep(self.delay_s())
        if not self._connected:
            raise lost

    def _unavailable(self, request: str) -> MetadataUnavailable:
        return MetadataUnavailable(f"{request} of {self.name!r} did not reach the metadata store; try again")
