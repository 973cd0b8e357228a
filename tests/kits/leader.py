"""What tests of the cluster leader stand on: snapshots made by hand, and candidates without segments on one store."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping
from typing import Any

from braid.broker.topics import Topics
from braid.cluster.leader import Leader, LeaderConfig
from braid.cluster.members import Members
from braid.cluster.owners import Owners, SegmentKey
from braid.cluster.ownership.leader_step import Decision
from braid.cluster.snapshot import Snapshot
from braid.metadata import paths
from braid.metadata.keepalive import LeaseKeeper
from braid.metadata.memory import MemoryStore
from braid.metadata.store import Delete, Lease, Put
from braid.metadata.view import Known, View
from braid.model.cluster import RACK, REPLICAS, BrokerState, BrokerView, Registration
from braid.model.errors import NotServing
from braid.model.ids import Epoch, Revision
from braid.model.layout import Layout
from braid.model.load import LoadReport
from braid.model.names import SegmentName, TopicName
from braid.model.ownership import Move, OpeningFailure, Ownership, OwnershipState
from braid.model.topic import Topic, TopicPolicies
from braid.testing.sim.loop import Simulation

ORDERS = TopicName("public", "default", "orders")
LEASE_TTL_S = 10.0


def names_of(segments: int, topic: TopicName = ORDERS) -> list[SegmentName]:
    return [SegmentName.of(topic, info) for info in Layout.initial(segments).segments.values()]


def key_of(name: SegmentName) -> SegmentKey:
    return name.topic.path, name.descriptor


def record(state: str, owner: str, epoch: int = 3, **fields: Any) -> Ownership:
    """`clean` as it is in that state, unless it is given; `to` makes a move."""
    move = fields.pop("to", None)
    fields.setdefault("clean", state == "SEALED")
    return Ownership(
        state=OwnershipState(state),
        owner=owner,
        epoch=Epoch(epoch),
        move=Move(to=move) if move is not None else None,
        **fields,
    )


def unable(*brokers: str, lasting: bool = True) -> tuple[OpeningFailure, ...]:
    """Failures of these brokers to open a segment."""
    return tuple(OpeningFailure(broker=each, reason=f"{each} has no files", lasting=lasting) for each in brokers)


def snapshot_of(
    records: Iterable[Ownership | None] = (),
    *,
    live: Iterable[str] = ("a", "b", "c"),
    drained: Iterable[str] = (),
    gone_since: Mapping[str, float] | None = None,
    unable_since: Mapping[str, float] | None = None,
    policies: TopicPolicies | None = None,
    deleting: bool = False,
    loads: Mapping[str, LoadReport] | None = None,
    racks: Mapping[str, str] | None = None,
    stopping: Iterable[str] = (),
) -> Snapshot:
    """One topic with as many segments as there are records. `unable_since` is by broker, and for all segments."""
    found = list(records)
    topic = Topic(id=1, layout=Layout.initial(len(found)), policies=policies or TopicPolicies(), deleting=deleting)
    states = dict.fromkeys(drained, BrokerState.DRAINING) | dict.fromkeys(stopping, BrokerState.STOPPING)
    labels = {broker: {RACK: rack} for broker, rack in (racks or {}).items()}
    return Snapshot(
        topics={ORDERS.path: topic},
        records={
            key_of(name): Known(each, Revision(10 + name.id), 0)
            for name, each in zip(names_of(len(found)), found)
            if each is not None
        },
        brokers={
            id_: BrokerView(id=id_, state=states.get(id_, BrokerState.ACTIVE), labels=labels.get(id_, {}))
            for id_ in live
        },
        loads=loads or {},
        gone_since=gone_since or {},
        unable_since={
            (key_of(name), broker): since
            for name in names_of(len(found))
            for broker, since in (unable_since or {}).items()
        },
    )


def applied(snapshot: Snapshot, decisions: Iterable[Decision]) -> Snapshot:
    """The state after the decisions were written."""
    records = dict(snapshot.records)
    for revision, decision in enumerate(decisions, start=1_000):
        records[key_of(decision.segment)] = Known(decision.record, Revision(revision), 0)
    return Snapshot(
        topics=snapshot.topics,
        records=records,
        brokers=snapshot.brokers,
        loads=snapshot.loads,
        gone_since=snapshot.gone_since,
        unable_since=snapshot.unable_since,
    )


class Candidate:
    """What a broker has of the cluster, without segments: a registration, a view and a leader under one lease."""

    def __init__(
        self, simulation: Simulation, store: MemoryStore, id_: str, config: LeaderConfig | None = None
    ) -> None:
        self.id = id_
        self.store = store
        self.clock = simulation.clock
        self.view = View(store)
        self.topics = Topics(self.view, self.clock, random.Random(simulation.seed))
        self.owners = Owners(self.view)
        self.members = Members(self.view)
        self.leader = Leader(self.view, self.topics, self.owners, self.members, self.clock, id_, config)
        self.lease: Lease
        self.keeper: LeaseKeeper

    async def start(self) -> Candidate:
        self.lease = await self.store.grant_lease(LEASE_TTL_S)
        registration = Registration(address=f"{self.id}:6660", admin=f"{self.id}:8660", features=(REPLICAS,))
        await self.store.txn([], [Put(paths.broker(self.id), registration.to_json(), self.lease.id)])
        self.keeper = LeaseKeeper(self.lease, self.clock)
        self.keeper.start()
        await self.view.load()
        self.leader.start(self.lease)
        return self

    async def ask(self, broker_id: str, name: str, arguments: dict[str, Any], *, timeout_s: float) -> Any:
        """Ask another broker: no broker here has copies of logs."""
        raise NotServing(f"broker {broker_id} does not answer {name}")

    async def drain(self, broker: str, *, wish: bool = True) -> None:
        key = paths.drain(broker)
        await self.store.txn([], [Put(key, b"{}") if wish else Delete(key)])

    async def put(self, name: SegmentName, new: Ownership) -> None:
        """As an owner would, whatever was there."""
        result = await self.store.txn([], [Put(paths.ownership(*key_of(name)), new.to_json())])
        await self.view.caught_up(result.revision)


class Owner:
    """Plays a broker's part in the records of its segments, without any segment behind them: opens what is assigned to
    it, hands over what is to move, changes replicas. `look` lets it look again after a setting has changed."""

    def __init__(self, candidate: Candidate) -> None:
        self.candidate = candidate
        self.refuses = ""
        """Why it hands over nothing; empty: it does."""
        self.opens = True
        self.cannot_open = ""
        """Why it opens nothing, as it says in the records; empty: it does."""
        self.hands_over = True
        self.copies = True
        """Whether it changes replicas when it is asked to."""
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> Owner:
        self.candidate.owners.table.on_change.append(lambda _: self._changed.set())
        self._task = asyncio.create_task(self._play(), name=f"owner {self.candidate.id}")
        return self

    def look(self) -> None:
        self._changed.set()

    async def _play(self) -> None:
        owners = self.candidate.owners
        while True:
            self._changed.clear()
            for key, found in owners.of_broker(self.candidate.id).items():
                known = owners.table.known(key)
                new = self._next(found)
                if new is not None and known is not None:
                    await asyncio.sleep(0.01)
                    name = SegmentName.at(*key)
                    await owners.swap(name, known.revision, new)
            await self._changed.wait()

    def _next(self, found: Ownership) -> Ownership | None:
        match found.state:
            case OwnershipState.ASSIGNED if self.cannot_open:
                told = found.unopened(self.cannot_open, lasting=True)
                return told if told != found else None
            case OwnershipState.ASSIGNED if self.opens:
                return found.serving()
            case OwnershipState.SERVING if found.move is not None and self.hands_over:
                return found.kept(self.refuses) if self.refuses else found.draining()
            case OwnershipState.SERVING if found.change is not None and self.copies:
                return found.replicas_changed(found.change.replicas, found.change.write_quorum)
            case OwnershipState.DRAINING:
                return found.sealed()
        return None
