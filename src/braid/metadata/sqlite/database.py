"""The tables of the metadata file and what is done with them. Synchronous; one thread at a time calls it (`store.py`).

    state     one row: the revision, the history's floor, the history's size
    entries   what is true now, one row per key
    events    what happened after the floor, one row per change; old revisions are pruned as new ones come
    leases    time to live, end, and the session and boot that it belongs to

Leases end at `clock.monotonic()`, which counts from the machine's boot, so an end stands with the boot's id, and a
lease of another boot is over. No reader sees keys of a lease that is over: a reader that finds one deletes it, and
a writer deletes it before anything else, in the same commit and at a revision of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import apsw
import msgspec

from braid.metadata.history import HistoryLimits, Page, compacted
from braid.metadata.limits import encode_key, encode_prefix, prefix_end
from braid.metadata.sqlite.file import MetadataFile
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
from braid.model.errors import LeaseLost
from braid.model.ids import Revision
from braid.ports.clock import Clock

T = TypeVar("T")

PAGE_EVENTS = 1_000
PAGE_BYTES = 4 * 1024 * 1024
"""How much of the history is read in one query."""
PRUNED_SHARE = 0.1
"""A history that is full gives up this share of itself, so that most writes have nothing to prune."""

SCHEMA = """
CREATE TABLE state (revision INTEGER NOT NULL, floor INTEGER NOT NULL, history_bytes INTEGER NOT NULL);
INSERT INTO state VALUES (0, 0, 0);
CREATE TABLE entries (key BLOB PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL, lease INTEGER NOT NULL);
CREATE INDEX entries_by_lease ON entries (lease) WHERE lease <> 0;
CREATE TABLE events (revision INTEGER, key BLOB, value BLOB, lease INTEGER NOT NULL, PRIMARY KEY (revision, key))
    WITHOUT ROWID;
CREATE TABLE leases (id INTEGER PRIMARY KEY AUTOINCREMENT, session TEXT NOT NULL, boot TEXT NOT NULL,
    ttl_s REAL NOT NULL, expires_at REAL NOT NULL);
