"""The records between known offsets: a job that repeats a step reads exactly the same records, whatever has happened to
the topic since the offsets were chosen."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812 (as everybody calls it)
from pyspark.sql.types import StructType

from braid.client.consuming.checkpoint import END, Position
from braid.model.errors import InvalidArgument
from braid.scan.planning import Range
from braid.spark.source.options import SourceOptions
from braid.spark.source.schema import SOURCE_SCHEMA


def rows_between(
    spark: SparkSession,
    source: Mapping[str, str],
    ranges: Sequence[Range],
    others: Iterable[int],
    columns: Sequence[str],
    more: Mapping[str, str],
    seen: Observation | None = None,
) -> DataFrame:
    """Read these ranges. `others` are the segments without a range; `more` are further options of the source. `seen`
    counts the rows of each segment (`records_seen`)."""
    nothing: dict[int, Position] = dict.fromkeys(others, END)
    first = nothing | {each.segment: each.first for each in ranges}
    until = nothing | {each.segment: each.until for each in ranges}
    rows = (
        spark.read.format("braid")
        .schema(columns_schema(tuple({"segment": None, **dict.fromkeys(columns)})))
        .options(**source, **more)
        .options(startingOffsets=json.dumps(first), endingOffsets=json.dumps(until))
        .load()
    )
    # A segment that was created since is in neither of the two.
    rows = rows.where(rows["segment"].isin([each.segment for each in ranges]))
    if seen is not None:
        rows = counted(rows, ranges, seen)
    return rows.select(*columns)


def within(options: SourceOptions, rows: DataFrame) -> DataFrame:
    """Keep the rows within the time bounds, as the source does."""
    time = F.col("timestamp")
    if options.starting_timestamp is not None:
        rows = rows.where(time >= F.timestamp_micros(F.lit(options.starting_timestamp)))
    if options.ending_timestamp is not None:
        rows = rows.where(time < F.timestamp_micros(F.lit(options.ending_timestamp)))
    return rows


def counted(rows: DataFrame, ranges: Sequence[Range], seen: Observation) -> DataFrame:
    """Count the rows of each segment while they pass."""
    counts = [F.count_if(F.col("segment") == each.segment).alias(str(each.segment)) for each in ranges]
    return rows.observe(seen, *counts)


def records_seen(seen: Observation) -> dict[int, int]:
    """Return how many rows of each segment have passed. Waits for the action that makes them."""
    return {int(segment): int(count) for segment, count in seen.get.items()}


def records_skipped(ranges: Sequence[Range], seen: Mapping[int, int]) -> dict[int, int]:
    """Return how many records of these ranges have not passed, by segment: they could not be decoded."""
    missing = {each.segment: each.records - seen.get(each.segment, 0) for each in ranges}
    return {segment: count for segment, count in missing.items() if count}


def columns_schema(columns: Sequence[str]) -> StructType:
    for each in columns:
        if each not in SOURCE_SCHEMA.names or columns.count(each) > 1:
            raise InvalidArgument(
                f"column {each!r} is unknown, or named twice: choose from {', '.join(SOURCE_SCHEMA.names)}"
            )
    return StructType([SOURCE_SCHEMA[each] for each in columns])
