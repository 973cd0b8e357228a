"""Layouts that were changed often: 5,000 splits and merges, with and without pruning.

    python -m benchmarks.layouts [--quick]

A topic with 16 segments is changed: its largest segment is split, and two neighbours are merged. Each change replaces
parents by children, so 5,000 changes make some 10,000 segments. With pruning, a sealed segment leaves the layout some
changes later, as it does when retention has deleted its records; without, all stay. A topic that was never changed
stands beside both. The sizes are those of the topic's record in the metadata store, and of the routing that is pushed
to a client.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import deque
from collections.abc import Callable

from benchmarks.report import Report
from braid.client.routing import TopicMap
from braid.model.ids import SegmentId
from braid.model.layout import LAST_HASH, Layout
from braid.model.topic import Topic
from braid.model.transition import plan_merge, plan_split
from braid.wire.operations import SegmentRoute, TopicRoute, encode

SEGMENTS = 16
KEPT_CHANGES = 50
"""How many changes a sealed segment outlives, with pruning."""


def changed(topic: Topic, draw: random.Random) -> Topic:
    """Split the largest segment, or merge two neighbours: the number of segments stays, give or take one."""
    active = topic.layout.active
    at = draw.randrange(len(active) - 1)
    if len(active) > SEGMENTS:
        plan = plan_merge(topic.layout, active[at].segment_id, active[at + 1].segment_id)
    else:
        plan = plan_split(topic.layout, max(active, key=lambda each: len(each.hash_range)).segment_id)
    return topic.beginning(plan, transition_id=1, created_at=0).committed()


def change_often(changes: int, *, prune: bool) -> tuple[Topic, list[float]]:
    """Return the topic after so many changes, and how long each took."""
    topic, draw = Topic(id=1, layout=Layout.initial(SEGMENTS)), random.Random(1)
    sealed: deque[tuple[SegmentId, ...]] = deque()
    taken = []
    for _ in range(changes):
        began = time.perf_counter()
        before = set(topic.layout.active)
        topic = changed(topic, draw)
        taken.append(time.perf_counter() - began)
        sealed.append(tuple(sorted(each.segment_id for each in before - set(topic.layout.active))))
        while prune and len(sealed) > KEPT_CHANGES:
            for segment in sealed.popleft():
                topic = topic.pruned(segment)
    return topic, taken


def route_of(topic: Topic) -> TopicRoute:
    routes = (
        SegmentRoute(
            each.segment_id,
            each.hash_range.start,
            each.hash_range.end,
            each.is_active,
            each.parent_ids,
            each.child_ids,
            "10.0.0.1:6650",
            1,
        )
        for each in topic.layout.segments.values()
    )
    return TopicRoute("public/default/orders", topic.id, topic.layout.epoch, tuple(routes), "10.0.0.1:6650")


def each_s(work: Callable[[int], object], hashes: list[int]) -> float:
    began = time.perf_counter()
    for key_hash in hashes:
        work(key_hash)
    return (time.perf_counter() - began) / len(hashes)


def measure(report: Report, case: str, topic: Topic, taken: list[float], lookups: int) -> None:
    draw = random.Random(2)
    hashes = [draw.randint(0, LAST_HASH) for _ in range(lookups)]
    client = TopicMap(1, route_of(topic))
    client.find_active(0)
    topic.layout.find_active(0)
    data = topic.to_json()
    facts = {"segments": len(topic.layout.segments), "active": len(topic.layout.active)}
    report.add(f"{case}: lookup by hash, client", each_s(client.find_active, hashes) * 1e9, "ns", **facts)
    report.add(f"{case}: lookup by hash, broker", each_s(topic.layout.find_active, hashes) * 1e9, "ns", **facts)
    report.add(f"{case}: a push", len(encode(client.route)), "bytes", **facts)
    report.add(f"{case}: the topic's record", len(data), "bytes", **facts)
    began = time.perf_counter()
    Topic.from_json(data)
    report.add(f"{case}: read the record", (time.perf_counter() - began) * 1e3, "ms", **facts)
    if taken:
        last = sorted(taken[-len(taken) // 10 :])
        report.add(f"{case}: a change, median of the last tenth", last[len(last) // 2] * 1e3, "ms", **facts)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    changes, lookups = (200, 1_000) if quick else (5_000, 200_000)
    report = Report("layouts")
    measure(report, "never changed", Topic(id=1, layout=Layout.initial(SEGMENTS)), [], lookups)
    measure(report, f"{changes:,} changes, pruned", *change_often(changes, prune=True), lookups)
    measure(report, f"{changes:,} changes, all kept", *change_often(changes, prune=False), lookups)
    report.print()
    report.write_jsonl()


if __name__ == "__main__":
    main()
