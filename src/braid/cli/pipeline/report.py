"""How the command line prints the reports of Spark jobs: as text or as JSON.

The text of a report is a list of parts, from top to bottom, with an empty line between them. It is the same on a
terminal, in a pipe and without colours.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
import msgspec

from braid.cli.terminal.output import Column, bytes_text, paint, print_fields, print_json, print_table

if TYPE_CHECKING:
    from braid.client.client import Client
    from braid.spark.jobs.report import JobReport

_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
_HEIGHTS: Final = "▁▂▃▄▅▆▇█"


class Fields(NamedTuple):
    """One thing: a line for each of its properties."""

    lines: Sequence[tuple[str, str]]


class Rows(NamedTuple):
    """Many things of a kind, as a table below its `title`. A table without rows prints `empty` instead."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    title: str = ""
    empty: str = ""


class Lines(NamedTuple):
    """Sentences, or commands to type."""

    lines: Sequence[str]
    title: str = ""


Part = Fields | Rows | Lines


def print_report(report: JobReport | Mapping[str, Any], parts: Iterable[Part], *, as_json: bool) -> None:
    """Print the parts for a person, or the exact report as JSON for a program."""
    if as_json:
        print_json(report)
        return
    for number, part in enumerate(parts):
        if number:
            click.echo()
        match part:
            case Fields(lines):
                print_fields(lines)
            case Rows(columns, rows, title, empty):
                _print_title(title)
                if rows:
                    print_table(columns, rows, empty=empty)
                elif empty:
                    click.echo(empty)
            case Lines(lines, title):
                _print_title(title)
                for line in lines:
                    click.echo(line)


async def publish_report(
    client: Client, topic: str, job: str, report: JobReport | Mapping[str, Any], *, ok: bool
) -> None:
    """Publish the exact report, as JSON. Reports of the same job and topic have one key, so they keep their order."""
    content = msgspec.to_builtins(report)
    published = {"job": job, "ok": ok, "at": time.time_ns() // 1_000, "report": content}
    key = f"{job} {content.get('topic', '')}".strip()
    async with client.producer(topic) as producer:
        await producer.send(msgspec.json.encode(published), key)


def _print_title(title: str) -> None:
    if title:
        click.echo(paint(title, "1"))


# Values as text.


def bar_text(amount: float, highest: float, width: int = 20) -> str:
    """Draw a bar of blocks, to an eighth of a column; every amount above zero shows at least an eighth."""
    if amount <= 0 or highest <= 0:
        return ""
    eighths = max(1, round(min(amount / highest, 1.0) * width * 8))
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def curve_text(amounts: Sequence[float]) -> str:
    """Draw a column for each amount, as high as the amount; zero is a gap."""
    highest = max(amounts, default=0)
    return "".join(" " if each <= 0 else _HEIGHTS[min(7, int(each / highest * 8))] for each in amounts)


def percent_text(part: float) -> str:
    return f"{part:.1%}" if 0 < part < 0.1 else f"{part:.0%}"


def rate_text(amount: float, seconds: float) -> str:
    return f"{bytes_text(round(amount / seconds))}/s"


def minute_text(seconds: int) -> str:
    moment = datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC)
    return moment.strftime("%Y-%m-%d %H:%M")
