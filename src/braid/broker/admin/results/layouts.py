"""What calls answer about a topic's layout, and about a change of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

from braid.broker.admin.results.fields import Micros, Owners, owners_of
from braid.model.ids import LayoutEpoch, SegmentId
from braid.model.layout import HashRange, SegmentInfo
from braid.model.names import TopicName
from braid.model.ownership import Ownership
from braid.model.topic import Topic
from braid.model.transition import TransitionStep


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
    owners: Owners
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
            owners=owners_of(records),
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
