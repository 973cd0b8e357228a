"""`braid topic`"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final

import click

from braid.cli.commands.topic_auto_scale import autoscale
from braid.cli.commands.topic_layout import abort, layout, merge, repartition, split
from braid.cli.commands.topic_moves import move, recover, replicas
from braid.cli.commands.topic_policies import given_policies, policy_fields, policy_options, print_warnings, update
from braid.cli.target import Target, ask, with_target
from braid.cli.terminal.output import (
    Column,
    age_text,
    backlog_text,
    bytes_text,
    confirm,
    count_text,
    json_option,
    print_done,
    print_fields,
    print_held,
    print_json,
    print_table,
    print_undrained,
    print_unreadable,
    range_text,
    time_text,
)
from braid.model.errors import PermissionDenied, RecordUnreadable, TopicExists, TopicNotFound
from braid.model.names import DEFAULT_NAMESPACE, DEFAULT_TENANT, TopicName
from braid.ports.tasks import all_of

if TYPE_CHECKING:
    from braid.client.admin import Admin
    from braid.client.client import Client

MAX_QUESTIONS: Final = 32
"""How many topics `list` asks about at the same time."""


@click.group()
def topic() -> None:
    """Create, look at, change and delete topics.

    NAME is `orders`, `tenant/namespace/orders` or `topic://tenant/namespace/orders`; `orders` alone is
    `public/default/orders`.
    """


@topic.command()
@click.argument("name")
@click.option(
    "--segments", default=1, show_default=True, metavar="N", help="Ranges of key hashes, each with its own log."
)
@policy_options(creating=True)
@click.option("--if-not-exists", is_flag=True, help="Leave a topic of this name as it is; do not fail.")
@json_option
@with_target
def create(
    target: Target,
    name: str,
    segments: int,
    if_not_exists: bool,
    as_json: bool,
    **policies: Any,
) -> None:
    """Create a topic.

    \b
    Examples:
      braid topic create orders
      braid topic create orders --segments 4 --retention 7d
      braid topic create orders --replicas 3 --confirm 2
      braid topic create orders --if-not-exists          # in a script
    """
    path = TopicName.parse(name).path

    async def make(client: Client) -> tuple[bool, dict[str, Any]]:
        """Return whether it was created, and the topic."""
        try:
            return True, await client.admin.create_topic(
                path,
                segments,
                **given_policies(policies),
            )
        except TopicExists:
            if if_not_exists:
                with contextlib.suppress(TopicNotFound):  # If it is being deleted, the first error says so.
                    return False, await client.admin.topic(path)
            raise

    created, made = ask(target, make)
    if not created:
        print_done(f"Topic {path} exists.", made, as_json=as_json)
        return
    plural = "segment" if segments == 1 else "segments"
    print_done(f"Created topic {path} with {segments} {plural}.", made, as_json=as_json)
    print_warnings(made.get("warnings", ()))


@topic.command("list")
@click.option(
    "--namespace",
    default=f"{DEFAULT_TENANT}/{DEFAULT_NAMESPACE}",
    show_default=True,
    metavar="TENANT/NAMESPACE",
    help="Whose topics.",
)
@json_option
@with_target
def list_topics(target: Target, namespace: str, as_json: bool) -> None:
    """List the topics of a namespace.

    \b
    Examples:
      braid topic list
      braid topic list --namespace acme/sales --json
    """

    async def look(client: Client) -> tuple[list[str], list[dict[str, Any] | None]]:
        names = await client.admin.list_topics(namespace)
        return names, [] if as_json else await _stats_of(client.admin, names)

    names, stats = ask(target, look)
    if as_json:
        print_json(names)
        return
    columns = [
        Column("TOPIC"),
        Column("SEGMENTS", right=True),
        Column("RECORDS", right=True),
        Column("SIZE", right=True),
        Column("IN/S", right=True),
        Column("OUT/S", right=True),
        Column("SUBSCRIPTIONS", right=True),
        Column("BACKLOG", right=True),
    ]
    rows = [
        (
            TopicName.parse(name).path,
            count_text(len(found["segments"])),
            count_text(_sum(found, "records")),
            bytes_text(_sum(found, "bytes")),
            bytes_text(_sum(found, "bytesInPerS")),
            bytes_text(_sum(found, "bytesOutPerS")),
            count_text(len(found["subscriptions"])),
            _backlog(found),
        )
        if found is not None
        else (TopicName.parse(name).path, *"-------")
        for name, found in zip(names, stats)
    ]
    example = "NAME" if namespace == f"{DEFAULT_TENANT}/{DEFAULT_NAMESPACE}" else f"{namespace}/NAME"
    print_table(columns, rows, empty=f"No topics in {namespace}. Create one with `braid topic create {example}`.")
    for name, found in zip(names, stats):
        if found is not None and found.get("unavailable") is not None:
            click.echo(f"Topic {TopicName.parse(name).path} is unavailable: {found['unavailable']}", err=True)


def _sum(stats: dict[str, Any], field: str) -> int | None:
    """Add up all segments. Returns None if one is not known, because another broker serves it."""
    values = [segment.get(field) for segment in stats["segments"].values()]
    return None if None in values else sum(values)


def _backlog(stats: dict[str, Any]) -> str:
    """Add up all subscriptions. The sum is a minimum, marked by `+`, if a segment did not answer."""
    unavailable = any(segment["unavailable"] is not None for segment in stats["segments"].values())
    return backlog_text(
        {
            "backlog": sum(each["backlog"] for each in stats["subscriptions"].values()),
            "unavailable": unavailable and stats["subscriptions"],
        }
    )


async def _stats_of(admin: Admin, names: list[str]) -> list[dict[str, Any] | None]:
    """Return the statistics of each topic; None for a topic that was deleted meanwhile or that we may not see."""
    slots = asyncio.Semaphore(MAX_QUESTIONS)

    async def stats(name: str) -> dict[str, Any] | None:
        async with slots:
            try:
                return await admin.topic_stats(name)
            except (TopicNotFound, PermissionDenied):
                return None

    return await all_of(map(stats, names))


@topic.command()
@click.argument("name")
@json_option
@with_target
def show(target: Target, name: str, as_json: bool) -> None:
    """Show a topic's layout, owners and policies.

    \b
    Examples:
      braid topic show orders
    """

    async def look(client: Client) -> tuple[dict[str, Any], dict[str, Any]]:
        stats = await client.admin.topic_stats(name)
        if stats.get("unavailable") is not None:  # Without this, the client would wait for the topic.
            raise RecordUnreadable(f"topic {name} is unavailable: {stats['unavailable']}")
        return await client.admin.topic(name), stats

    found, stats = ask(target, look)
    if as_json:
        print_json(found)
        return
    owners, copies = found.get("owners", {}), found.get("replicas", {})  # Older brokers do not tell.
    print_fields(
        [
            ("topic", TopicName.parse(found["name"]).path),
            ("id", str(found["topicId"])),
            ("created", time_text(found["createdAt"])),
            ("layout epoch", str(found["epoch"])),
            *policy_fields(found["policies"]),
            *found["properties"].items(),
        ]
    )
    click.echo()
    columns = [
        Column("SEGMENT", right=True),
        Column("RANGE"),
        Column("STATE"),
        Column("OWNER"),
        *([Column("REPLICAS")] if copies else []),
        Column("PARENTS"),
        Column("CHILDREN"),
    ]
    rows = [
        (
            str(segment["segmentId"]),
            range_text(segment["hashRange"]),
            segment["state"],
            owners.get(segment_id) or "-",
            *([", ".join(copies.get(segment_id, ())) or "-"] if copies else []),
            ", ".join(map(str, segment["parentIds"])) or "-",
            ", ".join(map(str, segment["childIds"])) or "-",
        )
        for segment_id, segment in found["segments"].items()
    ]
    print_table(columns, rows, empty="No segments.")
    _print_findings(stats)


@topic.command()
@click.argument("name")
@json_option
@with_target
def stats(target: Target, name: str, as_json: bool) -> None:
    """Show the size and the owners of a topic's segments, its subscriptions, and groups of checkpoint consumers.

    \b
    Examples:
      braid topic stats orders
      braid topic stats orders --json | jq '.subscriptions.billing.backlog'
    """
    found = ask(target, lambda client: client.admin.topic_stats(name))
    if as_json:
        print_json(found)
        return
    replicated = any(segment.get("replicas") for segment in found["segments"].values())  # Older brokers do not tell.
    columns = [
        Column("SEGMENT", right=True),
        Column("RANGE"),
        Column("STATE"),
        Column("OWNER"),
        *([Column("REPLICAS")] if replicated else []),
        Column("EARLIEST", right=True),
        Column("END", right=True),
        Column("RECORDS", right=True),
        Column("SIZE", right=True),
    ]
    rows = [
        (
            str(segment["segmentId"]),
            range_text(segment["hashRange"]),
            segment["state"] or "-",
            segment["owner"] or "-",
            *([", ".join(segment["replicas"]) or "-"] if replicated else []),
            count_text(segment["earliestOffset"]),
            count_text(segment["endOffset"]),
            count_text(segment["records"]),
            bytes_text(segment["bytes"]),
        )
        for segment in found["segments"].values()
    ]
    print_table(columns, rows, empty="No segments.")
    _print_findings(found)
    if found["subscriptions"]:
        click.echo()
        _print_subscriptions(found["subscriptions"])
    if found.get("groups"):  # Earlier brokers do not tell.
        click.echo()
        _print_groups(found["groups"])


def _print_findings(stats: dict[str, Any]) -> None:
    for segment in stats["segments"].values():
        if segment["unavailable"] is not None:
            click.echo(f"Segment {segment['segmentId']} is unavailable: {segment['unavailable']}")
        if (hashes := segment.get("hotKeyHashes")) is not None:
            click.echo(
                f"Segment {segment['segmentId']} has {segment['hotKeyShare']:.0%} of its load on key hashes "
                f"{range_text(hashes)}: one key can be in one segment only, so splits hardly help."
            )


def _print_groups(groups: dict[str, Any]) -> None:
    columns = [
        Column("GROUP"),
        Column("SEGMENTS", right=True),
        Column("BACKLOG", right=True),
        Column("CONSUMERS", right=True),
    ]
    rows = [
        (
            name,
            count_text(sum(len(consumer["segments"]) for consumer in each["consumers"].values())),
            count_text(each["backlog"]),
            count_text(len(each["consumers"])),
        )
        for name, each in groups.items()
    ]
    print_table(columns, rows, empty="")


def _print_subscriptions(subscriptions: dict[str, Any]) -> None:
    columns = [
        Column("SUBSCRIPTION"),
        Column("KIND"),
        Column("AGE", right=True),
        Column("MOVED", right=True),
        Column("BACKLOG", right=True),
        Column("CONSUMERS", right=True),
    ]
    rows = [
        (
            name,
            each["kind"] or "?",
            age_text(each["createdAt"]),
            age_text(each.get("movedAt")),
            backlog_text(each),
            count_text(len(each["consumers"])),
        )
        for name, each in subscriptions.items()
    ]
    print_table(columns, rows, empty="")
    for name, each in subscriptions.items():
        print_held(name, each)
        print_undrained(name, each)
        print_unreadable(name, each)


@topic.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--force", is_flag=True, help="Also if consumers are connected.")
@json_option
@with_target
def delete(target: Target, name: str, yes: bool, force: bool, as_json: bool) -> None:
    """Delete a topic with all its records and subscriptions.

    \b
    Examples:
      braid topic delete orders
      braid topic delete orders --yes          # in a script
    """
    path = TopicName.parse(name).path
    confirm(f"Delete topic {path} with all its records and subscriptions?", yes=yes)
    ask(target, lambda client: client.admin.delete_topic(path, force=force))
    print_done(f"Deleted topic {path}.", {"deleted": path}, as_json=as_json)


# Changes of layout are in topic_layout.py, those of owners in topic_moves.py.


for command in (split, merge, repartition, abort, layout):
    topic.add_command(command)
topic.add_command(autoscale)
topic.add_command(update)
topic.add_command(move)
topic.add_command(move, "unload")
topic.add_command(recover)
topic.add_command(replicas)