"""


EXPIRED_LEASES = "SELECT id FROM leases WHERE boot <> ? OR expires_at <= ?"


class _StoreState(msgspec.Struct):
    revision: int
    floor: int
    history_bytes: int


class Database:
    def __init__(self, path: str, clock: Clock, boot: str, session: str, limits: HistoryLimits) -> None:
        self._clock = clock
        self._boot = boot
        self._session = session
        self._limits = limits
        self._followed: tuple[int, int] | None = None
        self._file = MetadataFile(path, SCHEMA)
        self._connection = self._file.connection
        self.on_change: Callable[[], None] = lambda: None
        """Called after each commit that raised the revision."""

    def revision(self) -> Revision:
        return self._reading("open", lambda: Revision(self._state().revision))

    def get(self, key: str) -> Entry | None:
        return self._reading("get", lambda: self._entry(key))

    def list(self, prefix: str) -> Listing:
        first = encode_prefix(prefix)
        end = prefix_end(first)

        def read() -> Listing:
            query = (
                "SELECT key, value, revision, lease FROM entries WHERE key >= ? AND (? IS NULL OR key < ?) ORDER BY key"
            )
            rows = self._connection.execute(query, (first, end, end))
            entries = tuple(Entry(key.decode(), value, revision, lease) for key, value, revision, lease in rows)
            return Listing(entries, Revision(self._state().revision))

        return self._reading("list", read)

    def txn(self, conditions: Sequence[Condition], operations: Sequence[Operation]) -> TxnResult:
        with self._writing("txn") as state:
            if not all(self._holds(condition) for condition in conditions):
                return TxnResult(False, Revision(state.revision))
            for operation in operations:
                if isinstance(operation, Put) and operation.lease:
                    self._check_lease(operation.lease, f"{operation.key!r} cannot be put under")
            self._apply(state, operations)
            return TxnResult(True, Revision(state.revision))

    def grant(self, ttl_s: float) -> int:
        with self._writing("grant"):
            self._connection.execute(
                "INSERT INTO leases (session, boot, ttl_s, expires_at) VALUES (?, ?, ?, ?)",
                (self._session, self._boot, ttl_s, self._clock.monotonic() + ttl_s),
            )
            return self._connection.last_insert_rowid()

    def renew(self, lease: int) -> None:
        with self._writing("renew"):
            self._check_lease(lease, "there is nothing to renew in")
            self._connection.execute(
                "UPDATE leases SET expires_at = ? + ttl_s WHERE id = ?", (self._clock.monotonic(), lease)
            )

    def revoke(self, lease: int) -> None:
        with self._writing("revoke") as state:
            self._end_leases(state, [lease])

    def end_session(self, session: str) -> None:
        """Revoke what a session holds whose process is dead."""
        with self._writing("end a dead session") as state:
            rows = self._connection.execute("SELECT id FROM leases WHERE session = ?", (session,))
            self._end_leases(state, [lease for (lease,) in rows])

    def expire(self) -> None:
        """End what has expired, if anything has."""
        with self._file.reading("expire"):
            has_expired = self._has_expired()
        if has_expired:
            with self._writing("expire"):
                pass

    def compact(self) -> None:
        with self._writing("compact") as state:
            self._connection.execute("DELETE FROM events")
            state.floor, state.history_bytes = state.revision, 0

    def skip_to(self, revision: Revision) -> None:
        """Raise the revision without a change; watches have to list again."""
        with self._writing("skip") as state:
            if revision > state.revision:
                self._connection.execute("DELETE FROM events")
                state.revision = state.floor = revision
                state.history_bytes = 0

    def has_news(self) -> bool:
        """Tell whether any process has written since `events` last read everything to the end."""
        return self._file.version() != self._followed

    def events(self, prefix: str, after: Revision) -> Page:
        """Return the next changes after a revision; `MetadataCompacted` when some of them are pruned."""
        with self._file.reading("watch"):
            version = self._file.version()
            state = self._state()
            if after < state.floor:
                raise compacted(prefix, after, Revision(state.floor))
            changes, is_whole = self._read_events(prefix, after)
        if not is_whole:
            return Page(changes, changes[-1].revision)
        if not prefix:
            self._followed = version
        return Page(changes, max(after, Revision(state.revision)))

    def close(self) -> None:
        self._file.close()

    # Transactions.

    @contextmanager
    def _writing(self, request: str) -> Iterator[_StoreState]:
        """The body runs in a write transaction, after what has expired is gone. It raises `LeaseLost` only before it
        has written anything; the expiries are then kept, because the answer rests on them."""
        lost: LeaseLost | None = None
        with self._file.writing(request):
            before = self._state()
            state = msgspec.structs.replace(before)
            self._end_expired(state)
            try:
                yield state
            except LeaseLost as error:
                lost = error
            self._prune(state)
            if state != before:
                self._connection.execute(
                    "UPDATE state SET revision = ?, floor = ?, history_bytes = ?", msgspec.structs.astuple(state)
                )
        if state.revision != before.revision:
            self.on_change()
        if lost is not None:
            raise lost

    def _reading(self, request: str, query: Callable[[], T]) -> T:
        """The answer of a snapshot that shows no key of an expired lease."""
        while True:
            with self._file.reading(request):
                if not self._has_expired():
                    return query()
            self.expire()

    # The tables, inside a transaction.

    def _state(self) -> _StoreState:
        for revision, floor, history_bytes in self._connection.execute(
            "SELECT revision, floor, history_bytes FROM state"
        ):
            return _StoreState(revision, floor, history_bytes)
        raise apsw.CorruptError("the table `state` is empty")

    def _entry(self, key: str) -> Entry | None:
        rows = self._connection.execute("SELECT value, revision, lease FROM entries WHERE key = ?", (encode_key(key),))
        for value, revision, lease in rows:
            return Entry(key, value, revision, lease)
        return None

    def _holds(self, condition: Condition) -> bool:
        entry = self._entry(condition.key)
        match condition:
            case Compare(_, revision):
                return revision == (entry.revision if entry else 0)
            case CompareValue(_, value):
                return entry is not None and entry.value == value

    def _apply(self, state: _StoreState, operations: Sequence[Operation]) -> None:
        revision = state.revision + 1
        events: list[tuple[int, bytes, bytes | None, int]] = []
        for operation in operations:
            key = encode_key(operation.key)
            match operation:
                case Put(_, value, lease):
                    self._connection.execute(
                        "INSERT INTO entries VALUES (?1, ?2, ?3, ?4) ON CONFLICT (key) "
                        "DO UPDATE SET value = ?2, revision = ?3, lease = ?4",
                        (key, value, revision, lease),
                    )
                    events.append((revision, key, value, lease))
                case Delete():
                    self._connection.execute("DELETE FROM entries WHERE key = ?", (key,))
                    if self._connection.changes():
                        events.append((revision, key, None, 0))
        if events:
            self._connection.executemany("INSERT INTO events VALUES (?, ?, ?, ?)", events)
            state.revision = revision
            state.history_bytes += sum(len(key) + len(value or b"") for _, key, value, _ in events)

    def _check_lease(self, lease: int, complaint: str) -> None:
        if self._connection.execute("SELECT 1 FROM leases WHERE id = ?", (lease,)).get is None:
            raise LeaseLost(
                f"{complaint} lease {lease}: it has expired or was revoked, or never was; ask for a new one"
            )

    def _has_expired(self) -> bool:
        return self._connection.execute(EXPIRED_LEASES, (self._boot, self._clock.monotonic())).fetchone() is not None

    def _end_expired(self, state: _StoreState) -> None:
        rows = self._connection.execute(EXPIRED_LEASES, (self._boot, self._clock.monotonic()))
        self._end_leases(state, [lease for (lease,) in rows])

    def _end_leases(self, state: _StoreState, leases: Iterable[int]) -> None:
        """Each lease's keys vanish together, at one revision."""
        for lease in leases:
            keys = self._connection.execute("SELECT key FROM entries WHERE lease = ? AND lease <> 0", (lease,))
            self._apply(state, [Delete(key.decode()) for (key,) in keys])
            self._connection.execute("DELETE FROM leases WHERE id = ?", (lease,))

    def _prune(self, state: _StoreState) -> None:
        """Forget the oldest revisions of a history that is over a limit. The newest stays, whatever its size."""
        limits = self._limits
        if state.revision - state.floor <= limits.revisions and state.history_bytes <= limits.max_bytes:
            return
        kept_revisions = limits.revisions * (1 - PRUNED_SHARE)
        kept_bytes = limits.max_bytes * (1 - PRUNED_SHARE)
        sizes = self._connection.execute(
            "SELECT revision, sum(length(key) + ifnull(length(value), 0)) FROM events WHERE revision < ? "
            "GROUP BY revision ORDER BY revision",
            (state.revision,),
        )
        for revision, size in sizes:
            if state.revision - state.floor <= kept_revisions and state.history_bytes <= kept_bytes:
                break
            state.floor = revision
            state.history_bytes -= size
        self._connection.execute("DELETE FROM events WHERE revision <= ?", (state.floor,))

    def _read_events(self, prefix: str, after: Revision) -> tuple[Sequence[Changes], bool]:
        """Whole revisions, up to a page; and whether these are all."""
        changes: list[Changes] = []
        events: list[Event] = []
        count = size = 0
        rows = self._connection.execute("SELECT revision, key, value, lease FROM events WHERE revision > ?", (after,))
        for revision, raw_key, value, lease in rows:
            if events and events[0].revision != revision:
                changes.append(Changes(events[0].revision, tuple(events)))
                events = []
                if count >= PAGE_EVENTS or size >= PAGE_BYTES:
                    return changes, False
            key = raw_key.decode()
            if key.startswith(prefix):
                events.append(Event(key, value, revision, lease))
                count += 1
                size += len(raw_key) + len(value or b"")
        if events:
            changes.append(Changes(events[0].revision, tuple(events)))
        return changes, True
