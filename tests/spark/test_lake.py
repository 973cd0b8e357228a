"""Topics land in tables, each record once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.dataset
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import braid.sync
from braid.model.errors import DataLoss, TableConflict, TableMismatch
from braid.model.layout import HashRange
from braid.scan.snapshot import take_snapshot
from braid.spark.jobs.lake.job import Lake, LakeReport, land, next_step, open_table, step_rows, write_files
from braid.spark.jobs.lake.table import LakeTable, Landed, Landing
from braid.spark.source.options import SourceOptions
from braid.spark.stream.batch_limits import BatchLimits
from tests.kits import poison
from tests.kits.hand_made_topic import HandMadeTopic, Shape, records
from tests.kits.waiting import wait_until
from tests.spark.dying_jobs import LANDED, Left
from tests.spark.spark_kit import ROOT, WAIT_S, Sent, StoredBroker, numbered

both = pytest.mark.parametrize("kind", ["parquet", "delta"])


def rows_of(where: Path, kind: str) -> Any:
    """As readers without Spark see them."""
    if kind == "delta":
        return deltalake.DeltaTable(str(where)).to_pyarrow_table()
    return pa.dataset.dataset(where, partitioning="hive").to_table()


def offsets_of(where: Path, kind: str) -> list[tuple[int, int]]:
    found = rows_of(where, kind)
    return sorted(zip(found["segment"].to_pylist(), found["offset"].to_pylist(), strict=True))


def lake(spark: SparkSession, source: dict[str, str], where: Path, kind: str, **more: Any) -> LakeReport:
    return Lake(spark, source, open_table(str(where), kind), **more).run()


def everything(*ends: int) -> list[tuple[int, int]]:
    return [(segment, offset) for segment, end in enumerate(ends) for offset in range(end)]


@both
def test_a_topic_lands_and_a_second_run_goes_on_where_the_table_says(
    spark: SparkSession, broker: StoredBroker, tmp_path: Path, kind: str
) -> None:
    topic = broker.create(f"lake-runs-{kind}", segments=2)
    source = {"topic": topic, "url": broker.url}
    sent = broker.fill(topic, numbered(3_000), headers={"trace": b"a1"})
    where = tmp_path / "orders"
    first = lake(spark, source, where, kind, max_records=1_000)
    assert (first.ok, first.records, first.lag, len(first.steps)) == (True, 3_000, 0, 3)
    check_each_once(rows_of(where, kind), sent)
    nothing = lake(spark, source, where, kind)
    assert (nothing.records, nothing.steps, nothing.step) == (0, (), first.step)

    sent += broker.fill(topic, numbered(500))
    again = lake(spark, source, where, kind)
    assert (again.records, sum(each.records for each in again.segments)) == (500, 500)
    found = rows_of(where, kind)
    check_each_once(found, sent)
    assert found.schema.field("timestamp").type == pa.timestamp("us", "UTC")
    assert found.filter(pa.compute.less(found["offset"], 1))["headers"][0].as_py() == [("trace", b"a1")]
    if kind == "parquet":
        read = spark.read.parquet(str(where))
        assert read.where("step = 4").count() == 500
        assert read.selectExpr("count(*)", "count(distinct segment, offset)").first() == (3_500, 3_500)


def check_each_once(found: Any, sent: list[Sent]) -> None:
    rows = sorted(zip(*(found[name].to_pylist() for name in ("segment", "offset", "key", "value")), strict=True))
    assert rows == sorted((each.segment, each.offset, each.key, each.value) for each in sent)


@both
def test_parents_land_before_their_children_and_everything_once(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    low, high = HashRange(0, 0x7FFF), HashRange(0x8000, 0xFFFF)
    shapes = [Shape(HashRange(0, 0xFFFF)), Shape(low, (0,)), Shape(high, (0,)), Shape(HashRange(0, 0xFFFF), (1, 2))]
    topic = HandMadeTopic(tmp_path / "history", shapes)
    for segment in range(4):
        topic.add_chunk(segment, records(0, 40))
    where = tmp_path / "orders"
    landed: list[dict[str, Any]] = []
    table = open_table(str(where), kind)
    report = Lake(
        spark, topic.options, table, max_records=50, on_step=lambda _: landed.append(dict(positions(where, kind)))
    ).run()
    assert (report.records, report.lag, report.ok) == (160, 0, True)
    assert offsets_of(where, kind) == everything(40, 40, 40, 40)
    for before, after in zip([{}, *landed], landed):
        for segment, shape in enumerate(shapes):
            if after.get(str(segment)) != before.get(str(segment), 0):
                assert all(before.get(str(parent)) == "END" for parent in shape.parents)
    assert landed[-1] == {"0": "END", "1": "END", "2": "END", "3": 40}


def test_records_that_cannot_be_decoded_end_the_run_or_are_skipped_with_a_count(
    spark: SparkSession, tmp_path: Path
) -> None:
    topic = HandMadeTopic(tmp_path / "history")
    topic.add_chunk(0, records(0, 5), poison.shown_by_the_body()["value offsets that fall"], records(8, 12))
    where = tmp_path / "orders"
    with pytest.raises(PySparkException, match="offsets 5 to 7 of segment 0"):
        lake(spark, topic.options, tmp_path / "failed", "parquet")
    report = lake(spark, {**topic.options, "badRecords": "skip"}, where, "parquet", columns=("offset", "value"))
    assert (report.ok, report.records, report.skipped, report.lag) == (True, 17, 3, 0)
    (segment,) = report.segments
    assert (segment.first, segment.until, segment.records, segment.position) == (0, 20, 17, 20)
    assert sorted(rows_of(where, "parquet")["offset"].to_pylist()) == [*range(5), *range(8, 20)]


def positions(where: Path, kind: str) -> dict[str, Any]:
    found = open_table(str(where), kind).landed()
    assert found is not None
    return {str(segment): position for segment, position in found.positions.items()}


@both
def test_a_step_that_was_written_but_not_committed_is_landed_once(
    spark: SparkSession, tmp_path: Path, kind: str
) -> None:
    topic = HandMadeTopic(tmp_path / "history")
    topic.add_chunk(0, records(0, 100))
    where = tmp_path / "orders"
    lake(spark, topic.options, where, kind)
    topic.add_chunk(0, records(100, 50))

    table = open_table(str(where), kind)
    before = table.landed()
    assert before is not None
    step = next_step(take_snapshot(SourceOptions.parse(topic.options)), before, BatchLimits())
    assert step is not None
    folder = table.stage(step.landed.step)
    write_files(step_rows(spark, topic.options, step), folder)
    assert os.path.isdir(folder)
    assert offsets_of(where, kind) == everything(100)  # Here a driver would die.
    assert lake(spark, topic.options, where, kind).records == 50
    assert offsets_of(where, kind) == everything(150)
    # And one that comes back to life, with what it had planned, is refused and leaves nothing.
    with pytest.raises(TableConflict, match="nothing was landed twice"):
        land(spark, topic.options, table, step)
    assert offsets_of(where, kind) == everything(150)
    assert open_table(str(where), kind).remove_leftovers(older_than_s=-1) == 1
    assert not os.path.exists(folder)
    assert offsets_of(where, kind) == everything(150)


class Meeting:
    """A table whose commits wait for each other."""

    def __init__(self, table: LakeTable, together: threading.Barrier) -> None:
        self._table = table
        self._together = together

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def commit(self, landing: Landing, landed: Landed) -> None:
        self._together.wait(WAIT_S)
        self._table.commit(landing, landed)


@both
def test_two_lakes_at_once_land_everything_once_and_one_of_them_says_so(
    spark: SparkSession, tmp_path: Path, kind: str
) -> None:
    topic = HandMadeTopic(tmp_path / "history")
    topic.add_chunk(0, records(0, 200))
    where, together = tmp_path / "orders", threading.Barrier(2)
    outcomes: list[int | str] = []

    def run() -> None:
        table: Any = Meeting(open_table(str(where), kind), together)
        try:
            outcomes.append(Lake(spark, topic.options, table).run().records)
        except TableConflict as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert min(map(str, outcomes)) == "200"
    assert "another writer has committed step 1" in max(map(str, outcomes))
    assert offsets_of(where, kind) == everything(200)
    left = [path for path in tmp_path.rglob("part-*.parquet") if "history" not in path.parts]
    assert len(left) == 1


def test_what_retention_took_before_it_landed_is_an_error_or_is_skipped_by_name(
    spark: SparkSession, tmp_path: Path
) -> None:
    topic = HandMadeTopic(tmp_path / "history")
    topic.add_chunk(0, records(0, 10))
    where = tmp_path / "orders"
    lake(spark, topic.options, where, "parquet")
    topic.add_chunk(0, records(10, 10))
    topic.add_chunk(0, records(20, 10))
    topic.forget(0, 0)
    topic.forget(0, 0)
    with pytest.raises(DataLoss, match=r"offsets 10 to 19 of segment 0 .*--skip-lost"):
        lake(spark, topic.options, where, "parquet")
    report = lake(spark, topic.options, where, "parquet", skip_lost=True)
    assert (report.ok, report.records) == (False, 10)
    assert "offsets 10 to 19" in report.losses[0]
    assert offsets_of(where, "parquet") == [(0, offset) for offset in [*range(10), *range(20, 30)]]


@both
def test_a_topic_that_was_created_again_does_not_land_in_the_table_of_the_old_one(
    spark: SparkSession, broker: StoredBroker, tmp_path: Path, kind: str
) -> None:
    topic = broker.create(f"lake-again-{kind}")
    broker.fill(topic, numbered(10))
    where, source = tmp_path / "orders", {"topic": topic, "url": broker.url}
    assert lake(spark, source, where, kind).records == 10
    with braid.sync.connect(broker.url, timeout=WAIT_S) as client:
        client.admin.delete_topic(topic)
    broker.create(topic)
    broker.fill(topic, numbered(30))
    with pytest.raises(TableMismatch, match="deleted and created again"):
        lake(spark, source, where, kind)
    assert len(offsets_of(where, kind)) == 10


def test_only_the_columns_that_were_asked_for_land(spark: SparkSession, tmp_path: Path) -> None:
    topic = HandMadeTopic(tmp_path / "history")
    topic.add_chunk(0, records(0, 10))
    for kind in ("parquet", "delta"):
        where = tmp_path / kind
        lake(spark, topic.options, where, kind, columns=("offset", "value"))
        assert rows_of(where, kind).column_names == ["offset", "value"] + ["step"] * (kind == "parquet")
        with pytest.raises(TableMismatch, match="has the columns offset, value"):
            lake(spark, topic.options, where, kind, columns=("key",))
        assert lake(spark, topic.options, where, kind).ok


# Real processes.

START_S = 200.0
"""For a process with a session of its own, on a machine that has other things to do."""


def start(*command: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    return subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)


def test_a_driver_that_is_killed_before_its_commit_has_landed_nothing_and_the_next_run_all(
    spark: SparkSession, broker: StoredBroker, killed: Left
) -> None:
    where = killed.table
    assert not where.exists()
    assert len(list((where.parent / ".orders.staging").glob("1-*/part-*.parquet"))) >= 1
    assert lake(spark, {"topic": LANDED, "url": broker.url}, where, "parquet").records == 1_000
    check_each_once(rows_of(where, "parquet"), killed.landed)


def test_following_lands_what_comes_and_ends_with_sigterm(broker: StoredBroker, tmp_path: Path) -> None:
    topic = broker.create("lake-followed")
    sent = broker.fill(topic, numbered(100))
    where = tmp_path / "orders"
    command = ["--url", broker.url, "pipeline", "lake", topic, "--to", str(where), "--format", "delta"]
    following = start("-m", "braid.cli.main", *command, "--follow", "--json", "--master", "local[2]")
    try:
        wait_until(lambda: has(where, 100) or following.poll() is not None, "100 records in the table", START_S)
        sent += broker.fill(topic, numbered(50))
        wait_until(lambda: has(where, 150) or following.poll() is not None, "150 records in the table")
        following.send_signal(signal.SIGTERM)
        printed, said = following.communicate(timeout=WAIT_S)
    finally:
        following.kill()
        following.communicate()
    assert following.returncode == 0, said.decode()[-2000:]
    report = json.loads(printed)
    assert (report["ok"], report["records"], report["lag"]) == (True, 150, 0)
    check_each_once(rows_of(where, "delta"), sent)


def has(where: Path, count: int) -> bool:
    return deltalake.DeltaTable.is_deltatable(str(where)) and len(offsets_of(where, "delta")) >= count


def run_cli(arguments: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "braid.cli.main", *arguments], capture_output=True, timeout=WAIT_S)


def test_wrong_usage_is_said_before_spark_is_started(broker: StoredBroker, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    base = ["--url", broker.url, "pipeline", "lake", "nothing-here", "--to"]
    for arguments, code, text in (
        ([*base, "s3://bucket/x"], 2, b"no file system for object stores"),
        ([*base, str(tmp_path)], 1, b"is not empty"),
        ([*base, str(tmp_path / "t"), "--columns", "price"], 2, b"column 'price' is unknown"),
        ([*base, str(tmp_path / "t")], 1, b"there is no topic public/default/nothing-here"),
    ):
        done = run_cli(arguments)
        assert (done.returncode, text in done.stderr) == (code, True), done.stderr
        assert done.stderr.count(b"\n") == 1
