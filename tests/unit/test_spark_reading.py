"""What executors do with a partition, without Spark: hand-made topics in a folder, damaged, moved and deleted."""

from __future__ import annotations

import datetime
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql.types import StructType

from braid.model.batch.header import Codec
from braid.model.errors import BatchUnreadable, ConnectFailed, DataLoss, InvalidArgument, LogDamaged, TopicNotFound
from braid.model.hashing import key_hash
from braid.model.layout import HashRange
from braid.scan import reading
from braid.scan.planning import NO_PRUNING, ChunkPiece, Partition, Prune, Range, plan_batch, plan_micro_batch
from braid.scan.reading import raw_batches, record_batches
from braid.scan.snapshot import SegmentSnapshot, TopicSnapshot, take_snapshot
from braid.spark.data_source import BatchReader, BraidDataSource
from braid.spark.source.options import SourceOptions
from braid.spark.source.schema import SOURCE_SCHEMA, arrow_schema
from tests.kits import poison
from tests.kits.hand_made_topic import FULL, HandMadeTopic, Record, Shape, records

LOW, HIGH = HashRange(0, 0x7FFF), HashRange(0x8000, 0xFFFF)


def reader(topic: HandMadeTopic, *columns: str, **options: str) -> BatchReader:
    schema = StructType([SOURCE_SCHEMA[name] for name in columns]) if columns else SOURCE_SCHEMA
    found = BraidDataSource({**topic.options, **options}).reader(schema)
    assert isinstance(found, BatchReader)
    return found


def rows(found: BatchReader) -> list[dict[str, Any]]:
    return [row for partition in found.partitions() for batch in found.read(partition) for row in batch.to_pylist()]


def values(topic: HandMadeTopic, **options: str) -> list[bytes]:
    return [row["value"] for row in rows(reader(topic, "value", **options))]


def planned(topic: HandMadeTopic) -> tuple[TopicSnapshot, list[Partition]]:
    snapshot = take_snapshot(SourceOptions.parse(topic.options))
    ranges = [Range(each.id, each.earliest, each.end) for each in snapshot.segments.values()]
    return snapshot, plan_batch(snapshot, ranges)


def numbers(first: int, until: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, until)]


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.LZ4, Codec.ZSTD])
def test_rows_are_what_was_published(tmp_path: Path, codec: Codec) -> None:
    topic = HandMadeTopic(tmp_path)
    topic.add_chunk(
        0,
        [Record(b"a" * 500, b"alpha", 5, {"trace": b"t1", "x": b""}), Record(b"", None, 6)],
        [Record(b"c", b"", 7)],
        epoch=4,
        codec=codec,
    )
    time = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    tick = datetime.timedelta(microseconds=1)
    same = {"segment": 0, "epoch": 4}
    assert rows(reader(topic)) == [
        {
            **same,
            "offset": 0,
            "key": b"alpha",
            "value": b"a" * 500,
            "timestamp": time + 5 * tick,
            "headers": [("trace", b"t1"), ("x", b"")],
            "keyHash": 0xA9C0,
        },
        {**same, "offset": 1, "key": None, "value": b"", "timestamp": time + 6 * tick, "headers": [], "keyHash": 0},
        {
            **same,
            "offset": 2,
            "key": b"",
            "value": b"c",
            "timestamp": time + 7 * tick,
            "headers": [],
            "keyHash": key_hash(b""),
        },
    ]


def test_arrow_batches_have_exactly_the_schema_that_spark_expects(tmp_path: Path) -> None:
    topic = HandMadeTopic(tmp_path)
    topic.add_chunk(0, records(0, 3), [Record(b"x", b"k", 9, {"h": b"v"})])
    found = reader(topic)
    for partition in found.partitions():
        for batch in found.read(partition):
            assert batch.schema == arrow_schema(SOURCE_SCHEMA)
            batch.validate(full=True)


@pytest.mark.parametrize(
    "columns", [("value", "offset"), ("epoch",), ("segment", "offset"), ("keyHash", "headers", "key")]
)
def test_only_the_columns_asked_for_are_made_in_the_order_asked(tmp_path: Path, columns: tuple[str, ...]) -> None:
    topic = HandMadeTopic(tmp_path)
    topic.add_chunk(0, records(0, 3, key=b"k"), records(3, 2))
    whole = rows(reader(topic))
    found = rows(reader(topic, *columns))
    assert found == [{name: row[name] for name in columns} for row in whole]
    assert list(found[0]) == list(columns)


