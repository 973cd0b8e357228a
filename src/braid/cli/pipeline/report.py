"""How the reports of Spark jobs look: on a terminal, in a pipe and without colours the same.

A report is a list of parts, from top to bottom, with an empty line between them.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import click

from braid.cli.terminal.output import Column, bytes_text, paint, print_fields, print_json, print_table

_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
_HEIGHTS: Final = "▁▂▃▄▅▆▇█"


class Fields(NamedTuple):
    """One thing, a line for each of its properties."""

    lines: Sequence[tuple[str, str]]


class Rows(NamedTuple):
    """Many things of a kind. `title` stands above, if there is one; `empty` in place of a table without rows."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    title: str = ""
    empty: str = ""


class Lines(NamedTuple):
    """Sentences, or commands to type."""

    lines: Sequence[str]
    title: str = ""


Part = Fields | Rows | Lines


def print_report(report: Any, parts: Iterable[Part], *, as_json: bool) -> None:
    """The parts for a person, or the report itself, exactly, for a program."""
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


def _print_title(title: str) -> None:
    if title:
        click.echo(paint(title, "1"))


# How values look.


def bar_text(amount: float, highest: float, width: int = 20) -> str:
    """A bar of blocks, to an eighth of a column; what is not nothing shows at least that."""
    if amount <= 0 or highest <= 0:
        return ""
    eighths = max(1, round(min(amount / highest, 1.0) * width * 8))
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def curve_text(amounts: Sequence[float]) -> str:
    """A column of blocks for each, as high as it is; nothing is a gap."""
    highest = max(amounts, default=0)
    return "".join(" " if each <= 0 else _HEIGHTS[min(7, int(each / highest * 8))] for each in amounts)


def percent_text(part: float) -> str:
    return f"{part:.1%}" if 0 < part < 0.1 else f"{part:.0%}"


def rate_text(amount: float, seconds: float) -> str:
    return f"{bytes_text(round(amount / seconds))}/s"


def minute_text(seconds: int) -> str:
    moment = datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC)
    return moment.strftime("%Y-%m-%d %H:%M")
