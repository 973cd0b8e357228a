"""`braid pipeline advise`"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from braid.cli.pipeline.report import (
    Fields,
    Lines,
    Part,
    Rows,
    bar_text,
    curve_text,
    minute_text,
    percent_text,
    rate_text,
)
from braid.cli.pipeline.session import (
    SparkRun,
    bad_records_option,
    check_topic,
    manifest_option,
    source_options,
    with_spark,
)
from braid.cli.target import Target, ask, with_target
from braid.cli.terminal.output import Column, bytes_text, count_text, time_text
from braid.cli.terminal.param_types import DURATION
from braid.model.errors import BraidError, InvalidArgument
from braid.model.names import TopicName

if TYPE_CHECKING:
    from braid.client.client import Client
    from braid.model.layout import HashRange
    from braid.spark.jobs.advise.job import AdviceReport
    from braid.spark.jobs.advise.rules import Merge, SegmentShare, Split

SHOWN_KEYS: Final = 10
COLUMNS: Final = 64
"""Of a curve."""


class Since(click.ParamType[str]):
    """A duration before now, or a time; the value is a time in ISO 8601."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if re.fullmatch(r"\d+\s*[smhd]", value):
            now = datetime.datetime.now(tz=datetime.UTC)
            try:
                return (now - datetime.timedelta(seconds=DURATION.convert(value, param, ctx))).isoformat()
            except OverflowError:
                self.fail(f"{value!r} ago was before the calendar began", param, ctx)
        try:
            moment = datetime.datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is no time: write 12h, 7d or 2026-11-15T18:00:00Z", param, ctx)
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.UTC)).isoformat()


@click.command()
@click.argument("topic")
@click.option(
    "--since",
    type=Since(),
    default="7d",
    show_default=True,
    metavar="TIME",
    help="Look at records that are not older: 12h, 7d, 2026-11-15T18:00:00Z.",
)
@click.option(
    "--bucket",
    type=DURATION,
    default="1h",
    show_default=True,
    metavar="TIME",
    help="Of each segment the busiest time of this length counts.",
)
@click.option(
    "--segments-target",
    type=click.IntRange(min=1, max=1_024),
    metavar="N",
    help="How many segments the load is to be spread over. [default: as many as there are]",
)
@click.option("--apply", is_flag=True, help="Make the splits and merges.")
@bad_records_option
@manifest_option
@with_spark
@with_target
def advise(
    target: Target,
    topic: str,
    since: str,
    bucket: int,
    segments_target: int | None,
    apply: bool,
    bad_records: str,
    manifest: str | None,
    run: SparkRun,
) -> None:
    """Say which splits and merges would even the load of a topic.

    Measures where the load lies on the ring of key hashes, hour by hour, and names the keys that no split can divide.
    Changes nothing without --apply.

    \b
    Examples:
      braid pipeline advise orders
      braid pipeline advise orders --since 24h --bucket 5m --segments-target 8
      braid pipeline advise orders --manifest file:///srv/braid --json | jq .commands
    """
    path = TopicName.parse(topic).path
    if apply and manifest is not None:
        raise click.UsageError(
            "--apply asks brokers for changes, and --manifest is for when there are none: choose one"
        )
    if manifest is None:
        check_topic(target, path)
    with run.session(f"braid advise {path}") as spark, run.progress(spark, f"Measuring {path}"):
        from braid.spark.jobs.advise.job import advise_topic

        found = advise_topic(
            spark,
            {**source_options(target, path, manifest), "badRecords": bad_records},
            since=since,
            bucket_s=bucket,
            target=segments_target,
        )
    applied = apply_advice(target, path, found) if apply else []
    shown = {**msgspec.to_builtins(found), "applied": msgspec.to_builtins(applied)} if apply else found
    errors = [f"{each.command}: {each.error}" for each in applied if each.error is not None]
    run.finish(shown, render(found, applied), target=target, failed=bool(errors), errors=errors)


class AppliedCommand(msgspec.Struct, frozen=True):
    command: str
    error: str | None
    """Why the brokers refused the command; None if they ran it."""


def apply_advice(target: Target, topic: str, report: AdviceReport) -> list[AppliedCommand]:
    """Run the commands one after the other. Before each, check that its segments exist with the expected ranges: ids
    are given in turn, so after a failed command another segment may have the id that was expected."""
    from braid.spark.jobs.advise.rules import followed

    applied = []
    for number, command in enumerate(report.commands):
        action = report.advice.actions[number]
        expected = followed(report.advice.before, report.advice.actions[:number])
        try:
            ask(target, partial(_change, topic=topic, action=action, expected=expected))
            applied.append(AppliedCommand(command, None))
        except BraidError as error:
            applied.append(AppliedCommand(command, str(error)))
    return applied


