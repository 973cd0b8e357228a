"""Tables of the lake, without Spark: what is visible when, and who wins."""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Iterable
from pathlib import Path

import deltalake
import msgspec
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from braid.client.consuming.checkpoint import Position
from braid.model.errors import InvalidArgument, JobFailed, TableConflict, TableMismatch
from braid.spark.jobs.lake.delta import statistics
from braid.spark.jobs.lake.job import open_table
from braid.spark.jobs.lake.parquet import ParquetTable
from braid.spark.jobs.lake.table import LakeTable, Landed, Landing

COLUMNS = ("segment", "offset", "value", "timestamp", "headers")
SCHEMA = pa.schema(
    [
        ("segment", pa.int32()),
        ("offset", pa.int64()),
        ("value", pa.binary()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("headers", pa.map_(pa.string(), pa.binary())),
    ]
)
TIME = datetime.datetime(2026, 11, 15, 18, 0, 0, 123456, tzinfo=datetime.UTC)
Row = tuple[int, int]

both = pytest.mark.parametrize("kind", ["parquet", "delta"])


def landed(step: int, positions: dict[int, Position], topic_id: int = 7) -> Landed:
    return Landed(topic="public/default/orders", topic_id=topic_id, step=step, positions=positions, columns=COLUMNS)


def created(where: Path, kind: str) -> LakeTable:
    table = open_table(str(where), kind)
    assert table.landed() is None
    table.create(landed(0, {}), SCHEMA)
    return table


def joined(where: Path, kind: str) -> LakeTable:
    """Another writer of a table that is there, but may have no commit yet."""
    table = open_table(str(where), kind)
    if table.landed() is None:
        table.create(landed(0, {}), SCHEMA)
    return table


def spark_writes(folder: str, rows: Iterable[Row], file: str = "part-0.snappy.parquet") -> None:
    """A folder as Spark leaves it: data, checksums, a mark of success."""
    os.makedirs(folder, exist_ok=True)
    columns = list(zip(*rows, strict=True)) or [(), ()]
    count = len(columns[0])
    data = [columns[0], columns[1], [b"v"] * count, [TIME] * count, [[("a", b"1")]] * count]
    pq.write_table(
        pa.table([pa.array(each, type=field.type) for each, field in zip(data, SCHEMA)], schema=SCHEMA),
        f"{folder}/{file}",
        row_group_size=2,
    )
    Path(folder, f".{file}.crc").write_bytes(b"crc")
    Path(folder, "_SUCCESS").touch()


def staged(table: LakeTable, step: int, rows: list[Row]) -> Landing:
    folder = table.stage(step)
    spark_writes(folder, rows)
    return table.prepare(folder, len(rows))


def rows_of(where: Path, kind: str) -> list[Row]:
    """As a reader sees them that is given the path alone."""
    if kind == "delta":
        if not deltalake.DeltaTable.is_deltatable(str(where)):
            return []
        found = deltalake.DeltaTable(str(where)).to_pyarrow_table()
    elif where.exists():
        found = pa.dataset.dataset(where, partitioning="hive").to_table()
    else:
        return []
    return sorted(zip(found["segment"].to_pylist(), found["offset"].to_pylist())) if found.num_rows else []


@both
def test_rows_and_positions_become_visible_with_the_commit(tmp_path: Path, kind: str) -> None:
    where = tmp_path / "orders"
    table = created(where, kind)
    landing = staged(table, 1, [(0, 0), (0, 1)])
    assert rows_of(where, kind) == []
    again = open_table(str(where), kind).landed()
    assert again is None or (again.step, again.positions) == (0, {})

    table.commit(landing, landed(1, {0: 2, 1: "END"}))
    assert rows_of(where, kind) == [(0, 0), (0, 1)]
    assert open_table(str(where), kind).landed() == landed(1, {0: 2, 1: "END"})


@both
def test_a_table_goes_on_where_its_last_commit_says(tmp_path: Path, kind: str) -> None:
    where = tmp_path / "orders"
    table = created(where, kind)
    table.commit(staged(table, 1, [(0, 0)]), landed(1, {0: 1}))
    table = open_table(str(where), kind)
    assert table.landed() == landed(1, {0: 1})
    table.commit(staged(table, 2, [(1, 0), (1, 1)]), landed(2, {0: "END", 1: 2}))
    assert open_table(str(where), kind).landed() == landed(2, {0: "END", 1: 2})
    assert rows_of(where, kind) == [(0, 0), (1, 0), (1, 1)]


@both
def test_a_table_learns_the_id_of_its_topic_when_it_becomes_known(tmp_path: Path, kind: str) -> None:
    where = tmp_path / "orders"
    table = open_table(str(where), kind)
    assert table.landed() is None
    table.create(landed(0, {}, topic_id=0), SCHEMA)
    for step, topic_id in enumerate([0, 7, 7], start=1):
        table.commit(staged(table, step, [(0, step)]), landed(step, {0: step + 1}, topic_id))
        table = open_table(str(where), kind)
        assert table.landed() == landed(step, {0: step + 1}, topic_id)


@both
def test_a_step_without_records_moves_positions_alone(tmp_path: Path, kind: str) -> None:
    table = created(tmp_path / "orders", kind)
    table.commit(staged(table, 1, [(0, 0)]), landed(1, {0: 1}))
    assert table.landed() == landed(1, {0: 1})
    table.commit(table.prepare(table.stage(2), 0), landed(2, {0: "END"}))
    assert open_table(str(tmp_path / "orders"), kind).landed() == landed(2, {0: "END"})
    assert rows_of(tmp_path / "orders", kind) == [(0, 0)]


@both
def test_of_two_writers_of_one_step_one_wins_and_nothing_lands_twice(tmp_path: Path, kind: str) -> None:
    where = tmp_path / "orders"
    created(where, kind)
    writers = [joined(where, kind) for _ in range(4)]
    landings = [staged(table, 1, [(0, 0), (0, 1)]) for table in writers]
    together = threading.Barrier(len(writers))
    outcomes: list[str] = []

    def commit(table: LakeTable, landing: Landing) -> None:
        together.wait()
        try:
            table.commit(landing, landed(1, {0: 2}))
            outcomes.append("landed")
        except TableConflict:
            table.discard(landing.folder)
            outcomes.append("conflict")

    threads = [threading.Thread(target=commit, args=each) for each in zip(writers, landings)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["conflict"] * 3 + ["landed"]
    assert rows_of(where, kind) == [(0, 0), (0, 1)]
    assert open_table(str(where), kind).landed() == landed(1, {0: 2})


@both
def test_a_writer_that_comes_late_conflicts_also_many_steps_later(tmp_path: Path, kind: str) -> None:
    where = tmp_path / "orders"
    table, late = created(where, kind), joined(where, kind)
    slow = staged(late, 1, [(0, 0)])
    for step in (1, 2, 3):
        table.commit(staged(table, step, [(0, step - 1)]), landed(step, {0: step}))
        table.landed()
    with pytest.raises(TableConflict, match="nothing was landed twice"):
        late.commit(slow, landed(1, {0: 1}))
    assert rows_of(where, kind) == [(0, 0), (0, 1), (0, 2)]


@both
def test_a_writer_that_has_seen_the_other_one_land_does_not_land_its_old_step(tmp_path: Path, kind: str) -> None:
    where = tmp_path / "orders"
    table, late = created(where, kind), joined(where, kind)
    slow = staged(late, 1, [(0, 0)])
    table.commit(staged(table, 1, [(0, 0)]), landed(1, {0: 1}))
    assert late.landed() == landed(1, {0: 1})
    with pytest.raises(TableConflict):
        late.commit(slow, landed(1, {0: 1}))
    assert rows_of(where, kind) == [(0, 0)]


class LooksTooEarly(ParquetTable):
    """Another writer's commit comes between its look and its rename."""

    def _last_step(self) -> int:
        return 0


def test_the_rename_alone_decides_between_writers_of_a_parquet_table(tmp_path: Path) -> None:
    where = tmp_path / "orders"
    table, other = created(where, "parquet"), LooksTooEarly(str(where))
    other.create(landed(0, {}), SCHEMA)
    table.commit(staged(table, 1, [(0, 0)]), landed(1, {0: 1}))
    with pytest.raises(TableConflict):
        other.commit(staged(other, 1, [(0, 0)]), landed(1, {0: 1}))
    assert rows_of(where, "parquet") == [(0, 0)]


def test_a_step_that_was_deleted_from_a_parquet_table_is_not_landed_again(tmp_path: Path) -> None:
    where = tmp_path / "orders"
    table, late = created(where, "parquet"), joined(where, "parquet")
    slow = staged(late, 1, [(0, 0)])
    for step in (1, 2):
        table.commit(staged(table, step, [(0, step - 1)]), landed(step, {0: step}))
    for file in (where / "step=1").iterdir():
        file.unlink()
    (where / "step=1").rmdir()
    with pytest.raises(TableConflict):
        late.commit(slow, landed(1, {0: 1}))
    assert rows_of(where, "parquet") == [(0, 1)]


@both
def test_a_step_with_fewer_rows_than_planned_is_refused(tmp_path: Path, kind: str) -> None:
    table = created(tmp_path / "orders", kind)
    folder = table.stage(1)
    spark_writes(folder, [(0, 0)])
    with pytest.raises(JobFailed, match=r"were to write 3 records .* finds 1 there.*shared file system"):
        table.prepare(folder, 3)
    with pytest.raises(JobFailed, match="finds 0 there"):
        table.prepare(table.stage(1), 3)  # Executors wrote to disks of their own.
    assert rows_of(tmp_path / "orders", kind) == []


@both
def test_only_files_with_rows_are_landed(tmp_path: Path, kind: str) -> None:
    where = tmp_path / "orders"
    table = created(where, kind)
    folder = table.stage(1)
    spark_writes(folder, [(0, 0)])
    spark_writes(folder, [], "part-1.snappy.parquet")
    os.makedirs(f"{folder}/_temporary/0")
    landing = table.prepare(folder, 1)
    table.commit(landing, landed(1, {0: 1}))
    found = {path.name for path in where.rglob("*") if path.is_file() and "_delta_log" not in path.parts}
    assert found == {"part-0.snappy.parquet"} | ({"_braid.parquet"} if kind == "parquet" else set())


@both
def test_leftovers_are_removed_when_they_are_old_and_nothing_else_is(tmp_path: Path, kind: str) -> None:
    where = tmp_path / "orders"
    table = created(where, kind)
    table.commit(staged(table, 1, [(0, 0)]), landed(1, {0: 1}))
    table.landed()
    killed = [staged(table, 1, [(0, 0)]).folder, staged(table, 2, [(0, 1)]).folder]
    assert table.remove_leftovers() == 0
    assert all(map(os.path.isdir, killed))
    table.commit(staged(table, 2, [(0, 1)]), landed(2, {0: 2}))
    killed.append(staged(table, 3, [(0, 2)]).folder)
    assert open_table(str(where), kind).remove_leftovers(older_than_s=-1) == 3
    assert not any(map(os.path.exists, killed))
    assert rows_of(where, kind) == [(0, 0), (0, 1)]
    assert not (tmp_path / ".orders.staging").exists()


@both
def test_a_folder_of_something_else_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(TableMismatch, match="is not empty"):
        open_table(str(tmp_path), kind).landed()
    with pytest.raises(TableMismatch, match=r"notes\.txt is a file"):
        open_table(str(tmp_path / "notes.txt"), kind)
    with pytest.raises(InvalidArgument, match="no file system for object stores"):
        open_table("s3://bucket/orders", kind)


def test_a_delta_table_that_another_writer_is_making_is_not_something_else(tmp_path: Path) -> None:
    (tmp_path / "_delta_log").mkdir()  # What the other one has come to: no commit yet.
    table = joined(tmp_path, "delta")
    table.commit(staged(table, 1, [(0, 0)]), landed(1, {0: 1}))
    assert rows_of(tmp_path, "delta") == [(0, 0)]


def test_formats_are_not_mistaken_for_each_other(tmp_path: Path) -> None:
    for kind, other in (("parquet", "delta"), ("delta", "parquet")):
        table = created(tmp_path / kind, kind)
        table.commit(staged(table, 1, [(0, 0)]), landed(1, {0: 1}))
        with pytest.raises(TableMismatch, match=f"{kind} is not empty"):
            open_table(str(tmp_path / kind), other).landed()
    with pytest.raises(InvalidArgument, match="choose one of parquet, delta"):
        open_table(str(tmp_path), "iceberg")


def test_a_delta_table_of_somebody_else_is_refused(tmp_path: Path) -> None:
    deltalake.DeltaTable.create(str(tmp_path), SCHEMA)
    with pytest.raises(TableMismatch, match="was not made by `braid pipeline lake`"):
        open_table(str(tmp_path), "delta").landed()


def test_a_parquet_table_whose_last_step_was_copied_in_part_is_refused(tmp_path: Path) -> None:
    where = tmp_path / "orders"
    table = created(where, "parquet")
    folder = table.stage(1)
    spark_writes(folder, [(0, 0), (0, 1)], "part-0.parquet")
    spark_writes(folder, [(1, 0)], "part-1.parquet")
    table.commit(table.prepare(folder, 3), landed(1, {0: 2, 1: 1}))
    assert open_table(str(where), "parquet").landed() == landed(1, {0: 2, 1: 1})
    part = where / "step=1" / "part-1.parquet"
    whole = part.read_bytes()
    part.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TableMismatch, match="step=1 cannot be read"):
        open_table(str(where), "parquet").landed()
    part.unlink()
    with pytest.raises(TableMismatch, match="step=1 was committed with 3 rows and has 2"):
        open_table(str(where), "parquet").landed()
    part.write_bytes(whole)
    assert open_table(str(where), "parquet").landed() == landed(1, {0: 2, 1: 1})


def test_a_parquet_table_whose_last_commit_is_damaged_is_refused(tmp_path: Path) -> None:
    where = tmp_path / "orders"
    table = created(where, "parquet")
    table.commit(staged(table, 1, [(0, 0)]), landed(1, {0: 1}))
    mark = where / "step=1" / "_braid.parquet"
    whole = mark.read_bytes()
    mark.unlink()
    with pytest.raises(TableMismatch, match=r"_braid\.parquet is missing"):
        table.landed()
    mark.write_bytes(whole[:-20])
    with pytest.raises(TableMismatch, match="cannot be read"):
        table.landed()
    mark.write_bytes(whole)
    (where / "step=1").rename(where / "step=4")
    with pytest.raises(TableMismatch, match="folders of the table were renamed"):
        table.landed()


def test_delta_keeps_its_positions_when_others_change_the_table_and_its_log(tmp_path: Path) -> None:
    where = tmp_path / "orders"
    table = created(where, "delta")
    for step in (1, 2, 3):
        table.commit(staged(table, step, [(0, step - 1)]), landed(step, {0: step, 5: "END"}))
        table.landed()
    other = deltalake.DeltaTable(str(where))
    other.optimize.compact()
    other.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
    other.create_checkpoint()
    checkpoint = other.version()
    for old in (where / "_delta_log").glob("*.json"):
        if int(old.stem) < checkpoint:
            old.unlink()  # As the cleaning of old commits does after a month.
    assert open_table(str(where), "delta").landed() == landed(3, {0: 3, 5: "END"})
    assert rows_of(where, "delta") == [(0, 0), (0, 1), (0, 2)]


def test_delta_lands_beside_a_compaction(tmp_path: Path) -> None:
    where = tmp_path / "orders"
    table = created(where, "delta")
    for step in (1, 2):
        table.commit(staged(table, step, [(0, step - 1)]), landed(step, {0: step}))
        table.landed()
    landing = staged(table, 3, [(0, 2)])
    deltalake.DeltaTable(str(where)).optimize.compact()
    table.commit(landing, landed(3, {0: 3}))
    assert rows_of(where, "delta") == [(0, 0), (0, 1), (0, 2)]


def test_delta_files_have_statistics_by_which_engines_skip(tmp_path: Path) -> None:
    where = tmp_path / "orders"
    table = created(where, "delta")
    landing = staged(table, 1, [(3, 10), (3, 11), (4, 7)])
    table.commit(landing, landed(1, {3: 12, 4: 8}))
    (file,) = landing.files
    found = statistics(file.footer)
    assert found["numRecords"] == 3
    assert found["minValues"] == {"segment": 3, "offset": 7, "timestamp": "2026-11-15T18:00:00.123456Z"}
    assert found["maxValues"] == {"segment": 4, "offset": 11, "timestamp": "2026-11-15T18:00:00.123456Z"}
    assert found["nullCount"] == {"segment": 0, "offset": 0, "value": 0, "timestamp": 0}
    data = deltalake.DeltaTable(str(where)).to_pyarrow_dataset()
    assert data.to_table(filter=pa.dataset.field("offset") > 100).num_rows == 0
    assert data.to_table(filter=pa.dataset.field("offset") > 9).num_rows == 2


def test_the_history_of_a_delta_table_tells_the_offsets(tmp_path: Path) -> None:
    where = tmp_path / "orders"
    table = created(where, "delta")
    table.commit(staged(table, 1, [(0, 0)]), landed(1, {0: 1, 1: "END"}))
    (commit, _) = deltalake.DeltaTable(str(where)).history()
    note = commit["braid"]["landed"]
    assert (note["topic"], note["topicId"], note["positions"]) == ("public/default/orders", 7, {"0": 1, "1": "END"})


def test_a_commit_of_a_newer_build_is_refused() -> None:
    newer = msgspec.json.encode(landed(1, {0: 1})).replace(b'"version":1', b'"version":2')
    with pytest.raises(TableMismatch, match="has version 2; this build reads 1"):
        Landed.from_bytes(newer, "here")
