"""What calls answer about brokers, and about balancing the load between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from braid.broker.admin.results.fields import Micros
from braid.cluster.balancing.plan import BalancePlan, Proposed, Remark
from braid.model.cluster import Registration
from braid.model.load import LoadReport

BrokerStatus = Literal["active", "draining", "drained", "stopping", "down"]


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
