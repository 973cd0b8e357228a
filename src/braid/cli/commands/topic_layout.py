"""`braid topic split`, `merge`, `repartition`, `abort` and `layout`: the shape of a topic."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

import click

from braid.cli.target import Target, ask, with_target
from braid.cli.terminal.braid_drawing import draw
from braid.cli.terminal.output import (
    Column,
    duration_text,
    json_option,
    print_done,
    print_fields,
    print_json,
    print_table,
    range_text,
)
from braid.cli.terminal.param_types import HASH
from braid.cli.terminal.spinner import status_line, with_elapsed
from braid.model.names import TopicName

if TYPE_CHECKING:
    from braid.client.client import Client

WAIT: Final = click.FloatRange(min=0, min_open=True, max=3_600)
timeout_option = click.option(
    "--timeout", type=WAIT, default=60.0, show_default=True, metavar="SECONDS", help="How long to wait."
)


@click.command()
@click.argument("name")
@click.argument("segment_id", type=int)
@click.option(
    "--at", type=HASH, metavar="HEX", help="The first hash of the upper half, hex digits. [default: the middle]"
)
@click.option("--into", type=click.IntRange(2), default=2, show_default=True, help="How many segments of equal size.")
@timeout_option
@json_option
@with_target
def split(target: Target, name: str, segment_id: int, at: str | None, into: int, timeout: float, as_json: bool) -> None:
    """Split a segment in two, or into more.

    Clients keep publishing and reading. The command waits until the new segments take writes.

    \b
    Examples:
      braid topic split orders 0
      braid topic split orders 0 --at 4000
      braid topic split orders 0 --into 4
    """
    path = TopicName.parse(name).path
    _change(
        target,
        f"Splitting segment {segment_id} of {path}",
        lambda client: client.admin.split(path, segment_id, at=at, into=into, timeout=timeout),
        as_json=as_json,
    )


@click.command()
@click.argument("name")
@click.argument("first_id", type=int)
@click.argument("second_id", type=int)
@timeout_option
@json_option
@with_target
def merge(target: Target, name: str, first_id: int, second_id: int, timeout: float, as_json: bool) -> None:
    """Merge two neighbouring segments into one.

    \b
    Examples:
      braid topic merge orders 1 2
    """
    path = TopicName.parse(name).path
    _change(
        target,
        f"Merging segments {first_id} and {second_id} of {path}",
        lambda client: client.admin.merge(path, first_id, second_id, timeout=timeout),
        as_json=as_json,
    )


@click.command()
@click.argument("name")
@click.argument("segments", type=click.IntRange(min=1), metavar="N")
@timeout_option
@json_option
@with_target
def repartition(target: Target, name: str, segments: int, timeout: float, as_json: bool) -> None:
    """Change a topic to N segments of equal size.

    \b
    Examples:
      braid topic repartition orders 8
    """
    path = TopicName.parse(name).path
    _change(
        target,
        f"Changing {path} to {segments} segments",
        lambda client: client.admin.repartition(path, segments, timeout=timeout),
        as_json=as_json,
    )


@click.command()
@click.argument("name")
@json_option
@with_target
def abort(target: Target, name: str, as_json: bool) -> None:
    """Take back a change of the layout whose old segments still take writes.

    \b
    Examples:
      braid topic abort orders
    """
    path = TopicName.parse(name).path
    ask(target, lambda client: client.admin.abort_transition(path))
    print_done(f"The layout of {path} stays as it is.", {"aborted": path}, as_json=as_json)


@click.command()
@click.argument("name")
@click.option("--rows", type=click.IntRange(1), default=12, show_default=True, help="How many layouts to draw.")
@json_option
@with_target
def layout(target: Target, name: str, rows: int, as_json: bool) -> None:
    """Draw a topic's braid: how its segments were split and merged.

    Time goes down, the ring of key hashes across. The last row is the layout that takes writes now, with the owners. A
    table names every segment that the topic still has, and a change that is under way.

    \b
    Examples:
      braid topic layout orders
      braid topic layout orders --rows 100
    """
    found = ask(target, lambda client: client.admin.layout(TopicName.parse(name).path))
    if as_json:
        print_json(found)
        return
    segments, owners = list(found["segments"].values()), found["owners"]
    for line in draw(segments, width=shutil.get_terminal_size().columns, rows=rows, owners=owners):
        click.echo(line)
    click.echo()
    print_table(
        [
            Column("SEGMENT", right=True),
            Column("RANGE"),
            Column("STATE"),
            Column("OWNER"),
            Column("FROM"),
            Column("TO"),
        ],
        (
            [
                str(segment["segmentId"]),
                range_text(segment["hashRange"]),
                segment["state"],
                owners.get(str(segment["segmentId"])) or "-",
                _numbers(segment["parentIds"]),
                _numbers(segment["childIds"]),
            ]
            for segment in segments
        ),
        empty="The topic has no segments.",
    )
    if (change := found["transition"]) is not None:
        children = ", ".join(f"{id_} ({range_text(hashes)})" for id_, hashes in change["children"].items())
        click.echo()
        print_fields(
            [
                ("change", f"{_numbers(change['parents'])} → {children}"),
                ("step", change["step"]),
                ("waits for", "; ".join(change["waitsFor"]) or "-"),
            ]
        )


def _numbers(segments: list[int]) -> str:
    return ", ".join(map(str, segments)) or "-"


def _change(target: Target, what: str, change: Callable[[Client], Awaitable[dict[str, Any]]], *, as_json: bool) -> None:
    with status_line(what) as show:
        done = ask(target, lambda client: with_elapsed(change(client), what, show))
    if as_json:
        print_json(done)
        return
    parents, children = _numbers(done["parents"]), _numbers(done["children"])
    if done.get("doneBefore"):  # Earlier brokers do not tell.
        click.echo(f"{parents} → {children}: the layout has this change already.")
    else:
        click.echo(f"{parents} → {children} in {duration_text(done['seconds'])}.")
