"""Advice about real topics with a planted hot range, a planted hot key, and neither."""

from __future__ import annotations

import random
from itertools import count
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from braid.cli.pipeline.advise import render
from braid.cli.pipeline.report import Fields
from braid.model.hashing import key_hash
from braid.model.layout import HashRange
from braid.spark.jobs.advise.job import advise_topic
from braid.spark.jobs.advise.rules import RECORD_BYTES, Split
from tests.kits import poison
from tests.kits.hand_made_topic import HandMadeTopic, Record
from tests.spark.spark_kit import StoredBroker

VALUE = b"v" * 50
HOT_RANGE = HashRange(0x8400, 0x8BFF)
HOT_KEY = b"customer-7"  # its hash is 7213


def keys_in(hashes: HashRange, wanted: int) -> list[bytes]:
    found = (b"key-%d" % number for number in count())
    return [key for _, key in zip(range(wanted), (key for key in found if key_hash(key) in hashes))]


@pytest.fixture(scope="module")
def orders(broker: StoredBroker) -> str:
    """4 segments; a third of the records anywhere, a third in a narrow range, a third with one key, 90 without any."""
    anywhere, narrow = keys_in(HashRange(0, 0xFFFF), 1_000), keys_in(HOT_RANGE, 1_000)
    records: list[tuple[bytes | None, bytes]] = [(key, VALUE) for key in (*anywhere, *narrow, *[HOT_KEY] * 1_000)]
    random.Random(1).shuffle(records)
    topic = broker.create("advised", segments=4)
    broker.fill(topic, [*records, *[(None, VALUE)] * 90])
    broker.until_chunks(topic, 1)
    return topic


def test_a_hot_range_is_divided_and_a_hot_key_is_named(spark: SparkSession, broker: StoredBroker, orders: str) -> None:
    report = advise_topic(spark, {"topic": orders, "url": broker.url}, target=8)
    advice = report.advice
    assert report.records == 3_090
    assert report.unkeyed_share == pytest.approx(90 * (len(VALUE) + RECORD_BYTES) / report.load)

    (hot,) = advice.hot_keys
    weight = 1_000 * (len(HOT_KEY) + len(VALUE) + RECORD_BYTES)
    (key,) = report.keys
    assert (hot.key, hot.key_hash, hot.segment_id) == ("customer-7", 0x7213, 1)
    assert (key.key, key.records, key.load) == ("customer-7", 1_000, weight)
    assert hot.share == pytest.approx(weight / report.load)

    inside = [action.at for action in advice.actions if isinstance(action, Split) and int(action.at, 16) in HOT_RANGE]
    assert inside, "no split in the hot range"
    hottest = max(advice.before, key=lambda each: each.peak_load)
    assert hottest.evenness > 2
    others = [each for each in advice.after if hot.key_hash not in each.hash_range]
    assert max(each.evenness for each in others) <= 1.5
    assert report.commands[0].startswith("braid topic split advised ")


def test_the_same_is_found_in_storage_alone_up_to_where_it_reaches(
    spark: SparkSession, broker: StoredBroker, orders: str
) -> None:
    report = advise_topic(spark, {"topic": orders, "manifest": broker.storage}, target=8)
    assert 1_000 < report.records <= 3_090
    assert [each.key for each in report.advice.hot_keys] == ["customer-7"]


def test_records_that_cannot_be_decoded_are_skipped_with_a_count(spark: SparkSession, tmp_path: Path) -> None:
    topic = HandMadeTopic(tmp_path)
    timed = [Record(b"%d" % number, HOT_KEY, number * 1_000_000) for number in range(12)]
    topic.add_chunk(0, timed[:5], poison.shown_by_the_body()["value offsets that fall"], timed[5:])
    since = "1970-01-01T00:00:02Z"
    with pytest.raises(Exception, match="cannot be decoded"):
        advise_topic(spark, topic.options, since=since)
    skipping = {**topic.options, "badRecords": "skip"}
    report = advise_topic(spark, skipping, since=since)
    assert (report.records, report.skipped) == (10, 3)
    assert [(each.key, each.records) for each in report.keys] == [("customer-7", 10)]
    (skipped,) = [part for part in render(report) if isinstance(part, Fields)]
    assert ("skipped", "3 records that cannot be decoded") in skipped.lines


def test_what_is_older_does_not_count(spark: SparkSession, broker: StoredBroker, orders: str) -> None:
    report = advise_topic(spark, {"topic": orders, "url": broker.url}, since="2100-01-01T00:00:00Z")
    assert (report.records, report.load, report.times, report.keys, report.ok) == (0, 0, (), (), True)
