"""What a broker knows of the metadata store: tables that follow it, all of them through one watch.

The view changes in one way only: the watch applies transactions in the order of their revisions. A broker's own writes
take that way too. So the tables together show exactly one revision, the view's `generation`: a reader never sees a
segment's new owner beside its topic's old layout, and content never changes without the generation rising, which is
what clients compare.

A caller waits for one of two things: `caught_up` for a revision, which this broker has written or heard of; `until` for
a condition on the tables, which any broker may fulfil.

One watch of everything, instead of one for each table, makes this possible: two watches would each have come to another
revision. Its price is that the keys that no table wants (cursors, chunks) pass by, too.

When the watch cannot go on (its history is gone), every table is listed again. Listings of different prefixes have
different revisions; the watch begins after the oldest, and a table ignores what its own listing has shown already.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Hashable
from typing import Any, Final, Generic, NamedTuple, TypeVar

from braid.metadata.history import watching
from braid.metadata.store import Changes, Compare, Listing, Store
from braid.model.errors import (
    BraidError,
    MetadataCompacted,
    MetadataCorrupt,
    MetadataUnavailable,
    RecordUnreadable,
    ShuttingDown,
)
from braid.model.ids import Revision
from braid.ports.tasks import end

EVERYTHING: Final = "/"
RETRY_S: Final = 0.5
"""How long the view waits before it asks a store again that did not answer."""
TURN_CHANGES: Final = 16
"""So many changes are applied in one iteration of the loop. Each may make a broker look at a thousand segments."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_log: Final = logging.getLogger(__name__)


class Known(NamedTuple, Generic[V]):
    value: V
    revision: Revision
    """At which the store's key was written."""
    lease: int


class Table(Generic[K, V]):
    """The keys of one kind. Read it like a dict; only the view changes it.

    An entry that this build cannot read is not in the dict, or is there with the last value that it could read. It is
    not absent: `unreadable` has it, and writes that expect to find nothing, or that value, fail."""

    def __init__(
        self, prefix: str, identify: Callable[[str], K | None], decode: Callable[[bytes], V], key: Callable[[K], str]
    ) -> None:
        """`identify` returns the identity that a store's key names, None for a key of another kind; `key` is its
        inverse."""
        self.prefix: Final = prefix
        self.on_change: list[Callable[[K], None]] = []
        """Called after the whole view has come to the revision that changed an entry."""
        self._identify = identify
        self._decode = decode
        self._key = key
        self._known: dict[K, Known[V]] = {}
        self._unreadable: dict[K, RecordUnreadable] = {}
        self._listed_at = Revision(0)

    def get(self, identity: K) -> V | None:
        known = self._known.get(identity)
        return known.value if known is not None else None

    def known(self, identity: K) -> Known[V] | None:
        return self._known.get(identity)

    def all(self) -> dict[K, V]:
        return {identity: known.value for identity, known in self._known.items()}

    def unreadable(self, identity: K) -> RecordUnreadable | None:
        """Return why the entry that the store has cannot be read; None if it can, or if there is none."""
        return self._unreadable.get(identity)

    def all_unreadable(self) -> dict[K, RecordUnreadable]:
        return dict(self._unreadable)

    def __contains__(self, identity: K) -> bool:
        return identity in self._known

    def __len__(self) -> int:
        return len(self._known)

    def unchanged(self, identity: K) -> Compare:
        """Return a condition that holds while the store has what this view shows, be it nothing."""
        known = self._known.get(identity)
        return Compare(self._key(identity), known.revision if known is not None else Revision(0))

    def take_listing(self, listing: Listing) -> list[K]:
        """Return the entries that differ now."""
        self._listed_at = listing.revision
        found = {identity: entry for entry in listing.entries if (identity := self._identify(entry.key)) is not None}
        changed = [identity for identity in self._known if identity not in found]
        for identity in changed:
            del self._known[identity]
        self._unreadable = {identity: error for identity, error in self._unreadable.items() if identity in found}
        changed += [
            identity
            for identity, entry in found.items()
            if self._set(identity, entry.value, entry.revision, entry.lease)
        ]
        return changed

    def take_changes(self, changes: Changes) -> list[K]:
        if changes.revision <= self._listed_at:
            return []
        return [
            identity
            for event in changes.events
            if event.key.startswith(self.prefix)
            and (identity := self._identify(event.key)) is not None
            and self._set(identity, event.value, event.revision, event.lease)
        ]

    def _set(self, identity: K, value: bytes | None, revision: Revision, lease: int) -> bool:
        """Apply a change, and tell whether what can be read has changed."""
        if value is None:
            self._unreadable.pop(identity, None)
            return self._known.pop(identity, None) is not None
        known = self._known.get(identity)
        if known is not None and known.revision == revision:
            return False
        try:
            self._known[identity] = Known(self._decode(value), revision, lease)
        except MetadataCorrupt as error:
            # A record that this build cannot read must not cost the others; its last known value stays.
            unreadable = RecordUnreadable(f"{self._key(identity)}: {error}")
            if str(self._unreadable.get(identity)) != str(unreadable):
                _log.error("%s", unreadable)
            self._unreadable[identity] = unreadable
            return False
        self._unreadable.pop(identity, None)
        return True

    def tell(self, identity: K) -> None:
        for callback in list(self.on_change):
            callback(identity)


