"""The default metadata store: one SQLite file, shared by all brokers of one machine. No service to start.

All work on the file happens in one thread per store (`database.py` says how). Watches read a copy of the latest
changes that this store keeps in memory. One task, the *follower*, fills it: it looks at the file when this store has
committed, when another process rings (`sessions.py`), and every `POLL_S` in any case; the poll is also the timer
that ends expired leases and those of dead processes, so that every watch hears of it.

Speaks for one process. After a fork the child must open its own: a copied connection would damage the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import ParamSpec, TypeVar
from weakref import WeakSet

import apsw

from braid.metadata.history import History, HistoryLimits, Page, Watch, store_closed
from braid.metadata.lease import HeldLease
from braid.metadata.limits import check_ttl, check_txn, encode_key, encode_prefix
from braid.metadata.sqlite.database import Database
from braid.metadata.sqlite.file import refuse_old_engine
from braid.metadata.sqlite.filesystem import refuse_network_filesystem
from braid.metadata.sqlite.sessions import StoreSession, boot_id
from braid.metadata.store import Condition, Entry, Listing, Operation, TxnResult
from braid.model.errors import MetadataCompacted, MetadataError, MetadataUnavailable
from braid.model.ids import Revision
from braid.ports.clock import Clock, SystemClock
from braid.ports.tasks import cancel
from braid.ports.threads import Threads

P = ParamSpec("P")
T = TypeVar("T")

POLL_S = 0.25
"""How late a watch is at worst when a ring was lost, and how long a dead process keeps its leases. An idle broker does
little else than this."""
TAIL_LIMITS = HistoryLimits(revisions=1_000, max_bytes=8 * 1024 * 1024)
"""The changes that are kept in memory for watches. A watch that needs older ones reads the file."""
FINAL_CAUSES = (apsw.CorruptError, apsw.NotADBError, FileNotFoundError)
"""What waiting does not mend: a watch must say so instead of being silent for ever."""


class SqliteStore:
    def __init__(self, path: str, clock: Clock, limits: HistoryLimits, boot: str) -> None:
        """Use `SqliteStore.open`. This part blocks: it opens the files, in the thread that will work on them."""
        self.path = path
        self._clock = clock
        self._process = os.getpid()
        self._closed = False
        self._failure: MetadataError | None = None
        self._leases: WeakSet[HeldLease] = WeakSet()
        try:
            self._session = StoreSession(path + ".sessions")
        except OSError as error:
            raise MetadataUnavailable(f"the metadata file {path} cannot be opened: {error}") from error
        try:
            self._database = Database(path, clock, boot, self._session.name, limits)
            self._history = History(TAIL_LIMITS, self._database.revision())
        except BaseException:
            self._session.close()
            raise

    @classmethod
    async def open(
        cls, path: str, *, clock: Clock | None = None, limits: HistoryLimits | None = None, boot: str | None = None
    ) -> SqliteStore:
        """Open the file, or create it in a folder that exists. `clock.monotonic()` must read the same in all processes
        of the machine, as the system's does. `boot` names the machine's boot; tests set it."""
        refuse_old_engine(apsw.sqlite_lib_version())
        refuse_network_filesystem(path)
        loop = asyncio.get_running_loop()
        thread = Threads(1, "metadata")
        try:
            store = await thread.call(cls, path, clock or SystemClock(), limits or HistoryLimits(), boot or boot_id())
        except BaseException:
            thread.stop()
            raise
        store._start(loop, thread)
        return store

    def _start(self, loop: asyncio.AbstractEventLoop, thread: Threads) -> None:
        self._loop = loop
        self._thread = thread
        self._rung = asyncio.Event()
        self._database.on_change = self._announce
        loop.add_reader(self._session.notifications.fileno(), self._on_notification)
        self._follower = loop.create_task(self._follow(), name=f"follow {self.path}")

    @property
    def history(self) -> History:
        return self._history

    async def get(self, key: str) -> Entry | None:
        encode_key(key)
        return await self._run(self._database.get, key)

    async def list(self, prefix: str) -> Listing:
        encode_prefix(prefix)
        return await self._run(self._database.list, prefix)

    async def txn(self, conditions: Sequence[Condition], operations: Sequence[Operation]) -> TxnResult:
        conditions, operations = tuple(conditions), tuple(operations)
        check_txn(conditions, operations)
        return await self._run(self._database.txn, conditions, operations)

    def watch(self, prefix: str, after: Revision) -> Watch:
        encode_prefix(prefix)
        return Watch(self, prefix, after)

    async def grant_lease(self, ttl_s: float) -> HeldLease:
        check_ttl(ttl_s)
        requested_at = self._clock.monotonic()
        lease = HeldLease(self, self._clock, await self._run(self._database.grant, ttl_s), ttl_s, requested_at)
        self._leases.add(lease)
        return lease

    async def renew_lease(self, lease: int) -> None:
        """Renew before all other work that waits: a lease must not be lost because clients ask for much."""
        self._check_open("renew")
        await self._thread.call(self._database.renew, lease, urgent=True)

    async def revoke_lease(self, lease: int) -> None:
        await self._run(self._database.revoke, lease)

    async def skip_to(self, revision: Revision) -> None:
        """Raise the revision, for a store that continues another one: what others have seen must stay in the past."""
        await self._run(self._database.skip_to, revision)

    async def compact(self) -> None:
        """Forget the history up to now: older watches have to list again."""
        await self._run(self._database.compact)

    async def close(self) -> None:
        """Close the file. The leases that this store granted end now: no process is left to renew them."""
        if self._closed:
            return
        self._check_process("close")
        self._closed = True
        for lease in [*self._leases]:
            lease.end()
        self._history.wake_all()
        await cancel([self._follower])
        self._loop.remove_reader(self._session.notifications.fileno())
        try:
            await self._thread.call(self._close_files)
        finally:
            self._thread.stop()

    def check_watch(self) -> bool:
        self._check_process("watch")
        if self._closed:
            raise store_closed("watch")
        if self._failure is not None:
            raise self._failure
        return True

    async def older(self, prefix: str, after: Revision) -> Page:
        return await self._run(self._database.events, prefix, after)

    async def _run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        self._check_open(work.__name__)
        return await self._thread.call(partial(work, *args, **kwargs))

    def _check_open(self, request: str) -> None:
        self._check_process(request)
        if self._closed:
            raise store_closed(request)

    def _check_process(self, request: str) -> None:
        if os.getpid() != self._process:
            raise MetadataError(
                f"{request}: the metadata file {self.path} was opened in process {self._process} and is used in its "
                f"fork {os.getpid()}; open the store after the fork"
            )

    # Following the file.

    async def _follow(self) -> None:
        probe_at = self._loop.time() + POLL_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._rung.wait()
            self._rung.clear()
            probe = self._loop.time() >= probe_at
            if probe:
                probe_at = self._loop.time() + POLL_S
            try:
                await self._catch_up(probe)
            except MetadataError as error:
                if isinstance(error.__cause__, FINAL_CAUSES):
                    return self._fail(error)
                # Busy, or out of room for the deletes of expired leases: the next poll tries again.
            except Exception as error:
                # Our bug; but no watch may be silent for ever because of it.
                self._fail(MetadataError(f"the store of {self.path} stopped following its file: {error!r}"))
                raise

    def _fail(self, error: MetadataError) -> None:
        """From now on every watch raises."""
        self._failure = error
        self._history.wake_all()

    async def _catch_up(self, probe: bool) -> None:
        more = True
        while more:
            try:
                page, more = await self._thread.call(self._news, probe, self._history.revision)
            except MetadataCompacted:
                # This process slept through more than the file keeps. Its watches find that out for themselves.
                self._history.restart(await self._thread.call(self._database.revision))
                return
            probe = False
            for changes in page.changes:
                self._history.append(changes)

    def _news(self, probe: bool, after: Revision) -> tuple[Page, bool]:
        if probe:
            self._database.expire()
            self._bury_dead_sessions()
        if not self._database.has_news():
            return Page((), after), False
        return self._database.events("", after), self._database.has_news()

    def _bury_dead_sessions(self) -> None:
        try:
            found = self._session.claim_dead()
        except OSError as error:  # The process has no file left for it: the next poll tries again.
            raise MetadataUnavailable(f"the other processes of {self.path} cannot be looked at: {error}") from error
        for dead in found:
            try:
                self._database.end_session(dead.name)
            except MetadataError:
                dead.release()
                raise
            dead.bury()

    def _announce(self) -> None:
        """The thread has committed a change."""
        self._session.notify_others()
        self._loop.call_soon_threadsafe(self._rung.set)

    def _on_notification(self) -> None:
        self._session.take_notifications()
        self._rung.set()

    def _close_files(self) -> None:
        # If the leases cannot be ended here, others end them: the session's lock is free once it is closed.
        with contextlib.suppress(MetadataError):
            self._database.end_session(self._session.name)
        try:
            self._database.close()
        finally:
            self._session.close()
