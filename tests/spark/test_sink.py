"""`df.write` and `df.writeStream` to topics: each row once, whatever Spark repeats (I10, I11)."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

import braid.sync
from braid.spark.sink.input import workers_pipe
from braid.spark.sink.options import SinkOptions
from braid.spark.sink.rows import BLOCK_ROWS
from braid.spark.sink.task import Writing, write_task
from braid.storage.log.producers import REMEMBERED_BATCHES
from tests.kits.cluster_process import ClusterProcess
from tests.kits.waiting import wait_until
from tests.spark.dying_jobs import COPIED, COPIED_TO, Left
from tests.spark.spark_kit import COPIED_AT_ONCE, WAIT_S, StoredBroker, copy_all, numbered

ROWS = 50_000
KEYS = 13
SLICE_ROWS = 1_000
assert ROWS // 2 > BLOCK_ROWS + 5 * SLICE_ROWS


def rows_of(spark: SparkSession, count: int, partitions: int = 2) -> DataFrame:
    """Numbers as values, each of one of a few keys."""
    numbers = spark.range(0, count, 1, partitions)
    return numbers.selectExpr(f"concat('key-', id % {KEYS}) key", "cast(id as string) value")


def save(frame: DataFrame, url: str, topic: str, **options: Any) -> None:
    frame.write.format("braid").options(url=url, topic=topic, **options).mode("append").save()


def stored(url: str, topic: str) -> dict[int, list[tuple[bytes | None, bytes]]]:
    """The records of each segment, in order."""
    found: dict[int, list[tuple[bytes | None, bytes]]] = defaultdict(list)
    with braid.sync.connect(url, timeout=WAIT_S) as client:
        end = sum(ends(client, topic))
        with client.checkpoint_consumer(topic, start="earliest") as reader:
            while sum(map(len, found.values())) < end:
                batch = reader.receive_batch(timeout=WAIT_S)
                assert batch is not None
                found[batch.segment] += [(message.key, message.value) for message in batch.messages()]
    return found


def count(url: str, topic: str) -> int:
    with braid.sync.connect(url, timeout=WAIT_S) as client:
        return sum(ends(client, topic))


def ends(client: braid.sync.Client, topic: str) -> list[int]:
    """Of the segments, as their owners say; of one that moves just now, 0."""
    return [segment["endOffset"] or 0 for segment in client.admin.topic_stats(topic)["segments"].values()]


def check_each_once(found: dict[int, list[tuple[bytes | None, bytes]]], expected: int) -> None:
    numbers = [int(value) for records in found.values() for _, value in records]
    assert len(numbers) == expected
    assert set(numbers) == set(range(expected))


# ── what a write is ──────────────────────────────────────────────────────────────────────────────────────────────────


def pipe_of_worker(_: int) -> str:
    return type(workers_pipe()).__name__


def test_the_sink_finds_the_pipe_of_sparks_worker(spark: SparkSession) -> None:
    """A canary. When it fails, this version of Spark keeps the pipe elsewhere. The sink still works; see verifyInput in
    docs/pipeline/writing.md, and mend `workers_pipe`."""
    found = spark.sparkContext.parallelize([0], 1).map(pipe_of_worker).collect()
    assert found == ["BufferedRWPair"] or found == ["BufferedReader"], found


def test_columns_arrive_as_records(spark: SparkSession, broker: StoredBroker) -> None:
    one, other = broker.create("sink-columns"), broker.create("sink-columns-other")
    frame = spark.sql(
        "select 'k' key, 'v' value, map('h', 'ö', 'i', '') headers, timestamp '2026-11-15 18:00:00Z' timestamp, "
        f"'{other}' topic union all select null, '', null, timestamp '1999-01-01 00:00:00Z', null"
    )
    save(frame, broker.url, one, compression="zstd")
    found = {}
    for topic in (one, other):
        rows = spark.read.format("braid").options(url=broker.url, topic=topic).load().collect()
        found[topic] = [(row.key, bytes(row.value), row.headers, row.timestamp.isoformat()) for row in rows]
    assert found[other] == [
        (bytearray(b"k"), b"v", {"h": bytearray("ö".encode()), "i": bytearray()}, "2026-11-15T18:00:00")
    ]
    assert found[one] == [(None, b"", {}, "1999-01-01T00:00:00")]


def test_what_cannot_be_written_is_refused_before_any_task(spark: SparkSession, broker: StoredBroker) -> None:
    topic = broker.create("sink-refused")
    rows = rows_of(spark, 10)
    cases: list[tuple[str, Callable[[], None]]] = [
        ("column offset", lambda: save(rows.selectExpr("value", "1L offset"), broker.url, topic)),
        ("column value is int", lambda: save(rows.selectExpr("1 value"), broker.url, topic)),
        ("option orderin is unknown: did you mean ordering", lambda: save(rows, broker.url, topic, orderin="x")),
        ("option timeout is 'x'", lambda: save(rows, broker.url, topic, timeout="x")),
        ("sink-nowhere does not exist", lambda: save(rows, broker.url, "sink-nowhere")),
        (
            "a topic can only be added to",
            lambda: rows.write.format("braid").options(url=broker.url, topic=topic).mode("overwrite").save(),
        ),
    ]
    for text, write in cases:
        with pytest.raises(PySparkException, match=text):
            write()
    with pytest.raises(PySparkException, match="column value is null in row 0 of this partition"):
        save(rows.selectExpr("cast(null as string) value"), broker.url, topic)
    assert count(broker.url, topic) == 0


def test_a_version_is_written_once_and_the_next_one_is_another(spark: SparkSession, broker: StoredBroker) -> None:
    topic = broker.create("sink-versions", segments=2)
    for version, repeats in ((3, 2), (4, 1), (9, 2)):
        for _ in range(repeats):
            save(rows_of(spark, 100), broker.url, topic, txnAppId="etl", txnVersion=version)
    assert count(broker.url, topic) == 300
    save(rows_of(spark, 100), broker.url, topic, txnAppId="etl", txnVersion=3)
    assert count(broker.url, topic) == 300, "a version that came before is taken as done"
    save(rows_of(spark, 100), broker.url, topic, txnAppId="another", txnVersion=3)
    save(rows_of(spark, 100), broker.url, topic)
    save(rows_of(spark, 100), broker.url, topic)
    assert count(broker.url, topic) == 600


# ── tasks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def slice_of(numbers: range) -> Any:
    keys = [f"key-{number % KEYS}" for number in numbers]
    return pa.RecordBatch.from_pydict({"key": keys, "value": [str(number) for number in numbers]})


class FailingSource(DataSource):
    """The same rows as `rows_of`. The first attempt of partition 1 fails half-way, when some of its rows are stored;
    with `reorder`, the next one has them in another order."""

    @classmethod
    def name(cls) -> str:
        return "failing"

    def schema(self) -> str:
        return "key string, value string"

    def reader(self, schema: StructType) -> DataSourceReader:
        return FailingReader(dict(self.options))


class FailingReader(DataSourceReader):
    def __init__(self, options: dict[str, str]) -> None:
        self.options = options

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(0), InputPartition(1)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        task = TaskContext.get()
        assert task is not None
        first = partition.value * ROWS // 2
        fails = partition.value == 1 and task.attemptNumber() == 0
        step = -1 if "reorder" in self.options and not fails else 1
        for start in range(first, first + ROWS // 2, SLICE_ROWS):
            if fails and start == first + ROWS // 2 - SLICE_ROWS:  # Spark holds some of them back until more come.
                wait_until(self.has_rows_of_partition_1, "rows of the failing task are stored")
                raise RuntimeError("this task fails once")
            yield slice_of(range(start, start + SLICE_ROWS)[::step])

    def has_rows_of_partition_1(self) -> bool:
        found = stored(self.options["url"], self.options["topic"])
        return any(int(value) >= ROWS // 2 for records in found.values() for _, value in records)


@pytest.fixture
def small_slices(spark: SparkSession) -> Iterator[None]:
    """Rows reach the sink soon after their source has given them."""
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", SLICE_ROWS)
    yield
    spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")


def failing_rows(spark: SparkSession, **options: str) -> DataFrame:
    spark.dataSource.register(FailingSource)
    return spark.read.format("failing").options(**options).load()


@pytest.mark.usefixtures("small_slices")
def test_a_task_that_fails_half_way_and_is_retried_writes_each_row_once(
    spark: SparkSession, broker: StoredBroker
) -> None:
    topic = broker.create("sink-retried", segments=2)
    save(failing_rows(spark, url=broker.url, topic=topic), broker.url, topic)
    with braid.sync.connect(broker.url, timeout=WAIT_S) as client:
        assert client.admin.topic_stats(topic)["duplicateBatches"] >= 1, "the retry has sent again what was stored"
    found = stored(broker.url, topic)
    check_each_once(found, ROWS)
    by_key = defaultdict(list)
    for records in found.values():
        for key, value in records:
            by_key[key, int(value) >= ROWS // 2].append(int(value))
    assert len(by_key) == 2 * KEYS
    assert all(numbers == sorted(numbers) for numbers in by_key.values()), "a task's rows keep their order by key"


@pytest.mark.usefixtures("small_slices")
def test_a_retry_with_other_rows_fails_and_says_what_to_do(spark: SparkSession, broker: StoredBroker) -> None:
    topic = broker.create("sink-differs")
    differing = failing_rows(spark, url=broker.url, topic=topic, reorder="yes")
    with pytest.raises(PySparkException, match=r"partition 1 of write .* was written before: .*ordering=content"):
        save(differing, broker.url, topic)
    values = [value for records in stored(broker.url, topic).values() for _, value in records]
    assert len(values) == len(set(values)), "nothing was stored twice before it was refused"


def test_ordering_by_content_makes_a_retry_in_another_order_the_same(spark: SparkSession, broker: StoredBroker) -> None:
    """A task that gathers its rows has stored none when its input fails: so its whole write is repeated."""
    topic = broker.create("sink-content")
    rows = rows_of(spark, 2_000, 1)
    for frame in (rows, rows.orderBy("value").coalesce(1), rows.orderBy("key", "value").coalesce(1)):
        save(frame, broker.url, topic, ordering="content", txnAppId="etl", txnVersion=1)
    check_each_once(stored(broker.url, topic), 2_000)


def test_two_attempts_of_a_task_at_the_same_time_write_each_row_once(broker: StoredBroker) -> None:
    topic = broker.create("sink-speculation", segments=2)
    options = SinkOptions.parse({"url": broker.url, "topic": topic}, streaming=False)
    writing = Writing("write:speculation", 0, "a write")
    table = pa.table(
        {
            "key": [b"key-%d" % (number % KEYS) for number in range(4 * ROWS)],
            "value": [b"%d" % number for number in range(4 * ROWS)],
        }
    )
    together = threading.Barrier(2)

    def attempt(slice_rows: int) -> tuple[int, int]:
        together.wait()
        done = write_task(table.to_batches(max_chunksize=slice_rows), options, writing, 0)
        return done.records, done.duplicates

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(attempt, (10_000, 777))
    assert first[0] == second[0] == 4 * ROWS
    assert first[1] + second[1] == 4 * ROWS
    check_each_once(stored(broker.url, topic), 4 * ROWS)


class HaltingSource(DataSource):
    """Rows as of `rows_of`, in two partitions. Each waits for a file `1`, `2` and `3` in `folder` when it has come a
    quarter further."""

    @classmethod
    def name(cls) -> str:
        return "halting"

    def schema(self) -> str:
        return "key string, value string"

    def reader(self, schema: StructType) -> DataSourceReader:
        return HaltingReader(Path(self.options["folder"]))


class HaltingReader(DataSourceReader):
    rows = 4 * ROWS
    quarter = rows // 8

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(0), InputPartition(1)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        first = partition.value * self.rows // 2
        for start in range(first, first + self.rows // 2, SLICE_ROWS):
            halt, rest = divmod(start - first, self.quarter)
            if halt and not rest:
                wait_until((self.folder / str(halt)).exists, f"halt {halt} is over")
            yield slice_of(range(start, start + SLICE_ROWS))


@pytest.mark.usefixtures("small_slices")
def test_a_segment_that_moves_in_the_middle_of_a_write_is_not_noticed(spark: SparkSession, tmp_path: Path) -> None:
    topic = "sink-moved"
    with ClusterProcess(tmp_path, shared=True, brokers=2) as cluster:
        with braid.sync.connect(cluster.url, timeout=WAIT_S) as client:
            client.admin.create_topic(topic)

            def move_at_each_halt() -> None:
                stored_rows = 0
                for halt in ("1", "2", "3"):
                    wait_until(lambda: sum(ends(client, topic)) > stored_rows, "more rows are stored")  # noqa: B023
                    client.admin.move(topic)
                    stored_rows = sum(ends(client, topic))
                    (tmp_path / halt).touch()

            spark.dataSource.register(HaltingSource)
            with ThreadPoolExecutor(1) as threads:
                moving = threads.submit(move_at_each_halt)
                save(spark.read.format("halting").option("folder", str(tmp_path)).load(), cluster.url, topic)
                moving.result()
        check_each_once(stored(cluster.url, topic), HaltingReader.rows)


# ── queries ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_replayed_micro_batch_is_not_written_twice(spark: SparkSession, broker: StoredBroker, tmp_path: Path) -> None:
    source, target = broker.create("sink-source"), broker.create("sink-target", segments=2)
    broker.fill(source, numbered(1_000))
    copy_all(spark, broker.url, source, target, tmp_path)
    commits = sorted(
        (path for path in (tmp_path / "commits").iterdir() if path.name.isdigit()), key=lambda p: int(p.name)
    )
    assert len(commits) >= 3
    for path in (commits[-1], commits[-1].with_name(f".{commits[-1].name}.crc")):
        path.unlink(missing_ok=True)
    copy_all(spark, broker.url, source, target, tmp_path)
    assert commits[-1].exists(), "it was replayed"
    check_each_once(stored(broker.url, target), 1_000)
    broker.fill(source, numbered(1_100)[1_000:])
    copy_all(spark, broker.url, source, target, tmp_path)
    check_each_once(stored(broker.url, target), 1_100)


def test_a_checkpoint_that_was_set_back_is_refused_and_loses_nothing_in_silence(
    spark: SparkSession, broker: StoredBroker, tmp_path: Path
) -> None:
    source, target = broker.create("sink-back-source"), broker.create("sink-back-target")
    records = (REMEMBERED_BATCHES + 4) * COPIED_AT_ONCE  # The broker remembers no batch of those that come again.
    broker.fill(source, numbered(records, size=20))
    copy_all(spark, broker.url, source, target, tmp_path)
    for folder in ("commits", "offsets"):
        for path in (tmp_path / folder).iterdir():
            if path.name.strip(".").removesuffix(".crc") not in ("0", "1"):
                path.unlink()
    with pytest.raises(PySparkException, match="its checkpoint was set back, or copied"):
        copy_all(spark, broker.url, source, target, tmp_path)
    check_each_once(stored(broker.url, target), records)


def test_a_driver_that_is_killed_between_a_batch_and_its_commit_is_continued_by_another(
    spark: SparkSession, broker: StoredBroker, killed: Left
) -> None:
    assert (killed.checkpoint / "offsets" / "1").exists()
    assert not (killed.checkpoint / "commits" / "1").exists()
    assert count(broker.url, COPIED_TO) == 800
    copy_all(spark, broker.url, COPIED, COPIED_TO, killed.checkpoint)
    check_each_once(stored(broker.url, COPIED_TO), 1_000)
