"""`braid bench scale`: how a split, a merge and a repartition affect producers and consumers, beside a move in one run.

Two brokers, a producer and a consumer run in their own processes. The benchmark fills the topic. Then it moves, splits,
merges and repartitions the topic again and again, while records with keys are sent and received at a steady rate. The
pause is the longest time until a record that was due around the change was confirmed, or received. Records that are
lost, repeated, or out of order for their key are counted. Afterwards another topic is changed very often, and the
benchmark looks at what it costs then.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from braid.cli.bench.machine import machine_facts, machine_text, rss_bytes
from braid.cli.bench.move import AFTER_NS, BEFORE_NS, TOPIC, move_all, under_load
from braid.cli.bench.workload import Steady
from braid.cli.target import Target, ask
from braid.cli.terminal.output import Column, bytes_text, json_option, print_json, print_table
from braid.cli.terminal.param_types import SIZE
from braid.cli.terminal.spinner import status_line

if TYPE_CHECKING:
    from braid.cli.bench.broker import OwnCluster
    from braid.client.client import Client
    from braid.client.routing import TopicMap

KEYS: Final = 1_024
REST_S: Final = 1.0
OF_A_MOVE: Final = 2.0
"""How many times the pause of a move a change of the layout may take."""
OF_SMALL_HISTORY: Final = 1.5
OF_FEWER_CHANGES: Final = 1.25
"""How many times the memory, and the time of a change, after a quarter of all changes they may be after all."""
CHANGED_TOPIC: Final = "braided"
SEGMENTS: Final = 8
PARTS: Final = 4
RETENTION_MS: Final = 1_000
LOOKUPS: Final = 20_000

Change = tuple[str, Callable[["Client"], Awaitable[object]]]


@click.command()
@click.option(
    "--history",
    "histories",
    type=SIZE,
    multiple=True,
    default=("10MiB", "4GiB"),
    show_default=True,
    help="The size of the topic before the changes; may be repeated.",
)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="How often each is measured.")
@click.option("--rate", type=click.FloatRange(min=1), default=20_000, show_default=True, help="Records per second.")
@click.option("--size", type=SIZE, default=100, show_default=True, help="Bytes of a value.")
@click.option(
    "--changes",
    type=click.IntRange(min=0),
    default=1_000,
    show_default=True,
    metavar="N",
    help="Then change another topic so often, and look at what it costs. 0: do not.",
)
@json_option
def scale(histories: tuple[int, ...], rounds: int, rate: float, size: int, changes: int, as_json: bool) -> None:
    """Start two brokers, and change the layout of a topic under load.

    \b
    braid bench scale
    braid bench scale --history 10MiB --rounds 3 --rate 5000
    braid bench scale --history 10MiB --rounds 1 --changes 5000
    """
    rows: list[ScaleResult] = []
    for history in histories:
        with status_line(f"{bytes_text(history)} of history") as show:
            rows.append(measure_changes(ScaleCase(history, rounds, rate, size), show))
    after: list[AfterChanges] = []
    if changes:
        with status_line(f"{changes:,} changes") as show:
            after = measure_often_changed(changes, show)
    print_rows(rows, after, as_json=as_json)


class ScaleCase(msgspec.Struct, frozen=True):
    history_bytes: int
    rounds: int
    rate: float
    size: int


class Pauses(msgspec.Struct, frozen=True, rename="camel"):
    """Of one kind of change, a number for each time that it was made."""

    change: str
    took_ms: list[float]
    producer_ms: list[float]
    consumer_ms: list[float]


class ScaleResult(msgspec.Struct, frozen=True, rename="camel"):
    history_bytes: int
    records: int
    lost: int
    """Or out of order for their key."""
    twice: int
    errors: int
    changes: list[Pauses]


async def _split(client: Client) -> object:
    return await client.admin.split(TOPIC, (await _active(client))[0])


async def _merge(client: Client) -> object:
    first, second, *_ = await _active(client)
    return await client.admin.merge(TOPIC, first, second)


async def _active(client: Client) -> list[int]:
    """The segments that take writes, in the order of their ranges."""
    segments = (await client.admin.layout(TOPIC))["segments"].values()
    active = sorted(
        (each for each in segments if each["state"] == "ACTIVE"), key=lambda each: each["hashRange"]["start"]
    )
    return [each["segmentId"] for each in active]


def _repartition(count: int) -> Callable[[Client], Awaitable[object]]:
    return lambda client: client.admin.repartition(TOPIC, count)


ROUND: Final[tuple[Change, ...]] = (
    ("move", move_all),
    ("split", _split),
    ("merge", _merge),
    ("1 → 4", _repartition(4)),
    ("4 → 7", _repartition(7)),
    ("7 → 1", _repartition(1)),
)


def measure_changes(case: ScaleCase, show: Callable[[str], None]) -> ScaleResult:
    found = under_load(case, lambda client: _change_often(client, case, show), show, keys=KEYS)
    return _row(case, found.result, found.sent, found.producer, found.consumer)


async def _change_often(client: Client, case: ScaleCase, show: Callable[[str], None]) -> list[tuple[str, int, int]]:
    """Make all changes, round after round. Returns which began and ended when."""
    await asyncio.sleep(2 * REST_S)
    times: list[tuple[str, int, int]] = []
    for number in range(case.rounds):
        for name, change in ROUND:
            show(f"round {number + 1} of {case.rounds}: {name}")
            began_ns = time.monotonic_ns()
            await change(client)
            times.append((name, began_ns, time.monotonic_ns()))
            await asyncio.sleep(REST_S)
    await asyncio.sleep(REST_S)
    return times


def _row(
    case: ScaleCase, times: Sequence[tuple[str, int, int]], sent: int, producer: Steady, consumer: Steady
) -> ScaleResult:
    changes = []
    for name, _ in ROUND:
        made = [(began, ended) for each, began, ended in times if each == name]
        spans = [(began - BEFORE_NS, ended + AFTER_NS) for began, ended in made]
        changes.append(
            Pauses(
                name,
                [(ended - began) / 1e6 for began, ended in made],
                [producer.longest_ms(*span) for span in spans],
                [consumer.longest_ms(*span) for span in spans],
            )
        )
    return ScaleResult(case.history_bytes, sent, consumer.lost, consumer.twice, producer.errors, changes)


# What a topic costs after many changes. Two brokers share a SQLite file. A topic of some segments is changed again and
# again: its largest segment is split, or two neighbours are merged. Each segment gets a record, and retention deletes
# records soon, so that sealed segments leave the layout. After each part of the changes the benchmark looks at what
# there is: the brokers' memory, the metadata, the routing that is pushed to clients, and how long a lookup by key hash
# takes.


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
        return ask(Target(url=cluster.url), lambda client: _change_very_often(client, cluster, changes, show))


async def _change_very_often(
    client: Client, cluster: OwnCluster, changes: int, show: Callable[[str], None]
) -> list[AfterChanges]:
    await client.admin.create_topic(CHANGED_TOPIC, segments=SEGMENTS, retention_ms=RETENTION_MS)
    draw, found, took_ms = random.Random(1), list[AfterChanges](), list[float]()
    looks = {changes * part // PARTS for part in range(1, PARTS + 1)}
    async with client.producer(CHANGED_TOPIC) as producer:
        for number in range(1, changes + 1):
            await producer.send(b"value", key=b"%d" % number)
            began = time.perf_counter()
            await _change(client, draw)
            took_ms.append((time.perf_counter() - began) * 1e3)
            if number in looks:
                show(f"{number:,} of {changes:,} changes")
                found.append(await _look_at_costs(client, cluster, number, statistics.median(took_ms)))
                took_ms.clear()
    return found


async def _change(client: Client, draw: random.Random) -> None:
    """Split the largest segment, or merge two neighbours: the number of active segments stays, give or take one."""
    active = (await client.routing.refresh(_path())).active
    if len(active) <= SEGMENTS:
        await client.admin.split(CHANGED_TOPIC, max(active, key=lambda each: each.last_hash - each.first_hash).id)
    else:
        at = draw.randrange(len(active) - 1)
        await client.admin.merge(CHANGED_TOPIC, active[at].id, active[at + 1].id)


async def _look_at_costs(client: Client, cluster: OwnCluster, changes: int, change_ms: float) -> AfterChanges:
    from braid.metadata import paths
    from braid.wire.operations import encode

    layout: dict[str, Any] = await client.admin.layout(CHANGED_TOPIC)
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

    return TopicName.parse(CHANGED_TOPIC).path


# The results.


def print_rows(rows: Sequence[ScaleResult], after: Sequence[AfterChanges], *, as_json: bool) -> None:
    ratios = ratios_of(rows) | growth_of(after)
    if as_json:
        facts = machine_facts()
        print_json({"bench": "scale", "machine": facts, "results": rows, "afterChanges": after, "ratios": ratios})
        return
    columns = [Column("history"), Column("change")]
    columns += [
        Column(name, right=True) for name in ("took ms", "worst", "producer ms", "worst", "consumer ms", "worst")
    ]
    print_table(columns, [_cells(row, pauses) for row in rows for pauses in row.changes], empty="nothing was measured")
    for row in rows:
        click.echo(
            f"{bytes_text(row.history_bytes)}: {row.records:,} records, {row.lost} lost or out of order, "
            f"{row.twice} twice, {row.errors} errors."
        )
    if after:
        click.echo()
        names = ("changes", "segments made", "kept", "record", "keys", "metadata", "push", "lookup", "change", "memory")
        print_table([Column(name, right=True) for name in names], map(_cells_after, after), empty="")
    for name, (ratio, allowed) in ratios.items():
        click.echo(f"{name}: {ratio:.2f} ({'within' if ratio <= allowed else 'not within'} {allowed:g}).")
    click.echo(f"\n{machine_text('two brokers of its own')} Medians, and the worst of all.")


def ratios_of(rows: Sequence[ScaleResult]) -> dict[str, tuple[float, float]]:
    """Return, by name, the ratios that tell how good it is, each with what is allowed. By medians."""
    found: dict[str, tuple[float, float]] = {}
    move, *others = rows[-1].changes
    for pauses in others:
        for side in ("producer", "consumer"):
            found[f"{side}'s pause, {pauses.change} / move"] = _median(pauses, side) / _median(move, side), OF_A_MOVE
    if len(rows) > 1:
        for small, large in zip(rows[0].changes, rows[-1].changes, strict=True):
            sizes = f"{bytes_text(rows[-1].history_bytes)} / {bytes_text(rows[0].history_bytes)}"
            for side in ("producer", "consumer"):
                ratio = _median(large, side) / _median(small, side)
                found[f"{side}'s pause, {large.change}, {sizes}"] = ratio, OF_SMALL_HISTORY
    return found


def growth_of(after: Sequence[AfterChanges]) -> dict[str, tuple[float, float]]:
    """Return, by name, what grew from the first look to the last one, each with what is allowed."""
    if len(after) < 2:
        return {}
    first, last = after[0], after[-1]
    between = f"{last.changes:,} changes / {first.changes:,}"
    return {
        f"memory of the brokers, {between}": (last.rss_bytes / first.rss_bytes, OF_FEWER_CHANGES),
        f"time of a change, {between}": (last.change_ms / first.change_ms, OF_FEWER_CHANGES),
    }


def _cells_after(row: AfterChanges) -> list[str]:
    return [
        f"{row.changes:,}",
        f"{row.segments_made:,}",
        f"{row.segments:,}",
        bytes_text(row.topic_bytes),
        f"{row.metadata_keys:,}",
        bytes_text(row.metadata_bytes),
        bytes_text(row.push_bytes),
        f"{row.lookup_ns:,.0f} ns",
        f"{row.change_ms:,.0f} ms",
        bytes_text(row.rss_bytes),
    ]


def _median(pauses: Pauses, side: str) -> float:
    return max(statistics.median(pauses.producer_ms if side == "producer" else pauses.consumer_ms), 0.001)


def _cells(row: ScaleResult, pauses: Pauses) -> list[str]:
    times = [
        f"{value:,.0f}"
        for values in (pauses.took_ms, pauses.producer_ms, pauses.consumer_ms)
        for value in (statistics.median(values), max(values))
    ]
    return [bytes_text(row.history_bytes), pauses.change, *times]
