"""`braid pipeline advise`: measures a topic's load by key hash and by time, and says which splits and merges help.

    records ─► by (hour, key hash): records, bytes            one pass over the topic; at most 65,536 rows an hour, kept
                 ├─► by (hour, cell of 64 hashes)             what the driver gets
                 └─► by (hour, hash), in the heaviest cells   so that a split falls where it should
    records of the heaviest hashes ─► by key                  a second pass, only if some hash is heavy

A hash is at least as heavy as any of its keys. So without a heavy hash there is no heavy key, and with one only few
keys must be counted exactly. Both passes read up to the same offsets, so they see the same records.

rules.py decides what to advise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from pyspark.sql import Observation
from pyspark.sql import functions as f
from pyspark.storagelevel import StorageLevel

from braid.model.errors import InvalidArgument
from braid.model.layout import LAST_HASH, HashRange
from braid.scan.planning import Range
from braid.scan.snapshot import TopicSnapshot, take_snapshot
from braid.spark.jobs.advise.rules import (
    RECORD_BYTES,
    TOLERANCE,
    ActiveSegment,
    Advice,
    KeyLoad,
    LoadHistogram,
    Policy,
    Split,
    advise,
)
from braid.spark.jobs.bounded_read import columns_schema, records_seen, records_skipped, rows_between, within
from braid.spark.jobs.report import JobReport
from braid.spark.source.options import SourceOptions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS: Final = ("key", "value", "timestamp", "keyHash")
"""The job reads only these columns."""
UNKEYED: Final = -1
"""The hash of a record without a key."""
CELL: Final = 64
"""Hashes in a cell: 1,024 cells for the ring."""
MAX_REFINED: Final = 128
"""How many cells are counted hash by hash, the heaviest first."""
REFINED_SHARE: Final = 0.05
"""A lighter cell cannot move a split far from its best place. In even shares."""
HEAVY_SHARE: Final = 0.01
"""The report names keys with at least this part of the load."""
MAX_KEYS: Final = 100
MAX_BUCKETS: Final = 1_000
RING_SLICES: Final = 64


class RingLoad(JobReport, frozen=True):
    first_hash: int
    load: int


class TimeLoad(JobReport, frozen=True):
    time: int
    """When the bucket begins, in seconds since 1970."""
    load: int


class AdviceReport(JobReport, frozen=True):
    topic: str
    since: str | None
    bucket_s: int
    records: int
    load: int
    """Bytes of keys and values, and a few for each record."""
    unkeyed_share: float
    """Of the load: records without a key, which go to all segments in turn."""
    ring: tuple[RingLoad, ...]
    times: tuple[TimeLoad, ...]
    keys: tuple[KeyLoad, ...]
    """Keys with at least 1 % of the load, and keys that are heavy in one bucket; the heaviest first."""
    advice: Advice
    commands: tuple[str, ...]
    """Commands that follow the advice."""
    ok: bool
    """Whether there is nothing to do."""
    skipped: int = 0
    """How many records could not be decoded and were not measured, because `badRecords` is skip."""


def advise_topic(
    spark: SparkSession,
    options: Mapping[str, str],
    *,
    since: str | None = None,
    bucket_s: int = 3_600,
    target: int | None = None,
) -> AdviceReport:
    """Measure a topic and advise on its layout. `options` say where the topic is, as for `format("braid")`. `since`
    leaves out older records, as `startingTimestamp` does. `target` is the number of segments wanted; as many as there
    are by default."""
    timed = {**options, "startingTimestamp": since} if since is not None else dict(options)
    snapshot = take_snapshot(SourceOptions.parse(timed).for_batch())
    layout = active_segments(snapshot)
    policy = Policy(target or len(layout))
    records, skipped = _read(spark, timed, snapshot)
    measured = load_by_hash(records, bucket_s).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        histogram = collect_histogram(measured, layout, bucket_s, policy.target)
    finally:
        measured.unpersist()
    heavy = heavy_hashes(histogram, policy.target)
    keys = collect_keys(load_by_key(_read(spark, timed, snapshot)[0], heavy, bucket_s)) if heavy else ()
    advice = advise(layout, histogram, keys, policy)
    return make_report(snapshot.topic, since, histogram, keys, advice, skipped())


def _read(
    spark: SparkSession, source: Mapping[str, str], snapshot: TopicSnapshot
) -> tuple[DataFrame, Callable[[], int]]:
    """Return the records of the snapshot, and a function that says after the first action how many were skipped."""
    options = SourceOptions.parse(source)
    segments = snapshot.segments
    ranges = [Range(each.id, each.earliest, each.end) for each in segments.values() if each.earliest < each.end]
    if options.bad_records != "skip" or not ranges:
        ends = json.dumps({str(segment.id): segment.end for segment in segments.values()})
        rows = spark.read.format("braid").schema(columns_schema(COLUMNS)).options(**source, endingOffsets=ends)
        return rows.load(), lambda: 0
    # Older rows are read, too: they are not among the records that cannot be decoded.
    untimed = {name: value for name, value in source.items() if name != "startingTimestamp"}
    seen = Observation()
    others = segments.keys() - {each.segment for each in ranges}
    records = rows_between(spark, untimed, ranges, others, COLUMNS, {}, seen)
    return within(options, records), lambda: sum(records_skipped(ranges, records_seen(seen)).values())


def active_segments(snapshot: TopicSnapshot) -> list[ActiveSegment]:
    """Return the segments without children, which take records now, in order of their ranges."""
    parents = {parent for segment in snapshot.segments.values() for parent in segment.parents}
    leaves = (segment for number, segment in snapshot.segments.items() if number not in parents)
    found = [ActiveSegment(leaf.id, HashRange(leaf.first_hash, leaf.last_hash)) for leaf in leaves]
    return sorted(found, key=lambda segment: segment.range)


# Spark: DataFrame → DataFrame.


def load_by_hash(records: DataFrame, bucket_s: int) -> DataFrame:
    """(time, hash) → records, load"""
    return records.groupBy(_time(bucket_s).alias("time"), _hash().alias("hash")).agg(
        f.count(f.lit(1)).alias("records"), f.sum(_load()).alias("load")
    )


def load_by_cell(measured: DataFrame) -> DataFrame:
    """(time, cell) → records, load; the cell of records without a key is UNKEYED."""
    cell = f.when(f.col("hash") == UNKEYED, UNKEYED).otherwise(f.shiftright("hash", CELL.bit_length() - 1))
    return measured.groupBy("time", cell.alias("cell")).agg(
        f.sum("records").alias("records"), f.sum("load").alias("load")
    )


def load_by_key(records: DataFrame, hashes: Sequence[int], bucket_s: int) -> DataFrame:
    """key → keyHash, records, load, peak; the MAX_KEYS heaviest keys on these hashes, the heaviest first."""
    chosen = records.where(f.col("key").isNotNull() & f.col("keyHash").isin(*hashes))
    timed = chosen.groupBy("key", "keyHash", _time(bucket_s).alias("time")).agg(
        f.count(f.lit(1)).alias("records"), f.sum(_load()).alias("load")
    )
    keys = timed.groupBy("key", "keyHash").agg(
        f.sum("records").alias("records"), f.sum("load").alias("load"), f.max("load").alias("peak")
    )
    return keys.orderBy(f.desc("peak"), f.desc("load"), "key").limit(MAX_KEYS)


def _time(bucket_s: int) -> Any:
    seconds = f.unix_seconds("timestamp")
    return seconds - f.pmod(seconds, f.lit(bucket_s))


def _hash() -> Any:
    return f.when(f.col("key").isNull(), UNKEYED).otherwise(f.col("keyHash"))


def _load() -> Any:
    return (f.length("value") + f.coalesce(f.length("key"), f.lit(0)) + RECORD_BYTES).cast("long")


# From Spark to the input of rules.py.


def collect_histogram(
    measured: DataFrame, layout: Sequence[ActiveSegment], bucket_s: int, target: int
) -> LoadHistogram:
    coarse = load_by_cell(measured).limit(MAX_BUCKETS * ((LAST_HASH + 1) // CELL + 1) + 1).toArrow()
    times, columns = np.unique(coarse["time"].to_numpy(), return_inverse=True)
    if len(times) > MAX_BUCKETS:
        raise InvalidArgument(
            f"the records span more than {MAX_BUCKETS:,} buckets of {bucket_s} s: choose a larger bucket, or a later "
            "beginning"
        )
    cells, loads = coarse["cell"].to_numpy(), coarse["load"].to_numpy()
    unkeyed = np.zeros(len(times), np.int64)
    unkeyed[columns[cells == UNKEYED]] = loads[cells == UNKEYED]
    by_cell = np.zeros(((LAST_HASH + 1) // CELL, len(times)), np.int64)
    keyed = cells != UNKEYED
    by_cell[cells[keyed], columns[keyed]] = loads[keyed]
    refined = _cells_to_refine(by_cell, unkeyed, layout, target)
    starts = [
        np.arange(cell * CELL, (cell + 1) * CELL if cell in refined else cell * CELL + 1)
        for cell in range(len(by_cell))
    ]
    by_hash = _exact(measured, refined, times)
    rows = [by_hash[cell] if cell in refined else by_cell[cell : cell + 1] for cell in range(len(by_cell))]
    return LoadHistogram(
        bucket_s=bucket_s,
        times=tuple(map(int, times)),
        starts=np.concatenate(starts),
        loads=np.concatenate(rows),
        unkeyed=unkeyed,
        records=int(coarse["records"].to_numpy().sum()),
    )


def _cells_to_refine(by_cell: Any, unkeyed: Any, layout: Sequence[ActiveSegment], target: int) -> set[int]:
    """Choose the cells that a segment's border cuts, and the heaviest cells."""
    cut = {segment.range.start // CELL for segment in layout if segment.range.start % CELL}
    if by_cell.shape[1] == 0:
        return cut
    in_time = by_cell.sum(axis=0) + unkeyed
    peaks, loads = by_cell.max(axis=1), by_cell.sum(axis=1)
    heavy = (peaks > REFINED_SHARE * in_time.max() / target) | (loads >= HEAVY_SHARE * in_time.sum())
    heaviest = np.argsort(-peaks, kind="stable")
    return cut | {int(cell) for cell in [cell for cell in heaviest if heavy[cell]][:MAX_REFINED]}


def _exact(measured: DataFrame, cells: set[int], times: Any) -> dict[int, Any]:
    """Count hash by hash; for each cell: [hash in the cell, bucket]."""
    found = {cell: np.zeros((CELL, len(times)), np.int64) for cell in cells}
    if not cells or not len(times):
        return found
    inside = (f.col("hash") != UNKEYED) & f.shiftright("hash", CELL.bit_length() - 1).isin(*cells)
    fine = measured.where(inside).select("time", "hash", "load").toArrow()
    columns = np.searchsorted(times, fine["time"].to_numpy())
    for key_hash, column, load in zip(fine["hash"].to_pylist(), columns, fine["load"].to_pylist()):
        found[key_hash // CELL][key_hash % CELL, column] = load
    return found


def heavy_hashes(histogram: LoadHistogram, target: int) -> list[int]:
    """Return the hashes that may have a key worth naming, the heaviest first. Each is a cell of its own."""
    if not histogram.times:
        return []
    in_time = histogram.loads.sum(axis=0) + histogram.unkeyed
    half_capacity = TOLERANCE * int(in_time.max()) / target / 2
    peaks, loads = histogram.loads.max(axis=1), histogram.loads.sum(axis=1)
    alone = np.diff(histogram.starts, append=LAST_HASH + 1) == 1
    heavy = alone & ((peaks > half_capacity) | (loads >= HEAVY_SHARE * int(in_time.sum())))
    order = np.argsort(-peaks, kind="stable")
    return [int(histogram.starts[cell]) for cell in order if heavy[cell]][:MAX_KEYS]


def collect_keys(keys: DataFrame) -> tuple[KeyLoad, ...]:
    return tuple(
        KeyLoad(
            bytes(row["key"]).decode("utf-8", "backslashreplace"),
            row["keyHash"],
            row["records"],
            row["load"],
            row["peak"],
        )
        for row in keys.collect()
    )


# The report.


def make_report(
    topic: str, since: str | None, histogram: LoadHistogram, keys: Sequence[KeyLoad], advice: Advice, skipped: int
) -> AdviceReport:
    by_time = (histogram.loads.sum(axis=0) + histogram.unkeyed) if histogram.times else np.zeros(0, np.int64)
    total, unkeyed = int(by_time.sum()), int(histogram.unkeyed.sum())
    width = (LAST_HASH + 1) // RING_SLICES
    by_slice = np.zeros(RING_SLICES, np.int64)
    np.add.at(by_slice, histogram.starts // width, histogram.loads.sum(axis=1))
    shown = [key for key in keys if key.load >= HEAVY_SHARE * total or key.peak_load > advice.capacity / 2]
    return AdviceReport(
        topic=topic,
        since=since,
        bucket_s=histogram.bucket_s,
        records=histogram.records,
        load=total,
        unkeyed_share=unkeyed / total if total else 0.0,
        ring=tuple(RingLoad(index * width, int(load)) for index, load in enumerate(by_slice)),
        times=tuple(TimeLoad(time, int(load)) for time, load in zip(histogram.times, by_time)),
        keys=tuple(shown),
        advice=advice,
        commands=tuple(commands(topic, advice)),
        ok=not advice.actions and not advice.hot_keys,
        skipped=skipped,
    )


def commands(topic: str, advice: Advice) -> list[str]:
    name = topic.removeprefix("public/default/")
    found = []
    for action in advice.actions:
        if isinstance(action, Split):
            found.append(f"braid topic split {name} {action.segment_id} --at {action.at}")
        else:
            found.append(f"braid topic merge {name} {action.segment_ids[0]} {action.segment_ids[1]}")
    return found
