"""Values that the first broker of a cluster makes, and that never change after that."""

from __future__ import annotations

import contextlib
from typing import Final

from braid.metadata.store import Compare, Put, Store
from braid.model.errors import MetadataUncertain
from braid.model.ids import Revision

MAX_TRIES: Final = 5


async def made_once(store: Store, key: str, fresh: bytes) -> bytes:
    """Return the key's value; make it `fresh` if there is none. Every broker gets the same value."""
    for _ in range(MAX_TRIES):
        entry = await store.get(key)
        if entry is not None:
            return entry.value
        with contextlib.suppress(MetadataUncertain):  # The key is read back in any case: another broker may have won.
            await store.txn([Compare(key, Revision(0))], [Put(key, fresh)])
    raise MetadataUncertain(f"{key} could be neither read nor written; start the broker again")
