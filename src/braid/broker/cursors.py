"""The cursors of one segment, on its owner: what each subscription has consumed of it.

An ack moves a cursor in memory; the store follows, by count, by time and at every orderly stop. So a crash makes a
subscription go back by the acks of the last moments, and never forward: what is stored never lies beyond the acks, nor
beyond what the log has synced, because a cursor that outlives the records before it would skip the ones that later take
their offsets. A position that is ahead of the synced end stays dirty until the log has caught up.

A seek and a new subscription (`place`) are stored before they count. Memory changes when the store has answered and the
caller goes on without the loop in between, so that whoever closes channels right after a seek lets no old ack slip in.

Every write is one transaction under two kinds of conditions: that this owner still owns the segment (I3), and that each
cursor is as this owner last saw it. The second makes a write harmless whose answer was lost and that arrives late. When
a transaction fails or its outcome is unknown, everything is read back, and what is still missing is written again. All
writes take turns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Final, NamedTuple

from braid.broker.config import CursorConfig
from braid.metadata import paths
from braid.metadata.store import MAX_TXN_OPERATIONS, Compare, Delete, Put, Store
from braid.model.errors import Fenced, InvalidArgument, MetadataError, MetadataUncertain, SubscriptionNotFound
from braid.model.ids import Epoch, Offset, Revision
from braid.model.names import SegmentName
from braid.model.subscription import Cursor, decode, encode

log = logging.getLogger(__name__)

MAX_CURSORS_PER_TXN: Final = MAX_TXN_OPERATIONS - 1
"""Each costs an operation and a condition, and the ownership is one condition more."""
MAX_TRIES: Final = 5
RETRY_S: Final = 1.0
"""How long the background flush waits after the store did not answer."""


class _Stored(NamedTuple):
    offset: Offset
    revision: Revision


class Cursors:
    def __init__(
        self,
        store: Store,
        name: SegmentName,
        epoch: Epoch,
        ownership: Compare,
        durable_end: Callable[[], Offset],
        config: CursorConfig,
        *,
        end: Callable[[], Offset] | None = None,
    ) -> None:
        """`durable_end` is what the log has synced, `end` what consumers may see; without it both are the same."""
        self.name = name
        self._store = store
        self._epoch = epoch
        self._ownership = ownership
        self._durable_end = durable_end
        self._end = end or durable_end
        self._config = config
        self._offsets: dict[str, Offset] = {}
        self._stored: dict[str, _Stored] = {}
        self._dirty: dict[str, None] = {}
        """Subscriptions whose position in memory is not the one in the store."""
        self._acks = 0
        """Since the last flush."""
        self._turn = asyncio.Lock()
        self._work = asyncio.Event()
        """Set while anything is dirty."""
        self._much_work = asyncio.Event()
        """Set when so many acks came that the flush does not wait for its time."""
        self._fenced: Fenced | None = None
        self._task: asyncio.Task[None] | None = None

    async def load(self) -> None:
        """Read all cursors. One that lies beyond the end of the log is set to the end: what it says was consumed is
        not there, so it must not hide what comes."""
        await self._read_back()
        end = self._durable_end()
        for subscription, stored in self._stored.items():
            self._offsets[subscription] = stored.offset
            if stored.offset > end:
                log.warning(
                    "the cursor of subscription %s stands at offset %d of %s, which ends at %d: records that were "
                    "consumed are lost; it is set to the end",
                    subscription, stored.offset, self.name, end,
                )  # fmt: skip
                self._offsets[subscription] = end
                self._note_dirty(subscription)

    def offset(self, subscription: str) -> Offset | None:
        return self._offsets.get(subscription)

    def all(self) -> dict[str, Offset]:
        return dict(self._offsets)

    def lowest(self) -> Offset | None:
        """The first offset that a subscription may need again, also after a crash: the lowest that is stored."""
        return min((stored.offset for stored in self._stored.values()), default=None)

    def advance(self, subscription: str, offset: Offset) -> bool:
        """An ack: everything below `offset` is consumed. False if it was before."""
        self._check_owner()
        known = self._offsets.get(subscription)
        if known is None:
            raise self._not_found(subscription)
        if offset <= known:
            return False
        self._check_place(subscription, offset)
        self._offsets[subscription] = offset
        self._acks += 1
        self._note_dirty(subscription)
        if self._acks >= self._config.flush_acks:
            self._much_work.set()
        return True

    async def place(self, subscription: str, offset: Offset) -> None:
        """Seek or creation: stored when it returns, as far as the log is synced."""
        self._check_place(subscription, offset)
        async with self._turn:
            await self._write({subscription: min(offset, self._durable_end())})
            self._offsets[subscription] = offset
            self._settle([subscription])

    async def remove(self, subscription: str) -> None:
        """Removing one that is not there is fine."""
        async with self._turn:
            if subscription in self._stored:
                await self._write({subscription: None})
            self._offsets.pop(subscription, None)
            self._dirty.pop(subscription, None)
            self._settle([])

    async def flush(self, subscription: str | None = None) -> None:
        """Returns when all cursors, or the one that is named, are stored as they were when it was called, as far as
        the log is synced. What lies beyond stays dirty."""
        async with self._turn:
            self._check_owner()
            names = [*self._dirty] if subscription is None else [name for name in self._dirty if name == subscription]
            if subscription is None:
                self._acks = 0
                self._much_work.clear()
            durable_end = self._durable_end()
            places: dict[str, Offset | None] = {name: min(self._offsets[name], durable_end) for name in names}
            # A cursor that waits for the log to be synced is where it was.
            places = {name: place for name, place in places.items() if self._stored_offset(name) != place}
            await self._write(places)
            self._settle(names)

    def start(self) -> None:
        """Flush in the background from now on."""
        assert self._task is None, "cursors are started once"
        self._task = asyncio.create_task(self._flush_when_due(), name=f"flush cursors of {self.name}")

    async def stop(self) -> None:
        """Ends the background flush and stores what is left. What another owner took over is not ours to store."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()
        if self._fenced is None:
            await self.flush()

    async def _flush_when_due(self) -> None:
        while True:
            await self._work.wait()
            await _wait_at_most(self._much_work, self._config.flush_s)
            try:
                await self.flush()
            except Fenced:
                return  # Whoever acks next is told.
            except MetadataError as error:
                log.warning("cursors of %s cannot be stored, trying again: %s", self.name, error)
                await asyncio.sleep(RETRY_S)

    def _stored_offset(self, subscription: str) -> Offset | None:
        stored = self._stored.get(subscription)
        return stored.offset if stored is not None else None

    def _note_dirty(self, subscription: str) -> None:
        self._dirty[subscription] = None
        self._work.set()

    def _settle(self, subscriptions: list[str]) -> None:
        """These were written: they stay dirty only if they have moved on since, or the log was behind."""
        for subscription in subscriptions:
            if self._stored_offset(subscription) == self._offsets.get(subscription):
                self._dirty.pop(subscription, None)
            else:
                self._dirty[subscription] = None
        if self._dirty:
            self._work.set()
        else:
            self._work.clear()

    def _check_owner(self) -> None:
        if self._fenced is not None:
            raise self._fenced.again()

    def _check_place(self, subscription: str, offset: Offset) -> None:
        if not 0 <= offset <= self._end():
            raise InvalidArgument(
                f"subscription {subscription} cannot stand at offset {offset} of {self.name}: "
                f"the segment ends at {self._end()}"
            )

    def _not_found(self, subscription: str) -> SubscriptionNotFound:
        return SubscriptionNotFound(f"{self.name} has no subscription {subscription}; it may have been deleted")

    # The store.

    def _key(self, subscription: str) -> str:
        return paths.cursor(self.name.topic.path, self.name.descriptor, subscription)

    async def _write(self, places: Mapping[str, Offset | None]) -> None:
        """Store these cursors, None for no cursor. Only with the turn."""
        left = iter(places.items())
        while some := dict(islice(left, MAX_CURSORS_PER_TXN)):
            await self._write_some(some)

    async def _write_some(self, places: Mapping[str, Offset | None]) -> None:
        for _ in range(MAX_TRIES):
            self._check_owner()
            conditions = [self._ownership]
            operations: list[Put | Delete] = []
            for subscription, offset in places.items():
                key = self._key(subscription)
                stored = self._stored.get(subscription)
                conditions.append(Compare(key, stored.revision if stored is not None else Revision(0)))
                value = None if offset is None else encode(Cursor(offset=offset, epoch=self._epoch))
                operations.append(Delete(key) if value is None else Put(key, value))
            try:
                result = await self._store.txn(conditions, operations)
            except MetadataUncertain:
                result = None
            if result is not None and result.succeeded:
                for subscription, offset in places.items():
                    self._note_stored(subscription, offset, result.revision)
                return
            await self._read_back()
            if all(self._stored_offset(subscription) == offset for subscription, offset in places.items()):
                return
        raise MetadataUncertain(f"cursors of {self.name} could not be written and read back; try again")

    def _note_stored(self, subscription: str, offset: Offset | None, revision: Revision) -> None:
        if offset is None:
            self._stored.pop(subscription, None)
        else:
            self._stored[subscription] = _Stored(offset, revision)

    async def _read_back(self) -> None:
        """Learn what is stored. `Fenced`, for good, if the segment has another owner."""
        prefix = paths.cursors_prefix(self.name.topic.path, self.name.descriptor)
        listing = await self._store.list(prefix)
        owner = await self._store.get(self._ownership.key)
        if owner is None or owner.revision != self._ownership.revision:
            self._fenced = Fenced(
                f"cursors of {self.name} cannot be written in epoch {self._epoch}: the segment has another owner now"
            )
            raise self._fenced.again()
        self._stored = {}
        for entry in listing.entries:
            subscription = paths.subscription_of_cursor(entry.key)
            if subscription is not None:
                self._stored[subscription] = _Stored(decode(Cursor, entry.value).offset, entry.revision)


async def _wait_at_most(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
