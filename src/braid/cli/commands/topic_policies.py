"""`braid topic update`, and how a topic's policies look."""

from __future__ import annotations

from typing import Any

import click

from braid.cli.target import Target, ask, with_target
from braid.cli.terminal.output import bytes_text, count_text, json_option, print_done
from braid.cli.terminal.param_types import DURATION, FOREVER, OFF, SIZE, OrWord
from braid.model.names import TopicName

retention_waits_option = click.option(
    "--retention-waits-for-subscriptions",
    "retention_waits",
    type=OrWord(DURATION, OFF, FOREVER),
    metavar="TIME|off|forever",
    help="How long retention waits for a subscription that does not move: 7d; off: not at all; forever: no limit.",
)


decoded_bytes_option = click.option(
    "--max-decoded-bytes", type=SIZE, metavar="SIZE", help="Refuse batches that decompress to more: 8MiB."
)
batch_records_option = click.option(
    "--max-batch-records", type=int, metavar="N", help="Refuse batches of more records: 100000."
)


def waiting_policies(waits: int | str | None) -> dict[str, Any]:
    """Return the policies that `--retention-waits-for-subscriptions` means."""
    if waits is None:
        return {}
    return {
        "retention_ignores_subscriptions": waits == OFF,
        "retention_waits_for_subscriptions_ms": int(waits) * 1000 if waits not in (OFF, FOREVER) else None,
    }


@click.command()
@click.argument("name")
@click.option("--durability", type=click.Choice(["memory", "fsync", "replicated"]), help="What a confirm waits for.")
@click.option("--retention", type=OrWord(DURATION, OFF), metavar="TIME|off", help="Delete what is older: 12h, 7d.")
@click.option(
    "--retention-bytes",
    type=OrWord(SIZE, OFF),
    metavar="SIZE|off",
    help="Delete the oldest beyond this, per segment: 10GiB.",
)
@retention_waits_option
@click.option(
    "--on-owner-loss",
    type=click.Choice(["wait", "continue"]),
    help="When a segment's broker is lost: wait for it, or continue elsewhere without the records on its disk.",
)
@click.option(
    "--owner-loss-after",
    type=DURATION,
    metavar="TIME",
    help="How long the broker is lost before `continue` applies.",
)
@decoded_bytes_option
@batch_records_option
@json_option
@with_target
def update(
    target: Target,
    name: str,
    durability: str | None,
    retention: int | str | None,
    retention_bytes: int | str | None,
    retention_waits: int | str | None,
    on_owner_loss: str | None,
    owner_loss_after: int | None,
    max_decoded_bytes: int | None,
    max_batch_records: int | None,
    as_json: bool,
) -> None:
    """Change policies of a topic. Those that are not given stay.

    `off` removes a limit. A new durability opens the topic's segments again; clients wait for that a moment.

    \b
    Examples:
      braid topic update orders --retention 7d
      braid topic update orders --retention off --retention-bytes 10GiB
      braid topic update orders --retention-waits-for-subscriptions 7d
      braid topic update orders --durability memory
    """
    path = TopicName.parse(name).path
    changes: dict[str, Any] = {
        "durability": durability,
        "retention_ms": retention if retention in (None, OFF) else int(retention) * 1000,
        "retention_bytes": retention_bytes,
        "on_owner_loss": on_owner_loss,
        "owner_loss_after_ms": None if owner_loss_after is None else owner_loss_after * 1000,
        "max_decoded_bytes": max_decoded_bytes,
        "max_batch_records": max_batch_records,
    }
    given: dict[str, Any] = {
        policy: None if value == OFF else value for policy, value in changes.items() if value is not None
    } | waiting_policies(retention_waits)
    if not given:
        raise click.UsageError("give at least one policy to change")
    changed = ask(target, lambda client: client.admin.update_topic(path, **given))
    print_done(f"Changed topic {path}.", changed, as_json=as_json)


def policy_fields(policies: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the policies as lines of `topic show`."""
    return [
        ("durability", policies["durability"]),
        ("replicas", f"{policies['replicas']} (write quorum {policies['writeQuorum']})"),
        ("retention", _retention_text(policies)),
        ("batches", _batches_text(policies)),
        ("on owner loss", _owner_loss_text(policies)),
    ]


def _batches_text(policies: dict[str, Any]) -> str:
    """`-`: the broker is older than these limits."""
    decoded, records = policies.get("maxDecodedBytes"), policies.get("maxBatchRecords")
    return f"up to {bytes_text(decoded)} decompressed, {count_text(records)} records"


def _owner_loss_text(policies: dict[str, Any]) -> str:
    if policies["onOwnerLoss"] == "wait":
        return "waits for its broker"
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
