"""Streaming queries in a real Spark: what only Spark decides. Everything else: test_stream.py, without Java."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors.exceptions.captured import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import spark_partition_id, window
from pyspark.sql.streaming.query import StreamingQuery

import braid.sync
from braid.spark import register
from tests.kits.cluster_process import ClusterProcess
from tests.kits.waiting import wait_until
from tests.spark.spark_kit import StoredBroker, number_of, numbered

Rows = dict[int, dict[int, list[tuple[int, int]]]]
"""Segment and offset of each row, by partition and micro-batch."""


@pytest.fixture(autouse=True)
def format_braid(spark: SparkSession) -> None:
    register(spark)


def stream(spark: SparkSession, broker: StoredBroker, topic: str, **options: object) -> DataFrame:
    reader = spark.readStream.format("braid").option("url", broker.url).option("topic", topic)
    return reader.options(**{name: str(value) for name, value in options.items()}).load()


def run(rows: DataFrame, checkpoint: Path, into: Rows) -> dict[str, Any]:
    """Until everything is read that is there; the last progress."""

    def keep(batch: DataFrame, number: int) -> None:
        found = into[number] = {}
        for row in batch.withColumn("part", spark_partition_id()).select("part", "segment", "offset").collect():
            found.setdefault(row.part, []).append((row.segment, row.offset))

    writer = rows.writeStream.foreachBatch(keep).option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    try:
        query.awaitTermination()
        progress: dict[str, Any] = json.loads(query.recentProgress[-1].json)
        return progress
    finally:
        query.stop()


def flat(found: Rows) -> list[tuple[int, int]]:
    return [row for batch in sorted(found) for part in sorted(found[batch]) for row in found[batch][part]]


def lose_last_commit(checkpoint: Path) -> int:
    """As if the driver had been killed between a micro-batch and its commit; the micro-batch's number."""
    last = max(int(path.name) for path in (checkpoint / "commits").iterdir() if path.name.isdigit())
    (checkpoint / "commits" / str(last)).unlink()
    (checkpoint / "commits" / f".{last}.crc").unlink(missing_ok=True)
    return last


def test_each_record_comes_once_over_limits_restarts_and_a_killed_driver(
    spark: SparkSession, broker: StoredBroker, tmp_path: Path
) -> None:
    topic = broker.create("queries", 3)
    sent = broker.fill(topic, numbered(2_000))
    checkpoint = tmp_path / "checkpoint"
    options: dict[str, object] = {
        "startingOffsets": "earliest", "maxRecordsPerTrigger": 900, "minPartitions": 2, "subscription": "spark",
    }  # fmt: skip
    first: Rows = {}
    progress = run(stream(spark, broker, topic, **options), checkpoint, first)
    assert [sum(map(len, parts.values())) for parts in first.values()] == [900, 900, 200]
    assert all(len(parts) == 2 for parts in first.values())
    assert sorted(flat(first)) == sorted((each.segment, each.offset) for each in sent)
    assert progress["sources"][0]["latestOffset"]["positions"] == progress["sources"][0]["endOffset"]["positions"]
    with braid.sync.connect(broker.url) as client:
        assert client.admin.subscription(topic, "spark")["backlog"] == 0

    lost = lose_last_commit(checkpoint)
    more = broker.fill(topic, numbered(100))
    second: Rows = {}
    # Options that would cut it in another way count from the next micro-batch on.
    again = stream(spark, broker, topic, **{**options, "minPartitions": 1, "maxRecordsPerTrigger": 7_000})
    run(again, checkpoint, second)
    assert second[lost] == first[lost]
    assert sorted(second) == [lost, lost + 1]
    assert sorted(flat({lost + 1: second[lost + 1]})) == sorted((each.segment, each.offset) for each in more)


def test_a_first_micro_batch_from_latest_comes_again_from_the_same_place(
    spark: SparkSession, broker: StoredBroker, tmp_path: Path
) -> None:
    topic = broker.create("queries-latest")
    broker.fill(topic, numbered(50))
    found: Rows = {}
    run(stream(spark, broker, topic), tmp_path, found)
    assert found == {0: {}}
    lose_last_commit(tmp_path)
    broker.fill(topic, numbered(20))
    found = {}
    run(stream(spark, broker, topic), tmp_path, found)
    assert found == {0: {}, 1: {0: [(0, offset) for offset in range(50, 70)]}}


def test_a_running_query_rides_through_a_killed_broker(spark: SparkSession, tmp_path: Path) -> None:
    with StoredBroker(tmp_path) as broker:
        topic = broker.create("queries-killed", 2)
        rows = stream(spark, broker, topic, startingOffsets="earliest", subscription="spark")
        query = rows.writeStream.format("memory").queryName("killed").start()
        try:
            broker.fill(topic, numbered(500))
            query.processAllAvailable()
            broker.kill()
            broker.start()
            broker.fill(topic, numbered(500))
            query.processAllAvailable()
            found = spark.table("killed").select("segment", "offset").collect()
            assert len(found) == len(set(found)) == 1_000
            with braid.sync.connect(broker.url) as client:
                wait_until(lambda: client.admin.subscription(topic, "spark")["backlog"] == 0, "no lag is shown")
        finally:
            query.stop()


