"""`braid subscription`"""

from __future__ import annotations

import datetime
import re
from typing import TYPE_CHECKING, Any, Final

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
from braid.cli.terminal.param_types import DURATION
from braid.cli.terminal.record_lines import record_object
from braid.model.errors import TopicNotFound
from braid.model.subscription import DEFAULT_START, MAX_PEEK

if TYPE_CHECKING:
    from braid.client.client import Client

SHOWN_CHARS: Final = 60
"""Of a key or a value in a table."""


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
@click.option(
    "--kind",
    type=click.Choice(["stream", "queue"]),
    default="stream",
    show_default=True,
    help="stream: ordered, one consumer for each segment. queue: messages one by one, in no order, any consumers.",
)
@click.option(
    "--ack-timeout", type=DURATION, metavar="TIME", help="Of a queue: deliver again what is not acked. [default: 30s]"
)
@click.option(
    "--max-deliveries", type=int, metavar="N", help="Of a queue: then a message is a dead letter. [default: never]"
)
@click.option("--dead-letter-topic", metavar="TOPIC", help="Of a queue: where dead letters go. It must exist.")
@click.option("--query", is_flag=True, help="A query of Spark shows by it how far it is. The query creates it, too.")
@json_option
@with_target
def create(
    target: Target,
    topic: str,
    name: str,
    start: str,
    kind: str,
    ack_timeout: int | None,
    max_deliveries: int | None,
    dead_letter_topic: str | None,
    query: bool,
    as_json: bool,
) -> None:
    """Create a subscription before its first consumer.

    \b
    Examples:
      braid subscription create orders billing
      braid subscription create orders billing --from earliest
      braid subscription create orders mailer --kind queue --ack-timeout 1m
      braid subscription create orders mailer --kind queue --max-deliveries 5 --dead-letter-topic orders-dead
    """
    policies = (ack_timeout, max_deliveries, dead_letter_topic)
    if kind != "queue" and any(each is not None for each in policies):
        raise click.UsageError("--ack-timeout, --max-deliveries and --dead-letter-topic need --kind queue")
    if (max_deliveries is None) != (dead_letter_topic is None):
        raise click.UsageError("--max-deliveries and --dead-letter-topic belong together")

    async def created(client: Client) -> dict[str, Any]:
        if dead_letter_topic is not None:
            try:
                await client.admin.topic(dead_letter_topic)
            except TopicNotFound:
                raise TopicNotFound(
                    f"there is no topic {dead_letter_topic} for dead letters; create it with `braid topic create "
                    f"{dead_letter_topic}`"
                ) from None
        return await client.admin.create_subscription(
            topic,
            name,
            start=start,
            kind=kind,
            ack_timeout_ms=ack_timeout * 1000 if ack_timeout is not None else None,
            max_deliveries=max_deliveries,
            dead_letter_topic=dead_letter_topic,
            query=query,
        )

    made = ask(target, created)
    what = "queue subscription" if kind == "queue" else "subscription"
    print_done(f"Created {what} {name} on {topic}, from {start}.", made, as_json=as_json)


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
    """Show the position of a subscription in each segment, and its consumers; of a queue, what its messages wait for.

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
            ("kind", f"{found['kind'] or '?'}{', of a query' if found.get('query') else ''}"),
            ("created", f"{time_text(found['createdAt'])} ({age_text(found['createdAt'])} ago)"),
            ("last moved", f"{age_text(found.get('movedAt'))} ago"),
            ("backlog", backlog_text(found)),
            *_queue_fields(found),
        ]
    )
    click.echo()
    if found.get("queue") is not None:
        _print_queue(found)
    else:
        _print_positions(found)
    print_held(name, found)
    print_undrained(name, found)
    print_unreadable(name, found)
    for segment, each in found["unavailable"].items():
        click.echo(f"Segment {segment} is unavailable: {each['reason']}")
    idle = [consumer for consumer, each in found["consumers"].items() if not each["segments"]]
    if idle:
        click.echo(f"\nConsumers without a segment: {', '.join(idle)}")


def _queue_fields(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what only a queue has, as lines of `show`."""
    queue = found.get("queue")
    if queue is None:
        return []
    policies = queue["policies"]
    dead_letters = "none"
    if policies["maxDeliveries"]:
        times = policies["maxDeliveries"]
        deliveries = "1 delivery" if times == 1 else f"{times} deliveries"
        dead_letters = f"after {deliveries} to {policies['deadLetterTopic']}"
        dead_letters += f"; {count_text(queue['deadLettered'])} since its brokers opened it"
    oldest = queue["oldestAt"]
    return [
        ("ready", count_text(queue["ready"])),
        ("leased", count_text(queue["leased"])),
        ("delayed", count_text(queue["delayed"])),
        ("oldest", f"{time_text(oldest)} ({age_text(oldest)} ago)" if oldest else "-"),
        ("ack timeout", f"{policies['ackTimeoutMs'] / 1000:g} s"),
        ("dead letters", dead_letters),
        ("consumers", ", ".join(found["consumers"]) or "none"),
    ]


