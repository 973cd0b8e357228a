"""Copying a segment's chunks to the broker that takes it over, where brokers share no storage.

A producer table that is an object of its own (storage/history/producer_objects.py) is copied like a chunk.

The owner asks which chunks the target has, and sends the others, each in pieces with a checksum. A chunk appears on the
target whole or not at all, so an interrupted copy goes on with the first chunk that is missing. The target keeps the
chunks until it is clear which broker serves the segment (leftover_chunks.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import crc32c

from braid.broker.peers.links import Peers
from braid.broker.segment_folders import own_folder
from braid.broker.segments.leftover_chunks import Copies
from braid.broker.topics import Topics
from braid.model.errors import (
    BatchCorrupt,
    InvalidArgument,
    NotAvailable,
    ObjectExists,
    ObjectStoreUnavailable,
    TopicNotFound,
    quote,
)
from braid.model.ids import Revision
from braid.model.names import SegmentName
from braid.ports.disk import Buffer
from braid.storage.context import StorageContext
from braid.storage.history.catalog import ChunkDescriptor, ProducerObject
from braid.storage.history.manifest import segment_folder
from braid.storage.history.producer_objects import SUFFIX as PRODUCERS
from braid.storage.objects.disk import DiskObjects, ObjectDraft

PIECE_BYTES: Final = 1 << 20
COPY_ROUNDS: Final = 3
"""How often missing chunks are sent. A chunk that is then not there as it was sent will never be."""
MAX_DRAFTS: Final = 64
"""Chunks that come in at the same time. Beyond it a new chunk replaces the oldest, whose sender may be gone."""


class OutgoingHistory:
    def __init__(self, context: StorageContext, peers: Peers) -> None:
        self._context = context
        self._peers = peers

    async def copy(
        self,
        name: SegmentName,
        topic_id: int,
        target: str,
        objects: Sequence[ChunkDescriptor | ProducerObject],
        revision: Revision,
    ) -> None:
        """Return when the target's disk holds all these objects, and will keep them while the segment's record is the
        one of this revision."""
        about = {"segment": str(name), "topic_id": topic_id, "revision": revision}
        missing: list[ChunkDescriptor | ProducerObject] = []
        for _ in range(COPY_ROUNDS):
            there = await self._peers.call(target, "list_history", about)
            missing = [each for each in objects if there.get(each.object) != each.size]
            if not missing:
                return
            for each in missing:
                await self._send(name, topic_id, target, each)
        raise ObjectStoreUnavailable(
            f"broker {target} was sent {missing[0].object}, and does not have it as it was sent; look at its copy there"
        )

    async def _send(
        self, name: SegmentName, topic_id: int, target: str, source: ChunkDescriptor | ProducerObject
    ) -> None:
        path = f"{segment_folder(name.topic.path, name.descriptor)}/{source.object}"
        for start in range(0, source.size, PIECE_BYTES):
            piece = await self._context.objects.read(path, start, PIECE_BYTES)
            arguments = {
                "segment": str(name),
                "topic_id": topic_id,
                "object": source.object,
                "start": start,
                "size": source.size,
                "checksum": crc32c.crc32c(piece),
            }
            await self._peers.call(target, "put_history", arguments, (piece,))


class IncomingHistory:
    """The target's side: it answers the calls of the owner that copies."""

    def __init__(
        self,
        context: StorageContext,
        topics: Topics,
        copies: Copies,
        settled: Callable[[SegmentName, Revision], Awaitable[None]],
    ) -> None:
        """`settled` returns when no copy of a segment is being removed (`ReplicaCopies.settled`)."""
        self._context = context
        self._topics = topics
        self._copies = copies
        self._settled = settled
        self._drafts: dict[str, ObjectDraft] = {}

    async def list_history(self, arguments: dict[str, Any]) -> dict[str, int]:
        name, revision = SegmentName.parse(arguments["segment"]), Revision(arguments["revision"])
        folder = segment_folder(name.topic.path, name.descriptor)
        objects = self._disk_objects()
        self._check_topic(name, arguments["topic_id"])
        await self._settled(name, revision)
        self._check_topic(name, arguments["topic_id"])
        await own_folder(self._context, name, arguments["topic_id"])
        self._copies.count_on(name, revision)
        await self._copies.settled(name)
        stats = await objects.list(folder)
        return {stat.name.rpartition("/")[2]: stat.size for stat in stats}

    async def put_history(self, arguments: dict[str, Any], payload: Buffer) -> None:
        name = SegmentName.parse(arguments["segment"])
        leaf, start, size = arguments["object"], arguments["start"], arguments["size"]
        if not isinstance(leaf, str) or "/" in leaf or not leaf.endswith((".chunk", PRODUCERS)):
            raise InvalidArgument(f"{quote(leaf)} is no name of a chunk or of a producer table")
        if crc32c.crc32c(payload) != arguments["checksum"]:
            raise BatchCorrupt(f"a piece of {leaf} was damaged on its way; send it again")
        self._check_topic(name, arguments["topic_id"])
        path = f"{segment_folder(name.topic.path, name.descriptor)}/{leaf}"
        draft = self._drafts.pop(path, None)
        if start == 0:
            if draft is not None:
                await draft.discard()
            if len(self._drafts) >= MAX_DRAFTS:
                oldest = next(iter(self._drafts))
                await self._drafts.pop(oldest).discard()
            draft = await self._disk_objects().draft(path)
        if draft is None or draft.size != start:
            if draft is not None:
                await draft.discard()
            raise ObjectStoreUnavailable(f"{leaf} does not go on at byte {start} here; send it from its beginning")
        try:
            await draft.write([payload])
            if draft.size < size:
                if (replaced := self._drafts.pop(path, None)) is not None:
                    await replaced.discard()  # Of a sender that got no answer in time and began anew.
                self._drafts[path] = draft
                return
            await draft.publish()
        except ObjectExists:
            await draft.discard()  # Another copy was faster, or an earlier answer was lost.
        except BaseException:
            await draft.discard()
            raise

    async def close(self) -> None:
        drafts, self._drafts = self._drafts, {}
        for draft in drafts.values():
            await draft.discard()

    def _check_topic(self, name: SegmentName, topic_id: int) -> None:
        """Refuse chunks of a deleted topic: they must not meet a new topic of the same name. A topic that this broker
        has not heard of yet is welcome."""
        path = name.topic.path
        topic = self._topics.find(path)
        if self._topics.mark(path) is not None or (topic is not None and topic.id != topic_id):
            raise TopicNotFound(f"topic {name.topic} was deleted, or deleted and created again")

    def _disk_objects(self) -> DiskObjects:
        objects = self._context.objects
        if not isinstance(objects, DiskObjects):
            raise NotAvailable("this broker keeps its history in shared storage: nothing is copied to it")
        return objects
