"""The queue of a simulated topic: its subscription, its consumers, what an operator does to it, and what is checked.

Consumers do what the interface allows: they ack one by one, together, late, twice, or never; they nack, extend, and
close. Leases are so short that they run out. In some seeds a message that nobody acks becomes a dead letter. Everything
else goes on meanwhile.

The checks are in `queue_checker.py`. Here the checker is told what the brokers' queues do, and looks at their disks.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from braid.broker.broker import Broker
from braid.broker.queues.channel import QueueChannel, QueueSettings
from braid.broker.queues.segment_queue import SegmentQueue
from braid.broker.replicas.queue_copies import QUEUE_APPEND, QUEUE_BEGIN
from braid.broker.segments.owned_segment import OwnedSegment
from braid.client.client import Client
from braid.client.consuming.queue import QueueConsumer
from braid.metadata import paths
from braid.metadata.store import Operation, Put
from braid.model.errors import AckStale, BraidError, InvalidArgument, SegmentNotFound
from braid.model.ids import NO_REQUEST
from braid.model.message import QueueMessage
from braid.model.names import SegmentName
from braid.model.queue.events import QueueEvents, QueueImage, QueueSnapshot
from braid.model.queue.settled import SettledOffsets
from braid.model.queue.state import Handed
from braid.model.stored_record import decode
from braid.model.subscription import Cursor
from braid.storage.history.catalog import Frontier
from braid.storage.reader import StoredBatch
from braid.testing.checkers.history import PromiseBroken
from braid.testing.checkers.queue_checker import JournalsOnDisk, Place, QueueChecker, QueueWatch
from braid.testing.checkers.topic_history import Record
from braid.testing.scenarios.machine import BrokerMachine
from braid.testing.scenarios.queues.copies import SimulatedQueueCopies
from braid.wire.operations import QueueAnswer

if TYPE_CHECKING:
    from braid.testing.scenarios.clients import ClientMachine
    from braid.testing.scenarios.cluster import SimulatedCluster

QUEUES: Final = "queues"
"""A seed that favours this has a queue."""
NAME: Final = "queued"
TOPIC: Final = "simulated"
DEAD_LETTERS: Final = "buried"
LOGS: Final = "/data/wal"
ACK_TIMEOUT_S: Final = (0.3, 1.0, 3.0, 10.0)
MAX_DELIVERIES: Final = (0, 0, 1, 2, 5)

Handler = Callable[..., Awaitable[Any]]


class SimulatedQueues:
    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._random = cluster.random
        self.there = cluster.favoured == QUEUES
        random = Random(f"queues of {cluster.simulation.seed}")
        self.ack_timeout_s = random.choice(ACK_TIMEOUT_S)
        self._max_deliveries = random.choice(MAX_DELIVERIES)
        self.delays = self.there and random.random() < 0.6
        """Whether messages are returned for later. Then no clock jumps: the next owner would wait for the jump, too."""
        self.names = [NAME] if self.there else []
        self.topics: list[str] = []
        """Beside the simulated one."""
        self.pruned: dict[int, int] = {}
        """Segments that the layout has dropped, and where they ended."""
        self.checker: Final = QueueChecker()
        self.copies: Final = SimulatedQueueCopies(cluster, NAME, self._count)
        self._journals = JournalsOnDisk(LOGS, NAME)
        self._watches: dict[SegmentQueue, QueueWatch] = {}
        self._seeking = False

    async def create(self, client: Client) -> None:
        """Create the subscription."""
        if not self.there:
            return
        policies: dict[str, Any] = {}
        # A dead letter that is lost would not be missed where losses are accepted.
        if self._max_deliveries and self._cluster.durability == "fsync" and not self._cluster.lossy:
            policies = {"max_deliveries": self._max_deliveries, "dead_letter_topic": DEAD_LETTERS}
            await client.admin.create_topic(DEAD_LETTERS, segments=1, **self._cluster.replicas.side_policy())
            self.topics.append(DEAD_LETTERS)
        else:
            self._max_deliveries = 0
        await client.admin.create_subscription(
            TOPIC, NAME, start="earliest", kind="queue", ack_timeout_ms=int(self.ack_timeout_s * 1000), **policies
        )

    async def seek(self) -> None:
        """Set the subscription to another place."""
        if self._seeking:
            return
        self._seeking = True
        operator, random = self._cluster.operator, self._random
        admin, segment = operator.client.admin, random.choice(self._cluster.inspector.segments())
        ways: list[Callable[[], Awaitable[Any]]] = [
            lambda: admin.seek(TOPIC, NAME, random.choice(["earliest", "latest"])),
            lambda: admin.seek(TOPIC, NAME, {segment: random.randint(0, self._cluster.inspector.end(segment))}),
            lambda: admin.skip(TOPIC, NAME),
            lambda: admin.skip(TOPIC, NAME, segment=segment, count=random.randint(1, 50)),
        ]
        way = random.choice(ways)

        async def seek() -> None:
            self._cluster.note(f"{NAME} is to be set to another place")
            try:
                self._cluster.note(f"{NAME} was set to {await way()}")
                self._count("queue_seeks")
            finally:
                self._seeking = False

        # What was confirmed last may be lost.
        refused = (SegmentNotFound, InvalidArgument)
        operator.in_background(operator.tolerantly(seek, refused))

    # Consumers.

    async def take(self, machine: ClientMachine, client: Client) -> None:
        """Be a consumer, for a while."""
        prefetch = self._random.choice([1, 5, 30, None])
        consumer = client.queue_consumer(TOPIC, NAME, name=machine.name, prefetch=prefetch)
        try:
            async with consumer:
                await QueueProgram(self, self._cluster, machine, consumer).run()
        except AckStale:
            pass  # Of an ack that nobody waited for.

    def got(self, message: QueueMessage) -> None:
        self._cluster.inspector.check_seen(message.segment, message.offset)
        self._count("queue_messages")
        self.checker.received(place_of(message), message.lease, message.redelivery_count, self._max_deliveries)

    def _count(self, field: str, number: int = 1) -> None:
        counts = self._cluster.counts
        setattr(counts, field, getattr(counts, field) + number)

    def told(self, message: QueueMessage) -> None:
        self._count("queue_acks")
        self.checker.told(place_of(message))

    def nacked(self) -> None:
        self._count("nacks")

    # Brokers.

    def follow(self, machine: BrokerMachine, broker: Broker) -> None:
        """Watch what a broker says about its copies of the queue."""
        if self.there:
            self.copies.follow(machine, broker)

    def meet(self, segment: OwnedSegment, broker: Broker) -> None:
        """Watch the queue of a segment that was opened."""
        if not self.there:
            return
        queues = segment.queues
        open_queue = queues._open

        async def opened(subscription: str, **options: Any) -> None:
            await open_queue(subscription, **options)
            self._checked(lambda: self._meet(segment, broker))

        queues._open = opened  # type: ignore[method-assign]
        self._meet(segment, broker)

    def _meet(self, segment: OwnedSegment, broker: Broker) -> None:
        queue = segment.queues.find(NAME)
        if queue is None or queue in self._watches:
            return
        number, owner = segment.name.id, f"{broker.id} in epoch {segment.epoch}"
        snapshot = queue.snapshot()
        before = self.checker.current(number)
        if before is not None and before.number == snapshot.placement and before.confirmed:
            self._count("queues_opened")
            self._count("states_handed_over", bool(segment.cursors.handed_over(NAME)))
        watch = QueueWatch(self.checker, number, owner, snapshot, sought=self._is_sought(segment))
        self._watches[queue] = watch
        watch.begun(queue.last_number, snapshot)
        self._follow(queue, watch, segment, broker)

    def _is_sought(self, segment: OwnedSegment) -> bool:
        return segment.cursors._placed_by.get(NAME, NO_REQUEST) != NO_REQUEST

    def _follow(self, queue: SegmentQueue, watch: QueueWatch, segment: OwnedSegment, broker: Broker) -> None:
        def now_us() -> int:
            return int(queue._clock.monotonic() * 1e6)

        attach, take_answer, detach, reset = queue.attach, queue.answer, queue.detach, queue.reset

        def is_alive() -> bool:
            """The timers of a broker that was killed may still run. Nothing hears of what they do."""
            return self._cluster.machines[broker.id].broker is broker

        def on_events(number: int, events: QueueEvents | QueueSnapshot) -> None:
            if not is_alive():
                return
            self._checked(lambda: watch.on_events(number, events, now_us()))

        def on_confirmed() -> None:
            self._checked(lambda: self._on_confirmed(queue, watch, segment, broker))

        def attached(
            channel: QueueChannel, settings: QueueSettings, holds: Sequence[tuple[int, int, int]] = ()
        ) -> list[int]:
            send = channel.send

            def sent(batch: StoredBatch, handed: Sequence[Handed], max_deliveries: int, end: int) -> None:
                deadline_us = now_us() + settings.ack_timeout_us
                if is_alive():
                    self._checked(lambda: watch.handed(handed, channel.key, deadline_us))
                send(batch, handed, max_deliveries, end)

            channel.send = sent  # type: ignore[method-assign]
            lost = attach(channel, settings, holds)
            self._checked(lambda: watch.kept(holds, lost, channel.key, now_us() + settings.ack_timeout_us))
            return lost

        def answered(answer: QueueAnswer) -> tuple[int, list[int]]:
            now = now_us()
            watch.answering(
                [(offset, lease, seen) for offset, lease, _, seen, _ in answer.nacks],
                [(offset, lease, now + more_us) for offset, lease, more_us in answer.extensions],
            )
            try:
                return take_answer(answer)
            except BraidError:
                watch.refused()
                raise
            finally:
                watch.answered()

        def detached(key: int, *, leave: bool) -> None:
            if leave:
                watch.leaving(key)
            detach(key, leave=leave)
            watch.answered()

        def was_reset(image: QueueImage) -> None:
            self._checked(lambda: watch.reset(image.snapshot(), sought=self._is_sought(segment)))
            reset(image)

        queue.on_events.append(on_events)
        queue.confirmed.follow(on_confirmed, first=True)
        queue.attach = attached  # type: ignore[method-assign]
        queue.answer = answered  # type: ignore[method-assign]
        queue.detach = detached  # type: ignore[method-assign]
        queue.reset = was_reset  # type: ignore[method-assign]
        on_confirmed()

    def _on_confirmed(self, queue: SegmentQueue, watch: QueueWatch, segment: OwnedSegment, broker: Broker) -> None:
        """Look at the disks when acks are confirmed."""
        news = watch.on_confirmed(queue.confirmed.value)
        record = self._cluster.inspector.record(segment.name)
        if not news or record is None:
            return
        if not record.is_held_by(broker.id, segment.epoch):
            raise PromiseBroken("I3", f"{broker.id} confirms acks of {segment.name}; the record is {record}")
        machines = [self._cluster.machines[each] for each in record.replicas or (broker.id,)]
        disks = {machine.id: machine.last_disk or machine.disk for machine in machines}
        place = place_on_disk(segment.name)
        copies = self._cluster.replicas.checker.copies
        quorum = record.write_quorum if record.replicas else 1
        self._count("acks_on_disks", len(news))
        self._journals.check_confirmed(
            place, watch.placement, news, disks, quorum, lambda each: copies.is_member(disks[each], place)
        )

    def _checked(self, check: Callable[[], None]) -> None:
        try:
            check()
        except Exception as error:
            self._cluster.failed(error)

    def look(self, machine: BrokerMachine) -> None:
        """Look at the journals on a disk."""
        if not self.there or self._cluster.durability != "fsync":
            return
        inspector, server = self._cluster.inspector, self._cluster.store._server
        copies = self._cluster.replicas.checker.copies
        for number in self.checker.segments():
            name, known = inspector.name_of(number), self.checker.current(number)
            record = inspector.record(name)
            if known is None or record is None or machine.id not in (record.replicas or (record.owner,)):
                continue
            place = place_on_disk(name)

            def end(name: SegmentName = name, place: str = place) -> int:
                last = max(
                    (each.base_offset + each.records for each in copies.all_batches(machine.disk, place)), default=0
                )
                entry = server.get(paths.current_chunk(name.topic.path, name.descriptor))
                return max(last, decode(Frontier, entry.value).next_offset if entry is not None else 0)

            self._journals.look(machine.disk, machine.id, place, end, known)

    def watch_copies(self, machine: BrokerMachine, broker: Broker) -> None:
        """Look at the disk of a follower whenever its journal has taken something: for a moment, it may be ahead of its
        log."""
        if not self.there:
            return
        handlers = broker.front_door.peer_calls._handlers
        for call in (QUEUE_BEGIN, QUEUE_APPEND):
            handler, shielded = handlers[call]
            handlers[call] = partial(self._watched, handler, machine, broker), shielded

    async def _watched(self, handler: Handler, machine: BrokerMachine, broker: Broker, *arguments: Any) -> Any:
        answer = await handler(*arguments)
        if machine.broker is broker:
            self._checked(lambda: self.look(machine))
        return answer

    def on_transaction(self, operations: Sequence[Operation]) -> None:
        """Look at each cursor that is stored."""
        if not self.there:
            return
        for operation in operations:
            if not isinstance(operation, Put) or paths.subscription_of_cursor(operation.key) != NAME:
                continue
            cursor = decode(Cursor, operation.value)
            descriptor = unquote(operation.key.split("/")[5])
            name = SegmentName.at(f"public/default/{TOPIC}", descriptor)
            on_disk = self._settled_while_opening(name)
            self._checked(partial(self.checker.cursor_stored, name.id, cursor.placement, cursor.offset, on_disk))

    def _settled_while_opening(self, name: SegmentName) -> SettledOffsets | tuple[()]:
        """Return what is settled on the disk of the segment's owner, if that broker is opening its segments."""
        record = self._cluster.inspector.record(name)
        machine = self._cluster.machines[record.owner] if record is not None else None
        if machine is None or machine.broker is not None:
            return ()
        image = self._journals.find(machine.disk, place_on_disk(name))
        return image.settled if image is not None else ()

    # The end.

    async def check_the_end(self, log: dict[int, list[Record | None]]) -> None:
        """Nothing is lost, and each dead letter is there once."""
        if not self.there:
            return
        await self._audit()
        dead = await self._dead_letters()
        self._count("dead_letters", sum(dead.values()))
        self._count("stale_answers", self.checker.stale)
        self._count("time_outs", self.checker.time_outs)
        self.checker.check_dead(dead)
        for segment, records in log.items():
            there = [offset for offset, record in enumerate(records) if record is not None]
            self.checker.check_whole(segment, there, dead)
        if not self._cluster.retention:
            for segment, end in self.pruned.items():
                self.checker.check_whole(segment, range(end), dead)

    async def _audit(self) -> None:
        """An audit of queues that are sound finds nothing: journals, owners, logs and cursors agree."""
        operator = self._cluster.operator

        async def audit() -> None:
            if findings := await operator.client.admin.check_queues(TOPIC):
                raise PromiseBroken("audit", f"queues that are sound have findings: {findings}")

        await operator.surely(audit)

    async def _dead_letters(self) -> Counter[tuple[int, int]]:
        dead: Counter[tuple[int, int]] = Counter()
        if self.topics:
            async with self._cluster.operator.client.checkpoint_consumer(DEAD_LETTERS, start="earliest") as consumer:
                while (batch := await consumer.receive_batch(5.0)) is not None:
                    for message in batch.messages():
                        headers = message.headers
                        names = ("braid-dead-letter-segment", "braid-dead-letter-offset")
                        segment, offset = (int(headers[name]) for name in names)
                        dead[segment, offset] += 1
        return dead


