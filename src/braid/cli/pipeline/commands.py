"""`braid pipeline`: Spark jobs over the history of topics.

Each job is a module of its own. It is imported when it is used, and imports PySpark only when it runs: help needs
neither PySpark nor Java. The jobs share session.py (options, session, progress), errors.py and report.py.
"""

from __future__ import annotations

from typing import Final

import click

from braid.cli.main import Lazy, LazyGroup

JOBS: Final = {
    "audit": Lazy(
        "braid.cli.pipeline.audit:audit", "Prove that the history of a topic has no gap, no repeat and no damage."
    ),
    "lake": Lazy("braid.cli.pipeline.lake:lake", "Land a topic in a table, each record once."),
    "compact": Lazy("braid.cli.pipeline.compact:compact", "Turn many small chunks into few large ones."),
    "advise": Lazy("braid.cli.pipeline.advise:advise", "Say which splits and merges would even the load."),
    "replay": Lazy("braid.cli.pipeline.replay:replay", "Copy a topic, or a time of it, into another topic."),
}


@click.group(cls=LazyGroup, lazy=JOBS)
def pipeline() -> None:
    """Spark jobs over the history of topics.

    They need PySpark (`pip install 'braidmq[spark]'`) and Java 17 or newer, and run on this machine unless --master
    names a cluster. All of them can be stopped at any time and run again.
    """