def test_small_batches_are_joined_and_large_ones_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "ROWS", 10)
    monkeypatch.setattr(reading, "MAX_ROWS", 12)
    topic = HandMadeTopic(tmp_path)
    topic.add_chunk(0, *[records(first, 3) for first in range(0, 24, 3)], records(24, 30))
    found = reader(topic, "value")
    sizes = [batch.num_rows for partition in found.partitions() for batch in found.read(partition)]
    assert sizes == [12, 12, 12, 12, 6]
    assert values(topic) == numbers(0, 54)


def test_a_topic_without_records_has_no_rows(tmp_path: Path) -> None:
    assert rows(reader(HandMadeTopic(tmp_path))) == []


# ── bounds ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("first", "until"), [(0, 20), (3, 17), (4, 8), (5, 6), (7, 13)])
def test_offsets_are_cut_to_the_record_inside_of_batches(tmp_path: Path, first: int, until: int) -> None:
    topic = HandMadeTopic(tmp_path)
    topic.add_chunk(0, records(0, 4), records(4, 4))
    topic.add_chunk(0, records(8, 12))
    found = values(topic, startingOffsets=f'{{"0": {first}}}', endingOffsets=f'{{"0": {until}}}')
    assert found == numbers(first, until)


def test_records_that_have_taken_the_place_of_lost_ones_are_not_read_for_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    topic = HandMadeTopic(tmp_path)
    topic.add_chunk(0, records(0, 4), records(4, 4), epoch=2)
    topic.add_chunk(0, records(8, 4), epoch=5)
    snapshot = take_snapshot(SourceOptions.parse(topic.options))
    before = msgspec.structs.replace(snapshot.segments[0], epochs=((2, 0),))
    now = msgspec.structs.replace(snapshot.segments[0], epochs=((2, 0), (5, 8)))

    def read(segment: SegmentSnapshot, **options: str) -> list[int]:
        there = msgspec.structs.replace(snapshot, segments={0: segment})
        (partition,) = plan_batch(there, [Range(0, 2, 12)])
        found = raw_batches(partition, SourceOptions.parse({**topic.options, **options}))
        return [header.base_offset for _, header, _ in found]

    assert read(now) == [0, 4, 8]
    with pytest.raises(
        DataLoss, match=r"offsets 8 to 11 of segment 0 .* records of epoch 5 .* The topic has lost them"
    ):
        read(before)
    with caplog.at_level(logging.WARNING):
        assert read(before, failOnDataLoss="false") == [0, 4]
    assert "offsets 8 to 11" in caplog.text


def test_every_column_is_cut_at_the_same_records(tmp_path: Path) -> None:
    topic = HandMadeTopic(tmp_path)
    made = [Record(b"%d" % n, b"key-%d" % n, n, {"n": b"%d" % n}) for n in range(20)]
    topic.add_chunk(0, made[:9], made[9:])
    whole = rows(reader(topic))
    assert [row["keyHash"] for row in whole] == [key_hash(record.key or b"") for record in made]
    assert rows(reader(topic, startingOffsets='{"0": 4}', endingOffsets='{"0": 16}')) == whole[4:16]


@pytest.mark.parametrize("runs", [True, False])
def test_batches_that_share_a_run_with_wanted_ones_are_left_out(tmp_path: Path, runs: bool) -> None:
    topic = HandMadeTopic(tmp_path)
    topic.add_chunk(0, *[records(first, 5) for first in range(0, 25, 5)], runs=runs)
    snapshot, _ = planned(topic)
    (partition,) = plan_batch(snapshot, [Range(0, 7, 13)])
    found = raw_batches(partition, SourceOptions.parse(topic.options))
    assert [header.base_offset for _, header, _ in found] == [5, 10]


@pytest.mark.parametrize(
    ("since", "before"), [(0, 100), (5, 15), (9, 10), (10, 11), (0, 1), (19, 20), (20, 30), (7, 7)]
)
def test_times_are_cut_to_the_record_whatever_order_they_have(tmp_path: Path, since: int, before: int) -> None:
    topic = HandMadeTopic(tmp_path)
    times = [0, 3, 1, 2, 5, 4, 9, 8, 7, 6, 19, 10, 11, 18, 17, 12, 13, 16, 14, 15]
    made = [Record(b"%d" % time, None, time * 1_000) for time in times]
    topic.add_chunk(0, made[:4], made[4:7])
    topic.add_chunk(0, made[7:12], made[12:])
    found = values(topic, startingTimestamp=str(since), endingTimestamp=str(before))
    assert found == [b"%d" % time for time in times if since <= time < before]


