"""The output of the command line, for people and for programs.

Tables go to people: through rich, which is imported only then, with colours only on a terminal and never with NO_COLOR.
In a pipe the same table has no colours, so that `grep` and `awk` find whole words. `--json` goes to programs.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TextIO, TypeVar

import click
import msgspec

C = TypeVar("C", bound=Callable[..., Any])

MAX_COLUMNS: Final = 10_000
"""Rich must neither fold nor cut lines, in a pipe or on a terminal. A terminal that is too narrow breaks the line
itself, and nothing is lost."""
_UNITS: Final = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")

_AGES: Final = (("d", 86_400), ("h", 3_600), ("m", 60))

json_option = click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")


class Column(NamedTuple):
    title: str
    right: bool = False
    """Whether values stand at the right: numbers are easier to compare there."""


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[str]], *, empty: str) -> None:
    """Print a table. Without rows, print `empty` instead, to stderr: a program that reads the table gets none."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    lines = list(rows)
    if not lines:
        if empty:
            click.echo(empty, err=True)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column.title, justify="right" if column.right else "left", no_wrap=True)
    for line in lines:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in line))
    console = Console(highlight=False, width=MAX_COLUMNS)
    with console.capture() as printed:
        console.print(table)
    click.echo("\n".join(line.rstrip() for line in printed.get().splitlines()))


_STYLES: Final = {"ACTIVE": "green", "active": "green", "SEALED": "yellow", "yes": "green", "-": "dim"}
"""Colours of words that mean the same in every table."""


def print_fields(fields: Iterable[tuple[str, str]]) -> None:
    """Print the properties of one thing, one line each."""
    lines = list(fields)
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        click.echo(f"{paint(name, '1')}{' ' * (width - len(name))}  {value}")


def print_json(value: object) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def print_done(text: str, value: object, *, as_json: bool) -> None:
    """Print what a command did: a sentence, or the broker's reply as JSON."""
    if as_json:
        print_json(value)
    else:
        click.echo(text)


def print_note(text: str) -> None:
    """Print a remark for a person, but not for a program."""
    if sys.stderr.isatty():
        click.echo(text, err=True)


def print_error(text: str) -> None:
    line = " ".join(text.split())
    click.echo(f"{paint('braid:', '31;1', sys.stderr)} {line}", err=True)


def paint(text: str, code: str, stream: TextIO | None = None) -> str:
    """Return `text` in a colour or weight (an SGR code), if the stream is a terminal that shows colours."""
    target = stream if stream is not None else sys.stdout
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not target.isatty():
        return text
    return f"\x1b[{code}m{text}\x1b[0m"


def confirm(question: str, *, yes: bool) -> None:
    """Ask a person before something is deleted. A script cannot answer, so it is not asked."""
    if yes or sys.stdin is None or not sys.stdin.isatty():
        return
    if not click.confirm(question, err=True):
        raise click.ClickException("nothing was deleted")


# How values look.


def bytes_text(count: int | None) -> str:
    """Return `512 B`, `1.5 KiB`, `20 GiB`: three digits are enough to compare. `-` if the size is not known."""
    if count is None:
        return "-"
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in _UNITS:
        size /= 1024
        if round(size, 1) < 1000 or unit == _UNITS[-1]:
            return f"{size:.1f} {unit}" if round(size, 1) < 100 else f"{size:.0f} {unit}"
    raise AssertionError("unreachable")


def count_text(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"


def backlog_text(subscription: dict[str, Any]) -> str:
    """Return a count, marked as a minimum if some brokers did not answer."""
    return count_text(subscription["backlog"]) + ("+" if subscription["unavailable"] else "")


def age_text(timestamp_us: int | None) -> str:
    """Return how long ago that was, in its largest unit: `9d`, `3h`; `-` if it is not known."""
    if not timestamp_us:
        return "-"
    seconds = max(0, int(time.time() - timestamp_us / 1e6))
    return next((f"{seconds // size}{unit}" for unit, size in _AGES if seconds >= size), f"{seconds}s")


def print_held(name: str, subscription: dict[str, Any]) -> None:
    """Warn of a subscription that keeps records from retention."""
    if subscription.get("heldBytes"):
        held, moved = bytes_text(subscription["heldBytes"]), age_text(subscription["movedAt"])
        click.echo(
            f"Subscription {name} holds {held} back from retention; it last moved {moved} ago. Consume, skip or delete "
            "it, or limit the wait: `braid topic update --retention-waits-for-subscriptions`."
        )


def print_undrained(name: str, subscription: dict[str, Any]) -> None:
    """Warn of a subscription that keeps sealed segments, and that no consumer reads."""
    connected = any(each["connected"] for each in subscription["consumers"].values())
    if subscription.get("undrained") and not connected:
        segments = ", ".join(map(str, subscription["undrained"]))
        click.echo(
            f"Subscription {name} has no consumer and has not consumed what is sealed: segment {segments}. Consume, "
            "skip or delete it."
        )


def print_unreadable(name: str, subscription: dict[str, Any]) -> None:
    """Warn of a subscription whose record the broker cannot read."""
    if subscription.get("unreadable"):
        click.echo(
            f"Subscription {name} takes no consumers: {subscription['unreadable']}. A later version may read it; "
            "otherwise delete it."
        )


def time_text(timestamp_us: int | None) -> str:
    """Return the time in UTC; `-` if it is not known, or if the calendar has no such time."""
    if timestamp_us is None:
        return "-"
    try:
        moment = datetime.datetime.fromtimestamp(timestamp_us / 1e6, tz=datetime.UTC)
    except (ValueError, OverflowError, OSError):
        return "-"
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC")


def range_text(hash_range: dict[str, int]) -> str:
    """Return a segment's range, as in its name."""
    return f"{hash_range['start']:04x}-{hash_range['end']:04x}"


def duration_text(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
