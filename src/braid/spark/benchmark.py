"""The measurements of `braid bench spark`, each as a ratio to a comparison in the same session.

    read      an aggregate over format("braid")  :  the same rows in Parquet, read by Spark itself
                                                 :  a Python source that yields such Arrow batches from memory
    stream    records per second of a query over the whole topic, and what a micro-batch of one record takes
    write     rows that Spark makes, written by format("braid")  :  the same rows, thrown away
    audit     the time for once, twice and four times the history

Spark reads Parquet best, without any Python. A Python source cannot be faster than one that reads from memory: the
difference is the cost of Braid's own reading. Cases take turns, and the median round counts, because machines are
noisy.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

SCHEMA: Final = "offset long, value binary"
"""The columns of the aggregate: Parquet does not read more either."""
BATCH_ROWS: Final = 16_384
"""Of the source in memory; the batches of Braid's own source have about as many."""
MEMORY: Final = "braid_bench_memory"
TRIGGER_RECORDS: Final = 1_000_000
"""Of a measured micro-batch: large enough that its fixed costs are small."""


class Ratio(msgspec.Struct, frozen=True, rename="camel"):
    seconds: float
    against_s: float
    """The time of the comparison."""
    records: int

    @property
    def ratio(self) -> float:
        return self.seconds / self.against_s

    @property
    def rate(self) -> float:
        return self.records / self.seconds


class Streamed(msgspec.Struct, frozen=True, rename="camel"):
    records: int
    seconds: float
    """Of all micro-batches but the first, which includes the start."""
    first_batch_s: float
    small_batch_ms: float
    """The time of a micro-batch with one record: its fixed cost."""

    @property
    def rate(self) -> float:
        return self.records / self.seconds


def aggregate(rows: DataFrame) -> tuple[int, int, int]:
    """Return the count, the sum of the values' lengths and the highest offset."""
    (found,) = rows.selectExpr("count(*)", "sum(length(value))", "max(offset)").collect()
    return found[0], found[1], found[2]


def braid_rows(spark: SparkSession, options: Mapping[str, str]) -> DataFrame:
    return spark.read.format("braid").options(**options).schema(SCHEMA).load()


def write_parquet(spark: SparkSession, options: Mapping[str, str], path: str) -> None:
    """Write all columns of the topic to Parquet, by Spark's own writer."""
    spark.read.format("braid").options(**options).load().write.parquet(path)


def measure_read(
    spark: SparkSession, options: Mapping[str, str], parquet: str, *, records: int, value_bytes: int, rounds: int
) -> tuple[Ratio, Ratio]:
    """Measure Braid against Parquet, and against memory."""
    spark.dataSource.register(MemorySource)
    partitions = braid_rows(spark, options).rdd.getNumPartitions()
    memory = {"records": str(records), "valueBytes": str(value_bytes), "partitions": str(partitions)}

    def check(name: str, rows: DataFrame) -> None:
        count, size, highest = aggregate(rows)
        if (count, size, highest) != (records, records * value_bytes, records - 1):
            raise AssertionError(f"{name} counted {count} rows with {size} bytes up to offset {highest}")

    seconds = _median_seconds(
        {
            "braid": lambda: check("braid", braid_rows(spark, options)),
            "memory": lambda: check("memory", spark.read.format(MEMORY).options(**memory).load()),
            "parquet": lambda: check("parquet", spark.read.parquet(parquet)),
        },
        rounds,
    )
    return (
        Ratio(seconds["braid"], seconds["parquet"], records),
        Ratio(seconds["braid"], seconds["memory"], records),
    )


def _median_seconds(cases: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Run the cases in turn, and return the median time of each. One more round, the first, warms up."""
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, run in cases.items():
            began = time.perf_counter()
            run()
            if number:
                taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def measure_stream(spark: SparkSession, options: Mapping[str, str], folder: str, *, small_batches: int) -> Streamed:
    large = _run_query(spark, {**options, "maxRecordsPerTrigger": str(TRIGGER_RECORDS)}, f"{folder}/large")
    small = _run_query(
        spark,
        {**options, "maxRecordsPerTrigger": "1"},
        f"{folder}/small",
        stop_after=small_batches,
    )
    first, *rest = large
    counted = rest or [first]
    return Streamed(
        records=sum(each["numInputRows"] for each in counted),
        seconds=sum(each["durationMs"]["triggerExecution"] for each in counted) / 1e3,
        first_batch_s=first["durationMs"]["triggerExecution"] / 1e3,
        small_batch_ms=statistics.median(each["durationMs"]["triggerExecution"] for each in small[1:] or small),
    )


def _run_query(
    spark: SparkSession, options: Mapping[str, str], folder: str, stop_after: int | None = None
) -> list[dict[str, Any]]:
    """Run a query to the topic's end, or for so many micro-batches. Returns the progress of those that had records."""
    rows = spark.readStream.format("braid").options(startingOffsets="earliest", **options).schema(SCHEMA).load()
    writing = rows.writeStream.format("noop").option("checkpointLocation", folder)
    query = writing.trigger(availableNow=True).start()
    while not query.awaitTermination(1):
        if stop_after is not None and len(query.recentProgress) > stop_after:
            query.stop()
    # In 4.x a progress is an object that behaves like a dictionary.
    progress: list[Any] = list(query.recentProgress)
    return [each for each in progress if each["numInputRows"]]


def measure_write(
    spark: SparkSession, options: Mapping[str, str], *, records: int, value_bytes: int, rounds: int
) -> Ratio:
    """Measure writes of rows that are cheap to make."""

    def rows() -> DataFrame:
        return spark.range(records).selectExpr(f"cast(lpad(cast(id as string), {value_bytes}, 'x') as binary) as value")

    seconds = _median_seconds(
        {
            "noop": lambda: rows().write.format("noop").mode("overwrite").save(),
            "braid": lambda: rows().write.format("braid").options(**options).mode("append").save(),
        },
        rounds,
    )
    return Ratio(seconds["braid"], seconds["noop"], records)


class MemorySource(DataSource):
    """The rows of an imaginary topic: each task makes one batch and yields it again and again."""

    @classmethod
    def name(cls) -> str:
        return MEMORY

    def schema(self) -> str:
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002 (there is one)
        records, size, partitions = (int(self.options[name]) for name in ("records", "valueBytes", "partitions"))
        return MemoryReader(records, size, partitions)


class MemoryReader(DataSourceReader):
    def __init__(self, records: int, value_bytes: int, partitions: int) -> None:
        self._records = records
        self._value_bytes = value_bytes
        self._partitions = partitions

    def partitions(self) -> list[InputPartition]:
        cuts = [self._records * number // self._partitions for number in range(self._partitions + 1)]
        return [InputPartition((first, until)) for first, until in pairwise(cuts)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        first, until = partition.value
        schema = pa.schema([("offset", pa.int64()), ("value", pa.binary())])
        ends = np.arange(BATCH_ROWS + 1, dtype=np.int32) * self._value_bytes
        data = pa.py_buffer(np.random.default_rng(1).bytes(BATCH_ROWS * self._value_bytes))
        values = pa.Array.from_buffers(pa.binary(), BATCH_ROWS, [None, pa.py_buffer(ends), data])
        offsets = pa.array(np.arange(first, until))
        for at in range(0, until - first, BATCH_ROWS):
            count = min(BATCH_ROWS, until - first - at)
            yield pa.RecordBatch.from_arrays([offsets.slice(at, count), values.slice(0, count)], schema=schema)