class QueueProgram:
    """What one consumer does."""

    def __init__(
        self, queues: SimulatedQueues, cluster: SimulatedCluster, machine: ClientMachine, consumer: QueueConsumer
    ) -> None:
        self._queues = queues
        self._cluster = cluster
        self._machine = machine
        self._consumer = consumer
        self._random = random = cluster.random
        self._held: list[QueueMessage] = []
        """Messages that are answered later, or never."""
        ways = [
            self._ack_each,
            self._ack_together,
            self._submit,
            self._ack_twice,
            self._ack_late,
            self._nack,
            self._extend,
            self._hold,
        ]
        self._ways = random.choices(ways, k=random.randint(1, 4))

    async def run(self) -> None:
        random, cluster, machine = self._random, self._cluster, self._machine
        left = random.choice([3, 30, 300])
        while not machine.leaving.is_set() and (left > 0 or cluster.settling):
            messages = await self._consumer.receive_many(random.choice([1, 5, 30]), random.choice([0.01, 0.5, 1.0]))
            for message in messages:
                self._queues.got(message)
            left -= len(messages) + 1
            if cluster.settling:
                await self._ack_together([*messages, *self._held])
                self._held.clear()
            elif messages:
                await random.choice(self._ways)(messages)
            if self._held and random.random() < 0.2 and not cluster.settling:
                await self._ack(self._held.pop(random.randrange(len(self._held))))
            if random.random() < 0.1:
                await asyncio.sleep(random.uniform(0, 1.0))

    async def _tolerantly(
        self, message: QueueMessage, work: Awaitable[None], *, ack: bool = False, extends: bool = False
    ) -> bool:
        """Say something about a message; return whether that is stored."""
        try:
            await work
        except AckStale:
            self._queues.checker.refused(place_of(message), message.lease, ack=ack, extends=extends)
            return False
        except BraidError as error:
            if not self._cluster.explains(error):
                raise
            return False
        return True

    async def _ack(self, message: QueueMessage) -> None:
        self._queues.checker.acking(place_of(message), message.lease)
        if await self._tolerantly(message, self._consumer.ack(message), ack=True):
            self._queues.told(message)

    async def _ack_each(self, messages: list[QueueMessage]) -> None:
        self._random.shuffle(messages)
        for message in messages:
            await self._ack(message)

    async def _ack_together(self, messages: list[QueueMessage]) -> None:
        await asyncio.gather(*map(self._ack, messages))

    async def _submit(self, messages: list[QueueMessage]) -> None:
        for message in messages:
            self._queues.checker.acking(place_of(message), message.lease)
            try:
                self._consumer.submit_ack(message)
            except AckStale:
                self._queues.checker.refused(place_of(message), message.lease, ack=True)
                return
        if self._random.random() < 0.7:
            try:
                await self._consumer.flush()
            except AckStale:
                return  # Which of them, is not known.
            except BraidError as error:
                if not self._cluster.explains(error):
                    raise
            else:
                for message in messages:
                    self._queues.told(message)

    async def _ack_twice(self, messages: list[QueueMessage]) -> None:
        await self._ack_together(messages)
        await asyncio.sleep(self._random.choice([0.0, self._queues.ack_timeout_s]))
        await self._ack_together(messages)

    async def _ack_late(self, messages: list[QueueMessage]) -> None:
        await asyncio.sleep(self._queues.ack_timeout_s * self._random.uniform(0.8, 2.0))
        await self._ack_together(messages)

    async def _nack(self, messages: list[QueueMessage]) -> None:
        delay_s = self._random.choice([0.0, 0.0, 0.2, 3.0]) if self._queues.delays else 0.0
        for message in messages:
            if await self._tolerantly(message, self._consumer.nack(message, delay_s, "it did not work")):
                self._queues.nacked()

    async def _extend(self, messages: list[QueueMessage]) -> None:
        timeout_s = self._queues.ack_timeout_s
        for message in messages:
            more_s = timeout_s * self._random.uniform(0.1, 2.0)
            await self._tolerantly(message, self._consumer.extend(message, more_s), extends=True)
        await asyncio.sleep(timeout_s * self._random.uniform(0.1, 1.5))
        await self._ack_together(messages)

    async def _hold(self, messages: list[QueueMessage]) -> None:
        self._held += messages


def place_of(message: QueueMessage) -> Place:
    return Place(message.segment, message.placement, message.offset)


def place_on_disk(name: SegmentName) -> str:
    return f"{name.topic.path}/{name.descriptor}"
