"""What tests of a broker's control side stand on: a memory store, topics, and segments without a log behind them; or a
whole broker on a simulated machine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Never

from braid.broker.broker import Broker
from braid.broker.config import AuthConfig, BrokerConfig, CursorConfig
from braid.broker.cursors.cursors import Cursors
from braid.broker.groups.group import Assigned
from braid.broker.segments.read_grants import ReadGrant, ReadGrants
from braid.broker.topics import Topics
from braid.metadata import paths
from braid.metadata.memory import Fault, MemoryStore
from braid.metadata.store import Compare, Put
from braid.metadata.view import View
from braid.model.errors import BraidError, NotServing
from braid.model.ids import Epoch, Offset
from braid.model.log.epochs import EpochStarts
from braid.model.log.replication import FollowerStatus
from braid.model.names import SegmentName, TopicName
from braid.model.ownership import Ownership, OwnershipState
from braid.model.topic import Topic, TopicPolicies
from braid.storage.objects.store import Objects
from braid.testing.sim.disk import SimulatedDisk
from braid.testing.sim.loop import Simulation
from braid.testing.sim.network import SimulatedNetwork

ORDERS = TopicName("public", "default", "orders")


class Machine:
    """A whole broker's: a store and a disk that outlive the brokers on them."""

    def __init__(self, simulation: Simulation, auth: AuthConfig | None = None) -> None:
        self.simulation = simulation
        self.store = MemoryStore(simulation.clock)
        self.disk = SimulatedDisk(simulation.random)
        self.host = SimulatedNetwork(simulation.random).host("machine")
        self.config = BrokerConfig(data="/data", listen="machine:6660", auth=auth)

    async def start(self, objects: Objects | None = None) -> Broker:
        return await Broker.open(
            self.config,
            network=self.host,
            store=self.store,
            disk=self.disk,
            clock=self.simulation.clock,
            random=self.simulation.random,
            objects=objects,
        )


async def own(store: MemoryStore, name: SegmentName, owner: str = "broker-1", epoch: int = 1) -> Compare:
    """Take a segment; what its cursors compare."""
    key = paths.ownership(name.topic.path, name.descriptor)
    record = Ownership(state=OwnershipState.SERVING, owner=owner, epoch=Epoch(epoch))
    result = await store.txn([], [Put(key, record.to_json())])
    return Compare(key, result.revision)


class NoQueues:
    """The queues of a segment that has none."""

    def find(self, subscription: str) -> None:
        return None

    def get(self, subscription: str) -> Never:
        raise NotServing(f"subscription {subscription} has no queue here")

    def follow_cursor(self, subscription: str) -> None:
        pass

    async def begin(self, subscription: str) -> None:
        pass

    async def remove(self, subscription: str) -> None:
        pass

    async def check(self) -> list[str]:
        return []


class PlainSegment:
    """A segment that is just numbers: where it begins and ends, and when its records were written."""

    def __init__(
        self, name: SegmentName, ends: dict[str, int], cursors: Cursors, times: list[int], topic_id: int = 0
    ) -> None:
        self.name = name
        self.topic_id = topic_id
        self.cursors = cursors
        self.queues = NoQueues()
        self.earliest = Offset(0)
        self.epochs: EpochStarts = ()
        self.followers: tuple[FollowerStatus, ...] = ()
        self.times = times
        """Of the records from offset 0 on, µs."""
        self.closed: list[tuple[str, str, Offset | None]] = []
        """Subscription, code, and where its cursor stood when its channels were closed."""
        self.replaced: list[tuple[list[str], str]] = []
        """Objects of chunks, and of the one that took their place."""
        self._ends = ends

    @property
    def end(self) -> Offset:
        return Offset(self._ends["end"])

    @property
    def sealed(self) -> bool:
        return bool(self._ends["ended"])

    def end_log(self) -> None:
        """Let nothing follow what is there."""
        self._ends["ended"] = 1
        self.cursors.note_drained()

    def grow(self, end: int, *, synced: int | None = None) -> None:
        self._ends.update(end=end, synced=end if synced is None else synced)

    async def sync_to(self, offset: Offset) -> None:
        await asyncio.sleep(0)
        self._ends["synced"] = max(self._ends["synced"], offset)

    async def offset_at_time(self, timestamp_us: int) -> Offset:
        await asyncio.sleep(0)
        found = (Offset(offset) for offset, time in enumerate(self.times) if time >= timestamp_us)
        return next(found, self.end)

    def close_channels(self, subscription: str, closed_code: str, message: str) -> None:
        self.closed.append((subscription, closed_code, self.cursors.offset(subscription)))

    async def replace_chunks(self, old: Sequence[str], new: str) -> int:
        await asyncio.sleep(0)
        self.replaced.append((list(old), new))
        return len(self.replaced)

    def producer_rows(self) -> bytes:
        return b""

    async def check_can_end(self) -> None:
        pass


