"""`braid bench move`: how a move affects producers and consumers, and whether its cost grows with the history.

Two brokers, a producer and a consumer run in their own processes. The benchmark fills the topic and moves it once, so
that the history is in chunks. Then it moves the topic back and forth while records are sent and received at a steady
rate. The pause is the longest time until a record that was due around the move was confirmed, or received.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar

import click
import msgspec

from braid.cli.bench.machine import machine_facts, machine_text
from braid.cli.bench.workload import Mode, Steady, SteadyReceive, SteadySend
from braid.cli.target import Target, ask
from braid.cli.terminal.output import Column, bytes_text, json_option, print_json, print_table
from braid.cli.terminal.param_types import SIZE
from braid.cli.terminal.spinner import status_line

if TYPE_CHECKING:
    from braid.client.client import Client

BEFORE_NS: Final = 50_000_000
AFTER_NS: Final = 500_000_000
"""A move affects records that were due this long before and after it."""
FILL_RECORD_BYTES: Final = 1_000
FILL_BATCH_BYTES: Final = 1 << 20
TOPIC: Final = "bench"
SUBSCRIPTION: Final = "bench"
MOVE_TIMEOUT_S: Final = 600.0
"""Copying gigabytes takes time."""
SETTLE_S: Final = 1.0
ALLOWED_RATIO: Final = 1.5


@click.command()
@click.option(
    "--history",
    "histories",
    type=SIZE,
    multiple=True,
    default=("10MiB", "1GiB", "4GiB"),
    show_default=True,
    help="The size of the topic before the moves; may be repeated.",
)
@click.option(
    "--storage",
    type=click.Choice(["shared_fs", "local"]),
    default="shared_fs",
    show_default=True,
    help="Whether the brokers share a folder for history, or copy it to each other.",
)
@click.option(
    "--moves", type=click.IntRange(min=1), default=10, show_default=True, metavar="N", help="For each history."
)
@click.option(
    "--count",
    type=click.IntRange(min=1),
    metavar="N",
    help="Instead: this many moves in a row, without a rest, with the first history.",
)
@click.option("--rate", type=click.FloatRange(min=1), default=5_000, show_default=True, help="Records per second.")
@click.option("--size", type=SIZE, default=100, show_default=True, help="Bytes of a value.")
@json_option
def move(
    histories: tuple[int, ...], storage: str, moves: int, count: int | None, rate: float, size: int, as_json: bool
) -> None:
    """Start two brokers, and move a topic back and forth between them under load.

    \b
    braid bench move
    braid bench move --history 10MiB --history 1GiB --storage local --moves 3
    braid bench move --history 10MiB --count 200
    """
    rows: list[MoveResult] = []
    for history in histories[:1] if count else histories:
        case = MoveCase(history, storage, count or moves, 0.0 if count else SETTLE_S, rate, size)
        with status_line(f"{bytes_text(history)} of history") as show:
            rows.append(measure_moves(case, show))
    print_rows(rows, as_json=as_json)


T = TypeVar("T")


class Load(Protocol):
    """What is in the topic before the measurement, and what is sent meanwhile."""

    @property
    def history_bytes(self) -> int: ...

    @property
    def rate(self) -> float: ...

    @property
    def size(self) -> int: ...


class MoveCase(msgspec.Struct, frozen=True):
    history_bytes: int
    storage: str
    moves: int
    rest_s: float
    rate: float
    size: int


class MoveResult(msgspec.Struct, frozen=True, rename="camel"):
    history_bytes: int
    storage: str
    moves: int
    records: int
    move_ms: list[float]
    producer_ms: list[float]
    """For each move, the longest that a record waited for its confirm."""
    consumer_ms: list[float]
    """For each move, the longest that a record took to be received."""
    rest_ms: float
    """The longest that a consumer waited for a record while nothing moved."""
    lost: int
    twice: int
    errors: int


class UnderLoad(NamedTuple, Generic[T]):
    """What was done under load, and what the load saw of it."""

    result: T
    sent: int
    producer: Steady
    consumer: Steady


def measure_moves(case: MoveCase, show: Callable[[str], None]) -> MoveResult:
    found = under_load(case, lambda client: _move_often(client, case, show), show, shared=case.storage == "shared_fs")
    return _row(case, found.result, found.sent, found.producer, found.consumer)


def under_load(
    load: Load,
    work: Callable[[Client], Coroutine[Any, Any, T]],
    show: Callable[[str], None],
    *,
    shared: bool = True,
    keys: int = 1,
) -> UnderLoad[T]:
    """Start two brokers, fill a topic, move it once, and do the work while records are sent and received."""
    from braid.cli.bench.broker import own_cluster
    from braid.cli.bench.measure import measure_publish, worker

    with own_cluster(2, shared=shared) as cluster:
        target = Target(url=cluster.url)
        ask(target, lambda client: client.admin.create_topic(TOPIC))
        show("filling")
        measure_publish(
            target,
            TOPIC,
            mode=Mode.SEND_TABLE,
            records=max(1, load.history_bytes // FILL_RECORD_BYTES),
            size=FILL_RECORD_BYTES,
            batch_bytes=FILL_BATCH_BYTES,
            warm_up=False,
        )
        ask(target, move_all)
        with worker(SteadyReceive(target=target, topic=TOPIC, subscription=SUBSCRIPTION, keys=keys)) as receiver:
            receiver.wait_ready()
            with worker(SteadySend(target=target, topic=TOPIC, rate=load.rate, size=load.size, keys=keys)) as sender:
                sender.wait_ready()
                result = ask(target, work)
                sender.stop()
                sent = sender.wait_done()
            received = receiver.wait_done()
    assert sent.steady is not None
    assert received.steady is not None
    return UnderLoad(result, sent.records, sent.steady, received.steady)


async def _move_often(client: Client, case: MoveCase, show: Callable[[str], None]) -> list[tuple[int, int]]:
    """Move again and again. Returns when each move began and ended."""
    await asyncio.sleep(2 * SETTLE_S)
    times: list[tuple[int, int]] = []
    for number in range(case.moves):
        show(f"move {number + 1} of {case.moves}")
        began_ns = time.monotonic_ns()
        await move_all(client)
        times.append((began_ns, time.monotonic_ns()))
        await asyncio.sleep(case.rest_s)
    await asyncio.sleep(SETTLE_S)
    return times


async def move_all(client: Client) -> None:
    await client.admin.move(TOPIC, timeout=MOVE_TIMEOUT_S)


def _row(case: MoveCase, times: Sequence[tuple[int, int]], sent: int, producer: Steady, consumer: Steady) -> MoveResult:
    spans = [(began - BEFORE_NS, ended + AFTER_NS) for began, ended in times]
    first_ns = times[0][0]
    return MoveResult(
        history_bytes=case.history_bytes,
        storage=case.storage,
        moves=len(times),
        records=sent,
        move_ms=[(ended - began) / 1e6 for began, ended in times],
        producer_ms=[producer.longest_ms(*span) for span in spans],
        consumer_ms=[consumer.longest_ms(*span) for span in spans],
        rest_ms=consumer.longest_ms(first_ns - int(SETTLE_S * 1e9), first_ns - BEFORE_NS),
        lost=consumer.lost,
        twice=consumer.twice,
        errors=producer.errors,
    )


def print_rows(rows: Sequence[MoveResult], *, as_json: bool) -> None:
    ratios = ratios_of(rows)
    if as_json:
        print_json({"bench": "move", "machine": machine_facts(), "results": rows, "ratios": ratios})
        return
    columns = [Column("history"), Column("storage")]
    names = ("moves", "move ms", "worst", "producer ms", "worst", "consumer ms", "worst", "at rest")
    columns += [Column(name, right=True) for name in (*names, "records", "lost", "twice", "errors")]
    print_table(columns, map(_cells, rows), empty="nothing was measured")
    for name, ratio in ratios.items():
        within = "within" if ratio <= ALLOWED_RATIO else "not within"
        click.echo(
            f"{name}: {bytes_text(rows[-1].history_bytes)} takes {ratio:.2f} times what "
            f"{bytes_text(rows[0].history_bytes)} takes ({within} {ALLOWED_RATIO})."
        )
    click.echo(f"\n{machine_text('two brokers of its own')} Medians, and the worst of all moves.")


def ratios_of(rows: Sequence[MoveResult]) -> dict[str, float]:
    """Return the ratios of the last history to the first, by medians. Where history is copied, they may be high."""
    if len(rows) < 2 or rows[0].storage != "shared_fs":
        return {}
    pairs = {"move": "move_ms", "producer": "producer_ms", "consumer": "consumer_ms"}
    return {
        name: statistics.median(getattr(rows[-1], field)) / statistics.median(getattr(rows[0], field))
        for name, field in pairs.items()
    }


def _cells(row: MoveResult) -> list[str]:
    times = [
        f"{value:,.0f}"
        for values in (row.move_ms, row.producer_ms, row.consumer_ms)
        for value in (statistics.median(values), max(values))
    ]
    counts = (row.records, row.lost, row.twice, row.errors)
    return [
        bytes_text(row.history_bytes),
        row.storage,
        f"{row.moves}",
        *times,
        f"{row.rest_ms:,.0f}",
        *(f"{count:,}" for count in counts),
    ]
