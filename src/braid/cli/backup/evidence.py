"""Gathers what the history says: the manifests and chunks in storage, and the logs on the disks of brokers.

Nothing is changed. A data folder stays locked while its logs are read, so no broker uses it meanwhile.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Sequence

from braid.broker.data_folder import DataFolder, open_data_folder, read_mark
from braid.cli.backup.rules import DiskLog, History
from braid.model.errors import FileTaken, InvalidArgument, InvalidConfig, InvalidName
from braid.model.names import SegmentName
from braid.ports.disk import Disk
from braid.storage.history.manifest import SegmentManifest, TopicManifest, read_segment_manifest, read_topic_manifest
from braid.storage.log.recovery import recover
from braid.storage.objects.disk import DiskObjects
from braid.storage.objects.store import Objects

LOCAL = "local"


async def gather(disk: Disk, storage: str, folders: Sequence[DataFolder]) -> History:
    """Read the history of all topics. In `local` storage, chunks lie in the data folders."""
    history = History(manifests={}, segments={}, objects={}, disks={}, revisions=[])
    stores: list[Objects] = []
    try:
        if storage == LOCAL:
            stores += [DiskObjects(disk, os.path.abspath(each.chunks)) for each in folders]
        else:
            from braid.storage.objects.urls import open_objects

            stores.append(open_objects(storage, disk=disk))
        for objects in stores:
            await _read_storage(objects, history)
    finally:
        for objects in stores:
            await objects.close()
    for folder in folders:
        await _read_disk(disk, folder, history)
    return history


async def _read_storage(objects: Objects, history: History) -> None:
    topics: set[str] = set()
    segments: set[tuple[str, str]] = set()
    for stat in await objects.list(""):
        tenant, _, rest = stat.name.partition("/")
        parts = rest.split("/")
        if tenant.startswith(".") or len(parts) < 4:
            continue  # Braid's own marks, or something else.
        topic = f"{tenant}/{parts[0]}/{parts[1]}"
        topics.add(topic)
        if parts[2] != "manifests":
            segments.add((topic, parts[2]))
            history.objects[stat.name] = stat.size
        with contextlib.suppress(ValueError):
            if parts[-2] == "manifests":
                history.revisions.append(int(parts[-1].removesuffix(".json")))
    for topic in topics:
        manifest = await read_topic_manifest(objects, topic)
        history.manifests[topic] = _newer_topic(history.manifests.get(topic), manifest)
    for topic, descriptor in segments:
        try:
            SegmentName.at(topic, descriptor)
        except InvalidName:
            continue
        found = await read_segment_manifest(objects, topic, descriptor)
        known = history.segments.get((topic, descriptor))
        history.segments[topic, descriptor] = _newer_segment(known, found)


def _newer_topic(known: TopicManifest | None, found: TopicManifest | None) -> TopicManifest | None:
    return max((each for each in (known, found) if each is not None), key=lambda each: each.revision, default=None)


def _newer_segment(known: SegmentManifest | None, found: SegmentManifest | None) -> SegmentManifest | None:
    return max(
        (each for each in (known, found) if each is not None),
        key=lambda each: (each.epoch, each.next_offset, each.revision),
        default=None,
    )


async def _read_disk(disk: Disk, folder: DataFolder, history: History) -> None:
    root = os.path.abspath(folder.logs)
    for topic, descriptor in _log_folders(root):
        found = await recover(disk, f"{root}/{topic}/{descriptor}")
        if found.epochs:
            log = DiskLog(
                broker=folder.mark.broker_id,
                base_offset=found.base_offset,
                next_offset=found.next_offset,
                epochs=frozenset(found.epochs),
            )
            history.disks.setdefault((topic, descriptor), []).append(log)


def _log_folders(root: str) -> list[tuple[str, str]]:
    """Return topic and descriptor of each log below the folder of a broker's logs."""
    found = []
    for path, folders, _ in os.walk(root):
        parts = os.path.relpath(path, root).split(os.sep)
        if len(parts) == 4:
            folders.clear()
            found.append(("/".join(parts[:3]), parts[3]))
    return sorted(found)


@contextlib.asynccontextmanager
async def locked_folders(disk: Disk, paths: Sequence[str]) -> AsyncIterator[list[DataFolder]]:
    """Lock the data folders of brokers, which must not run."""
    async with contextlib.AsyncExitStack() as stack:
        folders = []
        for path in paths:
            mark = await read_mark(disk, path) if os.path.isdir(path) else None
            if mark is None:
                raise InvalidArgument(f"{path} is no data folder of a broker")
            try:
                folder = await open_data_folder(disk, path, mark.broker_id)
            except InvalidConfig as error:
                if isinstance(error.__cause__, FileTaken):
                    raise InvalidConfig(
                        f"the data folder {path} is used by a broker that runs: stop all brokers first"
                    ) from error
                raise
            stack.push_async_callback(folder.release)
            folders.append(folder)
        names = [folder.mark.broker_id for folder in folders]
        if len(set(names)) < len(names):
            raise InvalidArgument(f"several folders belong to one broker: {', '.join(sorted(names))}")
        yield folders
