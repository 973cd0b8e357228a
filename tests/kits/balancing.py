"""Clusters in a few words, for the tests of placing and balancing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from braid.cluster.balancing.plan import BalancePlan, Proposed
from braid.model.cluster import RACK, BrokerState, BrokerView, ClusterLoad, SegmentPlacement, SegmentRef
from braid.model.ids import SegmentId
from braid.model.load import LoadReport, SegmentLoad, busiest_of

NOON_US = 1_700_000_000_000_000
SECOND_US = 1_000_000
MB = 1_000_000

TOPIC = "public/default/orders"


def ref(number: int, topic: str = TOPIC) -> SegmentRef:
    return SegmentRef(topic, SegmentId(number))


def brokers(*ids: str, racks: Mapping[str, str] | None = None) -> tuple[BrokerView, ...]:
    known = racks or {}
    return tuple(BrokerView(id=each, labels={RACK: known[each]} if each in known else {}) for each in ids)


def replicated(segment: SegmentRef, *replicas: str) -> SegmentPlacement:
    """A segment with these replicas; the first one owns it."""
    return SegmentPlacement(
        topic_path=segment.topic_path, segment_id=segment.segment_id, owner=replicas[0], replicas=replicas
    )


def owned(
    by_broker: Mapping[str, Iterable[SegmentRef]], moving: Iterable[SegmentRef] = ()
) -> tuple[SegmentPlacement, ...]:
    under_way = set(moving)
    return tuple(
        SegmentPlacement(topic_path=each.topic_path, segment_id=each.segment_id, owner=broker, moving=each in under_way)
        for broker, segments in by_broker.items()
        for each in segments
    )


def report(
    segments: Mapping[SegmentRef, int],
    *,
    at: int = NOON_US,
    cpu: float = 0.0,
    history: Mapping[SegmentRef, int] | None = None,
    rest: int = 0,
) -> LoadReport:
    """What a broker says that serves these, at these bytes per second, of which it takes in a third."""
    sizes = history or {}
    loads = [
        SegmentLoad(
            topic_path=segment.topic_path,
            segment_id=segment.segment_id,
            bytes_in_per_s=rate // 3,
            bytes_out_per_s=rate - rate // 3,
            history_bytes=sizes.get(segment, 0),
        )
        for segment, rate in segments.items()
    ]
    bytes_in = sum(load.bytes_in_per_s for load in loads)
    return LoadReport(
        at=at,
        cpu=cpu,
        bytes_in_per_s=bytes_in,
        bytes_out_per_s=sum(segments.values()) - bytes_in + rest,
        segments=len(loads),
        busiest=busiest_of(loads),
    )


def cluster(
    rates: Mapping[str, Mapping[SegmentRef, int]],
    *,
    at: int = NOON_US,
    states: Mapping[str, BrokerState] | None = None,
    dead: Iterable[str] = (),
    moving: Iterable[SegmentRef] = (),
    cpu: Mapping[str, float] | None = None,
    history: Mapping[SegmentRef, int] | None = None,
    copies_history: bool = False,
) -> ClusterLoad:
    """Brokers with their segments and the bytes per second of each; dead ones have no report."""
    gone = set(dead)
    return ClusterLoad(
        brokers=tuple(
            BrokerView(id=broker, state=(states or {}).get(broker, BrokerState.ACTIVE), live=broker not in gone)
            for broker in rates
        ),
        owned=owned(rates, moving),
        loads={
            broker: report(segments, at=at, cpu=(cpu or {}).get(broker, 0.0), history=history)
            for broker, segments in rates.items()
            if broker not in gone
        },
        copies_history=copies_history,
    )


def moved(plan: BalancePlan) -> list[tuple[SegmentRef, str, str]]:
    return [(move.segment, move.source, move.target) for move in plan.moves]


def remarks(plan: BalancePlan) -> list[str]:
    return [note.remark.value for note in plan.notes]


def after(rates: Mapping[str, Mapping[SegmentRef, int]], moves: Iterable[Proposed]) -> dict[str, dict[SegmentRef, int]]:
    """Who serves what once the moves are done."""
    result = {broker: dict(segments) for broker, segments in rates.items()}
    for move in moves:
        result[move.target][move.segment] = result[move.source].pop(move.segment)
    return result
