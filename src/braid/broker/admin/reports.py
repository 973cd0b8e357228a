"""What the owners of a topic's segments and its controller know of it, gathered from all of them: how far logs and
subscriptions are, and who consumes.

Every owner is asked once, at the same time, and has a short time to answer. Whoever does not is no reason to show
nothing: its segments are named as unavailable, with the owner and what is wrong.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Final

import msgspec

from braid.broker.admin.segment_stats import (
    QueueStatistics,
    Rates,
    SegmentStatistics,
    TopicCounts,
    queue_statistics,
    segment_statistics,
    topic_counts,
)
from braid.broker.groups.controllers import Controllers
from braid.broker.groups.group import ConsumerStatus
from braid.broker.groups.groups import Groups
from braid.broker.groups.subscriptions import Progress
from braid.broker.metrics import BrokerMetrics
from braid.broker.peers.calls import Arguments, PeerCalls
from braid.broker.segments.segment_access import Ask
from braid.broker.segments.segments import Segments
from braid.broker.topics import Topics
from braid.cluster.drained import DrainedSegments
from braid.cluster.members import Members
from braid.cluster.owners import Owners
from braid.cluster.ownership.move_request import move_progress
from braid.model.errors import BraidError, RecordUnreadable, TopicNotFound
from braid.model.ids import Offset, SegmentId
from braid.model.names import SegmentName, TopicName
from braid.model.ownership import Ownership, OwnershipState
from braid.ports.tasks import all_of
from braid.wire.operations import ENDED

ANSWER_S: Final = 2.0
OLDEST_S: Final = 0.5
"""For reading how old the oldest messages of queues are. Whoever asks must get the rest in time."""


class OwnerReport(msgspec.Struct, frozen=True, kw_only=True):
    """One broker's."""

    segments: dict[SegmentId, SegmentStatistics]
    cursors: dict[SegmentId, dict[str, Offset]]
    counts: TopicCounts
    consumers: dict[str, dict[str, ConsumerStatus]] = {}
    """By subscription, or key of a group, and name; of the topic's controller."""
    positions: dict[str, dict[SegmentId, int]] = {}
    """By key of a group of checkpoint consumers, and segment; of the topic's controller."""
    absent: dict[SegmentId, str] = {}
    """Why the broker does not serve segments that are its own."""
    moved_at: dict[SegmentId, dict[str, int]] = {}
    """By segment and subscription: when its cursor last moved. Earlier versions do not tell."""
    held_bytes: dict[SegmentId, dict[str, int]] = {}
    """By segment and subscription: bytes that retention keeps for it alone."""
    queues: dict[SegmentId, dict[str, QueueStatistics]] = {}
    """By segment and subscription, of those that are queues."""


class Unavailable(msgspec.Struct, frozen=True):
    owner: str
    """A broker's id; empty if there is none."""
    reason: str


class TopicReport(msgspec.Struct, frozen=True, kw_only=True):
    segments: dict[SegmentId, SegmentStatistics]
    cursors: dict[SegmentId, dict[str, Offset]]
    counts: TopicCounts
    """Of all brokers that answered."""
    consumers: dict[str, dict[str, ConsumerStatus]]
    """By subscription, or key of a group, and name; none if the controller did not answer."""
    positions: dict[str, dict[SegmentId, int]]
    """By key of a group of checkpoint consumers, and segment: where its last checkpoint is, or ENDED."""
    moved_at: dict[str, int]
    """By subscription: when one of its cursors last moved, as far as owners tell."""
    held_bytes: dict[str, int]
    """By subscription."""
    sealed: frozenset[SegmentId]
    """The segments that take no writes any more."""
    drained: dict[str, frozenset[SegmentId]]
    """By subscription: the sealed segments of which it has consumed everything."""
    unavailable: dict[SegmentId, Unavailable]
    replicas: dict[SegmentId, tuple[str, ...]] = {}
    """The brokers with copies of segments that are replicated."""
    queues: dict[SegmentId, dict[str, QueueStatistics]] = {}
    """By segment and subscription, of those that are queues."""

    def connected(self, subscription: str | None = None) -> list[str]:
        """The names of the connected consumers, of one subscription or of all."""
        return sorted(
            name
            for each, consumers in self.consumers.items()
            for name, consumer in consumers.items()
            if consumer.connected and subscription in (None, each)
        )

    def group_progress(self, key: str) -> dict[SegmentId, Progress]:
        """Of a group of checkpoint consumers, in the segments for which it has told a position and the owner an end."""
        return {
            segment: Progress(
                Offset(offset if offset != ENDED else ends.end_offset), ends.earliest_offset, ends.end_offset
            )
            for segment, offset in sorted(self.positions.get(key, {}).items())
            if (ends := self.segments.get(segment)) is not None
        }

    def undrained(self, subscription: str) -> list[SegmentId]:
        """The sealed segments that the subscription has not consumed to their ends."""
        return sorted(self.sealed - self.drained.get(subscription, frozenset()))

    def progress(self, subscription: str) -> dict[SegmentId, Progress]:
        """In the segments whose owners answered."""
        return {
            segment: Progress(
                cursors[subscription], ends.earliest_offset, ends.end_offset, self._unsettled(segment, subscription)
            )
            for segment, ends in sorted(self.segments.items())
            if subscription in (cursors := self.cursors[segment])
        }

    def queue(self, subscription: str) -> dict[SegmentId, QueueStatistics]:
        """Of a subscription that is a queue, in the segments whose owners answered."""
        found = ((segment, queues.get(subscription)) for segment, queues in sorted(self.queues.items()))
        return {segment: each for segment, each in found if each is not None}

    def _unsettled(self, segment: SegmentId, subscription: str) -> int | None:
        found = self.queues.get(segment, {}).get(subscription)
        return found.unsettled if found is not None else None


