"""A program that runs a lake or a replay and is killed at a known point of it.

dying_jobs.py lake   URL TOPIC TABLE FORMAT      dies when the files are there, before the commit
dying_jobs.py replay URL SOURCE TARGET FOLDER    dies when a step is written, before it is marked as done
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from braid.spark.jobs.lake.job import Lake, open_table
from braid.spark.jobs.lake.table import Landed, Landing
from braid.spark.jobs.replay.job import ReplayRun
from braid.spark.jobs.replay.journal import Replay, ReplayJournal
from tests.spark.spark_kit import spark_session


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DyingJournal(ReplayJournal):
    def write(self, replay: Replay) -> Replay:
        if replay.step is not None and replay.step.done:
            die()
        return super().write(replay)


def main(job: str, url: str, topic: str, *rest: str) -> None:
    with spark_session(Path(os.environ["DYING_FOLDER"]), "local[2]") as spark:
        if job == "lake":
            where, kind = rest
            table = open_table(where, kind)

            def commit(landing: Landing, landed: Landed) -> None:
                assert landing.rows
                assert landed.step == 1
                die()

            table.commit = commit  # type: ignore[method-assign]
            Lake(spark, {"topic": topic, "url": url}, table).run()
        else:
            target, folder = rest
            ReplayRun(spark, {"topic": topic, "url": url}, {"topic": target, "url": url}, DyingJournal(folder)).run()
    raise AssertionError("it should be dead")


if __name__ == "__main__":
    main(*sys.argv[1:])
