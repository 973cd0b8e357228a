"""`braid pipeline compact`"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from braid.cli.pipeline.report import Fields, Lines, Part, Rows
from braid.cli.pipeline.session import SparkRun, check_topic, source_options, with_spark
from braid.cli.target import Target, with_target
from braid.cli.terminal.output import Column, bytes_text, count_text, duration_text
from braid.cli.terminal.param_types import SIZE
from braid.model.names import TopicName
from braid.storage.history.compaction import DEFAULT_TARGET_BYTES, MAX_TARGET_BYTES, MIN_TARGET_BYTES

if TYPE_CHECKING:
    from braid.spark.jobs.compact import CompactReport

_DEFAULT: Final = SIZE.text(DEFAULT_TARGET_BYTES)


@click.command()
@click.argument("topic")
@click.option(
    "--target-bytes",
    type=SIZE,
    default=_DEFAULT,
    show_default=True,
    metavar="SIZE",
    help="How large chunks may become; chunks of half that size stay as they are.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be joined.")
@with_spark
@with_target
def compact(target: Target, run: SparkRun, topic: str, target_bytes: int, dry_run: bool) -> None:
    """Turn many small chunks into few large ones.

    Readers and writers go on meanwhile, and reads return the same as before. The brokers delete the replaced chunks an
    hour later, so that readers that are under way find them.

    \b
    Examples:
      braid pipeline compact orders --dry-run
      braid pipeline compact orders --target-bytes 256MiB
    """
    path = TopicName.parse(topic).path
    if not MIN_TARGET_BYTES <= target_bytes <= MAX_TARGET_BYTES:
        raise click.BadParameter(
            f"chunks have {SIZE.text(MIN_TARGET_BYTES)} to {SIZE.text(MAX_TARGET_BYTES)}", param_hint="--target-bytes"
        )
    check_topic(target, path)
    with run.session(f"braid compact {path}") as spark, run.progress(spark, f"Compacting {path}"):
        from braid.spark.jobs.compact import compact_topic

        report = compact_topic(spark, source_options(target, path), target_bytes=target_bytes, dry_run=dry_run)
    run.finish(report, render(report), target=target, failed=not report.ok)


def render(report: CompactReport) -> list[Part]:
    would = "would be " if report.dry_run else ""
    parts: list[Part] = [
        Fields(
            [
                ("topic", report.topic),
                ("chunks", f"{count_text(report.chunks_before)} → {count_text(report.chunks_after)}"),
                ("joined", f"{bytes_text(report.joined_bytes)} {would}rewritten, {_target(report)}"),
                ("time", duration_text(report.seconds)),
            ]
        ),
        Rows(
            [
                Column("segment", right=True),
                Column("range"),
                Column("chunks", right=True),
                Column("then" if report.dry_run else "now", right=True),
                Column("joined", right=True),
                Column("bytes", right=True),
            ],
            [
                (
                    str(each.segment),
                    each.range,
                    count_text(each.chunks_before),
                    count_text(each.chunks_after),
                    f"{each.joined_chunks} in {each.swaps}" if each.swaps else "-",
                    bytes_text(each.joined_bytes) if each.swaps else "-",
                )
                for each in report.segments
            ],
        ),
    ]
    if report.failures:
        columns = [Column("segment", right=True), Column("first chunk"), Column("what is wrong")]
        rows = [(str(each.segment), each.object, each.text) for each in report.failures]
        parts.append(Rows(columns, rows, title="Not joined; braid pipeline audit tells more"))
    if report.notes:
        parts.append(Lines(report.notes, title="Notes"))
    return parts


def _target(report: CompactReport) -> str:
    return f"chunks of up to {bytes_text(report.target_bytes)}"
