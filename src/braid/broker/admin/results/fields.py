"""Fields that results of several subjects have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from braid.model.ids import Epoch, SegmentId
from braid.model.ownership import Ownership

Micros = Annotated[int, Meta(description="Microseconds since 1970.")]
OwnerEpoch = Annotated[Epoch, Meta(description="Counts the segment's owners.")]
Owners = Annotated[
    dict[SegmentId, str | None], Meta(description="The broker that has each segment; null while none does.")
]


def owners_of(records: Mapping[SegmentId, Ownership | None]) -> dict[SegmentId, str | None]:
    return {id_: record.owner if record is not None and record.is_owned else None for id_, record in records.items()}
