"""What calls answer about topics and their segments.

Metadata says some of it, which every broker knows. Only the owner of a segment knows the rest (`segment_stats.py`), so
that may be missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from braid.broker.admin.reports import TopicReport, Unavailable
from braid.broker.admin.results.fields import Micros, OwnerEpoch, Owners, owners_of
from braid.broker.admin.results.subscriptions import GroupDescription, SubscriptionDescription
from braid.broker.admin.segment_stats import SegmentStatistics, TopicCounts
from braid.model.errors import RecordUnreadable
from braid.model.ids import LayoutEpoch, Offset, SegmentId
from braid.model.layout import HashRange, SegmentInfo, SegmentState
from braid.model.names import SegmentName, TopicName
from braid.model.ownership import Ownership
from braid.model.subscription import Subscription, group_name, is_group
from braid.model.topic import Topic, TopicPolicies


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
    owners: Owners
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
            owners=owners_of(records),
            replicas={id_: each.replicas for id_, each in records.items() if each is not None and each.replicas},
            warnings=topic.policies.warnings,
        )


class StorageLocation(Struct, frozen=True):
    storage: Annotated[
        str, Meta(description="The URL of the topic's chunks and manifests; empty where each broker keeps its own.")
    ]


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
