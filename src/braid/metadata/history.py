"""The latest changes of a store, and the watches that read them.

A watch has a position, not a queue: it asks the history for what came after its position. So a slow reader costs no
memory (I12), a cancelled read loses nothing, and an interrupted stream resumes by asking again. The price is that a
reader that falls below the history's floor has to list again: `MetadataCompacted`.

    floor                                    revision
      │  changes, oldest first …               │
      └── everything after the floor is here ──┘

A watch that waits is *parked* at the head. A change under another prefix moves its position along without waking the
watch: a store with a hundred watches wakes one of them per write, and an idle watch never falls below the floor.

Everything here runs on one event loop. A store that fills its history from elsewhere (SQLite: other processes) passes
`older`, which reads changes that are no longer in memory.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from typing import NamedTuple, Protocol, cast

import msgspec

from braid.metadata.store import Changes, Store
from braid.model.errors import MetadataCompacted, MetadataUnavailable
from braid.model.ids import Revision


class HistoryLimits(msgspec.Struct, frozen=True):
    revisions: int = 10_000
    """How many of the last revisions a watch can resume from. At a hundred writes a second: more than a minute."""
    max_bytes: int = 64 * 1024 * 1024
    """How many bytes of keys and values they may hold together."""


PAGE_REVISIONS = 256
"""How many revisions a watch takes in one step, so that a watch with many to catch up does not stall the loop."""


class Page(NamedTuple):
    changes: Sequence[Changes]
    position: Revision
    """Everything up to here has been considered."""


def below(prefix: str, changes: Changes) -> Changes | None:
    """Return the part of a transaction that a watch of `prefix` sees."""
    events = tuple(event for event in changes.events if event.key.startswith(prefix))
    if not events:
        return None
    return changes if len(events) == len(changes.events) else Changes(changes.revision, events)


def size_of(changes: Changes) -> int:
    return sum(len(event.key) + len(event.value or b"") for event in changes.events)


class History:
    def __init__(self, limits: HistoryLimits, revision: Revision) -> None:
        self.floor = revision
        self.revision = revision
        self._limits = limits
        self._changes: list[Changes] = []
        self._dropped = 0
        """How many at the front of `_changes` are forgotten; the list is cut when they are half of it."""
        self._bytes = 0
        self._parked: dict[Watch, None] = {}
        """A dict for its order: the same run wakes the same watches in the same order."""

    def append(self, changes: Changes) -> None:
        assert changes.revision > self.revision, (changes.revision, self.revision)
        head, self.revision = self.revision, changes.revision
        self._changes.append(changes)
        self._bytes += size_of(changes)
        while self._is_over_limit():
            self._drop_oldest()
        for watch in [*self._parked]:
            watch.notice(changes, head)

    def forget(self) -> None:
        """Compact everything up to now."""
        self.restart(self.revision)

    def restart(self, revision: Revision) -> None:
        """Go on at a revision, without the changes before it."""
        self._changes.clear()
        self._dropped = self._bytes = 0
        self.floor = self.revision = revision
        self.wake_all()

    def read(self, prefix: str, after: Revision) -> Page:
        """Return the changes under `prefix` after a revision that is not below the floor."""
        assert after >= self.floor, (after, self.floor)
        start = bisect_right(self._changes, after, lo=self._dropped, key=lambda changes: changes.revision)
        taken = [*islice(self._changes, start, start + PAGE_REVISIONS)]
        position = taken[-1].revision if taken else max(after, self.revision)
        return Page([seen for changes in taken if (seen := below(prefix, changes))], position)

    @property
    def waiting(self) -> int:
        """Count the watches that wait for a change."""
        return len(self._parked)

    def park(self, watch: Watch) -> None:
        self._parked[watch] = None

    def unpark(self, watch: Watch) -> None:
        self._parked.pop(watch, None)

    def wake_all(self) -> None:
        """Let every waiting watch look again: something about its store changed that is not a change of keys."""
        for watch in [*self._parked]:
            watch.wake()

    def _is_over_limit(self) -> bool:
        kept = len(self._changes) - self._dropped
        return kept > 1 and (kept > self._limits.revisions or self._bytes > self._limits.max_bytes)

    def _drop_oldest(self) -> None:
        oldest = self._changes[self._dropped]
        self._dropped += 1
        self._bytes -= size_of(oldest)
        self.floor = oldest.revision
        if self._dropped * 2 > len(self._changes):
            del self._changes[: self._dropped]
            self._dropped = 0


class WatchSource(Protocol):
    """What a watch needs of its store."""

    @property
    def history(self) -> History: ...

    def check_watch(self) -> bool:
        """Tell whether the watch may read now; if not, it waits to be woken. Raises when it never will."""

    async def older(self, prefix: str, after: Revision) -> Page:
        """Return changes that the history no longer has, or raise `MetadataCompacted`."""


class Watch:
    """One watch of one prefix, read by one task at a time. Cancelling a read loses nothing; the next one goes on."""

    def __init__(self, source: WatchSource, prefix: str, after: Revision) -> None:
        self._source = source
        self._prefix = prefix
        self._position = after
        self._ready: list[Changes] = []
        """Taken from the history and not yet handed out, in reverse, so that the next one is at the end."""
        self._wakeup: asyncio.Future[None] | None = None
        self._reading = False
        self._is_closed = False

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> Changes:
        if self._reading:
            raise RuntimeError(f"two tasks read one watch of {self._prefix!r}; open a watch for each")
        self._reading = True
        try:
            while not self._is_closed:
                may_read = self._source.check_watch()
                if may_read and self._ready:
                    return self._ready.pop()
                if not may_read or not await self._fill():
                    await self._wait()
            raise StopAsyncIteration
        finally:
            self._reading = False

    async def aclose(self) -> None:
        self._is_closed = True
        self._ready.clear()
        self.wake()

    def interrupt(self) -> None:
        """After the stream broke, forget changes that were received but not handed out, and ask for them again."""
        if self._ready:
            self._position = Revision(self._ready[-1].revision - 1)
            self._ready.clear()
        self.wake()

    def notice(self, changes: Changes, head: Revision) -> None:
        """Hear that a change was appended after `head` while this watch waited."""
        if below(self._prefix, changes) is not None:
            self.wake()
        elif self._position >= head:
            # Only a watch that had seen everything may skip: a watch without a connection has changes to catch up.
            self._position = max(self._position, changes.revision)

    def wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)
        self._source.history.unpark(self)

    async def _fill(self) -> bool:
        """Take the next page. False when the watch stands at the head and has nothing to hand out."""
        history = self._source.history
        if self._position >= history.floor:
            page = history.read(self._prefix, self._position)
        else:
            page = await self._source.older(self._prefix, self._position)
        self._ready = [*reversed(page.changes)]
        self._position = page.position
        return bool(self._ready) or self._position < history.revision

    async def _wait(self) -> None:
        self._wakeup = asyncio.get_running_loop().create_future()
        self._source.history.park(self)
        try:
            await self._wakeup
        finally:
            self._source.history.unpark(self)
            self._wakeup = None


def compacted(prefix: str, after: Revision, floor: Revision) -> MetadataCompacted:
    return MetadataCompacted(
        f"a watch of {prefix!r} asked for the changes after revision {after}, the store has only those after {floor}; "
        "list the prefix again and watch from the listing's revision"
    )


def store_closed(what: str) -> MetadataUnavailable:
    return MetadataUnavailable(f"{what}: this client of the metadata store is closed; open a new one")


class _ClosableWatch(Protocol):
    async def aclose(self) -> None: ...


@asynccontextmanager
async def watching(store: Store, prefix: str, after: Revision) -> AsyncIterator[AsyncIterator[Changes]]:
    """Open a watch that is freed at the end of the block, however the block ends."""
    watch = store.watch(prefix, after)
    try:
        yield watch
    finally:
        await cast("_ClosableWatch", watch).aclose()