async def _change(client: Client, topic: str, action: Split | Merge, expected: dict[int, HashRange]) -> None:
    from braid.spark.jobs.advise.rules import Split

    layout = await client.admin.topic(topic)
    for number in (action.segment_id,) if isinstance(action, Split) else action.segment_ids:
        there = layout["segments"].get(str(number))
        wanted = {"start": expected[number].start, "end": expected[number].end}
        if there is None or there["state"] != "ACTIVE" or there["hashRange"] != wanted:
            raise InvalidArgument(
                f"there is no active segment {number} with the range {expected[number]}: an earlier step was not done, "
                "or the layout has changed meanwhile; ask for advice again"
            )
    if isinstance(action, Split):
        await client.admin.split(topic, action.segment_id, at=action.at)
    else:
        await client.admin.merge(topic, *action.segment_ids)


# The report as text.


def render(report: AdviceReport, applied: Sequence[AppliedCommand] = ()) -> list[Part]:
    advice = report.advice
    parts: list[Part] = [Fields(_facts(report))]
    if report.records:
        parts.append(Lines(_curves(report)))
        parts.append(_loads(report, advice.before, "Now"))
    parts.append(Lines([advice.statement]))
    if advice.actions:
        done = [each.command for each in applied if each.error is None]
        parts.append(Lines(done, title="Done") if done else Lines(report.commands, title="To follow the advice, type"))
        parts.append(_loads(report, advice.after, "Afterwards"))
    if advice.hot_keys:
        parts += [_hot_keys(report), _cure(report)]
    elif report.keys:
        parts.append(_keys(report))
    return parts


def _facts(report: AdviceReport) -> list[tuple[str, str]]:
    advice = report.advice
    unkeyed = f", {percent_text(report.unkeyed_share)} of it without keys" if report.unkeyed_share else ""
    lines = [
        ("topic", report.topic),
        ("records", count_text(report.records) + (f" since {_moment(report.since)}" if report.since else "")),
        ("load", f"{bytes_text(report.load)}{unkeyed}"),
    ]
    if report.skipped:
        lines.append(("skipped", f"{count_text(report.skipped)} records that cannot be decoded"))
    if report.records:
        per_second = rate_text(advice.even_share, report.bucket_s)
        busiest = f"at the busiest time ({DURATION.text(report.bucket_s)})"
        lines.append(("even share", f"{per_second} for each of {advice.target} segments {busiest}"))
    return lines


def _moment(iso: str) -> str:
    return time_text(round(datetime.datetime.fromisoformat(iso).timestamp() * 1e6))


def _curves(report: AdviceReport) -> list[str]:
    """Draw the load by key hash and by time."""
    first, last = report.times[0].time, report.times[-1].time
    return [
        f"by key hash  0000 |{curve_text([each.load for each in report.ring])}| ffff",
        f"by time      {minute_text(first)} |{curve_text(_over_time(report))}| {minute_text(last)} UTC",
    ]


def _over_time(report: AdviceReport) -> list[int]:
    """Return the load by time, with empty buckets. Where buckets share a column, the highest one counts."""
    first, last = report.times[0].time, report.times[-1].time
    buckets = (last - first) // report.bucket_s + 1
    columns = min(COLUMNS, buckets)
    found = [0] * columns
    for each in report.times:
        column = (each.time - first) // report.bucket_s * columns // buckets
        found[column] = max(found[column], each.load)
    return found


def _loads(report: AdviceReport, loads: Sequence[SegmentShare], title: str) -> Rows:
    columns = [
        Column("SEGMENT", right=True),
        Column("RANGE"),
        Column("PEAK", right=True),
        Column("OF ALL", right=True),
        Column("EVEN SHARES", right=True),
        Column(""),
    ]
    highest = max(each.peak_load for each in (*report.advice.before, *report.advice.after))
    rows = [
        (
            str(each.segment_id),
            str(each.hash_range),
            rate_text(each.peak_load, report.bucket_s),
            percent_text(each.share),
            f"{each.evenness:.2f}",
            bar_text(each.peak_load, highest) + (" hot" if each.peak_load > report.advice.capacity else ""),
        )
        for each in loads
    ]
    return Rows(columns, rows, title=title)


def _hot_keys(report: AdviceReport) -> Rows:
    columns = [
        Column("KEY"),
        Column("HASH"),
        Column("SEGMENT", right=True),
        Column("OF ALL", right=True),
        Column("OF WHAT A SEGMENT MAY CARRY", right=True),
    ]
    rows = [
        (
            each.key,
            f"{each.key_hash:04x}",
            str(each.segment_id),
            percent_text(each.share),
            percent_text(each.of_capacity),
        )
        for each in report.advice.hot_keys[:SHOWN_KEYS]
    ]
    return Rows(columns, rows, title="Hot keys, which no split can divide")


def _cure(report: AdviceReport) -> Lines:
    key = report.advice.hot_keys[0].key
    return Lines(
        [
            f"If the records of one such key need no order among each other, publish them under several keys ({key}/0, "
            f"{key}/1, …) or none. If they do, one segment must carry them: give the key a topic of its own, or fewer "
            "bytes."
        ]
    )


def _keys(report: AdviceReport) -> Rows:
    columns = [Column("KEY"), Column("HASH"), Column("RECORDS", right=True), Column("OF ALL", right=True)]
    rows = [
        (each.key, f"{each.key_hash:04x}", count_text(each.records), percent_text(each.load / report.load))
        for each in report.keys[:SHOWN_KEYS]
    ]
    return Rows(columns, rows, title="Heaviest keys")