class View:
    def __init__(self, store: Store) -> None:
        self.store: Final = store
        self.generation = Revision(0)
        """The metadata revision that the tables reflect."""
        self.changes = 0
        """How many revisions have changed a table. Rises after the tables' own callbacks."""
        self.on_failure: Callable[[BaseException], None] | None = None
        """Called when the view can follow no more: by a bug of ours, or a store that is broken for good."""
        self._tables: list[Table[Any, Any]] = []
        self._waiting: list[tuple[Revision, asyncio.Future[None]]] = []
        self._change = asyncio.Event()
        """Set by the next change, which then puts another event here."""
        self._lets_wait = True
        self._task: asyncio.Task[None] | None = None

    def add(self, table: Table[K, V]) -> Table[K, V]:
        """Add a table, before `load`."""
        assert self._task is None, "tables are added before the view is loaded"
        self._tables.append(table)
        return table

    def unreadable(self) -> int:
        """Return how many entries of all tables cannot be read."""
        return sum(len(table.all_unreadable()) for table in self._tables)

    async def load(self) -> None:
        """Read all tables, and follow their changes from there on."""
        after = await self._list()
        self._task = asyncio.create_task(self._follow(after), name="follow metadata")
        self._task.add_done_callback(self._on_end)

    async def stop(self) -> None:
        task, self._task = self._task, None
        await end(task)
        self._fail_waiting()

    def end_waits(self) -> None:
        """End all waiting, because this broker is about to stop."""
        self._lets_wait = False
        self._wake()

    async def caught_up(self, revision: Revision) -> None:
        """Return when the tables show what was written at this revision."""
        if self.generation < revision:
            if not self._follows:
                raise _stopped()
            future = asyncio.get_running_loop().create_future()
            self._waiting.append((revision, future))
            await future

    async def until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until the condition holds, at most for this time (None: without a limit), and tell whether it does. The
        condition is asked again whenever a table has changed. `ShuttingDown` if this broker stops meanwhile."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    if not self._lets_wait or not self._follows:
                        raise _stopped()
                    await self._change.wait()
                return True
        return condition()

    async def changed_since(self, seen: int, timeout_s: float) -> bool:
        """Wait until there were more than so many `changes`, for a loop that looks, acts, and looks again."""
        return await self.until(lambda: self.changes > seen, timeout_s)

    @property
    def _follows(self) -> bool:
        return self._task is not None and not self._task.done()

    async def _follow(self, after: Revision) -> None:
        while True:
            # Where the watch cannot go on (its history is gone, its client is closed), a new listing tells why.
            with contextlib.suppress(MetadataCompacted, MetadataUnavailable):
                async with watching(self.store, EVERYTHING, after) as watch:
                    in_a_row = 0
                    async for changes in watch:
                        self._apply(changes)
                        in_a_row += 1
                        if in_a_row == TURN_CHANGES:  # A watch that is behind does not wait between two changes.
                            in_a_row = 0
                            await asyncio.sleep(0)
            after = await self._list_again()

    async def _list_again(self) -> Revision:
        while True:
            try:
                return await self._list()
            except MetadataUnavailable as error:
                _log.warning("the metadata cannot be listed, trying again: %s", error)
                await asyncio.sleep(RETRY_S)

    async def _list(self) -> Revision:
        """Read all tables from the store; return the revision to follow from."""
        listings = {prefix: await self.store.list(prefix) for prefix in {table.prefix: None for table in self._tables}}
        changed = [(table, table.take_listing(listings[table.prefix])) for table in self._tables]
        oldest = min((listing.revision for listing in listings.values()), default=Revision(0))
        self._reached(oldest, changed)
        return oldest

    def _apply(self, changes: Changes) -> None:
        self._reached(changes.revision, [(table, table.take_changes(changes)) for table in self._tables])

    def _reached(self, revision: Revision, changed: list[tuple[Table[Any, Any], list[Any]]]) -> None:
        self.generation = max(self.generation, revision)
        for table, identities in changed:
            for identity in identities:
                table.tell(identity)
        if any(identities for _, identities in changed):
            self.changes += 1
            self._wake()
        due = [future for waits_for, future in self._waiting if waits_for <= self.generation]
        self._waiting = [each for each in self._waiting if each[0] > self.generation]
        for future in due:
            if not future.done():
                future.set_result(None)

    def _wake(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail_waiting()
            if self.on_failure is not None:
                self.on_failure(error)

    def _fail_waiting(self) -> None:
        for _, future in self._waiting:
            if not future.done():
                future.set_exception(_stopped())
        self._waiting.clear()
        self._wake()


def _stopped() -> BraidError:
    return ShuttingDown("this broker no longer follows the metadata: it is shutting down; ask another one")
