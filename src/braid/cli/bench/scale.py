"""`braid bench scale`: how a split, a merge and a repartition affect producers and consumers, beside a move in one run.

Two brokers, a producer and a consumer run in their own processes. The benchmark fills the topic. Then it moves, splits,
merges and repartitions the topic again and again, while records with keys are sent and received at a steady rate. The
pause is the longest time until a record that was due around the change was confirmed, or received. Records that are
lost, repeated, or out of order for their key are counted. Afterwards another topic is changed very often
(changes.py).
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final

import click
import msgspec

from braid.cli.bench.changes import AfterChanges, measure_often_changed
from braid.cli.bench.machine import machine_facts, machine_text
from braid.cli.bench.move import AFTER_NS, BEFORE_NS, TOPIC, move_all, under_load
from braid.cli.bench.workload import Steady
from braid.cli.terminal.output import Column, bytes_text, json_option, print_json, print_table
from braid.cli.terminal.param_types import SIZE
from braid.cli.terminal.spinner import status_line

if TYPE_CHECKING:
    from braid.client.client import Client

KEYS: Final = 1_024
REST_S: Final = 1.0
OF_A_MOVE: Final = 2.0
"""How many times the pause of a move a change of the layout may take."""
OF_SMALL_HISTORY: Final = 1.5
OF_FEWER_CHANGES: Final = 1.25
"""How many times the memory, and the time of a change, after a quarter of all changes they may be after all."""

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
