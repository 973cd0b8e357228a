"""The segments that this broker serves: opened, opened again after a failure, closed, deleted.

A segment is served under an ownership epoch that this broker took by compare-and-swap, one above the last. Its log asks
before each confirm whether the broker's lease still holds (I3); cursors are written only while the ownership record is
the one that was taken here. When a log fails, because a write or a sync did, the segment is abandoned and opened again
in the next epoch: recovery finds out what the disk really holds. Until then requests are answered with *not serving*,
which clients retry.

One object owns each map here; everything runs on the broker's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

from braid.broker.config import BrokerConfig
from braid.broker.cursors import Cursors
from braid.broker.delivery import Channel
from braid.broker.metrics import BrokerMetrics
from braid.broker.publish import PublishQueue
from braid.metadata import paths
from braid.metadata.store import MAX_TXN_OPERATIONS, Compare, Delete, Put, Store
from braid.model.errors import (
    BraidError,
    DiskError,
    DiskFull,
    Fenced,
    NotServing,
    SegmentNotFound,
    ShuttingDown,
    TopicNotFound,
)
from braid.model.ids import Epoch, Offset, Revision
from braid.model.names import SegmentName, TopicName
from braid.model.ownership import Ownership, OwnershipState
from braid.model.topic import Topic
from braid.ports.disk import Disk
from braid.storage.housekeeper import Housekeeper
from braid.storage.log import LogConfig
from braid.storage.manifest import write_topic_manifest
from braid.storage.retention import RetentionPolicy
from braid.storage.segment import SegmentStorage, Shelf
from braid.storage.writer import FileConfig

OPENED_AT_ONCE: Final = 16
KEEP_LOCAL_BYTES: Final = 256 << 20
"""Of each segment whose history is in shared storage: readers a little behind the tail stay on the local disk."""
REOPEN_FIRST_S: Final = 0.1
REOPEN_MAX_S: Final = 10.0
ROOM_BYTES: Final = 16 << 20
ROOM_PROBE_S: Final = 1.0

_log: Final = logging.getLogger(__name__)

Key = tuple[str, int]
"""A topic's path and a segment's id."""


class ServedSegment:
    def __init__(
        self,
        name: SegmentName,
        topic: Topic,
        epoch: Epoch,
        storage: SegmentStorage,
        cursors: Cursors,
        publishes: PublishQueue,
        on_failure: Callable[[ServedSegment, BraidError], None],
    ) -> None:
        self.name: Final = name
        self.topic_id: Final = topic.id
        self.epoch: Final = epoch
        self.storage: Final = storage
        self.cursors: Final = cursors
        self.publishes: Final = publishes
        self.serving = True
        self._channels: dict[Channel, None] = {}
        self._on_failure = on_failure
        storage.log.confirmed.follow(self._on_confirmed)

    @property
    def earliest(self) -> Offset:
        return self.storage.earliest

    @property
    def end(self) -> Offset:
        """The first offset that consumers may not see yet."""
        return Offset(self.storage.log.confirmed.value)

    @property
    def sealed(self) -> bool:
        return self.storage.log.sealed

    async def sync_to(self, offset: Offset) -> None:
        """Return when everything below `offset` is synced: no cursor is stored beyond that. A topic that syncs only
        now and then does it for this."""
        if offset > self.storage.log.synced.value:
            await self.storage.log.flush()

    async def offset_at_time(self, timestamp_us: int) -> Offset:
        """The first offset of the first batch with a record at or after this time; else the end."""
        offset = await self.storage.sources.offset_at_time(timestamp_us)
        reader = self.storage.reader(max(offset, self.earliest))
        while batches := await reader.read_available():
            for header, _ in batches:
                if header.max_timestamp >= timestamp_us:
                    return header.base_offset
        return self.end

    def add_channel(self, channel: Channel) -> None:
        self._channels[channel] = None
        channel.pump()

    def forget_channel(self, channel: Channel) -> None:
        self._channels.pop(channel, None)

    def close_channels(self, subscription: str, closed_code: str, message: str) -> None:
        """End the channels of a subscription. Unless the code is that of a final error, they may be opened again."""
        error = BraidError.by_code.get(closed_code)
        for channel in [each for each in self._channels if each.subscription == subscription]:
            channel.close(closed_code, message, retriable=error is None or error.retriable)

    def fail_channels(self, error: BraidError) -> None:
        for channel in list(self._channels):
            channel.fail(error)

    def _on_confirmed(self) -> None:
        """The watermark rose or failed. Called by the log's commit, which must not suffer from what happens here."""
        for channel in list(self._channels):
            try:
                channel.pump()
            except Exception:
                _log.exception("a channel of %s broke", self.name)
                channel.drop()
        error = self.storage.log.confirmed.error
        if error is not None and self.serving and not self.sealed:
            self._on_failure(self, error)


