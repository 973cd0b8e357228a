"""`braid bench`: measures publishing, consuming and latency on this machine. move.py and segments.py measure moves of
segments, queue.py measures queues, replication.py measures replicas, spark.py measures Spark.

Producer and consumer run in their own processes. Without `--url` the broker does, too: `braid serve` on free ports,
with a temporary folder that is deleted afterwards. A benchmark makes a topic with one segment, and deletes it at the
end.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
import msgspec

from braid.cli.bench.machine import cpu_s, machine_facts, machine_text
from braid.cli.bench.move import move
from braid.cli.bench.queue import queue
from braid.cli.bench.replication import replication
from braid.cli.bench.scale import scale
from braid.cli.bench.segments import segments
from braid.cli.bench.spark import spark
from braid.cli.bench.workload import Form, Mode
from braid.cli.target import Target, with_target
from braid.cli.terminal.output import Column, json_option, print_json, print_table
from braid.cli.terminal.param_types import SIZE
from braid.model.topic import Durability

if TYPE_CHECKING:
    from braid.cli.bench.broker import OwnBroker
    from braid.cli.bench.workload import Done

C = TypeVar("C", bound=Callable[..., Any])

BYTES_PER_CASE: Final = 300_000_000
"""The bytes that a case publishes or consumes by default: a second or less."""
SINGLES_PER_CASE: Final = 50_000
LONE_RECORDS: Final = 5_000
"""For a publisher that waits for each record."""
RECORDS_PER_CASE: Final = 2_000_000
"""The default number of records where each record is one call."""


@click.group()
def bench() -> None:
    """Measure publishing, consuming, queues, latency, moves and Spark.

    Without --url (or BRAID_URL) a broker is started for the measurement, on this machine.
    """
    # So that brokers and their folders do not outlive a benchmark that is killed.
    before = signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    click.get_current_context().call_on_close(lambda: signal.signal(signal.SIGTERM, before))


def _shared_options(command: C) -> C:
    options = (
        click.option(
            "--size",
            "sizes",
            type=SIZE,
            multiple=True,
            default=(100, 1024),
            show_default=True,
            help="Bytes of a value.",
        ),
        click.option(
            "--durability",
            type=click.Choice([Durability.MEMORY.value, Durability.FSYNC.value]),
            default=Durability.FSYNC.value,
            show_default=True,
            help="What a confirm waits for.",
        ),
        json_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


_records_option: Final = click.option(
    "--records", type=click.IntRange(min=1), metavar="N", help="In each case. [default: what takes about a second]"
)
_batch_option: Final = click.option(
    "--batch", "batch_bytes", type=SIZE, default="256KiB", show_default=True, help="The largest batch."
)


@bench.command()
@click.option(
    "--mode",
    "modes",
    type=click.Choice([mode.value for mode in Mode]),
    multiple=True,
    default=(Mode.SEND_MANY.value,),
    show_default=True,
    help="How the producer is used; may be repeated. single: each task has its own producer.",
)
@click.option(
    "--tasks", type=click.IntRange(min=1), metavar="N", help="Tasks that send at the same time. [default: by mode]"
)
@_records_option
@_batch_option
@_shared_options
@with_target
def publish(
    target: Target,
    modes: tuple[str, ...],
    tasks: int | None,
    records: int | None,
    batch_bytes: int,
    sizes: tuple[int, ...],
    durability: str,
    as_json: bool,
) -> None:
    """Publish to a fresh topic.

    \b
    braid bench publish
    braid bench publish --mode submit --mode send --size 100
    braid bench publish --mode single --tasks 64 --url braid://10.0.0.7:6660
    """
    from braid.cli.bench.measure import fresh_topic, measure_publish
    from braid.cli.bench.workload import DEFAULT_TASKS

    with _place(target) as (place, own):
        run = BenchRun("publish", place, own, as_json=as_json)
        for mode in map(Mode, modes):
            count = tasks or DEFAULT_TASKS[mode]
            for size in sizes:
                total = records or _records_of(mode, size, count)
                name = f"{mode.value}, {count} task{'s' if count > 1 else ''}"
                with (
                    fresh_topic(place, Durability(durability)) as topic,
                    run.case(name, size, durability, total) as case,
                ):
                    case.done = measure_publish(
                        place,
                        topic,
                        mode=mode,
                        records=total,
                        size=size,
                        batch_bytes=batch_bytes,
                        tasks=count,
                        observer=case,
                    )
        run.print()


@bench.command()
@click.option(
    "--as",
    "forms",
    type=click.Choice([form.value for form in Form]),
    multiple=True,
    default=(Form.ARROW.value, Form.MESSAGES.value),
    show_default=True,
    help="The form in which the consumer takes records; may be repeated.",
)
@_records_option
@_batch_option
@_shared_options
@with_target
def consume(
    target: Target,
    forms: tuple[str, ...],
    records: int | None,
    batch_bytes: int,
    sizes: tuple[int, ...],
    durability: str,
    as_json: bool,
) -> None:
    """Consume a topic that was filled before, acknowledging every batch.

    \b
    braid bench consume
    braid bench consume --as each --size 100 --records 1000000
    """
    from braid.cli.bench.measure import fill, fresh_topic, measure_consume

    with _place(target) as (place, own):
        run = BenchRun("consume", place, own, as_json=as_json)
        for size in sizes:
            total = records or BYTES_PER_CASE // size
            with fresh_topic(place, Durability(durability)) as topic:
                fill(place, topic, total, size, batch_bytes)
                for form in map(Form, forms):
                    with run.case(f"as {form.value}", size, durability, total) as case:
                        case.done = measure_consume(
                            place,
                            topic,
                            records=total,
                            form=form,
                            subscription=f"bench-{form.value}",
                            observer=case,
                        )
        run.print()


@bench.command()
@click.option(
    "--rate",
    "rates",
    type=click.FloatRange(min=0, min_open=True),
    multiple=True,
    default=(1_000, 10_000),
    show_default=True,
    help="Records per second; may be repeated.",
)
@click.option(
    "--duration",
    "duration_s",
    type=click.FloatRange(min=0.1),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="The length of each case.",
)
@_shared_options
@with_target
def latency(
    target: Target,
    rates: tuple[float, ...],
    duration_s: float,
    sizes: tuple[int, ...],
    durability: str,
    as_json: bool,
) -> None:
    """Time single records, from the moment at which they are due to be sent until the consumer has them.

    The producer keeps its schedule even when earlier records are late, so a pause of the broker counts for every record
    that was due meanwhile.

    \b
    braid bench latency
    braid bench latency --rate 50000 --duration 10 --durability memory
    """
    from braid.cli.bench.measure import fresh_topic, measure_latency

    with _place(target) as (place, own):
        run = BenchRun("latency", place, own, as_json=as_json)
        for size in sizes:
            for rate in rates:
                total = int(rate * duration_s)
                name = f"at {rate:,.0f} records/s"
                with (
                    fresh_topic(place, Durability(durability)) as topic,
                    run.case(name, size, durability, total) as case,
                ):
                    case.done = measure_latency(
                        place, topic, rate=rate, duration_s=duration_s, size=size, observer=case
                    )
        run.print()


# What was measured.


class Case:
    """One row of the table, while it is measured: an `Observer` of its worker."""

    done: Done

    def __init__(self, own: OwnBroker | None, show: Callable[[int], None]) -> None:
        self._own = own
        self._show = show
        self._broker_cpu_s = 0.0

    def on_ready(self) -> None:
        self._broker_cpu_s = cpu_s(self._own.pid) if self._own is not None else 0.0

    def on_progress(self, records: int) -> None:
        self._show(records)

    def broker_cpu(self) -> float | None:
        return None if self._own is None else (cpu_s(self._own.pid) - self._broker_cpu_s) / self.done.seconds


class CaseResult(msgspec.Struct, frozen=True, rename="camel"):
    case: str
    record_bytes: int
    durability: str
    records: int
    seconds: float
    records_per_s: float
    megabytes_per_s: float
    latency_ms: dict[str, float]
    client_cpu: float
    """Cores that the measured client process kept busy."""
    broker_cpu: float | None
    """Cores that the broker kept busy, if the benchmark started it."""


class BenchRun:
    def __init__(self, name: str, target: Target, own: OwnBroker | None, *, as_json: bool) -> None:
        self._name = name
        self._target = target
        self._own = own
        self._as_json = as_json
        self._rows: list[CaseResult] = []

    @contextlib.contextmanager
    def case(self, name: str, size: int, durability: str, total: int) -> Iterator[Case]:
        with _progress_bar(f"{self._name} {name}, {size} B", total) as show:
            case = Case(self._own, show)
            yield case
        done = case.done
        self._rows.append(
            CaseResult(
                case=name,
                record_bytes=size,
                durability=durability,
                records=done.records,
                seconds=done.seconds,
                records_per_s=done.rate,
                megabytes_per_s=done.records * size / done.seconds / 1e6,
                latency_ms=done.latency_ms,
                client_cpu=done.cpu_s / done.seconds,
                broker_cpu=case.broker_cpu(),
            )
        )

    def print(self) -> None:
        where = "its own broker" if self._own is not None else self._target.url
        if self._as_json:
            print_json({"bench": self._name, "broker": where, "machine": machine_facts(), "results": self._rows})
            return
        columns = [Column(self._name), Column("value", right=True), Column("durability")]
        columns += [Column(title, right=True) for title in ("records/s", "MB/s", "p50 ms", "p99 ms", "p99.9 ms")]
        print_table(columns, map(_cells, self._rows), empty="nothing was measured")
        click.echo(f"\n{machine_text(where)}")


def _cells(row: CaseResult) -> list[str]:
    times = [row.latency_ms.get(name) for name in ("p50", "p99", "p99.9")]
    return [
        row.case,
        f"{row.record_bytes} B",
        row.durability,
        f"{row.records_per_s:,.0f}",
        f"{row.megabytes_per_s:,.1f}",
        *("-" if taken is None else f"{taken:.2f}" for taken in times),
    ]


@contextlib.contextmanager
def _progress_bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal, and remove it at the end."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda records: progress.update(task, completed=records)


# Where it is measured.


@contextlib.contextmanager
def _place(target: Target) -> Iterator[tuple[Target, OwnBroker | None]]:
    """Use the brokers of --url, or start a broker for the benchmark."""
    context = click.get_current_context()
    if context.params.get("url") or context.find_root().params.get("url"):
        yield target, None
        return
    from braid.cli.bench.broker import own_broker

    with own_broker() as broker:
        yield Target(url=broker.url), broker


def _records_of(mode: Mode, size: int, tasks: int) -> int:
    match mode:
        case Mode.SEND_MANY | Mode.SEND_TABLE:
            return BYTES_PER_CASE // size
        case Mode.SINGLE:
            return SINGLES_PER_CASE
        case _ if tasks == 1 and mode is Mode.SEND:
            return LONE_RECORDS
        case _:
            return min(RECORDS_PER_CASE, SINGLES_PER_CASE * tasks, BYTES_PER_CASE // size)


bench.add_command(move)
bench.add_command(queue)
bench.add_command(replication)
bench.add_command(scale)
bench.add_command(segments)
bench.add_command(spark)
