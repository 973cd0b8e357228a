"""Changes that are under way anywhere in the cluster."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from braid.broker.admin.results.fields import Micros
from braid.model.ids import SegmentId
from braid.model.ownership import Ownership, OwnershipState
from braid.model.topic import Topic

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
