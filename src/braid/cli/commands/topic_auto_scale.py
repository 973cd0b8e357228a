"""`braid topic autoscale`: when a topic's segments are split and merged by themselves."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import click

from braid.cli.target import Target, ask, with_target
from braid.cli.terminal.output import json_option, print_done, print_fields, print_json
from braid.cli.terminal.param_types import DURATION, SIZE
from braid.client.admin import Admin
from braid.model.names import TopicName

F = TypeVar("F", bound=Callable[..., Any])

_SETTINGS: Final = {
    "min_segments": ("minSegments", int, "N", "Never merge below so many segments."),
    "max_segments": ("maxSegments", int, "N", "Never split beyond so many segments."),
    "max_dag_depth": ("maxDagDepth", int, "N", "Merges in a segment's line of ancestors."),
    "split_cooldown": ("splitCooldownSeconds", DURATION, "TIME", "Rest after a split."),
    "merge_cooldown": ("mergeCooldownSeconds", DURATION, "TIME", "Rest after a merge."),
    "merge_window": ("mergeWindowSeconds", DURATION, "TIME", "How long neighbours are cold before they are merged."),
    "split_records_in": ("splitMsgRateInThreshold", int, "N", "Split above so many records a second."),
    "split_bytes_in": ("splitBytesRateInThreshold", SIZE, "SIZE", "Split above so many bytes a second, published."),
    "split_bytes_out": ("splitBytesRateOutThreshold", SIZE, "SIZE", "Split above so many bytes a second, delivered."),
    "merge_records_in": ("mergeMsgRateInThreshold", int, "N", "Cold is below so many records a second; 0: never."),
    "merge_bytes_in": ("mergeBytesRateInThreshold", SIZE, "SIZE", "Cold is below so many bytes a second, published."),
    "merge_bytes_out": ("mergeBytesRateOutThreshold", SIZE, "SIZE", "Cold is below so many bytes a second, delivered."),
}
"""By option: the setting's name in JSON, its type, and the help."""


def place_arguments(command: F) -> F:
    """Take a topic's name, or `--namespace`."""
    option = click.option(
        "--namespace", metavar="TENANT/NAMESPACE", help="For all topics of this namespace, instead of one topic."
    )
    return click.argument("name", required=False)(option(command))


class _Place:
    """A topic, or a namespace."""

    def __init__(self, name: str | None, namespace: str | None) -> None:
        if (name is None) is (namespace is None):
            raise click.UsageError("name a topic, or a namespace with --namespace")
        self._topic = TopicName.parse(name).path if name is not None else None
        self._namespace = namespace or ""

    def __str__(self) -> str:
        return f"topic {self._topic}" if self._topic is not None else f"namespace {self._namespace}"

    def get(self, admin: Admin) -> Coroutine[Any, Any, dict[str, Any]]:
        if self._topic is not None:
            return admin.auto_scale_policy(self._topic)
        return admin.namespace_auto_scale_policy(self._namespace)

    def put(self, admin: Admin, policy: dict[str, Any]) -> Coroutine[Any, Any, None]:
        if self._topic is not None:
            return admin.set_auto_scale_policy(self._topic, policy)
        return admin.set_namespace_auto_scale_policy(self._namespace, policy)

    def delete(self, admin: Admin) -> Coroutine[Any, Any, None]:
        if self._topic is not None:
            return admin.delete_auto_scale_policy(self._topic)
        return admin.delete_namespace_auto_scale_policy(self._namespace)


@click.group()
def autoscale() -> None:
    """Let a topic's segments be split and merged as the load needs it.

    Settings that a topic does not have are those of its namespace; those that the namespace does not have, of the
    brokers' configuration.
    """


@autoscale.command()
@place_arguments
@json_option
@with_target
def show(target: Target, name: str | None, namespace: str | None, as_json: bool) -> None:
    """Show what a topic or a namespace says itself. `dry-run` shows what results.

    \b
    Examples:
      braid topic autoscale show orders
      braid topic autoscale show --namespace acme/sales
    """
    place = _Place(name, namespace)
    found = ask(target, lambda client: place.get(client.admin))
    if as_json:
        print_json(found)
    elif found:
        print_fields([(setting, _text(value)) for setting, value in found.items()])
    else:
        click.echo(f"The {place} has no settings of its own.")


def setting_options(command: F) -> F:
    for option, (_, kind, metavar, text) in reversed(_SETTINGS.items()):
        command = click.option(f"--{option.replace('_', '-')}", option, type=kind, metavar=metavar, help=text)(command)
    return click.option("--on/--off", "enabled", default=None, help="Whether the load changes the layout.")(command)


@autoscale.command("set")
@place_arguments
@setting_options
@json_option
@with_target
def set_settings(
    target: Target,
    name: str | None,
    namespace: str | None,
    enabled: bool | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Change settings of a topic or a namespace. Those that are not given stay.

    \b
    Examples:
      braid topic autoscale set orders --on --max-segments 16
      braid topic autoscale set orders --split-records-in 20000 --merge-records-in 2000
      braid topic autoscale set --namespace acme/sales --on
    """
    place = _Place(name, namespace)
    given = {_SETTINGS[option][0]: value for option, value in settings.items() if value is not None}
    if enabled is not None:
        given["enabled"] = enabled
    if not given:
        raise click.UsageError("give at least one setting to change")

    async def change(client: Any) -> dict[str, Any]:
        changed = {**await place.get(client.admin), **given}
        await place.put(client.admin, changed)
        return changed

    changed = ask(target, change)
    print_done(f"Changed the auto-scaling of {place}.", changed, as_json=as_json)


@autoscale.command()
@place_arguments
@json_option
@with_target
def delete(target: Target, name: str | None, namespace: str | None, as_json: bool) -> None:
    """Remove all settings of a topic or a namespace; those of the level above it count.

    \b
    Examples:
      braid topic autoscale delete orders
    """
    place = _Place(name, namespace)
    ask(target, lambda client: place.delete(client.admin))
    print_done(f"Removed the auto-scaling settings of {place}.", {"deleted": str(place)}, as_json=as_json)


@autoscale.command("dry-run")
@click.argument("name")
@json_option
@with_target
def dry_run(target: Target, name: str, as_json: bool) -> None:
    """Say what auto-scaling would do with a topic now, and why. Nothing changes.

    The first time, the owners begin to measure the topic's key hashes; ask again some seconds later.

    \b
    Examples:
      braid topic autoscale dry-run orders
    """
    path = TopicName.parse(name).path
    found = ask(target, lambda client: client.admin.auto_scale_proposal(path))
    if as_json:
        print_json(found)
        return
    segments = " ".join(map(str, found["segments"]))
    at = f" --at {found['at']}" if found["at"] is not None else ""
    command = f"braid topic {found['action']} {path} {segments}{at}" if found["action"] is not None else "-"
    print_fields(
        [
            ("auto-scaling", "on" if found["enabled"] else "off"),
            ("would run", command),
            ("why", found["reason"]),
            *(("finding", each) for each in found["findings"]),
            *((setting, _text(value)) for setting, value in (found["policy"] or {}).items() if setting != "enabled"),
        ]
    )


def _text(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else f"{value:,}"
