"""`spark.read.format("braid")`: a real session, a real broker, and topics made by hand."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession

import braid.sync
from braid.model.hashing import key_hash
from braid.scan.planning import ChunkPiece, OwnerPiece
from braid.scan.snapshot import take_snapshot
from braid.spark.data_source import BatchReader, BraidDataSource
from braid.spark.source.options import SourceOptions
from braid.spark.source.schema import SOURCE_SCHEMA
from tests.kits.cluster_process import ClusterProcess
from tests.kits.hand_made_topic import HandMadeTopic, Shape, records
from tests.kits.waiting import wait_until
from tests.spark.spark_kit import Sent, StoredBroker, number_of, numbered
from tests.unit.test_spark_reading import HIGH, LOW, split_and_merged

TOPIC = "source-orders"
RECORDS = 3_000
PUSH_DOWN = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture(scope="module")
def sent(broker: StoredBroker) -> list[Sent]:
    """Two segments, several chunks of each, and a tail that no chunk holds yet."""
    broker.create(TOPIC, segments=2)
    found = broker.fill(TOPIC, numbered(RECORDS), headers={"trace": b"t"})
    broker.until_chunks(TOPIC, 4)
    return found


def load(spark: SparkSession, broker: StoredBroker, schema: str = "", **options: str) -> DataFrame:
    reader = spark.read.format("braid").options(url=broker.url, topic=TOPIC, **options)
    return (reader.schema(schema) if schema else reader).load()


def reader(options: dict[str, str]) -> BatchReader:
    found = BraidDataSource(options).reader(SOURCE_SCHEMA)
    assert isinstance(found, BatchReader)
    return found


def error_of(frame: DataFrame) -> str:
    with pytest.raises(PySparkException) as caught:
        frame.collect()
    return str(caught.value)


# ── what is read ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_topic_is_a_table_of_all_its_records(spark: SparkSession, broker: StoredBroker, sent: list[Sent]) -> None:
    frame = load(spark, broker)
    assert frame.schema.simpleString() == (
        "struct<segment:int,offset:bigint,key:binary,value:binary,timestamp:timestamp,headers:map<string,binary>,"
        "keyHash:int,epoch:int>"
    )
    found = frame.collect()
    assert sorted((row.segment, row.offset, bytes(row.key), bytes(row.value)) for row in found) == sorted(sent)
    assert all(row.keyHash == key_hash(bytes(row.key)) for row in found)
    assert {(row.epoch, bytes(row.headers["trace"])) for row in found} == {(1, b"t")}
    assert all(0 <= time.time() - row.timestamp.timestamp() < 3_600 for row in found)
    pieces = [piece for each in reader({"url": broker.url, "topic": TOPIC}).partitions() for piece in each.value.pieces]
    assert {type(piece) for piece in pieces} == {ChunkPiece, OwnerPiece}


def test_columns_are_chosen_by_schema_in_any_order(spark: SparkSession, broker: StoredBroker, sent: list[Sent]) -> None:
    found = load(spark, broker, "value binary, segment int").where("segment = 1").collect()
    assert sorted(bytes(row.value) for row in found) == sorted(each.value for each in sent if each.segment == 1)
    assert found[0].__fields__ == ["value", "segment"]


def test_headers_can_be_left_out(spark: SparkSession, broker: StoredBroker, sent: list[Sent]) -> None:
    frame = load(spark, broker, includeHeaders="false")
    assert "headers" not in frame.columns
    assert frame.count() == RECORDS


def test_offsets_bound_the_read(spark: SparkSession, broker: StoredBroker, sent: list[Sent]) -> None:
    frame = load(spark, broker, startingOffsets='{"0": 17, "1": "END"}', endingOffsets='{"0": 1017}', minPartitions="3")
    assert frame.rdd.getNumPartitions() >= 3
    assert [(row.segment, row.offset) for row in frame.collect()] == [(0, offset) for offset in range(17, 1017)]


def test_times_bound_the_read(spark: SparkSession, tmp_path: Path) -> None:
    topic = HandMadeTopic(tmp_path)
    for second in range(10):
        topic.add_chunk(0, records(second, 1, timestamp=second * 1_000_000))
    frame = spark.read.format("braid").options(
        **topic.options, startingTimestamp="3000", endingTimestamp="1970-01-01T00:00:07Z"
    )
    assert [number_of(row.value) for row in frame.load().collect()] == [3, 4, 5, 6]


def test_splits_and_merges_are_read_with_parents_before_children(spark: SparkSession, tmp_path: Path) -> None:
    topic = split_and_merged(tmp_path)
    frame = spark.read.format("braid").options(**topic.options, minPartitions="6").load()
    assert frame.rdd.getNumPartitions() >= 6
    by_key: dict[bytes, list[int]] = {}
    for row in frame.collect():  # Partitions come in their order.
        by_key.setdefault(bytes(row.key), []).append(number_of(row.value))
    assert len(by_key) == 7
    assert all(found == sorted(found) for found in by_key.values())
    assert sum(map(len, by_key.values())) == sum(map(topic.end, topic.chunks))


def where_pyspark_is(_: int) -> str:
    return pyspark.__file__


def test_workers_import_the_pyspark_that_is_installed(spark: SparkSession) -> None:
    """And not Spark's zipped copy, which each of them would compile anew."""
    assert spark.sparkContext.parallelize([0], 1).map(where_pyspark_is).collect() == [pyspark.__file__]


