"""What administrative calls answer. PIP-468's shapes and names where it has them. Fields may be added.

Everything here is made of values that were gathered before: what metadata says, which every broker knows, and what only
the owner of a segment knows (`segment_stats.py`), which may be missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from braid.broker.admin.reports import TopicReport, Unavailable
from braid.broker.admin.segment_stats import QueueStatistics, SegmentStatistics, TopicCounts
from braid.broker.groups.group import ConsumerStatus
from braid.cluster.balancing.plan import BalancePlan, Proposed, Remark
from braid.model.cluster import Registration
from braid.model.errors import RecordUnreadable
from braid.model.ids import Epoch, LayoutEpoch, Offset, SegmentId
from braid.model.layout import HashRange, SegmentInfo, SegmentState
from braid.model.load import LoadReport
from braid.model.names import SegmentName, TopicName
from braid.model.ownership import Ownership, OwnershipState
from braid.model.subscription import QueuePolicies, Subscription, SubscriptionKind, group_name, is_group
from braid.model.topic import Topic, TopicPolicies
from braid.model.transition import TransitionStep
from braid.wire.operations import ENDED, SegmentRoute, TopicRoute

Micros = Annotated[int, Meta(description="Microseconds since 1970.")]
OwnerEpoch = Annotated[Epoch, Meta(description="Counts the segment's owners.")]
BrokerStatus = Literal["active", "draining", "drained", "stopping", "down"]

# What metadata says.


class TopicDescription(Struct, frozen=True, kw_only=True, rename="camel"):
    """The layout is PIP-468's JSON as it is stored, with what belongs to the topic beside it."""

    name: str
    topic_id: int
    epoch: Annotated[LayoutEpoch, Meta(description="Counts the topic's layouts.")]
    next_segment_id: SegmentId
    segments: dict[SegmentId, SegmentInfo]
    properties: dict[str, str]
    policies: TopicPolicies
    created_at: Micros
    owners: Annotated[
        dict[SegmentId, str | None], Meta(description="The broker that has each segment; null while none does.")
    ]
    replicas: Annotated[
        dict[SegmentId, tuple[str, ...]], Meta(description="The brokers with copies of segments that are replicated.")
    ] = {}
    warnings: Annotated[
        tuple[str, ...], Meta(description="What these policies mean when a broker is lost, where that may surprise.")
    ] = ()

    @classmethod
    def of(cls, name: TopicName, topic: Topic, records: Mapping[SegmentId, Ownership | None]) -> TopicDescription:
        return cls(
            name=str(name),
            topic_id=topic.id,
            epoch=topic.layout.epoch,
            next_segment_id=topic.layout.next_segment_id,
            segments=topic.layout.segments,
            properties=topic.layout.properties,
            policies=topic.policies,
            created_at=topic.created_at,
            owners=_owners(records),
            replicas={id_: each.replicas for id_, each in records.items() if each is not None and each.replicas},
            warnings=topic.policies.warnings,
        )


class StorageLocation(Struct, frozen=True):
    storage: Annotated[
        str, Meta(description="The URL of the topic's chunks and manifests; empty where each broker keeps its own.")
    ]


class LoadSummary(Struct, frozen=True, kw_only=True, rename="camel"):
    """Its report, without the segments one by one: there can be hundreds."""

    at: Micros
    cpu: Annotated[float, Meta(description="Of one core.")]
    bytes_in_per_s: int
    bytes_out_per_s: int
    records_in_per_s: int
    segments: int
    backlog_bytes: int | None
    adopted_generation: Annotated[
        int | None, Meta(description="The oldest routing that one of its clients works with.")
    ]


