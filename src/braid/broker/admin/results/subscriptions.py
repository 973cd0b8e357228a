"""What calls answer about subscriptions, queues and groups of checkpoint consumers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

from braid.broker.admin.reports import TopicReport
from braid.broker.admin.results.fields import Micros
from braid.broker.admin.segment_stats import QueueStatistics
from braid.broker.groups.group import ConsumerStatus
from braid.model.errors import RecordUnreadable
from braid.model.ids import Offset, SegmentId
from braid.model.subscription import QueuePolicies, Subscription, SubscriptionKind, group_name
from braid.wire.operations import ENDED


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
    query: Annotated[
        bool,
        Meta(description="Whether it shows how far a query is that keeps its own positions, such as one of Spark."),
    ] = False

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
            query=record is not None and record.query,
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


class PlacedSubscription(Struct, frozen=True):
    offsets: dict[SegmentId, Offset]
