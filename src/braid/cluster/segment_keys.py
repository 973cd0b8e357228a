"""Deleting keys from the metadata in an order, in as few transactions as it takes."""

from __future__ import annotations

from collections.abc import Sequence

from braid.metadata import paths
from braid.metadata.store import MAX_TXN_OPERATIONS, Compare, Condition, Delete, Store
from braid.metadata.view import Known
from braid.model.names import SegmentName
from braid.model.ownership import Ownership


async def delete_keys(store: Store, keys: Sequence[str], *conditions: Condition) -> None:
    """Delete keys in this order, as long as the conditions hold."""
    room = MAX_TXN_OPERATIONS - len(conditions)
    for first in range(0, len(keys), room):
        some = keys[first : first + room]
        if not (await store.txn([*conditions], [Delete(key) for key in some])).succeeded:
            return


async def delete_segment_keys(store: Store, name: SegmentName, known: Known[Ownership], *conditions: Condition) -> None:
    """Delete all keys of a segment, its ownership record last, as long as that record is the one which is known."""
    path, descriptor = name.topic.path, name.descriptor
    record = paths.ownership(path, descriptor)
    below = [
        entry.key
        for prefix in (paths.segment_storage_prefix(path, descriptor), paths.segment_prefix(path, descriptor))
        for entry in (await store.list(prefix)).entries
        if entry.key != record
    ]
    await delete_keys(store, [*below, record], *conditions, Compare(record, known.revision))
