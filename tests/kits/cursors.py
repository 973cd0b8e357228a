"""The cursors of one plain segment, and what the store has of them."""

from __future__ import annotations

from braid.broker.config import CursorConfig
from braid.metadata import paths
from braid.metadata.memory import MemoryStore
from braid.model.ids import SegmentId
from braid.model.layout import FULL_RANGE
from braid.model.names import SegmentName
from braid.model.stored_record import decode
from braid.model.subscription import Cursor
from tests.kits.control import ORDERS, PlainSegment, plain_segment

NAME = SegmentName(ORDERS, FULL_RANGE, SegmentId(0))


async def opened(store: MemoryStore, *, end: int = 100, config: CursorConfig | None = None) -> PlainSegment:
    return await plain_segment(store, NAME, end=end, config=config)


async def stored(store: MemoryStore, subscription: str = "billing") -> int | None:
    """The offset that the store has; None: it has no cursor."""
    cursor = await _cursor(store, subscription)
    return cursor.offset if cursor is not None else None


async def placement(store: MemoryStore, subscription: str = "billing") -> int:
    cursor = await _cursor(store, subscription)
    assert cursor is not None
    return cursor.placement


async def _cursor(store: MemoryStore, subscription: str) -> Cursor | None:
    entry = await store.client("looker-on").get(paths.cursor(ORDERS.path, NAME.descriptor, subscription))
    return decode(Cursor, entry.value) if entry is not None else None
