"""The cursors of one segment as the store has them, and the only way in which its owner writes them.

Every write is one transaction under two kinds of conditions: that this owner still owns the segment (I3), and that each
cursor is as this owner last saw it. The second condition makes a delayed write harmless, even if its reply was lost.
When a transaction fails or its outcome is unknown, everything is read back, and what is still missing is written again.
The fence is the owner and epoch of the ownership record, not its revision, which also rises when the same owner's state
changes. `on_fenced` is called when another owner has the segment, which must then not be served any more.

A drained mark is put in the transaction that stores the cursor at the end, and deleted in the transaction that sets it
back, so no cursor is ever read with the mark of another place.

One write or reading at a time: the caller sees to it (cursors.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Final, NamedTuple

from msgspec import UNSET, UnsetType

from braid.metadata import paths
from braid.metadata.store import MAX_TXN_OPERATIONS, Compare, Delete, Entry, Put, Store
from braid.model.errors import Fenced, MetadataError, MetadataUncertain
from braid.model.ids import Epoch, Offset, RequestId, Revision
from braid.model.names import SegmentName
from braid.model.ownership import Ownership
from braid.model.stored_record import decode, encode
from braid.model.subscription import Cursor, Drained

MAX_CURSORS_PER_TXN: Final = MAX_TXN_OPERATIONS // 2
"""Each cursor costs an operation, another one for its mark, and a condition."""
MAX_TRIES: Final = 5


class CursorPlace(NamedTuple):
    offset: Offset
    placement: int
    placed_by: RequestId
    moved_at: int
    drained: bool
    queue: bool
    state: bytes


class _Stored(NamedTuple):
    place: CursorPlace
    revision: Revision
    unknown: str | UnsetType
    """The fields of the record that this build does not know (model/stored_record.py)."""


class StoredCursors:
    def __init__(
        self,
        store: Store,
        name: SegmentName,
        epoch: Epoch,
        ownership: Compare,
        end: Callable[[], Offset],
        on_fenced: Callable[[Fenced], None] | None,
    ) -> None:
        """`end` returns the end of what consumers may see, which a drained mark names."""
        self._store = store
        self._name = name
        self._epoch = epoch
        self._ownership = ownership
        self._end = end
        self._on_fenced = on_fenced
        self._owner = ""
        """The owner of this epoch, which has only one: known when the ownership record was read."""
        self._stored: dict[str, _Stored] = {}
        self._fenced: Fenced | None = None
        self.last_placement = 0
        """The highest that any cursor of the segment has had, as far as the store has told."""

    @property
    def fenced(self) -> bool:
        """Whether the store has shown that this owner may write no more."""
        return self._fenced is not None

    def check_owner(self) -> None:
        if self._fenced is not None:
            raise self._fenced.again()

    def __contains__(self, subscription: str) -> bool:
        return subscription in self._stored

    def place(self, subscription: str) -> CursorPlace | None:
        stored = self._stored.get(subscription)
        return stored.place if stored is not None else None

    def places(self) -> dict[str, CursorPlace]:
        return {subscription: stored.place for subscription, stored in self._stored.items()}

    def revision(self, subscription: str) -> Revision:
        """The revision at which the cursor was written; 0 if there is none."""
        stored = self._stored.get(subscription)
        return stored.revision if stored is not None else Revision(0)

    async def write(self, places: Mapping[str, CursorPlace | None], *, unless: str | None = None) -> bool:
        """Store these cursors; None removes a cursor. If the key `unless` exists, nothing is stored and the answer is
        False."""
        with_states = {name: place for name, place in places.items() if place is not None and place.state}
        for name, place in with_states.items():  # They may be long: one at a time.
            if not await self._write_some({name: place}, unless):
                return False
        left = iter((name, place) for name, place in places.items() if name not in with_states)
        while some := dict(islice(left, MAX_CURSORS_PER_TXN)):
            if not await self._write_some(some, unless):
                return False
        return True

    async def read_back(self) -> None:
        """Read what is stored. `Fenced`, for good, if the segment has another owner."""
        # One listing: a cursor and its mark are read as one transaction has left them.
        listing = await self._store.list(paths.segment_prefix(self._name.topic.path, self._name.descriptor))
        drained = {found[2] for entry in listing.entries if (found := paths.drained_of(entry.key)) is not None}
        self._check_ownership(await self._store.get(self._ownership.key))
        self._stored = {}
        for entry in listing.entries:
            subscription = paths.subscription_of_cursor(entry.key)
            if subscription is not None:
                cursor = decode(Cursor, entry.value, f"the Cursor at {entry.key}")
                place = CursorPlace(
                    cursor.offset,
                    cursor.placement,
                    cursor.placed_by,
                    cursor.moved_at,
                    subscription in drained,
                    cursor.queue,
                    cursor.state,
                )
                self._stored[subscription] = _Stored(place, entry.revision, cursor.unknown)
                self.last_placement = max(self.last_placement, cursor.placement)
        self.last_placement = max(self.last_placement, listing.revision)

    async def _write_some(self, places: Mapping[str, CursorPlace | None], unless: str | None) -> bool:
        for _ in range(MAX_TRIES):
            self.check_owner()
            conditions = [self._ownership]
            if unless is not None:
                conditions.append(Compare(unless, Revision(0)))
            operations: list[Put | Delete] = []
            for subscription, place in places.items():
                key = paths.cursor(self._name.topic.path, self._name.descriptor, subscription)
                stored = self._stored.get(subscription)
                conditions.append(Compare(key, stored.revision if stored is not None else Revision(0)))
                operations.append(Delete(key) if place is None else Put(key, self._encoded(place, stored)))
                operations += self._marking(subscription, place, stored)
            try:
                result = await self._store.txn(conditions, operations)
            except MetadataUncertain:
                result = None
            if result is not None and result.succeeded:
                for subscription, place in places.items():
                    self._note_stored(subscription, place, result.revision)
                return True
            try:
                await self.read_back()
            except MetadataError as error:
                if result is None:
                    raise MetadataUncertain(f"it is not known whether cursors of {self._name} were stored") from error
                raise
            if all(self.place(subscription) == place for subscription, place in places.items()):
                return True
            if unless is not None and await self._store.get(unless) is not None:
                return False
        raise MetadataUncertain(f"cursors of {self._name} could not be written and read back; try again")

    def _encoded(self, place: CursorPlace, stored: _Stored | None) -> bytes:
        offset, placement, placed_by, moved_at, _, queue, state = place
        cursor = Cursor(
            offset=offset,
            epoch=self._epoch,
            placement=placement,
            placed_by=placed_by,
            moved_at=moved_at,
            queue=queue,
            state=state,
            unknown=stored.unknown if stored is not None else UNSET,
        )
        return encode(cursor)

    def _marking(self, subscription: str, place: CursorPlace | None, stored: _Stored | None) -> list[Put | Delete]:
        """Put or delete the drained mark, if it is to change. The condition on the cursor covers the mark: both change
        together. A mark without a cursor is deleted."""
        drained = place is not None and place.drained
        if stored is not None and stored.place.drained == drained:
            return []
        key = paths.drained(self._name.topic.path, self._name.descriptor, subscription)
        return [Put(key, encode(Drained(end=self._end()))) if drained else Delete(key)]

    def _note_stored(self, subscription: str, place: CursorPlace | None, revision: Revision) -> None:
        if place is None:
            self._stored.pop(subscription, None)
        else:
            before = self._stored.get(subscription)
            unknown = before.unknown if before is not None else UNSET
            self._stored[subscription] = _Stored(place, revision, unknown)

    def _check_ownership(self, entry: Entry | None) -> None:
        """Compare this revision of the record from now on, if this owner and epoch still hold it; else `Fenced`."""
        record = Ownership.from_json(entry.value) if entry is not None else None
        if entry is not None and record is not None:
            self._owner = self._owner or record.owner
            if record.is_held_by(self._owner, self._epoch):
                self._ownership = Compare(entry.key, entry.revision)
                return
        sealed = record is not None and (record.owner, record.epoch) == (self._owner, self._epoch)
        now = "is sealed" if sealed else "has no owner any more"
        if record is not None and not sealed:
            now = f"has another owner now, {record.owner} in epoch {record.epoch}"
        self._fenced = Fenced(f"cursors of {self._name} cannot be written in epoch {self._epoch}: the segment {now}")
        if self._on_fenced is not None and not sealed:  # The owner knows what it has sealed itself.
            self._on_fenced(self._fenced)
        raise self._fenced.again()
