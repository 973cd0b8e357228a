"""The things that all segments of one broker share, and where the chunks of their logs lie."""

from __future__ import annotations

import random
from enum import Enum

import msgspec

from braid.metadata.store import Store
from braid.ports.clock import Clock
from braid.ports.disk import Disk
from braid.storage.cache import HotCache
from braid.storage.handles import FooterCache, ReadHandles
from braid.storage.log.preallocated import PreallocatedFiles
from braid.storage.objects.store import Objects


class StorageMode(Enum):
    LOCAL = "local"
    """Chunks lie on the broker's own disk and are made when a segment is handed over."""
    SHARED_FS = "shared_fs"
    OBJECT_STORE = "object_store"

    @property
    def exports_continuously(self) -> bool:
        return self is not StorageMode.LOCAL


class StorageContext(msgspec.Struct):
    """What all segments of one broker share."""

    broker_id: str
    disk: Disk
    folder: str
    store: Store
    objects: Objects
    mode: StorageMode
    clock: Clock
    cache: HotCache
    handles: ReadHandles
    footers: FooterCache
    preallocated: PreallocatedFiles | None
    random: random.Random