def test_a_time_bound_needs_no_timestamp_column(tmp_path: Path) -> None:
    topic = HandMadeTopic(tmp_path)
    topic.add_chunk(0, [Record(b"old", None, 1_000), Record(b"new", None, 2_000)])
    assert rows(reader(topic, "offset", startingTimestamp="2")) == [{"offset": 1}]


def test_chunks_runs_and_batches_outside_the_bounds_are_not_read(tmp_path: Path) -> None:
    topic = HandMadeTopic(tmp_path)
    topic.add_chunk(0, records(0, 2, timestamp=1_000))
    topic.add_chunk(
        0,
        records(2, 2, timestamp=1_000),
        records(4, 2, timestamp=5_000),
        records(6, 2, timestamp=9_000),
        runs=True,
    )
    topic.path(0, 0).write_bytes(b"damaged, but not looked at")
    data = bytearray(topic.path(0, 1).read_bytes())
    data[100] ^= 1  # in the first batch of the second chunk
    topic.path(0, 1).write_bytes(data)
    assert values(topic, startingTimestamp="5", endingTimestamp="6") == numbers(4, 6)
    with pytest.raises(LogDamaged):
        values(topic, startingTimestamp="1", endingTimestamp="6")


def test_a_key_is_found_without_reading_batches_of_other_hashes(tmp_path: Path) -> None:
    topic = HandMadeTopic(tmp_path)
    topic.add_chunk(
        0, records(0, 2, key=b"alpha"), records(2, 2, key=b"key-0"), records(4, 1), records(5, 1, key=b"alpha")
    )
    options = SourceOptions.parse(topic.options)
    _, (partition,) = planned(topic)
    prune = Prune(hashes=frozenset([key_hash(b"alpha")]))
    found = [header.base_offset for _, header, _ in raw_batches(partition, options, prune=prune)]
    assert found == [0, 5]
    assert [header.base_offset for _, header, _ in raw_batches(partition, options)] == [0, 2, 4, 5]


# ── splits and merges ────────────────────────────────────────────────────────────────────────────────────────────────


