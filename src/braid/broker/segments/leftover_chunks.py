"""Chunks on this broker's own disk of segments that other brokers serve, and when they are removed. Only in mode
`local`.

A broker that has handed a segment over keeps its chunks until the new owner serves the segment. The target of a move
has chunks before it is the owner. Both remove them when the record says that another broker serves the segment, and no
move may bring it here. The disk of that owner then holds every chunk that the catalog names, so those chunks, and
nothing else, can be removed here. The record must be later than the record of the last owner that counted on the chunks
here: this broker may be the last to hear of a move.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from braid.cluster.owners import Owners
from braid.model.errors import BraidError
from braid.model.ids import Revision
from braid.model.names import SegmentName
from braid.model.ownership import OwnershipState
from braid.ports.tasks import TaskScope
from braid.storage.context import StorageContext, StorageMode
from braid.storage.history.catalog import Catalog
from braid.storage.history.manifest import segment_folder
from braid.storage.history.producer_objects import SUFFIX as PRODUCERS

RETRY_S: Final = 5.0

_log: Final = logging.getLogger(__name__)


class Copies:
    def __init__(self, context: StorageContext, owners: Owners) -> None:
        self._context = context
        self._owners = owners
        self._here: set[SegmentName] = set()
        """Segments of which this disk may hold chunks that it does not need."""
        self._counted_on: dict[SegmentName, Revision] = {}
        """The latest record whose owner counted on the chunks here."""
        self._removing = TaskScope[SegmentName]()
        self._stopped = False

    async def start(self) -> None:
        """Find the chunks on this disk, and from now on remove those that it does not need."""
        if self._context.mode is not StorageMode.LOCAL:
            return
        for stat in await self._context.objects.list(""):
            match stat.name.split("/"):
                case [tenant, namespace, topic, descriptor, leaf] if leaf.endswith((".chunk", PRODUCERS)):
                    self._here.add(SegmentName.at(f"{tenant}/{namespace}/{topic}", descriptor))
        self._owners.table.on_change.append(lambda key: self._reconcile(SegmentName.at(*key)))
        for name in list(self._here):
            self._reconcile(name)

    async def stop(self) -> None:
        self._stopped = True
        await self._removing.cancel()

    def left(self, name: SegmentName) -> None:
        """Note that this broker has handed the segment over."""
        if self._context.mode is StorageMode.LOCAL:  # Elsewhere the chunks are not a copy: they are the history.
            self._here.add(name)
            self._reconcile(name)

    def count_on(self, name: SegmentName, revision: Revision) -> None:
        """Keep the chunks here: the segment's owner, under the record of this revision, counts on them."""
        self._here.add(name)
        self._counted_on[name] = max(revision, self._counted_on.get(name, revision))

    async def settled(self, name: SegmentName) -> None:
        """Return when no removal of the segment's chunks is under way. After `count_on`, the chunks here then stay."""
        if (task := self._removing.get(name)) is not None:
            await asyncio.wait([task])

    def _reconcile(self, name: SegmentName) -> None:
        if name in self._here and self._owners.known(name) is None:  # Deleted, and its chunks with it.
            self._here.discard(name)
            self._counted_on.pop(name, None)
        if name in self._here and self._may_go(name) and name not in self._removing and not self._stopped:
            self._removing.start(name, self._remove(name), name=f"remove copies of {name}")

    def _may_go(self, name: SegmentName) -> bool:
        known = self._owners.known(name)
        if known is None or known.revision <= self._counted_on.get(name, 0):
            return False
        record, here = known.value, self._context.broker_id
        wanted = record.keeps_copy(here) or (record.move is not None and record.move.to in (here, ""))
        return record.state is OwnershipState.SERVING and record.owner != here and not wanted

    async def _remove(self, name: SegmentName) -> None:
        folder = segment_folder(name.topic.path, name.descriptor)
        while self._may_go(name):
            try:
                catalog = Catalog(self._context.store, name.topic.path, name.descriptor)
                await catalog.load()
                known = {each.object for each in catalog.objects}
                for stat in await self._context.objects.list(folder):
                    if not self._may_go(name):
                        return
                    leaf = stat.name.rpartition("/")[2]
                    if leaf in known or leaf.endswith(PRODUCERS):  # A producer table holds no records.
                        await self._context.objects.delete(stat.name)
                if not self._may_go(name):
                    return
                self._here.discard(name)
                self._counted_on.pop(name, None)
                return
            except BraidError as error:
                _log.warning("copies of %s could not be removed yet: %s", name, error)
            await asyncio.sleep(RETRY_S)
