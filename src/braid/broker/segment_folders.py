"""The folders of segments on a broker's own disk, and the topics that they belong to.

While a broker is down, a topic may be deleted and created again under the same name. The files on the broker's disk
then belong to a topic that is gone. So every folder has an empty file, `topic-{id}`, that tells which topic's segment
it holds. A broker checks it before it begins to use the folder.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Final

from braid.model.errors import DiskError
from braid.model.names import SegmentName
from braid.ports.disk import Disk
from braid.ports.tasks import all_of
from braid.storage.context import StorageContext, StorageMode
from braid.storage.history.manifest import segment_folder

MARK: Final = "topic-"

_log: Final = logging.getLogger(__name__)


async def own_folder(context: StorageContext, name: SegmentName, topic_id: int) -> None:
    """Make sure that the folder, and in mode `local` the chunks, hold nothing of an earlier topic of this name."""
    disk = context.disk
    folder = f"{context.folder}/{name.topic.path}/{name.descriptor}"
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


async def remove_tree(disk: Disk, folder: str) -> None:
    """Remove a folder with all that is in it."""
    await all_of(remove_tree(disk, f"{folder}/{name}") for name in await disk.list_folders(folder))
    for stat in await disk.list(folder):
        with contextlib.suppress(DiskError):
            await disk.remove(f"{folder}/{stat.name}")
    await disk.remove_folder(folder)
