"""`braid topic move`, `braid topic recover` and `braid topic replicas`: which brokers have a topic's segments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from braid.cli.commands.topic_policies import print_warnings
from braid.cli.target import Target, ask, with_target
from braid.cli.terminal.output import Column, count_text, duration_text, json_option, print_json, print_table
from braid.cli.terminal.spinner import status_line, with_elapsed
from braid.model.names import TopicName

if TYPE_CHECKING:
    from braid.client.client import Client

WAIT: Final = click.FloatRange(min=0, min_open=True, max=3_600)


@click.command()
@click.argument("name")
@click.option("--segment", type=int, metavar="ID", help="Only this segment. [default: all]")
@click.option("--to", metavar="BROKER", help="The broker that takes over. [default: the least loaded]")
@click.option("--timeout", type=WAIT, default=60.0, show_default=True, metavar="SECONDS", help="How long to wait.")
@json_option
@with_target
def move(target: Target, name: str, segment: int | None, to: str | None, timeout: float, as_json: bool) -> None:
    """Move a topic, or one segment of it, to another broker. `unload` is another name for it.

    Clients keep publishing and reading. The command waits until the new owners serve the segments.

    \b
    Examples:
      braid topic move orders --to broker-2
      braid topic move orders --segment 3
    """
    path = TopicName.parse(name).path
    with status_line(f"Moving {path}") as show:

        async def ask_and_wait(client: Client) -> dict[str, Any]:
            moving = client.admin.move(path, segment=segment, to=to, timeout=timeout)
            return await with_elapsed(moving, f"Moving {path}", show)

        done = ask(target, ask_and_wait)
    if as_json:
        print_json(done)
    else:
        _print_moves(done["segments"])


@click.command()
@click.argument("name")
@click.option("--segment", type=int, metavar="ID", help="Only this segment. [default: all that are lost]")
@click.option("--to", metavar="BROKER", help="The broker that takes over. [default: the least loaded]")
@click.option("--accept-loss", is_flag=True, help="Accept the loss of records that only the lost broker's disk had.")
@click.option("--timeout", type=WAIT, default=60.0, show_default=True, metavar="SECONDS", help="How long to wait.")
@json_option
@with_target
def recover(
    target: Target,
    name: str,
    segment: int | None,
    to: str | None,
    accept_loss: bool,
    timeout: float,
    as_json: bool,
) -> None:
    """Let another broker continue segments whose broker is gone for good, or cannot open them.

    The new owner continues after the records in shared storage. Records that only the lost broker's disk had are lost.
    Without --accept-loss nothing changes, and the error says how far the stored records reach.

    \b
    Examples:
      braid topic recover orders
      braid topic recover orders --segment 3 --to broker-2 --accept-loss
    """
    path = TopicName.parse(name).path
    with status_line(f"Recovering {path}") as show:

        async def ask_and_wait(client: Client) -> dict[str, Any]:
            recovering = client.admin.recover(path, segment=segment, to=to, accept_loss=accept_loss, timeout=timeout)
            return await with_elapsed(recovering, f"Recovering {path}", show)

        done = ask(target, ask_and_wait)
    if as_json:
        print_json(done)
        return
    _print_moves(done["segments"])
    for each in done["segments"]:
        click.echo(f"Segment {each['segment']}: {each['loss']}.")


def _took_text(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else duration_text(seconds)


def _print_moves(segments: list[dict[str, Any]]) -> None:
    columns = [
        Column("SEGMENT", right=True),
        Column("FROM"),
        Column("TO"),
        Column("EPOCH", right=True),
        Column("TOOK", right=True),
    ]
    rows = [
        (
            str(each["segment"]),
            each["from"],
            each["to"],
            count_text(each["epoch"]),
            _took_text(each["seconds"]) if each["moved"] else "was there",
        )
        for each in segments
    ]
    print_table(columns, rows, empty="No segments.")


@click.command()
@click.argument("name")
@click.option("--set", "replicas", type=int, metavar="N", help="Ask for so many replicas of each segment.")
@click.option("--confirm", type=int, metavar="W", help="Let so many of them confirm. [default: with --set, a majority]")
@json_option
@with_target
def replicas(target: Target, name: str, replicas: int | None, confirm: int | None, as_json: bool) -> None:
    """Show the replicas of a topic's segments, or ask for another number of them.

    A replica is `in sync` when its copy counts for confirms. Replicas that are asked for are brought about while
    clients go on; look again to see how far they are.

    \b
    Examples:
      braid topic replicas orders
      braid topic replicas orders --set 3
      braid topic replicas orders --set 5 --confirm 3
    """
    path = TopicName.parse(name).path

    async def look(client: Client) -> dict[str, Any]:
        if replicas is None and confirm is None:
            return await client.admin.topic_replicas(path)
        return await client.admin.set_replicas(path, replicas, confirm=confirm)

    found = ask(target, look)
    if as_json:
        print_json(found)
        return
    columns = [
        Column("SEGMENT", right=True),
        Column("CONFIRM"),
        Column("REPLICA"),
        Column("STATE"),
        Column("END", right=True),
        Column("BEHIND", right=True),
    ]
    rows = [
        (
            str(segment["segmentId"]),
            f"{segment['writeQuorum']} of {_voters(segment)}",
            each["broker"],
            each["state"].replace("-", " "),
            count_text(each["end"]),
            count_text(each["behind"]),
        )
        for segment in found["segments"].values()
        for each in segment["replicas"]
    ]
    print_table(columns, rows, empty="No segments.")
    for segment in found["segments"].values():
        _print_replica_findings(segment, found["replicas"])
    print_warnings(found.get("warnings", ()))


def _voters(segment: dict[str, Any]) -> int:
    """Return how many replicas the segment has. Those that join do not count yet."""
    return sum(each["state"] != "joining" for each in segment["replicas"])


def _print_replica_findings(segment: dict[str, Any], wanted: int) -> None:
    number, change = segment["segmentId"], segment["change"]
    if segment["unavailable"] is not None:
        click.echo(f"Segment {number} is unavailable: {segment['unavailable']}")
    for each in segment["replicas"]:
        if each["error"]:
            click.echo(f"Segment {number}: {each['broker']} gets nothing: {each['error']}")
    if change is not None:
        to = ", ".join(change["replicas"]) or "its owner alone"
        waits = "; ".join(change["waitsFor"]) or "it is nearly done"
        click.echo(f"Segment {number} changes to {to}, {change['writeQuorum']} to confirm: {waits}")
    elif segment["replicas"] and _voters(segment) != wanted:
        click.echo(f"Segment {number} has {_voters(segment)} replicas, and is to have {wanted}.")