class BrokerDescription(Struct, frozen=True, kw_only=True, rename="camel"):
    id: str
    address: str
    admin: str
    version: str
    started_at: Micros
    state: BrokerStatus
    segments: Annotated[int, Meta(description="That it owns.")]
    replicas: Annotated[int, Meta(description="Segments of others of which it holds copies.")]
    labels: dict[str, str]
    leader: Annotated[bool, Meta(description="Whether it leads the cluster.")]
    load: Annotated[LoadSummary | None, Meta(description="Its last report; null if there is none.")]
    obstacles: Annotated[list[str], Meta(description="Why segments of a draining broker do not move; some of them.")]

    @classmethod
    def of(
        cls,
        id_: str,
        registration: Registration,
        *,
        state: BrokerStatus,
        segments: int,
        replicas: int = 0,
        leader: bool = False,
        load: LoadReport | None = None,
        obstacles: Sequence[str] = (),
    ) -> BrokerDescription:
        return cls(
            id=id_,
            address=registration.address,
            admin=registration.admin,
            version=registration.version,
            started_at=registration.started_at,
            labels=registration.labels,
            state=state,
            segments=segments,
            replicas=replicas,
            leader=leader,
            obstacles=list(obstacles),
            load=msgspec.convert(load, LoadSummary | None, from_attributes=True),
        )

    @classmethod
    def of_down(cls, id_: str, segments: int, replicas: int = 0) -> BrokerDescription:
        """A broker that is not there, and has segments or copies of them that wait for it."""
        return cls.of(id_, Registration(address="", admin=""), state="down", segments=segments, replicas=replicas)


class PlannedMove(Struct, frozen=True, kw_only=True, rename="camel"):
    topic: str
    segment: int
    source: str = msgspec.field(name="from")
    to: str
    bytes_per_s: int
    history_bytes: int
    reason: str

    @classmethod
    def of(cls, move: Proposed) -> PlannedMove:
        return cls(
            topic=move.segment.topic_path,
            segment=move.segment.segment_id,
            source=move.source,
            to=move.target,
            bytes_per_s=move.bytes_in_per_s + move.bytes_out_per_s,
            history_bytes=move.history_bytes,
            reason=move.reason,
        )


class PlanNote(Struct, frozen=True):
    remark: Remark
    text: str


class PlannedLoad(Struct, frozen=True, kw_only=True, rename="camel"):
    broker: str = msgspec.field(name="id")
    bytes_per_s_before: int
    bytes_per_s_after: int
    segments_before: int
    segments_after: int


class BalanceResult(Struct, frozen=True, kw_only=True, rename="camel"):
    """What balancing does, or would do."""

    dry_run: bool
    begun: Annotated[int, Meta(description="How many moves have begun.")]
    spread_before: Annotated[float, Meta(description="The load of the busiest broker by the mean.")]
    spread_after: float
    moves: list[PlannedMove]
    notes: list[PlanNote]
    brokers: list[PlannedLoad]

    @classmethod
    def of(cls, plan: BalancePlan, *, begun: int, dry_run: bool) -> BalanceResult:
        return cls(
            dry_run=dry_run,
            begun=begun,
            spread_before=round(plan.spread_before, 3),
            spread_after=round(plan.spread_after, 3),
            moves=[PlannedMove.of(move) for move in plan.moves],
            notes=msgspec.convert(plan.notes, list[PlanNote], from_attributes=True),
            brokers=msgspec.convert(plan.brokers, list[PlannedLoad], from_attributes=True),
        )


class RoutedSegment(Struct, frozen=True, kw_only=True, rename="camel"):
    segment_id: int
    hash_range: HashRange
    active: bool
    parent_ids: tuple[int, ...]
    child_ids: tuple[int, ...]
    owner: Annotated[str, Meta(description="An address; empty while nobody serves it.")]
    epoch: int

    @classmethod
    def of(cls, segment: SegmentRoute) -> RoutedSegment:
        return cls(
            segment_id=segment.id,
            hash_range=HashRange(segment.first_hash, segment.last_hash),
            active=segment.active,
            parent_ids=segment.parents,
            child_ids=segment.children,
            owner=segment.owner,
            epoch=segment.epoch,
        )