class Segments:
    def __init__(
        self,
        shelf: Shelf,
        config: BrokerConfig,
        metrics: BrokerMetrics,
        *,
        may_act: Callable[[], bool],
        find_topic: Callable[[str], Topic | None],
        housekeeper: Housekeeper,
    ) -> None:
        self._shelf = shelf
        self._store: Store = shelf.store
        self._config = config
        self._metrics = metrics
        self._may_act = may_act
        self._find_topic = find_topic
        self._housekeeper = housekeeper
        self._served: dict[Key, ServedSegment] = {}
        self._absent: dict[Key, BraidError] = {}
        """Why a segment that belongs to this broker is not served now."""
        self._opening: dict[Key, asyncio.Task[None]] = {}
        self._tried: dict[Key, asyncio.Event] = {}
        """Set when a segment that is being opened has been tried for the first time."""
        self.generation = Revision(0)
        """The metadata revision at which this broker last took a segment."""
        self.on_open: list[Callable[[str], None]] = []
        """Called with a topic's path when one of its segments is served from now on."""
        self._slots = asyncio.Semaphore(OPENED_AT_ONCE)
        self._closing = False

    def get(self, path: str, segment_id: int) -> ServedSegment:
        found = self._served.get((path, segment_id))
        if found is not None:
            return found
        topic = self._find_topic(path)
        if topic is None:
            raise TopicNotFound(f"topic {path} does not exist")
        if segment_id not in topic.layout.segments:
            raise SegmentNotFound(f"topic {path} has no segment {segment_id}")
        reason = self._absent.get((path, segment_id))
        detail = f": {reason}" if reason is not None else ""
        raise NotServing(f"segment {segment_id} of topic {path} is not served by {self._shelf.broker_id}{detail}")

    def of_topic(self, path: str) -> list[ServedSegment]:
        return [segment for (topic, _), segment in sorted(self._served.items()) if topic == path]

    def all(self) -> list[ServedSegment]:
        return list(self._served.values())

    def absent(self) -> dict[Key, BraidError]:
        return dict(self._absent)

    # Opening.

    async def open_topic(self, name: TopicName, topic: Topic) -> None:
        """Open all segments of a topic that are this broker's, or nobody's yet. What cannot be opened now is tried
        again in the background, and says why meanwhile."""
        await self._write_manifest(name, topic)
        names = [SegmentName.of(name, info) for info in topic.layout.segments.values()]
        await asyncio.gather(*(self._open_or_retry(segment, topic) for segment in names))

    async def _open_or_retry(self, name: SegmentName, topic: Topic) -> None:
        """Returns after the first attempt; further ones happen in the background."""
        key = (name.topic.path, name.id)
        if key in self._served or self._closing:
            return
        if key not in self._opening:
            self._tried[key] = asyncio.Event()
            task = asyncio.get_running_loop().create_task(self._keep_opening(key, name, topic), name=f"open {name}")
            self._opening[key] = task
        if (tried := self._tried.get(key)) is not None:
            await tried.wait()

    async def _keep_opening(self, key: Key, name: SegmentName, topic: Topic) -> None:
        pause_s = REOPEN_FIRST_S
        tried = self._tried[key]
        try:
            while True:
                try:
                    async with self._slots:
                        return await self._open(name, topic)
                except BraidError as error:
                    self._note_absent(key, name, error)
                tried.set()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, REOPEN_MAX_S)
        finally:
            tried.set()
            del self._tried[key], self._opening[key]

    def _note_absent(self, key: Key, name: SegmentName, error: BraidError) -> None:
        if str(self._absent.get(key)) != str(error):
            _log.warning("%s cannot be opened: %s", name, error)
        self._absent[key] = error

    async def _open(self, name: SegmentName, topic: Topic) -> None:
        key = (name.topic.path, name.id)
        taken = await self._take(name)
        if taken is None:
            self._absent.pop(key, None)
            return
        epoch, ownership = taken
        files = FileConfig(file_bytes=self._config.file_bytes)
        config = LogConfig(
            durability=topic.policies.durability, files=files, on_sync=self._metrics.sync_latency_s.observe
        )
        storage = await SegmentStorage.open(
            self._shelf, name.topic.path, name.descriptor, epoch, config, may_confirm=self._may_act
        )
        try:
            cursors = Cursors(
                self._store,
                name,
                epoch,
                ownership,
                lambda: Offset(storage.log.synced.value),
                self._config.cursors,
                end=lambda: Offset(storage.log.confirmed.value),
            )
            await cursors.load()
        except BaseException:
            await storage.abandon()
            raise
        cursors.start()
        publishes = PublishQueue(
            storage.log,
            name.range,
            self._metrics,
            self._metrics.topic(name.topic.path),
            asyncio.get_running_loop().time,
        )
        segment = ServedSegment(name, topic, epoch, storage, cursors, publishes, self._on_failure)
        self._absent.pop(key, None)
        self._served[key] = segment
        self._housekeeper.add(
            storage, lambda: self._retention(name.topic.path), cursors.lowest, keep_local_bytes=KEEP_LOCAL_BYTES
        )
        cut, damage = storage.recovered.torn_bytes, len(storage.recovered.damage)
        if cut or damage:
            _log.warning("%s: recovery cut %d torn bytes and found %d damaged places", name, cut, damage)
        for callback in self.on_open:
            callback(name.topic.path)

    async def _take(self, name: SegmentName) -> tuple[Epoch, Compare] | None:
        """The next ownership epoch, and what its holder compares; None when the segment belongs to another broker."""
        key = paths.ownership(name.topic.path, name.descriptor)
        entry = await self._store.get(key)
        epoch = Epoch(1)
        if entry is not None:
            record = Ownership.from_json(entry.value)
            if record.owner != self._shelf.broker_id:
                return None
            epoch = Epoch(record.epoch + 1)
        taken = Ownership(state=OwnershipState.SERVING, owner=self._shelf.broker_id, epoch=epoch)
        before = Compare(key, entry.revision if entry is not None else Revision(0))
        result = await self._store.txn([before], [Put(key, taken.to_json())])
        if not result.succeeded:
            raise Fenced(f"{name} was taken by somebody else while this broker wanted epoch {epoch}")
        self.generation = max(self.generation, result.revision)
        return epoch, Compare(key, result.revision)

    async def _write_manifest(self, name: TopicName, topic: Topic) -> None:
        try:
            entry = await self._store.get(paths.layout(name.path))
            if entry is not None:
                await write_topic_manifest(self._shelf.objects, name.path, entry.revision, topic.layout)
        except BraidError as error:
            _log.warning("the manifest of %s was not written: %s", name, error)

    def _retention(self, path: str) -> RetentionPolicy:
        topic = self._find_topic(path)
        if topic is None:
            return RetentionPolicy()
        policies = topic.policies
        return RetentionPolicy(
            max_age_s=policies.retention_ms / 1000 if policies.retention_ms is not None else None,
            max_bytes=policies.retention_bytes,
            delete_unconsumed=policies.retention_ignores_subscriptions,
        )

    # Failing and closing.

    def _on_failure(self, segment: ServedSegment, error: BraidError) -> None:
        """Called by the log while it fails: only notes it; the rest happens in a task."""
        key = (segment.name.topic.path, segment.name.id)
        if self._closing or self._served.get(key) is not segment or key in self._opening:
            return
        _log.error("%s has failed and will be opened again: %s", segment.name, error)
        full = isinstance(error, DiskFull)
        if not full:
            self._withdraw(key, segment, error)
        self._opening[key] = asyncio.get_running_loop().create_task(
            self._reopen(key, segment, error, when_there_is_room=full), name=f"reopen {segment.name}"
        )

    def _withdraw(self, key: Key, segment: ServedSegment, error: BraidError) -> None:
        segment.serving = False
        self._served.pop(key, None)
        self._absent[key] = error

    async def _reopen(self, key: Key, segment: ServedSegment, error: BraidError, *, when_there_is_room: bool) -> None:
        try:
            if when_there_is_room:  # A full disk stops only writers: readers go on until it can be opened again.
                await self._room(segment.name)
                self._withdraw(key, segment, error)
            await self._end(segment, NotServing(f"{segment.name} is being opened again"), orderly=False)
        finally:
            self._opening.pop(key, None)
        topic = self._find_topic(segment.name.topic.path)
        if topic is not None and topic.id == segment.topic_id and not self._closing:
            await self._open_or_retry(segment.name, topic)

    async def _room(self, name: SegmentName) -> None:
        """Return when the disk takes a file again that is as large as a group of batches."""
        disk = self._shelf.disk
        probe = f"{self._shelf.folder}/{name.topic.path}/{name.descriptor}/room"  # Others may be probing too.
        while True:
            await asyncio.sleep(ROOM_PROBE_S)
            with contextlib.suppress(DiskError):
                await disk.remove(probe)
            with contextlib.suppress(DiskError):  # Whatever is wrong with the disk: there is no room yet.
                await disk.prepare(probe, ROOM_BYTES)
                return await disk.remove(probe)

    async def _end(self, segment: ServedSegment, reason: BraidError, *, orderly: bool) -> None:
        segment.serving = False
        self._housekeeper.remove(segment.storage)
        segment.fail_channels(reason)
        try:
            await segment.cursors.stop()
        except BraidError as error:
            _log.warning("cursors of %s are not stored: their consumers go back a little: %s", segment.name, error)
        finally:  # Also when whoever wanted this was cancelled: nobody else knows the segment any more.
            await (segment.storage.close() if orderly else segment.storage.abandon())

    async def abandon_all(self, reason: BraidError) -> None:
        """The broker has lost its lease: it serves nothing any more. `open_topic` begins anew."""
        segments = list(self._served.values())
        self._served.clear()
        await asyncio.gather(*(self._end(segment, reason, orderly=False) for segment in segments))

    async def flush(self) -> None:
        """Return when every publish that was taken is confirmed or refused."""
        await asyncio.gather(*(segment.storage.log.flush() for segment in self.all()), return_exceptions=True)

    async def close(self) -> None:
        """Orderly: cursors stored, logs closed. Whatever fails is said, and the others are closed all the same."""
        self._closing = True
        for task in list(self._opening.values()):
            task.cancel()
        if self._opening:
            await asyncio.wait(list(self._opening.values()))
        segments, self._served = list(self._served.values()), {}
        ending = (self._end(segment, ShuttingDown("the broker is stopping"), orderly=True) for segment in segments)
        for outcome in await asyncio.gather(*ending, return_exceptions=True):
            if isinstance(outcome, BaseException):
                _log.error("a segment did not close in order: %s", outcome)

    # Deleting.

    async def delete_topic(self, name: TopicName, topic: Topic) -> None:
        """Remove everything that belongs to the topic, except its record. Can be repeated after a crash anywhere."""
        gone = TopicNotFound(f"topic {name.path} was deleted")
        for info in topic.layout.segments.values():
            key = (name.path, info.segment_id)
            if (task := self._opening.get(key)) is not None:
                task.cancel()
                await asyncio.wait([task])
            self._absent.pop(key, None)
            segment = self._served.pop(key, None)
            if segment is not None:
                await self._end(segment, gone, orderly=False)
        for stat in await self._shelf.objects.list(name.path):
            await self._shelf.objects.delete(stat.name)
        await remove_tree(self._shelf.disk, f"{self._shelf.folder}/{name.path}")
        for prefix in (
            paths.topic_segments_prefix(name.path),
            paths.topic_storage_prefix(name.path),
            paths.topic_prefix(name.path),
        ):
            keys = [entry.key for entry in (await self._store.list(prefix)).entries]
            for start in range(0, len(keys), MAX_TXN_OPERATIONS):
                await self._store.txn([], [Delete(key) for key in keys[start : start + MAX_TXN_OPERATIONS]])
        self._metrics.topics.pop(name.path, None)


async def remove_tree(disk: Disk, folder: str) -> None:
    """Remove a folder with all that is in it."""
    for name in await disk.list_folders(folder):
        await remove_tree(disk, f"{folder}/{name}")
    for stat in await disk.list(folder):
        with contextlib.suppress(DiskError):
            await disk.remove(f"{folder}/{stat.name}")
    await disk.remove_folder(folder)
