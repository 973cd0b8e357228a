"""`braid pipeline audit`"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from braid.cli.pipeline.report import Fields, Lines, Part, Rows, rate_text
from braid.cli.pipeline.session import SparkRun, check_topic, manifest_option, source_options, with_spark
from braid.cli.target import Target, with_target
from braid.cli.terminal.output import Column, bytes_text, count_text, duration_text
from braid.model.names import TopicName

if TYPE_CHECKING:
    from braid.spark.jobs.audit.job import AuditReport

SHOWN_DEFECTS: Final = 50
"""In the table; --json has all of them."""


@click.command()
@click.argument("topic")
@manifest_option
@click.option("--deep", is_flag=True, help="Open the body of every batch, too: can its records be decoded?")
@with_spark
@with_target
def audit(target: Target, run: SparkRun, topic: str, manifest: str | None, deep: bool) -> None:
    """Prove that the history of a topic has no gap, no repeat and no damage.

    Reads every byte: from storage, and from the brokers if it is not exported yet. Changes nothing. The exit code is 0
    if everything is sound and 1 if there are defects.

    \b
    Examples:
      braid pipeline audit orders
      braid pipeline audit orders --manifest file:///srv/braid
      braid pipeline audit orders --deep
      braid pipeline audit orders --json | jq .defects
    """
    path = TopicName.parse(topic).path
    if manifest is None:
        check_topic(target, path)
    with run.session(f"braid audit {path}") as spark, run.progress(spark, f"Auditing {path}"):
        from braid.spark.jobs.audit.job import audit_topic

        report = audit_topic(spark, source_options(target, path, manifest), deep=deep)
    run.finish(report, render(report), target=target, failed=not report.ok)


def render(report: AuditReport) -> list[Part]:
    parts: list[Part] = [
        Fields(
            [
                ("topic", report.topic),
                ("verdict", "sound" if report.ok else _defects_text(len(report.defects))),
                ("read", f"{bytes_text(report.bytes)} in {duration_text(report.seconds)}, {_rate(report)}"),
                ("records", f"{count_text(report.records)} in {count_text(report.batches)} batches"),
            ]
        ),
        Rows(
            [
                Column("segment", right=True),
                Column("range"),
                Column("chunks", right=True),
                Column("batches", right=True),
                Column("records", right=True),
                Column("bytes", right=True),
                Column("offsets"),
                Column("sealed"),
            ],
            [
                (
                    str(each.segment),
                    each.range,
                    count_text(each.chunks),
                    count_text(each.batches),
                    count_text(each.records),
                    bytes_text(each.bytes),
                    f"{each.first_offset}–{each.next_offset - 1}" if each.next_offset > each.first_offset else "none",
                    "yes" if each.sealed else "no",
                )
                for each in report.segments
            ],
        ),
    ]
    if report.defects:
        shown = report.defects[:SHOWN_DEFECTS]
        columns = [Column("rule"), Column("segment", right=True), Column("offset", right=True), Column("what is wrong")]
        rows = [(each.rule, str(each.segment), str(each.offset), each.text) for each in shown]
        parts.append(Rows(columns, rows, title="Defects"))
        objects = sorted({f"segment {each.segment}: {each.object}" for each in shown if each.object})
        if objects:
            parts.append(Lines(objects, title="In these objects"))
        if len(report.defects) > len(shown):
            parts.append(Lines([f"{len(report.defects) - len(shown)} more; --json has them all"]))
    if report.notes:
        parts.append(Lines(report.notes, title="Notes"))
    return parts


def _rate(report: AuditReport) -> str:
    return rate_text(report.bytes, report.seconds) if report.seconds else "-"


def _defects_text(count: int) -> str:
    return "1 defect" if count == 1 else f"{count} defects"
