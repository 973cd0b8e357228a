"""`braid pipeline lake`: a topic lands in a table, each record once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import click

from braid.cli.pipeline.report import Fields, Lines, Part, Rows
from braid.cli.pipeline.session import (
    SparkRun,
    bad_records_option,
    check_topic,
    manifest_option,
    source_options,
    with_spark,
)
from braid.cli.target import Target, with_target
from braid.cli.terminal.output import Column, bytes_text, count_text, duration_text
from braid.model.names import TopicName

if TYPE_CHECKING:
    from braid.spark.jobs.lake.job import LakeReport, StepReport


def _names(_: click.Context, __: click.Parameter, given: str | None) -> tuple[str, ...] | None:
    return None if given is None else tuple(name.strip() for name in given.split(","))


@click.command()
@click.argument("topic")
@click.option("--to", "where", required=True, metavar="PATH", help="The table: a folder that all executors see.")
@click.option("--format", "kind", type=click.Choice(["parquet", "delta"]), default="parquet", show_default=True)
@click.option("--follow", is_flag=True, help="Land new records, too, until Ctrl-C. [default: what is there now]")
@click.option("--max-records", type=click.IntRange(min=1), metavar="N", help="Records in one commit, at most.")
@click.option("--columns", callback=_names, metavar="A,B", help="Only these, on the first run. [default: all]")
@click.option("--skip-lost", is_flag=True, help="Go on after records that retention deleted before they landed.")
@bad_records_option
@manifest_option
@with_spark
@with_target
def lake(
    target: Target,
    run: SparkRun,
    topic: str,
    where: str,
    kind: str,
    follow: bool,
    max_records: int | None,
    columns: tuple[str, ...] | None,
    skip_lost: bool,
    bad_records: str,
    manifest: str | None,
) -> None:
    """Land a topic in a table, each record once.

    The table remembers how far it has come: run the command again and it goes on there, also after a kill. Files and
    offsets become visible in one commit. Spark, pandas, Polars and DuckDB read the folder; every Delta reader reads a
    Delta table.

    \b
    Examples:
      braid pipeline lake orders --to /lake/orders
      braid pipeline lake orders --to /lake/orders --format delta --follow
      braid pipeline lake orders --to /lake/orders --columns segment,offset,timestamp,value
    """
    from braid.spark.session import check_pyspark

    check_pyspark()
    from braid.spark.jobs.bounded_read import columns_schema
    from braid.spark.jobs.lake.job import MAX_RECORDS, Lake, open_table

    path = TopicName.parse(topic).path
    columns_schema(columns or ("offset",))
    table = open_table(where, kind)
    table.landed()
    if manifest is None:
        check_topic(target, path)
    with run.session(f"lake {path}") as spark:
        ending = threading.Event() if follow else None
        with _ended_by_signals(ending) if ending is not None else nullcontext(), run.progress(spark, f"Landing {path}"):
            report = Lake(
                spark,
                {**source_options(target, path, manifest), "badRecords": bad_records},
                table,
                columns=columns,
                max_records=max_records or MAX_RECORDS,
                skip_lost=skip_lost,
                on_step=_print_step if follow and not run.as_json else _nothing,
            ).run(ending)
    run.finish(report, render(report), target=target)


@contextmanager
def _ended_by_signals(ending: threading.Event) -> Iterator[None]:
    """End the run after the current step at the first Ctrl-C or SIGTERM, and immediately at the second."""
    numbers = (signal.SIGINT, signal.SIGTERM)

    def on_signal(*_: Any) -> None:
        if ending.is_set():
            raise KeyboardInterrupt
        ending.set()

    before = [signal.signal(number, on_signal) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


def _nothing(_: StepReport) -> None:
    pass


def _print_step(step: StepReport) -> None:
    click.echo(
        f"step {step.step}: {count_text(step.records)} records, {count_text(step.files)} files, "
        f"{bytes_text(step.bytes)}, {duration_text(step.seconds)}"
    )


def render(report: LakeReport) -> list[Part]:
    fields = [
        ("topic", report.topic),
        ("table", f"{report.table} ({report.format}, at step {report.step})"),
        ("landed", f"{count_text(report.records)} records in {duration_text(report.seconds)}"),
        ("written", f"{count_text(report.files)} files, {bytes_text(report.bytes)}; commits: {len(report.steps)}"),
        ("lag", f"{count_text(report.lag)} records"),
    ]
    if report.skipped:
        fields.append(("skipped", f"{count_text(report.skipped)} records that cannot be decoded"))
    if report.leftovers:
        fields.append(("removed", f"{report.leftovers} folders that were never committed"))
    titles = ("segment", "from", "to", "records", "next", "lag")
    rows = [
        (
            str(each.segment),
            str(each.first) if each.records else "-",
            str(each.until - 1) if each.records else "-",
            count_text(each.records),
            str(each.position),
            count_text(each.lag),
        )
        for each in report.segments
    ]
    table = Rows([Column(title, right=True) for title in titles], rows, empty="Nothing has landed yet.")
    return [Fields(fields), table, *([Lines(report.losses, title="Lost")] if report.losses else [])]
