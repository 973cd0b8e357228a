"""What the followers of a simulated queue hold: how they lag, and what they say of it.

A confirmed ack is on w disks, and so is a confirmed message. Nothing says that these are the same disks: a follower may
have all messages and lack events, or wait for the messages of events that it was sent. Here a follower lags in one of
them, or in both, while the others go on. Often its owner is then lost, or stands still until its lease is over:

- a follower that lags in **events** often has more of the log than the others. Then it wins the vote, and must ask the
  others what was settled (I9);
- a follower that lags in **messages** must not store the events of messages that it lacks (I8);
- of a follower that lags in **both**, the last events of the lost owner arrive just before the vote, and wait for their
  messages. The messages come from the next owner. By then the follower has promised the next epoch, and must not
  take these events any more (I3).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from braid.broker.broker import Broker
from braid.broker.peers.calls import Arguments
from braid.broker.replicas.queue_copies import QUEUE_APPEND, QUEUE_BEGIN, QUEUE_READ
from braid.model.names import SegmentName
from braid.model.ownership import Ownership, OwnershipState
from braid.model.queue.events import decode_events, decode_snapshot
from braid.ports.disk import Buffer
from braid.testing.checkers.history import PromiseBroken
from braid.testing.checkers.queue_checker import EvidenceChecker
from braid.testing.scenarios.machine import BrokerMachine

if TYPE_CHECKING:
    from braid.testing.scenarios.cluster import SimulatedCluster

EVENTS: Final = "events"
MESSAGES: Final = "messages"
CALLS: Final = {EVENTS: (QUEUE_BEGIN, QUEUE_APPEND), MESSAGES: ("copy_append",)}
"""The calls of an owner that bring them."""
LAGS: Final = ((EVENTS,), (EVENTS,), (MESSAGES,), (MESSAGES, EVENTS), (MESSAGES, EVENTS))
"""In what a follower lags. In both: only events of messages that it lacks do not arrive."""
LAG_S: Final = (0.3, 1.5)
LOOK_S: Final = 0.05
HELD_S: Final = 6.0
"""How long the owner goes on at most until a follower lacks something."""
LOST: Final = 0.8
"""How often the owner is lost while a follower lags."""
BEFORE_S: Final = (0.0, 0.4)
"""How long before the end of the owner's lease its last events arrive at a follower that lags in both."""
AFTER_S: Final = (0.1, 1.5)
"""How long after the end of the lease everything else arrives."""
GONE_S: Final = (0.1, 4.0)
"""How much longer than its lease an owner is away."""

Handler = Callable[[Arguments, Buffer], Awaitable[Any]]


