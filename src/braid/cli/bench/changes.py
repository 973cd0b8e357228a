"""What a topic costs after many changes of its layout: a part of `braid bench scale`.

Two brokers share a SQLite file. A topic of some segments is changed again and again: its largest segment is split, or
two neighbours are merged. Each segment gets a record, and retention deletes records soon, so that sealed segments leave
the layout. After each part of the changes the benchmark looks at what there is: the brokers' memory, the metadata, the
routing that is pushed to clients, and how long a lookup by key hash takes.
"""

from __future__ import annotations

import random
import sqlite3
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from braid.cli.bench.machine import rss_bytes
from braid.cli.target import Target, ask

if TYPE_CHECKING:
    from braid.cli.bench.broker import OwnCluster
    from braid.client.client import Client
    from braid.client.routing import TopicMap

TOPIC: Final = "braided"
SEGMENTS: Final = 8
PARTS: Final = 4
RETENTION_MS: Final = 1_000
LOOKUPS: Final = 20_000


class AfterChanges(msgspec.Struct, frozen=True, rename="camel"):
    """What there is after so many changes."""

    changes: int
    segments_made: int
    segments: int
    """That the layout still has."""
    topic_bytes: int
    """Of the topic's record."""
    metadata_keys: int
    metadata_bytes: int
    """Keys and values of everything in the metadata store."""
    push_bytes: int
    lookup_ns: float
    change_ms: float
    """The median since the last look."""
    rss_bytes: int
    """Of all brokers together."""


def measure_often_changed(changes: int, show: Callable[[str], None]) -> list[AfterChanges]:
    from braid.cli.bench.broker import own_cluster

    with own_cluster(2, shared=True) as cluster:
        return ask(Target(url=cluster.url), lambda client: _change_often(client, cluster, changes, show))


async def _change_often(
    client: Client, cluster: OwnCluster, changes: int, show: Callable[[str], None]
) -> list[AfterChanges]:
    await client.admin.create_topic(TOPIC, segments=SEGMENTS, retention_ms=RETENTION_MS)
    draw, found, took_ms = random.Random(1), list[AfterChanges](), list[float]()
    looks = {changes * part // PARTS for part in range(1, PARTS + 1)}
    async with client.producer(TOPIC) as producer:
        for number in range(1, changes + 1):
            await producer.send(b"value", key=b"%d" % number)
            began = time.perf_counter()
            await _change(client, draw)
            took_ms.append((time.perf_counter() - began) * 1e3)
            if number in looks:
                show(f"{number:,} of {changes:,} changes")
                found.append(await _look(client, cluster, number, statistics.median(took_ms)))
                took_ms.clear()
    return found


async def _change(client: Client, draw: random.Random) -> None:
    """Split the largest segment, or merge two neighbours: the number of active segments stays, give or take one."""
    active = (await client.routing.refresh(_path())).active
    if len(active) <= SEGMENTS:
        await client.admin.split(TOPIC, max(active, key=lambda each: each.last_hash - each.first_hash).id)
    else:
        at = draw.randrange(len(active) - 1)
        await client.admin.merge(TOPIC, active[at].id, active[at + 1].id)


async def _look(client: Client, cluster: OwnCluster, changes: int, change_ms: float) -> AfterChanges:
    from braid.metadata import paths
    from braid.wire.operations import encode

    layout: dict[str, Any] = await client.admin.layout(TOPIC)
    routes = await client.routing.refresh(_path())
    brokers = list(cluster.brokers.values())
    metadata = Path(brokers[0].folder).parent / "metadata.db"
    with closing(sqlite3.connect(f"file:{metadata}?mode=ro", uri=True)) as store:
        keys, size = store.execute("SELECT count(*), sum(length(key) + length(value)) FROM entries").fetchone()
        of_topic = store.execute("SELECT length(value) FROM entries WHERE key = ?", (paths.layout(_path()).encode(),))
        topic_bytes = of_topic.fetchone()[0]
    return AfterChanges(
        changes=changes,
        segments_made=layout["nextSegmentId"],
        segments=len(layout["segments"]),
        topic_bytes=topic_bytes,
        metadata_keys=keys,
        metadata_bytes=size,
        push_bytes=len(encode(routes.route)),
        lookup_ns=_lookup_ns(routes),
        change_ms=change_ms,
        rss_bytes=sum(rss_bytes(broker.pid) for broker in brokers),
    )


def _lookup_ns(routes: TopicMap) -> float:
    draw = random.Random(2)
    hashes = [draw.randrange(1 << 16) for _ in range(LOOKUPS)]
    routes.find_active(0)
    began = time.perf_counter_ns()
    for key_hash in hashes:
        routes.find_active(key_hash)
    return (time.perf_counter_ns() - began) / LOOKUPS


def _path() -> str:
    from braid.model.names import TopicName

    return TopicName.parse(TOPIC).path