async def plain_segment(
    store: MemoryStore,
    name: SegmentName,
    *,
    end: int = 0,
    config: CursorConfig | None = None,
    topic_id: int = 0,
    owner: str = "broker-1",
    epoch: int = 1,
    now_us: Callable[[], int] = lambda: 1,
    ended: bool = False,
) -> PlainSegment:
    ends = {"end": end, "synced": end, "ended": int(ended)}
    cursors = Cursors(
        store,
        name,
        Epoch(epoch),
        await own(store, name, owner, epoch),
        lambda: Offset(ends["synced"]),
        config or CursorConfig(),
        now_us=now_us,
        end=lambda: Offset(ends["end"]),
        drained=lambda offset: bool(ends["ended"]) and offset >= ends["end"],
    )
    await cursors.load()
    return PlainSegment(name, ends, cursors, [], topic_id)


class PlainSegments:
    def __init__(self) -> None:
        self.served: dict[tuple[str, int], PlainSegment] = {}

    def get(self, path: str, segment_id: int) -> PlainSegment:
        try:
            return self.served[path, segment_id]
        except KeyError:
            raise NotServing(f"{path} {segment_id}") from None

    def of_topic(self, path: str) -> list[PlainSegment]:
        return [segment for (topic, _), segment in sorted(self.served.items()) if topic == path]

    async def serve(self, store: MemoryStore, name: TopicName, topic: Topic, *, end: int = 0) -> None:
        for info in topic.layout.segments.values():
            segment = await plain_segment(store, SegmentName.of(name, info), end=end, topic_id=topic.id)
            self.served[name.path, info.segment_id] = segment


async def loaded_topics(simulation: Simulation, store: MemoryStore) -> Topics:
    topics = Topics(View(store), simulation.clock, random.Random(simulation.seed))
    await topics.view.load()
    return topics


async def make_topic(topics: Topics, name: TopicName = ORDERS, segments: int = 1) -> Topic:
    return await topics.create(name, segments=segments, policies=TopicPolicies(), properties={})


def counted(store: MemoryStore) -> list[str]:
    """The requests of this client from now on."""
    requests: list[str] = []

    def count(request: str) -> Fault:
        requests.append(request)
        return Fault.NONE

    store.fault = count
    return requests


def faults(*planned: Fault, of: str = "txn") -> Callable[[str], Fault]:
    """These for the next requests of that name, then none."""
    left = list(planned)

    def fault(request: str) -> Fault:
        return left.pop(0) if request == of and left else Fault.NONE

    return fault


def faults_at(*steps: tuple[str, Fault]) -> Callable[[str], Fault]:
    """Each meets the next request of its name, in this order."""
    left = list(steps)

    def fault(request: str) -> Fault:
        return left.pop(0)[1] if left and left[0][0] == request else Fault.NONE

    return fault


class Readers:
    """Who reads which segment, by the rule of the segments' owners."""

    def __init__(self) -> None:
        self.reading: dict[int, Recorder] = {}
        self._read_grants: dict[int, ReadGrants] = {}

    def open(self, segment: int, read_grant: ReadGrant, reader: Recorder) -> None:
        self._read_grants.setdefault(segment, ReadGrants()).take("billing", read_grant)
        if (other := self.reading.get(segment)) is not None:
            other.evict(segment)
        self.reading[segment] = reader

    def close(self, segment: int, reader: Recorder) -> None:
        if self.reading.get(segment) is reader:
            del self.reading[segment]


class Recorder:
    """A consumer's connection that notes what it is told, and opens a channel on each segment that it gets."""

    def __init__(self, readers: Readers, name: str) -> None:
        self.name = name
        self.assigned: list[tuple[int, tuple[int, ...]]] = []
        self.read_grants: dict[int, ReadGrant] = {}
        """As it was told last."""
        self.revoked: list[int] = []
        """Segments whose channel was closed for it, because another consumer opened one."""
        self.expulsion: BraidError | None = None
        self.give_back: Callable[[int], None] = lambda _segment: None
        """Called with each segment that is missing in a new assignment."""
        self.has: set[int] = set()
        self._readers = readers

    def assign(self, assigned: Assigned) -> None:
        assert not self.assigned or assigned.number > self.assigned[-1][0]
        self.assigned.append((assigned.number, assigned.segments))
        grants = zip(assigned.segments, assigned.grants, strict=True)
        self.read_grants = {segment: ReadGrant(assigned.term, grant) for segment, grant in grants}
        for segment in sorted(set(assigned.segments) - self.has):
            self._open(segment)
        for segment in sorted(self.has - set(assigned.segments)):
            self.give_back(segment)

    def gave_back(self, segment: int) -> None:
        """It has closed its channel; if it got the segment again meanwhile, it opens another."""
        self.drop(segment)
        if segment in self.read_grants:
            self._open(segment)

    def _open(self, segment: int) -> None:
        self._readers.open(segment, self.read_grants[segment], self)
        self.has.add(segment)

    def drop(self, segment: int) -> None:
        self.has.discard(segment)
        self._readers.close(segment, self)

    def evict(self, segment: int) -> None:
        self.revoked.append(segment)
        self.has.discard(segment)

    def expelled(self, error: BraidError) -> None:
        self.expulsion = error
        self.end()

    def end(self) -> None:
        """It closes all that it has."""
        self.read_grants = {}
        for segment in sorted(self.has):
            self.drop(segment)

    def latest(self) -> tuple[int, ...] | None:
        return self.assigned[-1][1] if self.assigned else None
