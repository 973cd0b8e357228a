"""`braid topic update`, and how a topic's policies look."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import click

from braid.cli.target import Target, ask, with_target
from braid.cli.terminal.output import bytes_text, count_text, json_option, print_done
from braid.cli.terminal.param_types import DURATION, FOREVER, OFF, SIZE, OrWord
from braid.model.names import TopicName

F = TypeVar("F", bound=Callable[..., Any])


def policy_options(*, creating: bool) -> Callable[[F], F]:
    """Add the options of the policies that a topic is created with, and that can change later. `given_policies` makes
    policies of what they return. A topic that is created has defaults."""

    def default(value: str) -> dict[str, Any]:
        return {"default": value, "show_default": True} if creating else {}

    keep = " [default: keep]" if creating else ""
    one = " [default: 1]" if creating else ""
    usual = " [default: fsync; with replicas, replicated]" if creating else ""
    options = [
        click.option("--replicas", type=int, metavar="N", help=f"Brokers that hold each segment.{one}"),
        click.option(
            "--confirm",
            type=int,
            metavar="W",
            help="Replicas that a confirm waits for, the owner included. [default: a majority]",
        ),
        click.option(
            "--durability",
            type=click.Choice(["memory", "fsync", "replicated"]),
            help=f"What a confirm waits for.{usual}",
        ),
        click.option(
            "--retention", type=OrWord(DURATION, OFF), metavar="TIME|off", help=f"Delete what is older: 12h, 7d.{keep}"
        ),
        click.option(
            "--retention-bytes",
            type=OrWord(SIZE, OFF),
            metavar="SIZE|off",
            help=f"Delete the oldest beyond this, per segment: 10GiB.{keep}",
        ),
        click.option(
            "--retention-waits-for-subscriptions",
            "retention_waits",
            type=OrWord(DURATION, OFF, FOREVER),
            metavar="TIME|off|forever",
            help="How long retention waits for a subscription that does not move: 7d; off: not at all; forever: no "
            "limit.",
        ),
        click.option(
            "--on-owner-loss",
            type=click.Choice(["wait", "continue"]),
            help="When a segment's broker is lost: wait for it, or continue elsewhere without the records on its disk.",
            **default("wait"),
        ),
        click.option(
            "--owner-loss-after",
            type=DURATION,
            metavar="TIME",
            help="How long the broker is lost before `continue` applies.",
            **default("1m"),
        ),
        click.option(
            "--max-decoded-bytes", type=SIZE, metavar="SIZE", help="Refuse batches that decompress to more: 8MiB."
        ),
        click.option("--max-batch-records", type=int, metavar="N", help="Refuse batches of more records: 100000."),
        click.option(
            "--message-ttl",
            type=OrWord(DURATION, OFF),
            metavar="TIME|off",
            help="Queues settle messages that are older, without delivering them: 1d.",
        ),
    ]

    def add(command: F) -> F:
        for option in reversed(options):  # The last decorator stands first in the help.
            command = option(command)
        return command

    return add


def given_policies(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the policies that these options mean. Those that are not given are left out."""
    values = dict(options)
    waits = values.pop("retention_waits")
    for name in ("retention", "owner_loss_after", "message_ttl"):
        value = values.pop(name)
        values[f"{name}_ms"] = value if value in (None, OFF) else value * 1000
    found = {policy: None if value == OFF else value for policy, value in values.items() if value is not None}
    if waits is not None:
        found["retention_ignores_subscriptions"] = waits == OFF
        found["retention_waits_for_subscriptions_ms"] = waits * 1000 if waits not in (OFF, FOREVER) else None
    return found


@click.command()
@click.argument("name")
@policy_options(creating=False)
@json_option
@with_target
def update(target: Target, name: str, as_json: bool, **policies: Any) -> None:
    """Change policies of a topic. Those that are not given stay.

    `off` removes a limit. A new durability opens the topic's segments again; clients wait for that a moment. Other
    replicas are brought about while clients go on: `braid topic replicas` shows how far that is.

    \b
    Examples:
      braid topic update orders --retention 7d
      braid topic update orders --retention off --retention-bytes 10GiB
      braid topic update orders --retention-waits-for-subscriptions 7d
      braid topic update orders --durability memory
      braid topic update orders --replicas 3
    """
    path = TopicName.parse(name).path
    given = given_policies(policies)
    if not given:
        raise click.UsageError("give at least one policy to change")
    changed = ask(target, lambda client: client.admin.update_topic(path, **given))
    print_done(f"Changed topic {path}.", changed, as_json=as_json)
    print_warnings(changed.get("warnings", ()))


def print_warnings(warnings: Iterable[str]) -> None:
    """Print what an operator should know about a topic's policies, beside the result."""
    for warning in warnings:
        click.echo(f"Warning: {warning}.", err=True)


def policy_fields(policies: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the policies as lines of `topic show`."""
    return [
        ("durability", policies["durability"]),
        ("replicas", f"{policies['replicas']} (write quorum {policies['writeQuorum']})"),
        ("retention", _retention_text(policies)),
        ("batches", _batches_text(policies)),
        ("on owner loss", _owner_loss_text(policies)),
        *([("message TTL", _ttl_text(ttl_ms))] if (ttl_ms := policies.get("messageTtlMs")) is not None else []),
    ]


def _ttl_text(ttl_ms: int) -> str:
    shown = f"{ttl_ms} ms" if ttl_ms % 1000 else DURATION.text(ttl_ms // 1000)
    return f"queues do not deliver what is older than {shown}"


def _batches_text(policies: dict[str, Any]) -> str:
    """`-`: the broker is older than these limits."""
    decoded, records = policies.get("maxDecodedBytes"), policies.get("maxBatchRecords")
    return f"up to {bytes_text(decoded)} decompressed, {count_text(records)} records"


def _owner_loss_text(policies: dict[str, Any]) -> str:
    if policies["onOwnerLoss"] == "wait":
        return "waits for its broker" if policies["replicas"] == 1 else "its replicas take over"
    return f"continues elsewhere after {DURATION.text(policies['ownerLossAfterMs'] // 1000)}"


def _retention_text(policies: dict[str, Any]) -> str:
    retention_ms, retention_bytes = policies.get("retentionMs"), policies.get("retentionBytes")
    limits = []
    if retention_ms is not None:
        limits.append(DURATION.text(retention_ms // 1000))
    if retention_bytes is not None:
        limits.append(f"{bytes_text(retention_bytes)} per segment")
    if not limits:
        return "keeps everything"
    return f"{', '.join(limits)}; {_waits_text(policies)}"


def _waits_text(policies: dict[str, Any]) -> str:
    if policies["retentionIgnoresSubscriptions"]:
        return "does not wait for subscriptions"
    waits_ms = policies.get("retentionWaitsForSubscriptionsMs")
    return "waits for subscriptions" + (f" up to {DURATION.text(waits_ms // 1000)}" if waits_ms is not None else "")
