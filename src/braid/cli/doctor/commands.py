"""`braid doctor`"""

from __future__ import annotations

import asyncio
import os
import textwrap
from collections import Counter
from typing import TYPE_CHECKING, Final

import click

from braid.cli.extras import require_server
from braid.cli.target import Target, with_target
from braid.cli.terminal.output import json_option, paint, print_json

if TYPE_CHECKING:
    from braid.cli.doctor.facts import Facts
    from braid.cli.doctor.rules import Finding

EXIT_PROBLEM: Final = 1
MAX_CONNECTIONS: Final = 10_000
"""As in broker/config.py, which a client need not import."""
WIDTH: Final = 100
_COLOURS: Final = {"ok": "32", "warning": "33", "problem": "31;1"}


@click.command()
@click.option("--config", "file", envvar="BRAID_CONFIG", metavar="FILE", help="A broker's file, for the next three.")
@click.option("--data", envvar="BRAID_DATA", metavar="DIR", help="A data folder to look at: its disk is measured.")
@click.option("--metadata", envvar="BRAID_METADATA", metavar="URL", help="A metadata store to look at.")
@click.option(
    "--storage", envvar="BRAID_STORAGE", metavar="URL", help="A storage to try: a small object comes and goes."
)
@click.option("--no-cluster", is_flag=True, help="Look at this machine alone, and ask no broker.")
@json_option
@with_target
def doctor(
    target: Target,
    file: str | None,
    data: str | None,
    metadata: str | None,
    storage: str | None,
    no_cluster: bool,
    as_json: bool,
) -> int:
    """Check a machine and a cluster, and say what to change.

    It looks at limits, clocks, the disk, the metadata store, the storage, and the addresses of all brokers. It changes
    nothing. The exit code is 1 if something is a problem; warnings are none.

    \b
    Examples:
      braid doctor                                  # this machine, and the brokers at --url
      braid doctor --config broker.toml             # also that broker's disk, metadata store and storage
      braid doctor --no-cluster --data /var/lib/braid --storage s3://bucket/braid
    """
    from braid.cli.doctor.rules import is_healthy, judge

    max_connections = MAX_CONNECTIONS
    if file is not None:
        require_server("braid doctor --config")
        from braid.cli.config import load_config

        config = load_config(file, {"data": data, "metadata": metadata, "storage": storage})
        data, storage, max_connections = config.data, config.storage, config.limits.max_connections
        metadata = config.metadata or None
    facts = asyncio.run(_gather(target, data, metadata, storage, max_connections, ask_cluster=not no_cluster))
    findings = judge(facts)
    healthy = is_healthy(findings)
    if as_json:
        print_json({"healthy": healthy, "findings": findings, "facts": facts})
    else:
        _print(findings)
    return 0 if healthy else EXIT_PROBLEM


async def _gather(
    target: Target,
    data: str | None,
    metadata: str | None,
    storage: str | None,
    max_connections: int,
    *,
    ask_cluster: bool,
) -> Facts:
    from braid.cli.doctor.facts import Facts
    from braid.cli.doctor.machine import look_at_folder, look_at_machine
    from braid.cli.doctor.services import look_at_cluster, look_at_metadata, look_at_storage

    if metadata or (storage and storage != "local"):
        require_server("braid doctor --metadata and --storage")
    return Facts(
        machine=look_at_machine(max_connections),
        folder=look_at_folder(data if data is not None else os.curdir),
        metadata=await look_at_metadata(metadata) if metadata else None,
        storage=await look_at_storage(storage) if storage and storage != "local" else None,
        cluster=await look_at_cluster(target) if ask_cluster else None,
    )


def _print(findings: list[Finding]) -> None:
    level_width = max(len(each.level.value) for each in findings)
    subject_width = max(len(each.subject) for each in findings)
    indent = " " * (level_width + subject_width + 4)
    for each in findings:
        level = paint(each.level.value, _COLOURS[each.level.value]) + " " * (level_width - len(each.level.value))
        text = textwrap.fill(each.text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False)
        click.echo(f"{level}  {each.subject:<{subject_width}}  {text.lstrip()}")
        if each.advice:
            advice = textwrap.fill(each.advice, WIDTH, initial_indent=indent, subsequent_indent=indent)
            click.echo(paint(advice, "1"))
    counts = Counter(each.level.value for each in findings)
    parts = (("problem", "problem"), ("warning", "warning"), ("ok", "check"))
    said = [f"{counts[level]} {noun}{'' if counts[level] == 1 else 's'}" for level, noun in parts]
    click.echo(f"{', '.join(said)} passed.")
