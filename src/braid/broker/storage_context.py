"""What all segments of a broker share, opened and closed in one place."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from braid.broker.config import BrokerConfig
from braid.broker.data_folder import DataFolder
from braid.metadata.store import Store
from braid.model.errors import InvalidArgument, InvalidConfig, ObjectStoreUnavailable
from braid.ports.clock import Clock
from braid.ports.disk import Disk
from braid.storage.cache import HotCache
from braid.storage.handles import FooterCache, ReadHandles
from braid.storage.log.preallocated import PreallocatedFiles
from braid.storage.objects.disk import DiskObjects
from braid.storage.objects.store import Objects
from braid.storage.segment import StorageContext, StorageMode

LOCAL = "local"


@asynccontextmanager
async def open_storage_context(
    config: BrokerConfig,
    folder: DataFolder,
    store: Store,
    disk: Disk,
    clock: Clock,
    random: random.Random,
    objects: Objects | None = None,
) -> AsyncIterator[StorageContext]:
    """`objects`, if they are given, are shared by all brokers, whatever the configuration says."""
    if objects is not None:
        mode = StorageMode.OBJECT_STORE
    else:
        mode, objects = await _open_objects(config.storage, folder, disk, clock, random)
    preallocated = PreallocatedFiles(disk, folder.preallocated, config.file_bytes, config.spare_files)
    await disk.make_folder(folder.logs)
    handles = ReadHandles(disk)
    await preallocated.open()
    try:
        yield StorageContext(
            broker_id=config.id,
            disk=disk,
            folder=folder.logs,
            store=store,
            objects=objects,
            mode=mode,
            clock=clock,
            cache=HotCache(config.cache_bytes),
            handles=handles,
            footers=FooterCache(),
            preallocated=preallocated,
            random=random,
        )
    finally:
        await preallocated.close()
        await handles.close()
        await objects.close()


async def _open_objects(
    storage: str, folder: DataFolder, disk: Disk, clock: Clock, random: random.Random
) -> tuple[StorageMode, Objects]:
    if storage == LOCAL:
        objects = DiskObjects(disk, str(Path(folder.chunks).absolute()), random=random)
        # The folder is locked, so every draft is one that a crash has left.
        with contextlib.suppress(ObjectStoreUnavailable):
            await objects.sweep(clock.now_us())
        return StorageMode.LOCAL, objects
    from braid.storage.objects.urls import open_objects  # obstore takes 40 ms to import, and most brokers need none

    try:
        shared = open_objects(storage, disk=disk, random=random)
    except InvalidArgument as error:
        raise InvalidConfig(f"--storage {storage}: {error}") from error
    return (StorageMode.SHARED_FS if storage.startswith("file:") else StorageMode.OBJECT_STORE), shared
