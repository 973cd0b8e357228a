"""Topics into other topics: keys keep their order, each record once."""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import braid.sync
from braid.model.errors import InvalidArgument, TopicNotFound
from braid.model.hashing import key_hash
from braid.model.layout import HashRange
from braid.scan.planning import Range
from braid.spark.jobs.replay.job import ReplayReport, ReplayRun, bounds, copy, in_order
from braid.spark.jobs.replay.journal import Replay, ReplayJournal, ReplayStep
from tests.kits import poison
from tests.kits.hand_made_topic import HandMadeTopic, Record, Shape
from tests.spark.dying_jobs import REPLAYED, REPLAYED_TO, Left
from tests.spark.spark_kit import WAIT_S, StoredBroker, numbered

Copied = tuple[bytes, datetime.datetime, dict[str, bytes]]


def replay(
    spark: SparkSession, source: dict[str, str], broker: StoredBroker, target: str, folder: Path, **more: Any
) -> ReplayReport:
    sink = {"topic": target, "url": broker.url}
    journal = more.pop("journal", None) or ReplayJournal(str(folder))
    return ReplayRun(spark, source, sink, journal, **more).run()


def records(spark: SparkSession, source: dict[str, str]) -> list[Any]:
    """In the order of offsets, segment by segment, parents before children."""
    return spark.read.format("braid").options(**source).load().orderBy("segment", "offset").collect()


def by_key(rows: Iterable[Any]) -> dict[bytes | None, list[Copied]]:
    found = defaultdict(list)
    for row in rows:
        key = bytes(row["key"]) if row["key"] is not None else None
        found[key].append((bytes(row["value"]), row["timestamp"], row["headers"]))
    return dict(found)


def test_a_topic_is_copied_into_one_with_other_segments_and_keys_keep_their_order(
    spark: SparkSession, broker: StoredBroker, tmp_path: Path
) -> None:
    source = {"topic": broker.create("replay-a", segments=3), "url": broker.url}
    target = {"topic": broker.create("replay-b", segments=2), "url": broker.url}
    broker.fill(source["topic"], numbered(3_000, keys=40), headers={"trace": b"a1"})
    report = replay(spark, source, broker, "replay-b", tmp_path, max_records=1_100)
    assert (report.ok, report.records, report.steps, report.repeated, report.lag) == (True, 3_000, 3, 0, 0)
    assert sum(each.records for each in report.segments) == 3_000
    assert by_key(records(spark, target)) == by_key(records(spark, source))

    broker.fill(source["topic"], numbered(200, keys=40))
    more = replay(spark, source, broker, "replay-b", tmp_path)
    assert (more.records, more.steps, more.duplicates) == (200, 1, 0)
    assert by_key(records(spark, target)) == by_key(records(spark, source))
    assert replay(spark, source, broker, "replay-b", tmp_path).steps == 0


def test_records_that_cannot_be_decoded_are_skipped_with_a_count_also_within_bounds_of_time(
    spark: SparkSession, broker: StoredBroker, tmp_path: Path
) -> None:
    topic = HandMadeTopic(tmp_path / "history")
    timed = [Record(b"%d" % number, None, number * 1_000_000) for number in range(12)]
    topic.add_chunk(0, timed[:5], poison.shown_by_the_body()["value offsets that fall"], timed[5:])
    broker.create("replay-poison")
    source = {**topic.options, "badRecords": "skip"}
    report = replay(spark, source, broker, "replay-poison", tmp_path / "journal", bounded_by=bounds("2000", "9000"))
    assert (report.ok, report.records, report.skipped) == (True, 7, 3)
    found = records(spark, {"topic": "replay-poison", "url": broker.url})
    assert [bytes(row["value"]) for row in found] == [b"%d" % number for number in range(2, 9)]


class Interrupted(Exception):
    pass


