"""`braid backup` and `braid restore`"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Final

import click

from braid.cli.extras import require_server
from braid.cli.terminal.output import count_text, json_option, print_error, print_json, time_text
from braid.model.errors import InvalidArgument

if TYPE_CHECKING:
    from braid.cli.backup.rules import Plan
    from braid.cli.backup.snapshot import Snapshot

EXIT_REFUSED: Final = 1


@click.command()
@click.argument("file")
@click.option("--metadata", envvar="BRAID_METADATA", metavar="URL", help="sqlite:PATH or etcd://HOST:PORT,…")
@click.option(
    "--data", metavar="DIR", help="A broker's data folder that holds the metadata store, instead of --metadata."
)
@json_option
def backup(file: str, metadata: str | None, data: str | None, as_json: bool) -> None:
    """Write all metadata of a cluster into a new file, as of one moment. Brokers may go on meanwhile.

    The file holds topics, layouts, owners, cursors, policies and the cluster's secret; no records. Keep it as you keep
    keys.

    \b
    Examples:
      braid backup cluster.backup --metadata etcd://10.0.0.1:2379
      braid backup monday.backup --data /var/lib/braid
    """
    require_server("braid backup")
    from braid.cli.backup.restoring import take_backup

    snapshot = asyncio.run(take_backup(_metadata_url(metadata, data), file))
    if as_json:
        print_json({"file": file, "keys": len(snapshot.values), "header": snapshot.header})
    else:
        click.echo(f"{file} has {count_text(len(snapshot.values))} keys of revision {snapshot.header.revision:,}.")


@click.command()
@click.argument("file")
@click.option("--metadata", envvar="BRAID_METADATA", metavar="URL", help="The empty store that gets the metadata.")
@click.option(
    "--storage",
    envvar="BRAID_STORAGE",
    metavar="URL",
    default="local",
    show_default=True,
    help="Where the cluster's history is.",
)
@click.option(
    "--data", "folders", multiple=True, metavar="DIR", help="The data folder of a broker that is stopped. Repeatable."
)
@click.option("--leave-out", "left_out", multiple=True, metavar="TOPIC", help="Do not restore this topic. Repeatable.")
@click.option("--dry-run", is_flag=True, help="Only compare the backup with the history.")
@json_option
def restore(
    file: str,
    metadata: str | None,
    storage: str,
    folders: tuple[str, ...],
    left_out: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> int:
    """Restore a cluster's metadata from a backup. All brokers must be stopped, and the store must be empty.

    The command carries the backup forward to what the history shows. It refuses a topic whose layout has changed since.
    With one --data and without --metadata, the store is the file in that folder.

    \b
    Examples:
      braid restore cluster.backup --metadata etcd://10.0.0.1:2379 --storage s3://history/braid
      braid restore monday.backup --data /var/lib/braid
      braid restore monday.backup --data /var/lib/braid --dry-run
    """
    require_server("braid restore")
    from braid.cli.backup.restoring import restore_backup

    if storage == "local" and not folders:
        raise InvalidArgument("with local storage the history is on the brokers' disks: name their folders by --data")
    target = None if dry_run else _metadata_url(metadata, folders[0] if len(folders) == 1 else None)
    left_out = tuple(_topic_path(each) for each in left_out)
    snapshot, plan = asyncio.run(restore_backup(file, target, storage, folders, left_out))
    if as_json:
        print_json(_described(snapshot, plan, written=not (dry_run or plan.problems)))
    else:
        _print(snapshot, plan, dry_run=dry_run)
    return EXIT_REFUSED if plan.problems else 0


def _metadata_url(metadata: str | None, data: str | None) -> str:
    if metadata:
        return metadata
    if data is None:
        raise InvalidArgument("no metadata store is named: give --metadata, or the one --data that holds it")
    return f"sqlite:{os.path.join(data, 'metadata.db')}"


def _topic_path(name: str) -> str:
    from braid.model.names import TopicName

    return TopicName.parse(name).path


def _described(snapshot: Snapshot, plan: Plan, *, written: bool) -> dict[str, object]:
    return {
        "written": written,
        "keys": len(plan.values),
        "backup": snapshot.header,
        "carriedForward": plan.carried_forward,
        "notInStorage": plan.not_in_storage,
        "problems": plan.problems,
    }


def _print(snapshot: Snapshot, plan: Plan, *, dry_run: bool) -> None:
    for problem in plan.problems:
        print_error(f"{problem.topic}: {problem.text}")
    if plan.problems:
        print_error("nothing was restored; --leave-out TOPIC restores the others")
        return
    verb = "can be restored" if dry_run else "are restored"
    click.echo(f"{count_text(len(plan.values))} keys of {time_text(snapshot.header.created_at)} {verb}.")
    if plan.carried_forward:
        click.echo(f"{count_text(len(plan.carried_forward))} segments were carried forward to what the history shows.")
    if plan.not_in_storage:
        first, *others = plan.not_in_storage
        more = f" and {count_text(len(others))} more" if others else ""
        click.echo(
            f"The storage has nothing of {first}{more} to compare with: do --storage and --data name the history?"
        )
    if not dry_run:
        click.echo("Start the brokers. Records that were consumed after the backup are delivered again.")
