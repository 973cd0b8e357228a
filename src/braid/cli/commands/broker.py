"""`braid broker`"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import click

from braid.cli.target import Target, ask, with_target
from braid.cli.terminal.output import (
    Column,
    bytes_text,
    count_text,
    json_option,
    print_done,
    print_json,
    print_note,
    print_table,
)
from braid.cli.terminal.spinner import status_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from braid.client.client import Client

LOOK_S: Final = 0.5


@click.group()
def broker() -> None:
    """Look at brokers; take one out of service and back; even their load."""


@broker.command("list")
@json_option
@with_target
def list_brokers(target: Target, as_json: bool) -> None:
    """List the brokers of the cluster, with their segments and load.

    A `down` broker is unreachable; SEGMENTS counts the segments that wait for its return. REPLICAS counts the segments
    of others of which a broker holds copies.

    \b
    Examples:
      braid broker list
    """
    found = ask(target, lambda client: client.admin.brokers())
    if as_json:
        print_json(found)
        return
    with_racks = any("rack" in each["labels"] for each in found)
    with_replicas = any(each.get("replicas") for each in found)  # Older brokers do not tell.
    columns = [
        Column("BROKER"),
        Column("STATE"),
        *([Column("RACK")] if with_racks else []),
        Column("ADDRESS"),
        Column("ADMIN"),
        Column("SEGMENTS", right=True),
        *([Column("REPLICAS", right=True)] if with_replicas else []),
        Column("LEADER"),
        Column("IN/S", right=True),
        Column("OUT/S", right=True),
        Column("CPU", right=True),
        Column("VERSION"),
    ]
    rows = [
        (
            each["id"],
            each["state"],
            *([each["labels"].get("rack", "-")] if with_racks else []),
            each["address"] or "-",
            each["admin"] or "-",
            count_text(each["segments"]),
            *([count_text(each["replicas"])] if with_replicas else []),
            "yes" if each["leader"] else "-",
            *_load_texts(each["load"]),
            each["version"] or "-",
        )
        for each in found
    ]
    print_table(columns, rows, empty="No brokers.")


def _load_texts(load: dict[str, Any] | None) -> tuple[str, str, str]:
    if load is None:
        return "-", "-", "-"
    return bytes_text(load["bytesInPerS"]), bytes_text(load["bytesOutPerS"]), f"{load['cpu']:.0%}"


@broker.command()
@click.argument("broker_id", metavar="ID")
@click.option("--no-wait", is_flag=True, help="Only request it, and return immediately.")
@json_option
@with_target
def drain(target: Target, broker_id: str, no_wait: bool, as_json: bool) -> None:
    """Move all segments off a broker, for maintenance, and wait until this is done.

    Ctrl-C ends only the wait. The broker gets no segments, also after a restart, until it is activated again.

    \b
    Examples:
      braid broker drain broker-2
    """
    with status_line(f"Draining {broker_id}") as show:

        async def ask_and_wait(client: Client) -> dict[str, Any]:
            state = await client.admin.drain(broker_id)
            return state if no_wait else await _drained(client, state, show)

        try:
            state = ask(target, ask_and_wait)
        except KeyboardInterrupt:
            print_note(f"Broker {broker_id} keeps draining; `braid broker activate {broker_id}` cancels this.")
            raise
    left = f"{count_text(state['segments'])} segments"
    texts = {
        "drained": f"Broker {broker_id} is drained.",
        "draining": f"Broker {broker_id} is draining: {left} to move.",
        "down": f"Broker {broker_id} is down: {left} wait for it, and move away when it is back.",
    }
    print_done(texts.get(state["state"], f"Broker {broker_id} is {state['state']}."), state, as_json=as_json)


async def _drained(client: Client, state: dict[str, Any], show: Callable[[str], None]) -> dict[str, Any]:
    broker_id, total = state["id"], state["segments"]
    said = False
    told: set[str] = set()
    while state["state"] == "draining":
        brokers = {each["id"]: each for each in await client.admin.brokers()}
        if broker_id not in brokers:
            break  # The broker owned nothing any more, and has stopped.
        state = brokers[broker_id]
        total = max(total, state["segments"])
        show(f"Draining {broker_id}: {total - state['segments']} of {total} segments have moved")
        if not said and not any(each["state"] == "active" for each in brokers.values()):
            said = True
            click.echo("No other broker is active: nothing can move until one is.", err=True)
        for obstacle in state.get("obstacles", ()):  # Of a broker of this version.
            if obstacle not in told:
                told.add(obstacle)
                click.echo(f"Not moved yet: {obstacle}", err=True)
        if state["state"] == "draining":
            await asyncio.sleep(LOOK_S)
    return state


@broker.command()
@click.argument("broker_id", metavar="ID")
@json_option
@with_target
def activate(target: Target, broker_id: str, as_json: bool) -> None:
    """Let a drained broker serve again.

    \b
    Examples:
      braid broker activate broker-2
    """
    done = ask(target, lambda client: client.admin.activate(broker_id))
    print_done(f"Broker {broker_id} is {done['state']}.", done, as_json=as_json)


@broker.command()
@click.option("--dry-run", is_flag=True, help="Only say what would move.")
@json_option
@with_target
def balance(target: Target, dry_run: bool, as_json: bool) -> None:
    """Start the moves that best balance the brokers.

    The command starts a few moves at a time. Run it again when they have ended, or start the brokers with --balance:
    then they balance by themselves.

    \b
    Examples:
      braid broker balance --dry-run
    """
    plan = ask(target, lambda client: client.admin.balance(dry_run=dry_run))
    if as_json:
        print_json(plan)
        return
    columns = [
        Column("TOPIC"),
        Column("SEGMENT", right=True),
        Column("FROM"),
        Column("TO"),
        Column("LOAD/S", right=True),
        Column("WHY"),
    ]
    rows = [
        (
            each["topic"],
            str(each["segment"]),
            each["from"],
            each["to"],
            bytes_text(each["bytesPerS"]),
            each["reason"],
        )
        for each in plan["moves"]
    ]
    if rows:
        print_table(columns, rows, empty="")
        click.echo(
            f"The busiest broker has {plan['spreadBefore']:.2f} times the mean load, then {plan['spreadAfter']:.2f}."
        )
    else:
        click.echo("Nothing moves.")
    for note in plan["notes"]:
        click.echo(f"Note: {note['text']}.")