class RoutedTopic(Struct, frozen=True, kw_only=True, rename="camel"):
    topic: str
    topic_id: int
    layout_epoch: int
    controller: Annotated[str, Meta(description="The address where consumers join; empty if any broker will do.")]
    segments: list[RoutedSegment]

    @classmethod
    def of(cls, route: TopicRoute) -> RoutedTopic:
        return cls(
            topic=route.topic,
            topic_id=route.topic_id,
            layout_epoch=route.layout_epoch,
            controller=route.controller,
            segments=[RoutedSegment.of(segment) for segment in route.segments],
        )


class ClusterRouting(Struct, frozen=True):
    generation: Annotated[int, Meta(description="The metadata revision that this reflects.")]
    topics: list[RoutedTopic]


ChangeKind = Literal["layout", "move", "opening", "vote", "replicas"]


class ClusterChange(Struct, frozen=True, kw_only=True, rename="camel"):
    """A change that is under way somewhere in the cluster."""

    kind: Annotated[
        ChangeKind,
        Meta(
            description="`opening`: the segment's owner opens it; `vote`: its replicas vote for an owner; `replicas`: "
            "another set of brokers gets copies."
        ),
    ]
    topic: Annotated[str, Meta(description="`tenant/namespace/name`")]
    segments: Annotated[tuple[SegmentId, ...], Meta(description="Of a layout, the parents.")]
    children: Annotated[tuple[SegmentId, ...], Meta(description="Of a layout.")] = ()
    step: Annotated[str, Meta(description="The state of the layout's change, or of the segment's ownership.")]
    source: Annotated[str, Meta(description="The segment's owner; empty for a layout.")] = msgspec.field(
        name="from", default=""
    )
    to: Annotated[tuple[str, ...], Meta(description="The brokers that get the segment, or copies of it.")] = ()
    since: Annotated[Micros | None, Meta(description="When it began; null if that is not stored.")] = None

    @classmethod
    def of_topic(cls, path: str, topic: Topic) -> ClusterChange | None:
        change = topic.transition
        if change is None:
            return None
        return cls(
            kind="layout",
            topic=path,
            segments=change.parents,
            children=change.child_ids,
            step=change.step.value,
            since=change.created_at,
        )

    @classmethod
    def of_segment(cls, path: str, segment: SegmentId, record: Ownership) -> ClusterChange | None:
        """Describe what happens with the segment by its record; None if it is served and nothing else is wanted."""
        kind: ChangeKind
        to: tuple[str, ...] = ()
        if record.state is OwnershipState.RECOVERING:
            kind = "vote"
        elif record.move is not None or record.state in (OwnershipState.DRAINING, OwnershipState.SEALED):
            kind, to = "move", (record.move.to,) if record.move is not None and record.move.to else ()
        elif record.state is OwnershipState.ASSIGNED:
            kind = "opening"
        elif record.change is not None:
            kind, to = "replicas", record.change.replicas
        else:
            return None
        return cls(kind=kind, topic=path, segments=(segment,), step=record.state.value, source=record.owner, to=to)


# What owners know beside it.


