"""`braid broker`"""

from __future__ import annotations

import click

from braid.cli.output import Column, count_text, json_option, print_done, print_json, print_table
from braid.cli.target import Target, ask, with_target


@click.group()
def broker() -> None:
    """Look at brokers; take one out of service and back."""


@broker.command("list")
@json_option
@with_target
def list_brokers(target: Target, as_json: bool) -> None:
    """List the brokers of the cluster.

    \b
    Examples:
      braid broker list
    """
    found = ask(target, lambda client: client.admin.brokers())
    if as_json:
        print_json(found)
        return
    columns = [Column("BROKER"), Column("STATE"), Column("ADDRESS"), Column("ADMIN"), Column("SEGMENTS", right=True)]
    rows = [
        (each["id"], each["state"], each["address"], each["admin"] or "-", count_text(each["segments"]))
        for each in found
    ]
    print_table(columns, rows, empty="No brokers.")


@broker.command()
@click.argument("broker_id", metavar="ID")
@json_option
@with_target
def drain(target: Target, broker_id: str, as_json: bool) -> None:
    """Move everything off a broker, for maintenance.

    \b
    Examples:
      braid broker drain broker-2
    """
    done = ask(target, lambda client: client.admin.drain(broker_id))
    print_done(f"Broker {broker_id} is drained.", done, as_json=as_json)


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
    print_done(f"Broker {broker_id} is active.", done, as_json=as_json)