def _print_queue(found: dict[str, Any]) -> None:
    columns = [
        Column("SEGMENT", right=True),
        Column("EARLIEST", right=True),
        Column("OFFSET", right=True),
        Column("END", right=True),
        Column("READY", right=True),
        Column("LEASED", right=True),
        Column("DELAYED", right=True),
        Column("OLDEST", right=True),
        Column("CONSUMERS", right=True),
    ]
    rows = []
    for segment, each in found["segments"].items():
        queue = each.get("queue") or {}  # An owner of an earlier version does not tell.
        rows.append(
            (
                segment,
                count_text(each["earliest"]),
                count_text(each["offset"]),
                count_text(each["end"]),
                *(count_text(queue.get(name)) for name in ("ready", "leased", "delayed")),
                "(drained)" if each.get("drained") else age_text(queue.get("oldestAt")),
                count_text(len(queue.get("consumers", ()))),
            )
        )
    print_table(columns, rows, empty="No segments.")
    for segment, reason in found["queue"]["blocked"].items():
        click.echo(f"Segment {segment} hands out no new messages: {reason}")


def _print_positions(found: dict[str, Any]) -> None:
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

    This also purges a queue: messages that consumers have, or that wait, are settled, too. Of a queue, --count counts
    messages that are not settled, and what was settled after them stays so.

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


@subscription.command()
@click.argument("topic")
@click.argument("name")
@click.option("--count", type=click.IntRange(1, MAX_PEEK), default=10, show_default=True, metavar="N")
@json_option
@with_target
def peek(target: Target, topic: str, name: str, count: int, as_json: bool) -> None:
    """Look at messages of a queue that are not settled. This takes nothing away from its consumers.

    The oldest messages of each segment come first. Some of them may be with consumers, or wait for their time.

    \b
    Examples:
      braid subscription peek orders mailer
      braid subscription peek orders mailer --count 100 --json
    """
    found = ask(target, lambda client: client.admin.peek(topic, name, count=count))
    if as_json:
        print_json([record_object(message) for message in found])
        return
    columns = [
        Column("SEGMENT", right=True),
        Column("OFFSET", right=True),
        Column("PUBLISHED"),
        Column("KEY"),
        Column("VALUE"),
    ]
    rows = [
        (
            str(message.segment),
            count_text(message.offset),
            time_text(message.timestamp_us),
            _short(message.key) if message.key is not None else "-",
            _short(message.value),
        )
        for message in found
    ]
    print_table(columns, rows, empty=f"All messages of subscription {name} are settled.")


def _short(data: bytes) -> str:
    """Return the beginning of a key or a value as one line, without control characters."""
    text = data[: 4 * SHOWN_CHARS].decode(errors="replace")
    shown = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)
    return shown if len(shown) <= SHOWN_CHARS else f"{shown[: SHOWN_CHARS - 1]}…"


@subscription.command()
@click.argument("topic")
@click.argument("name")
@click.option("--to", metavar="TOPIC", help="Where to publish them. [default: TOPIC, where all subscriptions get them]")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="At most N, the oldest first. [default: all]")
@json_option
@with_target
def redrive(target: Target, topic: str, name: str, to: str | None, count: int | None, as_json: bool) -> None:
    """Publish the dead letters of a queue again.

    They become new records of TOPIC, without the headers of dead letters. The dead-letter topic keeps them; a
    subscription there remembers which were published again, so the next redrive publishes only newer ones.

    \b
    Examples:
      braid subscription redrive orders mailer --count 1      # does it work now?
      braid subscription redrive orders mailer
      braid subscription redrive orders mailer --to orders-retry
    """
    done = ask(target, lambda client: client.admin.redrive(topic, name, to=to, count=count))
    letters = "1 dead letter" if done["redriven"] == 1 else f"{count_text(done['redriven'])} dead letters"
    text = f"Published {letters} of subscription {name} to {done['to']}."
    if not done["redriven"]:
        text = f"No more dead letters of subscription {name} wait in {done['from']}."
    print_done(text, done, as_json=as_json)
    if done["unreadable"] and not as_json:
        click.echo(
            f"Left out {count_text(done['unreadable'])}, which hold batches that no consumer could decode: look at "
            f"them with `braid consume {done['from']} --json`."
        )


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
