"""`braid subscription`"""

from __future__ import annotations

import datetime
import re

import click

from braid.cli.target import Target, ask, with_target
from braid.cli.terminal.output import (
    Column,
    age_text,
    backlog_text,
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
    time_text,
)
from braid.model.subscription import DEFAULT_START


@click.group()
def subscription() -> None:
    """Create, look at, move and delete subscriptions. TOPIC is named as in `braid topic`."""


@subscription.command()
@click.argument("topic")
@click.argument("name")
@click.option(
    "--from",
    "start",
    type=click.Choice(["earliest", "latest"]),
    default=DEFAULT_START,
    show_default=True,
    help="Where it begins: at the first stored record, or at the records that are published from now on.",
)
@json_option
@with_target
def create(target: Target, topic: str, name: str, start: str, as_json: bool) -> None:
    """Create a subscription before its first consumer.

    \b
    Examples:
      braid subscription create orders billing
      braid subscription create orders billing --from earliest
    """
    made = ask(target, lambda client: client.admin.create_subscription(topic, name, start=start))
    print_done(f"Created subscription {name} on {topic}, from {start}.", made, as_json=as_json)


@subscription.command("list")
@click.argument("topic")
@json_option
@with_target
def list_subscriptions(target: Target, topic: str, as_json: bool) -> None:
    """List the subscriptions of a topic.

    \b
    Examples:
      braid subscription list orders
    """
    found = ask(target, lambda client: client.admin.subscriptions(topic))
    if as_json:
        print_json(found)
        return
    columns = [
        Column("SUBSCRIPTION"),
        Column("KIND"),
        Column("CREATED"),
        Column("MOVED", right=True),
        Column("BACKLOG", right=True),
        Column("CONSUMERS", right=True),
    ]
    rows = [
        (
            each["name"],
            each["kind"] or "?",
            time_text(each["createdAt"]),
            age_text(each.get("movedAt")),
            backlog_text(each),
            count_text(len(each["consumers"])),
        )
        for each in found
    ]
    print_table(columns, rows, empty=f"Topic {topic} has no subscriptions.")
    for each in found:
        print_held(each["name"], each)
        print_undrained(each["name"], each)
        print_unreadable(each["name"], each)


@subscription.command()
@click.argument("topic")
@click.argument("name")
@json_option
@with_target
def show(target: Target, topic: str, name: str, as_json: bool) -> None:
    """Show the position of a subscription in each segment, and its consumers.

    \b
    Examples:
      braid subscription show orders billing
    """
    found = ask(target, lambda client: client.admin.subscription(topic, name))
    if as_json:
        print_json(found)
        return
    print_fields(
        [
            ("subscription", found["name"]),
            ("kind", found["kind"] or "?"),
            ("created", f"{time_text(found['createdAt'])} ({age_text(found['createdAt'])} ago)"),
            ("last moved", f"{age_text(found.get('movedAt'))} ago"),
            ("backlog", backlog_text(found)),
        ]
    )
    click.echo()
    holders = {str(segment): consumer for consumer, each in found["consumers"].items() for segment in each["segments"]}
    columns = [
        Column("SEGMENT", right=True),
        Column("EARLIEST", right=True),
        Column("OFFSET", right=True),
        Column("END", right=True),
        Column("BACKLOG", right=True),
        Column("CONSUMER"),
    ]
    rows = [
        (
            segment,
            count_text(each["earliest"]),
            count_text(each["offset"]),
            count_text(each["end"]),
            count_text(each["backlog"]),
            holders.get(segment, "(drained)" if each.get("drained") else "-"),
        )
        for segment, each in found["segments"].items()
    ]
    print_table(columns, rows, empty="No segments.")
    print_held(name, found)
    print_undrained(name, found)
    print_unreadable(name, found)
    for segment, each in found["unavailable"].items():
        click.echo(f"Segment {segment} is unavailable: {each['reason']}")
    idle = [consumer for consumer, each in found["consumers"].items() if not each["segments"]]
    if idle:
        click.echo(f"\nConsumers without a segment: {', '.join(idle)}")


