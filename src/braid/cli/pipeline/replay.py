"""`braid pipeline replay`: a topic, or a time of it, into another topic."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from braid.cli.pipeline.report import Fields, Part, Rows
from braid.cli.pipeline.session import (
    SparkRun,
    bad_records_option,
    check_topic,
    manifest_option,
    source_options,
    with_spark,
)
from braid.cli.target import Target, with_target
from braid.cli.terminal.output import Column, count_text, duration_text
from braid.model.errors import TopicNotFound
from braid.model.names import TopicName

if TYPE_CHECKING:
    from braid.spark.jobs.replay.job import ReplayReport


@click.command()
@click.argument("source")
@click.argument("target_topic", metavar="TARGET")
@click.option(
    "--from",
    "start",
    default="earliest",
    show_default=True,
    metavar="WHERE",
    help="earliest, a time, or offsets in JSON.",
)
@click.option(
    "--until",
    default="latest",
    show_default=True,
    metavar="WHERE",
    help="latest, a time, or offsets in JSON: up to there.",
)
@click.option("--name", metavar="NAME", help="Of this replay. [default: made of the topics' names]")
@click.option(
    "--checkpoint",
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="Where the replay remembers how far it is. [default: ~/.local/state/braid/replay/NAME]",
)
@click.option("--max-records", type=click.IntRange(min=1), metavar="N", help="Records in one step, at most.")
@click.option("--create", is_flag=True, help="Create TARGET if it does not exist, with as many segments as SOURCE has.")
@bad_records_option
@manifest_option
@with_spark
@with_target
def replay(
    target: Target,
    run: SparkRun,
    source: str,
    target_topic: str,
    start: str,
    until: str,
    name: str | None,
    checkpoint: str | None,
    max_records: int | None,
    create: bool,
    bad_records: str,
    manifest: str | None,
) -> None:
    """Copy a topic, or a time of it, into another topic.

    Writes each record once, with its key, headers and timestamp, in the order of keys. A replay that was killed goes on
    when it is started again; a replay that is done copies the records that have come since. Times are written as
    2026-11-15T18:00:00Z or as milliseconds since 1970, offsets as {"0": 17, "3": "END"}.

    \b
    Examples:
      braid pipeline replay orders orders-copy --create
      braid pipeline replay orders orders-monday --from 2026-11-09T00:00:00Z --until 2026-11-10T00:00:00Z
      braid pipeline replay orders restored --manifest file:///backup/history
    """
    from braid.spark.session import check_pyspark

    check_pyspark()
    from braid.spark.jobs.replay.job import MAX_RECORDS, ReplayRun, check_topics, checked_bounds
    from braid.spark.jobs.replay.journal import ReplayJournal, default_folder

    origin, destination = TopicName.parse(source).path, TopicName.parse(target_topic).path
    check_topics(origin, destination)
    called = name or f"{origin}-to-{destination}".replace("/", "-")
    bounds = checked_bounds(source_options(target, origin, manifest), start, until)
    if manifest is None:
        check_topic(target, origin)
    if not create:
        try:
            check_topic(target, destination)
        except TopicNotFound as error:
            raise TopicNotFound(f"{error}, or let --create do it") from error
    with run.session(f"replay {origin}") as spark, run.progress(spark, f"Copying {origin} into {destination}"):
        report = ReplayRun(
            spark,
            {**source_options(target, origin, manifest), "badRecords": bad_records},
            source_options(target, destination),
            ReplayJournal(checkpoint or default_folder(called, os.environ)),
            bounded_by=bounds,
            max_records=max_records or MAX_RECORDS,
            create=create,
        ).run()
    run.finish(report, render(report), target=target)


def render(report: ReplayReport) -> list[Part]:
    rate = f", {count_text(round(report.records / report.seconds))} a second" if report.records else ""
    fields = [
        ("source", report.source),
        ("target", report.target),
        ("copied", f"{count_text(report.records)} records in {duration_text(report.seconds)}{rate}"),
        ("steps", count_text(report.steps)),
    ]
    if report.repeated:
        text = (
            f"{report.repeated} of an earlier run; {count_text(report.duplicates)} records were in the target already"
        )
        fields.append(("repeated", text))
    if report.skipped:
        fields.append(("skipped", f"{count_text(report.skipped)} records that cannot be decoded"))
    fields += [("lag", f"{count_text(report.lag)} records"), ("checkpoint", report.checkpoint)]
    rows = [
        (str(each.segment), str(each.first), str(each.until - 1), count_text(each.records)) for each in report.segments
    ]
    columns = [Column(title, right=True) for title in ("segment", "from", "to", "copied")]
    return [Fields(fields), Rows(columns, rows, empty="Nothing was left to copy.")]
