"""The ownership records of all segments, as this broker knows them, and the one way to change them.

A change compares the record that it was decided on. When the answer is lost, the record is read back. Every record is
unique (an epoch has one owner, and within an epoch each state comes once), so a record that is found was written.

Many records that change for one reason go into few transactions (`swap_all`): a broker may take a thousand segments
with it. Each record keeps its own conditions. If one of them fails, the transaction writes nothing, and its records are
written one by one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from braid.metadata import paths
from braid.metadata.store import MAX_TXN_OPERATIONS, Compare, Condition, Operation, Put
from braid.metadata.view import Known, Table, View
from braid.model.errors import InvalidName, MetadataUncertain, RecordUnreadable
from braid.model.ids import Revision
from braid.model.names import SegmentName
from braid.model.ownership import Ownership

SegmentKey = tuple[str, str]
"""A topic's path and a segment's descriptor."""

MAX_TRIES: Final = 5
SWAPS_TOGETHER: Final = 32
"""Records in one transaction. A larger one keeps other writers of the store waiting, and more of it is written again if
one record has changed."""

_log: Final = logging.getLogger(__name__)


class Swap(NamedTuple):
    """One record that is to be replaced, as `Owners.swap` does."""

    name: SegmentName
    revision: Revision
    record: Ownership
    conditions: tuple[Condition, ...] = ()


class Owners:
    def __init__(self, view: View) -> None:
        self.view: Final = view
        self.table: Final[Table[SegmentKey, Ownership]] = view.add(
            Table(
                paths.SEGMENTS_PREFIX,
                _identify,
                Ownership.from_json,
                lambda key: paths.ownership(*key),
            )
        )
        self._by_topic: dict[str, dict[str, None]] = {}
        self.table.on_change.append(self._index)

    def _index(self, key: SegmentKey) -> None:
        path, descriptor = key
        if key in self.table:
            self._by_topic.setdefault(path, {})[descriptor] = None
        elif (descriptors := self._by_topic.get(path)) is not None:
            descriptors.pop(descriptor, None)
            if not descriptors:
                del self._by_topic[path]

    def find(self, name: SegmentName) -> Ownership | None:
        return self.table.get((name.topic.path, name.descriptor))

    def known(self, name: SegmentName) -> Known[Ownership] | None:
        return self.table.known((name.topic.path, name.descriptor))

    def unreadable(self, name: SegmentName) -> RecordUnreadable | None:
        """Return why the segment's record cannot be read; None if it can, or if there is none."""
        return self.table.unreadable((name.topic.path, name.descriptor))

    def of_topic(self, path: str) -> dict[str, Ownership]:
        """Return the records of a topic by descriptor."""
        found = ((descriptor, self.table.get((path, descriptor))) for descriptor in self._by_topic.get(path, {}))
        return {descriptor: record for descriptor, record in found if record is not None}

    def of_broker(self, broker_id: str) -> dict[SegmentKey, Ownership]:
        return {key: record for key, record in self.table.all().items() if record.owner == broker_id}

    async def swap(
        self,
        name: SegmentName,
        revision: Revision,
        record: Ownership,
        *,
        conditions: Sequence[Condition] = (),
        operations: Sequence[Operation] = (),
    ) -> Revision | None:
        """Replace the record that was written at `revision` (0: there was none). Returns the new revision, or None when
        the record has changed or another condition failed: nothing was written. `MetadataUncertain` if it is not known
        whether the record was written."""
        key = paths.ownership(name.topic.path, name.descriptor)
        value = record.to_json()
        for _ in range(MAX_TRIES):
            try:
                result = await self.view.store.txn(
                    [Compare(key, revision), *conditions], [Put(key, value), *operations]
                )
                return result.revision if result.succeeded else None
            except MetadataUncertain:
                entry = await self.view.store.get(key)
            if entry is not None and entry.value == value:
                return entry.revision
            if (entry.revision if entry is not None else 0) != revision:
                return None
        raise MetadataUncertain(f"it is not known whether the ownership of {name} was changed; look, then try again")

    async def swap_all(self, swaps: Sequence[Swap]) -> list[Revision | None]:
        """Replace several records, with few transactions. Returns for each what `swap` returns. `MetadataUncertain` if
        it is not known which of them were written."""
        revisions: list[Revision | None] = []
        for group in grouped(swaps):
            revision = await self._swap_group(group)
            if revision is not None:
                revisions += [revision] * len(group)
            else:
                alone = (self.swap(each.name, each.revision, each.record, conditions=each.conditions) for each in group)
                revisions += await asyncio.gather(*alone)
        return revisions

    async def _swap_group(self, group: Sequence[Swap]) -> Revision | None:
        """Replace all records of the group, or none."""
        if len(group) == 1:
            return None
        keys = [paths.ownership(each.name.topic.path, each.name.descriptor) for each in group]
        result = await self.view.store.txn(
            [*(Compare(key, each.revision) for key, each in zip(keys, group, strict=True)), *_shared(group)],
            [Put(key, each.record.to_json()) for key, each in zip(keys, group, strict=True)],
        )
        return result.revision if result.succeeded else None


def grouped(swaps: Sequence[Swap]) -> Iterator[Sequence[Swap]]:
    """Divide swaps, in their order, into groups that fit into one transaction each."""
    group: list[Swap] = []
    for each in swaps:
        fits = len(group) < SWAPS_TOGETHER and len(group) + 1 + len(_shared([*group, each])) <= MAX_TXN_OPERATIONS
        if group and not fits:
            yield group
            group = []
        group.append(each)
    if group:
        yield group


def _shared(group: Sequence[Swap]) -> dict[Condition, None]:
    """Return the conditions of all swaps, each once."""
    return dict.fromkeys(condition for each in group for condition in each.conditions)


def _identify(key: str) -> SegmentKey | None:
    """Return the segment that a key names; None for a key that is no ownership record."""
    found = paths.segment_of_ownership(key)
    if found is not None:
        try:
            SegmentName.at(*found)
        except InvalidName as error:
            _log.error("%s is not an ownership record: %s", key, error)
            return None
    return found