class FailingJournal(ReplayJournal):
    """Fails where a process might die: a step is written, and not marked as done."""

    def write(self, replay: Replay) -> Replay:
        if replay.step is not None and replay.step.done and replay.step.number == 1:
            raise Interrupted
        return super().write(replay)


def test_a_step_that_was_written_and_not_marked_as_done_is_recognised(
    spark: SparkSession, broker: StoredBroker, tmp_path: Path
) -> None:
    source = {"topic": broker.create("replay-again", segments=2), "url": broker.url}
    broker.create("replay-again-copy", segments=3)
    broker.fill(source["topic"], numbered(1_500, keys=20))
    with pytest.raises(Interrupted):
        replay(
            spark, source, broker, "replay-again-copy", tmp_path, max_records=600, journal=FailingJournal(str(tmp_path))
        )
    broker.fill(source["topic"], numbered(100, keys=20))
    report = replay(spark, source, broker, "replay-again-copy", tmp_path)
    assert (report.repeated, report.duplicates, report.records) == (1, 600, 1_000)
    target = {"topic": "replay-again-copy", "url": broker.url}
    assert by_key(records(spark, target)) == by_key(records(spark, source))


def test_a_step_in_several_partitions_is_stored_once_though_spark_reads_it_in_another_order(
    spark: SparkSession, broker: StoredBroker, tmp_path: Path
) -> None:
    topic = HandMadeTopic(tmp_path / "history")
    for first in range(0, 2_000, 200):
        topic.add_chunk(0, [Record(b"%d" % n, b"key-%d" % (n % 30)) for n in range(first, first + 200)])
    broker.create("replay-wide", segments=2)
    sink = {"topic": "replay-wide", "url": broker.url}
    whole = Replay(id="x", source="s", source_id=0, target="t", target_id=1, bounds={})
    step = ReplayStep(number=0, ranges=(Range(0, 0, 2_000),), partitions=3, positions={0: 2_000})
    assert copy(spark, {**topic.options, "minPartitions": "5"}, sink, whole, step, ()) == ({0: 2_000}, 0)
    assert copy(spark, {**topic.options, "minPartitions": "2"}, sink, whole, step, ()) == ({0: 2_000}, 0)
    assert by_key(records(spark, sink)) == by_key(records(spark, topic.options))
    frame = spark.read.format("braid").options(**topic.options).load()
    used = in_order(frame, 3).selectExpr("spark_partition_id() AS part", "key").distinct().collect()
    assert len({row["part"] for row in used}) == 3
    assert len(used) == 30  # A key is in one partition.


def test_a_split_and_merged_history_is_copied_from_storage_alone_in_the_order_of_keys(
    spark: SparkSession, broker: StoredBroker, tmp_path: Path
) -> None:
    low, high, full = HashRange(0, 0x7FFF), HashRange(0x8000, 0xFFFF), HashRange(0, 0xFFFF)
    topic = HandMadeTopic(tmp_path / "history", [Shape(full), Shape(low, (0,)), Shape(high, (0,)), Shape(full, (1, 2))])
    keys = [b"key-%d" % number for number in range(8)]
    number = 0
    for segment in range(4):
        hashes = topic.layout.segment(segment).hash_range
        for _ in range(2):
            batch = []
            for key in [key for key in keys if hashes.start <= key_hash(key) <= hashes.end] * 10:
                batch.append(Record(b"%d" % number, key, 1_000_000 + number, {"n": b"%d" % number}))
                number += 1
            topic.add_chunk(segment, batch)
    report = replay(spark, topic.options, broker, "replay-restored", tmp_path / "state", max_records=70, create=True)
    assert (report.ok, report.records) == (True, number)
    copied = by_key(records(spark, {"topic": "replay-restored", "url": broker.url}))
    assert copied == by_key(records(spark, topic.options))
    for each in copied.values():
        values = [int(value) for value, _, _ in each]
        assert values == sorted(values)
    with braid.sync.connect(broker.url, timeout=WAIT_S) as client:
        assert len(client.admin.topic("replay-restored")["segments"]) == 1