class SegmentDescription(Struct, frozen=True, kw_only=True, rename="camel"):
    """Null stands for what is not known: no broker that answered serves the segment now."""

    segment_id: SegmentId
    hash_range: HashRange
    state: SegmentState | None = None
    owner: str | None = None
    epoch: OwnerEpoch | None = None
    replicas: Annotated[tuple[str, ...], Meta(description="The brokers with copies of it, its owner included.")] = ()
    earliest_offset: Offset | None = None
    end_offset: Offset | None = None
    records: int | None = None
    bytes: int | None = None
    bytes_in_per_s: Annotated[int | None, Meta(description="Published, lately.")] = None
    bytes_out_per_s: Annotated[int | None, Meta(description="Sent to consumers, lately.")] = None
    records_in_per_s: Annotated[int | None, Meta(description="Published, lately.")] = None
    chunks: Annotated[int | None, Meta(description="Objects of its history.")] = None
    chunk_bytes: int | None = None
    exported_offset: Annotated[
        Offset | None, Meta(description="Chunks hold everything below; the rest is only in logs.")
    ] = None
    log_bytes: Annotated[int | None, Meta(description="Of its owner's log files, also what chunks hold already.")] = (
        None
    )
    hot_key_hashes: Annotated[
        HashRange | None, Meta(description="The hashes of a key that is most of its load, where that is measured.")
    ] = None
    hot_key_share: Annotated[float | None, Meta(description="Of its load.")] = None
    unavailable: Annotated[str | None, Meta(description="Why nothing is known of it now; null if it is.")] = None

    @classmethod
    def of(
        cls,
        info: SegmentInfo,
        known: SegmentStatistics | None,
        unavailable: Unavailable | None,
        replicas: tuple[str, ...] = (),
    ) -> SegmentDescription:
        described = cls(segment_id=info.segment_id, hash_range=info.hash_range, state=info.state, replicas=replicas)
        if known is not None:
            return msgspec.structs.replace(described, **msgspec.structs.asdict(known))
        if unavailable is not None:
            owner = unavailable.owner or None
            return msgspec.structs.replace(described, owner=owner, unavailable=unavailable.reason)
        return described


class SubscriptionProgress(Struct, frozen=True):
    offset: Annotated[Offset, Meta(description="Everything below is consumed.")]
    earliest: Offset
    end: Offset
    backlog: int
    drained: Annotated[bool, Meta(description="Whether the segment is sealed and all of it is consumed.")] = False
    queue: Annotated[QueueStatistics | None, Meta(description="Of a queue; null if it is none.")] = None


class UnavailableSegment(Struct, frozen=True):
    owner: Annotated[str | None, Meta(description="The broker that has it, if one does.")]
    reason: str


class QueueDescription(Struct, frozen=True, kw_only=True, rename="camel"):
    """Of all segments whose owners answered. `segments` of the subscription has each of them."""

    ready: int
    leased: int
    delayed: int
    dead_lettered: Annotated[
        int, Meta(description="Since the segments' owners opened them: a restart or a move begins again at 0.")
    ]
    oldest_at: Annotated[
        Micros | None,
        Meta(description="When the oldest unsettled message was published; null: none is, as far as known."),
    ]
    blocked: Annotated[dict[SegmentId, str], Meta(description="Why segments hand out no new messages.")]
    policies: QueuePolicies

    @classmethod
    def of(cls, policies: QueuePolicies, found: Mapping[SegmentId, QueueStatistics]) -> QueueDescription:
        known = found.values()
        return cls(
            ready=sum(each.ready for each in known),
            leased=sum(each.leased for each in known),
            delayed=sum(each.delayed for each in known),
            dead_lettered=sum(each.dead_lettered for each in known),
            oldest_at=min((each.oldest_at for each in known if each.oldest_at is not None), default=None),
            blocked={segment: each.blocked for segment, each in found.items() if each.blocked},
            policies=policies,
        )


