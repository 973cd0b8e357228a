"""What calls have done that move segments, or recover them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from braid.broker.admin.results.fields import OwnerEpoch
from braid.model.ids import SegmentId


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