@subscription.command()
@click.argument("topic")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--force", is_flag=True, help="Also if consumers are connected.")
@json_option
@with_target
def delete(target: Target, topic: str, name: str, yes: bool, force: bool, as_json: bool) -> None:
    """Delete a subscription with its positions. Records stay.

    \b
    Examples:
      braid subscription delete orders billing
    """
    confirm(f"Delete subscription {name} of {topic}? It forgets how far it is.", yes=yes)
    ask(target, lambda client: client.admin.delete_subscription(topic, name, force=force))
    print_done(f"Deleted subscription {name} of {topic}.", {"deleted": name}, as_json=as_json)


@subscription.command()
@click.argument("topic")
@click.argument("name")
@click.option("--to", type=click.Choice(["earliest", "latest"]), help="To one end of every segment.")
@click.option("--offset", "offsets", multiple=True, metavar="SEGMENT:OFFSET", help="Of one segment. Repeatable.")
@click.option(
    "--timestamp", metavar="TIME", help="To the first record not older: 2026-11-15T12:00:00Z, or ms since 1970."
)
@json_option
@with_target
def seek(
    target: Target,
    topic: str,
    name: str,
    to: str | None,
    offsets: tuple[str, ...],
    timestamp: str | None,
    as_json: bool,
) -> None:
    """Set a subscription to another place. Its consumers continue from there.

    \b
    Examples:
      braid subscription seek orders billing --to earliest
      braid subscription seek orders billing --offset 0:1500 --offset 1:0
      braid subscription seek orders billing --timestamp 2026-11-15T12:00:00Z
    """
    if (to is not None) + bool(offsets) + (timestamp is not None) != 1:
        raise click.UsageError("give exactly one of --to, --offset and --timestamp")
    place: str | int | dict[int, int]
    if to is not None:
        place, said = to, to
    elif offsets:
        place, said = parse_offsets(offsets), ", ".join(offsets)
    else:
        assert timestamp is not None
        place, said = parse_timestamp_ms(timestamp), timestamp
    done = ask(target, lambda client: client.admin.seek(topic, name, place))
    print_done(f"Subscription {name} of {topic} continues at {said}.", done, as_json=as_json)


@subscription.command()
@click.argument("topic")
@click.argument("name")
@click.option("--segment", type=click.IntRange(min=0), metavar="ID", help="Only in this segment; needs --count.")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="How many records of --segment. [default: all]")
@json_option
@with_target
def skip(target: Target, topic: str, name: str, segment: int | None, count: int | None, as_json: bool) -> None:
    """Mark records as consumed: the whole backlog, or the next N of one segment.

    \b
    Examples:
      braid subscription skip orders billing
      braid subscription skip orders billing --segment 0 --count 1     # a record that cannot be processed
    """
    if (segment is None) != (count is None):
        raise click.UsageError("--segment and --count belong together")
    done = ask(target, lambda client: client.admin.skip(topic, name, segment=segment, count=count))
    what = "everything" if segment is None else f"{count} of segment {segment}"
    print_done(f"Subscription {name} of {topic} skipped {what}.", done, as_json=as_json)


def parse_offsets(texts: tuple[str, ...]) -> dict[int, int]:
    """Parse `SEGMENT:OFFSET` of each segment."""
    found: dict[int, int] = {}
    for text in texts:
        match = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", text)
        if match is None:
            raise click.BadParameter(f"{text!r} must be SEGMENT:OFFSET, for example 0:1500", param_hint="'--offset'")
        if int(match[1]) in found:
            raise click.BadParameter(f"segment {match[1]} is named twice", param_hint="'--offset'")
        found[int(match[1])] = int(match[2])
    return found


def parse_timestamp_ms(text: str) -> int:
    """Parse ISO 8601, in UTC unless it has a zone, or milliseconds since 1970."""
    if re.fullmatch(r"-?[0-9]{1,15}", text):
        return int(text)
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is no time: write 2026-11-15T12:00:00Z, or milliseconds since 1970", param_hint="'--timestamp'"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return round(moment.timestamp() * 1000)