def test_a_time_of_a_topic_is_copied_exactly(spark: SparkSession, broker: StoredBroker, tmp_path: Path) -> None:
    topic = HandMadeTopic(tmp_path / "history")
    for first in range(0, 100, 10):  # Times overlap: 0…14, 10…24, …
        topic.add_chunk(0, [Record(b"%d" % n, b"k", n * 1_000_000) for n in range(first, first + 15)])
    report = replay(
        spark,
        topic.options,
        broker,
        "replay-time",
        tmp_path / "state",
        bounded_by=bounds("1970-01-01T00:00:33Z", "1970-01-01T00:00:47Z"),
        create=True,
    )
    copied = [int(row["value"]) for row in records(spark, {"topic": "replay-time", "url": broker.url})]
    wanted = [n for first in range(0, 100, 10) for n in range(first, first + 15) if 33 <= n < 47]
    assert copied == wanted
    assert report.records == len(wanted)
    assert (report.segments[0].first, report.segments[0].until) == (30, 150)  # Chunks before it were not looked at.


def test_offsets_bound_a_replay(spark: SparkSession, broker: StoredBroker, tmp_path: Path) -> None:
    topic = HandMadeTopic(tmp_path / "history")
    topic.add_chunk(0, [Record(b"%d" % n, b"k") for n in range(50)])
    asked = bounds('{"0": 17}', '{"0": 23}')
    replay(spark, topic.options, broker, "replay-offsets", tmp_path / "s", bounded_by=asked, create=True)
    copied = [int(row["value"]) for row in records(spark, {"topic": "replay-offsets", "url": broker.url})]
    assert copied == list(range(17, 23))
    with pytest.raises(InvalidArgument, match="is about another replay"):
        replay(spark, topic.options, broker, "replay-offsets", tmp_path / "s")


def test_records_without_a_key_keep_the_order_of_their_segment(
    spark: SparkSession, broker: StoredBroker, tmp_path: Path
) -> None:
    source = {"topic": broker.create("replay-keyless", segments=2), "url": broker.url}
    sent = broker.fill(source["topic"], [(None, b"%d" % number) for number in range(1_000)])
    broker.create("replay-keyless-copy")
    replay(spark, source, broker, "replay-keyless-copy", tmp_path)
    copied = [int(row["value"]) for row in records(spark, {"topic": "replay-keyless-copy", "url": broker.url})]
    assert sorted(copied) == list(range(1_000))
    for segment in (0, 1):
        of_it = [int(each.value) for each in sorted(sent, key=lambda each: each.offset) if each.segment == segment]
        assert [number for number in copied if number in set(of_it)] == of_it


def test_topics_that_cannot_be_are_refused(spark: SparkSession, broker: StoredBroker, tmp_path: Path) -> None:
    source = {"topic": broker.create("replay-refused"), "url": broker.url}
    with pytest.raises(TopicNotFound, match="let --create do it"):
        replay(spark, source, broker, "replay-nowhere", tmp_path)
    with pytest.raises(InvalidArgument, match="into itself"):
        replay(spark, source, broker, "public/default/replay-refused", tmp_path)
    with pytest.raises(TopicNotFound):
        replay(spark, {**source, "topic": "replay-nothing"}, broker, "replay-refused", tmp_path)


def test_a_driver_that_is_killed_goes_on_when_it_is_started_again(
    spark: SparkSession, broker: StoredBroker, killed: Left
) -> None:
    source = {"topic": REPLAYED, "url": broker.url}
    target = {"topic": REPLAYED_TO, "url": broker.url}
    assert len(records(spark, target)) == 1_000
    report = replay(spark, source, broker, REPLAYED_TO, killed.journal)
    assert (report.repeated, report.duplicates) == (1, 1_000)
    assert by_key(records(spark, target)) == by_key(records(spark, source))
