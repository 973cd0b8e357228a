"""The replicas of a simulated topic: how many there are, how an operator changes that, and what happens to them alone.

Some topics of several brokers have replicas. The operator changes their number while everything else goes on, also to
one and back. Brokers lose their disks, often right after such a change. Answers about copies come late.

**What a topic can spare.** A record that w replicas hold survives the loss of w - 1 disks. So a disk is lost only while
each segment that has a copy there keeps this promise: of the other replicas, all but w - 2 are members. A broker that
lost its disk is no member until the owner has seen it hold everything that is confirmed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Final

from braid.broker.broker import Broker
from braid.broker.segments.owned_segment import OwnedSegment
from braid.metadata import paths
from braid.model.errors import InvalidArgument, NotAvailable
from braid.model.log.replication import LogPosition
from braid.model.names import SegmentName
from braid.model.ownership import Ownership
from braid.storage.log.wal import SUFFIX
from braid.testing.checkers.history import PromiseBroken
from braid.testing.checkers.ownership_checker import Segment
from braid.testing.checkers.replica_checker import BatchContent, ReplicaChecker, check_same_producers
from braid.testing.scenarios.clients import TOPIC
from braid.testing.scenarios.machine import BrokerMachine
from braid.testing.scenarios.queues.queues import QUEUES

if TYPE_CHECKING:
    from braid.testing.scenarios.cluster import SimulatedCluster

REPLICAS: Final = "replicas"
"""A seed that favours this has replicas."""
NUMBERS: Final = ((2, 1), (2, 2), (3, 1), (3, 2), (3, 2), (3, 2), (3, 3), (4, 2), (4, 3))
"""Of replicas, and of those that confirm a record."""
ALONE: Final = (1, 1)
SIDE_NUMBERS: Final = (3, 2)
BROKERS: Final = (3, 5)
LOGS: Final = "/data/wal"
REPLACE_AFTER_S: Final = (2.0, 8.0, 600.0)
LATE_S: Final = (0.0, 14.0)
"""How late an answer may be: an owner waits 10 s for it."""
LATE: Final = {
    "copy_begin": 0.1,
    "copy_cut": 0.4,
    "copy_reset": 0.4,
    "copy_admit": 0.3,
    "copy_promise": 0.1,
    "queue_begin": 0.1,
    "queue_append": 0.01,
}
"""The calls about copies whose answers may be late, with the share of those that are, in a seed that has such."""
PAUSE_S: Final = 640.0
"""Longer than a file may stay open."""

Handler = Callable[..., Coroutine[Any, Any, Any]]


class SimulatedReplicas:
    def __init__(self, cluster: SimulatedCluster, share: float) -> None:
        """`share` is that of the seeds that have replicas."""
        self._cluster = cluster
        # Of its own: a seed without replicas takes the course that it took before there were any.
        random = Random(f"replicas of {cluster.simulation.seed}")
        if cluster.favoured == QUEUES:
            share *= 2
        drawn = cluster.favoured in ("", QUEUES) and random.random() < share
        wanted = cluster.favoured == REPLICAS or drawn
        self.there = wanted
        """Whether the topic has replicas, at times at least."""
        self.change = self.there and random.random() < 0.6
        """Whether their number changes."""
        self.late = self.there and random.random() < 0.4
        """Whether some answers come late."""
        self.brokers = random.randint(*BROKERS)
        self.numbers = random.choice([each for each in NUMBERS if each[0] <= self.brokers])
        """Of replicas, and of those that confirm a record, as the operator has asked for last."""
        if self.change and random.random() < 0.4:
            self.numbers = ALONE
        self.checker = ReplicaChecker(LOGS)
        self._random = cluster.random
        self._compared: dict[tuple[OwnedSegment, str], LogPosition] = {}
        """By segment that is open, and follower, up to where their producers were compared."""

    # What the topic is to have.

    def policy(self) -> dict[str, Any]:
        """Return what the topic is created with, beside its other policies."""
        if not self.there or self.numbers == ALONE:
            return {"durability": self._cluster.durability}
        return {"replicas": self.numbers[0], "confirm": self.numbers[1]}

    def side_policy(self) -> dict[str, Any]:
        """Return what other topics are created with: they have to survive a lost disk, too."""
        return {"replicas": SIDE_NUMBERS[0], "confirm": SIDE_NUMBERS[1]} if self.there else {}

    def settings(self) -> dict[str, Any]:
        """Draw a broker's settings."""
        return {"replace_after_s": self._random.choice(REPLACE_AFTER_S)} if self.there else {}

    @property
    def need_all(self) -> bool:
        """Whether every broker has to confirm a record. While one is drained, no segment can be made then."""
        return self.there and self.numbers[1] == len(self._cluster.machines)

    async def change_replicas(self) -> None:
        """Ask for other numbers, several times in a row, also for one and back."""
        operator, random = self._cluster.operator, self._random
        several = random.choice([[], [], [ALONE], [ALONE, (3, 2)]])
        possible = [each for each in NUMBERS if each[0] <= len(self._cluster.machines)]

        async def change() -> None:
            for numbers in [*several, random.choice(possible)]:
                await self._ask(numbers)
                await asyncio.sleep(random.choice([0.0, 0.1, 1.0, 4.0]))

        # Too few brokers may be there to confirm a record, or one of an earlier version.
        operator.in_background(operator.tolerantly(change, (InvalidArgument, NotAvailable)))

    async def _ask(self, numbers: tuple[int, int]) -> None:
        self._cluster.note(f"{numbers[1]} of {numbers[0]} replicas are to confirm")
        await self._cluster.operator.client.admin.set_replicas(TOPIC, numbers[0], confirm=numbers[1])
        self.numbers = numbers

    async def settle(self) -> None:
        """Let the topic have replicas in the end."""
        if self.there:
            await self._cluster.operator.surely(partial(self._ask, self._random.choice([(2, 2), (3, 2), (3, 3)])))

    # Faults.

    async def lose_disk(self) -> None:
        """A broker loses its disk, and comes back without it."""
        spare = [machine for machine in self._idle() if self._can_spare(machine)]
        if spare:
            self._cluster.faults.lose_disk(self._random.choice(spare))

    def on_changed(self, segment: Segment, record: Ownership) -> None:
        """Hear that a segment has other replicas. That is the worst moment to lose a disk: the vote is another one, and
        copies that are not needed any more are removed."""
        cluster = self._cluster
        cluster.counts.replica_changes += 1
        if cluster.gentle or cluster.settling or not self.there or self._random.random() > 0.3:
            return
        involved = [machine for machine in self._idle() if machine.id in record.replicas and self._can_spare(machine)]
        if involved:
            cluster.note(f"{segment} has changed its replicas")
            cluster.faults.lose_disk(self._random.choice(involved))

    def _idle(self) -> list[BrokerMachine]:
        return [machine for machine in self._cluster.machines.values() if machine.up and not machine.busy]

    def _can_spare(self, machine: BrokerMachine) -> bool:
        """Tell whether every segment keeps its promises without the disk of this machine."""
        for entry in self._cluster.store._server.list(paths.SEGMENTS_PREFIX).entries:
            segment = paths.segment_of_ownership(entry.key)
            if segment is not None and not self._survives(segment, Ownership.from_json(entry.value), machine.id):
                return False
        return True

    def _survives(self, segment: Segment, record: Ownership, lost: str) -> bool:
        if lost not in record.keepers:
            return True
        if record.clean or not record.replicas:
            return False
        machines = self._cluster.machines
        others = [each for each in record.replicas if each != lost]
        missing = sum(not self.checker.copies.is_member(machines[each].disk, "/".join(segment)) for each in others)
        return missing + 1 < record.write_quorum

    async def pause(self) -> None:
        """Nothing is published until the newest files are old."""
        cluster = self._cluster
        # One that is closing has to end in time.
        clients = [client for client in cluster.clients.values() if not client.leaving.is_set()]
        cluster.note("all clients sleep")
        for client in clients:
            client.freeze()
        await asyncio.sleep(PAUSE_S)
        for client in clients:
            client.thaw()
        cluster.counts.pauses += 1

    def delay_answers(self, broker: Broker) -> None:
        """Let some answers about copies come late, so that their owner has given them up."""
        if not self.late:
            return
        handlers = broker.front_door.peer_calls._handlers
        for call, share in LATE.items():
            handler, shielded = handlers[call]
            handlers[call] = self._late(handler, share), shielded

    def _late(self, handler: Handler, share: float) -> Handler:
        async def answer(*arguments: Any) -> Any:
            late = self._cluster.clients and not self._cluster.settling and self._random.random() < share
            first = self._random.random() < 0.3
            if late:
                self._cluster.counts.late_answers += 1
            if late and first:
                await asyncio.sleep(self._random.uniform(*LATE_S))
            answer = await handler(*arguments)
            if late and not first:
                await asyncio.sleep(self._random.uniform(*LATE_S))
            return answer

        return answer

    # What is checked.

    def on_confirmed(self, name: SegmentName, offset: int, record: Ownership) -> None:
        """I2: when a record is confirmed, enough disks have it."""
        if not self.there or not record.replicas:
            return
        machines = [self._cluster.machines[broker] for broker in record.replicas]
        disks = {machine.id: machine.last_disk or machine.disk for machine in machines}
        try:
            self.checker.check_confirmed(_place(name), offset, disks, record.owner, record.write_quorum)
        except PromiseBroken as error:
            self._cluster.failed(error)
        self._cluster.counts.confirms_on_disks += 1

    def check_producers(self, segment: OwnedSegment) -> None:
        """I10: a follower that is as far as its owner knows the same producers."""
        log = segment.storage.log
        for follower in segment.followers if self.there else ():
            broker, position = self._cluster.machines[follower.broker].broker, log.position
            copy = broker.segment_host.replicas._open.get(segment.name) if broker is not None else None
            if copy is None or not follower.in_sync or not copy.storage.position == follower.position == position:
                continue
            if self._compared.get((segment, follower.broker)) != position:
                self._compared[segment, follower.broker] = position
                copied = copy.storage._log._writer._producers
                check_same_producers(str(segment.name), follower.broker, log._writer._producers, copied)

    def all_in_sync(self) -> bool:
        """Tell whether each segment has the replicas that it is to have, and all of them hold all of it."""
        served = self._cluster.inspector.served()
        records = self._cluster.inspector.records()
        return not self.there or all(
            record.change is None
            and len(record.replicas) == min(self.numbers[0], len(self._cluster.machines))
            and number in served
            and len(served[number].followers) == len(record.replicas) - 1
            and all(each.in_sync and each.member and not each.behind for each in served[number].followers)
            for number, record in records.items()
        )

    async def check_copies(self) -> None:
        """I1: each copy holds what the log holds."""
        records = self._cluster.inspector.records()
        for number, segment in self._cluster.inspector.served().items() if self.there else ():
            batches: dict[int, BatchContent] = {}
            reader = segment.storage.reader(segment.earliest)
            while some := await reader.read_available():
                batches.update((header.base_offset, BatchContent.of(header)) for header, _ in some)
            first = segment.storage.catalog.next_offset  # Chunks hold what is before.
            for broker in records[number].replicas:
                disk = self._cluster.machines[broker].disk
                self.checker.check_whole(_place(segment.name), disk, broker, batches, first, segment.end)

    def check_files(self, machine: BrokerMachine) -> None:
        """No write that counts went to a file that nobody finds any more."""
        written = [path for path in machine.disk.unlinked_writes() if path.endswith(SUFFIX)]
        if self.there and written:
            raise PromiseBroken("I2", f"{machine.id} has written to files that were removed: {written}")


def _place(name: SegmentName) -> str:
    return f"{name.topic.path}/{name.descriptor}"
