"""The resources of a broker: its clock, network, locked data folder, metadata store and storage."""

from __future__ import annotations

import contextlib
import logging
import os
import random as random_module
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final, Self

import msgspec

from braid.broker.config import LOCAL, BrokerConfig
from braid.broker.connections.tls import peer_tls, server_tls
from braid.broker.data_folder import DataFolder, open_data_folder
from braid.cluster.cluster_id import cluster_id
from braid.metadata.sqlite.store import SqliteStore
from braid.metadata.store import Store
from braid.model.errors import BraidError, InvalidArgument, InvalidConfig, ObjectStoreUnavailable
from braid.ports.clock import Clock, SystemClock
from braid.ports.disk import Disk
from braid.ports.network import Network, SocketNetwork
from braid.ports.os_disk import OsDisk
from braid.ports.private_files import keep_folder_private
from braid.ports.processor import NoProcessor, Processor, SystemProcessor
from braid.ports.threads import Threads
from braid.storage.cache import HotCache
from braid.storage.context import StorageContext, StorageMode
from braid.storage.handles import FooterCache, ReadHandles
from braid.storage.log.preallocated import PreallocatedFiles
from braid.storage.objects.disk import DiskObjects
from braid.storage.objects.marked import MarkedObjects
from braid.storage.objects.store import Objects

_log: Final = logging.getLogger(__name__)


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    clock: Clock
    processor: Processor
    random: random_module.Random
    network: Network
    store: Store
    folder: DataFolder
    storage: StorageContext
    threads: Threads | None = None
    """For work that takes long and touches no disk; None in a simulation."""

    @classmethod
    async def open(
        cls,
        stack: contextlib.AsyncExitStack,
        config: BrokerConfig,
        *,
        network: Network | None = None,
        store: Store | None = None,
        disk: Disk | None = None,
        clock: Clock | None = None,
        random: random_module.Random | None = None,
        objects: Objects | None = None,
    ) -> Self:
        """Open the resources, with real ports in place of those that are not given. `stack` closes what this opens."""
        processor = SystemProcessor() if clock is None else NoProcessor()
        clock = clock or SystemClock()
        random = random or random_module.Random(os.urandom(16))
        threads = None
        if disk is None:
            disk = OsDisk(private_folder=config.data)
            stack.push_async_callback(disk.close)
            threads = Threads(1, "measure")
            stack.callback(threads.stop)
            _keep_private(config.data)
        folder = await open_data_folder(disk, config.data, config.id)
        stack.push_async_callback(folder.release)
        if store is None:
            store = await open_store(config.metadata or f"sqlite:{folder.metadata_file}", clock)
            stack.push_async_callback(store.close)
        storage = await stack.enter_async_context(_open_storage(config, folder, store, disk, clock, random, objects))
        return cls(
            clock=clock,
            processor=processor,
            random=random,
            network=network or _open_network(config),
            store=store,
            folder=folder,
            storage=storage,
            threads=threads,
        )


def _keep_private(folder: str) -> None:
    try:
        keep_folder_private(folder)
    except OSError as error:
        raise InvalidConfig(f"the data folder {folder} cannot be used: {error.strerror}") from error


def _open_network(config: BrokerConfig) -> Network:
    if config.tls is None:
        return SocketNetwork()
    return SocketNetwork(client_tls=peer_tls(config.tls), server_tls=server_tls(config.tls))


async def open_store(url: str, clock: Clock) -> Store:
    """Open the metadata store that a URL names. `InvalidConfig` if it cannot be."""
    scheme, _, rest = url.partition(":")
    try:
        if scheme == "sqlite" and rest:
            return await SqliteStore.open(rest, clock=clock)
        if scheme == "etcd" and rest.startswith("//"):
            from braid.metadata.etcd.store import EtcdStore  # needs grpcio, which only clusters install

            return await EtcdStore.open(rest.removeprefix("//").split(","), clock=clock)
    except ImportError as error:
        raise InvalidConfig(str(error)) from error
    except BraidError as error:
        raise InvalidConfig(f"--metadata {url}: {error}") from error
    raise InvalidConfig(f"--metadata {url} is not understood: write sqlite:PATH or etcd://HOST:PORT,…")


@contextlib.asynccontextmanager
async def _open_storage(
    config: BrokerConfig,
    folder: DataFolder,
    store: Store,
    disk: Disk,
    clock: Clock,
    random: random_module.Random,
    objects: Objects | None = None,
) -> AsyncIterator[StorageContext]:
    """An object store that is given (`objects`) is shared by all brokers, whatever the configuration says."""
    outer: list[Objects] = []
    if objects is not None:
        mode = StorageMode.OBJECT_STORE
    else:
        mode, objects, outer = await _open_objects(config.storage, folder, disk, clock, random)
    preallocated = PreallocatedFiles(disk, folder.preallocated, config.file_bytes, config.spare_files)
    handles = ReadHandles(disk)
    try:
        if mode is not StorageMode.LOCAL:
            objects = await _marked(objects, outer, config.storage, store)
        await disk.make_folder(folder.logs)
        await preallocated.open()
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


async def _marked(objects: Objects, outer: list[Objects], storage: str, store: Store) -> Objects:
    """Refuse a shared storage that belongs to another cluster, or that lies inside or around the storage of another
    cluster. A storage that does not answer is compared before it is changed."""
    marked = MarkedObjects(objects, await cluster_id(store), outer)
    try:
        await marked.verify()
    except InvalidConfig as error:
        raise InvalidConfig(f"--storage {storage}: {error}") from error
    except BraidError as error:
        _log.warning("it is not known yet whether the storage belongs to this cluster: %s", error)
    return marked


async def _open_objects(
    storage: str, folder: DataFolder, disk: Disk, clock: Clock, random: random_module.Random
) -> tuple[StorageMode, Objects, list[Objects]]:
    """The objects, and those of the prefixes around them."""
    if storage == LOCAL:
        objects = DiskObjects(disk, str(Path(folder.chunks).absolute()), random=random)
        # This broker has locked the folder, so a crash has left every draft that is there.
        with contextlib.suppress(ObjectStoreUnavailable):
            await objects.sweep(clock.now_us())
        return StorageMode.LOCAL, objects, []
    from braid.storage.objects.urls import (
        open_objects,
        outer_objects,
    )  # obstore takes 40 ms to import, and most brokers need none

    try:
        shared = open_objects(storage, disk=disk, random=random)
        outer = outer_objects(storage, disk=disk)
    except InvalidArgument as error:
        raise InvalidConfig(f"--storage {storage}: {error}") from error
    return (StorageMode.SHARED_FS if storage.startswith("file:") else StorageMode.OBJECT_STORE), shared, outer