class SimulatedQueueCopies:
    def __init__(self, cluster: SimulatedCluster, subscription: str, count: Callable[[str], None]) -> None:
        """`count` counts what has happened, by the field of `QueueCounts`."""
        self._cluster = cluster
        self._random = cluster.random
        self._subscription = subscription
        self._count = count
        self._evidence = EvidenceChecker()
        self._segment = ""
        """Of which a follower lags: of one at a time."""
        self._closed: dict[tuple[str, str], asyncio.Event] = {}
        """By broker, and events or messages: they do not arrive there until the event is set."""
        self._waiting: Counter[tuple[str, str]] = Counter()
        """How many requests have not arrived."""
        self._used_at: dict[int, float] = {}
        """By segment: when its owner has last sent events."""

    # Faults.

    async def lag(self) -> None:
        """Let a follower lag; often its owner is lost meanwhile. Of the segments, take one whose queue is in use."""
        records = [record for record in self._cluster.inspector.records().items() if self._may_lag(record[1])]
        if records and not self._segment:
            segment, record = max(records, key=lambda each: self._used_at.get(each[0], 0.0))
            self._segment = str(self._cluster.inspector.name_of(segment))
            late = self._random.choice([each for each in record.replicas if each != record.owner])
            self._cluster.operator.in_background(self._lag(record, late))

    def _may_lag(self, record: Ownership) -> bool:
        """Tell whether the other replicas can confirm without one of the followers."""
        served = record.state is OwnershipState.SERVING and record.move is None
        return served and record.write_quorum < len(record.replicas)

    async def _lag(self, record: Ownership, late: str) -> None:
        owner, what = self._cluster.machines[record.owner], self._random.choice(LAGS)
        self._count("lags")
        try:
            for each in what:
                self._hold_up(late, each)
            lacks = await self._lacks(late, what[-1])
            await asyncio.sleep(self._random.uniform(*LAG_S))
            loses = lacks and record.write_quorum > 1 and self._random.random() < LOST  # Otherwise no vote comes.
            if loses and owner.up and not owner.busy:
                await self._lose(owner, record, late, what)
        finally:
            self._let_all_through()
            self._segment = ""

    async def _lacks(self, broker: str, what: str) -> bool:
        """Tell whether something is sent that does not arrive, now or soon."""
        for _ in range(int(HELD_S / LOOK_S)):
            if self._waiting[broker, what]:
                return True
            await asyncio.sleep(LOOK_S)
        return False

    async def _lose(self, owner: BrokerMachine, record: Ownership, late: str, what: Sequence[str]) -> None:
        """The owner is gone, or stands still, until its lease is over. What it has sent arrives around then."""
        random, cluster = self._random, self._cluster
        owner.busy = True
        try:
            if MESSAGES not in what:  # It is to have more of the log than the others.
                for other in record.replicas:
                    if other not in (late, owner.id):
                        self._hold_up(other, MESSAGES)
                        await self._lacks(other, MESSAGES)
            self._count("owners_lost_meanwhile")
            over_s = self._lease_left_s(owner)
            arriving = asyncio.ensure_future(self._arrive(over_s, late if len(what) > 1 else ""))
            gone_s = over_s + random.uniform(*GONE_S)
            if random.random() < 0.4:
                await cluster.faults.freeze_for(owner, gone_s)
            else:
                cluster.faults.crash(owner)
                await asyncio.sleep(gone_s)
                await cluster.faults.start(owner)
            await arriving
        finally:
            owner.busy = False

    async def _arrive(self, over_s: float, first: str) -> None:
        """Let everything arrive that was held up. The lease is over after so long; events arrive before that at the
        `first` one."""
        before_s = min(over_s, self._random.uniform(*BEFORE_S))
        await asyncio.sleep(over_s - before_s)
        if first:
            self._let_through(first, EVENTS)
        await asyncio.sleep(before_s + self._random.uniform(*AFTER_S))
        self._let_all_through()

    def _lease_left_s(self, machine: BrokerMachine) -> float:
        assert machine.broker is not None
        lease = machine.broker.cluster.registration.lease
        over = self._cluster.store._server.expires_at(lease.id)
        return max(0.0, over - self._cluster.simulation.clock.monotonic()) if over is not None else 0.0

    def _hold_up(self, broker: str, what: str) -> None:
        if (broker, what) not in self._closed:
            self._cluster.note(f"{broker} lags in {what}")
            self._closed[broker, what] = asyncio.Event()

    def _let_through(self, broker: str, what: str) -> None:
        if (closed := self._closed.pop((broker, what), None)) is not None:
            self._cluster.note(f"{broker} gets {what}")
            closed.set()

    def _let_all_through(self) -> None:
        for which in list(self._closed):
            self._let_through(*which)

    # What followers are asked, and say.

    def follow(self, machine: BrokerMachine, broker: Broker) -> None:
        """Hear what a broker says about its copies; let it lag now and then."""
        handlers = broker.front_door.peer_calls._handlers
        watched = {QUEUE_BEGIN: self._begin, QUEUE_APPEND: self._append, QUEUE_READ: self._read}
        for call, watch in watched.items():
            handler, shielded = handlers[call]
            handlers[call] = watch(handler, machine), shielded  # type: ignore[assignment]
        for what, calls in CALLS.items():
            for call in calls:
                handler, shielded = handlers[call]
                handlers[call] = self._late(handler, broker, call, what), shielded  # type: ignore[assignment]

    def _late(self, handler: Handler, broker: Broker, call: str, what: str) -> Handler:
        which = (broker.id, what)

        async def late(arguments: Arguments, payload: Buffer) -> Any:
            while (closed := self._closed.get(which)) is not None and self._is_late(broker, call, arguments, payload):
                self._waiting[which] += 1
                try:
                    await closed.wait()
                finally:
                    self._waiting[which] -= 1
            return await handler(arguments, payload)

        return late

    def _is_late(self, broker: Broker, call: str, arguments: Arguments, payload: Buffer) -> bool:
        if arguments["segment"] != self._segment:
            return False
        if call not in CALLS[EVENTS] or (broker.id, MESSAGES) not in self._closed:
            return True
        copy = broker.segment_host.replicas._open.get(SegmentName.parse(arguments["segment"]))
        events = (decode_events if call == QUEUE_APPEND else decode_snapshot)(memoryview(payload))
        return copy is None or events.end > copy.storage.position.end

    def _begin(self, handler: Handler, machine: BrokerMachine) -> Handler:
        disk = machine.disk

        async def begin(arguments: Arguments, payload: Buffer) -> Any:
            snapshot = decode_snapshot(memoryview(payload))
            answer = await handler(arguments, payload)
            if arguments["subscription"] == self._subscription:
                self._checked(lambda: self._evidence.began(disk, arguments["segment"], arguments["epoch"], snapshot))
            return answer

        return begin

    def _append(self, handler: Handler, machine: BrokerMachine) -> Handler:
        disk = machine.disk

        async def append(arguments: Arguments, payload: Buffer) -> Any:
            segment, events = arguments["segment"], decode_events(memoryview(payload))
            self._used_at[SegmentName.parse(segment).id] = asyncio.get_running_loop().time()
            placement = self._evidence.placement(disk, segment)
            answer = await handler(arguments, payload)
            if arguments["subscription"] == self._subscription and placement is not None:
                self._checked(lambda: self._evidence.took(disk, segment, arguments["epoch"], placement, events.settled))
            return answer

        return append

    def _read(self, handler: Handler, machine: BrokerMachine) -> Handler:
        disk = machine.disk

        async def read(arguments: Arguments, payload: Buffer) -> Any:
            answer = await handler(arguments, payload)
            if self._subscription in arguments["subscriptions"]:
                image = answer["images"].get(self._subscription)
                snapshot = decode_snapshot(image) if image is not None else None
                self._evidence.said(disk, arguments["segment"], arguments["epoch"], snapshot)
            return answer

        return read

    def _checked(self, check: Callable[[], None]) -> None:
        try:
            check()
        except PromiseBroken as error:
            self._cluster.failed(error)