def split_and_merged(folder: Path) -> HandMadeTopic:
    """0 was split into 1 and 2, these were merged into 3, which was split into 4 and 5."""
    shapes = [
        Shape(FULL),
        Shape(LOW, (0,)),
        Shape(HIGH, (0,)),
        Shape(FULL, (1, 2)),
        Shape(LOW, (3,)),
        Shape(HIGH, (3,)),
    ]
    topic = HandMadeTopic(folder, shapes)
    number = 0
    for segments in ((0,), (1, 2), (3,), (4, 5)):
        for _ in range(3):
            for segment in segments:
                hashes = topic.layout.segment(segment).hash_range
                made = [
                    Record(b"%d" % (number + place), key)
                    for place, key in enumerate(b"key-%d" % (place % 7) for place in range(14))
                    if key_hash(key) in hashes
                ]
                topic.add_chunk(segment, made[: len(made) // 2], made[len(made) // 2 :])
            number += 14
    return topic


@pytest.mark.parametrize("partitions", ["1", "5", "40"])
def test_each_key_is_in_order_across_splits_and_merges(tmp_path: Path, partitions: str) -> None:
    topic = split_and_merged(tmp_path)
    found = rows(reader(topic, "segment", "offset", "key", "value", minPartitions=partitions))
    assert len({(row["segment"], row["offset"]) for row in found}) == len(found) == sum(map(topic.end, topic.chunks))
    by_key: dict[bytes, list[int]] = {}
    for row in found:
        by_key.setdefault(row["key"], []).append(int(row["value"]))
    assert len(by_key) == 7
    for key, numbers_of_key in by_key.items():
        assert numbers_of_key == sorted(numbers_of_key), f"{key!r} is out of order"


def test_manifests_tell_layout_ends_and_seals(tmp_path: Path) -> None:
    snapshot = take_snapshot(SourceOptions.parse(split_and_merged(tmp_path).options))
    assert {each.id: (each.parents, each.sealed) for each in snapshot.segments.values()} == {
        0: ((), True),
        1: ((0,), True),
        2: ((0,), True),
        3: ((1, 2), True),
        4: ((3,), False),
        5: ((3,), False),
    }
    assert snapshot.segments[0].end == 42
    assert (snapshot.topic_id, snapshot.storage) == (0, f"file://{tmp_path}")


# ── bad days ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def three_chunks(folder: Path) -> HandMadeTopic:
    topic = HandMadeTopic(folder)
    for first in (0, 10, 20):
        topic.add_chunk(0, records(first, 5), records(first + 5, 5))
    return topic


def read(topic: HandMadeTopic, partition: Partition, **options: str) -> list[bytes]:
    parsed = SourceOptions.parse({**topic.options, **options})
    schema = arrow_schema(StructType([SOURCE_SCHEMA["value"]]))
    return [row["value"] for batch in record_batches(partition, parsed, schema) for row in batch.to_pylist()]


def test_a_damaged_chunk_is_an_error_that_names_it_and_says_what_to_do(tmp_path: Path) -> None:
    topic = three_chunks(tmp_path)
    data = bytearray(topic.path(0, 1).read_bytes())
    data[data.index(b"15", 200)] ^= 1
    topic.path(0, 1).write_bytes(data)
    for options in ({}, {"failOnDataLoss": "false"}):
        with pytest.raises(LogDamaged) as caught:
            values(topic, **options)
        assert topic.chunks[0][1].object in str(caught.value)
        assert "at offset 15" in str(caught.value)
        assert "braid pipeline audit" in str(caught.value)


def test_a_table_of_offsets_is_read_from_headers_alone(tmp_path: Path) -> None:
    topic = three_chunks(tmp_path)
    data = bytearray(topic.path(0, 1).read_bytes())
    data[data.index(b"15", 200)] ^= 1  # in a body
    topic.path(0, 1).write_bytes(data)
    found = rows(reader(topic, "offset", "segment", startingOffsets='{"0": 5}'))
    assert [row["offset"] for row in found] == list(range(5, 30))
    with pytest.raises(LogDamaged):
        rows(reader(topic, "offset", "value"))
    data[0] ^= 1  # and now in a header
    topic.path(0, 1).write_bytes(data)
    with pytest.raises(LogDamaged, match="at offset 10"):
        rows(reader(topic, "offset"))


@pytest.mark.parametrize("cut", [1, 40, 500])
def test_a_chunk_that_lost_its_end_is_damaged(tmp_path: Path, cut: int) -> None:
    topic = three_chunks(tmp_path)
    topic.path(0, 1).write_bytes(topic.path(0, 1).read_bytes()[:-cut])
    with pytest.raises(LogDamaged, match=topic.chunks[0][1].object):
        values(topic)


def test_a_chunk_under_the_name_of_another_is_damage(tmp_path: Path) -> None:
    topic = three_chunks(tmp_path)
    topic.path(0, 1).write_bytes(topic.path(0, 2).read_bytes())
    with pytest.raises(LogDamaged, match="speaks of offsets 20–30, the catalog of 10–20"):
        values(topic)


def test_a_missing_chunk_is_data_loss_or_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    topic = three_chunks(tmp_path)
    topic.path(0, 1).unlink()
    with pytest.raises(DataLoss) as caught:
        values(topic)
    assert "offsets 10 to 19 of segment 0 of topic public/default/orders are gone" in str(caught.value)
    assert "failOnDataLoss" in str(caught.value)
    with caplog.at_level(logging.WARNING):
        assert values(topic, failOnDataLoss="false") == numbers(0, 10) + numbers(20, 30)
    assert "offsets 10 to 19 of segment 0" in caplog.text


def test_retention_after_planning_is_data_loss_too(tmp_path: Path) -> None:
    topic = three_chunks(tmp_path)
    _, (partition,) = planned(topic)
    topic.forget(0, 0)
    with pytest.raises(DataLoss, match="offsets 0 to 9"):
        read(topic, partition)
    assert read(topic, partition, failOnDataLoss="false") == numbers(10, 30)


def test_chunks_that_were_compacted_after_planning_are_read_from_where_they_are_now(tmp_path: Path) -> None:
    topic = three_chunks(tmp_path)
    _, (partition,) = planned(topic)
    topic.forget(0, 0)
    topic.forget(0, 0)
    topic.add_chunk(0, records(0, 20), at=0, epoch=9)
    assert read(topic, partition) == numbers(0, 30)


def test_a_chunk_that_vanishes_in_the_middle_of_a_piece_is_read_on_elsewhere(tmp_path: Path) -> None:
    topic = three_chunks(tmp_path)
    snapshot, _ = planned(topic)
    (partition,) = plan_micro_batch(snapshot, [Range(0, 3, 27)], partitions=1)
    topic.forget(0, 1)
    topic.add_chunk(0, records(10, 4), at=10, epoch=9)
    topic.add_chunk(0, records(14, 6), at=14, epoch=9)
    assert read(topic, partition) == numbers(3, 27)


def test_a_hole_in_the_manifest_is_data_loss_and_never_a_shorter_table(tmp_path: Path) -> None:
    topic = three_chunks(tmp_path)
    topic.forget(0, 1)
    with pytest.raises(DataLoss, match="offsets 10 to 19"):
        values(topic)


def test_what_is_read_is_fixed_when_it_is_planned(tmp_path: Path) -> None:
    topic = three_chunks(tmp_path)
    found = reader(topic, "value")
    partitions = found.partitions()
    topic.add_chunk(0, records(30, 10))
    assert [row["value"] for each in partitions for batch in found.read(each) for row in batch.to_pylist()] == numbers(
        0, 30
    )
    assert values(topic) == numbers(0, 40)


def test_a_topic_without_a_manifest_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(TopicNotFound, match="correct the topic's name or the storage's URL"):
        BraidDataSource({"manifest": f"file://{tmp_path}", "topic": "nothing"}).reader(SOURCE_SCHEMA).partitions()


def test_a_wrong_storage_url_names_the_option() -> None:
    with pytest.raises(InvalidArgument, match="option manifest"):
        BraidDataSource({"manifest": "/tmp/x", "topic": "nothing"}).reader(SOURCE_SCHEMA).partitions()


def test_no_broker_is_one_clear_sentence() -> None:
    found = BraidDataSource({"url": "braid://127.0.0.1:1", "topic": "orders", "timeout": "0.1"}).reader(SOURCE_SCHEMA)
    with pytest.raises(ConnectFailed) as caught:
        found.partitions()
    assert "no broker answered at braid://127.0.0.1:1 for 0.1 s" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_raw_batches_say_which_piece_they_belong_to(tmp_path: Path) -> None:
    topic = three_chunks(tmp_path)
    _, (partition,) = planned(topic)
    found = list(raw_batches(partition, SourceOptions.parse(topic.options), prune=NO_PRUNING))
    assert [(piece.first, header.base_offset, header.count) for piece, header, _ in found] == [
        (0, 0, 5),
        (0, 5, 5),
        (10, 10, 5),
        (10, 15, 5),
        (20, 20, 5),
        (20, 25, 5),
    ]
    assert all(isinstance(piece, ChunkPiece) for piece, _, _ in found)
    assert all(len(data) == header.size for _, header, data in found)


# ── poison ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def poisoned(folder: Path, what: str) -> HandMadeTopic:
    """Offsets 0 to 4 are good, 5 to 7 are poison, 8 and 9 are good."""
    topic = HandMadeTopic(folder)
    poisonous = (poison.shown_by_the_body() | poison.shown_by_the_header())[what]
    topic.add_chunk(0, records(0, 5), poisonous, records(8, 2))
    return topic


STORED = [*poison.shown_by_the_body(), "an unknown schema", "another raw length than its plain body"]


@pytest.mark.parametrize("what", STORED)
def test_a_batch_that_cannot_be_decoded_fails_the_read_with_its_offsets_and_the_way_past_it(
    tmp_path: Path, what: str
) -> None:
    topic = poisoned(tmp_path, what)
    with pytest.raises(
        BatchUnreadable, match=r"offsets 5 to 7 of segment 0 .* Set option badRecords to skip"
    ) as raised:
        rows(reader(topic))
    assert (raised.value.segment, raised.value.first_offset, raised.value.next_offset) == (0, 5, 8)


@pytest.mark.parametrize("what", STORED)
@pytest.mark.parametrize("columns", [(), ("value",), ("offset",)], ids=["all", "values", "offsets"])
def test_a_batch_that_cannot_be_decoded_is_skipped_with_a_count_if_that_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str, columns: tuple[str, ...]
) -> None:
    found = rows(reader(poisoned(tmp_path, what), *columns, badRecords="skip"))
    assert len(found) == 7, "whichever columns are read"
    if "value" in found[0]:
        assert [row["value"] for row in found] == numbers(0, 5) + numbers(8, 10)
    (warning,) = caplog.messages
    assert warning.startswith("3 records were skipped")
    assert "offsets 5 to 7 of segment 0 of topic public/default/orders" in warning


def test_only_the_records_of_the_partition_count_as_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    topic = poisoned(tmp_path, "value offsets that fall")
    options = {"startingOffsets": '{"0": 3}', "endingOffsets": '{"0": 6}', "badRecords": "skip"}
    assert values(topic, **options) == numbers(3, 5)
    assert caplog.messages[0].startswith("1 records were skipped")


def test_batches_that_become_large_are_decompressed_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MAX_BYTES", 3 << 20)
    topic = HandMadeTopic(tmp_path)
    topic.add_chunk(0, *(poison.bomb(2 << 20) for _ in range(6)))
    found = reader(topic, "value")
    sizes = [batch.nbytes for partition in found.partitions() for batch in found.read(partition)]
    assert len(sizes) == 6, "each is larger than what is left beside the one before it"
