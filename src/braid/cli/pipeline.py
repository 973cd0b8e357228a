"""`braid pipeline`: the names of the Spark jobs, until the jobs are there."""

from __future__ import annotations

from typing import Final

import click

from braid.model.errors import NotAvailable

JOBS: Final = {
    "audit": "Prove that the history of a topic has no gap, no repeat and no damage.",
    "lake": "Land a topic in a table, each record once.",
    "compact": "Turn many small chunks into few large ones.",
    "advise": "Say which splits and merges would even the load.",
    "replay": "Copy a topic, or a time of it, into another topic.",
}


@click.group()
def pipeline() -> None:
    """Spark jobs over the history of topics. They come with Spark support, which is not in this version yet."""


def _job(name: str, text: str) -> click.Command:
    def refuse(**_: object) -> None:
        raise NotAvailable(f"braid pipeline {name} comes with Spark support, which is not in this version yet")

    return click.Command(
        name,
        callback=refuse,
        help=text,
        params=[
            click.Option(["--master"], metavar="URL", help="`local[*]` or `spark://…`."),
            click.Option(["--json", "as_json"], is_flag=True, help="Answer in JSON."),
            click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED),
        ],
        context_settings={"ignore_unknown_options": True},
    )


for _name, _text in JOBS.items():
    pipeline.add_command(_job(_name, _text))
