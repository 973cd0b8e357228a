"""The inspector of a simulated cluster: it looks into the brokers all along, and knows when everything has settled."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from braid.broker.broker import Broker
from braid.broker.groups.group import Group
from braid.broker.segments.delivery import DeliveryChannel
from braid.broker.segments.owned_segment import OwnedSegment
from braid.broker.segments.read_grants import ReadGrant
from braid.client.producing.open_batch import ProducerBatch
from braid.metadata import paths
from braid.model.batch.columns import decode_messages
from braid.model.batch.header import BatchHeader
from braid.model.errors import SegmentSealed
from braid.model.ids import Offset, Revision, SegmentId
from braid.model.names import SegmentName, TopicName
from braid.model.ownership import Ownership, OwnershipState
from braid.model.stored_record import decode
from braid.model.subscription import Cursor, is_group
from braid.model.topic import Topic
from braid.storage.history.catalog import Frontier
from braid.storage.log.log import Appended
from braid.testing.checkers.history import PromiseBroken
from braid.testing.checkers.ownership_checker import Segment
from braid.testing.checkers.topic_history import Record
from braid.testing.checkers.transition_checker import TransitionChecker
from braid.testing.scenarios.clients import RACED, TOPIC
from braid.testing.scenarios.machine import BrokerMachine

if TYPE_CHECKING:
    from braid.testing.scenarios.cluster import SimulatedCluster

PATH: Final = f"public/default/{TOPIC}"
LOOK_S: Final = 0.05
LAST_REQUEST_BYTES: Final = 1 << 20
"""A connection may exceed its limit of bytes in flight by the request that reaches the limit."""

Log = dict[int, list[Record | None]]
"""By segment, all records from offset 0 on; None for those that retention has deleted."""


class Inspector:
    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self.transitions: Final = TransitionChecker(
            PATH, lambda: cluster.layouts.segments(PATH), self.segments, cluster.failed
        )
        self._two_leaders = False
        self._known: dict[OwnedSegment, Broker] = {}
        self._confirmed: dict[int, int] = {}
        """By segment, up to where consumers could see it last."""
        self._highest: dict[int, int] = {}
        """By segment, up to where consumers could see it at any time."""
        self._servers: dict[int, Broker] = {}
        """By segment, the broker that opened it last."""
        self._epochs: dict[int, int] = {}
        """By segment, in which epoch something was confirmed last."""
        self._read_grants: dict[OwnedSegment, dict[str, ReadGrant]] = defaultdict(dict)
        """By segment that is open and subscription, the highest that its owner has let read."""
        self._least_ends: dict[int, int] = {}
        """By segment that was continued with a loss, what chunks had when the loss was accepted."""
        self._cursors_seen: dict[OwnedSegment, Revision] = {}
        """By segment that is open, the revision of the store at which its stored cursors were looked at last."""
        self._topic: tuple[Revision, Topic] | None = None
        """The topic as it was last read."""

    # ── all along ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._count_leaders()
            for machine in self._cluster.machines.values():
                self._look_now(machine)
                if self._cluster.transitions and machine.up:
                    await self._look_at_change(machine)

    def _count_leaders(self) -> None:
        """Count how often a second broker begins to believe that it leads the cluster."""
        brokers = [machine.broker for machine in self._cluster.machines.values() if machine.broker is not None]
        two = sum(broker.cluster.leader.leading for broker in brokers) > 1
        self._cluster.counts.two_leaders += two and not self._two_leaders
        self._two_leaders = two

    async def _look_at_change(self, machine: BrokerMachine) -> None:
        assert machine.broker is not None
        try:
            await self.transitions.look(machine.broker)
        except PromiseBroken as error:
            self._cluster.failed(error)

    def look_around(self) -> None:
        for machine in self._cluster.machines.values():
            self.look(machine)

    def follow(self, machine: BrokerMachine) -> None:
        """Meet each segment when the broker opens it: before any client can get something of it."""
        broker = machine.broker
        assert broker is not None
        broker.segments.on_open.append(lambda _: self._look_now(machine))
        self._follow_groups(broker)
        self.transitions.follow(broker)
        self._cluster.queues.watch_copies(machine, broker)
        self._cluster.replicas.delay_answers(broker)
        self._cluster.queues.follow(machine, broker)
        machine.last_disk = None
        self.look(machine)

    def _look_now(self, machine: BrokerMachine) -> None:
        try:
            self.look(machine)
        except Exception as error:
            self._cluster.failed(error)

    def look(self, machine: BrokerMachine) -> None:
        broker = machine.broker
        if broker is None or machine.frozen:
            return
        if broker.failed.done():
            raise broker.failed.result()
        self._check_lease(broker)
        self._cluster.replicas.check_files(machine)
        self._cluster.queues.look(machine)
        for segment in broker.segments.of_topic(PATH):
            if segment not in self._known:
                self._meet(segment, broker)
            self._check_channels(segment)
            self._check_cursors(segment, broker)
            self._cluster.replicas.check_producers(segment)
            self._cluster.history.deleted(segment.name.id, segment.earliest)
        if self._cluster.transitions:
            self._check_reading_order(broker)
        for session in broker.front_door.server._sessions:
            if session._bytes > broker.config.limits.max_bytes_in_flight + LAST_REQUEST_BYTES:
                raise PromiseBroken("I12", f"a connection of {broker.id} has {session._bytes} bytes in flight")

    def _meet(self, segment: OwnedSegment, broker: Broker) -> None:
        """A segment was opened since the last look."""
        self._known[segment] = broker
        number, start = segment.name.id, segment.storage.start
        if self._servers.get(number) is broker:
            self._cluster.counts.segments_reopened += 1
        self._servers[number] = broker
        self._cluster.history.recovered(number, start.offset, self._cluster.simulation.clock.monotonic())
        least = self._least_ends.pop(number, 0)
        if start.offset < least:
            raise PromiseBroken("I2", f"{segment.name} goes on at {start.offset}, chunks had reached {least}")
        record = self.record(segment.name)
        if record is not None and record.is_held_by(broker.id, segment.epoch):
            self._cluster.history.begins(number, segment.earliest)
        self.transitions.meet(segment, record)
        self._cluster.queues.meet(segment, broker)
        self._follow(segment, broker)

    def _follow(self, segment: OwnedSegment, broker: Broker) -> None:
        """I3: what is confirmed is confirmed by its owner, under a lease that lives, in no earlier epoch.
        I7: no channel sends more than that."""
        confirmed, number = segment.storage.log.confirmed, segment.name.id
        channels: list[DeliveryChannel] = []
        value = self._confirmed[number] = confirmed.value
        self._highest[number] = max(value, self._highest.get(number, 0))

        def rises() -> None:
            channels[:] = segment._channels  # A channel of a log that fails sends what it has, and is forgotten.

        def risen() -> None:
            nonlocal value
            for channel in channels:
                if channel.offset > confirmed.value:
                    what = (
                        f"{segment.name} is confirmed to {confirmed.value} on {broker.id}, and sent to {channel.offset}"
                    )
                    self._cluster.failed(PromiseBroken("I7", what))
            if confirmed.value <= value:
                return
            value = self._confirmed[number] = confirmed.value
            self._highest[number] = max(value, self._highest[number])
            what = f"{segment.name} confirmed {value} on {broker.id} in epoch {segment.epoch}"
            record = self.record(segment.name)
            if not broker.cluster.registration.may_act():
                self._cluster.failed(PromiseBroken("I3", f"{what}, whose lease it knows to be over"))
            if self._cluster.store._server.get(paths.broker(broker.id)) is None:
                self._cluster.failed(PromiseBroken("I3", f"{what} without a lease"))
            if record is not None and not record.is_held_by(broker.id, segment.epoch):
                self._cluster.failed(PromiseBroken("I3", f"{what}; the record is {record}"))
            if segment.epoch < self._epochs.get(number, 0):
                self._cluster.failed(PromiseBroken("I3", f"{what}, after epoch {self._epochs[number]} had confirmed"))
            self._epochs[number] = segment.epoch
            if record is not None:
                self._cluster.replicas.on_confirmed(segment.name, value - 1, record)

        confirmed.follow(rises, first=True)
        confirmed.follow(risen)
        self._follow_retries(segment, broker)
        self._follow_channels(segment, broker)

    def _follow_channels(self, segment: OwnedSegment, broker: Broker) -> None:
        """Look at each channel when it is opened: one that should not be there may be closed a moment later."""
        add_channel = segment.add_channel

        def added(channel: DeliveryChannel) -> None:
            add_channel(channel)
            try:
                self._check_reading_order(broker)
            except PromiseBroken as error:
                self._cluster.failed(error)

        segment.add_channel = added  # type: ignore[method-assign]

    def _follow_retries(self, segment: OwnedSegment, broker: Broker) -> None:
        """I3: an owner that knows its lease to be over says nothing of what an ended log has."""
        log = segment.storage.log
        recognise = log._recognise

        def recognised(header: BatchHeader) -> Appended:
            known = False
            try:
                answer, known = recognise(header), True
                return answer
            except SegmentSealed:
                known = True
                raise
            finally:
                if known and not broker.cluster.registration.may_act():
                    what = f"{broker.id} says what the ended log of {segment.name} has; its lease is over"
                    self._cluster.failed(PromiseBroken("I3", what))

        log._recognise = recognised  # type: ignore[method-assign]

    def _check_lease(self, broker: Broker) -> None:
        """I3: a broker that acts by its lease acts no longer than the store keeps the lease."""
        registration = broker.cluster.registration
        if not registration.may_act():
            return
        lease = registration.lease
        expires_at = self._cluster.store._server.expires_at(lease.id)
        if expires_at is None or lease.deadline > expires_at:
            raise PromiseBroken("I3", f"{broker.id} may act until {lease.deadline}, its lease ends at {expires_at}")

    def check_settled(self, batch: ProducerBatch) -> None:
        """I10: no broker says of a batch that it has stored that it was not stored."""
        if batch.duplicate and not batch.doubtful:
            self._cluster.failed(
                PromiseBroken("I10", f"all copies of a batch were refused, and one was at {batch.base_offset} before")
            )

    def check_seen(self, segment: int, offset: int) -> None:
        """I7: a record that a consumer got was confirmed before."""
        confirmed = self._highest.get(segment, 0)
        if offset >= confirmed:
            raise PromiseBroken(
                "I7", f"a consumer saw offset {offset} of segment {segment}, which was confirmed up to {confirmed}"
            )

    def _check_channels(self, segment: OwnedSegment) -> None:
        """I4: at most one consumer of a subscription has a segment, and none that had to give it up."""
        names = [channel.subscription for channel in segment._channels if channel.subscription is not None]
        if len(names) > len(set(names)):
            channels = [(each.subscription, each.number) for each in segment._channels]
            raise PromiseBroken("I4", f"{segment.name} is delivered twice to one subscription: {channels}")
        highest = self._read_grants[segment]
        for name, read_grant in segment.read_grants._highest.items():
            if read_grant < highest.get(name, read_grant):
                raise PromiseBroken("I4", f"{segment.name} went from {highest[name]} of {name} back to {read_grant}")
            highest[name] = read_grant

    def _check_reading_order(self, broker: Broker) -> None:
        """I4: as far as the owner of a segment knows, nobody reads it whose subscription has not drained its
        ancestors."""
        topic, marks = broker.cluster.topics.find(PATH), broker.cluster.drained
        if topic is None:
            return
        for segment in broker.segments.of_topic(PATH):
            there = segment.name.id in topic.layout.segments
            for channel in segment._channels if there else ():
                name = channel.subscription
                if name is None or is_group(name):
                    continue
                if left := {*topic.layout.ancestors(segment.name.id)} - marks.of(PATH, name):
                    raise PromiseBroken("I4", f"{broker.id} lets {name} read {segment.name} before {sorted(left)}")

    def _follow_groups(self, broker: Broker) -> None:
        """Look at each group whenever its controller has given out segments."""
        give_out = broker.groups._pass

        def given_out(group: Group) -> None:
            give_out(group)
            try:
                self._check_group(broker, group)
            except PromiseBroken as error:
                self._cluster.failed(error)

        broker.groups._pass = given_out  # type: ignore[method-assign]

    def _check_group(self, broker: Broker, group: Group) -> None:
        """I4: as far as a controller knows, a consumer gets a segment, or keeps it, only when all of its ancestors are
        drained; and no ancestor is given out again before the segment was given back. Of a group of checkpoint
        consumers it knows nothing before all of them are back."""
        topic = broker.cluster.topics.find(group.topic.path)
        if is_group(group.subscription) and group.holders and not group.complete:
            raise PromiseBroken("I4", f"{broker.id} gives out {sorted(group.holders)} before all consumers are back")
        if topic is None or is_group(group.subscription):
            return
        layout, drained = topic.layout, broker.cluster.drained.of(group.topic.path, group.subscription)
        for segment in group.holders.keys() & layout.segments.keys():
            left = {*layout.ancestors(segment)} - drained
            again = [each for each in left if group.grants.get(each, 0) > group.grants[segment]]
            if again or (left and segment not in group.asked_back):
                what = f"{group.subscription} has segment {segment} on {broker.id} beside {sorted(left)}"
                raise PromiseBroken("I4", f"{what}: grants {group.grants}, asked back {sorted(group.asked_back)}")

    def _check_cursors(self, segment: OwnedSegment, broker: Broker) -> None:
        """No cursor lies beyond the end, and no stored one beyond what a crash leaves of the log."""
        for name, offset in segment.cursors.all().items():
            if offset > segment.end:
                raise PromiseBroken("I5", f"{name} stands at {offset} of {segment.name}, which ends at {segment.end}")
        revision = self._cluster.store._server.history.revision
        if self._cursors_seen.get(segment) == revision:
            return  # What is stored has not changed, and what is synced stays so.
        self._cursors_seen[segment] = revision
        record = self.record(segment.name)
        if record is None or record.owner != broker.id or self._servers[segment.name.id] is not broker:
            return  # Cursors are about the log of another owner.
        for entry in self._cluster.store._server.list(paths.cursors_prefix(PATH, segment.name.descriptor)).entries:
            offset, synced = decode(Cursor, entry.value).offset, segment.storage.log.synced.value
            if offset > synced:
                raise PromiseBroken("I2", f"{entry.key} is stored at {offset}, the log is synced to {synced}")

    # ── what checkers and faults report and ask ──────────────────────────────────────────────────────────────────────

    def ends_on(self, machine: BrokerMachine) -> dict[int, int]:
        """Where the segments ended that this machine served last."""
        return {number: end for number, end in self._confirmed.items() if self._servers[number].id == machine.id}

    def acked_on(self, machine: BrokerMachine) -> dict[tuple[str, int], int]:
        """By subscription and segment, up to where the acks reach that have arrived at this machine."""
        assert machine.broker is not None
        return {
            (name, segment.name.id): offset
            for segment in machine.broker.segments.of_topic(PATH)
            for name, offset in segment.cursors.all().items()
        }

    def check_stored(self, acked: dict[tuple[str, int], int]) -> None:
        """An owner may still remember the cursor of a subscription that was deleted."""
        for (name, segment), offset in acked.items():
            stored = self.stored_cursor(name, segment)
            is_there = self._cluster.store._server.get(paths.subscription(PATH, name)) is not None
            if stored < offset and is_there and segment in self.segments():
                raise PromiseBroken(
                    "acks",
                    f"the cursor of {name} in segment {segment} was at {offset}, an orderly stop stored {stored}",
                )

    def on_accepted_loss(self, segment: Segment, record: Ownership, frontier: Frontier | None) -> None:
        """`record` is what the loss gives up."""
        for failure in record.failures:
            works = not self._cluster.machines[failure.broker].disk_failed
            if failure.broker in record.keepers and failure.lasting and works:
                raise PromiseBroken("I2", f"{segment} is given up, and the disk of its keeper works: {failure}")
        if segment[0] == PATH:
            number = int(segment[1].rpartition("-")[2])
            self._least_ends[number] = frontier.next_offset if frontier is not None else 0
            self.transitions.forget_end(number)
            self._cluster.history.lost({number: self._confirmed.get(number, 0)})
            self._cluster.history.stopped()

    def on_sealing(self, path: str, descriptor: str, record: Ownership) -> None:
        """A broker keeps its files until the seal is written: before that, they are the log. Only a log that has ended
        may be in chunks as a whole before that, and only a topic that is being deleted needs no log."""
        topic = self._cluster.store._server.get(paths.layout(path))
        if topic is None or Topic.from_json(topic.value).deleting:
            return
        entry = self._cluster.store._server.get(paths.current_chunk(path, descriptor))
        if entry is not None and decode(Frontier, entry.value).complete:
            return
        paths_there = self._cluster.machines[record.owner].disk.paths()
        if not any(f"{path}/{descriptor}/" in each and each.endswith(".wal") for each in paths_there):
            raise PromiseBroken("I2", f"{record.owner} seals {descriptor} of {path}, and its files are gone")

    def on_sealed(self, segment: Segment, record: Ownership) -> None:
        """A broker that hands a segment over has stored every ack that had arrived."""
        for known, broker in self._known.items():
            if (known.name.topic.path, known.name.descriptor) != segment:
                continue
            if (broker.id, known.epoch) != (record.owner, record.epoch):
                continue
            for name, offset in known.cursors.all().items():
                entry = self._cluster.store._server.get(paths.cursor(*segment, name))
                if entry is not None and decode(Cursor, entry.value).offset < offset:
                    raise PromiseBroken(
                        "acks", f"{segment} is sealed; {name} was at {offset}, {entry.value!r} is stored"
                    )

    def on_record(self, path: str, descriptor: str, record: Ownership) -> bool:
        """Return whether this record is the first one that says that a log of the topic has ended."""
        if path != PATH or record.ended_at is None:
            return False
        number = SegmentName.at(path, descriptor).id
        ended = [
            known
            for known, broker in self._known.items()
            if (known.name.id, known.epoch, broker.id) == (number, record.epoch, record.owner)
        ]
        return any(self.transitions.note_end(each) for each in ended)

    def on_pruned(self, path: str, segment: SegmentId, end: Offset) -> None:
        """A call deletes a segment only when every subscription has left it (I5)."""
        if path != PATH:
            return
        for name in (*self._cluster.subscriptions, *self._cluster.queues.names, RACED):
            mark = paths.drained(PATH, self.name_of(segment).descriptor, name)
            if not self._cluster.retention and self._cluster.store._server.get(mark) is None:
                raise PromiseBroken("I5", f"segment {segment} is deleted, and {name} is not marked as drained there")
        self._cluster.history.pruned(segment, end)
        self._cluster.queues.pruned[segment] = end

    # ── how far everything is ────────────────────────────────────────────────────────────────────────────────────────

    def record(self, name: SegmentName) -> Ownership | None:
        entry = self._cluster.store._server.get(paths.ownership(name.topic.path, name.descriptor))
        return Ownership.from_json(entry.value) if entry is not None else None

    def topic(self) -> Topic:
        """Read the topic as the metadata store has it."""
        entry = self._cluster.store._server.get(paths.layout(PATH))
        assert entry is not None, "the topic is there from the beginning to the end"
        if self._topic is None or self._topic[0] != entry.revision:
            self._topic = entry.revision, Topic.from_json(entry.value)
        return self._topic[1]

    def segments(self) -> list[int]:
        """Return the segments of the layout, and those that are to come into it."""
        return sorted(self.topic().segments)

    def name_of(self, segment: int) -> SegmentName:
        known = self._cluster.layouts.segments(PATH)
        return SegmentName.of(TopicName.parse(PATH), known[SegmentId(segment)])

    def stored_cursor(self, subscription: str, segment: int) -> int:
        """What the metadata store has, -1 for nothing."""
        entry = self._cluster.store._server.get(paths.cursor(PATH, self.name_of(segment).descriptor, subscription))
        return decode(Cursor, entry.value).offset if entry is not None else -1

    def end(self, segment: int) -> int:
        """Up to where consumers could see it last."""
        return self._confirmed.get(segment, 0)

    def least_end(self, segment: int) -> int:
        """Of one that is being continued with a loss: what chunks have of it."""
        return self._least_ends.get(segment, 0)

    def records(self) -> dict[int, Ownership]:
        records = {segment: self.record(self.name_of(segment)) for segment in self.segments()}
        return {segment: record for segment, record in records.items() if record is not None}

    def owners(self) -> dict[int, str]:
        return {segment: record.owner for segment, record in self.records().items()}

    def served(self) -> dict[int, OwnedSegment]:
        """Those whose owner serves them, in the record's epoch, with no move ahead."""
        served: dict[int, OwnedSegment] = {}
        for segment in self.segments():
            record = self.record(self.name_of(segment))
            if record is None or record.state is not OwnershipState.SERVING or record.move is not None:
                continue
            broker = self._cluster.machines[record.owner].broker
            here = broker.segments.of_topic(PATH) if broker is not None else []
            served.update((segment, each) for each in here if each.name.id == segment and each.epoch == record.epoch)
        return served

    def has_lost(self) -> bool:
        """Whether a segment waits for a broker that is gone, or that cannot open it."""
        records = [self.record(self.name_of(segment)) for segment in self.segments()]
        return any(
            record.state is not OwnershipState.SEALED
            and (record.failures or self._cluster.store._server.get(paths.broker(record.owner)) is None)
            for record in records
            if record is not None
        )

    def all_registered(self) -> bool:
        return all(self._cluster.store._server.get(paths.broker(name)) is not None for name in self._cluster.machines)

    def all_served(self) -> bool:
        """Whether each segment is served, and the active ones take what is published."""
        served = self.served()
        active = [served.get(each.segment_id) for each in self.topic().layout.active]
        return len(served) == len(self.segments()) and all(each is not None and each.takes_publishes for each in active)

    def layout_is_steady(self) -> bool:
        """Whether no transition is under way, and nothing is left of segments that the topic does not have."""
        entries = self._cluster.store._server.list(paths.topic_segments_prefix(PATH)).entries
        there = {found[1] for entry in entries if (found := paths.segment_of_ownership(entry.key)) is not None}
        names = {self.name_of(segment).descriptor for segment in self.segments()}
        return self.topic().transition is None and there == names

    def is_finalized(self) -> bool:
        return self._cluster.store._server.get(paths.transition(PATH)) is None

    def all_read(self) -> bool:
        served = self.served()
        ends = {number: segment.end for number, segment in served.items()}
        return len(served) == len(self.segments()) and not any(
            self._cluster.history.missing(name, ends) for name in self._cluster.subscriptions
        )

    def all_acked(self) -> bool:
        served = self.served()
        return len(served) == len(self.segments()) and all(
            max(segment.cursors.all()[name], segment.earliest) == segment.end
            for segment in served.values()
            for name in (*self._cluster.subscriptions, *self._cluster.queues.names)
        )

    def whereabouts(self) -> str:
        served = self.served()
        ends = {number: segment.end for number, segment in served.items()}
        records = {number: self.record(self.name_of(number)) for number in self.segments()}
        missing = {name: self._cluster.history.missing(name, ends)[:5] for name in self._cluster.subscriptions}
        cursors = {number: segment.cursors.all() for number, segment in served.items()}
        brokers = [each.broker for each in self._cluster.machines.values() if each.broker is not None]
        absent = {broker.id: broker.segments.absent() for broker in brokers}
        members = {(each.id, name): each.groups.members(PATH, name) for each in brokers for name in missing}
        topic = self.topic()
        followers = {number: segment.followers for number, segment in served.items()}
        return f"{topic=}, {records=}, {ends=}, {missing=}, {members=}, {cursors=}, {absent=}, {followers=}"

    async def read_storage(self) -> Log:
        """Straight from storage: offsets without a gap (I1), epochs that never go back (I3)."""
        log: Log = {}
        for number, segment in self.served().items():
            records, epoch = log.setdefault(number, [None] * segment.earliest), 0
            reader = segment.storage.reader(segment.earliest)
            while batches := await reader.read_available():
                for header, data in batches:
                    if header.epoch < epoch:
                        raise PromiseBroken("I3", f"{segment.name}: epoch {header.epoch} stands after {epoch}")
                    epoch = header.epoch
                    for message in decode_messages(data, header):
                        if message.offset != len(records):
                            raise PromiseBroken(
                                "I1", f"{segment.name} has {message.offset} where {len(records)} is due"
                            )
                        records.append((message.value, message.key))
            if len(records) != segment.end:
                raise PromiseBroken("I1", f"{segment.name} ends at {segment.end} and holds {len(records)} records")
        return log

    async def read_as_client(self, log: Log) -> Log:
        """What a checkpoint consumer gets from the beginning, as many records as there are."""
        read: Log = {segment: [each for each in records if each is None] for segment, records in log.items()}
        left = sum(each is not None for records in log.values() for each in records)
        async with self._cluster.operator.client.checkpoint_consumer(TOPIC, start="earliest") as consumer:
            while left > 0:
                batch = await consumer.receive_batch(60.0)
                if batch is None:
                    raise PromiseBroken("progress", f"a reader waits for {left} records, without any fault")
                for message in batch.messages():
                    left -= 1
                    if message.offset != len(read[message.segment]):
                        raise PromiseBroken("I1", f"a reader got {message.segment}@{message.offset} out of order")
                    read[message.segment].append((message.value, message.key))
        return read