class Reports:
    def __init__(
        self,
        broker_id: str,
        topics: Topics,
        segments: Segments,
        owners: Owners,
        drained: DrainedSegments,
        members: Members,
        metrics: BrokerMetrics,
        groups: Groups,
        controllers: Controllers,
        ask: Ask,
        rates: Rates,
    ) -> None:
        self._broker_id = broker_id
        self._topics = topics
        self._segments = segments
        self._owners = owners
        self._drained = drained
        self._members = members
        self._metrics = metrics
        self._groups = groups
        self._controllers = controllers
        self._ask = ask
        self._rates = rates

    def answer_for(self, calls: PeerCalls) -> None:
        calls.register("report_topic", self._on_call)

    async def of_topic(self, topic: TopicName) -> TopicReport:
        found = self._topics.get(topic.path)
        names = {segment_id: SegmentName.of(topic, info) for segment_id, info in found.layout.segments.items()}
        records = {segment_id: self._owners.find(name) for segment_id, name in names.items()}
        owners = {segment_id: record.owner for segment_id, record in records.items() if record is not None}
        controller = self._controllers.table.get(topic.path)
        wanted = [self._broker_id, *owners.values(), controller.broker if controller is not None else ""]
        asked = [*dict.fromkeys(broker for broker in wanted if broker)]
        answers = await all_of(self._of_broker(each, topic, found.id) for each in asked)
        by_owner = dict(zip(asked, answers, strict=True))
        reports = [each for each in answers if isinstance(each, OwnerReport)]
        segments: dict[SegmentId, SegmentStatistics] = {}
        cursors: dict[SegmentId, dict[str, Offset]] = {}
        consumers: dict[str, dict[str, ConsumerStatus]] = {}
        positions: dict[str, dict[SegmentId, int]] = {}
        queues: dict[SegmentId, dict[str, QueueStatistics]] = {}
        for report in reports:
            queues |= report.queues
            segments |= report.segments
            cursors |= report.cursors
            consumers |= report.consumers
            positions |= report.positions
        unavailable = {
            segment_id: why_unavailable(
                record, by_owner, segment_id, self._down(record), self._owners.unreadable(names[segment_id])
            )
            for segment_id, record in records.items()
            if segment_id not in segments
        }
        counts = _sum(report.counts for report in reports)
        moved_at: dict[str, int] = {}
        held_bytes: Counter[str] = Counter()
        for report in reports:
            for times in report.moved_at.values():
                moved_at |= {name: max(time, moved_at.get(name, 0)) for name, time in times.items()}
            for sizes in report.held_bytes.values():
                held_bytes.update(sizes)
        return TopicReport(
            segments=segments,
            cursors=cursors,
            counts=counts,
            consumers=consumers | consumers_of_queues(queues),
            positions=positions,
            queues=queues,
            moved_at=moved_at,
            held_bytes=held_bytes,
            sealed=frozenset(segment for segment, info in found.layout.segments.items() if not info.is_active),
            drained=self._drained.of_topic(topic.path),
            unavailable=unavailable,
            replicas={id_: record.replicas for id_, record in records.items() if record is not None},
        )

    def _down(self, record: Ownership | None) -> list[str]:
        """The brokers that are gone of those whose disks hold what no other disk does."""
        return [broker for broker in record.keepers if not self._members.is_live(broker)] if record is not None else []

    async def _of_broker(self, broker_id: str, topic: TopicName, topic_id: int) -> OwnerReport | str:
        """Its report, or why there is none."""
        if broker_id == self._broker_id:
            return await self._own(topic)
        if not self._members.is_live(broker_id):
            return f"its owner {broker_id} is down"
        about = {"topic": topic.path, "topic_id": topic_id}
        try:
            answer = await self._ask(broker_id, "report_topic", about, timeout_s=ANSWER_S)
        except BraidError as error:
            return f"broker {broker_id} does not answer for it: {error}"
        return msgspec.convert(answer, OwnerReport)

    async def _on_call(self, arguments: Arguments) -> OwnerReport:
        topic = TopicName.parse(arguments["topic"])
        if self._topics.get(topic.path).id != arguments["topic_id"]:
            raise TopicNotFound(f"topic {topic} was deleted and created again")
        return await self._own(topic)

    async def _own(self, topic: TopicName) -> OwnerReport:
        deadline = asyncio.get_running_loop().time() + OLDEST_S
        queues = {each.name.id: await queue_statistics(each, deadline) for each in self._segments.of_topic(topic.path)}
        owned = self._segments.of_topic(topic.path)  # All that follows is of one moment.
        return OwnerReport(
            segments=segment_statistics(self._broker_id, self._segments, topic, self._rates),
            cursors={each.name.id: each.cursors.all() for each in owned},
            moved_at={each.name.id: each.cursors.all_moved_at() for each in owned},
            held_bytes={each.name.id: each.retention.held for each in owned},
            counts=topic_counts(self._metrics, topic),
            consumers=self._groups.of_topic(topic.path),
            positions=self._groups.positions(topic.path),
            queues={segment: found for segment, found in queues.items() if found},
            absent={
                SegmentId(segment_id): str(error)
                for (path, segment_id), error in self._segments.absent().items()
                if path == topic.path
            },
        )