# ── filters ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(params=["true", "false"], ids=["push-down", "no push-down"])
def push_down(request: pytest.FixtureRequest, spark: SparkSession) -> Iterator[bool]:
    before = spark.conf.get(PUSH_DOWN, "false")
    spark.conf.set(PUSH_DOWN, request.param)
    yield request.param == "true"
    spark.conf.set(PUSH_DOWN, before or "false")


def test_one_frame_gives_the_same_answers_to_many_queries(
    spark: SparkSession, broker: StoredBroker, sent: list[Sent], push_down: bool
) -> None:
    """Spark keeps one plan for all of them, which the last filter that was pushed down decides."""
    frame = load(spark, broker)
    zero, one = (sum(each.segment == number for each in sent) for number in (0, 1))
    assert frame.where("segment = 0").count() == zero
    assert frame.count() == RECORDS
    assert frame.where("segment = 0").union(frame.where("segment = 1")).count() == RECORDS
    joined = frame.where("segment = 0").select("offset").join(frame.where("segment = 1").select("offset"), "offset")
    assert joined.count() == min(zero, one)


@pytest.mark.parametrize(
    ("condition", "keeps"),
    [
        ("key in (cast('key-3' as binary), cast('key-7' as binary))", lambda each: each.key in (b"key-3", b"key-7")),
        ("segment = 1 and offset >= 100 and offset < 110", lambda each: each.segment == 1 and 100 <= each.offset < 110),
        ("timestamp < '2020-01-01' or segment <> 1", lambda each: each.segment != 1),
    ],
)
def test_filters_prune_and_never_change_the_answer(
    spark: SparkSession, broker: StoredBroker, sent: list[Sent], push_down: bool, condition: str, keeps: Any
) -> None:
    frame = load(spark, broker, pruneByFilters="true", minPartitions="8").where(condition)
    found = frame.select("segment", "offset", "key", "value").collect()
    expected = [each for each in sent if keeps(each)]
    assert sorted((row.segment, row.offset, bytes(row.key), bytes(row.value)) for row in found) == sorted(expected)


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("segment = 1", [2, 3]),
        ("key = cast('key-0' as binary)", [2]),
        ("timestamp >= '1970-01-01 00:00:02'", [2, 3]),
        ("segment = 0 and offset = 1", [1]),
    ],
)
def test_what_filters_rule_out_is_not_even_opened(
    spark: SparkSession, tmp_path: Path, push_down: bool, condition: str, expected: list[int]
) -> None:
    topic = HandMadeTopic(tmp_path, [Shape(LOW), Shape(HIGH)])
    for number, key in enumerate([b"key-5", b"key-6", b"key-0", b"key-1"]):  # Two with low hashes, two with high ones.
        topic.add_chunk(number // 2, records(number, 1, key=key, timestamp=number * 1_000_000))
    topic.path(0, 0).write_bytes(b"damaged")
    frame = spark.read.format("braid").options(**topic.options, pruneByFilters="true").load().where(condition)
    if push_down:
        assert [number_of(row.value) for row in frame.collect()] == expected
    else:
        assert "cannot be read at offset 0" in error_of(frame)


# ── bad input and bad days ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_wrong_option_is_named(spark: SparkSession, broker: StoredBroker) -> None:
    with pytest.raises(PySparkException) as caught:
        load(spark, broker, startingOffset="earliest")
    assert "option startingoffset is unknown: did you mean startingOffsets?" in str(caught.value)


def test_an_option_of_streams_is_refused_in_a_batch_read(spark: SparkSession, broker: StoredBroker) -> None:
    assert "option maxRecordsPerTrigger was given" in error_of(load(spark, broker, maxRecordsPerTrigger="10"))


def test_a_column_that_does_not_exist_is_named(spark: SparkSession, broker: StoredBroker, sent: list[Sent]) -> None:
    assert "a column 'valeu', which a topic does not have" in error_of(load(spark, broker, "valeu binary"))


def test_a_topic_that_does_not_exist_is_named(spark: SparkSession, broker: StoredBroker) -> None:
    frame = spark.read.format("braid").options(url=broker.url, topic="nothing").load()
    assert "topic public/default/nothing does not exist" in error_of(frame)


def test_offsets_that_do_not_exist_are_named(spark: SparkSession, broker: StoredBroker, sent: list[Sent]) -> None:
    assert "option endingOffsets names offset 99999 of segment 0" in error_of(
        load(spark, broker, endingOffsets='{"0": 99999}')
    )


def test_a_damaged_chunk_fails_the_query_with_its_name(spark: SparkSession, tmp_path: Path) -> None:
    topic = HandMadeTopic(tmp_path)
    for first in (0, 10):
        topic.add_chunk(0, records(first, 10))
    data = bytearray(topic.path(0, 1).read_bytes())
    data[data.index(b"15", 200)] ^= 1
    topic.path(0, 1).write_bytes(data)
    text = error_of(spark.read.format("braid").options(**topic.options, failOnDataLoss="false").load())
    assert topic.chunks[0][1].object in text
    assert "braid pipeline audit" in text


def rows(found: BatchReader, partitions: list[Any]) -> list[tuple[int, int, int]]:
    return [
        (row["segment"], row["offset"], number_of(row["value"]))
        for partition in partitions
        for batch in found.read(partition)
        for row in batch.to_pylist()
    ]


def test_manifests_are_read_with_every_broker_down(spark: SparkSession, tmp_path: Path) -> None:
    with StoredBroker(tmp_path) as own:
        own.create("orders", segments=2)
        sent = own.fill("orders", numbered(2_000))
        own.until_chunks("orders", 4)
        own.stop()
    found = spark.read.format("braid").options(manifest=own.storage, topic="orders").load().collect()
    exported = sum(chunk["nextOffset"] - chunk["baseOffset"] for chunk in own.chunks("orders"))
    assert len(found) == exported > 0
    assert {(row.segment, row.offset, bytes(row.key), bytes(row.value)) for row in found} <= set(sent)


def test_a_broker_that_restarts_during_the_read_costs_time_and_no_record(tmp_path: Path) -> None:
    with StoredBroker(tmp_path, file_bytes=256 << 20) as own:  # Nothing is exported: all comes from the owner.
        own.create("orders")
        own.fill("orders", numbered(200, size=100_000), batch_records=10)
        found = reader({"url": own.url, "topic": "orders"})
        (partition,) = found.partitions()
        assert {type(piece) for piece in partition.value.pieces} == {OwnerPiece}
        batches = found.read(partition)
        numbers = [number_of(value) for value in next(batches).column("value").to_pylist()]
        assert len(numbers) < 200
        own.kill()
        own.start()
        numbers += [number_of(value) for batch in batches for value in batch.column("value").to_pylist()]
    assert numbers == list(range(200))


def test_chunks_that_vanish_are_read_from_the_owner_as_long_as_it_has_them(tmp_path: Path) -> None:
    with StoredBroker(tmp_path) as own:
        own.create("orders")
        own.fill("orders", numbered(2_000))
        own.until_chunks("orders", 4)
        found = reader({"url": own.url, "topic": "orders"})
        partitions = found.partitions()
        for path in (tmp_path / "history").rglob("*.chunk"):
            path.unlink()
        assert [number for _, _, number in rows(found, partitions)] == list(range(2_000))


def test_what_was_planned_is_read_after_the_topic_has_moved_and_grown(tmp_path: Path) -> None:
    with ClusterProcess(tmp_path, shared=True, brokers=2) as cluster, braid.sync.connect(cluster.url) as client:
        client.admin.create_topic("orders", segments=2)
        with client.producer("orders") as producer:
            producer.send_many([(key, value) for key, value in numbered(500)])
        options = {"url": cluster.url, "topic": "orders"}
        found = reader(options)
        partitions = found.partitions()
        for segment in (0, 1):
            client.admin.move("orders", segment=segment)
        with client.producer("orders") as producer:
            producer.send_many([(key, value) for key, value in numbered(100)])
        read = rows(found, partitions)
        assert sorted(number for _, _, number in read) == list(range(500))
        wait_until(lambda: _has_chunks(options), "the moves have exported the tails")
        again = reader(options)
        assert len(rows(again, again.partitions())) == 600


def test_a_fail_over_of_a_replicated_topic_during_the_read_costs_time_and_no_record(tmp_path: Path) -> None:
    with ClusterProcess(tmp_path, shared=False) as cluster, braid.sync.connect(cluster.url) as client:
        client.admin.create_topic("orders", replicas=3, confirm=2)  # Nothing is exported: all comes from the owner.
        with client.producer("orders", max_batch_records=10) as producer:
            producer.send_many([(key, value) for key, value in numbered(200, size=100_000)])
        found = reader({"url": cluster.url, "topic": "orders"})
        (partition,) = found.partitions()
        assert {type(piece) for piece in partition.value.pieces} == {OwnerPiece}
        batches = found.read(partition)
        numbers = [number_of(value) for value in next(batches).column("value").to_pylist()]
        assert len(numbers) < 200
        cluster[client.admin.topic_replicas("orders")["segments"]["0"]["owner"]].kill()
        with client.producer("orders") as producer:
            producer.send(b"later")
        numbers += [number_of(value) for batch in batches for value in batch.column("value").to_pylist()]
    assert numbers == list(range(200))


def _has_chunks(options: dict[str, str]) -> bool:
    snapshot = take_snapshot(SourceOptions.parse(options))
    return all(segment.chunks for segment in snapshot.segments.values())


def test_retention_of_the_start_is_data_loss_unless_that_is_fine(tmp_path: Path) -> None:
    topic = HandMadeTopic(tmp_path)
    for first in (0, 10):
        topic.add_chunk(0, records(first, 10))
    topic.forget(0, 0)
    asked = {**topic.options, "startingOffsets": '{"0": 3}'}
    with pytest.raises(Exception, match=r"names offset 3 of segment 0.*retention has deleted earlier records"):
        reader(asked).partitions()
    found = reader({**asked, "failOnDataLoss": "false"})
    assert [number for _, _, number in rows(found, found.partitions())] == list(range(10, 20))


def test_a_frame_is_a_snapshot(spark: SparkSession, tmp_path: Path) -> None:
    topic = HandMadeTopic(tmp_path)
    topic.add_chunk(0, records(0, 10))
    frame = spark.read.format("braid").options(**topic.options).load()
    assert frame.collect() == frame.collect()
    topic.add_chunk(0, records(10, 10))
    assert frame.count() == 10
    rows_now: list[Row] = spark.read.format("braid").options(**topic.options).load().collect()
    assert len(rows_now) == 20