def test_a_running_query_is_not_disturbed_when_the_segments_of_both_its_topics_move(
    spark: SparkSession, tmp_path: Path
) -> None:
    with ClusterProcess(tmp_path, shared=True, brokers=2) as cluster:
        with braid.sync.connect(cluster.url, timeout=60) as client:
            for topic in ("moving-source", "moving-target"):
                client.admin.create_topic(topic, segments=2)
            rows = spark.readStream.format("braid").options(
                url=cluster.url, topic="moving-source", startingOffsets="earliest", maxRecordsPerTrigger=150
            )
            writer = rows.load().select("key", "value").writeStream.format("braid")
            query = writer.options(
                url=cluster.url, topic="moving-target", checkpointLocation=str(tmp_path / "checkpoint")
            ).start()
            try:
                with client.producer("moving-source", max_batch_records=50) as producer:
                    for first in range(0, 1_000, 100):
                        producer.send_many(numbered(1_000)[first : first + 100])
                        for topic in ("moving-source", "moving-target"):
                            client.admin.move(topic)
                query.processAllAvailable()
            finally:
                query.stop()
        copied = spark.read.format("braid").options(url=cluster.url, topic="moving-target").load()
        by_key: dict[bytes, list[int]] = {}
        for row in copied.orderBy("segment", "offset").collect():
            by_key.setdefault(bytes(row.key), []).append(number_of(row.value))
        assert by_key == {b"key-%d" % key: list(range(key, 1_000, 10)) for key in range(10)}
        assert copied.where("epoch > 2").count(), "nothing was written behind a move"


def test_a_query_goes_on_through_splits_and_merges_of_both_its_topics_and_repeats_nothing(
    spark: SparkSession, broker: StoredBroker, tmp_path: Path
) -> None:
    source, target = broker.create("changing-source"), broker.create("changing-target", 2)
    checkpoint = tmp_path / "checkpoint"

    def start() -> StreamingQuery:
        rows = spark.readStream.format("braid").options(
            url=broker.url, topic=source, startingOffsets="earliest", maxRecordsPerTrigger=150
        )
        writer = rows.load().select("key", "value").writeStream.format("braid")
        return writer.options(url=broker.url, topic=target, checkpointLocation=str(checkpoint)).start()

    with braid.sync.connect(broker.url, timeout=60) as client, client.producer(source) as producer:
        query = start()
        try:
            producer.send_many(numbered(1_000)[:400])
            client.admin.split(source, 0)
            client.admin.merge(target, 0, 1)
            producer.send_many(numbered(1_000)[400:600])
            client.admin.split(target, 2)
            query.processAllAvailable()
        finally:
            query.stop()
        lose_last_commit(checkpoint)
        client.admin.merge(target, 3, 4)
        client.admin.repartition(source, 3)
        query = start()
        try:
            producer.send_many(numbered(1_000)[600:])
            client.admin.split(target, 5)
            query.processAllAvailable()
        finally:
            query.stop()
    copied = spark.read.format("braid").options(url=broker.url, topic=target).load()
    by_key: dict[bytes, list[int]] = {}
    for row in copied.orderBy("segment", "offset").collect():  # Children have higher ids than their parents.
        by_key.setdefault(bytes(row.key), []).append(number_of(row.value))
    assert by_key == {b"key-%d" % key: list(range(key, 1_000, 10)) for key in range(10)}


def test_micro_batches_without_records_for_the_watermark_repeat_nothing(
    spark: SparkSession, broker: StoredBroker, tmp_path: Path
) -> None:
    topic = broker.create("queries-watermark")
    rows = stream(spark, broker, topic, startingOffsets="earliest").withWatermark("timestamp", "0 seconds")
    counts = rows.groupBy(window("timestamp", "1 second")).count()
    writer = counts.writeStream.format("memory").queryName("windows").outputMode("append")
    query = writer.option("checkpointLocation", str(tmp_path)).start()
    try:
        with braid.sync.connect(broker.url) as client, client.producer(topic) as producer:
            for second in range(3):
                for _ in range(10):
                    producer.submit(b"x", timestamp=(1_700_000_000 + second) * 1_000_000)
            producer.flush()
        query.processAllAvailable()
        wait_until(lambda: spark.table("windows").count() == 2, "two windows are closed")
        assert [row["count"] for row in spark.table("windows").orderBy("window").collect()] == [10, 10]
    finally:
        query.stop()


def test_a_topic_that_was_created_again_ends_the_query_with_the_reason(
    spark: SparkSession, broker: StoredBroker, tmp_path: Path
) -> None:
    topic = broker.create("queries-anew")
    broker.fill(topic, numbered(20))
    found: Rows = {}
    run(stream(spark, broker, topic, startingOffsets="earliest"), tmp_path, found)
    with braid.sync.connect(broker.url) as client:
        client.admin.delete_topic(topic)
        client.admin.create_topic(topic)
    broker.fill(topic, numbered(5))
    with pytest.raises(StreamingQueryException, match=re.escape("was deleted and created again")) as failure:
        run(stream(spark, broker, topic), tmp_path, found)
    assert "set option failOnDataLoss to false" in str(failure.value)
    found = {}
    run(stream(spark, broker, topic, failOnDataLoss="false"), tmp_path, found)
    assert flat(found) == [(0, offset) for offset in range(5)]
