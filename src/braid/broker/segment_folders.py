"""The folders of segments on a broker's own disk, and the topics that they belong to.

While a broker is down, a topic may be deleted and created again under the same name. The files on the broker's disk
then belong to a topic that is gone. So every folder has an empty file, `topic-{id}`, that tells which topic's segment
it holds. A broker checks it before it begins to use the folder.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Final

from braid.broker.keyed_locks import KeyedLocks
from braid.model.errors import DiskError
from braid.model.names import SegmentName, TopicName
from braid.ports.disk import Disk
from braid.ports.tasks import all_of
from braid.storage.context import StorageContext, StorageMode
from braid.storage.history.manifest import segment_folder
from braid.storage.log import promise as promises
from braid.storage.segment_recovery import remove_file

MARK: Final = "topic-"
ROOM_BYTES: Final = 16 << 20
"""As large as a group of batches."""

_turns: Final = KeyedLocks()
"""By broker and folder. A caller that found the folder empty may take long to delete what lies beside it: chunks that
another caller has brought meanwhile must not be among that."""

_log: Final = logging.getLogger(__name__)


async def own_folder(context: StorageContext, name: SegmentName, topic_id: int) -> None:
    """Make sure that the folder, and in mode `local` the chunks, hold nothing of an earlier topic of this name."""
    folder = f"{context.folder}/{name.topic.path}/{name.descriptor}"
    async with _turns.of(f"{id(context)} {folder}"):
        await _own_folder(context, folder, name, topic_id)


async def _own_folder(context: StorageContext, folder: str, name: SegmentName, topic_id: int) -> None:
    disk = context.disk
    await disk.make_folder(folder)
    found = [stat.name for stat in await disk.list(folder)]
    marks = [name for name in found if name.startswith(MARK)]
    if marks == [f"{MARK}{topic_id}"]:
        return
    if not found and context.mode is StorageMode.LOCAL:
        # A copy may have brought chunks after the deletion of its topic had removed the folder.
        await context.objects.delete_below(segment_folder(name.topic.path, name.descriptor))
    if marks:
        _log.warning("%s: removing the files of a deleted topic of the same name", name)
        if context.mode is StorageMode.LOCAL:
            await context.objects.delete_below(segment_folder(name.topic.path, name.descriptor))
        await remove_tree(disk, folder)  # Last, because the mark goes with the folder.
        await disk.make_folder(folder)
    await (await disk.open(f"{folder}/{MARK}{topic_id}", create=True)).close()


async def remove_segment(context: StorageContext, name: SegmentName) -> None:
    """Remove what this broker's own disk holds of a segment. Can be repeated after a crash anywhere."""
    folder = f"{context.folder}/{name.topic.path}"
    # Before anything is lost, the copy is no witness any more (I2): this broker may become a replica again.
    await remove_file(context.disk, f"{folder}/{name.descriptor}/{promises.NAME}")
    await remove_tree(context.disk, f"{folder}/{name.descriptor}")
    await context.disk.sync_folder(folder)
    if context.mode is StorageMode.LOCAL:
        await context.objects.delete_below(segment_folder(name.topic.path, name.descriptor))


async def remove_topic(context: StorageContext, name: TopicName) -> None:
    """Remove what this broker's own disk holds of a topic. Can be repeated after a crash anywhere."""
    await remove_tree(context.disk, f"{context.folder}/{name.path}")
    # An earlier try may have removed the folder without syncing that. Nothing may come back after the record is gone.
    await context.disk.sync_folder(f"{context.folder}/{name.tenant}/{name.namespace}")
    if context.mode is StorageMode.LOCAL:
        await context.objects.delete_below(name.path)


async def has_room(disk: Disk, folder: str) -> bool:
    """Tell whether the disk takes a file of ROOM_BYTES. One caller at a time may ask about a folder."""
    probe = f"{folder}/room"
    with contextlib.suppress(DiskError):
        await disk.remove(probe)
    with contextlib.suppress(DiskError):  # Whatever is wrong with the disk: there is no room.
        await disk.prepare(probe, ROOM_BYTES)
        await disk.remove(probe)
        return True
    return False


async def remove_tree(disk: Disk, folder: str) -> None:
    """Remove a folder with all that is in it."""
    await all_of(remove_tree(disk, f"{folder}/{name}") for name in await disk.list_folders(folder))
    for stat in await disk.list(folder):
        with contextlib.suppress(DiskError):
            await disk.remove(f"{folder}/{stat.name}")
    await disk.remove_folder(folder)
