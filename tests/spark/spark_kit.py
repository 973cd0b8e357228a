"""What Spark tests share: a session, a broker whose records soon become chunks, topics with known records.

A session costs 10 s, so there is one for all tests that need one (conftest.py). It retries tasks (`local[2,3]`: plain
`local[2]` never does) and has two shuffle partitions.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import braid.sync
from braid.model.names import TopicName
from braid.spark.session import check_java, end_session, session_settings
from braid.spark.worker_python import installed_pyspark
from braid.testing.processes import BrokerProcess
from tests.kits.waiting import wait_until

ROOT: Final = Path(__file__).parents[2]
WAIT_S: Final = 60.0
TIMEOUT_S: Final = 300
"""Of one test, the start of the session included; far above the seconds that one takes."""
FILE_BYTES: Final = 64 << 10
"""Of the brokers' files: small, so that a few thousand records already make several chunks."""
BATCH_RECORDS: Final = 200
COPIED_AT_ONCE: Final = 400


@contextlib.contextmanager
def spark_session(folder: Path, master: str = "local[2,3]", **settings: str) -> Iterator[SparkSession]:
    """The one session of this process; when it ends, its Java process has ended. Without Java it fails, and says so."""
    check_java()
    builder = SparkSession.builder.master(master).appName("braid-tests")
    ours = {**SETTINGS, "spark.sql.warehouse.dir": str(folder / "warehouse"), **settings}
    for name, value in session_settings(master, ours).items():
        builder = builder.config(name, value)
    with pytest.MonkeyPatch.context() as environment:  # Java has its own copy from its start.
        environment.setenv("PYSPARK_PYTHON", sys.executable)
        environment.setenv("PYSPARK_DRIVER_PYTHON", sys.executable)
        # Python's workers inherit Java's, and find what functions of test modules refer to by name.
        environment.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
        environment.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        environment.setenv("SPARK_LOCAL_DIRS", str(folder / "local"))
        with installed_pyspark(sys.executable):
            session = builder.getOrCreate()
    try:
        yield session
    finally:
        end_session(session)


SETTINGS: Final = {
    "spark.driver.memory": "1g",
    "spark.python.daemon.module": "tests.spark.worker_daemon",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.shuffle.partitions": "2",
}
"""What tests want beyond what every session of Braid's has: small, with quick workers, and tables fetched as Arrow."""


# ── brokers and topics ───────────────────────────────────────────────────────────────────────────────────────────────


class Sent(NamedTuple):
    segment: int
    offset: int
    key: bytes | None
    value: bytes


class StoredBroker(BrokerProcess):
    """A real `braid serve` that exports to a folder, with files so small that chunks come soon."""

    def __init__(self, folder: Path, *options: str, file_bytes: int = FILE_BYTES) -> None:
        config = folder / "broker.toml"
        config.write_text(f"file_bytes = {file_bytes}\nspare_files = 0\nlease_ttl_s = 5\n")
        self.folder = folder
        self.storage = f"file://{folder}/history"
        super().__init__(folder / "data", "--config", str(config), "--storage", self.storage, *options)

    def create(self, topic: str, segments: int = 1, **policies: Any) -> str:
        with braid.sync.connect(self.url, timeout=WAIT_S) as client:
            client.admin.create_topic(topic, segments=segments, **policies)
        return topic

    def fill(
        self,
        topic: str,
        records: Iterable[tuple[bytes | None, bytes]],
        *,
        headers: dict[str, bytes] | None = None,
        batch_records: int = BATCH_RECORDS,
    ) -> list[Sent]:
        """Publish (key, value) pairs in batches of `batch_records`; where each went, in the order of sending."""
        pairs = list(records)
        with (
            braid.sync.connect(self.url, timeout=WAIT_S) as client,
            client.producer(
                topic, max_batch_records=batch_records, linger=WAIT_S
            ) as producer,  # No batch leaves early.
        ):
            receipts = [producer.submit(value, key=key, headers=headers) for key, value in pairs]
            producer.flush()
            ids = [receipt.result() for receipt in receipts]
        return [Sent(id_.segment, id_.offset, key, value) for id_, (key, value) in zip(ids, pairs, strict=True)]

    def chunks(self, topic: str) -> list[dict[str, Any]]:
        """The chunks that the newest manifests list."""
        while True:
            folders = (self.folder / "history" / TopicName.parse(topic).path).glob("*/manifests")
            newest = [max(folder.glob("*.json")) for folder in folders]
            with contextlib.suppress(FileNotFoundError):  # The owner has replaced a manifest just now.
                return [chunk for path in newest for chunk in json.loads(path.read_bytes())["chunks"]]

    def until_chunks(self, topic: str, count: int) -> None:
        wait_until(
            lambda: len(self.chunks(topic)) >= count, f"{count} chunks of {topic} in the manifests of {self.storage}"
        )


def numbered(count: int, keys: int = 10, size: int = 100) -> list[tuple[bytes | None, bytes]]:
    """Records `0…` padded to `size` bytes, over so many keys: enough to see order, loss and repeats."""
    return [(b"key-%d" % (number % keys), b"%d" % number + b" " * (size - len(str(number)))) for number in range(count)]


def number_of(value: bytes | bytearray) -> int:
    return int(bytes(value))


# ── queries ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def copy_all(spark: SparkSession, url: str, source: str, target: str, checkpoint: Path) -> None:
    """Topic to topic until nothing is left."""
    query = start_copy(spark, url, source, target, checkpoint)
    try:
        query.awaitTermination()
    finally:
        query.stop()


def start_copy(
    spark: SparkSession, url: str, source: str, target: str, checkpoint: Path, sink: str = "braid"
) -> StreamingQuery:
    """In micro-batches of `COPIED_AT_ONCE` rows."""
    rows = spark.readStream.format("braid").options(
        url=url, topic=source, startingOffsets="earliest", maxRecordsPerTrigger=COPIED_AT_ONCE
    )
    writing = rows.load().select("key", "value").writeStream.format(sink)
    writing = writing.options(url=url, topic=target, checkpointLocation=str(checkpoint))
    return writing.trigger(availableNow=True).start()
