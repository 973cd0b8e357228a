"""What an action will do, before anybody confirms it, and what is under way, in sentences. Pure, so each has a test."""

from __future__ import annotations

import time

from braid.console.numbers import age_text, bytes_text, counted
from braid.console.pages.parts import short_name
from braid.console.watch.history import SegmentSeen
from braid.console.watch.view import BrokerSeen, ClusterView, Json, TopicSeen

_CLIENTS_WAIT = (
    "Publishers and consumers of this range wait a moment, usually well under a second. No record is lost or repeated."
)


def of_move(segment: SegmentSeen, to: str) -> list[str]:
    target = to or "the least loaded broker"
    return [
        f"Segment {segment.id} ({hashes(segment)}) goes from {segment.owner or 'nobody'} to {target}.",
        _CLIENTS_WAIT,
        "If brokers share no storage, its history is copied first, while it is served.",
    ]


def of_split(segment: SegmentSeen, into: int, at: str) -> list[str]:
    parts = f"two segments at hash {at}" if at else f"{into} segments of equal size"
    return [
        f"Segment {segment.id} ({hashes(segment)}) is sealed, and {parts} take its keys.",
        _CLIENTS_WAIT,
        "Consumers read the sealed segment to its end before they read its children, so each key keeps its order.",
    ]


def of_merge(first: SegmentSeen, second: SegmentSeen) -> list[str]:
    return [
        f"Segments {first.id} ({hashes(first)}) and {second.id} ({hashes(second)}) are sealed, and one new segment "
        "takes the keys of both.",
        _CLIENTS_WAIT,
        "Consumers read both to their ends before they read the new one.",
    ]


def neighbour(segment: SegmentSeen, topic: TopicSeen) -> SegmentSeen | None:
    """Return the active segment with which this one can be merged: the next one, or the one before the last."""
    active = sorted((each for each in topic.segments if each.active), key=lambda each: each.first_hash)
    if segment not in active or len(active) < 2:
        return None
    place = active.index(segment)
    return active[place + 1] if place + 1 < len(active) else active[place - 1]


def of_drain(broker: BrokerSeen, others: int) -> list[str]:
    if not others:
        return [f"{broker.id} is the only active broker: its segments have nowhere to go. Start another one first."]
    segments, to = counted(broker.segments, "segment"), counted(others, "broker")
    return [
        f"{broker.id} hands over {segments} to the other {to}, a few at a time.",
        f"{broker.id} gets no new segments until it is activated again.",
        _CLIENTS_WAIT,
    ]


def of_activate(broker: BrokerSeen) -> list[str]:
    return [f"{broker.id} may own segments again. Nothing moves to it by itself immediately; balance to even the load."]


def of_balance(plan: Json) -> list[str]:
    moves = [
        f"{each['topic']} segment {each['segment']}: {each['from']} → {each['to']} "
        f"({bytes_text(each['bytesPerS']) + '/s' if each['bytesPerS'] else 'idle'})"
        for each in plan["moves"]
    ]
    notes = [each["text"] for each in plan["notes"]]
    if not moves:
        return ["Nothing would move.", *notes]
    if plan["spreadBefore"] == plan["spreadAfter"]:
        spread = "The load stays as it is; the numbers of segments are evened."
    else:
        spread = f"The busiest broker has {plan['spreadBefore']:.2f} × the mean load, then {plan['spreadAfter']:.2f} ×."
    return [spread, *moves[:12], *([f"… and {len(moves) - 12} more"] if len(moves) > 12 else []), *notes]


def of_delete_topic(topic: TopicSeen) -> list[str]:
    size = f", {bytes_text(topic.stored_bytes)}" if topic.stored_bytes is not None else ""
    return [
        f"{topic.path} goes with its {counted(len(topic.segments), 'segment')}, all records{size} and all "
        "subscriptions.",
        "Nothing brings it back.",
    ]


def of_seek(subscription: str, where: str) -> list[str]:
    return [
        f"{subscription} continues at {where}. Its consumers are repositioned.",
        "Records that it has consumed before may come again; records in between may be left out.",
    ]


def of_skip(subscription: str, backlog: int) -> list[str]:
    left_out = counted(backlog, "record")
    return [f"{subscription} leaves out {left_out} that it has before it. It never gets what it leaves out."]


def of_redrive(subscription: str, dead_letters: str) -> list[str]:
    return [
        f"The dead letters of {subscription} in {dead_letters} are published to their topic again.",
        "Every subscription of that topic gets them. They stay in the dead-letter topic, and are redriven only once.",
    ]


def hashes(segment: SegmentSeen) -> str:
    return f"{segment.first_hash:04x}–{segment.last_hash:04x}"


# What is under way.


def change_text(change: Json) -> str:
    """Say in a sentence what is under way."""
    topic, segments = short_name(change["topic"]), ", ".join(map(str, change["segments"]))
    match change["kind"]:
        case "layout":
            children = ", ".join(map(str, change["children"]))
            return f"{topic}: segment {segments} → {children} ({change['step'].lower()})"
        case "move":
            to = ", ".join(change["to"]) or "another broker"
            return f"{topic}: segment {segments} moves from {change['from']} to {to}"
        case "vote":
            return f"{topic}: the replicas of segment {segments} vote; its owner {change['from']} is gone"
        case "replicas":
            return f"{topic}: copies of segment {segments} go to {', '.join(change['to']) or 'nobody any more'}"
        case _:
            return f"{topic}: {change['from']} opens segment {segments}"


def since_text(change: Json) -> str:
    return f"for {age_text(time.time() - change['since'] / 1e6)}" if change["since"] else change["step"].lower()


def changes_of(view: ClusterView, topic: str) -> list[str]:
    """Return the sentences about one topic."""
    return [change_text(each) for each in view.changes if each["topic"] == topic]