class SubscriptionDescription(Struct, frozen=True, kw_only=True, rename="camel"):
    name: str
    kind: Annotated[SubscriptionKind | None, Meta(description="Null if the record cannot be read.")]
    created_at: Annotated[Micros | None, Meta(description="Null if the record cannot be read.")]
    moved_at: Annotated[Micros | None, Meta(description="When it last acked or was placed; null if no owner tells.")]
    held_bytes: Annotated[
        int, Meta(description="Bytes that have outlived the topic's retention and are kept because it needs them.")
    ]
    backlog: Annotated[int, Meta(description="Records that it has before it, in the segments whose owners answered.")]
    segments: dict[SegmentId, SubscriptionProgress]
    unavailable: Annotated[
        dict[SegmentId, UnavailableSegment], Meta(description="Segments whose owner did not answer.")
    ]
    consumers: Annotated[dict[str, ConsumerStatus], Meta(description="Those that the group's leader knows.")]
    undrained: Annotated[
        list[SegmentId],
        Meta(description="Sealed segments that it has not consumed to their ends; it reads their children after that."),
    ] = []
    unreadable: Annotated[
        str | None, Meta(description="Why its record cannot be read, so that no consumer can join; null if it can.")
    ] = None
    queue: Annotated[QueueDescription | None, Meta(description="Of a queue; null if it is none.")] = None

    @classmethod
    def of(
        cls, name: str, subscription: Subscription | RecordUnreadable, report: TopicReport
    ) -> SubscriptionDescription:
        """What metadata says of it, with what the segments' owners and the topic's controller know."""
        record = subscription if isinstance(subscription, Subscription) else None
        progress, drained = report.progress(name), report.drained.get(name, frozenset())
        queue = report.queue(name) if record is not None and record.kind is SubscriptionKind.QUEUE else {}
        return cls(
            name=name,
            kind=record.kind if record is not None else None,
            created_at=record.created_at if record is not None else None,
            moved_at=report.moved_at.get(name),
            held_bytes=report.held_bytes.get(name, 0),
            backlog=sum(each.backlog for each in progress.values()),
            segments={
                segment: SubscriptionProgress(
                    each.offset, each.earliest, each.end, each.backlog, segment in drained, queue.get(segment)
                )
                for segment, each in progress.items()
            },
            unavailable={
                segment: UnavailableSegment(each.owner or None, each.reason)
                for segment, each in report.unavailable.items()
            },
            consumers=report.consumers.get(name, {}),
            undrained=report.undrained(name),
            unreadable=str(subscription) if record is None else None,
            queue=QueueDescription.of(record.queue, queue)
            if record is not None and record.kind is SubscriptionKind.QUEUE
            else None,
        )


class GroupProgress(Struct, frozen=True, rename="camel"):
    offset: Annotated[int, Meta(description="The next offset after the group's last checkpoint.")]
    end_offset: int
    backlog: int
    ended: Annotated[bool, Meta(description="Whether the segment is sealed, and a checkpoint has its end.")]


class GroupDescription(Struct, frozen=True, kw_only=True, rename="camel"):
    """A group of checkpoint consumers. It exists while it has consumers, and keeps no records from retention."""

    name: str
    backlog: Annotated[int, Meta(description="Records after its last checkpoints, in the segments that have one.")]
    segments: Annotated[
        dict[SegmentId, GroupProgress], Meta(description="Those for which a consumer has told a checkpoint.")
    ]
    consumers: Annotated[dict[str, ConsumerStatus], Meta(description="Those that the topic's controller knows.")]

    @classmethod
    def of(cls, key: str, report: TopicReport) -> GroupDescription:
        progress, told = report.group_progress(key), report.positions.get(key, {})
        return cls(
            name=group_name(key),
            backlog=sum(each.backlog for each in progress.values()),
            segments={
                segment: GroupProgress(each.offset, each.end, each.backlog, told[segment] == ENDED)
                for segment, each in progress.items()
            },
            consumers=report.consumers[key],
        )


class TopicStatistics(TopicCounts, frozen=True, kw_only=True, rename="camel"):
    """Counts since the broker started."""

    name: str
    epoch: Annotated[LayoutEpoch | None, Meta(description="Counts the topic's layouts; null if it is unavailable.")]
    segments: dict[SegmentId, SegmentDescription]
    subscriptions: dict[str, SubscriptionDescription]
    groups: Annotated[
        dict[str, GroupDescription], Meta(description="Groups of checkpoint consumers, which have no subscription.")
    ]
    unavailable: Annotated[
        str | None, Meta(description="Why nothing is known of the topic but its name and segments; null if more is.")
    ] = None

    @classmethod
    def of(
        cls,
        name: TopicName,
        topic: Topic,
        subscriptions: Mapping[str, Subscription | RecordUnreadable],
        report: TopicReport,
    ) -> TopicStatistics:
        return cls(
            name=str(name),
            epoch=topic.layout.epoch,
            segments={
                id_: SegmentDescription.of(
                    info, report.segments.get(id_), report.unavailable.get(id_), report.replicas.get(id_, ())
                )
                for id_, info in topic.layout.segments.items()
            },
            **msgspec.structs.asdict(report.counts),
            subscriptions={
                each: SubscriptionDescription.of(each, found, report) for each, found in sorted(subscriptions.items())
            },
            groups={
                group_name(key): GroupDescription.of(key, report) for key in sorted(report.consumers) if is_group(key)
            },
        )

    @classmethod
    def of_unreadable(cls, name: TopicName, segments: Iterable[SegmentName], reason: str) -> TopicStatistics:
        """Describe a topic whose record the broker cannot read. Other records name its segments."""
        return cls(
            name=str(name),
            epoch=None,
            segments={
                each.id: SegmentDescription(segment_id=each.id, hash_range=each.range, unavailable=reason)
                for each in segments
            },
            **dict.fromkeys(TopicCounts.__struct_fields__, 0),
            subscriptions={},
            groups={},
            unavailable=reason,
        )


