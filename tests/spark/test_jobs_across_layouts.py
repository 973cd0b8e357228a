"""Jobs on a topic that was split, merged and repartitioned while it was filled: they read parents before children."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest
from pyspark.sql import SparkSession

import braid.sync
from braid.spark.jobs.audit.job import audit_topic
from braid.spark.jobs.compact import compact_topic
from braid.spark.jobs.lake.job import Lake, open_table
from braid.spark.jobs.replay.job import ReplayRun
from braid.spark.jobs.replay.journal import ReplayJournal
from tests.kits.waiting import wait_until
from tests.spark.spark_kit import StoredBroker, number_of, numbered

TOPIC = "changed"
CHANGES = ("split 0", "merge 1 2", "split 3", "repartition 3")
ENDED = {0, 1, 2, 3, 4, 5}
RECORDS = 5_000
KEYS = 20
IN_ORDER = {b"key-%d" % key: list(range(key, RECORDS, KEYS)) for key in range(KEYS)}


@pytest.fixture(scope="module")
def changed(broker: StoredBroker) -> str:
    broker.create(TOPIC)
    records = numbered(RECORDS, keys=KEYS)
    with braid.sync.connect(broker.url, timeout=60) as client:
        for turn, change in enumerate((*CHANGES, "")):
            broker.fill(TOPIC, records[turn * 1_000 : (turn + 1) * 1_000])
            if change:
                name, *numbers = change.split()
                getattr(client.admin, name)(TOPIC, *map(int, numbers))
    wait_until(lambda: sealed_in_storage(broker) == ENDED, "the manifests of all parents say that they have ended")
    return TOPIC


def sealed_in_storage(broker: StoredBroker) -> set[int]:
    folders = (broker.folder / "history/public/default" / TOPIC).glob("*-*-*")
    newest = {int(folder.name.rpartition("-")[2]): max(folder.glob("manifests/*.json")) for folder in folders}
    return {segment for segment, path in newest.items() if json.loads(path.read_bytes())["sealed"]}


def by_key(rows: list[tuple[int, int, Any, Any]]) -> dict[bytes, list[int]]:
    """The numbers of each key's records, parents before children."""
    found: dict[bytes, list[int]] = {}
    for _, _, key, value in sorted(rows):
        found.setdefault(bytes(key), []).append(number_of(value))
    return found


def records(spark: SparkSession, **options: str) -> dict[bytes, list[int]]:
    read = spark.read.format("braid").options(**options).load()
    return by_key([tuple(row) for row in read.select("segment", "offset", "key", "value").collect()])


def test_the_history_is_sound_before_and_after_compaction(
    spark: SparkSession, broker: StoredBroker, changed: str
) -> None:
    options = {"topic": changed, "url": broker.url}
    audited = audit_topic(spark, options, deep=True)
    assert audited.defects == ()
    assert audited.records == RECORDS
    assert records(spark, **options) == IN_ORDER
    report = compact_topic(spark, options, target_bytes=512 << 10)
    assert (report.ok, report.failures) == (True, ())
    assert report.chunks_after < report.chunks_before
    assert {each.segment for each in report.segments if each.swaps} & ENDED, "sealed segments are compacted, too"
    assert records(spark, **options) == IN_ORDER
    alone = audit_topic(spark, {"topic": changed, "manifest": broker.storage})
    assert alone.defects == ()
    assert {each.segment for each in alone.segments if each.sealed} == ENDED


def test_a_table_gets_parents_before_their_children(
    spark: SparkSession, broker: StoredBroker, changed: str, tmp_path: Path
) -> None:
    where = tmp_path / "orders"
    report = Lake(
        spark, {"topic": changed, "url": broker.url}, open_table(str(where), "parquet"), max_records=900
    ).run()
    assert (report.ok, report.records, report.lag) == (True, RECORDS, 0)
    table = pyarrow.dataset.dataset(where, partitioning="hive").to_table()
    names = ("step", "segment", "offset", "key", "value")
    rows = sorted(zip(*(table[name].to_pylist() for name in names), strict=True))
    assert by_key([(step, at, key, value) for at, (step, _, _, key, value) in enumerate(rows)]) == IN_ORDER


def test_a_replay_keeps_the_order_of_keys_while_its_target_changes(
    spark: SparkSession, broker: StoredBroker, changed: str, tmp_path: Path
) -> None:
    broker.create("changed-copy", segments=2)
    target = {"topic": "changed-copy", "url": broker.url}
    journal = ReplayJournal(str(tmp_path))
    with braid.sync.connect(broker.url, timeout=60) as client:
        changes = iter(
            (lambda: client.admin.merge("changed-copy", 0, 1), lambda: client.admin.split("changed-copy", 2))
        )

        def on_step(_: object) -> None:
            next(changes, lambda: None)()

        run = ReplayRun(spark, {"topic": changed, "url": broker.url}, target, journal, max_records=900, on_step=on_step)
        report = run.run()
        assert next(changes, None) is None, "the target has changed twice"
    assert (report.ok, report.records, report.duplicates) == (True, RECORDS, 0)
    assert records(spark, **target) == IN_ORDER
