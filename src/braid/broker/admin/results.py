"""The JSON that administrative calls answer with. PIP-468's shapes and names where it has them.

Everything here is made of values that were gathered before: what metadata says, which every broker knows, and what only
the owner of a segment knows (`segment_stats.py`), which may be missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from braid.broker.admin.reports import TopicReport, Unavailable
from braid.broker.admin.segment_stats import SegmentStatistics
from braid.broker.groups.group import ConsumerStatus
from braid.broker.groups.subscriptions import Progress
from braid.cluster.balancing.plan import BalancePlan
from braid.model.ids import Offset, SegmentId
from braid.model.layout import SegmentInfo
from braid.model.load import LoadReport
from braid.model.names import TopicName
from braid.model.registration import Registration
from braid.model.subscription import Subscription
from braid.model.topic import Topic
from braid.wire.operations import TopicRoute

# What metadata says.


def topic_json(name: TopicName, topic: Topic) -> dict[str, Any]:
    """The layout is PIP-468's JSON as it is stored, with what belongs to the topic beside it."""
    layout = msgspec.to_builtins(topic.layout, str_keys=True)
    return {
        "name": str(name),
        "topicId": topic.id,
        **layout,
        "policies": msgspec.to_builtins(topic.policies),
        "createdAt": topic.created_at,
    }


def broker_json(
    id_: str, registration: Registration, *, state: str, segments: int, leader: bool, load: LoadReport | None
) -> dict[str, Any]:
    return {
        "id": id_,
        **msgspec.to_builtins(registration),
        "state": state,
        "segments": segments,
        "leader": leader,
        "load": _load_json(load),
    }


def down_json(id_: str, segments: int) -> dict[str, Any]:
    """A broker that is not there, and owns segments that wait for it."""
    return broker_json(
        id_, Registration(address="", admin=""), state="down", segments=segments, leader=False, load=None
    )


def _load_json(load: LoadReport | None) -> dict[str, Any] | None:
    """Without the segments one by one: there can be hundreds."""
    if load is None:
        return None
    found: dict[str, Any] = msgspec.to_builtins(load)
    del found["busiest"]
    return found


def plan_json(plan: BalancePlan, *, begun: int, dry_run: bool) -> dict[str, Any]:
    """What balancing does, or would do."""
    return {
        "dryRun": dry_run,
        "begun": begun,
        "spreadBefore": round(plan.spread_before, 3),
        "spreadAfter": round(plan.spread_after, 3),
        "moves": [
            {
                "topic": move.segment.topic_path,
                "segment": move.segment.segment_id,
                "from": move.source,
                "to": move.target,
                "bytesPerS": move.bytes_in_per_s + move.bytes_out_per_s,
                "historyBytes": move.history_bytes,
                "reason": move.reason,
            }
            for move in plan.moves
        ],
        "notes": [{"remark": note.remark.value, "text": note.text} for note in plan.notes],
        "brokers": [
            {
                "id": load.broker,
                "bytesPerSBefore": load.bytes_per_s_before,
                "bytesPerSAfter": load.bytes_per_s_after,
                "segmentsBefore": load.segments_before,
                "segmentsAfter": load.segments_after,
            }
            for load in plan.brokers
        ],
    }


def topology_json(generation: int, routes: list[TopicRoute]) -> dict[str, Any]:
    return {"generation": generation, "topics": [_route_json(route) for route in routes]}


def _route_json(route: TopicRoute) -> dict[str, Any]:
    return {
        "topic": route.topic,
        "topicId": route.topic_id,
        "layoutEpoch": route.layout_epoch,
        "controller": route.controller,
        "segments": [
            {
                "segmentId": segment.id,
                "hashRange": {"start": segment.first_hash, "end": segment.last_hash},
                "active": segment.active,
                "parentIds": list(segment.parents),
                "childIds": list(segment.children),
                "owner": segment.owner,
                "epoch": segment.epoch,
            }
            for segment in route.segments
        ],
    }


# What owners know beside it.


def topic_stats_json(
    name: TopicName,
    topic: Topic,
    report: TopicReport,
    subscriptions: Mapping[str, dict[str, Any]],
) -> dict[str, Any]:
    """`subscriptions`, each as `subscription_json`, by name."""
    return {
        "name": str(name),
        "epoch": topic.layout.epoch,
        "segments": {
            str(info.segment_id): _segment_json(
                info, report.segments.get(info.segment_id), report.unavailable.get(info.segment_id)
            )
            for info in topic.layout.segments.values()
        },
        **msgspec.to_builtins(report.counts),
        "subscriptions": dict(subscriptions),
    }


def _segment_json(
    info: SegmentInfo, known: SegmentStatistics | None, unavailable: Unavailable | None
) -> dict[str, Any]:
    """None stands for what is not known: nobody who answered serves the segment now."""
    unknown = {**dict.fromkeys(SegmentStatistics.__struct_encode_fields__), "owner": _owner(unavailable)}
    return {
        "segmentId": info.segment_id,
        "hashRange": msgspec.to_builtins(info.hash_range),
        "state": info.state.value,
        **(unknown if known is None else msgspec.to_builtins(known)),
        "unavailable": unavailable.reason if unavailable is not None else None,
    }


def _owner(unavailable: Unavailable | None) -> str | None:
    return (unavailable.owner or None) if unavailable is not None else None


def subscription_json(
    name: str,
    subscription: Subscription,
    progress: Mapping[SegmentId, Progress],
    consumers: Mapping[str, ConsumerStatus],
    unavailable: Mapping[SegmentId, Unavailable],
) -> dict[str, Any]:
    """`progress` has the segments whose owners answered, `unavailable` the others; `consumers` are those that the
    group's leader knows."""
    return {
        "name": name,
        "kind": subscription.kind.value,
        "createdAt": subscription.created_at,
        "backlog": sum(each.backlog for each in progress.values()),
        "segments": {
            str(segment): {
                "offset": each.offset,
                "earliest": each.earliest,
                "end": each.end,
                "backlog": each.backlog,
            }
            for segment, each in progress.items()
        },
        "unavailable": {
            str(segment): {"owner": _owner(each), "reason": each.reason} for segment, each in unavailable.items()
        },
        "consumers": {
            consumer: {"segments": list(each.segments), "connected": each.connected}
            for consumer, each in consumers.items()
        },
    }


def offsets_json(offsets: dict[SegmentId, Offset]) -> dict[str, Any]:
    return {"offsets": {str(segment): offset for segment, offset in offsets.items()}}


def some_names(names: list[str]) -> str:
    """For the sentence of an error."""
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
