"""Compaction of live topics: fewer chunks, the same records for every reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import braid.sync
from braid.model.errors import InvalidArgument, NotAvailable
from braid.model.names import TopicName
from braid.spark.jobs.audit.job import audit_topic
from braid.spark.jobs.compact import compact_topic
from braid.testing.processes import BrokerProcess
from tests.spark.spark_kit import StoredBroker, numbered

TARGET = 512 << 10


def filled(broker: StoredBroker, topic: str, segments: int = 2, records: int = 6_000) -> dict[str, str]:
    """A topic with a dozen chunks of 64 KiB; returns the options to read it with."""
    broker.create(topic, segments)
    broker.fill(topic, numbered(records))
    broker.until_chunks(topic, 8)
    return {"topic": topic, "url": broker.url}


def rows(spark: SparkSession, options: dict[str, str]) -> list[tuple[Any, ...]]:
    read = spark.read.format("braid").options(**options).load().drop("headers")
    return sorted(map(tuple, read.collect()))


def consumed(broker: StoredBroker, topic: str) -> dict[tuple[int, int], bytes]:
    """Everything, through the broker."""
    found: dict[tuple[int, int], bytes] = {}
    with (
        braid.sync.connect(broker.url) as client,
        client.checkpoint_consumer(topic, start="earliest") as consumer,
    ):
        total = sum(int(each["endOffset"]) for each in client.admin.topic_stats(topic)["segments"].values())
        while len(found) < total:
            batch = consumer.receive_batch()
            assert batch is not None
            for message in batch.messages():
                found[message.id.segment, message.id.offset] = message.value
    return found


def test_reads_are_identical_through_spark_through_manifests_and_through_the_broker(
    spark: SparkSession, tmp_path: Path
) -> None:
    with StoredBroker(tmp_path) as broker:
        options = filled(broker, "compacted")
        alone = {"topic": "compacted", "manifest": broker.storage}
        by_spark, by_broker = rows(spark, options), consumed(broker, "compacted")
        planned = compact_topic(spark, options, target_bytes=TARGET, dry_run=True)
        assert planned.dry_run
        assert planned.chunks_after < planned.chunks_before == len(broker.chunks("compacted")), "nothing was changed"

        report = compact_topic(spark, options, target_bytes=TARGET)
        assert (report.ok, report.failures, report.notes) == (True, (), ())
        assert len(broker.chunks("compacted")) == report.chunks_after == planned.chunks_after
        assert rows(spark, options) == by_spark
        audited = audit_topic(spark, alone)
        assert audited.ok, audited.defects
        ends = {segment.segment: segment.next_offset for segment in audited.segments}
        assert rows(spark, alone) == [row for row in by_spark if row[1] < ends[row[0]]]
        again = compact_topic(spark, options, target_bytes=TARGET, dry_run=True)
        assert again.chunks_after == again.chunks_before, "a second run has nothing to do"

        broker.kill()
        broker.start()
        assert consumed(broker, "compacted") == by_broker


def test_a_read_that_was_planned_before_finds_the_records_after_the_old_objects_are_gone(
    spark: SparkSession, broker: StoredBroker
) -> None:
    options = filled(broker, "planned")
    expected = rows(spark, options)
    planned = spark.read.format("braid").options(**options).load().drop("headers")
    planned.explain()  # Fixes what is read.
    old = {chunk["object"] for chunk in broker.chunks("planned")}
    assert compact_topic(spark, options, target_bytes=TARGET).ok
    kept = {chunk["object"] for chunk in broker.chunks("planned")}
    for path in (broker.folder / "history" / TopicName.parse("planned").path).glob("*/*.chunk"):
        if path.name in old - kept:
            path.unlink()
    assert sorted(map(tuple, planned.collect())) == expected


def test_damage_is_left_where_it_is_and_told(spark: SparkSession, broker: StoredBroker) -> None:
    options = filled(broker, "damaged", segments=1, records=4_000)
    first = broker.chunks("damaged")[2]
    path = next((broker.folder / "history" / TopicName.parse("damaged").path).glob(f"*/{first['object']}"))
    data = bytearray(path.read_bytes())
    data[first["batchBytes"] // 2] ^= 1
    path.write_bytes(data)
    report = compact_topic(spark, options, target_bytes=128 << 10)
    assert not report.ok
    assert [failure.code for failure in report.failures] == ["chunk-corrupt"]
    assert first["object"] in report.failures[0].text
    assert first in broker.chunks("damaged")
    assert {defect.rule for defect in audit_topic(spark, options).defects} <= {"batch-body", "batch-header"}


def test_an_object_that_is_missing_is_a_failure_and_told_once(spark: SparkSession, broker: StoredBroker) -> None:
    options = filled(broker, "incomplete")
    lost = broker.chunks("incomplete")[2]["object"]
    next((broker.folder / "history" / TopicName.parse("incomplete").path).glob(f"*/{lost}")).unlink()
    report = compact_topic(spark, options, target_bytes=TARGET)
    assert any(segment.swaps for segment in report.segments), "others are joined all the same"
    assert (report.ok, report.notes) == (False, ())
    assert [failure.code for failure in report.failures] == ["object-missing"]
    assert lost in report.failures[0].text


def test_what_cannot_be_compacted_is_refused_with_the_reason(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="needs brokers"):
        compact_topic(spark, {"topic": "orders", "manifest": f"file://{tmp_path}"})
    with BrokerProcess(tmp_path / "data") as broker:
        with braid.sync.connect(broker.url) as client:
            client.admin.create_topic("kept")
        with pytest.raises(NotAvailable, match="their own disks"):
            compact_topic(spark, {"topic": "kept", "url": broker.url})
