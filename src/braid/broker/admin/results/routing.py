"""What clients are told: where the segments of topics are."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from braid.model.layout import HashRange
from braid.wire.operations import SegmentRoute, TopicRoute


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
