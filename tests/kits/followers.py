"""Followers that answer as a test says, and an owner with a real log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from braid.broker.replicas.replication import Replication
from braid.broker.replicas.stream import MAX_READS
from braid.cluster.owners import Owners
from braid.metadata import paths
from braid.metadata.memory import MemoryStore
from braid.metadata.store import Put
from braid.metadata.view import View
from braid.model.batch.header import BatchHeader, parse_header
from braid.model.errors import BraidError, ConnectionLost
from braid.model.ids import Epoch, Offset
from braid.model.log.replication import LogPosition
from braid.model.names import SegmentName
from braid.model.ownership import Ownership
from braid.model.topic import Durability
from braid.ports.disk import Buffer
from braid.storage.history.catalog import Catalog
from braid.storage.segment import SegmentStorage
from braid.testing.sim.loop import Simulation
from tests.kits.storage import DESCRIPTOR, SMALL, TOPIC, World, make_batch

NAME = SegmentName.at(TOPIC, DESCRIPTOR)
CONFIG = msgspec.structs.replace(SMALL, durability=Durability.REPLICATED)
PAUSE_S = 5.0
"""Long enough for everything that could happen."""


def at(epoch: int, end: int) -> LogPosition:
    return LogPosition(epoch=Epoch(epoch), end=Offset(end))


class Followers:
    """Followers whose disks take as much as the test says."""

    def __init__(self) -> None:
        self.held: dict[str, LogPosition] = {}
        """By broker; a broker that is not here does not answer."""
        self.takes: dict[str, int] = {}
        """By broker: the offset up to which its disk takes records now."""
        self.changed = asyncio.Event()
        self.admitted: list[str] = []
        self.appended = 0
        """Records that were sent, repeated ones included."""
        self.credit = 1 << 20
        """What each follower grants."""
        self.pieces = 0
        """Pieces with records that are not answered."""
        self.piece_bytes = 0
        self.link_is_ready = asyncio.Event()
        self.link_is_ready.set()
        self.posted = 0
        self._posts: list[asyncio.Task[None]] = []
        self.lost_admissions = 0
        """So many calls to admit a follower get no answer."""

    def begin(self, *brokers: str, epoch: int = 1, end: int = 0) -> None:
        """Let these followers be there, with disks that hold this and take nothing."""
        for broker in brokers:
            self.held[broker] = at(epoch, end)
            self.takes[broker] = end

    def take(self, broker: str, end: int) -> None:
        """Let the follower's disk take records up to this offset."""
        self.takes[broker] = end
        self._wake()

    def lose(self, broker: str) -> None:
        """Let the follower be gone."""
        del self.held[broker]
        self._wake()

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def call(
        self,
        broker_id: str,
        name: str,
        arguments: dict[str, Any],
        payload: Sequence[Buffer] = (),
        timeout_s: float = 0,
    ) -> Any:
        assert timeout_s > 0
        self._check(broker_id)
        if name == "copy_begin":
            return {
                "position": msgspec.to_builtins(self.held[broker_id]),
                "record_epoch": self.held[broker_id].epoch,
                "last": None,
                "file_base": 0,
                "member": False,
                "credit": self.credit,
            }
        if name == "copy_admit":
            if self.lost_admissions:
                self.lost_admissions -= 1
                raise ConnectionLost("no answer")
            return self.admitted.append(broker_id)
        assert name == "copy_append", name
        *_, last = headers(b"".join(payload)) if payload else (None,)
        self.appended += sum(each.count for each in headers(b"".join(payload)))
        end = last.next_offset if last is not None else 0
        size = sum(map(len, payload))
        if self.takes[broker_id] < end:
            self.pieces += 1
            self.piece_bytes += size
            while self.takes[broker_id] < end:
                await self.changed.wait()
                self._check(broker_id)
            self.pieces -= 1
            self.piece_bytes -= size
        if last is not None:
            self.held[broker_id] = max(self.held[broker_id], at(last.epoch, end), key=lambda each: each.rank)
        return {"position": msgspec.to_builtins(self.held[broker_id])}

    async def ready(self, broker_id: str) -> None:
        self._check(broker_id)
        await self.link_is_ready.wait()

    def post(
        self,
        broker_id: str,
        name: str,
        arguments: dict[str, Any],
        payload: Sequence[Buffer],
        on_answer: Callable[[Any, BraidError | None], None],
    ) -> bool:
        if not self.link_is_ready.is_set():
            return False
        assert name == "copy_append", name
        self.posted += 1

        async def answer() -> None:
            try:
                on_answer(await self.call(broker_id, name, arguments, payload, 1), None)
            except BraidError as error:
                on_answer(None, error)

        self._posts.append(asyncio.create_task(answer()))
        return True

    def _check(self, broker: str) -> None:
        if broker not in self.held:
            raise ConnectionLost(f"{broker} is gone")


def headers(data: bytes) -> list[BatchHeader]:
    found, position = [], 0
    while position < len(data):
        found.append(parse_header(data, position))
        position += found[-1].size
    return found


class Scene:
    def __init__(
        self, world: World, store: MemoryStore, owners: Owners, storage: SegmentStorage, replication: Replication
    ) -> None:
        self.world = world
        self.store = store
        self.owners = owners
        self.log = storage.log
        self.replication = replication

    async def append(self, count: int) -> None:
        for _ in range(count):
            self.log.append(make_batch())
        await self.log.flush()

    async def stays(self, offset: int) -> bool:
        """Tell whether nothing more is confirmed, however long it takes."""
        await asyncio.sleep(PAUSE_S)
        return self.log.confirmed.value == offset

    async def write(self, record: Ownership) -> None:
        known = self.owners.known(NAME)
        assert known is not None
        revision = await self.owners.swap(NAME, known.revision, record)
        assert revision is not None
        await self.owners.view.caught_up(revision)
        self.follow()

    def follow(self) -> None:
        known = self.owners.known(NAME)
        assert known is not None
        self.replication.follow(known)

    @property
    def record(self) -> Ownership:
        record = self.owners.find(NAME)
        assert record is not None
        return record


async def nothing_to_bring(follower: str, catalog: Catalog) -> None:
    """Storage is shared."""


@asynccontextmanager
async def scene(simulation: Simulation, followers: Followers, replicas: str, quorum: int) -> AsyncIterator[Scene]:
    world = World(simulation)
    context = world.a.context
    record = Ownership.first(context.broker_id, (context.broker_id, *replicas), quorum).serving()
    await context.store.txn([], [Put(paths.ownership(TOPIC, DESCRIPTOR), record.to_json())])
    store = world.store.client("replication")
    view = View(store)
    owners = Owners(view)
    await view.load()
    reads = asyncio.Semaphore(MAX_READS)
    replication = Replication(context, owners, NAME, 1, record, followers, nothing_to_bring, lambda _: reads)
    storage = await SegmentStorage.open(context, TOPIC, DESCRIPTOR, Epoch(1), CONFIG, replicate=replication.begin)
    found = Scene(world, store, owners, storage, replication)
    owners.table.on_change.append(lambda _: found.follow())
    yield found
    await replication.stop()
    await storage.abandon()
    await view.stop()