# What calls have done.


class MovedSegment(Struct, frozen=True, kw_only=True):
    segment: SegmentId
    source: str = msgspec.field(name="from")
    to: str
    epoch: OwnerEpoch
    seconds: float
    moved: Annotated[bool, Meta(description="False if it was there already.")]


class MovedTopic(Struct, frozen=True):
    topic: str
    segments: list[MovedSegment]


class RecoveredSegment(MovedSegment, frozen=True, kw_only=True):
    loss: Annotated[str, Meta(description="What is lost, as far as it is known.")]


class RecoveredTopic(Struct, frozen=True):
    topic: str
    segments: list[RecoveredSegment]


class ChangedLayout(Struct, frozen=True, rename="camel"):
    topic: str
    epoch: Annotated[LayoutEpoch, Meta(description="Of the layout after the change.")]
    parents: tuple[SegmentId, ...]
    children: tuple[SegmentId, ...]
    seconds: float
    done_before: Annotated[bool, Meta(description="Whether the layout had the change already when the call came.")] = (
        False
    )


class TransitionDescription(Struct, frozen=True, kw_only=True, rename="camel"):
    """A change of the layout that is under way."""

    id: Annotated[int, Meta(description="Random: names this change, and no other.")]
    step: TransitionStep
    parents: tuple[SegmentId, ...]
    children: dict[SegmentId, HashRange]
    since: Micros
    waits_for: Annotated[tuple[str, ...], Meta(description="What it waits for, in sentences.")]


class LayoutDescription(Struct, frozen=True, kw_only=True, rename="camel"):
    """PIP-468's JSON as it is stored, with the owners and the change that is under way beside it."""

    name: str
    epoch: Annotated[LayoutEpoch, Meta(description="Counts the topic's layouts.")]
    next_segment_id: SegmentId
    segments: dict[SegmentId, SegmentInfo]
    properties: dict[str, str]
    owners: Annotated[
        dict[SegmentId, str | None], Meta(description="The broker that has each segment; null while none does.")
    ]
    transition: TransitionDescription | None

    @classmethod
    def of(
        cls,
        name: TopicName,
        topic: Topic,
        records: Mapping[SegmentId, Ownership | None],
        waits_for: tuple[str, ...],
    ) -> LayoutDescription:
        change = topic.transition
        return cls(
            name=str(name),
            epoch=topic.layout.epoch,
            next_segment_id=topic.layout.next_segment_id,
            segments=topic.layout.segments,
            properties=topic.layout.properties,
            owners=_owners(records),
            transition=None
            if change is None
            else TransitionDescription(
                id=change.id,
                step=change.step,
                parents=change.parents,
                children=change.ranges,
                since=change.created_at,
                waits_for=waits_for,
            ),
        )


def _owners(records: Mapping[SegmentId, Ownership | None]) -> dict[SegmentId, str | None]:
    return {id_: record.owner if record is not None and record.is_owned else None for id_, record in records.items()}


class PlacedSubscription(Struct, frozen=True):
    offsets: dict[SegmentId, Offset]


def some_names(names: list[str]) -> str:
    """For the sentence of an error."""
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
