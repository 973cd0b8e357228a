"""A driver that is killed, with its Java, when each of three jobs has come to a known point.

    lake      its files are there, the commit is not
    replay    a step is written, and not marked as done
    query     its second micro-batch is written, and not committed

`killed_driver` runs it, and tells what it has left. The jobs run at the same time in one process, because each driver
costs ten seconds of processor time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final, NamedTuple

from pyspark.sql import SparkSession
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from braid.spark.data_source import BraidDataSource
from braid.spark.jobs.lake.job import Lake, open_table
from braid.spark.jobs.lake.table import Landed, Landing
from braid.spark.jobs.replay.job import ReplayRun
from braid.spark.jobs.replay.journal import Replay, ReplayJournal
from braid.spark.sink.sink import StreamSink, stream_writer
from tests.kits.waiting import wait_until
from tests.spark.spark_kit import ROOT, WAIT_S, Sent, StoredBroker, numbered, spark_session, start_copy

LANDED: Final = "killed-landed"
REPLAYED, REPLAYED_TO = "killed-replayed", "killed-replayed-to"
COPIED, COPIED_TO = "killed-copied", "killed-copied-to"
RECORDS: Final = 1_000
"""Of each of the topics that are read."""
FOLDER: Final = "BRAID_TEST_FOLDER"


class Left(NamedTuple):
    """What a killed driver has left."""

    table: Path
    """Of the lake."""
    journal: Path
    """Of the replay."""
    checkpoint: Path
    """Of the query."""
    landed: list[Sent]


def killed_driver(broker: StoredBroker, folder: Path) -> Left:
    """Run `main` in a process until it is dead."""
    for topic, segments in ((LANDED, 2), (REPLAYED, 2), (REPLAYED_TO, 2), (COPIED, 1), (COPIED_TO, 1)):
        broker.create(topic, segments)
    landed, *_ = [broker.fill(topic, numbered(RECORDS, keys=20)) for topic in (LANDED, REPLAYED, COPIED)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", FOLDER: str(folder)}
    command = [sys.executable, "-c", f"from {__name__} import main; main({broker.url!r})"]
    killed = subprocess.run(command, env=environment, capture_output=True, timeout=4 * WAIT_S, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()[-2000:]
    return Left(folder / "orders", folder / "journal", folder / "checkpoint", landed)


def main(url: str) -> None:
    folder = Path(os.environ[FOLDER])
    with spark_session(folder / "spark") as spark:
        java = spark.sparkContext._gateway.proc.pid  # type: ignore[union-attr]
        (folder / "victims").write_text(json.dumps([java, os.getpid()]))
        spark.dataSource.register(KillingSource)
        threading.Thread(target=land, args=(spark, url, folder), daemon=True).start()
        # Writes begin in the main thread: Spark finds a format by the session that is active in a thread.
        start_copy(spark, url, COPIED, COPIED_TO, folder / "checkpoint", KillingSource.name())
        replay(spark, url, folder)


def land(spark: SparkSession, url: str, folder: Path) -> None:
    table = open_table(str(folder / "orders"), "parquet")

    def commit(landing: Landing, landed: Landed) -> None:
        assert landing.rows
        assert landed.step == 1
        wait_for_death(folder / "landed")

    table.commit = commit  # type: ignore[method-assign]
    Lake(spark, {"topic": LANDED, "url": url}, table).run()


def replay(spark: SparkSession, url: str, folder: Path) -> None:
    journal = DyingJournal(str(folder / "journal"))
    ReplayRun(spark, {"topic": REPLAYED, "url": url}, {"topic": REPLAYED_TO, "url": url}, journal).run()


class DyingJournal(ReplayJournal):
    def write(self, replay: Replay) -> Replay:
        if replay.step is not None and replay.step.done:
            wait_for_death(Path(os.environ[FOLDER]) / "replayed")
        return super().write(replay)


def wait_for_death(mark: Path) -> None:
    mark.touch()
    threading.Event().wait(2 * WAIT_S)
    raise AssertionError("it should be dead")


class KillingSink(StreamSink):
    """Kills its driver when its second micro-batch is written and not yet committed, and the others have come to their
    points. It runs in a process of its own."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        if batchId == 1:
            folder = Path(os.environ[FOLDER])
            for mark in ("landed", "replayed"):
                wait_until((folder / mark).exists, f"the other jobs wait for death: {mark}")
            for pid in json.loads((folder / "victims").read_text()):
                os.kill(pid, signal.SIGKILL)
        super().commit(messages, batchId)


class KillingSource(BraidDataSource):
    @classmethod
    def name(cls) -> str:
        return "braid-killing"

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamSink:  # noqa: N802
        plain = stream_writer(dict(self.options), schema, overwrite=overwrite)
        return KillingSink(plain._options)
