"""The copies that this broker keeps of other brokers' segments.

A copy is opened when its owner begins to stream, or when the leader asks for a promise. It is closed when this broker
becomes the owner, and it is removed when the record of a served segment does not name this broker any more.

One request at a time changes a copy (`_locks`). Pieces of the log do not wait for that lock: they are taken in the
order in which they come, and only in the *session* that the last `copy_begin` has opened. A request that cuts a copy
or begins it anew ends the session first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import msgspec

from braid.broker.keyed_locks import KeyedLocks
from braid.broker.peers.calls import COPY_STATE, Arguments, PeerCalls
from braid.broker.segment_folders import own_folder, remove_segment
from braid.broker.topics import Topics
from braid.cluster.owners import Owners, SegmentKey
from braid.model.errors import BraidError, Fenced, NotServing, OutOfSequence, TopicNotFound
from braid.model.ids import Epoch, Offset, Revision
from braid.model.log.replication import LogPosition, Promise
from braid.model.names import SegmentName
from braid.model.ownership import OwnershipState
from braid.ports.disk import Buffer
from braid.ports.tasks import TaskScope, all_of
from braid.storage.context import StorageContext
from braid.storage.log.context import LogConfig
from braid.storage.replica import ReplicaStorage

CREDIT_BYTES: Final = 8 << 20
"""How much an owner may send to one copy before this broker has answered: as much as one commit writes at most."""
RETRY_S: Final = 5.0

_log: Final = logging.getLogger(__name__)


class _Copy:
    """One copy, while it is open. Changed only under its lock."""

    def __init__(self, storage: ReplicaStorage) -> None:
        self.storage: Final = storage
        self.session: tuple[Epoch, int] | None = None
        """The stream whose pieces are taken: the epoch of its owner, and its number."""
        self.covered = Offset(0)
        """Chunks hold everything below this offset, as the owner said last."""
        self.dropped = Offset(0)
        """Files below this offset are removed."""


class ReplicaCopies:
    def __init__(
        self,
        context: StorageContext,
        topics: Topics,
        owners: Owners,
        *,
        ended: Callable[[SegmentName], Awaitable[None]],
        on_sync: Callable[[float], None] | None = None,
    ) -> None:
        """`ended` returns when this broker does not serve the segment any more, if its record says so."""
        self._context = context
        self._topics = topics
        self._owners = owners
        self._ended = ended
        self._config = LogConfig(on_sync=on_sync)
        self._open: dict[SegmentName, _Copy] = {}
        self._locks = KeyedLocks()
        """By a segment's name: the request that changes its copy."""
        self._here: set[SegmentName] = set()
        """Segments of which this disk may hold a copy."""
        self.on_release: Callable[[SegmentName], Awaitable[None]] = _nothing
        """Called before a copy is closed."""
        self._removing = TaskScope[SegmentName]()
        self._dropping = TaskScope[SegmentName]()
        self._closed = False

    def answer(self, calls: PeerCalls) -> None:
        """Answer owners that stream, and the leader that asks for promises."""
        calls.register("copy_begin", self.begin)
        calls.register("copy_cut", self.cut)
        calls.register("copy_reset", self.reset)
        calls.register_with_payload("copy_append", self.append, shielded=False)
        calls.register("copy_admit", self.admit)
        calls.register("copy_promise", self.promise)
        calls.register(COPY_STATE, self.state)

    async def start(self) -> None:
        """Remove copies that this broker keeps for nobody, now and from now on."""
        self._owners.table.on_change.append(self._on_record)
        for key, record in self._owners.table.all().items():
            name = SegmentName.at(*key)
            folder = f"{self._context.folder}/{name.topic.path}/{name.descriptor}"
            if (
                record.replicas
                and not record.keeps_copy(self._context.broker_id)
                and await self._context.disk.list(folder)
            ):
                self._here.add(name)
            self._on_record(key)

    async def stop(self) -> None:
        """Close all copies in order."""
        self._closed = True
        await self._removing.cancel()
        await self._dropping.cancel()
        await all_of(self.release(name) for name in list(self._open))

    # What owners ask.

    async def begin(self, arguments: Arguments) -> dict[str, Any]:
        """Begin a session; return how far the copy reaches, and how much may be under way to it."""
        name, epoch = _about(arguments)
        await self._owners.view.caught_up(Revision(arguments["revision"]))
        async with self._locks.of(str(name)):
            copy = await self._opened(name, arguments["topic_id"], epoch)
            copy.session = None
            await copy.storage.refresh()
            copy.session = (epoch, arguments["session"])
            return await self._state(copy)

    async def cut(self, arguments: Arguments) -> dict[str, Any]:
        """Drop what is not part of the owner's log: all records from an offset on."""
        name, epoch = _about(arguments)
        async with self._locks.of(str(name)):
            copy = self._in_session(name, epoch, arguments["session"])
            copy.session = None
            await copy.storage.cut_back(Offset(arguments["end"]))
            copy.session = (epoch, arguments["session"])
            return await self._state(copy)

    async def reset(self, arguments: Arguments) -> dict[str, Any]:
        """Drop the copy, and begin at the frontier."""
        name, epoch = _about(arguments)
        async with self._locks.of(str(name)):
            copy = self._in_session(name, epoch, arguments["session"])
            copy.session = None
            await copy.storage.reset()
            copy.session = (epoch, arguments["session"])
            return await self._state(copy)

    async def append(self, arguments: Arguments, payload: Buffer) -> dict[str, Any]:
        """Take a piece of the log; return how far this broker's disk has come."""
        name, epoch = _about(arguments)
        copy = self._in_session(name, epoch, arguments["session"])
        storage = copy.storage
        piece = payload if isinstance(payload, memoryview | bytearray) else bytearray(payload)
        number = storage.apply(epoch, Offset(arguments["file_base"]), piece)
        held = await storage.held(number)
        copy.covered = max(copy.covered, Offset(arguments["covered"]))
        if copy.covered > copy.dropped and name not in self._dropping:
            self._dropping.start(name, self._drop_covered(name), name=f"drop files of {name}")
        return {"position": _told(held)}

    async def _drop_covered(self, name: SegmentName) -> None:
        """Remove the files that the copy needs no longer. The owner's next piece repeats what has failed."""
        async with self._locks.of(str(name)):
            copy = self._open.get(name)
            if copy is None:
                return
            try:
                covered = copy.covered
                await copy.storage.drop_covered(covered)
                copy.dropped = covered
            except BraidError as error:
                _log.warning("files of the copy of %s could not be removed yet: %s", name, error)

    async def admit(self, arguments: Arguments) -> None:
        """Note that the copy holds everything that is confirmed: from now on it is a witness."""
        name, epoch = _about(arguments)
        async with self._locks.of(str(name)):
            copy = self._in_session(name, epoch, arguments["session"])
            await copy.storage.admit()

    # What the leader asks.

    async def promise(self, arguments: Arguments) -> list[dict[str, Any] | str]:
        """Promise the epochs of segments whose replicas vote. Returns, for each, the promise or why there is none."""
        await self._owners.view.caught_up(Revision(arguments["revision"]))

        async def promised(segment: str, topic_id: int, epoch: int) -> dict[str, Any] | str:
            try:
                return _told(await self._promise(SegmentName.parse(segment), topic_id, Epoch(epoch)))
            except BraidError as error:
                return str(error)

        return await asyncio.gather(*(promised(*each) for each in arguments["segments"]))

    async def _promise(self, name: SegmentName, topic_id: int, epoch: Epoch) -> Promise:
        async with self._locks.of(str(name)):
            copy = await self._opened(name, topic_id, epoch)
            position = await copy.storage.promise(epoch)
            copy.session = None  # Its owner is deposed.
            return Promise(broker=self._context.broker_id, epoch=epoch, position=position, member=copy.storage.member)

    async def state(self, arguments: Arguments) -> dict[str, Any]:
        """Return how far the copy reaches, and whether it is a witness. Nothing is promised."""
        name, epoch = _about(arguments)
        storage = await self.opened(name, arguments["topic_id"], epoch)
        return {"end": storage.position.end, "member": storage.member}

    # What this broker asks.

    async def opened(self, name: SegmentName, topic_id: int, epoch: Epoch) -> ReplicaStorage:
        """Return the copy of a segment, for the owner of this epoch, or for a vote in it."""
        async with self.held(name, topic_id, epoch) as storage:
            return storage

    @contextlib.asynccontextmanager
    async def held(self, name: SegmentName, topic_id: int, epoch: Epoch) -> AsyncIterator[ReplicaStorage]:
        """Give the copy of a segment as `opened` does; nothing releases it meanwhile."""
        async with self._locks.of(str(name)):
            yield (await self._opened(name, topic_id, epoch)).storage

    async def release(self, name: SegmentName) -> None:
        """Close the copy of a segment: this broker is to open it as its owner, or stops."""
        async with self._locks.of(str(name)):
            await self.on_release(name)
            if (copy := self._open.pop(name, None)) is not None:
                await copy.storage.close()

    async def settled(self, name: SegmentName, revision: Revision) -> None:
        """Return when no copy of the segment is being removed. If its record of this revision names this broker, none
        will be removed from now on: what is listed after this stays."""
        await self._owners.view.caught_up(revision)
        async with self._locks.of(str(name)):
            return

    async def drop_topic(self, path: str) -> None:
        """Close the copies of a topic whose files are about to be removed."""
        for name in [each for each in self._open if each.topic.path == path]:
            await self._discard(name)

    async def _discard(self, name: SegmentName) -> None:
        """Close a copy whose files are about to be removed."""
        async with self._locks.of(str(name)):
            await self.on_release(name)
            if (copy := self._open.pop(name, None)) is not None:
                await copy.storage.abandon()

    # Opening and removing.

    async def _opened(self, name: SegmentName, topic_id: int, epoch: Epoch) -> _Copy:
        """Return the copy for the owner of this epoch, or for a vote in it."""
        self._check(name, topic_id, epoch)
        if name in self._open and self._open[name].storage.failure is not None:
            await self._open.pop(name).storage.abandon()
        copy = self._open.get(name)
        if copy is None:
            await self._ended(name)
            await own_folder(self._context, name, topic_id)
            storage = await ReplicaStorage.open(self._context, name.topic.path, name.descriptor, self._config)
            copy = self._open[name] = _Copy(storage)
        if epoch < copy.storage.promised:
            raise Fenced(f"{name}: epoch {copy.storage.promised} was promised, and epoch {epoch} is over")
        return copy

    def _check(self, name: SegmentName, topic_id: int, epoch: Epoch) -> None:
        if self._closed:
            raise NotServing(f"broker {self._context.broker_id} is stopping, or has not started yet")
        path = name.topic.path
        topic = self._topics.find(path)
        if topic is None or topic.id != topic_id:
            raise TopicNotFound(f"topic {name.topic} was deleted, or deleted and created again")
        record = self._owners.find(name)
        if record is None or not record.keeps_copy(self._context.broker_id):
            raise NotServing(f"broker {self._context.broker_id} keeps no copy of {name}")
        if record.epoch > epoch:
            raise Fenced(f"{name} has come to epoch {record.epoch}, and {epoch} is over")
        if record.owner == self._context.broker_id and record.is_owned:
            raise NotServing(f"broker {self._context.broker_id} owns {name}, and is to open it")

    def check_followed(self, name: SegmentName, epoch: Epoch) -> None:
        """Raise if this owner does not stream to the copy: the disk may be another one than the owner counts."""
        copy = self._open.get(name)
        if copy is None or copy.session is None or copy.session[0] != epoch:
            raise OutOfSequence(f"the copy of {name} is in no session of epoch {epoch}; begin anew")

    def _in_session(self, name: SegmentName, epoch: Epoch, session: int) -> _Copy:
        copy = self._open.get(name)
        if copy is None or copy.session != (epoch, session):
            raise OutOfSequence(f"the copy of {name} is not in session {session} of epoch {epoch}; begin anew")
        return copy

    async def _state(self, copy: _Copy) -> dict[str, Any]:
        storage = copy.storage
        return {
            "position": _told(storage.position),
            "record_epoch": storage.record_epoch,
            "last": await storage.last_batch(),
            "file_base": storage.file_base,
            "member": storage.member,
            "credit": CREDIT_BYTES,
        }

    def _on_record(self, key: SegmentKey) -> None:
        name = SegmentName.at(*key)
        record = self._owners.find(name)
        if record is not None and record.keeps_copy(self._context.broker_id):
            self._here.add(name)
        elif name in self._here and name not in self._removing and not self._closed and self._may_go(name):
            self._removing.start(name, self._remove(name), name=f"remove the copy of {name}")

    def _may_go(self, name: SegmentName) -> bool:
        """Tell whether nothing needs this broker's copy any more. A served segment has enough others; of a segment that
        is not served, this copy may be the best."""
        record = self._owners.find(name)
        if record is None:
            return self._owners.unreadable(name) is None and self._topics.unreadable(name.topic.path) is None
        here = self._context.broker_id
        is_target = record.move is not None and record.move.to == here  # Also of a segment without replicas.
        needed = here == record.owner or is_target or record.keeps_copy(here)
        return record.state is OwnershipState.SERVING and not needed

    async def _remove(self, name: SegmentName) -> None:
        while self._may_go(name):
            try:
                async with self._locks.of(str(name)):
                    if not self._may_go(name):
                        return  # The record names this broker again.
                    await self.on_release(name)
                    if (copy := self._open.pop(name, None)) is not None:
                        await copy.storage.abandon()
                    await remove_segment(self._context, name)
                    self._here.discard(name)
                _log.info("the copy of %s is removed: other brokers keep it", name)
                return
            except BraidError as error:
                _log.warning("the copy of %s could not be removed yet: %s", name, error)
            await asyncio.sleep(RETRY_S)


async def _nothing(_: SegmentName) -> None:
    return None


def _about(arguments: Arguments) -> tuple[SegmentName, Epoch]:
    return SegmentName.parse(arguments["segment"]), Epoch(arguments["epoch"])


def _told(value: LogPosition | Promise) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(value)
    return told
