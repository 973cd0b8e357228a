"""The id of a cluster: random, made once, kept in its metadata store."""

from __future__ import annotations

import contextlib
import secrets
from typing import Final

from braid.metadata import paths
from braid.metadata.store import Compare, Put, Store
from braid.model.errors import MetadataUncertain
from braid.model.ids import Revision

ID_BYTES: Final = 16
MAX_TRIES: Final = 5


async def cluster_id(store: Store) -> str:
    """Return the cluster's id; make it if there is none."""
    fresh = secrets.token_hex(ID_BYTES).encode()
    for _ in range(MAX_TRIES):
        entry = await store.get(paths.CLUSTER_ID)
        if entry is not None:
            return entry.value.decode()
        with contextlib.suppress(MetadataUncertain):  # The key is read back in any case: another broker may have won.
            await store.txn([Compare(paths.CLUSTER_ID, Revision(0))], [Put(paths.CLUSTER_ID, fresh)])
    raise MetadataUncertain("the cluster's id could be neither read nor written; start the broker again")