def consumers_of_queues(
    queues: Mapping[SegmentId, Mapping[str, QueueStatistics]],
) -> dict[str, dict[str, ConsumerStatus]]:
    """Return the consumers of queues by subscription and name. Only owners know them: queues have no groups."""
    attached: dict[str, dict[str, list[int]]] = {}
    for segment, found in sorted(queues.items()):
        for subscription, queue in found.items():
            for consumer in dict.fromkeys(queue.consumers):
                attached.setdefault(subscription, {}).setdefault(consumer, []).append(segment)
    return {
        subscription: {name: ConsumerStatus(tuple(segments), connected=True) for name, segments in sorted(each.items())}
        for subscription, each in attached.items()
    }


def why_unavailable(
    record: Ownership | None,
    answers: Mapping[str, OwnerReport | str],
    segment_id: SegmentId,
    down: Collection[str] = (),
    unreadable: RecordUnreadable | None = None,
) -> Unavailable:
    """Say why a segment is unavailable. `down` are those of the record's keepers that are gone; `unreadable` tells why
    the record that the store has cannot be read."""
    if unreadable is not None:
        return Unavailable(record.owner if record is not None else "", str(unreadable))
    if record is None:
        return Unavailable("", "no broker was given it so far")
    answer = answers[record.owner]
    if record.clean and record.holders and len(down) == len(record.holders):
        reason = f"its history is only on {' and '.join(record.holders)}, which {'are' if len(down) > 1 else 'is'} down"
    elif record.state is OwnershipState.SEALED:  # Whatever its last owner says or does.
        to = record.move.to if record.move is not None else ""
        reason = f"it is moving from broker {record.owner} to {f'broker {to}' if to else 'another one'}"
    elif record.replicas and not record.clean and (record.state is OwnershipState.RECOVERING or record.owner in down):
        reason = _votes(record, down)
    elif isinstance(answer, str):
        reason = answer
    elif (absent := answer.absent.get(segment_id)) is not None:
        reason = f"broker {record.owner} cannot open it: {absent}"
    elif (failure := record.failure_of(record.owner)) is not None:
        reason = f"broker {record.owner} cannot open it: {failure.reason}"
    elif record.state is OwnershipState.ASSIGNED:
        reason = f"broker {record.owner} is opening it"
    elif record.move is not None:
        reason = f"broker {record.owner} is handing it over"
    else:
        reason = "its owner does not serve it at the moment"
    return Unavailable(record.owner, reason)


def _votes(record: Ownership, down: Collection[str]) -> str:
    there = len(record.replicas) - len(down)
    if there >= record.keepers_needed:
        return move_progress(record) if record.state is OwnershipState.RECOVERING else "its replicas take over"
    missing = f"{record.keepers_needed - there} of {', '.join(down)} must come back" if there else "all are down"
    return (
        f"its owner {record.owner} is lost, and {record.keepers_needed} of its replicas "
        f"{', '.join(record.replicas)} must vote: {missing}"
    )


def _sum(counts: Iterable[TopicCounts]) -> TopicCounts:
    total = dict.fromkeys(TopicCounts.__struct_fields__, 0)
    for each in counts:
        for name in total:
            total[name] += getattr(each, name)
    return TopicCounts(**total)
