"""The id of a cluster: random, made once, kept in its metadata store."""

from __future__ import annotations

import secrets
from typing import Final

from braid.metadata import paths
from braid.metadata.made_once import made_once
from braid.metadata.store import Store

ID_BYTES: Final = 16


async def cluster_id(store: Store) -> str:
    """Return the cluster's id; make it if there is none."""
    fresh = secrets.token_hex(ID_BYTES).encode()
    return (await made_once(store, paths.CLUSTER_ID, fresh)).decode()
